"""Attention on fused kernels."""

from __future__ import annotations
