"""What entered a block, for a forward that takes the width of its heads from it.

    B, N, C = x.shape                                  # C: of all heads, on one device
    qkv = F.linear(x, self.qkv.weight, bias)           # the projection's module is not called
    ...
    return self.proj(x.transpose(1, 2).reshape(B, N, C))

There C has to be the width of this rank's heads. ``LocalWidth`` says so when it is asked for its shape, and hands a
product with the weight of one of the block's columns to the block. Turned, with its last dim where it was, it still
says so (a forward that works on (N, B, C)). For anything else it is the plain tensor.
"""

# B batch, N sequence, C width of the heads

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import getattr_static
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardformer.comm.values import has_values
from shardformer.errors import ConfigError


class Owner(Protocol):
    """The block that a tensor entered."""

    width: int | None

    def project_by_weight(self, weight: Tensor, x: Tensor) -> Tensor | None:
        """The output of the block's column with this weight; None where it has none."""


SHAPE: Any = getattr_static(Tensor, "shape").__get__
TURNS = (Tensor.transpose, Tensor.permute, torch.transpose, torch.permute)


class LocalWidth(Tensor):
    """A tensor (B, N, H) that says of its last dim that it is ``block.width``, and is H otherwise."""

    block: Owner

    @staticmethod
    def of(x: Tensor, block: Owner) -> LocalWidth:
        if not has_values(x):
            raise ConfigError(
                "A step is traced whose block asks its input for the width of the heads",
                rule="Fake tensors cannot be tensors of another class, which this block is given",
                remedy="Count its collectives in a real step, with shardformer.testing.threads.run_as_threads",
            )
        entered = x.as_subclass(LocalWidth)
        entered.block = block
        return entered

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(args[0] if args else None, LocalWidth):
                if func == SHAPE or func is Tensor.size:
                    return _shown(func(*args, **given), args[0], *args[1:], **given)
                if func is F.linear:
                    return _linear(*args, **given)
                if func in TURNS:
                    return _turned(func(*args, **given), args[0])
            return func(*args, **given)


def _shown(said: torch.Size | int, x: LocalWidth, dim: int | None = None) -> torch.Size | int:
    width = x.block.width
    assert width is not None
    if isinstance(said, torch.Size):
        return torch.Size((*said[:-1], width))
    return width if dim in (-1, x.dim() - 1) else said


def _turned(y: Tensor, x: LocalWidth) -> Tensor:
    """y, which is x with its dims in another order."""
    stays = y.shape[-1] == x.shape[-1] and y.stride(-1) == x.stride(-1)
    return LocalWidth.of(y, x.block) if stays else y


def _linear(x: LocalWidth, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.block.project_by_weight(weight, x)
    if y is None:
        return F.linear(x, weight, bias)
    return y if bias is None else y + bias
