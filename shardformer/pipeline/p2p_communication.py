"""Point-to-point communication of activations and gradients between pipeline stages."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from shardformer.comm.collectives import PendingCollective, all_gather
from shardformer.comm.recorder import get_num_bytes, record_collective_start
from shardformer.errors import ConfigError, InputError
from shardformer.layout.shard_spec import get_even_split_bounds
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.mesh.transport import CollectiveLog, Work
from shardformer.pipeline.schedules import ActionKind, PipelineAction, PipelineSchedule, get_sent_actions
from shardformer.torch_compat import has_real_data

TO_NEXT_STAGE, TO_PREVIOUS_STAGE = 1, 2
"""Message tags for sends to a higher and to a lower rank. Other exchanges send without a tag."""


class PointToPointCommunicator:
    """Sends and receives tensors between pipeline ranks. Messages in the same direction keep their order.

    If a transport serializes the messages of two ranks, a second one is opened, so that activations and gradients do
    not wait for each other. All processes must construct their PointToPointCommunicator at the same time.
    """

    def __init__(self, context: ParallelContext) -> None:
        self.axis = context.pipe
        self._transports = {TO_NEXT_STAGE: self.axis.transport, TO_PREVIOUS_STAGE: self.axis.transport}
        if (
            self.axis.size > 1
            and context.world is not None
            and self.axis.transport.has_serialized_sends(context.device)
        ):
            self._transports[TO_PREVIOUS_STAGE] = context.world.create_transport(context.grid.get_rank_groups("pipe"))

    def send(self, tensor: Tensor, dst: int, purpose: str) -> PendingCollective:
        """Send a contiguous tensor asynchronously. The tensor must not change until the send completes."""
        tag = TO_NEXT_STAGE if dst > self.axis.rank else TO_PREVIOUS_STAGE
        event = record_collective_start("send", self.axis, get_num_bytes(tensor), purpose, num_ranks=2)
        return PendingCollective([self._transports[tag].send(tensor, dst, tag)], lambda: tensor, event)

    def receive(self, buffer: Tensor, src: int, purpose: str) -> PendingCollective:
        tag = TO_NEXT_STAGE if src < self.axis.rank else TO_PREVIOUS_STAGE
        event = record_collective_start("receive", self.axis, get_num_bytes(buffer), purpose, num_ranks=2)
        return PendingCollective([self._transports[tag].receive(buffer, src, tag)], lambda: buffer, event)


HEADER_BYTES = 1024
PREFETCHED_MESSAGES = 4
"""Number of receives that are posted ahead per rank. gloo starts a transfer only when its receive is posted."""


@dataclass(frozen=True)
class TensorMeta:
    """Shape, dtype and sharding of a tensor that one pipeline stage sends to another.

    Args:
        requires_grad: whether the tensor needs a gradient.
        is_sharded: whether each tensor-parallel rank sends one shard of it.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_sharded: bool

    @property
    def numel(self) -> int:
        return int(torch.Size(self.sizes).numel())


TensorMetas = tuple[TensorMeta, ...]


@dataclass
class _PostedReceive:
    """An asynchronous receive of one message from another pipeline stage.

    If the shapes are unknown, the receive of a header with the shapes is posted first.
    """

    action: PipelineAction
    header: tuple[Tensor, Work] | None = None
    parts: list[Tensor] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)


@dataclass
class _ReceiveQueue:
    """Messages that this rank will receive from one other pipeline rank, in the order in which they are sent."""

    source: int
    expected: deque[PipelineAction]
    posted: deque[_PostedReceive] = field(default_factory=deque)


