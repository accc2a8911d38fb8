"""Distribution of heads: each KV head is on the ranks of its query heads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shardformer.discovery.reduced_model import ReferenceGradients
from shardformer.discovery.validation import validate_policy
from shardformer.errors import ConfigError
from shardformer.layout.shard_spec import AttentionHeadLayout
from shardformer.policies.families import LlamaPolicy
from shardformer.verify.small_models import SmallModelFactory

LAYOUTS = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(1, 8))


@given(LAYOUTS)
def test_each_query_head_is_on_one_rank_with_its_kv_head(sizes: tuple[int, int, int, int]) -> None:
    num_kv_heads, group, head_dim, ranks = sizes
    assume(num_kv_heads * group >= ranks)
    layout = AttentionHeadLayout(num_kv_heads * group, num_kv_heads, head_dim, ranks)

    assert (
        layout.get_query_split().stores_each_index_once
        and layout.get_query_split().full == num_kv_heads * group * head_dim
    )
    assert set(layout.get_kv_split().multiplicity) >= {1} or num_kv_heads < ranks
    assert layout.get_kv_split().full == num_kv_heads * head_dim
    for rank in range(ranks):
        heads = layout.get_query_split().get_local_length(rank) // head_dim
        assert heads == layout.get_num_query_heads(rank) == layout.get_query_split(1).get_local_length(rank) >= 1
        # The forward pass repeats each KV head for the same number of query heads, in order.
        held, expand = layout.get_stored_kv_heads(rank), layout.get_local_kv_head_per_query(rank)
        seen = held if expand is None else [held[i] for i in expand]
        values = layout.get_local_head_and_feature_counts(rank)
        assert len(seen) == layout.get_num_used_kv_heads(rank) == values["kv_heads"]
        first = sum(layout.get_num_query_heads(r) for r in range(rank))
        assert [seen[h // values["groups"]] for h in range(heads)] == [(first + h) // group for h in range(heads)]
        assert values["width"] == heads * head_dim and values["heads"] == heads


def test_example_of_the_docstring() -> None:
    layout = AttentionHeadLayout(6, 2, head_dim=8, num_ranks=4)
    assert [layout.get_stored_kv_heads(rank) for rank in range(4)] == [[0], [0, 1], [1], [1]]
    assert [layout.get_num_query_heads(rank) for rank in range(4)] == [2, 2, 1, 1]
    assert layout.get_local_kv_head_per_query(1) is None  # 0 1 for heads 2 and 3: one each
    assert layout.get_kv_split().multiplicity == (2,) * 8 + (3,) * 8


def test_kv_groups_are_not_split_if_there_are_enough() -> None:
    layout = AttentionHeadLayout(12, 4, head_dim=2, num_ranks=3)
    assert [layout.get_stored_kv_heads(rank) for rank in range(3)] == [[0, 1], [2], [3]]
    assert layout.get_kv_split().stores_each_index_once


def test_each_partition_is_split_the_same_way() -> None:
    layout = AttentionHeadLayout(
        12, 6, head_dim=2, num_ranks=2, partitions=2
    )  # 0 to 5 and 6 to 11, on KV 0 1 2 and 3 4 5
    assert layout.get_query_split(1).parts == (((0, 4), (6, 10)), ((4, 6), (10, 12)))
    assert layout.get_kv_split(1).parts == (((0, 2), (3, 5)), ((2, 3), (5, 6)))
    assert layout.get_local_head_and_feature_counts(0) == {"heads": 8, "kv_heads": 4, "groups": 2, "width": 16}
    assert AttentionHeadLayout(12, 4, 2, num_ranks=4, partitions=2).get_local_kv_head_per_query(1) is None
    shared = AttentionHeadLayout(
        20, 4, 2, num_ranks=3, partitions=2
    )  # per partition: ten heads on two KV heads, split into 4, 3 and 3
    assert shared.get_local_kv_head_per_query(1) == [0, 1, 1, 2, 3, 3]


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_llama_with_shared_kv_heads_equals_one_process(ranks: int, kernel: str) -> None:
    """Six query heads on two KV heads. The eager kernel repeats KV heads by num_key_value_groups."""
    torch.manual_seed(0)
    changes = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "attn_implementation": kernel}
    model = SmallModelFactory("llama", changes=changes)().double()
    ids = torch.arange(3, 17).view(2, 7)
    reference = ReferenceGradients.from_model(model, lambda model: model(input_ids=ids, use_cache=False).logits)
    assert validate_policy(reference, LlamaPolicy, ranks) is None


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((6, 6, 8, 2, 4), ("num_kv_heads=6 in 4 partitions",)),
        (
            (8, 8, 8, 3, 4),
            ("tensor size of 3 exceeds the 2 attention heads of each partition", "tensor size of at most 2"),
        ),
        ((6, 4, 8, 2), ("num_heads=6", "num_kv_heads=4")),
        ((3, 3, 8, 4), ("tensor size of 4 exceeds the 3", "tensor size of at most 3")),
        ((1, 1, 8, 2), ("tensor size of 2", "tensor size of at most 1")),
    ],
)
def test_invalid_head_counts_are_refused(sizes: tuple[int, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        AttentionHeadLayout(*sizes)
    assert all(word in str(caught.value) for word in words)
