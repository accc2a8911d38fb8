"""Choose the context parallel method: ring attention, Ulysses, both combined, or all-gathered keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from shardformer.errors import ConfigError
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.transformers_compat import get_uniform_config_field

RING, GROUP = "ring", "ulysses"
"""Names of the two axes into which the sequence axis is split."""


@dataclass(frozen=True)
class ContextParallelSizes:
    """Ring size and Ulysses group size of the sequence axis.

    Args:
        ring: number of ranks that exchange keys and values.
        group: number of ranks in a Ulysses group, which exchange attention heads for sequence positions.
        all_gather_kv: whether keys and values are all-gathered instead of sent around the ring.
    """

    ring: int
    group: int
    all_gather_kv: bool = False

    def __str__(self) -> str:
        if self.all_gather_kv:
            return f"keys gathered over {self.ring} ranks"
        parts = [f"ring of {self.ring}"] if self.ring > 1 else []
        parts += [f"Ulysses over {self.group}"] if self.group > 1 else []
        return " x ".join(parts)


def is_context_parallel_method_set(context: ParallelContext, method: str) -> bool:
    """Return whether the user chose the context parallel method, instead of ``"auto"``."""
    return method != "auto" or (RING in context.sizes and GROUP in context.sizes)


def choose_context_parallel_sizes(model: nn.Module, context: ParallelContext, method: str) -> ContextParallelSizes:
    """Choose the ring size and the Ulysses group size of the sequence axis.

    ``"auto"`` minimizes the communicated bytes, by the formulas of ring attention and Ulysses, with Ulysses groups
    within a host. Raises ConfigError if the method does not fit the sizes of the sequence axis.
    """
    size, view = context.sequence.size, context.sizes
    if RING in view and GROUP in view:
        sizes = ContextParallelSizes(view[RING], view[GROUP], method == "gather")
        if (method == "ring" and sizes.group > 1) or (method in ("ulysses", "gather") and sizes.ring > 1 < sizes.group):
            raise ConfigError(
                f"context_parallel={method!r} requires a single number as the sequence size, but got a pair of a ring "
                f"size and a Ulysses group size, sequence=({sizes.ring}, {sizes.group}).",
                remedy=f"Set sequence={size}, or use context_parallel='auto'.",
            )
        return sizes
    if method == "ulysses":
        return ContextParallelSizes(1, size)
    if method in ("ring", "gather"):
        return ContextParallelSizes(size, 1, method == "gather")
    return min(_iter_candidate_sizes_with_costs(model, context), key=lambda found: found[0])[1]


def _iter_candidate_sizes_with_costs(
    model: nn.Module, context: ParallelContext
) -> Iterator[tuple[float, ContextParallelSizes]]:
    size, queries, keys = context.sequence.size, *_get_num_query_and_kv_heads(model)
    queries, keys = max(queries // context.tensor.size, 1), max(keys // context.tensor.size, 1)
    for group in range(1, size + 1):
        if size % group or group > queries or (group > 1 and not _is_ulysses_group_within_host(context, group)):
            continue
        ring = size // group
        local_keys = max(keys / group, 1)
        sent = 4.5 * local_keys * (ring - 1) / ring
        sent += 4 * (queries + max(keys, group)) / ring * (group - 1) / group**2
        yield sent, ContextParallelSizes(ring, group)


def _get_num_query_and_kv_heads(model: nn.Module) -> tuple[int, int]:
    """Read the numbers of query and KV heads from the config. Returns (1, 1) if they differ between layers."""
    config = getattr(model, "config", None)
    inner = getattr(config, "get_text_config", lambda: config)()
    for name in ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads"):
        if isinstance(queries := get_uniform_config_field(inner, name), int):
            keys = get_uniform_config_field(inner, "num_key_value_heads")
            return queries, keys if isinstance(keys, int) else queries
    return 1, 1


def _is_ulysses_group_within_host(context: ParallelContext, ulysses_group_size: int) -> bool:
    """Return whether no Ulysses group of this size spans several hosts, as far as the hosts are known.

    A Ulysses group consists of consecutive ranks of the sequence axis.
    """
    lines = context.grid.get_rank_groups("sequence")
    return not any(
        context.grid.crosses_hosts(line[i : i + ulysses_group_size])
        for line in lines
        for i in range(0, len(line), ulysses_group_size)
    )
