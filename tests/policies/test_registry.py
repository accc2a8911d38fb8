"""Policy lookup: the user's policy, the family's, or an error that shows how to write one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor, nn

from shardformer.discovery.derive_policy import EXAMPLE
from shardformer.errors import PolicyError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.policies import policy as policies
from shardformer.policies.policy import FAMILIES
from shardformer.policies.role_policy import RolePolicy
from shardformer.shard_model_api import resolve_policy_and_origin
from tests.policies.toy import HEADS, ScaledToyLM, ToyLM, ToyPolicy

HIDDEN, VOCAB = 24, 97


@pytest.mark.slow
def test_importing_the_registry_imports_no_policy_or_transformers() -> None:
    code = """
        import sys
        from shardformer.policies import policy
        early = [n for n in sys.modules if n.startswith("shardformer.policies.families") or n == "transformers"]
        policy.FAMILIES["t5"].import_policy_class()
        print(early, sorted(n for n in sys.modules if n.startswith("shardformer.policies.families")))
        print("transformers" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["[] ['shardformer.policies.families']", "False"], done.stderr


@pytest.mark.parametrize("family", FAMILIES)
def test_every_location_loads_a_policy(family: str) -> None:
    policy = FAMILIES[family].import_policy_class()
    assert issubclass(policy, RolePolicy)
    assert policy.__module__ == f"shardformer.policies.{FAMILIES[family].module_name}"


@dataclass
class Config:
    model_type: str


class Named(nn.Module):
    def __init__(self, model_type: str) -> None:
        super().__init__()
        self.config = Config(model_type)


def test_user_policy_has_precedence_as_class_or_instance() -> None:
    for given in (ToyPolicy, ToyPolicy()):
        policy, source = resolve_policy_and_origin(Named("bert"), given)
        assert isinstance(policy, ToyPolicy) and source == "the user's policy ToyPolicy"


def test_registered_family_of_the_config_is_used() -> None:
    policy, source = resolve_policy_and_origin(Named("t5"), None)
    assert type(policy).__name__ == "T5Policy" and source == "the registered family 't5'"


def test_user_registration_replaces_the_built_in_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "_REGISTERED", {})
    policies.register_policy("t5", ToyPolicy)
    policy, source = resolve_policy_and_origin(Named("t5"), None)
    assert isinstance(policy, ToyPolicy) and source == "the policy registered by the user for 't5'"


TO_WRITE = (*FAMILIES, "class MyPolicy(RolePolicy)", "docs/policies.md")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Named("bertt"), ("No policy for Named", "model type 'bertt'", "Did you mean 'bert'", *TO_WRITE)),
        (
            ScaledToyLM(),
            ("No policy for ScaledToyLM", 'derive_policy(model, batch={"ids": ..., "scale": ...})', "docs/policies.md"),
        ),
    ],
)
def test_unknown_family_error_shows_how_to_write_a_policy(model: nn.Module, words: tuple[str, ...]) -> None:
    with pytest.raises(PolicyError) as caught:
        resolve_policy_and_origin(model, None)
    text = str(caught.value)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("wrong", ["bert", int, nn.Linear, {"stack": "layers"}, ToyLM])
def test_invalid_policy_is_refused(wrong: Any) -> None:
    with pytest.raises(PolicyError, match=r"must be an instance or subclass of shardformer\.policies\.Policy"):
        resolve_policy_and_origin(ToyLM(), wrong)


# --------------------------------------------------------------------------------------------------------- the example


class Mine(ToyLM):
    """The toy model with the module names and head count of the example in the error message."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.attn = FourHeads()


class FourHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(30, 32), nn.Linear(30, 32), nn.Linear(30, 32), nn.Linear(32, 30)
        self.num_heads = 4

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        out: Tensor = self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


def _run_example() -> list[str]:
    names: dict[str, Any] = {"model": Mine()}
    names["model"].head = nn.Identity()  # the example names none
    exec(textwrap.dedent(EXAMPLE), names)
    return [type(m).__name__ for m in names["model"].modules() if hasattr(m, "shard_specs")]


def test_example_in_the_error_message_runs(pool2: WorkerPool) -> None:
    assert HEADS != 4 and len(EXAMPLE.strip().splitlines()) <= 14
    layer = ["Linear1D_Col"] * 3 + ["Linear1D_Row", "Linear1D_Col", "Linear1D_Row"]
    assert pool2.run(_run_example) == [["VocabParallelEmbedding1D", *layer, *layer]] * 2
