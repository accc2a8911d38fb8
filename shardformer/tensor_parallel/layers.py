"""Tensor-parallel linear layers, embeddings, norms and dropout (Shoeybi et al. 2019, "Megatron-LM", section 3).

Linear layers store the weight as (out, in) like nn.Linear, or as (in, out) like transformers' Conv1D (``transposed``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.comm.collectives import (
    copy_to_tp_region,
    gather_from_parallel_region,
    reduce_from_tp_region,
    scatter_to_parallel_region,
)
from shardformer.comm.deferred_tensor import resolve_deferred_tensors
from shardformer.errors import ConfigError, InputError
from shardformer.kernels.fused_ops import FusedLayerNorm, make_fused_norm, rms_norm
from shardformer.layout.packed_weights import is_4bit_linear
from shardformer.layout.shard_spec import ShardSpec, Split
from shardformer.mesh.parallel_context import Axis
from shardformer.module_paths import has_transposed_weight, is_linear_or_conv1d
from shardformer.random_state import LocalRNGState
from shardformer.tensor_parallel.block import TensorParallelBlock
from shardformer.tensor_parallel.linear_communication import (
    ReducePartialOutputs,
    ReplicatedInputRegion,
    RowParallelMatmul,
    TpRegion,
    compute_single_column_linear,
    defer_all_reduce,
    linear_matmul,
    prepare_extra_block_input,
)
from shardformer.tensor_parallel.parallel_module import (
    GroupLike,
    ParallelModule,
    check_behaves_like_plain_module,
    check_dim_is_shardable,
    measure_embedding_scale,
    move_hooks,
    select_matmul_dtype,
)
from shardformer.tensor_parallel.quantized_linear import make_meta_linear_like, store_quantized_shard
from shardformer.tensor_parallel.vocab_parallel_logits import wrap_local_logits_as_full_logits
from shardformer.torch_compat import assert_async, has_real_data

# B batch, S sequence, H in features, F out features; lower case: local shard (h = H / tensor, f = F / tensor)


class _ParallelLinear(ParallelModule):
    weight: nn.Parameter
    bias: nn.Parameter | None
    _sharded_features: str  # name of the attribute that contains the number of sharded features

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        process_group: GroupLike = None,
        split: Split | None = None,
        native: nn.Module | None = None,
        shared: dict[int, nn.Parameter] | None = None,
    ) -> None:
        super().__init__(Axis.of(process_group))
        self.in_features, self.out_features = in_features, out_features
        if native is None:
            # build the full layer first, so that the weights match those of the plain layer under the same seed
            native = nn.Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)
        self.transposed = has_transposed_weight(native)
        weight, full_bias = native.weight, getattr(native, "bias", None)
        assert isinstance(weight, Tensor) and (full_bias is None or isinstance(full_bias, Tensor))
        self.split = (split or self._make_even_split()).with_axis(self.axis.name)
        weight_spec, bias_spec = self._make_weight_and_bias_specs(weight.shape)
        self.register_shard("weight", weight, weight_spec, shared)
        self.register_shard("bias", full_bias, bias_spec, shared)
        self.train(native.training)

    def _make_weight_and_bias_specs(self, weight_shape: Sequence[int]) -> tuple[ShardSpec, ShardSpec]:
        is_column = self._sharded_features == "out_features"
        splits = {int(is_column == self.transposed): self.split}
        return ShardSpec(weight_shape, splits), ShardSpec((self.out_features,), {0: self.split} if is_column else {})

    def _make_even_split(self) -> Split:
        size: int = getattr(self, self._sharded_features)
        check_dim_is_shardable(self._sharded_features, size, self.axis)
        return Split.even(size, self.axis.size)

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        """Shard an nn.Linear, a transformers Conv1D or a bitsandbytes 4-bit linear layer over the ranks.

        Raises ConfigError for other classes, and for a 4-bit weight whose shards would divide its blocks.
        """
        if is_4bit_linear(module):
            plain = make_meta_linear_like(module)
            new = cls(plain.in_features, plain.out_features, process_group=process_group, native=plain, **kwargs)
            (kwargs.get("shared") or {}).pop(id(plain.weight), None)  # its id is used again
            store_quantized_shard(new, module, new.coords)
            return new
        if not is_linear_or_conv1d(module):
            raise ConfigError(
                f"{cls.__name__} can only replace a linear layer, but got a {type(module).__name__}.",
                remedy="In the policy, pass the path of the linear layer itself, not of the module that contains it.",
            )
        check_behaves_like_plain_module(module, nn.Linear)
        weight = module.weight
        assert isinstance(weight, Tensor)
        in_features, out_features = weight.shape if has_transposed_weight(module) else weight.shape[::-1]
        return cls(in_features, out_features, process_group=process_group, native=module, **kwargs)

    def extra_repr(self) -> str:
        local = "x".join(str(n) for n in self.weight.shape)
        order = "in x out" if self.transposed else "out x in"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"local weight {local} ({order}), {self.axis}"
        )


class Linear1D_Col(_ParallelLinear):
    """Column-parallel linear layer: each rank computes a shard of the output features.

    (B, S, H) -> (B, S, f), or (B, S, F) with ``gather_output``.

    Communicates outside a block: backward one all-reduce of B*S*H, overlapped with the weight gradient; with
    ``gather_output`` also one all-gather of B*S*F in the forward pass. In a block, the block communicates.

    Args:
        gather_output: return the full output on every rank.
        skip_bias_add: return (output, bias) without adding the bias, so that the caller can fuse it (Megatron).
        split: the output features of each rank. By default, they are split evenly.
        expand: (width, indices): return the local groups of ``width`` features in the order of ``indices``, with
            repetitions. Used when several local query heads share a KV head that the forward pass expects repeated.
    """

    _sharded_features = "out_features"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        expand: tuple[int, Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        self.gather_output, self.skip_bias_add, self.expand = gather_output, skip_bias_add, expand
        self.block: TensorParallelBlock | None = None
        self.finish: Callable[[Tensor, Tensor | None], Tensor] | None = None
        self.is_inside_adapter = False

    @property
    def fused_bias(self) -> Tensor | None:
        """Bias to add in the matmul, or None if the bias is added later."""
        return None if self.skip_bias_add or self.finish is not None else self.bias

    def multiply(self, hidden_states: Tensor) -> Tensor:
        """Multiply the full input by this rank's shard of the weight. Communicates nothing."""
        return linear_matmul(hidden_states, self.weight, self.fused_bias, self.transposed)

    def forward(self, x: Tensor) -> Any:
        if self.is_inside_adapter:
            return self.multiply(x)
        if self.block is not None:
            y = self.block.compute_column_output(self, x)
        elif self.axis.size == 1:
            y = self.multiply(x)
        else:
            y = compute_single_column_linear(self, x)
        return self.finalize_adapter_output(y)

    def prepare_adapter_input(self, hidden_states: Tensor) -> Tensor:
        """Prepare the input for a PEFT adapter of this layer. Its gradient is summed over the ranks only once."""
        if self.block is not None:
            return self.block.get_shared_input(hidden_states)
        return hidden_states if self.axis.size == 1 else prepare_extra_block_input(hidden_states, self.axis)

    def finalize_adapter_output(self, output: Tensor) -> Any:
        """Turn this rank's output features, including those of PEFT adapters, into the output of the layer."""
        if self.finish is not None:
            output = self.finish(output, self.bias)
        if self.expand is not None:
            width, indices = self.expand
            output = output.unflatten(-1, (-1, width))[..., list(indices), :].flatten(-2)
        bias: Tensor | None = self.bias
        if self.gather_output:
            output = gather_from_parallel_region(output, self.axis, -1, self.split, "gather")
            if self.skip_bias_add and bias is not None:
                bias = gather_from_parallel_region(bias, self.axis, 0, self.split, "gather")
        return (output, bias) if self.skip_bias_add else output


