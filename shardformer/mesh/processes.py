"""The transport over process groups of torch.distributed: the one place that knows the names of backends."""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from shardformer.mesh.deadlock import to, uncounted
from shardformer.mesh.lost import Peers, ReachedWork, ReceivedWork
from shardformer.mesh.presence import Presence, presence
from shardformer.mesh.transport import NOBODY, Lines, Meeting, Transport, Word, Work
from shardformer.torch_compat import is_counted, name_of_group, num_begun

FIRST_PAUSE_S, LAST_PAUSE_S = 0.001, 0.25
ASK_AFTER_S = 5.0
"""When ranks that have not come to a call are asked whether they wait for others."""
ASK_EVERY_S = 2.0
REST_S = 5.0
"""How long the rest is waited for when two ranks came to different calls: all are to hear of it."""


@dataclass(frozen=True)
class Processes:
    """The processes of a launcher of which ``ranks`` form the grid."""

    ranks: tuple[int, ...]
    thread: ClassVar[None] = None

    @property
    def store(self) -> Any:
        """The launcher's store; None where there is one process."""
        return launcher_store()

    def connect(self, lines: Lines) -> Transport:
        """One process group a line; none where each process stands alone."""
        if max(len(line) for line in lines) == 1:
            return NOBODY
        mine = next((list(line) for line in lines if dist.get_rank() in line), [])
        if len(self.ranks) == dist.get_world_size():
            group, _ = dist.new_subgroups_by_enumeration([list(line) for line in lines])
        else:  # the processes outside of the grid do not come here
            group = dist.new_group(mine, use_local_synchronization=True) if mine else None
        return ProcessGroupTransport(group) if len(mine) > 1 else NOBODY


def launcher_store() -> Any:
    """The store of torch's default group; None where there is no other process."""
    launched = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return _get_default_store() if launched else None


