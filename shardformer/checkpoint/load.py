"""Load a checkpoint into a model that is sharded under any parallel layout.

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
from shardformer.checkpoint import file_format
from shardformer.checkpoint.chunks import CheckpointTensor, ChunkBounds, LocalTensorRegion, assign_chunks_to_write
from shardformer.checkpoint.file_format import HEADER_BYTES, CheckpointIndex, SavedChunk, make_corruption_error
from shardformer.checkpoint.training_state import (
    EXTRA_STATE,
    KAHAN_RESIDUALS,
    MASTER_WEIGHTS,
    WEIGHTS,
    ModelCheckpointTensors,
    Optimizers,
    OptimizerStates,
    Schedulers,
    as_list,
    collect_optimizer_states,
    get_buffer_key,
    get_rng_state_key,
    get_rng_state_tensors,
    set_rng_state_tensors,
)
from shardformer.comm.collective_call import run_on_all_ranks, run_on_first_rank, wait_for_all_ranks
from shardformer.comm.collectives import all_gather_objects, all_reduce
from shardformer.errors import ConfigError, suggest_similar_names
from shardformer.filesystem import to_absolute_path
from shardformer.mesh.parallel_context import Axis
from shardformer.public_names import deprecate_renamed_function_arguments
from shardformer.zero.flat_shards import FlatParamShard, ParamSlice
from shardformer.zero.optimizer_state_view import rollback_optimizers_on_error

LONG = 2**16
"""Contiguous ranges of at least this many bytes are read separately, shorter ones through memory-mapped files."""
BITS = 2**64


class CheckpointChunkReader:
    """Reads tensor chunks from the files of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, _SafetensorsFile] = {}
        self.num_bytes = 0

    def read_chunk_part(self, tensor_name: str, saved_chunk: SavedChunk, part_bounds: ChunkBounds, out: Tensor) -> None:
        """Read the part of a saved chunk within ``part_bounds`` into ``out``. Raises CorruptCheckpointError."""
        path, key = (
            self._folder / file_format.get_rank_file_name(saved_chunk.file_index),
            file_format.get_safetensors_chunk_key(tensor_name, saved_chunk.start),
        )
        try:
            if saved_chunk.file_index not in self._files:
                self._files[saved_chunk.file_index] = _SafetensorsFile(path)
            self._files[saved_chunk.file_index].read_chunk_part(key, saved_chunk, part_bounds[0], out)
        except FileNotFoundError:
            raise make_corruption_error(f"The checkpoint file {path} is missing.") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise make_corruption_error(f"Cannot read {key} from the checkpoint file {path}: {error}.") from error
        self.num_bytes += out.nbytes

    def close(self) -> None:
        for file in self._files.values():
            os.close(file.descriptor)
        self._files = {}


