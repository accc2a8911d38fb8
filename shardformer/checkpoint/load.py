"""Load a checkpoint into a training run of any layout.

Each rank reads only its own chunks. Together, the ranks verify the checksums of all saved tensors.
"""

from __future__ import annotations

import copy
import json
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.checkpoint import directory as checkpoint_directory
from shardformer.checkpoint.chunks import ChunkBounds, ChunkOwners, FlatRegion, TensorItem, assign_writes
from shardformer.checkpoint.file_format import (
    HEADER_BYTES,
    CheckpointIndex,
    CorruptCheckpointError,
    IndexEntry,
    SavedChunk,
    chunk_key,
    corrupt_checkpoint_error,
    file_name,
    from_json,
    header,
    overlapping_chunks,
    weighted_sum,
)
from shardformer.checkpoint.training_state import (
    EXTRA_STATE,
    KAHAN_RESIDUALS,
    MASTER_WEIGHTS,
    WEIGHTS,
    ModelTensors,
    OptimizerStates,
    as_object_list,
    buffer_name,
    optimizer_states,
    random_state_key,
    random_state_tensors,
    set_random_state_tensors,
)
from shardformer.comm.collective_call import come, run_on_all_ranks, run_on_first_rank
from shardformer.comm.collectives import all_gather_objects, all_reduce
from shardformer.errors import ConfigError, did_you_mean
from shardformer.filesystem.atomic_write import path_of
from shardformer.mesh.parallel_context import Axis
from shardformer.public_names import renamed_parameters
from shardformer.zero.flat_shards import FlatShard, ParamSlice
from shardformer.zero.optimizer_state_view import unchanged_on_error

LONG = 2**16
"""Contiguous runs of at least this many bytes are read one by one, shorter ones through mapped memory."""


class BoxReader:
    """Reader of the chunks in a checkpoint folder. ``num_bytes`` counts the bytes it has read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, _File] = {}
        self.num_bytes = 0

    def read(self, name: str, box: SavedChunk, piece: ChunkBounds, out: Tensor) -> None:
        """Fill ``out`` with the part ``piece`` of a saved chunk. Raises CorruptCheckpointError."""
        path, key = self._folder / file_name(box.file), chunk_key(name, box.start)
        try:
            if box.file not in self._files:
                self._files[box.file] = _File(path)
            begin = self._files[box.file].place_of(key, out.dtype, box)
            self._files[box.file].fill(out, begin, tuple(a - o for a, o in zip(piece[0], box.start, strict=True)), box)
        except FileNotFoundError:
            raise corrupt_checkpoint_error(f"{path} is missing") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise corrupt_checkpoint_error(f"{key} cannot be read from {path}: {error}") from error
        self.num_bytes += out.nbytes

    def close(self) -> None:
        for file in self._files.values():
            os.close(file.descriptor)
        self._files = {}


class _File:
    """An open safetensors file."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(self.descriptor).st_size
            length = int.from_bytes(os.pread(self.descriptor, HEADER_BYTES, 0), "little")
            if HEADER_BYTES + length > size:
                raise ValueError("the file is truncated")
            self._header: dict[str, Any] = json.loads(os.pread(self.descriptor, length, HEADER_BYTES))
            self._header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in self._header.values()), default=0)
            if HEADER_BYTES + length + end > size:
                raise ValueError("the file is truncated")
        except BaseException:
            os.close(self.descriptor)
            raise
        self._begin = HEADER_BYTES + length
        self._mapped: Tensor | None = None

    def place_of(self, key: str, dtype: torch.dtype, box: SavedChunk) -> int:
        """Return the offset of a chunk in the file.

        Raises KeyError if it is missing, ValueError if its dtype, shape or size differs from the index.
        """
        entry = self._header[key]
        low, high = entry["data_offsets"]
        found = entry["dtype"], tuple(entry["shape"]), high - low
        expected = (*header(dtype, box.size), prod(box.size) * dtype.itemsize)
        if found != expected or low < 0:
            raise ValueError(f"the file has {found}, the index {expected}")
        return int(self._begin + low)

    def fill(self, out: Tensor, begin: int, start: tuple[int, ...], box: SavedChunk) -> None:
        """Read the box at ``start`` of a chunk that is stored at offset ``begin`` into ``out``."""
        row = out.element_size()
        dim = out.dim() - 1
        while dim > 0 and out.shape[dim] == box.size[dim]:
            row *= box.size[dim]
            dim -= 1
        # elements are contiguous in the chunk from dim on, and in ``out`` if it is contiguous
        run = row * (out.shape[dim] if out.dim() else 1)
        if run < LONG and out.numel() * out.element_size() > run:
            out.copy_(self._picked(out, begin, start, box))
            return
        target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
        numbers: Any = target.reshape(-1).view(torch.uint8).numpy()
        data = memoryview(numbers)
        strides = _strides(box.size, out.element_size())
        outer = torch.cartesian_prod(*(torch.arange(n) for n in out.shape[:dim])).view(-1, dim) if dim > 0 else [()]
        for number, at in enumerate(outer):
            place = [a + int(i) for a, i in zip(start, at, strict=False)] + list(start[max(dim, 0) :])
            offset = begin + sum(i * stride for i, stride in zip(place, strides, strict=True))
            self._read_into(data[number * run : (number + 1) * run], offset)
        if target is not out:
            out.copy_(target)

    def _read_into(self, data: Any, offset: int) -> None:
        while len(data):
            count = os.preadv(self.descriptor, [data], offset)
            if count == 0:
                raise ValueError("the file is truncated")
            data, offset = data[count:], offset + count

    def _picked(self, out: Tensor, begin: int, start: tuple[int, ...], box: SavedChunk) -> Tensor:
        """Return a box of many short rows through mapped memory, which reads only the pages it needs."""
        if self._mapped is None:
            memory = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_COPY)
            self._mapped = torch.frombuffer(memory, dtype=torch.uint8)
        size = out.element_size()
        rows = self._mapped[begin : begin + prod(box.size) * size].view(*box.size[:-1], box.size[-1] * size)
        inner = slice(start[-1] * size, (start[-1] + out.shape[-1]) * size)
        outer = tuple(slice(a, a + n) for a, n in zip(start[:-1], out.shape[:-1], strict=True))
        return rows[(*outer, inner)].clone(memory_format=torch.contiguous_format).view(out.dtype)


