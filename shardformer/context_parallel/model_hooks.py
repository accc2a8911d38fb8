"""Shards a model's sequence at its inputs and gathers it where a module needs all positions.

inputs, embeddings, masks    whole, on all ranks alike
layers                       this rank's positions, of the hidden states and of all else that they are given
behind them                  a ``SequenceShardedTensor``, which a head and its loss read position by position
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import all_gather_numbers
from shardformer.comm.deferred_tensor import resolve_deferred
from shardformer.context_parallel.masks import ChunkedMask
from shardformer.context_parallel.sequence_layout import (
    ContextParallelState,
    SequencePositions,
    new_seed,
    set_current_state,
)
from shardformer.context_parallel.sequence_sharded_tensor import (
    SequenceShardedTensor,
    gather_rows,
    local_rows,
    set_inside_model,
    shared_input,
)
from shardformer.errors import InputError
from shardformer.tensor_parallel.region import LocalRandomState
from shardformer.tensor_parallel.sequence_parallel import first_tensor, with_first_output
from shardformer.torch_compat import (
    current_graph_task_id,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_with_path,
)
from shardformer.transformers_compat import arguments_of, caches_in, without_caches

# B batch, S sequence, H hidden; s: this rank's positions


class ModelInputHook:
    """Before and behind a forward of the whole model.

    Args:
        draws: whether the model draws random numbers when it trains.
    """

    def __init__(self, run: ContextParallelState, model: nn.Module, *, draws: bool) -> None:
        self._run, self._draws, self._arguments = run, draws, arguments_of(model)
        model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        run.is_open = not caches_in((*args, *kwargs.values())) and not kwargs.get("use_cache", False)
        run.now, run.met = None, {}
        set_current_state(run)
        set_inside_model(True)
        if not run.is_open:
            return None
        if self._draws and model.training:  # before ranks that were seeded apart are aligned
            run.seed = all_gather_numbers([new_seed()], run.axis)[0][0]
        return self._shared(args, kwargs)

    def _shared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inputs that need a gradient: each rank finds that of its own positions, and all of them get the whole."""

        def trains(x: Any) -> bool:
            return isinstance(x, Tensor) and x.requires_grad and not isinstance(x, SequenceShardedTensor)

        if not torch.is_grad_enabled() or not any(map(trains, tree_leaves((args, kwargs)))):
            return None
        return tree_map(lambda x: shared_input(x, self._run.axis) if trains(x) else x, (args, kwargs))

    def _leave(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Keys and values that a forward kept are of this rank's positions: nobody may go on with them."""
        run = self._run
        run.now = None
        set_current_state(None)
        set_inside_model(False)
        return without_caches(output, self._arguments) if run.is_open else None


class StackHook:
    """The layers of one stack.

    Args:
        path: of the stack.
        layers: in order; one that is called again stands here once.
        ends: behind which the sequence is whole for whoever asks: the last layer, or a norm behind it; every layer,
            where the model reads or writes positions between them.
        draws: whether the model draws random numbers when it trains: then each rank draws its own between the layers.
    """

    def __init__(
        self,
        run: ContextParallelState,
        path: str,
        layers: Sequence[nn.Module],
        ends: Sequence[nn.Module],
        *,
        draws: bool,
    ) -> None:
        self._run, self._path, self._first = run, path, layers[0]
        self._random = LocalRandomState(run.axis) if draws else None
        self._full: int | None = None  # of the forward that is between the first layer and the last
        for layer in dict.fromkeys(layers):
            layer.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        for end in dict.fromkeys(ends):
            end.register_forward_hook(self._leave)

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        again = current_graph_task_id() >= 0
        if not again and not run.is_open:
            run.now = None
            return None
        hidden = first_tensor(args, kwargs)
        masks = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ChunkedMask)]
        if again:
            full = self._recalled(layer, hidden, masks)
            if full is None:
                run.now = None
                return None
        elif self._full is None:
            full = self._full = hidden.shape[1]
            if self._random is not None and layer.training:
                self._random.enter(hidden)
        else:
            full = self._full
        run.now = run.positions_in_forward(full)
        lengths = {full, *(mask.keys.length for mask in masks)}
        return tree_map_with_path(
            lambda path, leaf: self._own((self._path, *path[1:]), leaf, leaf is hidden, lengths), (args, kwargs)
        )

    def _recalled(self, layer: nn.Module, hidden: Tensor, masks: Sequence[ChunkedMask]) -> int | None:
        """In a recomputation: the length of the sequence in the forward that is repeated."""
        lengths = [mask.queries.length for mask in masks]
        mine = [length for length in lengths if hidden.shape[1] in (length, self._run.part(length))]
        if mine:
            return mine[0]
        run, length = self._run, hidden.shape[1]
        if layer is self._first and length in run.known:
            return length
        found = run.of_part(length)
        return None if found is None else found.length

    def _own(self, path: Hashable, leaf: Any, is_hidden: bool, lengths: set[int]) -> Any:
        """This rank's positions of an argument."""
        run = self._run
        if isinstance(leaf, SequenceShardedTensor):
            run.positions_in_forward(leaf.rows.full)
            rows = run.rows(leaf.rows.full)
            return leaf.local if leaf.rows is rows else local_rows(leaf.full_tensor(), rows, leaf.shard_dim)
        if not isinstance(leaf, Tensor):
            # a cache of this rank's positions is of no use, and a recomputation would add to it again
            return None if hasattr(type(leaf), "get_seq_length") else leaf
        leaf = resolve_deferred(leaf)
        if is_hidden:
            return local_rows(leaf, run.rows(leaf.shape[1]), 1) if leaf.shape[1] in lengths else leaf
        dim = run.dim_of(path, leaf, lengths)
        return leaf if dim is None else local_rows(leaf, run.rows(leaf.shape[dim]), dim)

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> Any:
        run = self._run
        if current_graph_task_id() >= 0 or self._full is None:
            return output
        rows, self._full = run.rows(self._full), None
        run.now = None
        if self._random is not None:
            self._random.leave()
        return with_first_output(output, lambda x: SequenceShardedTensor(resolve_deferred(x), rows, 1))

    def reset_after_error(self) -> None:
        """After a forward that an error broke off."""
        self._full = None
        if self._random is not None:
            self._random.leave()


