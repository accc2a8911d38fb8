"""The checks of one GPU by one process: each function runs in a worker and returns a summary of its findings.

All but ``memory`` also run on the CPU, to try the kit without a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardformer
from shardformer.context_parallel.attention_kernels import (
    AttentionScoreOptions,
    BlockAttentionMask,
    partial_attention_backward,
    partial_attention_with_lse,
)
from shardformer.kernels.attention import attention
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory
from shardformer.zero.mixed_precision import LossScale, MixedPrecision
from tests.gpu.fake_device import misplaced

STEPS = 4


def train(
    family: str,
    device: str,
    *,
    options: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    adam: dict[str, Any] | None = None,
    activations: str = "",
    steps: int = STEPS,
) -> tuple[nn.Module, Any, list[float]]:
    """Trains the small model of a family on one rank. Returns the model, the optimizer and the losses.

    Without options and zero it is the plain model with torch's optimizer.
    """
    sample, where = SmallModelFactory(family), torch.device(device)
    torch.manual_seed(0)
    model = sample().to(where).train()
    batch = {name: x.to(where) for name, x in RandomBatchFactory(sample.head_class)(0).items()}
    if options is not None or zero is not None:
        model = shard_model(model, context=ParallelContext.from_default_process_group({}, where), **(options or {}))
    if activations:
        shardformer.offload.activations.offload_activations(model, activations, min_bytes=0)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, **(adam or {}))
    if zero is not None:
        optimizer = shardformer.shard_optimizer(model, optimizer, **zero)
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        optimizer.backward(loss) if zero is not None else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        assert loss.device == where, f"the loss is on {loss.device}"
    return model, optimizer, losses


def _on_host(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().cpu() for name, x in model.state_dict().items()}


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative difference of two models' weights, and the name of that weight."""
    found = [
        (float((x.float() - theirs[name].float()).abs().max() / theirs[name].float().abs().max().clamp(min=1e-6)), name)
        for name, x in ours.items()
        if x.is_floating_point() and name in theirs
    ]
    return max(found)


def placement(device: str) -> str:
    """Every parameter, buffer, gradient, loss and state of several families is on the GPU, under ZeRO too."""
    where, families = torch.device(device), ("llama", "gpt2", "bert", "t5", "bloom", "vit")
    for family in families:
        for zero in (None, {"stage": 2}, {"stage": 3}):
            model, optimizer, _ = train(family, device, options={}, zero=zero, steps=2)
            inner = optimizer.inner if zero is not None else [optimizer]
            found = misplaced(model, where) + misplaced(nn.Module(), where, {type(o).__name__: o for o in inner})
            assert not found, f"{family}, zero={zero}: {', '.join(found[:3])}"
    return f"{len(families)} families, each plain and under ZeRO 2 and 3"


def half_precision(device: str) -> str:
    """bf16 and fp16 give the losses of fp32 within 3 percent; a gradient that overflows halves the loss scale."""
    _, _, wide = train("llama", device)
    found = []
    for precision in ("bf16", "fp16"):
        for stage in (0, 2, 3):
            scale = LossScale(2.0**10)
            asked = MixedPrecision(precision, loss_scale=scale)
            _, optimizer, losses = train("llama", device, zero={"stage": stage, "precision": asked})
            off = max(abs(a - b) / abs(b) for a, b in zip(losses, wide, strict=True))
            assert off < 0.03, f"{precision}, stage {stage}: a loss differs from that in fp32 by {off:.1%}"
            assert optimizer.skipped == 0, f"{precision}, stage {stage}: skipped {optimizer.skipped} steps"
            found.append(off)
    asked = MixedPrecision("fp16", loss_scale=LossScale(2.0**40))
    _, optimizer, _ = train("llama", device, zero={"stage": 2, "precision": asked})
    assert optimizer.skipped == STEPS, f"with a scale of 2^40 {optimizer.skipped} of {STEPS} steps were skipped"
    assert optimizer.loss_scale.value == 2.0 ** (40 - STEPS), f"the scale is {optimizer.loss_scale.value:g}"
    return f"losses within {max(found):.2%} of fp32; overflowing steps are skipped"


def attention_kernels(device: str) -> str:
    """The fused kernels match the math kernel in fp32, forward and backward."""
    where, worst, count = torch.device(device), 0.0, 0
    halves = (torch.bfloat16, torch.float16) if where.type == "cuda" else ()
    for dtype in (torch.float32, *halves):
        for heads, keys, width in ((4, 4, 64), (8, 2, 64), (4, 4, 20)):
            for kind in ("causal", "none", "mask", "bias"):
                off = _attention_differs(where, dtype, heads, keys, width, kind)
                bound = 3e-2 if dtype in halves else 2e-4
                assert off < bound, f"{dtype}, {heads} heads on {keys} of {width}, {kind}: off by {off:.1e}"
                worst, count = max(worst, off), count + 1
    return f"{count} cases, off by at most {worst:.1e}"


