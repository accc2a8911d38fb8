"""Save a sharded model with full weights in transformers' format."""

from __future__ import annotations

import copy
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.checkpoint import directory as checkpoint_directory
from shardformer.checkpoint.file_format import (
    CheckpointIndex,
    TensorIndexEntry,
    TensorToWrite,
    compute_chunk_checksum,
    fsync_path,
    make_corruption_error,
    write_safetensors_file,
)
from shardformer.checkpoint.load import CheckpointChunkReader
from shardformer.checkpoint.save import prepare_save
from shardformer.checkpoint.training_state import WEIGHTS, ModelCheckpointTensors
from shardformer.comm.collective_call import (
    run_and_compare_across_ranks,
    run_on_all_ranks,
    run_on_first_rank,
    wait_for_all_ranks,
)
from shardformer.errors import ConfigError, InputError, check_int
from shardformer.filesystem import (
    AtomicDirectoryWriter,
    release_folder_lock,
    remove_file_or_folder,
    to_absolute_path,
    write_new_file,
)
from shardformer.layout.packed_weights import check_no_quantized_weights, get_quantized_weights_numel
from shardformer.layout.sharding_metadata import ShardingMetadata, get_or_build_metadata, get_sharding_metadata
from shardformer.public_names import deprecate_renamed_function_arguments
from shardformer.tensor_parallel.layers import Embedding1D, VocabParallelEmbedding1D
from shardformer.transformers_compat import save_custom_code
from shardformer.weights.state_dict import full_state_dict

MAX_BYTES = 5 * 10**9
"""Maximum size of a weights file, unless one tensor is larger."""
EXPORT_FILE_NAME, EXPORT_INDEX_NAME = ".parts", "model.safetensors.index.json"
WRITTEN_BY = {"written_by": "shardformer.export_pretrained"}
"""Entry in the header of each weights file."""


MODEL_DIRECTORY = AtomicDirectoryWriter(
    re.compile(
        r"(pytorch_)?model(-\d{5}-of-\d{5})?\.(safetensors|bin)|(pytorch_)?model\.(safetensors|bin)\.index\.json"
        r"|adapter_model\.(safetensors|bin)|(generation_|adapter_)?config\.json"
    ),
    key_file="config.json",
)
"""Files that belong to a saved model. transformers loads no folder without config.json."""


@deprecate_renamed_function_arguments({"folder": "directory"}, ("directory", "model"))
def export_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    max_file_bytes: int = MAX_BYTES,
) -> Path:
    """Export a sharded model to a directory that transformers' ``from_pretrained`` can load.

    All ranks must call it. Writes full weights as safetensors files with an index, the config and generation config.
    No rank materializes more of the full model than one tensor: each rank writes its shards to a temporary file, as
    for a checkpoint, and the ranks assemble the weights files from it. Communicates names and sizes, but no weights.

    Args:
        directory: a new directory, or one that an export wrote, which is replaced when the export is complete. Other
            files in it are kept.
        tokenizer: a tokenizer, or another object with ``save_pretrained``, to save into the same directory.
        max_file_bytes: maximum size of one weights file, in bytes.

    Raises:
        ConfigError: on all ranks, if the directory has other contents, or is the one that the model was loaded from.
        InputError: on all ranks, if writing fails.
    """
    tensors = ModelCheckpointTensors(model)
    world, what = tensors.world, f"Exporting to {directory}"
    wait_for_all_ranks("export_pretrained", world)
    target = run_on_all_ranks(lambda: _resolve_export_directory(directory, tensors, max_file_bytes), world, what)
    place = Path(os.path.abspath(target))
    # the first rank creates a hidden directory, whose unique name identifies it to all ranks
    hidden = place.parent / run_on_first_rank(
        lambda: MODEL_DIRECTORY.create_temporary_directory(place, place).name, world, what
    )
    try:
        run_on_all_ranks(lambda: checkpoint_directory.wait_until_folder_exists(hidden), world, what)
        with prepare_save(hidden / EXPORT_FILE_NAME, model) as job:
            parts = job.write_or_clean_up(partial(job.write_checkpoint, sync_to_disk=False))
        index = CheckpointIndex.read(parts)
        files = _assign_tensors_to_files(index, max_file_bytes)

        def write_files() -> None:
            for name, entries in list(files.items())[world.rank :: world.size]:
                _write_weights_file(hidden / name, entries, parts)

        run_on_all_ranks(write_files, world, what)
        if world.rank == 0:
            release_folder_lock(hidden / EXPORT_FILE_NAME, tensors.model)
        run_on_first_rank(lambda: _complete_export(hidden, place, tensors.model, files, tokenizer), world, what)
    except BaseException:
        if world.rank == 0:
            release_folder_lock(hidden / EXPORT_FILE_NAME, tensors.model)
            remove_file_or_folder(hidden)
        raise
    return target