def pass_through(module: nn.Module) -> None:
    """A parallel layer outside of the stacks reads a cut tensor position by position."""
    cut: list[SequenceShardedTensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, SequenceShardedTensor)]
        cut[:] = found[:1]
        return tree_map(
            lambda leaf: leaf.local if isinstance(leaf, SequenceShardedTensor) else leaf, (args, dict(kwargs))
        )

    def leave(_: nn.Module, args: Any, output: Any) -> Any:
        if not cut:
            return output
        x = cut.pop()
        return with_first_output(output, lambda y: SequenceShardedTensor(resolve_deferred(y), x.rows, x.shard_dim))

    module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    module.register_forward_hook(leave)


# B batch, S sequence, H hidden; s: this rank's positions


class FullSequenceHook:
    """Gathers what a module is given for each position (a state space, a convolution), and takes this rank's of what
    it gives. Every rank computes the module for all positions.

    Communicates: forward one all-gather of B*S*H, backward one reduce-scatter of it.

    Args:
        path: of the module, alike in each layer.
        draws: whether the model draws random numbers when it trains.
    """

    def __init__(self, run: ContextParallelState, path: tuple[str, str], module: nn.Module, *, draws: bool) -> None:
        self._run, self._path = run, path
        self._random = LocalRandomState(run.axis, aligned=True) if draws else None
        self._now: SequencePositions | None = None
        self._before: SequencePositions | None = None
        module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run, hidden = self._run, first_tensor(args, kwargs)
        self._now = now = self._before = run.now
        again = current_graph_task_id() >= 0
        if now is None and again:  # a layer that is computed again
            self._now = now = run.of_part(hidden.shape[1])
        if now is None:
            return None
        part = run.part(now.length)
        if hidden.shape[1] != part:
            raise InputError(
                f"A module that is given the whole sequence was given a tensor of shape {tuple(hidden.shape)}",
                rule=f"Its input is (batch, {part}, hidden): this rank's part of {now.length} positions",
                remedy="Leave the sequence axis out for this model",
            )
        if self._random is not None and module.training:
            self._random.enter(hidden)
        among = run.known if again else run.met  # that of an encoder, beside a decoder's
        parts = {run.part(length) for length in among}
        leaves, spec = tree_flatten_with_path((args, kwargs))
        given = {(*self._path, *path): x for path, x in leaves if isinstance(x, Tensor) and x is not hidden}
        run.learn_parts(given, among, hidden.shape[0])
        run.now = None

        def whole(path: Any, leaf: Any) -> Any:
            if leaf is hidden:
                return gather_rows(leaf, run.rows(now.length), 1)
            dim = run.dim_of((*self._path, *path), leaf, parts) if isinstance(leaf, Tensor) else None
            lies = None if dim is None else run.of_part(leaf.shape[dim], among)
            return leaf if lies is None or dim is None else gather_rows(leaf, run.rows(lies.length), dim)

        return spec.unflatten(whole(path, leaf) for path, leaf in leaves)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        run, now, self._now = self._run, self._now, None
        if now is None:
            return output
        run.now = self._before
        if self._random is not None:
            self._random.leave()
        return with_first_output(output, lambda x: local_rows(x, run.rows(now.length), 1))

    def reset_after_error(self) -> None:
        """After a forward that an error broke off."""
        self._now = None
        if self._random is not None:
            self._random.leave()
