"""The attention function, and the mask function, that are registered with transformers for a sequence that is cut.

A model on transformers' interface stays as it is: it asks for a mask and is given a ``ChunkedMask``, and calls this
attention
with it. Of a forward that is not cut, as in decoding with a cache, both are torch's own.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.context_parallel.attention_kernels import Dropout, ScoreOptions
from shardformer.context_parallel.masks import ChunkedMask, causal, unknown_attribute
from shardformer.context_parallel.ring_attention import RingExchange, ring_attention
from shardformer.context_parallel.sequence_layout import ContextParallelState, SequencePositions, current_state
from shardformer.context_parallel.ulysses import HeadExchange, key_heads, query_heads, to_heads, to_positions
from shardformer.errors import ConfigError, InputError
from shardformer.kernels.attention_registration import register_attention
from shardformer.torch_compat import current_graph_task_id, has_data

# B batch, N query heads, K key heads, s positions of this rank, D head dim

NAME = "shardformer_context"
RUN = "_shardformer_context"
"""Attribute of an attention module: the run of its model."""
KNOWN = {
    "softcap", "s_aux", "sinks", "sliding_window", "is_causal", "use_cache", "position_ids", "cache_position",
    "output_attentions", "output_hidden_states", "return_dict", "num_items_in_batch", "position_embeddings",
    "attention_mask", "deterministic", "target_dtype",
}  # fmt: skip
"""Arguments of an attention function that change nothing here, or that it knows."""


def context_attention(
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
    """Attention as transformers calls it: query (B, N, s, D), key and value (B, K, s, D) -> (B, s, N, D), None.

    Communicates what ``ring_attention`` and ``to_heads`` say. Raises ConfigError, or InputError, for what cannot be
    done with a part of the sequence.
    """
    run: ContextParallelState | None = module.__dict__.get(RUN)
    lies = None if run is None else _query_layout(run, query, attention_mask)
    if run is None or lies is None:
        if isinstance(attention_mask, ChunkedMask):  # of a stack whose sequence stays whole
            attention_mask = attention_mask.whole(query.device)
        return _full_sequence_attention(module, query, key, value, attention_mask, dropout, scaling, is_causal, kwargs)
    _check(module, attention_mask, kwargs)
    mask = attention_mask
    if mask is None:
        mask = _without_mask(module, query, key, run, lies, is_causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = kwargs.get("s_aux", kwargs.get("sinks"))
    width = value.shape[-1]
    query, key, value = _same_width(query, key, value)
    ulysses = _Heads(run, query.shape[1], key.shape[1], mask)
    drop = None
    if dropout > 0:
        drop = Dropout(dropout, mask.seed + run.number(module), ulysses.own_queries())
    travel = RingExchange(run.ring, mask, ScoreOptions(scale, kwargs.get("softcap"), drop), run.gathers)
    q, k, v = ulysses.enter(query, key, value)
    own = ulysses.own_queries().to(query.device)
    bias = kwargs.get("position_bias")
    line = bias.line[own] if isinstance(bias, RelativeBiasArgument) else None
    out = ring_attention(q, k, v, travel, None if sinks is None else sinks[own], line)
    return ulysses.leave(out)[..., :width].transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class RelativeBiasArgument:
    """What stands where a model hands a bias of all pairs of positions to its layers: see ``kernels.Bias``."""

    line: Tensor

    def __getattr__(self, name: str) -> Any:
        raise unknown_attribute(name, "the bias of its attention", "no tensor of all pairs of positions: a bias")


def pass_relative_bias(module: nn.Module, run: ContextParallelState) -> None:
    """A module that makes a bias of relative positions (``compute_bias``, as T5's) makes the line of it instead."""
    whole = getattr(type(module), "compute_bias", None)
    if whole is not None and "past_seen_tokens" in inspect.signature(whole).parameters:
        module.__dict__[RUN] = run
        module.__dict__["compute_bias"] = MethodType(_line_bias, module)


def _line_bias(self: nn.Module, query_length: int, key_length: int, *args: Any, **kwargs: Any) -> Any:
    run: ContextParallelState = self.__dict__[RUN]
    whole: Any = getattr(type(self), "compute_bias")  # noqa: B009  # which nn.Module has not
    again = current_graph_task_id() >= 0
    lies = run.of_part(query_length) if again else run.now
    if lies is None:
        return whole(self, query_length, key_length, *args, **kwargs)
    # of one query, behind which and before which there are as many keys as the sequence has
    device = {"device": kwargs["device"]} if "device" in kwargs else {}
    line = whole(self, 1, 2 * lies.length - 1, past_seen_tokens=lies.length - 1, **device)
    return RelativeBiasArgument(line[0, :, 0])


class _Heads:
    """The exchange of heads of one attention."""

    def __init__(self, run: ContextParallelState, queries: int, keys: int, mask: ChunkedMask) -> None:
        axis, ring_rank = run.group, run.ring.rank
        if queries < axis.size:
            raise ConfigError(
                f"{queries} query heads on this rank, and {axis.size} ranks that exchange heads for positions",
                rule="Ulysses gives each rank of its group one head at the least",
                remedy=f"Take context_parallel='ring', or sequence=({run.axis.size // queries}, {queries})",
            )
        q_heads = query_heads(queries, axis.size)
        k_heads = key_heads(q_heads, queries, keys)
        of_queries, of_keys = (tuple(p.position_ranges(ring_rank)) for p in (mask.queries, mask.keys))
        self._queries = HeadExchange(axis, q_heads, of_queries, queries)
        self._keys = HeadExchange(axis, k_heads, of_keys, keys)

    def own_queries(self) -> Tensor:
        """Numbers of the query heads that this rank computes with."""
        return torch.tensor(self._queries.heads[self._queries.axis.rank])

    def enter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return to_heads(query, self._queries), to_heads(key, self._keys), to_heads(value, self._keys)

    def leave(self, out: Tensor) -> Tensor:
        return to_positions(out, self._queries)


def _query_layout(run: ContextParallelState, query: Tensor, mask: Any) -> SequencePositions | None:
    """How the sequence of the queries lies over the ranks; None where they are whole."""
    count = query.shape[2]
    if isinstance(mask, ChunkedMask):
        return mask.queries if count == run.part(mask.queries.length) else None
    if current_graph_task_id() < 0:
        return run.now
    return run.of_part(count)  # computed again, perhaps behind another forward


def _without_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    run: ContextParallelState,
    lies: SequencePositions,
    is_causal: bool | None,
) -> ChunkedMask:
    keys = run.of_part(key.shape[2])
    if keys is None:
        raise ConfigError(
            f"{type(module).__name__} attends to {key.shape[2]} positions on rank {run.axis.rank} of {run.axis.size}, "
            "which it has of no sequence",
            rule="Where the sequence is cut over ranks, each has its part of queries and keys",
            remedy="Leave the sequence axis out for this model",
        )
    sees_before = getattr(module, "is_causal", True) if is_causal is None else is_causal
    predicate = causal if sees_before and lies.length > 1 else None
    return ChunkedMask(predicate, None, lies, keys, query.shape[0], seed=run.seed)


