"""The configuration of a parallel run: ``ShardConfig`` and ``ParallelConfig``.

Every combination of options is either applied, or refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Annotated, Any

import torch.distributed as dist

from shardformer.errors import ConfigError, check_argument, did_you_mean
from shardformer.layout.activation_layout import CONTEXT_PARALLEL, GRID_LAYOUTS, SEQUENCE_PARALLEL, ActivationLayout
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.mesh.rank_grid import check_axis_size, num_ranks
from shardformer.mesh.tensor_grid import sizes_of_mode
from shardformer.offload.activations import OFFLOAD_TARGETS
from shardformer.offload.host import OffloadConfig
from shardformer.pipeline.micro_batches import check_sizes
from shardformer.pipeline.stage_manager import PipelineStageManager
from shardformer.tensor_parallel.grid.layers import LAYERS_BY_MODE
from shardformer.zero.config import ZERO_STAGES, StepOptions
from shardformer.zero.mixed_precision import MixedPrecision

CONTEXT_PARALLEL_METHODS = ("auto", "ring", "ulysses", "gather")
EXTRA_KWARGS = ("check_inputs", "bucket_bytes")


@dataclass
class ShardConfig:
    """How a model is sharded.

    Args:
        tensor_parallel_process_group: the group of the tensor axis. None means all processes.
        pipeline_stage_manager: how the layers are cut into the stages of a pipeline, and its schedule. None: where the
            context has a pipe axis, the usual ones.
        enable_tensor_parallelism: whether weights are cut over the tensor axis.
        enable_fused_normalization: torch's fused layer and RMS norm in place of the model's own classes.
        enable_flash_attention: torch's flash or memory-efficient attention, or the flash-attn package where it fits.
        enable_jit_fused: an MLP's activation in one kernel, with the bias before it and the gate behind it.
        enable_sequence_parallelism: between blocks each tensor rank holds a part of the sequence.
        enable_sequence_overlap: the gathers and scatters of sequence parallelism run under the matmuls beside them.
        enable_all_optimization: all five of the above.
        tensor_parallel_mode: "1d", or the tensor axis as a grid: "2d" (rows and columns), "2.5d" (and copies of these)
            or "3d" (and a third axis that is cut too), with ``launch_from_torch(tensor=(2, 2))`` or three numbers.
        context_parallel: how attention reads the positions of other ranks of the sequence axis: "ring" (keys and values
            travel), "ulysses" (heads are exchanged for positions), "gather" (keys and values are gathered), or "auto":
            ring and Ulysses as they send the least.
        watch: whether ranks notice, at every step of training, that they have come apart: batches, modes, steps and
            options of optimizers, weights that they hold alike (docs/reliability.md).
        extra_kwargs: ``check_inputs`` (default True: the tensor ranks compare what they are fed), ``bucket_bytes``
            (size of a bucket of gradients, default 25 MB).
        context: the grid from ``launch_from_torch``; it brings the data axis too.
        stream: how the activations between the blocks lie, where that is not what the options say.
    """

    tensor_parallel_process_group: dist.ProcessGroup | None = None
    pipeline_stage_manager: PipelineStageManager | None = None
    enable_tensor_parallelism: bool = True
    enable_fused_normalization: bool = False
    enable_flash_attention: bool = False
    enable_jit_fused: bool = False
    enable_sequence_parallelism: bool = False
    enable_sequence_overlap: bool = False
    enable_all_optimization: bool = False
    tensor_parallel_mode: str = "1d"
    context_parallel: str = "auto"
    watch: bool = True
    extra_kwargs: dict[str, Any] = field(default_factory=dict)
    context: ParallelContext | None = None
    stream: ActivationLayout | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.extra_kwargs, Mapping):
            raise ConfigError(
                f"extra_kwargs={self.extra_kwargs!r:.80}",
                rule=f"It is a dict of {', '.join(EXTRA_KWARGS)}",
                remedy="Write extra_kwargs={'check_inputs': False}, or leave it out",
            )
        self.extra_kwargs = dict(self.extra_kwargs)
        self._check_kinds()
        if self.enable_all_optimization:
            self.enable_fused_normalization = self.enable_flash_attention = self.enable_jit_fused = True
            if self.enable_tensor_parallelism and self.tensor_parallel_mode == "1d":
                self.enable_sequence_parallelism = self.enable_sequence_overlap = True
        if self.enable_sequence_overlap and not self.enable_sequence_parallelism:
            raise ConfigError(
                "enable_sequence_overlap=True with enable_sequence_parallelism=False",
                rule="The overlap hides the communication of sequence parallelism, which is off",
                remedy="Set enable_sequence_parallelism=True too, or leave both off",
            )
        if self.enable_sequence_parallelism and not self.enable_tensor_parallelism:
            raise ConfigError(
                "enable_sequence_parallelism=True with enable_tensor_parallelism=False",
                rule="The sequence is cut over the tensor axis, between tensor-parallel blocks",
                remedy="Set enable_tensor_parallelism=True, or leave sequence parallelism off",
            )
        if self.tensor_parallel_mode not in tuple(LAYERS_BY_MODE):
            raise ConfigError(
                f"tensor_parallel_mode={self.tensor_parallel_mode!r}",
                rule=f"The modes are {', '.join(LAYERS_BY_MODE)}",
                remedy=did_you_mean(str(self.tensor_parallel_mode), LAYERS_BY_MODE),
            )
        if self.tensor_parallel_mode != "1d" and (self.enable_sequence_parallelism or self.cuts_context):
            other = "enable_sequence_parallelism=True" if self.enable_sequence_parallelism else "a sequence axis"
            raise ConfigError(
                f"tensor_parallel_mode={self.tensor_parallel_mode!r} with {other}",
                rule="On a tensor grid what flows between the blocks is cut along samples and hidden features",
                remedy="Leave the sequence whole, or use tensor_parallel_mode='1d'",
            )
        if self.context_parallel not in CONTEXT_PARALLEL_METHODS:
            raise ConfigError(
                f"context_parallel={self.context_parallel!r}",
                rule=f"It is one of {', '.join(CONTEXT_PARALLEL_METHODS)}",
                remedy=did_you_mean(str(self.context_parallel), CONTEXT_PARALLEL_METHODS),
            )
        for name in self.extra_kwargs:
            if name not in EXTRA_KWARGS:
                raise ConfigError(
                    f"extra_kwargs holds {name!r}",
                    rule=f"It takes {', '.join(EXTRA_KWARGS)}",
                    remedy=did_you_mean(name, EXTRA_KWARGS),
                )

    def _check_kinds(self) -> None:
        manager: Any = self.pipeline_stage_manager
        if manager is not None and not isinstance(manager, PipelineStageManager):
            raise ConfigError(
                f"pipeline_stage_manager={manager!r:.60}",
                rule="It is a PipelineStageManager, which says how layers are cut into stages, and the schedule",
                remedy="Write PipelineStageManager(context, schedule='1f1b'), or leave it out",
            )
        is_grid = isinstance(self.context, ParallelContext | None)
        check_argument(
            "context", self.context, is_grid, "It is the grid that launch_from_torch returned", "Leave context out"
        )
        is_layout = isinstance(self.stream, ActivationLayout | None)
        check_argument(
            "stream", self.stream, is_layout, "It says how activations between the blocks lie", "Leave stream out"
        )
        switches = {n: getattr(self, n) for n in self.__dataclass_fields__ if n.startswith("enable_")}
        switches |= {"watch": self.watch, "check_inputs": self.extra_kwargs.get("check_inputs", True)}
        wrong = next((n for n, value in switches.items() if not isinstance(value, bool)), None)
        if wrong is not None:
            raise ConfigError(
                f"{wrong}={switches[wrong]!r}", rule="It is on or off", remedy=f"Write {wrong}=True or False"
            )
        size = self.extra_kwargs.get("bucket_bytes", 1)
        if type(size) is not int or size < 1:
            raise ConfigError(
                f"bucket_bytes={size!r}",
                rule="It is a number of bytes, one or more",
                remedy="Write 25 * 2**20 for 25 MB, or leave it out",
            )

    def stream_layout(self) -> ActivationLayout:
        """How the activations between the blocks are to lie."""
        if self.stream is not None:
            return self.stream
        if self.tensor_parallel_mode in GRID_LAYOUTS:
            return GRID_LAYOUTS[self.tensor_parallel_mode]
        cuts = SEQUENCE_PARALLEL.cuts if self.enable_sequence_parallelism else ()
        return ActivationLayout((*CONTEXT_PARALLEL.cuts, *cuts) if self.cuts_context else cuts)

    @property
    def cuts_context(self) -> bool:
        """Whether the sequence is cut over the ranks of the sequence axis."""
        manager = self.pipeline_stage_manager
        context = self.context if manager is None or self.context is not None else manager.context
        return self.stream is None and context is not None and context.sequence.size > 1

    def heads_axis(self) -> Axis:
        """The axis over which heads and features are cut: tensor, or on a tensor grid its columns."""
        context = self.resolve_context()
        return context.axes["column"] if self.is_grid and "column" in context.axes else context.tensor

    @property
    def is_grid(self) -> bool:
        """Whether the tensor axis is a grid."""
        return self.tensor_parallel_mode in GRID_LAYOUTS and self.enable_tensor_parallelism

    def resolve_context(self) -> ParallelContext:
        """The grid to shard over: the one given, one around the group given, or all processes as the tensor axis."""
        context = self._given_context()
        self._check_mode(context)
        if context.sequence.size > 1 and all(cut.axis != "sequence" for cut in self.stream_layout().cuts):
            raise ConfigError(
                f"The grid has sequence={context.sequence.size}",
                rule="A model is sharded over the data, pipe and tensor axes, and those that its stream is cut over",
                remedy="Leave sequence out: enable_sequence_parallelism cuts the sequence along the tensor axis",
            )
        return context

    def _check_mode(self, context: ParallelContext) -> None:
        if self.tensor_parallel_mode == "1d" and "row" in context.axes and context.tensor.size > 1:
            sizes = context.sizes
            grid = " x ".join(str(sizes[name]) for name in ("row", "column", "depth"))
            raise ConfigError(
                f"tensor_parallel_mode='1d' on a tensor axis that was laid as a grid of {grid}",
                rule="Rows and columns are those of the modes 2d, 2.5d and 3d",
                remedy="Write tensor_parallel_mode='2d', or give tensor= one number",
            )

    def _given_context(self) -> ParallelContext:
        manager = self.pipeline_stage_manager
        if manager is not None and self.context is None and self.tensor_parallel_process_group is None:
            return manager.context
        if manager is not None and self.context is not manager.context:
            raise ConfigError(
                "The config's grid is not that of its pipeline_stage_manager",
                rule="One grid has the stages and all other axes",
                remedy="Leave context and tensor_parallel_process_group out: the stage manager brings its context",
            )
        if self.context is None:
            return ParallelContext.from_group(self.tensor_parallel_process_group)
        if self.tensor_parallel_process_group is not None:
            raise ConfigError(
                "Both context and tensor_parallel_process_group were given",
                rule="A context names its tensor group itself",
                remedy="Give one of the two",
            )
        return self.context

    def options(self) -> dict[str, bool | str]:
        """The options by name, for the plan's hash and for ``describe_sharding``."""
        names = [n for n in self.__dataclass_fields__ if n.startswith("enable_")]
        modes = ("tensor_parallel_mode", "context_parallel") if self.cuts_context else ("tensor_parallel_mode",)
        return {**{n: bool(getattr(self, n)) for n in names}, **{n: str(getattr(self, n)) for n in modes}}


