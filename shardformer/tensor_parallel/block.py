"""Tensor-parallel blocks, such as attention or an MLP, which communicate only at their input and output.

    x --> entry --> q, k, v (column-parallel) --> attention of the local heads --> o (row-parallel) --> exit

A ``TensorParallelBlock`` communicates at the entry and the exit. At the entry, one tensor becomes the input of all
column-parallel linear layers of the block. Its gradient is first summed over these linear layers, then over the ranks,
in one collective. At the exit, the row-parallel linear layer sums the outputs of the ranks.

The original forward pass calls its linear layers one by one, with the tensor that entered or with the input of the
block. The first such call computes the outputs of all column-parallel linear layers, and the other calls return them. A
linear layer that is called with any other tensor computes only its own output.

Some forward passes read the width of the heads from the shape of the input:

    B, N, C = x.shape                                  # on one device, C is the width of all heads
    qkv = F.linear(x, self.qkv.weight, bias)           # does not call the module of the projection
    ...
    return self.proj(x.transpose(1, 2).reshape(B, N, C))

Here C must be the width of the local heads. ``LocalWidthTensor`` reports this width as its last dim, and computes a
product with the weight of a column-parallel linear layer through the block. Transposing a ``LocalWidthTensor`` gives
another one if the last dim is the same, for forward passes on (N, B, C). All other functions see the plain tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import getattr_static
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.comm.collectives import reduce_from_tp_region, reduce_scatter_to_sp_region
from shardformer.comm.deferred_tensor import DeferredTensor
from shardformer.comm.sharded_tensor import Args, Kwargs
from shardformer.errors import ConfigError, PolicyError
from shardformer.forward_hooks import HookOrder, register_forward_hooks
from shardformer.mesh.parallel_context import Axis
from shardformer.random_state import LocalRandomState
from shardformer.tensor_parallel.linear_communication import (
    SEQUENCE,
    ColumnParallel,
    ReplicatedRegion,
    SequenceShardedRegion,
    TpRegion,
    cache_gathered_input,
    compute_column_linears,
    prepare_extra_block_input,
)
from shardformer.tensor_parallel.sequence_parallel import ActivationSharding, map_first_tensor
from shardformer.torch_compat import (
    DisableTorchFunctionSubclass,
    current_graph_task_id,
    get_autograd_function_class,
    has_data,
    tree_leaves,
)

# B batch, N sequence, C width of the heads

SHAPE: Any = getattr_static(Tensor, "shape").__get__
PERMUTING_FUNCTIONS = (Tensor.transpose, Tensor.permute, torch.transpose, torch.permute)


class LocalWidthTensor(Tensor):
    """A tensor (B, N, H) whose ``shape`` ends with the width of this rank's attention heads instead of H."""

    block: TensorParallelBlock

    @staticmethod
    def from_tensor(x: Tensor, block: TensorParallelBlock) -> LocalWidthTensor:
        if not has_data(x):
            raise ConfigError(
                "This model does not support fake tensors: the size of its attention heads depends on an input.",
                remedy="Run it with real tensors, for example with shardformer.local_ranks.threads.run_as_threads.",
            )
        entered = x.as_subclass(LocalWidthTensor)
        entered.block = block
        return entered

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            if isinstance(args[0] if args else None, LocalWidthTensor):
                if func == SHAPE or func is Tensor.size:
                    return _get_size_with_local_width(func(*args, **kwargs), args[0], *args[1:], **kwargs)
                if func is F.linear:
                    return _compute_linear_in_block(*args, **kwargs)
                if func in PERMUTING_FUNCTIONS:
                    return _wrap_if_last_dim_unchanged(func(*args, **kwargs), args[0])
            return func(*args, **kwargs)


def _get_size_with_local_width(size: torch.Size | int, x: LocalWidthTensor, dim: int | None = None) -> torch.Size | int:
    width = x.block.width
    assert width is not None
    if isinstance(size, torch.Size):
        return torch.Size((*size[:-1], width))
    return width if dim in (-1, x.dim() - 1) else size


def _wrap_if_last_dim_unchanged(y: Tensor, x: LocalWidthTensor) -> Tensor:
    keeps_last_dim = y.shape[-1] == x.shape[-1] and y.stride(-1) == x.stride(-1)
    return LocalWidthTensor.from_tensor(y, x.block) if keeps_last_dim else y


