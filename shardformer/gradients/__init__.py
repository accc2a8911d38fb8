"""How gradients are agreed on between ranks."""

from __future__ import annotations
