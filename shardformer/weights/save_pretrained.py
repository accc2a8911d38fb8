"""Gathers full weights from any layout and writes the folder that ``from_pretrained`` of transformers reads."""

from __future__ import annotations

import copy
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.checkpoint import directory as checkpoint_directory
from shardformer.checkpoint.file_format import (
    CheckpointIndex,
    IndexEntry,
    TensorToWrite,
    corrupt_checkpoint_error,
    sync,
    weighted_sum,
    write_file,
)
from shardformer.checkpoint.load import BoxReader
from shardformer.checkpoint.save import prepare_save
from shardformer.checkpoint.training_state import WEIGHTS, ModelTensors
from shardformer.comm.collective_call import (
    collective_call,
    come,
    run_on_all_ranks,
    run_on_first_rank,
)
from shardformer.errors import ConfigError, InputError, check_int
from shardformer.filesystem.atomic_write import DirectoryWriter, path_of, remove, write_new
from shardformer.filesystem.lock import release
from shardformer.layout.sharding_metadata import ShardingMetadata, metadata_of
from shardformer.public_names import renamed_parameters
from shardformer.tensor_parallel.layers import Embedding1D, VocabParallelEmbedding1D
from shardformer.transformers_compat import save_code
from shardformer.weights.state_dict import full_state_dict

MAX_BYTES = 5 * 10**9
"""Of a file, unless one tensor is larger."""
EXPORT_FILE_NAME, EXPORT_INDEX_NAME = ".parts", "model.safetensors.index.json"
WRITTEN_BY = {"written_by": "shardformer.export_pretrained"}
"""In the header of each file of weights."""


MODEL_DIRECTORY = DirectoryWriter(
    re.compile(
        r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)|(pytorch_)?model\.(safetensors|bin)\.index\.json"
        r"|adapter_model\.(safetensors|bin)|(generation_|adapter_)?config\.json"
    ),
    key="config.json",
)
"""The files that are loaded together with, or instead of, a model; without a config transformers loads none."""


@renamed_parameters({"folder": "directory"}, ("directory", "model"))
def export_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    max_file_bytes: int = MAX_BYTES,
) -> Path:
    """Writes full weights as safetensors, with their index, the config and the generation config.

    No rank ever has more of the full model than one tensor: each writes its pieces beside, as for a checkpoint, and the
    files are put together out of these, each by one rank. All ranks call it. A model without a config gets weights
    alone. Communicates names and sizes, no weights.

    Args:
        directory: a new one, or one that an export wrote, which is replaced: it is there when all of it is written.
        Other
            files in it are kept.
        tokenizer: or anything else with ``save_pretrained``, which is saved beside.
        max_file_bytes: of one file of weights.

    Raises, on all ranks, ConfigError where the folder holds something else, or the weights that the model was loaded
    from, and InputError where the disk fails.
    """
    tensors = ModelTensors(model)
    world, what = tensors.world, f"Exporting to {directory}"
    come("export_pretrained", world)
    target = run_on_all_ranks(lambda: _checked(directory, tensors, max_file_bytes), world, what)
    place = Path(os.path.abspath(target))
    hidden = place.parent / run_on_first_rank(lambda: _begin(place), world, what)
    try:
        run_on_all_ranks(lambda: checkpoint_directory.check_visible(hidden), world, what)
        with prepare_save(hidden / EXPORT_FILE_NAME, model) as job:
            parts = job.agree(partial(job.write, to_disk=False))
        index = CheckpointIndex.read(parts)
        files = _files_of(index, max_file_bytes)

        def put_together() -> None:
            for name, entries in list(files.items())[world.rank :: world.size]:
                _put_together(hidden / name, entries, parts)

        run_on_all_ranks(put_together, world, what)
        if world.rank == 0:
            release(hidden / EXPORT_FILE_NAME, tensors.model)
        run_on_first_rank(lambda: _finish(hidden, place, tensors.model, files, tokenizer), world, what)
    except BaseException:
        if world.rank == 0:
            release(hidden / EXPORT_FILE_NAME, tensors.model)
            remove(hidden)
        raise
    return target


def _checked(folder: Any, tensors: ModelTensors, max_file_bytes: int) -> Path:
    """The path of a folder that may be written. Raises ConfigError."""
    check_int("max_file_bytes", max_file_bytes, unit="bytes", example=5 * 10**9)
    if unknown := [name for name, x in tensors.tensors.items() if x.dtype == torch.complex128]:
        raise ConfigError(
            f"{unknown[0]} holds numbers of the kind complex128",
            rule="transformers reads weights from safetensors, which has complex64 alone",
            remedy="Convert it to complex64 before training, or keep both parts in a float64 parameter "
            "(torch.view_as_real); a checkpoint (save_checkpoint) holds complex128",
        )
    target = path_of(folder)
    check_target(target, tensors.model)
    return target


