"""The optimizer that ``shard_optimizer`` returns, which updates only this rank's slices of the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.comm.collective_call import run_and_compare_across_ranks
from shardformer.errors import ConfigError
from shardformer.gradients.buckets import (
    AllReduceToShards,
    GradientBucket,
    GradientSlot,
    ReduceScatterToShards,
    assign_gradient_owners,
)
from shardformer.gradients.clipping import parse_norm_type
from shardformer.gradients.reducer import BUCKET_BYTES, GradientReducer
from shardformer.layout.sharding_metadata import METADATA_ATTRIBUTE, ShardingMetadata
from shardformer.mesh.parallel_context import Axis
from shardformer.offload.disk import DiskShard, FileOffloadManager
from shardformer.offload.host import HostOffloadManager
from shardformer.tensor_parallel.parallel_module import enable_fp32_inputs_of_16bit_layers
from shardformer.torch_compat import call_with_state_dict_hooks, is_true_or_unknown, load_state_dict_with_hooks
from shardformer.zero.config import ZeroOptions
from shardformer.zero.elementwise_trial import estimate_optimizer_state_bytes, requires_full_matrices
from shardformer.zero.flat_shards import FlatParamShard, ParamSlice, make_unsupported_assigned_grad_error
from shardformer.zero.memory_estimate import (
    DevicePlacementManager,
    MemoryEstimate,
    format_memory_report,
    measure_memory,
)
from shardformer.zero.mixed_precision import LossScale
from shardformer.zero.optimizer_state_view import (
    OptimizerStateView,
    PatchedZeroGrad,
    attach_zero_optimizer,
    get_optimizer_state_mesh_coords,
    load_state_dict_in_place,
    rollback_optimizers_on_error,
)
from shardformer.zero.optimizer_step import (
    OverlappedParamAllGather,
    ShardedParamUpdater,
    compute_sharded_grad_norm,
    make_nonfinite_grad_error,
)
from shardformer.zero.stage3_gather_schedule import ParamGatherScheduler, shard_for_zero_stage3
from shardformer.zero.stage3_parameters import Stage3ParamGroup


def check_params_unmodified(model: nn.Module, metadata: ShardingMetadata, shards: Sequence[FlatParamShard]) -> None:
    """Raise ConfigError if a parameter was replaced or moved, or ``.grad`` was set, after ``shard_optimizer``."""
    here = {id(p) for p in model.parameters()}
    for entry in metadata.entries:
        if id(entry.param) not in here:
            raise ConfigError(
                f"The parameter {entry.name} was replaced by another parameter after shard_optimizer was called.",
                remedy="Replace the parameter before you call shard_optimizer.",
            )
        if entry.param.grad is not None:
            raise make_unsupported_assigned_grad_error(entry.name)
    for shard in shards:
        if moved := shard.find_reallocated_param():
            raise ConfigError(
                f"The memory of parameter {moved} was replaced after shard_optimizer was called, for example by "
                "p.data = ... or model.to(...).",
                remedy="Use p.copy_(values) under torch.no_grad(), or move the model before you call shard_optimizer.",
            )


class ZeroOptimizer(Optimizer):
    """A torch optimizer whose states are sharded over ranks, as returned by ``shard_optimizer``.

    Attributes:
        grad_norm: Gradient norm of the last step before clipping, or None if it was not computed.
        skipped: Number of steps that were skipped because of non-finite gradients.
        inner: The optimizers that were passed to ``shard_optimizer``.
        is_stepping: Whether the inner optimizers are in a step.
        shards: This rank's shards of all buckets. The inner optimizers step slices of them.
        model_params: The model's parameters in each group of the inner optimizers, in their original order.
    """

    _is_initialized = _is_open = False
    is_stepping = False

    def __init__(
        self, model: nn.Module, metadata: ShardingMetadata, optimizers: Sequence[Optimizer], zero_options: ZeroOptions
    ) -> None:
        self.inner, self._model, self.table, self._settings = list(optimizers), model, metadata, zero_options
        self._stage, self._precision = zero_options.stage, zero_options.precision
        device, offload = metadata.context.device, zero_options.offload
        where = FileOffloadManager if offload.folder is not None else HostOffloadManager
        self._host = where(offload, device, overlap=zero_options.overlap) if offload.to is not None else None
        self.grad_norm: Tensor | None = None
        self.skipped = 0
        self._scheduler: ParamGatherScheduler | None = None
        self._is_scaled = False
        kind = AllReduceToShards if self._stage == 0 else ReduceScatterToShards
        self._end = kind(
            self._accumulate_reduced_grads,
            self._check_loss_is_scaled,
            self._apply_user_grad_edit,
            self._set_param_grads,
        )
        full_params = {
            id(p) for o in optimizers if requires_full_matrices(o) for group in o.param_groups for p in group["params"]
        }
        self.shards = self._create_param_shards(full_params)
        if self._precision.param_dtype is not None:  # after the master weights were copied from the original values
            for param in (entry.param for entry in metadata.entries if entry.param.is_floating_point()):
                if param.dtype != self._precision.param_dtype:
                    param.data = param.data.to(self._precision.param_dtype)
            enable_fp32_inputs_of_16bit_layers(model)
        self.model_params = [list(group["params"]) for optimizer in self.inner for group in optimizer.param_groups]
        self._by_bucket = {id(shard.gradient_slots): shard for shard in self.shards}
        self._places = {id(g): (shard, n) for shard in self.shards for n, g in enumerate(shard.gradient_slots)}
        self._replace_params_with_slices()
        last_first = self.shards if self._scheduler is not None else self.shards[::-1]
        offloaded = [shard for shard in last_first if shard.host is not None]
        unsharded_cache = self._scheduler.unsharded_cache if self._scheduler is not None else None
        self._placement = DevicePlacementManager(zero_options, offloaded, unsharded_cache, self.inner, metadata.context)
        seeds = {id(entry): number for number, entry in enumerate(metadata.entries)}
        for shard in self.shards:
            shard.enable_stochastic_rounding(seeds)
        self._update = ShardedParamUpdater(self.inner, self.shards, self._host, metadata.context)
        if isinstance(self._host, FileOffloadManager):
            self._move_states_to_files(self._host)
        known = [getattr(optimizer, "defaults", {}) for optimizer in self.inner]
        defaults = {name: value for name, value in known[0].items() if all(name in each for each in known)}
        super().__init__([group for optimizer in self.inner for group in optimizer.param_groups], defaults)
        self._is_initialized = True
        self._state = OptimizerStateView(self.inner, self.shards)
        metadata.gradient_owner = self
        self.__dict__[METADATA_ATTRIBUTE] = metadata
        model.__dict__["zero_grad"] = PatchedZeroGrad(model, self)
        for optimizer in self.inner:
            attach_zero_optimizer(optimizer, self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizers, with this rank's slices of the parameters."""
        if self._is_initialized:
            self._groups[:] = [group for optimizer in self.inner for group in optimizer.param_groups]
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._is_initialized:
            raise ConfigError(
                "optimizer.param_groups cannot be assigned after shard_optimizer was called.",
                remedy="Change the existing groups in place, or change your optimizer before you call shard_optimizer.",
            )
        self._groups = groups

    @property  # type: ignore[override]  # torch has an attribute
    def state(self) -> MutableMapping[Tensor, dict[str, Any]]:
        """The states of the wrapped optimizers. If they are in files, use this property inside ``readable_state()``."""
        if isinstance(self._host, FileOffloadManager) and not self._is_open:
            raise ConfigError(
                f"optimizer.state cannot be accessed directly with offload='nvme:{self._host.disk.folder}'.",
                remedy="Read optimizer.state inside `with optimizer.readable_state():` on all ranks.",
            )
        return self._state

    @state.setter
    def state(self, state: MutableMapping[Tensor, dict[str, Any]]) -> None:
        if self._is_initialized and state:
            raise ConfigError(
                "optimizer.state cannot be assigned after shard_optimizer was called.",
                remedy="Use optimizer.load_state_dict to load a state.",
            )
        if self._is_initialized:
            self.state.clear()

    def _create_param_shards(self, full_matrix_param_ids: Collection[int]) -> list[FlatParamShard]:
        """Create a shard for each gradient bucket, and for the parameters whose gradients are not reduced."""
        table = self.table
        held = {id(gradient.param) for reducer in self._get_grad_reducers() for gradient in reducer.gradients}
        if alone := [GradientSlot(e, Axis("none"), table.coords) for e in table.entries if id(e.param) not in held]:
            table.reducers.append(GradientReducer(alone))
        assign_gradient_owners(
            [g for reducer in self._get_grad_reducers() for g in reducer.gradients],
            full_matrix_param_ids,
            table.context,
        )
        shards: list[FlatParamShard] = []
        if self._stage == 3:
            self._scheduler, shards = shard_for_zero_stage3(self._model, table, self._settings, self._end, self._host)
        axis = Axis("none") if self._stage == 0 else None
        dtype, overlap = self._precision.reduce_dtype, self._settings.overlap
        size: Any = self._settings.bucket_bytes or self.table.request.extra.get("bucket_bytes", BUCKET_BYTES)
        found = [
            bucket
            for r in self._get_grad_reducers()
            for bucket in r.switch_to_sharded_reduction(self._end, dtype, size, overlap)
        ]
        narrow, rounding = self._precision.param_dtype, self._precision.weight_rounding_mode
        return shards + [
            FlatParamShard(each, narrow, axis=axis, host_manager=self._host, rounding_mode=rounding) for each in found
        ]

    def _get_grad_reducers(self) -> list[GradientReducer]:
        return [reducer for reducer in self.table.reducers if isinstance(reducer, GradientReducer)]

    def _move_states_to_files(self, file_manager: FileOffloadManager) -> None:
        """Move this rank's master weights and optimizer states to a file.

        Raises:
            ConfigError: The directory does not exist or its disk is full on a rank. Raised on all ranks.
        """
        held = {id(p): (o, group) for o in self.inner for group in o.param_groups for p in group["params"]}

        def get_param_state(param: Tensor) -> dict[str, Any]:
            return held[id(param)][0].state[param] if id(param) in held else {}

        parts = [(shard, shard.host) for shard in self.shards if isinstance(shard.host, DiskShard)]
        for shard, part in parts:
            expected = sum(
                estimate_optimizer_state_bytes(*held[id(p.value)], p.value) for p in shard.slices if id(p.value) in held
            )
            part.assign_param_slices_and_write(
                [(p.value, p.shard_range) for p in shard.slices], get_param_state, round(expected)
            )
        if failure := file_manager.commit_or_roll_back([part for _, part in parts], self.table.context):
            raise ConfigError(
                f"Optimizer states cannot be offloaded to files in {file_manager.disk.folder!r}: {failure}.",
                remedy="Use a directory with enough free space. shardformer.estimate_memory returns the required size.",
            )

    def _accumulate_reduced_grads(self, bucket: GradientBucket, reduced_grads: Tensor, grad_counts: Tensor) -> None:
        self._by_bucket[id(bucket.gradients)].accumulate_reduced_grads(
            reduced_grads, grad_counts, self._precision.current_loss_scale
        )

    def _apply_user_grad_edit(self, grad_slot: GradientSlot) -> None:
        shard, number = self._places[id(grad_slot)]
        shard.apply_user_grad_edit(number)

    def _set_param_grads(self) -> None:
        for shard in self.shards:
            shard.set_param_grads()

    def _replace_params_with_slices(self) -> None:
        """Make the wrapped optimizers update this rank's slices of the parameters.

        Communicates one all-reduce for each state tensor of which several ranks store slices.
        """
        slices: dict[int, list[ParamSlice]] = {}
        for shard in self.shards:
            for number, gradient in enumerate(shard.gradient_slots):
                param: Any = gradient.param
                found = [p for p in shard.slices if p.param_index == number]
                slices.setdefault(id(param), []).extend(found)
                for optimizer in self.inner:
                    if state := optimizer.state.pop(param, None):
                        cut = shard.shard_param_optimizer_state(number, state)
                        optimizer.state.update({p.value: cut for p in found})
        for optimizer in self.inner:
            for group in optimizer.param_groups:
                group["params"] = [param_slice.value for p in group["params"] for param_slice in slices.get(id(p), ())]

    # --- one step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip the gradients, update this rank's shards, and all-gather the updated parameters.

        Communicates one all-gather of the parameters that received a gradient, and one all-reduce of four numbers over
        each axis.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_pending_grads()
        problem = self._apply_grad_edits()
        for shard in self.shards if problem is None else ():
            shard.copy_modified_params_to_shard()
        if self._check_and_clip_grads(problem):
            if self._scheduler is not None:
                self._scheduler.free_gathered_params()
            with self._set_flag_temporarily("is_stepping"):
                self._update.update_and_all_gather_params()
            self._placement.fill_free_device_memory()
        self._set_param_grads()
        return loss

    def _apply_grad_edits(self) -> Exception | None:
        """Copy the user's changes to ``p.grad`` into the shards. Return an error that all ranks must raise, or None."""
        try:
            for shard in self.shards:
                for number in range(len(shard.gradient_slots)):
                    shard.apply_user_grad_edit(number)
            check_params_unmodified(self._model, self.table, self.shards)
        except Exception as error:  # other ranks wait for this one, so every error must reach them
            return error
        return None

    def _check_and_clip_grads(self, local_error: Exception | None) -> bool:
        """Compute the gradient norm, clip the gradients, and return whether the optimizer should step.

        Raises:
            InputError: A gradient is not finite, and ``on_nonfinite`` is "raise".
            Exception: ``local_error`` is raised on this rank, and a ConfigError on other ranks.
        """
        rules, scale = self._settings, self._precision.loss_scale
        is_scaled = self._precision.parameters == "fp16"
        if rules.max_grad_norm is None and rules.on_nonfinite == "ignore" and not is_scaled:
            self._get_grad_norm(local_error, ())  # raises on all ranks if one has an error
            return True
        self.grad_norm = self._get_grad_norm(local_error)
        is_finite = (rules.on_nonfinite == "ignore" and not is_scaled) or is_true_or_unknown(
            torch.isfinite(self.grad_norm)
        )
        if is_scaled:
            scale.update(is_finite)
        elif not is_finite and rules.on_nonfinite == "raise":
            raise make_nonfinite_grad_error(self.shards, self.table, self.grad_norm)
        self.skipped += not is_finite
        if is_finite and rules.max_grad_norm is not None:
            self._clip_grads(rules.max_grad_norm)
        return is_finite

    def _get_grad_norm(
        self,
        error: Exception | None,
        param_ids: Collection[int] | None = None,
        norm_type: float = 2.0,
        within_pipeline_stage: bool = False,
    ) -> Tensor:
        arguments = self.shards, self.table, self._stage, error, param_ids, norm_type, within_pipeline_stage
        return compute_sharded_grad_norm(*arguments)

    def reduce_pending_grads(self) -> None:
        """Reduce the gradients that were accumulated inside ``no_sync``. Must be called on all ranks."""
        for reducer in self.table.reducers:
            if reducer.was_paused:
                reducer.start_reduction()
                reducer.finish_reduction()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the gradients so that their norm is at most ``max_norm``, and return the norm before clipping.

        The norm is identical on all ranks. Communicates one all-reduce of four numbers over each axis.

        Args:
            norm_type: As in ``torch.nn.utils.clip_grad_norm_``, such as 2.0 or ``inf``.
            error_if_nonfinite: Leave the gradients unchanged if the norm is not finite. The caller raises an error.
        """
        self.grad_norm = self.compute_grad_norm(None, norm_type)
        if not error_if_nonfinite or is_true_or_unknown(torch.isfinite(self.grad_norm)):
            self._clip_grads(max_norm)
        return self.grad_norm

    def compute_grad_norm(self, params: Iterable[Tensor] | None, norm_type: float = 2.0) -> Tensor:
        """Compute the norm of the gradients of ``params``, or of all parameters if None.

        All ranks must call this method, and get the same norm. Communicates one all-reduce of four numbers per axis,
        and another one of the maximum for ``norm_type=inf``.
        """
        norm_order = parse_norm_type(norm_type)
        self.reduce_pending_grads()
        problem = self._apply_grad_edits()
        self._set_param_grads()
        ids = None if params is None else {id(p) for p in params}
        return self._get_grad_norm(problem, ids, norm_type=norm_order)

    def _clip_grads(self, max_norm: float) -> None:
        assert self.grad_norm is not None
        if math.isinf(max_norm):
            return  # inf / inf would make all gradients NaN
        scale = (max_norm / (self.grad_norm + 1e-6)).clamp(max=1.0)
        for shard in self.shards:
            if shard.reduced_grads is not None:
                shard.reduced_grads.mul_(scale.to(shard.reduced_grads))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including those that were accumulated within ``no_sync``.

        Args:
            set_to_none: False sets gradients to zero, so that the next step still applies momentum and weight decay.
        """
        for shard in self.shards:
            shard.clear_grads() if set_to_none else shard.zero_grads()
        for p in self._model.parameters():
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them over ranks. Use it for all but the last backward pass of a step.

        Stages 2 and 3 ignore this context manager and always reduce gradients.
        """
        with self.table.no_sync() if self._stage < 2 else nullcontext():
            yield

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a loss. With fp16 parameters, the loss is scaled first."""
        with self.scale_loss() as scale:
            (loss if scale == 1 else loss.float() * scale).backward()

    @contextmanager
    def scale_loss(self) -> Iterator[float]:
        """Yield the loss scale, for a loss that you scale yourself. Call ``loss.backward()`` inside this context."""
        self._is_scaled = True
        try:
            yield self._precision.current_loss_scale
        finally:
            self._is_scaled = False

    def _check_loss_is_scaled(self, grad_slot: GradientSlot) -> None:
        if self._precision.parameters == "fp16" and not self._is_scaled:
            raise ConfigError(
                "Training in fp16 requires a scaled loss, but loss.backward() computed the gradient of "
                f"{grad_slot.entry.name} from an unscaled loss.",
                remedy="Call optimizer.backward(loss) instead of loss.backward(), without a GradScaler.",
            )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``step`` unscales gradients itself. ``torch.amp.GradScaler`` reads this attribute first.

        Raises:
            ConfigError: With ``precision="fp16"``, this optimizer already scales the loss.
        """
        if self._precision.parameters == "fp16":
            raise ConfigError(
                "A GradScaler was used with an optimizer from shard_optimizer(precision='fp16'), which already scales "
                "the loss.",
                remedy="Remove the GradScaler, and call optimizer.backward(loss) and optimizer.step().",
            )
        return False

    def finish_reduction_and_set_grads(self, *, within_pipeline_stage: bool = False) -> None:
        """Reduce pending gradients, apply the user's changes to ``p.grad``, and set ``.grad`` to the reduced gradients.

        All ranks must call this method. If one has an error, all raise. Communicates a few numbers over each axis.
        """
        self.reduce_pending_grads()
        self._get_grad_norm(self._apply_grad_edits(), (), within_pipeline_stage=within_pipeline_stage)
        self._set_param_grads()

    def full_gradient(self, name: str) -> Tensor | None:
        """Return the reduced gradient of a parameter, or None if the parameter has no gradient.

        The gradient has the shape of the parameter on this rank. All ranks of the parameter's pipeline stage must call
        this method. Communicates one all-gather of a bucket and a few numbers.
        """
        self.finish_reduction_and_set_grads(within_pipeline_stage=True)
        for shard in self.shards:
            for number, gradient in enumerate(shard.gradient_slots):
                if gradient.entry.name == name:
                    return shard.all_gather_grad(number)
        raise ConfigError(
            f"The model has no trainable parameter {name!r}.",
            remedy="Pass the name of a parameter from model.named_parameters() that requires a gradient.",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of the optimizer states and master weights. Each rank must save its own."""
        return call_with_state_dict_hooks(self, self._build_local_state_dict)

    def _build_local_state_dict(self) -> dict[str, Any]:
        context = self.table.context
        with self.readable_state():
            states = [optimizer.state_dict() for optimizer in self.inner]
            return {
                "place": {"sizes": context.sizes, "coords": context.coords},
                # torch returns the dictionaries that the optimizer continues to use
                "optimizers": [{**d, "state": {k: dict(v) for k, v in d["state"].items()}} for d in states],
                "loss_scale": asdict(self._precision.loss_scale),
                "rounds": self.rounding_counts,
                "masters": [p.value.detach().clone() for shard in self.shards for p in shard.slices],
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer state that the same rank saved with ``state_dict`` under the same layout.

        All ranks must call this method.

        Raises:
            ConfigError: A different rank saved the state. Raised on all ranks before anything is changed.
        """
        load_state_dict_with_hooks(self, state_dict, self._load_state_dict_on_all_ranks)

    def _load_state_dict_on_all_ranks(self, state_dict: dict[str, Any]) -> None:
        context, doing = self.table.context, "load this optimizer's state"
        run_and_compare_across_ranks(
            context, lambda: self._check_state_dict_fits_this_rank(state_dict), action_description=doing
        )

        def load_inner_optimizers() -> None:
            for optimizer, state in zip(self.inner, state_dict["optimizers"], strict=True):
                load_state_dict_in_place(optimizer, state)

        slices = [p for shard in self.shards for p in shard.slices]
        with self.writable_state():
            with rollback_optimizers_on_error(self.inner):
                run_and_compare_across_ranks(context, load_inner_optimizers, action_description=doing)
            for param_slice, master in zip(slices, state_dict["masters"], strict=True):
                param_slice.value.copy_(master)
        for name, value in state_dict["loss_scale"].items():
            setattr(self._precision.loss_scale, name, value)
        self.rounding_counts = state_dict["rounds"]

    def _check_state_dict_fits_this_rank(self, state_dict: dict[str, Any]) -> None:
        context = self.table.context
        known = ("place", "masters", "optimizers", "loss_scale", "rounds")
        is_dict = isinstance(state_dict, dict)
        if key := next((name for name in known if not is_dict or name not in state_dict), None):
            raise ConfigError(
                f"The state passed to load_state_dict has no {key!r}, so it was not saved by a ZeRO optimizer.",
                remedy="Pass the result of optimizer.state_dict(). Load the state of a torch optimizer before you call "
                "shard_optimizer.",
            )
        saved, axes = state_dict["place"], get_optimizer_state_mesh_coords(self.inner[0])
        try:
            is_here = saved["sizes"] == context.sizes and all(saved["coords"][n] == axes[n][1] for n in axes)
            fits = is_here and _get_state_dict_signature(state_dict) == self._state_dict_signature
        except (AttributeError, KeyError, TypeError):  # not a state of a ZeroOptimizer
            fits = False
        if not fits:
            place = {"sizes": context.sizes, "coords": context.coords}
            raise ConfigError(
                f"The optimizer state does not match this rank: it was saved at {saved}, but this rank is at {place}.",
                remedy="Load the state that this rank saved. To change the layout, use save_checkpoint.",
            )

    @property
    def _state_dict_signature(self) -> tuple[Any, ...]:
        shapes = [tuple(p.value.shape) for shard in self.shards for p in shard.slices]
        groups = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in self.inner]
        return shapes, groups, sorted(vars(self._precision.loss_scale)), len(self.rounding_counts)

    @contextmanager
    def readable_state(self) -> Iterator[None]:
        """Make the master weights and optimizer states readable inside this context, between two optimizer steps."""
        for shard in self.shards:
            shard.master_weight_store.load()
        try:
            with self._set_flag_temporarily("_is_open"):
                yield
        finally:
            for shard in self.shards:
                shard.master_weight_store.release(keep_memory=True)

    @contextmanager
    def writable_state(self) -> Iterator[None]:
        """Allow changes to the master weights and optimizer states inside this context, between two optimizer steps.

        All ranks must enter it together. On exit, the parameters of all ranks get the new values, which communicates
        one all-gather.
        """
        with torch.no_grad(), ExitStack() as stack:
            for shard in self.shards:
                stack.enter_context(shard.allow_master_weight_edits())
            with self._set_flag_temporarily("_is_open"):
                yield
            for shard in self.shards:
                if (
                    shard.rounded is None
                ):  # rounded weights are stored once, on exit of shard.allow_master_weight_edits()
                    shard.copy_master_weights_to_params()
        if self._scheduler is not None:
            self._scheduler.free_gathered_params()
        all_gather = OverlappedParamAllGather()
        all_gather.add_shards(self.shards)
        with torch.no_grad():
            all_gather.finish()
        for shard in self.shards:
            shard.record_param_versions()
        if isinstance(self._host, FileOffloadManager):
            self._host.wait_for_writes(self.table.context)

    @contextmanager
    def _set_flag_temporarily(self, flag_name: str) -> Iterator[None]:
        before = getattr(self, flag_name)
        setattr(self, flag_name, True)
        try:
            yield
        finally:
            setattr(self, flag_name, before)

    @property
    def has_sharded_states(self) -> bool:
        """Whether each rank stores only a shard of the optimizer states of its parameters."""
        return any(s.axis.size > 1 or any(gradient.is_shared for gradient in s.gradient_slots) for s in self.shards)

    @property
    def rounding_counts(self) -> list[int]:
        """Number of stochastic roundings of each shard, which seeds the next rounding."""
        return [shard.rounded.step for shard in self.shards if shard.rounded is not None]

    @rounding_counts.setter
    def rounding_counts(self, counts: Sequence[int]) -> None:
        for rounded, step in zip([s.rounded for s in self.shards if s.rounded], counts, strict=True):
            rounded.step = step

    @property
    def stage3_param_groups(self) -> Sequence[Stage3ParamGroup]:
        """The groups of parameters that ZeRO stage 3 gathers and frees together. Empty for other stages."""
        return self._scheduler.units if self._scheduler is not None else ()

    @property
    def loss_scale(self) -> LossScale:
        return self._precision.loss_scale

    def memory(self) -> MemoryEstimate:
        """Measure the memory that the model and optimizer use on this rank, in bytes for each kind of tensor."""
        return measure_memory(self.table, self.shards, self.stage3_param_groups, self.inner)

    def describe(self) -> str:
        """Return a report of the ZeRO options, the memory of this rank and the offload bandwidth."""
        return format_memory_report(self._settings, self.inner, self.memory(), self._host)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ConfigError(
            "An optimizer from shard_optimizer cannot be copied or pickled.",
            remedy="Save optimizer.state_dict(), or use save_checkpoint. To copy the optimizer, copy the model and "
            "call shard_optimizer for the copy.",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ConfigError, because parameter groups cannot be added after ``shard_optimizer``."""
        if self._is_initialized:
            raise ConfigError(
                "add_param_group cannot be called on the optimizer that shard_optimizer returned.",
                remedy="Add the group to your optimizer before you call shard_optimizer.",
            )
        super().add_param_group(param_group)


def unwrap_zero_optimizers(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Replace each ZeroOptimizer by the optimizers that the user passed to ``shard_optimizer``."""
    return [own for each in optimizers for own in (each.inner if isinstance(each, ZeroOptimizer) else [each])]


def _get_state_dict_signature(state_dict: dict[str, Any]) -> tuple[Any, ...]:
    """Summarize the structure of a saved optimizer state, for comparison with the current state."""
    shapes = [tuple(master.shape) for master in state_dict["masters"]]
    groups = [[len(group["params"]) for group in each["param_groups"]] for each in state_dict["optimizers"]]
    return shapes, groups, sorted(state_dict["loss_scale"]), len(state_dict["rounds"])
