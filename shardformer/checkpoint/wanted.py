"""What a rank wants of a training run that was saved under some layout, to go on under its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.checkpoint.files import Entry, Index
from shardformer.checkpoint.held import Item, Region
from shardformer.checkpoint.model import EXTRA_STATE, MASTERS, RESTS, WEIGHTS, ModelTensors, buffer_name
from shardformer.checkpoint.optimizers import OptimizerStates
from shardformer.checkpoint.plain import from_json
from shardformer.checkpoint.random_states import random_name, random_tensors, set_random_tensors
from shardformer.checkpoint.together import all_do
from shardformer.comm.collectives import gather_objects
from shardformer.errors import ConfigError, nearest
from shardformer.optim.shards import Piece, Shard
from shardformer.optim.undo import unchanged_on_error


class Wanted:
    """What this rank wants of a training run that was saved, and what it does with it when it is there.

    Args:
        index: what there is.
        where: in words.
    """

    def __init__(
        self,
        index: Index,
        where: object,
        tensors: ModelTensors,
        optimizers: Sequence[OptimizerStates],
        schedulers: Sequence[Any] = (),
    ) -> None:
        self.index, self._where, self._tensors = index, where, tensors
        self.items: list[Item] = []
        self._values: dict[str, tuple[str, Tensor]] = {}  # name of a parameter -> what is read of it, and where to
        self._schedulers, self._goes_on = schedulers, bool(optimizers)
        self._optimizers = [each.optimizer for each in optimizers]
        self._first: list[Callable[[], object]] = []  # code that is not ours, which may fail
        self._then: list[Callable[[], object]] = []

        def plan() -> None:
            self._check_model()
            self._want_values()
            self._want_states(optimizers)
            self._check_schedulers()
            self._want_random()

        all_do(plan, tensors.world, f"Loading {where}")
        self._check_all_is_wanted()

    def _want(self, name: str, region: Region, *, is_checked: bool = True) -> Tensor:
        """Memory that is to be filled."""
        memory = region.new(getattr(torch, self.index.tensors[name].dtype))
        self.items.append(replace(region.item(name, memory), is_checked=is_checked))
        return memory

    # --- the model

    def _check_model(self) -> None:
        saved = {n.partition("/")[2]: e for n, e in self.index.tensors.items() if n.startswith(f"{WEIGHTS}/")}
        for name, tensor in self._tensors.tensors.items():
            self._check_one(name, self._tensors.region_of(tensor).shape, saved)

    def _check_one(self, name: str, shape: tuple[int, ...], saved: dict[str, Entry]) -> None:
        entry = saved.get(name)
        kind = type(self._tensors.model).__name__
        if entry is None:
            raise ConfigError(
                f"{self._where} holds no {name}, which this {kind} has",
                rule=f"A checkpoint is loaded into the model that was saved, which was a {self.index.values['model']}",
                remedy=f"{nearest(name, saved)} Build the model from the config of that run",
            )
        if entry.shape != shape:
            raise ConfigError(
                f"{name} has the shape {shape} in this {kind}, and {entry.shape} in {self._where}",
                rule="A checkpoint is loaded into a model of the sizes of the one that was saved",
                remedy="Build the model from the config of that run",
            )

    def _check_all_is_wanted(self) -> None:
        """Raises ConfigError, on all ranks, where some of the weights that were saved are wanted by none."""
        names = set().union(*gather_objects(set(self._tensors.tensors), self._tensors.world))
        saved = [n.partition("/")[2] for n in self.index.tensors if n.startswith(f"{WEIGHTS}/")]
        if more := [name for name in saved if name not in names]:
            raise ConfigError(
                f"{self._where} holds {len(more)} weights that this {type(self._tensors.model).__name__} does not "
                f"have, {more[0]} among them",
                rule=f"A checkpoint is loaded into the model that was saved, which was a {self.index.values['model']}",
                remedy=f"{nearest(more[0], names)} Build the model from the config of that run",
            )

    def _want_values(self) -> None:
        gathered, data = self._tensors.gathered, self._tensors.coords.get("data", 0)
        as_many = self.index.sizes.get("data", 1) == self._tensors.sizes.get("data", 1)
        for name, tensor in self._tensors.tensors.items():
            if id(tensor) not in gathered:
                own = buffer_name(data, name)
                best = own if as_many and own in self.index.tensors else self._best(name, tensor.dtype)
                self._values[name] = best, self._want(best, self._tensors.region_of(tensor))
                self._then.append(partial(tensor.detach().copy_, self._values[name][1]))
        trained = {id(shard) for shard in (self._tensors.zero.shards if self._tensors.zero is not None else ())}
        for shard in self._tensors.shards():
            for piece in shard.pieces:
                if shard.whole is None or shard.has_masters or shard.rounded is not None:
                    self._want_piece(shard, piece, trains=id(shard) in trained)

    def _best(self, name: str, dtype: torch.dtype) -> str:
        """The name of the saved value that is as precise as a tensor of this dtype can be."""
        entry, master = self.index.tensors[f"{WEIGHTS}/{name}"], f"{MASTERS}/{name}"
        is_wider = dtype.is_floating_point and dtype.itemsize > getattr(torch, entry.dtype).itemsize
        return master if is_wider and master in self.index.tensors else f"{WEIGHTS}/{name}"

    def _want_piece(self, shard: Shard, piece: Piece, *, trains: bool) -> None:
        name, region = self._tensors.name_of_piece(piece), self._tensors.region_of_piece(piece)
        best = self._best(name, shard.wide if trains else shard.dtype)
        there, values = self._values.get(name, ("", None))
        if there == best and values is not None and not piece.gradient.is_shared:
            memory = values.reshape(-1)[piece.stretch]
        else:
            memory = self._want(best, region, is_checked=there != best)
        rest_name = f"{RESTS}/{name}"
        rest = self._want(rest_name, region) if trains and rest_name in self.index.tensors else None

        def commit() -> None:
            wide = memory if rest is None else memory.to(shard.wide) + rest.to(shard.wide)
            if trains:
                piece.value.copy_(wide.view(piece.value.shape))
            if not trains or not shard.has_masters or shard.rounded is not None:
                shard.own[piece.at] = memory.reshape(-1).to(shard.own)

        self._then.append(commit)

    # --- what trains it

    def _want_states(self, optimizers: Sequence[OptimizerStates]) -> None:
        saved = self.index.values["optimizers"]
        if optimizers and len(saved) != len(optimizers):
            raise ConfigError(
                f"{self._where} holds the states of {len(saved)} optimizers, and {len(optimizers)} are to be loaded",
                rule="The optimizers are those that were saved, in their order",
                remedy="Build them as that run did, or load the weights alone: leave the optimizer out",
            )
        for each, values in zip(optimizers, saved if optimizers else (), strict=True):
            each.check(values)
            read = [(slot, key, self._want(name, region)) for slot, key, name, region in each.wanted(self.index)]
            self._first.append(partial(each.take_up, values, read, exact=self._is_exact))

    @property
    def _is_exact(self) -> bool:
        """Whether the parameters have the precision in which they were saved."""
        return all(
            getattr(torch, self.index.tensors[f"{WEIGHTS}/{name}"].dtype) == tensor.dtype
            for name, tensor in self._tensors.tensors.items()
        )

    def _check_schedulers(self) -> None:
        saved = [each["kind"] for each in self.index.values["scheduler"]]
        own = [type(each).__name__ for each in self._schedulers]
        if own and saved != own:
            raise ConfigError(
                f"{self._where} holds the states of {', '.join(saved) or 'no scheduler'}, and {', '.join(own)} "
                "is to be loaded",
                rule="What is given as scheduler is what was saved, in its order",
                remedy="Give what was given to save_checkpoint, or leave it out",
            )

    def _want_random(self) -> None:
        """The random states of the rank that had this one's data, where there are as many data ranks as then."""
        own, coords = self._tensors.coords, self.index.values["coords"]
        as_many = self.index.sizes.get("data", 1) == self._tensors.sizes.get("data", 1)
        self.has_random = self._goes_on and as_many
        if not self.has_random:
            return
        same = [rank for rank, theirs in enumerate(coords) if theirs == own and self.index.sizes == self._tensors.sizes]
        alike = [rank for rank, theirs in enumerate(coords) if theirs.get("data", 0) == own.get("data", 0)]
        rank = (same or alike)[0]
        names = list(random_tensors(self._tensors.device)[0])
        memory = {}
        for name in names:
            full = random_name(rank, name)
            if full in self.index.tensors:
                memory[name] = self._want(full, Region(self.index.tensors[full].shape, None, {}))
        numbers = self.index.values["random"][rank]
        self._then.append(lambda: set_random_tensors(memory, numbers, self._tensors.device))

    # --- when all was read

    @torch.no_grad()
    def commit(self, take: Callable[[], object] = lambda: None) -> None:
        """Gives the model and what trains it what was read.

        Optimizers, schedulers, extra states of modules and ``take``, which can fail, come first. Where one fails on any
        rank, all of them are as they were before, and all ranks raise. Then come the values, which are only copied.
        Communicates what went wrong, and under ZeRO one all-gather.
        """
        zero, values = self._tensors.zero, self.index.values
        with zero.loading() if zero is not None else nullcontext():
            with unchanged_on_error(self._optimizers, self._schedulers), self._extra_states_kept():
                all_do(lambda: self._take_states(take), self._tensors.world, f"Loading {self._where}")
            for each in self._then:
                each()
        if zero is not None and self._goes_on and "loss_scale" in values:
            for name, value in values["loss_scale"].items():
                setattr(zero.loss_scale, name, value)
            zero.rounds = [values["rounds"]] * len(zero.rounds)

    def _take_states(self, take: Callable[[], object]) -> None:
        values = self.index.values
        for each in self._first:
            each()
        for name in self._tensors.extra_states.keys() & values["extra_states"].keys():
            self._holder(name).set_extra_state(from_json(values["extra_states"][name]))
        for scheduler, saved in zip(self._schedulers, values["scheduler"], strict=False):
            scheduler.load_state_dict(from_json(saved["state"]))
        take()

    def _holder(self, extra_state: str) -> nn.Module:
        return self._tensors.model.get_submodule(extra_state.removesuffix(EXTRA_STATE).removesuffix("."))

    @contextmanager
    def _extra_states_kept(self) -> Iterator[None]:
        """Modules have the extra states that they had when the body raises."""
        before = {name: copy.deepcopy(self._holder(name).get_extra_state()) for name in self._tensors.extra_states}
        try:
            yield
        except BaseException:
            for name, state in before.items():
                with suppress(Exception):  # what failed may be this very call
                    self._holder(name).set_extra_state(state)
            raise
