"""Entry point of ``python -m shardformer``, which runs the command line interface."""

from __future__ import annotations

from shardformer.cli import main

if __name__ == "__main__":
    main()
