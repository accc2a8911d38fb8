"""Pairs of hooks for what autograd saves, which leave to each other what is not theirs.

torch asks the innermost pair of ``saved_tensors_hooks`` alone. Of the pairs here each is asked, and takes what it
knows; what none of them takes is saved as autograd does by itself, with its version.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class SavedTensorHooks:
    """One pair, from ``enter`` to ``leave``.

    Args:
        pack: tensor -> what is saved in its place; None where it is left to others.
        unpack: what was saved -> the tensor.
        goes_first: whether it is asked before the others, because it takes a few tensors that it knows for certain.
            Of the rest the innermost pair is asked first.
    """

    def __init__(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], *, goes_first: bool = False
    ) -> None:
        self._pack, self._unpack, self._goes_first = pack, unpack, goes_first
        self._asked: list[SavedTensorHooks] = []
        self._untraced: Pair | None = None
        self.is_entered = False

    def enter(self) -> None:
        around = _ours(_top())
        self._asked = sorted([self, *(around._asked if around else [])], key=lambda hooks: not hooks._goes_first)
        self.is_entered = True
        torch._C._autograd._push_saved_tensors_default_hooks(*self._pair())

    def leave(self) -> None:
        """Takes this pair away, wherever it stands: what was to leave before it may have been broken off."""
        self.is_entered = False
        above: list[Pair] = []
        while (top := _top()) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            if _ours(top) is self:
                break
            above.append(top)
        for pair in reversed(above):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)

    def _pair(self) -> Pair:
        """What torch calls: in a part of a model that is compiled, without being compiled too."""
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None and self._untraced is None:
            self._untraced = dynamo.disable(self.pack), dynamo.disable(self.unpack)
        return self._untraced or (self.pack, self.unpack)

    def pack(self, x: Tensor) -> tuple[Callable[[Any], Tensor], Any]:
        for hooks in self._asked:
            if hooks.is_entered and (packed := hooks._pack(x)) is not None:
                return hooks._unpack, packed
        # what a node saves of its own output must not hold the node
        return _as_it_was, (x if x.grad_fn is None else x.detach(), x._version)

    def unpack(self, saved: tuple[Callable[[Any], Tensor], Any]) -> Tensor:
        unpack, packed = saved
        return unpack(packed)


def others_save() -> bool:
    """Whether hooks that are none of these stand around: a checkpoint of the caller's, ``save_on_cpu``."""
    top = _top()
    return top is not None and _ours(top) is None


def check_version(x: Tensor, version: int, shape: torch.Size | None = None) -> None:
    """As autograd does of what it saves by itself. Raises RuntimeError."""
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(x.shape if shape is None else shape)} is at version {x._version}; "
            f"expected version {version} instead"
        )


def _as_it_was(packed: tuple[Tensor, int]) -> Tensor:
    x, version = packed
    check_version(x, version)
    return x


def _top() -> Pair | None:
    top: Pair | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top


def _ours(pair: Pair | None) -> SavedTensorHooks | None:
    hooks = None if pair is None else getattr(unwrap(pair[0]), "__self__", None)
    return hooks if isinstance(hooks, SavedTensorHooks) else None
