"""Wrappers for private torch functions and for functions that differ between torch versions."""

from __future__ import annotations

import inspect
import logging
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
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._subclasses.fake_tensor import FakeCopyMode as FakeCopyMode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge
from torch.distributed import distributed_c10d
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.nn.modules.module import _IncompatibleKeys
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

IncompatibleKeys = _IncompatibleKeys
"""Result of ``nn.Module.load_state_dict``: missing and unexpected keys."""

current_graph_task_id = torch._C._current_graph_task_id
"""Returns the id of the backward pass that runs in this thread. It is negative outside a backward pass."""

at_end_of_backward: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
"""Registers a function that autograd calls when the current backward pass has ended, unless it raises.

Activation checkpointing with ``use_reentrant=True`` runs a nested backward pass within the backward pass.
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


def get_innermost_saved_tensors_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the pack and unpack hooks of the innermost ``saved_tensors_hooks`` context, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def get_tensor_hooks(tensor: Tensor) -> list[Any]:
    """Return all gradient hooks registered on a tensor."""
    tables = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return [hook for table in tables for hook in (table or {}).values()]


def has_step_hooks(optimizer: Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def get_active_ddp_module() -> nn.Module | None:
    """Return the DistributedDataParallel module whose forward pass is running, or None."""
    return DistributedDataParallel._active_ddp_module


def is_dynamo_imported() -> bool:
    """Return whether ``torch._dynamo`` has been imported, without which ``torch.compile`` cannot be in use."""
    return "torch._dynamo" in sys.modules


COMPILED_CALL = "_compiled_call_impl"  # attribute of a module with the compiled call that ``module.compile()`` created


def get_initial_optimizer_state(
    optimizer: Optimizer, param_group: dict[str, Any], param: nn.Parameter
) -> dict[str, Any]:
    """Return the optimizer state that a parameter has before the first step, or {} if it has none.

    In torch 2.11 Adagrad creates its state only in the constructor, so its step raises KeyError for a parameter that is
    added to a group later.

    Args:
        param_group: the options of the group, passed to the constructor.
    """
    if not isinstance(optimizer, Adagrad):
        return {}
    known = inspect.signature(Adagrad).parameters
    settings = {**optimizer.defaults, **param_group}
    made = Adagrad([param], **{name: value for name, value in settings.items() if name in known and name != "params"})
    return dict(made.state[param])


def call_with_state_dict_hooks(optimizer: Any, make_state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Create a state dict between an optimizer's ``state_dict`` pre-hooks and post-hooks."""
    for hook in list(optimizer._optimizer_state_dict_pre_hooks.values()):
        hook(optimizer)
    found = make_state_dict()
    for hook in list(optimizer._optimizer_state_dict_post_hooks.values()):
        other = hook(optimizer, found)
        found = found if other is None else other
    return found


def load_state_dict_with_hooks(
    optimizer: Any, state_dict: dict[str, Any], load_fn: Callable[[dict[str, Any]], None]
) -> None:
    """Load a state dict between an optimizer's ``load_state_dict`` pre-hooks and post-hooks."""
    for hook in list(optimizer._optimizer_load_state_dict_pre_hooks.values()):
        other = hook(optimizer, state_dict)
        state_dict = state_dict if other is None else other
    load_fn(state_dict)
    for hook in list(optimizer._optimizer_load_state_dict_post_hooks.values()):
        hook(optimizer)


def get_wrapped_module_attr_name(module: nn.Module) -> str | None:
    """Return the attribute name under which a wrapper stores its module, or None for other modules.

    The wrappers are those of activation checkpointing, activation offload and ``torch.compile``. Their classes are
    private or slow to import, so they are only looked up in modules that are already imported.
    """
    if _is_instance_of_imported_class(
        module, "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"
    ):
        return "_checkpoint_wrapped_module"
    return "_orig_mod" if is_torch_compile_wrapper(module) else None


def is_torch_compile_wrapper(module: nn.Module) -> bool:
    """Return whether a module was returned by ``torch.compile(module)``."""
    return _is_instance_of_imported_class(module, "torch._dynamo.eval_frame", "OptimizedModule")


