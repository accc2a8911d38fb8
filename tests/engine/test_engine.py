"""The engine trains with the same calls under every layout, and with the weights of a single process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, InputError, ShardFormerError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.training.engine import Engine
from shardformer.training.initialize import get_or_create_parallel_context, initialize
from shardformer.training.sample_order import make_shuffle_generator
from shardformer.verify.small_models import SmallModelFactory
from shardformer.weights.state_dict import full_state_dict
from shardformer.zero.optimizers import LARS
from shardformer.zero.zero_optimizer import ZeroOptimizer
from tests.pools import WorkerPools

GPT2 = SmallModelFactory("gpt2", changes={"n_layer": 4})
EXACT = 1e-6
"""GPT-2 computes its loss in fp32, so other micro-batches round differently."""

Losses = list[float]


def plain(sample: SmallModelFactory = GPT2) -> nn.Module:
    torch.manual_seed(0)
    return sample().double().train()


def rows(count: int = 22, length: int = 9) -> list[dict[str, Tensor]]:
    """Samples with different numbers of ignored labels."""
    ids = torch.randint(3, 127, (count, length), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for row in range(count):
        labels[row, : row * 2 % length] = -100
    return [{"input_ids": i, "labels": label} for i, label in zip(ids, labels, strict=True)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@cache
def alone() -> tuple[Losses, dict[str, Tensor]]:
    """Plain training loop in the data order of the engine."""
    model = plain()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    samples = rows()
    for epoch in range(2):
        order = torch.randperm(len(samples), generator=make_shuffle_generator(0, epoch)).tolist()
        for start in range(0, len(order), 6):
            batch = [samples[i] for i in order[start : start + 6]]
            loss = model(**{k: torch.stack([s[k] for s in batch]) for k in batch[0]}).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses, model.state_dict()


def trained(parallel: dict[str, Any]) -> tuple[Losses, dict[str, Tensor]]:
    model = plain()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    engine = initialize(
        model, optimizer, train_data=rows(), batch_size=6, scheduler=scheduler,
        parallel={"max_grad_norm": 1.0, **parallel},
    )  # fmt: skip
    losses = []
    for _ in range(2):
        for batch in engine.data:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
    return losses, full_state_dict(engine.model)


def difference(found: tuple[Losses, dict[str, Tensor]], expected: tuple[Losses, dict[str, Tensor]]) -> float:
    losses = [abs(a - b) for a, b in zip(found[0], expected[0], strict=True)]
    weights = [float((found[1][name] - value).abs().max()) for name, value in expected[1].items()]
    return max(losses + weights)


def _layout(parallel: dict[str, Any]) -> float:
    return difference(trained(parallel), alone())


def test_one_process_equals_a_plain_training_loop() -> None:
    assert _layout({}) < 1e-12
    assert _layout({"zero_stage": 1}) < 1e-12
    assert _layout({"micro_batch_size": 2}) < EXACT


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor": 2},
        {"pipe": 2, "micro_batches": 3},
        {"data": 2, "zero_stage": 2},
        {"tensor": 2, "sequence_parallel": True, "zero_stage": 0, "micro_batch_size": 2},
    ],
    ids=str,
)
def test_two_processes_give_the_weights_of_one(pool2: WorkerPool, parallel: dict[str, Any]) -> None:
    assert max(pool2.run(_layout, parallel)) < EXACT


@pytest.mark.reduced(at_most=2)
@pytest.mark.parametrize(
    "parallel", [{"pipe": 2, "zero_stage": 1}, {"tensor": 2, "zero_stage": 3}, {"pipe": 2, "tensor": 2}, {}], ids=str
)
def test_four_processes_give_the_weights_of_one(pool4: WorkerPool, parallel: dict[str, Any]) -> None:
    assert max(pool4.run(_layout, parallel)) < EXACT


# -------------------------------------------------------------------------------------------------------- what it takes


def _seen_by_norms() -> list[Tensor]:
    """Return the inputs of layer norms in some steps, with uneven tensor shards."""
    torch.manual_seed(0)
    parallel = {"tensor": 2, "data": 2, "zero_stage": 3}
    model = SmallModelFactory("bert", changes={"vocab_size": 131})().double().train()
    engine = initialize(
        model, torch.optim.AdamW(model.parameters(), 1e-3), None, rows(), parallel=parallel, batch_size=4
    )
    seen: list[Tensor] = []
    for module in engine.model.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(lambda module, args, out: seen.append(args[0].detach().clone()))
    for batch in engine.data:
        engine.train_step(batch)
    return seen


def test_replicated_activations_are_bitwise_equal_on_tensor_ranks_under_stage_3(pool4: WorkerPool) -> None:
    every = pool4.run(_seen_by_norms)
    for one, other in (every[:2], every[2:]):
        assert len(one) > 10 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Sum(nn.Module):
    """Model without a config that returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        out: Tensor = self.layers(x, **kwargs)
        return out


