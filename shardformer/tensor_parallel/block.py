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

Here C must be the width of the local heads. ``LocalHeadWidthTensor`` reports this width as its last dim, and computes a
product with the weight of a column-parallel linear layer through the block. Transposing a ``LocalHeadWidthTensor``
gives another one if the last dim is the same, for forward passes on (N, B, C). All other functions see the plain
tensor.
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
from shardformer.comm.sharded_tensor import Args, Kwargs, TorchFunction
from shardformer.errors import ConfigError, PolicyError
from shardformer.forward_hooks import ForwardArgs, HookOrder, register_forward_hooks
from shardformer.mesh.parallel_context import Axis
from shardformer.random_state import LocalRNGState
from shardformer.tensor_parallel.linear_communication import (
    SEQUENCE,
    ColumnParallelLinear,
    ReplicatedInputRegion,
    SequenceShardedRegion,
    TpRegion,
    cache_full_input,
    compute_column_linears,
    prepare_extra_block_input,
)
from shardformer.tensor_parallel.sequence_parallel import ActivationSharding, map_first_tensor_arg
from shardformer.torch_compat import (
    DisableTorchFunctionSubclass,
    current_graph_task_id,
    get_autograd_function_class,
    has_real_data,
    tree_leaves,
)

# B batch, N sequence, C width of the heads

SHAPE: Any = getattr_static(Tensor, "shape").__get__
PERMUTING_FUNCTIONS = (Tensor.transpose, Tensor.permute, torch.transpose, torch.permute)


