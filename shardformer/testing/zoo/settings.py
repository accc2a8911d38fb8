"""The sizes of the small models, family by family, under the model type of transformers.

Odd on purpose: a vocabulary of 127, six heads of eight, two KV heads, MLPs of 70, images of 5 x 5 patches, windows that
do not divide. No dropout, no stochastic depth, nothing masked by chance; no cache in what a model gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_BERT: dict[str, Any] = dict(
    vocab_size=127, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=70,
    max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
)  # fmt: skip
_LLAMA: dict[str, Any] = dict(
    vocab_size=127, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    intermediate_size=70, max_position_embeddings=64, classifier_dropout=0.0, bos_token_id=1, eos_token_id=2,
    pad_token_id=0,
)  # fmt: skip
_OPT: dict[str, Any] = dict(
    vocab_size=127, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, ffn_dim=70,
    max_position_embeddings=64, dropout=0.0, bos_token_id=2, eos_token_id=2, pad_token_id=1, use_cache=False,
)  # fmt: skip
_WIDE = 0.2
"""Of initial weights, where with the usual 0.02 hardly anything that attention computes would reach the loss."""
_IMAGES: dict[str, Any] = dict(image_size=20, patch_size=4)
_VIT: dict[str, Any] = dict(
    hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=70, **_IMAGES,
)  # fmt: skip
# 7 x 7 patches in windows of 3: padded, and shifted in the second layer; then 4 x 4. Reconstructed from 4 x 4 by 7.
_SWIN: dict[str, Any] = dict(
    image_size=28, patch_size=4, embed_dim=24, depths=[2, 1], num_heads=[3, 6], window_size=3, mlp_ratio=1.46,
    drop_path_rate=0.0, encoder_stride=7, initializer_range=_WIDE,
)  # fmt: skip
QFORMER: Mapping[str, Any] = MappingProxyType({**_BERT, "encoder_hidden_size": 48, "cross_attention_frequency": 2})
"""BLIP-2's second part; its first layer attends to the image, its second does not."""

SMALL: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "bert": _BERT,
        "gpt2": dict(
            vocab_size=127, n_embd=48, n_layer=2, n_head=6, n_inner=70, n_positions=64, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, summary_first_dropout=0.0, classifier_dropout=0.0, bos_token_id=1,
            eos_token_id=2, pad_token_id=0,
        ),
        "llama": _LLAMA,
        "t5": dict(
            vocab_size=127, d_model=48, d_kv=8, num_layers=2, num_heads=6, d_ff=70, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=2, classifier_dropout=0.0,
        ),
        "opt": _OPT,
        "chatglm": {},
        "bloom": dict(
            vocab_size=127, hidden_size=48, n_layer=2, n_head=6, hidden_dropout=0.0, attention_dropout=0.0,
            bos_token_id=1, eos_token_id=2, pad_token_id=0, use_cache=False,
        ),
        "falcon": dict(
            vocab_size=127, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_kv_heads=2,
            new_decoder_architecture=True, ffn_hidden_size=70, max_position_embeddings=64, bos_token_id=1,
            eos_token_id=2, pad_token_id=0, use_cache=False,
        ),
        "gpt_neo": dict(
            vocab_size=127, hidden_size=48, num_layers=2, num_heads=6, intermediate_size=70, window_size=5,
            attention_types=[[["global", "local"], 1]], max_position_embeddings=64, classifier_dropout=0.0,
            bos_token_id=1, eos_token_id=2, pad_token_id=0, use_cache=False,
        ),
        "gptj": dict(
            vocab_size=127, n_embd=48, n_layer=2, n_head=6, n_inner=70, n_positions=64, rotary_dim=4, bos_token_id=1,
            eos_token_id=2, pad_token_id=0, use_cache=False,
        ),
        "qwen2": {**_LLAMA, "use_cache": False},
        "qwen3": {**_LLAMA, "head_dim": 8, "use_cache": False},
        "mistral": {**_LLAMA, "sliding_window": 5, "use_cache": False},
        "roberta": {**_BERT, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "use_cache": False},
        "albert": {**_BERT, "embedding_size": 30, "classifier_dropout_prob": 0.0},
        "ernie": {**_BERT, "use_cache": False},
        "whisper": dict(
            vocab_size=127, d_model=48, num_mel_bins=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6,
            decoder_attention_heads=6, encoder_ffn_dim=70, decoder_ffn_dim=70, max_source_positions=15,
            max_target_positions=64, classifier_proj_size=30, dropout=0.0, decoder_start_token_id=3, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, begin_suppress_tokens=None, use_cache=False,
        ),
        "vit": {**_VIT, "encoder_stride": 4},
        "beit": {
            **_VIT, "vocab_size": 127, "use_relative_position_bias": True, "drop_path_rate": 0.0,
            "pool_scales": [1, 2], "auxiliary_channels": 30,
        },
        "swin": _SWIN,
        "swinv2": {**_SWIN, "pretrained_window_sizes": [0, 0]},
        "sam": dict(
            vision_config=dict(
                hidden_size=48, num_hidden_layers=2, num_attention_heads=6, mlp_dim=70, output_channels=48,
                num_pos_feats=24, window_size=3, global_attn_indexes=[1], initializer_range=_WIDE, **_IMAGES,
            ),
            prompt_encoder_config=dict(hidden_size=48, mask_input_channels=12, **_IMAGES),
            mask_decoder_config=dict(hidden_size=48, num_attention_heads=6, mlp_dim=70, iou_head_hidden_dim=30),
            initializer_range=_WIDE,
        ),
        "blip-2": dict(
            vision_config={**_VIT, "initializer_range": 0.02},
            qformer_config=dict(QFORMER),
            text_config={**_OPT, "model_type": "opt"},
            num_query_tokens=5, image_text_hidden_size=30, image_token_index=4,
        ),
    }
)  # fmt: skip
