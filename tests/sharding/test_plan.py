"""Every rule of a policy matches a module, and every large weight is covered by a rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import nn

from shardformer.errors import ConfigError, PolicyError, ShardFormerError
from shardformer.mesh.parallel_context import Axis
from shardformer.pipeline.layer_sequence import LayerStackDescription
from shardformer.policies import legacy
from shardformer.policies.legacy import Argument, Col_Layer, Layer, Row_Layer
from shardformer.policies.module_descriptions import (
    BlockDescription,
    ModulePolicyDescription,
    SubModuleReplacementDescription,
)
from shardformer.policies.policy import Policy
from shardformer.policies.roles import MLP, Attention, AttentionProjections, LayerStack
from shardformer.sharding.plan import ShardingPlan, make_sharding_plan
from shardformer.tensor_parallel.layers import (
    Linear1D_Col,
    Linear1D_Row,
    VocabParallelEmbedding1D,
    VocabParallelLMHead1D,
)
from tests.policies.toy import Layer as ToyLayer
from tests.policies.toy import SelfAttention, ToyLM, ToyPolicy


class Written(Policy):
    """A policy with the descriptions that a test passes."""

    def __init__(self, said: Any, stacks: list[LayerStackDescription] | None = None) -> None:
        super().__init__()
        self._said, self._stacks = said, stacks or []

    def module_policy(self) -> Any:
        return self._said

    def stacks(self) -> list[LayerStackDescription]:
        return self._stacks


def plan_of(policy: Policy, model: nn.Module | None = None, size: int = 2) -> ShardingPlan:
    """Return the plan for one of ``size`` ranks, without communication."""
    policy.set_model(model or ToyLM())
    policy.axis = Axis("tensor", size)
    plan = make_sharding_plan(policy.model, policy)
    legacy.check_legacy_policy(policy, policy.model)
    return plan


def refused(policy: Policy, *words: str, model: nn.Module | None = None, size: int = 2) -> ShardFormerError:
    with pytest.raises((PolicyError, ConfigError)) as caught:
        plan_of(policy, model, size)
    error = caught.value
    assert error.what and error.remedy
    for word in words:
        assert word in str(error), error
    return error


def cut(*suffixes: str, target: Any = Linear1D_Col, **kwargs: Any) -> ModulePolicyDescription:
    return ModulePolicyDescription(
        sub_module_replacement=[SubModuleReplacementDescription(suffix, target, **kwargs) for suffix in suffixes]
    )


# ------------------------------------------------------------------------------------------------ rules without a match


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        (nn.GRU, "Known names: "),
        ("SelfAttentoin", "'SelfAttention'"),
        ("layer.*.attn", "'layers.0.attn'"),
        ("layers.7", "'layers.1'"),
        ("layers.*.*.*.q", ""),
    ],
)
def test_rule_without_a_matching_module_is_refused(key: Any, hint: str) -> None:
    name = key if isinstance(key, str) else key.__name__
    refused(Written({key: ModulePolicyDescription()}), f"rule for {name!r} matches no module of ToyLM", hint)


@pytest.mark.parametrize("key", ["SelfAttention", SelfAttention, "layers.*.attn", "tests.policies.toy.SelfAttention"])
def test_rule_matches_by_name_class_and_path(key: Any) -> None:
    plan = plan_of(Written({key: cut("q")}))
    assert list(plan.replacements) == ["layers.0.attn.q", "layers.1.attn.q"]


def test_class_does_not_match_its_subclasses() -> None:
    refused(Written({nn.Module: ModulePolicyDescription()}), "'Module' matches no module")


def test_missing_submodule_is_refused() -> None:
    refused(Written({"Layer": cut("attn.qq")}), "'layers.0.attn.qq'", "'attn.q'", "ignore_if_not_exist=True")
    refused(Written({"": cut("haed")}), "no module 'haed'", "'head'")


def test_optional_submodule_may_be_missing() -> None:
    plan = plan_of(Written({"Layer": cut("attn.qq", "attn.q", ignore_if_not_exist=True)}))
    assert list(plan.replacements) == ["layers.0.attn.q", "layers.1.attn.q"]


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("attn.num_haeds", ("attribute 'num_haeds' of layers.0.attn, which does not", "'num_heads'")),
        ("atn.num_heads", ("attribute 'num_heads' of layers.0.atn, which does not", "'attn'")),
    ],
)
def test_missing_attribute_is_refused(attribute: str, words: tuple[str, ...]) -> None:
    refused(Written({"Layer": ModulePolicyDescription(attribute_replacement={attribute: 2})}), *words)


def test_missing_method_is_refused() -> None:
    description = ModulePolicyDescription(method_replacement={"foward": lambda self, x: x})
    refused(Written({"Layer": description}), "method 'foward' of layers.0 (Layer), which does not exist", "'forward'")


@pytest.mark.parametrize("broken", [{"entry": "atn"}, {"columns": ["attn.x"]}, {"row": "attn.y"}])
def test_block_with_a_missing_path_is_refused(broken: Mapping[str, Any]) -> None:
    block = BlockDescription(**{"entry": "attn", "columns": ["attn.q"], "row": "attn.o", **broken})
    description = cut("attn.q", "attn.o")
    description.blocks = [block]
    refused(Written({"Layer": description}), "The model has no module 'layers.0.a")


@pytest.mark.parametrize(
    "stack",
    [
        LayerStackDescription("layer"),
        LayerStackDescription("layers", "ln"),
        LayerStackDescription("layers", None, ("e", "x")),
    ],
)
def test_stack_with_a_missing_path_is_refused(stack: LayerStackDescription) -> None:
    refused(Written({}, [stack]), "The model has no module")


# ---------------------------------------------------------------------------------------------------- conflicting rules


def test_two_rules_for_one_module_are_refused() -> None:
    refused(Written({"Layer": cut("attn.q"), ToyLayer: cut("attn.q")}), "one replaces 'layers.0.attn.q'")
    refused(Written({"Layer": cut("attn.q", "attn.q")}), "one replaces 'layers.0.attn.q'")
    refused(Written({"Layer": cut("attn.q"), "SelfAttention": cut("q")}), "one replaces 'layers.0.attn.q'")


def test_overlapping_rules_are_refused() -> None:
    refused(
        Written({"Layer": cut("attn"), "SelfAttention": cut("q")}), "'layers.0.attn'", "Two rules of the policy overlap"
    )


def test_rule_for_the_full_model_is_refused() -> None:
    refused(Written({"": cut("")}), "replaces the full model", "inject_policy")


def test_target_without_from_native_module_is_refused() -> None:
    refused(Written({"Layer": cut("attn.q", target=nn.Linear)}), "replaces 'layers.0.attn.q' with Linear")


def test_policy_that_returns_no_descriptions_is_refused() -> None:
    refused(Written(None), "ModulePolicyDescription objects, but got None", "docs/policies.md")
    refused(Written({"Layer": {"attn.q": Linear1D_Col}}), "module_policy() must return", "but got {'attn.q'")
    refused(Written({"Layer": None}), "ModulePolicyDescription objects, but got None")
    refused(Written(ModulePolicyDescription()), "objects, but got ModulePolicyDescription(")


class SaysNothing(Policy):
    pass


def test_empty_policy_is_refused() -> None:
    refused(SaysNothing(), "The policy overrides neither module_policy() nor argument_policy()", "docs/policies.md")


def test_tied_weight_with_an_unnamed_owner_is_refused() -> None:
    tied = ToyLM(tied=True)
    table = cut("embed", target=VocabParallelEmbedding1D)
    refused(
        Written({"": table}),
        "head.weight is tied to the sharded parameter embed.weight",
        "Add 'head' to the policy",
        model=tied,
    )
    assert table.sub_module_replacement is not None
    table.sub_module_replacement.append(SubModuleReplacementDescription("head", VocabParallelLMHead1D))
    assert len(plan_of(Written({"": table}), tied).replacements) == 2


def test_direct_parameter_of_a_block_entry_is_refused() -> None:
    model: Any = ToyLM()
    model.layers[0].mlp.scale = nn.Parameter(model.norm.weight.detach().clone())
    refused(ToyPolicy(), "layers.0.mlp.scale", "move the parameter into a submodule", model=model)
    model = ToyLM()
    model.layers[0].attn.scale = nn.Parameter(model.norm.weight.detach().clone())
    refused(ToyPolicy(), "layers.0.attn.scale", "`local_attrs` of the Attention", "'inside'", model=model)


# -------------------------------------------------------------------------------------------------------- roles' tables


class Other(ToyPolicy):
    """A table with some changed entries."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        vars(self).update(changes)