def _resolve_export_directory(
    directory: str | os.PathLike[str], tensors: ModelCheckpointTensors, max_file_bytes: int
) -> Path:
    check_int("max_file_bytes", max_file_bytes, unit="bytes", example=5 * 10**9)
    check_no_quantized_weights(tensors.model, "export_pretrained")
    if get_or_build_metadata(tensors.model).adapters is not None:
        raise ConfigError(
            f"{type(tensors.model).__name__} cannot be exported, because it has PEFT adapters.",
            remedy="Save the adapters with PEFT's save_pretrained, or export the result of merge_and_unload().",
        )
    if name := next((name for name, x in tensors.tensors.items() if x.dtype == torch.complex128), None):
        raise ConfigError(
            f"The tensor {name} has the dtype complex128, which safetensors does not support.",
            remedy="Convert the tensor to complex64, or use save_checkpoint, which supports complex128.",
        )
    target = to_absolute_path(directory)
    check_export_directory(target, tensors.model)
    return target


def check_export_directory(export_directory: Path, model: nn.Module | None = None) -> None:
    """Raise ConfigError if an export must not replace ``export_directory``.

    Files, the directory from which the model was loaded, and directories that no export wrote must not be replaced.
    """
    if export_directory.is_symlink():
        raise ConfigError(
            f"Cannot export the model to {export_directory}, because it is a symbolic link.",
            remedy="Pass the directory that the link refers to, or another directory.",
        )
    if not export_directory.exists():
        return
    if not export_directory.is_dir() or (any(export_directory.iterdir()) and not _is_exported_model(export_directory)):
        raise ConfigError(
            f"Cannot export the model to {export_directory}, because it is a file or contains files that are not an "
            "export of ShardFormer.",
            remedy="Pass a new or empty directory.",
        )
    source = getattr(model, "name_or_path", None)
    if isinstance(source, str) and source and os.path.exists(source) and os.path.samefile(source, export_directory):
        raise ConfigError(
            f"Cannot export the model to {export_directory}, because the model was loaded from this directory.",
            remedy="Pass another directory.",
        )


