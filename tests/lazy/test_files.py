"""Weight files: all ranks must read identical files that have not changed since loading."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from shardformer.errors import ConfigError, ShardFormerError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.meta_init import safetensors_source
from shardformer.meta_init import safetensors_source as files
from shardformer.meta_init.lazy_init import materialize
from shardformer.meta_init.safetensors_source import SafetensorsFile, SafetensorsTensorReader, load_safetensors_lazily
from shardformer.shard_model_api import shard_model
from shardformer.weights.from_pretrained import from_pretrained

NAME = "model.safetensors"
ONE = "model.norm.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    folder = tmp_path_factory.mktemp("saved") / "model"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folders(saved: Path, tmp_path: Path) -> list[Path]:
    """Save the same model in three folders, one for each rank."""
    return [Path(shutil.copytree(saved, tmp_path / name)) for name in ("a", "b", "c")]


def load(folder: Path, **options: Any) -> nn.Module:
    return from_pretrained(transformers.LlamaForCausalLM, folder, **options)


def outcomes(models: list[nn.Module], axis: str = "tensor") -> list[str]:
    """Return the error of each rank when one model per rank is sharded; empty without an error."""

    def shard(context: ParallelContext) -> str:
        try:
            shard_model(models[context.rank], context=context)
        except ShardFormerError as error:
            assert error.what and error.remedy
            return str(error)
        return ""

    return run_as_threads(shard, **{axis: len(models)})


def write(folder: Path, where: int, number: int = 0xFF) -> None:
    """Change a byte of the file and keep its size and modification time."""
    path = folder / NAME
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[where] ^= number
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def with_other_size(folder: Path) -> None:
    path = folder / NAME
    save_file({**load_file(path), "other": torch.zeros(4)}, path, metadata={"format": "pt"})


def with_other_header(folder: Path) -> None:
    path = folder / NAME
    save_file(load_file(path), path, metadata={"format": "tp"})


# ------------------------------------------------------------------------------------------------ ranks that differ


@pytest.mark.parametrize(
    ("change", "named"),
    [(lambda f: write(f, -1), "sampled bytes"), (with_other_size, "size"), (with_other_header, "header")],
    ids=["bytes", "size", "header"],
)
def test_different_weight_files_raise_on_all_ranks_and_name_the_file_and_rank(
    folders: list[Path], change: Callable[[Path], None], named: str
) -> None:
    change(folders[1])
    models = [load(folder) for folder in folders[:2]]
    said = outcomes(models)
    for part in (
        f"rank 1 reads '{folders[1] / NAME}'",
        f"rank 0 reads '{folders[0] / NAME}'",
        f"differ in their {named}",
    ):
        assert [part in each for each in said] == [True, True], said
    assert all(p.is_meta for model in models for p in model.parameters())


def test_the_reported_rank_differs_from_most_ranks(folders: list[Path]) -> None:
    write(folders[0], -1)
    said = outcomes([load(folder) for folder in folders], "data")
    assert all(f"rank 0 reads '{folders[0] / NAME}', rank 1" in each for each in said), said


def test_a_rank_that_reads_several_files_instead_of_one_is_refused(folders: list[Path]) -> None:
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folders[1])
    (folders[1] / NAME).unlink()
    model.save_pretrained(folders[1], max_shard_size="5KB")
    said = outcomes([load(folder) for folder in folders[:2]])
    assert all("rank 1 reads 3 files" in each and "rank 0 reads 1 file such as" in each for each in said), said


def test_identical_files_may_be_in_different_folders(folders: list[Path]) -> None:
    os.utime(folders[1] / NAME, (1, 1))
    assert outcomes([load(folder) for folder in folders], "data") == ["", "", ""]


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample small files like large ones: a few bytes in the middle of each tensor."""
    monkeypatch.setattr(files, "NUM_CHUNKS", 0)
    monkeypatch.setattr(files, "TENSOR_BYTES", 4)


