"""Sends activations forward and gradients backward between pipeline stages."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardformer.comm.collectives import PendingCollective, all_gather
from shardformer.comm.recorder import bytes_of, record
from shardformer.errors import ConfigError, InputError
from shardformer.layout.shard_spec import even_bounds
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.mesh.transport import CollectiveLog
from shardformer.pipeline.schedules import Action, ActionKind, Schedule, messages
from shardformer.torch_compat import has_data

TO_NEXT_STAGE, TO_PREVIOUS_STAGE = 1, 2
"""Towards a higher rank, and towards a lower one; tags that no exchange has, which sends without one."""


class PointToPoint:
    """Both ways between the ranks of the pipe axis. What is sent one way arrives in the order in which it was sent.

    Where a transport runs what two ranks send each other in turn, each way gets one of its own, so that neither waits
    for the other. All processes make their PointToPoint at one time.
    """

    def __init__(self, context: ParallelContext) -> None:
        self.axis = context.pipe
        self._transports = {TO_NEXT_STAGE: self.axis.transport, TO_PREVIOUS_STAGE: self.axis.transport}
        if self.axis.size > 1 and context.world is not None and self.axis.transport.sends_in_turn(context.device):
            self._transports[TO_PREVIOUS_STAGE] = context.world.connect(context.grid.rank_groups("pipe"))

    def send(self, x: Tensor, to: int, purpose: str) -> PendingCollective:
        """Starts sending a contiguous tensor, which stays as it is until what is returned is done."""
        way = TO_NEXT_STAGE if to > self.axis.rank else TO_PREVIOUS_STAGE
        noted = record("send", self.axis, bytes_of(x), purpose, ranks=2)
        return PendingCollective([self._transports[way].send(x, to, way)], lambda: x, noted)

    def receive(self, x: Tensor, source: int, purpose: str) -> PendingCollective:
        """Starts receiving into ``x``."""
        way = TO_NEXT_STAGE if source < self.axis.rank else TO_PREVIOUS_STAGE
        noted = record("receive", self.axis, bytes_of(x), purpose, ranks=2)
        return PendingCollective([self._transports[way].receive(x, source, way)], lambda: x, noted)


HEADER_BYTES = 1024
PREFETCHED_MESSAGES = 4
"""How many messages of a rank are received ahead of their use. gloo lets one leave when its receiver asks for it, so in
a schedule where a rank computes longer than the other sends, the second would only then set out."""


@dataclass(frozen=True)
class TensorMeta:
    """What is known of one tensor of a parcel before it comes.

    Args:
        trains: whether a gradient of it is wanted.
        is_cut: whether each tensor rank sends a part of it.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype
    trains: bool
    is_cut: bool

    @property
    def numel(self) -> int:
        return int(torch.Size(self.sizes).numel())


TensorMetas = tuple[TensorMeta, ...]


@dataclass
class _Posted:
    """A message that is on its way: first its header, where its shapes are not known."""

    action: Action
    header: tuple[Tensor, Any] | None = None
    parts: list[Tensor] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)


@dataclass
class _Incoming:
    """Messages from one rank, in the order in which it sends them."""

    source: int
    expected: deque[Action]
    posted: deque[_Posted] = field(default_factory=deque)


