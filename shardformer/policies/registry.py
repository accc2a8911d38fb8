"""Registry of model families and their policies.

A family is named after the ``model_type`` of its transformers config. timm models have no config, so their family is
``timm:`` plus the class name. The module of a policy is imported on first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from torch import nn

from shardformer.errors import PolicyError
from shardformer.policies.policy import Policy


@dataclass(frozen=True)
class PolicyLocation:
    """The module and class name of a policy that is imported on first use.

    Args:
        file_name: a module of ``shardformer.policies.models``, or the full name of a module.
        class_name: name of the policy class in the module.
    """

    file_name: str
    class_name: str

    def load_policy_class(self) -> type[Policy]:
        name = self.file_name if "." in self.file_name else f"shardformer.policies.models.{self.file_name}"
        policy: type[Policy] = getattr(import_module(name), self.class_name)
        return policy


FAMILIES = MappingProxyType(
    {
        "albert": PolicyLocation("albert", "AlbertPolicy"),
        "beit": PolicyLocation("vit", "BeitPolicy"),
        "bert": PolicyLocation("bert", "BertPolicy"),
        "blip-2": PolicyLocation("blip2", "Blip2Policy"),
        "blip_2_qformer": PolicyLocation("blip2", "Blip2QFormerPolicy"),
        "blip_2_vision_model": PolicyLocation("blip2", "Blip2VisionPolicy"),
        "bloom": PolicyLocation("bloom", "BloomPolicy"),
        "chatglm": PolicyLocation("chatglm2", "ChatGLMPolicy"),
        "ernie": PolicyLocation("bert", "BertPolicy"),
        "falcon": PolicyLocation("falcon", "FalconPolicy"),
        "gpt2": PolicyLocation("gpt", "GPT2Policy"),
        "gpt_neo": PolicyLocation("gpt", "GPTNeoPolicy"),
        "gptj": PolicyLocation("gpt", "GPTJPolicy"),
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
        "timm:Beit": PolicyLocation("timm", "TimmBeitPolicy"),
        "timm:Eva": PolicyLocation("timm", "TimmEvaPolicy"),
        "timm:SwinTransformer": PolicyLocation("timm", "TimmSwinPolicy"),
        "timm:SwinTransformerV2": PolicyLocation("timm", "TimmSwinV2Policy"),
        "timm:VisionTransformer": PolicyLocation("timm", "TimmViTPolicy"),
        "vit": PolicyLocation("vit", "ViTPolicy"),
        "whisper": PolicyLocation("whisper", "WhisperPolicy"),
    }
)

_REGISTERED: dict[str, type[Policy]] = {}


def register_policy(model_type: str, policy: type[Policy]) -> None:
    """Register a policy for a model family in this process. It replaces a built-in policy of the same family.

    Args:
        model_type: ``model_type`` of the transformers config, or ``timm:`` plus the class name for a timm model.
        policy: a subclass of Policy.

    Raises:
        PolicyError: if ``policy`` is not a subclass of Policy.
    """
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise PolicyError(
            f"The policy for {model_type!r} must be a subclass of shardformer.policies.Policy, but got {policy!r:.80}.",
            remedy="Pass the policy class, not an instance.",
        )
    _REGISTERED[model_type] = policy


def find_registered_policy(model: nn.Module) -> tuple[Policy, str] | None:
    """Find the policy that is registered for the model's family, and describe where it comes from."""
    family = get_model_family(model)
    if not isinstance(family, str):
        return None
    if family in _REGISTERED:
        return _REGISTERED[family](), f"the policy registered by the user for {family!r}"
    return (FAMILIES[family].load_policy_class()(), f"the registered family {family!r}") if family in FAMILIES else None


def has_user_policy(model: nn.Module) -> bool:
    """Return whether the user registered a policy for the model's family."""
    return get_model_family(model) in _REGISTERED


def get_model_family(model: nn.Module) -> Any:
    """Return the name of the model's family, such as ``llama`` or ``timm:VisionTransformer``."""
    classes = [f"timm:{cls.__name__}" for cls in type(model).__mro__ if cls.__module__.partition(".")[0] == "timm"]
    known = next((name for name in classes if name in _REGISTERED or name in FAMILIES), None)
    named = getattr(getattr(model, "config", None), "model_type", None)
    return known or named or next(iter(classes), None)