def pairs(count: int = 10) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.rand(count, 4, generator=generator), torch.randint(3, (count,), generator=generator))


def made(**options: Any) -> Engine:
    torch.manual_seed(0)
    model = Sum()
    return initialize(model, sgd(model), nn.CrossEntropyLoss(), **options)


def test_tuples_of_inputs_and_targets_are_batches() -> None:
    data = pairs()
    engine, plainly = made(train_data=data, batch_size=4, data_options={"shuffle": False}), Sum()
    torch.manual_seed(0)
    plainly = Sum()
    optimizer = sgd(plainly)
    for batch, start in zip(engine.data, range(0, 10, 4), strict=True):
        x, y = data[start : start + 4]
        expected = nn.functional.cross_entropy(plainly(x), y)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert float(engine.train_step(batch)) == pytest.approx(float(expected.detach()), abs=1e-7)
    assert engine.steps == 3


def test_a_user_loader_keeps_its_settings() -> None:
    engine = made(train_data=DataLoader(pairs(), batch_size=4, drop_last=True))
    assert [len(batch[1]) for batch in engine.data] == [4, 4]


def test_a_list_of_batches_is_one_large_batch() -> None:
    data = pairs()
    whole, parts = made(), made()
    expected = whole.train_step(tuple(data[:10]))
    found = parts.train_step([tuple(data[:3]), tuple(data[3:10])])
    assert float(found) == pytest.approx(float(expected), abs=1e-6)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-7)


def test_evaluate_returns_the_mean_loss_of_all_batches() -> None:
    data = pairs()
    engine = made()
    with torch.no_grad():
        expected = nn.functional.cross_entropy(engine.model(data[:10][0]), data[:10][1])
    found = engine.evaluate(iter([tuple(data[:2]), tuple(data[2:3]), tuple(data[3:10])]))
    assert float(found) == pytest.approx(float(expected), abs=1e-6)
    assert engine.model.training
    assert float(engine.evaluate(tuple(data[:10]))) == pytest.approx(float(expected), abs=1e-6)


def test_evaluate_weights_batches_by_their_counted_labels() -> None:
    x, y = pairs()[:10]
    y[1:5] = -100  # of the first batch one label counts, of the second all
    engine = made()
    with torch.no_grad():
        expected = nn.functional.cross_entropy(engine.model(x), y)
    found = engine.evaluate(iter([(x[:5], y[:5]), (x[5:], y[5:])]))
    assert float(found) == pytest.approx(float(expected), abs=1e-6)


def test_averaging_over_ranks_returns_the_mean_of_their_losses() -> None:
    x, y = pairs()[:10]
    y[1:5] = -100  # of the first rank's labels one counts, of the second's all

    def run(context: ParallelContext) -> tuple[float, float, float]:
        engine, mine = (
            made(context=context, parallel={"average_loss_over": "ranks"}),
            slice(5 * context.data.rank, None),
        )
        batch = x[mine][:5], y[mine][:5]
        with torch.no_grad():
            own = nn.functional.cross_entropy(engine.model(batch[0]), batch[1])
        return float(own), float(engine.evaluate(batch)), float(engine.train_step(batch))

    found = run_as_threads(run, data=2)
    expected = (found[0][0] + found[1][0]) / 2
    assert abs(found[0][0] - found[1][0]) > 1e-3
    for _, evaluated, trained_with in found:
        assert (evaluated, trained_with) == (pytest.approx(expected, abs=1e-6), pytest.approx(expected, abs=1e-6))


def test_eval_mode_computes_no_gradients() -> None:
    engine, batch = made(), tuple(pairs()[:4])
    engine.eval()
    first = engine(batch)
    assert torch.equal(engine(batch), first)
    engine.train()
    with torch.no_grad():
        assert torch.equal(engine(batch), first)
    assert all(p.grad is None for p in engine.model.parameters())
    assert engine.predict(batch).shape == (4, 3)


