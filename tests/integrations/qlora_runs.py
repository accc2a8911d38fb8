"""Trains adapters on a model with the 4-bit weights of bitsandbytes, on a process grid and in one process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import shardformer
from shardformer.errors import ShardFormerError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.tensor_parallel.quantized_linear import MIN_BLOCK, slice_4bit_weight
from shardformer.weights.state_dict import full_state_dict
from tests.integrations.peft_models import LAYOUTS, SMALL, VOCAB, Layout, batch_of
from tests.integrations.peft_runs import (
    Difference,
    Result,
    difference,
    error_of,
    fill,
    make_optimizer,
    train_llama,
    train_plain,
    train_sharded,
)

STEPS = 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, **SMALL,
}  # fmt: skip
"""The slices of o_proj (32) and down_proj (96) divide blocks of 64 values, those of the other layers do not."""
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
def folder_of(model: str = "llama", **sizes: Any) -> str:
    """Save a small LLaMA or GPT-2, which has biases and one linear for q, k and v, and return its folder."""
    torch.manual_seed(0)
    folder = tempfile.mkdtemp(prefix="qlora-")
    if model == "gpt2":
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=64, n_layer=2, n_head=4, **rates)
        transformers.GPT2LMHeadModel(config).apply(fill_biases).save_pretrained(folder)
    else:
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **sizes})).save_pretrained(folder)
    return folder


def fill_biases(module: nn.Module) -> None:
    if isinstance(bias := getattr(module, "bias", None), nn.Parameter):
        nn.init.normal_(bias, std=0.1)


def quantized(quantizer: str = "nf4", model: str = "llama", **sizes: Any) -> Any:
    config = transformers.BitsAndBytesConfig(**QUANTIZERS[quantizer])
    return transformers.AutoModelForCausalLM.from_pretrained(folder_of(model, **sizes), quantization_config=config)


def lora(adapter: str) -> Any:
    import peft

    return peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **ADAPTERS[adapter])


def adapted(quantizer: str, adapter: str, layout: Layout, model_name: str = "llama") -> Any:
    """Return a model with 4-bit weights and with adapters that have nonzero values."""
    import peft

    model = quantized(quantizer, model_name)
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=layout.checkpointing)
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


def compare(quantizer: str, adapter: str, name: str, order: str = "before", model_name: str = "llama") -> Difference:
    """Compare a layout with one process, over several steps."""
    layout = LAYOUTS[name]

    def after(context: ParallelContext) -> Any:
        return adapted_after(quantizer, adapter, layout, context)

    def before() -> Any:
        return adapted(quantizer, adapter, layout, model_name)

    return compare_models(before, layout, after if order == "after" else None)


def compare_models(
    build: Callable[[], Any], layout: Layout, build_sharded: Callable[[ParallelContext], Any] | None = None
) -> Difference:
    """Train a model in one process and on a layout, and compare.

    Args:
        build_sharded: returns the sharded model; by default the built model is sharded.
    """
    plain = build()
    trained = {name for name, param in plain.named_parameters() if param.requires_grad}
    reference = train_plain(plain, "llama", layout, STEPS)

    def run(context: ParallelContext) -> Result:
        if build_sharded is not None:
            model = build_sharded(context)
        else:
            model = shardformer.shard_model(build(), context=context, **layout.options)
        return train_sharded(model, "llama", layout, context, STEPS)

    found = run_as_threads(run, **layout.sizes, one_at_a_time=True)[0]
    for result in (found, reference):  # full_state_dict leaves out quantized weights
        result.weights = {name: x for name, x in result.weights.items() if name in trained}
    return Difference.between(found, reference)


def compare_all(cases: Sequence[tuple[str, ...]]) -> list[Difference | str]:
    """Compare several cases; the result of a refused one is the text of its error."""
    results: list[Difference | str] = []
    for case in cases:
        try:
            results.append(compare(*case))
        except ShardFormerError as error:
            results.append(str(error))
    return results


def slices_of_a_weight() -> dict[str, bool]:
    """Slice 4-bit weights, and compare the values bitwise with those of the full weight."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Params4bit

    slices: dict[str, tuple[tuple[int, int], int, list[tuple[int, int]]]] = {
        "rows": ((96, 128), 0, [(32, 64)]),
        "rows of q, k and v": ((96, 128), 0, [(0, 16), (32, 48), (64, 80)]),
        "an odd number of rows": ((33, 64), 0, [(22, 33)]),
        "columns": ((40, 256), 1, [(128, 256)]),
        "columns that divide blocks of 64": ((40, 192), 1, [(96, 192)]),
        "columns of two ranges": ((5, 256), 1, [(0, 64), (192, 256)]),
    }
    found = {}
    for name, (shape, dim, ranges) in slices.items():
        for kind, nested, storage in (("nf4", True, torch.uint8), ("fp4", False, torch.bfloat16)):
            torch.manual_seed(0)
            options = {"compress_statistics": nested, "quant_type": kind, "quant_storage": storage}
            full: Any = Params4bit(torch.randn(shape), **options).to("cpu")
            local = slice_4bit_weight(full, dim, ranges)
            values = dequantize_4bit(full.data, full.quant_state)
            expected = torch.cat([values.narrow(dim, a, b - a) for a, b in ranges], dim)
            is_equal = torch.equal(dequantize_4bit(local.data, local.quant_state), expected)
            found[f"{name}, {kind}"] = is_equal and local.dtype == storage and local.quant_state.blocksize >= MIN_BLOCK
    return found


