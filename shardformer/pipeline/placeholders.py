"""What stands for the parameters of other stages, so that the model's own forward runs where they are not.

A parameter that another stage holds is taken out of its module, and a tensor of one NaN, stretched to the parameter's
shape, is left as an attribute in its place: code that looks at its shape, dtype or device goes on, it needs no memory,
and whatever is computed of it by mistake is NaN, which shows, and not a number that passes for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.values import has_values


class Placeholders:
    """The stand-ins in a model, by module and name. They have the device of this rank, and the dtype of the parameter
    wherever it is."""

    def __init__(self) -> None:
        self.are_shown = False
        """Whether a stage runs: code that reads the dtype or device of a module then sees its stand-ins too."""
        self._names: dict[int, tuple[str, ...]] = {}  # of each module's parameters, as the plain model registers them
        self._places: list[tuple[nn.Module, str, tuple[str, ...]]] = []  # with all names in the model
        self._device: torch.device | None = None
        self._held: tuple[nn.Module, str] | None = None
        self._own: dict[str, torch.dtype] = {}

    def __len__(self) -> int:
        return len(self._places)

    def remove(self, model: nn.Module, held: Mapping[str, bool]) -> None:
        """Takes the parameters out that are not held here, by name. A module with several names is held by any."""
        wanted: dict[tuple[int, str], bool] = {}
        names: dict[tuple[int, str], tuple[str, ...]] = {}
        modules = list(model.named_modules(remove_duplicate=False))
        for path, module in modules:
            for name in module._parameters:
                key, full = (id(module), name), f"{path}.{name}" if path else name
                wanted[key] = wanted.get(key, False) or held.get(full, True)
                names[key] = (*names.get(key, ()), full)
        self._names = {id(module): tuple(module._parameters) for _, module in modules}
        for _, module in modules:
            for name, param in list(module._parameters.items()):
                if param is not None and not wanted[id(module), name]:
                    del module._parameters[name]
                    module.__dict__[name] = _stand_in(param)
                    self._places.append((module, name, names[id(module), name]))
        self._own = dtypes_of(model)
        without = {id(module) for module, _, _ in self._places}
        for _, module in modules:
            if any(id(inner) in without for inner in module.modules()):
                module.__dict__["named_parameters"] = _NamedParameters(module, self)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While this lasts ``module.parameters()`` gives stand-ins in the place of the parameters of other stages."""
        before, self.are_shown = self.are_shown, True
        try:
            yield
        finally:
            self.are_shown = before

    def names_of(self, module: nn.Module) -> tuple[str, ...]:
        """The names of a module's own parameters, in the order of the plain model."""
        return self._names.get(id(module), tuple(module._parameters))

    def has_any(self, module: nn.Module) -> bool:
        """Whether a parameter of the module's own, or of one inside of it, is elsewhere."""
        inside = {id(m) for m in module.modules()}
        return any(id(m) in inside for m, _, _ in self._places)

    def follow(self, model: nn.Module) -> None:
        """After the model was moved to another device, which stand-ins are not: they are no parameters."""
        like = self._parameter_of(model)
        if like is not None and like.device != self._device:
            self._device = like.device
            for module, name, _ in self._places:
                _move(module, name, like.device)

    def take_dtypes(self, model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
        """After a conversion of the model: the stand-ins get the dtypes that the parameters have on their own stages.

        Args:
            dtypes: of the parameters of all stages, by name. One that is not there (a rank is traced alone) is taken to
                be converted as this rank's parameters of its dtype were.
        """
        before, self._own = self._own, dtypes_of(model)
        converted = {before[name]: dtype for name, dtype in self._own.items() if name in before}
        for module, name, names in self._places:
            known = next((dtypes[n] for n in names if n in dtypes), None)
            now = module.__dict__[name].dtype
            _move(module, name, known or converted.get(now, now))

    def _parameter_of(self, model: nn.Module) -> Tensor | None:
        """A parameter that is here. Where it stands is remembered: a stage may have many modules before its first."""
        if self._held is not None:
            found = self._held[0]._parameters.get(self._held[1])
            if found is not None:
                return found
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is not None and param.is_floating_point():
                    self._held = module, name
                    return param
        return None


class _NamedParameters:
    """``named_parameters`` of a module of which another stage holds parameters, in the order of the plain model."""

    def __init__(self, module: nn.Module, placeholders: Placeholders) -> None:
        self._module, self._placeholders = module, placeholders

    def __call__(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        module = self._module
        if not self._placeholders.are_shown:
            return type(module).named_parameters(module, prefix, recurse, remove_duplicate)
        return self._with_stand_ins(prefix, recurse, remove_duplicate)

    def _with_stand_ins(self, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, nn.Parameter]]:
        module, seen = self._module, set[int]()
        modules = module.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)
        for path, inner in modules if recurse else [(prefix, module)]:
            for name in self._placeholders.names_of(inner):
                value = inner._parameters.get(name)
                value = inner.__dict__.get(name) if value is None else value
                if value is not None and not (remove_duplicate and id(value) in seen):
                    seen.add(id(value))
                    yield f"{path}.{name}" if path else name, value


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    """Of the parameters that are here, by all of their names."""
    return {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}


def _move(module: nn.Module, name: str, to: torch.device | torch.dtype) -> None:
    value: Tensor = module.__dict__[name]
    module.__dict__[name] = value.as_strided((), ()).to(to).expand(value.shape)


def placeholder(*shape: int, like: Tensor) -> Tensor:
    """A tensor of one NaN that looks like ``shape``."""
    return torch.full((), float("nan"), dtype=like.dtype, device=like.device).expand(shape)


def _stand_in(param: Tensor) -> Tensor:
    """What is left of a parameter. Of one that waits for its value, which is nowhere yet, it is on the CPU."""
    device = torch.device("cpu") if param.is_meta else param.device
    number = float("nan") if param.is_floating_point() else 0
    return torch.full((), number, dtype=param.dtype, device=device).expand(tuple(param.shape))


def output_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What a table or a linear would give, without computing it: NaNs, to which a model may add in place."""
    x = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
    weight: Any = module.weight
    if not isinstance(module, nn.Linear):
        width: Any = module.embedding_dim
        return placeholder(*x.shape, width, like=weight).contiguous()
    out = placeholder(*x.shape[:-1], module.out_features, like=weight).contiguous()
    kind = x.device.type  # autocast converts what linears give, and not what tables give
    return out.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else out


def has_nan(x: Any) -> bool:
    """Whether a NaN is in it: it may be computed, as a whole or in parts, of what another stage holds."""
    looks = isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 0 and has_values(x)
    return looks and bool(x.isnan().any())


def is_placeholder(x: Any) -> bool:
    """Whether nothing but NaN is in it, as in what is computed of what another stage holds."""
    looks = isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 0 and has_values(x)
    return looks and bool(x.isnan().all())
