"""A norm over features that are cut over the tensor axis: over all heads of q or k, or over an MLP's width.

Each rank normalises the features that it has; the statistics are those of all of them.
"""

# W features in all; w: those of this rank

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.conjugates import enter_block, leave_block
from shardformer.errors import ConfigError
from shardformer.layers.norm import FusedLayerNorm, fused_norm, rms_norm
from shardformer.layers.tensor.parallel_module import GroupLike, ParallelModule
from shardformer.layout.spec import ShardSpec
from shardformer.layout.split import Split
from shardformer.mesh.axis import Axis


class SplitNorm(ParallelModule):
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
        split = split.over(self.axis.name)
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
                f"SplitNorm was given a norm over {shapes}",
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
        return enter_block(leave_block(summed, self.axis), self.axis) / self.full

    def extra_repr(self) -> str:
        return f"{self.full}, kind={self.kind}, {self.axis}"
