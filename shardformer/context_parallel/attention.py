"""Attention and mask functions that transformers calls in models with context parallelism.

The model is not modified: it requests a mask, gets a ``ChunkedMask``, and passes it to this attention function. If the
sequence is not sharded, as in decoding with a cache, both functions call torch's own.

Layers that are compiled with torch.compile call a custom operator. A graph contains only tensors and constants. The
mask of an attention module and the positions of the ranks are objects, which differ in each forward pass. The graph
therefore receives scalar tensors that refer to these objects:

    q, k, v, site, mask --> context_attention --> out, lse, call      site: the module, mask: a ``ChunkedMask``
    grad, q, k, v, out, lse, call --> context_attention_backward      call: the plan of the forward pass

The sequence length can therefore change without a recompilation, as far as the compiler supports it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.context_parallel.attention_kernels import AttentionDropout, AttentionScoreOptions
from shardformer.context_parallel.masks import ChunkedMask, causal_predicate
from shardformer.context_parallel.ring_attention import (
    RingExchange,
    ring_attention,
    ring_attention_backward,
    ring_attention_forward,
)
from shardformer.context_parallel.sequence_layout import ContextParallelState, SequencePositions, get_current_state
from shardformer.context_parallel.ulysses import (
    HeadExchange,
    assign_key_heads,
    assign_query_heads,
    exchange_heads_for_positions,
    exchange_positions_for_heads,
    gather_heads,
    scatter_heads,
)
from shardformer.errors import ConfigError, InputError
from shardformer.kernels.attention_registration import register_attention
from shardformer.torch_compat import current_graph_task_id, has_data

# B batch, N query heads, K key heads, s local positions, D head dim

NAME = "shardformer_context"
RUN = "_shardformer_context"
"""Attribute of an attention module that contains the ``ContextParallelState`` of its model."""
SITE = "_shardformer_attention_site"
"""Attribute of a compiled attention module: a tensor that refers to the module, see ``graph_attention``."""
KNOWN_ARGUMENTS = {
    "softcap", "s_aux", "sinks", "sliding_window", "is_causal", "use_cache", "position_ids", "cache_position",
    "output_attentions", "output_hidden_states", "return_dict", "num_items_in_batch", "position_embeddings",
    "attention_mask", "deterministic", "target_dtype",
}  # fmt: skip
"""Arguments that ``context_parallel_attention`` implements or can ignore."""


def context_parallel_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention over a sharded sequence. The signature is that of transformers' attention functions.

    query (B, N, s, D), key and value (B, K, s, D) -> (B, s, N, D) and None.

    Communicates as ``ring_attention`` and ``exchange_positions_for_heads``.

    Raises:
        ConfigError, InputError: for arguments that context parallelism does not support.
    """
    state: ContextParallelState | None = getattr(module, RUN, None)
    if state is not None and torch.compiler.is_compiling() and getattr(module, SITE, None) is not None:
        return _attend_in_graph(module, state, query, key, value, attention_mask, dropout, scaling, is_causal, kwargs)
    positions = None if state is None else _find_query_positions(state, query, attention_mask)
    if state is None or positions is None:
        if isinstance(attention_mask, ChunkedMask):  # from a stack whose sequence is not sharded
            attention_mask = attention_mask.make_full_mask(query.device)
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        full: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return full
    _check_attention_arguments(module, attention_mask, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = kwargs.get("s_aux", kwargs.get("sinks"))
    width = value.shape[-1]
    query, key, value = _pad_head_dims_to_same_width(query, key, value)
    scores = AttentionScoreOptions(scale, kwargs.get("softcap"))
    plan = plan_attention(module, state, query, key, attention_mask, dropout, scores, is_causal)
    q, k, v = (
        exchange_positions_for_heads(query, plan.of_queries),
        exchange_positions_for_heads(key, plan.of_keys),
        exchange_positions_for_heads(value, plan.of_keys),
    )
    heads, bias = plan.heads.to(query.device), kwargs.get("position_bias")
    distance_bias = bias.distance_bias[heads] if isinstance(bias, PerDistancePositionBias) else None
    out = ring_attention(q, k, v, plan.exchange, None if sinks is None else sinks[heads], distance_bias)
    return exchange_heads_for_positions(out, plan.of_queries)[..., :width].transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class AttentionPlan:
    """Describes what the ranks exchange in one call of an attention module."""

    exchange: RingExchange
    of_queries: HeadExchange
    of_keys: HeadExchange
    heads: Tensor  # the query heads of this rank in its Ulysses group


def plan_attention(
    module: nn.Module,
    state: ContextParallelState,
    query: Tensor,
    key: Tensor,
    mask: ChunkedMask | None,
    dropout: float,
    scores: AttentionScoreOptions,
    is_causal: bool | None,
) -> AttentionPlan:
    """Plan which heads and keys the ranks exchange in one attention call. Communicates nothing."""
    positions = _find_query_positions(state, query, mask)
    if positions is None:
        length = query.shape[2]
        raise InputError(
            f"The compiled {type(module).__name__} received queries for {length} positions, which is not the length of "
            "the sequence shard of this rank.",
            remedy="Set compile=False, or disable context parallelism with sequence=1.",
        )
    if mask is None:
        mask = _make_default_mask(module, query, key, state, positions, is_causal)
    of_queries, of_keys = _make_head_exchanges(state, query.shape[1], key.shape[1], mask)
    heads = torch.tensor(of_queries.heads[of_queries.axis.rank])
    if dropout > 0:
        scores = replace(
            scores, dropout=AttentionDropout(dropout, mask.seed + state.get_attention_module_index(module), heads)
        )
    return AttentionPlan(RingExchange(state.ring, mask, scores, state.gathers), of_queries, of_keys, heads)


def _attend_in_graph(
    module: nn.Module,
    state: ContextParallelState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """Compute attention in a compiled layer with a single custom operator. See ``graph_attention``."""
    unknown = [name for name, x in kwargs.items() if name not in KNOWN_ARGUMENTS and isinstance(x, Tensor)]
    if unknown or kwargs.get("output_attentions"):
        unsupported = ", ".join(unknown) or "output_attentions=True"
        raise ConfigError(
            f"Compiled attention with context parallelism does not support {unsupported}.",
            remedy="Set compile=False.",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = kwargs.get("s_aux", kwargs.get("sinks"))
    width = value.shape[-1]
    query, key, value = _pad_head_dims_to_same_width(query, key, value)
    out = torch.ops.shardformer.context_attention(
        query, key, value, sinks, getattr(module, SITE), mask, state.group.size, dropout, scale,
        kwargs.get("softcap"), is_causal,
    )[0]  # fmt: skip
    return out[..., :width].transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class PerDistancePositionBias:
    """Relative position bias that stores one value per distance instead of one per pair of positions."""

    distance_bias: Tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ConfigError(
            f"The model reads .{name} of its attention bias, which is not a tensor with context parallelism.",
            remedy="Disable context parallelism for this model (sequence=1).",
        )


def patch_relative_bias(module: nn.Module, state: ContextParallelState) -> None:
    """Make a T5 attention compute its position bias per distance instead of per pair of positions."""
    original = getattr(type(module), "compute_bias", None)
    if original is not None and "past_seen_tokens" in inspect.signature(original).parameters:
        module.__dict__[RUN] = state
        module.__dict__["compute_bias"] = MethodType(_compute_bias_by_distance, module)


def has_patched_relative_bias(module: nn.Module) -> bool:
    """Return whether ``patch_relative_bias`` has modified ``module``."""
    return "compute_bias" in module.__dict__


def _compute_bias_by_distance(self: nn.Module, query_length: int, key_length: int, *args: Any, **kwargs: Any) -> Any:
    state: ContextParallelState = self.__dict__[RUN]
    original: Any = getattr(type(self), "compute_bias")  # noqa: B009  # nn.Module declares no such attribute
    is_recomputing = current_graph_task_id() >= 0
    positions = state.find_positions_by_local_length(query_length) if is_recomputing else state.current
    if positions is None:
        return original(self, query_length, key_length, *args, **kwargs)
    # the biases of one query, with length - 1 keys before it and after it
    device = {"device": kwargs["device"]} if "device" in kwargs else {}
    distance_bias = original(self, 1, 2 * positions.length - 1, past_seen_tokens=positions.length - 1, **device)
    return PerDistancePositionBias(distance_bias[0, :, 0])


def _make_head_exchanges(
    state: ContextParallelState, num_heads: int, num_key_heads: int, mask: ChunkedMask
) -> tuple[HeadExchange, HeadExchange]:
    """Return how the ranks of a Ulysses group exchange query heads, and how they exchange key heads."""
    axis, ring_rank = state.group, state.ring.rank
    if num_heads < axis.size:
        ring_size = state.axis.size // num_heads
        raise ConfigError(
            f"Ulysses cannot split the {num_heads} query heads of this rank over a group of {axis.size} ranks.",
            remedy=f"Use context_parallel='ring', or sequence=({ring_size}, {num_heads}).",
        )
    q_heads = assign_query_heads(num_heads, axis.size)
    query_lengths, key_lengths = (tuple(p.get_group_lengths(ring_rank)) for p in (mask.queries, mask.keys))
    of_keys = HeadExchange(axis, assign_key_heads(q_heads, num_heads, num_key_heads), key_lengths, num_key_heads)
    return HeadExchange(axis, q_heads, query_lengths, num_heads), of_keys


def _find_query_positions(state: ContextParallelState, query: Tensor, mask: Any) -> SequencePositions | None:
    """Return which sequence positions the queries have on each rank, or None if the queries are not sharded."""
    count = query.shape[2]
    if isinstance(mask, ChunkedMask):
        return mask.queries if count == state.get_local_length(mask.queries.length) else None
    if current_graph_task_id() < 0:
        return state.current
    return state.find_positions_by_local_length(
        count
    )  # a recomputation; a later forward pass may have replaced state.current


def _make_default_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    state: ContextParallelState,
    positions: SequencePositions,
    is_causal: bool | None,
) -> ChunkedMask:
    keys = state.find_positions_by_local_length(key.shape[2])
    if keys is None:
        length = key.shape[2]
        raise ConfigError(
            f"{type(module).__name__} received {length} keys on sequence rank {state.axis.rank}, which is not the "
            "length of a sequence shard of this rank.",
            remedy="Disable context parallelism for this model with sequence=1.",
        )
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    predicate = causal_predicate if is_causal and positions.length > 1 else None
    return ChunkedMask(predicate, None, positions, keys, query.shape[0], seed=state.seed)


def _pad_head_dims_to_same_width(*tensors: Tensor) -> list[Tensor]:
    """Pad the head dim of all tensors with zeros to the same width. The zeros do not change the attention scores."""
    width = max(t.shape[-1] for t in tensors)
    return [t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in tensors]


def _check_attention_arguments(module: nn.Module, mask: Any, kwargs: dict[str, Any]) -> None:
    if isinstance(mask, Tensor):
        raise InputError(
            f"{type(module).__name__} received an attention mask of shape {tuple(mask.shape)}, which context "
            "parallelism does not support.",
            remedy="Pass a padding mask of shape (batch, sequence), or position_ids that restart at 0 in each packed "
            "document.",
        )
    if kwargs.get("output_attentions"):
        raise ConfigError(
            "output_attentions=True is not supported with context parallelism.", remedy="Set output_attentions=False."
        )
    for name, value in kwargs.items():
        # T5's cross-attention passes zeros; fake tensors have no values
        if name not in KNOWN_ARGUMENTS and isinstance(value, Tensor) and has_data(value) and value.any():
            raise ConfigError(
                f"Context parallelism does not support the tensor {name!r} that {type(module).__name__} passes to its "
                "attention function.",
                remedy="Disable context parallelism for this model with sequence=1.",
            )


def context_parallel_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Any:
    """Return the attention mask of a model as a ``ChunkedMask``, or torch's mask if the sequence is not sharded."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    predicate = causal_mask_function if mask_function is None else mask_function
    state = get_current_state()
    if state is None or not state.is_open:
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, predicate, attention_mask, use_vmap=use_vmap, **kwargs
        )
    padding = None if attention_mask is None else attention_mask.bool()[:, :kv_length]
    if padding is not None and padding.shape[-1] < kv_length:
        padding = F.pad(padding, (0, kv_length - padding.shape[-1]))
    predicate = {bidirectional_mask_function: None, causal_mask_function: causal_predicate}.get(predicate, predicate)
    queries, keys = state.get_positions_per_rank(q_length), state.get_positions_per_rank(kv_length)
    return ChunkedMask(predicate, padding, queries, keys, batch_size, by_vmap=use_vmap, seed=state.seed)


def register_context_parallel_attention() -> None:
    """Register the attention and mask functions of context parallelism with transformers. Idempotent."""
    register_attention(NAME, context_parallel_attention, context_parallel_mask)


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