def block(*blocks: Attention | MLP) -> LayerStack:
    return LayerStack("layers", blocks)


GOOD_ATTENTION, GOOD_MLP = ToyPolicy.stack.blocks


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stack": LayerStack("layer", [GOOD_MLP])}, ("no module 'layer'", "'layers.0'")),
        (
            {"stack": block(Attention("atn", AttentionProjections(q="q", k="k", v="v", out="o")))},
            ("no module 'layers.*.atn'", "'attn'"),
        ),
        (
            {"stack": block(Attention("attn", AttentionProjections(q="wq", k="k", v="v", out="o")))},
            ("no module 'layers.*.attn.wq'",),
        ),
        ({"stack": block(MLP("mlp", up="up", down="fc2"))}, ("no module 'layers.*.mlp.up'",)),
        ({"stack": block(MLP("mlp", up=["up?"], down="fc2"))}, ("no module 'layers.*.mlp.up'",)),
        (
            {"stack": block(MLP("mlp", up="fc1", down="norm"))},
            ("layers.*.mlp.norm must be an nn.Linear", "but is a Identity"),
        ),
        ({"stack": block(MLP("mlp", up="fc1", down="fc1"))}, ("41 output features", "has 30 input features")),
        ({"stack": LayerStack("layers", [GOOD_ATTENTION, GOOD_MLP], final_norm="nrm")}, ("no module 'nrm'", "'norm'")),
        ({"embeddings": "embd"}, ("no module 'embd'", "'embed'")),
        ({"keep_replicated": ("positions",)}, ("no module 'positions'",)),
        ({"num_heads": "n_head"}, ("num_heads='n_head', but the model has no config", "Set num_heads to a number")),
        ({"num_heads": 4}, ("layers.*.attn.o has 30 features", "4 heads")),
        ({"num_kv_heads": 1}, ("layers.*.attn.k has 30 features", "1 heads require 6")),
        (
            {"num_kv_heads": 2},
            (
                "num_heads=5 cannot be divided evenly among num_kv_heads=2",
                "num_key_value_heads in the model's config to 1, 5",
            ),
        ),
        (
            {"stack": block(GOOD_ATTENTION)},
            ("The policy has no rule for 'layers.0.mlp.fc1.weight' of shape (41, 30)", "`keep_replicated`"),
        ),
        ({"embeddings": ()}, ("The policy has no rule for 'embed.weight' of shape (101, 30)", "%")),
        ({"head": ()}, ("The policy has no rule for 'head.weight' of shape (101, 30)",)),
    ],
)
def test_table_that_does_not_match_the_model_is_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(Other(**changes), *words)


