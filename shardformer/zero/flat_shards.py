"""What a rank keeps of one bucket under ZeRO: a stretch of the sum of the gradients, and the numbers that it changes.

The numbers of a bucket lie behind each other and are cut into as many equal parts as ranks sum it. A parameter may lie
in one part or in several: what an optimizer is given of it is a piece, a tensor with one dim.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), sections 5.1 and 5.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import PendingCollective, all_reduce, start_all_gather, start_all_gather_into
from shardformer.errors import ConfigError
from shardformer.gradients.buckets import Bucket, GradientSlot
from shardformer.layout.sharding_metadata import ParamEntry
from shardformer.mesh.parallel_context import Axis
from shardformer.offload.host import AsyncCopy, HostDeviceCopier, HostMemory, HostShard
from shardformer.torch_compat import has_data, to_list
from shardformer.zero.gradient_view import ShardedGradient
from shardformer.zero.mixed_precision import KAHAN, RoundedSlice, RoundedWeights

EDITS = 2**12
"""Numbers of edits: so small that sums of their squares over all ranks are exact."""


@dataclass(eq=False)
class ParamSlice:
    """Numbers in a row of one parameter, or all of it, which this rank's optimizer changes.

    Args:
        number: the place of the parameter in its bucket.
        param_range: the numbers of the flat parameter; of the full one where ranks hold slices of it.
        shard_range: where they lie in this rank's part of the bucket.
        value: the optimizer's parameter: a view of this rank's part, or a master where that has 16 bits, or is on the
            device while the optimizer is not.
    """

    gradient: GradientSlot
    number: int
    param_range: slice
    shard_range: slice
    value: nn.Parameter

    @property
    def entry(self) -> ParamEntry:
        return self.gradient.entry


@dataclass(frozen=True)
class UnshardOptions:
    """How parameters come that are gathered when they are read.

    Args:
        memory: gives memory for (numbers, dtype, device).
        link: to the host, where this rank's part rests; None: on the device.
    """

    memory: Callable[[int, torch.dtype, torch.device], Tensor]
    link: HostDeviceCopier | None = None


class FlatShard:
    """This rank's part of a bucket. Communicates one all-gather of the parameters for each ``start_gather``.

    The model's parameters become views of one tensor, ``full``, in which the ranks' parts lie behind each other, so
    that the gather writes into them. Where they are slices of what lies there, only this rank's part lasts.

    Args:
        dtype: the one that the parameters are about to get; None: they keep theirs.
        gathered: of parameters that come when they are read (stage 3), so that only this rank's part lasts.
        axis: of the ranks that each have a part; by default those that agree on the gradients.
        host: where the optimizer has its pieces and their gradients; None: on the device.
        rounding: "kahan" or "stochastic", of bf16 without masters.
    """

    def __init__(
        self,
        bucket: Bucket,
        dtype: torch.dtype | None = None,
        *,
        gathered: UnshardOptions | None = None,
        axis: Axis | None = None,
        host: HostMemory | None = None,
        rounding: str | None = None,
    ) -> None:
        self.gradients, self.axis = bucket.gradients, axis or bucket.axis
        self._slices = bucket.slices if axis is None else None
        first = self.gradients[0].param
        self.dtype = dtype if dtype is not None and first.is_floating_point() else first.dtype
        self.device = first.device
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.length, self.places = bucket.offsets(self.axis.size)
        self.gathered, self.keeps = gathered, gathered is not None
        self._link = gathered.link if gathered is not None else None
        lasts = not self.keeps and not any(gradient.is_shared for gradient in self.gradients)
        self.full: Tensor | None = self._new(self.length * self.axis.size) if lasts else None
        if self._link is not None:
            self.local = self._link.new_host(self.length, self.dtype).zero_()
        else:
            self.local = self._new(self.length) if self.full is None else self._own_of(self.full)
        self.host = host.part(self.length, self.wide) if host is not None else None
        rounds = rounding is not None and self.wide != self.dtype and host is None
        self.rounded = RoundedWeights(self.local, rests=rounding == KAHAN) if rounds else None
        self.has_masters = self.host is not None or self.wide != self.dtype
        self.slices = [piece for n, g in enumerate(self.gradients) if (piece := self._take(n, g)) is not None]
        self._sum: Tensor | None = None
        self._counts: Tensor | None = None
        self._had = [False] * len(self.gradients)
        self.edits = 0  # a number of what a script did to gradients, which all ranks do alike
        self._is_discarded = False  # whether a script has discarded the gradient of a parameter here
        self._shown: dict[int, tuple[ShardedGradient, Tensor | None]] = {}
        self._going_up: AsyncCopy | None = None
        self._fetched: tuple[Tensor, AsyncCopy] | None = None
        self._versions = self._current_versions()

    def enable_rounding(self, keys: Mapping[int, int]) -> None:
        """Without masters: what is wide now is rounded.

        Args:
            keys: a number for each entry, by its identity.
        """
        if self.rounded is not None:
            self.rounded.hold(
                [RoundedSlice(p.value, p.shard_range, p.param_range.start, keys[id(p.entry)]) for p in self.slices]
            )

    @property
    def _masters(self) -> HostShard | RoundedWeights | None:
        """What says whether the pieces have their values now."""
        return self.host if self.host is not None else self.rounded

    @property
    def rests_on_host(self) -> bool:
        """Whether ``own`` is on the host."""
        return self._link is not None

    @property
    def sum(self) -> Tensor | None:
        """Of the gradients of this rank's part; None where none arrived."""
        return self._sum if self.host is None else self.host.sum

    @property
    def has_gradient(self) -> list[bool]:
        """For each parameter, whether any rank had a gradient of it. On a GPU the first look waits for it."""
        if self._counts is not None:
            counts: list[float] = to_list(self._counts)
            self._had, self._counts = [a or b > 0 for a, b in zip(self._had, counts, strict=True)], None
        return self._had

    @property
    def is_changed(self) -> bool:
        """Whether any parameter had a gradient, which all ranks know alike, whatever became of it since."""
        return any(self.has_gradient) or self._is_discarded

    def _current_versions(self) -> list[int]:
        return [gradient.param._version for gradient in self.gradients]

    def find_moved_param(self) -> str | None:
        """The name of a parameter whose values are no longer where they were put; None where all are."""
        if self.full is None or not has_data(self.full):
            return None
        base, size = self.full.data_ptr(), self.full.element_size()
        for gradient, place in zip(self.gradients, self.places, strict=True):
            if gradient.numel and gradient.param.data_ptr() != base + place.start * size:
                return gradient.entry.name
        return None

    def adopt_written_params(self) -> None:
        """Parameters that were written to since the last step, as by ``load_state_dict``: their values are taken up.

        All ranks write alike. What lies in this rank's part is there already, where the parameters are views of it.
        """
        if self.keeps or self._versions == self._current_versions():
            return
        with self.changing():
            for number, (gradient, before) in enumerate(zip(self.gradients, self._versions, strict=True)):
                if gradient.param._version != before:
                    self._take_up(number, gradient)
        self.sync_versions()

    def sync_versions(self) -> None:
        """What the parameters hold now is what this shard has."""
        self._versions = self._current_versions()

    def _take_up(self, number: int, gradient: GradientSlot) -> None:
        flat = _flat(gradient, gradient.param.detach()) if self.full is None else None
        for piece in (piece for piece in self.slices if piece.number == number):
            if flat is not None:
                self.local[piece.shard_range] = flat[piece.param_range]
            if self.has_masters:  # what was written as it was, as when weights are loaded, keeps its master
                value = piece.value.detach()
                written = self.local[piece.shard_range].view_as(value).to(value.device)
                value.copy_(torch.where(value.to(self.dtype) == written, value, written.to(self.wide)))

    def _new(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self.dtype, device=self.device)

    def _stretch(self, number: int) -> slice:
        """The numbers of a flat parameter that lie in this rank's part."""
        place, begin = self.places[number], self.axis.rank * self.length
        low, high = max(place.start, begin), min(place.stop, begin + self.length)
        return slice(low - place.start, high - place.start) if low < high else slice(0, 0)

    def _take(self, number: int, gradient: GradientSlot) -> ParamSlice | None:
        """Moves a parameter here. Returns this rank's piece; one all-reduce where several ranks hold slices of it.

        Of a parameter without numbers each rank has a piece, as one process has it.
        """
        flat = _flat(gradient, gradient.param.detach())
        place, stretch = self.places[number], self._stretch(number)
        if self.full is not None:
            self.full[place] = flat
            gradient.param.data = gradient.unpack(self.full[place])
        if stretch.start == stretch.stop and gradient.numel:
            return None
        begin = place.start - self.axis.rank * self.length
        at = slice(begin + stretch.start, begin + stretch.stop) if gradient.numel else slice(0, 0)
        if self.full is None:
            self.local[at] = flat[stretch]
        if self.host is not None:
            value = self.host.values[at].copy_(flat[stretch])
        else:
            value = flat[stretch].to(self.wide, copy=True) if self.has_masters else self.local[at]
        value = value.view(gradient.shape) if gradient.is_full else value
        return ParamSlice(gradient, number, stretch, at, nn.Parameter(value, gradient.param.requires_grad))

    def cut(self, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """Of an optimizer's state of a parameter what goes with this rank's piece of it."""
        gradient, stretch = self.gradients[number], self._stretch(number)
        shape = gradient.param.shape
        return {
            name: self._cut(gradient, x, stretch)
            if isinstance(x, Tensor) and x.shape == shape and (x.dim() or name != "step")
            else self._beside(x)
            for name, x in state.items()
        }

    def _beside(self, x: Any) -> Any:
        """What is no number of the parameter: a count of steps of a fused optimizer was where the parameter was."""
        return x.to("cpu") if self.host is not None and isinstance(x, Tensor) else x

    def _cut(self, gradient: GradientSlot, x: Tensor, stretch: slice) -> Tensor:
        flat = _flat(gradient, x.to_dense() if x.is_sparse else x)
        flat = flat if self.host is None else flat.to("cpu")
        return flat.view(gradient.shape).clone() if gradient.is_full else flat[stretch].clone()

    def receive(self, part: Tensor, had: Tensor, scale: float = 1.0) -> None:
        """Adds this rank's part of a sum of gradients, over ``scale``.

        ``had`` says for each parameter how many ranks had one.
        """
        self._counts = had.clone() if self._counts is None else self._counts + had  # a view would hold the bucket
        if self.host is not None:
            self.host.receive(part, scale)
            return
        part = part.to(self.wide) if scale == 1 else part.to(self.wide) / scale
        self._sum = part if self._sum is None else self._sum.add_(part)

    def give_gradients(self) -> None:
        """The optimizer's parameters get their gradients; those whose parameter had none on any rank get none."""
        total = self.sum
        for piece in self.slices:
            has_one = total is not None and self.has_gradient[piece.number]
            piece.value.grad = total[piece.shard_range].view_as(piece.value) if has_one and total is not None else None

    # --- what scripts see of the gradients, between a backward and zero_grad

    def show(self) -> None:
        """Parameters and pieces have their gradients in ``.grad``; on a GPU those of no rank too, as zeros."""
        if not has_data(self.local) or (total := self.sum) is None:
            return
        known = self.has_gradient if self._counts is None or not self._counts.is_cuda else [True] * len(self.gradients)
        views: dict[int, Tensor] = {}
        for piece in self.slices:
            if known[piece.number]:
                views[piece.number] = piece.value.grad = total[piece.shard_range].view_as(piece.value)
        for number, gradient in enumerate(self.gradients):
            if known[number] and not gradient.changed:
                seen = gradient.param.grad = ShardedGradient(self, number)
                self._shown[number] = seen, views.get(number)

    def hide(self, number: int) -> None:
        """Takes up what a script did to a gradient that was shown. Its ``.grad`` is free for the next backward.

        Raises ConfigError for one that was set to what is not computed of it.
        """
        gradient, grad = self.gradients[number], self.gradients[number].param.grad
        if (shown := self._shown.get(number)) is None:
            if gradient.changed and grad is None:
                self.discard_gradient(number)  # with what a backward in no_sync added to it
            elif isinstance(grad, ShardedGradient) and grad.is_of(self, number) and grad.made is not None:
                self._put_back(number, grad.made)
            return
        piece = next((piece for piece in self.slices if piece.number == number), None)
        mine = piece.value.grad if piece is not None else None
        if grad is None:
            self.edited(number, "discarded")
        if grad is None or (piece is not None and mine is None):
            self.discard_gradient(number)
            return
        if not isinstance(grad, ShardedGradient) or not grad.is_of(self, number):
            raise set_by_hand(gradient.entry.name)
        del self._shown[number]
        gradient.param.grad = None
        if grad.made is not None:
            self.edited(number, "replaced")
            self.numbers_of(number).copy_(grad.made)
        elif mine is not None and mine is not shown[1]:
            self.numbers_of(number).copy_(mine.reshape(-1))

    def _put_back(self, number: int, numbers: Tensor) -> None:
        """Takes what was computed of earlier gradients of a parameter for its gradient, after zero_grad."""
        self.gradients[number].param.grad = None
        self.edited(number, "put back")
        if self.sum is None:
            self.receive(self._new(self.length), torch.zeros(len(self.gradients)))
        self.has_gradient[number] = True
        self.numbers_of(number).copy_(numbers)

    def discard_gradient(self, number: int) -> None:
        """What was summed of the gradient of a parameter is not used."""
        self._shown.pop(number, None)
        if self.has_gradient[number]:
            self._had[number], self._is_discarded = False, True
            self.numbers_of(number).zero_()
        self.gradients[number].param.grad = None
        for piece in (piece for piece in self.slices if piece.number == number):
            piece.value.grad = None

    def edited(self, number: int, what: str) -> None:
        """Notes what a script did, for ranks to compare: what one does alone would be a part of a gradient's edit."""
        self.edits = (self.edits + crc32(f"{what} {self.gradients[number].entry.name}".encode())) % EDITS

    def numbers_of(self, number: int) -> Tensor:
        """Of a parameter's gradient what the step will use on this rank."""
        if (total := self.sum) is None:
            raise ConfigError(
                f"The gradient of {self.gradients[number].entry.name} was used after zero_grad",
                remedy="Clone it before, or read p.grad after the next backward",
            )
        piece = next((piece for piece in self.slices if piece.number == number), None)
        return total[piece.shard_range] if piece is not None else total[:0]

    def is_here(self, number: int) -> bool:
        """Whether each rank has all numbers of a gradient, in the shape of the parameter."""
        return self.axis.size == 1 and not self.gradients[number].is_shared

    def pick(self, number: int, x: Tensor) -> Tensor:
        """Of a tensor of the shape of a parameter the numbers that ``numbers_of`` has of its gradient."""
        gradient = self.gradients[number]
        if gradient.is_shared:
            raise ConfigError(
                f"The gradient of {gradient.entry.name} was to be changed by a tensor",
                rule="One rank gets this gradient from all that hold slices of it, and each knows its own slice alone",
                remedy="Change it by numbers, or in a hook of the parameter (register_hook)",
            )
        return x.reshape(-1)[self._stretch(number)]

    def zero(self) -> None:
        """The gradients that are here become 0, and count."""
        if (total := self.sum) is not None:
            total.zero_()

    def forget(self) -> None:
        """The gradients are thrown away."""
        self._sum, self._counts, self._had = None, None, [False] * len(self.gradients)
        self._is_discarded, self.edits = False, 0
        if self.host is not None:
            self.host.clear_gradients()
        for piece in self.slices:
            piece.value.grad = None
        for gradient in self.gradients:
            gradient.param.grad = None
        self._shown = {}

    def store(self) -> None:
        """Rounds what the optimizer made of its pieces, where these are masters, and starts to bring it to the device.

        ``start_gather`` waits for that.
        """
        if self.host is not None and self._link is not None:
            self.local.copy_(self.host.values)
        elif self.host is not None:
            self._going_up = self.host.copy_to_device(self.local)
        elif self.rounded is not None:
            self.rounded.store()
        elif self.has_masters:
            for piece in self.slices:
                self.local[piece.shard_range] = piece.value.detach().reshape(-1)

    def move_to_device(self) -> None:
        """From now on the pieces are on the device. Between two steps."""
        assert self.host is not None
        self.host.load()
        self.host.wait()
        self.host, self.has_masters = None, self.wide != self.dtype or self.rests_on_host
        for piece in self.slices:
            here = (
                piece.value.detach().to(self.device)
                if self.has_masters
                else self.local[piece.shard_range].view_as(piece.value)
            )
            piece.value.data = here

    def fetch(self) -> None:
        """Before ``take``, where that would have to wait."""
        if self._masters is not None:
            self._masters.fetch()

    def load(self) -> bool:
        """Returns whether the pieces have their values now."""
        return self._masters is None or self._masters.load()

    def evict(self) -> None:
        """The values of the pieces may go."""
        if self._masters is not None:
            self._masters.evict()

    def discard(self, *, keeps_memory: bool = False) -> None:
        """The values of the pieces may go, which nobody changed."""
        if self._masters is not None:
            self._masters.discard(keeps_memory=keeps_memory)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The pieces may be written to in here. Between two steps."""
        masters = self._masters
        if masters is None:
            yield
            return
        masters.load()
        masters.wait()
        try:
            yield
        finally:
            masters.save()

    def start_gather(self) -> PendingCollective:
        """Starts bringing together what all ranks have, in the model's precision."""
        if self._going_up is not None:
            self._going_up.wait()
            self._going_up = None
        if self._link is not None:
            self.fetch_parameters()
            assert self._fetched is not None
            (whole, copy), self._fetched = self._fetched, None
            copy.wait()
            own = self._own_of(whole)
        else:
            whole, own = self._new_whole() if self.full is None else self.full, self.local
        if self._slices is not None:
            return self._slices.start_share(own, whole, self.places)
        return start_all_gather_into(whole, own, self.axis, "parameters")

    def fetch_parameters(self) -> None:
        """Starts to bring this rank's part to the device, where it rests on the host."""
        if self._link is not None and self._fetched is None:
            whole = self._new_whole()
            self._fetched = whole, self._link.to_device(self._own_of(whole), self.local)

    def forget_fetched(self) -> None:
        """What was brought to the device will not be used."""
        if self._fetched is not None:
            self._fetched[1].finish()
            self._fetched = None

    def _new_whole(self) -> Tensor:
        numel = self.length * self.axis.size
        if self.gathered is not None:
            return self.gathered.memory(numel, self.dtype, self.device)
        return self.local.new_empty(numel)

    def _own_of(self, whole: Tensor) -> Tensor:
        return whole[self.axis.rank * self.length : (self.axis.rank + 1) * self.length]

    def gather_gradient(self, number: int) -> Tensor | None:
        """The gradient of a parameter, from all ranks. Communicates one all-gather of the bucket."""
        mine = self.sum if self.sum is not None else torch.zeros(self.length, dtype=self.wide)
        whole = start_all_gather(mine.to(self.device), self.axis, 0, purpose="gradients").wait()
        return self.gradients[number].unpack(whole[self.places[number]]) if self.has_gradient[number] else None

    def write(self, values: Tensor) -> None:
        """Puts what was gathered into the model's parameters, where these are slices of it."""
        for gradient, place in zip(self.gradients, self.places, strict=True):
            if gradient.is_shared:
                gradient.param.detach().copy_(gradient.unpack(values[place]))
        self.sync_versions()


def set_by_hand(name: str) -> ConfigError:
    """For a gradient that does not come from a backward that the ranks agreed on."""
    return ConfigError(
        f"{name} has a .grad that no backward brought, or none that zero saw",
        rule="Under ZeRO p.grad shows the sum that the optimizer keeps of all ranks; what is computed of gradients of "
        "the parameter number by number may be put back, before or after zero_grad, or None",
        remedy="Change it in place (p.grad.mul_(0.5)), or in a hook of the parameter (register_hook), which runs "
        "before gradients are summed",
    )


def _flat(gradient: GradientSlot, value: Tensor) -> Tensor:
    """The numbers of a parameter, or of what goes with it, as a bucket has them; a view where a rank holds it alone."""
    if not gradient.is_shared:
        return value.reshape(-1)
    spec = gradient.entry.spec
    full = torch.zeros(spec.shape, dtype=torch.promote_types(value.dtype, torch.float32), device=value.device)
    spec.place(value.to(full.dtype), full, gradient.coords)
    copies = gradient.copies
    full = full / (copies.to(full) if isinstance(copies, Tensor) else copies)
    return all_reduce(full, gradient.axis, purpose="setup").reshape(-1)
