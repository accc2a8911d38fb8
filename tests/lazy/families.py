"""Small models of many families, for tests of building and loading."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

BASE: dict[str, Any] = dict(
    vocab_size=127, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=70,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GROUPED: dict[str, Any] = dict(BASE, num_key_value_heads=2)
IMAGE: dict[str, Any] = dict(
    hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=70, image_size=32, patch_size=8
)
WINDOWS: dict[str, Any] = dict(
    image_size=32, patch_size=4, embed_dim=12, depths=[2, 2], num_heads=[2, 4], window_size=4
)
GPT: dict[str, Any] = dict(
    vocab_size=127, n_embd=48, n_layer=2, n_head=6, n_positions=64, bos_token_id=1, eos_token_id=2
)
OPT: dict[str, Any] = dict(
    vocab_size=127, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, ffn_dim=70, max_position_embeddings=64
)
SPEECH: dict[str, Any] = dict(
    vocab_size=127, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6,
    decoder_attention_heads=6, encoder_ffn_dim=70, decoder_ffn_dim=70, num_mel_bins=8, max_source_positions=32,
    max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip
SAM: dict[str, Any] = dict(
    vision_config=dict(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=6, mlp_dim=70, image_size=64, patch_size=16,
        output_channels=16, global_attn_indexes=[1], window_size=2,
    ),
    prompt_encoder_config=dict(hidden_size=16, image_size=64, patch_size=16, mask_input_channels=4),
    mask_decoder_config=dict(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mlp_dim=20, iou_head_hidden_dim=16
    ),
)  # fmt: skip
BLIP: dict[str, Any] = dict(
    vision_config=IMAGE,
    qformer_config=dict(BASE, encoder_hidden_size=48),
    text_config=dict(model_type="opt", word_embed_proj_dim=48, **OPT),
    num_query_tokens=4,
)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("AlbertForMaskedLM", dict(BASE, embedding_size=24)),
    "beit": ("BeitForImageClassification", dict(IMAGE, use_relative_position_bias=True, drop_path_rate=0.2)),
    "bert": ("BertForPreTraining", BASE),
    "blip-2": ("Blip2ForConditionalGeneration", BLIP),
    "bloom": ("BloomForCausalLM", dict(vocab_size=127, hidden_size=48, n_layer=2, n_head=6)),
    "ernie": ("ErnieForMaskedLM", BASE),
    "falcon": ("FalconForCausalLM", dict(vocab_size=127, hidden_size=48, num_hidden_layers=2, num_attention_heads=6)),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        dict(vocab_size=127, hidden_size=48, num_layers=2, num_heads=6, attention_types=[[["global", "local"], 1]]),
    ),
    "gptj": ("GPTJForCausalLM", dict(GPT, rotary_dim=4)),
    "llama": ("LlamaForCausalLM", GROUPED),
    "mamba": ("MambaForCausalLM", dict(vocab_size=127, hidden_size=48, num_hidden_layers=2)),
    "mistral": ("MistralForCausalLM", GROUPED),
    "mixtral": ("MixtralForCausalLM", dict(GROUPED, num_local_experts=4)),
    "opt": ("OPTForCausalLM", dict(OPT, word_embed_proj_dim=24)),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", dict(GROUPED, head_dim=8)),
    "roberta": ("RobertaForMaskedLM", BASE),
    "sam": ("SamModel", SAM),
    "swin": ("SwinForImageClassification", WINDOWS),
    "swinv2": ("Swinv2ForImageClassification", WINDOWS),
    "t5": (
        "T5ForConditionalGeneration",
        dict(vocab_size=127, d_model=48, d_kv=8, num_layers=2, num_heads=6, d_ff=70),
    ),
    "vit": ("ViTForImageClassification", IMAGE),
    "whisper": ("WhisperForConditionalGeneration", SPEECH),
}


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 3) -> nn.Module:
    import transformers

    name, settings = FAMILIES[family]
    kind: Any = getattr(transformers, name)
    config = kind.config_class(**settings)
    torch.manual_seed(seed)
    model: nn.Module = kind._from_config(config, dtype=dtype)
    return model


def assert_same(ours: nn.Module, plain: nn.Module) -> None:
    """Assert that parameters, buffers, dtypes, strides and ties of two models are identical."""
    found, expected = _tensors(ours), _tensors(plain)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].device == value.device, name
        assert found[name].dtype == value.dtype, name
        assert found[name].requires_grad == value.requires_grad, name
        assert torch.equal(found[name], value), name
    groups = [[{n for n in t if t[n] is t[m]} for m in t] for t in (found, expected)]
    assert groups[0] == groups[1]


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
