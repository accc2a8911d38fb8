"""Common uses of a model in training give the same results on the sharded and on the plain model.

Each feature is a function of a model. It runs on the plain and on the sharded model, and its results are compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardformer.comm.collectives import all_gather_objects, gather_full_tensor
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.config import ShardConfig
from shardformer.gradients.clipping import clip_grad_norm_
from shardformer.gradients.reducer import no_sync
from shardformer.layout.sharding_metadata import METADATA_ATTRIBUTE, get_shard_specs, get_sharding_metadata
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.shard_model_api import shard_model
from shardformer.tensor_parallel import linear_communication as region
from shardformer.tensor_parallel.vocab_parallel_logits import VocabParallelLogits
from shardformer.verify.small_models import LANGUAGE_MODEL, RandomBatchFactory, SmallModelFactory
from shardformer.weights.state_dict import full_state_dict
from tests.ops import seeing_parts
from tests.pairwise import pairwise
from tests.pools import WorkerPools

SEQUENCE = {"enable_sequence_parallelism": True}
OVERLAP = {**SEQUENCE, "enable_sequence_overlap": True}
MODES: dict[str, dict[str, Any]] = {"plain": {}, "sequence": SEQUENCE, "overlap": OVERLAP}
FAMILIES = tuple(LANGUAGE_MODEL)

Values = dict[str, Tensor]
Feature = Callable[[nn.Module, str], Values]


def is_sharded(model: nn.Module) -> bool:
    return METADATA_ATTRIBUTE in model.__dict__


def gradients(model: nn.Module) -> Values:
    """Return the full gradients. Parameters without a gradient are omitted."""
    if not is_sharded(model):
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    axis, specs = get_sharding_metadata(model).context.tensor, get_shard_specs(model)
    return {
        n: gather_full_tensor(p.grad, specs[n], lambda _: axis)
        for n, p in model.named_parameters()
        if p.grad is not None
    }


def weights(model: nn.Module) -> Values:
    if is_sharded(model):
        return full_state_dict(model)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def clipped(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    if is_sharded(model):
        return clip_grad_norm_(model, max_norm, norm_type)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)


def paused(model: nn.Module) -> Any:
    return no_sync(model) if is_sharded(model) else nullcontext()


def loss_of(model: nn.Module, family: str, step: int = 0, sequence: int = 13) -> Tensor:
    """Return the mean loss over the data ranks' shards, or on a sharded model the loss of this rank's shard."""
    batch = RandomBatchFactory(LANGUAGE_MODEL[family], sequence_length=sequence)(step)
    if is_sharded(model):
        data = get_sharding_metadata(model).context.data
        each = len(batch["input_ids"]) // data.size
        batch = {k: v[data.rank * each : (data.rank + 1) * each] for k, v in batch.items()}
    loss: Tensor = model(**batch).loss
    return loss.double()


def build(family: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return SmallModelFactory(family, changes=changes)().double().train()


def side_by_side(
    feature: Feature, family: str, options: Mapping[str, Any], *, tensor: int = 2, data: int = 1
) -> list[dict[str, float]]:
    """Return the relative differences of a feature's results on each rank, by kind of value.

    Ranks are threads that compute in turn, so that no processes are started.
    """
    plain = on_plain(feature, family)

    def compare(context: ParallelContext) -> dict[str, float]:
        ours = feature(shard_model(build(family), config=ShardConfig(context=context, **options)), family)
        return differences(ours, plain)

    return run_as_threads(compare, tensor=tensor, data=data, one_at_a_time=True)


@cache
def on_plain(feature: Feature, family: str) -> Values:
    """Return a feature's result on the plain model, computed once for all ranks and modes."""
    return feature(build(family), family)


def differences(ours: Values, plain: Values) -> dict[str, float]:
    assert ours.keys() == plain.keys(), sorted(ours.keys() ^ plain.keys())
    largest: dict[str, float] = {}
    for name, value in plain.items():
        kind = name.partition(":")[0]
        largest[kind] = max(largest.get(kind, 0.0), float(value.double().abs().max()))
    return {
        name: float((ours[name].double() - value.double()).abs().max()) / max(largest[name.partition(":")[0]], 1e-30)
        for name, value in plain.items()
    }


