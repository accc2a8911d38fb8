"""Refusals of the integrations: the rows of the tables in docs/integrations.md, and the attempts of the tests.

Each row of a table names the attempts that show it. The functions ``refusals`` of the tests make these attempts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """A row of a table.

    Args:
        what: what is refused.
        why: the reason, or what to use instead.
        attempts: name of an attempt -> parts of the error's message.
    """

    what: str
    why: str
    attempts: Mapping[str, tuple[str, ...]]


ONE_LIBRARY = "Only one library can shard the model"
REFUSALS: dict[str, Sequence[Refusal]] = {
    "peft": (
        Refusal(
            'adapters with `tensor_parallel_mode` other than `"1d"`',
            "A tensor grid shards both dimensions of a weight",
            {"2d": ("tensor_parallel_mode other than '1d'",)},
        ),
        Refusal(
            "AdaLoRA, prompt tuning, p-tuning and prefix tuning with a `pipe` axis",
            "These methods change the inputs or the loss of the full model",
            {"AdaLoRA and pipe": ("AdaLoraModel", "pipe=2"), "prompt and pipe": ("prompt learning", "pipe=2")},
        ),
        Refusal(
            "BOFT, OFT and other methods that transform the weight, on a layer sharded by tensor parallelism",
            "Each rank has only a slice of the weight. Use data parallelism, ZeRO or a pipeline",
            {"boft": ("unknown layout",)},
        ),
        Refusal(
            "`target_parameters` (experts of a mixture) on a layer sharded by tensor parallelism",
            "Each rank has only a slice of the weight. Use data parallelism, ZeRO or a pipeline",
            {"parameter": ("target_parameters",)},
        ),
        Refusal(
            "`trainable_token_indices` on an embedding sharded by tensor parallelism, or with a `pipe` axis",
            "Use data parallelism or ZeRO",
            {"tokens": ("TrainableTokensWrapper",), "tokens and pipe": ("TrainableTokensWrapper", "pipe=2")},
        ),
        Refusal(
            "tied adapters (`ensure_weight_tying=True`) and other adapters that share weights between layers, with a "
            "`tensor` or `pipe` axis",
            "Tensor and pipeline parallelism would separate the shared weights. Use data parallelism",
            {"tied adapters": ("share memory",), "tied adapters and pipe": ("share memory",)},
        ),
        Refusal(
            "`modules_to_save` with a linear layer inside an attention module or MLP, under tensor parallelism",
            "Use an adapter for this layer",
            {"saved in a block": ("modules_to_save does not support",)},
        ),
        Refusal(
            "`lora_bias=True` on a row-parallel layer; DoRA on embeddings; variants of LoRA other than DoRA, under "
            "tensor parallelism",
            "ShardFormer doesn't implement these options",
            {
                "lora_bias": ("once per rank",),
                "DoRA on the embedding": ("DoRA needs the norms of all embedding vectors",),
                "variant": ("Variant is not supported",),
            },
        ),
        Refusal(
            "DoRA or IA3 on a linear layer whose bias `enable_jit_fused` fuses",
            "The fused operation adds the bias later",
            {"fused bias": ("a fused operation adds later",)},
        ),
        Refusal(
            "dropout of an adapter on a replicated linear layer between blocks, with sequence parallelism",
            "Each rank processes different positions of the sequence",
            {"dropout": ("the tensor ranks process different positions",)},
        ),
        Refusal(
            "adding adapters after `shard_optimizer`, or after creating an optimizer",
            "The optimizer would not update the adapters. Add them first",
            {"zero": ("after shard_optimizer",), "optimizer": ("An optimizer already contains",)},
        ),
        Refusal(
            "merging under ZeRO stage 3",
            "Each rank has only a shard of the weights. Save the adapters, and merge them on a single process",
            {"merge under stage 3": ("merge_adapter is not supported while ZeRO stage 3",)},
        ),
        Refusal(
            "adapters that are computed from the weights (PiSSA, DoRA), or `modules_to_save`, added to a pipeline "
            "stage",
            "Add the adapters before you shard the model",
            {"PiSSA and pipe": ("reads weights or copies modules",), "saved and pipe": ("copies modules",)},
        ),
        Refusal(
            "transformers' `load_adapter` on a sharded model",
            "`load_adapter` assigns full tensors. Use `PeftModel.from_pretrained`",
            {"transformers' load_adapter": ("load_adapter", "PeftModel.from_pretrained")},
        ),
        Refusal(
            "`add_weighted_adapter` on a sharded model",
            "`add_weighted_adapter` needs all values of the adapters. Call it before sharding",
            {"weighted adapter": ("add_weighted_adapter is not supported",)},
        ),
    ),
    "bitsandbytes": (
        Refusal(
            "4-bit weights with a `tensor` axis, if a row is not a whole number of blocks (64 values), or the columns "
            "of a rank are not a multiple of 32",
            "All values of a block share one scale. Use a smaller axis, or list the layer in `llm_int8_skip_modules`",
            {
                "rows": ("self_attn.q_proj", "has 48 columns", "llm_int8_skip_modules"),
                "columns": ("self_attn.o_proj", "The columns ", "32"),
            },
        ),
        Refusal(
            "`load_in_8bit=True` with a `tensor` or `sequence` axis",
            "8-bit layers scale their input by its largest value over all features. For outliers, they use all tokens",
            {
                "int8 and tensor": ("q_proj is a quantized Linear8bitLt", "tensor=2"),
                "int8 and sequence": ("q_proj is a quantized Linear8bitLt", "sequence=2"),
            },
        ),
        Refusal(
            "other quantizers (GPTQ, AWQ, torchao, HQQ, fp8, mxfp4) with a `tensor` or `sequence` axis",
            "ShardFormer doesn't know how these quantizers store weights",
            {
                "subclass": ("q_proj is a quantized Linear, which", "tensor=2"),
                "buffers": ("q_proj is a quantized IntegerLinear", "tensor=2"),
            },
        ),
        Refusal(
            "`initialize` for a quantized model without adapters",
            "Quantized weights can't be trained. The transformers Trainer raises the same error",
            {"no adapters": ("Training does not support the quantized", "get_peft_model")},
        ),
        Refusal(
            "`save_pretrained` and `export_pretrained` of the quantized base; `engine.reshard`",
            "Save the adapters or a checkpoint. Both contain all trained parameters",
            {
                "save the base": ("save_pretrained does not support the quantized",),
                "reshard": ("already sharded or quantized",),
            },
        ),
        Refusal(
            "merging adapters into 4-bit weights that tensor parallelism shards",
            "Each rank would quantize its slice with its own scales. Merge the adapters on a single process",
            {"merge": ("merge_and_unload is not supported while tensor parallelism shards quantized weights",)},
        ),
        Refusal(
            "DoRA, PiSSA and other adapters that are computed from the weights, added to a sharded quantized model",
            "Call `get_peft_model` before `shard_model`",
            {"DoRA after sharding": ("This LoraConfig, which is computed from the weights", "before shard_model")},
        ),
        Refusal(
            "quantized weights that differ between ranks, or that bitsandbytes changed for evaluation on the CPU",
            "Load the same model on all ranks, and shard it before the first evaluation",
            {
                "different weights": ("model.layers.1.mlp.up_proj.weight",),
                "after evaluation": ("converted the 4-bit weight of model.layers.0.mlp.up_proj",),
            },
        ),
    ),
    "transformers": (
        Refusal(
            "`fsdp`, `deepspeed`, `parallelism_config`, and models that `DistributedConfig` or `fully_shard` sharded",
            f"{ONE_LIBRARY}. `ParallelismConfig` and `DistributedConfig` select accelerate's and transformers' own "
            "parallelism",
            {
                "fsdp": ("fsdp", "zero_stage"),
                "deepspeed": ("deepspeed", "zero_stage"),
                "parallelism_config": ("parallelism_config", "Set the sizes of the axes in ParallelConfig"),
                "fully_shard": ("is a DTensor", "Load the model without distributed_config"),
            },
        ),
        Refusal(
            "`use_liger_kernel`",
            "Liger's kernels replace the model's modules, and compute the loss from full logits",
            {"liger": ("use_liger_kernel",)},
        ),
        Refusal(
            "`auto_find_batch_size`",
            "Ranks would retry with different batch sizes",
            {"auto_find_batch_size": ("auto_find_batch_size", "retry")},
        ),
        Refusal(
            '`optim="lomo"`, `"adalomo"`, and layer-wise optimizers',
            "These optimizers update parameters before the gradients are reduced over the ranks",
            {"lomo": ("optim='lomo'", "during the backward pass")},
        ),
        Refusal(
            "with `pipe`: label smoothing, `compute_loss_func`, your own `compute_loss`, `predict_with_generate`, "
            "NEFTune",
            "A pipeline always uses the model's own loss",
            {
                "pipe and label smoothing": ("label_smoothing_factor with pipe=2",),
                "pipe and compute_loss_func": ("compute_loss_func with pipe=2",),
                "pipe and compute_loss": ("compute_loss with pipe=2",),
                "pipe and generate": ("predict_with_generate with pipe=2",),
                "pipe and NEFTune": ("neftune_noise_alpha with pipe=2",),
            },
        ),
        Refusal(
            "with `sequence`: `predict_with_generate`",
            "A sharded sequence cannot be extended token by token",
            {"sequence and generate": ("predict_with_generate=True", "sequence=2")},
        ),
        Refusal(
            "`max_grad_norm` in `ParallelConfig`",
            "Set `max_grad_norm` in `TrainingArguments`",
            {"max_grad_norm": ("max_grad_norm=1.0", "TrainingArguments")},
        ),
        Refusal(
            "a layout that differs from the sharded model's layout, or two layouts",
            "Pass the layout only once",
            {
                "other layout": ("parallel requests data=2", "the argument context has data=1"),
                "two layouts": ("differs from", "Pass the layout to only one of them"),
            },
        ),
        Refusal(
            "a layout for several processes, if `TrainingArguments` found only one process",
            "On machines without GPUs, pass `use_cpu=True`",
            {"one process": ("found one process", "use_cpu=True")},
        ),
        Refusal(
            "with `data`: your own `get_train_dataloader` that returns a plain `DataLoader`",
            "All data-parallel ranks would read the same samples. Return `self.accelerator.prepare(loader)`",
            {"plain loader": ("get_train_dataloader", "same samples", "self.accelerator.prepare(loader)")},
        ),
        Refusal(
            "a sharded model in the transformers Trainer",
            "The transformers Trainer passes different batches to all processes",
            {
                "plain Trainer": ("sharded over", "shardformer.integrations.transformers.Trainer"),
                "plain Trainer evaluates": ("sharded over", "shardformer.integrations.transformers.Trainer"),
            },
        ),
    ),
    "accelerate": (
        Refusal(
            "FSDP, DeepSpeed and Megatron plugins, `ParallelismConfig`",
            ONE_LIBRARY,
            {
                "fsdp_plugin": ("fsdp_plugin", ONE_LIBRARY),
                "deepspeed_plugin": ("deepspeed_plugin", ONE_LIBRARY),
                "megatron_lm_plugin": ("megatron_lm_plugin", ONE_LIBRARY),
                "parallelism_config": ("parallelism_config", ONE_LIBRARY),
            },
        ),
        Refusal(
            "`dispatch_batches=True`",
            "accelerate sends a different part of each batch to every process, but the ranks of a sharded model need "
            "the same part",
            {"dispatch_batches": ("dispatch_batches=True", "same batch")},
        ),
        Refusal(
            "`pipe`",
            "Your loop calls the forward and the backward pass separately. Use `shardformer.initialize`",
            {"pipe": ("pipe=2", "engine.train_step")},
        ),
        Refusal(
            "a model whose layout differs from the Accelerator's layout",
            "Pass the model's context",
            {"other layout": ("data=2", "Pass the context of the model")},
        ),
        Refusal(
            "a sharded model in accelerate's own `Accelerator`",
            "accelerate's own `Accelerator` passes different batches to all processes",
            {
                "plain": ("sharded over", "shardformer.integrations.accelerate.Accelerator"),
                "plain, evaluation": ("sharded over", "shardformer.integrations.accelerate.Accelerator"),
            },
        ),
    ),
    "lightning": (
        Refusal(
            "`pipe`",
            "`training_step` calls the model, but a pipeline must run the forward pass. Use `shardformer.initialize`",
            {"pipe": ("pipe=2",)},
        ),
        Refusal(
            "`micro_batches`, `max_grad_norm` and `on_nonfinite` in `ParallelConfig`, and `find_unused_parameters`",
            "Use `accumulate_grad_batches` and `gradient_clip_val`. A sharded model doesn't need DDP options",
            {
                "micro_batches": ("micro_batches=2",),
                "max_grad_norm": ("max_grad_norm=1.0",),
                "on_nonfinite": ("'skip'",),
                "find_unused_parameters": ("find_unused",),
            },
        ),
        Refusal(
            "`automatic_optimization = False`",
            "The strategy must weight the loss that `training_step` returns by its number of labels",
            {"automatic_optimization": ("automatic_optimization=False",)},
        ),
        Refusal(
            "parameters of the LightningModule that are not all in one attribute",
            "Put all parameters into one `nn.Module`",
            {
                "two models": ("has parameters in ['head', 'model']",),
                "own parameter": ("has parameters in ['model', 'scale']",),
            },
        ),
        Refusal(
            "`sync_batchnorm`, averaging callbacks, checkpoint plugins",
            "These options change the module, or save copies of it",
            {
                "sync_batchnorm": ("sync_batchnorm=True",),
                "averaging": ("StochasticWeightAveraging",),
                "checkpoint plugin": ("AsyncCheckpointIO",),
            },
        ),
        Refusal(
            '`precision="16-mixed"`, and precision plugins that replace modules',
            'Use `"bf16-mixed"`, or `ParallelConfig(precision="fp16")` with ZeRO',
            {"16-mixed": ("16-mixed",)},
        ),
    ),
}
"""Library -> rows of its table."""


def attempts_of(library: str) -> dict[str, tuple[str, ...]]:
    """Return the parts of each error's message, by the name of the attempt."""
    return {name: parts for row in REFUSALS[library] for name, parts in row.attempts.items()}


def check_refusals(library: str, found: Mapping[str, str]) -> None:
    """Check that each attempt of the library's table was made and raised its error."""
    expected = attempts_of(library)
    assert found.keys() == expected.keys()
    check_messages(found, expected)


def check_messages(found: Mapping[str, str], expected: Mapping[str, Sequence[str]]) -> None:
    """Check that each message contains its expected parts."""
    for name, parts in expected.items():
        assert all(part in found[name] for part in parts), (name, found[name])


def table(library: str) -> str:
    """Return the table of a library in Markdown."""
    rows = [f"| {row.what} | {row.why} |" for row in REFUSALS[library]]
    return "\n".join(["| option | reason or alternative |", "|---|---|", *rows])
