"""Trains a PEFT model on a process grid and in one process, and compares losses, gradients, weights and files."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shardformer
from shardformer.comm import CollectiveRecorder
from shardformer.comm.collectives import all_gather_objects, all_reduce
from shardformer.errors import ConfigError
from shardformer.integrations.peft import get_peft_model
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.weights.state_dict import full_state_dict
from tests.integrations.peft_models import LAYOUTS, METHODS, MODELS, Layout, batch_of, config_of, gpt2, llama

STEPS = 4


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
    return Result(losses, norms, gradients, {name: x.detach().clone() for name, x in model.state_dict().items()})


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
            gradients = full_gradients(model, context)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_data(loss, context))
    return Result(losses, norms, gradients, full_state_dict(model))


def mean_over_data(loss: Tensor, context: ParallelContext) -> float:
    if context.pipe.size > 1:
        return float(loss.detach())
    axes = [a for a in ("data", "sequence") if context.sizes.get(a, 1) > 1]
    total = loss.detach().clone().double()
    for name in axes:
        total = all_reduce(total, context.axis(name)) / context.axis(name).size
    return float(total)


def trained_names(model: nn.Module, context: ParallelContext) -> set[str]:
    """Return the names of the parameters that train on any pipeline stage."""
    own = {name for name, param in model.named_parameters() if param.requires_grad}
    return set().union(*all_gather_objects(own, context.pipe))


def full_gradients(model: nn.Module, context: ParallelContext) -> dict[str, Tensor]:
    """Gather the full gradients of a sharded model, by writing them into its parameters for a moment."""
    values = [(p, p.data.clone()) for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p, _ in values:
            assert p.grad is not None
            p.data.copy_(p.grad)
        trained, full = trained_names(model, context), full_state_dict(model)
        for p, value in values:
            p.data.copy_(value)
    return {name: full[name] for name in trained}


def difference(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Return the largest difference relative to the largest value of each tensor; inf if names or shapes differ."""
    if set(ours) != set(reference):
        return float("inf")
    # a gradient that is zero in exact arithmetic, as that of a key bias, is compared with the largest one
    floor = 1e-6 * max((float(x.abs().max()) for x in reference.values() if x.numel()), default=0.0)
    worst = 0.0
    for name, x in reference.items():
        if ours[name].shape != x.shape:
            return float("inf")
        if x.numel():
            error = float((ours[name].double() - x.double()).abs().max())
            worst = max(worst, error / max(float(x.abs().max()), floor, 1e-30))
    return worst


def shard_before(model_name: str, config: Any, layout: Layout, context: ParallelContext, **options: Any) -> Any:
    """``get_peft_model``, then ``shard_model``."""
    model = adapted(model_name, copy.deepcopy(config), layout.dtype, **options)
    if layout.checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return shardformer.shard_model(model, context=context, **layout.options)


def shard_after(model_name: str, config: Any, layout: Layout, context: ParallelContext, **options: Any) -> Any:
    """``shard_model``, then PEFT's own ``get_peft_model``."""
    import peft

    torch.manual_seed(0)
    model = MODELS[model_name](**options).to(layout.dtype)
    if layout.checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    model = shardformer.shard_model(model, context=context, **layout.options)
    torch.manual_seed(5)
    model = peft.get_peft_model(model, copy.deepcopy(config))
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

    @classmethod
    def between(cls, found: Result, reference: Result) -> Self:
        """Compare the results of a layout with those of one process."""
        return cls(
            max(abs(a - b) for a, b in zip(found.losses, reference.losses, strict=True)),
            max(abs(a - b) / max(b, 1e-9) for a, b in zip(found.norms, reference.norms, strict=True)),
            difference(found.gradients, reference.gradients) if found.gradients else None,
            difference(found.weights, reference.weights),
        )

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

    found = run_as_threads(run, **layout.sizes, one_at_a_time=True)[0]
    return Difference.between(found, reference)


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
        other = peft.PeftModel.from_pretrained(other, f"{folder}/plain", is_trainable=True)
        loaded = full_state_dict(other)
        before = eval_loss(other, model_name, context)
        if layout.zero is None:
            merged = model.merge_and_unload()
            merged.save_pretrained(f"{folder}/merged")
            loaded["loss_of_merged"] = eval_loss(merged, model_name, context)
        loaded["loss"] = before
        return loaded

    loaded = run_as_threads(run, **layout.sizes, one_at_a_time=True)[0]
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


