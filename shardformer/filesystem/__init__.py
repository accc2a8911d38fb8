"""Atomic writes and lock files, for folders that several processes read or write at the same time."""

from __future__ import annotations
