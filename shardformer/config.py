"""Configuration of distributed training (``ParallelConfig``) and of model sharding (``ShardConfig``).

This module does not import torch, so that the command line starts fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, get_args, get_type_hints

from shardformer.errors import ConfigError, check_argument, check_bool, check_choice, check_int, check_names_are_known
from shardformer.pipeline.partition import RENAMED_METHODS, check_partition
from shardformer.pipeline.schedules import LOSS_AVERAGES, SCHEDULES
from shardformer.public_names import deprecate_renamed_arguments

if TYPE_CHECKING:
    import torch.distributed as dist

    from shardformer.layout.activation_layout import ActivationLayout
    from shardformer.mesh.parallel_context import Axis, ParallelContext
    from shardformer.offload.host import OffloadConfig
    from shardformer.pipeline.stage_manager import PipelineStageManager
    from shardformer.zero.mixed_precision import MixedPrecision

CONTEXT_PARALLEL_METHODS = ("auto", "ring", "ulysses", "gather")
EXTRA_KWARGS = ("check_inputs", "bucket_bytes")
RENAMED_SHARD_FIELDS = {"watch": "check_consistency", "stream": "activation_layout"}


class ShardOptions(TypedDict, total=False):
    """Keyword arguments of ``shard_model``, which are the fields of ``ShardConfig`` without ``context``."""

    tensor_parallel_process_group: dist.ProcessGroup | None
    pipeline_stage_manager: PipelineStageManager | None
    enable_tensor_parallelism: bool
    enable_fused_normalization: bool
    enable_flash_attention: bool
    enable_jit_fused: bool
    compile: bool | str
    enable_sequence_parallelism: bool
    enable_sequence_overlap: bool
    enable_all_optimization: bool
    tensor_parallel_mode: str
    context_parallel: str
    check_consistency: bool
    extra_kwargs: dict[str, Any]
    activation_layout: ActivationLayout | None


@deprecate_renamed_arguments(RENAMED_SHARD_FIELDS, renamed_attributes=RENAMED_SHARD_FIELDS)
@dataclass
class ShardConfig:
    """Options for sharding a model.

    Create them with ``ParallelConfig.make_shard_config(context)``, or write them directly as in ColossalAI.

    Args:
        tensor_parallel_process_group: the process group of the tensor axis. None: all processes.
        pipeline_stage_manager: the pipeline stages and their schedule. None: the defaults, if the context has a pipe
            axis.
        enable_tensor_parallelism: shard weights over the tensor axis.
        enable_fused_normalization, enable_flash_attention, enable_jit_fused, enable_sequence_parallelism,
            enable_sequence_overlap: ``fused_normalization``, ``flash_attention``, ``fused_activation``,
            ``sequence_parallel`` and ``sequence_overlap`` of ``ParallelConfig``.
        enable_all_optimization: enable all five of these.
        tensor_parallel_mode, context_parallel, check_consistency, compile: as in ``ParallelConfig``.
        extra_kwargs: ``check_inputs`` and ``bucket_bytes`` of ``ParallelConfig``.
        context: the context from ``launch_from_torch``.
        activation_layout: the layout of the activations between blocks. None: derived from the other options.
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
    check_consistency: bool = True
    compile: bool | str = False
    extra_kwargs: dict[str, Any] = field(default_factory=dict)
    context: ParallelContext | None = None
    activation_layout: ActivationLayout | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ShardConfig:
        """Create a ShardConfig from a dict of its fields. Raises ConfigError for an unknown field."""
        known = (*cls.__dataclass_fields__, *RENAMED_SHARD_FIELDS)
        check_names_are_known(options, known, "There is no option", "The options are the fields of ShardConfig")
        return cls(**options)

    def __post_init__(self) -> None:
        from shardformer.tensor_parallel.grid_layers import LAYERS_BY_MODE

        self._check_field_types()
        if self.enable_all_optimization:
            self.enable_fused_normalization = self.enable_flash_attention = self.enable_jit_fused = True
            if self.enable_tensor_parallelism and self.tensor_parallel_mode == "1d":
                self.enable_sequence_parallelism = self.enable_sequence_overlap = True
        check_choice("tensor_parallel_mode", self.tensor_parallel_mode, LAYERS_BY_MODE)
        check_choice("context_parallel", self.context_parallel, CONTEXT_PARALLEL_METHODS)
        on, needed = "enable_sequence_parallelism", "enable_tensor_parallelism"
        for name, other in (("enable_sequence_overlap", on), (on, needed)):
            if getattr(self, name) and not getattr(self, other):
                raise ConfigError(
                    f"{name}=True requires {other}=True.",
                    remedy=f"Set {other}=True, or remove {name}.",
                )
        if self.tensor_parallel_mode != "1d" and (self.enable_sequence_parallelism or self.has_context_parallel):
            other = f"{on}=True" if self.enable_sequence_parallelism else "the sequence axis"
            raise ConfigError(
                f"tensor_parallel_mode={self.tensor_parallel_mode!r} cannot be combined with {other}.",
                remedy=f"Remove {other}, or use tensor_parallel_mode='1d'.",
            )

    def _check_field_types(self) -> None:
        from shardformer.layout.activation_layout import ActivationLayout
        from shardformer.mesh.parallel_context import ParallelContext
        from shardformer.pipeline.stage_manager import PipelineStageManager

        rule = f"extra_kwargs is a dict with the keys {', '.join(EXTRA_KWARGS)}"
        is_dict = isinstance(self.extra_kwargs, Mapping)
        check_argument("extra_kwargs", self.extra_kwargs, is_dict, rule, "Set extra_kwargs={'check_inputs': False}")
        self.extra_kwargs = dict(self.extra_kwargs)
        check_names_are_known(self.extra_kwargs, EXTRA_KWARGS, "extra_kwargs has no key", rule)
        for name, kind, remedy in (
            ("pipeline_stage_manager", PipelineStageManager, "Write PipelineStageManager(context, schedule='1f1b')"),
            ("context", ParallelContext, "Pass the context that launch_from_torch returned"),
            ("activation_layout", ActivationLayout, "Remove it"),
        ):
            value = getattr(self, name)
            check_argument(name, value, isinstance(value, kind | None), f"It must be a {kind.__name__} or None", remedy)
        switches = [each.name for each in fields(self) if isinstance(each.default, bool)]
        check_compile_option(self.compile)
        switches.remove("compile")
        for name, value in {**{n: getattr(self, n) for n in switches}, **self.extra_kwargs}.items():
            check_int(name, value, unit="bytes") if name == "bucket_bytes" else check_bool(name, value)

    def resolve_activation_layout(self) -> ActivationLayout:
        """Return the layout of activations between transformer blocks."""
        from shardformer.layout import activation_layout as layouts

        if self.activation_layout is not None:
            return self.activation_layout
        if self.tensor_parallel_mode != "1d":
            return layouts.GRID_LAYOUTS[self.tensor_parallel_mode]
        shards = layouts.SEQUENCE_PARALLEL.shards if self.enable_sequence_parallelism else ()
        return layouts.ActivationLayout(
            (*layouts.CONTEXT_PARALLEL.shards, *shards) if self.has_context_parallel else shards
        )

    @property
    def has_context_parallel(self) -> bool:
        """Whether context parallelism is enabled, which shards activations over the sequence axis."""
        manager = self.pipeline_stage_manager
        context = self.context if manager is None or self.context is not None else manager.context
        return self.activation_layout is None and context is not None and context.sequence.size > 1

    def get_attention_head_axis(self) -> Axis:
        """Return the mesh axis that shards attention heads: tensor, or column in a tensor parallel grid."""
        context = self.resolve_context()
        return context.axes["column"] if self.has_tensor_parallel_grid and "column" in context.axes else context.tensor

    @property
    def has_tensor_parallel_grid(self) -> bool:
        """Whether the tensor parallel ranks form a 2D, 2.5D or 3D grid."""
        return self.tensor_parallel_mode != "1d" and self.enable_tensor_parallelism

    def resolve_context(self) -> ParallelContext:
        """Return the configured parallel context, or create one from the tensor parallel process group."""
        context = self._get_or_create_context()
        sizes = context.sizes
        if self.tensor_parallel_mode == "1d" and "row" in sizes and sizes["tensor"] > 1:
            grid = " x ".join(str(sizes[name]) for name in ("row", "column", "depth"))
            raise ConfigError(
                f"tensor_parallel_mode='1d' requires a single tensor size, but got a grid of {grid} ranks.",
                remedy="Pass a single number as the tensor size, or use tensor_parallel_mode='2d', '2.5d' or '3d'.",
            )
        if sizes["sequence"] > 1 and all(s.axis != "sequence" for s in self.resolve_activation_layout().shards):
            size = sizes["sequence"]
            raise ConfigError(
                f"activation_layout={self.activation_layout} does not use the sequence axis, which has size {size}.",
                remedy="Remove activation_layout, or use sequence=1.",
            )
        return context

    def _get_or_create_context(self) -> ParallelContext:
        from shardformer.mesh.parallel_context import ParallelContext

        manager, context, group = self.pipeline_stage_manager, self.context, self.tensor_parallel_process_group
        if manager is not None and context is None and group is None:
            return manager.context
        if (manager is not None and context is not manager.context) or (context is not None and group is not None):
            raise ConfigError(
                "ShardConfig received more than one of context, tensor_parallel_process_group and "
                "pipeline_stage_manager.",
                remedy="Pass only one of them.",
            )
        return ParallelContext.from_group(group) if context is None else context

    def get_sharding_options(self) -> dict[str, bool | str]:
        """Return the options that affect the sharding of a model."""
        names = [n for n in self.__dataclass_fields__ if n.startswith("enable_")]
        modes = ("tensor_parallel_mode", "context_parallel") if self.has_context_parallel else ("tensor_parallel_mode",)
        modes = (*modes, "compile") if self.compile else modes
        return {**{n: bool(getattr(self, n)) for n in names}, **{n: str(getattr(self, n)) for n in modes}}