class _SafetensorsFile:
    """An open safetensors file of a checkpoint, with its parsed header."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(self.descriptor).st_size
            length = int.from_bytes(os.pread(self.descriptor, HEADER_BYTES, 0), "little")
            if HEADER_BYTES + length > size:
                raise ValueError("The file is truncated.")
            self._header: dict[str, Any] = json.loads(os.pread(self.descriptor, length, HEADER_BYTES))
            self._header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in self._header.values()), default=0)
            if HEADER_BYTES + length + end > size:
                raise ValueError("The file is truncated.")
        except BaseException:
            os.close(self.descriptor)
            raise
        self._data_offset = HEADER_BYTES + length
        self._mapped: Tensor | None = None

    def read_chunk_part(
        self, chunk_key: str, saved_chunk: SavedChunk, part_start: tuple[int, ...], out: Tensor
    ) -> None:
        """Read the part of a saved chunk that begins at ``part_start`` in the full tensor into ``out``.

        Raises KeyError if the chunk is missing, ValueError if its dtype, shape or size differs from the index.
        """
        entry = self._header[chunk_key]
        low, high = entry["data_offsets"]
        found = entry["dtype"], tuple(entry["shape"]), high - low
        expected = (
            *file_format.get_safetensors_dtype_and_shape(out.dtype, saved_chunk.size),
            prod(saved_chunk.size) * out.dtype.itemsize,
        )
        if found != expected or low < 0:
            raise ValueError(
                f"The dtype, shape and bytes of {chunk_key} are {found}, but the checkpoint index lists {expected}."
            )
        offset = self._data_offset + int(low)
        part_start = tuple(a - o for a, o in zip(part_start, saved_chunk.start, strict=True))
        row, dim = out.element_size(), out.dim() - 1
        while dim > 0 and out.shape[dim] == saved_chunk.size[dim]:
            row *= saved_chunk.size[dim]
            dim -= 1
        # elements are contiguous in the chunk from dim on, and in ``out`` if it is contiguous
        run = row * (out.shape[dim] if out.dim() else 1)
        if run < LONG and out.nbytes > run:
            out.copy_(self._read_short_rows_from_mmap(out, offset, part_start, saved_chunk))
            return
        target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
        numbers: Any = target.reshape(-1).view(torch.uint8).numpy()
        data = memoryview(numbers)
        strides = [out.element_size() * prod(saved_chunk.size[dim + 1 :]) for dim in range(out.dim())]
        outer = torch.cartesian_prod(*(torch.arange(n) for n in out.shape[:dim])).view(-1, dim) if dim > 0 else [()]
        for number, index in enumerate(outer):
            place = [a + int(i) for a, i in zip(part_start, index, strict=False)] + list(part_start[max(dim, 0) :])
            row_offset = offset + sum(i * stride for i, stride in zip(place, strides, strict=True))
            self._read_into_buffer(data[number * run : (number + 1) * run], row_offset)
        if target is not out:
            out.copy_(target)

    def _read_into_buffer(self, buffer: memoryview, file_offset: int) -> None:
        while len(buffer):
            count = os.preadv(self.descriptor, [buffer], file_offset)
            if count == 0:
                raise ValueError("The file is truncated.")
            buffer, file_offset = buffer[count:], file_offset + count

    def _read_short_rows_from_mmap(
        self, like_tensor: Tensor, chunk_file_offset: int, start_in_chunk: tuple[int, ...], saved_chunk: SavedChunk
    ) -> Tensor:
        """Read many short rows through a memory-mapped file, so that only the required pages are loaded."""
        if self._mapped is None:
            memory = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_COPY)
            self._mapped = torch.frombuffer(memory, dtype=torch.uint8)
        width = like_tensor.element_size()
        num_bytes = prod(saved_chunk.size) * width
        rows = self._mapped[chunk_file_offset : chunk_file_offset + num_bytes].view(
            *saved_chunk.size[:-1], saved_chunk.size[-1] * width
        )
        inner = slice(start_in_chunk[-1] * width, (start_in_chunk[-1] + like_tensor.shape[-1]) * width)
        outer = tuple(slice(a, a + n) for a, n in zip(start_in_chunk[:-1], like_tensor.shape[:-1], strict=True))
        return rows[(*outer, inner)].clone(memory_format=torch.contiguous_format).view(like_tensor.dtype)


def read_checkpoint_tensors(
    checkpoint_folder: Path,
    checkpoint_index: CheckpointIndex,
    checkpoint_tensors: Sequence[CheckpointTensor],
    world: Axis,
) -> int:
    """Read this rank's shards of all tensors from a checkpoint, and verify the checksums of the tensors.

    Returns the number of bytes read. Each rank reads only its own chunks. For each element, one rank adds its
    contribution to the checksum of its saved chunk. Communicates the names and bounds of the chunks that are read, and
    two integers for each saved chunk.

    Raises CorruptCheckpointError on all ranks if a file is missing or a checksum does not match.
    """
    rows = _number_saved_chunks(checkpoint_index, checkpoint_tensors, world)
    assigned = assign_chunks_to_write([item for item in checkpoint_tensors if item.is_checked], world)
    sums = torch.zeros(len(rows), 2, dtype=torch.int64)
    reader = CheckpointChunkReader(checkpoint_folder)

    def read_local_items() -> None:
        for item in checkpoint_tensors:
            saved = checkpoint_index.tensors[item.name].chunks
            for chunk in item.chunks:
                count = 0
                for number, bounds in file_format.find_overlapping_chunks(
                    checkpoint_index.tensors[item.name], chunk.bounds
                ):
                    reader.read_chunk_part(item.name, saved[number], bounds, chunk.get_subview(*bounds))
                    count += prod(bounds[1])
                if count != (expected := chunk.values.numel()):
                    raise make_corruption_error(
                        f"The checkpoint {checkpoint_folder} contains only {count} of the {expected} elements of "
                        f"{item.name} that this rank needs."
                    )
                for box in assigned.get((item.name, *chunk.bounds), ()) if item.is_checked else ():
                    for number, bounds in file_format.find_overlapping_chunks(checkpoint_index.tensors[item.name], box):
                        row = sums[rows[item.name, number]]
                        total = (
                            int(row[0]) + file_format.compute_chunk_checksum(chunk.get_subview(*bounds), bounds[0])
                        ) % BITS
                        row[0] = total - BITS if total >= BITS // 2 else total
                        row[1] += prod(bounds[1])

    try:
        run_on_all_ranks(read_local_items, world, f"Reading {checkpoint_folder}")
    finally:
        reader.close()
    sums = all_reduce(sums, world, purpose="setup")
    for (name, number), (total, count) in zip(rows, sums.tolist(), strict=True):
        box = checkpoint_index.tensors[name].chunks[number]
        file = checkpoint_folder / file_format.get_rank_file_name(box.file_index)
        chunk = f"the chunk of {name} at {list(box.start)} in {file}"
        if count != (expected := prod(box.size)):
            raise make_corruption_error(
                f"The checkpoint index lists {expected} elements for {chunk}, but {count} elements were read."
            )
        if total % BITS != box.checksum:
            raise make_corruption_error(f"The checksum of {chunk} does not match its contents.")
    return reader.num_bytes


def _number_saved_chunks(
    index: CheckpointIndex, tensor_items: Sequence[CheckpointTensor], world: Axis
) -> dict[tuple[str, int], int]:
    """Number the saved chunks that any rank loads, in the same order on all ranks."""
    local = {item.name for item in tensor_items}
    is_read = torch.tensor([name in local for name in index.tensors], dtype=torch.int64)
    is_read = all_reduce(is_read, world, op="max", purpose="setup")
    names = [name for name, flag in zip(index.tensors, is_read.tolist(), strict=True) if flag]
    keys = [(name, number) for name in names for number in range(len(index.tensors[name].chunks))]
    return {key: row for row, key in enumerate(keys)}


class LoadPlan:
    """Plan of the tensors that this rank reads from a checkpoint, and where it copies them.

    Args:
        index: index of the saved run.
        checkpoint_name: name of the saved run for error messages.
    """

    def __init__(
        self,
        index: CheckpointIndex,
        checkpoint_name: str | Path,
        model_tensors: ModelCheckpointTensors,
        optimizer_states: Sequence[OptimizerStates],
        schedulers: Sequence[Any] = (),
    ) -> None:
        self.index, self._where, self._tensors = index, checkpoint_name, model_tensors
        self.items: list[CheckpointTensor] = []
        self._values: dict[str, tuple[str, Tensor]] = {}  # name of a parameter -> (name of the saved tensor, buffer)
        self._schedulers, self._has_optimizer = schedulers, bool(optimizer_states)
        self._optimizers = [each.optimizer for each in optimizer_states]
        self._load_states: list[Callable[[], object]] = []  # code of optimizers, which may fail
        self._copy_values: list[Callable[[], object]] = []
        self._has_same_data_axis = index.sizes.get("data", 1) == model_tensors.mesh_axis_sizes.get("data", 1)
        self.has_random = self._has_optimizer and self._has_same_data_axis
        self._kind, self._saved_kind = type(model_tensors.model).__name__, index.values["model"]
        self._saved = {n.partition("/")[2]: e for n, e in index.tensors.items() if n.startswith(f"{WEIGHTS}/")}

        def build_plan() -> None:
            self._check_model_tensors_match_checkpoint()
            self._add_model_tensors()
            self._add_optimizer_states(optimizer_states)
            self._check_scheduler_classes_match()
            if self.has_random:
                self._add_rng_states()

        run_on_all_ranks(build_plan, model_tensors.world, f"Loading {checkpoint_name}")
        self._check_no_unused_weights()

    def _add_tensor_to_read(self, tensor_name: str, region: LocalTensorRegion, *, is_checked: bool = True) -> Tensor:
        memory = region.allocate_buffer(getattr(torch, self.index.tensors[tensor_name].dtype))
        self.items.append(replace(region.make_tensor_item(tensor_name, memory), is_checked=is_checked))
        return memory

    # --- the model

    def _check_model_tensors_match_checkpoint(self) -> None:
        for name, tensor in self._tensors.tensors.items():
            shape = self._tensors.get_local_region(tensor).shape
            if name not in self._saved:
                hint = suggest_similar_names(name, self._saved)
                raise ConfigError(
                    f"The weight {name} of this {self._kind} is missing from {self._where}, which was saved from a "
                    f"{self._saved_kind}.",
                    remedy=f"{hint} Build the model from the config of the saved run.",
                )
            if (saved_shape := self._saved[name].shape) != shape:
                raise ConfigError(
                    f"{name} has the shape {shape} in this {self._kind}, but the shape {saved_shape} in {self._where}.",
                    remedy="Build the model from the config of the saved run.",
                )

    def _check_no_unused_weights(self) -> None:
        names = set().union(*all_gather_objects(set(self._tensors.tensors), self._tensors.world))
        if unused := [name for name in self._saved if name not in names]:
            name, hint = unused[0], suggest_similar_names(unused[0], names)
            raise ConfigError(
                f"{self._where} was saved from a {self._saved_kind} and contains weights that this {self._kind} does "
                f"not have, such as {name}.",
                remedy=f"{hint} Build the model from the config of the saved run.",
            )

    def _add_model_tensors(self) -> None:
        zero, data = self._tensors.zero, self._tensors.mesh_coords.get("data", 0)
        gathered = self._tensors.zero_stage3_param_ids
        for name, tensor in self._tensors.tensors.items():
            if id(tensor) not in gathered:
                buffer = get_buffer_key(data, name)
                is_saved = self._has_same_data_axis and buffer in self.index.tensors
                source = buffer if is_saved else self._choose_weight_source(name, tensor.dtype)
                self._values[name] = source, self._add_tensor_to_read(source, self._tensors.get_local_region(tensor))
                self._copy_values.append(partial(tensor.detach().copy_, self._values[name][1]))
        trained = {id(shard) for shard in (zero.shards if zero is not None else ())}
        for shard in self._tensors.iter_zero_shards():
            for piece in shard.slices:
                if shard.full is None or shard.has_masters or shard.rounded is not None:
                    self._add_zero_param_slice(shard, piece, is_trained=id(shard) in trained)

    def _choose_weight_source(self, param_name: str, dtype: torch.dtype) -> str:
        """Choose whether to load a parameter from its saved weights or from its saved master weights.

        Master weights are chosen if ``dtype`` is wider than the dtype of the saved weights.
        """
        master, saved_dtype = f"{MASTER_WEIGHTS}/{param_name}", getattr(torch, self._saved[param_name].dtype)
        is_wider = dtype.is_floating_point and dtype.itemsize > saved_dtype.itemsize
        return master if is_wider and master in self.index.tensors else f"{WEIGHTS}/{param_name}"

    def _add_zero_param_slice(self, shard: FlatParamShard, param_slice: ParamSlice, *, is_trained: bool) -> None:
        name, region = (
            self._tensors.get_param_name(param_slice),
            self._tensors.get_param_slice_region(param_slice),
        )
        source = self._choose_weight_source(name, shard.wide_dtype if is_trained else shard.dtype)
        read, values = self._values.get(name, ("", None))
        if read == source and values is not None and not param_slice.grad_slot.is_shared:
            memory = values.reshape(-1)[param_slice.param_range]
        else:
            memory = self._add_tensor_to_read(source, region, is_checked=read != source)
        residual_name = f"{KAHAN_RESIDUALS}/{name}"
        has_residual = is_trained and residual_name in self.index.tensors
        residual = self._add_tensor_to_read(residual_name, region) if has_residual else None

        def copy_values() -> None:
            wide = memory if residual is None else memory.to(shard.wide_dtype) + residual.to(shard.wide_dtype)
            if is_trained:
                param_slice.value.copy_(wide.view(param_slice.value.shape))
            if not is_trained or not shard.has_masters or shard.rounded is not None:
                shard.local[param_slice.shard_range] = memory.reshape(-1).to(shard.local)

        self._copy_values.append(copy_values)

    # --- optimizers, schedulers, random states

    def _add_optimizer_states(self, optimizer_states: Sequence[OptimizerStates]) -> None:
        saved = self.index.values["optimizers"]
        if optimizer_states and len(saved) != len(optimizer_states):
            raise ConfigError(
                f"The number of optimizers is {len(optimizer_states)}, but {self._where} was saved with {len(saved)}.",
                remedy="Create the optimizers as in the saved run, or omit optimizer= to load only the weights.",
            )
        has_saved_dtypes = all(
            getattr(torch, self._saved[name].dtype) == tensor.dtype for name, tensor in self._tensors.tensors.items()
        )
        for each, values in zip(optimizer_states, saved if optimizer_states else (), strict=True):
            each.check_saved_state_is_compatible(values)
            read = [
                (slot, key, self._add_tensor_to_read(name, region))
                for slot, key, name, region in each.iter_saved_state_tensors(self.index)
            ]
            self._load_states.append(partial(each.load_saved_state, values, read, keep_saved_dtype=has_saved_dtypes))

    def _check_scheduler_classes_match(self) -> None:
        saved = [each["kind"] for each in self.index.values["scheduler"]]
        passed = [type(each).__name__ for each in self._schedulers]
        if passed and saved != passed:
            passed_names, saved_names = ", ".join(passed), ", ".join(saved) or "no scheduler"
            raise ConfigError(
                f"The scheduler is {passed_names}, but {self._where} was saved with {saved_names}.",
                remedy="Pass the same schedulers that you passed to save_checkpoint, or omit the argument scheduler.",
            )

    def _add_rng_states(self) -> None:
        """Plan to restore the random number generators of the saved rank with the same mesh coordinates.

        Under another layout, the states of the first rank with the same data rank are restored.
        """
        coords, saved = self._tensors.mesh_coords, self.index.values["coords"]
        same_layout = self.index.sizes == self._tensors.mesh_axis_sizes
        same_place = [rank for rank, other in enumerate(saved) if same_layout and other == coords]
        same_data = [rank for rank, other in enumerate(saved) if other.get("data", 0) == coords.get("data", 0)]
        rank = (same_place or same_data)[0]
        memory = {}
        for name in get_rng_state_tensors(self._tensors.device)[0]:
            key = get_rng_state_key(rank, name)
            if key in self.index.tensors:
                memory[name] = self._add_tensor_to_read(key, LocalTensorRegion(self.index.tensors[key].shape, None, {}))
        numbers = self.index.values["random"][rank]
        self._copy_values.append(lambda: set_rng_state_tensors(memory, numbers, self._tensors.device))

    # --- after reading

    @torch.no_grad()
    def apply_loaded_state(self, on_loaded: Callable[[], object] = lambda: None) -> None:
        """Copy the loaded state into the model, the optimizers and the schedulers.

        The steps that can fail run first: optimizers, schedulers, extra states of modules, and ``on_loaded``. If one of
        them fails on any rank, all ranks restore the previous state and raise. The parameters are copied last.
        Communicates the errors, and under ZeRO one all-gather of the parameters.
        """
        zero, values = self._tensors.zero, self.index.values
        with zero.writable_state() if zero is not None else nullcontext():
            with (
                rollback_optimizers_on_error(self._optimizers, self._schedulers),
                self._restore_extra_states_on_error(),
            ):
                run_on_all_ranks(
                    lambda: self._load_optimizer_and_extra_states(on_loaded),
                    self._tensors.world,
                    f"Loading {self._where}",
                )
            for copy_values in self._copy_values:
                copy_values()
        if zero is not None and self._has_optimizer and "loss_scale" in values:
            for name, value in values["loss_scale"].items():
                setattr(zero.loss_scale, name, value)
            zero.rounding_counts = [values["rounds"]] * len(zero.rounding_counts)

    def _load_optimizer_and_extra_states(self, on_loaded: Callable[[], object]) -> None:
        values = self.index.values
        for load_states in self._load_states:
            load_states()
        for name in self._tensors.extra_states.keys() & values["extra_states"].keys():
            self._get_extra_state_module(name).set_extra_state(
                file_format.decode_json_value(values["extra_states"][name])
            )
        for scheduler, saved in zip(self._schedulers, values["scheduler"], strict=False):
            scheduler.load_state_dict(file_format.decode_json_value(saved["state"]))
        on_loaded()

    def _get_extra_state_module(self, extra_state_name: str) -> nn.Module:
        return self._tensors.model.get_submodule(extra_state_name.removesuffix(EXTRA_STATE).removesuffix("."))

    @contextmanager
    def _restore_extra_states_on_error(self) -> Iterator[None]:
        before = {
            name: copy.deepcopy(self._get_extra_state_module(name).get_extra_state())
            for name in self._tensors.extra_states
        }
        try:
            yield
        except BaseException:
            for name, state in before.items():
                with suppress(Exception):  # set_extra_state itself may have failed before
                    self._get_extra_state_module(name).set_extra_state(state)
            raise


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Path, step and extra values of a checkpoint that ``load_checkpoint`` has loaded.

    Args:
        path: path of the checkpoint.
        step: number of training steps that were completed when the checkpoint was saved.
        extra: the ``extra`` that was passed to ``save_checkpoint``.
        num_bytes: number of bytes that this rank read.
        skipped: error messages of newer checkpoints, which were skipped because they are damaged.
        has_random: whether random states were restored. The data axis must have the same size as in the saved run.
    """

    path: Path
    step: int
    extra: Any
    num_bytes: int
    skipped: tuple[str, ...] = ()
    has_random: bool = True


