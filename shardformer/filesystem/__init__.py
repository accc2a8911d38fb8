"""Writing of files and folders that other processes may read or write at the same time."""

from __future__ import annotations
