"""How the two models compute: in fp64 without casts of their own, and how far rounding alone moves a gradient."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WIDE: dict[Any, Any] = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
    **dict.fromkeys((Tensor.float, Tensor.half, Tensor.bfloat16), Tensor.double),
}
"""dtype, or cast to it -> what an fp64 model gets in its place."""

LIKE_ANOTHER = (Tensor.to, Tensor.type, Tensor.type_as)
"""Casts whose dtype may be that of another tensor, or a name."""
BACKWARDS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)

UNITS = 4
"""By how many units in the last place an operation's result is off, at most."""


class WithoutCasts(TorchFunctionMode):
    """Whoever asks for fewer bits than fp64 has gets fp64: LLaMA's norm, the upcast of logits, a softmax in fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BACKWARDS:
            return self._backward(func, args, kwargs)
        wide_args = [WIDE.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
        wide_kwargs = {k: WIDE.get(v, v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
        out = WIDE.get(func, func)(*wide_args, **wide_kwargs)
        if func in LIKE_ANOTHER and out.dtype in WIDE and args[0].dtype == torch.float64:
            return args[0].to(out.device)
        return out

    def _backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a backward computes again, under checkpointing, is without casts too: its nodes run in this mode."""
        _lead_backwards()
        before, _NOW.mode = _NOW.mode, self
        try:
            return func(*args, **kwargs)
        finally:
            _NOW.mode = before


class _Now(threading.local):
    """The mode in which this thread starts a backward."""

    mode: WithoutCasts | None = None


_NOW = _Now()
_PATCHING = threading.Lock()


def _lead_backwards() -> None:
    """From now on a backward runs in the mode of the thread that starts it; in other threads it stays torch's."""
    module: Any = torch.autograd
    with _PATCHING:
        original = module._engine_run_backward
        if hasattr(original, "of_torch"):
            return

        @wraps(original)
        def run(*tensors: Any, **options: Any) -> Any:
            with nullcontext() if _NOW.mode is None else _NOW.mode:
                return original(*tensors, **options)

        leading: Any = run
        leading.of_torch = original
        module._engine_run_backward = leading


class RandomRounding(TorchDispatchMode):
    """The result of each operation is off by a little, at random: what comes out differs as rounding lets it differ.

    A sum whose terms cancel is so off by what the terms are rounded by (Monte Carlo arithmetic, Parker 1997).
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives its base no types
        self._seed, self._generators = seed, dict[torch.device, torch.Generator]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = out if isinstance(out, tuple | list) else (out,)
        for returned, t in zip(func._schema.returns, outputs, strict=False):
            if returned.alias_info is None and isinstance(t, Tensor) and t.is_floating_point():
                self._round(t)
        return out

    def _round(self, t: Tensor) -> None:
        if t.layout == torch.strided:
            if t.device not in self._generators:
                self._generators[t.device] = torch.Generator(t.device).manual_seed(self._seed)
            off = torch.empty_like(t).uniform_(-1, 1, generator=self._generators[t.device])
            t.addcmul_(t, off, value=UNITS * torch.finfo(t.dtype).eps)