def _strides(shape: tuple[int, ...], size: int) -> list[int]:
    """Return the strides of a contiguous tensor in bytes."""
    return [size * prod(shape[dim + 1 :]) for dim in range(len(shape))]


BITS = 2**64


def read_items(folder: Path, index: CheckpointIndex, items: Sequence[TensorItem], world: Axis) -> int:
    """Fill the items from a checkpoint and return the number of bytes that this rank read.

    Each rank reads only its own chunks. For each element, one rank adds its contribution to the checksum of its saved
    chunk. Communicates the names and bounds of the chunks that are read, and two integers for each saved chunk.

    Raises CorruptCheckpointError on all ranks if a file is missing or a checksum does not match.
    """
    numbers = _numbered(index, items, world)
    mine = assign_writes([item for item in items if item.is_checked], world)
    sums = torch.zeros(len(numbers), 2, dtype=torch.int64)
    reader = BoxReader(folder)

    def read() -> None:
        for item in items:
            _read_item(reader, item, index.tensors[item.name])
            if item.is_checked:
                _add_sums(item, index.tensors[item.name], mine, numbers, sums)

    try:
        run_on_all_ranks(read, world, f"Reading {folder}")
    finally:
        reader.close()
    _compare(all_reduce(sums, world, purpose="setup"), numbers, index, folder)
    return reader.num_bytes


def _numbered(index: CheckpointIndex, items: Sequence[TensorItem], world: Axis) -> dict[tuple[str, int], int]:
    """Number the saved chunks of all tensors that any rank reads, identically on all ranks."""
    names = list(index.tensors)
    wanted = torch.zeros(len(names), dtype=torch.int64)
    own = {item.name for item in items}
    wanted[[i for i, name in enumerate(names) if name in own]] = 1
    wanted = all_reduce(wanted, world, op="max", purpose="setup")
    chosen = [name for name, is_wanted in zip(names, wanted.tolist(), strict=True) if is_wanted]
    keys = [(name, number) for name in chosen for number in range(len(index.tensors[name].boxes))]
    return {key: i for i, key in enumerate(keys)}


def _read_item(reader: BoxReader, item: TensorItem, entry: IndexEntry) -> None:
    for held in item.held:
        count = 0
        for number, (start, size) in overlapping_chunks(entry, (held.start, tuple(held.values.shape))):
            reader.read(item.name, entry.boxes[number], (start, size), held.part(start, size))
            count += prod(size)
        if count != held.values.numel():
            raise corrupt_checkpoint_error(
                f"The checkpoint has only {count} of {held.values.numel()} elements of {item.name} at "
                f"{list(held.start)}"
            )


