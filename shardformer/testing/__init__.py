"""Former location of the worker pool and of ranks that run as threads, now in ``shardformer.local_ranks``."""

from __future__ import annotations
