"""What a sharded model checks and refuses once it is in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import broadcast, checksum, gather_objects
from shardformer.comm.params import gather_param, param_specs
from shardformer.config import ShardConfig
from shardformer.errors import ConfigError, InputError
from shardformer.mesh.axis import Axis
from shardformer.mesh.context import ParallelContext
from shardformer.sharding.agree import wait_for_all
from shardformer.sharding.describe import ShardRecord, record_of
from shardformer.sharding.stages import OF_EVERY_LAYER, WHY_NOT, Stages


def guard_model(model: nn.Module, record: ShardRecord, config: ShardConfig) -> None:
    """Installs the checks of a forward, lets ``save_pretrained`` write full weights, and refuses a resize."""
    _Guard(model, record, config)
    for module in model.modules():
        own = _save_pretrained if module is model else _refuse_part
        for name, method in (("save_pretrained", own), ("resize_token_embeddings", _refuse_resize)):
            if hasattr(module, name):
                setattr(module, name, method.__get__(module))
    if hasattr(model, "save_pretrained"):
        record.notes.append("save_pretrained writes full weights; resize_token_embeddings is refused.")


class _Guard:
    """Before a forward: what an error broke off is forgotten, gradients are hooked; once, inputs are compared."""

    def __init__(self, model: nn.Module, record: ShardRecord, config: ShardConfig) -> None:
        self._record, self._config = record, config
        self._compared = not config.extra_kwargs.get("check_inputs", True) or record.context.tensor.size == 1
        self._known = False
        self._is_cut = config.enable_tensor_parallelism and record.context.tensor.size > 1
        model.register_forward_pre_hook(self, with_kwargs=True)
        record.check_call = self._refuse_outputs

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() < 0:  # not a recomputation in a backward
            for edge in self._record.edges:
                edge.abandon()
        for averager in self._record.averagers:
            averager.refresh()
        self._refuse_alone(model)
        self._refuse_outputs(model, kwargs)
        if not self._known:
            self._known = True
            _refuse_new_parameters(model, self._record)
        if not self._compared:
            self._compared = True
            compare_inputs([*args, *kwargs.values()], self._record.context.tensor)

    def _refuse_alone(self, model: nn.Module) -> None:
        """A stage is no model by itself: only a pipeline hands it what the stage before made."""
        stages = self._record.stages
        if (
            stages is None
            or stages.manager.num_stages == 1
            or stages.stage_forward is None
            or stages.stage_forward.now is not None
        ):
            return
        raise ConfigError(
            f"This {type(model).__name__} was called on stage {stages.manager.stage} of {stages.manager.num_stages}",
            rule="A stage has a part of the layers: all stages run a batch together, and generate() they cannot",
            remedy="Write pipeline = shardformer.Pipeline(model, micro_batches=...), then pipeline.step(batch), "
            "pipeline.evaluate(batch) or pipeline.forward(batch)",
        )

    def _refuse_outputs(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        settings, in_stages = getattr(model, "config", None), self._record.context.pipe.size > 1
        cuts_sequence = self._is_cut and self._config.enable_sequence_parallelism
        for name, when, why in (
            ("output_attentions", self._is_cut, "Between the blocks each tensor rank holds its own heads only"),
            (
                "output_hidden_states",
                cuts_sequence,
                "Between the blocks each tensor rank holds a stretch of the sequence",
            ),
            *((name, in_stages, WHY_NOT) for name in OF_EVERY_LAYER),
            ("use_cache", in_stages, "Keys and values would be kept by the stage that has the layer"),
        ):
            asked = kwargs.get(name, False if name == "use_cache" else None)
            if when and (getattr(settings, name, False) if asked is None else asked):
                raise ConfigError(
                    f"{name}=True on a model that is sharded over {self._record.context}",
                    rule=why,
                    remedy=f"Leave {name} off, or run the plain model for it",
                )


def _refuse_new_parameters(model: nn.Module, record: ShardRecord) -> None:
    count = len(list(model.parameters()))  # names may change: by a wrapper around a layer
    if count > record.num_parameters:
        raise ConfigError(
            f"This {type(model).__name__} has {count} parameters, and had {record.num_parameters} when it was sharded",
            rule="Weights are compared, cut and their gradients agreed on between ranks when a model is sharded",
            remedy="Build the whole model first, with its new head or its adapters, and shard it then",
        )


def compare_inputs(values: list[Any], axis: Axis) -> None:
    """Raises InputError on every rank when the tensor ranks were not fed the same. A few numbers are gathered."""
    every = gather_objects([checksum(v) for v in values if isinstance(v, Tensor)], axis)
    if any(theirs != every[0] for theirs in every):
        raise InputError(
            f"The {axis.size} tensor ranks were fed different batches",
            rule="Tensor ranks compute one batch together; only data ranks have batches of their own",
            remedy="Draw the batch by the data rank: context.data.rank of context.data.size, not the global rank",
        )


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The plain model's state dict: every parameter and buffer whole, on the CPU, on every rank.

    All ranks of the tensor and pipe axes call it. Communicates one all-gather a sharded parameter over tensor, and over
    pipe one broadcast of each parameter and buffer.
    """
    record = record_of(model)
    record.gathers += 1
    axis, specs = record.context.tensor, param_specs(model)
    for over in (axis, record.context.pipe):
        wait_for_all(over, "full_state_dict or save_pretrained", record.gathers)
    known: dict[int, Tensor] = {}
    out = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        if id(value) not in known:
            spec = specs.get(name)
            known[id(value)] = value.detach() if spec is None else gather_param(value, spec, axis)
        out[name] = known[id(value)].cpu()
    if record.stages is None or record.context.pipe.size == 1:
        return out
    return _of_all_stages(out, record.stages, record.context)