def assert_same(found: list[dict[str, float]], bound: float = 1e-6) -> None:
    """Assert that differences on all ranks are within the tolerance, which is wider for models with casts to fp32."""
    for rank, differences in enumerate(found):
        worst = max(differences, key=lambda name: differences[name])
        assert differences[worst] < bound, (rank, worst, differences[worst])


def named(kind: str, values: Mapping[str, Tensor]) -> Values:
    return {f"{kind}:{name}": value for name, value in values.items()}


def frozen(model: nn.Module, family: str) -> Values:
    """Freeze all parameters except for the last layer's matrices and the norms, and unfreeze some after a step."""
    names = [name for name, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        p.requires_grad_(".1." in name or "norm" in name.lower() or "ln_" in name)
    out = {}
    for step in range(2):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        loss_of(model, family, step).backward()
        out.update(named(f"gradient {step}", gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
        for name in names[:6]:
            model.get_parameter(name).requires_grad_(True)
    return {**out, **named("weight", weights(model))}


def frozen_embedding(model: Any, family: str) -> Values:
    """The input of the first block needs no gradient."""
    model.get_input_embeddings().weight.requires_grad_(False)
    for name, p in model.named_parameters():
        if "position" in name or "wpe" in name or "embeddings" in name.lower():
            p.requires_grad_(False)
    loss_of(model, family).backward()
    return named("gradient", gradients(model))


def accumulated(model: nn.Module, family: str) -> Values:
    """Two steps with three backward passes each."""
    out = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        for part in range(3):
            (loss_of(model, family, 3 * step + part) / 3).backward()
        out.update(named(f"gradient {step}", gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    return {**out, **named("weight", weights(model))}


def accumulated_without_traffic(model: nn.Module, family: str) -> Values:
    out = {}
    for step in range(2):
        with paused(model):
            loss_of(model, family, 3 * step).backward()
            loss_of(model, family, 3 * step + 1).backward()
        loss_of(model, family, 3 * step + 2).backward()
        out.update(named(f"gradient {step}", gradients(model)))
    return out  # gradients of the second step accumulate onto those of the first


def accumulated_in_one_backward(model: nn.Module, family: str) -> Values:
    (loss_of(model, family, 0) + 2 * loss_of(model, family, 1)).backward()
    return named("gradient", gradients(model))


def zeroed_in_place(model: nn.Module, family: str) -> Values:
    loss_of(model, family, 0).backward()
    model.zero_grad(set_to_none=False)
    loss_of(model, family, 1).backward()
    return named("gradient", gradients(model))


def graph_kept(model: nn.Module, family: str) -> Values:
    """Two backward passes through one graph."""
    loss = loss_of(model, family)
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    return named("gradient", gradients(model))


def checkpointed(model: nn.Module, family: str) -> Values:
    return _checkpointed(model, family, False)


def checkpointed_reentrant(model: nn.Module, family: str) -> Values:
    return _checkpointed(model, family, True)


def lengths_in_one_backward(model: Any, family: str) -> Values:
    """Run forward passes of several lengths, then a backward pass that recomputes them, with an evaluation between."""
    out = {}
    for lengths in ((13, 9, 17), (13, 14, 12)):  # in the second case some ranks have shards of equal length
        for use_reentrant in (False, True):
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
            model.zero_grad()
            loss = sum((i + 1) * loss_of(model, family, i, length) for i, length in enumerate(lengths))
            with torch.no_grad():
                model.eval()
                loss_of(model, family, 5, 6)
                model.train()
            assert isinstance(loss, Tensor)
            loss.backward()
            out.update(named(f"gradient {lengths} {use_reentrant}", gradients(model)))
    return out


class Recomputed(nn.Module):
    """A checkpoint around a whole module, including its hooks."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(self.layer, **kwargs), *args, use_reentrant=True)


def wrapped_in_checkpoints(model: Any, family: str) -> Values:
    """Test normal sequences and empty shards, with a first forward pass that runs without gradients on all ranks."""
    model.enable_input_require_grads()
    model.config.use_cache = False
    layers: Any = model.get_submodule({"llama": "model.layers", "gpt2": "transformer.h"}[family])
    for i, layer in enumerate(layers):
        layers[i] = Recomputed(layer)
    out = named("gradient", loss_and_gradients(model, family))
    model.zero_grad()
    ids = torch.tensor([[5, 7, 11], [64, 96, 126]])
    model(input_ids=ids, labels=ids).loss.backward()
    return {**out, **named("short gradient", gradients(model))}


def _checkpointed(model: Any, family: str, use_reentrant: bool) -> Values:
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:  # otherwise the input of the first layer needs no gradient
        model.enable_input_require_grads()
    out = {}
    for step in range(2):
        loss = loss_of(model, family, step)
        out[f"loss:{step}"] = _whole_loss(model, loss)
        loss.backward()
        out.update(named(f"gradient {step}", gradients(model)))
    return out


def _whole_loss(model: nn.Module, loss: Tensor) -> Tensor:
    if not is_sharded(model):
        return loss.detach()
    every = all_gather_objects(loss.detach(), get_sharding_metadata(model).context.data)
    return torch.stack(every).mean()


def clipped_by_norms(model: nn.Module, family: str) -> Values:
    out = {}
    for max_norm, norm_type in ((0.7, 2.0), (1e-3, math.inf), (0.1, 1.0), (0.3, 3.0), (math.inf, 2.0), (1e3, 2.0)):
        model.zero_grad()
        loss_of(model, family).backward()
        out[f"norm:{max_norm} {norm_type}"] = clipped(model, max_norm, norm_type)
        out.update(named(f"gradient {max_norm} {norm_type}", gradients(model)))
    return out


def evaluated(model: nn.Module, family: str) -> Values:
    """Train, evaluate with and without gradients, and train again."""
    out = {}
    for step in range(2):
        loss_of(model, family, step).backward()
        model.eval()
        out[f"loss:{step} eval"] = _whole_loss(model, loss_of(model, family, 5))
        with torch.no_grad():
            out[f"loss:{step} no_grad"] = _whole_loss(model, loss_of(model, family, 6))
        with torch.inference_mode():
            out[f"loss:{step} inference"] = _whole_loss(model, loss_of(model, family, 7)).clone()
        model.train()
    return {**out, **named("gradient", gradients(model))}


def loss_and_gradients(model: nn.Module, family: str) -> Values:
    loss = loss_of(model, family)
    loss.backward()
    return {"loss:": _whole_loss(model, loss), **named("gradient", gradients(model))}


def copied(model: nn.Module, family: str) -> Values:
    """Train a deep copy, and the original, whose weights are unchanged by that."""
    early = copy.deepcopy(model)
    out = named("gradient 0", _trained(model, family, 0))
    duplicate = copy.deepcopy(model)
    out.update(named("gradient of the early copy", _trained(early, family, 1)))
    out.update(named("gradient of the copy", _trained(duplicate, family, 1, sequence=10)))
    out.update(named("gradient of the original", _trained(model, family, 2)))
    return {**out, **named("weight of the copy", weights(duplicate)), **named("weight", weights(model))}


def copied_after_checkpoints(model: Any, family: str) -> Values:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return copied(model, family)


def _trained(model: nn.Module, family: str, step: int, sequence: int = 13) -> Values:
    model.zero_grad()
    loss_of(model, family, step, sequence).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return gradients(model)


def interrupted(model: nn.Module, family: str) -> Values:
    """Raise in the middle of a forward pass and of a backward pass, and continue training after each."""
    layer = next(m for n, m in model.named_modules() if n.endswith(".1"))
    with failing(layer, in_backward=False):
        loss_of(model, family, 1)
    out = loss_and_gradients(model, family)
    with failing(layer, in_backward=True):
        loss_of(model, family, 1).backward()
    model.zero_grad()
    return {**out, **{f"again {name}": value for name, value in loss_and_gradients(model, family).items()}}


@contextmanager
def failing(module: nn.Module, *, in_backward: bool) -> Iterator[None]:
    @seeing_parts
    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    @seeing_parts
    def fail_in_backward(_: nn.Module, args: Any, output: Any) -> None:
        (output[0] if isinstance(output, tuple) else output).register_hook(fail)

    handle = module.register_forward_hook(fail_in_backward if in_backward else fail)
    try:
        yield
    except ArithmeticError:
        return
    finally:
        handle.remove()
    raise AssertionError("it did not fail")


EVERYWHERE: tuple[Feature, ...] = (
    frozen,
    frozen_embedding,
    accumulated,
    accumulated_without_traffic,
    accumulated_in_one_backward,
    zeroed_in_place,
    graph_kept,
    checkpointed,
    checkpointed_reentrant,
    lengths_in_one_backward,
    clipped_by_norms,
    evaluated,
    copied,
    copied_after_checkpoints,
    interrupted,
)


@pytest.mark.slow
@pytest.mark.reduced(at_most=8)
@pytest.mark.parametrize(("feature", "family", "mode"), pairwise(EVERYWHERE, FAMILIES, list(MODES)))
def test_features(feature: Feature, family: str, mode: str) -> None:
    assert_same(side_by_side(feature, family, MODES[mode]))


@pytest.mark.slow
@pytest.mark.reduced(at_most=2)
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize(
    "feature",
    [accumulated, clipped_by_norms, checkpointed_reentrant, lengths_in_one_backward, wrapped_in_checkpoints],
    ids=lambda f: f.__name__,
)
def test_features_over_four_ranks(feature: Feature, mode: str) -> None:
    """Each of the two KV heads is on two ranks."""
    assert_same(side_by_side(feature, "llama", MODES[mode], tensor=4))


@pytest.mark.slow
@pytest.mark.reduced(at_most=3)
@pytest.mark.parametrize("mode", ["plain", "overlap"])
@pytest.mark.parametrize(
    "feature", [accumulated, accumulated_without_traffic, frozen, checkpointed, clipped_by_norms, interrupted]
)
def test_features_with_a_data_axis(feature: Feature, mode: str) -> None:
    """Each of two data ranks has two samples. The mean loss of a batch is the mean over its shards."""
    assert_same(side_by_side(feature, "gpt2", MODES[mode], data=2))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
    "AdamW one by one": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=False, amsgrad=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9, centered=True, eps=1e-4),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0, eps=1e-4),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-3),
}


def stepped(model: nn.Module, family: str, optimizer: str) -> Values:
    """Step with two parameter groups, clipping and a scheduler, and save and load the state in between."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    made = OPTIMIZERS[optimizer]([{"params": matrices}, {"params": others, "weight_decay": 0.0}])
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (step + 1))
    for step in range(3):
        loss_of(model, family, step).backward()
        clipped(model, 1.0)
        made.step()
        schedule.step()
        made.zero_grad()
        made.load_state_dict(copy.deepcopy(made.state_dict()))
    return named("weight", weights(model))


@cache
def stepping(optimizer: str) -> Feature:
    return lambda model, family: stepped(model, family, optimizer)


@pytest.mark.reduced(at_most=4)
@pytest.mark.parametrize("mode", ["plain", "sequence"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_any_elementwise_optimizer(optimizer: str, mode: str) -> None:
    # BERT stays in fp64, so that no optimizer divides noise by noise
    assert_same(side_by_side(stepping(optimizer), "bert", MODES[mode]), 1e-9)


DROPOUT = {
    "bert": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3},
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.3},
    "llama": {"attention_dropout": 0.3},
    "t5": {"dropout_rate": 0.2},
}


def with_and_without_checkpoints(family: str, options: Mapping[str, Any], use_reentrant: bool) -> dict[str, Any]:
    """Return the gradients of one seed with stored and recomputed activations, and recomputed in a copy."""
    context = ParallelContext.from_default_process_group({})
    model: Any = shard_model(build(family, **DROPOUT[family]), config=ShardConfig(context=context, **options))
    found, states = [], []
    for is_recomputed in (False, True, True):
        if is_recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            if use_reentrant:
                model.enable_input_require_grads()
        torch.manual_seed(3)
        loss_of(model, family).backward()
        found.append(gradients(model))
        model.zero_grad()
        states.append(torch.get_rng_state().double())
        if is_recomputed:
            model = copy.deepcopy(model)
    model.eval()
    before = torch.get_rng_state()
    loss_of(model, family)
    worst = {
        f"{i} {name}": float((found[i][name] - value).abs().max()) for i in (1, 2) for name, value in found[0].items()
    }
    every = all_gather_objects(states, context.tensor)
    return {
        "differences": worst,
        "one state": all(torch.equal(a, b) for mine in every for a, b in zip(mine, every[0], strict=True)),
        "eval draws nothing": torch.equal(before, torch.get_rng_state()),
    }


@pytest.mark.reduced(at_most=2)
@pytest.mark.parametrize(("family", "mode", "use_reentrant"), pairwise(FAMILIES, list(MODES), [False, True]))
def test_recomputation_draws_the_same_dropout_masks(
    pool2: WorkerPool, family: str, mode: str, use_reentrant: bool
) -> None:
    for found in pool2.run(with_and_without_checkpoints, family, MODES[mode], use_reentrant):
        assert max(found["differences"].values()) < 1e-12, found["differences"]
        assert found["one state"], "after a step all ranks draw the same again"
        assert found["eval draws nothing"]


def ways_of_calling(family: str) -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 127, (3, 9), generator=generator)
    states = torch.randn(3, 9, 48, generator=generator).double()
    ways: dict[str, dict[str, Any]] = {
        "a count of items": {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(17.0)},
        "a tuple": {"input_ids": ids, "labels": ids, "return_dict": False},
        "one label": {"input_ids": ids, "labels": torch.where(torch.arange(9) == 4, ids, -100)},
        "one sample": {"input_ids": ids[:1], "labels": ids[:1]},
        "embeddings": {"inputs_embeds": states, "labels": ids},
        "a cache": {"input_ids": ids, "labels": ids, "use_cache": True},
    }
    if family == "t5":
        ways["decoder's ids"] = {"input_ids": ids, "decoder_input_ids": ids[:, :4]}
        ways["decoder's embeddings"] = {"input_ids": ids, "decoder_inputs_embeds": states}
        return ways
    ways["no labels"] = {"input_ids": ids}
    ways["positions"] = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(3, 12)[None]}
    if family == "bert":
        ways["token types"] = {"input_ids": ids, "labels": ids, "token_type_ids": ids % 2}
    else:
        ways["the last logits"] = {"input_ids": ids, "logits_to_keep": 2}
    return ways


def called(model: nn.Module, family: str, way: str) -> Values:
    """Return all outputs, and the gradients of a sum of functions of them."""
    out, losses = {}, []
    output = model(**ways_of_calling(family)[way])
    for name, value in output.items() if hasattr(output, "items") else enumerate(output):
        if isinstance(value, Tensor):
            whole = value.full_tensor() if isinstance(value, VocabParallelLogits) else value
            out[f"{name}:"] = whole.detach().clone()
            losses.append(value.square().mean().double())
    torch.stack([loss for loss in losses if loss.requires_grad]).sum().backward()
    return {**out, **named("gradient", gradients(model))}


@pytest.mark.reduced
@pytest.mark.parametrize(
    ("family", "way", "mode"),
    [
        (family, way, ("plain", "overlap")[(i + j) % 2])
        for i, family in enumerate(FAMILIES)
        for j, way in enumerate(ways_of_calling(family))
    ],
)
def test_other_forward_signatures(family: str, way: str, mode: str) -> None:
    assert_same(side_by_side(partial(called, way=way), family, MODES[mode]))


def in_autocast(family: str, options: Mapping[str, Any], recompute: bool) -> dict[str, Any]:
    """Return loss and gradients in bf16 of both models, those in fp32, and the traffic of a block."""

    def run(model: nn.Module, enabled: bool) -> tuple[float, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = loss_of(model, family)
        loss.backward()
        # in the order of names, which both models share
        flat = torch.cat([g.float().flatten() for _, g in sorted(gradients(model).items())])
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
        model.zero_grad()
        return float(loss.detach()), flat

    plain = build(family).float()
    exact, plain_bf16 = run(plain, False), run(plain, True)
    context = ParallelContext.from_default_process_group({})
    model: Any = shard_model(build(family).float(), config=ShardConfig(context=context, **options))
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    run(model, True)  # compares the inputs of the ranks
    with CollectiveRecorder(context) as recorder:
        ours = run(model, True)
    return {
        "loss": abs(ours[0] - plain_bf16[0]),
        "noise of the loss": abs(exact[0] - plain_bf16[0]),
        "gradient": float((ours[1] - plain_bf16[1]).norm() / exact[1].norm()),
        "noise of the gradient": float((exact[1] - plain_bf16[1]).norm() / exact[1].norm()),
        "bytes": [call.payload_bytes for call in recorder.calls if call.purpose == "block"],
    }


@pytest.mark.reduced(at_most=2)
@pytest.mark.parametrize(("family", "mode", "recompute"), pairwise(FAMILIES, list(MODES), [False, True]))
def test_autocast_differs_only_by_rounding(pool2: WorkerPool, family: str, mode: str, recompute: bool) -> None:
    for found in pool2.run(in_autocast, family, MODES[mode], recompute):
        assert 0 < found["noise of the gradient"] < 0.1, found
        assert found["gradient"] < 2 * found["noise of the gradient"], found
        assert found["loss"] < 2e-2, found


def test_blocks_communicate_in_16_bit_under_autocast(pool2: WorkerPool) -> None:
    whole = 4 * 13 * 48  # B*S*H
    found = pool2.run(in_autocast, "gpt2", {}, False)[0]
    # each block of two layers and the head all-reduces one bf16 tensor per direction; the embedding's stays in fp32
    assert sorted(found["bytes"]) == [2 * whole] * 9 + [4 * whole]


def sent_by_blocks(options: Mapping[str, Any], enabled: bool) -> tuple[int, bool]:
    """Return the bytes that the blocks of a step send in fp32 and under autocast, and whether a ring sends them."""
    context = ParallelContext.from_default_process_group({})
    model: Any = shard_model(build("llama").float(), config=ShardConfig(context=context, **options))
    ring = mock.Mock(wraps=region.all_gather_matmul)
    cast, watched = (
        torch.autocast("cpu", torch.bfloat16, enabled=enabled),
        mock.patch.object(region, "all_gather_matmul", ring),
    )
    with CollectiveRecorder(context) as recorder, watched, cast:
        loss_of(model, "llama").backward()
    return recorder.payload_bytes(purpose="block"), ring.called


@pytest.mark.parametrize("mode", ["sequence", "overlap"])
def test_autocast_halves_the_traffic_and_keeps_the_overlap(pool2: WorkerPool, mode: str) -> None:
    (whole, ring), (half, ring_too) = (pool2.run(sent_by_blocks, MODES[mode], on)[0] for on in (False, True))
    assert whole / 2 <= half < 0.65 * whole  # the embedding's all-reduce stays in fp32
    assert ring_too == ring == (mode == "overlap")


# untied and with large weights, because a small tied model only repeats tokens
GENERATING = {
    "gpt2": SmallModelFactory("gpt2", changes={"tie_word_embeddings": False, "initializer_range": 0.3}),
    "llama": SmallModelFactory("llama", changes={"initializer_range": 0.3}),
    "t5": SmallModelFactory("t5", changes={"tie_word_embeddings": False, "initializer_factor": 8.0}),
    "bert": SmallModelFactory("bert", "BertLMHeadModel", {"tie_word_embeddings": False, "initializer_range": 0.3}),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 1.5},
    "one new token": {"max_new_tokens": 1, "min_new_tokens": 1},
}


def to_generate(family: str) -> Any:
    sample = GENERATING[family]
    torch.manual_seed(0)
    return SmallModelFactory(sample.family, sample.head, {**sample.changes, **DROPOUT[family]})().double().eval()


def generated(model: Any, length: int) -> dict[str, Tensor]:
    """Return the tokens generated for prompts of different lengths, for each decoding method."""
    ids = torch.randint(5, 127, (3, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if length > 2:
        ids[1, :2], mask[1, :2] = 0, 0  # left padding
    out = {}
    for name, way in WAYS.items():
        torch.manual_seed(7)
        settings = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "pad_token_id": 0, **way}
        out[name] = model.generate(ids, attention_mask=mask, **settings)
    return out


def generated_on_ranks(family: str, options: Mapping[str, Any], length: int) -> dict[str, Tensor]:
    """Generate in the workers, whose random states differ."""
    context = ParallelContext.from_default_process_group({})
    return generated(shard_model(to_generate(family), config=ShardConfig(context=context, **options)), length)


@pytest.mark.reduced(at_most=2)
@pytest.mark.parametrize(
    ("family", "layout", "length"),
    pairwise(list(GENERATING), [(2, "plain"), (2, "overlap"), (4, "sequence")], [1, 9]),
)
def test_generate_gives_the_same_tokens(pools: WorkerPools, family: str, layout: tuple[int, str], length: int) -> None:
    tensor, mode = layout
    plain = generated(to_generate(family), length)
    for ours in pools(tensor).run(generated_on_ranks, family, MODES[mode], length):
        for way, tokens in plain.items():
            assert torch.equal(tokens, ours[way]), way
    said = plain["greedy"][:, -7:]
    assert len(set(said.flatten().tolist())) > 3, ("it says something", said)


def saved(family: str, folder: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Train, save, and load with transformers only."""
    trained: Any = build(family)
    _trained(trained, family, 0)
    context = ParallelContext.from_default_process_group({})
    model: Any = shard_model(build(family), config=ShardConfig(context=context, **options))
    _trained(model, family, 0)
    state = full_state_dict(model)
    model.save_pretrained(folder)
    loaded = type(trained).from_pretrained(folder, dtype=torch.float64)
    want = trained.state_dict()
    assert list(state) == list(want), "the keys of the plain model in its order"
    tied = {name: value.data_ptr() for name, value in want.items()}
    return {
        "state": max(float((state[name].double() - value.double()).abs().max()) for name, value in want.items()),
        "loaded": max(
            float((loaded.state_dict()[name].double() - value.double()).abs().max()) for name, value in want.items()
        ),
        "dtypes": {name for name, value in want.items() if state[name].dtype != value.dtype},
        "tied": {name for name in want for other in want if tied[name] == tied[other]}
        == {n for n in state for other in state if state[n].data_ptr() == state[other].data_ptr()},
        "trains on": abs(
            float(loss_of(trained, family, 1).detach()) - float(loss_of(loaded.train(), family, 1).detach())
        ),
    }


@pytest.mark.reduced(at_most=2)
@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_equals_the_plain_one(pools: WorkerPools, family: str, tensor: int, tmp_path: Path) -> None:
    for found in pools(tensor).run(saved, family, str(tmp_path), SEQUENCE):
        assert found["state"] < 1e-8 and found["loaded"] < 1e-8 and found["trains on"] < 1e-6
        assert found["dtypes"] == set() and found["tied"]


def test_a_saved_model_with_a_data_axis_equals_the_plain_one(pool4: WorkerPool, tmp_path: Path) -> None:
    found = pool4.run(saved_over_data, str(tmp_path))
    assert all(differences < 1e-12 for differences in found)


def saved_over_data(folder: str) -> float:
    context = ParallelContext.from_default_process_group({"data": 2})
    model: Any = shard_model(build("llama"), config=ShardConfig(context=context))
    model.save_pretrained(folder)
    plain: Any = build("llama")
    loaded = type(plain).from_pretrained(folder, dtype=torch.float64)
    return max(float((loaded.get_parameter(name) - value).abs().max()) for name, value in plain.named_parameters())
