"""Pipeline parallelism: the layers of a model spread over ranks, and the order in which micro-batches pass them."""

from __future__ import annotations
