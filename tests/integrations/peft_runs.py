"""Trains a PEFT model on a process grid and in one process, and compares losses, gradients, weights and files."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import shardformer
from shardformer.integrations.peft import from_pretrained, get_peft_model
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.weights.state_dict import full_state_dict

VOCAB, BATCH, LENGTH, STEPS = 48, 4, 10, 4
SMALL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        **SMALL,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(**options: Any) -> Any:
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **options}
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=24, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2, **rates
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
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
    config = transformers.StableLmConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        use_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **SMALL,
    )
    return transformers.StableLmForCausalLM(config)


MODELS: dict[str, Callable[..., Any]] = {"llama": llama, "gpt2": gpt2, "bert": bert, "t5": t5, "stablelm": stablelm}


def batch_of(model_name: str, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
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


@dataclass
class Result:
    """Results of a run. Weights and gradients are full tensors of everything that trains."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def adapted(model_name: str, config: Any, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Return a PEFT model whose adapters have nonzero values: a zero B would hide the gradient of A."""
    import peft

    torch.manual_seed(0)
    model = MODELS[model_name](**options).to(dtype)
    torch.manual_seed(5)
    model = peft.get_peft_model(model, config)
    fill(model)
    return model


def fill(model: nn.Module, seed: int = 11) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, param in sorted(model.named_parameters()):
        if param.requires_grad and "ranknum" not in name:  # which PEFT does not save
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.1
            param.data.add_(noise.to(param))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9)


def train_plain(model: Any, model_name: str, layout: Layout, steps: int = STEPS) -> Result:
    model.train()
    optimizer, losses, norms, gradients = make_optimizer(model), [], [], {}
    for step in range(steps):
        torch.manual_seed(1000 + step)
        loss = model(**batch_of(model_name, step)).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    trained = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    return Result(losses, norms, gradients, trained)


def train_sharded(model: Any, model_name: str, layout: Layout, context: ParallelContext, steps: int = STEPS) -> Result:
    """Train a model that is sharded already."""
    model.train()
    optimizer: Any = make_optimizer(model)
    if layout.zero is not None:
        optimizer = shardformer.shard_optimizer(model, optimizer, stage=layout.zero, **layout.zero_options)
    pipeline = shardformer.Pipeline(model, micro_batches=2) if context.pipe.size > 1 else None
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        torch.manual_seed(1000 + step)
        full = batch_of(model_name, step)
        batch = {name: x.chunk(context.data.size)[context.data.rank] for name, x in full.items()}
        if pipeline is not None:
            loss = pipeline.step(batch)
        else:
            loss = model(**batch).loss
            loss.backward()
        norms.append(float(shardformer.clip_grad_norm_(model, 1.0)))
        if step == 0 and layout.zero is None:
            gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_data(loss, context))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    weights = full_state_dict(model)
    if context.pipe.size > 1:
        trained = {n for n in weights if any(part in n for part in ("lora_", "ia3_", "vera_lambda", "modules_to_save"))}
    return Result(losses, norms, gradients, {n: weights[n] for n in trained})


def mean_over_data(loss: Tensor, context: ParallelContext) -> float:
    from shardformer.comm.collectives import all_reduce

    if context.pipe.size > 1:
        return float(loss.detach())
    axes = [a for a in ("data", "sequence") if context.sizes.get(a, 1) > 1]
    total = loss.detach().clone().double()
    for name in axes:
        total = all_reduce(total, context.axis(name)) / context.axis(name).size
    return float(total)


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gather the full gradients of a sharded model, by writing them into its parameters for a moment."""
    values = [(p, p.data.clone()) for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p, _ in values:
            assert p.grad is not None
            p.data.copy_(p.grad)
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        full = full_state_dict(model)
        for p, value in values:
            p.data.copy_(value)
    return {n: x for n, x in full.items() if n in trained or ("lora_" in n or "modules_to_save" in n or "ia3" in n)}


def difference(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Return the largest difference relative to the largest value of each tensor; inf if names or shapes differ."""
    if set(ours) != set(reference):
        print("only one side has", sorted(set(ours) ^ set(reference))[:4])
        return float("inf")
    worst = 0.0
    for name, x in reference.items():
        if ours[name].shape != x.shape:
            print(name, ours[name].shape, x.shape)
            return float("inf")
        if (size := x.numel()) and float(x.abs().max()) > 0:
            worst = max(worst, float((ours[name] - x).abs().max() / x.abs().max()))
        elif size:
            worst = max(worst, float(ours[name].abs().max()))
    return worst


def shard_before(model_name: str, config: Any, layout: Layout, context: ParallelContext, **options: Any) -> Any:
    """``get_peft_model``, then ``shard_model``."""
    model = adapted(model_name, copy.deepcopy(config), layout.dtype, **options)
    if layout.checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return shardformer.shard_model(model, context=context, **layout.options)


