"""A resumed run has bitwise the weights of an uninterrupted run under the same layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from shardformer.checkpoint.load import load_checkpoint
from shardformer.checkpoint.save import save_checkpoint
from shardformer.errors import ConfigError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.offload.host import OffloadConfig
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory, compute_model_loss
from shardformer.weights.state_dict import full_state_dict
from shardformer.zero.mixed_precision import MixedPrecision
from shardformer.zero.optimizers import LAMB
from shardformer.zero.shard_optimizer import shard_optimizer
from tests.checkpoint.runs import Lookahead
from tests.optim.test_owners import muon

STOP, END = 3, 5
Make = Callable[[nn.Module], Any]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


class LookaheadWithState(Lookahead):
    """Save the state of the inner optimizer in an additional entry."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": self.inner.state_dict()}


@dataclass(frozen=True)
class Case:
    """A training run: its layout, optimizer and options."""

    name: str
    data: int = 1
    tensor: int = 1
    make: Make = adamw
    settings: dict[str, Any] | None = None  # of zero
    family: str = "llama"
    freeze: bool = False
    dtype: torch.dtype = torch.float32
    more: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("AdamW"),
    Case("SGD-bf16", make=lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9), dtype=torch.bfloat16),
    Case("tensor", tensor=2, family="t5"),
    Case("stage0", data=2, settings={"stage": 0}),
    Case("stage2-bf16", data=2, settings={"stage": 2, "precision": "bf16"}, freeze=True),
    Case("stage3-bf16", data=2, tensor=2, settings={"stage": 3, "precision": "bf16"}, family="gpt2"),
    Case("stage3-frozen", data=2, settings={"stage": 3, "keep_frozen": False}, freeze=True),
    Case("stage3-on-host", data=2, settings={"stage": 3, "offload": OffloadConfig("cpu", parameters=True)}),
    Case("kahan", data=2, settings={"stage": 1, "precision": MixedPrecision("bf16", master_weights="kahan")}),
    Case("stochastic", data=3, settings={"stage": 2, "precision": MixedPrecision("bf16", master_weights="stochastic")}),
    Case("fp16", data=2, settings={"stage": 1, "precision": "fp16"}, family="bert"),
    Case("offload", data=2, settings={"stage": 2, "offload": "cpu", "precision": "bf16"}),
    Case("files", data=2, settings={"stage": 1, "offload": "nvme"}),
    Case("Muon", data=2, tensor=2, make=muon, settings={"stage": 2}, dtype=torch.float64),
    Case("Adafactor", data=2, make=lambda m: torch.optim.Adafactor(m.parameters()), settings={"stage": 1}),
    Case("transformers", make=lambda m: transformers.Adafactor(m.parameters(), lr=0.02, relative_step=False)),
    Case("Lookahead", data=2, make=lambda m: Lookahead(adamw(m)), settings={"stage": 1}),
    Case("Lookahead-tensor", tensor=2, make=lambda m: Lookahead(adamw(m))),
    Case("LAMB", data=2, tensor=2, make=lambda m: LAMB(m.parameters(), lr=0.01), settings={"stage": 0}),
]


def train(case: Case, model: nn.Module, optimizer: Any, scheduler: Any, steps: range, rank: int) -> None:
    for step in steps:
        batch = RandomBatchFactory(DEFAULT_HEAD[case.family], batch_size=2)(10 * step + rank)
        loss = compute_model_loss(
            model, {k: x.to(case.dtype) if x.is_floating_point() else x for k, x in batch.items()}
        )
        optimizer.backward(loss) if hasattr(optimizer, "backward") else loss.backward()
        skipped = getattr(optimizer, "skipped", 0)
        optimizer.step()
        optimizer.zero_grad()
        if getattr(optimizer, "skipped", 0) == skipped:
            scheduler.step()