def file_differences(name: str, folder: str) -> dict[str, float]:
    """Compare the adapter files of a layout with those of one process, load them, and merge or unload the adapters."""
    import peft

    layout = LAYOUTS[name]
    plain = adapted("nf4", "LoRA", layout)
    plain.save_pretrained(f"{folder}/plain")
    batch = batch_of("llama", 0)

    def loss_of(model: Any) -> float:
        with torch.no_grad():
            return float(model.train()(**batch).loss)

    def run(context: ParallelContext) -> dict[str, float]:
        model = shardformer.shard_model(adapted("nf4", "LoRA", layout), context=context, **layout.options)
        model.save_pretrained(f"{folder}/sharded")
        other = shardformer.shard_model(quantized("nf4"), context=context, **layout.options)
        other = peft.PeftModel.from_pretrained(other, f"{folder}/plain", is_trainable=True)
        losses = {"loss": loss_of(model), "loaded": loss_of(other)}
        losses["trainable"], losses["parameters"] = model.get_nb_trainable_parameters()
        if context.tensor.size == 1:
            other.merge_adapter()
            losses["merged"] = loss_of(other)
        losses["unloaded"] = loss_of(model.unload())
        return losses

    found = run_as_threads(run, **layout.sizes, one_at_a_time=True)[0]
    files = [load_file(f"{folder}/{kind}/adapter_model.safetensors") for kind in ("plain", "sharded")]
    configs = [json.loads(Path(f"{folder}/{kind}/adapter_config.json").read_text()) for kind in ("plain", "sharded")]
    expected = {"loss": loss_of(plain), "loaded": loss_of(plain)}
    expected["trainable"], expected["parameters"] = plain.get_nb_trainable_parameters()
    if "merged" in found:
        merged = peft.PeftModel.from_pretrained(quantized("nf4"), f"{folder}/sharded")
        merged.merge_adapter()
        expected["merged"] = loss_of(merged)
    expected["unloaded"] = loss_of(plain.unload())
    return {
        "adapter file": difference(files[1], files[0]),
        "config": 0.0 if configs[0] == configs[1] else float("inf"),
        **{key: abs(found[key] - value) for key, value in expected.items()},
    }


def train_engine(first: dict[str, Any], second: dict[str, Any], folder: str) -> dict[str, float]:
    """Train with ``initialize``, resume the checkpoint under another layout, and compare with one process."""
    layout = Layout()
    plain = adapted("nf4, double quantization", "LoRA", layout).train()
    reference = train_llama(plain, make_optimizer(plain), 4)

    def run(context: ParallelContext, fields: dict[str, Any], steps: range, models: list[Any]) -> Any:
        parallel = shardformer.ParallelConfig(max_grad_norm=1.0, micro_batches=2, **fields)
        engine = shardformer.initialize(
            models.pop(), lambda ps: torch.optim.SGD(ps, lr=0.2, momentum=0.9), parallel=parallel, context=context
        )
        if steps.start:
            engine.load(folder)
        losses = []
        for step in steps:
            size, rank = context.data.size, context.data.rank
            losses.append(
                float(engine.train_step({n: x.chunk(size)[rank] for n, x in batch_of("llama", step).items()}))
            )
        engine.save(folder)
        return losses, full_state_dict(engine.model)

    losses: list[float] = []
    for fields, steps in ((first, range(2)), (second, range(2, 4))):
        sizes = {name: n for name, n in fields.items() if name in ("data", "tensor", "pipe", "sequence")}
        # the ranks are threads, which share the random state
        models = [adapted("nf4, double quantization", "LoRA", layout) for _ in range(prod(sizes.values()))]
        part = run_as_threads(partial(run, fields=fields, steps=steps, models=models), **sizes)[0]
        losses += part[0]
    trained = {n: p.detach() for n, p in plain.named_parameters() if p.requires_grad}
    return {
        "loss": max(abs(a - b) for a, b in zip(losses, reference, strict=True)),
        "weights": difference({n: x for n, x in part[1].items() if n in trained}, trained),
    }


