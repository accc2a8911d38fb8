"""Attention and mask functions that transformers calls in models with context parallelism.

The model is not modified: it requests a mask, gets a ``ChunkedAttentionMask``, and passes it to this attention
function. If the sequence is not sharded, as in decoding with a cache, both functions call torch's own.

Layers that are compiled with torch.compile call a custom operator. A graph contains only tensors and constants. The
mask of an attention module and the positions of the ranks are objects, which differ in each forward pass. The graph
therefore receives scalar tensors that refer to these objects:

    q, k, v, site, mask --> context_attention --> out, lse, call      site: the module, mask: a ``ChunkedAttentionMask``
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
from shardformer.context_parallel.masks import ChunkedAttentionMask, causal_mask_predicate
from shardformer.context_parallel.ring_attention import (
    RingKVExchange,
    ring_attention,
    ring_attention_backward,
    ring_attention_forward,
)
from shardformer.context_parallel.sequence_layout import (
    ContextParallelState,
    SequenceLayout,
    get_context_parallel_state,
)
from shardformer.context_parallel.ulysses import (
    UlyssesHeadExchange,
    assign_key_heads_to_ranks,
    assign_query_heads_to_ranks,
    gather_heads_and_scatter_positions,
    gather_heads_without_autograd,
    scatter_heads_and_gather_positions,
    scatter_heads_without_autograd,
)
from shardformer.errors import ConfigError, InputError
from shardformer.kernels.attention_registration import register_attention
from shardformer.torch_compat import current_graph_task_id, has_real_data

# B batch, N query heads, K key heads, s local positions, D head dim

Mask = ChunkedAttentionMask | Tensor | None
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

    Communicates as ``ring_attention`` and ``scatter_heads_and_gather_positions``.

    Raises:
        ConfigError, InputError: for arguments that context parallelism does not support.
    """
    state: ContextParallelState | None = getattr(module, RUN, None)
    if state is not None and torch.compiler.is_compiling() and getattr(module, SITE, None) is not None:
        return _compute_compiled_attention(
            module, state, query, key, value, attention_mask, dropout, scaling, is_causal, kwargs
        )
    positions = None if state is None else _find_query_layout(state, query, attention_mask)
    if state is None or positions is None:
        if isinstance(attention_mask, ChunkedAttentionMask):  # from a stack whose sequence is not sharded
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
    query, key, value = _pad_to_same_head_dim(query, key, value)
    scores = AttentionScoreOptions(scale, kwargs.get("softcap"))
    plan = make_attention_plan(module, state, query, key, attention_mask, dropout, scores, is_causal)
    q, k, v = (
        scatter_heads_and_gather_positions(query, plan.query_exchange),
        scatter_heads_and_gather_positions(key, plan.key_exchange),
        scatter_heads_and_gather_positions(value, plan.key_exchange),
    )
    heads, bias = plan.local_query_heads.to(query.device), kwargs.get("position_bias")
    distance_bias = bias.distance_bias[heads] if isinstance(bias, PerDistancePositionBias) else None
    out = ring_attention(q, k, v, plan.exchange, None if sinks is None else sinks[heads], distance_bias)
    return gather_heads_and_scatter_positions(out, plan.query_exchange)[..., :width].transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class AttentionExchangePlan:
    """Plan for the all-to-all of heads and the ring exchange of keys and values in one attention call."""

    exchange: RingKVExchange
    query_exchange: UlyssesHeadExchange
    key_exchange: UlyssesHeadExchange
    local_query_heads: Tensor  # the query heads of this rank in its Ulysses group


def make_attention_plan(
    module: nn.Module,
    state: ContextParallelState,
    query: Tensor,
    key: Tensor,
    chunked_mask: ChunkedAttentionMask | None,
    dropout: float,
    score_options: AttentionScoreOptions,
    is_causal: bool | None,
) -> AttentionExchangePlan:
    """Plan which attention heads, keys and values the ranks send each other. Communicates nothing."""
    positions = _find_query_layout(state, query, chunked_mask)
    if positions is None:
        length = query.shape[2]
        raise InputError(
            f"The compiled {type(module).__name__} received queries for {length} positions, but this rank's shard of "
            "the sequence has another length.",
            remedy="Set compile=False, or set sequence=1 to disable context parallelism.",
        )
    if chunked_mask is None:
        chunked_mask = _make_default_chunked_mask(module, query, key, state, positions, is_causal)
    of_queries, of_keys = _make_query_and_key_head_exchanges(state, query.shape[1], key.shape[1], chunked_mask)
    heads = torch.tensor(of_queries.heads_by_rank[of_queries.axis.rank])
    if dropout > 0:
        score_options = replace(
            score_options,
            dropout=AttentionDropout(dropout, chunked_mask.seed + state.get_attention_module_index(module), heads),
        )
    return AttentionExchangePlan(
        RingKVExchange(state.ring, chunked_mask, score_options, state.all_gather_kv), of_queries, of_keys, heads
    )


