"""``shardformer verify``: can anybody tell the sharded model from the plain one?"""

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
    check_model_directory,
    check_num_processes,
    options_from_dataclass,
)
from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from shardformer.local_ranks.worker_pool import WorkerPool
    from shardformer.pipeline.micro_batch_loss import LossWeight
    from shardformer.verify.model_source import ModelSource
    from shardformer.verify.report import Report
    from shardformer.verify.train_both import VerifyPipeline
    from shardformer.verify.training_options import VerifyTraining

TIMEOUT_S = 3600.0
"""For one head. A model may be large, and what hangs can be stopped by hand."""


class Dtype(StrEnum):
    """What verify computes in."""

    FP64 = "fp64"
    FP32 = "fp32"


FLAGS = {
    "tensor": "Tensor parallel size: by default 2, and 1 with --pipe or --sequence; or the rows and columns of a grid, "
    "as 4x2, or three numbers, with --tensor-parallel-mode.",
    "tensor_parallel_mode": "",
    "data": "Data parallel size: the number of parts of the batch, by default 1.",
    "pipe": "Pipeline parallel size: the number of stages. The small model of a family has as many layers as it needs.",
    **dict.fromkeys(
        ("schedule", "num_model_chunks", "micro_batches", "partition", "recompute_layers", "zero_stage"), ""
    ),
    "sequence": "Context parallel size: 4, or 2x2, a ring of groups, and Ulysses in each group.",
    **dict.fromkeys(("context_parallel", "sequence_parallel", "sequence_overlap"), ""),
    **dict.fromkeys(("fused_normalization", "flash_attention", "fused_activation"), ""),
    "precision": "With --zero-stage: bf16 or fp16 for the parameters of both models, with master weights in fp32.",
    "offload": "With --zero-stage: cpu or nvme:DIR, for master weights and optimizer state.",
    "average_loss_over": "The plain loss, with --data. ranks, the default: the mean of the losses of the ranks' parts "
    "of a batch, as shard_model and DDP train it. tokens: the loss of the whole batch, from which a loss that balances "
    "experts, or parts with different numbers of labels, differ.",
}
"""A field of ``ParallelConfig`` that is a flag -> its help, if the description of the field does not fit."""
RENAMED_OPTIONS = {
    "--mode": "--tensor-parallel-mode", "--chunks": "--num-model-chunks", "--cut": "--partition",
    "--zero": "--zero-stage", "--context": "--context-parallel", "--overlap": "--sequence-overlap",
    "--fused-norm": "--fused-normalization", "--jit": "--fused-activation", "--reference": "--average-loss-over",
    "--micro-steps": "--gradient-accumulation-steps", "--checkpointing": "--activation-checkpointing",
}  # fmt: skip
"""Earlier name of an option -> its name."""