def unwrap_compiled_module(module: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """Unwrap ``torch.compile(module)``. Returns the module and the arguments of ``torch.compile``.

    The arguments are those of ``module.compile()``: the backend, which includes the mode and the options, and
    ``dynamic``. They are empty for a module without a wrapper, or if the wrapper disables compilation.
    """
    arguments: dict[str, Any] = {}
    while is_torch_compile_wrapper(module):
        from torch._dynamo.eval_frame import innermost_backend

        wrapper: Any = module
        module = wrapper._orig_mod
        if callable(callback := wrapper.dynamo_ctx.callback):
            backend = innermost_backend(callback)
            arguments = {"backend": backend, "dynamic": getattr(backend, "dynamic", None)}
    return module, arguments


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called on a module."""
    return getattr(module, COMPILED_CALL, None) is not None


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled by ``torch.compile(module)`` or ``module.compile()``."""
    return is_compiled_in_place(module) or is_torch_compile_wrapper(module)


def count_gloo_collectives_by_group() -> dict[str, int]:
    """Count the collectives that this process has started on each gloo process group, by group name.

    Only gloo counts all collectives. Point-to-point messages are not counted.
    """
    found: dict[str, int] = {}
    for group, name in list(distributed_c10d._world.pg_names.items()):
        with suppress(RuntimeError, ValueError, KeyError):  # a group that is being destroyed
            if has_exact_collective_count(group):
                found[str(name)] = get_gloo_collective_count(group)
    return found


def get_gloo_collective_count(process_group: Any) -> int:
    """Return the number of collectives that this process has started on a gloo process group."""
    return int(process_group._get_sequence_number_for_group())


def get_group_name(process_group: dist.ProcessGroup | None) -> str:
    """Return the name of a process group, by default the default group. It is empty outside the group."""
    process_group = distributed_c10d._get_default_group() if process_group is None else process_group
    return str(distributed_c10d._world.pg_names.get(process_group, ""))


def has_exact_collective_count(process_group: dist.ProcessGroup) -> bool:
    """Return whether a process group counts all its collectives, as pure gloo groups do."""
    return {pair.partition(":")[2] for pair in dist.get_backend_config(process_group).split(",")} == {"gloo"}


def _is_instance_of_imported_class(module: nn.Module, module_name: str, class_name: str) -> bool:
    found = getattr(sys.modules.get(module_name), class_name, None)
    return found is not None and isinstance(module, found)


def has_real_data(tensor: Tensor) -> bool:
    """Return whether a tensor stores values, unlike a meta or fake tensor."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


save_own_tensors, load_own_tensors = nn.Module._save_to_state_dict, nn.Module._load_from_state_dict
"""Methods of a module that save and load its own parameters and buffers, which layers of other libraries extend."""
apply_to_tensors = nn.Module._apply
"""Method of a module with which ``to`` converts its parameters and buffers."""


def is_wrapper_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor only wraps other tensors and has no storage of its own."""
    return hasattr(type(tensor), "__tensor_flatten__")


def has_meta_tensors(model: nn.Module) -> bool:
    """Return whether a model has parameters or buffers on the meta device."""
    with DisableTorchFunction():  # inside LazyInit tensors report another device
        return any([t.is_meta for t in (*model.parameters(), *model.buffers())])


def tolist_or_ones(tensor: Tensor) -> Any:
    """Return ``tensor.tolist()``, or nested lists of ones for a meta or fake tensor."""
    if has_real_data(tensor):
        return tensor.tolist()
    ones: Any = 1
    for size in reversed(tensor.shape):
        ones = [ones] * size
    return ones


def is_true_or_unknown(tensor: Tensor) -> bool:
    """Return ``bool(tensor)``, or True for a meta or fake tensor, so that checks pass during tracing."""
    return bool(tensor) if has_real_data(tensor) else True


storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")


def get_storage_use_count(tensor: Tensor) -> int:
    """Return the reference count of a tensor's storage."""
    return int(torch._C._storage_Use_Count(get_storage_id(tensor)))


def get_storage_id(tensor: Tensor) -> int:
    """Return a unique ID of a tensor's storage, which works for meta and fake tensors, unlike a data pointer."""
    return storage_id(tensor.untyped_storage())


without_fake_tensors = unset_fake_temporarily
"""Context manager and decorator in which new tensors have values, even while a step is traced."""

Node = Any  # torch.autograd.graph.Node, whose subclasses have different additional attributes


def get_gradient_shape(gradient_edge: GradientEdge) -> tuple[int, ...]:
    """Return the shape of the gradient on an edge of the autograd graph."""
    node: Any = gradient_edge.node
    return tuple(node._input_metadata[gradient_edge.output_nr].shape)


def copy_autograd_sequence_number(target_node: Node, source_node: Node) -> None:
    """Copy the sequence number of an autograd node, so that both nodes run at the same point in backward."""
    target_node._set_sequence_nr(source_node._sequence_nr())


def as_tuple(value: Any) -> Any:
    return value if isinstance(value, tuple | list) else (value,)


def get_autograd_function_class(node: Node) -> Any:
    """Return the ``torch.autograd.Function`` of an autograd node, or None for a built-in operation."""
    return getattr(node, "_forward_cls", None)


@cache
def get_saved_tensor_attr_names(node_class: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(node_class) if name.startswith("_raw_saved_"))


def iter_saved_tensors(node: Node) -> Iterator[Any]:
    """Yield the ``SavedTensor`` objects of an autograd node."""
    kind: Any = type(node)
    for name in get_saved_tensor_attr_names(kind):
        saved = getattr(node, name)
        yield from (one for one in as_tuple(saved) if one is not None)


def has_saved_tensor_unpack_hooks(node: Node) -> bool:
    """Return whether the saved tensors of an autograd node have unpack hooks, as activation checkpointing adds."""
    return any(getattr(saved, "unpack_hook", None) is not None for saved in iter_saved_tensors(node))


def release_saved_tensors(nodes: Iterable[Node]) -> None:
    """Free the saved tensors of autograd nodes after backward, even if the graph is still referenced."""
    for node in nodes:
        for saved in iter_saved_tensors(node):
            try:
                saved.register_hooks(lambda _: None, raise_saved_tensors_freed_error)
            except RuntimeError:  # no tensor is saved, or a hook has packed it
                pass


def raise_saved_tensors_freed_error(_: object) -> Tensor:
    raise RuntimeError(
        "Trying to backward through a graph whose saved tensors have already been freed. Run the forward pass again."
    )


def get_compile_error_class() -> type[Exception]:
    """Return the base class of all ``torch.compile`` errors."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def get_recompile_limit_error_class() -> type[Exception]:
    """Return the error class for reaching the recompile limit with ``fullgraph=True``."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return FailOnRecompileLimitHit


def resolve_compile_backend(
    backend: str | Callable[..., Any], mode: str | None, options: dict[str, Any] | None, dynamic: bool | None
) -> Callable[..., Any]:
    """Return the function that compiles a graph for a ``torch.compile`` backend. Raises for an unknown backend."""
    if backend == "inductor":
        compiler: Callable[..., Any] = torch._TorchCompileInductorWrapper(mode, options, dynamic)
        return compiler
    if isinstance(backend, str) or mode or options:
        found: Callable[..., Any] = torch._TorchCompileWrapper(backend, mode, options, dynamic)
        return found
    return backend


def get_compile_backend_name(backend: str | Callable[..., Any]) -> str:
    """Return the name of a ``torch.compile`` backend, which may be a name or a function."""
    if isinstance(backend, str):
        return backend
    return str(getattr(backend, "compiler_name", getattr(backend, "__name__", "a function")))


def get_recompile_reason(fn: Callable[[], Any]) -> str:
    """Call a function that reaches the recompile limit, and return the reason logged by ``torch.compile``."""
    reasons: list[str] = []

    def capture_reason(log_record: logging.LogRecord) -> bool:
        if "last reason" in str(log_record.msg) and isinstance(log_record.args, tuple):
            reasons.append(str(log_record.args[3]))
        return False  # the reason is reported elsewhere

    logger = logging.getLogger("torch._dynamo.convert_frame")
    logger.addFilter(capture_reason)
    try:
        fn()
    except get_recompile_limit_error_class():
        pass
    finally:
        logger.removeFilter(capture_reason)
    return reasons[0] if reasons else "unknown"


def view_as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor as a one-dimensional tensor of bytes. A non-contiguous tensor is copied.

    A tensor of one element is contiguous with any stride, such as 0 after ``expand``, but a view of another element
    size requires stride 1.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    return (flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def is_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor, without the slow import of the DTensor class."""
    return any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


def is_sharded_by_fsdp(param: Tensor) -> bool:
    """Return whether FSDP has sharded a parameter. ``FullyShardedDataParallel`` marks it with a private attribute."""
    return is_dtensor(param) or bool(getattr(param, "_fsdp_flattened", False))