@pytest.mark.usefixtures("few_samples")
@pytest.mark.parametrize("all_bytes", [False, True])
def test_all_bytes_are_compared_on_request(folders: list[Path], all_bytes: bool) -> None:
    write(folders[1], -1)  # the last byte of a tensor: no sample
    said = outcomes([load(folder, all_bytes=all_bytes) for folder in folders[:2]])
    assert ["differ in their bytes" in each for each in said] == [all_bytes] * 2, said


def test_ranks_with_different_all_bytes_options_are_refused(folders: list[Path]) -> None:
    texts = outcomes([load(folders[0]), load(folders[1], all_bytes=True)])
    expected = "Rank 1 loaded its weights with all_bytes=True, but rank 0 used all_bytes=False"
    assert all(expected in text for text in texts)
    with pytest.raises(ConfigError, match="all_bytes='yes'"):
        load(folders[0], all_bytes="yes")


# ------------------------------------------------------------------------------------------------ files that change


def touch(folder: Path) -> None:
    os.utime(folder / NAME, (1, 1))


def cut(folder: Path) -> None:
    os.truncate(folder / NAME, 2000)


def empty(folder: Path) -> None:
    (folder / NAME).write_bytes(b"")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda f: write(f, -1), "different sampled bytes"),
        (lambda f: write(f, 20), "different header"),
        (with_other_size, "different size"),
        (touch, "was rewritten"),
        (cut, "changed or became unreadable since it was loaded"),
        (empty, "changed or became unreadable since it was loaded"),
        (lambda f: (f / NAME).unlink(), "No such file"),
    ],
    ids=["bytes", "header", "size", "time", "cut", "empty", "gone"],
)
def test_a_file_change_between_loading_and_sharding_raises_on_all_ranks(
    folders: list[Path], change: Callable[[Path], None], named: str
) -> None:
    models = [load(folder) for folder in folders[:2]]
    change(folders[1])
    said = outcomes(models)
    assert all(str(folders[1] / NAME) in each and named in each for each in said), said
    assert said[0].startswith("Rank 1 cannot shard this model")
    assert all(p.is_meta for model in models for p in model.parameters())
    with pytest.raises(ConfigError, match=named):
        materialize(models[1])