def test_optional_and_replicated_paths_are_accepted() -> None:
    extra = Attention("cross", AttentionProjections(q="q", k="k", v="v", out="o"), optional=True)
    gate = MLP("mlp", up=["fc1", "gate?"], down="fc2")
    plan = plan_of(Other(stack=block(GOOD_ATTENTION, extra, gate), embeddings=(), keep_replicated=("embed", "pooler?")))
    assert [path for path in plan.replacements if path.startswith("layers.0")] == [
        f"layers.0.{name}" for name in ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.fc1", "mlp.fc2")
    ]


def test_more_ranks_than_heads_or_features_are_refused() -> None:
    refused(ToyPolicy(), "A tensor size of 6 exceeds the 5 attention heads", "at most 5", size=6)
    only_mlp = Other(stack=block(GOOD_MLP), keep_replicated=("layers",))
    refused(only_mlp, "42 exceeds the 41 features of layers.*.mlp.fc1", "at most 41", size=42)


# ------------------------------------------------------------------------------------------------------ legacy policies


class First(Policy):
    """A legacy policy that lists the passed layers of a Layer."""

    said: Any = None

    def __init__(self, *layers: Layer, **answers: Any) -> None:
        super().__init__()
        argument = Argument(param_funcs=[lambda: list(layers)])
        self.answers: dict[str, Any] = {"argument_policy": {"Layer": argument}, **answers}
        for name in self.answers:
            vars(self)[name] = lambda *_, name=name: self.answers[name]


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Col_Layer(weight="attn.qq.weight"), ("no module 'layers.0.attn.qq'", "'attn.q'")),
        (Col_Layer(), ("Col_Layer(weight=None, bias=None)", "weight=")),
        (Col_Layer(weight="weight"), ("weight='weight'",)),
        (Row_Layer(weight="attn.o.weight", bias="attn.q.bias"), ("must belong to one module",)),
        (Layer(weight="attn.o.weight"), ("has no replace_layer", "Col_Layer to shard the output features")),
    ],
)
def test_layer_without_a_valid_name_is_refused(layer: Layer, words: tuple[str, ...]) -> None:
    refused(First(layer), *words)