def _of_all_stages(own: dict[str, Tensor], stages: Stages, context: ParallelContext) -> dict[str, Tensor]:
    """What the stages have together, in the order of the plain model's; tied names give one tensor."""
    whole: dict[str, Tensor] = {}
    dtypes = gather_objects({name: t.dtype for name, t in own.items()}, context.pipe)
    for name, (first, shape) in stages.state.items():
        if first not in whole:
            source = stages.stages_of(name)[0]
            here = own[name] if source == context.pipe.rank else torch.empty(shape, dtype=dtypes[source][name])
            whole[first] = broadcast(here.to(context.device).contiguous(), context.pipe, source).cpu()
    return {name: whole[first] for name, (first, _) in stages.state.items()}


def _save_pretrained(self: Any, save_directory: Any, **kwargs: Any) -> None:
    """As on the plain model: full weights, written by the first rank. All ranks call it."""
    context = record_of(self).context
    state = kwargs.pop("state_dict", None) or full_state_dict(self)
    wait_for_all(context.data, "save_pretrained", record_of(self).gathers)
    problem: Exception | None = None
    if context.tensor.rank == 0 and context.pipe.rank == 0 and context.data.rank == 0:
        native: Callable[..., None] = type(self).save_pretrained
        try:
            native(self, save_directory, state_dict=state, **kwargs)
        except Exception as error:
            problem = error
    said = [str(problem) if problem else ""]
    for axis in (context.tensor, context.pipe, context.data):
        said = [word for words in gather_objects(said, axis) for word in words]
    if problem is not None:
        raise problem
    if any(said):
        raise InputError(
            f"The first rank could not write to {save_directory!r}: {max(said)}",
            rule="The first rank writes for all",
            remedy="Give a folder that it can write to",
        )


def _refuse_resize(self: Any, *args: Any, **kwargs: Any) -> None:
    """Refused: the table is cut over the ranks."""
    raise ConfigError(
        "resize_token_embeddings on a sharded model",
        rule="The vocabulary is cut over the tensor ranks when the model is sharded",
        remedy="Resize the plain model, then shard it",
    )


def _refuse_part(self: Any, *args: Any, **kwargs: Any) -> None:
    """Refused: only the model that was sharded knows how to gather its weights."""
    raise ConfigError(
        f"save_pretrained on a {type(self).__name__} inside of a sharded model",
        rule="The model that was sharded saves itself; what stands in it holds this rank's parts",
        remedy="Save the whole model, or write shardformer.full_state_dict(model) yourself",
    )
