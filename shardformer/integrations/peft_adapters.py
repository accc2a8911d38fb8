"""Shard PEFT adapters on parallel linear layers.

An adapter follows the linear layer that it belongs to, its ``base_layer``. Its forward pass runs on local tensors,
between the entry and the exit of that linear layer:

    x --> base.prepare_adapter_input --> PEFT's forward of the adapter, which calls base (local product)
      --> base.finalize_adapter_output

    base               in features                             out features
    column-parallel    replicated (A): gradients are summed    sharded like the output of base (B)
    row-parallel       sharded like the input of base (A)      replicated (B): gradients are summed

Every adapter whose output is linear in the output features is therefore exact, and no collective is added. The adapter
of a column-parallel layer shares the entry of the block. That of a row-parallel layer adds to the local output before
it is reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.comm.collectives import all_reduce, copy_to_tp_region, scatter_to_parallel_region
from shardformer.context_parallel.sequence_layout import ContextParallelState, IndexShards
from shardformer.errors import ConfigError
from shardformer.layout.packed_weights import add_mixin_classes
from shardformer.layout.shard_spec import Split
from shardformer.mesh.parallel_context import Axis
from shardformer.tensor_parallel.grid_layers import GridParallelModule
from shardformer.tensor_parallel.layers import (
    Embedding1D,
    Linear1D_Col,
    Linear1D_Row,
    VocabParallelEmbedding1D,
)
from shardformer.tensor_parallel.parallel_module import ParallelModule, shard_parameter
from shardformer.torch_compat import current_graph_task_id

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer

ParallelLinear = Linear1D_Col | Linear1D_Row
EMBEDDINGS = (VocabParallelEmbedding1D, Embedding1D)

FEATURE_DIMS: Mapping[str, tuple[str, int]] = {
    "lora_A": ("in", 1),
    "lora_B": ("out", 0),
    "lora_magnitude_vector": ("out", 0),
    "vera_lambda_b": ("out", 0),
}
"""Attribute of an adapter -> the features of the base that a dim of its parameters counts, and that dim."""
REPLICATED = ("lora_E", "ranknum", "vera_lambda_d")
"""Attributes whose parameters count no features."""
FULL_DELTA = ("hada_", "lokr_")
"""Prefixes of parameters from which an adapter computes a weight; each rank then selects its slice of the weight."""


class AdapterDropout(nn.Module):
    """A dropout layer for sharded inputs that draws the same mask as dropout in a single process.

    Every rank draws the mask of all features and positions from the shared random state and selects its own.
    Communicates nothing.

    Args:
        split: the features of each rank, or None if each rank has all features.
        axis: the axis of the split.
        context_parallel_state: the state of context parallelism, or None if each rank has all positions.
    """

    def __init__(
        self, p: float, split: Split | None, axis: Axis, context_parallel_state: ContextParallelState | None
    ) -> None:
        super().__init__()
        self.p, self.split, self.axis, self.sequence = p, split, axis, context_parallel_state

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        positions = self._get_sequence_index_shards(x)
        shape = [*x.shape[:-1], x.shape[-1] if self.split is None else self.split.full]
        if positions is not None:
            shape[1] = positions.full
        mask = F.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), self.p)
        if positions is not None:
            mask = positions.slice_local(mask, 1)
        if self.split is not None:
            mask = mask.index_select(-1, self.split.indices(self.axis.rank).to(x.device))
        return x * mask

    def _get_sequence_index_shards(self, hidden_states: Tensor) -> IndexShards | None:
        state = self.sequence
        if state is None or hidden_states.dim() < 3:
            return None
        if state.current is None:  # between the layers, unless activation checkpointing recomputes a layer
            found = state.find_layout_by_local_length(hidden_states.shape[1]) if current_graph_task_id() >= 0 else None
            return None if found is None else state.get_index_shards(found.length)
        seen = [state.current, *state.seen_in_forward.values()]
        lengths = [each.length for each in seen if state.get_local_length(each.length) == hidden_states.shape[1]]
        return state.get_index_shards(lengths[0]) if lengths else None

    def extra_repr(self) -> str:
        return f"p={self.p}"


def has_full_gradients_on_every_rank(tuner_layer: nn.Module) -> bool:
    """Return whether every rank has the complete gradients of an adapter after the backward pass."""
    return isinstance(tuner_layer, _FullAdapterParametersMixin)


class _ParallelLayerAdapterMixin:
    """A mixin that runs an adapter between the input and the output communication of its parallel layer."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        base: ParallelLinear = self.get_base_layer()
        x = base.prepare_adapter_input(x)
        with _prepare_base_layer_for_adapter(base, self.training):
            y = super().forward(x, *args, **kwargs)  # type: ignore[misc]  # of the adapter's class
        return base.finalize_adapter_output(y)


