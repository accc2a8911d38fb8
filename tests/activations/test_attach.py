"""Stored activations with checkpoints, tensor ranks, stages and ZeRO. All gradients are bitwise equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardformer.comm.recorder import CollectiveRecorder
from shardformer.config import ShardConfig
from shardformer.errors import ConfigError, InputError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.offload.activations import (
    PURPOSE,
    all_gather_and_verify_partitions,
    get_local_partition_and_checksum,
    offload_activations,
)
from shardformer.offload.saved_tensor_hooks import ActivationStats
from shardformer.pipeline.pipeline import Pipeline
from shardformer.pipeline.schedules import SCHEDULES
from shardformer.pipeline.stage_manager import PipelineStageManager
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory, compute_model_loss
from shardformer.weights.state_dict import full_state_dict
from shardformer.zero.shard_optimizer import shard_optimizer

SMALL = 256
Result = tuple[float, list[Tensor | None], ActivationStats | None, CollectiveRecorder | None]


def build(family: str, reentrant: bool | None = None, layers: int = 0) -> nn.Module:
    torch.manual_seed(0)
    sample = SmallModelFactory(family)
    model: Any = (sample.with_min_layers(layers) if layers else sample)().double().train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model  # type: ignore[no-any-return]


def batch_of(family: str, seed: int = 0) -> dict[str, Tensor]:
    batch = RandomBatchFactory(DEFAULT_HEAD[family], batch_size=3)(seed)
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


def equal(a: Result, b: Result) -> bool:
    pairs = zip(a[1], b[1], strict=True)
    return a[0] == b[0] and all(x is y is None or (x is not None and torch.equal(x, y)) for x, y in pairs)  # type: ignore[arg-type]


def trained(model: nn.Module, family: str, on: str | None, context: ParallelContext | None = None) -> Result:
    """Run two forward passes before one backward pass. Return the loss, the gradients, and bytes stored and sent."""
    store = offload_activations(model, on, min_bytes=SMALL) if on else None
    with CollectiveRecorder(context or ParallelContext.from_sizes({})) as recorder:
        loss = compute_model_loss(model, batch_of(family)) + compute_model_loss(model, batch_of(family, 1))
        loss.backward()
    figures = store.stats() if store else None
    return float(loss.detach()), [p.grad for p in model.parameters()], figures, recorder


@pytest.mark.reduced(at_most=4)
@pytest.mark.parametrize(
    ("family", "reentrant"),
    [("llama", None), ("llama", False), ("llama", True), ("t5", None), ("t5", True), ("bert", False), ("gpt2", None)]
    + [("vit", False), ("whisper", None)],
)
def test_transformers_models_on_the_host(family: str, reentrant: bool | None) -> None:
    expected = trained(build(family, reentrant), family, "device")
    found = trained(build(family, reentrant), family, "host")
    assert equal(found, expected)
    assert expected[2] is not None and found[2] is not None
    assert found[2].most_host > 0.9 * expected[2].most
    assert reentrant is not None or found[2].most < 0.7 * expected[2].most


# --------------------------------------------------------------------------------------------------------- tensor ranks


def over_ranks(family: str, on: str | None, tensor: int, reentrant: bool | None, **options: Any) -> list[Result]:
    models = [build(family, reentrant) for _ in range(tensor)]

    def run(context: ParallelContext) -> Result:
        model = shard_model(models[context.rank], context=context, **options)
        return trained(model, family, on, context)

    return run_as_threads(run, tensor=tensor)


@pytest.mark.reduced(cover="reentrant", at_most=1)
@pytest.mark.parametrize(
    ("family", "tensor", "reentrant"),
    [
        ("llama", 2, False),
        ("llama", 3, True),
        ("bert", 3, False),
        ("t5", 2, True),
        ("gpt2", 2, False),
        ("vit", 2, None),
    ],
)
def test_layer_inputs_are_sharded_over_tensor_ranks(family: str, tensor: int, reentrant: bool | None) -> None:
    """Stored and communicated bytes equal the formula of the docstring."""
    expected = over_ranks(family, "device", tensor, reentrant)
    inputs = sizes_of_layer_inputs(family)
    for on in ("tensor", "tensor+host"):
        found = over_ranks(family, on, tensor, reentrant)
        for own, other in zip(found, expected, strict=True):
            assert equal(own, other)
            figures, before, recorder = own[2], other[2], own[3]
            assert figures is not None and before is not None and recorder is not None
            saved = sum(size - -(-size // tensor) for size in inputs)
            whole = before.most - saved
            if on == "tensor":
                assert figures.most == whole
            else:
                assert whole - 10_000 < figures.most_host <= whole  # tensors below SMALL are not moved
            assert recorder.count("all_gather", purpose=PURPOSE) == 2 * len(inputs)
            payload = sum(tensor * -(-size // tensor) + 8 * tensor for size in inputs)
            assert recorder.wire_bytes("all_gather", purpose=PURPOSE) == (tensor - 1) * payload


def sizes_of_layer_inputs(family: str) -> list[int]:
    """Return the bytes of the inputs of each layer in the two forward passes of ``trained``."""
    model, sizes = build(family), list[int]()
    names = [n for n, m in model.named_modules() if n.rpartition(".")[2].isdecimal() and is_layer(n, m)]
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda m, args, kwargs: sizes.append((args[0] if args else kwargs["hidden_states"]).nbytes),
            with_kwargs=True,
        )
    for seed in (0, 1):
        compute_model_loss(model, batch_of(family, seed))
    return sizes


def is_layer(name: str, module: nn.Module) -> bool:
    return type(module).__name__.endswith(("Layer", "Block")) and name.count(".layer.") < 2


@pytest.mark.parametrize("tensor", [2, 3, 4])
def test_shards_of_any_size_are_gathered(tensor: int) -> None:
    def run(context: ParallelContext) -> None:
        for size in (1, 3, 4, 10, 4097):
            whole = torch.arange(size).to(torch.uint8)
            part, number = get_local_partition_and_checksum(whole, context.tensor)
            assert len(part) == -(-size // tensor)
            assert torch.equal(all_gather_and_verify_partitions(part, number, context.tensor, "It")[:size], whole)

    run_as_threads(run, tensor=tensor)


def test_one_rank_keeps_the_full_input() -> None:
    (found,), (expected,) = over_ranks("llama", "tensor", 1, False), over_ranks("llama", "device", 1, False)
    assert equal(found, expected)
    assert found[2] is not None and expected[2] is not None and found[2].most == expected[2].most


class Checkpointed(nn.Module):
    """A checkpoint around a layer, as in older transformers: it saves its input before the layer is called."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda x: self.layer(x, *args, **kwargs), x, use_reentrant=False)


