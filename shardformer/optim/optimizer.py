"""The optimizer under ZeRO: its parameters are this rank's pieces of those of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.comm.values import is_true
from shardformer.errors import ConfigError
from shardformer.layout.state import ROOT, ShardedState
from shardformer.mesh.axis import Axis
from shardformer.optim.between_steps import loading, reading
from shardformer.optim.checks import check_untouched
from shardformer.optim.memory import Memory
from shardformer.optim.offload.host import Host
from shardformer.optim.offload.paged import Files, PagedPart
from shardformer.optim.owners import give_to_owners
from shardformer.optim.probe import needs_whole, state_bytes
from shardformer.optim.report import held, lines
from shardformer.optim.room import Room
from shardformer.optim.settings import LossScale, Settings
from shardformer.optim.shard_norm import nonfinite, norm_of_shards
from shardformer.optim.shards import Piece, Shard
from shardformer.optim.stage3.layout import lay_out_units
from shardformer.optim.stage3.units import Unit
from shardformer.optim.stage3.walk import Walk
from shardformer.optim.update import Update
from shardformer.optim.zero_grad import ZeroGrad
from shardformer.reduce.bucket import Bucket, Gradient, HandAll, HandOver
from shardformer.reduce.buckets import BUCKET_BYTES, GradientReducer


class ZeroOptimizer(Optimizer):
    """What ``shardformer.zero`` returns. It is used as any optimizer of torch is; its parameters are pieces of yours.

    Attributes:
        grad_norm: the norm of the last step's gradients before they were clipped; None where it was not taken.
        skipped: how many steps were left out, since their gradients were not finite.
        inner: the optimizers that it was made of.
        shards: this rank's parts of all buckets, whose pieces these optimizers have.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        model: nn.Module,
        table: ShardedState,
        settings: Settings,
    ) -> None:
        self.inner, self._model, self._table, self._settings = list(optimizers), model, table, settings
        self._stage, self._precision = settings.stage, settings.precision
        device, asked = table.context.device, settings.offload
        where = Files if asked.folder is not None else Host
        self._host = where(asked, device, overlaps=settings.sending.overlap) if asked.to is not None else None
        self.grad_norm: Tensor | None = None
        self.skipped = 0
        self._walk: Walk | None = None
        self._is_scaled = False
        kind = HandAll if self._stage == 0 else HandOver
        self._end = kind(self._receive, self._check_scaled)
        whole = {id(p) for o in optimizers if needs_whole(o) for group in o.param_groups for p in group["params"]}
        self.shards = self._lay_out(whole)
        self._convert(self._precision.dtype)
        self._by_bucket = {id(shard.gradients): shard for shard in self.shards}
        self._replace_parameters()
        self._room = self._make_room()
        keys = {id(entry): number for number, entry in enumerate(table.entries)}
        for shard in self.shards:
            shard.hold(keys)
        self._update = Update(self.inner, self.shards, self._host, table.context)
        if isinstance(self._host, Files):
            self._put_into_files(self._host)
        super().__init__([group for optimizer in self.inner for group in optimizer.param_groups], {})
        self._is_laid_out = True
        table.gradients = self
        self.__dict__[ROOT] = table
        model.__dict__["zero_grad"] = ZeroGrad(model, self)

    def _lay_out(self, whole: Collection[int]) -> list[Shard]:
        """The shards of all buckets. Parameters that no ranks agree on get buckets of their own, of one rank."""
        table = self._table
        held = {id(gradient.param) for reducer in self._reducers() for gradient in reducer.gradients}
        if alone := [Gradient(e, Axis("none"), table.coords) for e in table.entries if id(e.param) not in held]:
            table.reducers.append(GradientReducer(alone))
        give_to_owners([g for reducer in self._reducers() for g in reducer.gradients], whole, table.context)
        shards: list[Shard] = []
        if self._stage == 3:
            self._walk, shards = lay_out_units(self._model, table, self._settings, self._end, self._host)
        return shards + self._cut(self._reducers())

    def _reducers(self) -> list[GradientReducer]:
        return [reducer for reducer in self._table.reducers if isinstance(reducer, GradientReducer)]

    def _cut(self, reducers: Sequence[GradientReducer]) -> list[Shard]:
        axis = Axis("none") if self._stage == 0 else None
        dtype, sending = self._precision.reduce_dtype, self._settings.sending
        size: Any = sending.bucket_bytes or self._table.request.extra.get("bucket_bytes", BUCKET_BYTES)
        found = [bucket for r in reducers for bucket in r.hand_over(self._end, dtype, size, sending.overlap)]
        narrow, rounding = self._precision.dtype, self._precision.rounding
        return [Shard(bucket, narrow, axis=axis, host=self._host, rounding=rounding) for bucket in found]

    def _make_room(self) -> Room:
        last_first = self.shards if self._walk is not None else self.shards[::-1]
        there = [shard for shard in last_first if shard.host is not None]
        residents = self._walk.residents if self._walk is not None else None
        return Room(self._settings, there, residents, self.inner, self._table.context)

    def _put_into_files(self, files: Files) -> None:
        """Raises ConfigError, on all ranks, where there is no room, or no such folder."""
        held = {id(p): (o, group) for o in self.inner for group in o.param_groups for p in group["params"]}

        def states(value: Tensor) -> dict[str, Any]:
            return held[id(value)][0].state[value] if id(value) in held else {}

        parts = [(shard, shard.host) for shard in self.shards if isinstance(shard.host, PagedPart)]
        for shard, part in parts:
            expected = sum(state_bytes(*held[id(p.value)], p.value) for p in shard.pieces if id(p.value) in held)
            part.hold([(p.value, p.at) for p in shard.pieces], states, round(expected))
        if said := files.end_step([part for _, part in parts], self._table.context):
            raise ConfigError(
                f"offload='nvme:{files.disk.folder}' cannot be used: {said}",
                rule="Masters and states are written to a file there, twice, so that a step that fails leaves one",
                remedy="Name a folder that is there, on a disk with room; shardformer.memory says how much it takes",
            )

    def _convert(self, dtype: torch.dtype | None) -> None:
        """Only when the masters are made, of what the parameters were."""
        for entry in self._table.entries:
            if dtype is not None and entry.param.is_floating_point() and entry.param.dtype != dtype:
                entry.param.data = entry.param.data.to(dtype)

    def _receive(self, bucket: Bucket, part: Tensor, had: Tensor) -> None:
        self._by_bucket[id(bucket.gradients)].receive(part, had, self._precision.scale)

    def _replace_parameters(self) -> None:
        """The optimizers get this rank's pieces in the place of the parameters, and of their state what goes with them.

        Communicates one all-reduce for each tensor of state of which several ranks hold slices.
        """
        pieces: dict[int, list[Piece]] = {}
        for shard in self.shards:
            for number, gradient in enumerate(shard.gradients):
                param: Any = gradient.param
                found = [piece for piece in shard.pieces if piece.number == number]
                pieces.setdefault(id(param), []).extend(found)
                for optimizer in self.inner:
                    if state := optimizer.state.pop(param, None):
                        cut = shard.cut(number, state)
                        optimizer.state.update({piece.value: cut for piece in found})
        for optimizer in self.inner:
            for group in optimizer.param_groups:
                group["params"] = [piece.value for p in group["params"] for piece in pieces.get(id(p), ())]

    # --- one step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clips, updates this rank's pieces, and brings the new parameters together on all ranks.

        Communicates one all-gather of the parameters that got a gradient; to clip, one number over each axis.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._agree_on_the_rest()
        check_untouched(self._model, self._table, self.shards)
        for shard in self.shards:
            shard.take_up()
        if not self._prepare():
            self.zero_grad()
            return loss
        if self._walk is not None:
            self._walk.put_away()
        try:
            self._update.run()
        finally:
            for shard in self.shards:
                shard.forget()
        self._room.after_step()
        return loss

    def _prepare(self) -> bool:
        """Looks whether all gradients are finite, and clips them. Returns whether the step is to be made."""
        rules, scale = self._settings.rules, self._precision.loss_scale
        is_scaled = self._precision.parameters == "fp16"
        if rules.max_grad_norm is None and rules.on_nonfinite == "ignore" and not is_scaled:
            return True
        self.grad_norm = norm_of_shards(self.shards, self._table, self._stage)
        is_finite = (rules.on_nonfinite == "ignore" and not is_scaled) or is_true(torch.isfinite(self.grad_norm))
        if is_scaled:
            scale.update(is_finite)
        elif not is_finite and rules.on_nonfinite == "raise":
            raise nonfinite(self.shards, self._table, self.grad_norm)
        self.skipped += not is_finite
        if is_finite and rules.max_grad_norm is not None:
            self._clip(rules.max_grad_norm)
        return is_finite

    def _agree_on_the_rest(self) -> None:
        """On what backwards left that were all in ``no_sync``."""
        for reducer in self._table.reducers:
            if reducer.was_paused:
                reducer.start()
                reducer.finish()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales all gradients so that their norm over the whole model is at most ``max_norm``.

        Returns the norm before, the same on all ranks. Communicates one all-reduce of one number over each axis.
        """
        if norm_type != 2.0:
            raise ConfigError(
                f"norm_type={norm_type} beside zero",
                rule="What ZeRO clips by is the Euclidean norm",
                remedy="Leave norm_type out",
            )
        self._agree_on_the_rest()
        self.grad_norm = norm_of_shards(self.shards, self._table, self._stage)
        self._clip(max_norm)
        return self.grad_norm

    def _clip(self, max_norm: float) -> None:
        assert self.grad_norm is not None
        if math.isinf(max_norm):
            return  # also where the norm is not finite, and inf / inf would make all gradients NaN
        scale = (max_norm / (self.grad_norm + 1e-6)).clamp(max=1.0)
        for shard in self.shards:
            if shard.sum is not None:
                shard.sum.mul_(scale.to(shard.sum))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throws away all gradients, those of backwards in ``no_sync`` too."""
        for shard in self.shards:
            shard.forget()
        for p in self._model.parameters():
            p.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all but the last backward of a step. Stage 2 keeps no whole gradient, so that it agrees each time."""
        with self._table.paused() if self._stage < 2 else nullcontext():
            yield

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()``; in fp16 of the loss times its scale."""
        with self.scaled() as scale:
            (loss if scale == 1 else loss.float() * scale).backward()

    @contextmanager
    def scaled(self) -> Iterator[float]:
        """What the loss is multiplied by, for the backwards in here."""
        self._is_scaled = True
        try:
            yield self._precision.scale
        finally:
            self._is_scaled = False

    def _check_scaled(self, gradient: Gradient) -> None:
        if self._precision.parameters == "fp16" and not self._is_scaled:
            raise ConfigError(
                f"A gradient of {gradient.entry.name} arrived from a backward that optimizer.backward did not call",
                rule="In fp16 the loss is scaled before the backward, since small gradients would be 0",
                remedy="Write optimizer.backward(loss) in the place of loss.backward(), without a GradScaler",
            )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What ``torch.amp.GradScaler`` asks before a step."""
        raise ConfigError(
            "A GradScaler was given the optimizer that zero returned",
            rule="zero scales the loss by itself where the parameters are fp16, and ranks agree on what to skip",
            remedy="Leave the scaler out: optimizer.backward(loss), optimizer.step()",
        )

    def full_gradient(self, name: str) -> Tensor | None:
        """The gradient of a parameter as the next step will use it, in the shape that the parameter has on this rank.

        None where it has none. All ranks call it. Communicates one all-gather of a bucket.
        """
        self._agree_on_the_rest()
        for shard in self.shards:
            for number, gradient in enumerate(shard.gradients):
                if gradient.entry.name == name:
                    return shard.gather_gradient(number)
        raise ConfigError(
            f"There is no gradient of {name!r}",
            rule="Asked for are parameters that train, by their names in the model",
            remedy="See [name for name, p in model.named_parameters() if p.requires_grad]",
        )

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps: the optimizers' states of its pieces, and their masters. Each rank saves its own."""
        context = self._table.context
        with self.reading():
            states = [optimizer.state_dict() for optimizer in self.inner]
            return {
                "place": {"sizes": context.sizes, "coords": context.coords},
                # torch hands out the dictionaries that an optimizer goes on using
                "optimizers": [{**d, "state": {k: dict(v) for k, v in d["state"].items()}} for d in states],
                "loss_scale": asdict(self._precision.loss_scale),
                "rounds": self.rounds,
                "masters": [piece.value.detach().clone() for shard in self.shards for piece in shard.pieces],
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up what ``state_dict`` of the same rank of an equal grid gave. Raises ConfigError for another one's."""
        context = self._table.context
        pieces = [piece for shard in self.shards for piece in shard.pieces]
        place = {"sizes": context.sizes, "coords": context.coords}
        shapes = [tuple(master.shape) for master in state_dict["masters"]]
        if state_dict["place"] != place or shapes != [tuple(piece.value.shape) for piece in pieces]:
            raise ConfigError(
                f"This optimizer's state was saved by the rank {state_dict['place']}, and this is {place}",
                rule="The pieces of a rank fit the same rank of an equal grid, with the same model and buckets",
                remedy="Load the file that this rank saved, with as many processes as then; or let "
                "shardformer.save_checkpoint save, whose checkpoints fit any layout",
            )
        for name, value in state_dict["loss_scale"].items():
            setattr(self._precision.loss_scale, name, value)
        with self.loading():
            for optimizer, state in zip(self.inner, state_dict["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            for piece, master in zip(pieces, state_dict["masters"], strict=True):
                piece.value.copy_(master)
        self.rounds = state_dict["rounds"]

    def reading(self) -> AbstractContextManager[None]:
        """The pieces and their states have their values in here. Between two steps."""
        return reading(self.shards)

    def loading(self) -> AbstractContextManager[None]:
        """The pieces may be written to in here; behind it the parameters of all ranks have what was written.

        All ranks call it. Communicates one all-gather of the parameters.
        """
        return loading(self.shards, self._walk, self._host, self._table.context)

    @property
    def rounds(self) -> list[int]:
        """How often each shard was rounded by chance."""
        return [shard.rounded.step for shard in self.shards if shard.rounded is not None]

    @rounds.setter
    def rounds(self, rounds: Sequence[int]) -> None:
        for rounded, step in zip([s.rounded for s in self.shards if s.rounded], rounds, strict=True):
            rounded.step = step

    @property
    def units(self) -> Sequence[Unit]:
        """Under stage 3, what is gathered together; else none."""
        return self._walk.units if self._walk is not None else ()

    @property
    def loss_scale(self) -> LossScale:
        return self._precision.loss_scale

    def memory(self) -> Memory:
        """What this rank keeps now, in bytes, by kind."""
        return held(self._table, self.shards, self.units, self.inner)

    def describe(self) -> str:
        """What was asked for, what this rank keeps now, and how fast it comes and goes."""
        return lines(self._settings, self.inner, self.memory(), self._host)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the pieces of the parameters are laid out once."""
        if getattr(self, "_is_laid_out", False):
            raise ConfigError(
                "add_param_group was called on the optimizer that zero returned",
                rule="The pieces of the parameters are laid out once",
                remedy="Add the group to your own optimizer, then call zero",
            )
        super().add_param_group(param_group)
