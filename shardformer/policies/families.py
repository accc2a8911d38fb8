"""Built-in sharding policies for transformers and timm models, one class per family.

``shardformer.policies.policy`` lists the families. Models of other families get a policy from
``shardformer.discovery``, which derives it from the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from torch import nn

from shardformer.errors import ConfigError
from shardformer.module_paths import get_attribute_by_path_or_none, get_submodule_or_raise
from shardformer.pipeline.layer_sequence import LayerSequence, LayerStackDescription, PipelineHints
from shardformer.policies.convert_roles import LayerRoleConverter
from shardformer.policies.module_descriptions import ModuleKey, ModulePolicyDescription
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import (
    MLP,
    Q_K_V_O,
    Q_K_V_OUT,
    Attention,
    AttentionInputs,
    AttentionProjections,
    LayerStack,
    LocalAttr,
    Role,
)


class AlbertPolicy(RolePolicy):
    """Policy for ALBERT, an encoder that applies the same layer repeatedly."""

    attention = Attention(
        "attention",
        AttentionProjections(q="query", k="key", v="value", out="dense"),
        inputs=AttentionInputs(entry="query", full_sequence=True),
    )
    stack = LayerStack(
        "encoder.albert_layer_groups.*.albert_layers", [attention, MLP("ffn", up="", down=".ffn_output")]
    )
    embeddings = "embeddings.word_embeddings"
    head = "predictions.decoder"
    keep_replicated = (
        "embeddings.position_embeddings",
        "embeddings.token_type_embeddings",
        "encoder.embedding_hidden_mapping_in",
        "pooler?",
    )

    def layer_sequence(self) -> LayerSequence:
        """Return each layer as often as the encoder applies it. The repetitions share weights but run separately."""
        config, groups = self.model.config, "encoder.albert_layer_groups"
        depth, kinds = config.num_hidden_layers, config.num_hidden_groups
        units = tuple(f"{groups}.{at * kinds // depth}" for at in range(depth))
        return LayerSequence((LayerStackDescription(groups, layer_calls=units).with_path_prefix(self.base),))


class BertPolicy(RolePolicy):
    """Policy for BERT, RoBERTa and ERNIE, which are post-norm encoders or decoders."""

    stack = LayerStack(
        "encoder.layer",
        [
            Attention(
                "attention.self", AttentionProjections(q="query", k="key", v="value", out=".attention.output.dense")
            ),
            Attention(
                "crossattention.self",
                AttentionProjections(q="query", k="key", v="value", out=".crossattention.output.dense"),
                inputs=AttentionInputs(cross_attention=True),
                optional=True,
            ),
            MLP("intermediate", up="dense", down=".output.dense"),
        ],
        cross_states=("encoder", "encoder_hidden_states"),
    )
    embeddings = "embeddings.word_embeddings"
    head = ("cls.predictions.decoder", "lm_head.decoder")
    keep_replicated = (
        "embeddings.position_embeddings",
        "embeddings.token_type_embeddings",
        "embeddings.task_type_embeddings?",
        "pooler?",
    )


class BloomPolicy(RolePolicy):
    """Policy for BLOOM, a decoder with ALiBi and a fused qkv projection that is interleaved by head."""

    attention = Attention(
        "self_attention",
        AttentionProjections(qkv="query_key_value", interleaved=True, out="dense"),
        local_attrs={"num_heads": "heads", "alibi": ("heads", 0)},
    )
    stack = LayerStack(
        "h",
        [attention, MLP("mlp", up="dense_h_to_4h", down="dense_4h_to_h")],
        final_norm="ln_f",
        stages=PipelineHints(num_outputs=1),
    )
    embeddings = "word_embeddings"
    head = "lm_head"

    def config_sanity_check(self) -> None:
        super().config_sanity_check()
        config = self.model.config
        if config.slow_but_exact and config.pretraining_tp > 1:
            raise ConfigError(
                f"BLOOM cannot be sharded with slow_but_exact=True and pretraining_tp={config.pretraining_tp}.",
                remedy="Build the model with slow_but_exact=False, which differs only by rounding.",
            )


class ChatGLMPolicy(RolePolicy):
    """Policy for ChatGLM2 and ChatGLM3, decoders with rotary positions and a fused gate and up projection."""

    stack = LayerStack(
        "encoder.layers",
        [
            Attention(
                "self_attention",
                AttentionProjections(qkv="query_key_value", out="dense"),
                local_attrs={
                    "num_attention_heads_per_partition": "heads",
                    "num_multi_query_groups_per_partition": "kv_heads",
                    "core_attention.hidden_size_per_partition": "width",
                    "core_attention.num_attention_heads_per_partition?": "heads",
                },
            ),
            MLP("mlp", up="dense_h_to_4h", down="dense_4h_to_h", fused=2),
        ],
        final_norm="encoder.final_layernorm?",
    )
    embeddings = "embedding.word_embeddings"
    head = "transformer.output_layer"
    keep_replicated = ("prefix_encoder?",)
    num_kv_heads = ".num_multi_query_groups_per_partition"


class FalconPolicy(RolePolicy):
    """Policy for Falcon, a decoder whose fused qkv projection is grouped by KV head."""

    stack = LayerStack(
        "h",
        [
            Attention(
                "self_attention",
                AttentionProjections(qkv="query_key_value", interleaved=True, out="dense"),
                local_attrs={
                    "num_heads": "heads",
                    "num_kv_heads": "kv_heads",
                    "alibi": ("heads", 1),
                    "attention_mask": ("heads", 1),
                },
            ),
            MLP("mlp", up="dense_h_to_4h", down="dense_4h_to_h", shared_exit="self_attention.dense"),
        ],
        final_norm="ln_f",
        stages=PipelineHints(num_outputs=1),
    )
    embeddings = "word_embeddings"
    head = "lm_head"
    num_kv_heads = ".num_kv_heads"

    def sums_block_outputs(self) -> bool:
        return bool(self.model.config.new_decoder_architecture or self.model.config.parallel_attn)


class GPT2Policy(RolePolicy):
    """Policy for GPT-2, a decoder with learned positions, a fused qkv Conv1D and optional cross-attention."""

    stack = LayerStack(
        "h",
        [
            Attention("attn", AttentionProjections(qkv="c_attn", out="c_proj"), local_attrs={"split_size": "width"}),
            Attention(
                "crossattention",
                AttentionProjections(q="q_attn", kv="c_attn", out="c_proj"),
                local_attrs={"split_size": "width"},
                inputs=AttentionInputs(cross_attention=True),
                optional=True,
            ),
            MLP("mlp", up="c_fc", down="c_proj"),
        ],
        final_norm="ln_f",
        cross_states=("", "encoder_hidden_states"),
    )
    embeddings = "wte"
    head = "lm_head"
    keep_replicated = ("wpe",)


class GPTNeoPolicy(RolePolicy):
    """Policy for GPT-Neo, a decoder with learned positions and alternating global and local attention."""

    attention = Attention("attn.attention", Q_K_V_OUT, local_attrs={"num_heads": "heads"})
    stack = LayerStack(
        "h", [attention, MLP("mlp", up="c_fc", down="c_proj")], final_norm="ln_f", stages=PipelineHints(num_outputs=1)
    )
    embeddings = "wte"
    head = "lm_head"
    keep_replicated = ("wpe",)


class GPTJPolicy(RolePolicy):
    """Policy for GPT-J, a decoder in which attention and MLP read the output of the same norm."""

    stack = LayerStack(
        "h",
        [
            Attention("attn", Q_K_V_OUT, local_attrs={"num_attention_heads": "heads"}),
            MLP("mlp", up="fc_in", down="fc_out", shared_exit="attn.out_proj"),
        ],
        final_norm="ln_f",
        stages=PipelineHints(num_outputs=None),  # from transformers 5.24 on, only the hidden states
    )
    embeddings = "wte"
    head = "lm_head"

    def sums_block_outputs(self) -> bool:
        return bool(self.model.config.resid_pdrop == 0)  # dropout is applied to each output before the sum


class LlamaPolicy(RolePolicy):
    """Policy for LLaMA, Mistral, Qwen2 and Qwen3, decoders with rotary positions and a gated MLP."""

    attention = Attention("self_attn", Q_K_V_O, local_attrs={"num_key_value_groups": "groups"})
    stack = LayerStack(
        "layers", [attention, MLP("mlp", up=["gate_proj", "up_proj"], down="down_proj")], final_norm="norm"
    )
    embeddings = "embed_tokens"
    head = "lm_head"


class OPTPolicy(RolePolicy):
    """Policy for OPT, a pre-norm or post-norm decoder with learned positions."""

    attention = Attention("self_attn", Q_K_V_OUT, local_attrs={"num_heads": "heads"})
    stack = LayerStack(
        "decoder.layers",
        [attention, MLP("fc1", up="", down=".fc2")],
        final_norm="decoder.final_layer_norm?",
        stages=PipelineHints(with_last_layer=["decoder.project_out?"]),
    )
    embeddings = "decoder.embed_tokens"
    head = "lm_head"
    keep_replicated = ("decoder.embed_positions", "decoder.project_in?", "decoder.project_out?")


BLIP2_VISION_BLOCKS: list[Role] = [
    Attention(
        "self_attn",
        AttentionProjections(qkv="qkv", out="projection"),
        local_attrs={"num_heads": "heads"},
        inputs=AttentionInputs(reads_width=True),
        num_heads=".num_heads",
    ),
    MLP("mlp", up="fc1", down="fc2"),
]


def _make_qformer_attention_policy(attention_path: str, **attention_kwargs: Any) -> Attention:
    return Attention(
        f"{attention_path}.attention",
        AttentionProjections(q="query", k="key", v="value", out=f".{attention_path}.output.dense"),
        local_attrs={"num_attention_heads": "heads", "all_head_size": "width"},
        **attention_kwargs,
    )


QFORMER_BLOCKS: list[Role] = [
    _make_qformer_attention_policy("attention"),
    _make_qformer_attention_policy(
        "crossattention", inputs=AttentionInputs(arguments=["encoder_hidden_states"]), optional=True
    ),
    MLP("intermediate_query", up="dense", down=".output_query.dense"),
    MLP("intermediate", up="dense", down=".output.dense", optional=True),
]
QFORMER_STAGES = PipelineHints(with_first_layer=["query_tokens"])
NO_QFORMER_SEQUENCE_PARALLEL = "the Q-Former sends its queries and its text through different layers"


class Blip2VisionPolicy(RolePolicy):
    """Policy for the image encoder of BLIP-2."""

    stack = LayerStack("encoder.layers", BLIP2_VISION_BLOCKS)
    keep_replicated = ("embeddings",)
    num_heads = ".num_heads"


class Blip2QFormerPolicy(RolePolicy):
    """Policy for the Q-Former of BLIP-2."""

    stack = LayerStack("encoder.layer", QFORMER_BLOCKS, no_sequence_parallel=NO_QFORMER_SEQUENCE_PARALLEL)
    num_heads = ".num_attention_heads"


class Blip2Policy(RolePolicy):
    """Policy for BLIP-2: the image encoder, the Q-Former and the language model."""

    stack = (
        LayerStack("vision_model.encoder.layers", BLIP2_VISION_BLOCKS, optional=True),
        LayerStack(
            "qformer.encoder.layer",
            QFORMER_BLOCKS,
            no_sequence_parallel=NO_QFORMER_SEQUENCE_PARALLEL,
            optional=True,
            stages=QFORMER_STAGES,
        ),
    )
    submodels = ("language_model?",)
    embeddings = "embeddings.word_embeddings?"
    keep_replicated = (
        "vision_model.embeddings?", "query_tokens?", "language_projection?", "embeddings?", "itm_head?",
        "vision_projection?", "text_projection?",
    )  # fmt: skip
    num_heads = ".num_attention_heads"

    def layer_sequence(self) -> LayerSequence:
        """Return the layers of the image encoder, the Q-Former and the language model, in execution order."""
        entries = {
            "qformer.encoder.layer": ("qformer", "encoder_hidden_states"),
            "language_model": ("language_projection", "input"),
        }
        found, entered = list(super().layer_sequence().stacks), set()
        for at, stack in enumerate(found):
            entry = next((d for d in entries if f"{stack.layers}.".startswith(f"{d}.")), None)
            if at and entry is not None and entry not in entered:
                entered.add(entry)
                found[at] = replace(stack, context=entries[entry])
        return LayerSequence(tuple(found))


def _make_sam_attention(attention_path: str) -> Attention:
    return Attention(
        attention_path,
        Q_K_V_OUT,
        local_attrs={"num_attention_heads": "heads"},
        inputs=AttentionInputs(arguments=["key", "value"]),
    )


LAYERS: list[Role] = [
    Attention(
        "attn",
        AttentionProjections(qkv="qkv", out="proj"),
        local_attrs={"num_attention_heads": "heads", "rel_pos_h?": "inside", "rel_pos_w?": "inside"},
    ),
    MLP("mlp", up="lin1", down="lin2"),
]


class SamVisionPolicy(RolePolicy):
    """Policy for the image encoder of SAM, which has windowed attention."""

    stack = LayerStack("vision_encoder.layers", LAYERS)
    keep_replicated = ("vision_encoder.patch_embed", "vision_encoder.neck", "vision_encoder.pos_embed?")
    num_heads = ".num_attention_heads"
    no_sequence_parallel = "its windows reorder the image between the blocks"


class SamPolicy(RolePolicy):
    """Policy for SAM: its image encoder and mask decoder."""

    stack = (
        LayerStack("vision_encoder.layers", LAYERS, stages=PipelineHints(with_last_layer=["shared_image_embedding"])),
        LayerStack(
            "mask_decoder.transformer.layers",
            [
                _make_sam_attention("self_attn"),
                _make_sam_attention("cross_attn_token_to_image"),
                MLP("mlp", up="lin1", down="lin2"),
                _make_sam_attention("cross_attn_image_to_token"),
            ],
        ),
    )
    unstacked_blocks = (_make_sam_attention("mask_decoder.transformer.final_attn_token_to_image"),)
    keep_replicated = (
        "vision_encoder.patch_embed", "vision_encoder.neck", "vision_encoder.pos_embed?", "shared_image_embedding",
        "prompt_encoder", "mask_decoder.iou_token", "mask_decoder.mask_tokens", "mask_decoder.upscale_conv1",
        "mask_decoder.upscale_conv2", "mask_decoder.output_hypernetworks_mlps", "mask_decoder.iou_prediction_head",
    )  # fmt: skip
    num_heads = ".num_attention_heads"
    no_sequence_parallel = SamVisionPolicy.no_sequence_parallel

    def layer_sequence(self) -> LayerSequence:
        """Return the layers of the image encoder in execution order. The layers of the mask decoder stay on one stage.

        The mask decoder passes two tensors between its layers.
        """
        return LayerSequence(super().layer_sequence().stacks[:1])


NO_SWIN_SEQUENCE_PARALLEL = "its windows partition the image anew in every layer"
SWINV2_POSITION_BIAS = "continuous_position_bias_mlp.2"


class SwinPolicy(RolePolicy):
    """Policy for Swin, an image encoder with windowed attention and several stages."""

    attention = Attention(
        "attention", Q_K_V_O, local_attrs={"relative_position_bias.relative_position_bias_table": "heads"}
    )
    stack = LayerStack(
        "encoder.layers.*.blocks", [attention, MLP("mlp", up="fc1", down="fc2")], stages=PipelineHints(num_outputs=2)
    )
    keep_replicated = ("embeddings", "encoder.layers.*.downsample?", ".decoder")
    num_heads = ".num_attention_heads"
    no_sequence_parallel = NO_SWIN_SEQUENCE_PARALLEL


class Swinv2Policy(RolePolicy):
    """Policy for Swin V2, which uses cosine attention and computes the position biases with an MLP."""

    stack = LayerStack(
        "encoder.layers.*.blocks",
        [
            Attention(
                "attention.self",
                AttentionProjections(
                    q="query", k="key", v="value", out=".attention.output.dense", gates=[SWINV2_POSITION_BIAS]
                ),
                local_attrs={"num_attention_heads": "heads", "all_head_size": "width", "logit_scale": "heads"},
                inputs=AttentionInputs(inner_inputs=[SWINV2_POSITION_BIAS]),
            ),
            MLP("intermediate", up="dense", down=".output.dense"),
        ],
        stages=PipelineHints(num_outputs=1),
    )
    keep_replicated = (
        "embeddings",
        "encoder.layers.*.downsample?",
        "encoder.layers.*.blocks.*.attention.self.continuous_position_bias_mlp.0",
        ".decoder",
    )
    num_heads = ".num_attention_heads"
    no_sequence_parallel = NO_SWIN_SEQUENCE_PARALLEL


T5_BIAS_TABLE = ("layer.0.SelfAttention.relative_attention_bias", "layer.0.SelfAttention.has_relative_attention_bias")
T5_STAGES = PipelineHints(num_outputs=3, shared_from_first=T5_BIAS_TABLE)
"""Only the first layer computes the biases. In a pipeline the first layer of each stage computes them."""


def _make_t5_attention(attention_path: str, inputs: AttentionInputs = AttentionInputs()) -> Attention:
    counts = {"n_heads": "heads", "relative_attention_bias?": "heads"}
    return Attention(attention_path, AttentionProjections(q="q", k="k", v="v", out="o"), counts, inputs)


class T5Policy(RolePolicy):
    """Policy for T5, an encoder-decoder whose first layers compute relative position biases."""

    stack = (
        LayerStack(
            "encoder.block",
            [
                _make_t5_attention("layer.0.SelfAttention"),
                MLP("layer.1.DenseReluDense", up=["wi?", "wi_0?", "wi_1?"], down="wo"),
            ],
            final_norm="encoder.final_layer_norm",
            stages=T5_STAGES,
        ),
        LayerStack(
            "decoder.block",
            [
                _make_t5_attention("layer.0.SelfAttention"),
                _make_t5_attention("layer.1.EncDecAttention", AttentionInputs(cross_attention=True)),
                MLP("layer.2.DenseReluDense", up=["wi?", "wi_0?", "wi_1?"], down="wo"),
            ],
            final_norm="decoder.final_layer_norm",
            cross_states=("decoder", "encoder_hidden_states"),
            stages=T5_STAGES,
            optional=True,
        ),
    )
    embeddings = ("shared?", "encoder.embed_tokens", "decoder.embed_tokens?")
    head = "lm_head"


class ViTPolicy(RolePolicy):
    """Policy for ViT, a pre-norm image encoder with learned positions."""

    stack = LayerStack(
        "layers", [Attention("attention", Q_K_V_O), MLP("mlp", up="fc1", down="fc2")], final_norm="layernorm"
    )
    keep_replicated = ("embeddings", "pooler?")


class BeitPolicy(RolePolicy):
    """Policy for BEiT, a pre-norm image encoder with relative position biases for each head."""

    stack = LayerStack(
        "layers",
        [
            Attention(
                "attention",
                Q_K_V_O,
                local_attrs={
                    ".relative_position_bias.relative_position_bias_table?": "heads",
                    "attention_mask": ("heads", 1),
                },
            ),
            MLP("mlp", up="fc1", down="fc2"),
        ],
        final_norm="layernorm?",
        stages=PipelineHints(on_every_stage=["shared_position_bias?", "relative_position_bias?"]),
    )
    head = "lm_head"
    keep_replicated = ("embeddings", "pooler?", "relative_position_bias?", ".decode_head", ".auxiliary_head", ".fpn")

    def reads_intermediate_layer_outputs(self) -> bool:
        return hasattr(self.model, "decode_head")


WHISPER_CROSS_ATTENTION = AttentionInputs(cross_attention=True)
WHISPER_MLP = MLP("fc1", up="", down=".fc2")


def _make_whisper_attention_policy(attention_path: str, **attention_kwargs: Any) -> Attention:
    return Attention(attention_path, Q_K_V_OUT, local_attrs={"num_heads": "heads"}, **attention_kwargs)


class WhisperPolicy(RolePolicy):
    """Policy for Whisper, which has an audio encoder and a text decoder with cross-attention."""

    stack = (
        LayerStack(
            "encoder.layers",
            [_make_whisper_attention_policy("self_attn"), WHISPER_MLP],
            final_norm="encoder.layer_norm",
            optional=True,
        ),
        LayerStack(
            "decoder.layers",
            [
                _make_whisper_attention_policy("self_attn"),
                _make_whisper_attention_policy("encoder_attn", inputs=WHISPER_CROSS_ATTENTION),
                WHISPER_MLP,
            ],
            final_norm="decoder.layer_norm",
            cross_states=("decoder", "encoder_hidden_states"),
            optional=True,
        ),
    )
    embeddings = "decoder.embed_tokens?"
    head = ("proj_out", "lm_head")
    keep_replicated = ("encoder.conv1?", "encoder.conv2?", "encoder.embed_positions?", "decoder.embed_positions?")
    num_heads = num_kv_heads = ".num_heads"

    def reads_intermediate_layer_outputs(self) -> bool:
        return bool(getattr(self.model.config, "use_weighted_layer_sum", False))


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
                path: layout.get_param_splits(path, full, counted)
                for path, counted in self.head_attrs.items()
                if (full := get_attribute_by_path_or_none(self.model, path)) is not None
            }
        return descriptions

    def postprocess(self) -> nn.Module:
        between = READ_BETWEEN_LAYERS if self.shard_config.enable_sequence_parallelism else ()
        for name in [*REBUILD, *between] if self.axis.size > 1 else []:
            if hasattr(self.model, name):
                setattr(self.model, name, _UnsupportedMethodStub(name))
        return super().postprocess()


class _UnsupportedMethodStub:
    def __init__(self, method_name: str) -> None:
        self.name = method_name

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