def _is_exported_model(directory: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    if not (files := [*directory.glob("*.safetensors"), *directory.glob("*.bin"), *directory.glob("*.pt*")]):
        return False
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                if not WRITTEN_BY.items() <= (file.metadata() or {}).items():
                    return False
        except (OSError, SafetensorError):
            return False
    return True


def _assign_tensors_to_files(
    checkpoint_index: CheckpointIndex, max_file_bytes: int
) -> dict[str, list[tuple[str, TensorIndexEntry]]]:
    """Distribute the tensors of a model over files of limited size. Return a dict from file names to tensors."""
    files: list[list[tuple[str, TensorIndexEntry]]] = []
    used = max_file_bytes
    for full, entry in sorted(checkpoint_index.tensors.items()):
        kind, _, name = full.partition("/")
        if kind == WEIGHTS:
            size = _count_tensor_bytes(entry)
            if used + size > max_file_bytes or not files:
                files.append([])
                used = 0
            files[-1].append((name, entry))
            used += size
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": each for n, each in enumerate(files, 1)}


def _count_tensor_bytes(index_entry: TensorIndexEntry) -> int:
    return int(prod(index_entry.shape) * getattr(torch, index_entry.dtype).itemsize)


def _write_weights_file(file_path: Path, entries: Sequence[tuple[str, TensorIndexEntry]], shards_path: Path) -> None:
    with closing(CheckpointChunkReader(shards_path)) as reader:
        tensors = [
            TensorToWrite(
                name, getattr(torch, entry.dtype), entry.shape, partial(_read_full_tensor, reader, name, entry)
            )
            for name, entry in entries
        ]
        write_safetensors_file(file_path, tensors, {"format": "pt", **WRITTEN_BY})


def _read_full_tensor(reader: CheckpointChunkReader, tensor_name: str, index_entry: TensorIndexEntry) -> Tensor:
    full = torch.empty(index_entry.shape, dtype=getattr(torch, index_entry.dtype))
    for box in index_entry.chunks:
        view = full[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
        reader.read_chunk_part(f"{WEIGHTS}/{tensor_name}", box, (box.start, box.size), view)
        if compute_chunk_checksum(view, box.start) != box.checksum:
            raise make_corruption_error(
                f"The tensor {tensor_name} is damaged: its checksum differs from the saved checksum."
            )
    return full


def _complete_export(
    temporary_directory: Path,
    target: Path,
    model: Any,
    files: dict[str, list[tuple[str, TensorIndexEntry]]],
    tokenizer: Any,
) -> None:
    """Write the remaining files of an export, such as the config, and move the directory to its final path."""
    remove_file_or_folder(temporary_directory / EXPORT_FILE_NAME)
    if len(files) > 1:
        weight_map = {name: file for file, entries in files.items() for name, _ in entries}
        total = sum(_count_tensor_bytes(entry) for entries in files.values() for _, entry in entries)
        found = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_new_file(temporary_directory / EXPORT_INDEX_NAME, json.dumps(found, indent=2, sort_keys=True).encode())
    _save_config_and_tokenizer(temporary_directory, model, tokenizer)
    fsync_path(temporary_directory)
    check_export_directory(target, model)  # it may have changed during the export
    MODEL_DIRECTORY.replace_target_directory(temporary_directory, target)
    fsync_path(target.parent)


def _save_config_and_tokenizer(directory: Path, model: nn.Module, tokenizer: Any) -> None:
    config = copy.deepcopy(getattr(model, "config", None))
    if config is not None:  # as transformers writes it, with class and dtype
        config.architectures = [type(model).__name__]
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if len(dtypes) == 1:
            config.dtype = str(dtypes.pop()).removeprefix("torch.")
    save_custom_code(model, directory, config)
    objects: list[Any] = [config, getattr(model, "generation_config", None), tokenizer]
    for thing in objects:
        if hasattr(thing, "save_pretrained"):
            thing.save_pretrained(directory)


def check_model_is_exportable(model: nn.Module, tokenizer: Any = None) -> None:
    """Raise ConfigError if an export would fail because of the config or the tokenizer.

    Writes all files except the weights to a temporary directory, and reads the config from it.
    """
    with tempfile.TemporaryDirectory(prefix="shardformer-export-") as folder:
        try:
            _save_config_and_tokenizer(Path(folder), model, tokenizer)
            kind: Any = type(getattr(model, "config", None))
            if hasattr(kind, "from_pretrained"):
                kind.from_pretrained(folder)
        except OSError:
            raise
        except Exception as error:  # transformers raises errors of any type
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(
                f"The config or tokenizer of {type(model).__name__} cannot be exported: {reason}.",
                remedy="Fix the config or tokenizer, or disable the export.",
            ) from error


_EMBEDDINGS = (nn.Embedding, VocabParallelEmbedding1D, Embedding1D)


def num_parameters(model: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Count the parameters of the full model, like ``num_parameters`` of transformers."""
    state = get_sharding_metadata(model)
    if state.stages is not None and state.context.pipe.size > 1:
        if only_trainable or exclude_embeddings:
            raise ConfigError(
                "num_parameters does not support only_trainable or exclude_embeddings on a pipeline stage.",
                remedy="Call num_parameters before you shard the model.",
            )
        return int(state.stages.num_parameters)
    embeddings = {id(p) for m in model.modules() if isinstance(m, _EMBEDDINGS) for p in m.parameters()}
    packed = 0 if only_trainable else get_quantized_weights_numel(model)
    return packed + sum(
        prod(entry.spec.shape)
        for entry in state.entries
        if (entry.param.requires_grad or not only_trainable)
        and not (exclude_embeddings and id(entry.param) in embeddings)
    )


def save_pretrained(model: Any, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
    """Save the full weights of a sharded model on the first rank, with transformers' ``save_pretrained``.

    All ranks must call it. Replaces the directory atomically (see ``AtomicDirectoryWriter``).
    """
    state = get_sharding_metadata(model)
    context = state.context
    wait_for_all_ranks("save_pretrained", *context.base_axes)
    check_no_quantized_weights(model, "save_pretrained")
    run_and_compare_across_ranks(
        context, lambda: _check_save_arguments(state, save_directory, kwargs), action_description="save this model"
    )
    kwargs.pop("is_main_process", None)
    weights = kwargs.pop("state_dict", None) or full_state_dict(model)

    def write_weights() -> None:
        if any(axis.rank > 0 for axis in context.axes.values()):
            return
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", os.path.basename(os.path.realpath(save_directory)))
        native: Callable[..., None] = type(model).save_pretrained
        MODEL_DIRECTORY.replace_directory(
            save_directory, lambda folder: native(model, folder, state_dict=weights, **kwargs)
        )

    run_and_compare_across_ranks(
        context, write_weights, action_description=f"write to {str(save_directory)!r}", error_class=InputError
    )


def _check_save_arguments(metadata: ShardingMetadata, directory: Any, kwargs: Mapping[str, Any]) -> None:
    if os.path.exists(directory) and not os.path.isdir(directory):
        raise ConfigError(
            f"save_pretrained requires a directory, but '{directory}' is a file.",
            remedy="Pass the path of a directory.",
        )
    is_first = all(axis.rank == 0 for axis in metadata.context.axes.values())
    if is_first and not kwargs.get("is_main_process", True):
        raise ConfigError(
            "save_pretrained does not support is_main_process=False on the first rank, which writes the files.",
            remedy="Remove is_main_process.",
        )
    entries = {e.name: e.spec for e in metadata.entries}
    for name, value in (kwargs.get("state_dict") or {}).items():
        if (spec := entries.get(name)) is not None and tuple(value.shape) != spec.shape:
            raise ConfigError(
                f"The state_dict must contain full tensors, but {name} has shape {tuple(value.shape)} instead of "
                f"{spec.shape}.",
                remedy="Omit state_dict, or pass shardformer.full_state_dict(model).",
            )


def raise_resize_error(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Raise ConfigError for ``resize_token_embeddings`` on a sharded model, because new rows would not be sharded."""
    raise ConfigError(
        "resize_token_embeddings is not supported on a sharded model.",
        remedy="Resize the embeddings before you shard the model.",
    )


def raise_load_adapter_error(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Raise ConfigError, because ``load_adapter`` of transformers does not work on a sharded model."""
    raise ConfigError(
        "load_adapter is not supported on a sharded model.",
        remedy="Use PeftModel.from_pretrained(model, folder), or load the adapter before you call shard_model.",
    )


def raise_submodule_save_error(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Raise ConfigError for ``save_pretrained`` on a submodule of a sharded model."""
    raise ConfigError(
        f"save_pretrained cannot save {type(model).__name__} alone, because it is a submodule of a sharded model.",
        remedy="Save the full model, or gather the weights with shardformer.full_state_dict(model).",
    )