class PackedTensor(Tensor):
    """Stands for a tensor of torchao: one byte per value, and one scale."""

    @staticmethod
    def __new__(cls, packed: Tensor, scale: Tensor) -> PackedTensor:
        return Tensor._make_wrapper_subclass(cls, packed.shape, dtype=scale.dtype)

    def __init__(self, packed: Tensor, scale: Tensor) -> None:
        self.packed, self.scale = packed, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["packed", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed, args[0].scale)
        plain = [x.packed * x.scale if isinstance(x, cls) else x for x in args]
        return func(*plain, **(kwargs or {}))


class IntegerLinear(nn.Module):
    """Stands for a linear of GPTQ or AWQ, which keeps integers in buffers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("qweight", (weight / scale).round().to(torch.int32))
        self.register_buffer("scales", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.qweight * self.scales)


def pack(model: Any, kind: str) -> Any:
    """Quantize the query projections of a model by a quantizer that the package does not know."""
    for layer in model.model.layers:
        linear = layer.self_attn.q_proj
        if kind == "buffers":
            layer.self_attn.q_proj = IntegerLinear(linear)
            continue
        scale = linear.weight.detach().abs().max() / 127
        packed = PackedTensor((linear.weight.detach() / scale).round().to(torch.int8), scale)
        linear.weight = nn.Parameter(packed, requires_grad=False)
    model.hf_quantizer = object()
    return model


def other_quantizer(kind: str, name: str) -> Difference:
    """Train adapters on a model of another quantizer, and compare with one process."""
    import peft

    def build() -> Any:
        model = pack(transformers.LlamaForCausalLM.from_pretrained(folder_of("llama")), kind)
        torch.manual_seed(5)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["o_proj", "down_proj"]))
        fill(model)
        return model

    return compare_models(build, LAYOUTS[name])


def shard(context: ParallelContext, quantizer: str = "nf4", **sizes: Any) -> Any:
    return shardformer.shard_model(quantized(quantizer, **sizes), context=context)


def save_base(context: ParallelContext, folder: str) -> None:
    shard(context).save_pretrained(folder)


def merge(context: ParallelContext) -> None:
    layout = Layout()
    shardformer.shard_model(adapted("nf4", "LoRA", layout), context=context).merge_and_unload()


def train_without_adapters(context: ParallelContext) -> None:
    shardformer.initialize(quantized(), lambda ps: torch.optim.SGD(ps, lr=0.1), context=context)


def shard_different_weights(context: ParallelContext) -> None:
    model = quantized()
    if context.data.rank == 1:
        model.model.layers[1].mlp.up_proj.weight.quant_state.absmax.mul_(2)
    shardformer.shard_model(model, context=context)


def shard_after_evaluation(context: ParallelContext) -> None:
    model = quantized()
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    shardformer.shard_model(model, context=context)


def reshard(context: ParallelContext) -> None:
    model = adapted("nf4", "LoRA", Layout())
    engine = shardformer.initialize(model, lambda ps: torch.optim.SGD(ps, lr=0.1), context=context)
    engine.reshard({"data": 1})


def add_dora(context: ParallelContext) -> None:
    import peft

    peft.get_peft_model(shard(context), lora("DoRA"))


def shard_packed(context: ParallelContext, kind: str) -> None:
    model = pack(transformers.LlamaForCausalLM.from_pretrained(folder_of("llama")), kind)
    shardformer.shard_model(model, context=context)


def refusals() -> dict[str, str]:
    """Return the messages of the errors by what is refused."""
    narrow = {"hidden_size": 48, "intermediate_size": 64}
    folder_of("llama"), folder_of("llama", **narrow)  # the ranks are threads, which share the random state
    return {
        "rows": error_of(lambda context: shard(context, **narrow), tensor=2),
        "columns": error_of(shard, tensor=4),
        "int8 and tensor": error_of(shard, "int8", tensor=2),
        "int8 and sequence": error_of(shard, "int8", sequence=2),
        "subclass": error_of(shard_packed, "subclass", tensor=2),
        "buffers": error_of(shard_packed, "buffers", tensor=2),
        "save the base": error_of(save_base, "unused", data=2),
        "merge": error_of(merge, tensor=2),
        "no adapters": error_of(train_without_adapters, data=2),
        "DoRA after sharding": error_of(add_dora, data=2),
        "reshard": error_of(reshard, data=1),
        "different weights": error_of(shard_different_weights, data=2),
        "after evaluation": error_of(shard_after_evaluation, data=2),
    }


def release() -> str:
    import bitsandbytes

    return str(bitsandbytes.__version__)
