"""The update of a step: the optimizers change their pieces, and all ranks get the new parameters.

What is on the device is updated first, all at once; on a GPU that runs while the host goes on. What is on the host
follows one shard after the other, so that what is new of one goes up, and to the other ranks, while the next one is
updated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor
from torch.optim import Optimizer

from shardformer.comm.collectives import Pending
from shardformer.errors import InputError
from shardformer.mesh.context import ParallelContext
from shardformer.optim.offload.host import Host
from shardformer.optim.offload.paged import Files
from shardformer.optim.probe import can_step_apart
from shardformer.optim.shards import Shard

UNDER_WAY = 8
"""Gathers at a time: of slices they take memory until they are written."""


class Update:
    """Steps of several optimizers on the pieces of shards.

    Args:
        host: where some of the shards' pieces are; None: nowhere.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], shards: Sequence[Shard], host: Host | None, context: ParallelContext
    ) -> None:
        self._optimizers, self._shards, self._host, self._context = optimizers, shards, host, context
        comes = host is not None or any(shard.rounded is not None for shard in shards)
        self._is_apart = comes and all(can_step_apart(optimizer) for optimizer in optimizers)

    def run(self) -> None:
        """Communicates one all-gather of the parameters of each shard that got a gradient.

        All ranks gather in one order, that of the shards; those of the device first. With files those come last, when
        all ranks have said that the others are written: one number over each axis. Raises InputError, on all ranks,
        where a file could not be read or written; then all is as before.
        """
        for shard in self._shards:
            shard.give_gradients()
        changed = [shard for shard in self._shards if shard.is_changed]
        lasting = [shard for shard in changed if shard.host is None and shard.rounded is None]
        rounded = [[shard] for shard in changed if shard.rounded is not None]
        there = [[shard] for shard in changed if shard.host is not None]
        if isinstance(self._host, Files):
            self._run(there)
            self._end_files(self._host, [shard for turn in there for shard in turn])
            self._run([lasting])
        else:
            self._run([lasting, *rounded, *there] if self._is_apart else [changed])

    def _run(self, turns: Sequence[Sequence[Shard]]) -> None:
        """Updates the shards of one turn after those of the other."""
        hand_out = HandOut()
        with self._host.updating() if self._host is not None else nullcontext():
            for number, turn in enumerate(turns):
                for shard in (shard for coming in turns[number : number + 2] for shard in coming):
                    shard.fetch()
                if all([shard.take() for shard in turn]):
                    self._step(turn if self._is_apart else None)
                    for shard in turn:
                        shard.store()
                hand_out.add(turn)
                for shard in turn:
                    shard.put_away()
        hand_out.finish()

    def _end_files(self, files: Files, shards: Sequence[Shard]) -> None:
        said = files.end_step([shard.host for shard in shards if shard.host is not None], self._context)
        if said is None:
            return
        hand_out = HandOut()
        for shard in shards:
            if shard.take():
                shard.store()
            hand_out.add([shard])
            shard.drop()
        hand_out.finish()
        what = f"The optimizer's files in {files.disk.folder} failed: {said}"
        if files.end_step([], self._context) is not None:
            rule = "What was before is read again, and that failed too: of some buckets the weights are lost"
            raise InputError(what, rule=rule, remedy="Go on from a checkpoint, on another disk")
        raise InputError(
            what,
            rule="A step counts when all ranks have written theirs: weights and states are those of the step before",
            remedy="Make room, then go on with the next batch; or save the model now",
        )

    def _step(self, turn: Sequence[Shard] | None) -> None:
        """One step of the optimizers; of a turn alone where one is given."""
        if turn is None:
            for optimizer in self._optimizers:
                optimizer.step()
            return
        pieces = {id(piece.value) for shard in turn for piece in shard.pieces if piece.value.grad is not None}
        for optimizer in self._optimizers:
            with only(optimizer, pieces):
                if optimizer.param_groups:
                    optimizer.step()


class HandOut:
    """Brings new parameters together on all ranks: of some shards while the next ones are stored."""

    def __init__(self) -> None:
        self._stored: list[Shard] = []
        self._under_way: deque[tuple[Shard, Pending]] = deque()

    def add(self, shards: Sequence[Shard]) -> None:
        """Their new values are stored. Starts to gather those that were added before."""
        self._gather()
        self._stored = list(shards)

    def _gather(self) -> None:
        """Of stage 3 the next forward gathers."""
        for shard in (shard for shard in self._stored if not shard.keeps):
            self._under_way.append((shard, shard.start_gather()))
            self._land(UNDER_WAY)
        self._stored = []

    def _land(self, most: int) -> None:
        while len(self._under_way) > most:
            shard, values = self._under_way.popleft()
            shard.write(values.wait())

    def finish(self) -> None:
        """The model's parameters have the new values when this returns."""
        self._gather()
        self._land(0)


@contextmanager
def only(optimizer: Optimizer, params: Collection[int]) -> Iterator[None]:
    """In here the optimizer holds no other parameters than these, by identity."""
    groups = optimizer.param_groups
    held: list[list[Tensor]] = [group["params"] for group in groups]
    try:
        for group, all_of_it in zip(groups, held, strict=True):
            group["params"] = [p for p in all_of_it if id(p) in params]
        optimizer.param_groups = [group for group in groups if group["params"]]
        yield
    finally:
        for group, all_of_it in zip(groups, held, strict=True):
            group["params"] = all_of_it
        optimizer.param_groups = groups
