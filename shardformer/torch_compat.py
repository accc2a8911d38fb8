"""Every private name of torch that shardformer uses, and differences between versions of torch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._subclasses.fake_tensor import FakeCopyMode as FakeCopyMode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge
from torch.distributed import distributed_c10d
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adagrad, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_any as tree_any
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_map_with_path as tree_map_with_path

current_graph_task_id = torch._C._current_graph_task_id
"""Returns the id of the backward that runs in this thread. It is negative outside of a backward."""

at_end_of_backward: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
"""Registers a function that autograd calls when the current backward has ended, unless it raises.

Activation checkpointing with ``use_reentrant=True`` runs a nested backward within the backward.
"""

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
DisableTorchFunction = torch._C.DisableTorchFunction
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
disable_current_modes = _disable_current_modes
make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
is_view: Callable[[Tensor], bool] = Tensor._is_view

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Returns the schema of an operator: its arguments and returns, and which of them it writes to."""

get_default_store = distributed_c10d._get_default_store
fused_sdp_choice = torch._fused_sdp_choice
assert_async = torch._assert_async

DropoutBase = nn.modules.dropout._DropoutNd  # base class of torch's dropout layers

COMPOSABLE_REGISTRY = REGISTRY_KEY
"""Attribute of a module with which torch records that ``fully_shard`` or ``replicate`` was applied."""

push_saved_tensors_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


def top_saved_tensors_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the innermost hooks for saved tensors, as (pack, unpack)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def tensor_hooks_of(x: Tensor) -> list[Any]:
    """Return the hooks that were registered on a tensor."""
    tables = (x._backward_hooks, getattr(x, "_post_accumulate_grad_hooks", None))
    return [hook for table in tables for hook in (table or {}).values()]


def has_step_hooks(optimizer: Any) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def active_ddp_module() -> nn.Module | None:
    """Return the DistributedDataParallel module whose forward is running, or None."""
    return DistributedDataParallel._active_ddp_module


def is_dynamo_loaded() -> bool:
    """Whether ``torch._dynamo`` has been imported. Otherwise nothing is compiled."""
    return "torch._dynamo" in sys.modules


COMPILED_CALL = "_compiled_call_impl"  # attribute of a module with the compiled call that ``module.compile()`` created


def state_when_made(optimizer: Optimizer, group: dict[str, Any], param: nn.Parameter) -> dict[str, Any]:
    """Return the state that the optimizer's constructor creates for a parameter. Empty if its first step creates it.

    In torch 2.11 Adagrad creates its state only in the constructor, so its step raises KeyError for a parameter that is
    added to a group later.

    Args:
        group: the options of the group, passed to the constructor.
    """
    if not isinstance(optimizer, Adagrad):
        return {}
    known = inspect.signature(Adagrad).parameters
    settings = {**optimizer.defaults, **group}
    made = Adagrad([param], **{name: value for name, value in settings.items() if name in known and name != "params"})
    return dict(made.state[param])


