"""Layers with 16-bit weights take inputs in fp32 as autocast would, and norms keep their statistics in fp32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.tensor_parallel.layers import Linear1D_Col, Linear1D_Row
from shardformer.tensor_parallel.parallel_module import enable_fp32_inputs_of_16bit_layers
from shardformer.training.initialize import initialize
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory, compute_model_loss
from shardformer.zero.shard_optimizer import shard_optimizer

Layer = Callable[[], nn.Module]
LAYERS: dict[str, tuple[Layer, list[tuple[int, ...]]]] = {
    "Linear": (lambda: nn.Linear(6, 4), [(3, 6)]),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 3), [(2, 2, 5, 5)]),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(2, 3, 3), [(2, 2, 5)]),
    "Bilinear": (lambda: nn.Bilinear(6, 4, 3), [(3, 6), (3, 4)]),
    "LayerNorm": (lambda: nn.LayerNorm(6), [(3, 6)]),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), [(3, 6)]),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(2, affine=True), [(3, 2, 5)]),
    "PReLU": (nn.PReLU, [(3, 6)]),
    "GRU": (lambda: nn.GRU(6, 4), [(3, 6)]),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(6, 2), [(3, 1, 6)] * 3),
}


def narrow(module: nn.Module) -> nn.Module:
    """Convert only the parameters, as ``shard_optimizer`` does."""
    for p in module.parameters():
        p.data = p.data.to(torch.bfloat16)
    return module


def first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_fp32_input_is_cast(name: str) -> None:
    make, shapes = LAYERS[name]
    torch.manual_seed(0)
    layer, inputs = narrow(make()), [torch.randn(shape, requires_grad=True) for shape in shapes]
    expected = first(layer(*(x.bfloat16() for x in inputs)))
    with pytest.raises((RuntimeError, ValueError)):  # else there would be nothing to cast for
        layer(*inputs)
    enable_fp32_inputs_of_16bit_layers(layer)
    enable_fp32_inputs_of_16bit_layers(layer)  # of two optimizers
    assert len(layer._forward_pre_hooks) == 1
    out = first(copy.deepcopy(layer)(*inputs))
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    first(layer(*inputs)).float().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in inputs)


def test_modules_that_accept_fp32_are_unchanged() -> None:
    class Wide(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.float())

    norm, wide, plain = narrow(nn.RMSNorm(6)), narrow(Wide(6, 6)), narrow(nn.Linear(6, 6))
    x = torch.randn(3, 6)
    for module in (norm, wide, plain):
        enable_fp32_inputs_of_16bit_layers(module)
    assert not norm._forward_pre_hooks and wide(x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plain(x), F.linear(x.bfloat16(), plain.weight, plain.bias))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):  # of the same number of bits, as in the plain model
        plain(x.half())


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("training", [True, False])
def test_statistics_stay_in_fp32(kind: type[nn.Module], dtype: torch.dtype, training: bool) -> None:
    if kind is nn.SyncBatchNorm and training:
        kind = nn.BatchNorm1d  # the other one needs processes
    torch.manual_seed(0)
    layer = narrow(kind(6)).train(training)
    wide = copy.deepcopy(layer).float()
    x = torch.randn(5, 6, dtype=dtype)
    enable_fp32_inputs_of_16bit_layers(layer)
    if kind is nn.SyncBatchNorm:
        wide = nn.BatchNorm1d(6).train(training)
    out, expected = layer(x), wide(x)
    assert torch.equal(out, expected) and out.dtype == dtype
    out.float().square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.dtype == torch.bfloat16 and p.grad is not None and p.grad.dtype == torch.bfloat16, name
    assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), wide.buffers(), strict=True))


def test_parameters_are_restored_after_an_error() -> None:
    layer = narrow(nn.BatchNorm1d(6))
    before = dict(layer.named_parameters())
    enable_fp32_inputs_of_16bit_layers(layer)
    with pytest.raises(RuntimeError):
        layer(torch.randn(5, 7))
    assert {name: id(p) for name, p in layer.named_parameters()} == {name: id(p) for name, p in before.items()}


def test_parallel_linear_layers_cast_before_communication() -> None:
    torch.manual_seed(0)
    columns, rows = nn.Linear(6, 8).bfloat16(), nn.Linear(8, 6).bfloat16()
    x = torch.randn(3, 6)

    def run(context: ParallelContext) -> tuple[Tensor, Tensor | None]:
        up = Linear1D_Col.from_native_module(columns, context.tensor)
        down = Linear1D_Row.from_native_module(rows, context.tensor)
        given = x.clone().requires_grad_()
        out = down(up(given).float())
        out.float().sum().backward()
        return out.detach(), given.grad

    expected_x = x.clone().requires_grad_()
    expected = rows(columns(expected_x.bfloat16()))
    expected.float().sum().backward()
    for out, grad in run_as_threads(run, tensor=2):
        assert out.dtype == torch.bfloat16 and grad is not None and expected_x.grad is not None
        assert (out - expected).abs().max() <= 0.02 * expected.abs().max()
        assert (grad - expected_x.grad).abs().max() <= 0.02 * expected_x.grad.abs().max()


def test_fp32_buffers_that_reach_a_layer_are_cast() -> None:
    """Swin V2 with fp32 coordinates and pixels is bitwise equal to Swin V2 with 16-bit ones."""
    torch.manual_seed(0)
    model = SmallModelFactory("swinv2")().float().train()
    batch = RandomBatchFactory(DEFAULT_HEAD["swinv2"])(0)
    batch = {name: x.float() if x.is_floating_point() else x for name, x in batch.items()}
    narrowed = copy.deepcopy(model).to(torch.bfloat16)
    torch.manual_seed(0)
    expected = compute_model_loss(narrowed, {n: x.bfloat16() if x.is_floating_point() else x for n, x in batch.items()})
    optimizer = shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=1, precision="bf16")
    torch.manual_seed(0)
    loss = compute_model_loss(model, batch)
    assert any(b.dtype == torch.float32 for b in model.buffers()) and loss == expected
    optimizer.backward(loss)
    optimizer.step()


@pytest.mark.reduced(at_most=1)
@pytest.mark.filterwarnings("ignore:The batch is split")
@pytest.mark.parametrize("stage", [1, 3])
def test_16_bit_engine_accepts_fp32_batches(stage: int) -> None:
    """The running statistics of BatchNorm are those of an fp32 model."""

    def run(context: ParallelContext) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        layout = {"data": 2, "zero_stage": stage, "precision": "bf16"}
        engine = initialize(model, optimizer, nn.CrossEntropyLoss(), parallel=layout, context=context)
        rows = torch.randn(2, 1, 5, 5), torch.tensor([0, 2])
        losses = [engine.train_step(rows) for _ in range(8)]
        assert losses[-1] < losses[0]
        return [buffer for buffer in engine.model.buffers() if buffer.is_floating_point()]

    for buffers in run_as_threads(run, data=2, one_at_a_time=True):
        assert {buffer.dtype for buffer in buffers} == {torch.float32}


@pytest.mark.slow
@pytest.mark.full
def test_a_stage_without_the_weights_of_a_norm_accepts_fp32_inputs() -> None:
    """Sinusoidal fp32 positions are added before a norm whose weights are on another stage."""
    torch.manual_seed(0)
    config = transformers.M2M100Config(
        vocab_size=37, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=20, decoder_ffn_dim=20, max_position_embeddings=32, use_cache=False,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
    )  # fmt: skip
    plain = transformers.M2M100ForConditionalGeneration(config).train()
    ids = torch.arange(3, 27).view(4, 6)
    alone = copy.deepcopy(plain)
    shard_optimizer(alone, torch.optim.SGD(alone.parameters(), lr=0.1), stage=1, precision="bf16")
    expected = float(alone(input_ids=ids, labels=ids).loss.detach())

    def run(context: ParallelContext) -> float:
        model = copy.deepcopy(plain)
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = initialize(model, own, parallel={"pipe": 2, "precision": "bf16"}, context=context)
        return float(engine.train_step({"input_ids": ids, "labels": ids}))

    for loss in run_as_threads(run, pipe=2, one_at_a_time=True):
        assert loss == pytest.approx(expected, rel=0.01)
