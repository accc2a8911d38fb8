"""The base class of policies, which describe how a model is sharded, and the registry of model families.

A policy has one of three forms, each converted to the next:

- roles (``shardformer.policies.role_policy.RolePolicy``): a table of attention modules, MLPs and embeddings;
- the legacy form: ``argument_policy`` with lists of ``Col_Layer`` and ``Row_Layer``;
- ``module_policy``: changes of attributes, parameters and submodules, for each kind of module.

A family is named after the ``model_type`` of its transformers config. timm models have no config, so their family is
``timm:`` plus the class name. The module of a policy is imported on first use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from torch import nn

from shardformer.config import ShardConfig
from shardformer.errors import PolicyError
from shardformer.mesh.parallel_context import Axis
from shardformer.pipeline.layer_sequence import LayerSequence, LayerStackDescription
from shardformer.policies.legacy import LegacyPolicy, convert_legacy_policy
from shardformer.policies.module_descriptions import ModuleKey, ModulePolicyDescription
from shardformer.public_names import deprecate_renamed_arguments

RENAMED = {
    "prove": "validate", "find_part": "find_submodel_policy", "chain": "layer_sequence", "whole": "keep_replicated",
    "parts": "submodels", "single": "unstacked_blocks", "against_sequence": "no_sequence_parallel",
    "against_pipeline": "no_pipeline", "refuses_sequence": "no_sequence_parallel_reason",
    "refuses_pipeline": "no_pipeline_reason", "sums_exits": "sums_block_outputs",
}  # fmt: skip
"""Earlier names of a policy's attributes and methods -> their names now."""


@deprecate_renamed_arguments({}, renamed_attributes=RENAMED)
class Policy(LegacyPolicy):
    """Base class of policies, which describe how a model is sharded.

    Override the methods that your model needs. The docstring of this module lists the forms of a policy.
    """

    name: str | None = None
    notes: Sequence[str] = ()
    """Sentences that ``describe_sharding`` prints."""
    validate: bool = True
    """Whether a user's policy is validated on a reduced model before use."""

    unproven: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    """"tensor", "pipe" or "enable_sequence_parallelism" -> name of an input that was not validated -> reason. Batches
    with such an input raise an error."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for old in [name for name in vars(cls) if name in RENAMED]:
            warnings.warn(
                f"{cls.__name__}.{old} is deprecated. Use {RENAMED[old]} instead.", DeprecationWarning, stacklevel=2
            )
            setattr(cls, RENAMED[old], vars(cls)[old])
            delattr(cls, old)

    def __init__(self) -> None:
        self.model: Any = None
        self.shard_config: ShardConfig = ShardConfig()
        self.axis: Axis = Axis("tensor")
        self.find_submodel_policy: Callable[[nn.Module], Policy] | None = None
        """Returns the policy of a model inside this one. None supports registered families only."""

    @property
    def replaces_class_or_ties_params(self) -> bool:
        """Whether the policy replaces the model's class or ties parameters."""
        functions = (self.inject_policy, self.binding_policy)
        return functions != (LegacyPolicy.inject_policy, LegacyPolicy.binding_policy)

    def set_model(self, model: nn.Module) -> None:
        """Set the model that the policy describes."""
        self.model = model

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Set the sharding config, and check that the policy supports it."""
        self.shard_config = shard_config
        # without tensor parallelism the policy describes the model as for a single rank
        self.axis = shard_config.get_attention_head_axis() if shard_config.enable_tensor_parallelism else Axis("tensor")
        self.config_sanity_check()

    def config_sanity_check(self) -> None:
        """Raise ConfigError if this policy does not support the sharding config."""

    def preprocess(self) -> nn.Module:
        """Modify the unsharded model before it is sharded, and return the model."""
        model: nn.Module = self.model
        return model

    def module_policy(self) -> Mapping[ModuleKey, ModulePolicyDescription]:
        """Return a dict from modules to descriptions of how sharding changes them.

        The default converts the result of ``argument_policy``.
        """
        return convert_legacy_policy(self)

    def postprocess(self) -> nn.Module:
        """Modify the model after it was sharded, and return the model."""
        model: nn.Module = self.model
        return model

    def stacks(self) -> list[LayerStackDescription]:
        """Return descriptions of the model's layers for sequence and pipeline parallelism."""
        return []

    def layer_sequence(self) -> LayerSequence:
        """Return the model's layers in execution order, to split them into pipeline stages."""
        return LayerSequence.from_stacks(self.model, self.stacks())

    def no_pipeline_reason(self) -> str | None:
        """Return the reason why this model does not support pipeline parallelism, or None if it does."""
        return None

    def replicated_paths(self) -> list[str] | None:
        """Return the paths of modules and parameters that may stay replicated, or None if all may."""
        return None


