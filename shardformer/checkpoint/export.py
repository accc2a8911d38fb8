"""Writes the folder that ``from_pretrained`` of transformers reads, out of a model under any layout."""

from __future__ import annotations

import copy
import json
import os
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
from shardformer.checkpoint.together import all_do
from shardformer.comm.calls import come
from shardformer.errors import ConfigError

MAX_BYTES = 5 * 10**9
"""Of a file, unless one tensor is larger."""
PARTS, INDEX = ".parts", "model.safetensors.index.json"


def export_pretrained(
    folder: str | os.PathLike[str], model: nn.Module, *, tokenizer: Any = None, max_file_bytes: int = MAX_BYTES
) -> Path:
    """Writes full weights as safetensors, with their index, the config and the generation config.

    No rank ever has more of the full model than one tensor: each writes its pieces beside, as for a checkpoint, and the
    files are put together out of these, each by one rank. All ranks call it. A model without a config gets weights
    alone. Communicates names and sizes, no weights.

    Args:
        folder: a new one; it is there when all of it is written.
        tokenizer: or anything else with ``save_pretrained``, which is saved beside.
        max_file_bytes: of one file of weights.

    Raises, on all ranks, ConfigError where the folder holds something already, InputError where the disk fails.
    """
    target, tensors = Path(folder), ModelTensors(model)
    world, hidden = tensors.world, folders.hidden_folder(target.parent, target.name)
    come("export_pretrained", world)

    def begin() -> None:
        _check(target, max_file_bytes)
        if world.rank == 0:
            folders.begin(target.parent, hidden)

    all_do(begin, world, f"Exporting to {target}")
    all_do(lambda: folders.check_seen(hidden), world, f"Exporting to {target}")
    try:
        with begun(hidden / PARTS, model) as job:
            parts = job.agree(partial(job.write, to_disk=False))
        index = Index.read(parts)
        files = _files_of(index, max_file_bytes)

        def put_together() -> None:
            for name, entries in list(files.items())[world.rank :: world.size]:
                _put_together(hidden / name, entries, parts)

        all_do(put_together, world, f"Exporting to {target}")
        all_do(
            lambda: _finish(hidden, target, tensors.model, files, tokenizer) if world.rank == 0 else None,
            world,
            f"Exporting to {target}",
        )
    except Exception:
        if world.rank == 0:
            folders.drop(hidden)
        raise
    return target


def _check(target: Path, max_file_bytes: int) -> None:
    if isinstance(max_file_bytes, bool) or not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        raise ConfigError(
            f"max_file_bytes={max_file_bytes!r}",
            rule="It is a number of bytes, one or more",
            remedy="Leave it out for files of 5 GB",
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"{target} is {'not empty' if target.is_dir() else 'a file'}",
            rule="A model is exported into a new folder, so that nothing old lies beside it",
            remedy="Give another folder, or remove this one before",
        )


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
            {"format": "pt"},
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
    folders.drop(hidden / PARTS)
    if len(files) > 1:
        where = {name: file for file, held in files.items() for name, _ in held}
        total = sum(_bytes_of(entry) for held in files.values() for _, entry in held)
        found = {"metadata": {"total_size": total}, "weight_map": where}
        (hidden / INDEX).write_text(json.dumps(found, indent=2, sort_keys=True))
    beside: list[Any] = [_config_of(model), getattr(model, "generation_config", None), tokenizer]
    for thing in beside:
        if hasattr(thing, "save_pretrained"):
            thing.save_pretrained(hidden)
    sync(hidden)
    if target.exists():
        target.rmdir()
    hidden.rename(target)
    sync(target.parent)


def _config_of(model: Any) -> Any:
    """The config, which says the class and the precision too, as transformers writes it."""
    config = copy.deepcopy(getattr(model, "config", None))
    if config is not None:
        config.architectures = [type(model).__name__]
        kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if len(kinds) == 1:
            config.dtype = str(kinds.pop()).removeprefix("torch.")
    return config
