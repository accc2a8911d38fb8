"""How files and folders are written that other processes may see, read, or write at the same time."""

from __future__ import annotations