class StageCommunicator:
    """Exchanges activations and gradients with the other pipeline ranks.

    ``known`` maps (receiving virtual stage, key of the micro-batch) to the metadata of the activations, across steps.
    A trace of a single rank receives no headers. It takes the metadata from ``given``, the ``known`` of earlier
    stages. ``waiting_for`` is the rank of the pipe axis whose message this rank is waiting for.

    Args:
        point_to_point: sends and receives along the pipe axis.
        tensor_axis: the tensor axis. Each of its ranks sends one shard of a replicated tensor. The receivers all-gather
            it.
    """

    def __init__(self, point_to_point: PointToPointCommunicator, tensor_axis: Axis, device: torch.device) -> None:
        self._point_to_point, self._tensor, self.device = point_to_point, tensor_axis, device
        self._rank = point_to_point.axis.rank
        self.known: dict[tuple[int, Hashable], TensorMetas] = {}
        self.given: Mapping[tuple[int, Hashable], TensorMetas] = {}
        self._arrived: dict[tuple[bool, int, int], list[Tensor]] = {}
        self._sent: deque[tuple[Work, Tensor]] = deque()
        self._incoming: dict[int, _ReceiveQueue] = {}
        self.waiting_for: int | None = None
        self.seconds_waited = 0.0

    @property
    def collective_log(self) -> CollectiveLog:
        """The log of the collectives that this process has started."""
        return self._point_to_point.axis.traffic

    def begin_step(self, schedule: PipelineSchedule, micro_batch_shape_keys: Sequence[Hashable]) -> None:
        """Reset the message queues at the start of a training or evaluation step.

        Args:
            micro_batch_shape_keys: one key per micro-batch. Micro-batches with equal activation shapes have equal keys.
        """
        self._schedule, self._keys = schedule, micro_batch_shape_keys
        self._arrived.clear()
        orders = (get_sent_actions(schedule, source, self._rank) for source in range(self._point_to_point.axis.size))
        self._incoming = {source: _ReceiveQueue(source, deque(order)) for source, order in enumerate(orders) if order}

    def send_tensors(self, action: PipelineAction, tensors: list[Tensor | None], sharded_flags: Sequence[bool]) -> None:
        """Send activations to the next stage, or gradients to the previous stage.

        Only tensors that require a gradient have an entry in a list of gradients. An entry of None means zero.
        """
        receiver = self._schedule.placement[action.receiver_stage]
        key = self._get_tensor_metas_key(action)
        if action.kind is ActionKind.FORWARD:
            parts = [t for t in tensors if t is not None]
            metas = tuple(
                TensorMeta(tuple(t.shape), t.dtype, t.requires_grad, shards and self._tensor.size > 1)
                for t, shards in zip(parts, sharded_flags, strict=True)
            )
            is_new = key not in self.known
            if self.known.setdefault(key, metas) != metas:
                shapes, earlier = ([s.sizes for s in each] for each in (metas, self.known[key]))
                raise InputError(
                    f"Two micro-batches with inputs of the same shape have activations of different shapes, {earlier} "
                    f"and {shapes}. The next pipeline stage expects equal shapes.",
                    remedy="Pad the inputs so that micro-batches of equal shape also have activations of equal shape.",
                )
            parts = [t.detach() for t in parts]
            if receiver != self._rank and is_new:
                self._start_send(_encode_tensor_metas(metas, self.device), receiver, "header")
        else:
            metas = tuple(s for s in self.known[key] if s.requires_grad)
            parts = [
                torch.zeros(s.sizes, dtype=s.dtype, device=self.device) if t is None else t
                for t, s in zip(tensors, metas, strict=True)
            ]
        if receiver == self._rank:
            self._arrived[_get_received_message_key(action)] = parts
            return
        for part, shape in zip(parts, metas, strict=True):
            if shape.is_sharded:
                start, end = self._get_local_shard_bounds(shape)
                part = part.reshape(-1)[start:end]
            self._start_send(part.contiguous(), receiver, _get_message_purpose(action))

    def _get_local_shard_bounds(self, tensor_meta: TensorMeta) -> list[int]:
        return get_even_split_bounds(tensor_meta.numel, self._tensor.size)[self._tensor.rank : self._tensor.rank + 2]

    def _start_send(self, tensor: Tensor, dst: int, purpose: str) -> None:
        if tensor.numel():
            self._sent.append((self._point_to_point.send(tensor, dst, purpose), tensor))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def start_next_receives(self) -> None:
        """Post receives for the next messages from all ranks, so that communication overlaps with computation."""
        for incoming in self._incoming.values():
            self._post_next_receives(incoming)

    def receive_activations(self, stage: int, micro_batch_index: int) -> tuple[list[Tensor], TensorMetas]:
        """Wait for a virtual stage's input activations, and return them with their metadata."""
        parts = self._receive_tensors(PipelineAction(ActionKind.FORWARD, stage - 1, micro_batch_index))
        return parts, self.known[stage, self._keys[micro_batch_index]]

    def receive_gradients(self, stage: int, micro_batch_index: int, action_kind: ActionKind) -> list[Tensor]:
        """Wait for the gradients of a virtual stage's output activations, and return them."""
        return self._receive_tensors(PipelineAction(action_kind, stage + 1, micro_batch_index))

    def _receive_tensors(self, action: PipelineAction) -> list[Tensor]:
        began = time.perf_counter()
        while _get_received_message_key(action) not in self._arrived:
            incoming = self._incoming[self._schedule.placement[action.stage]]
            self._post_next_receives(incoming)
            posted = incoming.posted.popleft()
            self._arrived[_get_received_message_key(posted.action)] = self._complete_receive(incoming, posted)
            self._post_next_receives(incoming)
        self.seconds_waited += time.perf_counter() - began
        return self._arrived.pop(_get_received_message_key(action))

    def _post_next_receives(self, receive_queue: _ReceiveQueue) -> None:
        posted = receive_queue.posted
        while receive_queue.expected and len(posted) < PREFETCHED_MESSAGES and not (posted and posted[-1].header):
            action = receive_queue.expected[0]
            metas = self._get_known_tensor_metas(action)
            if metas is None and action.kind is not ActionKind.FORWARD:
                return  # the gradient has the shapes of an activation that this rank has not sent yet
            posted.append(_PostedReceive(receive_queue.expected.popleft()))
            if metas is None:
                header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self.device)
                posted[-1].header = header, self._point_to_point.receive(header, receive_queue.source, "header")
            else:
                self._post_tensor_receives(receive_queue.source, posted[-1], metas)

    def _post_tensor_receives(self, src: int, posted_receive: _PostedReceive, metas: TensorMetas) -> None:
        for shape in metas:
            start, end = self._get_local_shard_bounds(shape)
            sizes = (end - start,) if shape.is_sharded else shape.sizes
            part = torch.empty(sizes, dtype=shape.dtype, device=self.device)
            posted_receive.parts.append(part)
            if part.numel():
                posted_receive.works.append(
                    self._point_to_point.receive(part, src, _get_message_purpose(posted_receive.action))
                )

    def _get_known_tensor_metas(self, action: PipelineAction) -> TensorMetas | None:
        metas = self.known.get(self._get_tensor_metas_key(action))
        if metas is None or action.kind is ActionKind.FORWARD:
            return metas
        return tuple(s for s in metas if s.requires_grad)

    def _get_tensor_metas_key(self, action: PipelineAction) -> tuple[int, Hashable]:
        return max(action.stage, action.receiver_stage), self._keys[action.micro_batch]

    def _complete_receive(self, receive_queue: _ReceiveQueue, posted_receive: _PostedReceive) -> list[Tensor]:
        action, self.waiting_for = posted_receive.action, receive_queue.source
        if posted_receive.header is not None:
            header, work = posted_receive.header
            work.wait()
            key = self._get_tensor_metas_key(action)
            self.known[key] = (
                pickle.loads(bytes(header.tolist()))
                if has_real_data(header)
                else self._infer_tensor_metas_from_earlier_stage(*key)
            )
            self._post_tensor_receives(receive_queue.source, posted_receive, self.known[key])
        for work in posted_receive.works:
            work.wait()
        self.waiting_for = None
        metas = self._get_known_tensor_metas(action)
        assert metas is not None
        return [self._gather_full_tensor(part, shape) for part, shape in zip(posted_receive.parts, metas, strict=True)]

    def _infer_tensor_metas_from_earlier_stage(self, receiver_stage: int, shape_key: Hashable) -> TensorMetas:
        """Take activation shapes from the nearest earlier stage if one rank is traced without the other ranks."""
        metas_at = {**self.given, **self.known}
        earlier = {b: metas for (b, k), metas in metas_at.items() if k == shape_key and b <= receiver_stage}
        if not earlier:
            raise ConfigError(
                f"Virtual stage {receiver_stage} cannot be traced, because the shapes of its input activations are "
                "unknown.",
                remedy="Trace stage 0 first with the same batch. Then assign pipeline.exchange.known of stage 0 to "
                f"pipeline.exchange.given of stage {receiver_stage}.",
            )
        return earlier[max(earlier)]

    def _gather_full_tensor(self, local_shard: Tensor, tensor_meta: TensorMeta) -> Tensor:
        if not tensor_meta.is_sharded:
            return local_shard
        lengths = [b - a for a, b in pairwise(get_even_split_bounds(tensor_meta.numel, self._tensor.size))]
        return all_gather(local_shard, self._tensor, 0, lengths_by_rank=lengths, purpose="arrival").view(
            tensor_meta.sizes
        )

    def wait_for_sends(self) -> None:
        """Wait until all asynchronous sends of this step have completed."""
        while self._sent:
            work, _ = self._sent.popleft()
            work.wait()


def _get_received_message_key(action: PipelineAction) -> tuple[bool, int, int]:
    return action.kind is ActionKind.FORWARD, action.receiver_stage, action.micro_batch


def _get_message_purpose(action: PipelineAction) -> str:
    return "activation" if action.kind is ActionKind.FORWARD else "gradient"


def _encode_tensor_metas(metas: TensorMetas, device: torch.device) -> Tensor:
    encoded = pickle.dumps(metas)
    assert len(encoded) <= HEADER_BYTES
    return torch.frombuffer(bytearray(encoded.ljust(HEADER_BYTES)), dtype=torch.uint8).to(device)