def shard_after(model_name: str, config: Any, layout: Layout, context: ParallelContext, **options: Any) -> Any:
    """``shard_model``, then ``get_peft_model``."""
    torch.manual_seed(0)
    model = MODELS[model_name](**options).to(layout.dtype)
    if layout.checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    model = shardformer.shard_model(model, context=context, **layout.options)
    torch.manual_seed(5)
    model = get_peft_model(model, copy.deepcopy(config))
    filled = adapted(model_name, copy.deepcopy(config), layout.dtype, **options)
    if context.pipe.size == 1:
        model.load_state_dict({n: p.detach() for n, p in filled.named_parameters() if p.requires_grad}, strict=False)
    return model


ORDERS = {"before": shard_before, "after": shard_after}


@dataclass
class Difference:
    """Largest differences between a layout and one process."""

    loss: float
    norm: float
    gradients: float | None
    weights: float

    @property
    def worst(self) -> float:
        return max(self.loss, self.norm, self.gradients or 0.0, self.weights)


def compare(
    model_name: str, config: Any, layout: Layout, order: str = "before", steps: int = STEPS, **options: Any
) -> Difference:
    """Compare a layout with one process, over several steps."""
    plain = adapted(model_name, copy.deepcopy(config), layout.dtype, **options)
    if layout.checkpointing:
        plain.gradient_checkpointing_enable()
        plain.enable_input_require_grads()
    reference = train_plain(plain, model_name, layout, steps)

    def run(context: ParallelContext) -> Result:
        model = ORDERS[order](model_name, config, layout, context, **options)
        return train_sharded(model, model_name, layout, context, steps)

    found = run_as_threads(run, **layout.sizes, in_turn=True)[0]
    return Difference(
        max(abs(a - b) for a, b in zip(found.losses, reference.losses, strict=True)),
        max(abs(a - b) / max(b, 1e-9) for a, b in zip(found.norms, reference.norms, strict=True)),
        difference(found.gradients, reference.gradients) if found.gradients else None,
        difference(found.weights, reference.weights),
    )


def lora(**options: Any) -> Any:
    import peft

    settings: dict[str, Any] = {"r": 3, "lora_alpha": 6, "target_modules": "all-linear", **options}
    return peft.LoraConfig(**settings)


def file_differences(model_name: str, config: Any, layout: Layout, folder: str) -> dict[str, float]:
    """Compare the adapter files of a layout with those of one process, load them both ways, and merge.

    Returns the largest difference per step; inf if names, shapes or configurations differ.
    """
    import peft

    plain = adapted(model_name, copy.deepcopy(config), layout.dtype)
    plain.save_pretrained(f"{folder}/plain")

    def run(context: ParallelContext) -> dict[str, Tensor]:
        model = shard_before(model_name, config, layout, context)
        model.save_pretrained(f"{folder}/sharded")
        torch.manual_seed(0)
        other = shardformer.shard_model(MODELS[model_name]().to(layout.dtype), context=context, **layout.options)
        other = from_pretrained(other, f"{folder}/plain", is_trainable=True)
        loaded = full_state_dict(other)
        before = eval_loss(other, model_name, context)
        if layout.zero is None:
            merged = model.merge_and_unload()
            merged.save_pretrained(f"{folder}/merged")
            loaded["loss_of_merged"] = eval_loss(merged, model_name, context)
        loaded["loss"] = before
        return loaded

    loaded = run_as_threads(run, **layout.sizes, in_turn=True)[0]
    files = [load_file(f"{folder}/{name}/adapter_model.safetensors") for name in ("sharded", "plain")]
    configs = [json.loads(Path(f"{folder}/{name}/adapter_config.json").read_text()) for name in ("sharded", "plain")]
    torch.manual_seed(0)
    again = peft.PeftModel.from_pretrained(MODELS[model_name]().to(layout.dtype), f"{folder}/sharded")
    state = plain.state_dict()
    loss = plain_loss(plain, model_name)
    found = {
        "adapter file": difference(*files),
        "config": 0.0 if strip_order(configs[0]) == strip_order(configs[1]) else float("inf"),
        "loaded on the layout": difference({n: x for n, x in loaded.items() if not n.startswith("loss")}, state),
        "loss on the layout": float((loaded["loss"] - loss).abs()),
        "loaded in one process": difference(again.state_dict(), state),
    }
    if "loss_of_merged" in loaded:
        merged = plain.merge_and_unload()
        saved = type(merged).from_pretrained(f"{folder}/merged", dtype=layout.dtype).state_dict()
        found["merged"] = difference(saved, merged.state_dict())
        found["loss of merged"] = float((loaded["loss_of_merged"] - plain_loss(merged, model_name)).abs())
    return found


def strip_order(config: dict[str, Any]) -> dict[str, Any]:
    return {name: sorted(value) if isinstance(value, list) else value for name, value in config.items()}


def plain_loss(model: Any, model_name: str) -> Tensor:
    with torch.no_grad():
        return model.eval()(**batch_of(model_name, 0)).loss.detach()


def eval_loss(model: Any, model_name: str, context: ParallelContext) -> Tensor:
    model.eval()
    if context.pipe.size > 1:
        return shardformer.Pipeline(model, micro_batches=2).evaluate(batch_of(model_name, 0))
    return plain_loss(model, model_name)