def _add_sums(
    item: TensorItem,
    entry: IndexEntry,
    mine: dict[ChunkOwners, list[ChunkBounds]],
    numbers: dict[tuple[str, int], int],
    sums: Tensor,
) -> None:
    """Add the contributions of this rank's share of an item to the checksums of the saved chunks."""
    for held in item.held:
        for piece in mine.get((item.name, held.start, tuple(held.values.shape)), ()):
            for number, (start, size) in overlapping_chunks(entry, piece):
                row = numbers[item.name, number]
                total = (int(sums[row, 0]) + weighted_sum(held.part(start, size), start)) % BITS
                sums[row, 0] = total - BITS if total >= BITS // 2 else total
                sums[row, 1] += prod(size)


def _compare(sums: Tensor, numbers: dict[tuple[str, int], int], index: CheckpointIndex, folder: Path) -> None:
    """Raise CorruptCheckpointError if a saved chunk was not read completely or its checksum differs."""
    for (name, number), (total, count) in zip(numbers, sums.tolist(), strict=True):
        box = index.tensors[name].boxes[number]
        where = f"{name} at {list(box.start)} in {folder / file_name(box.file)}"
        if count != prod(box.size):
            raise corrupt_checkpoint_error(f"Only {count} of {prod(box.size)} elements of {where} were read")
        if total % BITS != box.sum:
            raise corrupt_checkpoint_error(f"The checksum of {where} does not match")