class FusedLinear1D_Col(Linear1D_Col):
    """Column-parallel linear layer whose output concatenates several projections, such as q, k and v.

    Each of the ``n_fused`` projections is sharded separately, so that every rank has a shard of each. With two ranks
    and q, k, v of 4 features, rank 0 has features 0-1, 4-5, 8-9. Communicates as Linear1D_Col.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, n_fused: int = 3, **kwargs: Any
    ) -> None:
        if out_features % n_fused:
            raise ConfigError(
                f"out_features={out_features} is not divisible by the number of fused projections, n_fused={n_fused}.",
                remedy="Set n_fused to the number of concatenated projections, or pass split.",
            )
        axis = Axis.of(kwargs.get("process_group"))
        kwargs.setdefault("split", Split.fused([out_features // n_fused] * n_fused, axis.size))
        super().__init__(in_features, out_features, bias, **kwargs)
        self.n_fused = n_fused


class Linear1D_Row(_ParallelLinear):
    """Row-parallel linear layer: each rank multiplies its shard of the input features, and the products are summed.

    (B, S, h) -> (B, S, F). Adds the bias once, after the sum.

    Communicates: forward one all-reduce of B*S*F, backward nothing. At the exit of a block with sequence parallelism:
    forward one reduce-scatter, backward one all-gather of B*S*F, and the output is the local shard (B, s, F).

    Args:
        parallel_input: whether the input is sharded. If False, the layer selects its shard of a full input (backward:
            one all-gather of the input, or one all-reduce if ``split`` is not the even split).
        skip_bias_add: return (output, bias) without adding the bias.

    An adapter (PEFT) wraps a linear layer as ``finalize_adapter_output(f(prepare_adapter_input(x)))``, where f calls
    the linear layer. With ``is_inside_adapter``, that call returns the local product, and f adds to it before the
    reduction.

    If a module adds the outputs of two row-parallel linear layers, ``shared_exit`` of the first contains the second.
    The first then returns only its bias and communicates nothing. The second reduces the sum of both products.
    """

    _sharded_features = "in_features"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        parallel_input: bool = True,
        skip_bias_add: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        self.parallel_input, self.skip_bias_add = parallel_input, skip_bias_add
        self.block: TensorParallelBlock | None = None
        self.shared_exit: tuple[Linear1D_Row, ...] = ()  # a tuple, so that the linear is not registered as a submodule
        self.product_of_other: tuple[Tensor, Tensor] | None = None
        self.partial_of_other: Tensor | None = None
        self.is_inside_adapter = False

    def forward(self, x: Tensor) -> Any:
        if self.is_inside_adapter:
            return linear_matmul(x, self.weight, None, self.transposed)
        x = self.prepare_adapter_input(x)
        weight: Tensor = self.weight
        if (dtype := select_matmul_dtype(x, weight)) is not None:
            x, weight = x.to(dtype), weight.to(dtype)
        return self._reduce_output_and_exit_block(lambda region: self._reduce_matmul_or_defer(x, weight, region))

    def prepare_adapter_input(self, hidden_states: Tensor) -> Tensor:
        """Select this rank's input features for this layer and its PEFT adapters."""
        hidden_states = resolve_deferred_tensors(hidden_states)
        return hidden_states if self.parallel_input else self._select_local_features(hidden_states)

    def finalize_adapter_output(self, partial_output: Tensor) -> Any:
        """Sum the partial outputs of all ranks, and return the output of this layer."""
        return self._reduce_output_and_exit_block(lambda region: self._reduce_partial_output(partial_output, region))

    def _reduce_output_and_exit_block(self, reduce_fn: Callable[[TpRegion], Tensor]) -> Any:
        region = ReplicatedInputRegion(self.axis) if self.block is None else self.block.region
        try:
            y = reduce_fn(region)
        finally:  # a recomputation under checkpointing stops here and must not leave activations in the block
            if self.block is not None:
                self.block.exit_block(self.training)
        if self.block is not None and self.block.is_flat:
            y = y.flatten(0, 1)
        bias = self._get_output_bias(y)
        if bias is not None and torch.is_autocast_enabled(y.device.type):
            bias = bias.to(torch.get_autocast_dtype(y.device.type))
        if self.skip_bias_add:
            return y, bias
        return y if bias is None else y + bias

    def _get_output_bias(self, output: Tensor) -> Tensor | None:
        return self.bias

    def _reduce_partial_output(self, partial_output: Tensor, region: TpRegion) -> Tensor:
        """Sum ``partial_output`` over the ranks, or return zeros if the layer in ``shared_exit`` will sum it."""
        if self.shared_exit:
            self.shared_exit[0].partial_of_other = partial_output
            return partial_output.new_zeros((*region.get_local_leading_shape(partial_output), self.out_features))
        if self.product_of_other is not None:
            (x, weight), self.product_of_other = self.product_of_other, None
            partial_output = partial_output + linear_matmul(x, weight, None, self.transposed)
        if self.partial_of_other is not None:
            partial_output, self.partial_of_other = partial_output + self.partial_of_other, None
        if torch.compiler.is_compiling():
            return region.reduce_output(partial_output)
        y: Tensor = ReducePartialOutputs.apply(partial_output, region)
        return y

    def _reduce_matmul_or_defer(self, hidden_states: Tensor, weight: Tensor, region: TpRegion) -> Tensor:
        """Sum x @ weight over the ranks, or return zeros if the layer in ``shared_exit`` will sum it."""
        if self.partial_of_other is not None:
            return self._reduce_partial_output(linear_matmul(hidden_states, weight, None, self.transposed), region)
        if self.shared_exit:
            self.shared_exit[0].product_of_other = hidden_states, weight
            return hidden_states.new_zeros(
                (*region.get_local_leading_shape(hidden_states), self._get_num_output_features(region))
            )
        if self.product_of_other is not None:
            (other_x, other_weight), self.product_of_other = self.product_of_other, None
            hidden_states, weight = (
                torch.cat((hidden_states, other_x), -1),
                torch.cat((weight, other_weight), 0 if self.transposed else 1),
            )
        return self._row_parallel_matmul(hidden_states, weight, region)

    def _get_num_output_features(self, region: TpRegion) -> int:
        return self.out_features

    def _row_parallel_matmul(self, hidden_states: Tensor, weight: Tensor, region: TpRegion) -> Tensor:
        if torch.compiler.is_compiling():
            return region.reduce_output(linear_matmul(hidden_states, weight, None, self.transposed))
        y: Tensor = RowParallelMatmul.apply(hidden_states, weight, self.transposed, region)
        return y

    def _select_local_features(self, hidden_states: Tensor) -> Tensor:
        if self.split == self._make_even_split().with_axis(self.axis.name):
            return scatter_to_parallel_region(hidden_states, self.axis, -1, self.split)
        indices = self.split.indices(self.axis.rank).to(hidden_states.device)
        return copy_to_tp_region(hidden_states, self.axis).index_select(-1, indices)


