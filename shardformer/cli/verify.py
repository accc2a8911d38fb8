"""``shardformer verify``: can anybody tell the sharded model from the plain one?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardformer.cli._options import (
    check_model_directory,
    check_num_processes,
    options_from_dataclass,
    pipeline_options,
)
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


class LossAverage(StrEnum):
    """What the plain loss is with several data ranks."""

    PARTS = "parts"
    WHOLE = "whole"


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
    tensor: Annotated[
        str | None,
        typer.Option(
            metavar="RANKS",
            help="Over how many processes the weights are split: by default 2, and with --pipe 1, each layer whole; or "
            "rows and columns of a grid, as 4x2, or three numbers, with --mode.",
        ),
    ] = None
    mode: Annotated[str, typer.Option(metavar="NAME", help="Of the tensor axis: 1d, 2d, 2.5d or 3d.")] = "1d"
    data: Annotated[int, "Over how many groups of these the batch is split."] = 1
    pipe: Annotated[
        int | None,
        "Into how many stages the layers are cut, each on processes of its own. A family's small model gets as many "
        "layers as that takes.",
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of the pipeline: gpipe, 1f1b (the default), interleaved, interleaved_zb or zbv; shardformer draw "
            "shows them.",
        ),
    ] = None
    chunks: Annotated[int | None, "Virtual stages of a process, where the schedule leaves a choice."] = None
    micro_batches: Annotated[int | None, "Parts of a batch, by default as many as there are stages."] = None
    cut: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="How the layers are cut into stages: cost (the default), even, or the number of layers of each "
            "virtual stage, as 3,5.",
        ),
    ] = None
    zero: Annotated[
        int | None,
        "Train with this stage of ZeRO, 0 to 3: each data rank keeps a part of the optimizer's state (1), of the "
        "gradients (2), of the parameters (3).",
    ] = None
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="With --zero: one of torch.optim, LAMB or LARS.")] = (
        "SGD"
    )
    precision: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="With --zero: bf16 or fp16, of the parameters of both models, with masters in fp32."
        ),
    ] = "fp32"
    offload: Annotated[
        str | None,
        typer.Option(metavar="WHERE", help="With --zero: cpu, or nvme:DIR, for masters and the optimizer's state."),
    ] = None
    micro_steps: Annotated[
        int, typer.Option(min=1, max=2**14, help="Backwards of a step, each of a batch of its own.")
    ] = 1
    checkpointing: Annotated[bool, "Let the sharded model compute its layers again in the backward."] = False
    frozen: Annotated[
        str, typer.Option(metavar="NAMES", help="A regular expression: parameters that do not train, by whole names.")
    ] = ""
    sequence: Annotated[
        str,
        typer.Option(
            metavar="RANKS", help="Ranks that the sequence is cut over: 4, or 2x2, a ring of groups of Ulysses."
        ),
    ] = "1"
    context: Annotated[str, typer.Option(metavar="WAY", help="With --sequence: auto, ring, ulysses or gather.")] = (
        "auto"
    )
    sequence_parallel: Annotated[bool, "Split the sequence as well."] = False
    overlap: Annotated[bool, "Communicate under computation; needs --sequence-parallel."] = False
    fused_norm: Annotated[bool, "Use torch's fused norms."] = False
    flash_attention: Annotated[bool, "Use flash attention."] = False
    jit: Annotated[bool, "Fuse activations with their bias and gate."] = False
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 3
    dtype: Annotated[
        Dtype,
        "Precision of both models: in fp64 a mistake cannot hide in the rounding. Where a model casts to fewer bits "
        "(LLaMA in its norms, GPT-2 for the loss), it stays in fp64 then.",
    ] = Dtype.FP64
    reference: Annotated[
        LossAverage,
        "The plain loss, with --data: the mean of the losses of the data ranks' parts of a batch, or the loss of the "
        "whole batch, which a loss that balances experts, or parts with unlike numbers of labels, do not give.",
    ] = LossAverage.PARTS
    head: Annotated[str, "The class of transformers to build, such as BertForTokenClassification."] = ""
    all_heads: Annotated[bool, "Every head class of the family, one after another."] = False
    batch: Annotated[int | None, typer.Option(min=1, help="Samples in a batch, by default 4 or a little more.")] = None
    tokens: Annotated[int | None, typer.Option(min=6, help="Tokens in a sample, by default 13.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")] = False

    @property
    def tensor_size(self) -> int:
        """Of the tensor axis: who asks for a pipeline alone, or for the sequence axis, gets one."""
        from shardformer.mesh.rank_grid import num_ranks

        return num_ranks(self.tensor_sizes, "tensor")

    @property
    def tensor_sizes(self) -> int | tuple[int, ...]:
        """Its ranks, or those of its rows, columns and third axis. Raises ConfigError for anything else."""
        from shardformer.mesh.rank_grid import parse_axis_size

        if self.tensor is not None:
            return parse_axis_size(self.tensor, "tensor")
        return 2 if self.pipe is None and self.sequence == "1" else 1

    @property
    def sequence_sizes(self) -> int | tuple[int, int]:
        """Of the sequence axis. Raises ConfigError for what is neither a number nor two."""
        from shardformer.mesh.rank_grid import parse_axis_size

        sizes = parse_axis_size(self.sequence, "sequence")
        return sizes if isinstance(sizes, int) else (sizes[0], sizes[1])

    @property
    def sequence_ranks(self) -> int:
        from shardformer.mesh.rank_grid import num_ranks

        return num_ranks(self.sequence_sizes)

    @property
    def num_processes(self) -> int:
        return self.tensor_size * (self.pipe or 1) * self.data * self.sequence_ranks

    def pipelined(self, loss_weight: LossWeight | None = None) -> VerifyPipeline | None:
        return pipeline_options(self.pipe, self.micro_batches, self.schedule, self.chunks, self.cut, loss_weight)

    def training(self) -> VerifyTraining:
        from shardformer.verify.training_options import VerifyTraining

        return VerifyTraining(
            self.zero,
            self.optimizer,
            self.reference.value,
            self.precision,
            self.offload,
            self.micro_steps,
            self.checkpointing,
            self.frozen,
        )

    def config(self) -> dict[str, Any]:
        """The options by their names in ShardConfig."""
        return {
            "enable_sequence_parallelism": self.sequence_parallel,
            "enable_sequence_overlap": self.overlap,
            "enable_fused_normalization": self.fused_norm,
            "enable_flash_attention": self.flash_attention,
            "enable_jit_fused": self.jit,
            "context_parallel": self.context,
            "tensor_parallel_mode": self.mode,
        }


@options_from_dataclass(VerifyOptions)
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
    num_processes = options.num_processes
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
        size = getattr(options, name)
        if size is not None and size < 1:
            raise ConfigError(
                f"{name}={size}",
                rule="An axis has one rank or more",
                remedy=f"Use --{name} 1 or more",
            )
    if options.all_heads and options.head:
        raise ConfigError(
            f"--all-heads and --head {options.head}",
            rule="--all-heads runs every head, --head one",
            remedy="Leave one of the two out",
        )
    _check_used(options)
    check_num_processes("The product of the axes", options.num_processes)
    ShardConfig(**options.config())  # refuses a combination that cannot be before anything is loaded
    options.pipelined()
    options.training()


def _check_used(options: VerifyOptions) -> None:
    """Raises ConfigError for options that can have no effect beside the others."""
    splits, sequence = options.tensor_size > 1, options.sequence_ranks > 1
    for given, is_used, needed in (
        (f"--mode {options.mode}" if options.mode != "1d" else "", splits, "--tensor 2x2"),
        ("--sequence-parallel" if options.sequence_parallel else "", splits, "--tensor 2"),
        (f"--context {options.context}" if options.context != "auto" else "", sequence, "--sequence 2"),
        ("--reference whole" if options.reference is LossAverage.WHOLE else "", options.data > 1, "--data 2"),
    ):
        if given and not is_used:
            raise ConfigError(
                f"{given} without {needed}",
                rule=f"{given.split()[0]} has an effect with {needed.split()[0]} alone",
                remedy=f"Add {needed}, or leave it out",
            )


def _sources(options: VerifyOptions) -> list[ModelSource]:
    from shardformer.verify.model_source import find_model
    from shardformer.verify.small_models import is_vision_only

    check_model_directory(options.model)
    source = find_model(options.model)
    fixed = "batch_fn" in source.own and not hasattr(source.own["batch_fn"], "with_samples")
    if (fixed and options.batch) or ("batch_fn" in source.own and options.tokens):
        raise ConfigError(
            f"--batch or --tokens for {options.model}, which brings its own batch_fn",
            rule="The two are sizes of random batches",
            remedy="Leave them out, or the batch_fn",
        )
    if options.tokens and source.config is not None and is_vision_only(source.head):
        raise ConfigError(
            f"--tokens {options.tokens} for {source.head or options.model}, which reads images",
            rule="It is the length of a text",
            remedy="Leave it out",
        )
    heads = source.heads if options.all_heads else [options.head] if options.head else []
    sources = [source.with_head(head) for head in heads] or [source]
    pipeline = options.pipelined()
    return sources if pipeline is None else [source.deeper(_num_layers(pipeline)) for source in sources]


def _num_layers(pipeline: VerifyPipeline) -> int:
    """The least that a model must have for its stages."""
    from shardformer.verify.verification import StageOptions

    stages = StageOptions(pipeline.pipe, pipeline.micro_batches, **pipeline.stages)
    return stages.num_virtual_stages if isinstance(stages.cut, str) else sum(stages.cut)


def _verify_one(options: VerifyOptions, source: ModelSource, policy: Any, pool: WorkerPool) -> Report:
    import torch

    from shardformer.verify.model_source import TOKENS
    from shardformer.verify.small_models import num_samples, sample_loss, weights_loss_by_sample
    from shardformer.verify.verification import verify as run_verify

    weight = source.own.get("loss_weight")
    if weight is None and source.loss_fn is sample_loss and weights_loss_by_sample(source.head):
        weight = num_samples
    pipeline = options.pipelined(weight)
    of_rank = max(-(-4 // options.data), pipeline.num_parts if pipeline is not None else 1)
    batch = options.batch or of_rank * options.data
    return run_verify(
        source.model_fn,
        source.batches(batch, options.tokens or TOKENS),
        {"tensor": options.tensor_sizes, "sequence": options.sequence_sizes},
        options.data,
        options.steps,
        {Dtype.FP64: torch.float64, Dtype.FP32: torch.float32}[options.dtype],
        source.loss_fn,
        policy,
        options.config(),
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