@deprecate_renamed_function_arguments({"folder": "directory"}, ("directory", "model", "optimizer"))
def load_checkpoint(
    model: nn.Module, directory: str | os.PathLike[str], optimizer: Optimizers = None, *, scheduler: Schedulers = None
) -> LoadedCheckpoint:
    """Load a checkpoint into a model and its optimizer, even if it was saved under a different parallel layout.

    Each rank reads its own chunks once, and the ranks verify all checksums. Nothing is modified before all tensors have
    been read and verified. All ranks must call this function.

    Communicates names, sizes and checksums, and under ZeRO one all-gather of the parameters.

    Args:
        directory: a checkpoint, or a directory of checkpoints, from which the newest undamaged one is loaded.
        optimizer: an optimizer, a list of optimizers, or the result of ``shard_optimizer``, with the same classes and
            parameter groups as in the saved run. None: only weights and buffers are loaded, no random states.
        scheduler: the scheduler or schedulers that were passed to ``save_checkpoint``.

    Raises:
        ConfigError: the checkpoint belongs to another model or optimizer.
        CorruptCheckpointError: the checkpoint is damaged. A subclass of InputError.
        Exception: an optimizer, scheduler or module rejects its state.

    If one rank raises, all ranks raise, and the model is not modified.
    """
    return load_checkpoint_with_callback(directory, model, optimizer, scheduler)


