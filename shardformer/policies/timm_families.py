"""Sharding policies for timm models: ViT, DeiT, BEiT, EVA, Swin and Swin V2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn

from shardformer.errors import ConfigError
from shardformer.module_paths import get_attribute_by_path, get_submodule_or_raise
from shardformer.pipeline.layer_sequence import PipelineHints
from shardformer.policies.convert_roles import LayerRoleConverter
from shardformer.policies.families import NO_SWIN_SEQUENCE_PARALLEL
from shardformer.policies.module_descriptions import ModuleKey, ModulePolicyDescription
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionInputs, AttentionProjections, LayerStack, LocalAttr

REBUILD = ("set_input_size", "reset_classifier", "prune_intermediate_layers")
READ_BETWEEN_LAYERS = ("forward_intermediates", "get_intermediate_layers")

TIMM_MLP = MLP("mlp", up=["fc1?", "fc1_g?", "fc1_x?"], down="fc2", fused=None, norm="norm")


class TimmPolicy(RolePolicy):
    """Base class of the sharding policies for timm models.

    Class attributes:
        head_attrs: optional parameters outside the layers -> the dim that counts the heads of every layer.
    """

    num_heads = ".num_heads"
    head_attrs: Mapping[str, LocalAttr] = {}

    def module_policy(self) -> Mapping[ModuleKey, ModulePolicyDescription]:
        descriptions = dict(super().module_policy())
        if self.head_attrs:
            stack, _ = self._find_existing_stacks()[0]
            layer = LayerRoleConverter(get_submodule_or_raise(self.model, f"{stack.layers}.0"), stack.layers, self.axis)
            first = next(block for block in stack.blocks if isinstance(block, Attention))
            layout = self._create_attention_converter(first, layer).head_layout
            descriptions[""].parameters = {
                path: layout.get_parameter_split(path, full, counted)
                for path, counted in self.head_attrs.items()
                if (full := get_attribute_by_path(self.model, path)) is not None
            }
        return descriptions

    def postprocess(self) -> nn.Module:
        between = READ_BETWEEN_LAYERS if self.shard_config.enable_sequence_parallelism else ()
        for name in [*REBUILD, *between] if self.axis.size > 1 else []:
            if hasattr(self.model, name):
                setattr(self.model, name, _UnsupportedMethod(name))
        return super().postprocess()


class _UnsupportedMethod:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        if self.name in REBUILD:
            raise ConfigError(
                f"{self.name} is not supported on a sharded model.",
                remedy=f"Call {self.name} on the plain model before you shard it.",
            )
        raise ConfigError(
            f"{self.name} does not support sequence parallelism.", remedy="Set enable_sequence_parallelism=False."
        )


BIASES = {"q_bias?": "width", "k_bias?": "width", "v_bias?": "width"}
OUTSIDE = ("patch_embed", "pos_embed?", "cls_token?", "reg_token?", "attn_pool?", "head?")


FUSED = AttentionProjections(qkv="qkv", out="proj")


class TimmBeitPolicy(TimmPolicy):
    attention = Attention(
        "attn",
        FUSED,
        local_attrs={"num_heads": "heads", **BIASES, "relative_position_bias_table?": ("heads", -1)},
        inputs=AttentionInputs(reads_width=True),
    )
    stack = LayerStack(
        "blocks", [attention, TIMM_MLP], final_norm="norm", stages=PipelineHints(on_every_stage=["rel_pos_bias?"])
    )
    head_attrs = {"rel_pos_bias.relative_position_bias_table": ("heads", -1)}
    keep_replicated = OUTSIDE


class TimmEvaPolicy(TimmPolicy):
    attention = Attention(
        "attn",
        AttentionProjections(qkv="qkv?", q="q_proj?", k="k_proj?", v="v_proj?", out="proj"),
        local_attrs={
            "num_heads": "heads",
            "num_kv_heads?": "kv_heads",
            "num_kv_groups?": "groups",
            "attn_dim?": "width",
            **BIASES,
            "norm": "heads",
        },
        inputs=AttentionInputs(reads_width=True),
        num_kv_heads=".num_kv_heads",
    )
    stack = LayerStack(
        "blocks", [attention, TIMM_MLP], final_norm="norm", stages=PipelineHints(on_every_stage=["rope?"])
    )
    head_attrs = {"rope.freqs": ("heads", 2)}
    keep_replicated = OUTSIDE


class TimmSwinPolicy(TimmPolicy):
    attention = Attention(
        "attn", FUSED, local_attrs={"num_heads": "heads", "relative_position_bias_table": ("heads", -1)}
    )
    stack = LayerStack("layers.*.blocks", [attention, TIMM_MLP])
    keep_replicated = ("patch_embed", "layers.*.downsample", "head?")
    no_sequence_parallel = NO_SWIN_SEQUENCE_PARALLEL


class TimmSwinV2Policy(TimmSwinPolicy):
    attention = Attention(
        "attn",
        FUSED,
        local_attrs={
            "num_heads": "heads",
            **BIASES,
            "logit_scale": ("heads", 0),
            "cpb_mlp.0.weight": "inside",
            "cpb_mlp.2.weight": ("heads", 0),
        },
        inputs=AttentionInputs(reads_width=True),
    )
    stack = LayerStack("layers.*.blocks", [attention, TIMM_MLP])


class TimmViTPolicy(TimmPolicy):
    attention = Attention(
        "attn",
        FUSED,
        local_attrs={"num_heads": "heads", "attn_dim?": "width", "norm": "heads"},
        inputs=AttentionInputs(reads_width=True),  # in versions without attn_dim
    )
    stack = LayerStack("blocks", [attention, TIMM_MLP], final_norm="norm")
    keep_replicated = (*OUTSIDE, "dist_token?", "head_dist?")
