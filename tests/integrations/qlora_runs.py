"""Trains adapters on a model with the 4-bit weights of bitsandbytes, on a process grid and in one process."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import torch
import transformers

import shardformer
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from tests.integrations.peft_models import SEQUENCE_PARALLEL, SMALL, VOCAB, Layout
from tests.integrations.peft_runs import Difference, Result, difference, fill, train_plain, train_sharded

STEPS = 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, **SMALL,
}  # fmt: skip
"""The slices of o_proj (32) and down_proj (96) divide blocks of 64 values, those of the other linears do not."""
LAYOUTS: dict[str, Layout] = {
    "data": Layout({"data": 2}),
    "ZeRO 1": Layout({"data": 2}, zero=1),
    "ZeRO 2": Layout({"data": 2}, zero=2),
    "ZeRO 3": Layout({"data": 2}, zero=3, zero_options={"keep_frozen": False}),
    "ZeRO 3, frozen base gathered": Layout({"data": 2}, zero=3),
    "tensor": Layout({"tensor": 2}),
    "sequence parallel": Layout({"tensor": 2}, SEQUENCE_PARALLEL),
    "context": Layout({"sequence": 2}),
    "pipeline": Layout({"pipe": 2}),
    "tensor and ZeRO 2": Layout({"tensor": 2, "data": 2}, zero=2),
    "sequence parallel and pipeline": Layout({"tensor": 2, "pipe": 2}, SEQUENCE_PARALLEL),
    "checkpointing": Layout({"tensor": 2}, SEQUENCE_PARALLEL, checkpointing=True),
}
NF4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
QUANTIZERS: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "nf4, double quantization": {**NF4, "bnb_4bit_use_double_quant": True},
    "fp4": {**NF4, "bnb_4bit_quant_type": "fp4"},
    "nf4 in bf16": {**NF4, "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": "all-linear"},
    "LoRA on attention": {"target_modules": ["q_proj", "v_proj"]},
    "DoRA": {"target_modules": "all-linear", "use_dora": True},
    "LoRA, dropout": {"target_modules": "all-linear", "lora_dropout": 0.3},
}


@cache
def folder_of(**sizes: Any) -> str:
    """Save a small LLaMA, and return its folder."""
    torch.manual_seed(0)
    folder = tempfile.mkdtemp(prefix="qlora-")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **sizes})).save_pretrained(folder)
    return folder


def quantized(quantizer: str = "nf4", **sizes: Any) -> Any:
    config = transformers.BitsAndBytesConfig(**QUANTIZERS[quantizer])
    return transformers.AutoModelForCausalLM.from_pretrained(folder_of(**sizes), quantization_config=config)


def lora(adapter: str) -> Any:
    import peft

    return peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **ADAPTERS[adapter])


def adapted(quantizer: str, adapter: str, layout: Layout) -> Any:
    """Return a model with 4-bit weights and with adapters that have nonzero values."""
    import peft

    model = peft.prepare_model_for_kbit_training(quantized(quantizer), use_gradient_checkpointing=layout.checkpointing)
    torch.manual_seed(5)
    model = peft.get_peft_model(model, lora(adapter))
    fill(model)
    return model


def adapted_after(quantizer: str, adapter: str, layout: Layout, context: ParallelContext) -> Any:
    """``shard_model``, then ``get_peft_model``."""
    import peft

    model = peft.prepare_model_for_kbit_training(quantized(quantizer), use_gradient_checkpointing=layout.checkpointing)
    model = shardformer.shard_model(model, context=context, **layout.options)
    torch.manual_seed(5)
    model = peft.get_peft_model(model, lora(adapter))
    full = adapted(quantizer, adapter, layout)
    model.load_state_dict({n: p.detach() for n, p in full.named_parameters() if p.requires_grad}, strict=False)
    return model


def compare(quantizer: str, adapter: str, name: str, order: str = "before") -> Difference:
    """Compare a layout with one process, over several steps."""
    layout = LAYOUTS[name]
    reference = train_plain(adapted(quantizer, adapter, layout), "llama", layout, STEPS)

    def run(context: ParallelContext) -> Result:
        if order == "after":
            model = adapted_after(quantizer, adapter, layout, context)
        else:
            plain = adapted(quantizer, adapter, layout)
            model = shardformer.shard_model(plain, context=context, **layout.options)
        return train_sharded(model, "llama", layout, context, STEPS)

    found = run_as_threads(run, **layout.sizes, in_turn=True)[0]
    return Difference(
        max(abs(a - b) for a, b in zip(found.losses, reference.losses, strict=True)),
        max(abs(a - b) / max(b, 1e-9) for a, b in zip(found.norms, reference.norms, strict=True)),
        difference(found.gradients, reference.gradients) if found.gradients else None,
        difference(found.weights, reference.weights),
    )


def compare_all(cases: list[tuple[str, str, str, str]]) -> list[Difference | str]:
    from shardformer.errors import ShardFormerError

    results: list[Difference | str] = []
    for case in cases:
        try:
            results.append(compare(*case))
        except ShardFormerError as error:
            results.append(str(error))
    return results