def test_optimizer_and_scheduler_may_be_functions() -> None:
    torch.manual_seed(0)
    engine = initialize(
        Sum(),
        lambda parameters: torch.optim.AdamW(parameters, lr=1.0),
        nn.CrossEntropyLoss(),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
    engine.train_step(tuple(pairs()[:4]))
    assert engine.optimizer.param_groups[0]["lr"] == 0.5


def test_the_users_optimizer_object_is_kept() -> None:
    torch.manual_seed(0)
    model = Sum()
    first, *others = model.parameters()
    optimizer = (
        torch.optim.LBFGS(model.parameters())
        if False
        else torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.2}])
    )
    engine = initialize(model, optimizer, nn.CrossEntropyLoss())
    assert engine.optimizer is optimizer
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3]
    before = [p.detach().clone() for p in model.parameters()]
    engine.train_step(tuple(pairs()[:4]))
    assert all(not torch.equal(p, b) for p, b in zip(engine.model.parameters(), before, strict=True))


@pytest.mark.parametrize("make", [partial(LARS, lr=0.1, trust=0.1), partial(torch.optim.SGD, lr=0.1)])
def test_engine_gathers_matrices_that_the_optimizer_needs(make: Any) -> None:
    """Without ``zero_stage``, the weights of tensor-parallel ranks equal those of one process."""
    models = [plain() for _ in range(3)]

    def train(context: ParallelContext | None) -> tuple[dict[str, Tensor], bool]:
        model = models[-1 if context is None else context.rank]
        engine = initialize(model, make(model.parameters()), context=context)
        for row in rows(3):
            engine.train_step({name: value[None] for name, value in row.items()})
        return full_state_dict(engine.model), isinstance(engine.optimizer, ZeroOptimizer)

    want, _ = train(None)
    for weights, is_gathered in run_as_threads(train, tensor=2):
        assert is_gathered == (make.func is LARS)
        assert max(float((weights[name] - value).abs().max()) for name, value in want.items()) < EXACT


def test_schedulers_may_step_every_epoch() -> None:
    model = Sum()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine = initialize(
        model, optimizer, nn.CrossEntropyLoss(), pairs(), scheduler, batch_size=5, scheduler_every="epoch"
    )
    for batch in engine.data:
        engine.train_step(batch)
        assert scheduler.get_last_lr() == [0.05]
    assert scheduler.get_last_lr() == [0.025]


# --------------------------------------------------------------------------------------------------------- what it does


def test_nonfinite_steps_raise_or_are_skipped() -> None:
    bad = (torch.full((4, 4), torch.inf), torch.zeros(4, dtype=torch.long))
    engine = made(parallel={"max_grad_norm": 1.0})
    before = [p.detach().clone() for p in engine.model.parameters()]
    with pytest.raises(InputError, match="non-finite gradients"):
        engine.train_step(bad)
    skipping = made(parallel={"max_grad_norm": 1.0, "on_nonfinite": "skip"})
    skipping.train_step(bad)
    assert (skipping.steps, skipping.skipped) == (1, 1)
    for each in (engine, skipping):
        assert all(torch.equal(p, b) for p, b in zip(each.model.parameters(), before, strict=True))


