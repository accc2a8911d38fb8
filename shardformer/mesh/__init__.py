"""Mesh of processes with parallel axes, process groups, and initialization of torch.distributed."""

from __future__ import annotations
