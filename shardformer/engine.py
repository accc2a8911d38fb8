"""Training a sharded model, with or without a pipeline: one call for a batch, the same for one stage and for many."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import all_gather, broadcast, broadcast_object, checksum
from shardformer.errors import ConfigError, InputError
from shardformer.mesh.axis import Axis
from shardformer.pipeline.exchange import StageExchange
from shardformer.pipeline.loss import LossWeight, LossWeights
from shardformer.pipeline.microbatches import batch_size_of, check_sizes, merge_outputs, sizes_of, split_batch
from shardformer.pipeline.placeholders import is_placeholder
from shardformer.pipeline.runtime import Runtime, StepJob, Trace
from shardformer.pipeline.schedule import Schedule, fitting_micro_batches, forward_only, make_schedule
from shardformer.pipeline.stage_manager import PipelineStageManager
from shardformer.pipeline.targets import tensors_of
from shardformer.sharding.describe import ShardRecord, record_of
from shardformer.sharding.regions import uses_dropout
from shardformer.sharding.stages import Stages, make_stages

Batch = Mapping[str, Any]
LossFn = Callable[[Any, Batch], Tensor]


class Pipeline:
    """Runs batches through a sharded model: as micro-batches, over the stages that it was cut into.

    Without a pipe axis it is the same call on one stage, which accumulates the gradients of the micro-batches.

    >>> context = launch_from_torch(pipe=2)                          # doctest: +SKIP
    >>> model = shard_model(model, context=context)                  # doctest: +SKIP
    >>> pipeline = Pipeline(model, micro_batches=8)                  # doctest: +SKIP
    >>> loss = pipeline.step(batch)                                  # doctest: +SKIP
    >>> optimizer.step(); optimizer.zero_grad()                      # doctest: +SKIP

    Args:
        model: what ``shard_model`` returned.
        micro_batches: into how many parts a batch is cut.
        micro_batch_size: or how many samples each part has; the last may be short.
        loss_fn: (output, micro-batch) -> loss, for a model that gives none itself.
        loss_weight: micro-batch -> how much counts in it, for a loss that is no mean of torch's functions.

    Every rank is given the same batch, but for data ranks, which each have their own.
    """

    def __init__(
        self,
        model: nn.Module,
        micro_batches: int | None = None,
        *,
        micro_batch_size: int | None = None,
        loss_fn: LossFn | None = None,
        loss_weight: LossWeight | None = None,
    ) -> None:
        record = record_of(model)
        self._model, self._record, self._context = model, record, record.context
        if micro_batches is None and micro_batch_size is None:
            micro_batches = 1 if record.stages is None else record.stages.manager.num_stages
        check_sizes(micro_batches, micro_batch_size)
        self._micro_batches, self._micro_batch_size = micro_batches, micro_batch_size
        self._loss_fn, self._loss_weight = loss_fn, loss_weight
        self._stages = record.stages or _single_stage(model, record)
        self._found: dict[int, Any] = {}
        self._compares = bool(record.extra_kwargs.get("check_inputs", True))
        manager, stage_forward = self._stages.manager, self._stages.stage_forward
        assert stage_forward is not None
        exchange = StageExchange(manager.point_to_point, self._context.tensor, self._context.device)
        self._runtime = Runtime(model, stage_forward, self._stages.chain, self._stages.spans, exchange, manager.stage)
        if micro_batches is not None:
            self._schedule(micro_batches)  # refuses a number that it forbids

    @property
    def stage_manager(self) -> PipelineStageManager:
        """The stages, and this process's place among them."""
        return self._stages.manager

    def step(self, batch: Batch | Sequence[Batch]) -> Tensor:
        """Forward and backward of a batch. Gradients are added to ``.grad``; the optimizer is yours to call.

        Args:
            batch: what the model's forward takes, by name. A list of batches counts as one large batch, whose gradients
                are accumulated: every token that counts weighs the same, in whichever of them it is.

        Returns the loss of the whole batch, on every rank. Communicates over pipe, for each micro-batch and boundary,
        its activations forward and their gradients backward, one small all-gather before and one broadcast behind.
        """
        averagers = [averager for averager in self._record.averagers if not averager.is_paused]
        with self._paused():
            loss = self._run(batch, backward=True).loss
        for averager in averagers:
            averager.start()
        for averager in averagers:
            averager.finish()
        assert loss is not None
        return loss

    def evaluate(self, batch: Batch | Sequence[Batch]) -> Tensor:
        """The loss of a batch, on every rank, without a backward."""
        with torch.no_grad():
            loss = self._run(batch, backward=False).loss
        assert loss is not None
        return loss

    def forward(self, batch: Batch, *, gather: bool = False) -> Any:
        """The model's output for a batch, on the last stage; no gradients.

        Args:
            gather: whether all stages get it.

        Returns the output with the micro-batches joined; on other stages, unless gathered, something that raises
        ConfigError when an output is asked of it.
        """
        with torch.no_grad():
            output = self._run(batch, backward=False, wants_output=True).output
        axis, last = self._stages.manager.axis, self._stages.manager.last_stage
        if gather:
            return broadcast_object(output, axis, last)
        return output if axis.rank == last else NoOutput(axis.rank, last)

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Notes when each action of this rank runs, and how many micro-batches are live."""
        self._runtime.trace = Trace()
        try:
            yield self._runtime.trace
        finally:
            self._runtime.trace = None

    # --- one batch

    def _run(self, batch: Batch | Sequence[Batch], *, backward: bool, wants_output: bool = False) -> _Head:
        self._runtime.check_goes_on()
        batches = _as_batches(batch)
        parts, sizes = self._cut(batches)
        if self._record.check_call is not None:  # here, where it is the same on all stages, and none waits for another
            self._record.check_call(self._model, parts[0])
        schedule = self._schedule(len(parts))
        if not backward:
            schedule = forward_only(schedule)
        draws = self._model.training and self._stages.draws
        keys, seed = self._agree(parts, backward, int(torch.randint(2**62, (), device="cpu")) if draws else 0)
        seeds = [(seed + 7919 * i) % 2**62 if draws else None for i in range(len(parts))]
        self._take_over_checkpointing()
        head = _Head(self, parts, sizes, wants_output)
        device = self._context.device
        with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=draws):
            try:
                self._runtime.run(StepJob(schedule, self._inputs(parts), keys, seeds, head))
            finally:
                head.close()
        head.finish()
        manager = self._stages.manager
        if not wants_output:
            given = head.loss if head.loss is not None else torch.zeros((), dtype=torch.float64)
            with self._runtime.named("at the end of a step"):
                loss = broadcast(given.to(self._context.device), manager.axis, manager.last_stage)
            in_fp64 = any(p.dtype == torch.float64 for p in self._model.parameters())
            head.loss = loss if in_fp64 else loss.float()
        return head

    def _cut(self, batches: Sequence[Batch]) -> tuple[list[dict[str, Any]], list[int]]:
        main = getattr(self._model, "main_input_name", None)
        parts: list[dict[str, Any]] = []
        sizes: list[int] = []
        for batch in batches:
            count = self._micro_batches
            if count is not None and len(batches) > 1:
                count = -(-count // len(batches))
            size = batch_size_of(batch, main)
            each = sizes_of(size, count, self._micro_batch_size)
            if self._micro_batch_size is not None and len(batches) == 1:
                each = self._fitting(size, each)
            parts += split_batch(batch, each, main)
            sizes += each
        return parts, sizes

    def _inputs(self, parts: Sequence[Batch]) -> Sequence[Batch]:
        """What the model is given: no cache, and nothing that only the loss function reads."""
        takes = inspect.signature(self._model.forward).parameters
        if "use_cache" in takes:
            parts = [{"use_cache": False, **part} for part in parts]
        if self._loss_fn is None or any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            return parts
        return [{name: value for name, value in part.items() if name in takes} for part in parts]

    def _fitting(self, size: int, each: list[int]) -> list[int]:
        """At most so many samples each: more parts where the schedule takes no such number of them."""
        manager = self._stages.manager
        count = fitting_micro_batches(manager.schedule, manager.num_stages, manager.num_model_chunks, len(each))
        return sizes_of(size, count, None) if count != len(each) and count <= size else each

    def _schedule(self, micro_batches: int) -> Schedule:
        manager = self._stages.manager
        return make_schedule(manager.schedule, manager.num_stages, micro_batches, manager.num_model_chunks)

    def _agree(self, parts: Sequence[Batch], backward: bool, seed: int) -> tuple[list[Hashable], int]:
        """A key for each micro-batch, of its shapes and what else decides the shapes of activations; stage 0's seed.

        Raises InputError on every stage when they were not given batches of the same shapes, or in the first call,
        unless ``check_inputs=False``, not the same batches.
        """
        trains = tuple(p.requires_grad for p in self._model.parameters())
        shapes = [_shapes_of(part) for part in parts]
        axis = self._stages.manager.axis
        seen = [checksum(t) for part in parts for _, t in tensors_of(part)] if self._compares and axis.size > 1 else []
        self._compares = False
        mine = (_number(shapes), len(parts), backward, self._model.training, _number(seen), _number(trains), seed)
        if axis.size == 1:
            return [(s, mine[2:-1]) for s in shapes], seed
        with self._runtime.named("before a step"):
            every = _gather_numbers(mine, axis, self._context.device)
        if any(theirs[:-2] != every[0][:-2] for theirs in every):
            raise _different(every, axis)
        mode = (backward, self._model.training, tuple(theirs[-2] for theirs in every))
        return [(s, mode) for s in shapes], every[0][-1]

    def _take_over_checkpointing(self) -> None:
        """``gradient_checkpointing_enable`` of transformers: here the stretches of a stage are checkpointed instead."""
        assert self._stages.stage_forward is not None
        for path in dict.fromkeys(self._stages.chain.units):
            layer: Any = self._model.get_submodule(path)
            if getattr(layer, "gradient_checkpointing", False) is True:
                layer.gradient_checkpointing = False
                self._stages.stage_forward.checkpoint_layer(path)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        with ExitStack() as pauses:
            for averager in self._record.averagers:
                pauses.enter_context(averager.paused())
            yield


class _Head:
    """What is done with the outputs of the last stage."""

    def __init__(self, pipeline: Pipeline, parts: Sequence[Batch], sizes: Sequence[int], wants_output: bool) -> None:
        self._loss_fn, self._wants_output = pipeline._loss_fn, wants_output
        self._parts, self._sizes, self._stage_forward = parts, sizes, pipeline._stages.stage_forward
        self._weights = LossWeights(parts, sizes, pipeline._loss_weight, pipeline._found)
        self._outputs: dict[int, Any] = {}
        self.loss: Tensor | None = None
        self.output: Any = None

    def before(self, micro_batch: int) -> None:
        if not self._wants_output:
            self._weights.start(micro_batch)

    def after(self, micro_batch: int, output: Any) -> Tensor | None:
        if self._wants_output:
            self._outputs[micro_batch] = output
            return None
        try:
            loss = self._loss_of(output, self._parts[micro_batch])
        finally:
            self._weights.stop()
        self._check_first(loss, output)
        loss = self._weights.of(micro_batch, loss)
        part = loss.detach().double()
        self.loss = part if self.loss is None else self.loss + part
        return loss

    def _loss_of(self, output: Any, part: Batch) -> Tensor:
        loss = self._loss_fn(output, part) if self._loss_fn is not None else getattr(output, "loss", None)
        if isinstance(loss, Tensor):
            return loss
        raise ConfigError(
            f"The model gave a {type(output).__name__} with loss={loss!r:.40}",
            rule="A step goes back from a loss, by default output.loss, which a model gives where a batch has labels",
            remedy="Add labels to the batch, or give Pipeline(..., loss_fn=), a function (output, micro-batch) -> loss",
        )

    def _check_first(self, loss: Tensor, output: Any) -> None:
        """The first loss of all is a number, unless the model gives none; not NaN that stands for another stage's."""
        assert self._stage_forward is not None
        ended_well, self._stage_forward.ended_well = self._stage_forward.ended_well, None
        if ended_well and is_placeholder(loss) and any(is_placeholder(t) for _, t in tensors_of({"output": output})):
            raise ConfigError(
                "The loss is NaN: it reads something in the model's output that an earlier stage computed",
                rule="The last stage has what its own layers and what stands behind them give",
                remedy="Give Pipeline(..., loss_fn=) that reads the last states or the logits only; where the model's "
                "head reads states between its layers, leave pipe out",
            )

    def close(self) -> None:
        """After the last forward, or an error."""
        self._weights.stop()

    def finish(self) -> None:
        if self._wants_output:
            ordered = [self._outputs[i] for i in sorted(self._outputs)]
            self.output = without_placeholders(merge_outputs(ordered, self._sizes)) if ordered else None
        elif self.loss is not None:
            self._weights.finish()


