"""``python -m shardformer``: the command line."""

from shardformer.cli import main

if __name__ == "__main__":
    main()
