"""Context-parallel attention as a custom operator for layers that are compiled with torch.compile.

A graph contains only tensors and constants. The mask of an attention module and the positions of the ranks are
objects, which differ in each forward pass. The graph therefore receives scalar tensors that refer to these objects:

    q, k, v, site, mask --> context_attention --> out, lse, call      site: the module, mask: a ``ChunkedMask``
    grad, q, k, v, out, lse, call --> context_attention_backward      call: the plan of the forward pass

The sequence length can therefore change without a recompilation, as far as the compiler supports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.context_parallel.attention import RUN, SITE, AttentionPlan, plan_attention
from shardformer.context_parallel.attention_kernels import AttentionScoreOptions
from shardformer.context_parallel.masks import ChunkedMask
from shardformer.context_parallel.ring_attention import ring_attention_backward, ring_attention_forward
from shardformer.context_parallel.ulysses import HeadExchange, gather_heads, scatter_heads
from shardformer.errors import ConfigError, InputError

# B batch, N query heads, K key heads, s local positions, D head dim

_HELD = "held_by_tensor"
_LIBRARY = torch.library.Library("shardformer", "FRAGMENT")
_LIBRARY.define(
    "context_attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor site, Tensor? mask, int group, "
    "float dropout, float scale, float? cap, bool? is_causal) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.cudagraph_unsafe,
)
_LIBRARY.define(
    "context_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, "
    "Tensor call) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.cudagraph_unsafe,
)


def wrap_object_in_tensor(value: Any) -> Tensor:
    """Wrap a Python object in a scalar tensor, so that it can pass through a compiled graph."""
    tensor = torch.zeros((), dtype=torch.int64, device="cpu")
    setattr(tensor, _HELD, value)
    return tensor


def unwrap_object_from_tensor(tensor: Tensor, kind: type) -> Any:
    """Return the object that ``wrap_object_in_tensor`` stored in a tensor. Raises InputError for other tensors."""
    value = getattr(tensor, _HELD, None)
    if not isinstance(value, kind):
        raise InputError(
            "With context parallelism, a compiled layer must not change its attention mask, but its attention module "
            f"received a tensor of shape {tuple(tensor.shape)}.",
            remedy="Set compile=False, or disable context parallelism for this model (sequence=1).",
        )
    return value


def wrap_mask_in_tensor(value: Any) -> Any:
    """Wrap a context-parallel attention mask in a tensor, and return any other value unchanged."""
    return wrap_object_in_tensor(value) if isinstance(value, ChunkedMask) else value


def wrap_attention_modules(layer: nn.Module) -> None:
    """Store each attention module of a layer in a tensor, which a compiled graph can pass to an operator."""
    for module in layer.modules():
        if RUN in module.__dict__:
            module.__dict__[SITE] = wrap_object_in_tensor(module)


@dataclass(frozen=True)
class _SavedAttentionCall:
    plan: AttentionPlan
    sees_nothing: Tensor | None
    exchanged: tuple[Tensor, ...] | None  # q, k, v, out, lse of the local heads in a Ulysses group, not in the graph


def _run_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    site: Tensor,
    mask: Tensor | None,
    group: int,
    dropout: float,
    scale: float,
    cap: float | None,
    is_causal: bool | None,
) -> tuple[Tensor, Tensor, Tensor]:
    module = unwrap_object_from_tensor(site, nn.Module)
    chunked = None if mask is None else unwrap_object_from_tensor(mask, ChunkedMask)
    state, scores = getattr(module, RUN), AttentionScoreOptions(scale, cap)
    plan = plan_attention(module, state, q, k, chunked, dropout, scores, is_causal)
    local_q, local_k, local_v = (
        _scatter_if_sharded(x, exchange) for x, exchange in ((q, plan.of_queries), (k, plan.of_keys), (v, plan.of_keys))
    )
    local_sinks = None if sinks is None else sinks[plan.heads.to(sinks.device)]
    out, lse, sees_nothing = ring_attention_forward(local_q, local_k, local_v, local_sinks, None, plan.exchange)
    if group == 1:
        return out.contiguous(), lse.contiguous(), wrap_object_in_tensor(_SavedAttentionCall(plan, sees_nothing, None))
    call = _SavedAttentionCall(plan, sees_nothing, (local_q, local_k, local_v, out, lse))
    return _gather_if_sharded(out, plan.of_queries).contiguous(), lse.new_empty(0), wrap_object_in_tensor(call)


def _fake_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Any, site: Tensor, mask: Any, group: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3] if group == 1 else (0,), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), lse, torch.empty_like(site)


def _run_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, call: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made: _SavedAttentionCall = unwrap_object_from_tensor(call, _SavedAttentionCall)
    plan, heads = made.plan, made.plan.heads.to(q.device)
    if made.exchanged is not None:
        q, k, v, out, lse = made.exchanged
    saved = (q, k, v, None if sinks is None else sinks[heads], None, out, lse)
    local = _scatter_if_sharded(grad, plan.of_queries)
    dq, dk, dv, local_sinks_grad, _ = ring_attention_backward(local, saved, made.sees_nothing, plan.exchange)
    sinks_grad = q.new_empty(0)
    if sinks is not None and local_sinks_grad is not None:
        sinks_grad = torch.zeros_like(sinks).index_copy_(0, heads, local_sinks_grad)
    dq, dk, dv = (
        _gather_if_sharded(dq, plan.of_queries),
        _gather_if_sharded(dk, plan.of_keys),
        _gather_if_sharded(dv, plan.of_keys),
    )
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), sinks_grad


def _fake_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks_grad = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), sinks_grad


def _scatter_if_sharded(x: Tensor, exchange: HeadExchange) -> Tensor:
    return x if exchange.axis.size == 1 else scatter_heads(x, exchange)


def _gather_if_sharded(x: Tensor, exchange: HeadExchange) -> Tensor:
    return x if exchange.axis.size == 1 else gather_heads(x, exchange)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)


def _autograd_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, out, lse, call = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise ConfigError(
            "Compiled attention with context parallelism does not support backward(create_graph=True).",
            remedy="Remove create_graph=True, or compute the second derivatives on the unsharded model.",
        )
    *grads, sinks_grad = torch.ops.shardformer.context_attention_backward(grad, q, k, v, sinks, out, lse, call)
    return (*grads, None if sinks is None else sinks_grad, *(None,) * 7)


for _name, _run, _shape in (
    ("context_attention", _run_attention, _fake_attention),
    ("context_attention_backward", _run_attention_backward, _fake_attention_backward),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardformer::{_name}", _shape, lib=_LIBRARY)
torch.library.register_autograd(
    "shardformer::context_attention", _autograd_backward, setup_context=_setup_context, lib=_LIBRARY
)