class NoOutput:
    """What ``Pipeline.forward`` gives on a stage that has no output."""

    def __init__(self, stage: int, last: int) -> None:
        self._stage, self._last = stage, last

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error(name)

    def __getitem__(self, key: Any) -> Any:
        raise self._error(repr(key))

    def _error(self, name: str) -> ConfigError:
        return ConfigError(
            f"{name} was asked of stage {self._stage}",
            rule=f"The last stage, {self._last} on the pipe axis, has the model's outputs",
            remedy="Call forward(batch, gather=True) on all stages, or look at the output on the last stage only",
        )


def without_placeholders(output: Any) -> Any:
    """The output without what other stages made of it, which is NaN here where the output itself is not."""
    tensors = [t for _, t in tensors_of({"output": output}) if t.is_floating_point() and t.numel()]
    placeholders = {id(t) for t in tensors if bool(t.isnan().all())}
    return _without(output, placeholders) if len(placeholders) < len(tensors) else output


def _without(output: Any, placeholders: set[int]) -> Any:
    if isinstance(output, Tensor):
        return None if id(output) in placeholders else output
    if isinstance(output, Mapping):
        kept = {name: _without(value, placeholders) for name, value in output.items()}
        return kept if type(output) is dict else type(output)(**kept)
    if isinstance(output, list | tuple):
        return type(output)(_without(value, placeholders) for value in output)
    return output


