"""With dropout, the sharded model equals the plain one under the same masks.

The sharded run records every mask. Joined along the sharded dimension, the masks are used in the plain run. A mask that
is wrongly replicated or wrongly different between ranks therefore changes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardformer.comm.collectives import all_gather_objects, gather_full_tensor
from shardformer.config import ShardConfig
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import LANGUAGE_MODEL, RandomBatchFactory, SmallModelFactory

DROPOUT = {
    "bert": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3},
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.3},
    "llama": {"attention_dropout": 0.3},
    "t5": {"dropout_rate": 0.2},
}


class _Masks(TorchFunctionMode):
    """Records masks of the normal generator, or returns recorded ones."""

    def __init__(self, given: list[Tensor] | None = None) -> None:
        super().__init__()
        self.given, self.drawn = given, list[Tensor]()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.dropout:
            return func(*args, **(kwargs or {}))
        x = args[0]
        settings = {
            "p": 0.5,
            "training": True,
            **dict(zip(("p", "training"), args[1:], strict=False)),
            **(kwargs or {}),
        }
        if not settings["training"] or settings["p"] == 0:
            return x
        if self.given is None:
            mask = torch.empty_like(x, requires_grad=False).bernoulli_(1 - settings["p"])
        else:
            mask = self.given[len(self.drawn)]
            assert mask.shape == x.shape, (mask.shape, x.shape)
        self.drawn.append(mask)
        return x * mask / (1 - settings["p"])


def _build(family: str) -> nn.Module:
    torch.manual_seed(0)
    model: Any = SmallModelFactory(family, changes=DROPOUT[family])().double().train()
    model.set_attn_implementation("eager")
    built: nn.Module = model
    return built


def _worst_difference(family: str, sequence_parallel: bool) -> float:
    batch = RandomBatchFactory(LANGUAGE_MODEL[family])(0)
    context = ParallelContext.from_default_process_group({})
    model = shard_model(
        _build(family), config=ShardConfig(context=context, enable_sequence_parallelism=sequence_parallel)
    )
    torch.manual_seed(1)
    with _Masks() as masks:
        loss = model(**batch).loss
    loss.backward()
    specs = get_shard_specs(model)
    ours = {n: gather_full_tensor(p.grad, specs[n], context.axis) for n, p in model.named_parameters()}
    parts = all_gather_objects(masks.drawn, context.tensor)

    plain = _build(family)
    shapes = _shapes(plain, batch)
    assert len(shapes) == len(masks.drawn)
    whole = [_joined([p[i] for p in parts], shapes[i]) for i in range(len(shapes))]
    with _Masks(whole):
        want = plain(**batch).loss
    want.backward()
    scale = max(float(p.grad.abs().max()) for p in plain.parameters())
    worst = max(float((p.grad - ours[n]).abs().max()) for n, p in plain.named_parameters()) / scale
    return max(worst, abs(float(loss.detach()) - float(want.detach())))


def _shapes(plain: nn.Module, batch: dict[str, Tensor]) -> list[torch.Size]:
    with _Masks() as masks, torch.no_grad():
        plain(**batch)
    return [m.shape for m in masks.drawn]


def _joined(parts: list[Tensor], shape: torch.Size) -> Tensor:
    """Join a mask: return one of equal masks, and concatenate shards along the dimension that is shorter."""
    cut = [d for d in range(len(shape)) if parts[0].shape[d] != shape[d]]
    if not cut:
        assert all(torch.equal(p, parts[0]) for p in parts), "outside a block the masks are the same on all ranks"
        return parts[0]
    if parts[0].shape == parts[1].shape:
        assert not torch.equal(parts[0], parts[1]), "inside a block every rank has a mask of its own"
    return torch.cat(parts, cut[0])


@pytest.mark.reduced(at_most=3)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("family", list(DROPOUT))
def test_dropout_masks_equal_those_of_one_process(pool2: WorkerPool, family: str, sequence_parallel: bool) -> None:
    assert max(pool2.run(_worst_difference, family, sequence_parallel)) < 1e-6
