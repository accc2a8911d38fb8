"""A sharded model exports the same files as the unsharded model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shardformer
from shardformer.checkpoint import directory
from shardformer.errors import ConfigError, InputError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.meta_init.lazy_init import materialize
from shardformer.verify.small_models import DEFAULT_HEAD, SmallModelFactory
from shardformer.weights import save_pretrained
from shardformer.weights import save_pretrained as export
from shardformer.weights.from_pretrained import from_pretrained
from shardformer.weights.save_pretrained import export_pretrained
from tests.checkpoint.runs import LAYOUTS, build, start
from tests.optim import test_unusual as unusual

TEXT = ("bert", "gpt2", "llama", "t5", "bloom", "opt", "whisper", "vit", "albert", "qwen3", "swin")


def same(folder: Path, plain: nn.Module) -> None:
    """Return whether transformers loads the unsharded model from the folder."""
    kind: Any = type(plain)
    read = kind.from_pretrained(folder, dtype=next(plain.parameters()).dtype)
    expected = plain.state_dict()
    assert read.state_dict().keys() == expected.keys()
    assert [name for name, x in read.state_dict().items() if not torch.equal(x, expected[name])] == []


@pytest.mark.parametrize("family", TEXT)
def test_single_process_export_loads_in_transformers(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = SmallModelFactory(family)()
    export_pretrained(model, tmp_path / "out")
    same(tmp_path / "out", model)


@pytest.mark.slow
@pytest.mark.reduced(at_most=3)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_export_of_any_layout_loads_in_transformers(family: str, layout: str, tmp_path: Path) -> None:
    plain, how = build(family), LAYOUTS[layout]
    most = max(p.numel() for p in plain.parameters())

    def do(context: ParallelContext) -> tuple[Path, int]:
        run = start(plain, how, context, family)
        held = 0
        real = save_pretrained._read_full_tensor

        def full(*args: Any) -> Tensor:
            nonlocal held
            found = real(*args)
            held = max(held, found.numel())
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(export, "_read_full_tensor", full)
            return export_pretrained(run.model, tmp_path / "out", max_file_bytes=40_000), held

    for path, held in run_as_threads(do, data=how.data, tensor=how.tensor, pipe=how.pipe):
        assert path == tmp_path / "out"
        assert held <= most
    assert len(list(path.glob("model-*.safetensors"))) > 3
    assert not list(tmp_path.glob(".*"))
    same(path, plain)


class Words:
    """A minimal tokenizer."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "words.txt").write_text("")


def test_export_includes_config_and_tokenizer(tmp_path: Path) -> None:
    model: Any = SmallModelFactory("gpt2")().to(torch.bfloat16)
    path = export_pretrained(model, tmp_path / "out", tokenizer=Words())
    assert {f.name for f in path.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "words.txt"
    }  # fmt: skip
    config = transformers.AutoConfig.from_pretrained(path)
    assert config.architectures == ["GPT2LMHeadModel"]
    assert config.dtype == torch.bfloat16
    again = from_pretrained(type(model), path)
    assert type(again) is type(model)


def test_model_without_config_exports_only_weights(tmp_path: Path) -> None:
    path = export_pretrained(nn.Linear(2, 3), tmp_path / "out")
    assert [f.name for f in path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("how", [None, {"stage": 0}, {"stage": 1, "offload": "cpu"}, {"stage": 3, "bucket_bytes": 20}])
def test_scalar_empty_and_complex_parameters_are_exported(how: dict[str, Any] | None, tmp_path: Path) -> None:
    models = [unusual.model_of() for _ in range(2)]

    def do(context: ParallelContext) -> dict[str, Tensor]:
        model = shardformer.shard_model(models[context.rank], context=context)
        optimizer: Any = unusual.sgd(model)
        if how is not None:
            optimizer = shardformer.shard_optimizer(model, optimizer, **how)
        unusual.train(model, optimizer, [context.rank])
        export_pretrained(model, tmp_path / "out", max_file_bytes=50)
        return shardformer.full_state_dict(model)

    for trained in run_as_threads(do, data=2):
        found = {name: x for path in (tmp_path / "out").glob("*.safetensors") for name, x in load_file(path).items()}
        assert found.keys() == trained.keys() and found["extra"].shape == (0, 5) and found["temperature"].shape == ()
        assert [name for name, x in found.items() if not torch.equal(x, trained[name])] == []
        assert found["filter"].dtype == torch.complex64 and found["filter"].imag.abs().max() > 0
        unusual.check(found, unusual.plainly())


def test_complex128_is_saved_but_not_exported(tmp_path: Path) -> None:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((3, 7), 0.5 - 2e-9j, dtype=torch.complex128))
            self.register_buffer("phase", torch.tensor(1.5j, dtype=torch.complex128))

    def do(context: ParallelContext) -> None:
        model = shardformer.shard_model(models[context.rank], context=context)
        optimizer = shardformer.shard_optimizer(model, torch.optim.Adam(model.parameters()), stage=3)
        with optimizer.writable_state():
            for shard in optimizer.shards:
                shard.local.mul_(1 + 1e-9j)
        shardformer.save_checkpoint(model, tmp_path / "saved", optimizer)
        with pytest.raises(ConfigError, match="complex128, which safetensors does not support"):
            export_pretrained(model, tmp_path / "out")

    models = [Filter(), Filter()]
    run_as_threads(do, data=2)
    assert not (tmp_path / "out").exists()
    found = Filter()
    shardformer.load_checkpoint(found, tmp_path / "saved")
    assert torch.equal(found.weight, Filter().weight * (1 + 1e-9j)) and torch.equal(found.phase, Filter().phase)  # type: ignore[operator,arg-type]
    kept = load_file(next((tmp_path / "saved").rglob("rank-00000.safetensors")))
    assert all(x.dtype == torch.float64 for x in kept.values() if x.shape[-1:] == (2,))