class VocabParallelLMHead1D(Linear1D_Col):
    """Language-model head that is sharded over the vocabulary: (B, S, H) -> sharded logits (B, S, V).

    The logits behave like the full logits. A cross entropy on them communicates three numbers per token; most other
    operations gather them (``VocabParallelLogits``). Communicates: backward one all-reduce of B*S*H.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for option in ("gather_output", "skip_bias_add"):
            if getattr(self, option):
                raise ConfigError(
                    f"VocabParallelLMHead1D does not support {option}=True.",
                    remedy=f"Remove {option}, or use Linear1D_Col for the language-model head.",
                )

    def finalize_adapter_output(self, output: Tensor) -> Any:
        bounds = [0, *(self.split.parts[r][-1][1] for r in range(self.axis.size))]
        return wrap_local_logits_as_full_logits(super().finalize_adapter_output(output), self.axis, bounds)


# B batch, S sequence, H hidden, V vocabulary; lower case: local shard (v = V / tensor, h = H / tensor)


class _ParallelEmbedding(ParallelModule):
    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        process_group: GroupLike = None,
        split: Split | None = None,
        native: nn.Module | None = None,
        shared: dict[int, nn.Parameter] | None = None,
    ) -> None:
        super().__init__(Axis.of(process_group))
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        if native is None:
            native = nn.Embedding(num_embeddings, embedding_dim, padding_idx, dtype=dtype, device=device)
        self.padding_idx: int | None = getattr(native, "padding_idx", padding_idx)
        weight = native.weight
        assert isinstance(weight, Tensor)
        size = weight.shape[self._dim]
        check_dim_is_shardable("num_embeddings" if self._dim == 0 else "embedding_dim", size, self.axis)
        self.split = (split or Split.even(size, self.axis.size)).with_axis(self.axis.name)
        self.register_shard("weight", weight, ShardSpec(weight.shape, {self._dim: self.split}), shared)
        self.train(native.training)

    _dim: int  # the dim of the table that is sharded
    factor = 1.0  # by which the native forward scales the vectors

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        """Shard an nn.Embedding over the ranks.

        Raises ConfigError for other classes, and for options that need the full table (max_norm, scale_grad_by_freq,
        sparse).
        """
        if not isinstance(module, nn.Embedding):
            raise ConfigError(
                f"{cls.__name__} can only replace an nn.Embedding, but got a {type(module).__name__}.",
                remedy="In the policy, pass the path of the nn.Embedding itself, not of the module that contains it.",
            )
        factor = measure_embedding_scale(module)
        if factor is None or factor == 1:
            check_behaves_like_plain_module(module, nn.Embedding)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if value := getattr(module, option):
                raise ConfigError(
                    f"An nn.Embedding with {option}={value} cannot be sharded.",
                    remedy=f"Build the model without {option}, or keep the embedding replicated.",
                )
        new = cls(module.num_embeddings, module.embedding_dim, process_group=process_group, native=module, **kwargs)
        new.factor = factor or 1.0
        move_hooks(new, module)  # the output is the full tensor (enable_input_require_grads)
        return new

    def _scale_embeddings(self, embeddings: Tensor) -> Tensor:
        return embeddings if self.factor == 1 else embeddings * self.factor

    def extra_repr(self) -> str:
        local = "x".join(str(n) for n in self.weight.shape)
        return f"{self.num_embeddings}, {self.embedding_dim}, local weight {local}, {self.axis}"


class VocabParallelEmbedding1D(_ParallelEmbedding):
    """Embedding that is sharded over the vocabulary: each rank looks up its own tokens, and the results are summed.

    (B, S) -> (B, S, H). Communicates: forward one all-reduce of B*S*H, backward nothing.

    Raises:
        InputError: for a token outside the vocabulary, on the CPU. On a GPU a device-side assertion fails.
    """

    _dim = 0
    sums_later = False
    """Whether to delay the sum, because ``ActivationSharding.shard_stack_input`` may reduce-scatter it."""

    def forward(self, token_ids: Tensor) -> Tensor:
        self._check_token_ids_in_vocabulary(token_ids)
        if self.axis.size == 1:
            return self._scale_embeddings(F.embedding(token_ids, self.weight, self.padding_idx))
        start, end = self.split.parts[self.axis.rank][0]
        is_local = (token_ids >= start) & (token_ids < end)
        padding = self.padding_idx
        local_padding = padding - start if padding is not None and start <= padding < end else None
        vectors = F.embedding(torch.where(is_local, token_ids - start, 0), self.weight, local_padding)
        partial = self._scale_embeddings(vectors.masked_fill(~is_local.unsqueeze(-1), 0))
        # a hook on the output must see the sum
        if self.sums_later and not self._forward_hooks and not self._backward_hooks:
            return defer_all_reduce(partial, self.axis)
        return reduce_from_tp_region(partial, self.axis)

    def _check_token_ids_in_vocabulary(self, token_ids: Tensor) -> None:
        if token_ids.device.type != "cpu" or not has_real_data(token_ids):
            assert_async(((token_ids >= 0) & (token_ids < self.num_embeddings)).all())
            return
        if token_ids.numel() == 0:
            return
        low, high = token_ids.aminmax()
        if low < 0 or high >= self.num_embeddings:
            invalid = int(low if low < 0 else high)
            raise InputError(
                f"The batch contains the token id {invalid}, but the vocabulary has {self.num_embeddings} tokens.",
                remedy="Use the tokenizer of the model, or resize the model's embeddings before you shard it.",
            )


class Embedding1D(_ParallelEmbedding):
    """Embedding that is sharded over the hidden dim: each rank looks up its slice of every embedding vector.

    (B, S) -> (B, S, H), or (B, S, h) without ``gather_output``. Communicates: forward one all-gather of B*S*H with
    ``gather_output``, backward nothing.
    """

    _dim = 1

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *args: Any, gather_output: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, *args, **kwargs)
        self.gather_output = gather_output

    def forward(self, indices: Tensor) -> Tensor:
        vectors = self._scale_embeddings(F.embedding(indices, self.weight, self.padding_idx))
        if not self.gather_output:
            return vectors
        return gather_from_parallel_region(vectors, self.axis, -1, self.split, "gather")


# W features of all ranks; w: of this rank


class ShardedNorm(ParallelModule):
    """Layer norm or RMS norm over features that are sharded over the ranks: (..., w) -> (..., w).

    Communicates: forward one all-reduce of one number per token (two for a layer norm), backward the same.

    Args:
        norm: the fused norm, which determines the formula.
        split: the features of each rank.
        expand: (features per head, the local head of each input head), if the input repeats a KV head for several
            query heads.
    """

    def __init__(
        self,
        norm: nn.Module,
        split: Split,
        expand: tuple[int, Sequence[int]] | None = None,
        process_group: GroupLike = None,
        shared: dict[int, nn.Parameter] | None = None,
    ) -> None:
        super().__init__(Axis.of(process_group))
        self.kind: str = "layer" if isinstance(norm, FusedLayerNorm) else str(norm.kind)
        self.eps: Any = norm.eps
        split = split.with_axis(self.axis.name)
        self.expand, self.full, self.split = expand, split.full, split
        for name in ("weight", "bias"):
            param = norm._parameters.get(name)
            self.register_shard(name, param, ShardSpec((split.full,), {0: split}), shared)
        copies = torch.tensor(split.multiplicity, dtype=torch.float64)[split.indices(self.axis.rank)]
        self.register_buffer("share", None if split.stores_each_index_once else 1 / copies, persistent=False)
        self.share: Tensor | None
        self.train(norm.training)

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        """Shard a layer norm or an RMS norm over the ranks.

        Raises ConfigError for other classes, and for a norm over another number of features than ``split`` has.
        """
        norm, full = make_fused_norm(module), kwargs["split"].full
        shapes = {tuple(p.shape) for p in norm.parameters()}
        if shapes - {(full,)}:
            raise ConfigError(
                f"ShardedNorm can only replace a norm over {full} features, but got a norm whose parameters have the "
                f"shape {shapes}.",
                remedy="Remove this norm from the policy if it normalizes each attention head separately.",
            )
        return cls(norm, process_group=process_group, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        if self.expand is None:
            return self._normalize(x)
        width, heads = self.expand
        first = [list(heads).index(head) for head in range(max(heads) + 1)]
        local: Tensor = x.unflatten(-1, (-1, width))[..., first, :]
        normed: Tensor = self._normalize(local.flatten(-2)).unflatten(-1, (-1, width))
        return normed[..., list(heads), :].flatten(-2)

    def _normalize(self, hidden_states: Tensor) -> Tensor:
        weight, bias = self._parameters["weight"], self._parameters.get("bias")
        if self.kind != "layer":
            return rms_norm(self.kind, hidden_states, weight, self.eps, self._compute_mean_over_ranks)
        x32 = hidden_states if hidden_states.dtype == torch.float64 else hidden_states.to(torch.float32)
        y = rms_norm("torch", x32 - self._compute_mean_over_ranks(x32), weight, self.eps, self._compute_mean_over_ranks)
        return (y if bias is None else y + bias).to(hidden_states.dtype)

    def _compute_mean_over_ranks(self, x: Tensor) -> Tensor:
        """Compute the mean of ``x`` over the features of all ranks. Backward: one all-reduce."""
        summed = (x if self.share is None else x * self.share.to(x.dtype)).sum(-1, keepdim=True)
        return copy_to_tp_region(reduce_from_tp_region(summed, self.axis), self.axis) / self.full

    def extra_repr(self) -> str:
        return f"{self.full}, kind={self.kind}, {self.axis}"


class DropoutForParallelInput(nn.Module):
    """Dropout on a sharded activation, with a different mask on each tensor rank. Communicates nothing."""

    def __init__(self, p: float = 0.5, inplace: bool = False, process_group: GroupLike = None) -> None:
        super().__init__()
        self.p, self.inplace = p, inplace
        self._random = LocalRNGState(Axis.of(process_group).rank)

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        native = _require_plain_dropout(cls, module, kwargs)
        return cls(native.p, native.inplace, process_group).train(native.training)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        self._random.enter_local_rng_state(x)
        try:
            return F.dropout(x, self.p, True, self.inplace)
        finally:
            self._random.exit_local_rng_state()


class DropoutForReplicatedInput(nn.Dropout):
    """Dropout on a replicated activation, with the same mask on all tensor ranks."""

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        native = _require_plain_dropout(cls, module, kwargs)
        return cls(native.p, native.inplace).train(native.training)


def _require_plain_dropout(parallel_cls: type[nn.Module], module: nn.Module, kwargs: dict[str, Any]) -> nn.Dropout:
    if not isinstance(module, nn.Dropout) or kwargs:
        arguments = f" with {', '.join(f'{k}={v!r}' for k, v in kwargs.items())}" if kwargs else ""
        raise ConfigError(
            f"{parallel_cls.__name__} can only replace an nn.Dropout without kwargs, but got "
            f"{type(module).__name__}{arguments}.",
            remedy="In the policy, pass the path of the nn.Dropout itself, and remove the kwargs.",
        )
    return module
