"""Masters, states and gradients in the memory of the host: ZeRO-Offload.

Gradients come down as the buckets land, under the backward; the host updates its masters, and what they are rounded to
goes up again, one shard while the next one is updated. An optimizer keeps its state beside its parameters, so that it
needs no word of this.

Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (2021), sections 4 and 5.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardformer.errors import ConfigError, check_argument
from shardformer.offload.host_device_copies import AsyncCopy, HostDeviceCopier

FREE_MEMORY, TO_CPU, TO_NVME = "free", "cpu", "nvme:"


@dataclass(frozen=True)
class OffloadConfig:
    """What ``zero`` keeps elsewhere than on the device.

    Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training" (2021); for files, Rajbhandari et al.,
    "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning" (2021).

    Args:
        to: where masters, states and gradients are, and are updated: "cpu", the host's memory; "nvme:DIR", files in a
            folder, from which they are read for the update, and the gradients on the host. None: on the device.
        on_device: the share of the numbers whose masters and states stay on the device all the same, from 0 to 1; or
            "free", as many as fit into what the first step left free of a GPU.
        parameters: whether this rank's part of the parameters rests on the host too, under stage 3; then the device
            holds no more of them than the layers that are gathered.
        buffers: of files, how many buckets are in memory at a time: being read, updated and written.
        threads: with which the host updates; by default as many as it has cores for each process, beside a GPU.
        bandwidth: where the device is the CPU, bytes a second that the link carries at the most: see
        ``HostDeviceCopier``.
    """

    to: str | None = None
    on_device: float | str = 0.0
    parameters: bool = False
    buffers: int = 3
    threads: int | None = None
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        share = self.on_device
        is_share = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1
        if not (
            self.to in (None, TO_CPU) or (isinstance(self.to, str) and self.to.startswith(TO_NVME) and self.folder)
        ):
            rule, remedy = "It is 'cpu', or 'nvme:' and a folder", "Write offload='cpu'"
            raise ConfigError(f"offload={self.to!r}", rule=rule, remedy=remedy)
        if share != FREE_MEMORY and not is_share:
            rule, remedy = "It is a share, from 0 to 1, or 'free'", "Write on_device=0.5"
            raise ConfigError(f"on_device={share!r}", rule=rule, remedy=remedy)
        is_right = type(self.buffers) is int and self.buffers >= 2
        check_argument(
            "buffers", self.buffers, is_right, "One bucket is read while another one is updated", "Write buffers=3"
        )
        is_right = self.threads is None or (type(self.threads) is int and self.threads >= 1)
        check_argument("threads", self.threads, is_right, "It is a number of threads, one or more", "Leave threads out")
        given = self.bandwidth
        is_right = given is None or (isinstance(given, int | float) and not isinstance(given, bool) and given > 0)
        check_argument(
            "OffloadConfig(bandwidth)", given, is_right, "It is a number of bytes a second", "Leave bandwidth out"
        )
        is_right = isinstance(self.parameters, bool)
        check_argument(
            "OffloadConfig(parameters)", self.parameters, is_right, "It is on or off", "Write parameters=True"
        )

    @classmethod
    def of(cls, given: Any, optimizers: Sequence[Any] = ()) -> OffloadConfig:
        """From what ``zero`` was given. Where that says no more, an optimizer may say what stays on the device.

        Raises ConfigError for what is none.
        """
        shares = [optimizer.on_device for optimizer in optimizers if hasattr(optimizer, "on_device")]
        return given if isinstance(given, cls) else cls(given, *shares[:1])

    @property
    def folder(self) -> str | None:
        """Of the files; None without any."""
        return None if self.to is None or self.to == TO_CPU else os.path.expanduser(self.to[len(TO_NVME) :])


MAX_COPIES_IN_FLIGHT = 4
"""Gradients of so many buckets are on their way to the host at a time: they take memory of the device until then."""


class HostMemory:
    """The memory of the host beside one device, and the way there."""

    def __init__(self, asked: OffloadConfig, device: torch.device, *, overlaps: bool = True) -> None:
        self.link = HostDeviceCopier(device, bandwidth=asked.bandwidth)
        self._most = MAX_COPIES_IN_FLIGHT if overlaps else 0
        self._under_way: deque[AsyncCopy] = deque()
        self._threads = asked.threads
        if asked.threads is None and device.type != "cpu":
            self._threads = max(1, len(os.sched_getaffinity(0)) // _processes_here())

    def bring_down(self, out: Tensor, x: Tensor) -> AsyncCopy:
        """Starts to copy to the host; waits for an earlier copy where there are too many."""
        copy = self.link.down(out, x)
        self._under_way.append(copy)
        while self._under_way and (len(self._under_way) > self._most or self._under_way[0].is_done()):
            self._under_way.popleft().finish()
        return copy

    def part(self, length: int, dtype: torch.dtype) -> HostShard:
        """Of a new shard."""
        return HostShard(self, length, dtype)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The host computes in here, with its threads: launchers leave each process one."""
        before = torch.get_num_threads()
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            yield
        finally:
            torch.set_num_threads(before)


