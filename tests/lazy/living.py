"""Counts the memory of live storages while lazy models are materialized."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from shardformer.meta_init import init_recipe


class Living:
    """Replacement for ``init_recipe._allocate_storage`` that counts the current and peak bytes of live storages."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def __call__(self, place: init_recipe.DeferredStorage) -> Any:
        storage = torch.empty(place.num_bytes, dtype=torch.uint8).untyped_storage()
        self.now += place.num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, place.num_bytes)
        return storage

    def _free(self, size: int) -> None:
        self.now -= size
