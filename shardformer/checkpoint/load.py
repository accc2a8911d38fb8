"""Loads a checkpoint into a training run of any layout."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.checkpoint import folder as folders
from shardformer.checkpoint.files import DamagedError, Entry, Index
from shardformer.checkpoint.held import Item, Region
from shardformer.checkpoint.model import EXTRA_STATE, MASTERS, RESTS, WEIGHTS, ModelTensors, buffer_name
from shardformer.checkpoint.optimizers import OptimizerStates, optimizers_of
from shardformer.checkpoint.plain import from_json
from shardformer.checkpoint.random_states import random_name, random_tensors, set_random_tensors
from shardformer.checkpoint.read import read_items
from shardformer.checkpoint.save import as_list
from shardformer.checkpoint.together import all_do, first_does
from shardformer.comm.collectives import gather_objects
from shardformer.errors import ConfigError, nearest
from shardformer.optim.shards import Piece, Shard


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Args:
        path: of the checkpoint.
        step: training steps that were made when it was saved.
        extra: what was given to ``save_checkpoint``.
        num_bytes: read by this rank.
        skipped: newer checkpoints that were damaged, and why.
        has_random: whether random numbers go on as they would have. They do where there are as many data ranks.
    """

    path: Path
    step: int
    extra: Any
    num_bytes: int
    skipped: tuple[str, ...] = ()
    has_random: bool = True


def load_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Any = None, *, scheduler: Any = None
) -> Loaded:
    """Goes on from a checkpoint, under whatever layout it was saved and this run has.

    Each rank reads what it will hold, once, and together the ranks check every number against the checksums. Nothing
    is changed before all of it was read and found right.

    All ranks call it. Communicates names, sizes and checksums; under ZeRO one all-gather of the parameters.

    Args:
        folder: a folder of checkpoints, of which the newest that is whole is loaded; or one of them.
        optimizer: one, several in a list, or what ``zero`` returned, of the classes and groups that were saved. None:
            the weights and buffers alone are loaded, and random numbers go on as they are.
        scheduler: what was given to ``save_checkpoint``.

    Raises, on all ranks, ConfigError for a checkpoint of another model or optimizer, DamagedError (an InputError) for
    one that is not what was saved.
    """
    tensors = ModelTensors(model)
    path, states = Path(folder), all_do(lambda: optimizers_of(optimizer, tensors), tensors.world, "Loading")
    tried: list[str] = []
    found = first_does(lambda: [str(each) for each in folders.candidates(path)], tensors.world, f"Loading {path}")
    for number, name in enumerate(found):
        try:
            loading = _Loading(Path(name), tensors, states, as_list(scheduler))
            num_bytes = read_items(loading.folder, loading.index, loading.items, tensors.world)
            break
        except DamagedError as error:
            tried.append(error.what)
            if number == len(found) - 1:
                raise
    loading.commit()
    extra = from_json(loading.index.values["extra"])
    return Loaded(loading.folder, loading.index.step, extra, num_bytes, tuple(tried), loading.has_random)


class _Loading:
    """What this rank reads of a checkpoint, and what it does with it when all of it was found right.

    Args:
        folder: the checkpoint.
    """

    def __init__(
        self, folder: Path, tensors: ModelTensors, optimizers: Sequence[OptimizerStates], schedulers: Sequence[Any]
    ) -> None:
        self.folder, self._tensors = folder, tensors
        self.items: list[Item] = []
        self._values: dict[str, tuple[str, Tensor]] = {}  # name of a parameter -> what is read of it, and where to
        self._schedulers, self._goes_on = schedulers, bool(optimizers)
        self._then: list[Callable[[], object]] = []
        world = tensors.world
        self.index = all_do(lambda: Index.read(folder), world, f"Loading {folder}")

        def plan() -> None:
            self._check_model()
            self._want_values()
            self._want_states(optimizers)
            self._check_schedulers()
            self._want_random()

        all_do(plan, world, f"Loading {folder}")
        self._check_all_is_wanted()

    def _want(self, name: str, region: Region, *, is_checked: bool = True) -> Tensor:
        """Memory that ``read_items`` fills."""
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
                f"{self.folder} holds no {name}, which this {kind} has",
                rule=f"A checkpoint is loaded into the model that was saved, which was a {self.index.values['model']}",
                remedy=f"{nearest(name, saved)} Build the model from the config of that run",
            )
        if entry.shape != shape:
            raise ConfigError(
                f"{name} has the shape {shape} in this {kind}, and {entry.shape} in {self.folder}",
                rule="A checkpoint is loaded into a model of the sizes of the one that was saved",
                remedy="Build the model from the config of that run",
            )

    def _check_all_is_wanted(self) -> None:
        """Raises ConfigError, on all ranks, where some of the weights that were saved are wanted by none."""
        names = set().union(*gather_objects(set(self._tensors.tensors), self._tensors.world))
        saved = [n.partition("/")[2] for n in self.index.tensors if n.startswith(f"{WEIGHTS}/")]
        if more := [name for name in saved if name not in names]:
            raise ConfigError(
                f"{self.folder} holds {len(more)} weights that this {type(self._tensors.model).__name__} does not "
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
                f"{self.folder} holds the states of {len(saved)} optimizers, and {len(optimizers)} are to be loaded",
                rule="The optimizers are those that were saved, in their order",
                remedy="Build them as that run did, or load the weights alone: leave the optimizer out",
            )
        for each, values in zip(optimizers, saved if optimizers else (), strict=True):
            each.check(values)
            read = [(slot, key, self._want(name, region)) for slot, key, name, region in each.wanted(self.index)]
            self._then.append(partial(each.take_up, values, read, exact=self._is_exact))

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
                f"{self.folder} holds the states of {', '.join(saved) or 'no scheduler'}, and {', '.join(own)} "
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
    def commit(self) -> None:
        """Gives the model and what trains it what was read. Communicates, under ZeRO, one all-gather."""
        zero, values = self._tensors.zero, self.index.values
        with zero.loading() if zero is not None else nullcontext():
            for each in self._then:
                each()
        if zero is not None and self._goes_on and "loss_scale" in values:
            for name, value in values["loss_scale"].items():
                setattr(zero.loss_scale, name, value)
            zero.rounds = [values["rounds"]] * len(zero.rounds)
        for name in self._tensors.extra_states.keys() & values["extra_states"].keys():
            module = self._tensors.model.get_submodule(name.removesuffix(EXTRA_STATE).removesuffix("."))
            module.set_extra_state(from_json(values["extra_states"][name]))
        for scheduler, saved in zip(self._schedulers, values["scheduler"], strict=False):
            scheduler.load_state_dict(from_json(saved["state"]))
