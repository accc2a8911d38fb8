"""What a policy is: how a model is sharded, as a description that ``ModelSharder`` carries out.

Three ways to write one, of which each is turned into the next:

- roles (``shardformer.policies.role_policy.RolePolicy``): what the model is made of, as a table;
- the first form: ``argument_policy`` with lists of ``Col_Layer`` and ``Row_Layer``;
- ``module_policy``: for each kind of module, what becomes of its attributes, parameters and submodules.
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
from shardformer.policies.legacy import LegacyPolicy, legacy_descriptions
from shardformer.policies.module_descriptions import ModuleKey, ModulePolicyDescription
from shardformer.public_names import renamed_arguments

RENAMED = {
    "prove": "validate", "find_part": "find_submodel_policy", "chain": "layer_sequence", "whole": "keep_replicated",
    "parts": "submodels", "single": "unstacked_blocks", "against_sequence": "no_sequence_parallel",
    "against_pipeline": "no_pipeline", "refuses_sequence": "no_sequence_parallel_reason",
    "refuses_pipeline": "no_pipeline_reason",
}  # fmt: skip
"""Earlier names of what a policy defines -> the names now."""


@renamed_arguments({}, attributes=RENAMED)
class Policy(LegacyPolicy):
    """How a model is sharded. Overwrite what your model needs; see the module's docstring for the three forms."""

    name: str | None = None
    notes: Sequence[str] = ()
    """What ``describe_sharding`` says of it."""
    validate: bool = True
    """Whether a policy that a user gives is tried on a copy of a small model before it is used."""

    unproven: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    """"tensor", "pipe" or "enable_sequence_parallelism" -> inputs (images in a text) with which it was not proven, and
    why. Batches with them are refused then."""

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
        """Finds the policy of a model inside this one; None: of a registered family only."""

    @property
    def changes_classes_or_ties(self) -> bool:
        """Whether it overwrites ``inject_policy`` or ``binding_policy`` of the first form."""
        functions = (self.inject_policy, self.binding_policy)
        return functions != (LegacyPolicy.inject_policy, LegacyPolicy.binding_policy)

    def set_model(self, model: nn.Module) -> None:
        """Makes the model known as ``self.model``."""
        self.model = model

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Makes the config known as ``self.shard_config``, and checks that the policy can do it."""
        self.shard_config = shard_config
        # with tensor parallelism off nothing is cut: the policy sees the model as one rank alone does
        self.axis = shard_config.head_axis() if shard_config.enable_tensor_parallelism else Axis("tensor")
        self.config_sanity_check()

    def config_sanity_check(self) -> None:
        """Raises ConfigError when the config asks for what this policy cannot do."""

    def preprocess(self) -> nn.Module:
        """Work on the plain model before it is sharded. Returns the model."""
        model: nn.Module = self.model
        return model

    def module_policy(self) -> Mapping[ModuleKey, ModulePolicyDescription]:
        """Which modules become what. By default what the first form says."""
        return legacy_descriptions(self)

    def postprocess(self) -> nn.Module:
        """Work on the sharded model. Returns the model."""
        model: nn.Module = self.model
        return model

    def stacks(self) -> list[StackDescription]:
        """The model's stacks of layers; sequence parallelism and pipelines need them."""
        return []

    def layer_sequence(self) -> LayerSequence:
        """The layers as a pipeline cuts them: one behind the other, in the order in which they run."""
        return LayerSequence.of(self.model, self.stacks())

    def no_pipeline_reason(self) -> str | None:
        """Why the layers of this model cannot be on several stages; None where they can."""
        return None

    def replicated(self) -> list[str] | None:
        """Paths of what stays whole on purpose. None: whatever no rule names may."""
        return None


class WithoutRules(Policy):
    """The policy of a model of which nothing is sharded."""

    def module_policy(self) -> Mapping[ModuleKey, ModulePolicyDescription]:
        return {}