def test_the_scheduler_does_not_step_after_a_skipped_step() -> None:
    good = tuple(pairs()[:4])
    bad = (torch.full((4, 4), torch.inf), good[1])
    engine = made(
        parallel={"max_grad_norm": 1.0, "on_nonfinite": "skip"},
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
    rates = []
    for batch in (bad, good, bad):
        engine.train_step(batch)
        rates.append(engine.optimizer.param_groups[0]["lr"])
    assert rates == [0.05, 0.025, 0.025]


def _misused(engine: Engine, how: str) -> None:
    batch = tuple(pairs()[:4])
    if how == "another loss":
        engine.backward(engine(batch) / 2)
    elif how == "no batch":
        engine.step()
    elif how == "no backward pass":
        engine(batch)
        engine.step()
    elif how == "twice":
        engine.backward(engine(batch))
        engine(batch)
    elif how == "saved between":
        engine(batch)
        engine.save("nowhere")
    else:
        engine.train_step(how)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("another loss", "received another loss than the last engine"),
        ("no batch", "step was called before engine.backward"),
        ("no backward pass", "step was called before engine.backward"),
        ("twice", r"engine\(\[first, second\]\)"),
        ("saved between", r"between engine\(batch\) and engine.step"),
        ("a word", "but got str"),
        ((torch.rand(4, 4), torch.rand(4), torch.zeros(4)), "has 2 inputs"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else "too many",
)
def test_calls_in_the_wrong_order_raise(how: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _misused(made(), how)


def strange_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": strange_optimizer()}, "not in the model"),
        ({"optimizer": torch.optim.SGD}, "optimizer must be .* but got SGD"),
        ({"parallel": {"tensr": 2}}, "Did you mean 'tensor'"),
        ({"parallel": 3}, "parallel=3"),
        ({"parallel": {"tensor": 2}}, "the script runs in only one process"),
        ({"parallel": {"zero_stage": 4}}, "zero_stage=4"),
        ({"parallel": {"partition": "uniform"}}, "without pipe=2"),
        ({"parallel": {"max_grad_norm": -1.0}}, "max_grad_norm=-1.0"),
        ({"scheduler_every": "month"}, "scheduler_every='month'"),
        ({"scheduler": lambda optimizer: None}, "only one optimizer, but initialize got 0"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_invalid_arguments_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        initialize(Sum(), **options)


def test_the_optimizer_keeps_its_parameters_after_an_error() -> None:
    model = plain()
    optimizer = sgd(model)
    context = ParallelContext.from_sizes({"tensor": 3})
    with pytest.raises(ShardFormerError):
        initialize(model, optimizer, context=context, parallel=ParallelConfig(tensor=3))
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


@pytest.mark.parametrize(
    ("asked", "processes", "sizes"),
    [
        ({"tensor": 4, "pipe": 2}, 8, (1, 2, 4)),
        ({"tensor": 4, "pipe": 2}, 6, (3, 1, 2)),
        ({"tensor": 2, "pipe": 2}, 3, (3, 1, 1)),
        ({"tensor": 2}, 6, (3, 1, 2)),
        ({"tensor": 3, "pipe": 2, "partition": [2, 2]}, 3, (1, 1, 3)),
    ],
)
def test_fit_to_adapts_the_layout_to_the_number_of_processes(
    asked: dict[str, Any], processes: int, sizes: tuple[int, int, int]
) -> None:
    fitted = ParallelConfig(**asked).fit_to(processes)
    assert (fitted.data, fitted.pipe, fitted.tensor) == sizes


# --------------------------------------------------------------------------------------------------------------- saving


def _resumed(tmp: str, first: dict[str, Any], then: dict[str, Any], dropout: float = 0.1) -> float:
    """Compare seven steps with three steps, a checkpoint, and four steps under another layout."""

    def run(parallel: dict[str, Any], start: Callable[[Engine], None], steps: int) -> tuple[Losses, Engine]:
        model = plain(SmallModelFactory("gpt2", changes={"n_layer": 4, "resid_pdrop": dropout}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        engine = initialize(model, optimizer, train_data=rows(), batch_size=6, scheduler=scheduler, parallel=parallel)
        start(engine)
        losses: Losses = []
        while engine.steps < steps:
            for batch in engine.data:
                losses.append(float(engine.train_step(batch)))
                if engine.steps == steps:
                    break
        return losses, engine

    torch.manual_seed(5)
    whole, _ = run(first, lambda engine: None, 7)
    torch.manual_seed(5)
    before, engine = run(first, lambda engine: None, 3)
    engine.save(tmp, in_background=True)
    engine.wait()
    torch.manual_seed(99)
    after, engine = run(then, lambda engine: engine.load(tmp) and None, 7)
    assert engine.steps == 7
    assert engine.skipped == 0
    return max(abs(a - b) for a, b in zip(before + after, whole, strict=True))


def test_resuming_within_an_epoch_is_bitwise_exact(tmp_path: Any) -> None:
    assert _resumed(str(tmp_path), {}, {}) == 0.0


def test_resuming_a_pipeline_is_bitwise_exact(pool2: WorkerPool, tmp_path: Any) -> None:
    assert max(pool2.run(_resumed, str(tmp_path), {"pipe": 2, "zero_stage": 1}, {"pipe": 2, "zero_stage": 1})) == 0.0


def test_a_checkpoint_resumes_under_another_layout(pools: WorkerPools, tmp_path: Any) -> None:
    assert (
        max(pools(4).run(_resumed, str(tmp_path), {"tensor": 2, "zero_stage": 2}, {"pipe": 2, "tensor": 2}, 0.0))
        < EXACT
    )


def test_one_process_without_a_launcher_trains_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("RANK", "SLURM_STEP_ID", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert get_or_create_parallel_context(None, ParallelConfig()).device == torch.device("cuda", 0)
