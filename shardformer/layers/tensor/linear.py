"""Linear layers cut over the tensor axis (Shoeybi et al. 2019, "Megatron-LM", section 3).

Both kinds hold a weight stored (out, in) as nn.Linear, or (in, out) as transformers' Conv1D (``transposed``).
"""

# B batch, S sequence, H in features, F out features; lower case: this rank's part (h = H / tensor, f = F / tensor)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.conjugates import enter_block, join_dim, split_dim
from shardformer.errors import ConfigError
from shardformer.layers.tensor.block import Block
from shardformer.layers.tensor.edges import Edges, WholeEdges
from shardformer.layers.tensor.parallel_module import GroupLike, ParallelModule, check_divides, check_native
from shardformer.layers.tensor.pending import resolved
from shardformer.layers.tensor.projection import RowExit, matmul_in, project_alone
from shardformer.layers.vocab.logits import shard_logits
from shardformer.layers.wide_inputs import product_dtype
from shardformer.layout.spec import ShardSpec
from shardformer.layout.split import Split
from shardformer.mesh.axis import Axis


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear stores its weight (in, out), as transformers' Conv1D does."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_transposed(module)


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
        self.split = (split or self._even_split()).over(self.axis.name)
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
                rule="It stands for an nn.Linear or a transformers Conv1D",
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
        self.block: Block | None = None
        self.finish: Callable[[Tensor, Tensor | None], Tensor] | None = None

    @property
    def fused_bias(self) -> Tensor | None:
        """The bias that the matmul adds itself; None where it is handed on or fused with what follows."""
        return None if self.skip_bias_add or self.finish is not None else self.bias

    def multiply(self, x: Tensor) -> Tensor:
        """The local product, for an input that has entered the block already. Communicates nothing."""
        return matmul_in(x, self.weight, self.fused_bias, self.transposed)

    def forward(self, x: Tensor) -> Any:
        if self.block is not None:
            y = self.block.project(self, x)
        elif self.axis.size == 1:
            y = self.multiply(x)
        else:
            y = project_alone(self, x)
        if self.finish is not None:
            y = self.finish(y, self.bias)
        if self.expand is not None:
            width, held = self.expand
            y = y.unflatten(-1, (-1, width))[..., list(held), :].flatten(-2)
        bias: Tensor | None = self.bias
        if self.gather_output:
            y = join_dim(y, self.axis, -1, self.split, "gather")
            if self.skip_bias_add and bias is not None:
                bias = join_dim(bias, self.axis, 0, self.split, "gather")
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
                rule="The fused blocks are of one size",
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

    Where a layer adds the outputs of two rows at once, the first's ``exits_with`` holds the second: the first then
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
        self.block: Block | None = None
        self.exits_with: tuple[Linear1D_Row, ...] = ()  # not as a module of this one
        self.product_of_other: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Any:
        x = resolved(x)
        if not self.parallel_input:
            x = self._part_of(x)
        weight: Tensor = self.weight
        if (dtype := product_dtype(x, weight)) is not None:
            x, weight = x.to(dtype), weight.to(dtype)
        edges = WholeEdges(self.axis) if self.block is None else self.block.edges
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

    def _leave(self, x: Tensor, weight: Tensor, edges: Edges) -> Tensor:
        """The sum over the ranks, with the product that another row handed to this one; zero where this one did so."""
        if self.exits_with:
            self.exits_with[0].product_of_other = x, weight
            return x.new_zeros((*edges.leading(x), self.out_features))
        if self.product_of_other is not None:
            (other, its_weight), self.product_of_other = self.product_of_other, None
            x, weight = torch.cat((x, other), -1), torch.cat((weight, its_weight), 0 if self.transposed else 1)
        y: Tensor = RowExit.apply(x, weight, self.transposed, edges)
        return y

    def _part_of(self, x: Tensor) -> Tensor:
        if self.split == self._even_split().over(self.axis.name):
            return split_dim(x, self.axis, -1, self.split)
        return enter_block(x, self.axis).index_select(-1, self.split.indices(self.axis.rank).to(x.device))


class VocabParallelLMHead1D(Linear1D_Col):
    """The head of a language model, cut over the vocabulary. (B, S, H) -> logits (B, S, V), of which each rank holds v.

    The logits behave as the full ones: a cross entropy on them communicates three numbers a token, anything else
    gathers them (``VocabParallelLogits``). Communicates: backward one all-reduce of B*S*H.
    """

    def forward(self, x: Tensor) -> Any:
        bounds = [0, *(self.split.parts[r][-1][1] for r in range(self.axis.size))]
        return shard_logits(super().forward(x), self.axis, bounds)
