"""Small models, PEFT configurations and layouts of the tests of PEFT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB, BATCH, LENGTH = 48, 4, 10
SMALL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
DECODER: dict[str, Any] = {**SIZES, "intermediate_size": 40, "num_key_value_heads": 2, **SMALL}
"""Sizes of a decoder whose key and value heads are shared by two query heads each."""
GPT2_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 4}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
"""Dropout rates of GPT-2 and GPT-J."""
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "experts_implementation": "eager"}


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, **options))


def gpt2(**options: Any) -> Any:
    rates = {**NO_DROPOUT, **options}
    config = transformers.GPT2Config(**GPT2_SIZES, **rates, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    rates: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**SIZES, intermediate_size=40, num_labels=3, **rates)
    return transformers.BertForSequenceClassification(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=24,
        d_kv=6,
        d_ff=40,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.T5ForConditionalGeneration(config)


def stablelm() -> Any:
    """A model without a registered policy: its policy is derived."""
    own: dict[str, Any] = {"num_key_value_heads": 4, "use_qkv_bias": True}
    rates: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return transformers.StableLmForCausalLM(transformers.StableLmConfig(**{**DECODER, **own}, **rates))


def gptj() -> Any:
    """A model that adds the outputs of its attention and its MLP, which leave through one reduction."""
    config = transformers.GPTJConfig(**GPT2_SIZES, **NO_DROPOUT, rotary_dim=4, bos_token_id=1, eos_token_id=2)
    return transformers.GPTJForCausalLM(config)


def opt() -> Any:
    own: dict[str, Any] = {"word_embed_proj_dim": 24, "ffn_dim": 40, "dropout": 0.0}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**SIZES, **SMALL, **own))


def mixtral() -> Any:
    own: dict[str, Any] = {"intermediate_size": 20, "num_local_experts": 4}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**DECODER, **own}, **EXPERTS))


def gemma() -> Any:
    """A model whose embedding scales its vectors and is tied to the head."""
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**DECODER, head_dim=6))


def convnext() -> Any:
    """A model without token embeddings."""
    torch.manual_seed(0)
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_labels=3, image_size=32, drop_path_rate=0.0
    )
    return transformers.ConvNextForImageClassification(config)


def qwen2_moe() -> Any:
    """A mixture with a replicated linear between the blocks."""
    own: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 20}
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**DECODER, **own, **EXPERTS))


MODELS: dict[str, Callable[..., Any]] = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "stablelm": stablelm,
    "gptj": gptj,
    "opt": opt,
    "mixtral": mixtral,
    "gemma": gemma,
    "convnext": convnext,
    "qwen2_moe": qwen2_moe,
}


def batch_of(model_name: str, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
    if model_name == "convnext":
        images = torch.randn(BATCH, 3, 32, 32, generator=generator, dtype=torch.float64)
        return {"pixel_values": images, "labels": torch.randint(0, 3, (BATCH,), generator=generator)}
    if model_name == "bert":
        return {"input_ids": ids, "labels": torch.randint(0, 3, (BATCH,), generator=generator)}
    return {"input_ids": ids, "labels": ids.clone()}


@dataclass(frozen=True)
class Layout:
    """A process grid and the options of ``shard_model`` and ``shard_optimizer``."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    zero: int | None = None
    zero_options: Mapping[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        parts = [f"{name}={size}" for name, size in self.sizes.items()]
        parts += [name.removeprefix("enable_") for name, value in self.options.items() if value]
        parts += [f"zero={self.zero}"] if self.zero is not None else []
        parts += ["checkpointing"] if self.checkpointing else []
        parts += [str(self.dtype).removeprefix("torch.")] if self.dtype != torch.float64 else []
        return " ".join(parts) or "one process"


ATTENTION_AND_MLP = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
FEED_FORWARD = {"feedforward_modules": ["down_proj", "up_proj"]}
ADALORA = {"init_r": 3, "target_r": 2, "total_step": 20, "tinit": 1, "tfinal": 2}
TOKENS = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {}),
    "rsLoRA": ("LoraConfig", {"use_rslora": True}),
    "DoRA": ("LoraConfig", {"use_dora": True}),
    "LoRA, dropout": ("LoraConfig", {"lora_dropout": 0.3}),
    "DoRA, dropout": ("LoraConfig", {"lora_dropout": 0.3, "use_dora": True}),
    "LoRA, trained biases": ("LoraConfig", {"bias": "all"}),
    "DoRA, biases": ("LoraConfig", {"use_dora": True}),
    "IA3, biases": ("IA3Config", {"target_modules": ["k_proj", "out_proj", "fc2"], "feedforward_modules": ["fc2"]}),
    "LoRA on the head": ("LoraConfig", {"target_modules": ["q_proj", "lm_head"]}),
    "LoRA on the embedding": ("LoraConfig", {"target_modules": ["embed_tokens", "o_proj"]}),
    "modules_to_save": (
        "LoraConfig",
        {"target_modules": ["q_proj", "o_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]},
    ),
    "IA3": ("IA3Config", {"target_modules": ATTENTION_AND_MLP, **FEED_FORWARD}),
    "VeRA": ("VeraConfig", {"target_modules": ["q_proj", "v_proj", "o_proj"], "r": 4}),
    "LoHa": ("LoHaConfig", {"target_modules": ATTENTION_AND_MLP, "r": 3}),
    "LoKr": ("LoKrConfig", {"target_modules": ATTENTION_AND_MLP, "r": 3}),
    "AdaLoRA": ("AdaLoraConfig", {"target_modules": ATTENTION_AND_MLP, "task_type": "CAUSAL_LM", **ADALORA}),
    "prompt tuning": ("PromptTuningConfig", TOKENS),
    "p-tuning": ("PromptEncoderConfig", {**TOKENS, "encoder_hidden_size": 12}),
    "prefix tuning": ("PrefixTuningConfig", TOKENS),
}
"""Feature -> PEFT's configuration class and its arguments."""


def model_of(feature: str) -> str:
    """Return the model of a feature; LLaMA has no biases."""
    return "opt" if "biases" in feature else "llama"


def config_of(feature: str, model_name: str = "llama", **options: Any) -> Any:
    import peft

    kind, settings = METHODS[feature]
    if kind == "LoraConfig":
        settings = {"r": 3, "lora_alpha": 6, "target_modules": "all-linear", **settings}
    of_model = {"gpt2": {"fan_in_fan_out": True}, "bert": {"task_type": "SEQ_CLS"}}.get(model_name, {})
    if model_name == "gemma":  # PEFT would copy all norms whose names end with "norm"
        of_model = {"modules_to_save": ["lm_head", "embed_tokens"]}
    if model_name in ("mixtral", "qwen2_moe"):  # all-linear would include the experts
        of_model = {"target_modules": ["q_proj", "k_proj", "o_proj"]}
    return getattr(peft, kind)(**{**settings, **of_model, **options})


SEQUENCE_PARALLEL = {"enable_sequence_parallelism": True}
LAYOUTS: dict[str, Layout] = {
    "tensor": Layout({"tensor": 2}),
    "tensor, 4 ranks": Layout({"tensor": 4}),
    "sequence parallel": Layout({"tensor": 2}, SEQUENCE_PARALLEL),
    "context": Layout({"sequence": 2}),
    "pipeline": Layout({"pipe": 2}),
    "data": Layout({"data": 2}),
    "ZeRO 1": Layout({"data": 2}, zero=1),
    "ZeRO 2": Layout({"data": 2}, zero=2),
    "ZeRO 3": Layout({"data": 2}, zero=3, zero_options={"keep_frozen": False}),
    "ZeRO 3, frozen base gathered": Layout({"data": 2}, zero=3),
    "tensor and ZeRO 2": Layout({"tensor": 2, "data": 2}, zero=2),
    "sequence parallel and pipeline": Layout({"tensor": 2, "pipe": 2}, SEQUENCE_PARALLEL),
    "checkpointing": Layout({"tensor": 2}, SEQUENCE_PARALLEL, checkpointing=True),
    "compiled": Layout({"tensor": 2}, {"compile": "aot_eager"}),
}
