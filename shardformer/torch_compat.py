"""Everything that shardformer uses of torch without a public name, and differences between versions of torch."""

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
"""The number of the backward that this thread is in, negative outside of a backward."""

at_end_of_backward: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
"""Called in a backward: autograd calls the function when the backward has ended; not if the backward raises.

Activation checkpointing with ``use_reentrant=True`` runs a backward of its own within the backward.
"""

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
DisableTorchFunction = torch._C.DisableTorchFunction
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
disable_current_modes = _disable_current_modes
make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
is_view: Callable[[Tensor], bool] = Tensor._is_view

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""The schema of an operator: its arguments, its returns, and which of them are written to."""

get_default_store = distributed_c10d._get_default_store
fused_sdp_choice = torch._fused_sdp_choice
assert_async = torch._assert_async

DropoutBase = nn.modules.dropout._DropoutNd
"""The class of all dropout layers of torch."""

COMPOSABLE_REGISTRY = REGISTRY_KEY
"""The attribute of a module in which torch notes that ``fully_shard`` or ``replicate`` was applied."""

push_saved_tensors_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


def top_saved_tensors_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The innermost hooks for saved tensors, as (pack, unpack)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def tensor_hooks_of(x: Tensor) -> list[Any]:
    """The hooks that were registered on a tensor."""
    tables = (x._backward_hooks, getattr(x, "_post_accumulate_grad_hooks", None))
    return [hook for table in tables for hook in (table or {}).values()]


def has_step_hooks(optimizer: Any) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def active_ddp_module() -> nn.Module | None:
    """The DistributedDataParallel whose forward runs."""
    return DistributedDataParallel._active_ddp_module


def is_dynamo_loaded() -> bool:
    """Whether something may be compiled: until then nothing has to be hidden from torch.compile."""
    return "torch._dynamo" in sys.modules


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


storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")


def storage_use_count(x: Tensor) -> int:
    """How many owners the memory of ``x`` has."""
    return int(torch._C._storage_Use_Count(memory_of(x)))


def memory_of(x: Tensor) -> int:
    """A number of the memory of ``x``, which no other memory has while it is held; also where it has no address."""
    return storage_id(x.untyped_storage())


without_fake_tensors = unset_fake_temporarily
"""In here, or in what it decorates, what is made has values, also while a step is traced: something is tried out."""

Node = Any  # torch.autograd.graph.Node, whose subclasses differ in what they have beside its methods


def gradient_shape(edge: GradientEdge) -> tuple[int, ...]:
    """The shape of the gradients that pass an edge of the graph."""
    node: Any = edge.node
    return tuple(node._input_metadata[edge.output_nr].shape)


def run_in_turn_of(node: Node, other: Node) -> None:
    """Gives a node the place of another one in the order of the backward."""
    node._set_sequence_nr(other._sequence_nr())


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
