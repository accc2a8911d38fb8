"""Pipeline: trains a sharded model with one call per batch, with one stage or many."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import (
    all_gather_numbers,
    all_gather_objects,
    all_reduce,
    broadcast,
    broadcast_object,
    checksum,
)
from shardformer.consistency.rank_divergence import COMPARED_VALUES, KIND_SHIFT, check_step
from shardformer.errors import ConfigError, InputError, check_bool, check_callable, check_choice
from shardformer.layout.sharding_metadata import ShardingMetadata, metadata_of
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.rank_grid import AXES
from shardformer.pipeline.micro_batch_loss import LossWeight, LossWeights, no_sum_of_means
from shardformer.pipeline.micro_batches import (
    TARGET_KEY,
    batch_size_of,
    check_sizes,
    micro_batch_sizes,
    named_tensors_in,
    special_token_ids,
    split_batch,
)
from shardformer.pipeline.p2p_communication import StageExchange
from shardformer.pipeline.paired_losses import Finding, Trial, TrialHead, findings_of, judge, trial_of, tried
from shardformer.pipeline.runtime import Batch, LastStage, LossFn, NoOutput, Runtime, RunTrace, StepInputs
from shardformer.pipeline.schedules import LOSS_AVERAGES, Schedule, fitting_micro_batches, forward_only, make_schedule
from shardformer.pipeline.stage_forward import dtypes_of
from shardformer.pipeline.stage_manager import PipelineStageManager, Stages, build_stages
from shardformer.public_names import renamed_arguments
from shardformer.random_state import RandomUseDetector, fork_random_state, uses_dropout
from shardformer.torch_compat import has_data, is_compiled_in_place, to_list, wrapped_name
from shardformer.transformers_compat import keywords_of, with_mask_as_cached


def start_training(model: nn.Module) -> nn.Module:
    """Puts a model into train mode, unless some of its modules are in train mode already. Returns the model.

    ``from_pretrained`` returns a model in eval mode. Where some modules are in train mode you chose which, as with a
    frozen part that keeps the running averages of its BatchNorm; then only the mode of the model itself is set, by
    which an engine tells training from evaluation.
    """
    if any(module.training for module in model.modules()):
        model.training = True
    else:
        model.train()
    return model


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Path of each module -> whether it is in train mode."""
    return {path: module.training for path, module in model.named_modules()}


def set_modes(model: nn.Module, modes: Mapping[str, bool]) -> None:
    """Puts modules back into the modes that ``modes_of`` returned, by ``train`` of their own."""
    modules = [(module, modes[path]) for path, module in model.named_modules() if path in modes]
    for module, mode in modules:  # each before the modules in it, which it takes along
        if module.training != mode:
            module.train(mode)
    for module, mode in modules:  # where a class overrides ``train``
        module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model is in eval mode in here. Behind it each module is in the mode that it was in."""
    before = modes_of(model)
    try:
        model.eval()
        yield
    finally:
        set_modes(model, before)


RENAMED_ARGUMENTS = {"average_over_data": "average_loss_over", "takes_short_batches": "allow_short_batches"}
OPTIMIZER_VALUES = ("steps", "options")
STEPS, OPTIONS = 6, 7
"""The places of an optimizer's steps and options among the numbers that stages compare."""


