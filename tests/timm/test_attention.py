"""timm's attention on fused kernels: all calls use them, results are equal, and scores are not stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardformer
from shardformer.errors import ConfigError
from shardformer.kernels import attention as attention_kernels
from shardformer.kernels.attention_registration import _describe_kernels, use_flash_attention
from shardformer.local_ranks.worker_pool import WorkerPool
from tests.ops import Ops
from tests.timm.models import MODELS, Small, images, loss
from tests.timm.test_timm import MODES, differences, in_worker, of, sharded

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLASH = {"enable_flash_attention": True}
TRAINED_BIAS = ("beit", "beit with one bias for all", "swin", "swin v2")
HELD_BY_THE_MODEL = {"swin": "the masks of its shifted windows still need as much memory as the attention scores"}


def said_of(name: str) -> tuple[str, int]:
    """Return the reported kernels, and the number of attention calls that used them."""

    def use(model: Any) -> tuple[str, int]:
        said = shardformer.describe_sharding(model)
        return "\n".join(said.notes), sum(
            n for *_, now, n in said.changes if now in ("forward_with_fused_kernels", "timm_swinv2_attention")
        )

    said: tuple[str, int] = sharded(name, FLASH, use)
    return said


@pytest.mark.reduced(one_in=5)
@pytest.mark.parametrize("name", [of(name, "flash attention") for name in MODELS])
def test_every_attention_call_uses_the_kernels(timm_worker: WorkerPool, name: str) -> None:
    assert in_worker(timm_worker, differences, name, (2, 4), {}, FLASH) == []
    notes, forwards = in_worker(timm_worker, said_of, name)
    assert "torch flash attention for the CPU" in notes
    assert ("chunked backward for the position bias" in notes) == (name in TRAINED_BIAS)
    assert forwards == {"swin": 4, "swin v2": 4, "vit pooled by attention": 3}.get(name, 2)


@pytest.mark.reduced(at_most=2)
@pytest.mark.parametrize("mode", ["sequence", "overlap"])
@pytest.mark.parametrize("name", ["vit with all between", "beit", "eva02"])
def test_flash_attention_with_all_other_options(timm_worker: WorkerPool, name: str, mode: str) -> None:
    options = {**FLASH, **MODES[mode], "enable_fused_normalization": True, "enable_jit_fused": True}
    with timm_worker.with_timeout(300) as pool:
        assert in_worker(pool, differences, name, (2,), {}, options) == []


def dropout_is_refused(name: str, changes: dict[str, float]) -> str:
    model = Small(name, changes)()
    with pytest.raises(ConfigError) as caught:
        use_flash_attention(model, CPU)
    assert not any("forward" in vars(module) for module in model.modules())
    return str(caught.value)


@pytest.mark.parametrize("name", ["vit", "beit", "swin", "swin v2"])
def test_dropout_of_weights_is_refused_on_the_cpu(timm_worker: WorkerPool, name: str) -> None:
    said = in_worker(timm_worker, dropout_is_refused, name, {"attn_drop_rate": 0.1})
    assert "do not support attention dropout on the CPU" in said


def held_by(name: str) -> tuple[set[str], bool, str]:
    """Return the operations of a step, whether scores are saved for the backward pass, and the note for CUDA."""
    called: set[tuple[int, int, int]] = set()
    held: list[tuple[int, ...]] = []
    attention = F.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Tensor:
        called.add((query.shape[1], query.shape[2], key.shape[2]))
        return attention(query, key, *rest, **options)

    def hold(tensor: Tensor) -> Tensor:
        held.append(tuple(tensor.shape))
        return tensor

    torch.manual_seed(0)
    model = Small(name)().double()
    batch = {key: x.double() if x.is_floating_point() else x for key, x in images(0).items()}
    use_flash_attention(model, CPU)
    with (
        patch.object(attention_kernels, "SCORES_AT_ONCE", 0),  # otherwise the small scores would all be kept
        patch.object(F, "scaled_dot_product_attention", noted),
        torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor),
        Ops() as ops,
    ):
        loss(model, batch)
    assert called, name
    of_batch = [shape for shape in held if len(shape) == 4 and shape[0] > 1 and shape[1:] in called]
    return ops.names, bool(of_batch), _describe_kernels(model, CUDA)


@pytest.mark.parametrize("name", [of(name, "memory-efficient attention") for name in MODELS])
def test_attention_scores_are_not_saved(
    timm_worker: WorkerPool, name: str, record_property: Callable[[str, object], None]
) -> None:
    ops, held, on_cuda = in_worker(timm_worker, held_by, name)
    assert "_scaled_dot_product_flash_attention_for_cpu" in ops
    assert not {"_softmax", "_safe_softmax"} & ops
    assert held == (name in HELD_BY_THE_MODEL)
    if held:
        record_property("feature", f"part: {HELD_BY_THE_MODEL[name]}")
    takes_bias = "torch memory-efficient attention, because the flash kernel supports no position bias"
    where_masked = "torch flash attention, or its memory-efficient kernel with a mask"
    assert (takes_bias if name in TRAINED_BIAS else where_masked) in on_cuda