class ProcessGroupTransport:
    """Carries over one process group.

    Attributes:
        peers: who is on the other side, for the error that names one who is gone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = self._ranks.index(dist.get_rank())
        self.peers = Peers(self._ranks, self._rank)
        # get_backend gives "cpu:gloo,cuda:nccl" for a group of two backends; the configuration names each device's
        pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self._backends = {device: backend for device, backend in pairs}
        self._is_counted = is_counted(group)
        self._sends_uncounted = False
        self._sent, self._arrived = [0] * len(self._ranks), [0] * len(self._ranks)
        # answers, from now on, those that wait for this process
        presence(_get_default_store(), dist.get_rank()).carriers.append(weakref.ref(self))

    def begun(self) -> dict[str, int]:
        """How often this process sent something to others over the group, and something arrived: see ``Report``."""
        name = name_of_group(self.group)
        sent = {to(name, rank): count for rank, count in zip(self._ranks, self._sent, strict=True) if count}
        if self._sends_uncounted:
            sent = {uncounted(name): 1}
        return {**sent, f"{name}<": sum(self._arrived)}

    @property
    def world(self) -> Processes:
        """The processes of this group."""
        return Processes(tuple(self._ranks))

    def _is_staged(self, x: Tensor) -> bool:
        """Whether a tensor is copied through the host's memory: one on a GPU, over gloo.

        gloo accepts CUDA tensors in some collectives only, not in sends and receives. Copying all of them lets two
        ranks train on one GPU, which NCCL refuses.
        """
        return x.device.type != "cpu" and self._backends.get(x.device.type) == "gloo"

    def exchanges_directly(self, x: Tensor) -> bool:
        """gloo's reduce-scatter sends as many bytes as an all-reduce, and its small messages wait for two rounds."""
        return x.device.type == "cpu" or self._backends.get(x.device.type) == "gloo"

    def sends_in_turn(self, device: torch.device) -> bool:
        """NCCL runs what two ranks send each other on one stream; gloo tells messages apart by their tags."""
        return self._backends.get(device.type) == "nccl"

    def all_reduce(self, x: Tensor, op: str) -> Work:
        if self._is_staged(x):
            host = _copied(x)
            return StagedWork([self.all_reduce(host, op)], [(x, host)])
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        return self._started(dist.all_reduce(x, op=reduce_op, group=self.group, async_op=True), "an all-reduce")

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        if self._is_staged(x):
            host = _on_host(out)
            return StagedWork([self.all_gather(host, _copied(x))], [(out, host)])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return self._started(gather(out, x, group=self.group, async_op=True), "an all-gather")

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        if self._is_staged(x):
            host = _on_host(out)
            return StagedWork([self.reduce_scatter(host, _copied(x))], [(out, host)])
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return self._started(scatter(out, x, group=self.group, async_op=True), "a reduce-scatter")

    def exchange(self, outgoing: Mapping[int, Tensor], arriving: Mapping[int, Tensor]) -> Sequence[Work]:
        """Between two ranks one all-to-all, which gloo gives less to do than a send and a receive (measured: half the
        time under computation)."""
        if any(self._is_staged(x) for x in (*outgoing.values(), *arriving.values())):
            sent = {id(x): _copied(x) for x in outgoing.values()}  # what goes to several ranks is copied once
            into = {rank: _on_host(x) for rank, x in arriving.items()}
            works = self.exchange({rank: sent[id(x)] for rank, x in outgoing.items()}, into)
            return [StagedWork(works, [(arriving[rank], host) for rank, host in into.items()])]
        if len(self._ranks) == 2:
            return self._swap(outgoing.get(1 - self._rank), arriving.get(1 - self._rank))
        works = [self.receive(x, r, 0) for r, x in arriving.items() if x.numel()]
        return works + [self.send(x, r, 0) for r, x in outgoing.items() if x.numel()]

    def _swap(self, out: Tensor | None, into: Tensor | None) -> Sequence[Work]:
        give, take = (0 if t is None else t.numel() for t in (out, into))
        like = out if out is not None else into
        if like is None or give + take == 0:
            return []
        given = like.new_empty(0) if out is None else out.view(-1)
        taken = like.new_empty(0) if into is None else into.view(-1)
        take_by_rank, give_by_rank = ([take, 0], [give, 0]) if self._rank == 1 else ([0, take], [0, give])
        work = dist.all_to_all_single(taken, given, take_by_rank, give_by_rank, group=self.group, async_op=True)
        return [self._started(work, "an exchange", 1 - self._rank)]

    def send(self, x: Tensor, to: int, tag: int) -> Work:
        if self._is_staged(x):
            return StagedWork([self.send(_copied(x), to, tag)])
        if torch.compiler.is_compiling():  # which would compile anew for each number
            self._sends_uncounted = True
        else:
            self._sent[to] += 1
        return ReachedWork(dist.isend(x, self._ranks[to], group=self.group, tag=tag), self.peers, "a send", to)

    def receive(self, x: Tensor, source: int, tag: int) -> Work:
        if self._is_staged(x):
            host = _on_host(x)
            return StagedWork([self.receive(host, source, tag)], [(x, host)])
        work = dist.irecv(x, self._ranks[source], group=self.group, tag=tag)
        return ReceivedWork(work, self.peers, source, (self.group, 0, "") if self._is_counted else None, self._arrived)

    def broadcast(self, x: Tensor, source: int) -> None:
        if self._is_staged(x):
            host = _copied(x)
            self.broadcast(host, source)
            x.data.copy_(host)
            return
        with self.peers.reached("a broadcast"):
            dist.broadcast(x, src=self._ranks[source], group=self.group)

    def broadcast_object(self, value: Any, source: int) -> Any:
        box = [value]
        with self.peers.reached("a broadcast"):
            dist.broadcast_object_list(box, src=self._ranks[source], group=self.group)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        out: list[Any] = [None] * len(self._ranks)
        with self.peers.reached("a gather of objects"):
            dist.all_gather_object(out, value, group=self.group)
        return out

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        device = "cpu" if "cpu" in self._backends else next(iter(self._backends))
        mine = torch.tensor([numbers], dtype=torch.int64, device=device)
        parts = [mine if rank == self._rank else torch.empty_like(mine) for rank in range(len(self._ranks))]
        if self.exchanges_directly(mine):
            others = [rank for rank in range(len(parts)) if rank != self._rank]
            works = self.exchange(dict.fromkeys(others, mine), {rank: parts[rank] for rank in others})
        else:
            works = [self._started(dist.all_gather(parts, mine, group=self.group, async_op=True), "an all-gather")]
        for work in works:
            work.wait()
        gathered: list[list[int]] = torch.cat(parts).tolist()
        return gathered

    def meet(self, call: str, *, waits: bool) -> Meeting:
        """Each rank keeps in the launcher's store the number of its last call, and its name."""
        store, me = _get_default_store(), dist.get_rank()
        asked = presence(store, me)
        name = f"shardformer/calls/{hashlib.sha256(repr(self._ranks).encode()).hexdigest()[:16]}"
        number = store.add(f"{name}/{me}/count", 1)
        store.set(f"{name}/{me}", json.dumps([number, call, not waits]))
        return self._met(store, name, number, asked) if waits else Meeting()

    def _met(self, store: Any, name: str, number: int, asked: Presence) -> Meeting:
        """Waits for those that have not come while they may. What this call came to is left for those that are late."""
        begin, pause_s = time.monotonic(), FIRST_PAUSE_S
        first, ask_at = 0, begin + ASK_AFTER_S
        differs_since: float | None = None
        while True:
            words = self._words(store, name, number)
            if None not in words:
                return Meeting(words)
            if store.check([f"{name}/failed/{number}"]):
                return Meeting(words, {self._ranks[r]: "gave up" for r, word in enumerate(words) if word is None})
            now = time.monotonic()
            absent = [rank for rank, word in zip(self._ranks, words, strict=True) if word is None]
            if differs_since is None and len({word.call for word in words if word is not None}) > 1:
                differs_since = now
            if now > ask_at:
                question, ask_at = asked.ask(), now + ASK_EVERY_S
                first = first or question
            missing = asked.waiting(absent, first) if ask_at > begin + ASK_AFTER_S else {}
            late = now - begin > store.timeout.total_seconds()
            if late or len(missing) == len(absent) or (differs_since is not None and now - differs_since > REST_S):
                store.set(f"{name}/failed/{number}", "")
                return Meeting(words, missing)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _words(self, store: Any, name: str, number: int) -> list[Word | None]:
        """What ranks came to as their call of this number. One that is further has made this one, unless it failed."""
        keys = [f"{name}/{rank}" for rank in self._ranks]
        if store.has_extended_api() and store.check(keys):
            found = store.multi_get(keys)
        else:
            found = [store.get(key) if store.check([key]) else b"[0, null, null]" for key in keys]
        mine = Word(*json.loads(found[self._rank])[1:])
        words: list[Word | None] = []
        for value in found:
            count, call, is_step = json.loads(value)
            is_past = count > number and not store.check([f"{name}/failed/{number}"])
            words.append(mine if is_past else Word(call, is_step) if count == number else None)
        return words

    def _started(self, work: Any, what: str, peer: int | None = None) -> Work:
        joined = None
        if self._is_counted and not torch.compiler.is_compiling():
            joined = self.group, num_begun(self.group), what.partition(" ")[2].replace("-", "_")
        return ReachedWork(work, self.peers, what, peer, joined)


class StagedWork:
    """Transfers between hosts on behalf of device tensors; ``wait`` copies the received values to the device.

    Args:
        works: the transfers of the host copies.
        arriving: pairs of a device tensor and the host buffer that receives its values.
    """

    def __init__(self, works: Sequence[Work], arriving: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self._works, self._arriving = works, list(arriving)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        while self._arriving:  # once, also where it is waited for again
            x, host = self._arriving.pop()
            x.data.copy_(host)  # as torch's collectives, which autograd does not see

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _copied(x: Tensor) -> Tensor:
    """A copy on the host. Waits for the computation of ``x``."""
    return x.detach().to("cpu", copy=True)


def _on_host(x: Tensor) -> Tensor:
    """A host buffer to receive ``x`` into."""
    return torch.empty_like(x, device="cpu")