def _attention_differs(where: torch.device, dtype: torch.dtype, heads: int, keys: int, width: int, kind: str) -> float:
    torch.manual_seed(0)
    batch, length = 2, 33
    q = torch.randn(batch, heads, length, width, device=where, dtype=dtype)
    k, v = (torch.randn(batch, keys, length, width, device=where, dtype=dtype) for _ in range(2))
    sees = torch.rand(batch, 1, length, length, device=where) > 0.3
    sees |= torch.eye(length, dtype=torch.bool, device=where)
    bias = torch.randn(1, heads, length, length, device=where, dtype=dtype)
    module = nn.Module()
    module.is_causal = kind == "causal"  # type: ignore[assignment]  # a plain attribute, as transformers has it

    def run(tensors: list[Tensor], fused: bool) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        q, k, v, bias = leaves
        if fused:
            more = {"position_bias": bias} if kind == "bias" else {}
            out = attention(module, q, k, v, sees if kind == "mask" else None, **more)[0].transpose(1, 2)
        else:
            k, v = (x.repeat_interleave(heads // keys, 1) for x in (k, v))
            added = {"mask": sees, "bias": bias}.get(kind)
            with sdpa_kernel(SDPBackend.MATH):
                out = F.scaled_dot_product_attention(q, k, v, added, is_causal=kind == "causal")
        weight = torch.sin(torch.arange(out.numel(), device=where, dtype=torch.float32)).view(out.shape)
        (out.float() * weight).sum().backward()
        return [out, *(x.grad for x in leaves if x.grad is not None)]

    ours, theirs = run([q, k, v, bias], True), run([x.float() for x in (q, k, v, bias)], False)
    assert len(ours) == len(theirs)
    return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


def context_kernels(device: str) -> str:
    """The kernels of ring attention match attention in fp64, forward and backward."""
    where, worst = torch.device(device), 0.0
    halves = (torch.bfloat16, torch.float16) if where.type == "cuda" else ()
    for dtype in (torch.float32, *halves):
        for kind in ("causal", "all", "sees"):
            torch.manual_seed(0)
            q = torch.randn(2, 4, 40, 32, device=where, dtype=dtype)
            k, v, grad = (torch.randn(2, heads, 40, 32, device=where, dtype=dtype) for heads in (2, 2, 4))
            positions = torch.arange(40, device=where)
            sees = (positions[:, None] >= positions[None, :]) | (positions[None, :] % 3 == 0)
            part = BlockAttentionMask(
                kind == "causal", sees[None, None] if kind == "sees" else None, positions, positions
            )
            how = AttentionScoreOptions(32**-0.5)
            out, lse = partial_attention_with_lse(q, k, v, part, how)
            ours = [out, *partial_attention_backward(grad, q, k, v, out, lse, part, how)[:3]]
            wide = [x.double().requires_grad_() for x in (q, k, v)]
            seen = positions[:, None] >= positions[None, :] if kind == "causal" else sees if kind == "sees" else None
            expected = _attend_written_out(*wide, seen)
            expected.backward(grad.double())
            theirs = [expected.detach(), *(x.grad for x in wide if x.grad is not None)]
            off = max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))
            assert off < (3e-2 if dtype in halves else 2e-4), f"{dtype}, {kind}: off by {off:.1e}"
            worst = max(worst, off)
    return f"off by at most {worst:.1e}"