@contextmanager
def _prepare_base_layer_for_adapter(base_layer: ParallelLinear, training: bool) -> Iterator[None]:
    """Temporarily hide a bias that the base layer adds later, and use the same random state on all ranks."""
    with ExitStack() as stack:
        if training and base_layer.block is not None:
            stack.enter_context(base_layer.block.use_shared_random_state())
        if base_layer.bias is None or not _is_bias_added_after_adapter(base_layer):
            yield
            return
        bias = base_layer._parameters["bias"]
        base_layer._parameters["bias"] = None
        try:
            yield
        finally:
            base_layer._parameters["bias"] = bias


def _is_bias_added_after_adapter(base_layer: ParallelLinear) -> bool:
    return isinstance(base_layer, Linear1D_Row) or base_layer.fused_bias is None


class _FullDeltaWeightMixin:
    """A mixin for adapters that compute the full weight update on every rank, such as LoHa and LoKr.

    Their parameters are replicated. Each rank uses its slice of the update.
    """

    def get_delta_weight(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        base: Any = type(self).get_base_layer(self)
        spec, coords = base.shard_specs["weight"], base.coords
        full_base = SimpleNamespace(weight=torch.empty(spec.shape, device="meta", dtype=base.weight.dtype))
        self.__dict__["get_base_layer"] = lambda: full_base  # its class reshapes to the shape of the base's weight
        try:
            full: Tensor = super().get_delta_weight(*args, **kwargs)  # type: ignore[misc]
        finally:
            del self.__dict__["get_base_layer"]
        for dim in spec.splits:
            indices = [torch.arange(a, b) for a, b in spec.get_local_slices(dim, coords)]
            full = full.index_select(dim, torch.cat(indices).to(full.device))
        return full


class _FullAdapterParametersMixin:
    """A mixin for adapters that need the full values and gradients of their parameters on every rank (AdaLoRA).

    The parameters stay replicated. Forward: this rank selects its features. Backward: one all-gather or all-reduce of
    each parameter, so that every rank has the complete gradients.
    """

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        base: ParallelLinear = self.get_base_layer()
        kind = "in" if isinstance(base, Linear1D_Row) else "out"
        tables = ("lora_A", "lora_B", "lora_E", "ranknum")
        for name in tables:
            counted, dim = _get_feature_kind_and_dim(self, name)
            local = {
                key: _select_local_features(p, dim, base) if counted == kind else copy_to_tp_region(p, base.axis)
                for key, p in self._modules[name].items()
            }
            self.__dict__[name] = local  # a plain dict, which Python finds before the registered one
        try:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        finally:
            for name in tables:
                del self.__dict__[name]


def _select_local_features(param: Tensor, dim: int, base_layer: ParallelLinear) -> Tensor:
    if base_layer.split.stores_each_index_once:
        return scatter_to_parallel_region(param, base_layer.axis, dim, base_layer.split)
    return copy_to_tp_region(param, base_layer.axis).index_select(
        dim, base_layer.split.indices(base_layer.axis.rank).to(param.device)
    )


class _DistributedDoraNormMixin:
    """A mixin that computes DoRA's weight norms across the ranks of a row-parallel layer.

    Communicates: one all-reduce of the number of output features.
    """

    axis: Axis

    def get_weight_norm(
        self: Any, weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None
    ) -> Tensor:
        weight = weight.t() if self.fan_in_fan_out else weight
        with torch.no_grad():
            local = torch.linalg.norm(weight + scaling * lora_weight, dim=1)
            squares = all_reduce(local.square(), self.axis, purpose="adapter")
        return squares.sqrt().to(weight.dtype)


class _CompilableDoraMixin:
    """A mixin that lets torch.compile trace how PEFT's DoRA layer reads the weight of its base layer."""

    def forward(self: Any, x: Tensor, *, base_layer: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() and type(base_layer.weight) is nn.Parameter:
            base_layer = _DequantizableBaseLayer(base_layer)
        y: Tensor = super().forward(x, base_layer=base_layer, **kwargs)  # type: ignore[misc]
        return y


class _DequantizableBaseLayer:
    """A wrapper around a base layer that makes PEFT read the weight by calling ``dequantize``."""

    W_q = None  # PEFT calls dequantize of bases with this attribute

    def __init__(self, base_layer: Any) -> None:
        self._base, self.bias = base_layer, base_layer.bias

    def dequantize(self) -> Tensor:
        weight: Tensor = self._base.weight
        return weight


def shard_adapter(
    tuner_layer: BaseTunerLayer, module_path: str, context_parallel_state: ContextParallelState | None
) -> None:
    """Shard the parameters of an adapter in place, and make its ``forward`` call the parallel base layer.

    Adapters that were sharded before stay unchanged. Communicates nothing.

    Raises:
        ConfigError: if this kind of adapter cannot run on this parallel layer.
    """
    base = tuner_layer.get_base_layer()
    for dora in getattr(tuner_layer, "lora_magnitude_vector", {}).values():
        if type(dora).__name__ == "DoraLinearLayer":
            add_mixin_classes(dora, _CompilableDoraMixin)
    if not isinstance(base, ParallelModule):
        _replace_adapter_dropout(tuner_layer, None, Axis("none"), context_parallel_state)
        return
    parameters = _get_adapter_parameters(tuner_layer, base, module_path)
    names = [name for name, _, _ in parameters]
    if isinstance(base, EMBEDDINGS):
        add_mixin_classes(tuner_layer, _FullDeltaWeightMixin)
        vars(base).update(
            max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False
        )  # the adapter reads them
        return
    reads_all = "lora_E" in names
    if reads_all:
        add_mixin_classes(tuner_layer, _FullAdapterParametersMixin, _ParallelLayerAdapterMixin, _FullDeltaWeightMixin)
    elif any(name.startswith(FULL_DELTA) for name in names):
        add_mixin_classes(tuner_layer, _ParallelLayerAdapterMixin, _FullDeltaWeightMixin)
    elif not (isinstance(base, Linear1D_Row) and "ia3_l" in names):  # which multiplies the reduced output, or the input
        add_mixin_classes(tuner_layer, _ParallelLayerAdapterMixin)
    kind, features = ("in", "in_features") if isinstance(base, Linear1D_Row) else ("out", "out_features")
    for name, owner, key in parameters:
        counted, dim = _get_feature_kind_and_dim(tuner_layer, name)
        if counted == kind and not reads_all and key not in vars(owner).get("shard_specs", {}):
            shard_parameter(owner, key, {dim: base.split}, base.axis)
            if hasattr(owner, features):
                vars(owner)[features] = owner._parameters["weight"].shape[dim]  # type: ignore[union-attr]
    if isinstance(tuner_layer, _ParallelLayerAdapterMixin):
        base.is_inside_adapter = True
        if isinstance(base, Linear1D_Col) and base.block is not None:
            base.block.has_adapters = True
    if isinstance(base, Linear1D_Row):
        _replace_adapter_dropout(tuner_layer, base.split, base.axis, context_parallel_state)
        for dora in getattr(tuner_layer, "lora_magnitude_vector", {}).values():
            add_mixin_classes(dora, _DistributedDoraNormMixin)
            dora.axis = base.axis
    else:
        _replace_adapter_dropout(tuner_layer, None, base.axis, context_parallel_state)
    for table in ("vera_A", "vera_B"):
        if table in tuner_layer._modules:
            _slice_shared_vera_matrix(tuner_layer, table, base, kind)


def _replace_adapter_dropout(
    tuner_layer: BaseTunerLayer,
    feature_split: Split | None,
    axis: Axis,
    context_parallel_state: ContextParallelState | None,
) -> None:
    if feature_split is None and context_parallel_state is None:
        return  # each rank has the full input
    for child in tuner_layer.children():
        for name, module in child.items() if isinstance(child, nn.ModuleDict) else ():
            if type(module) is nn.Dropout and module.p > 0:
                child[name] = AdapterDropout(module.p, feature_split, axis, context_parallel_state).train(
                    module.training
                )


def _slice_shared_vera_matrix(
    tuner_layer: BaseTunerLayer, matrix_name: str, base_layer: ParallelLinear, feature_kind: str
) -> None:
    """Make a VeRA adapter use this rank's slice of a matrix that all VeRA adapters share."""
    dim = 1 if matrix_name == "vera_A" else 0
    if (feature_kind == "in") != (matrix_name == "vera_A"):
        return
    # in the attributes, which Python finds before the registered table
    tuner_layer.__dict__[matrix_name] = _LocalSliceMapping(
        tuner_layer._modules[matrix_name], dim, base_layer.split.indices(base_layer.axis.rank)
    )


class _LocalSliceMapping(Mapping[str, Tensor]):
    """A mapping from names to this rank's slices of the full matrices in another mapping."""

    def __init__(self, full_matrices: Any, dim: int, indices: Tensor) -> None:
        self._table, self._dim, self._indices = full_matrices, dim, indices

    def __getitem__(self, name: str) -> Tensor:
        full: Tensor = self._table[name]
        return full.index_select(self._dim, self._indices.to(full.device))

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.keys())

    def __len__(self) -> int:
        return len(self._table)


def _get_feature_kind_and_dim(tuner_layer: BaseTunerLayer, attribute_name: str) -> tuple[str, int]:
    if attribute_name == "ia3_l":
        return ("in", 1) if tuner_layer.is_feedforward else ("out", 0)
    return FEATURE_DIMS.get(attribute_name, ("", 0))


def _get_adapter_parameters(
    tuner_layer: BaseTunerLayer, base_layer: ParallelModule, module_path: str
) -> list[tuple[str, nn.Module, str]]:
    """Return an adapter's parameters and their modules, or raise ConfigError if the adapter is not supported."""
    kind = f"{type(tuner_layer).__module__.removeprefix('peft.tuners.').partition('.')[0]} adapter"
    found = [
        (name, owner, key)
        for name, child in tuner_layer.named_children()
        if child is not tuner_layer.base_layer
        for owner in child.modules()
        for key, param in owner._parameters.items()
        if param is not None
    ]
    known = (*FEATURE_DIMS, *REPLICATED, "ia3_l", "lora_embedding_A", "lora_embedding_B")
    unknown = next((name for name, _, _ in found if name not in known and not name.startswith(FULL_DELTA)), None)
    why = None
    if isinstance(base_layer, GridParallelModule):
        why = "tensor_parallel_mode other than '1d' shards both dimensions of a weight"
    elif not isinstance(base_layer, (Linear1D_Col, Linear1D_Row, *EMBEDDINGS)):
        why = f"the layer is a {type(base_layer).__name__}"
    elif hasattr(tuner_layer, "parameter_name"):
        why = "target_parameters changes a parameter of the layer instead of adding to its output"
    elif unknown is not None or not found:
        why = f"its parameter {unknown} has an unknown layout" if found else "it has no parameters of its own"
    elif variants := [
        type(v).__name__ for v in getattr(tuner_layer, "lora_variant", {}).values() if "Dora" not in str(v)
    ]:
        why = f"{variants[0]} is not supported"
    elif isinstance(base_layer, EMBEDDINGS) and getattr(tuner_layer, "lora_magnitude_vector", None):
        why = "DoRA needs the norms of all embedding vectors on one rank"
    elif isinstance(base_layer, EMBEDDINGS) and base_layer.factor != 1:
        why = "the embedding scales its vectors"
    elif isinstance(base_layer, Linear1D_Row) and any(getattr(tuner_layer, "lora_bias", {}).values()):
        why = "lora_bias=True on a row-parallel linear layer would be added once per rank"
    elif isinstance(base_layer, Linear1D_Col) and base_layer.bias is not None and base_layer.fused_bias is None:
        scales = any(name in ("lora_magnitude_vector", "ia3_l") for name, _, _ in found)
        why = "it scales the output with its bias, which a fused operation adds later" if scales else None
    elif tuner_layer.merged_adapters:
        why = "it is merged. Call unmerge_adapter() first"
    if why is None:
        return found
    raise ConfigError(
        f"The {kind} on {module_path} cannot be sharded, because {why}.",
        remedy="Remove this module from target_modules, or use data parallelism or ZeRO instead of the tensor axis.",
    )


def restore_parallel_base_layer(tuner_layer: BaseTunerLayer) -> None:
    """Restore the parallel linear layer inside an adapter after PEFT has removed the adapter."""
    base = tuner_layer.get_base_layer()
    if isinstance(base, Linear1D_Col | Linear1D_Row):
        base.is_inside_adapter = False


def shard_trainable_copy(module_copy: nn.Module, original: nn.Module, module_path: str) -> nn.Module:
    """Shard a trainable copy of a module, such as one in ``modules_to_save``, in the same way as the original.

    Returns the copy unchanged if the original is replicated. Raises ConfigError if the original is inside a
    tensor-parallel block.
    """
    if any(isinstance(m, ParallelModule) for m in original.modules()) and (
        not isinstance(original, (Linear1D_Col, *EMBEDDINGS)) or getattr(original, "block", None) is not None
    ):
        raise ConfigError(
            f"modules_to_save does not support {module_path}, because tensor parallelism shards this module.",
            remedy="Add the module to target_modules instead. modules_to_save supports embeddings, heads and norms.",
        )
    if not isinstance(original, ParallelModule) or isinstance(module_copy, ParallelModule):
        return module_copy
    trains: Sequence[bool] = [p.requires_grad for p in module_copy.parameters()]
    new = type(original).from_native_module(module_copy, original.axis, split=original.split)
    for name in ("gather_output", "skip_bias_add", "sums_later", "factor"):
        if name in vars(original):
            vars(new)[name] = vars(original)[name]
    for param, flag in zip(new.parameters(), trains, strict=True):
        param.requires_grad_(flag)
    return new
