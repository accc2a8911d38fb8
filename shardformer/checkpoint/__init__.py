"""Checkpoints that are saved under one layout of processes and loaded under any other."""

from __future__ import annotations
