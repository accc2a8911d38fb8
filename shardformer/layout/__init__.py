"""Plain values that say where numbers are: parameters, activations, gradients."""

from __future__ import annotations