def test_nonempty_directory_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="not an export of ShardFormer"):
        export_pretrained(nn.Linear(2, 3), tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        export_pretrained(nn.Linear(2, 3), tmp_path / "mine")
    with pytest.raises(ConfigError, match="max_file_bytes=0"):
        export_pretrained(nn.Linear(2, 3), tmp_path / "out", max_file_bytes=0)


def test_earlier_export_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out"
    first, second = nn.Linear(2, 3), nn.Linear(2, 3)
    export_pretrained(first, path, max_file_bytes=1)
    (path / "NOTES.md").write_text("my notes")
    (path / "plots").mkdir()
    (path / "plots" / "loss.png").write_text("")
    export_pretrained(second, path)
    assert sorted(f.name for f in path.iterdir()) == ["NOTES.md", "model.safetensors", "plots"]
    assert (path / "plots" / "loss.png").exists()
    assert torch.equal(load_file(path / "model.safetensors")["weight"], second.weight)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize(
    "file", ["model.safetensors", "pytorch_model.bin", "model-00001-of-00002.safetensors", "notes"]
)
def test_files_of_other_origin_are_not_overwritten(file: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.mkdir()
    if file == "model.safetensors":
        save_file({"weight": torch.ones(3, 2)}, path / file)
    else:
        (path / file).write_text("mine")
    before = (path / file).read_bytes()
    with pytest.raises(ConfigError, match="not an export of ShardFormer"):
        export_pretrained(nn.Linear(2, 3), path)
    assert [(f.name, f.read_bytes()) for f in path.iterdir()] == [(file, before)]


def test_export_into_working_directory_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        export_pretrained(nn.Linear(2, 2), ".")
        assert Path("model.safetensors").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_symbolic_link_is_not_replaced(tmp_path: Path) -> None:
    export_pretrained(nn.Linear(2, 3), tmp_path / "real")
    before = (tmp_path / "real" / "model.safetensors").read_bytes()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="is a symbolic link"):
        export_pretrained(nn.Linear(2, 3), tmp_path / "out")
    assert (tmp_path / "real" / "model.safetensors").read_bytes() == before


def test_export_does_not_disturb_save_in_parent_directory(tmp_path: Path) -> None:
    mine = [
        directory.make_temporary_checkpoint_path(tmp_path, 3),
        tmp_path / ".saving-mine",
        tmp_path / ".dropped-mine",
    ]
    for path in mine:
        path.mkdir()
        (path / "file").write_text("")
    export_pretrained(nn.Linear(2, 3), tmp_path / "out")
    assert all((path / "file").exists() for path in mine)


def test_concurrent_exports_leave_one_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, first, second, said = save_pretrained._complete_export, nn.Linear(2, 3), nn.Linear(2, 3), []

    def finish(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(export, "_complete_export", real)
        said.append(export_pretrained(second, tmp_path / "out"))
        real(*args, **kwargs)

    monkeypatch.setattr(export, "_complete_export", finish)
    export_pretrained(first, tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["weight"], first.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_export_does_not_replace_source_model(tmp_path: Path) -> None:
    plain = SmallModelFactory("gpt2")()
    plain.save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match="not an export of ShardFormer"):
        export_pretrained(plain, tmp_path / "base")
    export_pretrained(plain, tmp_path / "out")
    again = materialize(from_pretrained(type(plain), tmp_path / "out"))
    with pytest.raises(ConfigError, match="the model was loaded from this directory"):
        export_pretrained(again, tmp_path / "out")
    same(tmp_path / "out", plain)


def test_failed_export_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError("No space left on device")

    plain = copy.deepcopy(SmallModelFactory("gpt2")())
    monkeypatch.setattr(export, "_write_weights_file", full)
    with pytest.raises(InputError, match="No space left"):
        export_pretrained(plain, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert DEFAULT_HEAD["gpt2"] == type(plain).__name__