def _compute_linear_in_block(x: LocalWidthTensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.block.compute_output_by_weight(weight, x)
    if y is None:
        return F.linear(x, weight, bias)
    return y if bias is None else y + bias


# B batch, S sequence, H hidden, F features of a linear layer; lower case: local (s = S / tensor, f = F / tensor)


@dataclass(eq=False)
class TensorParallelBlock:
    """Coordinates the linear layers of one tensor-parallel block, such as attention or an MLP."""

    stream: ActivationSharding
    random: bool = False  # whether the model draws random numbers in training: inside the block, each rank its own
    width: int | None = None  # the width of the local heads, if the forward pass reads it from the shape of the input
    columns: list[ColumnParallel] = field(default_factory=list)
    is_flat: bool = False  # whether the last input was (B*s, H); the exit then flattens the output
    has_adapters: bool = False  # whether other modules than the columns read the block's input (``get_shared_input``)
    _region: TpRegion | None = None
    _source: Tensor | None = None
    _entered: Tensor | None = None
    _joined: Tensor | None = None
    _pending: DeferredTensor | None = None
    _outputs: dict[int, Tensor] = field(default_factory=dict)
    _node: Any = None
    _is_watched: bool = False
    _entry: str = "module"

    def __post_init__(self) -> None:
        self.axis = self.stream.axis
        self._random = LocalRandomState(self.axis.rank, enabled=self.random)

    @property
    def is_open(self) -> bool:
        """Whether the forward pass is currently inside this block."""
        return self._source is not None

    @property
    def region(self) -> TpRegion:
        """Collectives that the block uses in this forward pass. A ``ReplicatedRegion`` if it has no input."""
        return self._region or ReplicatedRegion(self.axis)

    def enter(self, x: Tensor, training: bool) -> Tensor:
        """Convert this rank's activations x into the full input (B, S, H) of the block. Communicates as ``region``."""
        if torch.compiler.is_compiling():
            return self._enter_compiled(x, training)
        self._outputs, self._joined = {}, None
        if isinstance(x, DeferredTensor):
            x = x.full_tensor()
        self._region = region = self.stream.select_tp_region(x)
        self.is_flat = isinstance(region, SequenceShardedRegion) and x.dim() == 2
        if self.is_flat:
            x = self.stream.unflatten_tokens(x)
        if isinstance(region, SequenceShardedRegion):
            self.stream.check_local_sequence_length(x)
        self._source = x
        entered = region.enter(x)
        self._pending = entered if isinstance(entered, DeferredTensor) else None
        self._node = entered if self._is_watched else None
        if self.width is not None:
            entered = LocalWidthTensor.from_tensor(
                entered if self._pending is None else self._pending.full_tensor(), self
            )
        self._entered = entered
        if training:
            self._random.enter_local_state(x)
        return entered

    def _enter_compiled(self, x: Tensor, training: bool) -> Tensor:
        """Return the full input of a tensor-parallel block that is compiled with torch.compile.

        Each linear layer of the block computes its own output. The compiler sums their gradients before the collective
        of the backward pass, as in ``compute_column_output``.
        """
        self._region = region = self.stream.select_tp_region(x)
        self.is_flat = isinstance(region, SequenceShardedRegion) and x.dim() == 2
        self._source = x = self.stream.unflatten_tokens(x) if self.is_flat else x
        entered = region.get_full_block_input(x)
        if self.width is not None:
            entered = LocalWidthTensor.from_tensor(entered, self)
        self._entered = entered
        if training:
            self._random.enter_local_state(x)
        return entered

    def _get_full_input(self, x: Tensor) -> Tensor:
        """Return the full input of the block if x is this rank's input, and otherwise x."""
        return self._entered if x is self._source and self._entered is not None else x

    def register_entry(self, module: nn.Module, *, contains_exit_layer: bool = False) -> None:
        """Make the first tensor argument of ``module`` the input of the block."""
        self._entry = type(module).__name__
        self._is_watched = contains_exit_layer
        after = self.check_no_residual if contains_exit_layer else None
        register_forward_hooks(module, HookOrder.BLOCK, self._enter_block_hook, after, with_kwargs=True)

    def _enter_block_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return map_first_tensor(args, kwargs, lambda x: self.enter(x, module.training))

    def compute_column_output(self, column: ColumnParallel, x: Tensor) -> Tensor:
        """Return the output (B, S, f) of a column-parallel linear layer in this block for the input x.

        Raises PolicyError if the entry module was not called, because its input gradient would not be summed.
        """
        if torch.compiler.is_compiling():
            return column.multiply(self._get_full_input(x))
        if self._source is None and current_graph_task_id() < 0:  # a recomputation may begin inside
            self._check_entry_was_called(column)
        if self._source is None or (x is not self._entered and x is not self._source):
            return column.multiply(x)
        if self.has_adapters:
            return column.multiply(self.get_shared_input(x))
        if id(column) not in self._outputs:
            if x is self._entered and all(c is not column for c in self.columns):
                return column.multiply(x)  # a linear layer that also reads other states, which enter separately
            pending = self._pending
            gathered_x = pending.computed_value if pending is not None and pending.is_pending else None
            full_x, outputs = self._compute_all_column_outputs(gathered_x)
            if pending is not None and full_x is not None:
                cache_gathered_input(pending, full_x)
            self._outputs = {id(c): y for c, y in zip(self.columns, outputs, strict=True)}
        return self._outputs.pop(id(column))

    def get_shared_input(self, x: Tensor) -> Tensor:
        """Return the input (B, S, H) that the column-parallel layers of the block and their adapters share.

        Autograd adds their input gradients before the entry sums them over the ranks, in one collective. Returns any
        other tensor unchanged.
        """
        if self._source is None or (x is not self._entered and x is not self._source):
            return x
        if self._joined is None:
            entered = self._entered if self._pending is None else self._pending.full_tensor()
            assert entered is not None
            self._joined = entered.as_subclass(Tensor) if isinstance(entered, LocalWidthTensor) else entered
        return self._joined

    def _compute_all_column_outputs(self, gathered_x: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
        assert self._source is not None
        return compute_column_linears(self._source, self.region, self.columns, gathered_x)

    def _check_entry_was_called(self, column: ColumnParallel) -> None:
        if any(c is column for c in self.columns):
            raise PolicyError(
                f"The model replaced its {self._entry} after it was sharded.",
                remedy="Replace the module before you shard the model. For BigBird, which replaces its attention for "
                "short sequences, set attention_type in the config or pass longer sequences.",
            )

    def compute_output_by_weight(self, weight: Tensor, x: Tensor) -> Tensor | None:
        """Return the output of the column-parallel layer that owns ``weight``, or None if no layer owns it."""
        column = next((c for c in self.columns if c.weight is weight and c.bias is None), None)
        return None if column is None else self.compute_column_output(column, x)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelBlock:
        """Copy the block without the activations that it currently stores."""
        memo[id(self)] = copy = type(self)(deepcopy(self.stream, memo), self.random, self.width, is_flat=self.is_flat)
        copy.has_adapters = self.has_adapters
        copy.columns = deepcopy(self.columns, memo)
        return copy

    def check_no_residual(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Raise PolicyError if ``module`` adds its input to its output, as a residual connection does.

        This check runs after the first forward pass with gradients, if the entry module contains the exit. Every rank
        would have the full gradient of the residual, and the entry would sum it over the ranks.
        """
        if torch.compiler.is_compiling():
            return
        out = next((x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()), None)
        entered, self._node = self._node, None
        if entered is None or entered.grad_fn is None or out is None or out.grad_fn is None:
            return
        self._is_watched = False
        reached, seen = [out.grad_fn], set()
        while reached:
            node: Any = reached.pop()
            if node is None or node in seen or getattr(get_autograd_function_class(node), "leaves_block", False):
                continue
            if node is entered.grad_fn or (isinstance(entered, DeferredTensor) and entered.is_computed_by(node)):
                raise PolicyError(
                    f"The residual connection in {type(module).__name__} must be outside its tensor-parallel block.",
                    remedy="In the policy, set the entry to the first projection: inputs=AttentionInputs(entry=...).",
                )
            seen.add(node)
            reached += [following for following, _ in node.next_functions]

    def use_shared_random_state(self) -> AbstractContextManager[None]:
        """Return a context with the random state from before the block. Ranks with the same activations share it."""
        return self._random.use_outer_state()

    def keep_random_state_in_graph(self) -> None:
        """Include the switch to the block's random state in the graph of a compiled layer."""
        self._random.is_in_graph = self._random.is_enabled

    def close(self, training: bool) -> None:
        """Clear the activations that the block stores, at its end or after an exception."""
        self._source = self._entered = self._joined = self._pending = self._region = None
        self._outputs = {}
        if training:
            self._random.leave_local_state()

    def reset_after_error(self) -> None:
        self.close(training=True)


HeadRange = tuple[int, int, int]  # number of heads, first local head, end of the local heads


def register_argument_hook(
    module: nn.Module, argument_name: str, transform: Callable[[Tensor], Tensor], order: HookOrder
) -> None:
    """Apply ``transform`` to the tensor argument ``argument_name`` of ``module`` before each forward pass.

    Raises PolicyError if the forward pass has no such argument.
    """
    names = list(inspect.signature(module.forward).parameters)
    if argument_name not in names and "kwargs" not in names:
        known = ", ".join(names)
        raise PolicyError(
            f"{type(module).__name__}.forward has no argument {argument_name!r}, which the policy names.",
            remedy=f"In the policy, use one of the arguments {known}.",
        )
    position = names.index(argument_name) if argument_name in names else len(names)

    def change_inputs(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(kwargs.get(argument_name), Tensor):
            return args, {**kwargs, argument_name: transform(kwargs[argument_name])}
        if len(args) > position and isinstance(args[position], Tensor):
            return (*args[:position], transform(args[position]), *args[position + 1 :]), kwargs
        return args, kwargs

    register_forward_hooks(module, order, change_inputs, with_kwargs=True)


def select_local_heads(x: Tensor, dim: int, bounds: HeadRange, axis: Axis) -> Tensor:
    """Return this rank's attention heads from a tensor that contains all heads along ``dim``.

    The dim may combine samples and heads. Backward, if x requires a gradient: one all-reduce of x.
    """
    heads, start, end = bounds
    if x.shape[dim] % heads:
        return x  # shared by all heads
    entered = prepare_extra_block_input(x, axis) if x.requires_grad else x
    by_head: Tensor = entered.unflatten(dim, (-1, heads))
    return by_head.narrow(dim + 1, start, end - start).flatten(dim, dim + 1)


def wrap_as_tensor_parallel_block(
    module: nn.Module, activation_sharding: ActivationSharding, replicated_terms: Sequence[str] = ()
) -> None:
    """Make ``module`` a tensor-parallel block whose output is summed over the ranks.

    If the sequence is sharded, the block gathers the inputs that have one row per token, and returns the sums for the
    tokens of this rank. Modules before this one, such as a router, see only the tokens of this rank.

    Communicates: forward one all-reduce of the output, backward one of each input that requires a gradient. If the
    sequence is sharded: forward one all-gather of each input and one reduce-scatter of the output, backward the
    reverse.

    Args:
        replicated_terms: replicated terms that the module adds to its output: parameters (the bias of the experts) and
            submodules (an identity expert). Each rank adds 1 / axis.size of them, so that the output and the gradients
            summed over the ranks are correct.
    """
    axis = activation_sharding.axis
    own_params = [name for name in replicated_terms if name in module._parameters]

    def enter_input(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        tokens = activation_sharding.view_as_local_tokens(x)
        if tokens is not None:
            full = activation_sharding.gather_tokens(tokens)
            return full.view(-1, *x.shape[1:]) if x.dim() == tokens.dim() - 1 else full
        return prepare_extra_block_input(x, axis) if x.is_floating_point() and x.requires_grad else x

    def reduce_output(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if not activation_sharding.is_sharded:
            return reduce_from_tp_region(output, axis)
        by_sample = output if output.dim() == 3 else output.view(-1, activation_sharding.full, *output.shape[1:])
        local = reduce_scatter_to_sp_region(by_sample, axis, SEQUENCE)
        return local if output.dim() == 3 else local.reshape(-1, *output.shape[1:])

    def enter_all_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return tuple(enter_input(x) for x in args), {name: enter_input(x) for name, x in kwargs.items()}

    def scale_params(module: nn.Module, args: tuple[Any, ...]) -> None:
        # Python finds an entry of vars(module) before nn.Module looks up the parameter
        vars(module).update({name: module.get_parameter(name) / axis.size for name in own_params})

    def restore_params(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for name in own_params:
            vars(module).pop(name, None)

    def scale_output(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output / axis.size

    register_forward_hooks(module, HookOrder.BLOCK, enter_all_inputs, reduce_output, with_kwargs=True)
    if own_params:
        register_forward_hooks(module, HookOrder.BLOCK_PARAMETERS, scale_params, restore_params, always_call=True)
    for name in set(replicated_terms) - set(own_params):
        register_forward_hooks(module.get_submodule(name), HookOrder.BLOCK, after=scale_output)