def _compute_compiled_attention(
    module: nn.Module,
    state: ContextParallelState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    wrapped_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """Run attention in a compiled layer as a single custom operator. See ``graph_attention``."""
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
    query, key, value = _pad_to_same_head_dim(query, key, value)
    out = torch.ops.shardformer.context_attention(
        query, key, value, sinks, getattr(module, SITE), wrapped_mask, state.group.size, dropout, scale,
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
            f"The model accesses .{name} of its position bias, but context parallelism never creates the full bias "
            "tensor.",
            remedy="Set sequence=1 to disable context parallelism for this model.",
        )


def patch_relative_position_bias(module: nn.Module, state: ContextParallelState) -> None:
    """Patch a T5 attention module to store its position bias per distance, which needs less memory."""
    original = getattr(type(module), "compute_bias", None)
    if original is not None and "past_seen_tokens" in inspect.signature(original).parameters:
        module.__dict__[RUN] = state
        module.__dict__["compute_bias"] = MethodType(_compute_position_bias_per_distance, module)


def has_patched_position_bias(module: nn.Module) -> bool:
    return "compute_bias" in module.__dict__


def _compute_position_bias_per_distance(
    module: nn.Module, query_length: int, key_length: int, *args: Any, **kwargs: Any
) -> Any:
    state: ContextParallelState = module.__dict__[RUN]
    original: Any = getattr(type(module), "compute_bias")  # noqa: B009  # nn.Module declares no such attribute
    is_recomputing = current_graph_task_id() >= 0
    positions = state.find_layout_by_local_length(query_length) if is_recomputing else state.current
    if positions is None:
        return original(module, query_length, key_length, *args, **kwargs)
    # the biases of one query, with length - 1 keys before it and after it
    device = {"device": kwargs["device"]} if "device" in kwargs else {}
    distance_bias = original(module, 1, 2 * positions.length - 1, past_seen_tokens=positions.length - 1, **device)
    return PerDistancePositionBias(distance_bias[0, :, 0])


def _make_query_and_key_head_exchanges(
    state: ContextParallelState, num_query_heads: int, num_key_heads: int, chunked_mask: ChunkedAttentionMask
) -> tuple[UlyssesHeadExchange, UlyssesHeadExchange]:
    axis, ring_rank = state.group, state.ring.rank
    if num_query_heads < axis.size:
        ring_size = state.axis.size // num_query_heads
        raise ConfigError(
            f"Ulysses cannot split the {num_query_heads} query heads of this rank over a group of {axis.size} ranks.",
            remedy=f"Use context_parallel='ring', or set sequence=({ring_size}, {num_query_heads}) for a ring size of "
            f"{ring_size} and Ulysses groups of {num_query_heads} ranks.",
        )
    q_heads = assign_query_heads_to_ranks(num_query_heads, axis.size)
    query_lengths, key_lengths = (
        tuple(p.get_lengths_in_ulysses_group(ring_rank)) for p in (chunked_mask.queries, chunked_mask.keys)
    )
    of_keys = UlyssesHeadExchange(
        axis, assign_key_heads_to_ranks(q_heads, num_query_heads, num_key_heads), key_lengths, num_key_heads
    )
    return UlyssesHeadExchange(axis, q_heads, query_lengths, num_query_heads), of_keys


def _find_query_layout(state: ContextParallelState, query: Tensor, attention_mask: Mask) -> SequenceLayout | None:
    """Find the sequence layout of the queries, or None if they are not sharded over the sequence."""
    count = query.shape[2]
    if isinstance(attention_mask, ChunkedAttentionMask):
        return attention_mask.queries if count == state.get_local_length(attention_mask.queries.length) else None
    if current_graph_task_id() < 0:
        return state.current
    return state.find_layout_by_local_length(
        count
    )  # a recomputation; a later forward pass may have replaced state.current


def _make_default_chunked_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    state: ContextParallelState,
    sequence_layout: SequenceLayout,
    is_causal: bool | None,
) -> ChunkedAttentionMask:
    keys = state.find_layout_by_local_length(key.shape[2])
    if keys is None:
        length = key.shape[2]
        raise ConfigError(
            f"{type(module).__name__} received keys for {length} positions on sequence rank {state.axis.rank}, "
            "which does not match the length of any sequence shard on this rank.",
            remedy="Set sequence=1 to disable context parallelism for this model.",
        )
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    predicate = causal_mask_predicate if is_causal and sequence_layout.length > 1 else None
    return ChunkedAttentionMask(predicate, None, sequence_layout, keys, query.shape[0], dropout_seed=state.seed)


