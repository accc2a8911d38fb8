"""Invalid saves and loads raise on all ranks before anything is changed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardformer.checkpoint import directory
from shardformer.checkpoint import directory as folder_module
from shardformer.checkpoint.file_format import CheckpointIndex
from shardformer.checkpoint.load import load_checkpoint
from shardformer.checkpoint.retention import CheckpointRetention
from shardformer.checkpoint.save import RankSnapshot, save_checkpoint, write_rank_checkpoint
from shardformer.errors import ConfigError, InputError, ShardFormerError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.meta_init.lazy_init import LazyInit
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import SmallModelFactory
from shardformer.zero.shard_optimizer import shard_optimizer


class Net(nn.Module):
    def __init__(self, width: int = 6, head: str = "head") -> None:
        super().__init__()
        self.body = nn.Linear(5, width)
        setattr(self, head, nn.Linear(width, 2))


def stepped(
    model: nn.Module, make: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
) -> torch.optim.Optimizer:
    optimizer = make(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    model = Net()
    optimizer = stepped(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    save_checkpoint(model, root, optimizer, step=7, scheduler=scheduler)
    return root


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)


def groups(params: Any) -> torch.optim.Optimizer:
    first, *rest = params
    return torch.optim.AdamW([{"params": rest}, {"params": [first]}])


LOADS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "a weight that it lacks": (
        lambda: Net(head="classifier"),
        lambda _: None,
        "classifier.weight of this Net is missing from .* saved from a Net",
    ),
    "a weight that the model does not have": (
        lambda: nn.Sequential(),
        lambda _: None,
        "from a Net and contains weights that this Sequential does not have",
    ),
    "another size": (lambda: Net(7), lambda _: None, r"body.weight has the shape \(7, 5\) .* but the shape \(6, 5\)"),
    "another optimizer": (Net, lambda m: sgd(m.parameters()), "optimizer AdamW cannot be loaded into SGD"),
    "other groups": (Net, lambda m: groups(m.parameters()), "has 1 parameter groups"),
    "two optimizers": (
        Net,
        lambda m: [sgd(m.body.parameters()), sgd(m.head.parameters())],
        "The number of optimizers is 2",
    ),
    "an optimizer of another model": (Net, lambda _: sgd(Net().parameters()), "that is not in the model"),
    "no optimizer": (Net, lambda _: "AdamW", "Optimizer, but got str"),
}


@pytest.mark.parametrize("name", LOADS)
def test_mismatched_checkpoint_raises_and_changes_nothing(name: str, folder: Path) -> None:
    build, make, said = LOADS[name]
    model = build()
    before = copy.deepcopy(model.state_dict())
    optimizer = make(model)
    with pytest.raises(ConfigError, match=said):
        load_checkpoint(model, folder, optimizer)
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    if isinstance(optimizer, torch.optim.Optimizer):
        assert not optimizer.state


def test_error_suggests_similar_parameter_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'head\.weight'"):
        load_checkpoint(Net(head="heads"), folder)


def test_number_of_schedulers_must_match(folder: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2)]
    with pytest.raises(ConfigError, match=r"The scheduler is StepLR, StepLR, but .* was saved with StepLR"):
        load_checkpoint(model, folder, optimizer, scheduler=schedulers)


@pytest.mark.parametrize("path", ["nowhere", "step-00000009", "file"])
def test_wrong_path_suggests_nearby_checkpoints(path: str, folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.raises(ShardFormerError, match=r"does not exist|not a checkpoint|no checkpoint|is a file") as error:
        load_checkpoint(Net(), folder / path)
    assert "\n" not in str(error.value)


SAVES: dict[str, tuple[dict[str, Any], str]] = {
    "step": ({"step": -1}, "step=-1"),
    "a step that is no number": ({"step": 1.5}, "step=1.5"),
    "keep": ({"retention": 0}, r"CheckpointRetention\.last must be .* but got 0"),
    "code in extra": ({"extra": {"fn": print}}, r"extra\['fn'\] is a builtins.builtin_function_or_method"),
    "a large tensor in extra": ({"extra": torch.zeros(10**5)}, "extra is a torch.Tensor"),
}


@pytest.mark.parametrize("name", SAVES)
def test_invalid_save_raises_on_all_ranks(name: str, tmp_path: Path) -> None:
    options, said = SAVES[name]

    def do(context: ParallelContext) -> str:
        model = Net()
        optimizer = shard_optimizer(model, torch.optim.AdamW(model.parameters()), stage=1, context=context)
        own = options if context.rank == 1 else {}
        with pytest.raises((ConfigError, InputError), match=said) as error:
            save_checkpoint(model, tmp_path / "root", optimizer, **own)
        return str(error.value)

    assert len(set(run_as_threads(do, data=2))) == 1
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(("rows", "count"), [(range(0, 2), 6), (range(0, 5), 15)], ids=["too few", "too many"])
def test_incomplete_or_duplicate_writes_are_not_published(rows: range, count: int, tmp_path: Path) -> None:
    hidden = directory.make_temporary_checkpoint_path(tmp_path, 7)
    hidden.mkdir()
    snapshot = RankSnapshot(0, 1, CheckpointIndex(7, 0.0, {}), {"weights/x": ("float32", (4, 3))})
    snapshot.chunks += [("weights/x", (row % 4, 0), torch.zeros(1, 3)) for row in rows]
    with pytest.raises(
        InputError, match=f"^All ranks together saved {count} elements of weights/x, but this tensor has 12 elements"
    ):
        write_rank_checkpoint(snapshot, hidden, tmp_path, CheckpointRetention(), sync_to_disk=False)
    assert directory.list_checkpoints_with_save_times(tmp_path) == []


def test_negative_retention_age_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"younger_than must be .* but got -1"):
        CheckpointRetention(younger_than=-1)


def test_zero_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    model, other = Net(), Net()
    optimizer = shard_optimizer(other, torch.optim.AdamW(other.parameters()), stage=1)
    with pytest.raises(ConfigError, match="for another model"):
        save_checkpoint(model, tmp_path, optimizer)


@pytest.mark.filterwarnings("ignore:Adafactor updates shards")
def test_optimizer_state_with_other_shape_than_its_shard_is_refused(tmp_path: Path) -> None:
    """Row and column states of a shard differ from those of the full matrix, so only full parameters can be saved."""
    torch.manual_seed(0)
    plain = SmallModelFactory("gpt2")()

    def do(context: ParallelContext) -> None:
        model = shard_model(copy.deepcopy(plain), context=context)
        optimizer = stepped(model, torch.optim.Adafactor)
        with pytest.raises(ConfigError, match=r"Adafactor stores 'row_var' of shape .* Call shard_optimizer"):
            save_checkpoint(model, tmp_path, optimizer)

    run_as_threads(do, tensor=2)


def test_meta_model_is_refused(tmp_path: Path) -> None:
    with LazyInit():
        model = Net()
    with pytest.raises(ConfigError, match="has no values"):
        save_checkpoint(model, tmp_path)


def test_computed_state_dict_entries_are_refused(tmp_path: Path) -> None:
    model = Net()
    model.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}sum": torch.ones(2)}))
    with pytest.raises(ConfigError, match=r"sum in the model's state dict is a Tensor that is neither"):
        save_checkpoint(model, tmp_path)


@pytest.mark.parametrize("what", ["folder", "step"])
def test_ranks_must_save_the_same_step_and_directory(what: str, tmp_path: Path) -> None:
    def do(context: ParallelContext) -> str:
        model = Net()
        optimizer = shard_optimizer(model, torch.optim.AdamW(model.parameters()), stage=1, context=context)
        own = context.rank if what == "folder" else 0
        with pytest.raises(ConfigError) as error:
            save_checkpoint(model, tmp_path / str(own), optimizer, step=context.rank if what == "step" else 0)
        return str(error.value)

    said = run_as_threads(do, data=2)
    assert said[0] == said[1]
    assert "Rank 0 saves step 0 to" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_directory_that_is_not_shared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.is_dir

    def is_dir(self: Path) -> bool:
        return real(self) and not (self.name.startswith(".saving") and threading.current_thread().name != "rank-0")

    monkeypatch.setattr(Path, "is_dir", is_dir)
    monkeypatch.setattr(folder_module, "SEEN_WITHIN_S", 0.2)

    def do(context: ParallelContext) -> None:
        model = Net()
        optimizer = shard_optimizer(model, torch.optim.AdamW(model.parameters()), stage=1, context=context)
        with pytest.raises(ConfigError, match="cannot see the checkpoint directory"):
            save_checkpoint(model, tmp_path, optimizer)

    run_as_threads(do, data=3)


def test_empty_tensors_are_saved_and_unsupported_dtypes_refused(tmp_path: Path) -> None:
    model, again = Net(), Net()
    for each in (model, again):
        each.register_buffer("none", torch.empty(0, 3))
    save_checkpoint(model, tmp_path)
    load_checkpoint(again, tmp_path)
    assert torch.equal(again.body.weight, model.body.weight)
    model.register_buffer("pairs", torch.zeros(3).to(torch.float8_e4m3fnuz))
    with pytest.raises(ConfigError, match="pairs has dtype"):
        save_checkpoint(model, tmp_path)


def test_loading_only_weights_keeps_random_states(folder: Path) -> None:
    model = Net()
    before = torch.get_rng_state()
    assert not load_checkpoint(model, folder).has_random
    assert torch.equal(torch.get_rng_state(), before)
