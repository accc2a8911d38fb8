"""``python -m shardformer``: the command line."""

from __future__ import annotations

from shardformer.cli import main

if __name__ == "__main__":
    main()
