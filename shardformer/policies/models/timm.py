"""What timm's models share: no config, layers that ask their own module for the heads, methods that rebuild layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn

from shardformer.errors import ConfigError
from shardformer.policies.describe import ModuleKey, ModulePolicyDescription
from shardformer.policies.lowering import LayerLowering
from shardformer.policies.paths import module_at, value_at
from shardformer.policies.role_policy import MLP, Attention, RolePolicy
from shardformer.policies.roles import Counted

REBUILD = ("set_input_size", "reset_classifier", "prune_intermediate_layers")
LOOK_BETWEEN = ("forward_intermediates", "get_intermediate_layers")

TIMM_MLP = MLP("mlp", up=["fc1?", "fc1_g?", "fc1_x?"], down="fc2", fused=None, norm="norm")


class TimmPolicy(RolePolicy):
    """A table for a model of timm.

    Class attributes:
        per_head: parameters outside of the layers, where a model has them, with a dim that counts the heads of every
            layer.
    """

    num_heads = ".num_heads"
    per_head: Mapping[str, Counted] = {}

    def module_policy(self) -> Mapping[ModuleKey, ModulePolicyDescription]:
        said = dict(super().module_policy())
        if self.per_head:
            stack, _ = self._present_stacks()[0]
            layer = LayerLowering(module_at(self.model, f"{stack.layers}.0"), stack.layers, self.axis)
            first = next(block for block in stack.blocks if isinstance(block, Attention))
            layout = self._attention(first, layer).layout
            said[""].parameters = {
                path: layout.parameter_split(path, full, counted)
                for path, counted in self.per_head.items()
                if (full := value_at(self.model, path)) is not None
            }
        return said

    def postprocess(self) -> nn.Module:
        between = LOOK_BETWEEN if self.shard_config.enable_sequence_parallelism else ()
        for name in [*REBUILD, *between] if self.axis.size > 1 else []:
            if hasattr(self.model, name):
                setattr(self.model, name, _Refused(name))
        return super().postprocess()


class _Refused:
    """Stands for a method that does not know of ranks."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        if self.name in REBUILD:
            raise ConfigError(
                f"{self.name} on a sharded model",
                rule="Weights are compared, cut and their gradients agreed on between ranks when a model is sharded",
                remedy=f"Call {self.name} on the plain model, then shard it",
            )
        raise ConfigError(
            f"{self.name} with sequence parallelism",
            rule="Between the blocks each tensor rank holds its own part of the sequence only",
            remedy="Leave sequence parallelism off for it",
        )
