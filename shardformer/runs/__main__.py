"""What ``shardformer train`` starts in each process: ``python -m shardformer.runs run.toml parallel.tensor=2``."""

import sys

from shardformer.runs.read import read_config
from shardformer.runs.run import train

if __name__ == "__main__":
    train(read_config(sys.argv[1], sys.argv[2:]))
