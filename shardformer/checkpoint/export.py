"""Writes the folder that ``from_pretrained`` of transformers reads, out of a model under any layout."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.checkpoint import folder as folders
from shardformer.checkpoint.checksum import weighted_sum
from shardformer.checkpoint.files import Entry, Index, Written, damaged, sync, write_file
from shardformer.checkpoint.model import WEIGHTS, ModelTensors
from shardformer.checkpoint.reader import BoxReader
from shardformer.checkpoint.save import begun
from shardformer.checkpoint.together import all_do, first_does
from shardformer.comm.calls import come
from shardformer.disk.lock import release
from shardformer.disk.writing import make_folder, path_of, private_path, remove, remove_left, write_new
from shardformer.errors import ConfigError
from shardformer.sharding.replace import put_in_place
from shardformer.transformers_compat import save_code

MAX_BYTES = 5 * 10**9
"""Of a file, unless one tensor is larger."""
PARTS, INDEX = ".parts", "model.safetensors.index.json"
WRITTEN_BY = {"written_by": "shardformer.export_pretrained"}
"""In the header of each file of weights."""


def export_pretrained(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    tokenizer: Any = None,
    max_file_bytes: int = MAX_BYTES,
) -> Path:
    """Writes full weights as safetensors, with their index, the config and the generation config.

    No rank ever has more of the full model than one tensor: each writes its pieces beside, as for a checkpoint, and the
    files are put together out of these, each by one rank. All ranks call it. A model without a config gets weights
    alone. Communicates names and sizes, no weights.

    Args:
        folder: a new one, or one that an export wrote, which is replaced: it is there when all of it is written. Other
            files in it are kept.
        tokenizer: or anything else with ``save_pretrained``, which is saved beside.
        max_file_bytes: of one file of weights.

    Raises, on all ranks, ConfigError where the folder holds something else, or the weights that the model was loaded
    from, and InputError where the disk fails.
    """
    tensors = ModelTensors(model)
    world, what = tensors.world, f"Exporting to {folder}"
    come("export_pretrained", world)
    target = all_do(lambda: _checked(folder, tensors, max_file_bytes), world, what)
    place = Path(os.path.abspath(target))
    hidden = place.parent / first_does(lambda: _begin(place), world, what)
    try:
        all_do(lambda: folders.check_seen(hidden), world, what)
        with begun(hidden / PARTS, model) as job:
            parts = job.agree(partial(job.write, to_disk=False))
        index = Index.read(parts)
        files = _files_of(index, max_file_bytes)

        def put_together() -> None:
            for name, entries in list(files.items())[world.rank :: world.size]:
                _put_together(hidden / name, entries, parts)

        all_do(put_together, world, what)
        if world.rank == 0:
            release(hidden / PARTS, tensors.model)
        first_does(lambda: _finish(hidden, place, tensors.model, files, tokenizer), world, what)
    except BaseException:
        if world.rank == 0:
            release(hidden / PARTS, tensors.model)
            remove(hidden)
        raise
    return target


def _checked(folder: Any, tensors: ModelTensors, max_file_bytes: int) -> Path:
    """The path of a folder that may be written. Raises ConfigError."""
    if isinstance(max_file_bytes, bool) or not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        raise ConfigError(
            f"max_file_bytes={max_file_bytes!r}",
            rule="It is a number of bytes, one or more",
            remedy="Leave it out for files of 5 GB",
        )
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
    make_folder(place.parent)
    remove_left(place.parent, place.name)
    hidden = private_path(place)
    hidden.mkdir()
    return hidden.name


def check_target(target: Path, model: Any = None) -> None:
    """Raises ConfigError for a folder that holds what no export wrote, for that of ``model``, and for what is none."""
    if target.is_symlink():
        raise ConfigError(
            f"{target} is a symbolic link",
            rule="A model is exported into a new folder, which takes its name when all of it is written",
            remedy="Give the path that the link names, or another folder",
        )
    if not target.exists():
        return
    if not target.is_dir() or (any(target.iterdir()) and not _is_export(target)):
        raise ConfigError(
            f"{target} is {'not an export of ShardFormer' if target.is_dir() else 'a file'}",
            rule="A model is exported into a new folder, or in the place of an earlier export: no other model is "
            "overwritten",
            remedy="Give another folder, or move this one away",
        )
    source = getattr(model, "name_or_path", None)
    if isinstance(source, str) and source and os.path.exists(source) and os.path.samefile(source, target):
        raise ConfigError(
            f"{target} is the folder that the model was loaded from",
            rule="The model that a run starts from is not overwritten",
            remedy="Give another folder",
        )


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


def _files_of(index: Index, most: int) -> dict[str, list[tuple[str, Entry]]]:
    """Name of a file -> the tensors in it, in the order in which they were saved."""
    files: list[list[tuple[str, Entry]]] = []
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


def _bytes_of(entry: Entry) -> int:
    return int(prod(entry.shape) * getattr(torch, entry.dtype).itemsize)


def _put_together(path: Path, entries: Sequence[tuple[str, Entry]], parts: Path) -> None:
    reader = BoxReader(parts)
    try:
        write_file(
            path,
            [
                Written(name, getattr(torch, entry.dtype), entry.shape, partial(_full, reader, name, entry))
                for name, entry in entries
            ],
            {"format": "pt", **WRITTEN_BY},
        )
    finally:
        reader.close()


def _full(reader: BoxReader, name: str, entry: Entry) -> Tensor:
    full = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    for box in entry.boxes:
        view = full[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
        reader.read(f"{WEIGHTS}/{name}", box, (box.start, box.size), view)
        if weighted_sum(view, box.start) != box.sum:
            raise damaged(f"{name} is not what was written a moment ago: its checksum differs")
    return full


def _finish(hidden: Path, target: Path, model: Any, files: dict[str, list[tuple[str, Entry]]], tokenizer: Any) -> None:
    """What stands beside the weights; then the folder gets its name."""
    remove(hidden / PARTS)
    if len(files) > 1:
        where = {name: file for file, held in files.items() for name, _ in held}
        total = sum(_bytes_of(entry) for held in files.values() for _, entry in held)
        found = {"metadata": {"total_size": total}, "weight_map": where}
        write_new(hidden / INDEX, json.dumps(found, indent=2, sort_keys=True).encode())
    _save_beside(hidden, model, tokenizer)
    sync(hidden)
    check_target(target, model)  # it took a while to write
    put_in_place(hidden, target)
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
                rule="An export holds the config, the generation config and the tokenizer, as save_pretrained of "
                "transformers writes them, and from_pretrained reads them",
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