class StageExchange:
    """The parcels of one step, to and from all other ranks of the pipe axis.

    Args:
        point_to_point: along the pipe axis.
        tensor: the tensor axis, over which what is replicated is cut and gathered.

    ``known`` has the shapes by boundary (the virtual stage behind it) and key of the micro-batch, from step to step.
    Where a rank is traced alone no header says them: they are taken from ``given``, the ``known`` of stages before.
    ``waiting_for`` is the rank of the pipe axis whose parcel is waited for just now.
    """

    def __init__(self, point_to_point: PointToPoint, tensor: Axis, device: torch.device) -> None:
        self._point_to_point, self._tensor, self.device = point_to_point, tensor, device
        self.known: dict[tuple[int, Hashable], TensorMetas] = {}
        self.given: Mapping[tuple[int, Hashable], TensorMetas] = {}
        self._kept: dict[tuple[bool, int, int], list[Tensor]] = {}
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._incoming: dict[int, _Incoming] = {}
        self.waiting_for: int | None = None

    @property
    def traffic(self) -> CollectiveLog:
        """What this process hands to collectives."""
        return self._point_to_point.axis.traffic

    def begin(self, schedule: Schedule, keys: Sequence[Hashable]) -> None:
        """Makes ready for a step whose micro-batches have these keys."""
        self._schedule, self._keys = schedule, keys
        self._kept.clear()
        self._incoming = {}
        me = self._point_to_point.axis.rank
        for source in range(self._point_to_point.axis.size):
            order = messages(schedule, source, me)
            if source != me and order:
                self._incoming[source] = _Incoming(source, deque(order))

    # --- out

    def send(self, action: Action, tensors: list[Tensor | None], is_cut: Sequence[bool]) -> None:
        """Hands over what ``action`` gave: the activations behind a forward, the gradients behind a backward.

        Gradients are given for what trains; one that is None is zero.
        """
        receiver = self._schedule.placement[action.taker]
        key = (max(action.stage, action.taker), self._keys[action.micro_batch])
        if action.kind is ActionKind.FORWARD:
            given = [t for t in tensors if t is not None]
            shapes = tuple(
                TensorMeta(tuple(t.shape), t.dtype, t.requires_grad, c and self._tensor.size > 1)
                for t, c in zip(given, is_cut, strict=True)
            )
            is_new = key not in self.known
            if self.known.setdefault(key, shapes) != shapes:
                raise InputError(
                    f"A stage hands on {[s.sizes for s in shapes]}, before for micro-batches of these shapes "
                    f"{[s.sizes for s in self.known[key]]}",
                    rule="What a stage hands on has one shape for one shape of micro-batches, which the next stage "
                    "remembers",
                    remedy="Pad the batch, so that its shapes tell the shapes of everything that the model makes of it",
                )
            parts = [t.detach() for t in given]
            if receiver != self._point_to_point.axis.rank and is_new:
                self._start(_header(shapes, self.device), receiver, "header")
        else:
            wanted = [s for s in self.known[key] if s.trains]
            parts = [
                torch.zeros(s.sizes, dtype=s.dtype, device=self.device) if t is None else t
                for t, s in zip(tensors, wanted, strict=True)
            ]
            shapes = tuple(wanted)
        if receiver == self._point_to_point.axis.rank:
            self._kept[_result_key(action)] = parts
            return
        for part, shape in zip(parts, shapes, strict=True):
            if shape.is_cut:
                start, end = self._own_bounds(shape)
                part = part.reshape(-1)[start:end]
            self._start(part.contiguous(), receiver, _purpose(action))

    def _own_bounds(self, shape: TensorMeta) -> list[int]:
        """From where to where in all numbers this tensor rank's part of them is."""
        return even_bounds(shape.numel, self._tensor.size)[self._tensor.rank : self._tensor.rank + 2]

    def _start(self, x: Tensor, receiver: int, purpose: str) -> None:
        if x.numel():
            self._sent.append((self._point_to_point.send(x, receiver, purpose), x))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    # --- in

    def prefetch(self) -> None:
        """Starts to receive what every rank sends next, so that it comes while something else is computed."""
        for incoming in self._incoming.values():
            self._begin_next(incoming)

    def activations(self, stage: int, micro_batch: int) -> tuple[list[Tensor], TensorMetas]:
        """What the virtual stage before ``stage`` handed over, and what is known of it."""
        parts = self._take(Action(ActionKind.FORWARD, stage - 1, micro_batch))
        return parts, self.known[stage, self._keys[micro_batch]]

    def gradients(self, stage: int, micro_batch: int, kind: ActionKind) -> list[Tensor]:
        """The gradients of what ``stage`` handed on, of the tensors that train."""
        return self._take(Action(kind, stage + 1, micro_batch))

    def _take(self, action: Action) -> list[Tensor]:
        """What came of an action."""
        while _result_key(action) not in self._kept:
            incoming = self._incoming[self._schedule.placement[action.stage]]
            self._begin_next(incoming)
            posted = incoming.posted.popleft()
            self._kept[_result_key(posted.action)] = self._finish(incoming, posted)
            self._begin_next(incoming)
        return self._kept.pop(_result_key(action))

    def _begin_next(self, incoming: _Incoming) -> None:
        posted = incoming.posted
        while incoming.expected and len(posted) < PREFETCHED_MESSAGES and not (posted and posted[-1].header):
            action = incoming.expected[0]
            shapes = self._shapes_of(action)
            if shapes is None and action.kind is not ActionKind.FORWARD:
                return  # its own activation has not left yet, whose shapes it has
            posted.append(_Posted(incoming.expected.popleft()))
            if shapes is None:
                header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self.device)
                posted[-1].header = header, self._point_to_point.receive(header, incoming.source, "header")
            else:
                self._post(incoming.source, posted[-1], shapes)

    def _post(self, source: int, posted: _Posted, shapes: TensorMetas) -> None:
        for shape in shapes:
            start, end = self._own_bounds(shape)
            sizes = (end - start,) if shape.is_cut else shape.sizes
            part = torch.empty(sizes, dtype=shape.dtype, device=self.device)
            posted.parts.append(part)
            if part.numel():
                posted.works.append(self._point_to_point.receive(part, source, _purpose(posted.action)))

    def _shapes_of(self, action: Action) -> TensorMetas | None:
        if action.kind is ActionKind.FORWARD:
            return self.known.get((action.stage + 1, self._keys[action.micro_batch]))
        shapes = self.known.get((action.stage, self._keys[action.micro_batch]))
        return None if shapes is None else tuple(s for s in shapes if s.trains)

    def _finish(self, incoming: _Incoming, posted: _Posted) -> list[Tensor]:
        action, self.waiting_for = posted.action, incoming.source
        if posted.header is not None:
            header, work = posted.header
            work.wait()
            key = (action.stage + 1, self._keys[action.micro_batch])
            self.known[key] = pickle.loads(bytes(header.tolist())) if has_data(header) else self._unread(*key)
            self._post(incoming.source, posted, self.known[key])
        for work in posted.works:
            work.wait()
        self.waiting_for = None
        known = self._shapes_of(action)
        assert known is not None
        return [self._whole(part, shape) for part, shape in zip(posted.parts, known, strict=True)]

    def _unread(self, boundary: int, key: Hashable) -> TensorMetas:
        """What a header without values would say: the same as at the nearest boundary before where it is known."""
        before = {
            b: shapes for (b, k), shapes in (*self.given.items(), *self.known.items()) if k == key and b <= boundary
        }
        if not before:
            raise ConfigError(
                f"Stage {boundary} is traced, and nothing says what the stages before it hand on",
                remedy="Trace stage 0 with the same batch first, and set exchange.given to its exchange.known",
            )
        return before[max(before)]

    def _whole(self, part: Tensor, shape: TensorMeta) -> Tensor:
        if not shape.is_cut:
            return part
        bounds = even_bounds(shape.numel, self._tensor.size)
        lengths = [b - a for a, b in pairwise(bounds)]
        return all_gather(part, self._tensor, 0, lengths=lengths, purpose="arrival").view(shape.sizes)

    def finish(self) -> None:
        """Waits until everything has left."""
        while self._sent:
            work, _ = self._sent.popleft()
            work.wait()


def _result_key(action: Action) -> tuple[bool, int, int]:
    """Where the result of an action is kept."""
    return action.kind is ActionKind.FORWARD, action.taker, action.micro_batch


def _purpose(action: Action) -> str:
    return "activation" if action.kind is ActionKind.FORWARD else "gradient"


def _header(shapes: TensorMetas, device: torch.device) -> Tensor:
    written = pickle.dumps(shapes)
    assert len(written) <= HEADER_BYTES
    return torch.frombuffer(bytearray(written.ljust(HEADER_BYTES)), dtype=torch.uint8).to(device)
