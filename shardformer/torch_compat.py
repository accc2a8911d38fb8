"""Differences between versions of torch, and tensors without values (meta and fake tensors)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.optim import Adagrad, Optimizer

COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module with what ``module.compile()`` made of its call."""


def state_when_made(optimizer: Optimizer, group: dict[str, Any], param: nn.Parameter) -> dict[str, Any]:
    """The state that the constructor of the optimizer gives a parameter; empty if its first step makes all of it.

    In torch 2.11 Adagrad makes its state in the constructor only: its step raises KeyError for a parameter that is put
    into a group later.

    Args:
        group: the settings, which become arguments of the constructor.
    """
    if not isinstance(optimizer, Adagrad):
        return {}
    known = inspect.signature(Adagrad).parameters
    settings = {**optimizer.defaults, **group}
    made = Adagrad([param], **{name: value for name, value in settings.items() if name in known and name != "params"})
    return dict(made.state[param])


def hooked_state(optimizer: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``make`` gives, between the hooks for ``state_dict`` that scripts registered on an optimizer."""
    for hook in list(optimizer._optimizer_state_dict_pre_hooks.values()):
        hook(optimizer)
    found = make()
    for hook in list(optimizer._optimizer_state_dict_post_hooks.values()):
        other = hook(optimizer, found)
        found = found if other is None else other
    return found


def hooked_load(optimizer: Any, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
    """Loads a state, between the hooks for ``load_state_dict`` that scripts registered on an optimizer."""
    for hook in list(optimizer._optimizer_load_state_dict_pre_hooks.values()):
        other = hook(optimizer, state_dict)
        state_dict = state_dict if other is None else other
    load(state_dict)
    for hook in list(optimizer._optimizer_load_state_dict_post_hooks.values()):
        hook(optimizer)


def wrapped_name(module: nn.Module) -> str | None:
    """The name under which one of torch's wrappers holds the module that it was put around; None for other modules.

    These are the wrappers for activation checkpointing and offload, and what ``torch.compile`` makes of a module. Their
    classes are private or slow to import: where nothing imported them, no module is one of them.
    """
    if _is_a(module, "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"):
        return "_checkpoint_wrapped_module"
    return "_orig_mod" if is_compiled_wrapper(module) else None


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether it is what ``torch.compile(module)`` returned."""
    return _is_a(module, "torch._dynamo.eval_frame", "OptimizedModule")


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called. torch has no public word for that."""
    return getattr(module, COMPILED_CALL, None) is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of the module runs compiled code: by ``torch.compile(module)`` or ``module.compile()``."""
    return is_compiled_in_place(module) or is_compiled_wrapper(module)


def collectives_begun() -> dict[str, int]:
    """Name of a process group of this process -> how many collectives this process has begun on it.

    Of groups of gloo alone, which counts all of them; sends and receives between two ranks are not counted.
    """
    found: dict[str, int] = {}
    for group, name in list(distributed_c10d._world.pg_names.items()):
        with suppress(RuntimeError, ValueError, KeyError):  # one that is being destroyed
            if is_counted(group):
                found[str(name)] = num_begun(group)
    return found


def num_begun(group: Any) -> int:
    """How many collectives this process has begun on a group that ``is_counted``."""
    return int(group._get_sequence_number_for_group())


def name_of_group(group: dist.ProcessGroup | None) -> str:
    """The same in all processes of it; None is the group of all. Empty for one that this process is not in."""
    group = distributed_c10d._get_default_group() if group is None else group
    return str(distributed_c10d._world.pg_names.get(group, ""))


def is_counted(group: dist.ProcessGroup) -> bool:
    """Whether all collectives of a group are counted in one row: those of gloo, without another backend next to it."""
    return {pair.partition(":")[2] for pair in dist.get_backend_config(group).split(",")} == {"gloo"}


def _is_a(module: nn.Module, where: str, kind: str) -> bool:
    found = getattr(sys.modules.get(where), kind, None)
    return found is not None and isinstance(module, found)


def has_data(x: Tensor) -> bool:
    """Whether there are numbers in ``x`` to look at."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def to_list(x: Tensor) -> Any:
    """What ``x.tolist()`` gives; ones where there are no values."""
    if has_data(x):
        return x.tolist()
    ones: Any = 1
    for size in reversed(x.shape):
        ones = [ones] * size
    return ones


def is_true(x: Tensor) -> bool:
    """What ``bool(x)`` gives; True where there are no values: a check of numbers finds nothing wrong in a trace."""
    return bool(x) if has_data(x) else True


def memory_of(x: Tensor) -> int:
    """A number of the memory of ``x``, which no other memory has while it is held; also where it has no address."""
    number: int = x.untyped_storage()._cdata
    return number


without_fake_tensors = unset_fake_temporarily
"""In here, or in what it decorates, what is made has values, also while a step is traced: something is tried out."""

Node = Any  # torch.autograd.graph.Node, whose subclasses differ in what they have beside its methods


def as_tuple(given: Any) -> Any:
    return given if isinstance(given, tuple | list) else (given,)


def custom_function_of(node: Node) -> Any:
    """The autograd.Function whose backward this node is, None for a node of torch's own."""
    return getattr(node, "_forward_cls", None)


@cache
def saved_tensor_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_tensors_of(node: Node) -> Iterator[Any]:
    """The tensors that the forward saved for this node, as torch.autograd's SavedTensor."""
    kind: Any = type(node)
    for name in saved_tensor_names(kind):
        saved = getattr(node, name)
        yield from (one for one in as_tuple(saved) if one is not None)


def is_packed(node: Node) -> bool:
    """Whether a hook has to bring back what was saved, as checkpointing does by running the forward again."""
    return any(getattr(saved, "unpack_hook", None) is not None for saved in saved_tensors_of(node))


def release_saved_tensors(nodes: Iterable[Node]) -> None:
    """Gives back the memory of nodes that have done their part, though the graph lives on."""
    for node in nodes:
        for saved in saved_tensors_of(node):
            try:
                saved.register_hooks(lambda _: None, raise_released)
            except RuntimeError:  # nothing is held here, or it is held by a hook
                pass


def raise_released(_: object) -> Tensor:
    raise RuntimeError("A backward goes a second time through a graph that backward_of_inputs has used up.")
