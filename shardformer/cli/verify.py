"""The ``shardformer verify`` command, which trains a model with and without sharding and compares results."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardformer.cli._options import (
    check_model_directory_has_config,
    check_num_processes_within_limit,
    options_from_dataclass,
)
from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from shardformer.gradient_accumulation.micro_batch_loss import LossWeight
    from shardformer.local_ranks.worker_pool import WorkerPool
    from shardformer.verify.comparison import Report
    from shardformer.verify.model_source import ModelSource
    from shardformer.verify.train_both import VerifyPipeline
    from shardformer.verify.training_options import VerifyTraining

TIMEOUT_S = 3600.0  # per head class, long enough for large models


class TrainingDtype(StrEnum):
    """Floating-point precision in which ``shardformer verify`` trains both models."""

    FP64 = "fp64"
    FP32 = "fp32"


FLAGS = {
    "tensor": "Tensor parallel size. Default: 2, or 1 with --pipe or --sequence. With --tensor-parallel-mode, pass the "
    "shape of a grid of ranks, such as 4x2 or 2x2x2.",
    "tensor_parallel_mode": "",
    "data": "Data parallel size. Default: 1.",
    "pipe": "Pipeline parallel size (number of stages). A small random model gets as many layers as the stages need.",
    **dict.fromkeys(
        ("schedule", "num_model_chunks", "micro_batches", "partition", "recompute_layers", "zero_stage"), ""
    ),
    "sequence": "Context parallel size, such as 4, or 2x2 for a ring of Ulysses groups.",
    **dict.fromkeys(("context_parallel", "sequence_parallel", "sequence_overlap"), ""),
    **dict.fromkeys(("fused_normalization", "flash_attention", "fused_activation"), ""),
    "precision": "Precision of both models, with fp32 master weights: bf16 or fp16. Requires --zero-stage.",
    "offload": "Where to store master weights and optimizer state: cpu or nvme:DIR. Requires --zero-stage.",
    "average_loss_over": "How the reference loss is computed with --data. tokens: over the full batch (default with "
    "--pipe). ranks: as the mean of the ranks' losses, like in DDP (default without --pipe). The results differ "
    "if the ranks' batches have different numbers of labels, or if the loss balances experts.",
}
"""Field of ``ParallelConfig`` -> the help of its flag, or empty for the description of the field."""
RENAMED_OPTIONS = {
    "--mode": "--tensor-parallel-mode", "--chunks": "--num-model-chunks", "--cut": "--partition",
    "--zero": "--zero-stage", "--context": "--context-parallel", "--overlap": "--sequence-overlap",
    "--fused-norm": "--fused-normalization", "--jit": "--fused-activation", "--reference": "--average-loss-over",
    "--micro-steps": "--gradient-accumulation-steps", "--checkpointing": "--activation-checkpointing",
}  # fmt: skip
"""Earlier name of an option -> its name."""
OPTION_GROUPS = {
    "Layout": ("tensor", "data", "pipe", "zero_stage"),
    "Comparison": ("steps", "dtype", "average_loss_over", "as_json"),
    "Model and data": ("head", "all_heads", "policy", "frozen", "batch", "tokens"),
    "Tensor, sequence and context parallelism": (
        "tensor_parallel_mode", "sequence_parallel", "sequence_overlap", "sequence", "context_parallel",
    ),
    "Pipeline parallelism": ("micro_batches", "schedule", "num_model_chunks", "partition", "recompute_layers"),
    "Optimizer and memory": (
        "optimizer", "precision", "offload", "gradient_accumulation_steps", "activation_checkpointing",
    ),
    "Kernels": ("flash_attention", "fused_normalization", "fused_activation"),
}  # fmt: skip


@dataclass(frozen=True)
class VerifyOptions:
    """Command line options of ``shardformer verify``."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A transformers model type such as gpt2 (a small random model), a folder written by "
            "save_pretrained, a config.json (random weights), or a name on the Hugging Face Hub. For your own model, "
            "module:function, where the function returns a model, (model_fn, batch_fn), or a dict of model_fn, "
            "batch_fn, loss_fn, policy and loss_weight.",
        ),
    ]
    policy: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Sharding policy: my_policy.py, my_policy.py:MyPolicy or module:MyPolicy. Default: the model "
            "family's policy.",
        ),
    ] = ""
    parallel: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help="Optimizer for --zero-stage: a torch.optim class, LAMB or LARS.")
    ] = "SGD"
    gradient_accumulation_steps: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=2**14,
            help="Number of batches whose gradients are accumulated for an optimizer step.",
        ),
    ] = 1
    activation_checkpointing: Annotated[bool, "Use activation checkpointing in the sharded model."] = False
    frozen: Annotated[
        str, typer.Option(metavar="REGEX", help="Freeze parameters whose names match this regular expression.")
    ] = ""
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Number of optimizer steps.")] = 3
    dtype: Annotated[
        TrainingDtype,
        typer.Option(
            metavar="fp64|fp32",
            help="Precision of both models. With fp64, sharding errors are much larger than rounding errors. fp64 "
            "also replaces casts to lower precision inside the model, as in LLaMA's norms.",
        ),
    ] = TrainingDtype.FP64
    head: Annotated[
        str, typer.Option(metavar="CLASS", help="The transformers model class, such as BertForTokenClassification.")
    ] = ""
    all_heads: Annotated[bool, "Verify all model classes in the family that have a head, one after another."] = False
    batch: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Samples per batch. Default: 4, or more if the layout needs more."),
    ] = None
    tokens: Annotated[int | None, typer.Option(metavar="N", min=6, help="Tokens per sample. Default: 13.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False

    def make_parallel_config(self) -> ParallelConfig:
        """Create a ParallelConfig from the command-line options. By default, ``tensor`` is 2, or 1 with ``--pipe``."""
        is_default = "pipe" not in self.parallel and self.parallel.get("sequence", 1) == 1
        defaults = {"data": 1, "tensor": 2 if is_default else 1}
        return ParallelConfig(**{**defaults, **self.parallel})

    def make_verify_pipeline(self, loss_weight: LossWeight | None = None) -> VerifyPipeline | None:
        """Create the pipeline options, or None if ``--pipe`` is not set. Raises ConfigError for invalid options."""
        names = ("micro_batches", "schedule", "num_model_chunks", "partition", "recompute_layers")
        found = {name: self.parallel[name] for name in names if name in self.parallel}
        if "pipe" not in self.parallel:
            if found:
                passed = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in found.items())
                raise ConfigError(
                    f"{passed} has no effect without --pipe.", remedy=f"Add --pipe 2, or remove {passed}."
                )
            return None
        from shardformer.verify.train_both import VerifyPipeline

        pipeline = VerifyPipeline(self.parallel["pipe"], found.pop("micro_batches", None), found, loss_weight)
        pipeline.create_stage_manager()
        return pipeline

    def make_verify_training(self) -> VerifyTraining:
        from shardformer.verify.training_options import VerifyTraining

        layout = self.make_parallel_config()
        return VerifyTraining(
            optimizer=self.optimizer,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            activation_checkpointing=self.activation_checkpointing,
            frozen_pattern=self.frozen,
            average_loss_over=self.parallel.get("average_loss_over"),
            **{n: getattr(layout, n) for n in ("zero_stage", "precision", "offload")},
        )


@options_from_dataclass(VerifyOptions, FLAGS)
def verify(options: VerifyOptions) -> None:
    """Train a model both unsharded and sharded over several processes, and compare losses, gradients and weights.

    Exit status: 1 if the results differ, 2 on error.
    """
    from rich.console import Console

    from shardformer.local_ranks.worker_pool import WorkerPool
    from shardformer.verify.comparison import print_report
    from shardformer.verify.model_source import import_policy_class

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # every worker would print the same warnings
    _check_option_combinations(options)
    sources = _select_models_to_verify(options)
    policy = import_policy_class(options.policy) if options.policy else sources[0].user_overrides.get("policy")
    console, reports = Console(highlight=False), []
    num_processes = prod(size or 1 for size in options.make_parallel_config().sizes.values())
    with WorkerPool(num_processes, timeout_s=TIMEOUT_S, module_names=("torch", "transformers")) as pool:
        for source in sources:
            with _show_status(f"{source.head or source.title}: in one process and sharded over {num_processes}"):
                reports.append(_verify_model_class(options, source, policy, pool))
            if options.all_heads and not options.as_json:
                _print_model_class_result(console, reports[-1])
    if options.as_json:
        print(_format_reports_as_json(reports, options.all_heads))
    elif options.all_heads:
        _print_summary(console, reports)
    else:
        print_report(console, reports[0], sources[0].title)
    if not all(report.passed for report in reports):
        raise typer.Exit(1)


def _check_option_combinations(options: VerifyOptions) -> None:
    from shardformer.config import ShardConfig

    for name in ("pipe", "data"):
        size = options.parallel.get(name, 1)
        if size < 1:
            raise ConfigError(f"--{name} must be at least 1, but got {size}.", remedy=f"Use --{name} 1 or more.")
    if options.all_heads and options.head:
        raise ConfigError(
            f"--all-heads cannot be combined with --head {options.head}.", remedy="Remove one of the two options."
        )
    options.make_verify_pipeline()
    layout = options.make_parallel_config()
    _check_options_have_effect(options, layout)
    check_num_processes_within_limit("The product of the axes", prod(size or 1 for size in layout.sizes.values()))
    ShardConfig(**layout.get_shard_config_kwargs())  # rejects unsupported combinations before anything is loaded
    options.make_verify_training()


def _check_options_have_effect(options: VerifyOptions, layout: ParallelConfig) -> None:
    """Raise ConfigError for options that configure a parallel axis of size 1, and so have no effect."""
    sizes = {name: size or 1 for name, size in layout.sizes.items()}
    for name, axis, needed in (
        ("tensor_parallel_mode", "tensor", "--tensor 2x2"),
        ("sequence_parallel", "tensor", "--tensor 2"),
        ("context_parallel", "sequence", "--sequence 2"),
        ("average_loss_over", "data", "--data 2"),
    ):
        value = options.parallel.get(name)
        if value not in (None, False, "1d", "auto", "ranks") and sizes[axis] == 1:
            flag = f"--{name.replace('_', '-')}"
            option = flag if value is True else f"{flag} {value}"
            raise ConfigError(f"{option} has no effect without {needed}.", remedy=f"Add {needed}, or remove {flag}.")


def _select_models_to_verify(options: VerifyOptions) -> list[ModelSource]:
    from shardformer.verify.model_source import find_model_source
    from shardformer.verify.small_models import is_vision_only

    check_model_directory_has_config(options.model)
    source = find_model_source(options.model)
    fixed = "batch_fn" in source.user_overrides and not hasattr(source.user_overrides["batch_fn"], "with_samples")
    if (fixed and options.batch) or ("batch_fn" in source.user_overrides and options.tokens):
        raise ConfigError(
            f"--batch and --tokens have no effect for {options.model}, which has its own batch_fn.",
            remedy="Remove --batch and --tokens, or the batch_fn.",
        )
    if options.tokens and source.config is not None and is_vision_only(source.head):
        model = source.head or options.model
        raise ConfigError(
            f"--tokens {options.tokens} has no effect for {model}, which has no text input.", remedy="Remove --tokens."
        )
    heads = source.head_classes if options.all_heads else [options.head] if options.head else []
    sources = [source.with_head_class(head) for head in heads] or [source]
    pipeline = options.make_verify_pipeline()
    return (
        sources if pipeline is None else [source.with_min_layers(_get_min_num_layers(pipeline)) for source in sources]
    )


def _get_min_num_layers(pipeline: VerifyPipeline) -> int:
    """Return the minimum number of layers that a model needs to be split into the configured pipeline stages."""
    stages = pipeline.create_stage_manager()
    return stages.num_virtual_stages if isinstance(stages.partition, str) else sum(stages.partition)


def _verify_model_class(options: VerifyOptions, source: ModelSource, policy: Any, pool: WorkerPool) -> Report:
    import torch

    from shardformer.verify.model_source import TOKENS
    from shardformer.verify.small_models import compute_model_loss, count_samples, is_loss_averaged_over_samples
    from shardformer.verify.verification import verify as run_verify

    weight = source.user_overrides.get("loss_weight")
    if weight is None and source.loss_fn is compute_model_loss and is_loss_averaged_over_samples(source.head):
        weight = count_samples
    pipeline = options.make_verify_pipeline(weight)
    layout = options.make_parallel_config()
    data = layout.data or 1
    per_rank = max(-(-4 // data), pipeline.num_micro_batches if pipeline is not None else 1)
    batch = options.batch or per_rank * data
    batch_fn = source.make_batch_fn(batch, options.tokens or TOKENS)
    sizes = {"tensor": layout.tensor, "sequence": layout.sequence}
    dtype = {TrainingDtype.FP64: torch.float64, TrainingDtype.FP32: torch.float32}[options.dtype]
    config = {**layout.get_shard_config_kwargs(), "extra_kwargs": {}}
    return run_verify(
        source.model_fn, batch_fn, sizes, data, options.steps, dtype, source.loss_fn, policy, config,
        pipeline=pipeline, training=options.make_verify_training(), pool=pool,
    )  # fmt: skip


@contextmanager
def _show_status(status_text: str) -> Iterator[None]:
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"{status_text} ..."):
        yield


def _format_reports_as_json(reports: list[Report], as_list: bool) -> str:
    # JSON has no infinity and no NaN, which a failed comparison may contain: null
    found = [json.loads(report.to_json(), parse_constant=lambda _: None) for report in reports]
    if not as_list:
        return json.dumps(found[0], indent=2)
    return json.dumps({"passed": all(report.passed for report in reports), "reports": found}, indent=2)


def _print_model_class_result(console: Console, report: Report) -> None:
    mark = "[green]ok[/]" if report.passed else "[bold red]FAIL[/]"
    missing = f" Gradients that only one of the two models has: {', '.join(report.missing)}." if report.missing else ""
    console.print(f"{report.model:30} {mark}  {report.verdict}{missing}", soft_wrap=True)


def _print_summary(console: Console, reports: list[Report]) -> None:
    failed = [report.model for report in reports if not report.passed]
    mark = "[bold red]FAIL[/]" if failed else "[bold green]PASS[/]"
    names = f"{len(failed)} of {len(reports)} heads: {', '.join(failed)}" if failed else f"{len(reports)} heads"
    console.print(f"{mark}: {names}, {reports[0].layout}, {reports[0].dtype}.", soft_wrap=True)