def compare_named(
    feature: str, layout: str, model_name: str = "llama", order: str = "before", steps: int = STEPS
) -> Difference | str:
    """Compare a feature on a layout with one process. Returns the text of the error if the layout is refused."""
    try:
        return compare(model_name, config_of(feature, model_name), LAYOUTS[layout], order, steps)
    except ConfigError as error:
        return str(error)


def files_named(feature: str, layout: str, model_name: str = "llama") -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return file_differences(model_name, config_of(feature, model_name), LAYOUTS[layout], folder)


def compare_all(cases: list[tuple[str, str, str, str]], steps: int) -> list[Difference | str]:
    return [compare_named(*case, steps) for case in cases]


def release() -> str:
    import peft

    return str(peft.__version__)


def switch_adapters(layout: Layout | None) -> list[float]:
    """Train, switch, disable, merge and delete adapters, and return the losses and numbers on the way."""

    def run(context: ParallelContext | None) -> list[float]:
        model = adapted("llama", config_of("LoRA", target_modules=["q_proj", "down_proj"]))
        if context is not None and layout is not None:
            model = shardformer.shard_model(model, context=context, **layout.options)
        torch.manual_seed(9)
        model.add_adapter("second", config_of("LoRA", target_modules=["q_proj", "o_proj"], r=2))
        found = [plain_loss(model, "llama")]
        model.set_adapter("second")
        optimizer = make_optimizer(model)
        for step in range(2):
            model(**batch_of("llama", step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(plain_loss(model, "llama"))
        model.base_model.set_adapter(["default", "second"])
        found.append(plain_loss(model, "llama"))
        with model.disable_adapter():
            found.append(plain_loss(model, "llama"))
        model.merge_adapter()
        found.append(plain_loss(model, "llama"))
        model.unmerge_adapter()
        found.append(plain_loss(model, "llama"))
        model.delete_adapter("default")
        model.set_adapter("second")
        found.append(plain_loss(model, "llama"))
        prompt = batch_of("llama", 0)["input_ids"][:1, :4]
        tokens = model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
        return [*map(float, found), *map(float, tokens[0]), *map(float, model.get_nb_trainable_parameters())]

    return run(None) if layout is None else run_as_threads(run, **layout.sizes, one_at_a_time=True)[0]


def compare_saved_norms() -> Difference:
    """Compare Gemma 3, all of whose norms PEFT copies when it is sharded. Those of queries and keys are in blocks."""
    config = config_of("modules_to_save", "gemma", modules_to_save=["norm"])
    return compare("gemma", config, LAYOUTS["tensor"], "after", steps=2)


def compare_trained_tokens() -> Difference:
    """Compare trained rows of an embedding, whose wrapper holds the embedding through a child."""
    config = config_of("LoRA", trainable_token_indices=[1, 4])
    return compare("llama", config, LAYOUTS["ZeRO 3"], steps=2)


def loss_with_hook(order: str | None) -> float:
    """Return the loss of a model with a user's hook on a norm that an adapter copies.

    Args:
        order: "before" or "after" ``shard_model``. None does not shard.
    """
    import peft

    def run(context: ParallelContext | None) -> float:
        torch.manual_seed(0)
        model = llama().double()
        model.model.norm.register_forward_hook(lambda module, args, output: 2 * output)
        if context is not None and order == "after":
            model = shardformer.shard_model(model, context=context)
        model = peft.get_peft_model(model, config_of("LoRA", modules_to_save=["norm"]))
        if context is not None and order == "before":
            model = shardformer.shard_model(model, context=context)
        return float(plain_loss(model, "llama"))

    return run(None) if order is None else run_as_threads(run, tensor=2, one_at_a_time=True)[0]


def shard_different_adapters(context: ParallelContext, options: dict[str, int]) -> None:
    """Shard adapters whose options differ between the ranks."""
    torch.manual_seed(0)
    own = {name: value + context.rank for name, value in options.items()}
    shardformer.shard_model(adapted("llama", config_of("LoRA", **own)), context=context)


def names_after_deletion() -> tuple[set[str], set[str]]:
    """Return the adapters' names before an adapter is added, and after it is deleted. It is named like a module."""
    from shardformer.layout.sharding_metadata import get_sharding_metadata

    def run(context: ParallelContext) -> tuple[set[str], set[str]]:
        model = shardformer.shard_model(adapted("llama", config_of("LoRA")), context=context)
        before = set(get_sharding_metadata(model).adapters.own)
        model.add_adapter("model", config_of("LoRA"))
        assert len(get_sharding_metadata(model).adapters.own) == 2 * len(before)
        model.delete_adapter("model")
        return before, set(get_sharding_metadata(model).adapters.own)

    return run_as_threads(run, tensor=2, one_at_a_time=True)[0]


def errors_of_different_adapters() -> tuple[str, str]:
    """Return the errors for other ranks of the matrices, and for another scale."""
    return (
        error_of(shard_different_adapters, {"r": 3}, data=2),
        error_of(shard_different_adapters, {"lora_alpha": 6}, tensor=2),
    )


def block_collectives(feature: str, layout: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the collectives of one step of full fine-tuning and with adapters, by kind and purpose."""
    options, sizes = LAYOUTS[layout].options, LAYOUTS[layout].sizes
    torch.manual_seed(0)
    models = [llama().double(), adapted("llama", config_of(feature))]

    def run(context: ParallelContext) -> list[dict[str, int]]:
        counts = []
        for model in models:
            sharded = shardformer.shard_model(copy.deepcopy(model), context=context, **options).train()
            sharded(**batch_of("llama", 0)).loss.backward()
            with CollectiveRecorder(context) as recorder:
                sharded(**batch_of("llama", 0)).loss.backward()
            table = recorder.summarize_calls()
            counts.append({f"{op} {purpose}": number for (op, _, purpose), (number, _) in table.items()})
        return counts

    full, with_adapters = run_as_threads(run, **sizes)[0]
    return full, with_adapters


def train_llama(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Train in one process with clipped gradients, and return the losses."""
    losses = []
    for step in range(steps):
        loss = model(**batch_of("llama", step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train_engine(zero: int | None, folder: str, sizes: dict[str, int]) -> dict[str, float]:
    """Train with ``initialize``, save a checkpoint in the middle, resume it, and compare with one process."""
    config = config_of("LoRA")
    model = adapted("llama", config)
    plain = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    reference = train_llama(plain, optimizer, STEPS)

    def run(context: ParallelContext) -> tuple[list[float], dict[str, Tensor]]:
        parallel = shardformer.ParallelConfig(max_grad_norm=1.0, zero_stage=zero, micro_batches=2, **sizes)

        def start() -> Any:
            made = copy.deepcopy(model)
            return shardformer.initialize(
                made, lambda ps: torch.optim.AdamW(ps, lr=1e-2), parallel=parallel, context=context
            )

        def local(step: int) -> dict[str, Tensor]:
            return {n: x.chunk(context.data.size)[context.data.rank] for n, x in batch_of("llama", step).items()}

        engine, half = start(), STEPS // 2
        losses = [float(engine.train_step(local(step))) for step in range(half)]
        engine.save(folder)
        engine = start()
        engine.load(folder)
        losses += [float(engine.train_step(local(step))) for step in range(half, STEPS)]
        return losses, full_state_dict(engine.model)

    losses, weights = run_as_threads(run, **sizes)[0]
    return {
        "loss": max(abs(a - b) for a, b in zip(losses, reference, strict=True)),
        "weights": difference(weights, plain.state_dict()),
    }


def error_of(function: Callable[..., Any], *args: Any, **sizes: int) -> str:
    """Return the text of the error that sharding raises."""
    try:
        run_as_threads(lambda context: function(context, *args), one_at_a_time=True, **sizes)
    except ConfigError as error:
        return str(error)
    return "no error"


def shard_config(context: ParallelContext, kind: str, settings: dict[str, Any], options: dict[str, Any]) -> None:
    import peft

    options = dict(options)
    torch.manual_seed(0)
    model = MODELS[options.pop("model", "llama")]()
    model = peft.get_peft_model(model, getattr(peft, kind)(**settings))
    before = [(name, id(p), type(p)) for name, p in model.named_parameters()]
    try:
        shardformer.shard_model(model, context=context, **options)
    finally:
        assert before == [(name, id(p), type(p)) for name, p in model.named_parameters()]


def shard_with_optimizer(context: ParallelContext) -> None:
    model = adapted("llama", config_of("LoRA"))
    optimizer = make_optimizer(model)
    shardformer.shard_model(model, context=context)
    optimizer.step()


def adapt_after_zero(context: ParallelContext) -> None:
    model = shardformer.shard_model(llama(), context=context)
    shardformer.shard_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    get_peft_model(model, config_of("LoRA"))


def merge_under_stage_3(context: ParallelContext) -> None:
    model = shardformer.shard_model(adapted("llama", config_of("LoRA")), context=context)
    shardformer.shard_optimizer(model, make_optimizer(model), stage=3)
    model.merge_adapter()


def adapt_sharded(context: ParallelContext, settings: dict[str, Any]) -> None:
    get_peft_model(shardformer.shard_model(llama(), context=context), config_of("LoRA", **settings))


def call_on_sharded(context: ParallelContext, method: str, *args: Any) -> None:
    model = shardformer.shard_model(adapted("llama", config_of("LoRA")), context=context)
    getattr(model if hasattr(type(model.base_model), method) else model.get_base_model(), method)(*args)


TIED = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}


def refusals() -> dict[str, str]:
    """Return the messages of the errors by what is refused."""
    lora: dict[str, Any] = {"target_modules": ["q_proj"]}
    fused = {"enable_jit_fused": True, "model": "opt"}
    sequence_parallel = {"enable_sequence_parallelism": True, "model": "qwen2_moe"}
    cases: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, int]]] = {
        "2d": ("LoraConfig", lora, {"tensor_parallel_mode": "2d"}, {"tensor": 4}),
        "boft": ("BOFTConfig", {**lora, "boft_block_size": 4}, {}, {"tensor": 2}),
        "lora_bias": ("LoraConfig", {"target_modules": ["o_proj"], "lora_bias": True}, {}, {"tensor": 2}),
        "DoRA on the embedding": (
            "LoraConfig",
            {"target_modules": ["embed_tokens"], "use_dora": True},
            {},
            {"tensor": 2},
        ),
        "variant": (
            "LoraConfig",
            {**lora, "alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"},
            {},
            {"tensor": 2},
        ),
        "parameter": (
            "LoraConfig",
            {"target_modules": [], "target_parameters": ["q_proj.weight"]},
            {},
            {"tensor": 2},
        ),
        "tokens": ("LoraConfig", {**lora, "trainable_token_indices": [1]}, {}, {"tensor": 2}),
        "tokens and pipe": ("LoraConfig", {**lora, "trainable_token_indices": [1]}, {}, {"pipe": 2}),
        "tied adapters": ("LoraConfig", TIED, {"model": "gemma"}, {"tensor": 2}),
        "tied adapters and pipe": ("LoraConfig", TIED, {"model": "gemma"}, {"pipe": 2}),
        "saved in a block": ("LoraConfig", {**lora, "modules_to_save": ["up_proj"]}, {}, {"tensor": 2}),
        "fused bias": ("LoraConfig", {"target_modules": ["fc1"], "use_dora": True}, fused, {"tensor": 2}),
        "dropout": (
            "LoraConfig",
            {"target_modules": ["shared_expert_gate"], "lora_dropout": 0.1},
            sequence_parallel,
            {"tensor": 2},
        ),
        "AdaLoRA and pipe": ("AdaLoraConfig", METHODS["AdaLoRA"][1], {}, {"pipe": 2}),
        "prompt and pipe": ("PromptTuningConfig", METHODS["prompt tuning"][1], {}, {"pipe": 2}),
    }
    found = {
        name: error_of(shard_config, kind, settings, options, **sizes)
        for name, (kind, settings, options, sizes) in cases.items()
    }
    found["optimizer"] = error_of(shard_with_optimizer, tensor=2)
    found["zero"] = error_of(adapt_after_zero, data=2)
    found["merge under stage 3"] = error_of(merge_under_stage_3, data=2)
    found["PiSSA and pipe"] = error_of(adapt_sharded, {"init_lora_weights": "pissa"}, pipe=2)
    found["saved and pipe"] = error_of(adapt_sharded, {"modules_to_save": ["lm_head"]}, pipe=2)
    found["transformers' load_adapter"] = error_of(call_on_sharded, "load_adapter", "folder", data=2)
    weighted = ("add_weighted_adapter", ["default"], [1.0], "weighted")
    found["weighted adapter"] = error_of(call_on_sharded, *weighted, tensor=2)
    return found


def precision_differences() -> dict[str, Difference]:
    """Compare in fp32 and bf16. PiSSA does not accept fp64."""
    pissa, layout = config_of("LoRA", init_lora_weights="pissa"), Layout({"tensor": 2}, dtype=torch.float32)
    narrow = Layout({"tensor": 2}, LAYOUTS["sequence parallel"].options, dtype=torch.bfloat16)
    return {
        "PiSSA before": compare("llama", pissa, layout),
        "PiSSA after": compare("llama", pissa, layout, "after"),
        "bf16": compare("llama", config_of("LoRA"), narrow),
    }


def dropout_masks() -> list[list[bool]]:
    """Return the elements that an adapter drops on each tensor rank, in a model that has dropout in its blocks."""

    def run(context: ParallelContext) -> list[bool]:
        torch.manual_seed(0)
        model = gpt2(attn_pdrop=0.4)
        torch.manual_seed(5)
        model = get_peft_model(model, config_of("LoRA, dropout", "gpt2"))
        model = shardformer.shard_model(model, context=context).train()
        dropped: list[bool] = []
        dropout = model.get_submodule("base_model.model.transformer.h.1.attn.c_attn.lora_dropout.default")

        def forward(x: Tensor) -> Tensor:
            y: Tensor = type(dropout).forward(dropout, x)
            dropped.extend((y == 0).flatten().tolist())
            return y

        vars(dropout)["forward"] = forward
        model(**batch_of("gpt2", 0))
        return dropped

    return run_as_threads(run, tensor=2, one_at_a_time=True)


def reshard_engine() -> list[float]:
    """Return the differences of two losses to one process, when the engine changes its layout between them."""
    model = adapted("llama", config_of("LoRA"))
    plain = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    reference = []
    for step in range(2):
        loss = plain(**batch_of("llama", step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.append(float(loss.detach()))

    def run(context: ParallelContext) -> list[float]:
        def make(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, lr=1e-2)

        parallel = shardformer.ParallelConfig(tensor=2)
        engine = shardformer.initialize(copy.deepcopy(model), make, parallel=parallel, context=context)
        losses = [float(engine.train_step(batch_of("llama", 0)))]
        engine.reshard({"data": 2})
        local = {name: x.chunk(2)[engine.context.data.rank] for name, x in batch_of("llama", 1).items()}
        return [*losses, float(engine.train_step(local))]

    losses = run_as_threads(run, tensor=2, one_at_a_time=True)[0]
    return [abs(a - b) for a, b in zip(losses, reference, strict=True)]


def lazy_difference() -> float:
    """Compare the weights of an adapted model that was built lazily with those of one that was not."""

    def build() -> Any:
        return get_peft_model(llama(), config_of("LoRA"))

    def run(context: ParallelContext) -> dict[str, Tensor]:
        torch.manual_seed(0)
        with shardformer.LazyInit():
            model = build()
        return full_state_dict(shardformer.shard_model(model, context=context))

    torch.manual_seed(0)
    plain = build().state_dict()
    return difference(run_as_threads(run, tensor=2, one_at_a_time=True)[0], plain)


def injected_adapters(sizes: dict[str, int] | None, order: str = "before") -> tuple[float, float]:
    """Return the loss and gradient norm with adapters that transformers adds to a model, without PEFT's wrapper.

    Args:
        order: "before" or "after" ``shard_model``.
    """

    def run(context: ParallelContext | None) -> tuple[float, float]:
        torch.manual_seed(0)
        model = llama().double()
        if context is not None and order == "after":
            model = shardformer.shard_model(model, context=context)
        torch.manual_seed(5)
        model.add_adapter(config_of("LoRA", target_modules=["q_proj", "o_proj"], init_lora_weights=False))
        if context is not None and order == "before":
            model = shardformer.shard_model(model, context=context)
        loss = model.train()(**batch_of("llama", 0)).loss
        loss.backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        return float(loss.detach()), float(torch.nn.utils.clip_grad_norm_(trained, 1e9))

    return run(None) if sizes is None else run_as_threads(run, **sizes, one_at_a_time=True)[0]