STAGE_FIELDS = ("num_model_chunks", "partition", "layer_costs", "recompute_layers")
_LAYOUT_OPTIONS = ("tensor_parallel_mode", "sequence_parallel", "zero_stage", "precision", "offload")
_STAGE_3_FIELDS = ("keep_frozen", "reshard_after_forward")
_SHARD_OPTIONS = {
    "sequence_parallel": "enable_sequence_parallelism",
    "sequence_overlap": "enable_sequence_overlap",
    "fused_normalization": "enable_fused_normalization",
    "flash_attention": "enable_flash_attention",
    "fused_activation": "enable_jit_fused",
    **{name: name for name in ("tensor_parallel_mode", "context_parallel", "check_consistency", "compile")},
}
"""Field of ``ParallelConfig`` -> field of ``ShardConfig``."""
RENAMED_FIELDS = {
    "tensor_mode": "tensor_parallel_mode", "jit_fused": "fused_activation", "chunks": "num_model_chunks",
    "cut": "partition", "checkpoint_layers": "recompute_layers", "activations": "activation_offload",
    "zero": "zero_stage", "watch": "check_consistency", "average": "average_loss_over",
}  # fmt: skip
"""Earlier name of a field of ``ParallelConfig`` -> its name."""


@deprecate_renamed_arguments(RENAMED_FIELDS, {"partition": RENAMED_METHODS}, {**RENAMED_FIELDS, "fit": "fit_to"})
@dataclass(frozen=True)
class ParallelConfig:
    """Configuration of distributed training: parallel axes, pipeline schedule, ZeRO stage and other options.

    The command line flags, the table ``[parallel]`` of a run configuration and their documentation are generated from
    these fields. ``to_dict`` and ``from_dict`` convert to and from values that JSON and TOML can represent.

    Raises ConfigError for values and combinations that are not supported.
    """

    data: Annotated[
        int | None, "Data parallel size. None: the number of processes divided by the sizes of the other axes."
    ] = None
    pipe: Annotated[int, "Pipeline parallel size: the number of stages."] = 1
    sequence: Annotated[
        int | Sequence[int], "Context parallel size. Two numbers: the sizes of the ring and of a Ulysses group."
    ] = 1
    tensor: Annotated[
        int | Sequence[int], "Tensor parallel size. Two or three numbers: the shape of a grid of ranks."
    ] = 1
    tensor_parallel_mode: Annotated[str, 'Tensor parallel mode: "1d", or "2d", "2.5d" or "3d" for a grid.'] = "1d"
    sequence_parallel: Annotated[
        bool, "Shard the activations outside attention and MLPs along the sequence dimension, over the tensor axis."
    ] = False
    sequence_overlap: Annotated[
        bool, "Overlap the communication of `sequence_parallel` with matrix multiplications."
    ] = False
    context_parallel: Annotated[
        str,
        'Attention method for context parallelism: "ring" passes keys and values between ranks, "ulysses" '
        'exchanges heads for positions, "gather" all-gathers keys and values, "auto" selects the cheapest method.',
    ] = "auto"
    flash_attention: Annotated[bool, "Use torch's fused attention, or flash-attn if it supports the model."] = False
    fused_normalization: Annotated[bool, "Use torch's fused layer norm and RMS norm."] = False
    fused_activation: Annotated[bool, "Fuse an MLP's activation function with its bias and its gate."] = False
    compile: Annotated[
        bool | str, "Compile each layer with torch.compile: true for its default backend, or the name of a backend."
    ] = False
    schedule: Annotated[str, 'Pipeline schedule: "gpipe", "1f1b", "interleaved", "interleaved_zb" or "zbv".'] = "1f1b"
    num_model_chunks: Annotated[
        int | None, "Number of virtual stages per rank. None: 2 for interleaved, interleaved_zb and zbv, otherwise 1."
    ] = None
    partition: Annotated[
        str | Sequence[int],
        'How the layers are divided into stages: "balanced" by cost, "uniform" by number, or a list with the number '
        "of layers in each stage.",
    ] = "balanced"
    layer_costs: Annotated[
        Sequence[float] | None,
        "Relative cost of each layer. None: estimated from the number of weights that a token uses.",
    ] = None
    recompute_layers: Annotated[
        int | Sequence[int] | None,
        "Number of layers with activation checkpointing in each virtual stage, or a list with one number per stage.",
    ] = None
    activation_offload: Annotated[
        str,
        'Where activations are stored until the backward pass: "device", "host", "tensor" (sharded over the tensor '
        'axis) or "tensor+host".',
    ] = "device"
    micro_batches: Annotated[
        int | None, "Number of micro-batches in each rank's batch. None: the number of pipeline stages."
    ] = None
    micro_batch_size: Annotated[
        int | None, "Number of samples in a micro-batch. Use it instead of `micro_batches`."
    ] = None
    zero_stage: Annotated[
        int | None,
        "ZeRO stage: 1 shards the optimizer state over the data axis, 2 also the gradients, 3 also the parameters. "
        "None: no ZeRO, or stage 0 if `precision`, `offload` or an optimizer that needs full matrices requires it.",
    ] = None
    precision: Annotated[
        str | MixedPrecision,
        'Precision of the parameters: "fp32", or "bf16" or "fp16" with fp32 master weights. In Python, it may also be '
        "a `MixedPrecision`.",
    ] = "fp32"
    offload: Annotated[
        str | OffloadConfig | None,
        'Where master weights and optimizer state are stored: "cpu" or "nvme:DIR". In Python, it may also be an '
        "`OffloadConfig`.",
    ] = None
    keep_frozen: Annotated[bool, "ZeRO stage 3: do not shard frozen parameters."] = True
    reshard_after_forward: Annotated[
        bool | int | str | None,
        "ZeRO stage 3: free a layer's gathered parameters after its forward pass. False: gather them only once per "
        'step. A number of bytes, or "free" for the free GPU memory: keep up to this size for the last layers. '
        "None: true, or false in a pipeline.",
    ] = None
    bucket_bytes: Annotated[int | None, "Size of a gradient bucket in bytes. None: 25 MB."] = None
    max_grad_norm: Annotated[float | None, "Maximum global gradient norm. Larger gradients are clipped."] = None
    on_nonfinite: Annotated[
        str,
        'What to do if gradients are NaN or infinite: "raise", "skip" or "ignore". Without ZeRO, gradients are checked '
        "when their norm is computed.",
    ] = "raise"
    check_inputs: Annotated[bool, "Check that all ranks in a data parallel replica receive the same batch."] = True
    check_consistency: Annotated[
        bool, "Check that batches, training modes, optimizers and weights do not diverge between ranks."
    ] = True
    average_loss_over: Annotated[
        str,
        '"tokens": each label (or sample) has the same weight in the loss, as on one device. "ranks": the loss is the '
        "mean of the data parallel ranks' losses.",
    ] = "tokens"

    def __post_init__(self) -> None:
        from shardformer.gradient_accumulation.micro_batches import check_micro_batch_arguments
        from shardformer.mesh.rank_grid import check_axis_size, count_ranks_on_axis
        from shardformer.mesh.tensor_grid import compute_grid_shape
        from shardformer.offload.activations import OFFLOAD_TARGETS
        from shardformer.offload.host import OffloadConfig
        from shardformer.tensor_parallel.grid_layers import LAYERS_BY_MODE
        from shardformer.zero.config import ZERO_STAGES, ZeroOptions
        from shardformer.zero.mixed_precision import MixedPrecision

        for each in fields(self):
            if isinstance(value := getattr(self, each.name), list):
                object.__setattr__(self, each.name, tuple(value))
            if isinstance(each.default, bool) and each.name != "compile":
                check_bool(each.name, value)
        check_compile_option(self.compile)
        for name, known in (
            ("zero_stage", (None, *ZERO_STAGES)),
            ("average_loss_over", LOSS_AVERAGES),
            ("activation_offload", OFFLOAD_TARGETS),
            ("tensor_parallel_mode", LAYERS_BY_MODE),
            ("context_parallel", CONTEXT_PARALLEL_METHODS),
            ("schedule", SCHEDULES),
        ):
            check_choice(name, getattr(self, name), known)
        check_partition(self.partition, self.layer_costs, self.recompute_layers)
        for name in ("data", "pipe"):
            if (size := getattr(self, name)) is not None:
                check_axis_size(name, size)
        count_ranks_on_axis(self.sequence)
        if count_ranks_on_axis(self.tensor, "tensor") > 1 and self.tensor_parallel_mode != "1d":
            compute_grid_shape(self.tensor_parallel_mode, self.tensor)
        if self.micro_batches is not None or self.micro_batch_size is not None:
            check_micro_batch_arguments(self.micro_batches, self.micro_batch_size)
        MixedPrecision.from_value(self.precision), OffloadConfig.from_argument(self.offload)
        ZeroOptions(
            max_grad_norm=self.max_grad_norm,
            on_nonfinite=self.on_nonfinite,
            keep_frozen=self.keep_frozen,
            reshard_after_forward=self.reshard_after_forward,
            bucket_bytes=self.bucket_bytes,
        )
        self._check_fields_have_effect(STAGE_FIELDS, self.pipe > 1, "pipe=2 or more")
        self._check_fields_have_effect(_STAGE_3_FIELDS, self.zero_stage == 3, "zero_stage=3")
        self._check_fields_have_effect(("sequence_overlap",), self.sequence_parallel, "sequence_parallel=True")

    def _check_fields_have_effect(
        self, field_names: Sequence[str], is_required_option_set: bool, required_option: str
    ) -> None:
        changed = [f"{n}={getattr(self, n)!r}" for n in field_names if getattr(self, n) != _DEFAULTS[n]]
        if changed and not is_required_option_set:
            passed, unused = ", ".join(changed), " and ".join(n.partition("=")[0] for n in changed)
            raise ConfigError(
                f"{passed} has no effect without {required_option}.",
                remedy=f"Set {required_option}, or remove {unused}.",
            )

    @classmethod
    def from_value(cls, config_or_dict: Any) -> ParallelConfig:
        """Convert a ParallelConfig, a dict of its fields, or None to a ParallelConfig."""
        if config_or_dict is None or isinstance(config_or_dict, cls):
            return config_or_dict or cls()
        rule, remedy = "It must be a ParallelConfig or a dict of its fields", "Set parallel=ParallelConfig(tensor=2)"
        check_argument("parallel", config_or_dict, isinstance(config_or_dict, dict), rule, remedy)
        return cls.from_dict(config_or_dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ParallelConfig:
        """Create a ParallelConfig from the output of ``to_dict``. Raises ConfigError for an unknown field."""
        from shardformer.offload.host import OffloadConfig
        from shardformer.zero.mixed_precision import LossScale, MixedPrecision

        known = (*cls.__dataclass_fields__, *RENAMED_FIELDS)
        check_names_are_known(
            values, known, "parallel has no field", "The fields are those of shardformer.ParallelConfig"
        )
        found = dict(values)
        if isinstance(precision := found.get("precision"), Mapping):
            scale = precision.get("loss_scale", {})
            found["precision"] = MixedPrecision(**{**precision, "loss_scale": LossScale(**scale)})
        if isinstance(offload := found.get("offload"), Mapping):
            found["offload"] = OffloadConfig(**offload)
        return cls(**found)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a JSON-serializable dict."""
        return {each.name: _to_json_value(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    @cache
    def get_field_descriptions(cls) -> dict[str, tuple[Any, str]]:
        """Return the type and description of each field, for configuration files and the command line."""
        stand_ins = {"MixedPrecision": str, "OffloadConfig": str}
        hints = get_type_hints(cls, localns=stand_ins, include_extras=True)
        return {each.name: get_args(hints[each.name])[:2] for each in fields(cls)}

    @property
    def sizes(self) -> dict[str, int | None]:
        """Size of each mesh axis by axis name. The size of the data axis may be None."""
        from shardformer.mesh.rank_grid import count_ranks_on_axis

        composite = {name: count_ranks_on_axis(getattr(self, name), name) for name in ("sequence", "tensor")}
        return {"data": self.data, "pipe": self.pipe, **composite}

    def describe(self, axis_sizes: Mapping[str, int]) -> str:
        """Describe the parallel layout by its axis sizes and non-default options.

        Args:
            axis_sizes: size of each mesh axis. The size of the data axis may be None in the configuration.

        >>> ParallelConfig(tensor=2, zero_stage=1).describe({"data": 4, "pipe": 1, "sequence": 1, "tensor": 2})
        'data=4, tensor=2, zero_stage=1'
        """
        options = {name: getattr(self, name) for name in _LAYOUT_OPTIONS if getattr(self, name) != _DEFAULTS[name]}
        axes = {name: size for name, size in axis_sizes.items() if size > 1}
        return ", ".join(f"{name}={value}" for name, value in {**axes, **options}.items()) or "one process"

    def fit_to(self, num_processes: int) -> ParallelConfig:
        """Return a copy that is adapted to another number of processes.

        The axes that shard the model keep their sizes, or get a divisor of them, so that heads and layers remain
        divisible. The data axis gets the remaining processes.

        >>> fitted = ParallelConfig(tensor=4, pipe=2).fit_to(6)
        >>> fitted.tensor, fitted.pipe, fitted.data
        (2, 1, 3)
        """
        sizes = {name: size or 1 for name, size in self.sizes.items()}
        found = [
            (pipe, sequence, tensor)
            for pipe in _get_divisors(self.pipe)
            for sequence in _get_divisors(sizes["sequence"])
            for tensor in _get_divisors(sizes["tensor"])
            if num_processes % (pipe * sequence * tensor) == 0
        ]
        pipe, sequence, tensor = max(found, key=lambda sizes: (prod(sizes), sizes[2]))
        changes: dict[str, Any] = {} if pipe > 1 else {name: _DEFAULTS[name] for name in STAGE_FIELDS}
        if pipe != self.pipe and not isinstance(self.partition, str):
            changes |= {"partition": "balanced"}
        if sequence != sizes["sequence"]:
            changes |= {"sequence": sequence}
        if tensor == 1:
            changes |= {"sequence_parallel": False, "sequence_overlap": False}
        if tensor != sizes["tensor"]:
            changes |= {"tensor": tensor, "tensor_parallel_mode": "1d"}  # the new size may not form a grid
        return replace(self, data=num_processes // (pipe * sequence * tensor), pipe=pipe, **changes)

    def get_shard_config_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of the corresponding ``ShardConfig``."""
        buckets = {} if self.bucket_bytes is None else {"bucket_bytes": self.bucket_bytes}
        options = {option: getattr(self, name) for name, option in _SHARD_OPTIONS.items()}
        return {**options, "extra_kwargs": {"check_inputs": self.check_inputs, **buckets}}

    def get_stage_manager_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of the corresponding ``PipelineStageManager``."""
        return {name: getattr(self, name) for name in ("schedule", *STAGE_FIELDS)}

    def get_zero_kwargs(self) -> dict[str, Any]:
        """Return the corresponding keyword arguments of ``shard_optimizer``."""
        names = ("precision", "offload", "max_grad_norm", "on_nonfinite", *_STAGE_3_FIELDS, "bucket_bytes")
        return {"stage": self.effective_zero_stage or 0, **{name: getattr(self, name) for name in names}}

    def make_shard_config(self, context: ParallelContext) -> ShardConfig:
        """Create a ``ShardConfig`` from this configuration and a parallel context."""
        from shardformer.pipeline.stage_manager import PipelineStageManager

        manager = PipelineStageManager(context, **self.get_stage_manager_kwargs()) if context.pipe.size > 1 else None
        return ShardConfig(pipeline_stage_manager=manager, context=context, **self.get_shard_config_kwargs())

    @property
    def effective_zero_stage(self) -> int | None:
        """ZeRO stage in use, or None. Stage 0 means that only ``precision`` or ``offload`` requires ZeRO."""
        from shardformer.offload.host import OffloadConfig
        from shardformer.zero.mixed_precision import MixedPrecision

        needed = (
            MixedPrecision.from_value(self.precision).param_dtype is not None
            or OffloadConfig.from_argument(self.offload).to is not None
        )
        return 0 if self.zero_stage is None and needed else self.zero_stage


def check_compile_option(compile_option: Any) -> None:
    """Raise ConfigError if ``compile`` is neither a bool nor a string. Backend names are checked later."""
    rule, remedy = "It must be a bool or the name of a backend of torch.compile", "Set compile=True"
    check_argument(
        "compile", compile_option, isinstance(compile_option, bool | str) and compile_option != "", rule, remedy
    )


_DEFAULTS = {each.name: each.default for each in fields(ParallelConfig)}


def _to_json_value(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _get_divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
