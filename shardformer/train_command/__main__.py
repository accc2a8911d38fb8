"""Runs one worker process of ``shardformer train``.

Usage: ``python -m shardformer.train_command run.toml parallel.tensor=2``
"""

from __future__ import annotations

import sys

from shardformer.train_command.config_schema import load_train_config
from shardformer.train_command.run import run_training

if __name__ == "__main__":
    run_training(load_train_config(sys.argv[1], sys.argv[2:]))