class LocalHeadWidthTensor(Tensor):
    """Block input whose last dim in ``shape`` is the width of this rank's attention heads, not the hidden size."""

    block: TensorParallelBlock

    @staticmethod
    def from_tensor(tensor: Tensor, block: TensorParallelBlock) -> LocalHeadWidthTensor:
        if not has_real_data(tensor):
            raise ConfigError(
                "This model does not support fake tensors, because its attention reads the head size from an input.",
                remedy="Use real tensors, for example with shardformer.local_ranks.threads.run_as_threads.",
            )
        entered = tensor.as_subclass(LocalHeadWidthTensor)
        entered.block = block
        return entered

    @classmethod
    def __torch_function__(cls, func: TorchFunction, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            if isinstance(args[0] if args else None, LocalHeadWidthTensor):
                if func == SHAPE or func is Tensor.size:
                    return _get_size_with_local_width(func(*args, **kwargs), args[0], *args[1:], **kwargs)
                if func is F.linear:
                    return _compute_linear_in_block(*args, **kwargs)
                if func in PERMUTING_FUNCTIONS:
                    return _wrap_if_last_dim_unchanged(func(*args, **kwargs), args[0])
            return func(*args, **kwargs)


def _get_size_with_local_width(
    size: torch.Size | int, tensor: LocalHeadWidthTensor, dim: int | None = None
) -> torch.Size | int:
    width = tensor.block.local_head_width
    assert width is not None
    if isinstance(size, torch.Size):
        return torch.Size((*size[:-1], width))
    return width if dim in (-1, tensor.dim() - 1) else size


def _wrap_if_last_dim_unchanged(view: Tensor, source_tensor: LocalHeadWidthTensor) -> Tensor:
    keeps_last_dim = view.shape[-1] == source_tensor.shape[-1] and view.stride(-1) == source_tensor.stride(-1)
    return LocalHeadWidthTensor.from_tensor(view, source_tensor.block) if keeps_last_dim else view


def _compute_linear_in_block(hidden_states: LocalHeadWidthTensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = hidden_states.block.compute_column_output_by_weight(weight, hidden_states)
    if y is None:
        return F.linear(hidden_states, weight, bias)
    return y if bias is None else y + bias


# B batch, S sequence, H hidden, F features of a linear layer; lower case: local (s = S / tensor, f = F / tensor)


@dataclass(eq=False)
class TensorParallelBlock:
    """Coordinates the linear layers of one tensor-parallel block, such as attention or an MLP."""

    stream: ActivationSharding
    has_random_ops: bool = (
        False  # whether the model draws random numbers in training: inside the block, each rank its own
    )
    local_head_width: int | None = (
        None  # the width of the local heads, if the forward pass reads it from the shape of the input
    )
    columns: list[ColumnParallelLinear] = field(default_factory=list)
    is_flat: bool = False  # whether the last input was (B*s, H); the exit then flattens the output
    has_adapters: bool = False  # whether other modules than the columns read the block's input (``get_shared_input``)
    _region: TpRegion | None = None
    _local_input: Tensor | None = None
    _block_input: Tensor | None = None
    _shared_input: Tensor | None = None
    _deferred_input: DeferredTensor | None = None
    _outputs: dict[int, Tensor] = field(default_factory=dict)
    _node: Any = None
    _is_watched: bool = False
    _entry_class_name: str = "module"

    def __post_init__(self) -> None:
        self.axis = self.stream.axis
        self._random = LocalRNGState(self.axis.rank, enabled=self.has_random_ops)

    @property
    def is_open(self) -> bool:
        """Whether the forward pass is currently inside this block."""
        return self._local_input is not None

    @property
    def region(self) -> TpRegion:
        """Collectives of this block in the current forward pass. A ``ReplicatedInputRegion`` if it has no input."""
        return self._region or ReplicatedInputRegion(self.axis)

    def enter_block(self, hidden_states: Tensor, training: bool) -> Tensor:
        """Convert this rank's activations into the full input of the block. Communicates as ``region``."""
        if torch.compiler.is_compiling():
            return self._enter_compiled_block(hidden_states, training)
        self._outputs, self._shared_input = {}, None
        if isinstance(hidden_states, DeferredTensor):
            hidden_states = hidden_states.full_tensor()
        self._region = region = self.stream.select_tp_region(hidden_states)
        self.is_flat = isinstance(region, SequenceShardedRegion) and hidden_states.dim() == 2
        if self.is_flat:
            hidden_states = self.stream.unflatten_tokens(hidden_states)
        if isinstance(region, SequenceShardedRegion):
            self.stream.check_local_sequence_length(hidden_states)
        self._local_input = hidden_states
        entered = region.enter(hidden_states)
        self._deferred_input = entered if isinstance(entered, DeferredTensor) else None
        self._node = entered if self._is_watched else None
        if self.local_head_width is not None:
            entered = LocalHeadWidthTensor.from_tensor(
                entered if self._deferred_input is None else self._deferred_input.full_tensor(), self
            )
        self._block_input = entered
        if training:
            self._random.enter_local_rng_state(hidden_states)
        return entered

    def _enter_compiled_block(self, hidden_states: Tensor, training: bool) -> Tensor:
        """Compute the full input of a tensor-parallel block that is compiled with torch.compile.

        Each linear layer of the block computes its own output. The compiler sums their gradients before the collective
        of the backward pass, as in ``compute_column_output``.
        """
        self._region = region = self.stream.select_tp_region(hidden_states)
        self.is_flat = isinstance(region, SequenceShardedRegion) and hidden_states.dim() == 2
        self._local_input = hidden_states = (
            self.stream.unflatten_tokens(hidden_states) if self.is_flat else hidden_states
        )
        entered = region.get_full_block_input(hidden_states)
        if self.local_head_width is not None:
            entered = LocalHeadWidthTensor.from_tensor(entered, self)
        self._block_input = entered
        if training:
            self._random.enter_local_rng_state(hidden_states)
        return entered

    def _get_full_input(self, hidden_states: Tensor) -> Tensor:
        """Return the full block input if ``hidden_states`` is this rank's shard of it, otherwise ``hidden_states``."""
        return (
            self._block_input if hidden_states is self._local_input and self._block_input is not None else hidden_states
        )

    def register_entry_hooks(self, entry_module: nn.Module, *, contains_row_linear: bool = False) -> None:
        """Register hooks that make the first tensor argument of ``entry_module`` the input of the block."""
        self._entry_class_name = type(entry_module).__name__
        self._is_watched = contains_row_linear
        after = self.residual_check_forward_hook if contains_row_linear else None
        register_forward_hooks(entry_module, HookOrder.BLOCK, self._entry_forward_pre_hook, after, with_kwargs=True)

    def _entry_forward_pre_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardArgs:
        return map_first_tensor_arg(args, kwargs, lambda x: self.enter_block(x, module.training))

    def compute_column_output(self, column_linear: ColumnParallelLinear, hidden_states: Tensor) -> Tensor:
        """Compute the output (B, S, f) of one of the block's column-parallel linear layers.

        Raises PolicyError if the entry module was not called, because its input gradient would not be summed.
        """
        if torch.compiler.is_compiling():
            return column_linear.multiply(self._get_full_input(hidden_states))
        if self._local_input is None and current_graph_task_id() < 0:  # a recomputation may begin inside
            self._check_entry_module_was_called(column_linear)
        if self._local_input is None or (
            hidden_states is not self._block_input and hidden_states is not self._local_input
        ):
            return column_linear.multiply(hidden_states)
        if self.has_adapters:
            return column_linear.multiply(self.get_shared_input(hidden_states))
        if id(column_linear) not in self._outputs:
            if hidden_states is self._block_input and all(c is not column_linear for c in self.columns):
                return column_linear.multiply(
                    hidden_states
                )  # a linear layer that also reads other states, which enter separately
            pending = self._deferred_input
            gathered_x = pending.cached_full_tensor if pending is not None and pending.is_pending else None
            full_x, outputs = self._compute_all_column_outputs(gathered_x)
            if pending is not None and full_x is not None:
                cache_full_input(pending, full_x)
            self._outputs = {id(c): y for c, y in zip(self.columns, outputs, strict=True)}
        return self._outputs.pop(id(column_linear))

    def get_shared_input(self, hidden_states: Tensor) -> Tensor:
        """Return the block input (B, S, H), which the column-parallel layers and their PEFT adapters share.

        Autograd adds their input gradients before the entry sums them over the ranks, in one collective. Returns any
        other tensor unchanged.
        """
        if self._local_input is None or (
            hidden_states is not self._block_input and hidden_states is not self._local_input
        ):
            return hidden_states
        if self._shared_input is None:
            entered = self._block_input if self._deferred_input is None else self._deferred_input.full_tensor()
            assert entered is not None
            self._shared_input = entered.as_subclass(Tensor) if isinstance(entered, LocalHeadWidthTensor) else entered
        return self._shared_input

    def _compute_all_column_outputs(self, gathered_input: Tensor | None) -> tuple[Tensor | None, list[Tensor]]:
        assert self._local_input is not None
        return compute_column_linears(self._local_input, self.region, self.columns, gathered_input)

    def _check_entry_module_was_called(self, column_linear: ColumnParallelLinear) -> None:
        if any(c is column_linear for c in self.columns):
            raise PolicyError(
                f"The {self._entry_class_name} of the model was replaced after sharding, so its input gradients would "
                "be wrong.",
                remedy="Replace the module before you shard the model. For BigBird, which replaces its attention for "
                "short sequences, set attention_type in the config or pass longer sequences.",
            )

    def compute_column_output_by_weight(self, weight: Tensor, hidden_states: Tensor) -> Tensor | None:
        """Compute the output of the column-parallel layer that owns ``weight``, or return None if no layer owns it."""
        column = next((c for c in self.columns if c.weight is weight and c.bias is None), None)
        return None if column is None else self.compute_column_output(column, hidden_states)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelBlock:
        """Copy the block without the activations that it currently stores."""
        memo[id(self)] = copy = type(self)(
            deepcopy(self.stream, memo), self.has_random_ops, self.local_head_width, is_flat=self.is_flat
        )
        copy.has_adapters = self.has_adapters
        copy.columns = deepcopy(self.columns, memo)
        return copy

    def residual_check_forward_hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
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
            if node is entered.grad_fn or (isinstance(entered, DeferredTensor) and entered.is_output_of_node(node)):
                raise PolicyError(
                    f"{type(module).__name__} contains a residual connection, which must be outside the sharded "
                    "layers.",
                    remedy="In the policy, let the sharded layers start at the first projection: "
                    "inputs=AttentionInputs(entry=...).",
                )
            seen.add(node)
            reached += [following for following, _ in node.next_functions]

    def use_shared_random_state(self) -> AbstractContextManager[None]:
        """Temporarily restore the random state from before the block. Ranks with the same activations share it."""
        return self._random.use_outer_rng_state()

    def include_rng_switch_in_graph(self) -> None:
        """Capture the switch to the block's random state in the graph of a compiled layer."""
        self._random.is_in_graph = self._random.is_enabled

    def exit_block(self, training: bool) -> None:
        """Clear the activations that the block stores, at its end or after an exception."""
        self._local_input = self._block_input = self._shared_input = self._deferred_input = self._region = None
        self._outputs = {}
        if training:
            self._random.exit_local_rng_state()

    def reset_after_error(self) -> None:
        self.exit_block(training=True)


HeadRange = tuple[int, int, int]  # number of heads, first local head, end of the local heads


def register_argument_pre_hook(
    module: nn.Module, argument_name: str, transform_fn: Callable[[Tensor], Tensor], hook_order: HookOrder
) -> None:
    """Apply ``transform_fn`` to the tensor argument ``argument_name`` of ``module`` before each forward pass.

    Raises PolicyError if the forward pass has no such argument.
    """
    names = list(inspect.signature(module.forward).parameters)
    if argument_name not in names and "kwargs" not in names:
        known = ", ".join(names)
        raise PolicyError(
            f"The policy refers to the argument {argument_name!r} of {type(module).__name__}.forward, which does not "
            "exist.",
            remedy=f"Use an existing argument in the policy: {known}.",
        )
    position = names.index(argument_name) if argument_name in names else len(names)

    def argument_forward_pre_hook(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(kwargs.get(argument_name), Tensor):
            return args, {**kwargs, argument_name: transform_fn(kwargs[argument_name])}
        if len(args) > position and isinstance(args[position], Tensor):
            return (*args[:position], transform_fn(args[position]), *args[position + 1 :]), kwargs
        return args, kwargs

    register_forward_hooks(module, hook_order, argument_forward_pre_hook, with_kwargs=True)


def select_local_heads(tensor: Tensor, dim: int, bounds: HeadRange, axis: Axis) -> Tensor:
    """Select this rank's attention heads from a tensor that contains all heads along ``dim``.

    The dim may combine samples and heads. Backward, if ``tensor`` requires a gradient: one all-reduce of ``tensor``.
    """
    heads, start, end = bounds
    if tensor.shape[dim] % heads:
        return tensor  # shared by all heads
    entered = prepare_extra_block_input(tensor, axis) if tensor.requires_grad else tensor
    by_head: Tensor = entered.unflatten(dim, (-1, heads))
    return by_head.narrow(dim + 1, start, end - start).flatten(dim, dim + 1)


def register_block_hooks(
    module: nn.Module, activation_sharding: ActivationSharding, replicated_output_terms: Sequence[str] = ()
) -> None:
    """Make ``module`` a tensor-parallel block whose output is summed over the ranks.

    If the sequence is sharded, the block gathers the inputs that have one row per token, and returns the sums for the
    tokens of this rank. Modules before this one, such as a router, see only the tokens of this rank.

    Communicates: forward one all-reduce of the output, backward one of each input that requires a gradient. If the
    sequence is sharded: forward one all-gather of each input and one reduce-scatter of the output, backward the
    reverse.

    Args:
        replicated_output_terms: replicated terms that the module adds to its output: parameters (the bias of the
            experts) and submodules (an identity expert). Each rank adds 1 / axis.size of them, so that the output and
            the gradients summed over the ranks are correct.
    """
    axis = activation_sharding.axis
    own_params = [name for name in replicated_output_terms if name in module._parameters]

    def prepare_input(arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        tokens = activation_sharding.view_as_local_tokens(arg)
        if tokens is not None:
            full = activation_sharding.all_gather_tokens(tokens)
            return full.view(-1, *arg.shape[1:]) if arg.dim() == tokens.dim() - 1 else full
        return prepare_extra_block_input(arg, axis) if arg.is_floating_point() and arg.requires_grad else arg

    def reduce_output_hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if not activation_sharding.is_sharded:
            return reduce_from_tp_region(output, axis)
        by_sample = output if output.dim() == 3 else output.view(-1, activation_sharding.full, *output.shape[1:])
        local = reduce_scatter_to_sp_region(by_sample, axis, SEQUENCE)
        return local if output.dim() == 3 else local.reshape(-1, *output.shape[1:])

    def prepare_inputs_pre_hook(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ForwardArgs:
        return tuple(prepare_input(x) for x in args), {name: prepare_input(x) for name, x in kwargs.items()}

    def scale_params_pre_hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        # Python finds an entry of vars(module) before nn.Module looks up the parameter
        vars(module).update({name: module.get_parameter(name) / axis.size for name in own_params})

    def restore_params_hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for name in own_params:
            vars(module).pop(name, None)

    def scale_output_hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output / axis.size

    register_forward_hooks(module, HookOrder.BLOCK, prepare_inputs_pre_hook, reduce_output_hook, with_kwargs=True)
    if own_params:
        register_forward_hooks(
            module, HookOrder.BLOCK_PARAMETERS, scale_params_pre_hook, restore_params_hook, always_call=True
        )
    for name in set(replicated_output_terms) - set(own_params):
        register_forward_hooks(module.get_submodule(name), HookOrder.BLOCK, forward_hook=scale_output_hook)