@dataclass(frozen=True)
class VerifyOptions:
    """What the command takes."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A family or model type of transformers (bert, gpt2, stablelm, ...: a small random model), a folder "
            "that save_pretrained wrote, a config.json (random weights), a name on the Hugging Face hub, or "
            "module:function, whose function gives a model, (model_fn, batch_fn), or a dict of model_fn, batch_fn, "
            "loss_fn, policy and loss_weight.",
        ),
    ]
    policy: Annotated[
        str, "How the model is cut: my_policy.py, my_policy.py:MyPolicy or module:MyPolicy; by default the family's."
    ] = ""
    parallel: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help="With --zero-stage: one of torch.optim, LAMB or LARS.")
    ] = "SGD"
    gradient_accumulation_steps: Annotated[
        int, typer.Option(min=1, max=2**14, help="Backwards of a step, each of a batch of its own.")
    ] = 1
    activation_checkpointing: Annotated[bool, "The sharded model recomputes its layers in the backward."] = False
    frozen: Annotated[
        str, typer.Option(metavar="NAMES", help="A regular expression: parameters that do not train, by whole names.")
    ] = ""
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 3
    dtype: Annotated[
        Dtype,
        "Precision of both models: in fp64 a mistake cannot hide in the rounding. Where a model casts to fewer bits "
        "(LLaMA in its norms, GPT-2 for the loss), it stays in fp64 then.",
    ] = Dtype.FP64
    head: Annotated[str, "The class of transformers to build, such as BertForTokenClassification."] = ""
    all_heads: Annotated[bool, "Every head class of the family, one after another."] = False
    batch: Annotated[int | None, typer.Option(min=1, help="Samples in a batch, by default 4 or a little more.")] = None
    tokens: Annotated[int | None, typer.Option(min=6, help="Tokens in a sample, by default 13.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")] = False

    def layout(self) -> ParallelConfig:
        """The layout: with neither --pipe nor --sequence, two tensor parallel ranks unless --tensor is passed."""
        is_default = "pipe" not in self.parallel and self.parallel.get("sequence", 1) == 1
        defaults = {"data": 1, "tensor": 2 if is_default else 1, "average_loss_over": "ranks"}
        return ParallelConfig(**{**defaults, **self.parallel})

    def pipelined(self, loss_weight: LossWeight | None = None) -> VerifyPipeline | None:
        """The pipeline, if there is one. Raises ConfigError for options that its schedule does not support."""
        names = ("micro_batches", "schedule", "num_model_chunks", "partition", "recompute_layers")
        found = {name: self.parallel[name] for name in names if name in self.parallel}
        if "pipe" not in self.parallel:
            if found:
                given = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in found.items())
                rule = "These options configure a pipeline, and --pipe sets the number of its stages"
                raise ConfigError(f"{given} without --pipe", rule=rule, remedy="Add --pipe 2, or leave them out")
            return None
        from shardformer.verify.train_both import VerifyPipeline

        pipeline = VerifyPipeline(self.parallel["pipe"], found.pop("micro_batches", None), found, loss_weight)
        pipeline.stage_manager()
        return pipeline

    def training(self) -> VerifyTraining:
        from shardformer.verify.training_options import VerifyTraining

        layout = self.layout()
        return VerifyTraining(
            optimizer=self.optimizer,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            activation_checkpointing=self.activation_checkpointing,
            frozen_pattern=self.frozen,
            **{n: getattr(layout, n) for n in ("zero_stage", "precision", "offload", "average_loss_over")},
        )


@options_from_dataclass(VerifyOptions, FLAGS)
def verify(options: VerifyOptions) -> None:
    """Train a model whole in one process and split over several, and compare every loss, gradient and weight.

    Ends with status 1 when somebody could tell the two apart, and 2 for an error.
    """
    from rich.console import Console

    from shardformer.local_ranks.worker_pool import WorkerPool
    from shardformer.verify.model_source import find_policy
    from shardformer.verify.report import print_report

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # every worker would say what one has said
    _check(options)
    sources = _sources(options)
    policy = find_policy(options.policy) if options.policy else sources[0].own.get("policy")
    console, reports = Console(highlight=False), []
    num_processes = prod(size or 1 for size in options.layout().sizes.values())
    with WorkerPool(num_processes, timeout_s=TIMEOUT_S, imports=("torch", "transformers")) as pool:
        for source in sources:
            with _waiting(f"{source.head or source.title}: whole in one process and over {num_processes}"):
                reports.append(_verify_one(options, source, policy, pool))
            if options.all_heads and not options.as_json:
                _print_line(console, reports[-1])
    if options.as_json:
        print(_to_json(reports, options.all_heads))
    elif options.all_heads:
        _print_summary(console, reports)
    else:
        print_report(console, reports[0], sources[0].title)
    if not all(report.passed for report in reports):
        raise typer.Exit(1)


def _check(options: VerifyOptions) -> None:
    from shardformer.config import ShardConfig

    for name in ("pipe", "data"):
        size = options.parallel.get(name, 1)
        if size < 1:
            rule, remedy = "An axis has one rank or more", f"Use --{name} 1 or more"
            raise ConfigError(f"{name}={size}", rule=rule, remedy=remedy)
    if options.all_heads and options.head:
        rule, remedy = "--all-heads runs every head, --head one", "Leave one of the two out"
        raise ConfigError(f"--all-heads and --head {options.head}", rule=rule, remedy=remedy)
    options.pipelined()
    layout = options.layout()
    _check_used(options, layout)
    check_num_processes("The product of the axes", prod(size or 1 for size in layout.sizes.values()))
    ShardConfig(**layout.shard_options())  # refuses unsupported combinations before anything is loaded
    options.training()


def _check_used(options: VerifyOptions, layout: ParallelConfig) -> None:
    """Raises ConfigError for options that have no effect with the other options."""
    sizes = {name: size or 1 for name, size in layout.sizes.items()}
    for name, axis, needed in (
        ("tensor_parallel_mode", "tensor", "--tensor 2x2"),
        ("sequence_parallel", "tensor", "--tensor 2"),
        ("context_parallel", "sequence", "--sequence 2"),
        ("average_loss_over", "data", "--data 2"),
    ):
        value = getattr(layout, name)
        if value not in (False, "1d", "auto", "ranks") and sizes[axis] == 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag if value is True else f'{flag} {value}'} without {needed}",
                rule="It has no effect in this layout",
                remedy=f"Add {needed}, or leave it out",
            )


def _sources(options: VerifyOptions) -> list[ModelSource]:
    from shardformer.verify.model_source import find_model
    from shardformer.verify.small_models import is_vision_only

    check_model_directory(options.model)
    source = find_model(options.model)
    fixed = "batch_fn" in source.own and not hasattr(source.own["batch_fn"], "with_samples")
    if (fixed and options.batch) or ("batch_fn" in source.own and options.tokens):
        what = f"--batch or --tokens for {options.model}, which brings its own batch_fn"
        raise ConfigError(what, rule="They are sizes of random batches", remedy="Leave them out, or the batch_fn")
    if options.tokens and source.config is not None and is_vision_only(source.head):
        what = f"--tokens {options.tokens} for {source.head or options.model}, which reads images"
        raise ConfigError(what, rule="It is the length of a text", remedy="Leave it out")
    heads = source.heads if options.all_heads else [options.head] if options.head else []
    sources = [source.with_head(head) for head in heads] or [source]
    pipeline = options.pipelined()
    return sources if pipeline is None else [source.deeper(_num_layers(pipeline)) for source in sources]


def _num_layers(pipeline: VerifyPipeline) -> int:
    """The least that a model must have for its stages."""
    stages = pipeline.stage_manager()
    return stages.num_virtual_stages if isinstance(stages.partition, str) else sum(stages.partition)


def _verify_one(options: VerifyOptions, source: ModelSource, policy: Any, pool: WorkerPool) -> Report:
    import torch

    from shardformer.verify.model_source import TOKENS
    from shardformer.verify.small_models import num_samples, sample_loss, weights_loss_by_sample
    from shardformer.verify.verification import verify as run_verify

    weight = source.own.get("loss_weight")
    if weight is None and source.loss_fn is sample_loss and weights_loss_by_sample(source.head):
        weight = num_samples
    pipeline = options.pipelined(weight)
    layout = options.layout()
    data = layout.data or 1
    of_rank = max(-(-4 // data), pipeline.num_parts if pipeline is not None else 1)
    batch = options.batch or of_rank * data
    return run_verify(
        source.model_fn,
        source.batches(batch, options.tokens or TOKENS),
        {"tensor": layout.tensor, "sequence": layout.sequence},
        data,
        options.steps,
        {Dtype.FP64: torch.float64, Dtype.FP32: torch.float32}[options.dtype],
        source.loss_fn,
        policy,
        {**layout.shard_options(), "extra_kwargs": {}},
        pipeline=pipeline,
        training=options.training(),
        pool=pool,
    )


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """A sign of life on a terminal; on standard error, so that standard output holds the result alone."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"{what} ..."):
        yield


