"""What the modules of a stack's layers do with tokens, seen in one forward of a small model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.layers.norm import is_elementwise, norm_kind
from shardformer.layers.tensor.linear import is_linear
from shardformer.layers.tensor.stream import first_tensor
from shardformer.policies.infer.prove import Reference
from shardformer.policies.paths import matching

ROUNDING = 1e-5
"""Of the largest number of an output: tokens that experts are given in another order differ by less."""


@dataclass(frozen=True)
class Call:
    """The first call of a module: what it was given, and what it gave."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any

    @property
    def given(self) -> Tensor | None:
        """Its hidden states."""
        tensors = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)]
        return first_tensor(self.args, self.kwargs) if tensors else None

    @property
    def gave(self) -> Tensor | None:
        first = self.output[0] if isinstance(self.output, tuple | list) else self.output
        return first if isinstance(first, Tensor) else None


class TokensIn:
    """The layers at one path, of a model that ran once.

    Args:
        layers: the path of their list.

    Attributes:
        shape: samples and tokens of what they are given.
    """

    def __init__(self, reference: Reference, layers: str) -> None:
        self.layers, self._model = layers, reference.model
        self.paths = matching(f"{layers}.*", [path for path, _ in self._model.named_modules()])
        self._calls: dict[str, Call] = {}
        with ExitStack() as stack, torch.no_grad():
            for outer in self.paths:
                for path, module in self._model.get_submodule(outer).named_modules(prefix=outer):
                    note = partial(self._note, path)
                    stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
            reference.run(self._model)
        first = next((self._calls[path].given for path in self.paths if path in self._calls), None)
        self.shape: tuple[int, ...] = (0, 0) if first is None or first.dim() < 3 else tuple(first.shape[:2])

    def _note(self, path: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._calls.setdefault(path, Call(args, kwargs, output))

    def by_token(self, x: Tensor | None) -> bool:
        """Whether this is something for each token of the stack: (B, S, ...), or (B*S, ...)."""
        samples, length = self.shape
        return x is not None and (
            (x.dim() > 2 and tuple(x.shape[:2]) == self.shape) or (x.dim() == 2 and x.shape[0] == samples * length)
        )

    def is_given_tokens(self, path: str) -> bool:
        """Also True of a module that was not called: it may be, of another batch."""
        return path not in self._calls or self.by_token(self._calls[path].given)

    def is_given_numbers(self, path: str) -> bool:
        """Whether a module is given one number for each token, (B, S), beside its states."""
        return any(isinstance(x, Tensor) and tuple(x.shape) == self.shape for x in self._named(path).values())

    def above(self, path: str) -> dict[str, str]:
        """The modules of a layer that hold the one at ``path``, and itself, from the outermost: name -> path."""
        outer = next((outer for outer in self.paths if path.startswith(f"{outer}.")), None)
        parts = path.removeprefix(f"{outer}.").split(".") if outer is not None else []
        names = [".".join(parts[: i + 1]) for i in range(len(parts))]
        return {name: f"{outer}.{name}" for name in names}

    def is_fed(self, path: str) -> bool:
        """Whether a module is given the stack's tokens, in their order (B, S, ...), and gives as many."""
        if (call := self._calls.get(path)) is None or (x := call.given) is None:
            return False
        return x.dim() > 2 and tuple(x.shape[:2]) == self.shape and self.by_token(call.gave)

    def children(self) -> Iterator[tuple[str, str]]:
        """What a layer may call: (path of a layer, name in it)."""
        for outer in self.paths:
            for name, _ in _called(self._model.get_submodule(outer)):
                yield outer, name

    def mixing(self) -> Iterator[tuple[str, str]]:
        """The children of layers that may carry something from token to token: (path of a layer, name in it)."""
        for outer in self.paths:
            for name, child in _called(self._model.get_submodule(outer)):
                apart = is_linear(child) or norm_kind(child) is not None or is_elementwise(child)
                if not apart and next(child.parameters(), None) is not None and self._mixes(f"{outer}.{name}", child):
                    yield outer, name

    def _mixes(self, path: str, module: nn.Module) -> bool:
        """Whether what it gives for one token changes with another: its first token, then its last, is changed."""
        call = self._calls.get(path)
        if call is None:
            return True
        x, y = call.given, call.gave
        if x is None or y is None or tuple(x.shape[:2]) != self.shape or tuple(y.shape[:2]) != self.shape:
            return self.is_given_tokens(path)
        for token, others in ((0, slice(1, None)), (-1, slice(None, -1))):
            changed = x.detach().clone()
            changed[:, token] += torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype, device=x.device).square()
            own = [changed if a is x else a for a in call.args]
            named = {name: changed if a is x else a for name, a in call.kwargs.items()}
            try:
                with torch.no_grad():
                    again = Call((), {}, module(*own, **named)).gave
            except Exception:  # called out of its turn a module may raise anything
                return True
            if again is None or again.shape != y.shape or y.shape[1] < 2 or torch.equal(again[:, token], y[:, token]):
                return True  # nothing can be told, as where its last weight begins at 0
            if (again - y)[:, others].abs().max() > ROUNDING * y.abs().max():
                return True
        return False

    def beside(self) -> Iterator[str]:
        """The arguments of layers, and of modules in them, that are given for each token beside their states."""
        for outer in self.paths:
            for path, _ in self._model.get_submodule(outer).named_modules(prefix=outer):
                for name, x in self._named(path).items():
                    if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 2 and self.by_token(x):
                        yield f"{path}.{name}".removeprefix(f"{outer}.")

    def _named(self, path: str) -> dict[str, Any]:
        """What a module was given beside its states, by the names of its arguments."""
        if (call := self._calls.get(path)) is None:
            return {}
        names = inspect.signature(self._model.get_submodule(path).forward).parameters
        named = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        return {name: x for name, x in named.items() if x is not call.given}


def _called(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children of a module, and in the place of lists, which nobody calls, what stands in them."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