@pytest.mark.parametrize("on", ["tensor", "tensor+host"])
def test_inputs_saved_by_a_checkpoint_are_sharded(on: str) -> None:
    models = [build("gpt2") for _ in range(2)]
    expected = over_ranks("gpt2", None, 2, None)

    def run(context: ParallelContext) -> Result:
        model: Any = shard_model(models[context.rank], context=context)
        store = offload_activations(model, on, min_bytes=SMALL)
        layers, model.config.use_cache = model.transformer.h, False  # a cache would grow again in the recomputation
        model.transformer.h = nn.ModuleList([Checkpointed(layer) for layer in layers])
        found = trained(model, "gpt2", None, context)
        assert store.stats().most > 0
        return found

    for own, other in zip(run_as_threads(run, tensor=2), expected, strict=True):
        assert equal(own, other)
        assert own[3] is not None and own[3].count("all_gather", purpose=PURPOSE) == 2 * 2 * 2  # forward passes, layers


def test_inputs_that_differ_between_ranks_raise_on_all_ranks() -> None:
    """Without the checksums the gradients would be silently wrong."""
    models, raised = [build("llama", False) for _ in range(3)], list[str]()

    def run(context: ParallelContext) -> None:
        model: Any = shard_model(models[context.rank], context=context)
        offload_activations(model, "tensor", min_bytes=SMALL)

        def differ(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output + 1e-9 * (context.rank == 1)

        # from the second layer on: in older transformers the checkpoint of a layer recomputes its hooks
        model.model.layers[0].register_forward_hook(differ)
        loss = compute_model_loss(model, batch_of("llama"))
        with pytest.raises(
            InputError, match=r"The input of layer model.layers.1 must be identical .*, but these ranks differ: 1"
        ):
            loss.backward()
        raised.append(str(context))

    run_as_threads(run, tensor=3)
    assert len(raised) == 3


def test_sharded_sequences_can_only_be_stored_on_the_host() -> None:
    options = {"enable_sequence_parallelism": True}
    with pytest.raises(ConfigError, match=r"to='tensor', because its hidden states are sharded .sequence over tensor"):
        over_ranks("llama", "tensor", 2, False, **options)
    expected, found = (over_ranks("llama", on, 2, False, **options) for on in ("device", "host"))
    assert all(equal(own, other) for own, other in zip(found, expected, strict=True))
    assert found[0][2] is not None and found[0][2].most_host > 0


def _dropped(on: str | None, reentrant: bool) -> tuple[float, list[Tensor | None]]:
    import shardformer

    context = shardformer.launch_from_torch()
    sample = SmallModelFactory("gpt2", changes={"resid_pdrop": 0.3, "attn_pdrop": 0.3, "embd_pdrop": 0.3})
    torch.manual_seed(0)
    model: Any = sample().double().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model = shard_model(model, context=context)
    torch.manual_seed(context.rank)
    loss, grads, *_ = trained(model, "gpt2", on, context)
    return loss, grads


@pytest.mark.reduced(one_in=2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_is_identical_on_processes(pool2: WorkerPool, reentrant: bool) -> None:
    expected = pool2.run(_dropped, None, reentrant)
    for on in ("host", "tensor+host"):
        for own, other in zip(pool2.run(_dropped, on, reentrant), expected, strict=True):
            assert equal((*own, None, None), (*other, None, None))


def _in_ddp(on: str | None) -> tuple[float, list[Tensor | None]]:
    model = build("gpt2", False)
    wrapped = nn.parallel.DistributedDataParallel(model)
    loss, grads, *_ = trained(wrapped, "gpt2", on)
    return loss, grads


def test_ddp_around_a_plain_model(pool2: WorkerPool) -> None:
    for own, other in zip(pool2.run(_in_ddp, "host"), pool2.run(_in_ddp, None), strict=True):
        assert equal((*own, None, None), (*other, None, None))


def test_sharded_model_inside_a_wrapper() -> None:
    models = [build("gpt2", False) for _ in range(2)]

    def run(context: ParallelContext) -> int:
        model = Wrapper(shard_model(models[context.rank], context=context))
        recorder = trained(model, "gpt2", "tensor", context)[3]
        assert recorder is not None
        return recorder.count("all_gather", purpose=PURPOSE)

    assert run_as_threads(run, tensor=2) == [8, 8]


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)


# --------------------------------------------------------------------------------------------------------------- stages


def in_stages(on: str | None, schedule: str, tensor: int, reentrant: bool | None) -> list[Result]:
    models = [build("gpt2", reentrant, 4) for _ in range(2 * tensor)]

    def run(context: ParallelContext) -> Result:
        manager = PipelineStageManager(context, schedule)
        model = shard_model(models[context.rank], config=ShardConfig(context=context, pipeline_stage_manager=manager))
        store = offload_activations(model, on, min_bytes=SMALL) if on else None
        pipeline = Pipeline(model, micro_batches=4)
        with CollectiveRecorder(context) as recorder:
            losses = [
                float(pipeline.step(RandomBatchFactory(DEFAULT_HEAD["gpt2"], batch_size=4)(step))) for step in (0, 1)
            ]
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        figures = store.stats() if store else None
        return sum(losses), [p.grad for p in model.parameters()], figures, recorder

    return run_as_threads(run, tensor=tensor, pipe=2, one_at_a_time=True)


@pytest.mark.reduced(at_most=2)
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_over_stages(schedule: str) -> None:
    expected, found = in_stages("device", schedule, 1, None), in_stages("host", schedule, 1, None)
    for own, other in zip(found, expected, strict=True):
        assert equal(own, other)
        assert own[2] is not None and other[2] is not None and own[2].most < other[2].most
        assert own[2].most_host > 0.5 * other[2].most


@pytest.mark.full
@pytest.mark.slow
def test_over_stages_and_tensor_ranks_with_checkpoints() -> None:
    """The received input of a stage is not sharded, because the pipeline keeps it for its gradient."""
    expected, found = in_stages("device", "1f1b", 2, False), in_stages("tensor", "1f1b", 2, False)
    counts = [own[3].count("all_gather", purpose=PURPOSE) for own in found if own[3] is not None]
    assert counts == [2 * 2 * 4 * layers for layers in (2, 2, 1, 1)]  # steps, micro-batches
    for own, other in zip(found, expected, strict=True):
        assert equal(own, other)
        assert own[2] is not None and other[2] is not None and own[2].most < other[2].most


# ----------------------------------------------------------------------------------------------------------------- ZeRO


@pytest.mark.reduced(at_most=1)
@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["whole", "checkpoint", "reentrant"])
@pytest.mark.parametrize(("stage", "first"), [(2, "zero"), (3, "zero"), (3, "store")])
def test_zero(stage: int, first: str, reentrant: bool | None) -> None:
    """The two calls work in both orders: gathered parameters are left to stage 3."""

    def run_with(on: str | None) -> list[tuple[dict[str, Tensor], int]]:
        models = [build("llama", reentrant) for _ in range(2)]

        def run(context: ParallelContext) -> tuple[dict[str, Tensor], int]:
            model = shard_model(models[context.rank], context=context)
            steps: dict[str, Callable[[], Any]] = {
                "store": lambda: offload_activations(model, on, min_bytes=SMALL) if on else None,
                "zero": lambda: shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage),
            }
            made = {name: steps[name]() for name in sorted(steps, key=lambda name: name != first)}
            for step in range(3):
                compute_model_loss(model, batch_of("llama", 10 * step + context.data.rank)).backward()
                made["zero"].step()
                made["zero"].zero_grad()
            return full_state_dict(model), made["store"].stats().most_host if on else 0

        return run_as_threads(run, data=2)

    on_host, expected = run_with("host"), run_with(None)
    plain_model = build("llama", reentrant)
    store = offload_activations(plain_model, "host", min_bytes=SMALL)
    compute_model_loss(plain_model, batch_of("llama")).backward()
    for (weights, most_host), (plain, _) in zip(on_host, expected, strict=True):
        assert all(torch.equal(weights[name], value) for name, value in plain.items())
        assert most_host == store.stats().most_host  # gathered parameters are not stored


def test_shards_on_the_host_with_stage_3_over_data_and_tensor_ranks() -> None:
    def run_with(on: str | None) -> list[dict[str, Tensor]]:
        models = [build("llama", False) for _ in range(4)]

        def run(context: ParallelContext) -> dict[str, Tensor]:
            model = shard_model(models[context.rank], context=context)
            optimizer = shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
            store = offload_activations(model, on, min_bytes=SMALL) if on else None
            for step in range(2):
                compute_model_loss(model, batch_of("llama", 10 * step + context.data.rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert store is None or store.stats().most_host > 0
            return full_state_dict(model)

        return run_as_threads(run, data=2, tensor=2)

    for weights, plain in zip(run_with("tensor+host"), run_with(None), strict=True):
        assert all(torch.equal(weights[name], value) for name, value in plain.items())
