"""Losses that compare samples raise for divided batches, and ``gather_over_data`` makes them exact."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from shardformer.comm.collectives import all_gather_objects
from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.contrastive_losses import gather_over_data
from shardformer.training.initialize import initialize

INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def model_of() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    logits = F.normalize(output, dim=-1) @ F.normalize(target, dim=-1).T
    return F.cross_entropy(logits, torch.arange(len(logits)))


def centred(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output - output.mean(0), target)


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="sum")


def masked(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, torch.where(target[:, 0] > 0, -100, 1))


class Own(nn.Module):
    """A model that computes its loss itself.

    Args:
        loss: (output, inputs) -> loss.
        layer: between two linear layers.
    """

    def __init__(self, loss: Any, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.loss, self.calls = model_of(), loss, 0
        self.layer = nn.Identity() if layer is None else layer

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        return {"loss": self.loss(self.layer(self.body(inputs)), inputs)}


class Averaged(nn.Module):
    """Batch statistics with a running average, in both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return x - x.mean(0)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def norms(output: Tensor, target: Tensor) -> Tensor:
    """A mean and a sum in one loss."""
    return F.mse_loss(output, target) + 0.1 * F.l1_loss(output, target, reduction="sum")


def siglip(output: Tensor, target: Tensor) -> Tensor:
    sims = F.normalize(output, dim=-1) @ F.normalize(target, dim=-1).T
    return F.binary_cross_entropy_with_logits(sims, torch.eye(len(sims), dtype=sims.dtype))


def training(model: nn.Module, loss_fn: Any = None, batch: Any = None, **options: Any) -> Any:
    loss_weight, context = options.pop("loss_weight", None), options.pop("context", None)
    return initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn,
        parallel=ParallelConfig(**options), loss_weight=loss_weight, context=context,
    )  # fmt: skip


@pytest.mark.parametrize("loss_fn", [contrastive, centred, siglip])
@pytest.mark.parametrize("is_own", [False, True])
def test_loss_comparing_samples_raises_for_divided_batch(loss_fn: Any, *, is_own: bool) -> None:
    model, batch = (Own(loss_fn), {"inputs": INPUTS}) if is_own else (model_of(), (INPUTS, INPUTS))
    engine = training(copy.deepcopy(model), None if is_own else loss_fn)
    engine.train_step(batch)  # the whole batch at once
    engine = training(model, None if is_own else loss_fn, micro_batch_size=4)
    before = copy.deepcopy(engine.model.state_dict())
    for _ in range(2):
        with pytest.raises(ConfigError, match="compares the samples of a batch") as caught:
            engine.train_step(batch)
    assert "gather_over_data" in caught.value.remedy
    assert all(torch.equal(before[name], x) for name, x in engine.model.state_dict().items())
    assert all(p.grad is None for p in engine.model.parameters())


@pytest.mark.parametrize("loss_fn", [nn.MSELoss(), summed, nn.L1Loss(), masked, norms])
def test_means_and_sums_equal_full_batch(loss_fn: Any) -> None:
    engines = [training(Own(loss_fn), micro_batch_size=size) for size in (None, 3)]
    losses = [[float(engine.train_step({"inputs": INPUTS})) for _ in range(2)] for engine in engines]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def test_chosen_mean_of_parts_warns_once() -> None:
    engine = training(model_of(), contrastive, micro_batch_size=4, loss_weight=lambda part: len(INPUTS))
    with pytest.warns(UserWarning, match="compares the samples of a batch") as caught:
        engine.train_step((INPUTS, INPUTS))
        engine.train_step((INPUTS, INPUTS))
    assert len(caught) == 1


@pytest.mark.parametrize(
    "layer",
    [
        Averaged(),
        nn.BatchNorm1d(4, dtype=torch.float64),
        nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64), nn.Dropout(0.2)),
        nn.Dropout(0.5),
        Noise(),
    ],
)
def test_trial_restores_all_state(layer: nn.Module) -> None:
    found: list[list[Tensor]] = []
    for looks in (True, False):
        model = Own(F.mse_loss, copy.deepcopy(layer))
        before = copy.deepcopy(model.state_dict())
        engine = training(model, micro_batch_size=4)
        if not looks:
            engine.pipeline._check_samples_are_independent = lambda *_, **__: None
        called = list[int]()
        engine.model.body.register_forward_hook(lambda *_, called=called: called.append(1))
        torch.manual_seed(3)
        warns = looks and any(isinstance(m, nn.BatchNorm1d) for m in layer.modules())
        if looks and isinstance(layer, Averaged):
            with pytest.raises(ConfigError, match="compares the samples"):
                engine.train_step({"inputs": INPUTS})
            assert all(torch.equal(before[name], x) for name, x in engine.model.named_parameters())
            return
        with pytest.warns(UserWarning, match="BatchNorm") if warns else nullcontext():
            loss = engine.train_step({"inputs": INPUTS})
        assert all(m.training for m in engine.model.modules()) and len(called) == 2
        found.append([loss, torch.rand(3), torch.tensor(engine.model.calls), *engine.model.state_dict().values()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_model_comparing_samples_raises_on_all_data_ranks(size: int) -> None:
    """Includes a rank with a single sample, whose loss is zero."""
    models = [Own(contrastive) for _ in range(3)]

    def run(context: ParallelContext) -> None:
        engine = training(models[context.rank], context=context)
        with pytest.raises(ConfigError, match="compares the samples of a batch"):
            engine.train_step({"inputs": INPUTS[: size if context.rank == 1 else 4]})

    run_as_threads(run, data=3)


def test_finding_of_one_rank_raises_on_all() -> None:
    """On one rank all samples are equal, so its own losses show nothing."""
    models = [Own(centred) for _ in range(2)]

    def run(context: ParallelContext) -> None:
        engine = training(models[context.rank], context=context)
        inputs = INPUTS[:4] if context.rank else torch.ones(4, 4, dtype=torch.float64)
        with pytest.raises(ConfigError, match="compares the samples of a batch"):
            engine.train_step({"inputs": inputs})

    run_as_threads(run, data=2)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"data": 2}, {"data": 2, "tensor": 2}])