def _begin(place: Path) -> str:
    """Makes a hidden folder of a name that is used once: ranks that see it see the same folder."""
    return MODEL_DIRECTORY.begin(place, place).name


def check_target(target: Path, model: Any = None) -> None:
    """Raises ConfigError for a folder that holds what no export wrote, for that of ``model``, and for what is none."""
    if target.is_symlink():
        raise ConfigError(f"{target} is a symbolic link", remedy="Give the path that the link names, or another folder")
    if not target.exists():
        return
    if not target.is_dir() or (any(target.iterdir()) and not _is_export(target)):
        raise ConfigError(
            f"{target} is {'not an export of ShardFormer' if target.is_dir() else 'a file'}",
            remedy="Give another folder, or move this one away",
        )
    source = getattr(model, "name_or_path", None)
    if isinstance(source, str) and source and os.path.exists(source) and os.path.samefile(source, target):
        raise ConfigError(f"{target} is the folder that the model was loaded from", remedy="Give another folder")


def _is_export(folder: Path) -> bool:
    """Whether all weights in a folder were written by an export."""
    from safetensors import SafetensorError, safe_open

    if not (files := [*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.pt*")]):
        return False
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                found = file.metadata() or {}
        except (OSError, SafetensorError):
            return False
        if any(found.get(name) != value for name, value in WRITTEN_BY.items()):
            return False
    return True


def _files_of(index: CheckpointIndex, most: int) -> dict[str, list[tuple[str, IndexEntry]]]:
    """Name of a file -> the tensors in it, in the order in which they were saved."""
    files: list[list[tuple[str, IndexEntry]]] = []
    used = most
    for full, entry in sorted(index.tensors.items()):
        kind, _, name = full.partition("/")
        if kind == WEIGHTS:
            size = _bytes_of(entry)
            if used + size > most or not files:
                files.append([])
                used = 0
            files[-1].append((name, entry))
            used += size
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": each for n, each in enumerate(files, 1)}


def _bytes_of(entry: IndexEntry) -> int:
    return int(prod(entry.shape) * getattr(torch, entry.dtype).itemsize)


def _put_together(path: Path, entries: Sequence[tuple[str, IndexEntry]], parts: Path) -> None:
    reader = BoxReader(parts)
    try:
        write_file(
            path,
            [
                TensorToWrite(name, getattr(torch, entry.dtype), entry.shape, partial(_full, reader, name, entry))
                for name, entry in entries
            ],
            {"format": "pt", **WRITTEN_BY},
        )
    finally:
        reader.close()


def _full(reader: BoxReader, name: str, entry: IndexEntry) -> Tensor:
    full = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    for box in entry.boxes:
        view = full[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
        reader.read(f"{WEIGHTS}/{name}", box, (box.start, box.size), view)
        if weighted_sum(view, box.start) != box.sum:
            raise corrupt_checkpoint_error(f"{name} is not what was written a moment ago: its checksum differs")
    return full


def _finish(
    hidden: Path, target: Path, model: Any, files: dict[str, list[tuple[str, IndexEntry]]], tokenizer: Any
) -> None:
    """What stands beside the weights; then the folder gets its name."""
    remove(hidden / EXPORT_FILE_NAME)
    if len(files) > 1:
        where = {name: file for file, held in files.items() for name, _ in held}
        total = sum(_bytes_of(entry) for held in files.values() for _, entry in held)
        found = {"metadata": {"total_size": total}, "weight_map": where}
        write_new(hidden / EXPORT_INDEX_NAME, json.dumps(found, indent=2, sort_keys=True).encode())
    _save_beside(hidden, model, tokenizer)
    sync(hidden)
    check_target(target, model)  # it took a while to write
    MODEL_DIRECTORY.put_in_place(hidden, target)
    sync(target.parent)


def _save_beside(folder: Path, model: Any, tokenizer: Any) -> None:
    config = _config_of(model)
    save_code(model, folder, config)
    beside: list[Any] = [config, getattr(model, "generation_config", None), tokenizer]
    for thing in beside:
        if hasattr(thing, "save_pretrained"):
            thing.save_pretrained(folder)


def check_export(model: Any, tokenizer: Any = None) -> None:
    """Writes all but the weights into a temporary folder, and reads the config again: an export at the end does that.

    Raises ConfigError where transformers refuses it, so that this is known before training.
    """
    with tempfile.TemporaryDirectory(prefix="shardformer-export-") as folder:
        try:
            _save_beside(Path(folder), model, tokenizer)
            kind: Any = type(getattr(model, "config", None))
            if hasattr(kind, "from_pretrained"):
                kind.from_pretrained(folder)
        except OSError:
            raise
        except Exception as error:  # whatever a library refuses a config or a tokenizer with
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise ConfigError(
                f"{type(model).__name__} cannot be exported: {' '.join(lines)}",
                remedy="Correct the fields of the config, or export nothing",
            ) from error


def _config_of(model: Any) -> Any:
    """The config, which says the class and the precision too, as transformers writes it."""
    config = copy.deepcopy(getattr(model, "config", None))
    if config is not None:
        config.architectures = [type(model).__name__]
        kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if len(kinds) == 1:
            config.dtype = str(kinds.pop()).removeprefix("torch.")
    return config


_EMBEDDINGS = (nn.Embedding, VocabParallelEmbedding1D, Embedding1D)


def install_saving(model: nn.Module, state: ShardingMetadata) -> None:
    """Lets ``save_pretrained`` write full weights and ``num_parameters`` count them, and refuses them of a part."""
    for module in model.modules():
        own = _save_pretrained if module is model else _submodule_save_error
        for name, method in (("save_pretrained", own), ("resize_token_embeddings", _refuse_resize)):
            if hasattr(module, name):
                setattr(module, name, method.__get__(module))
    if hasattr(model, "num_parameters"):
        model.__dict__["num_parameters"] = _num_parameters.__get__(model)
    if hasattr(model, "save_pretrained"):
        state.notes.append("save_pretrained writes full weights; resize_token_embeddings is refused.")


def _num_parameters(self: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Of the plain model. Communicates nothing."""
    state = metadata_of(self)
    if state.stages is not None and state.context.pipe.size > 1:
        if only_trainable or exclude_embeddings:
            raise ConfigError(
                "num_parameters of some parameters, on a stage of a pipeline",
                remedy="Ask the plain model, before it is sharded",
            )
        return int(state.stages.num_parameters)
    embeddings = {id(p) for m in self.modules() if isinstance(m, _EMBEDDINGS) for p in m.parameters()}
    return sum(
        prod(entry.spec.shape)
        for entry in state.entries
        if (entry.param.requires_grad or not only_trainable)
        and not (exclude_embeddings and id(entry.param) in embeddings)
    )


def _save_pretrained(self: Any, save_directory: Any, **kwargs: Any) -> None:
    """As on the plain model: full weights, written by the first rank. All ranks call it.

    They are written beside, and the folder takes its place at once: see ``DirectoryWriter``.
    """
    state = metadata_of(self)
    context = state.context
    come("save_pretrained", *context.base_axes)
    collective_call(context, lambda: _check_saving(state, save_directory, kwargs), action="save this model")
    kwargs.pop("is_main_process", None)
    weights = kwargs.pop("state_dict", None) or full_state_dict(self)

    def write() -> None:
        if any(axis.rank > 0 for axis in context.axes.values()):
            return
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", os.path.basename(os.path.realpath(save_directory)))
        native: Callable[..., None] = type(self).save_pretrained
        MODEL_DIRECTORY.replace(save_directory, lambda folder: native(self, folder, state_dict=weights, **kwargs))

    collective_call(context, write, action=f"write to {str(save_directory)!r}", error=InputError)


def _check_saving(state: ShardingMetadata, folder: Any, kwargs: Mapping[str, Any]) -> None:
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ConfigError(
            f"save_pretrained({os.fspath(folder)!r}), which is a file",
            rule="A model is saved into a folder, which is made where there is none",
            remedy="Give the path of a folder",
        )
    is_first = all(axis.rank == 0 for axis in state.context.axes.values())
    if is_first and not kwargs.get("is_main_process", True):
        raise ConfigError(
            "save_pretrained(is_main_process=False) on the first rank", remedy="Leave is_main_process out"
        )
    entries = {e.name: e.spec for e in state.entries}
    for name, value in (kwargs.get("state_dict") or {}).items():
        if (spec := entries.get(name)) is not None and tuple(value.shape) != spec.shape:
            raise ConfigError(
                f"save_pretrained was given a state_dict with {name} of the shape {tuple(value.shape)}",
                rule=f"What is saved is whole: {name} has the shape {spec.shape}, of which state_dict() has a part",
                remedy="Leave state_dict out, or give shardformer.full_state_dict(model)",
            )


def _refuse_resize(self: Any, *args: Any, **kwargs: Any) -> None:
    """Refused: the table is cut over the ranks."""
    raise ConfigError("resize_token_embeddings on a sharded model", remedy="Resize the plain model, then shard it")


def _submodule_save_error(self: Any, *args: Any, **kwargs: Any) -> None:
    """Refused: only the model that was sharded knows how to gather its weights."""
    raise ConfigError(
        f"save_pretrained on a {type(self).__name__} inside of a sharded model",
        remedy="Save the whole model, or write shardformer.full_state_dict(model) yourself",
    )
