"""Which policy a model gets: the user's own, else the registered one of its family, else an error that helps.

The registry is data: model type, as a transformers config names it, to where the policy stands; for a model of timm,
which has no config, ``timm:`` and the name of its class. A policy's module is imported when it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from torch import nn

from shardformer.errors import PolicyError, nearest
from shardformer.policies.infer.infer import infer, infer_stacks
from shardformer.sharding.config import ShardConfig
from shardformer.sharding.policy import Policy


@dataclass(frozen=True)
class PolicyLocation:
    """Where a policy stands: a module of ``shardformer.policies.models`` (or a full module name), and its class."""

    file_name: str
    class_name: str

    def load(self) -> type[Policy]:
        name = self.file_name if "." in self.file_name else f"shardformer.policies.models.{self.file_name}"
        policy: type[Policy] = getattr(import_module(name), self.class_name)
        return policy


FAMILIES = MappingProxyType(
    {
        "albert": PolicyLocation("albert", "AlbertPolicy"),
        "beit": PolicyLocation("beit", "BeitPolicy"),
        "bert": PolicyLocation("bert", "BertPolicy"),
        "blip-2": PolicyLocation("blip2", "Blip2Policy"),
        "blip_2_qformer": PolicyLocation("blip2", "Blip2QFormerPolicy"),
        "blip_2_vision_model": PolicyLocation("blip2", "Blip2VisionPolicy"),
        "bloom": PolicyLocation("bloom", "BloomPolicy"),
        "chatglm": PolicyLocation("chatglm2", "ChatGLMPolicy"),
        "ernie": PolicyLocation("bert", "BertPolicy"),
        "falcon": PolicyLocation("falcon", "FalconPolicy"),
        "gpt2": PolicyLocation("gpt2", "GPT2Policy"),
        "gpt_neo": PolicyLocation("gpt_neo", "GPTNeoPolicy"),
        "gptj": PolicyLocation("gptj", "GPTJPolicy"),
        "llama": PolicyLocation("llama", "LlamaPolicy"),
        "mistral": PolicyLocation("llama", "LlamaPolicy"),
        "opt": PolicyLocation("opt", "OPTPolicy"),
        "qwen2": PolicyLocation("llama", "LlamaPolicy"),
        "qwen3": PolicyLocation("llama", "LlamaPolicy"),
        "roberta": PolicyLocation("bert", "BertPolicy"),
        "sam": PolicyLocation("sam", "SamPolicy"),
        "sam_vision_model": PolicyLocation("sam", "SamVisionPolicy"),
        "swin": PolicyLocation("swin", "SwinPolicy"),
        "swinv2": PolicyLocation("swin", "Swinv2Policy"),
        "t5": PolicyLocation("t5", "T5Policy"),
        "timm:Beit": PolicyLocation("timm_beit", "TimmBeitPolicy"),
        "timm:Eva": PolicyLocation("timm_beit", "TimmEvaPolicy"),
        "timm:SwinTransformer": PolicyLocation("timm_swin", "TimmSwinPolicy"),
        "timm:SwinTransformerV2": PolicyLocation("timm_swin", "TimmSwinV2Policy"),
        "timm:VisionTransformer": PolicyLocation("timm_vit", "TimmViTPolicy"),
        "vit": PolicyLocation("vit", "ViTPolicy"),
        "whisper": PolicyLocation("whisper", "WhisperPolicy"),
    }
)

EXAMPLE = """
    import shardformer
    from shardformer import MLP, Attention, RolePolicy, Stack

    class MyPolicy(RolePolicy):
        stack = Stack("layers", [                # the ModuleList of layers; what follows stands in each of them
            Attention("attn", q="q", k="k", v="v", out="o", attributes={"num_heads": "heads"}),
            MLP("mlp", up="fc1", down="fc2"),
        ])
        embeddings = "embed"                     # over the vocabulary
        num_heads = 4                            # or the name of the config's field that says it

    model = shardformer.shard_model(model, policy=MyPolicy)
"""


_REGISTERED: dict[str, type[Policy]] = {}


def register(model_type: str, policy: type[Policy]) -> None:
    """Makes ``policy`` the one of a family for the rest of this process, before a registered one of ours.

    Args:
        model_type: as the family's transformers config names it; ``timm:`` and the class's name for one of timm.
        policy: a subclass of Policy.
    """
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise PolicyError(
            f"register({model_type!r}, {policy!r:.80})",
            rule="A family's policy is a subclass of shardformer.Policy",
            remedy="Give the class itself",
        )
    _REGISTERED[model_type] = policy


def resolve_policy(
    model: nn.Module, policy: Policy | type[Policy] | None, *, tensor: int | None = None
) -> tuple[Policy, str]:
    """The policy for ``model`` and the link of the chain that gave it.

    Args:
        tensor: over how many ranks matrices will be cut, where that is known. Over one every model has a policy.

    Raises PolicyError for a model of an unknown family, with an example of a policy.
    """
    if policy is not None:
        if not (issubclass(policy, Policy) if isinstance(policy, type) else isinstance(policy, Policy)):
            raise PolicyError(
                f"policy={policy!r:.80}",
                rule="A policy is an instance or a subclass of shardformer.Policy",
                remedy="Write config=... for a ShardConfig"
                if isinstance(policy, ShardConfig)
                else "Derive the class from shardformer.Policy or shardformer.RolePolicy",
            )
        chosen = policy() if isinstance(policy, type) else policy
        return chosen, f"the user's policy {type(chosen).__name__}"
    family = _family(model)
    if isinstance(family, str) and family in _REGISTERED:
        return _REGISTERED[family](), f"the policy registered by the user for {family!r}"
    if isinstance(family, str) and family in FAMILIES:
        return FAMILIES[family].load()(), f"the registered family {family!r}"
    try:
        inferred = infer(model)
        if tensor == 1 and inferred.against_pipeline:
            uncut = infer_stacks(model)
            inferred = uncut if uncut.stack and not uncut.against_pipeline else inferred
        return inferred, "a policy that was inferred and proven"
    except PolicyError as error:
        if tensor == 1:
            return infer_stacks(model), "the order of its layers"
        not_inferred = error.what.partition(" could be inferred: ")[2] or error.what
    tried = f"it is of the model type {family!r}" if family else "it has no config with a model type"
    raise PolicyError(
        f"No policy for {type(model).__name__}: {tried}, no policy was given, "
        f"and none was found by inference: {not_inferred}",
        rule=f"The registered families are {', '.join(FAMILIES)}",
        remedy=(f"{nearest(family, FAMILIES)} " if family else "")
        + f"Say what the model is made of (docs/policies.md):\n{EXAMPLE}",
    )


def _family(model: nn.Module) -> Any:
    """The model type that the config names; of a timm model its class, or the base class that is registered."""
    classes = [f"timm:{cls.__name__}" for cls in type(model).__mro__ if cls.__module__.partition(".")[0] == "timm"]
    known = next((name for name in classes if name in _REGISTERED or name in FAMILIES), None)
    named = getattr(getattr(model, "config", None), "model_type", None)
    return known or named or next(iter(classes), None)