class LoadPlan:
    """The chunks that this rank reads from a saved run, and the assignments that follow once they are read.

    Args:
        index: index of the saved run.
        where: name of the saved run for error messages.
    """

    def __init__(
        self,
        index: CheckpointIndex,
        where: object,
        tensors: ModelTensors,
        optimizers: Sequence[OptimizerStates],
        schedulers: Sequence[Any] = (),
    ) -> None:
        self.index, self._where, self._tensors = index, where, tensors
        self.items: list[TensorItem] = []
        self._values: dict[str, tuple[str, Tensor]] = {}  # name of a parameter -> (name of the saved tensor, buffer)
        self._schedulers, self._goes_on = schedulers, bool(optimizers)
        self._optimizers = [each.optimizer for each in optimizers]
        self._first: list[Callable[[], object]] = []  # code of optimizers, which may fail
        self._then: list[Callable[[], object]] = []

        def plan() -> None:
            self._check_model()
            self._want_values()
            self._want_states(optimizers)
            self._check_schedulers()
            self._want_random()

        run_on_all_ranks(plan, tensors.world, f"Loading {where}")
        self._check_all_is_wanted()

    def _want(self, name: str, region: FlatRegion, *, is_checked: bool = True) -> Tensor:
        """Add a tensor to ``items`` and return the buffer that will be filled."""
        memory = region.new(getattr(torch, self.index.tensors[name].dtype))
        self.items.append(replace(region.item(name, memory), is_checked=is_checked))
        return memory

    # --- the model

    def _check_model(self) -> None:
        saved = {n.partition("/")[2]: e for n, e in self.index.tensors.items() if n.startswith(f"{WEIGHTS}/")}
        for name, tensor in self._tensors.tensors.items():
            self._check_one(name, self._tensors.region_of(tensor).shape, saved)

    def _check_one(self, name: str, shape: tuple[int, ...], saved: dict[str, IndexEntry]) -> None:
        entry = saved.get(name)
        kind = type(self._tensors.model).__name__
        if entry is None:
            raise ConfigError(
                f"{self._where} is a checkpoint of a {self.index.values['model']} and has no {name}, which this "
                f"{kind} needs",
                remedy=f"{did_you_mean(name, saved)} Build the model from the config of the saved run",
            )
        if entry.shape != shape:
            raise ConfigError(
                f"{name} has the shape {shape} in this {kind} and {entry.shape} in {self._where}",
                remedy="Build the model from the config of the saved run",
            )

    def _check_all_is_wanted(self) -> None:
        """Raise ConfigError on all ranks if no rank needs some of the saved weights."""
        names = set().union(*all_gather_objects(set(self._tensors.tensors), self._tensors.world))
        saved = [n.partition("/")[2] for n in self.index.tensors if n.startswith(f"{WEIGHTS}/")]
        if more := [name for name in saved if name not in names]:
            raise ConfigError(
                f"{self._where} is a checkpoint of a {self.index.values['model']} and has {len(more)} weights that "
                f"this {type(self._tensors.model).__name__} does not have, such as {more[0]}",
                remedy=f"{did_you_mean(more[0], names)} Build the model from the config of the saved run",
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
            for piece in shard.slices:
                if shard.full is None or shard.has_masters or shard.rounded is not None:
                    self._want_piece(shard, piece, trains=id(shard) in trained)

    def _best(self, name: str, dtype: torch.dtype) -> str:
        """Return the name of the saved tensor with the most precision that ``dtype`` can represent."""
        entry, master = self.index.tensors[f"{WEIGHTS}/{name}"], f"{MASTER_WEIGHTS}/{name}"
        is_wider = dtype.is_floating_point and dtype.itemsize > getattr(torch, entry.dtype).itemsize
        return master if is_wider and master in self.index.tensors else f"{WEIGHTS}/{name}"

    def _want_piece(self, shard: FlatShard, piece: ParamSlice, *, trains: bool) -> None:
        name, region = self._tensors.name_of_piece(piece), self._tensors.region_of_slice(piece)
        best = self._best(name, shard.wide if trains else shard.dtype)
        there, values = self._values.get(name, ("", None))
        if there == best and values is not None and not piece.gradient.is_shared:
            memory = values.reshape(-1)[piece.param_range]
        else:
            memory = self._want(best, region, is_checked=there != best)
        rest_name = f"{KAHAN_RESIDUALS}/{name}"
        rest = self._want(rest_name, region) if trains and rest_name in self.index.tensors else None

        def commit() -> None:
            wide = memory if rest is None else memory.to(shard.wide) + rest.to(shard.wide)
            if trains:
                piece.value.copy_(wide.view(piece.value.shape))
            if not trains or not shard.has_masters or shard.rounded is not None:
                shard.local[piece.shard_range] = memory.reshape(-1).to(shard.local)

        self._then.append(commit)

    # --- optimizers, schedulers, random states

    def _want_states(self, optimizers: Sequence[OptimizerStates]) -> None:
        saved = self.index.values["optimizers"]
        if optimizers and len(saved) != len(optimizers):
            raise ConfigError(
                f"{self._where} contains the states of {len(saved)} optimizers, but {len(optimizers)} were passed",
                remedy="Build the optimizers as in the saved run, or load only the weights by omitting optimizer",
            )
        for each, values in zip(optimizers, saved if optimizers else (), strict=True):
            each.check(values)
            read = [(slot, key, self._want(name, region)) for slot, key, name, region in each.wanted(self.index)]
            self._first.append(partial(each.load_values, values, read, exact=self._is_exact))

    @property
    def _is_exact(self) -> bool:
        """Whether all parameters have the dtype in which they were saved."""
        return all(
            getattr(torch, self.index.tensors[f"{WEIGHTS}/{name}"].dtype) == tensor.dtype
            for name, tensor in self._tensors.tensors.items()
        )

    def _check_schedulers(self) -> None:
        saved = [each["kind"] for each in self.index.values["scheduler"]]
        own = [type(each).__name__ for each in self._schedulers]
        if own and saved != own:
            raise ConfigError(
                f"{self._where} contains the states of {', '.join(saved) or 'no scheduler'}, but scheduler= is "
                f"{', '.join(own)}",
                remedy="Pass the schedulers that were passed to save_checkpoint, or omit scheduler",
            )

    def _want_random(self) -> None:
        """Read the random states of the rank that had this rank's data, if the data axis kept its size."""
        own, coords = self._tensors.coords, self.index.values["coords"]
        as_many = self.index.sizes.get("data", 1) == self._tensors.sizes.get("data", 1)
        self.has_random = self._goes_on and as_many
        if not self.has_random:
            return
        same = [rank for rank, theirs in enumerate(coords) if theirs == own and self.index.sizes == self._tensors.sizes]
        alike = [rank for rank, theirs in enumerate(coords) if theirs.get("data", 0) == own.get("data", 0)]
        rank = (same or alike)[0]
        names = list(random_state_tensors(self._tensors.device)[0])
        memory = {}
        for name in names:
            full = random_state_key(rank, name)
            if full in self.index.tensors:
                memory[name] = self._want(full, FlatRegion(self.index.tensors[full].shape, None, {}))
        numbers = self.index.values["random"][rank]
        self._then.append(lambda: set_random_state_tensors(memory, numbers, self._tensors.device))

    # --- after reading

    @torch.no_grad()
    def commit(self, take: Callable[[], object] = lambda: None) -> None:
        """Assign the tensors that were read to the model, the optimizers and the schedulers.

        The steps that can fail run first: optimizers, schedulers, extra states of modules, and ``take``. If one of them
        fails on any rank, all ranks restore the previous state and raise. The parameters are copied last. Communicates
        the errors, and under ZeRO one all-gather of the parameters.
        """
        zero, values = self._tensors.zero, self.index.values
        with zero.writable_state() if zero is not None else nullcontext():
            with unchanged_on_error(self._optimizers, self._schedulers), self._extra_states_kept():
                run_on_all_ranks(lambda: self._take_states(take), self._tensors.world, f"Loading {self._where}")
            for each in self._then:
                each()
        if zero is not None and self._goes_on and "loss_scale" in values:
            for name, value in values["loss_scale"].items():
                setattr(zero.loss_scale, name, value)
            zero.rounding_counts = [values["rounds"]] * len(zero.rounding_counts)

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
        """Restore the extra states of all modules if the body raises."""
        before = {name: copy.deepcopy(self._holder(name).get_extra_state()) for name in self._tensors.extra_states}
        try:
            yield
        except BaseException:
            for name, state in before.items():
                with suppress(Exception):  # set_extra_state itself may have failed before
                    self._holder(name).set_extra_state(state)
            raise


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Result of loading a checkpoint.

    Args:
        path: path of the checkpoint.
        step: number of training steps that were completed when it was saved.
        extra: the ``extra`` that was passed to ``save_checkpoint``.
        num_bytes: number of bytes that this rank read.
        skipped: error messages of newer checkpoints that were damaged.
        has_random: whether random states were restored, which requires the same size of the data axis.
    """

    path: Path
    step: int
    extra: Any
    num_bytes: int
    skipped: tuple[str, ...] = ()
    has_random: bool = True


@renamed_parameters({"folder": "directory"}, ("directory", "model", "optimizer"))
def load_checkpoint(
    model: nn.Module, directory: str | os.PathLike[str], optimizer: Any = None, *, scheduler: Any = None
) -> LoadedCheckpoint:
    """Resume from a checkpoint that was saved under any layout.

    Each rank reads its own chunks once, and the ranks verify all checksums. Nothing is modified before all tensors have
    been read and verified. All ranks must call this function.

    Communicates names, sizes and checksums, and under ZeRO one all-gather of the parameters.

    Args:
        directory: a directory of checkpoints, from which the newest undamaged one is loaded, or one checkpoint.
        optimizer: an optimizer, a list of optimizers, or the result of ``shard_optimizer``, with the classes and
            parameter groups that were saved. None: only weights and buffers are loaded, and random states are kept.
        scheduler: the scheduler or schedulers that were passed to ``save_checkpoint``.

    Raises:
        ConfigError: the checkpoint belongs to another model or optimizer.
        CorruptCheckpointError: the checkpoint is damaged. A subclass of InputError.
        Exception: an optimizer, scheduler or module rejects its state.

    All ranks raise, and the model is not modified.
    """
    return load_and_take(directory, model, optimizer, scheduler)


def load_and_take(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    take: Callable[[LoadedCheckpoint], object] = lambda _: None,
) -> LoadedCheckpoint:
    """Run ``load_checkpoint`` with an additional consumer of the loaded values.

    Args:
        take: called on every rank before the parameters are assigned. If it raises on one rank, all ranks restore the
            previous state. The caller must undo the effects of ``take`` itself.
    """
    tensors = ModelTensors(model)
    come("load_checkpoint", tensors.world)
    states = run_on_all_ranks(lambda: optimizer_states(optimizer, tensors), tensors.world, "Loading")
    tried: list[str] = []
    found = run_on_first_rank(
        lambda: [str(each) for each in checkpoint_directory.candidates(path_of(folder))],
        tensors.world,
        f"Loading {folder}",
    )
    for number, name in enumerate(found):
        try:
            loaded = Path(name)
            index = run_on_all_ranks(partial(CheckpointIndex.read, loaded), tensors.world, f"Loading {loaded}")
            loading = LoadPlan(index, loaded, tensors, states, as_object_list(scheduler))
            num_bytes = read_items(loaded, index, loading.items, tensors.world)
            break
        except CorruptCheckpointError as error:
            tried.append(error.what)
            if number == len(found) - 1:
                raise
    extra = from_json(index.values["extra"])
    made = LoadedCheckpoint(loaded, index.step, extra, num_bytes, tuple(tried), loading.has_random)
    loading.commit(partial(take, made))
    checkpoint_directory.goes_on_from(tensors.model, [str(loaded.parent)])
    return made