class NoShardingPolicy(Policy):
    """A policy that shards no weights."""

    def module_policy(self) -> Mapping[ModuleKey, ModulePolicyDescription]:
        return {}


@dataclass(frozen=True)
class PolicyLocation:
    """The module and class name of a policy that is imported on first use.

    Args:
        module_name: a module of ``shardformer.policies``, or the full name of a module.
        class_name: name of the policy class in the module.
    """

    module_name: str
    class_name: str

    def import_policy_class(self) -> type[Policy]:
        name = self.module_name if "." in self.module_name else f"shardformer.policies.{self.module_name}"
        policy: type[Policy] = getattr(import_module(name), self.class_name)
        return policy


FAMILIES = MappingProxyType(
    {
        "albert": PolicyLocation("families", "AlbertPolicy"),
        "beit": PolicyLocation("families", "BeitPolicy"),
        "bert": PolicyLocation("families", "BertPolicy"),
        "blip-2": PolicyLocation("families", "Blip2Policy"),
        "blip_2_qformer": PolicyLocation("families", "Blip2QFormerPolicy"),
        "blip_2_vision_model": PolicyLocation("families", "Blip2VisionPolicy"),
        "bloom": PolicyLocation("families", "BloomPolicy"),
        "chatglm": PolicyLocation("families", "ChatGLMPolicy"),
        "ernie": PolicyLocation("families", "BertPolicy"),
        "falcon": PolicyLocation("families", "FalconPolicy"),
        "gpt2": PolicyLocation("families", "GPT2Policy"),
        "gpt_neo": PolicyLocation("families", "GPTNeoPolicy"),
        "gptj": PolicyLocation("families", "GPTJPolicy"),
        "llama": PolicyLocation("families", "LlamaPolicy"),
        "mistral": PolicyLocation("families", "LlamaPolicy"),
        "opt": PolicyLocation("families", "OPTPolicy"),
        "qwen2": PolicyLocation("families", "LlamaPolicy"),
        "qwen3": PolicyLocation("families", "LlamaPolicy"),
        "roberta": PolicyLocation("families", "BertPolicy"),
        "sam": PolicyLocation("families", "SamPolicy"),
        "sam_vision_model": PolicyLocation("families", "SamVisionPolicy"),
        "swin": PolicyLocation("families", "SwinPolicy"),
        "swinv2": PolicyLocation("families", "Swinv2Policy"),
        "t5": PolicyLocation("families", "T5Policy"),
        "timm:Beit": PolicyLocation("families", "TimmBeitPolicy"),
        "timm:Eva": PolicyLocation("families", "TimmEvaPolicy"),
        "timm:SwinTransformer": PolicyLocation("families", "TimmSwinPolicy"),
        "timm:SwinTransformerV2": PolicyLocation("families", "TimmSwinV2Policy"),
        "timm:VisionTransformer": PolicyLocation("families", "TimmViTPolicy"),
        "vit": PolicyLocation("families", "ViTPolicy"),
        "whisper": PolicyLocation("families", "WhisperPolicy"),
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


def get_registered_policy_and_origin(model: nn.Module) -> tuple[Policy, str] | None:
    """Find the policy that is registered for the model's family, and describe where it was registered."""
    family = get_model_family_name(model)
    if not isinstance(family, str):
        return None
    if family in _REGISTERED:
        return _REGISTERED[family](), f"the policy registered by the user for {family!r}"
    return (
        (FAMILIES[family].import_policy_class()(), f"the registered family {family!r}") if family in FAMILIES else None
    )


def has_user_registered_policy(model: nn.Module) -> bool:
    """Return whether the user registered a policy for the model's family."""
    return get_model_family_name(model) in _REGISTERED


def get_model_family_name(model: nn.Module) -> str | None:
    """Return the name of the model's family, such as ``llama`` or ``timm:VisionTransformer``."""
    classes = [f"timm:{cls.__name__}" for cls in type(model).__mro__ if cls.__module__.partition(".")[0] == "timm"]
    known = next((name for name in classes if name in _REGISTERED or name in FAMILIES), None)
    named = getattr(getattr(model, "config", None), "model_type", None)
    return known or named or next(iter(classes), None)
