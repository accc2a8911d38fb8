"""Trains and evaluates a sharded model with one call per batch, on one or more pipeline stages."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardformer.comm import collectives
from shardformer.consistency.rank_divergence import COMPARED_VALUES, KIND_SHIFT, sync_random_state_and_check_ranks_agree
from shardformer.errors import ConfigError, InputError, check_bool, check_callable, check_choice
from shardformer.gradient_accumulation import micro_batches as splitting
from shardformer.gradient_accumulation.label_tracing import LabelTransform
from shardformer.gradient_accumulation.micro_batch_loss import (
    LossWeight,
    MicroBatchLossScaler,
    make_unsupported_loss_error,
)
from shardformer.gradient_accumulation.micro_batches import iter_named_tensors
from shardformer.layout.sharding_metadata import (
    ParamEntry,
    ShardingMetadata,
    get_sharded_module_and_prefix,
    get_sharding_metadata,
)
from shardformer.mesh.parallel_context import Axis
from shardformer.mesh.rank_grid import AXES
from shardformer.pipeline import contrastive_losses as trials
from shardformer.pipeline.contrastive_losses import SampleIndependenceTrial, SampleIndependenceTrialResult
from shardformer.pipeline.p2p_communication import StageCommunicator
from shardformer.pipeline.runtime import (
    Batch,
    LastStageOutputs,
    LossFn,
    MissingStageOutput,
    PipelineRuntime,
    PipelineStepInputs,
    PipelineTimingTrace,
)
from shardformer.pipeline.schedules import (
    LOSS_AVERAGES,
    PipelineSchedule,
    make_forward_only_schedule,
    make_schedule,
    round_up_num_micro_batches,
)
from shardformer.pipeline.stage_forward import get_param_dtypes
from shardformer.pipeline.stage_manager import PipelineStageManager, PipelineStages, build_pipeline_stages
from shardformer.public_names import deprecate_renamed_arguments
from shardformer.random_state import RNGUseDetector, fork_rng, may_use_dropout
from shardformer.torch_compat import get_wrapped_module_attr_name, has_real_data, is_compiled_in_place, tolist_or_ones
from shardformer.transformers_compat import copy_batch_with_cache_disabled, get_accepted_forward_kwargs


def ensure_training_mode(model: nn.Module) -> nn.Module:
    """Put a model into training mode, unless some of its modules are already in training mode. Returns the model.

    ``from_pretrained`` returns models in eval mode. If some modules are in training mode, the user has chosen the modes
    (for example a frozen BatchNorm in eval mode), and only the root module's flag is set.
    """
    if any(module.training for module in model.modules()):
        model.training = True
    else:
        model.train()
    return model


def get_training_modes(model: nn.Module) -> dict[str, bool]:
    """Map the path of each module to the module's ``training`` flag."""
    return {path: module.training for path, module in model.named_modules()}


def set_training_modes(model: nn.Module, training_modes: Mapping[str, bool]) -> None:
    """Restore each module's ``training`` flag from the dict that ``get_training_modes`` returned."""
    modules = [(module, training_modes[path]) for path, module in model.named_modules() if path in training_modes]
    for module, mode in modules:  # parents first: ``train`` also sets their submodules
        if module.training != mode:
            module.train(mode)
    for module, mode in modules:  # for classes that override ``train``
        module.training = mode


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode inside the ``with`` block, and restore each module's mode afterward."""
    before = get_training_modes(model)
    try:
        model.eval()
        yield
    finally:
        set_training_modes(model, before)


RENAMED_ARGUMENTS = {"average_over_data": "average_loss_over", "takes_short_batches": "allow_short_batches"}
OPTIMIZER_VALUES = ("steps", "options")
STEPS, OPTIONS = 6, 7
"""Indices of the optimizer's step count and options among the values that stages compare."""


