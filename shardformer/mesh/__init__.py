"""Process mesh: arrangement of ranks along axes, process groups, and initialization."""

from __future__ import annotations
