"""Register the forward hooks of several features on a module in a fixed nesting order.

Several features wrap the same forward pass: the recorder, ZeRO stage 3, activation offload, context parallelism,
sequence parallelism, tensor-parallel blocks, casts. ``HookOrder`` lists them from the outermost to the innermost, and
``register_forward_hooks`` keeps the hooks of each module in this order, whichever feature was installed first.

    HookOrder.A: before    -+
    HookOrder.B: before    -|-+
    forward                 | |
    HookOrder.B: after     -|-+
    HookOrder.A: after     -+

Hooks of users and other libraries keep their places. Orders before ``CHECKS`` run before the pre-hooks that were on the
module when it was sharded, all others run after them.

Some code does not use this order: a replaced ``module.forward``, which runs inside all hooks; hooks of parameters,
which run in the backward pass; and hooks of ``discovery`` on its own copies of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, auto
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

ForwardArgs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a forward pass, which a forward pre-hook returns."""
POSITIONS_ATTRIBUTE = "_shardformer_hook_positions"
Positions = dict[int, tuple["HookOrder", int]]
"""Attribute of a module: id of a hook -> (order, place among hooks of equal order)."""


class HookOrder(IntEnum):
    """Nesting order of forward hooks around a module, from the outermost to the innermost."""

    RECORDER = auto()
    """Records the module that runs, with the communication of all other hooks, and measures the time of layers."""
    PARAMETERS = auto()
    """ZeRO stage 3 starts a pass, in which every later read of a parameter gathers it."""
    SAVED_TENSORS = auto()
    """Activation offload stores every tensor that the other hooks and the forward pass save for the backward pass."""
    STAGE_INPUT = auto()
    """A pipeline stage replaces the states of the previous stack by the received ones, before any hook reads them."""
    PLAIN_OUTPUT = auto()
    """Gathers deferred outputs of the model, after all hooks that return local shards."""
    MODEL_SEQUENCE = auto()
    """Context parallelism and grids start and end around the model: inputs, and caches with local positions."""
    STACK_SEQUENCE = auto()
    """Context parallelism shards the sequence of a stack. Sequence parallelism then shards each of its shards."""
    LOCAL_POSITIONS = auto()
    """A layer outside the stacks receives the local positions of a sharded sequence."""
    LOCAL_SAMPLES = auto()
    """Selects the local samples of an attention module's arguments, given the number of samples before the gather."""
    FULL_LENGTH = auto()
    """Sequence parallelism gathers what the tensor ranks have, which is the shard of this sequence rank."""
    FULL_SEQUENCE = auto()
    """Context parallelism gathers the shards of all sequence ranks."""
    CHECKS = auto()
    """Checks of arguments and of the model, on the inputs that the pre-hooks of users return."""
    STACK = auto()
    """Tensor parallelism shards the hidden states at the first layer of a stack and gathers them after its last."""
    FULL_FEATURES = auto()
    """A grid gathers the features of a module's hidden states."""
    STACK_LENGTH = auto()
    """Restores the sequence length in a recomputation, which the arguments of the layer need."""
    TOKEN_ARGUMENTS = auto()
    """Shards or gathers arguments with one row per token."""
    REGION_ARGUMENTS = auto()
    """Arguments enter the tensor-parallel region: their gradients are summed over the ranks."""
    HEAD_ARGUMENTS = auto()
    """Selects the local heads of arguments that are inside the region."""
    SAMPLE_ARGUMENTS = auto()
    """A grid selects the local samples of arguments that are inside the region."""
    BLOCK = auto()
    """The hidden states enter a tensor-parallel block, and leave it."""
    BLOCK_PARAMETERS = auto()
    """Divides parameters that each rank adds to a sum, for one forward pass."""
    GRADIENT_DIVISOR = auto()
    """Sets the divisor of gradients, which depends on whether a block was entered."""
    RANDOM_STATE = auto()
    """A module draws the same random numbers on all ranks."""
    CASTS = auto()
    """Casts the inputs and parameters of a layer, after all hooks that compute with them."""
    LAYER_INPUT = auto()
    """Registers the tensor that the forward pass of a layer receives, and saves."""


def register_forward_hooks(
    module: nn.Module,
    hook_order: HookOrder,
    forward_pre_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    *,
    with_kwargs: bool = False,
    always_call: bool = False,
) -> Callable[[], None]:
    """Register a forward pre-hook and a forward hook on a module.

    Returns a function that removes them.

    Hooks of equal order nest in the order of their registration: the last one is the innermost, and the outermost for
    orders before ``CHECKS``.

    Args:
        forward_pre_hook: ``register_forward_pre_hook`` describes its arguments and its result.
        forward_hook: ``register_forward_hook`` describes its arguments and its result.
        with_kwargs: whether ``forward_pre_hook`` receives the keyword arguments of `forward`.
        always_call: whether ``forward_hook`` runs if the forward pass raises, too.
    """
    positions: Positions = module.__dict__.setdefault(POSITIONS_ATTRIBUTE, {})
    is_outside = hook_order < HookOrder.CHECKS
    handles = []
    if forward_pre_hook is not None:
        handles.append(module.register_forward_pre_hook(forward_pre_hook, with_kwargs=with_kwargs, prepend=is_outside))
    if forward_hook is not None:
        handles.append(module.register_forward_hook(forward_hook, always_call=always_call))
    for handle in handles:
        positions[handle.id] = hook_order, -handle.id if is_outside else handle.id
    for hooks, reverse in ((module._forward_pre_hooks, False), (module._forward_hooks, True)):
        if len(hooks) > 1:
            _sort_shardformer_hooks(hooks, positions, reverse=reverse)
    return partial(
        _remove_hook_handles, handles, positions
    )  # no reference to the module, which a feature may keep alive


def _remove_hook_handles(handles: list[RemovableHandle], position_by_hook_id: Positions) -> None:
    for handle in handles:
        handle.remove()
        position_by_hook_id.pop(handle.id, None)


def _sort_shardformer_hooks(hook_dict: Any, position_by_hook_id: Positions, *, reverse: bool) -> None:
    """Sort ShardFormer's hooks on a module, without moving the hooks of other libraries."""
    own = [key for key in hook_dict if key in position_by_hook_id]
    ranked = sorted(own, key=position_by_hook_id.__getitem__, reverse=reverse)
    if ranked != own:
        following = iter(ranked)
        for key in [next(following) if key in position_by_hook_id else key for key in hook_dict]:
            hook_dict.move_to_end(key)
