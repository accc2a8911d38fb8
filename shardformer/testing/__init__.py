"""Earlier package of the worker pool and of ranks as threads, which are now in ``shardformer.local_ranks``."""

from __future__ import annotations
