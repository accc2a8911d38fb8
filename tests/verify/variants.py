"""Config settings that change the structure of the families' models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardformer.verify.small_models import SMALL_CONFIGS, SmallModelFactory


@dataclass(frozen=True)
class Changed:
    """A family's main model or another head, with changed settings."""

    family: str
    changes: Mapping[str, Any]
    head: str = ""

    @property
    def sample(self) -> SmallModelFactory:
        return SmallModelFactory(self.family, self.head, self.changes)


_T5_TEXT = {**SMALL_CONFIGS["t5"], "model_type": "t5"}
_POST_NORM = {"do_layer_norm_before": False}
_OLD_FALCON = {"new_decoder_architecture": False, "num_kv_heads": None}
_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
_GROUPS = {"num_attention_heads": 12, "num_key_value_heads": 3}

VARIANTS: dict[str, Changed] = {
    "chatglm with three groups": Changed("chatglm", {"multi_query_group_num": 3, "add_qkv_bias": False}),
    "chatglm with as many groups as heads": Changed("chatglm", {"multi_query_group_num": 6, "num_layers": 3}),
    "bert untied": Changed("bert", {"tie_word_embeddings": False}),
    "bert of three layers": Changed("bert", {"num_hidden_layers": 3}),
    "bert of one layer": Changed("bert", {"num_hidden_layers": 1}),
    "bert with eager attention": Changed("bert", {"attn_implementation": "eager"}),
    "bert of one token type": Changed("bert", {"type_vocab_size": 1, "hidden_act": "relu"}),
    "gpt2 untied": Changed("gpt2", {"tie_word_embeddings": False}),
    "gpt2 of three layers": Changed("gpt2", {"n_layer": 3, "n_inner": None}),
    "gpt2 with upcast attention": Changed(
        "gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}
    ),
    "llama with biases": Changed("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with biases, as many KV heads as heads": Changed(
        "llama", {"attention_bias": True, "num_key_value_heads": 6, "num_hidden_layers": 3}
    ),
    "llama tied": Changed("llama", {"tie_word_embeddings": True}),
    "llama with a head dim of its own": Changed("llama", {"head_dim": 10}),
    "llama with three KV heads": Changed("llama", {"num_key_value_heads": 3}),
    "llama with one KV head": Changed("llama", {"num_key_value_heads": 1}),
    "llama with four KV heads": Changed("llama", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "llama with nine heads on three": Changed(
        "llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 54}
    ),
    "llama with groups that ranks cut": Changed("llama", _GROUPS),
    "llama with five heads on one": Changed(
        "llama", {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 50}
    ),
    "t5 gated": Changed("t5", {"feed_forward_proj": "gated-gelu"}),
    "t5 untied": Changed("t5", {"tie_word_embeddings": False, "num_layers": 3, "num_decoder_layers": 1}),
    "t5 with a head dim of its own": Changed(
        "t5", {"d_kv": 5, "feed_forward_proj": "gated-silu", "tie_word_embeddings": False}
    ),
    "opt with narrow embeddings": Changed("opt", {"word_embed_proj_dim": 30}),
    "opt with norms after": Changed("opt", _POST_NORM),
    "opt with norms after and narrow embeddings": Changed("opt", {**_POST_NORM, "word_embed_proj_dim": 30}),
    "opt without biases and norm weights": Changed(
        "opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}
    ),
    "opt without a last norm": Changed("opt", {"_remove_final_layer_norm": True, "activation_function": "gelu"}),
    "opt untied": Changed("opt", {"tie_word_embeddings": False}),
    "bloom slow but exact": Changed("bloom", {"pretraining_tp": 2, "slow_but_exact": True}),
    "bloom with the residual after the norm": Changed("bloom", {"apply_residual_connection_post_layernorm": True}),
    "bloom of five heads, untied": Changed("bloom", {"n_head": 5, "hidden_size": 50, "tie_word_embeddings": False}),
    "falcon of one KV head": Changed("falcon", {**_OLD_FALCON, "multi_query": True}),
    "falcon of one KV head, one after the other": Changed(
        "falcon", {**_OLD_FALCON, "multi_query": True, "parallel_attn": False, "bias": True}
    ),
    "falcon of one KV head with ALiBi": Changed("falcon", {**_OLD_FALCON, "multi_query": True, "alibi": True}),
    "falcon interleaved": Changed("falcon", {**_OLD_FALCON, "multi_query": False}),
    "falcon interleaved with ALiBi, one after the other": Changed(
        "falcon", {**_OLD_FALCON, "multi_query": False, "alibi": True, "parallel_attn": False, "bias": True}
    ),
    "falcon of groups with ALiBi": Changed("falcon", {"alibi": True, "bias": True}),
    "falcon of groups with one norm": Changed("falcon", {"num_ln_in_parallel_attn": 1}),
    # transformers 5.23 fails on groups with parallel_attn=False, because it creates no norms for them
    "falcon of as many KV heads as heads, untied": Changed(
        "falcon", {"num_kv_heads": 6, "tie_word_embeddings": False, "ffn_hidden_size": None}
    ),
    "gpt_neo all global": Changed("gpt_neo", {"attention_types": [[["global"], 2]], "intermediate_size": None}),
    "gpt_neo all local": Changed("gpt_neo", {"attention_types": [[["local"], 2]]}),
    "gpt_neo untied": Changed("gpt_neo", {"tie_word_embeddings": False}),
    "gptj with all dims rotated": Changed("gptj", {"rotary_dim": 8, "n_inner": None}),
    "gptj of five heads": Changed("gptj", {"n_head": 5, "n_embd": 40}),
    "qwen2 with a window in its last layer": Changed("qwen2", _WINDOW),
    "qwen2 tied, of as many KV heads as heads": Changed(
        "qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 6}
    ),
    "qwen2 with groups that ranks cut": Changed("qwen2", _GROUPS),
    "qwen3 with a head dim of its own": Changed("qwen3", {"head_dim": 10}),
    "qwen3 with biases and a window": Changed("qwen3", {**_WINDOW, "attention_bias": True}),
    "qwen3 tied, of one KV head": Changed("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "mistral without a window": Changed("mistral", {"sliding_window": None}),
    "mistral with a head dim of its own": Changed("mistral", {"head_dim": 10, "tie_word_embeddings": True}),
    "mistral with groups that ranks cut": Changed("mistral", _GROUPS),
    "roberta untied": Changed("roberta", {"tie_word_embeddings": False}),
    "roberta of one token type": Changed("roberta", {"type_vocab_size": 1}),
    "albert of two groups": Changed("albert", {"num_hidden_layers": 4, "num_hidden_groups": 2}),
    "albert of two layers in a group": Changed("albert", {"inner_group_num": 2}),
    "albert with wide embeddings, untied": Changed("albert", {"embedding_size": 48, "tie_word_embeddings": False}),
    "ernie with task types": Changed("ernie", {"use_task_id": True}),
    "ernie untied": Changed("ernie", {"tie_word_embeddings": False}),
    "whisper of other depths": Changed("whisper", {"encoder_layers": 3, "decoder_layers": 1, "scale_embedding": True}),
    "whisper untied": Changed("whisper", {"tie_word_embeddings": False, "decoder_attention_heads": 4}),
    "whisper with a sum over layers": Changed(
        "whisper", {"use_weighted_layer_sum": True}, "WhisperForAudioClassification"
    ),
    "vit without biases": Changed("vit", {"qkv_bias": False}),
    "vit with a pooler of its own": Changed("vit", {"pooler_output_size": 30, "pooler_act": "relu"}, "ViTModel"),
    "beit with a shared bias of positions": Changed(
        "beit", {"use_relative_position_bias": False, "use_shared_relative_position_bias": True}
    ),
    "beit with positions of its own": Changed(
        "beit", {"use_relative_position_bias": False, "use_absolute_position_embeddings": True}
    ),
    "beit without positions, with its first token": Changed(
        "beit", {"use_relative_position_bias": False, "use_mean_pooling": False, "layer_scale_init_value": 0.0}
    ),
    "beit with a pyramid": Changed(
        "beit", {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "add_fpn": True}, "BeitBackbone"
    ),
    "swin with positions of its own": Changed("swin", {"use_absolute_embeddings": True}),
    "swin without biases": Changed("swin", {"qkv_bias": False, "window_size": 2}),
    "swinv2 from other windows": Changed("swinv2", {"pretrained_window_sizes": [5, 2]}),
    # transformers 5.23 fails on swinv2's use_absolute_embeddings (one position too many)
    "swinv2 without biases": Changed("swinv2", {"qkv_bias": False, "window_size": 2}),
    "sam without relative positions": Changed(
        "sam", {"vision_config": {**SMALL_CONFIGS["sam"]["vision_config"], "use_rel_pos": False, "qkv_bias": False}}
    ),
    "sam with a last window": Changed(
        "sam",
        {"vision_config": {**SMALL_CONFIGS["sam"]["vision_config"], "global_attn_indexes": [0], "use_abs_pos": False}},
    ),
    "blip-2 with t5": Changed("blip-2", {"text_config": _T5_TEXT}),
    "blip-2 with gated t5, untied": Changed(
        "blip-2",
        {"text_config": {**_T5_TEXT, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}},
    ),
    "blip-2 model with t5": Changed("blip-2", {"text_config": _T5_TEXT}, "Blip2Model"),
    "blip-2 without biases": Changed(
        "blip-2", {"vision_config": {**SMALL_CONFIGS["blip-2"]["vision_config"], "qkv_bias": False}}
    ),
    "blip-2 that reads the image in each layer": Changed(
        "blip-2", {"qformer_config": {**SMALL_CONFIGS["blip-2"]["qformer_config"], "cross_attention_frequency": 1}}
    ),
}
