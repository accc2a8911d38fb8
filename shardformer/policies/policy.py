"""The base class of policies, which describe how a model is sharded.

A policy has one of three forms, each converted to the next:

- roles (``shardformer.policies.role_policy.RolePolicy``): a table of attention modules, MLPs and embeddings;
- the legacy form: ``argument_policy`` with lists of ``Col_Layer`` and ``Row_Layer``;
- ``module_policy``: changes of attributes, parameters and submodules, for each kind of module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from shardformer.config import ShardConfig
from shardformer.mesh.parallel_context import Axis
from shardformer.pipeline.layer_sequence import LayerSequence, StackDescription
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


@deprecate_renamed_arguments({}, attributes=RENAMED)
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
            warnings.warn(f"{cls.__name__}.{old} is now {RENAMED[old]}", DeprecationWarning, stacklevel=2)
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
        self.axis = shard_config.get_head_axis() if shard_config.enable_tensor_parallelism else Axis("tensor")
        self.config_sanity_check()

    def config_sanity_check(self) -> None:
        """Raise ConfigError if this policy does not support the sharding config."""

    def preprocess(self) -> nn.Module:
        """Modify the unsharded model before it is sharded, and return the model."""
        model: nn.Module = self.model
        return model

    def module_policy(self) -> Mapping[ModuleKey, ModulePolicyDescription]:
        """Return how sharding changes each kind of module, as a dict from modules to descriptions.

        The default converts the result of ``argument_policy``.
        """
        return convert_legacy_policy(self)

    def postprocess(self) -> nn.Module:
        """Modify the model after it was sharded, and return the model."""
        model: nn.Module = self.model
        return model

    def stacks(self) -> list[StackDescription]:
        """Return descriptions of the model's layers for sequence and pipeline parallelism."""
        return []

    def layer_sequence(self) -> LayerSequence:
        """Return the model's layers in execution order, to split them into pipeline stages."""
        return LayerSequence.from_stacks(self.model, self.stacks())

    def no_pipeline_reason(self) -> str | None:
        """Return why this model does not support pipeline parallelism, or None if it does."""
        return None

    def replicated_paths(self) -> list[str] | None:
        """Return which modules and parameters may stay replicated, or None if all may."""
        return None


class EmptyPolicy(Policy):
    """A policy that shards no weights."""

    def module_policy(self) -> Mapping[ModuleKey, ModulePolicyDescription]:
        return {}
