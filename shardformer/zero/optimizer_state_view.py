"""Access to sharded optimizer states with ``state``, ``state_dict``, ``load_state_dict`` and ``zero_grad``."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer import torch_compat
from shardformer.comm.collective_call import all_gather_over_mesh, run_and_compare_across_ranks
from shardformer.comm.collectives import compute_numel_and_hash
from shardformer.errors import ConfigError
from shardformer.layout.shard_spec import ShardSpec
from shardformer.layout.sharding_metadata import ShardingMetadata, get_local_metadata, group_params_by_metadata
from shardformer.torch_patches import Apply, LibraryPatch, replace_attribute
from shardformer.zero.flat_shards import FlatParamShard, ParamSlice

State = dict[str, Any]


@contextmanager
def rollback_optimizers_on_error(
    optimizers: Sequence[Optimizer], schedulers_and_hooks: Sequence[Any] = ()
) -> Iterator[None]:
    """Restore the state of optimizers, schedulers and hooks if the code inside the context raises.

    Args:
        optimizers: Their attributes, groups, lists of parameters and states are restored in place. Tensors are not
            copied, so in-place changes to them remain.
        schedulers_and_hooks: Their attributes are restored, including the contents of lists, dicts and sets.
    """
    restores = [_make_restore_fn(each) for each in optimizers]
    attributes = [
        (each, {name: _copy_container_or_value(value) for name, value in vars(each).items()})
        for each in schedulers_and_hooks
    ]
    states = [(each, copy.deepcopy(each.state_dict())) for each in schedulers_and_hooks if hasattr(each, "state_dict")]
    try:
        yield
    except BaseException:
        for restore in restores:
            restore()
        for each, values in attributes:
            _replace_dict_contents(vars(each), values)
        for each, state in states:
            with suppress(Exception):  # load_state_dict may be the call that failed
                each.load_state_dict(state)
        raise


def _copy_container_or_value(container_or_value: Any) -> Any:
    return copy.copy(container_or_value) if type(container_or_value) in (list, dict, set) else container_or_value


def _replace_dict_contents(target_dict: State, new_contents: State) -> None:
    target_dict.clear()
    target_dict.update(new_contents)


def _make_restore_fn(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that restores an optimizer's current attributes, parameter groups and states."""
    attributes, state = dict(vars(optimizer)), optimizer.state
    groups = [(group, dict(group), list(group["params"])) for group in optimizer.param_groups]
    states = [(param, each, _copy_container_or_value(each)) for param, each in state.items()]

    def restore_optimizer() -> None:
        _replace_dict_contents(vars(optimizer), attributes)
        for group, content, params in groups:
            _replace_dict_contents(group, content)
            group["params"][:] = params
        current: list[State] = optimizer.param_groups
        current[:] = [group for group, _, _ in groups]
        state.clear()
        for param, each, content in states:
            if type(each) is dict:
                _replace_dict_contents(each, content)
            state[param] = each

    return restore_optimizer


ZERO_OPTIMIZER_ATTRIBUTE = "_shardformer_held_by"
"""Name of an optimizer's attribute with a weak reference to the ZeroOptimizer that steps it."""