def _pad_to_same_head_dim(*tensors: Tensor) -> list[Tensor]:
    """Zero-pad the head dimension of all tensors to the same size. Attention scores stay the same."""
    width = max(t.shape[-1] for t in tensors)
    return [t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in tensors]


def _check_attention_arguments(module: nn.Module, attention_mask: Mask, kwargs: dict[str, Any]) -> None:
    if isinstance(attention_mask, Tensor):
        raise InputError(
            f"Context parallelism does not support the attention mask of shape {tuple(attention_mask.shape)} that "
            f"{type(module).__name__} received.",
            remedy="Pass a padding mask of shape (batch, sequence), or position_ids that restart at 0 in each packed "
            "document.",
        )
    if kwargs.get("output_attentions"):
        raise ConfigError(
            "Context parallelism does not support output_attentions=True.", remedy="Set output_attentions=False."
        )
    for name, value in kwargs.items():
        # T5's cross-attention passes zeros; fake tensors have no values
        if name not in KNOWN_ARGUMENTS and isinstance(value, Tensor) and has_real_data(value) and value.any():
            raise ConfigError(
                f"Context parallelism does not support the tensor {name!r} that {type(module).__name__} passes to its "
                "attention function.",
                remedy="Set sequence=1 to disable context parallelism for this model.",
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
    """Create a mask for context parallelism: a ``ChunkedAttentionMask``, or torch's mask for an unsharded sequence."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    predicate = causal_mask_function if mask_function is None else mask_function
    state = get_context_parallel_state()
    if state is None or not state.is_open:
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, predicate, attention_mask, use_vmap=use_vmap, **kwargs
        )
    padding = None if attention_mask is None else attention_mask.bool()[:, :kv_length]
    if padding is not None and padding.shape[-1] < kv_length:
        padding = F.pad(padding, (0, kv_length - padding.shape[-1]))
    predicate = {bidirectional_mask_function: None, causal_mask_function: causal_mask_predicate}.get(
        predicate, predicate
    )
    queries, keys = state.get_sequence_layout(q_length), state.get_sequence_layout(kv_length)
    return ChunkedAttentionMask(
        predicate, padding, queries, keys, batch_size, use_vmap=use_vmap, dropout_seed=state.seed
    )


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


def wrap_object_in_tensor(python_object: Any) -> Tensor:
    """Wrap a Python object in a scalar tensor, so that it can pass through a compiled graph."""
    tensor = torch.zeros((), dtype=torch.int64, device="cpu")
    setattr(tensor, _HELD, python_object)
    return tensor


def unwrap_object_from_tensor(tensor: Tensor, expected_type: type) -> Any:
    """Return the object that ``wrap_object_in_tensor`` stored in a tensor. Raises InputError for other tensors."""
    value = getattr(tensor, _HELD, None)
    if not isinstance(value, expected_type):
        raise InputError(
            "With context parallelism, a compiled layer must pass its attention mask on unchanged, but its attention "
            f"module received another tensor, of shape {tuple(tensor.shape)}.",
            remedy="Set compile=False, or set sequence=1 to disable context parallelism.",
        )
    return value


def wrap_mask_in_tensor(attention_mask: Any) -> Any:
    """Wrap a ``ChunkedAttentionMask`` in a tensor that a compiled graph can pass on. Other values are unchanged."""
    return wrap_object_in_tensor(attention_mask) if isinstance(attention_mask, ChunkedAttentionMask) else attention_mask


def add_tensor_wrappers_to_attention(layer_module: nn.Module) -> None:
    """Store each attention module of a layer in a tensor, so that a compiled graph can pass it to an operator."""
    for module in layer_module.modules():
        if RUN in module.__dict__:
            module.__dict__[SITE] = wrap_object_in_tensor(module)


@dataclass(frozen=True)
class _SavedAttentionCall:
    plan: AttentionExchangePlan
    is_fully_masked: Tensor | None
    group_tensors: (
        tuple[Tensor, ...] | None
    )  # q, k, v, out, lse of the local heads in a Ulysses group, not in the graph


def _context_parallel_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    wrapped_module: Tensor,
    wrapped_mask: Tensor | None,
    ulysses_group_size: int,
    dropout: float,
    scale: float,
    softcap: float | None,
    is_causal: bool | None,
) -> tuple[Tensor, Tensor, Tensor]:
    module = unwrap_object_from_tensor(wrapped_module, nn.Module)
    chunked = None if wrapped_mask is None else unwrap_object_from_tensor(wrapped_mask, ChunkedAttentionMask)
    state, scores = getattr(module, RUN), AttentionScoreOptions(scale, softcap)
    plan = make_attention_plan(module, state, q, k, chunked, dropout, scores, is_causal)
    local_q, local_k, local_v = (
        _scatter_heads_if_sharded(x, exchange)
        for x, exchange in ((q, plan.query_exchange), (k, plan.key_exchange), (v, plan.key_exchange))
    )
    local_sinks = None if sinks is None else sinks[plan.local_query_heads.to(sinks.device)]
    out, lse, sees_nothing = ring_attention_forward(local_q, local_k, local_v, local_sinks, None, plan.exchange)
    if ulysses_group_size == 1:
        return out.contiguous(), lse.contiguous(), wrap_object_in_tensor(_SavedAttentionCall(plan, sees_nothing, None))
    call = _SavedAttentionCall(plan, sees_nothing, (local_q, local_k, local_v, out, lse))
    return (
        _gather_heads_if_sharded(out, plan.query_exchange).contiguous(),
        lse.new_empty(0),
        wrap_object_in_tensor(call),
    )


def _context_parallel_attention_fwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Any,
    wrapped_module: Tensor,
    wrapped_mask: Any,
    ulysses_group_size: int,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(
        q.shape[:3] if ulysses_group_size == 1 else (0,), dtype=torch.promote_types(q.dtype, torch.float32)
    )
    return q.new_empty(q.shape), lse, torch.empty_like(wrapped_module)


def _context_parallel_attention_bwd(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    wrapped_call: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made: _SavedAttentionCall = unwrap_object_from_tensor(wrapped_call, _SavedAttentionCall)
    plan, heads = made.plan, made.plan.local_query_heads.to(q.device)
    if made.group_tensors is not None:
        q, k, v, out, lse = made.group_tensors
    saved = (q, k, v, None if sinks is None else sinks[heads], None, out, lse)
    local = _scatter_heads_if_sharded(grad_output, plan.query_exchange)
    dq, dk, dv, local_sinks_grad, _ = ring_attention_backward(local, saved, made.is_fully_masked, plan.exchange)
    sinks_grad = q.new_empty(0)
    if sinks is not None and local_sinks_grad is not None:
        sinks_grad = torch.zeros_like(sinks).index_copy_(0, heads, local_sinks_grad)
    dq, dk, dv = (
        _gather_heads_if_sharded(dq, plan.query_exchange),
        _gather_heads_if_sharded(dk, plan.key_exchange),
        _gather_heads_if_sharded(dv, plan.key_exchange),
    )
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), sinks_grad


def _context_parallel_attention_bwd_fake(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks_grad = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), sinks_grad


def _scatter_heads_if_sharded(tensor: Tensor, exchange: UlyssesHeadExchange) -> Tensor:
    return tensor if exchange.axis.size == 1 else scatter_heads_without_autograd(tensor, exchange)


def _gather_heads_if_sharded(tensor: Tensor, exchange: UlyssesHeadExchange) -> Tensor:
    return tensor if exchange.axis.size == 1 else gather_heads_without_autograd(tensor, exchange)


def _setup_attention_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)


def _attention_autograd_backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, out, lse, call = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise ConfigError(
            "Compiled attention with context parallelism does not support backward(create_graph=True).",
            remedy="Remove create_graph=True, or compute the second derivatives on the unsharded model.",
        )
    *grads, sinks_grad = torch.ops.shardformer.context_attention_backward(grad_output, q, k, v, sinks, out, lse, call)
    return (*grads, None if sinks is None else sinks_grad, *(None,) * 7)


for _name, _run, _shape in (
    ("context_attention", _context_parallel_attention_fwd, _context_parallel_attention_fwd_fake),
    ("context_attention_backward", _context_parallel_attention_bwd, _context_parallel_attention_bwd_fake),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardformer::{_name}", _shape, lib=_LIBRARY)
torch.library.register_autograd(
    "shardformer::context_attention", _attention_autograd_backward, setup_context=_setup_attention_context, lib=_LIBRARY
)
