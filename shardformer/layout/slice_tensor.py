"""What ``state_dict`` of a sharded model gives: tensors that know that they are one rank's part of the model.

Within torch they are tensors like others: they are loaded, copied, compared and computed with. What leaves torch would
be taken for the model: ``torch.save``, pickle and what is built on it, safetensors and NumPy are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from typing import Any, NoReturn

from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.torch_compat import DisableTorchFunctionSubclass, tree_leaves, tree_map

MARKED = "_shardformer_slices"
"""Attribute of a module whose state dict marks slices: the names of its parameters; None: all, and its buffers."""
_REMEDY = (
    "On all ranks call model.save_pretrained(folder) or shardformer.export_pretrained(model, folder) for a model that "
    "transformers loads, shardformer.save_checkpoint to go on training, or shardformer.full_state_dict(model) for the "
    "plain model's state dict. tensor.as_subclass(torch.Tensor) is this rank's part as a plain tensor"
)


class SliceTensor(Tensor):
    """A tensor of this rank's part of a model. What is computed from it and has as many numbers is one, too.

    ``as_subclass(torch.Tensor)`` gives a plain tensor of the same memory.
    """

    _called: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        slices = [x for x in leaves if isinstance(x, SliceTensor)]
        if func in _leaving_torch():
            refuse(slices[0]._called, slices[0].shape)
        with DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            if func is Tensor.as_subclass:
                return found
            arguments = {id(x) for x in leaves}
            return tree_map(lambda x: x if id(x) in arguments else _like(x, slices), found)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(self._called, self.shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        found: Tensor = memo[id(self)]
        return found

    def __copy__(self) -> Tensor:
        return self.view_as(self)


def refuse(name: str, shape: tuple[int, ...]) -> NoReturn:
    """Raises ConfigError for a slice that is about to leave torch."""
    raise ConfigError(
        f"{name}, of the shape {tuple(shape)}, was to be written to a file, pickled, or read by another library",
        rule="state_dict() of a sharded model holds this rank's part of it, and a file would lack the rest",
        remedy=_REMEDY,
    )


@cache
def _leaving_torch() -> frozenset[Any]:
    """The functions by which code that is not torch's gets at the memory of a tensor."""
    names = ("data_ptr", "numpy", "__array__", "__dlpack__")
    return frozenset(getattr(Tensor, name) for name in names)


def _like(x: Any, slices: Iterable[SliceTensor]) -> Any:
    name = next((each._called for each in slices if type(x) is Tensor and x.numel() == each.numel()), None)
    return x if name is None else _slice(x, name)


def _slice(x: Tensor, name: str) -> SliceTensor:
    found = x.as_subclass(SliceTensor)
    found._called = name
    return found


def without_mark(x: Tensor) -> Tensor:
    """A slice as the plain tensor of the same memory; any other tensor as it is."""
    return x.as_subclass(Tensor) if isinstance(x, SliceTensor) else x


def mark_slices(module: nn.Module, names: Collection[str] | None) -> None:
    """Lets the state dict of a module, and of any that it is in, mark what is a slice.

    Args:
        names: of parameters that the module holds itself; None: all of them, and its buffers.
    """
    known = module.__dict__.get(MARKED, ())
    if MARKED not in module.__dict__:
        module.register_state_dict_post_hook(_mark)
    module.__dict__[MARKED] = None if names is None or known is None else tuple(dict.fromkeys((*known, *names)))


def _mark(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """The module's own tensors, as ``keep_vars=True`` gives them, are left as they are; so are fake tensors."""
    marked = module.__dict__[MARKED]
    for name in (*module._parameters, *module._buffers) if marked is None else marked:
        full = f"{prefix}{name}"
        if type(value := state_dict.get(full)) is Tensor and value is not module._buffers.get(name):
            state_dict[full] = _slice(value, full)


class _Refuses:
    """What pickle finds in the place of the method of that name of a parameter."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self._name, self._shape = name, shape

    def __call__(self, protocol: Any) -> NoReturn:
        refuse(self._name, self._shape)


def refuse_pickling(name: str, param: Tensor) -> None:
    """Refuses to pickle a parameter that is a slice. It stays a plain parameter, which computing does not slow down."""
    param.__dict__["__reduce_ex__"] = _Refuses(name, tuple(param.shape))
