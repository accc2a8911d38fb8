"""Process mesh: rank grid, axes, parallel contexts, transports and initialization."""

from __future__ import annotations