LOSS_AVERAGES = ("tokens", "ranks")


@dataclass(frozen=True)
class ParallelConfig:
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
    precision: Annotated[str | MixedPrecision, '"fp32", "bf16", "fp16" or a `Precision`.'] = "fp32"
    offload: Annotated[str | OffloadConfig | None, '"cpu", "nvme:DIR" or an `Offload`.'] = None
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
                check_axis_size(name, size)
        if num_ranks(self.tensor, "tensor") > 1 and self.tensor_mode != "1d":
            sizes_of_mode(self.tensor_mode, self.tensor)
        if self.micro_batches is not None or self.micro_batch_size is not None:
            check_sizes(self.micro_batches, self.micro_batch_size)
        (
            MixedPrecision.of(self.precision),
            OffloadConfig.of(self.offload),
            StepOptions(self.max_grad_norm, self.on_nonfinite),
        )
        for name, known in (
            ("zero", (None, *ZERO_STAGES)),
            ("average", LOSS_AVERAGES),
            ("activations", OFFLOAD_TARGETS),
        ):
            if (value := getattr(self, name)) not in known or isinstance(value, bool):
                rule = f"{name} is one of {', '.join(map(repr, known))}"
                raise ConfigError(f"{name}={value!r}", rule=rule, remedy=did_you_mean(str(value), map(str, known)))
        if self.pipe == 1 and (self.chunks, self.cut, self.checkpoint_layers) != (None, "cost", None):
            raise ConfigError(
                "chunks, cut or checkpoint_layers is given with pipe=1",
                rule="They say how layers are cut into the stages of a pipeline",
                remedy="Write pipe=2 or more, or leave them out; model.gradient_checkpointing_enable() works without",
            )

    @classmethod
    def of(cls, given: Any) -> ParallelConfig:
        """From what ``initialize`` was given: itself, a mapping of its fields, or None. Raises ConfigError else."""
        if given is None or isinstance(given, cls):
            return given or cls()
        if not isinstance(given, dict):
            raise ConfigError(
                f"parallel={given!r:.80}",
                rule="It is a shardformer.ParallelConfig, or a dict of its fields",
                remedy="Write parallel=shardformer.ParallelConfig(tensor=2)",
            )
        names = [field.name for field in fields(cls)]
        unknown = next((str(name) for name in given if name not in names), None)
        if unknown is not None:
            rule = "The fields are those of shardformer.ParallelConfig"
            raise ConfigError(f"parallel has no field {unknown!r}", rule=rule, remedy=did_you_mean(unknown, names))
        return cls(**given)

    @property
    def sizes(self) -> dict[str, int | None]:
        """Of the axes."""
        sizes = {name: getattr(self, name) for name in ("data", "pipe", "sequence")}
        return {**sizes, "tensor": num_ranks(self.tensor, "tensor")}

    def fit(self, num_processes: int) -> ParallelConfig:
        """The layout that is most like this one over another number of processes.

        The axes that cut the model keep their sizes where these divide the processes, or get a divisor of them, so that
        heads and layers which could be cut so far still can; the data ranks are what remains.

        >>> fitted = ParallelConfig(tensor=4, pipe=2).fit(6)
        >>> fitted.tensor, fitted.pipe, fitted.data
        (1, 2, 3)
        """
        found = [
            (pipe, sequence, tensor)
            for pipe in _divisors(self.pipe)
            for sequence in _divisors(self.sequence)
            for tensor in _divisors(num_ranks(self.tensor, "tensor"))
            if num_processes % (pipe * sequence * tensor) == 0
        ]
        pipe, sequence, tensor = max(found, key=lambda sizes: (prod(sizes), sizes[2]))
        of_stages: dict[str, Any] = {} if pipe > 1 else {"chunks": None, "cut": "cost", "checkpoint_layers": None}
        if pipe != self.pipe and not isinstance(self.cut, str):
            of_stages |= {"cut": "cost"}
        data = num_processes // (pipe * sequence * tensor)
        if tensor == 1:
            of_stages |= {"sequence_parallel": False, "sequence_overlap": False}
        if tensor != num_ranks(self.tensor, "tensor"):
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
        asks = MixedPrecision.of(self.precision).dtype is not None or OffloadConfig.of(self.offload).to is not None
        return 0 if self.zero is None and asks else self.zero


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