def test_a_file_change_during_reading_raises_on_all_ranks(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    read = SafetensorsTensorReader.__call__

    def noted(self: SafetensorsTensorReader) -> torch.Tensor:
        order.append(self.key)
        return read(self)

    monkeypatch.setattr(SafetensorsTensorReader, "__call__", noted)
    materialize(load(folders[0]))
    last = order[-1]

    def changed(self: SafetensorsTensorReader) -> torch.Tensor:
        value = read(self)
        if self.key == last and self.file.path.startswith(str(folders[1])):
            touch(folders[1])
        return value

    monkeypatch.setattr(SafetensorsTensorReader, "__call__", changed)
    models = [load(folder) for folder in folders[:2]]
    said = outcomes(models)
    assert all(str(folders[1] / NAME) in each and "was rewritten" in each for each in said), said
    assert all(p.is_meta for model in models for p in model.parameters())


def test_a_rewritten_identical_file_is_accepted_with_all_bytes(
    folders: list[Path],
) -> None:
    models = [load(folder, all_bytes=True) for folder in folders[:2]]
    touch(folders[1])
    assert outcomes(models) == ["", ""]
    again = load(folders[0], all_bytes=True)
    touch(folders[0])
    write(folders[0], -1)
    with pytest.raises(ConfigError, match="changed or became unreadable since it was loaded"):
        materialize(again)


# ------------------------------------------------------------------------------------------------ what is looked at


def test_samples_of_a_large_file_cover_every_tensor_and_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / NAME
    save_file({"a": torch.zeros(3 << 20, dtype=torch.uint8), "b": torch.zeros(8), "c": torch.zeros(1 << 14)}, path)
    size = path.stat().st_size
    start = size - (3 << 20) - 32 - (4 << 14)
    tensors = json.loads(path.read_bytes()[8:start])
    before = SafetensorsFile(str(path)).contents

    def differs(where: int, **options: Any) -> bool:
        with path.open("r+b") as file:
            file.seek(where)
            file.write(b"\1")
            file.flush()
            found = SafetensorsFile(str(path), **options).contents
            file.seek(where)
            file.write(b"\0")
        return found != SafetensorsFile(str(path), **options).contents

    middles = [start + sum(tensors[name]["data_offsets"]) // 2 for name in "abc"]
    chunks = [(size - safetensors_source.CHUNK_BYTES) * number // 15 for number in range(1, 16)]
    assert [differs(where) for where in (*middles, *chunks)] == [True] * 18
    between = chunks[4] - 1000  # after the middle of "a", between the sampled chunks
    assert not differs(between) and differs(between, all_bytes=True)
    assert SafetensorsFile(str(path)).contents == before


# ------------------------------------------------------------------------------------------------ absurd headers


def raw(header: Any, data: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape: tuple[int, ...] = (2,), offsets: tuple[int, int] = (0, 8), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


ABSURD = {
    "a header of 2**60 bytes": raw({"a": tensor()}, length=2**60),
    "a header of 2**64 - 1 bytes": raw({"a": tensor()}, length=2**64 - 1),
    "a header as long as the file": raw({"a": tensor()}, length=90),
    "a header without bytes": raw(b""),
    "less than a length": b"1234567",
    "offsets beyond the file": raw({"a": tensor((2**38,), (0, 2**40))}),
    "offsets beyond numbers": raw({"a": tensor((2,), (2**70, 2**70 + 8))}),
    "offsets below the file": raw({"a": tensor((2,), (-8, 0))}),
    "offsets in reverse": raw({"a": tensor((2,), (8, 0))}),
    "tensors that overlap": raw({"a": tensor(), "b": tensor((2,), (4, 12))}, b"\0" * 12),
    "tensors with a hole": raw({"a": tensor(), "b": tensor((2,), (12, 20))}, b"\0" * 20),
    "an unknown dtype": raw({"a": tensor(dtype="Q7")}),
    "a dtype that torch lacks": raw({"a": tensor((32,), (0, 24), "F6_E2M3")}, b"\0" * 24),
    "a shape that does not fit": raw({"a": tensor((3,))}),
    "a shape beyond numbers": raw({"a": tensor((2**62, 2**62))}),
    "a shape beyond torch's": raw({"a": tensor((0, 2**63), (0, 0))}, b""),
    "bytes behind the tensors": raw({"a": tensor()}, b"\0" * 80),
    "a list": raw([1, 2]),
    "a deep list": raw(b"[" * 100_000),
    "no text": raw(b"\xff\xfe{}"),
}


@pytest.mark.parametrize("content", ABSURD.values(), ids=ABSURD.keys())
@pytest.mark.parametrize("size", ["small", "large"])
def test_invalid_files_raise_a_config_error_with_a_remedy(
    content: bytes, size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if size == "large":  # where places to look at are taken from the header
        monkeypatch.setattr(files, "NUM_CHUNKS", 0)
    path = tmp_path / NAME
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model.safetensors' cannot be read: .*again") as caught:
        load_safetensors_lazily(str(path))
    assert "\n" not in str(caught.value)


def test_a_folder_instead_of_a_file_is_refused(folders: list[Path]) -> None:
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folders[0])
    (folders[0] / NAME).unlink()
    (folders[0] / NAME).mkdir()
    with pytest.raises(ConfigError, match=r"contains neither|weights of .* cannot be read"):
        load(folders[0])
    (folders[0] / NAME).rmdir()
    model.save_pretrained(folders[0], max_shard_size="5KB")
    one = next(folders[0].glob("model-00001*"))
    one.unlink()
    one.mkdir()
    with pytest.raises(ConfigError, match=r"model-00001.*cannot be read: .*directory"):
        load(folders[0])


@pytest.mark.parametrize("length", [2**60, 2**32, 200_000_000])
def test_an_invalid_header_length_allocates_no_memory(length: int, tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(raw({"a": tensor()}, length=length))
    os.truncate(path, 2**33)  # a hole: it takes no room on the disk
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="cannot be read"):
            load_safetensors_lazily(str(path))
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
