"""Collectives over an axis: plain ones, ones that autograd understands, and the recorder that counts them."""

from __future__ import annotations
