"""Embeddings cut over the tensor axis: over the vocabulary, or over the embedding's own dim."""

# B batch, S sequence, H hidden, V vocabulary; lower case: this rank's part (v = V / tensor, h = H / tensor)

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.comm.conjugates import join_dim, leave_block
from shardformer.comm.values import has_values
from shardformer.errors import ConfigError, InputError
from shardformer.layers.tensor.edges import summed_later
from shardformer.layers.tensor.parallel_module import (
    GroupLike,
    ParallelModule,
    check_divides,
    check_native,
    factor_of,
    keep_hooks,
)
from shardformer.layout.spec import ShardSpec
from shardformer.layout.split import Split
from shardformer.mesh.axis import Axis


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
        self.split = (split or Split.even(size, self.axis.size)).over(self.axis.name)
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
                f"{cls.__name__} was given a {type(module).__name__}",
                rule="It stands for an nn.Embedding",
                remedy="Name the embedding itself in the policy",
            )
        factor = factor_of(module)
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
            return summed_later(partial, self.axis)
        return leave_block(partial, self.axis)

    def _check(self, ids: Tensor) -> None:
        if ids.device.type != "cpu" or not has_values(ids):
            torch._assert_async(((ids >= 0) & (ids < self.num_embeddings)).all())
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
        return join_dim(found, self.axis, -1, self.split, "gather")