def test_clip_raises(layout: dict[str, int]) -> None:
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**small, "vocab_size": 20, "eos_token_id": 1},
        vision_config={**small, "image_size": 4, "patch_size": 2},
        projection_dim=4,
    )
    torch.manual_seed(0)
    models = [transformers.CLIPModel(config) for _ in range(4)]
    batch = {"input_ids": torch.randint(2, 20, (4, 4)), "pixel_values": torch.randn(4, 3, 4, 4), "return_loss": True}

    def run(context: ParallelContext) -> None:
        engine = training(models[context.rank], context=context)
        with pytest.raises(ConfigError, match="compares the samples of a batch"):
            engine.train_step(batch)

    run_as_threads(run, **layout)


@pytest.mark.slow
def test_all_stages_raise_and_can_continue() -> None:
    config = transformers.GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=8)
    torch.manual_seed(0)
    models = [transformers.GPT2Model(config) for _ in range(2)]
    ids = torch.randint(0, 16, (6, 4))

    def compared(output: Any, batch: Any) -> Tensor:
        rows = output[0].mean(1)
        return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))

    def run(context: ParallelContext) -> list[Any]:
        engine = training(models[context.rank], compared, context=context, micro_batches=3)
        with pytest.raises(ConfigError, match="compares the samples of a batch"):
            engine.train_step({"input_ids": ids})
        engine.pipeline._loss_fn = lambda output, batch: F.mse_loss(output[0], torch.zeros_like(output[0]))
        return [float(engine.train_step({"input_ids": ids})) for _ in range(2)]

    first, second = run_as_threads(run, pipe=2)
    assert first == second and first[1] < first[0]


def test_user_gather_is_exact_with_one_micro_batch() -> None:
    models = [model_of() for _ in range(2)]

    def run(context: ParallelContext) -> None:
        def gathered(output: Tensor, target: Tensor) -> Tensor:
            others = torch.stack(all_gather_objects(output.detach(), context.data))
            return F.mse_loss(output - others.mean((0, 1)), target)

        mine = INPUTS[4 * context.rank :][:4]
        engine = training(models[context.rank], gathered, context=context)
        engine.train_step((mine, mine))
        engine = training(model_of(), gathered, context=context, micro_batches=2)
        with pytest.raises(ConfigError, match="compares the samples of a batch"):
            engine.train_step((mine, mine))

    run_as_threads(run, data=2)


def test_gathered_loss_equals_single_device() -> None:
    plain = model_of()
    models = [copy.deepcopy(plain) for _ in range(2)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = contrastive(plain(INPUTS), INPUTS)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    def run(context: ParallelContext) -> None:
        model = models[context.rank]

        def gathered(output: Tensor, target: Tensor) -> Tensor:
            return contrastive(gather_over_data(output, context), gather_over_data(target, context))

        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), gathered, context=context)
        mine = INPUTS[4 * context.rank :][:4]
        losses = [engine.train_step((mine, mine)).item() for _ in expected]
        assert losses == pytest.approx(expected, abs=1e-12)
        for ours, theirs in zip(engine.model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-12, rtol=0)

    run_as_threads(run, data=2)


def test_unequal_sample_counts_are_gathered_with_gradients() -> None:
    def run(context: ParallelContext) -> None:
        x = torch.full((1 + context.rank, 2), float(context.rank), requires_grad=True)
        whole = gather_over_data(x, context)
        assert whole[:, 0].tolist() == [0.0, 1.0, 1.0]
        (whole * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
        assert x.grad is not None
        assert x.grad[:, 0].tolist() == ([2.0] if context.rank == 0 else [4.0, 6.0])  # of the losses of both ranks

    run_as_threads(run, data=2)
