"""A norm between the blocks, over hidden features of which each rank of a tensor grid has a part."""

# H hidden; h: this rank's part

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardformer.comm.conjugates import join_dim
from shardformer.layers.norm import rms_norm
from shardformer.layers.tensor.split_norm import SplitNorm
from shardformer.mesh.tensor_grid import TensorGrid


class GridNorm(SplitNorm):
    """A layer norm or RMS norm over the H features of the stream: (..., h) -> (..., h), or of all (..., H) -> (..., H).

    Communicates: forward one all-reduce of one number a token (two for a layer norm), backward the same; where it is
    given all features one all-gather of its weight.
    """

    takes_grid = True

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> nn.Module:
        """Cuts a norm that holds the full weight over a ``TensorGrid``. Raises ConfigError as ``SplitNorm``."""
        grid: TensorGrid = process_group
        return super().from_native_module(module, grid.hidden, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.full or self.axis.size == 1:
            return super().forward(x)
        whole = {n: None if p is None else join_dim(p, self.axis, 0, self.split) for n, p in self._parameters.items()}
        weight, bias = whole["weight"], whole.get("bias")
        if self.kind != "layer":
            return rms_norm(self.kind, x, weight, self.eps)
        return nn.functional.layer_norm(x, (self.full,), weight, bias, self.eps)