def _to_json(reports: list[Report], as_list: bool) -> str:
    # JSON knows no infinity, which is how far a loss that is not a number is from one that is: null
    found = [json.loads(report.to_json(), parse_constant=lambda _: None) for report in reports]
    if not as_list:
        return json.dumps(found[0], indent=2)
    return json.dumps({"passed": all(report.passed for report in reports), "reports": found}, indent=2)


# ---------------------------------------------------------------------------------------------------------------- print


def _print_line(console: Console, report: Report) -> None:
    """One head among many: whether anybody could tell, and what comes nearest to its bound."""
    kind, difference, bound = max(report.kinds, key=lambda compared: compared[1].used)
    mark = "[green]ok[/]" if report.passed else "[bold red]SOMEBODY CAN TELL[/]"
    what = f"{kind} differ by {difference.relative:.0e}, bound {bound:.0e}"
    if report.missing:
        what = f"gradients that only one of the two has: {', '.join(report.missing)}"
    console.print(f"{report.model:30} {mark}  {what}", soft_wrap=True)


def _print_summary(console: Console, reports: list[Report]) -> None:
    told = [report.model for report in reports if not report.passed]
    if told:
        console.print(f"[bold red]SOMEBODY CAN TELL[/] {len(told)} of {len(reports)} heads: {', '.join(told)}.")
    else:
        console.print(f"[bold green]Nobody can tell.[/] {len(reports)} heads, {reports[0].layout}, {reports[0].dtype}.")