def hooked_state(optimizer: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call ``make`` between the hooks for ``state_dict`` that were registered on an optimizer."""
    for hook in list(optimizer._optimizer_state_dict_pre_hooks.values()):
        hook(optimizer)
    found = make()
    for hook in list(optimizer._optimizer_state_dict_post_hooks.values()):
        other = hook(optimizer, found)
        found = found if other is None else other
    return found


def hooked_load(optimizer: Any, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
    """Call ``load`` between the hooks for ``load_state_dict`` that were registered on an optimizer."""
    for hook in list(optimizer._optimizer_load_state_dict_pre_hooks.values()):
        other = hook(optimizer, state_dict)
        state_dict = state_dict if other is None else other
    load(state_dict)
    for hook in list(optimizer._optimizer_load_state_dict_post_hooks.values()):
        hook(optimizer)


def wrapped_name(module: nn.Module) -> str | None:
    """Return the attribute under which one of torch's wrappers stores the wrapped module, or None for other modules.

    The wrappers are those of activation checkpointing, activation offload and ``torch.compile``. Their classes are
    private or slow to import, so they are only looked up in modules that are already imported.
    """
    if _is_a(module, "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"):
        return "_checkpoint_wrapped_module"
    return "_orig_mod" if is_compiled_wrapper(module) else None


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` returned this module."""
    return _is_a(module, "torch._dynamo.eval_frame", "OptimizedModule")


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called, for which torch has no public function."""
    return getattr(module, COMPILED_CALL, None) is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether calling the module runs code compiled by ``torch.compile(module)`` or ``module.compile()``."""
    return is_compiled_in_place(module) or is_compiled_wrapper(module)


def collectives_begun() -> dict[str, int]:
    """Return process group name -> the number of collectives that this process has started on it.

    Only gloo groups are included, because gloo counts all collectives. Point-to-point messages are not counted.
    """
    found: dict[str, int] = {}
    for group, name in list(distributed_c10d._world.pg_names.items()):
        with suppress(RuntimeError, ValueError, KeyError):  # a group that is being destroyed
            if is_counted(group):
                found[str(name)] = num_begun(group)
    return found


def num_begun(group: Any) -> int:
    """Return the number of collectives that this process has started on a group for which ``is_counted`` is true."""
    return int(group._get_sequence_number_for_group())


def name_of_group(group: dist.ProcessGroup | None) -> str:
    """Return a name that is the same in all processes of a group (None: the default group). Empty for non-members."""
    group = distributed_c10d._get_default_group() if group is None else group
    return str(distributed_c10d._world.pg_names.get(group, ""))


def is_counted(group: dist.ProcessGroup) -> bool:
    """Whether gloo is the only backend of a group, so that all of its collectives are counted together."""
    return {pair.partition(":")[2] for pair in dist.get_backend_config(group).split(",")} == {"gloo"}


def _is_a(module: nn.Module, where: str, kind: str) -> bool:
    found = getattr(sys.modules.get(where), kind, None)
    return found is not None and isinstance(module, found)


def has_data(x: Tensor) -> bool:
    """Whether a tensor has values, unlike meta and fake tensors."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def to_list(x: Tensor) -> Any:
    """Return ``x.tolist()``, or ones if the tensor has no values."""
    if has_data(x):
        return x.tolist()
    ones: Any = 1
    for size in reversed(x.shape):
        ones = [ones] * size
    return ones


def is_true(x: Tensor) -> bool:
    """Return ``bool(x)``, or True if the tensor has no values, so that checks pass in a trace."""
    return bool(x) if has_data(x) else True


storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")


def storage_use_count(x: Tensor) -> int:
    """Return the number of references to the storage of ``x``."""
    return int(torch._C._storage_Use_Count(memory_of(x)))


def memory_of(x: Tensor) -> int:
    """Return an id of the storage of ``x``, unique while the storage exists. Works without a data pointer."""
    return storage_id(x.untyped_storage())


without_fake_tensors = unset_fake_temporarily
"""Context manager and decorator in which new tensors have values, even while a step is traced."""

Node = Any  # torch.autograd.graph.Node, whose subclasses have different additional attributes


def gradient_shape(edge: GradientEdge) -> tuple[int, ...]:
    """Return the shape of the gradients that flow through an edge of the autograd graph."""
    node: Any = edge.node
    return tuple(node._input_metadata[edge.output_nr].shape)


def run_in_turn_of(node: Node, other: Node) -> None:
    """Make a node run at the position of another node in the order of the backward."""
    node._set_sequence_nr(other._sequence_nr())


def as_tuple(given: Any) -> Any:
    return given if isinstance(given, tuple | list) else (given,)


def custom_function_of(node: Node) -> Any:
    """Return the autograd.Function of a backward node, or None for a built-in node."""
    return getattr(node, "_forward_cls", None)


@cache
def saved_tensor_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_tensors_of(node: Node) -> Iterator[Any]:
    """Yield the tensors that the forward saved for this node, as SavedTensor objects."""
    kind: Any = type(node)
    for name in saved_tensor_names(kind):
        saved = getattr(node, name)
        yield from (one for one in as_tuple(saved) if one is not None)


def is_packed(node: Node) -> bool:
    """Whether a hook must unpack the saved tensors, as in activation checkpointing."""
    return any(getattr(saved, "unpack_hook", None) is not None for saved in saved_tensors_of(node))


def release_saved_tensors(nodes: Iterable[Node]) -> None:
    """Free the saved tensors of nodes that have already run, although the graph is still alive."""
    for node in nodes:
        for saved in saved_tensors_of(node):
            try:
                saved.register_hooks(lambda _: None, raise_released)
            except RuntimeError:  # no tensor is saved, or a hook has packed it
                pass


def raise_released(_: object) -> Tensor:
    raise RuntimeError("backward_of_inputs has already freed the saved tensors of this graph.")