def load_checkpoint_with_callback(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers,
    scheduler: Schedulers,
    on_loaded: Callable[[LoadedCheckpoint], object] = lambda _: None,
) -> LoadedCheckpoint:
    """Load a checkpoint, and call ``on_loaded`` with the result before the model's parameters are overwritten.

    In other respects, this function is like ``load_checkpoint``.

    Args:
        on_loaded: called on every rank before the parameters are overwritten. If it raises on one rank, all ranks
            restore the previous state. The caller must undo the effects of ``on_loaded`` itself.
    """
    tensors = ModelCheckpointTensors(model)
    wait_for_all_ranks("load_checkpoint", tensors.world)
    states = run_on_all_ranks(lambda: collect_optimizer_states(optimizer, tensors), tensors.world, "Loading")
    tried: list[str] = []
    found = run_on_first_rank(
        lambda: [str(each) for each in checkpoint_directory.find_checkpoints(to_absolute_path(directory))],
        tensors.world,
        f"Loading {directory}",
    )
    for number, name in enumerate(found):
        try:
            loaded = Path(name)
            index = run_on_all_ranks(partial(CheckpointIndex.read, loaded), tensors.world, f"Loading {loaded}")
            loading = LoadPlan(index, loaded, tensors, states, as_list(scheduler))
            num_bytes = read_checkpoint_tensors(loaded, index, loading.items, tensors.world)
            break
        except file_format.CorruptCheckpointError as error:
            tried.append(error.what)
            if number == len(found) - 1:
                raise
    extra = file_format.decode_json_value(index.values["extra"])
    made = LoadedCheckpoint(loaded, index.step, extra, num_bytes, tuple(tried), loading.has_random)
    loading.apply_loaded_state(partial(on_loaded, made))
    checkpoint_directory.record_resumed_checkpoint_dirs(tensors.model, [str(loaded.parent)])
    return made