def test_optional_layer_and_custom_class_are_accepted() -> None:
    plan = plan_of(
        First(
            Col_Layer(weight="attn.qq.weight", ignore=True),
            Layer(weight="attn.o.weight", replace_layer=Linear1D_Row),
        )
    )
    assert [(path, sub.target_module) for path, sub in plan.replacements.items()][:1] == [
        ("layers.0.attn.o", Linear1D_Row)
    ]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"argument_policy": None}, ("must return a dict of Argument objects, but got None", "Argument(")),
        ({"argument_policy": {"Layer": Argument()}}, ("The Argument for Layer has no effect", "no functions")),
        (
            {"argument_policy": {"Layer": Argument(param_funcs=[Policy.attn_in])}},
            ("param_funcs (attn_in) return no layers",),
        ),
        ({"argument_policy": {"Layer": Argument({"attn.n_heads": 2})}}, ("attribute 'n_heads' of", "'num_heads'")),
        ({"binding_policy": {"embed.weight": "haed.weight"}}, ("parameter 'haed.weight'", "'head.weight'")),
        ({"inject_policy": (SelfAttention, SelfAttention)}, ("class SelfAttention, but the model is a ToyLM",)),
    ],
)
def test_legacy_results_that_do_not_match_the_model_are_refused(
    answers: dict[str, Any], words: tuple[str, ...]
) -> None:
    refused(First(Col_Layer(weight="attn.q.weight"), **answers), *words)


# --------------------------------------------------------------------------------------------------------- fingerprints


def scaled(factor: float) -> float:
    return factor


def test_fingerprint_is_identical_in_every_process() -> None:
    lines = plan_of(
        Written({"Layer": cut("attn.q", kwargs={"init": scaled, "gather_output": True})})
    ).get_lines_to_compare_across_ranks()
    assert (
        lines[0] == "layers.0.attn.q: Linear [(30, 30), (30,)] -> Linear1D_Col {'init': scaled, 'gather_output': True}"
    )
    assert "0x" not in "\n".join([*lines, *plan_of(ToyPolicy()).get_lines_to_compare_across_ranks()])


def test_ranks_with_different_head_counts_have_one_fingerprint() -> None:
    lines = []
    for rank in range(2):
        policy = ToyPolicy()
        policy.set_model(ToyLM())
        policy.axis = Axis("tensor", 2, rank)
        lines.append(make_sharding_plan(policy.model, policy).get_lines_to_compare_across_ranks())
    assert lines[0] == lines[1] and len(lines[0]) > 10
