"""Flash attention in every family: the kernel runs, gradients are equal, scores are not materialized."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardformer.errors import ConfigError
from shardformer.kernels import attention as attention_kernels
from shardformer.kernels import model_specific_attention
from shardformer.kernels.attention_registration import (
    ATTENTION_NAME,
    _describe_attention_kernels,
    check_flash_attention_is_supported,
    use_flash_attention,
)
from shardformer.verify.small_models import compute_model_loss
from tests.families.option import CASTS, EXACT, FAMILIES, assert_same, batch_of, build, plain, sharded
from tests.ops import Ops

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OPTION = "enable_flash_attention"
# Families without fp32 computation: attention, norms and activations use the dtype of the weights.
IN_FP64 = ("bert", "roberta", "albert", "ernie", "whisper", "t5", "vit", "beit", "swin", "swinv2", "sam")
# Classes whose method is replaced, because they do not dispatch their attention.
OWN = {
    "bloom": "bloom_attention",
    "chatglm": "chatglm_attention",
    "gpt_neo": "gpt_neo_attention",
    "gptj": "gptj_attention",
    "sam": "sam_vision_attention",
    "swinv2": "swinv2_attention",
}
HELD_BY_THE_MODEL = {
    "sam": "the relative positions of the model still need as much memory as the attention scores",
    "swin": "the masks of its shifted windows still need as much memory as the attention scores",
}
TRAINED_BIAS = ("t5", "beit", "swin", "swinv2", "sam")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom of five heads": ("bloom", {"n_head": 5, "hidden_size": 50}),
    "falcon eager": ("falcon", {"attn_implementation": "eager"}),
    "falcon of one KV head": ("falcon", {"new_decoder_architecture": False, "num_kv_heads": None, "multi_query": True}),
    "falcon with ALiBi": ("falcon", {"alibi": True, "bias": True}),
    "gpt_neo all local": ("gpt_neo", {"attention_types": [[["local"], 2]]}),
    "gptj with all dims rotated": ("gptj", {"rotary_dim": 8}),
    "sam eager": ("sam", {"attn_implementation": "eager"}),
    "swin eager": ("swin", {"attn_implementation": "eager"}),
    "gpt2 with upcast attention": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
}


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[int, int, int]]]:
    """Return (heads, queries, keys) of the calls of torch's attention."""
    found: set[tuple[int, int, int]] = set()
    attention = F.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Tensor:
        found.add((query.shape[1], query.shape[2], key.shape[2]))
        return attention(query, key, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    yield found
    assert torch.backends.cuda.math_sdp_enabled(), "torch's switch, one for all threads, was left as it was"


@pytest.mark.slow
@pytest.mark.reduced(one_in=2)
@pytest.mark.feature("flash attention")
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_uses_the_kernel_and_equals_the_plain_model(family: str, scores: set[tuple[int, int, int]]) -> None:
    ours = sharded(family, OPTION)
    assert_same(ours, plain(family), EXACT if family in IN_FP64 else CASTS)
    assert "torch flash attention for the CPU" in ours.notes
    assert ("chunked backward for the position bias" in ours.notes) == (family in TRAINED_BIAS)
    computes_itself = family in OWN and any(model_specific_attention.iter_attention_overrides(build(family, {})))
    assert (OWN.get(family) in ours.replaced()) == computes_itself
    assert scores


@pytest.mark.parametrize("name", VARIANTS)
def test_other_settings_use_the_kernel(name: str, scores: set[tuple[int, int, int]]) -> None:
    family, changes = VARIANTS[name]
    assert_same(sharded(family, OPTION, **changes), plain(family, **changes), CASTS)
    assert scores


@pytest.mark.feature("memory-efficient attention")
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_scores_are_not_materialized(
    family: str,
    scores: set[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    monkeypatch.setattr(
        attention_kernels, "SCORES_AT_ONCE", 0
    )  # otherwise these small scores would be computed at once
    model, held = build(family, {}), []
    use_flash_attention(model, CPU)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.shape) or t, lambda t: t), Ops() as ops:
        compute_model_loss(model, batch_of(family, batch_size=3, sequence_length=11))
    assert "_scaled_dot_product_flash_attention_for_cpu" in ops.names
    assert not {"_softmax", "_safe_softmax"} & ops.names
    of_batch = [tuple(s) for s in held if len(s) == 4 and s[0] > 1 and tuple(s[1:]) in scores]
    assert bool(of_batch) == (family in HELD_BY_THE_MODEL)
    if family in HELD_BY_THE_MODEL:
        record_property("feature", f"part: {HELD_BY_THE_MODEL[family]}")
    assert "memory-efficient" in _describe_attention_kernels(model, CUDA) or family == "falcon"


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("bloom", {"attention_dropout": 0.1}, r"with attention_dropout=0\.0"),
        ("gpt_neo", {"attention_dropout": 0.1}, r"with attention_dropout=0\.0"),
        ("gptj", {"attn_pdrop": 0.1}, r"with attn_pdrop=0\.0"),
        ("swinv2", {"attention_probs_dropout_prob": 0.1}, r"with attention_probs_dropout_prob=0\.0"),
        ("falcon", {"attention_dropout": 0.1, "alibi": True}, r"with attention_dropout=0\.0"),
        ("falcon", {"alibi": True, "attn_implementation": "eager"}, "alibi=True with the eager attention"),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact=True"),
    ],
)
def test_unsupported_kernel_options_are_refused(family: str, changes: dict[str, Any], words: str) -> None:
    model = build(family, changes)
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match=words):
        use_flash_attention(model, CPU)
    assert model.config._attn_implementation == before


def test_missing_attention_dropout_is_accepted() -> None:
    check_flash_attention_is_supported(build("falcon", {"attention_dropout": 0.1}), CPU)


def test_changed_attention_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for method, takes in (("forward", r"\['hidden_states'"), ("_attn", r"\[\]")):
        other = model_specific_attention.AttentionOverride(
            method, model_specific_attention.gptj_attention, "attention_dropout"
        )
        monkeypatch.setitem(model_specific_attention.OVERRIDES, "BloomAttention", other)
        with pytest.raises(ConfigError, match=rf"BloomAttention\.{method} has the arguments {takes}"):
            use_flash_attention(build("bloom", {}), CPU)


def test_class_that_dispatches_attention_keeps_its_methods(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPT-J dispatches its attention from transformers 5.24 on."""
    own = model_specific_attention.AttentionOverride("_attn", model_specific_attention.gptj_attention, "attn_dropout")
    monkeypatch.setitem(model_specific_attention.OVERRIDES, "LlamaAttention", own)
    model = build("llama", {})
    use_flash_attention(model, CPU)
    assert [path for path, _, _ in model_specific_attention.iter_attention_overrides(model)] == []
    assert model.config._attn_implementation == ATTENTION_NAME


def test_attention_weights_are_refused_with_the_kernel() -> None:
    model = build("gpt_neo", {})
    use_flash_attention(model, CPU)
    assert use_flash_attention(model, CPU)  # a second call installs no second hook
    assert all(len(m._forward_pre_hooks) <= 1 for m in model.modules())
    with pytest.raises(ConfigError, match="does not support the argument output_attentions"):
        model(**batch_of("gpt_neo"), output_attentions=True)
