"""What people do to a model when they train it: on a sharded model it gives what it gives on the plain one.

Each feature is one function of a model, run on the plain model and on the sharded one; what it returns is compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardformer.comm.collectives import gather_objects
from shardformer.comm.params import gather_param, param_specs
from shardformer.comm.recorder import Recorder
from shardformer.context import ParallelContext
from shardformer.optim.grad_norm import clip_grad_norm_
from shardformer.policies.config import ShardConfig
from shardformer.policies.guards import full_state_dict
from shardformer.policies.record import ATTRIBUTE, no_sync, record_of
from shardformer.policies.sharder import shard_model
from shardformer.pool import Pools, WorkerPool
from shardformer.samples import LANGUAGE_MODEL, Batches, Sample

SEQUENCE = {"enable_sequence_parallelism": True}
OVERLAP = {**SEQUENCE, "enable_sequence_overlap": True}
MODES: dict[str, dict[str, Any]] = {"plain": {}, "sequence": SEQUENCE, "overlap": OVERLAP}
FAMILIES = tuple(LANGUAGE_MODEL)

Values = dict[str, Tensor]
Feature = Callable[[nn.Module, str], Values]

# ---------------------------------------------------------------------------------------- plain and sharded, side by side


def is_sharded(model: nn.Module) -> bool:
    return ATTRIBUTE in model.__dict__


def gradients(model: nn.Module) -> Values:
    """The full gradients; a parameter without one has none here."""
    if not is_sharded(model):
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    axis, specs = record_of(model).context.tensor, param_specs(model)
    return {n: gather_param(p.grad, specs[n], axis) for n, p in model.named_parameters() if p.grad is not None}


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


def loss_of(model: nn.Module, family: str, step: int = 0) -> Tensor:
    """The mean of the losses of the parts that the data ranks get; on a sharded model, of this rank's part."""
    batch = Batches(LANGUAGE_MODEL[family])(step)
    if is_sharded(model):
        data = record_of(model).context.data
        each = len(batch["input_ids"]) // data.size
        batch = {k: v[data.rank * each : (data.rank + 1) * each] for k, v in batch.items()}
    loss: Tensor = model(**batch).loss
    return loss.double()


def build(family: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return Sample(family, changes=changes)().double().train()


def side_by_side(
    feature: Feature, family: str, options: Mapping[str, Any], changes: Mapping[str, Any], data: int = 1
) -> dict[str, float]:
    """Runs in the workers: the differences of what the feature gives, relative to the largest of each kind of value."""
    plain = feature(build(family, **changes), family)
    context = ParallelContext.from_world({"data": data})
    sharded = shard_model(build(family, **changes), config=ShardConfig(context=context, **options))
    ours = feature(sharded, family)
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
    """``found`` has the differences on each rank. The bound is where a model casts to fp32 by itself."""
    for rank, differences in enumerate(found):
        worst = max(differences, key=lambda name: differences[name])
        assert differences[worst] < bound, (rank, worst, differences[worst])


def named(kind: str, values: Mapping[str, Tensor]) -> Values:
    return {f"{kind}:{name}": value for name, value in values.items()}


# ------------------------------------------------------------------------------------------------------------- features


def frozen(model: nn.Module, family: str) -> Values:
    """All but the matrices of the last layer and the norms are frozen; after a step more of it thaws."""
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


def frozen_embedding(model: nn.Module, family: str) -> Values:
    """The first block's input needs no gradient."""
    model.get_input_embeddings().weight.requires_grad_(False)  # type: ignore[operator]
    for name, p in model.named_parameters():
        if "position" in name or "wpe" in name or "embeddings" in name.lower():
            p.requires_grad_(False)
    loss_of(model, family).backward()
    return named("gradient", gradients(model))


def accumulated(model: nn.Module, family: str) -> Values:
    """Three backwards a step, two steps."""
    out = {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
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
    return out  # the second step's on top of the first's


def accumulated_in_one_backward(model: nn.Module, family: str) -> Values:
    (loss_of(model, family, 0) + 2 * loss_of(model, family, 1)).backward()
    return named("gradient", gradients(model))


def zeroed_in_place(model: nn.Module, family: str) -> Values:
    loss_of(model, family, 0).backward()
    model.zero_grad(set_to_none=False)
    loss_of(model, family, 1).backward()
    return named("gradient", gradients(model))


def graph_kept(model: nn.Module, family: str) -> Values:
    """Two backwards through one graph."""
    loss = loss_of(model, family)
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    return named("gradient", gradients(model))


def checkpointed(model: nn.Module, family: str) -> Values:
    return _checkpointed(model, family, False)


def checkpointed_reentrant(model: nn.Module, family: str) -> Values:
    return _checkpointed(model, family, True)


def _checkpointed(model: nn.Module, family: str, use_reentrant: bool) -> Values:
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})  # type: ignore[operator]
    if use_reentrant:  # otherwise nothing that goes into the first layer needs a gradient
        model.enable_input_require_grads()  # type: ignore[operator]
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
    every = gather_objects(loss.detach(), record_of(model).context.data)
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
    """Training, then evaluation with and without gradients, then training again."""
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
    """A deep copy trains by itself; so does the original, whose weights it left alone."""
    out = named("gradient 0", _trained(model, family, 0))
    twin = copy.deepcopy(model)
    out.update(named("gradient of the copy", _trained(twin, family, 1)))
    out.update(named("gradient of the original", _trained(model, family, 2)))
    return {**out, **named("weight of the copy", weights(twin)), **named("weight", weights(model))}


def copied_after_checkpoints(model: nn.Module, family: str) -> Values:
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return copied(model, family)


def _trained(model: nn.Module, family: str, step: int) -> Values:
    model.zero_grad()
    loss_of(model, family, step).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return gradients(model)


def interrupted(model: nn.Module, family: str) -> Values:
    """An exception in the middle of a forward, and of a backward; after each of them training goes on."""
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
    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

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
    clipped_by_norms,
    evaluated,
    copied,
    copied_after_checkpoints,
    interrupted,
)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("feature", EVERYWHERE, ids=lambda feature: feature.__name__)
def test_features(pool2: WorkerPool, feature: Feature, family: str, mode: str) -> None:
    assert_same(pool2.run(side_by_side, feature, family, MODES[mode], {}))