@renamed_arguments(RENAMED_ARGUMENTS, {"average_loss_over": {False: "ranks", True: "tokens"}})
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
        average_loss_over: "ranks": the loss is the mean of the data ranks' losses, as in DDP. "tokens": the batches of
            all data ranks are one batch, in which every token (or sample) that counts has the same weight. This needs
            two more small all-reduces over data in a step, and is the default of ``initialize``.
        allow_short_batches: whether a batch with fewer samples than ``micro_batches``, as the last of an epoch may be,
            is cut into as many parts as it has; where the schedule goes with that number.

    Every rank is given the same batch, but for data ranks, which each have their own.
    ``exchange`` knows what the stages hand to each other, which a rank that is traced alone has to be given.
    """

    def __init__(
        self,
        model: nn.Module,
        micro_batches: int | None = None,
        *,
        micro_batch_size: int | None = None,
        loss_fn: LossFn | None = None,
        loss_weight: LossWeight | None = None,
        average_loss_over: str = "ranks",
        allow_short_batches: bool = False,
    ) -> None:
        for name, given in (("loss_fn", loss_fn), ("loss_weight", loss_weight)):
            rule = "It is a function" + (": (outputs, targets) -> loss" if name == "loss_fn" else ": batch -> a number")
            check_callable(name, given, rule)
        check_choice("average_loss_over", average_loss_over, LOSS_AVERAGES)
        check_bool("allow_short_batches", allow_short_batches)
        state = metadata_of(model)
        self._model, self._state, self._context = model, state, state.context
        if micro_batches is None and micro_batch_size is None:
            micro_batches = 1 if state.stages is None else state.stages.manager.num_stages
        check_sizes(micro_batches, micro_batch_size)
        self._micro_batches, self._micro_batch_size = micro_batches, micro_batch_size
        self._loss_fn, self._loss_weight, self._averages = loss_fn, loss_weight, average_loss_over == "tokens"
        self._takes_short = allow_short_batches
        self._stages: Stages = state.stages or _single_stage(model, state)
        self._found: dict[int, Any] = {}
        self._tried: set[bool] = set()  # in train mode, in eval mode: whether the loss compares samples
        self._is_checkpointed = False  # by transformers, as far as it was seen: a pipeline takes that over
        self.checkpointed: set[str] = set()  # the layers of which it did
        self._compares_factors = self._averages and self._context.data.size > 1
        self._kinds: tuple[int, ...] = ()  # of the stages' parameters, as stand-ins for them know it
        self._compares = bool(state.request.extra.get("check_inputs", True))
        manager, stage_forward = self._stages.manager, self._stages.stage_forward
        assert stage_forward is not None
        self.exchange = StageExchange(manager.point_to_point, self._context.tensor, self._context.device)
        self._runtime = Runtime(
            model,
            stage_forward,
            self._stages.chain,
            self._stages.spans,
            self.exchange,
            manager.stage,
            state.activations,
        )
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
        its activations forward and their gradients backward, one small all-gather before and one broadcast behind; in
        the first step, and after the model was converted, the dtypes of its parameters.
        """
        reducers = [reducer for reducer in self._state.reducers if not reducer.is_paused]
        keeper = self._state.gradient_owner
        with self._state.paused(), keeper.scaled() if keeper is not None else nullcontext(1.0) as scale:
            loss = self._run(batch, backward=True, loss_scale=scale).loss
        for reducer in reducers:
            reducer.start()
        for reducer in reducers:
            reducer.finish()
        assert loss is not None
        return loss

    def evaluate(self, batch: Batch | Sequence[Batch]) -> Tensor:
        """The loss of a batch, on every rank, without a backward."""
        with torch.no_grad():
            loss = self._run(batch, backward=False).loss
        assert loss is not None
        return loss

    def mean_loss(self, batches: Iterable[Batch]) -> Tensor:
        """The loss over several batches, on every rank, without a backward: of all that counts in any of them.

        Batches are weighed by what their losses are means over; by their samples where the model's loss does not tell.
        All ranks have as many batches.
        """
        total, weight = torch.zeros((), dtype=torch.float64), 0.0
        for batch in batches:
            with torch.no_grad():
                head = self._run(batch, backward=False, counts=True)
            counted = head.counted if head.counted is not None else float(sum(head.sizes))
            assert head.loss is not None
            # of nothing that counts the mean is not a number
            total += head.loss.cpu().double() * counted if counted else 0.0
            weight += counted
        device, axis = self._context.device, self._stages.manager.axis
        both = broadcast(
            torch.stack([total, torch.tensor(weight).double()]).to(device), axis, self._stages.manager.last_stage
        )
        return both[0] / both[1]

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
    def trace(self) -> Iterator[RunTrace]:
        """Notes when each action of this rank runs, and how many micro-batches are live."""
        self._runtime.trace = RunTrace()
        try:
            yield self._runtime.trace
        finally:
            self._runtime.trace = None

    # --- one batch

    def _run(
        self,
        batch: Batch | Sequence[Batch],
        *,
        backward: bool,
        wants_output: bool = False,
        loss_scale: float = 1.0,
        counts: bool = False,
    ) -> LastStage:
        self._runtime.check_goes_on()
        batches = _as_batches(batch)
        parts, sizes = self._cut(batches)
        inputs = self._inputs(parts)
        if self._state.check_call is not None:  # here, where it is the same on all stages, and none waits for another
            self._state.check_call(self._model, inputs[0])
        schedule = self._schedule(len(parts))
        if not backward:
            schedule = forward_only(schedule)
        device, manager = self._context.device, self._stages.manager
        self._refuse_compiled()
        draws = self._agree_on_step(batches)
        looks = not wants_output and self._looks_for_pairs(len(parts), backward=backward)
        with fork_random_state(device):
            keys, seed = self._agree(parts, backward, _next_seed() if draws else 0)
            seeds = [(seed + 7919 * i) % 2**62 if seed else None for i in range(len(parts))]
            self._take_over_checkpointing()
            head = self._head(parts, sizes, wants_output, counts, looks and manager.num_stages > 1)
            try:
                with self._stages.installed(self._model):
                    self._runtime.run(StepInputs(schedule, inputs, keys, seeds, head, loss_scale))
            finally:
                head.close()
        if draws and self._draws():
            _next_seed()
        head.finish()
        if not wants_output:
            loss, *noted = self._loss_of_all(head, looks)
            if self._compares_factors:
                _check_factors(*noted[:2])
                self._compares_factors = False
            if looks and has_data(loss):
                self._look_for_pairs(batches, len(parts), *map(bool, to_list(noted[-1] > 0)))
            in_fp64 = any(p.dtype == torch.float64 for p in self._model.parameters())
            head.loss = loss if in_fp64 else loss.float()
        return head

    def _refuse_compiled(self) -> None:
        if self._stages.manager.num_stages == 1:
            return
        for path, module in self._model.named_modules():
            # the model, and the layers, whose forwards are those of a stage
            if is_compiled_in_place(module) and (not path or "forward" in vars(module)):
                raise ConfigError(
                    f"{path or type(self._model).__name__} is compiled, and part of a pipeline",
                    rule="Which layers a stage runs, and with what, is decided anew for each micro-batch",
                    remedy="Compile what stands in the layers: for layer in model.model.layers: layer.mlp.compile()",
                )

    def _agree_on_step(self, batches: Sequence[Batch]) -> bool:
        """Whether any rank draws random numbers while it trains; the ranks of one batch have compared themselves."""
        training, watch = self._model.training, self._state.monitor
        if watch is not None:
            watch.training = training
        elif not training:
            return False
        given = [x for batch in batches for _, x in named_tensors_in(batch)]
        return check_step(self._state, given, self._draws()) and training

    def _loss_of_all(self, head: LastStage, looks: bool) -> list[Tensor]:
        """The loss of the batch, and facts that are sent in the same message.

        These are the mean of the factors of means and of their squares, and (whether the loss may compare samples,
        whether it does).
        """
        manager = self._stages.manager
        given = head.loss if head.loss is not None else torch.zeros((), dtype=torch.float64)
        rows = [given]
        if self._compares_factors:
            rows += [head.factors.to(given), head.factors.to(given).square()]
        if looks:
            rows += [given.new_tensor(float(self._may_compare(head))), given.new_tensor(float(head.compares))]
        with self._runtime.named("at the end of a step"):
            loss = broadcast(torch.stack(rows).to(self._context.device), manager.axis, manager.last_stage)
        if self._averages:
            loss = all_reduce(loss, self._context.data, purpose="loss") / self._context.data.size
        found = list(loss.unbind())
        return [*found[:-2], loss[-2:]] if looks else found

    def _head(
        self, parts: Sequence[Batch], sizes: Sequence[int], wants_output: bool, counts: bool, looks: bool
    ) -> LastStage:
        stage_forward, weights = self._stages.stage_forward, None
        assert stage_forward is not None
        if not wants_output:
            over = (self._context.data, self._context.device) if self._averages else None
            weights = LossWeights(parts, sizes, self._loss_weight, self._found, over, counts=counts)
        return LastStage(parts, sizes, stage_forward, weights, self._loss_fn, looks=looks)

    def _looks_for_pairs(self, num_parts: int, *, backward: bool) -> bool:
        """Whether this step finds out if the loss compares samples: the first one in each mode that divides its batch.

        An evaluation whose loss is not averaged over data ranks is left out: each data rank may run it alone.
        """
        is_divided = num_parts > 1 or self._context.data.size > 1
        return is_divided and self._model.training not in self._tried and (backward or self._averages)

    def _refuses_pairs(self, num_parts: int) -> bool:
        """Whether the loss is to be that of the whole batch: the user did not choose the mean of the parts' losses."""
        return self._loss_weight is None and (num_parts > 1 or self._averages)

    def _may_compare(self, head: LastStage) -> bool:
        """Whether samples have to be run apart and together. Over stages only a ``loss_fn`` is looked at, by itself."""
        if self._stages.manager.num_stages > 1:
            return False
        if not self._refuses_pairs(len(head.sizes)):
            return self._loss_fn is not None
        return not head.is_explained or (self._model.training and any(map(_normalizes, self._model.modules())))

    def _look_for_pairs(self, batches: Sequence[Batch], num_parts: int, may_compare: bool, compares: bool) -> None:
        """Raises ConfigError, or warns, where the loss of a batch that is divided compares its samples. See ``judge``.

        Where it may, a few samples are run without gradients. Communicates a few numbers a rank then.
        """
        size, mode = self._context.data.size, self._model.training
        into = [f"into {num_parts} micro-batches"] * (num_parts > 1) + [f"over {size} data ranks"] * (size > 1)
        findings: Sequence[int] | None = [Finding.COMPARES] if compares else []
        refuses, normalizes = self._refuses_pairs(num_parts), False
        if may_compare:
            trial = trial_of(
                batches[0],
                getattr(self._model, "main_input_name", None),
                special_token_ids(getattr(self._model, "config", None)),
                fails_alone=self._state.parameter_owner is not None,
                weighs=self._loss_weight is None,
                refused=refuses,
            )
            findings, writers = self._findings(trial)
            if mode and findings is None:  # draws, as dropout does; what has running averages normalizes as in training
                with evaluating(self._model):
                    for module in writers:
                        module.training = True
                    findings, _ = self._findings(trial)
            if mode and findings is not None and Finding.COMPARES in findings:
                with evaluating(self._model):
                    in_eval, _ = self._findings(trial)
                normalizes = in_eval is not None and {*in_eval} == {Finding.FINE}
        judge(findings or (), " and ".join(into), refuses=refuses, gathers=num_parts == 1, normalizes=normalizes)
        self._tried.add(mode)

    def _findings(self, trial: Trial | None) -> tuple[Sequence[int] | None, list[nn.Module]]:
        """What all ranks found in their trials, None if the loss is random; and the modules that wrote to buffers."""
        world = self._context.flatten(*AXES) if self._context.world is not None else Axis("world")
        if not all(has_one for (has_one,) in all_gather_numbers([trial is not None], world)):
            return (), []
        assert trial is not None
        found, draws = Finding.UNKNOWN, RandomUseDetector(self._context.device)
        writers: list[nn.Module] = []
        try:
            with tried(self._model, self._context.device) as writers:
                draws.begin()
                found = self._try(trial)
                draws.end()
        except Exception:  # what cannot be tried is not judged
            found = Finding.UNKNOWN
        return findings_of(all_gather_numbers([int(found), bool(draws.seen)], world)), writers

    def _try(self, trial: Trial) -> Finding:
        """Runs the micro-batches of a trial, on the only stage."""
        data_rank, compares, trace = self._context.data.rank, self._compares, self._runtime.trace
        parts, stage_forward = trial.micro_batches(data_rank), self._stages.stage_forward
        assert stage_forward is not None
        inputs, head = self._inputs(parts), TrialHead(trial, parts, stage_forward, self._loss_fn)
        keys, _ = self._agree(inputs, False, 0)
        self._runtime.trace = None
        try:
            with self._stages.installed(self._model):
                schedule = forward_only(self._schedule(len(parts)))
                self._runtime.run(StepInputs(schedule, inputs, keys, [None] * len(parts), head))
        finally:
            head.close()
            self._runtime.trace, self._compares = trace, compares
        dtypes = {p.dtype for p in self._model.parameters() if p.is_floating_point()}
        dtypes |= {autocast} if (autocast := _autocast(self._context.device)) is not None else set()
        eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        return Finding.GATHERS if head.gathers else trial.find(head.losses(), data_rank=data_rank, eps=eps)

    def _draws(self) -> bool:
        """Whether this rank may draw random numbers: by the config, or since it was seen to or not tried yet.

        Other ranks of the stage may say otherwise, where another thread of a process drew beside it: what all do then
        is agreed on.
        """
        stages = self._stages
        assert stages.stage_forward is not None
        return stages.uses_random or stages.stage_forward.draws.seen is not False

    def _cut(self, batches: Sequence[Batch]) -> tuple[list[dict[str, Any]], list[int]]:
        main = getattr(self._model, "main_input_name", None)
        parts: list[dict[str, Any]] = []
        sizes: list[int] = []
        for batch in batches:
            count = self._micro_batches
            if count is not None and len(batches) > 1:
                count = -(-count // len(batches))
            size = batch_size_of(batch, main)
            if count is not None and self._takes_short:
                count = min(count, max(size, 1))
            each = micro_batch_sizes(size, count, self._micro_batch_size)
            if self._micro_batch_size is not None and len(batches) == 1:
                each = self._fitting(size, each)
            parts += split_batch(batch, each, main, special_token_ids(getattr(self._model, "config", None)))
            sizes += each
        return parts, sizes

    def _inputs(self, parts: Sequence[Batch]) -> Sequence[Batch]:
        """What the model is given: no cache, and nothing that only the loss function reads."""
        names = keywords_of(self._model) if self._loss_fn is not None else None
        parts = [{n: x for n, x in p.items() if n != TARGET_KEY and (names is None or n in names)} for p in parts]
        if any("position_ids" in part for part in parts) and not self._is_checkpointed:
            self._is_checkpointed = any(
                getattr(m, "gradient_checkpointing", None) is True for m in self._model.modules()
            )
        return [with_mask_as_cached(p, self._model, is_checkpointed=self._is_checkpointed) for p in parts]

    def _fitting(self, size: int, each: list[int]) -> list[int]:
        """At most so many samples each: more parts where the schedule takes no such number of them."""
        manager = self._stages.manager
        count = fitting_micro_batches(manager.schedule, manager.num_stages, manager.num_model_chunks, len(each))
        return micro_batch_sizes(size, count, None) if count != len(each) and count <= size else each

    def _schedule(self, micro_batches: int) -> Schedule:
        manager = self._stages.manager
        return make_schedule(manager.schedule, manager.num_stages, micro_batches, manager.num_model_chunks)

    def _agree(self, parts: Sequence[Batch], backward: bool, seed: int) -> tuple[list[Hashable], int]:
        """A key for each micro-batch, of its shapes and what else decides the shapes of activations; one seed of all.

        Raises InputError on every stage when they were not given batches of the same shapes, or made other numbers of
        steps; and, unless ``check_inputs=False``, when they were not given the same batches: in the first call, and
        where they are watched in each.
        """
        kinds = tuple((p.requires_grad, p.dtype) for p in self._model.parameters())
        autocast = _autocast(self._context.device)
        shapes = [_shapes_of(part) for part in parts]
        axis, watch = self._stages.manager.axis, self._state.monitor
        training = self._model.training
        if axis.size == 1:
            return [(s, (backward, training, autocast, kinds)) for s in shapes], seed
        given = [t for part in parts for _, t in named_tensors_in(part)] if self._compares else []
        seen = watch.batch(given) if watch is not None else _hash_of([checksum(t) for t in given])
        self._compares = self._compares and watch is not None
        steps, options = (watch.rounds_of_stage(), watch.options_of_stage()) if watch is not None else (0, 0)
        modes = backward, training, _hash_of(autocast)
        mine = (_hash_of(shapes), len(parts), *modes, seen, steps, options, _hash_of(kinds), seed)
        with self._runtime.named("before a step"):
            every = self._comparable(all_gather_numbers(mine, axis))
        if any(theirs[:-2] != every[0][:-2] for theirs in every):
            raise _first_difference(every, axis)
        stages = tuple(theirs[-2] for theirs in every)
        self._take_dtypes(stages)
        return [(s, (*modes, stages)) for s in shapes], next((theirs[-1] for theirs in every if theirs[-1]), 0)

    def _take_dtypes(self, stages: tuple[int, ...]) -> None:
        """What stands for other stages' parameters gets their dtypes, where a stage's parameters have changed.

        Raises InputError on all stages where two of them hold one parameter in different dtypes.
        """
        if stages == self._kinds:
            return
        everywhere = all_gather_objects(dtypes_of(self._model), self._stages.manager.axis)
        known: dict[str, tuple[int, torch.dtype]] = {}
        for stage, dtypes in enumerate(everywhere):
            for name, dtype in dtypes.items():
                first = self._stages.parameters[name][0] if name in self._stages.parameters else name
                other, before = known.setdefault(first, (stage, dtype))
                if before != dtype:
                    raise InputError(
                        f"{first} is {before} on stage {other} and {dtype} on stage {stage}",
                        remedy="Convert the whole model, model.to(dtype), or these weights by all of their names",
                    )
        self._stages.placeholders.take_dtypes(self._model, {n: d for each in everywhere for n, d in each.items()})
        self._kinds = stages

    def _comparable(self, every: Sequence[Sequence[int]]) -> list[list[int]]:
        """What the stages said, without what they need not have in common (see ``consistency``)."""
        rows = [list(theirs) for theirs in every]
        are_known = all(row[OPTIONS] for row in rows)
        has_one_kind = len({row[OPTIONS] >> KIND_SHIFT for row in rows}) == 1
        trained = [row[STEPS] for row in rows if row[STEPS]]
        for row in rows:
            if not (are_known and has_one_kind):
                row[OPTIONS] = 0
            if trained and (not row[STEPS] or (are_known and not has_one_kind)):
                row[STEPS] = trained[0]
        return rows

    def _take_over_checkpointing(self) -> None:
        """``gradient_checkpointing_enable`` of transformers: here the spans of a stage are checkpointed instead."""
        assert self._stages.stage_forward is not None
        if self._stages.manager.num_stages > 1:
            self._stages.stage_forward.follow_wrappers(self._model)
        for path in dict.fromkeys(self._stages.chain.layer_calls):
            layer: Any = self._model.get_submodule(path)
            while (name := wrapped_name(layer)) is not None:
                layer = layer._modules[name]
            if getattr(layer, "gradient_checkpointing", False) is True:
                layer.gradient_checkpointing, self._is_checkpointed = False, True
                self._stages.stage_forward.checkpoint_layer(path)
                self.checkpointed.add(path)


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
    return tuple((name, tuple(t.shape), str(t.dtype)) for name, t in named_tensors_in(part))


def _hash_of(thing: Any) -> int:
    """A number of what a thing looks like in print, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(thing).encode()).digest()[:7], "big")


def _autocast(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast computes in; None outside of it."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _next_seed() -> int:
    return 1 + int(to_list(torch.randint(2**62 - 1, (), device="cpu")))


def _first_difference(every: Sequence[Sequence[int]], axis: Axis) -> InputError:
    other = next(stage for stage, theirs in enumerate(every) if theirs[:-2] != every[0][:-2])
    kinds = (
        "shapes of batches",
        "numbers of micro-batches",
        "calls",
        "modes of training",
        "settings of autocast",
        "batches",
        *OPTIMIZER_VALUES,
    )
    what, ours, theirs = next((kind, a, b) for kind, a, b in zip(kinds, every[0], every[other], strict=False) if a != b)
    if what in OPTIMIZER_VALUES:
        ranks = axis.ranks[0], axis.ranks[other]
        numbers = f" ({ours}, and rank {ranks[1]} {theirs})" if what == "steps" else ""
        places = f"Ranks {ranks[0]} and {ranks[1]}, stages 0 and {other} of {axis.size},"
        return InputError(
            f"{places} have come apart: they have different {COMPARED_VALUES[what].what}{numbers}",
            rule=COMPARED_VALUES[what].rule,
            remedy=COMPARED_VALUES[what].remedy,
        )
    return InputError(
        f"Stages 0 and {other} of {axis.size} were given different {what}",
        rule="All stages make the same calls with the same batch: each takes from it what its layers read",
        remedy="Draw the batch by the data rank: context.data.rank of context.data.size, not the global rank",
    )


def _normalizes(module: nn.Module) -> bool:
    """Whether a module computes statistics over the batch."""
    return isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) and module.training


def _check_factors(mean: Tensor, mean_square: Tensor) -> None:
    """The means in the loss have the same factors on all data ranks: else it is no sum of them."""
    if has_data(mean) and not to_list(mean_square - mean.square() <= 1e-11 * mean_square):
        raise no_sum_of_means("The means in the loss have other factors on other data ranks")


def _single_stage(model: nn.Module, state: ShardingMetadata) -> Stages:
    """The stages of a model that no pipeline cut: one, with all layers."""
    manager = PipelineStageManager(state.context, "1f1b")
    state.stages = stages = build_stages(model, state.request.policy, manager)
    stages.uses_random = uses_dropout(model)
    stages.install(model, state.activations, state.context)
    return stages
