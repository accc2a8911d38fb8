"""What flows between the blocks of a stack on a tensor grid: some samples, some hidden features of each."""

# B batch, b this rank's samples, S sequence, H hidden, h this rank's part of it

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardformer.comm.collectives import all_gather, local_chunk
from shardformer.comm.conjugates import first_order_only, join_dim, split_dim
from shardformer.errors import InputError
from shardformer.layers.grid.edges import GridEdges
from shardformer.layers.random_stream import RandomStream
from shardformer.layers.tensor.edges import Edges, WholeEdges
from shardformer.layers.tensor.pending import resolved
from shardformer.layers.tensor.stream import Stream, with_first_output, with_first_tensor
from shardformer.layout.split import Split
from shardformer.layout.stream import StreamLayout
from shardformer.mesh.axis import Axis
from shardformer.mesh.tensor_grid import TensorGrid
from shardformer.transformers_compat import caches_in, holds_tokens


class GridStream(Stream):
    """The activations between the blocks of one stack.

    A batch that does not divide is padded with copies of its last sample, of whose outputs nothing is read. A forward
    that goes on with keys and values of another one, or keeps them to be gone on with, is computed whole on all ranks.
    """

    def __init__(self, layout: StreamLayout, grid: TensorGrid, *, random: bool = False) -> None:
        super().__init__(StreamLayout(), grid.column)
        self.layout, self.grid, self.width = layout, grid, 0
        self.batch_dim = 0
        self._known: set[int] = set()
        self._random = RandomStream(grid.whole) if random else None

    @property
    def is_cut(self) -> bool:
        return self._is_open

    @property
    def shares_samples(self) -> Axis | None:
        return self.grid.hidden

    def edges(self, x: Tensor) -> Edges | GridEdges:  # type: ignore[override]  # a block asks only for what both have
        if torch._C._current_graph_task_id() >= 0:
            self._is_open = True  # what is recomputed was trained
        return GridEdges(self.grid, self.width, self.batch_dim) if self._is_open else WholeEdges(self.axis)

    def register(self, first: nn.Module, last: nn.Module) -> None:
        first.register_forward_pre_hook(self._enter_module, with_kwargs=True)
        last.register_forward_hook(self._leave_module)

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_trained = module.training or torch.is_grad_enabled()
        caches = caches_in((*args, *kwargs.values()))
        self._is_open = is_trained or not (caches or kwargs.get("use_cache"))
        if is_trained and any(map(holds_tokens, caches)) and torch._C._current_graph_task_id() < 0:
            raise InputError(
                "A forward that trains was given keys and values of another one",
                rule="On a tensor grid each rank has some samples, and what was kept is of all of them",
                remedy="Leave the cache out in training (prefix tuning needs tensor_parallel_mode='1d')",
            )
        return with_first_tensor(args, kwargs, lambda x: self.enter_stack(resolved(x), module.training))

    def enter_stack(self, x_BSH: Tensor, training: bool) -> Tensor:
        """The stack's input (B, S, H) becomes this rank's (b, S, h). Backward: one all-gather over all ranks."""
        if not self._is_open:
            return x_BSH
        self.samples, self.width = x_BSH.shape[self.batch_dim], x_BSH.shape[-1]
        self._known.add(self.samples)
        self._is_random = training
        if self._random is not None and training:
            self._random.enter(x_BSH)
        entered: Tensor = _Enter.apply(x_BSH, self.grid, self.batch_dim)
        return entered

    def leave_stack(self, x_bSh: Tensor) -> Tensor:
        """The stack's output is whole again. Forward: one all-gather over all ranks; backward nothing.

        In a recomputation, too: a checkpoint may hold what follows the stack (the merging of patches of Swin).
        """
        if not self._is_open:
            return x_bSh
        if self._random is not None and self._is_random:
            self._random.leave()
        samples = self.batch_of(x_bSh.shape[self.batch_dim])
        assert samples is not None  # of a forward that entered
        left: Tensor = _Leave.apply(x_bSh, self.grid, samples, self.width, self.batch_dim)
        return left

    def register_whole(self, module: nn.Module, random: bool) -> GridGathered:
        """Gives ``module`` all hidden features of this rank's samples. One all-gather, and backward one too."""
        return GridGathered(self, module, random)

    def cut_argument(self, x: Tensor, dim: int, samples: int) -> Tensor:
        """This rank's samples of what a block is given for each, x, whose ``dim`` counts samples or a multiple."""
        batch = self.batch_of(samples)
        if batch is None or x.shape[dim] % batch:
            return x
        by_sample = x.unflatten(dim, (batch, -1))
        core = self.grid.core
        cut: Tensor = padded(by_sample, -batch % self.grid.samples, dim).chunk(core.size, dim)[core.rank]
        return cut.flatten(dim, dim + 1)

    def batch_of(self, samples: int) -> int | None:
        """The batch of the forward under way, or of that which is recomputed: by its samples on this rank."""
        if torch._C._current_graph_task_id() < 0 or self.rows(self.samples) == samples:
            return self.samples
        return next((n for n in self._known if self.rows(n) == samples), None)

    def rows(self, batch: int) -> int:
        """How many samples of a batch a rank has between the blocks."""
        return -(-batch // self.grid.samples) * self.grid.samples // self.grid.batch.size

    def __deepcopy__(self, memo: dict[int, Any]) -> GridStream:
        memo[id(self)] = twin = GridStream(self.layout, self.grid, random=self._random is not None)
        twin.width, twin.samples, twin.batch_dim = self.width, self.samples, self.batch_dim
        return twin


class GridGathered:
    """Around a module that reads all hidden features: a mixture of experts with its router."""

    def __init__(self, stream: GridStream, module: nn.Module, random: bool) -> None:
        self._stream, hidden = stream, stream.grid.hidden
        self._random = RandomStream(hidden, aligned=True) if random else None
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave)

    def _split(self) -> Split:
        return Split.even(self._stream.width, self._stream.grid.hidden.size)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def join(x: Tensor) -> Tensor:
            self._stream.edges(x)
            if not self._stream.is_cut:
                return x
            if self._random is not None and module.training:
                self._random.enter(x)
            return join_dim(x, self._stream.grid.hidden, -1, self._split())

        return with_first_tensor(args, kwargs, join)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._stream.is_cut:
            return output
        self.abandon()
        return with_first_output(output, lambda x: split_dim(x, self._stream.grid.hidden, -1, self._split()))

    def abandon(self) -> None:
        """Behind the module, or after a forward that an error broke off: back to the random numbers outside."""
        if self._random is not None:
            self._random.leave()


