"""Models without values: on the meta device, with a recipe beside each tensor, by which a rank makes its part."""

from __future__ import annotations