def begin(case: Case, seed: int, context: ParallelContext, folder: Path) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(seed)
    model = SmallModelFactory(case.family)().to(case.dtype)
    if case.freeze:
        max(model.parameters(), key=lambda p: p.numel()).requires_grad_(False)
    model = shard_model(model, context=context)
    inner = case.make(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(
        inner if isinstance(inner, torch.optim.Optimizer) else inner[0], [1, 3]
    )
    if case.settings is None:
        return model, inner, scheduler
    settings = dict(case.settings)
    if settings.get("offload") == "nvme":
        settings["offload"] = f"nvme:{folder}"
    return model, shard_optimizer(model, inner, **settings), scheduler


@pytest.mark.reduced(one_in=2, at_most=4, keep=("kahan", "stochastic", "Lookahead"))
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_resumed_run_equals_uninterrupted_run(case: Case, tmp_path: Path) -> None:
    disk = tmp_path / "offload"
    disk.mkdir()

    def straight(context: ParallelContext) -> dict[str, Tensor]:
        model, optimizer, scheduler = begin(case, 0, context, disk)
        rank = context.data.rank
        train(case, model, optimizer, scheduler, range(STOP), rank)
        save_checkpoint(model, tmp_path / "saved", optimizer, step=STOP, scheduler=scheduler)
        train(case, model, optimizer, scheduler, range(STOP, END), rank)
        return full_state_dict(model)

    def resumed(context: ParallelContext) -> dict[str, Tensor]:
        model, optimizer, scheduler = begin(case, 1, context, disk)
        load_checkpoint(model, tmp_path / "saved", optimizer, scheduler=scheduler)
        train(case, model, optimizer, scheduler, range(STOP, END), context.data.rank)
        return full_state_dict(model)

    expected = run_as_threads(straight, data=case.data, tensor=case.tensor)
    for ours, theirs in zip(run_as_threads(resumed, data=case.data, tensor=case.tensor), expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("nested", [False, True])
def test_an_optimizer_that_saves_additional_entries_is_refused(nested: bool, tmp_path: Path) -> None:
    def run(context: ParallelContext) -> None:
        model = shard_model(nn.Sequential(nn.Linear(3, 2)), context=context)
        optimizer = LookaheadWithState(adamw(model))
        save_checkpoint(model, tmp_path, Lookahead(optimizer) if nested else optimizer)

    with pytest.raises(ConfigError, match=r"LookaheadWithState.state_dict\(\) has the entries 'inner'"):
        run_as_threads(run, data=1)
    assert not list(tmp_path.glob("step*"))


def test_stochastic_rounding_while_loading_is_identical_on_all_ranks(tmp_path: Path) -> None:
    wide, narrow = Case("wide", data=2), CASES[[case.name for case in CASES].index("stochastic")]

    def straight(context: ParallelContext) -> None:
        save_checkpoint(begin(wide, 0, context, tmp_path)[0], tmp_path)

    def rounded(context: ParallelContext) -> dict[str, Tensor]:
        model, optimizer, _ = begin(narrow, 1, context, tmp_path)
        load_checkpoint(model, tmp_path)
        assert set(optimizer.rounding_counts) == {1}
        return full_state_dict(model)

    run_as_threads(straight, data=2)
    first, *others = run_as_threads(rounded, data=3)
    for theirs in others:
        assert all(torch.equal(first[name], value) for name, value in theirs.items())


def test_fp32_states_of_16_bit_parameters_are_exact(tmp_path: Path) -> None:
    """Adafactor of transformers keeps fp32 states for 16-bit parameters."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(6, 5).bfloat16()
        return model, transformers.Adafactor(model.parameters(), lr=0.02, relative_step=False, beta1=0.9)

    (model, optimizer), (again, resumed) = made(), made()
    model(torch.randn(3, 6).bfloat16()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    save_checkpoint(model, tmp_path, optimizer)
    load_checkpoint(again, tmp_path, resumed)
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        expected = {key: x for key, x in optimizer.state[theirs].items() if isinstance(x, Tensor)}
        assert expected["exp_avg"].dtype == torch.float32
        for key, value in expected.items():
            found = resumed.state[ours][key]
            assert found.dtype == value.dtype and torch.equal(found, value), key


class Counting(nn.Module):
    """A norm with running averages and a counter that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head, self.seen = nn.BatchNorm1d(5), nn.Linear(5, 2), {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["calls"] += 1
        out: Tensor = self.head(self.norm(x))
        return out

    def get_extra_state(self) -> dict[str, int]:
        return self.seen

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = dict(state)


@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_per_data_rank_and_extra_states_are_restored(stage: int, tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: Any, number: int, rank: int) -> None:
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * number + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def made(context: ParallelContext) -> tuple[Counting, Any]:
        model = Counting()
        return model, shard_optimizer(
            model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=stage, context=context
        )

    def straight(context: ParallelContext) -> tuple[dict[str, Tensor], dict[str, int]]:
        model, optimizer = made(context)
        for number in range(4):
            step(model, optimizer, number, context.data.rank)
            if number == 1:
                save_checkpoint(model, tmp_path, optimizer)
        return {n: x.clone() for n, x in model.named_buffers()}, model.seen

    def resumed(context: ParallelContext) -> tuple[dict[str, Tensor], dict[str, int]]:
        model, optimizer = made(context)
        load_checkpoint(model, tmp_path, optimizer)
        for number in range(2, 4):
            step(model, optimizer, number, context.data.rank)
        return {n: x.clone() for n, x in model.named_buffers()}, model.seen

    expected = run_as_threads(straight, data=3)
    assert not torch.equal(expected[0][0]["norm.running_mean"], expected[1][0]["norm.running_mean"])
    for (ours, seen), (theirs, all_seen) in zip(run_as_threads(resumed, data=3), expected, strict=True):
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())
        assert seen == all_seen == {"calls": 4}
    alone = Counting()
    load_checkpoint(alone, tmp_path)
    assert alone.seen == {"calls": 2}


def test_values_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    def save(context: ParallelContext) -> None:
        model = Counting()
        optimizer = shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1, context=context)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(model.parameters(), lr=0.1))
        scheduler.step(float(context.rank))
        model.seen["calls"] = context.rank
        extra = {"step": 1, "names": {"a", "b"}, "hooks": {"Counter": {"count": context.rank}}, "nan": math.nan}
        save_checkpoint(model, tmp_path, optimizer, scheduler=scheduler, extra=extra)

    with pytest.warns(UserWarning, match="differs between ranks") as found:
        run_as_threads(save, data=2)
    assert sorted(str(warning.message).partition(" differs")[0] for warning in found) == [
        "_extra_state['calls']",
        "extra['hooks']['Counter']['count']",
        "scheduler",
    ]


def test_grad_scaler_and_nested_schedulers_resume(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)

    def made() -> tuple[torch.optim.Optimizer, list[Any]]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        parts = [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 9)]
        both = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])
        return optimizer, [both, torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)]

    optimizer, others = made()
    for _ in range(4):
        optimizer.step()
        optimizer.zero_grad()
        others[0].step()
    others[1].scale(torch.ones(()))
    others[1].update(4.0)
    save_checkpoint(model, tmp_path, optimizer, scheduler=others)
    again, theirs = made()
    load_checkpoint(model, tmp_path, again, scheduler=theirs)
    assert theirs[1].get_scale() == 4.0
    for _ in range(3):
        for one, scheduler in ((optimizer, others[0]), (again, theirs[0])):
            one.step()
            scheduler.step()
        assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