def padded(x: Tensor, more: int, dim: int = 0) -> Tensor:
    """x with so many copies of the last of a dim behind it."""
    if not more:
        return x
    last = x.narrow(dim, x.shape[dim] - 1, 1)
    return torch.cat((x, last.expand([more if d == dim else n for d, n in enumerate(x.shape)])), dim)


def _own(x: Tensor, grid: TensorGrid, dim: int) -> Tensor:
    mine = local_chunk(local_chunk(x, grid.batch, dim), grid.hidden, x.dim() - 1)
    return mine.clone(memory_format=torch.contiguous_format)  # a view would keep all of x


def _whole(x: Tensor, grid: TensorGrid, dim: int, samples: int, width: int) -> Tensor:
    return all_gather(all_gather(x, grid.hidden, -1, width), grid.batch, dim).narrow(dim, 0, samples)


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: TensorGrid, dim: int) -> Tensor:
        ctx.grid, ctx.dim, ctx.samples, ctx.width = grid, dim, x.shape[dim], x.shape[-1]
        return _own(padded(x, -x.shape[dim] % grid.samples, dim), grid, dim)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _whole(grad, ctx.grid, ctx.dim, ctx.samples, ctx.width), None, None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: TensorGrid, samples: int, width: int, dim: int) -> Tensor:
        ctx.grid, ctx.dim = grid, dim
        return _whole(x, grid, dim, samples, width)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        more = -grad.shape[ctx.dim] % ctx.grid.samples
        shape = [more if d == ctx.dim else n for d, n in enumerate(grad.shape)]
        whole = torch.cat((grad, grad.new_zeros(shape)), ctx.dim) if more else grad
        return _own(whole, ctx.grid, ctx.dim), None, None, None, None
