"""Types in policies and roles are checked, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardformer.config import ShardConfig
from shardformer.errors import PolicyError
from shardformer.layout.shard_spec import Split
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.layer_sequence import PipelineHints
from shardformer.policies.families import LlamaPolicy
from shardformer.policies.legacy import Argument
from shardformer.policies.module_descriptions import (
    ModuleKey,
    ModulePolicyDescription,
    SubModuleReplacementDescription,
    check_dataclass_field_types,
    check_value_type,
    format_type_hint,
    get_cached_type_hints,
)
from shardformer.policies.policy import Policy, get_registered_policy_and_origin
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionInputs, AttentionProjections, LayerStack
from shardformer.shard_model_api import shard_model
from shardformer.tensor_parallel.layers import Linear1D_Col
from shardformer.verify.small_models import LIBRARIES, SMALL_CONFIGS, SmallModelFactory
from tests.policies.toy import SelfAttention, ToyLM, ToyPolicy
from tests.test_bad_input import refusal_of, refused

HEADS = AttentionProjections(q="q", k="k", v="v", out="o")


@pytest.mark.parametrize(
    ("write", "what", "rule"),
    [
        (lambda: Attention(None, HEADS), "Attention has the invalid value at=None", "`at` must be a string"),
        (
            lambda: Attention("attn", "q"),
            "Attention has the invalid value projections='q'",
            "`projections` must be an AttentionProjections",
        ),
        (lambda: Attention("attn", HEADS, {"n": 3}), "local_attrs={'n': 3}", "a string or (a string, a whole number)"),
        (lambda: Attention("attn", HEADS, ["num_heads"]), "local_attrs=['num_heads']", "`local_attrs` must be a dict"),
        (lambda: Attention("attn", HEADS, num_heads=True), "num_heads=True", "a whole number or a string or None"),
        (
            lambda: AttentionProjections(q=["q"], out="o"),
            "Projections has the invalid value q=['q']",
            "`q` must be a string or None",
        ),
        (
            lambda: AttentionProjections(q="q", out=None),
            "Projections has the invalid value out=None",
            "`out` must be a string",
        ),
        (
            lambda: AttentionInputs(arguments="key"),
            "Inputs has the invalid value arguments='key'",
            "Use arguments=['key']",
        ),
        (
            lambda: MLP("mlp", up=3, down="fc2"),
            "MLP has the invalid value up=3",
            "`up` must be a string or a list (each a string)",
        ),
        (lambda: MLP("mlp", up="fc1", down="fc2", fused="2"), "fused='2'", "a whole number or None"),
        (
            lambda: LayerStack("layers", MLP("mlp", up="a", down="b")),
            "Stack has the invalid value blocks=MLP(",
            "Use blocks=[MLP(",
        ),
        (lambda: LayerStack("layers", ["attn"]), "blocks=['attn']", "an Attention or an MLP or an Experts"),
        (lambda: LayerStack("layers", [], cross_states="x"), "cross_states='x'", "(a string, a string) or None"),
        (
            lambda: LayerStack("layers", [], stages=PipelineHints(with_first_layer="x")),
            "with_first_layer='x'",
            "Use with_first_layer=['x']",
        ),
    ],
)
def test_role_with_a_wrong_type_is_refused_at_creation(write: Callable[[], Any], what: str, rule: str) -> None:
    with pytest.raises(PolicyError) as error:
        write()
    assert what in error.value.what and rule in f"{error.value.rule}. {error.value.remedy}"


def table(**fields: Any) -> type[Policy]:
    return type("MyPolicy", (ToyPolicy,), fields)


def returning(value: Any) -> type[Policy]:
    return type("MyPolicy", (Policy,), {"module_policy": lambda self: value})


def of_layers(**fields: Any) -> type[Policy]:
    return returning({"Layer": ModulePolicyDescription(**fields)})


def replacing(suffix: Any, **fields: Any) -> type[Policy]:
    return of_layers(sub_module_replacement=[SubModuleReplacementDescription(suffix, Linear1D_Col, **fields)])


class FirstForm(Policy):
    description: Any = None

    @classmethod
    def argument_policy(cls, model_config: Any, shard_config: int) -> dict[Any, Any]:  # type: ignore[override]
        return {SelfAttention: cls.description}


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (
            table(stack="layers"),
            ("MyPolicy has the invalid value stack='layers'", "a LayerStack or a list (each a LayerStack)"),
        ),
        (table(embeddings=[3]), ("embeddings=[3]", "a string or a list (each a string)")),
        (table(head=None), ("head=None", "a string or a list")),
        (
            table(keep_replicated="layers.*.mlp"),
            ("keep_replicated='layers.*.mlp'", "Use keep_replicated=['layers.*.mlp']"),
        ),
        (table(num_heads=5.0), ("num_heads=5.0", "a whole number or a string")),
        (
            returning({3: ModulePolicyDescription()}),
            ("MyPolicy.module_policy() has the invalid value key=3", "a string or a class"),
        ),
        (returning({None: ModulePolicyDescription()}), ("key=None", "a string or a class")),
        (replacing(None), ("suffix=None", "`suffix` must be a string")),
        (replacing(["mlp.fc1"]), ("suffix=['mlp.fc1']", "`suffix` must be a string")),
        (replacing("mlp.fc1", kwargs=[1]), ("kwargs=[1]", "a dict (a string: anything) or None")),
        (of_layers(sub_module_replacement={"mlp.fc1": Linear1D_Col}), ("each a SubModuleReplacementDescription",)),
        (of_layers(attribute_replacement=["attn.num_heads"]), ("`attribute_replacement` must be a dict",)),
        (of_layers(method_replacement={"forward": "gelu"}), ("{'forward': 'gelu'}", "a function")),
        (of_layers(param_replacement=len), ("Use param_replacement=[<built-in function len>]",)),
        (of_layers(parameters={"norm1.weight": 3}), ("a dict (a whole number: a Split)",)),
        (
            type("MyPolicy", (FirstForm,), {"description": [3]}),
            ("argument_policy() must return a dict of Argument objects, but got [3]", "Argument("),
        ),
        (
            type("MyPolicy", (FirstForm,), {"description": Argument(param_funcs=[lambda: ["q"]])}),  # type: ignore[list-item]
            ("must be Layer objects, but got 'q'", "Col_Layer(weight="),
        ),
    ],
)
def test_policy_with_a_wrong_type_is_refused_at_planning(policy: type[Policy], words: tuple[str, ...]) -> None:
    models = [ToyLM(), ToyLM()]

    def refuse(context: Any) -> Any:
        model = models[context.tensor.rank]
        return refusal_of(lambda: shard_model(model, policy, context=context), model)

    refused(run_as_threads(refuse, tensor=2), PolicyError, *words)


@pytest.mark.parametrize("family", sorted(name for name in SMALL_CONFIGS if name not in LIBRARIES))
def test_shipped_descriptions_have_valid_types(family: str) -> None:
    """The descriptions of the package are not checked when a model is sharded."""
    model = SmallModelFactory(family)()
    known = get_registered_policy_and_origin(model)
    assert known is not None
    policy: Any = known[0]
    policy.set_model(model)
    policy.set_shard_config(ShardConfig(context=ParallelContext.from_sizes({"tensor": 2})))
    for name in RolePolicy.__annotations__:
        check_value_type(family, name, getattr(policy, name), get_cached_type_hints(RolePolicy)[name])
    descriptions = policy.module_policy()
    assert descriptions
    for key, description in descriptions.items():
        check_value_type(family, "key", key, ModuleKey)
        check_dataclass_field_types(description)


def test_changed_instance_of_a_shipped_policy_is_checked() -> None:
    policy = LlamaPolicy()
    policy.num_heads = 5.0  # type: ignore[assignment]
    with pytest.raises(PolicyError, match=r"num_heads=5\.0"):
        policy.set_model(SmallModelFactory("llama")())


def test_lists_and_tuples_are_interchangeable() -> None:
    LayerStack("layers", (MLP("mlp", up=("gate", "up"), down="down"),), cross_states=["decoder", "states"])  # type: ignore[arg-type]
    Attention("attn", HEADS, {"alibi": ("heads", 0)}, num_heads=4)
    assert format_type_hint(dict[int, Split] | None) == "a dict (a whole number: a Split) or None"
