"""Parallel linears, embeddings, norms and dropout over the tensor axis (Shoeybi et al. 2019, "Megatron-LM", section 3).

Both kinds hold a weight stored (out, in) as nn.Linear, or (in, out) as transformers' Conv1D (``transposed``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.comm.autograd_collectives import (
    copy_to_tp_region,
    gather_from_region,
    reduce_from_tp_region,
    scatter_to_region,
)
from shardformer.comm.deferred_tensor import resolve_deferred
from shardformer.errors import ConfigError, InputError
from shardformer.kernels.fused_ops import FusedLayerNorm, fused_norm, rms_norm
from shardformer.layout.shard_spec import ShardSpec, Split
from shardformer.mesh.parallel_context import Axis
from shardformer.module_paths import is_linear, is_transposed
from shardformer.tensor_parallel.block import TensorParallelBlock
from shardformer.tensor_parallel.parallel_module import (
    GroupLike,
    ParallelModule,
    check_divides,
    check_native,
    embedding_scale,
    keep_hooks,
    product_dtype,
)
from shardformer.tensor_parallel.region import (
    LocalRandomState,
    ReplicatedRegion,
    RowParallelMatmul,
    TpRegion,
    deferred_all_reduce,
    linear_matmul,
    single_column_projection,
)
from shardformer.tensor_parallel.vocab_parallel_logits import shard_logits
from shardformer.torch_compat import assert_async, has_data

# B batch, S sequence, H in features, F out features; lower case: this rank's part (h = H / tensor, f = F / tensor)


class _ParallelLinear(ParallelModule):
    """What both kinds share: the weight, its orientation, and the full sizes."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    _cut: str
    """Which of its features are cut."""

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
            # the plain layer first: this rank keeps its part of the numbers that the random state gives that one
            native = nn.Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)
        self.transposed = is_transposed(native)
        weight, full_bias = native.weight, getattr(native, "bias", None)
        assert isinstance(weight, Tensor) and (full_bias is None or isinstance(full_bias, Tensor))
        self.split = (split or self._even_split()).with_axes(self.axis.name)
        of_weight, of_bias = self._specs(weight.shape)
        self.register_shard("weight", weight, of_weight, shared)
        self.register_shard("bias", full_bias, of_bias, shared)
        self.train(native.training)

    def _specs(self, shape: Sequence[int]) -> tuple[ShardSpec, ShardSpec]:
        """The layouts of the weight, of this shape, and of the bias."""
        cuts_out = self._cut == "out_features"
        splits = {int(cuts_out == self.transposed): self.split}
        return ShardSpec(shape, splits), ShardSpec((self.out_features,), {0: self.split} if cuts_out else {})

    def _even_split(self) -> Split:
        size: int = getattr(self, self._cut)
        check_divides(self._cut, size, self.axis)
        return Split.even(size, self.axis.size)

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        """Cuts an nn.Linear or a transformers Conv1D that holds the full weight.

        Raises ConfigError when ``module`` is neither.
        """
        if not is_linear(module):
            raise ConfigError(
                f"{cls.__name__} was given a {type(module).__name__}",
                remedy="Name the linear itself in the policy, not the module around it",
            )
        check_native(module, nn.Linear)
        weight = module.weight
        assert isinstance(weight, Tensor)
        in_features, out_features = weight.shape if is_transposed(module) else weight.shape[::-1]
        return cls(in_features, out_features, process_group=process_group, native=module, **kwargs)

    def extra_repr(self) -> str:
        local = "x".join(str(n) for n in self.weight.shape)
        order = "in x out" if self.transposed else "out x in"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"local weight {local} ({order}), {self.axis}"
        )


class Linear1D_Col(_ParallelLinear):
    """A column-parallel linear: each rank computes a part of the output features.

    (B, S, H) -> (B, S, f), or (B, S, F) with ``gather_output``.

    Communicates, when it stands alone: forward nothing (one all-gather of B*S*F with gather_output); backward one
    all-reduce of B*S*H, under which the weight's gradient is computed. In a block, the block's entry does it.

    Args:
        gather_output: whether every rank gets the full output.
        skip_bias_add: returns (output, bias) without adding the bias, as Megatron does to fuse it with what follows.
        split: which output features each rank holds, by default as even as can be.
        expand: for each group of ``expand[0]`` output features handed on, which of the held groups it is: a KV head
            that several local query heads share but that the forward wants repeated.
    """

    _cut = "out_features"

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
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add
        self.expand = expand
        self.block: TensorParallelBlock | None = None
        self.finish: Callable[[Tensor, Tensor | None], Tensor] | None = None

    @property
    def fused_bias(self) -> Tensor | None:
        """The bias that the matmul adds itself; None where it is handed on or fused with what follows."""
        return None if self.skip_bias_add or self.finish is not None else self.bias

    def multiply(self, x: Tensor) -> Tensor:
        """The local product, for an input that has entered the block already. Communicates nothing."""
        return linear_matmul(x, self.weight, self.fused_bias, self.transposed)

    def forward(self, x: Tensor) -> Any:
        if self.block is not None:
            y = self.block.project(self, x)
        elif self.axis.size == 1:
            y = self.multiply(x)
        else:
            y = single_column_projection(self, x)
        if self.finish is not None:
            y = self.finish(y, self.bias)
        if self.expand is not None:
            width, held = self.expand
            y = y.unflatten(-1, (-1, width))[..., list(held), :].flatten(-2)
        bias: Tensor | None = self.bias
        if self.gather_output:
            y = gather_from_region(y, self.axis, -1, self.split, "gather")
            if self.skip_bias_add and bias is not None:
                bias = gather_from_region(bias, self.axis, 0, self.split, "gather")
        return (y, bias) if self.skip_bias_add else y