class PatchedZeroGrad:
    """A replacement for ``zero_grad()`` of a model or optimizer that also clears the gradients stored by ZeRO.

    A copied model or optimizer gets the original method.
    """

    def __init__(self, model_or_optimizer: nn.Module | Optimizer, zero_optimizer: Optimizer | None) -> None:
        self._owner = weakref.ref(model_or_optimizer)
        self._usual: Callable[[Any, bool], None] = type(model_or_optimizer).zero_grad
        self._optimizer = weakref.ref(zero_optimizer) if zero_optimizer is not None else lambda: None

    def __call__(self, set_to_none: bool = True) -> None:
        if (optimizer := self._optimizer()) is not None:
            optimizer.zero_grad(set_to_none)
        elif (owner := self._owner()) is not None:
            self._usual(owner, set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchedZeroGrad:
        return PatchedZeroGrad(memo[id(self._owner())], None)


def attach_zero_optimizer(optimizer: Optimizer, zero_optimizer: Optimizer) -> None:
    """Attach an optimizer to its ZeroOptimizer, and replace the optimizer's ``zero_grad`` method."""
    optimizer.__dict__.update(
        {ZERO_OPTIMIZER_ATTRIBUTE: weakref.ref(zero_optimizer), "zero_grad": PatchedZeroGrad(optimizer, zero_optimizer)}
    )


def detach_zero_optimizer(optimizer: Optimizer) -> None:
    """Detach an optimizer from its ZeroOptimizer, and restore its original ``zero_grad`` method."""
    if optimizer.__dict__.pop(ZERO_OPTIMIZER_ATTRIBUTE, None) is not None:
        optimizer.__dict__.pop("zero_grad", None)


def get_zero_optimizer(optimizer: Optimizer) -> Any:
    """Return the ZeroOptimizer that wraps an optimizer, or None.

    A copy of an optimizer is not wrapped.
    """
    zero = optimizer.__dict__[ZERO_OPTIMIZER_ATTRIBUTE]() if ZERO_OPTIMIZER_ATTRIBUTE in optimizer.__dict__ else None
    return zero if zero is not None and any(optimizer is each for each in zero.inner) else None


COORDINATES_KEY = "shardformer_place"
"""Key in ``state_dict()`` for the (size, rank) of each axis along which ranks have different shards of the state."""
StateCoordinates = dict[str, tuple[int, int]]


_IS_CHECKED: ContextVar[bool] = ContextVar("is_checked", default=False)
"""Whether states are loaded without a check of the rank that saved them."""


def _patch_state_dict(original_state_dict: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @wraps(original_state_dict)
    def state_dict(optimizer: Optimizer) -> dict[str, Any]:
        found: dict[str, Any] = original_state_dict(optimizer)
        if place := get_optimizer_state_mesh_coords(optimizer):
            found[COORDINATES_KEY] = place
        return found

    return state_dict


def _patch_load_state_dict(original_load_state_dict: Callable[..., None]) -> Callable[..., None]:
    @wraps(original_load_state_dict)
    def load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if _IS_CHECKED.get() or (table := _find_sharding_metadata(optimizer)) is None:
            original_load_state_dict(optimizer, state_dict)
            return
        state_dict = _check_and_shard_state_dict(optimizer, state_dict, table)
        with rollback_optimizers_on_error([optimizer]):
            run_and_compare_across_ranks(
                table.context,
                lambda: original_load_state_dict(optimizer, state_dict),
                action_description=f"load the state of {type(optimizer).__name__}",
            )

    return load_state_dict


STATE_PATCHES: Mapping[LibraryPatch, Apply] = {
    LibraryPatch(
        "torch.optim.Optimizer.state_dict",
        "shardformer.zero.optimizer_state_view",
        "records which rank saved the state, because its parameters are shards",
    ): lambda: replace_attribute(Optimizer, "state_dict", _patch_state_dict(Optimizer.state_dict)),
    LibraryPatch(
        "torch.optim.Optimizer.load_state_dict",
        "shardformer.zero.optimizer_state_view",
        "shards the state of an unsharded model, and raises an error on all ranks if another rank saved the state",
    ): lambda: replace_attribute(Optimizer, "load_state_dict", _patch_load_state_dict(Optimizer.load_state_dict)),
}
"""Save the mesh coordinates of the rank with the state of torch's optimizers, and check them on load."""


def _find_sharding_metadata(optimizer: Optimizer) -> ShardingMetadata | None:
    """Find the sharding metadata of an optimizer's model, or None if all ranks have the same parameters."""
    if (holder := get_zero_optimizer(optimizer)) is not None:
        return holder.table  # type: ignore[no-any-return]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    tables = list(group_params_by_metadata(params))
    if not params:  # a pipeline stage without trainable parameters
        tables = [table for table in get_local_metadata() if table.context.pipe.size > 1]
    sizes = tables[0].context.sizes if len(tables) == 1 else {}
    return tables[0] if any(size > 1 for name, size in sizes.items() if name != "data") else None


def get_optimizer_state_mesh_coords(optimizer: Optimizer) -> StateCoordinates:
    """Return the (size, rank) of each mesh axis over which an optimizer's state is sharded."""
    table, holder = _find_sharding_metadata(optimizer), get_zero_optimizer(optimizer)
    if table is None:
        return {}
    if holder is not None and holder.has_sharded_states:
        names = set(table.context.sizes)
    else:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        entries = table.entries if holder is not None else group_params_by_metadata(params).get(table, ())
        names = {name for entry in entries for name in entry.spec.axes} | {"pipe"}
    return {name: (axis.size, axis.rank) for name, axis in table.axes.items() if name in names and axis.size > 1}


def _check_and_shard_state_dict(
    optimizer: Optimizer, state_dict: dict[str, Any], metadata: ShardingMetadata
) -> dict[str, Any]:
    """Check that a saved optimizer state fits this rank, and shard the state if it is unsharded.

    Communicates one object, with the L1 norm of each state tensor if the state does not record its rank.

    Raises:
        ConfigError: A different rank saved the state. Raised on all ranks.
    """
    own, sums, problem, kind = get_optimizer_state_mesh_coords(optimizer), list[float](), None, type(optimizer).__name__
    counts = [len(group["params"]) for group in optimizer.param_groups]
    try:
        state_dict = _shard_optimizer_state_dict(optimizer, state_dict, metadata)
        saved = state_dict.get(COORDINATES_KEY)
        if saved is not None and saved != own:
            problem = f"the state was saved by the rank with mesh coordinates {_format_mesh_coords(saved)}"
            problem += f", but this rank has {_format_mesh_coords(own)}"
        elif [len(group["params"]) for group in state_dict["param_groups"]] != counts:
            problem = "its parameter groups differ in size from those of the optimizer"
        elif saved is None and own:
            sums = _compute_state_norms(optimizer, state_dict, metadata)
    except (AttributeError, KeyError, TypeError) as error:
        problem = f"it is not an optimizer state ({type(error).__name__}: {error})"
    found = all_gather_over_mesh((problem, own, sums), metadata.context)
    if problem is None:
        problem = next((f"on rank {rank}, {theirs}" for rank, (theirs, *_) in found if theirs is not None), None)
    if problem is None and any(
        any(a) and a == b and one != other for n, (_, (_, one, a)) in enumerate(found) for _, (_, other, b) in found[:n]
    ):
        problem = "ranks with different shards of the parameters loaded the same state"
    if problem is not None:
        raise ConfigError(
            f"{kind}.load_state_dict cannot load this state, because {problem}.",
            remedy="Load the state that the same rank saved, or use save_checkpoint, which supports any layout.",
        )
    return state_dict


def _shard_optimizer_state_dict(
    optimizer: Optimizer, state_dict: dict[str, Any], metadata: ShardingMetadata
) -> dict[str, Any]:
    """Slice an unsharded optimizer state for this rank's parameter shards. A sharded state is returned unchanged."""
    pairs = _pair_state_keys_with_params(optimizer, state_dict)
    specs = {id(entry.param): entry.spec for entry in metadata.entries if entry.spec.is_sharded}
    states = {number: (state_dict["state"].get(number), specs.get(id(p)), p) for number, p in pairs}
    sharded = {
        number: {
            key: spec.slice_full_tensor(x, metadata.coords)
            if isinstance(x, Tensor) and tuple(x.shape) == spec.shape
            else x
            for key, x in state.items()
        }
        for number, (state, spec, p) in states.items()
        if isinstance(state, dict) and spec is not None and _is_full_param_state(state, spec, p)
    }
    if not sharded or COORDINATES_KEY in state_dict:
        return state_dict
    return {
        **state_dict,
        "state": {**state_dict["state"], **sharded},
        COORDINATES_KEY: get_optimizer_state_mesh_coords(optimizer),
    }


def _is_full_param_state(param_state: Mapping[str, Any], spec: ShardSpec, param: Tensor) -> bool:
    shapes = {tuple(x.shape) for x in param_state.values() if isinstance(x, Tensor)}
    return spec.shape in shapes and tuple(param.shape) not in shapes


def _pair_state_keys_with_params(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> list[tuple[Any, Tensor]]:
    """Pair each key of a saved optimizer state with the parameter at the same position in the optimizer."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    return list(zip(numbers, params, strict=False))


def _format_mesh_coords(mesh_coords: Any) -> str:
    if not isinstance(mesh_coords, dict):
        return repr(mesh_coords)[:80]
    return ", ".join(f"{name} {rank} of {size}" for name, (size, rank) in mesh_coords.items()) or "an unsharded model"


def _compute_state_norms(optimizer: Optimizer, state_dict: dict[str, Any], metadata: ShardingMetadata) -> list[float]:
    """Compute the L1 norms of optimizer state tensors, to detect ranks that load the same state by mistake."""
    cut = {id(entry.param) for entry in metadata.entries if entry.spec.is_sharded}
    states = [
        state_dict["state"].get(number, {})
        for number, p in _pair_state_keys_with_params(optimizer, state_dict)
        if id(p) in cut or get_zero_optimizer(optimizer) is not None
    ]
    tensors = [x for state in states for x in state.values() if isinstance(x, Tensor) and x.dim()]
    return [float(torch.abs(x).double().sum()) for x in tensors]


class OptimizerStateView(MutableMapping[Tensor, State]):
    """A mutable mapping from parameters to their sharded optimizer states.

    A key is a parameter of the model or this rank's slice of one. For a parameter without a slice on this rank, the
    state contains empty tensors, so that a script can edit the states of all parameters on every rank.
    """

    def __init__(self, optimizers: Sequence[Optimizer], shards: Sequence[FlatParamShard]) -> None:
        self._optimizers = optimizers
        self._slices: dict[int, ParamSlice | None] = {
            id(g.param): None for shard in shards for g in shard.gradient_slots
        }
        held = ((id(p), o) for o in optimizers for group in o.param_groups for p in group["params"])
        self._owners: dict[int, Optimizer] = dict(held)
        self._slices |= {id(p.grad_slot.param): p for shard in shards for p in shard.slices}

    def _find_state_and_key(self, param: Tensor) -> tuple[Any, Tensor] | None:
        """Find the optimizer's ``state`` and the key of a parameter in it, or None if only other ranks store it."""
        if id(param) in self._slices:
            if (param_slice := self._slices[id(param)]) is None:
                return None
            param = param_slice.value
        if id(param) not in self._owners:
            raise KeyError(param)
        return self._owners[id(param)].state, param

    def __getitem__(self, key: Tensor) -> State:
        found = self._find_state_and_key(key)
        return RemoteOptimizerStatePlaceholder(key) if found is None else found[0][found[1]]

    def __setitem__(self, key: Tensor, value: State) -> None:
        if (found := self._find_state_and_key(key)) is not None:
            found[0][found[1]] = value

    def __delitem__(self, key: Tensor) -> None:
        if (found := self._find_state_and_key(key)) is not None:
            del found[0][found[1]]

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, Tensor):
            return False
        try:
            found = self._find_state_and_key(key)
        except KeyError:
            return False
        return found is not None and found[1] in found[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (key for optimizer in self._optimizers for key in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def clear(self) -> None:
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def __repr__(self) -> str:
        return f"OptimizerStateView({dict(self)})"


class RemoteOptimizerStatePlaceholder(dict[str, Any]):
    """Placeholder with empty tensors for a parameter's optimizer state that only other ranks store."""

    def __init__(self, like_tensor: Tensor) -> None:
        self._like = like_tensor

    def __missing__(self, key: str) -> Tensor:
        return torch.empty(0, dtype=self._like.dtype, device=self._like.device)


class OptimizerStateBeforeSharding:
    """The state of an unsharded model's optimizer, which moves to the sharded parameters.

    An optimizer has a state if it was used before, or if its constructor creates one, as in Adagrad.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._kind, self._state, self._saved = type(optimizer).__name__, optimizer.state, dict(optimizer.state)
        self._shapes = {id(key): key.shape for key in self._saved if isinstance(key, Tensor)}
        moving = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
        self._has_step_on_device = {id(p) for group in moving for p in group["params"]}

    def format_lines(self) -> list[str]:
        """Describe each state tensor with a hash of its values, to compare the states of all ranks."""
        return [
            f"{self._kind} state {name!r} of parameter {number}: {tuple(x.shape)}, hash {compute_numel_and_hash(x)[1]}"
            for number, state in enumerate(self._saved.values())
            for name, x in (state.items() if isinstance(state, dict) else [("", state)])
            if isinstance(x, Tensor)
        ]

    def assign_to_sharded_params(self, find_sharded_param: Callable[[Tensor], Tensor | None]) -> None:
        """Assign this rank's shards of the state to the sharded parameters.

        Args:
            find_sharded_param: Returns the sharded parameter, or None if another pipeline stage has it.

        Raises:
            ConfigError: A state tensor cannot be sharded, or has no values.
        """
        params = {id(key): find_sharded_param(key) for key in self._saved if id(key) in self._shapes}
        shards: dict[int, tuple[ShardSpec, Any]] = {
            id(entry.param): (entry.spec, metadata.coords)
            for metadata, entries in group_params_by_metadata(p for p in params.values() if p is not None).items()
            for entry in entries
        }
        self._state.clear()
        for key, state in self._saved.items():
            param = params.get(id(key), key)
            if param is key and id(key) not in self._shapes:  # a global state
                self._state[key] = state
            elif param is not None:
                shard = partial(self._shard_value, key, param, shards.get(id(param)))
                is_dict = isinstance(state, dict)
                self._state[param] = {k: shard(k, x) for k, x in state.items()} if is_dict else shard("", state)

    def _shard_value(
        self, original: Tensor, param: Tensor, shard: tuple[ShardSpec, Any] | None, name: str, value: Any
    ) -> Any:
        """Slice the tensors of a state entry like the parameter, and move them to its device."""
        shape = self._shapes[id(original)]

        def shard_tensor(x: Tensor) -> Tensor:
            if x.is_meta and not param.is_meta:
                raise ConfigError(
                    f"{self._kind} was created from meta parameters, so its state {name!r} has no values.",
                    remedy="Pass a function that creates the optimizer: "
                    "optimizer=lambda parameters: torch.optim.Adagrad(parameters).",
                )
            if shard is not None and shard[0].is_sharded and param.shape != shape:
                if x.shape == shape:
                    x = shard[0].slice_full_tensor(x, shard[1])
                elif x.numel() != 1:
                    raise ConfigError(
                        f"The state {name!r} of {self._kind} cannot be sharded, because it has shape "
                        f"{tuple(x.shape)}, but its parameter has shape {tuple(shape)}.",
                        remedy="Pass a new optimizer, or train with data parallelism.",
                    )
            # as in Optimizer.load_state_dict, a step count moves only for a fused or capturable optimizer
            return x if name == "step" and id(original) not in self._has_step_on_device else x.to(param.device)

        return torch_compat.tree_map_only(Tensor, shard_tensor, value)


def load_state_dict_in_place(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load an optimizer state, but keep the original dictionaries in ``optimizer.param_groups``.

    torch replaces these dictionaries, so that changes by schedulers and scripts with references to the old ones would
    have no effect.
    """
    groups: list[dict[str, Any]] = optimizer.param_groups
    before = list(groups)
    token = _IS_CHECKED.set(True)
    try:
        optimizer.load_state_dict(state_dict)
    finally:
        _IS_CHECKED.reset(token)
    for old, new in zip(before, list(optimizer.param_groups), strict=True):
        if old is not new:
            _replace_dict_contents(old, new)
    groups[:] = before
    optimizer.param_groups = groups
