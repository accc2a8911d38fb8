"""The grid of processes: axes, contexts, launching."""

from __future__ import annotations
