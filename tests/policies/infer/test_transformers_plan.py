"""The tensor parallel plan of transformers is the first draft of a policy and is always validated."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from shardformer.discovery import derive_policy as deriving
from shardformer.discovery.candidate_roles import find_role_matching_plan, merge_transformers_tp_plans
from shardformer.discovery.derive_policy import derive_policy
from shardformer.policies.roles import MLP, Attention, AttentionProjections, Experts

FEW = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
PLAN = {"l.*.m.up": "colwise", "l.*.m.gate": "colwise", "l.*.m.down": "rowwise"}


def qwen(plan: dict[str, str] | None = None) -> Any:
    config = transformers.Qwen2Config(**FEW, num_key_value_heads=2)
    if plan is not None:
        config.base_model_tp_plan = plan
    return transformers.Qwen2ForCausalLM(config)


def count_validations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    validate = deriving.validate_policy
    monkeypatch.setattr(
        deriving, "validate_policy", lambda *args, **options: sizes.append(args[2]) or validate(*args, **options)
    )
    return sizes


def test_the_plan_has_paths_in_the_full_model() -> None:
    plan = merge_transformers_tp_plans(qwen())
    assert plan["model.layers.*.mlp.down_proj"] == "rowwise"
    assert len(plan) == len(transformers.Qwen2Config.base_model_tp_plan)


@pytest.mark.slow
def test_a_draft_is_validated_once_and_equals_the_searched_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = count_validations(monkeypatch)
    drafted, with_plan = str(derive_policy(qwen())), len(sizes)
    assert str(derive_policy(qwen({}))) == drafted
    assert 2 <= with_plan < len(sizes) - with_plan


@pytest.mark.reduced(one_in=2)
@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["self_attn", "mlp"])
def test_entries_missing_from_a_plan_are_derived(left_out: str) -> None:
    plan = {name: style for name, style in transformers.Qwen2Config.base_model_tp_plan.items() if left_out not in name}
    assert str(derive_policy(qwen(plan))) == str(derive_policy(qwen({})))


@pytest.mark.slow
def test_a_wrong_draft_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = str(derive_policy(qwen({})))
    wrong = Attention("self_attn", AttentionProjections(q="k_proj", k="q_proj", v="v_proj", out="o_proj"))
    drafted: list[str] = []

    def draft(plan: dict[str, str], layers: str, roles: Any) -> Any:
        drafted.extend([layers] if plan else [])
        return wrong if plan and isinstance(roles[0], Attention) else None

    monkeypatch.setattr(deriving, "find_role_matching_plan", draft)
    assert str(derive_policy(qwen())) == expected
    assert drafted


def test_a_plan_selects_the_role_that_shards_the_same_weights() -> None:
    mlp, other = MLP("m", up=["gate?", "up"], down="down"), MLP("m", up=["gate", "down"], down="up")
    assert find_role_matching_plan(PLAN, "l", [other, mlp]) == mlp
    assert find_role_matching_plan({**PLAN, "l.*.m.up": "replicate"}, "l", [other, mlp]) is None
    assert find_role_matching_plan(PLAN, "other", [mlp]) is None


@pytest.mark.parametrize(("style", "fused"), [("colwise", 1), ("packed_colwise", 2)])
def test_stacked_experts_are_packed_as_the_plan_describes(style: str, fused: int) -> None:
    plan = {"l.*.e.up": style, "l.*.e.down": "rowwise"}
    roles = [Experts("e", up=["up", "up_bias"], down="down", fused=n) for n in (1, 2)]
    assert find_role_matching_plan(plan, "l", roles) == roles[fused - 1]
    transposed = {"l.*.e.up": "packed_rowwise", "l.*.e.down": "colwise"}
    assert find_role_matching_plan(transposed, "l", roles) == roles[1]


def test_fused_heads_are_searched() -> None:
    plan = {"l.*.a.qkv": "colwise_gather_output", "l.*.a.out": "rowwise_split_input"}
    assert find_role_matching_plan(plan, "l", [Attention("a", AttentionProjections(qkv="qkv", out="out"))]) is None
