"""Around a module that mixes tokens otherwise than by attention: it is given all positions, where ranks have some."""

# B batch, S sequence, H hidden; s: this rank's positions

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from shardformer.errors import InputError
from shardformer.layers.context.cut_tensor import gather_rows, take_rows
from shardformer.layers.context.run import ContextRun
from shardformer.layers.random_stream import RandomStream
from shardformer.layers.tensor.stream import first_tensor, with_first_output
from shardformer.layout.positions import Positions


class ContextWhole:
    """Gathers what a module is given for each position (a state space, a convolution), and takes this rank's of what
    it gives. Every rank computes the module for all positions.

    Communicates: forward one all-gather of B*S*H, backward one reduce-scatter of it.

    Args:
        path: of the module, alike in each layer.
        draws: whether the model draws random numbers when it trains.
    """

    def __init__(self, run: ContextRun, path: tuple[str, str], module: nn.Module, *, draws: bool) -> None:
        self._run, self._path = run, path
        self._random = RandomStream(run.axis, aligned=True) if draws else None
        self._now: Positions | None = None
        self._before: Positions | None = None
        module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run, hidden = self._run, first_tensor(args, kwargs)
        self._now = now = self._before = run.now
        again = torch._C._current_graph_task_id() >= 0
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
        return with_first_output(output, lambda x: take_rows(x, run.rows(now.length), 1))

    def abandon(self) -> None:
        """After a forward that an error broke off."""
        self._now = None
        if self._random is not None:
            self._random.leave()
