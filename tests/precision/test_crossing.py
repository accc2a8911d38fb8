"""16 bits over every layout, family and entry point: as close to fp64 as the plain model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from shardformer.discovery.reduced_model import disable_dropout
from shardformer.verify.small_models import DEFAULT_HEAD, SMALL_CONFIGS, RandomBatchFactory, SmallModelFactory
from tests.precision.crossing import Entry, Reference, assert_as_exact
from tests.verify.deep import deep

LAYOUTS: Mapping[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "uneven tensor": {"tensor": 3},
    "sequence parallel": {"tensor": 2, "sequence_parallel": True},
    "overlap": {"tensor": 2, "sequence_parallel": True, "sequence_overlap": True},
    "ring": {"sequence": 2, "context_parallel": "ring"},
    "ulysses": {"sequence": 2, "context_parallel": "ulysses"},
    "2d": {"tensor": (2, 2), "tensor_parallel_mode": "2d"},
    "2.5d": {"tensor": (2, 2, 2), "tensor_parallel_mode": "2.5d"},
    "3d": {"tensor": (2, 2, 2), "tensor_parallel_mode": "3d"},
    "data": {"data": 2},
    "gpipe": {"pipe": 2, "schedule": "gpipe"},
    "1f1b": {"pipe": 2, "schedule": "1f1b"},
    "interleaved": {"pipe": 2, "schedule": "interleaved"},
    "zbv": {"pipe": 2, "schedule": "zbv"},
    "interleaved_zb": {"pipe": 2, "schedule": "interleaved_zb"},
    "pipe, data and tensor": {"pipe": 2, "data": 2, "tensor": 2},
    "kernels": {"tensor": 2, "flash_attention": True, "fused_normalization": True, "fused_activation": True},
}
ENTRIES: Mapping[str, Entry] = {
    "zero 1 bf16": Entry("zero", "bf16", {"zero_stage": 1}),
    "autocast bf16": Entry("autocast", "bf16"),
    "converted bf16": Entry("converted", "bf16"),
    "zero 3 fp16": Entry("zero", "fp16", {"zero_stage": 3}),
    "converted later bf16": Entry("converted later", "bf16"),
    "engine bf16": Entry("engine", "bf16"),
    "zero 2 bf16, offload": Entry("zero", "bf16", {"zero_stage": 2, "offload": "cpu"}),
    "autocast fp16, checkpointing": Entry("autocast", "fp16", checkpointing=True),
    "engine 3 bf16, checkpointing": Entry("engine", "bf16", {"zero_stage": 3}, checkpointing=True),
    "converted fp16": Entry("converted", "fp16"),
    "zero 0 fp16, checkpointing": Entry("zero", "fp16", {"zero_stage": 0}, checkpointing=True),
    "engine 1 fp16, offload": Entry("engine", "fp16", {"zero_stage": 1, "offload": "cpu"}),
    "converted later fp16": Entry("converted later", "fp16"),
    "autocast bf16, zero 3": Entry("autocast", "bf16", {"zero_stage": 3}),
    "engine bf16, activations on the host": Entry("engine", "bf16", {"activation_offload": "host"}),
}
# ReLU is replaced, because rounding can change which units are active.
CHANGES: Mapping[str, dict[str, Any]] = {
    "t5": {"feed_forward_proj": "gated-gelu"},
    "opt": {"activation_function": "gelu"},
    "blip-2": {"text_config": {"activation_function": "gelu"}},
    "sam": {"mask_decoder_config": {"hidden_act": "gelu"}},
}


@cache
def reference(family: str, *, is_deep: bool) -> Reference:
    sample = deep(family) if is_deep else SmallModelFactory(family)
    torch.manual_seed(0)
    changes = dict(sample.changes)
    for name, value in CHANGES.get(family, {}).items():
        inside = changes.get(name, SMALL_CONFIGS[family].get(name, {}))
        changes[name] = {**inside, **value} if isinstance(value, dict) else value
    model = SmallModelFactory(family, changes=changes)().float().train()
    disable_dropout(model)
    head = DEFAULT_HEAD[family]
    return Reference(model, RandomBatchFactory(head)(0), head)


# Each family and each entry point is combined with each layout. Swin V2 is omitted: its position bias uses ReLU.
CASES = [
    (family, layout, list(ENTRIES)[(4 * i + j) % len(ENTRIES)])
    for i, family in enumerate(name for name in SMALL_CONFIGS if name != "swinv2")
    for j, layout in enumerate(LAYOUTS)
]


CASES.append(("blip-2", "ulysses", "zero 0 fp16, checkpointing"))  # several stacks: one stays whole


@pytest.mark.reduced(family=("llama", "bert", "t5", "whisper"), at_most=6)
@pytest.mark.parametrize(("family", "layout", "entry"), CASES)
def test_step_is_as_exact_as_the_plain_model(family: str, layout: str, entry: str) -> None:
    made = reference(family, is_deep="pipe" in LAYOUTS[layout])
    if family == "swin" and layout == "2.5d" and ENTRIES[entry].checkpointing:
        # the recomputed layer gets its input in another dtype: torch raises an error
        with pytest.raises(RuntimeError):
            made.sharded(ENTRIES[entry], LAYOUTS[layout])
    else:
        assert_as_exact(made, ENTRIES[entry], LAYOUTS[layout])


SIZES: dict[str, Any] = dict(
    vocab_size=127, hidden_size=48, intermediate_size=72, num_hidden_layers=4, num_attention_heads=6,
    num_key_value_heads=2, pad_token_id=0, use_cache=False,
)  # fmt: skip


@cache
def derived(family: str) -> Reference:
    """Soft caps and windows, and a router that selects all experts, so that rounding cannot change the selection."""
    torch.manual_seed(0)
    if family == "gemma2":
        more = dict(head_dim=8, sliding_window=5, query_pre_attn_scalar=8)
        model: Any = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, **more))
    else:
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=4)
        model = transformers.MixtralForCausalLM(config)
    return Reference(model.train(), RandomBatchFactory("LlamaForCausalLM")(0), "LlamaForCausalLM")


@pytest.mark.slow
@pytest.mark.reduced(family=("gemma2", "mixtral"), layout=("1f1b",), at_most=1)
@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
@pytest.mark.parametrize(
    ("layout", "entry"),
    [
        ("1f1b", "engine bf16"),
        ("zbv", "autocast bf16"),
        ("uneven tensor", "zero 3 fp16"),
        ("sequence parallel", "converted later bf16"),
        ("ring", "zero 1 bf16"),
    ],
)
def test_model_with_a_derived_policy(family: str, layout: str, entry: str) -> None:
    assert_as_exact(derived(family), ENTRIES[entry], LAYOUTS[layout])