@deprecate_renamed_arguments(RENAMED_ARGUMENTS, {"average_loss_over": {False: "ranks", True: "tokens"}})
class Pipeline:
    """Splits batches into micro-batches, and runs them through the pipeline stages of a sharded model.

    Without pipeline parallelism, the same calls run on one stage and accumulate the gradients of the micro-batches.

    >>> context = launch_from_torch(pipe=2)                          # doctest: +SKIP
    >>> model = shard_model(model, context=context)                  # doctest: +SKIP
    >>> pipeline = Pipeline(model, micro_batches=8)                  # doctest: +SKIP
    >>> loss = pipeline.step(batch)                                  # doctest: +SKIP
    >>> optimizer.step(); optimizer.zero_grad()                      # doctest: +SKIP

    All ranks with the same data-parallel rank must pass the same batch. ``exchange`` stores the shapes of the
    activations, which a trace of a single rank needs.

    Args:
        model: the model that ``shard_model`` returned.
        micro_batches: number of micro-batches per batch.
        micro_batch_size: alternatively, the number of samples per micro-batch. The last one may be smaller.
        loss_fn: (output, micro-batch) -> loss, for a model that does not return a loss.
        loss_weight: (micro-batch) -> number of counted labels, for a loss that is not computed by torch's loss
            functions.
        average_loss_over: with "tokens", the batches of all data ranks form one batch in which each counted token (or
            sample) has the same weight. This costs two small all-reduces over data per step. With "ranks", the loss is
            the mean of the data ranks' losses, as in DDP.
        allow_short_batches: whether a batch with fewer samples than ``micro_batches``, such as the last one of an
            epoch, is split into one micro-batch per sample, if the schedule allows that number.
    """

    def __init__(
        self,
        model: nn.Module,
        micro_batches: int | None = None,
        *,
        micro_batch_size: int | None = None,
        loss_fn: LossFn | None = None,
        loss_weight: LossWeight | None = None,
        average_loss_over: str = "tokens",
        allow_short_batches: bool = False,
    ) -> None:
        for name, function in (("loss_fn", loss_fn), ("loss_weight", loss_weight)):
            signature = "(output, batch) -> loss" if name == "loss_fn" else "(batch) -> float"
            check_callable(name, function, f"{name} must be a function {signature}")
        check_choice("average_loss_over", average_loss_over, LOSS_AVERAGES)
        check_bool("allow_short_batches", allow_short_batches)
        state = get_sharding_metadata(model)
        self._sharded, _ = get_sharded_module_and_prefix(model)
        self._model = self._sharded if state.context.pipe.size > 1 else model
        self._state, self._context = state, state.context
        if micro_batches is None and micro_batch_size is None:
            micro_batches = 1 if state.stages is None else state.stages.manager.num_stages
        splitting.check_micro_batch_arguments(micro_batches, micro_batch_size)
        self._micro_batches, self._micro_batch_size = micro_batches, micro_batch_size
        self._loss_fn, self._loss_weight = loss_fn, loss_weight
        self._averages_tokens, self._allows_short_batches = average_loss_over == "tokens", allow_short_batches
        self._stages: PipelineStages = state.stages or _make_single_stage(self._sharded, state)
        self._label_transforms: dict[int, LabelTransform] = {}
        self._checked_modes: set[bool] = set()  # training flags for which the trial has run
        self._is_checkpointed = False  # gradient_checkpointing_enable() of transformers was called
        self.checkpointed: set[str] = set()  # paths of those layers
        self._must_check_factors = self._averages_tokens and self._context.data.size > 1
        self._stage_dtypes_hash: tuple[int, ...] = ()  # hash of each stage's parameter dtypes and requires_grad
        self._num_requires_grad_changes = 0  # how often a stage changed requires_grad of a shared parameter alone
        self._must_compare_batches = bool(state.request.extra.get("check_inputs", True))
        stages, manager = self._stages, self._stages.manager
        assert stages.stage_forward is not None
        self._manager, self._stage_forward = manager, stages.stage_forward
        self.exchange = StageCommunicator(manager.point_to_point, self._context.tensor, self._context.device)
        self._runtime = PipelineRuntime(self._model, stages, self.exchange)
        if micro_batches is not None:
            self._make_schedule(micro_batches)  # raises for an invalid number

    @property
    def stage_manager(self) -> PipelineStageManager:
        """The manager that assigns virtual pipeline stages to ranks."""
        return self._manager

    def step(self, batch: Batch | Sequence[Batch]) -> Tensor:
        """Run the forward and backward passes of a batch, and accumulate the gradients in ``.grad``.

        This does not call the optimizer.

        Communicates over pipe, per micro-batch and stage boundary, the activations in the forward pass and their
        gradients in the backward pass. Additionally, there are one small all-gather before and one broadcast after each
        step. In the first step, and after a conversion of the model, the stages also exchange the dtypes of their
        parameters.

        Args:
            batch: the inputs of the model's forward pass by name. A list of batches is treated as one large batch in
                which every counted token has the same weight.

        Returns:
            The loss of the full batch, on every rank.
        """
        reducers = [reducer for reducer in self._state.reducers if not reducer.is_paused]
        keeper = self._state.gradient_owner
        with self._state.no_sync(), keeper.scale_loss() if keeper is not None else nullcontext(1.0) as scale:
            loss = self._run_batch(batch, run_backward=True, loss_scale=scale).loss
        for reducer in reducers:
            reducer.start_reduction()
        for reducer in reducers:
            reducer.finish_reduction()
        assert loss is not None
        return loss

    def evaluate(self, batch: Batch | Sequence[Batch]) -> Tensor:
        """Compute the loss of a batch without gradients, and return it on every rank."""
        with torch.no_grad():
            loss = self._run_batch(batch, run_backward=False).loss
        assert loss is not None
        return loss

    def mean_loss(self, batches: Iterable[Batch]) -> Tensor:
        """Compute the mean loss of several batches without gradients, and return it on every rank.

        Batches are weighted by their number of counted labels, or by their number of samples if that is unknown. All
        ranks must pass the same number of batches.
        """
        total, weight = torch.zeros((), dtype=torch.float64), 0.0
        for batch in batches:
            with torch.no_grad():
                head = self._run_batch(batch, run_backward=False, count_labels=True)
            counted = head.counted if head.counted is not None else float(sum(head.sizes))
            assert head.loss is not None
            # the mean over zero labels is NaN
            total += head.loss.cpu().double() * counted if counted else 0.0
            weight += counted
        sums = torch.stack([total, torch.tensor(weight).double()]).to(self._context.device)
        sums = collectives.broadcast(sums, self._manager.axis, self._manager.last_stage)
        return sums[0] / sums[1]

    def forward(self, batch: Batch, *, gather: bool = False) -> Any:
        """Run the forward pass of a batch without gradients, and return the output on the last pipeline stage.

        Args:
            gather: whether to send the output to all stages.

        Returns:
            The output, merged from the micro-batches. Without ``gather``, the other stages return a placeholder that
            raises ConfigError on access.
        """
        with torch.no_grad():
            output = self._run_batch(batch, run_backward=False, return_output=True).output
        axis, last = self._manager.axis, self._manager.last_stage
        if gather:
            return collectives.broadcast_object(output, axis, last)
        return output if axis.rank == last else MissingStageOutput(axis.rank)

    @contextmanager
    def trace(self) -> Iterator[PipelineTimingTrace]:
        """Record the start and end of each forward and backward pass that this rank runs in the ``with`` block."""
        self._runtime.trace = PipelineTimingTrace()
        try:
            yield self._runtime.trace
        finally:
            self._runtime.trace = None

    def _run_batch(
        self,
        batch: Batch | Sequence[Batch],
        *,
        run_backward: bool,
        return_output: bool = False,
        loss_scale: float = 1.0,
        count_labels: bool = False,
    ) -> LastStageOutputs:
        self._runtime.check_no_earlier_step_failed()
        batches = _to_batch_list(batch)
        parts, sizes = self._split_batches_into_micro_batches(batches)
        inputs = self._select_model_inputs(parts)
        if self._state.check_call is not None:  # before any communication
            self._state.check_call(self._model, inputs[0])
        schedule = self._make_schedule(len(parts))
        if not run_backward:
            schedule = make_forward_only_schedule(schedule)
        self._check_not_compiled()
        draws = self._check_same_batch_and_detect_randomness(batches)
        runs_trial = not return_output and self._must_check_sample_independence(len(parts), run_backward=run_backward)
        with fork_rng(self._context.device):
            keys, seed = self._check_stages_agree(parts, run_backward, _draw_random_seed() if draws else 0)
            seeds = [(seed + 7919 * i) % 2**62 if seed else None for i in range(len(parts))]
            self._apply_gradient_checkpointing()
            weights = None
            if not return_output:
                over = (self._context.data, self._context.device) if self._averages_tokens else None
                weights = MicroBatchLossScaler(
                    parts, sizes, self._loss_weight, self._label_transforms, over, count_labels=count_labels
                )
            head = LastStageOutputs(parts, sizes, self._stage_forward, weights, self._loss_fn)
            head.checks_comparison = runs_trial and self._manager.num_stages > 1
            try:
                with self._stages.temporarily_override_forward(self._sharded):
                    self._runtime.run_step(PipelineStepInputs(schedule, inputs, keys, seeds, head, loss_scale))
            finally:
                head.stop_recording_loss_calls()
        if draws and self._may_use_random_numbers():
            _draw_random_seed()
        head.finalize_outputs()
        if not return_output:
            loss, *noted = self._broadcast_loss_and_statistics(head, runs_trial)
            if self._must_check_factors:
                _check_loss_factors_equal_over_ranks(*noted[:2])
                self._must_check_factors = False
            if runs_trial and has_real_data(loss):
                self._check_samples_are_independent(batches, len(parts), *map(bool, tolist_or_ones(noted[-1] > 0)))
            in_fp64 = any(p.dtype == torch.float64 for p in self._model.parameters())
            head.loss = loss if in_fp64 else loss.float()
        return head

    def _check_not_compiled(self) -> None:
        if self._manager.num_stages == 1:
            return
        for path, module in self._model.named_modules():
            # the model itself, and layers whose forward pass is overridden
            if is_compiled_in_place(module) and (not path or "forward" in vars(module)):
                name = path or type(self._model).__name__
                raise ConfigError(
                    f"Pipeline parallelism does not support compiled modules, but {name} is compiled.",
                    remedy="Set compile=True in ParallelConfig, or compile parts of layers, as in layer.mlp.compile().",
                )

    def _check_same_batch_and_detect_randomness(self, batches: Sequence[Batch]) -> bool:
        """Check that ranks that must share a batch received the same batch.

        Returns whether any of these ranks uses random numbers in training.
        """
        training, watch = self._model.training, self._state.monitor
        if watch is not None:
            watch.training = training
        elif not training:
            return False
        tensors = [x for batch in batches for _, x in iter_named_tensors(batch)]
        return (
            sync_random_state_and_check_ranks_agree(self._state, tensors, self._may_use_random_numbers()) and training
        )

    def _broadcast_loss_and_statistics(
        self, last_stage_outputs: LastStageOutputs, include_trial_flags: bool
    ) -> list[Tensor]:
        """Broadcast the batch loss and its statistics from the last pipeline stage to all stages.

        The statistics are the mean of the loss factors, the mean of their squares, and two flags: whether a trial is
        needed, and whether the loss compares samples.
        """
        loss = last_stage_outputs.loss if last_stage_outputs.loss is not None else torch.zeros((), dtype=torch.float64)
        rows = [loss]
        if self._must_check_factors:
            rows += [last_stage_outputs.factors.to(loss), last_stage_outputs.factors.to(loss).square()]
        if include_trial_flags:
            rows += [
                loss.new_tensor(float(self._needs_sample_independence_trial(last_stage_outputs))),
                loss.new_tensor(float(last_stage_outputs.compares_samples)),
            ]
        with self._runtime.add_stage_note_to_errors("at the end of a step"):
            loss = collectives.broadcast(
                torch.stack(rows).to(self._context.device), self._manager.axis, self._manager.last_stage
            )
        if self._averages_tokens:
            loss = collectives.all_reduce(loss, self._context.data, purpose="loss") / self._context.data.size
        found = list(loss.unbind())
        return [*found[:-2], loss[-2:]] if include_trial_flags else found

    def _must_check_sample_independence(self, num_micro_batches: int, *, run_backward: bool) -> bool:
        """Return whether this step must check that the loss is not contrastive.

        An evaluation whose loss is not averaged over data ranks is not checked, because data ranks may run it
        independently.
        """
        is_divided = num_micro_batches > 1 or self._context.data.size > 1
        return (
            is_divided and self._model.training not in self._checked_modes and (run_backward or self._averages_tokens)
        )

    def _requires_exact_loss(self, num_micro_batches: int) -> bool:
        return self._loss_weight is None and (num_micro_batches > 1 or self._averages_tokens)

    def _needs_sample_independence_trial(self, last_stage_outputs: LastStageOutputs) -> bool:
        """Return whether a trial run of the loss is needed to detect a contrastive loss.

        With several stages, the last stage checks ``loss_fn`` without a trial.
        """
        if self._manager.num_stages > 1:
            return False
        if not self._requires_exact_loss(len(last_stage_outputs.sizes)):
            return self._loss_fn is not None
        return not last_stage_outputs.averages_only_over_class_labels or (
            self._model.training and any(is_batch_norm(module) and module.training for module in self._model.modules())
        )

    def _check_samples_are_independent(
        self, batches: Sequence[Batch], num_micro_batches: int, needs_trial: bool, does_loss_compare_samples: bool
    ) -> None:
        """Raise ConfigError or warn if the loss is contrastive, but the batch is split over micro-batches or ranks.

        Communicates a few numbers per rank if a trial is needed.
        """
        size, mode = self._context.data.size, self._model.training
        divisions = [f"into {num_micro_batches} micro-batches"] * (num_micro_batches > 1) + [
            f"over {size} data-parallel ranks"
        ] * (size > 1)
        findings: Sequence[int] | None = [SampleIndependenceTrialResult.COMPARES] if does_loss_compare_samples else []
        is_exact, only_normalizes = self._requires_exact_loss(num_micro_batches), False
        if needs_trial:
            trial = trials.make_loss_trial(
                batches[0],
                *self._get_main_input_name_and_token_ids(),
                require_full_samples=self._state.parameter_owner is not None,
                weight_by_label_counts=self._loss_weight is None,
                reject_unknown_counts=is_exact,
            )
            findings, buffer_writers = self._run_loss_trial_on_all_ranks(trial)
            if mode and findings is None:  # disable dropout, but keep batch statistics
                with eval_mode(self._model):
                    for module in buffer_writers:
                        module.training = True
                    findings, _ = self._run_loss_trial_on_all_ranks(trial)
            if mode and findings is not None and SampleIndependenceTrialResult.COMPARES in findings:
                with eval_mode(self._model):
                    in_eval, _ = self._run_loss_trial_on_all_ranks(trial)
                only_normalizes = in_eval is not None and {*in_eval} == {SampleIndependenceTrialResult.INDEPENDENT}
        division, allows_gather = " and ".join(divisions), num_micro_batches == 1
        trials.check_loss_trial_results(findings or (), division, is_exact, allows_gather, only_normalizes)
        self._checked_modes.add(mode)

    def _run_loss_trial_on_all_ranks(
        self, loss_trial: SampleIndependenceTrial | None
    ) -> tuple[Sequence[int] | None, list[nn.Module]]:
        """Run the contrastive-loss trial on all ranks. Returns the outcomes and the modules that wrote to buffers.

        The outcomes are None if the loss is random.
        """
        world = self._context.flatten(*AXES) if self._context.world is not None else Axis("world")
        if not all(has_one for (has_one,) in collectives.all_gather_ints([loss_trial is not None], world)):
            return (), []
        assert loss_trial is not None
        found, draws = SampleIndependenceTrialResult.INCONCLUSIVE, RNGUseDetector(self._context.device)
        buffer_writers: list[nn.Module] = []
        try:
            with trials.restore_model_after_trial(self._model, self._context.device) as buffer_writers:
                draws.start()
                found = self._run_loss_trial(loss_trial)
                draws.stop()
        except Exception:  # no error, no finding
            found = SampleIndependenceTrialResult.INCONCLUSIVE
        return trials.merge_independence_trial_results(
            collectives.all_gather_ints([int(found), bool(draws.seen)], world)
        ), buffer_writers

    def _run_loss_trial(self, loss_trial: SampleIndependenceTrial) -> SampleIndependenceTrialResult:
        data_rank, compares, trace = self._context.data.rank, self._must_compare_batches, self._runtime.trace
        parts = loss_trial.get_trial_micro_batches(data_rank)
        inputs, head = (
            self._select_model_inputs(parts),
            trials.SampleIndependenceTrialOutputs(loss_trial, parts, self._stage_forward, self._loss_fn),
        )
        keys, _ = self._check_stages_agree(inputs, False, 0)
        self._runtime.trace = None
        try:
            with self._stages.temporarily_override_forward(self._sharded):
                schedule = make_forward_only_schedule(self._make_schedule(len(parts)))
                self._runtime.run_step(PipelineStepInputs(schedule, inputs, keys, [None] * len(parts), head))
        finally:
            head.stop_recording_loss_calls()
            self._runtime.trace, self._must_compare_batches = trace, compares
        dtypes = {p.dtype for p in self._model.parameters() if p.is_floating_point()}
        dtypes |= {autocast} if (autocast := _get_autocast_dtype(self._context.device)) is not None else set()
        eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        return (
            SampleIndependenceTrialResult.GATHERS
            if head.has_gathered
            else loss_trial.classify_losses(head.get_trial_losses(), data_rank=data_rank, eps=eps)
        )

    def _may_use_random_numbers(self) -> bool:
        """Return whether layers on this rank may draw random numbers in training, for example for dropout.

        Ranks of a stage may return different values if another thread draws numbers.
        ``_check_same_batch_and_detect_randomness`` combines them.
        """
        return self._stages.uses_random or self._stage_forward.draws.seen is not False

    def _get_main_input_name_and_token_ids(self) -> tuple[str | None, dict[str, int]]:
        config = getattr(self._model, "config", None)
        return getattr(self._model, "main_input_name", None), splitting.get_special_token_ids(config)

    def _split_batches_into_micro_batches(self, batches: Sequence[Batch]) -> tuple[list[dict[str, Any]], list[int]]:
        main, ids = self._get_main_input_name_and_token_ids()
        parts: list[dict[str, Any]] = []
        sizes: list[int] = []
        for batch in batches:
            count = self._micro_batches
            if count is not None and len(batches) > 1:
                count = -(-count // len(batches))
            size = splitting.get_batch_size(batch, main)
            if count is not None and self._allows_short_batches:
                count = min(count, max(size, 1))
            each = splitting.compute_micro_batch_sizes(size, count, self._micro_batch_size)
            if self._micro_batch_size is not None and len(batches) == 1:
                each = self._adjust_sizes_to_schedule(size, each)
            parts += splitting.split_batch(batch, each, main, ids)
            sizes += each
        return parts, sizes

    def _select_model_inputs(self, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
        names = get_accepted_forward_kwargs(self._model) if self._loss_fn is not None else None
        micro_batches = [
            {n: x for n, x in p.items() if n != splitting.TARGET_KEY and (names is None or n in names)}
            for p in micro_batches
        ]
        if any("position_ids" in part for part in micro_batches) and not self._is_checkpointed:
            self._is_checkpointed = any(
                getattr(m, "gradient_checkpointing", None) is True for m in self._model.modules()
            )
        return [
            copy_batch_with_cache_disabled(p, self._model, uses_gradient_checkpointing=self._is_checkpointed)
            for p in micro_batches
        ]

    def _adjust_sizes_to_schedule(self, batch_size: int, micro_batch_sizes: list[int]) -> list[int]:
        manager = self._manager
        count = round_up_num_micro_batches(
            manager.schedule, manager.num_stages, manager.num_model_chunks, len(micro_batch_sizes)
        )
        return (
            splitting.compute_micro_batch_sizes(batch_size, count, None)
            if count != len(micro_batch_sizes) and count <= batch_size
            else micro_batch_sizes
        )

    def _make_schedule(self, num_micro_batches: int) -> PipelineSchedule:
        manager = self._manager
        return make_schedule(manager.schedule, manager.num_stages, num_micro_batches, manager.num_model_chunks)

    def _check_stages_agree(
        self, micro_batches: Sequence[Batch], run_backward: bool, seed: int
    ) -> tuple[list[Hashable], int]:
        """Check that all pipeline stages received the same batch, and return a common random seed.

        Also returns a key for each micro-batch. Micro-batches with equal activation shapes have equal keys.

        Raises InputError on every stage if stages received batches of different shapes or made different numbers of
        steps. Unless ``check_inputs=False``, this also compares the contents of the batches in the first call, or in
        every call if the consistency monitor is active.
        """
        kinds = tuple((p.requires_grad, p.dtype) for p in self._model.parameters())
        autocast = _get_autocast_dtype(self._context.device)
        shapes = [_get_batch_shapes_and_dtypes(part) for part in micro_batches]
        axis, watch, training = self._manager.axis, self._state.monitor, self._model.training
        if axis.size == 1:
            return [(s, (run_backward, training, autocast, kinds)) for s in shapes], seed
        tensors = (
            [t for part in micro_batches for _, t in iter_named_tensors(part)] if self._must_compare_batches else []
        )
        seen = (
            watch.hash_forward_inputs(tensors)
            if watch is not None
            else _hash_repr([collectives.compute_numel_and_hash(t) for t in tensors])
        )
        self._must_compare_batches = self._must_compare_batches and watch is not None
        is_frozen = not any(p.requires_grad and not p.is_meta for p in self._model.parameters())
        steps = 0 if watch is None else watch.count_batches_with_optimizer_step(is_frozen)
        options = 0 if watch is None else watch.hash_optimizer_options()
        modes = run_backward, training, _hash_repr(autocast)
        local = (_hash_repr(shapes), len(micro_batches), *modes, seen, steps, options, _hash_repr(kinds), seed)
        groups = sorted({*self._stages.shared.values()})
        shared = [(group, self._find_shared_entries(group)) for group in groups]
        hashes = [0 if watch is None else watch.hash_shared_weights(*each) for each in shared]
        with self._runtime.add_stage_note_to_errors("before a step"):
            gathered = collectives.all_gather_ints((*local, *hashes), axis)
            rows = self._mask_allowed_differences([row[: len(local)] for row in gathered])
        if watch is not None:
            watch.rounds_of_stages = max(row[STEPS] for row in rows)
        if any(row[:-2] != rows[0][:-2] for row in rows):
            raise _make_stage_mismatch_error(rows, axis)
        stages = tuple(row[-2] for row in rows)
        self._update_after_casts_and_freezes(stages)
        for number, ranks in enumerate(groups, len(local)):
            if len({gathered[rank][number] for rank in ranks}) > 1:
                self._raise_shared_weights_differ(ranks)
        key = (*modes, stages, self._num_requires_grad_changes)
        return [(s, key) for s in shapes], next((row[-1] for row in rows if row[-1]), 0)

    def _find_shared_entries(self, stages: tuple[int, ...]) -> list[ParamEntry]:
        """Return the parameters that this rank shares with exactly these pipeline stages, in the same order on each."""
        found = [entry for entry in self._state.entries if entry.reduction.stages == stages]
        return sorted(found, key=lambda entry: self._stages.get_first_name(entry.name))

    def _raise_shared_weights_differ(self, stages: tuple[int, ...]) -> NoReturn:
        """Raise InputError on every stage for a shared parameter whose copies differ."""
        entries = self._find_shared_entries(stages)
        hashes = {
            self._stages.get_first_name(e.name): (e.name, collectives.compute_tensor_hash(e.param)) for e in entries
        }
        everywhere = collectives.all_gather_objects(
            {first: (name, int(number)) for first, (name, number) in hashes.items()}, self._manager.axis
        )
        copies = {rank: everywhere[rank] for rank in stages}
        first = next(n for n in copies[stages[0]] if len({copy[n][1] for copy in copies.values()}) > 1)
        names = ", ".join(f"{copy[first][0]} on stage {rank}" for rank, copy in copies.items())
        raise InputError(
            f"The copies of a parameter that several pipeline stages share have different values: {names}.",
            rule="A step must update all copies of a shared parameter, such as a tied embedding, in the same way.",
            remedy="If your code selects parameters by name to change weights, gradients or optimizer options, select "
            "the parameter by its name on each stage.",
        )

    def _update_after_casts_and_freezes(self, param_hash_by_stage: tuple[int, ...]) -> None:
        """Update placeholders and shared parameters after a stage changed ``dtype`` or ``requires_grad``.

        If one stage freezes or unfreezes a shared parameter, so do the others. Raises InputError on all stages if two
        stages store the same parameter in different dtypes.
        """
        if param_hash_by_stage == self._stage_dtypes_hash:
            return
        shared = {self._stages.get_first_name(e.name): e.param for e in self._state.entries if e.reduction.stages}
        flags = {name: param.requires_grad for name, param in shared.items()}
        gathered = collectives.all_gather_objects((get_param_dtypes(self._sharded), flags), self._manager.axis)
        agreed = self._stages.shared_requires_grad
        for name, was_trainable in list(agreed.items()):
            if {not was_trainable} & {flags[name] for _, flags in gathered if name in flags}:  # a stage has changed it
                agreed[name] = not was_trainable
                self._num_requires_grad_changes += 1
        for name in agreed.keys() & shared.keys():
            shared[name].requires_grad_(agreed[name])
        everywhere = [dtypes for dtypes, _ in gathered]
        known: dict[str, tuple[int, torch.dtype]] = {}
        for stage, dtypes in enumerate(everywhere):
            for name, dtype in dtypes.items():
                first = self._stages.get_first_name(name)
                other, before = known.setdefault(first, (stage, dtype))
                if before != dtype:
                    raise InputError(
                        f"The parameter {first} has dtype {before} on pipeline stage {other}, but {dtype} on pipeline "
                        f"stage {stage}.",
                        remedy="Call model.to(dtype) on all ranks, or cast the parameter on both stages.",
                    )
        self._stages.placeholders.convert_dtypes(self._sharded, {n: d for each in everywhere for n, d in each.items()})
        self._stage_dtypes_hash = param_hash_by_stage

    def _mask_allowed_differences(self, values_by_stage: Sequence[Sequence[int]]) -> list[list[int]]:
        """Overwrite values that are allowed to differ between pipeline stages, before all values are compared."""
        rows = [list(row) for row in values_by_stage]
        are_known = all(row[OPTIONS] for row in rows)
        has_one_kind = len({row[OPTIONS] >> KIND_SHIFT for row in rows}) == 1
        trained = [row[STEPS] for row in rows if row[STEPS]]
        for row in rows:
            if not (are_known and has_one_kind):
                row[OPTIONS] = 0
            if trained and (not row[STEPS] or (are_known and not has_one_kind)):
                row[STEPS] = trained[0]
        return rows

    def _apply_gradient_checkpointing(self) -> None:
        if self._manager.num_stages > 1:
            self._stage_forward.move_overrides_to_wrappers(self._sharded)
        for path in dict.fromkeys(self._stages.chain.called_layer_paths):
            layer: Any = self._sharded.get_submodule(path)
            while (name := get_wrapped_module_attr_name(layer)) is not None:
                layer = layer._modules[name]
            if getattr(layer, "gradient_checkpointing", False) is True:
                layer.gradient_checkpointing, self._is_checkpointed = False, True
                self._stage_forward.enable_layer_checkpointing(path)
                self.checkpointed.add(path)


def _to_batch_list(batch: Any) -> list[Batch]:
    batches = list(batch) if isinstance(batch, list | tuple) else [batch]
    if batches and all(isinstance(one, Mapping) for one in batches):
        return batches
    shown = "an empty list" if batch == [] else f"a {type(batch).__name__}"
    raise InputError(
        f"The batch must be a dict of the model's inputs or a list of dicts, but got {shown}.",
        remedy="Pass a dict, such as step({'input_ids': ids, 'labels': labels}).",
    )


def _get_batch_shapes_and_dtypes(micro_batch: Batch) -> Hashable:
    return tuple((name, tuple(t.shape), str(t.dtype)) for name, t in iter_named_tensors(micro_batch))


def _hash_repr(python_object: Any) -> int:
    """Hash an object's ``repr``, with the same result in every process."""
    return int.from_bytes(hashlib.sha256(repr(python_object).encode()).digest()[:7], "big")


def _get_autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _draw_random_seed() -> int:
    return 1 + int(tolist_or_ones(torch.randint(2**62 - 1, (), device="cpu")))


def _make_stage_mismatch_error(values_by_stage: Sequence[Sequence[int]], axis: Axis) -> InputError:
    other = next(stage for stage, row in enumerate(values_by_stage) if row[:-2] != values_by_stage[0][:-2])
    what = ("batch shapes", "numbers of micro-batches", "calls", "training modes", "autocast settings", "batches")
    names = (*what, *OPTIMIZER_VALUES)
    value, first, second = next(
        (n, a, b) for n, a, b in zip(names, values_by_stage[0], values_by_stage[other], strict=False) if a != b
    )
    if value in OPTIMIZER_VALUES:
        ranks, compared = (axis.ranks[0], axis.ranks[other]), COMPARED_VALUES[value]
        numbers = f" ({first} and {second})" if value == "steps" else ""
        return InputError(
            f"Ranks {ranks[0]} and {ranks[1]} (stages 0 and {other} of {axis.size}) have diverged: they have different "
            f"{compared.value_name}{numbers}.",
            rule=compared.rule,
            remedy=compared.remedy,
        )
    return InputError(
        f"Pipeline stages 0 and {other} of {axis.size} received different {value}.",
        remedy="Make the same calls with the same batch on all stages of a data rank. Select the batch by "
        "context.data.rank, not by the world rank.",
    )


def is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))


def _check_loss_factors_equal_over_ranks(mean_factor: Tensor, mean_square_factor: Tensor) -> None:
    if has_real_data(mean_factor) and not tolist_or_ones(
        mean_square_factor - mean_factor.square() <= 1e-11 * mean_square_factor
    ):
        raise make_unsupported_loss_error(
            "The factor by which the model multiplies its mean loss differs between data-parallel ranks."
        )


def _make_single_stage(model: nn.Module, metadata: ShardingMetadata) -> PipelineStages:
    manager = PipelineStageManager(metadata.context, "1f1b")
    metadata.stages = stages = build_pipeline_stages(model, metadata.request.policy, manager)
    stages.uses_random = may_use_dropout(model)
    stages.install_forward_overrides(model, metadata.activations, metadata.context)
    return stages