def _processes_here() -> int:
    """Processes that share this machine's cores."""
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


class HostShard:
    """What of one shard is on the host: its masters, and the sum of its gradients.

    Args:
        length: numbers.
        dtype: of the masters and of the sum.
    """

    def __init__(self, host: HostMemory, length: int, dtype: torch.dtype) -> None:
        self.host, self.length, self.dtype = host, length, dtype
        self.values = host.link.new_host(length, dtype).zero_()
        self._sum: Tensor | None = None
        self._has_sum = False
        self._staging: Tensor | None = None
        self._arriving: tuple[AsyncCopy, float] | None = None
        self._leaving: AsyncCopy | None = None

    def tensors(self) -> list[Tensor]:
        """All memory of the host that it has now, but for buffers that others use too."""
        return [x for x in (self.values, self._sum, self._staging) if x is not None]

    def fetch(self) -> None:
        """Before ``take``, where that would have to wait."""

    def take(self) -> bool:
        """Returns whether the masters may be read and written to."""
        return True

    def put_away(self) -> None:
        """The masters are not needed before the next step."""

    def drop(self, *, keeps_memory: bool = False) -> None:
        """As ``put_away``, where nothing was changed.

        Args:
            keeps_memory: somebody still looks at the tensors that are here.
        """

    def save(self) -> None:
        """Between two steps, something was changed."""

    def receive(self, part: Tensor, scale: float) -> None:
        """Starts to bring gradients down, which are added over ``scale``."""
        self._land()
        self._arriving = self.host.bring_down(self._stage(part.dtype), part), scale

    def _stage(self, dtype: torch.dtype) -> Tensor:
        if self._staging is None or self._staging.dtype != dtype:
            self._staging = self.host.link.new_host(self.length, dtype)
        return self._staging

    def _land(self) -> None:
        if self._arriving is None:
            return
        (copy, scale), self._arriving = self._arriving, None
        part = copy.finish()
        if self._sum is None:
            self._sum = self.host.link.new_host(part.numel(), self.dtype)
        if scale != 1:
            part = part.to(self.dtype) / scale
        self._sum = self._sum.add_(part) if self._has_sum else self._sum.copy_(part)
        self._has_sum = True

    @property
    def sum(self) -> Tensor | None:
        """Waits for what is on its way."""
        self._land()
        return self._sum if self._has_sum else None

    def forget(self) -> None:
        """The gradients are used, or thrown away."""
        self._land()
        self._has_sum = False

    def bring_up(self, own: Tensor) -> AsyncCopy:
        """Starts to copy the masters to the device, in the dtype there. Until it is done they stay as they are."""
        self.settle()
        values = self.values if own.dtype == self.dtype else self._stage(own.dtype).copy_(self.values)
        self._leaving = self.host.link.up(own, values)
        return self._leaving

    def settle(self) -> None:
        """Returns when the masters may be written to."""
        if self._leaving is not None:
            self._leaving.finish()
            self._leaving = None