def _same_width(*tensors: Tensor) -> list[Tensor]:
    """Zeros beyond change neither the scores nor the rest of the output."""
    width = max(t.shape[-1] for t in tensors)
    return [t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in tensors]


def _check(module: nn.Module, mask: Any, kwargs: dict[str, Any]) -> None:
    if isinstance(mask, Tensor):
        raise InputError(
            f"{type(module).__name__} was given a mask of shape {tuple(mask.shape)}",
            rule="With a sequence that is cut over ranks a mask is (batch, sequence), of the keys that there are: "
            "which positions see which is asked of the model's own mask function",
            remedy="Give attention_mask (batch, sequence), or position_ids that start again with each document",
        )
    if kwargs.get("output_attentions"):
        raise ConfigError(
            "output_attentions=True with a sequence that is cut over ranks",
            rule="No rank has the weights of all positions",
            remedy="Leave output_attentions off",
        )
    for name, given in kwargs.items():
        if name not in KNOWN and isinstance(given, Tensor) and _adds(given):
            raise ConfigError(
                f"{type(module).__name__} calls its attention with {name}",
                rule="With a sequence that is cut over ranks scores are products of queries and keys: a term that is "
                "added to those of all positions has no rank",
                remedy="Leave the sequence axis out for this model",
            )


def _adds(x: Tensor) -> bool:
    """Whether a term changes scores: T5's cross-attention adds zeros. In a trace it does not."""
    return has_data(x) and bool(x.any())


def _full_sequence_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
    )
    return found


def context_mask(
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
    """The mask function: the model's predicate itself, and what padding there is; torch's mask where nothing is cut."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    predicate = causal_mask_function if mask_function is None else mask_function
    run = current_state()
    if run is None or not run.is_open:
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, predicate, attention_mask, use_vmap=use_vmap, **kwargs
        )
    padding = None if attention_mask is None else _fitted(attention_mask, kv_length)
    predicate = {bidirectional_mask_function: None, causal_mask_function: causal}.get(predicate, predicate)
    queries, keys = run.positions(q_length), run.positions(kv_length)
    return ChunkedMask(predicate, padding, queries, keys, batch_size, by_vmap=use_vmap, seed=run.seed)


def _fitted(padding: Tensor, length: int) -> Tensor:
    padding = padding.bool()
    return F.pad(padding, (0, length - padding.shape[-1])) if padding.shape[-1] < length else padding[:, :length]


def register_context_attention() -> None:
    """Registers both functions. Idempotent."""
    register_attention(NAME, context_attention, context_mask)
