"""Keys and values that a script gives a tensor-parallel model: a learned prefix, or those of the plain model.

A cache that the sharded model filled holds this rank's heads. One that was filled otherwise holds all heads: each rank
takes its own of them, and the gradient of the whole is the sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.conjugates import enter_block
from shardformer.errors import ConfigError
from shardformer.mesh.axis import Axis
from shardformer.mesh.tensor_grid import TensorGrid
from shardformer.policies.describe import BlockDescription
from shardformer.transformers_compat import caches_in, holds_tokens

OF_THIS_RANK = "_shardformer_heads"
"""Attribute of a cache that holds this rank's heads."""


@dataclass(frozen=True)
class Heads:
    """The key-value heads of one layer.

    Args:
        total: how many there are.
        own: those that this rank's forward sees, in its order.
    """

    total: int
    own: tuple[int, ...]

    def of(self, x_BNSD: Tensor, axis: Axis) -> Tensor:
        """This rank's heads of keys or values that have all of them."""
        whole = enter_block(x_BNSD, axis) if x_BNSD.requires_grad and torch.is_grad_enabled() else x_BNSD
        return whole.index_select(1, torch.tensor(self.own, device=whole.device))


class CacheHeads:
    """Looks at the caches that a sharded model is called with.

    Args:
        axis: over which heads are cut.
        layers: number of a layer, as its attention knows it -> its heads.
    """

    def __init__(self, axis: Axis, layers: Mapping[int, Heads]) -> None:
        self._axis, self._layers = axis, layers

    @classmethod
    def of(
        cls, model: nn.Module, blocks: Sequence[tuple[str, BlockDescription]], axis: Axis, grid: TensorGrid | None
    ) -> CacheHeads:
        """For a model whose attentions number themselves, as those of transformers do."""
        layers: dict[int, Heads] = {}
        for _, block in blocks:
            arguments = block.arguments
            number = None if arguments is None else getattr(model.get_submodule(arguments.at), "layer_idx", None)
            if arguments is not None and type(number) is int and arguments.kv_heads[0]:
                # of two attentions with one number nothing is known, and of the parts of a grid
                known = number in layers or grid is not None
                layers[number] = Heads(0, ()) if known else Heads(*arguments.kv_heads)
        return cls(axis, layers)

    def enter(self, model: nn.Module, values: Sequence[Any]) -> None:
        """Before a forward: caches with all heads are left with those of this rank.

        Raises ConfigError for one with other heads, or whose layers are not known.
        """
        for cache in self._plain(values):
            if holds_tokens(cache) and OF_THIS_RANK not in vars(cache):
                self._cut(model, cache)
            vars(cache)[OF_THIS_RANK] = True

    def leave(self, values: Sequence[Any]) -> None:
        """After a forward: what it filled holds this rank's heads."""
        for cache in self._plain(values):
            vars(cache)[OF_THIS_RANK] = True

    def _plain(self, values: Sequence[Any]) -> Iterator[Any]:
        if self._layers:
            yield from (cache for cache in caches_in(values) if hasattr(cache, "__dict__"))

    def _cut(self, model: nn.Module, cache: Any) -> None:
        found = getattr(cache, "layers", None)
        if found is None or hasattr(cache, "self_attention_cache"):
            raise self._unknown(model, f"a {type(cache).__name__}")
        new: list[tuple[Any, str, Tensor]] = []
        for number, layer in enumerate(found):
            heads = self._layers.get(number)
            for name in ("keys", "values"):
                x = getattr(layer, name, None)
                if heads is None or not isinstance(x, Tensor) or not x.numel():
                    continue
                if x.dim() == 4 and x.shape[1] == heads.total:
                    new.append((layer, name, heads.of(x, self._axis)))
                elif x.dim() != 4 or x.shape[1] != len(heads.own):
                    raise self._unknown(model, f"{name} of the shape {tuple(x.shape)} for layer {number}")
        for layer, name, x in new:
            setattr(layer, name, x)

    def _unknown(self, model: nn.Module, what: str) -> ConfigError:
        counts = sorted({heads.total for heads in self._layers.values()} - {0})
        said = f"(batch, {' or '.join(map(str, counts))}, length, features of a head)" if counts else "unknown"
        return ConfigError(
            f"{type(model).__name__}, which is sharded over {self._axis.size} tensor ranks, was given {what}",
            rule=f"Keys and values that the model did not make itself have all heads, {said}: each rank takes its own",
            remedy="Fill a DynamicCache with keys and values of this shape, or let the model read these tokens itself",
        )
