"""Context parallelism: attention over a sequence of which each rank has a part, and the stream around it."""

from __future__ import annotations
