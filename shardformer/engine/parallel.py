"""``Parallel``: over how many processes a model is trained in which way, and how a batch runs through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Annotated, Any

from shardformer.activations.attach import WHERE
from shardformer.config import ShardConfig
from shardformer.errors import ConfigError, nearest
from shardformer.mesh.context import ParallelContext
from shardformer.mesh.grid import check_size
from shardformer.mesh.sizes import total_of
from shardformer.mesh.tensor_grid import sizes_of_mode
from shardformer.optim.settings import STAGES, Offload, Precision, Rules
from shardformer.pipeline.microbatches import check_sizes
from shardformer.pipeline.stage_manager import PipelineStageManager

AVERAGES = ("tokens", "ranks")


@dataclass(frozen=True)
class Parallel:
    """How a model is trained over the processes that were launched. The same fields stand in a run's config file.

    Each field is ``Annotated`` with its description, from which the config file's table and its page are made: a
    docstring would be missing under ``python -OO``.
    """

    data: Annotated[
        int | None,
        "ranks that each train on a part of the batch; None: what remains of the processes.",
    ] = None
    pipe: Annotated[int, "stages, which hold some of the layers each."] = 1
    sequence: Annotated[int, "ranks over which the sequence is cut, attention reading the positions of all."] = 1
    tensor: Annotated[
        int | Sequence[int],
        "ranks that hold a part of each matrix; two or three numbers for a grid of `tensor_mode`.",
    ] = 1
    tensor_mode: Annotated[str, '"1d", "2d", "2.5d" or "3d", as `tensor_parallel_mode` of `ShardConfig`.'] = "1d"
    sequence_parallel: Annotated[bool, "whether between blocks each tensor rank holds a part of the sequence."] = False
    sequence_overlap: Annotated[bool, "whether its gathers and scatters run under the matmuls beside them."] = False
    context_parallel: Annotated[
        str,
        'how it does: "ring", "ulysses", "gather" or "auto", as in `ShardConfig`.',
    ] = "auto"
    flash_attention: Annotated[bool, "kernels, as in `ShardConfig`."] = False
    fused_normalization: Annotated[bool, "kernels, as in `ShardConfig`."] = False
    jit_fused: Annotated[bool, "kernels, as in `ShardConfig`."] = False
    schedule: Annotated[
        str,
        'of the pipeline, "1f1b" and others; see `PipelineStageManager` for this and the next three.',
    ] = "1f1b"
    chunks: Annotated[int | None, "virtual stages on each rank; None: the schedule's own number."] = None
    cut: Annotated[
        str | Sequence[int],
        'how the layers are cut into stages: "cost", "even", or how many layers each has.',
    ] = "cost"
    checkpoint_layers: Annotated[
        int | Sequence[int] | None,
        "how many layers of each stage compute their activations again in the backward.",
    ] = None
    activations: Annotated[
        str,
        'where what the forward saves is kept: "device", "host", "tensor" or "tensor+host"; see `store_activations`.',
    ] = "device"
    micro_batches: Annotated[
        int | None,
        "into how many parts each rank's batch is cut. None: as many as there are stages.",
    ] = None
    micro_batch_size: Annotated[
        int | None,
        "or how many samples each part has: fewer need less memory, and the result is the same.",
    ] = None
    zero: Annotated[
        int | None,
        "the stage of ZeRO; None: none, unless precision or offload ask for what it does (then 0).",
    ] = None
    precision: Annotated[str | Precision, '"fp32", "bf16", "fp16" or a `Precision`.'] = "fp32"
    offload: Annotated[str | Offload | None, '"cpu", "nvme:DIR" or an `Offload`.'] = None
    max_grad_norm: Annotated[float | None, "to which a step clips the norm of all gradients."] = None
    on_nonfinite: Annotated[
        str,
        'what a step does with gradients that are not finite: "raise", "skip" or "ignore". Without zero they are '
        "looked at where their norm is taken.",
    ] = "raise"
    watch: Annotated[bool, "whether ranks notice that they have come apart, as in `ShardConfig`."] = True
    average: Annotated[
        str,
        '"tokens": each token, or sample, that counts weighs the same in the loss, wherever in the batch it is, as it '
        'does on one device. "ranks": the loss is the mean of the data ranks\' losses.',
    ] = "tokens"

    def __post_init__(self) -> None:
        for name in ("data", "pipe", "sequence"):
            if (size := getattr(self, name)) is not None:
                check_size(name, size)
        if total_of(self.tensor, "tensor") > 1 and self.tensor_mode != "1d":
            sizes_of_mode(self.tensor_mode, self.tensor)
        if self.micro_batches is not None or self.micro_batch_size is not None:
            check_sizes(self.micro_batches, self.micro_batch_size)
        Precision.of(self.precision), Offload.of(self.offload), Rules(self.max_grad_norm, self.on_nonfinite)
        for name, known in (("zero", (None, *STAGES)), ("average", AVERAGES), ("activations", WHERE)):
            if (value := getattr(self, name)) not in known or isinstance(value, bool):
                rule = f"{name} is one of {', '.join(map(repr, known))}"
                raise ConfigError(f"{name}={value!r}", rule=rule, remedy=nearest(str(value), map(str, known)))
        if self.pipe == 1 and (self.chunks, self.cut, self.checkpoint_layers) != (None, "cost", None):
            raise ConfigError(
                "chunks, cut or checkpoint_layers is given with pipe=1",
                rule="They say how layers are cut into the stages of a pipeline",
                remedy="Write pipe=2 or more, or leave them out; model.gradient_checkpointing_enable() works without",
            )

    @classmethod
    def of(cls, given: Any) -> Parallel:
        """From what ``initialize`` was given: itself, a mapping of its fields, or None. Raises ConfigError else."""
        if given is None or isinstance(given, cls):
            return given or cls()
        if not isinstance(given, dict):
            raise ConfigError(
                f"parallel={given!r:.80}",
                rule="It is a shardformer.Parallel, or a dict of its fields",
                remedy="Write parallel=shardformer.Parallel(tensor=2)",
            )
        names = [field.name for field in fields(cls)]
        unknown = next((str(name) for name in given if name not in names), None)
        if unknown is not None:
            rule = "The fields are those of shardformer.Parallel"
            raise ConfigError(f"parallel has no field {unknown!r}", rule=rule, remedy=nearest(unknown, names))
        return cls(**given)

    @property
    def sizes(self) -> dict[str, int | None]:
        """Of the axes."""
        sizes = {name: getattr(self, name) for name in ("data", "pipe", "sequence")}
        return {**sizes, "tensor": total_of(self.tensor, "tensor")}

    def fit(self, num_processes: int) -> Parallel:
        """The layout that is most like this one over another number of processes.

        The axes that cut the model keep their sizes where these divide the processes, or get a divisor of them, so that
        heads and layers which could be cut so far still can; the data ranks are what remains.

        >>> fitted = Parallel(tensor=4, pipe=2).fit(6)
        >>> fitted.tensor, fitted.pipe, fitted.data
        (1, 2, 3)
        """
        found = [
            (pipe, sequence, tensor)
            for pipe in _divisors(self.pipe)
            for sequence in _divisors(self.sequence)
            for tensor in _divisors(total_of(self.tensor, "tensor"))
            if num_processes % (pipe * sequence * tensor) == 0
        ]
        pipe, sequence, tensor = max(found, key=lambda sizes: (prod(sizes), sizes[2]))
        of_stages: dict[str, Any] = {} if pipe > 1 else {"chunks": None, "cut": "cost", "checkpoint_layers": None}
        if pipe != self.pipe and not isinstance(self.cut, str):
            of_stages |= {"cut": "cost"}
        data = num_processes // (pipe * sequence * tensor)
        if tensor == 1:
            of_stages |= {"sequence_parallel": False, "sequence_overlap": False}
        if tensor != total_of(self.tensor, "tensor"):
            of_stages |= {"tensor": tensor, "tensor_mode": "1d"}  # of another size there may be no such grid
        return replace(self, data=data, pipe=pipe, sequence=sequence, **of_stages)

    def shard_config(self, context: ParallelContext) -> ShardConfig:
        """What is asked of the sharder, over a grid."""
        manager = None
        if context.pipe.size > 1:
            manager = PipelineStageManager(
                context, self.schedule, self.chunks, cut=self.cut, checkpoint_layers=self.checkpoint_layers
            )
        return ShardConfig(
            pipeline_stage_manager=manager,
            enable_sequence_parallelism=self.sequence_parallel,
            enable_sequence_overlap=self.sequence_overlap,
            enable_flash_attention=self.flash_attention,
            enable_fused_normalization=self.fused_normalization,
            enable_jit_fused=self.jit_fused,
            context_parallel=self.context_parallel,
            tensor_parallel_mode=self.tensor_mode,
            watch=self.watch,
            context=context,
        )

    @property
    def zero_stage(self) -> int | None:
        """The stage of ZeRO; None where nothing asks for it."""
        asks = Precision.of(self.precision).dtype is not None or Offload.of(self.offload).to is not None
        return 0 if self.zero is None and asks else self.zero


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