def _as_batches(batch: Any) -> list[Batch]:
    batches = list(batch) if isinstance(batch, list | tuple) else [batch]
    if batches and all(isinstance(one, Mapping) for one in batches):
        return batches
    given = "an empty list" if batch == [] else f"a {type(batch).__name__}"
    raise InputError(
        f"The batch is {given}",
        rule="A batch is a dict of what the model's forward takes, by name, or a list of some",
        remedy="Write step({'input_ids': ids, 'labels': labels})",
    )


def _shapes_of(part: Batch) -> Hashable:
    return tuple((name, tuple(t.shape), str(t.dtype)) for name, t in tensors_of(part))


def _number(thing: Any) -> int:
    """A number of what a thing looks like in print, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(thing).encode()).digest()[:7], "big")


def _gather_numbers(numbers: Sequence[int], axis: Axis, device: torch.device) -> list[tuple[int, ...]]:
    mine = torch.tensor([numbers], dtype=torch.int64, device=device)
    return [tuple(row) for row in all_gather(mine, axis, 0, purpose="agreement").tolist()]


def _different(every: Sequence[tuple[int, ...]], axis: Axis) -> InputError:
    other = next(stage for stage, theirs in enumerate(every) if theirs[:-2] != every[0][:-2])
    kinds = ("shapes of batches", "numbers of micro-batches", "calls", "modes of training", "batches")
    what = next(kind for kind, a, b in zip(kinds, every[0], every[other], strict=False) if a != b)
    return InputError(
        f"Stages 0 and {other} of {axis.size} were given different {what}",
        rule="All stages make the same calls with the same batch: each takes from it what its layers read",
        remedy="Draw the batch by the data rank: context.data.rank of context.data.size, not the global rank",
    )


def _single_stage(model: nn.Module, record: ShardRecord) -> Stages:
    """The stages of a model that no pipeline cut: one, with all layers."""
    assert record.policy is not None
    record.stages = stages = make_stages(model, record.policy, PipelineStageManager(record.context, "1f1b"))
    stages.draws = uses_dropout(model)
    stages.open(model)
    return stages
