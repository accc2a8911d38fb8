"""Former location of functions that are now in ``shardformer.local_ranks``."""

from __future__ import annotations