class FusedLinear1D_Col(Linear1D_Col):
    """A column-parallel linear whose output features are ``n_fused`` blocks behind each other (q, k, v; gate, up).

    Each block is cut on its own, so every rank holds a part of each: with two ranks and q, k, v of 4 features,
    rank 0 holds 0-1, 4-5, 8-9 and rank 1 the others. Communicates as Linear1D_Col.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, n_fused: int = 3, **kwargs: Any
    ) -> None:
        if out_features % n_fused:
            raise ConfigError(
                f"out_features={out_features} with n_fused={n_fused}",
                remedy="Give the number of blocks that lie behind each other, or a split of your own",
            )
        axis = Axis.of(kwargs.get("process_group"))
        kwargs.setdefault("split", Split.fused([out_features // n_fused] * n_fused, axis.size))
        super().__init__(in_features, out_features, bias, **kwargs)
        self.n_fused = n_fused


class Linear1D_Row(_ParallelLinear):
    """A row-parallel linear: each rank multiplies its part of the input features; the sum is the output.

    (B, S, h) -> (B, S, F). The bias is added once, after the sum.

    Communicates: forward one all-reduce of B*S*F, backward nothing. At the exit of a block with sequence parallelism:
    forward one reduce-scatter, backward one all-gather of B*S*F, and the output is this rank's part (B, s, F).

    Args:
        parallel_input: whether the input is this rank's part already; otherwise the part is taken from the full input
            (backward one all-gather of the input; one all-reduce of it where ``split`` is not the even one).
        skip_bias_add: returns (output, bias) without adding the bias.

    Where a layer adds the outputs of two rows at once, the first's ``shared_exit`` holds the second: the first then
    gives its bias alone and communicates nothing, and the second brings both products out in one.
    """

    _cut = "in_features"

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
        self.shared_exit: tuple[Linear1D_Row, ...] = ()  # not as a module of this one
        self.product_of_other: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Any:
        x = resolve_deferred(x)
        if not self.parallel_input:
            x = self._part_of(x)
        weight: Tensor = self.weight
        if (dtype := product_dtype(x, weight)) is not None:
            x, weight = x.to(dtype), weight.to(dtype)
        edges = ReplicatedRegion(self.axis) if self.block is None else self.block.edges
        try:
            y = self._leave(x, weight, edges)
        finally:  # a recomputation under checkpointing stops in there, and may leave no activations behind
            if self.block is not None:
                self.block.leave(self.training)
        if self.block is not None and self.block.is_flat:
            y = y.flatten(0, 1)
        bias = self._bias_for(y)
        if bias is not None and torch.is_autocast_enabled(x.device.type):
            bias = bias.to(torch.get_autocast_dtype(x.device.type))
        if self.skip_bias_add:
            return y, bias
        return y if bias is None else y + bias

    def _bias_for(self, y: Tensor) -> Tensor | None:
        """What is added to the sum."""
        return self.bias

    def _leave(self, x: Tensor, weight: Tensor, edges: TpRegion) -> Tensor:
        """The sum over the ranks, with the product that another row handed to this one; zero where this one did so."""
        if self.shared_exit:
            self.shared_exit[0].product_of_other = x, weight
            return x.new_zeros((*edges.leading_shape(x), self.out_features))
        if self.product_of_other is not None:
            (other, its_weight), self.product_of_other = self.product_of_other, None
            x, weight = torch.cat((x, other), -1), torch.cat((weight, its_weight), 0 if self.transposed else 1)
        y: Tensor = RowParallelMatmul.apply(x, weight, self.transposed, edges)
        return y

    def _part_of(self, x: Tensor) -> Tensor:
        if self.split == self._even_split().with_axes(self.axis.name):
            return scatter_to_region(x, self.axis, -1, self.split)
        return copy_to_tp_region(x, self.axis).index_select(-1, self.split.indices(self.axis.rank).to(x.device))


class VocabParallelLMHead1D(Linear1D_Col):
    """The head of a language model, cut over the vocabulary. (B, S, H) -> logits (B, S, V), of which each rank holds v.

    The logits behave as the full ones: a cross entropy on them communicates three numbers a token, anything else
    gathers them (``VocabParallelLogits``). Communicates: backward one all-reduce of B*S*H.
    """

    def forward(self, x: Tensor) -> Any:
        bounds = [0, *(self.split.parts[r][-1][1] for r in range(self.axis.size))]
        return shard_logits(super().forward(x), self.axis, bounds)


# B batch, S sequence, H hidden, V vocabulary; lower case: this rank's part (v = V / tensor, h = H / tensor)


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
        check_divides("num_embeddings" if self._dim == 0 else "embedding_dim", size, self.axis)
        self.split = (split or Split.even(size, self.axis.size)).with_axes(self.axis.name)
        self.register_shard("weight", weight, ShardSpec(weight.shape, {self._dim: self.split}), shared)
        self.train(native.training)

    _dim: int
    factor = 1.0
    """What the native forward multiplies the vectors by."""

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        """Cuts an nn.Embedding that holds the full table.

        Raises ConfigError for what is not one, or one whose options need the full table (max_norm, scale_grad_by_freq,
        sparse gradients).
        """
        if not isinstance(module, nn.Embedding):
            raise ConfigError(
                f"{cls.__name__} was given a {type(module).__name__}", remedy="Name the embedding itself in the policy"
            )
        factor = embedding_scale(module)
        if factor is None or factor == 1:
            check_native(module, nn.Embedding)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise ConfigError(
                    f"The embedding has {option}={getattr(module, option)}",
                    rule="A table cut over ranks cannot renormalise, count or scatter rows that it does not hold",
                    remedy=f"Build the model without {option}, or leave this embedding whole",
                )
        new = cls(module.num_embeddings, module.embedding_dim, process_group=process_group, native=module, **kwargs)
        new.factor = factor or 1.0
        keep_hooks(new, module)  # what they see is as before: whole (enable_input_require_grads)
        return new

    def _scaled(self, found: Tensor) -> Tensor:
        return found if self.factor == 1 else found * self.factor

    def extra_repr(self) -> str:
        local = "x".join(str(n) for n in self.weight.shape)
        return f"{self.num_embeddings}, {self.embedding_dim}, local weight {local}, {self.axis}"


class VocabParallelEmbedding1D(_ParallelEmbedding):
    """An embedding cut over the vocabulary: each rank looks up the tokens it holds, the sum is the embedding.

    (B, S) -> (B, S, H). Communicates: forward one all-reduce of B*S*H, backward nothing.
    Raises InputError on the CPU for a token out of the vocabulary (on a GPU it is a device-side assertion).
    """

    _dim = 0
    sums_later = False
    """Whether a stack may follow at once that cuts the sum (``Stream.enter_stack``)."""

    def forward(self, ids: Tensor) -> Tensor:
        self._check(ids)
        if self.axis.size == 1:
            return self._scaled(F.embedding(ids, self.weight, self.padding_idx))
        start, end = self.split.parts[self.axis.rank][0]
        mine = (ids >= start) & (ids < end)
        padding = self.padding_idx
        local_padding = padding - start if padding is not None and start <= padding < end else None
        found = F.embedding(torch.where(mine, ids - start, 0), self.weight, local_padding)
        partial = self._scaled(found.masked_fill(~mine.unsqueeze(-1), 0))
        # who hooks the output gets it as it is
        if self.sums_later and not self._forward_hooks and not self._backward_hooks:
            return deferred_all_reduce(partial, self.axis)
        return reduce_from_tp_region(partial, self.axis)

    def _check(self, ids: Tensor) -> None:
        if ids.device.type != "cpu" or not has_data(ids):
            assert_async(((ids >= 0) & (ids < self.num_embeddings)).all())
            return
        if ids.numel() == 0:
            return
        low, high = ids.aminmax()
        if low < 0 or high >= self.num_embeddings:
            worst = int(low if low < 0 else high)
            raise InputError(
                f"The batch holds token {worst}",
                rule=f"The vocabulary has {self.num_embeddings} tokens, 0 to {self.num_embeddings - 1}",
                remedy="Use the tokenizer that belongs to the model, or resize the model's embeddings before sharding",
            )


class Embedding1D(_ParallelEmbedding):
    """An embedding cut over its own dim: each rank looks up a part of every vector.

    (B, S) -> (B, S, H), or (B, S, h) without ``gather_output``. Communicates: forward one all-gather of B*S*H with
    gather_output, otherwise nothing; backward nothing.
    """

    _dim = 1

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *args: Any, gather_output: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, *args, **kwargs)
        self.gather_output = gather_output

    def forward(self, ids: Tensor) -> Tensor:
        found = self._scaled(F.embedding(ids, self.weight, self.padding_idx))
        if not self.gather_output:
            return found
        return gather_from_region(found, self.axis, -1, self.split, "gather")


# W features in all; w: those of this rank


class ShardedNorm(ParallelModule):
    """A layer norm or RMS norm over W features of which each rank has w: (..., w) -> (..., w).

    Communicates: forward one all-reduce of one number a token (two for a layer norm), backward the same.

    Args:
        norm: the fused norm that was recognised, which says the formula.
        split: which features each rank has.
        expand: (features a head, for each head that comes in which of the held ones it repeats), where a KV head is
            handed on once for each query head.
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
        split = split.with_axes(self.axis.name)
        self.expand, self.full, self.split = expand, split.full, split
        for name in ("weight", "bias"):
            param = norm._parameters.get(name)
            self.register_shard(name, param, ShardSpec((split.full,), {0: split}), shared)
        held = torch.tensor(split.multiplicity, dtype=torch.float64)[split.indices(self.axis.rank)]
        self.register_buffer("share", None if split.is_partition else 1 / held, persistent=False)
        self.share: Tensor | None
        self.train(norm.training)

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        """Cuts a norm that holds the full weight.

        Raises ConfigError when ``module`` is no norm that is recognised, or not over the features of ``split``.
        """
        norm, full = fused_norm(module), kwargs["split"].full
        shapes = {tuple(p.shape) for p in norm.parameters()}
        if shapes - {(full,)}:
            raise ConfigError(
                f"ShardedNorm was given a norm over {shapes}",
                rule=f"It stands for a norm over the {full} features that are cut",
                remedy="Leave a norm over each head whole, it needs no rule",
            )
        return cls(norm, process_group=process_group, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        if self.expand is None:
            return self._normalise(x)
        width, heads = self.expand
        first = [list(heads).index(held) for held in range(max(heads) + 1)]
        held: Tensor = x.unflatten(-1, (-1, width))[..., first, :]
        normed: Tensor = self._normalise(held.flatten(-2)).unflatten(-1, (-1, width))
        return normed[..., list(heads), :].flatten(-2)

    def _normalise(self, x: Tensor) -> Tensor:
        weight, bias = self._parameters["weight"], self._parameters.get("bias")
        if self.kind != "layer":
            return rms_norm(self.kind, x, weight, self.eps, self._mean)
        x32 = x if x.dtype == torch.float64 else x.to(torch.float32)
        y = rms_norm("torch", x32 - self._mean(x32), weight, self.eps, self._mean)
        return (y if bias is None else y + bias).to(x.dtype)

    def _mean(self, x: Tensor) -> Tensor:
        """The mean over all W features, on every rank; in the backward each rank brings its part of its gradient."""
        summed = (x if self.share is None else x * self.share.to(x.dtype)).sum(-1, keepdim=True)
        return copy_to_tp_region(reduce_from_tp_region(summed, self.axis), self.axis) / self.full

    def extra_repr(self) -> str:
        return f"{self.full}, kind={self.kind}, {self.axis}"


class DropoutForParallelInput(nn.Module):
    """Dropout on this rank's part of an activation: the masks differ by tensor rank. Communicates nothing."""

    def __init__(self, p: float = 0.5, inplace: bool = False, process_group: GroupLike = None) -> None:
        super().__init__()
        self.p, self.inplace = p, inplace
        self._stream = LocalRandomState(Axis.of(process_group))

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        native = _plain_dropout(cls, module, kwargs)
        return cls(native.p, native.inplace, process_group).train(native.training)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        self._stream.enter(x)
        try:
            return F.dropout(x, self.p, True, self.inplace)
        finally:
            self._stream.leave()


class DropoutForReplicatedInput(nn.Dropout):
    """Dropout on an activation that all tensor ranks hold: all draw the same mask."""

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        native = _plain_dropout(cls, module, kwargs)
        return cls(native.p, native.inplace).train(native.training)


def _plain_dropout(cls: type[nn.Module], module: nn.Module, options: dict[str, Any]) -> nn.Dropout:
    if not isinstance(module, nn.Dropout) or options:
        given = f" and {', '.join(f'{k}={v!r}' for k, v in options.items())}" if options else ""
        raise ConfigError(
            f"{cls.__name__} was given a {type(module).__name__}{given}",
            remedy="Name the dropout itself in the policy, without kwargs",
        )
    return module