def _attend_written_out(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v


def fused_optimizers(device: str) -> str:
    """Fused, capturable and foreach AdamW give the same weights with and without ZeRO."""
    kinds: list[dict[str, Any]] = [{"fused": True}, {"foreach": True}]
    if torch.device(device).type == "cuda":
        kinds += [{"capturable": True}, {"fused": True, "capturable": True}]
    worst = 0.0
    for adam in kinds:
        plain, _, _ = train("gpt2", device, adam=adam)
        for zero in ({"stage": 1}, {"stage": 3}):
            model, _, _ = train("gpt2", device, zero=zero, adam=adam)
            off, name = furthest(shardformer.full_state_dict(model), _on_host(plain))
            assert off < 1e-3, f"{adam}, {zero}: {name} is off by {off:.1e}"
            worst = max(worst, off)
    return f"{len(kinds)} kinds under stages 1 and 3, off by at most {worst:.1e}"


def offload(device: str) -> str:
    """Master weights and states in pinned host memory give the same weights."""
    is_gpu, worst = torch.device(device).type == "cuda", 0.0
    for precision in ("fp32", "bf16"):
        for stage in (2, 3):
            asked = {"stage": stage, "precision": precision}
            here, _, _ = train("llama", device, zero=asked)
            expected = shardformer.full_state_dict(here)
            shares = (0.0, 0.5, "free") if is_gpu else (0.0, 0.5)
            for share in shares:
                place = shardformer.OffloadConfig("cpu", on_device=share, parameters=stage == 3)
                model, optimizer, _ = train("llama", device, zero={**asked, "offload": place})
                off, name = furthest(shardformer.full_state_dict(model), expected)
                bound = 1e-3 if precision == "fp32" else 5e-2
                assert off < bound, f"{asked}, on_device={share}: {name} is off by {off:.1e}"
                worst = max(worst, off)
                parts = [shard.host for shard in optimizer.shards if shard.host is not None]
                assert not is_gpu or all(part.values.is_pinned() for part in parts), "the masters are not pinned"
                assert parts or share != 0.0, "nothing is on the host"
    return f"off by at most {worst:.1e}" + (", in pinned memory" if is_gpu else "")


def activation_offload(device: str) -> str:
    """Offloaded activations give the same gradients."""
    _, _, plain = train("llama", device, options={})
    model, _, stored = train("llama", device, options={}, activations="host")
    off = max(abs(a - b) / abs(b) for a, b in zip(stored, plain, strict=True))
    assert off < 1e-5, f"a loss is off by {off:.1e}"
    assert not misplaced(model, torch.device(device))
    return f"losses off by at most {off:.1e}"


def random_states(device: str) -> str:
    """A checkpoint restores the random state of the GPU, and that of the CPU."""
    where = torch.device(device)
    model, optimizer, _ = train("gpt2", device, zero={"stage": 2}, adam={"fused": True})
    with TemporaryDirectory() as folder:
        shardformer.save_checkpoint(model, folder, optimizer, step=1)
        expected = [torch.rand(8, device=where).cpu(), torch.rand(8)]
        torch.manual_seed(123)
        other, its, _ = train("gpt2", device, zero={"stage": 2}, adam={"fused": True}, steps=1)
        shardformer.load_checkpoint(other, folder, its)
        found = [torch.rand(8, device=where).cpu(), torch.rand(8)]
        for name, a, b in zip((device, "the CPU"), found, expected, strict=True):
            assert torch.equal(a, b), f"the random numbers of {name} differ after loading"
        off, name = furthest(shardformer.full_state_dict(other), shardformer.full_state_dict(model))
        assert off == 0, f"{name} is off by {off:.1e} after loading"
        assert not misplaced(nn.Module(), where, {"AdamW": its.inner[0]}), "the optimizer's state is elsewhere"
    return "random numbers and weights are the same after loading"


def memory(device: str) -> str:
    """``shardformer.estimate_memory`` is within 10 percent of the memory after a step."""
    where, found = torch.device(device), []
    _warm_up(where)  # allocates the workspaces of cuBLAS, one per thread
    for zero in ({"stage": 0}, {"stage": 2, "precision": "bf16"}, {"stage": 3, "precision": "bf16"}):
        gc.collect()
        torch.cuda.synchronize(where)
        before = torch.cuda.memory_allocated(where)
        kept, held = _kept(where, zero, before)
        off = held / kept - 1
        assert abs(off) < 0.1, f"{zero}: the GPU holds {held / 1e6:.1f} MB, the estimate is {kept / 1e6:.1f} MB"
        found.append(off)
    return f"within {max(map(abs, found)):.1%} of the estimate"


def _warm_up(where: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(2048, 2048, device=where, dtype=dtype)
        layer(torch.ones(4, 2048, device=where, dtype=dtype)).sum().backward()


def _kept(where: torch.device, zero: dict[str, Any], before: int) -> tuple[float, int]:
    """Return the estimate for a model of 34 million parameters, and the bytes allocated after a step."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).to(where)
    model = shard_model(model, context=ParallelContext.from_default_process_group({}, where))
    plain = torch.optim.AdamW(model.parameters())
    expected = shardformer.estimate_memory(model, plain, **zero)
    dtype = torch.bfloat16 if "precision" in zero else torch.float32
    optimizer: Any = shardformer.shard_optimizer(model, plain, **zero)
    x = torch.randn(4, 2048, device=where, dtype=dtype)
    optimizer.backward(model(x).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()
    del x
    torch.cuda.synchronize(where)
    kept = expected.parameters + expected.gathered + expected.masters + expected.states
    return kept, torch.cuda.memory_allocated(where) - before


ONE_RANK: dict[str, Callable[[str], str]] = {
    check.__name__: check
    for check in (
        placement, half_precision, attention_kernels, context_kernels, fused_optimizers, offload, activation_offload,
        random_states, memory,
    )
}  # fmt: skip
