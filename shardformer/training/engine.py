"""Training engine that runs forward passes, backward passes and weight updates under any parallel layout."""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardformer.checkpoint.load import LoadedCheckpoint, load_checkpoint_with_callback
from shardformer.checkpoint.reshard_in_memory import ReshardStats
from shardformer.checkpoint.retention import CheckpointRetention, list_checkpoints_with_save_times
from shardformer.checkpoint.save import AsyncSave, async_save_checkpoint, check_can_save, save_checkpoint
from shardformer.comm.collective_call import check_ranks_agree_on_call_and_data, run_on_first_rank, wait_for_all_ranks
from shardformer.comm.collectives import all_gather_objects, all_reduce
from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, InputError
from shardformer.filesystem import acquire_folder_lock, to_absolute_path
from shardformer.gradients.clipping import clip_grads_with_norm_, grad_norm
from shardformer.layout.sharding_metadata import get_sharding_metadata
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.mesh.rank_grid import AXES
from shardformer.pipeline.pipeline import Pipeline, eval_mode
from shardformer.public_names import deprecate_renamed_arguments, deprecate_renamed_function_arguments
from shardformer.sharding.describe import count_total_and_local_params, format_summary, format_summary_as_html
from shardformer.torch_compat import is_true_or_unknown
from shardformer.training.data_loader import (
    ShardedDataLoader,
    batch_to_forward_kwargs,
    is_list_of_batches,
    move_to_device,
)
from shardformer.weights.save_pretrained import export_pretrained
from shardformer.zero.zero_optimizer import ZeroOptimizer, unwrap_zero_optimizers

POSITION_KEY, USER_STATE_KEY = "engine", "user"
"""Keys of the engine's own values and of the user's values in ``extra`` of a checkpoint."""


def pack_engine_state(num_steps: int, num_skipped_steps: int, data_position: Any, user_state: Any) -> dict[str, Any]:
    return {
        POSITION_KEY: {"steps": num_steps, "skipped": num_skipped_steps, "data": data_position},
        USER_STATE_KEY: user_state,
    }


def unpack_engine_state(loaded_checkpoint: LoadedCheckpoint) -> tuple[int, int, Any, LoadedCheckpoint]:
    """Split the extra values of a checkpoint into engine state and user values.

    Returns the number of steps and of skipped steps, the data position, and the checkpoint with only the user's values.
    """
    engine_state = loaded_checkpoint.extra
    if not isinstance(engine_state, dict) or engine_state.keys() != {POSITION_KEY, USER_STATE_KEY}:
        return loaded_checkpoint.step, 0, None, loaded_checkpoint
    place = engine_state[POSITION_KEY]
    return (
        place["steps"],
        place["skipped"],
        place["data"],
        replace(loaded_checkpoint, extra=engine_state[USER_STATE_KEY]),
    )


def acquire_checkpoint_lock(directory: str | os.PathLike[str], lock_owner: object, world_axis: Axis) -> None:
    """Prevent other jobs from saving into a checkpoint folder until the object ``lock_owner`` is deleted.

    The first rank takes the lock. If it fails, all ranks raise.
    """
    run_on_first_rank(
        lambda: acquire_folder_lock(to_absolute_path(directory), lock_owner), world_axis, f"Saving into {directory}"
    )


def has_checkpoint(directory: str | os.PathLike[str], world_axis: Axis) -> bool:
    """Return whether a folder contains a checkpoint. The first rank looks for it, and all ranks get the same answer."""
    return run_on_first_rank(
        lambda: (
            to_absolute_path(directory).is_dir() and bool(list_checkpoints_with_save_times(to_absolute_path(directory)))
        ),
        world_axis,
        f"Looking into {directory}",
    )


@deprecate_renamed_arguments(
    {}, renamed_attributes={"reshape": "reshard", "take_over": "adopt", "take_data": "set_data"}
)
class Engine:
    """Training engine for a sharded model, with the same API for every parallel layout. Create it with ``initialize``.

    >>> engine = shardformer.initialize(model, optimizer, train_data=data, batch_size=32)         # doctest: +SKIP
    >>> for batch in engine.data:                                                                 # doctest: +SKIP
    ...     loss = engine(batch)
    ...     engine.backward(loss)
    ...     engine.step()

    ``engine.train_step(batch)`` combines the three calls.

    Attributes:
        model: Sharded model.
        optimizers: The user's optimizers, or the sharded optimizers that wrap them. Empty for evaluation only.
        scheduler: The user's scheduler.
        scheduler_every: Whether the scheduler steps after each "step" or after each "epoch".
        data: Training data of this rank. Raises ConfigError if the engine has none.
        has_data: Whether the engine has training data.
        pipeline: Pipeline that runs the forward and backward passes of every batch.
        parallel: Configuration of the layout.
        layout: Short description of the layout, such as ``tensor=2, data=2``.
        context: Process grid.
        steps: Number of training steps, including skipped steps.
        skipped: Number of steps without an update because gradients were not finite.
        grad_norm: Global gradient norm of the last step before clipping, or None if it was not computed.
        takes_grad_norm: Compute the gradient norm even without clipping. Must be equal on all ranks.
        listener: Function that is called with the name of each event of a step. See ``shardformer.training.hook``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        pipeline: Pipeline,
        parallel: ParallelConfig,
        context: ParallelContext,
        *,
        scheduler: LRScheduler | list[LRScheduler] | tuple[LRScheduler, ...] | None = None,
        has_target: bool = False,
    ) -> None:
        self._data: ShardedDataLoader | None = None
        self.adopt(model, optimizers, pipeline, parallel, context)
        self.scheduler, self.scheduler_every = scheduler, "step"
        self._has_target = has_target
        self.steps = self.skipped = 0
        self.grad_norm: Tensor | None = None
        self.takes_grad_norm = False
        self.listener: Callable[[str], None] | None = None
        self._pending_loss: Tensor | None = None
        self._is_backward_done = False
        self._saving: AsyncSave | None = None
        self.rebuild: Callable[[ParallelConfig | dict[str, Any]], ReshardStats] | None = None

    def __repr__(self) -> str:
        return format_summary(*self.summary())

    def _repr_html_(self) -> str:
        return format_summary_as_html(*self.summary())

    def summary(self) -> tuple[str, dict[str, str]]:
        """Return the title and rows of a table with the engine's layout, parameters, optimizer, data and steps."""
        total, local = count_total_and_local_params(self.model)
        kinds = [type(each).__name__ for each in unwrap_zero_optimizers(self.optimizers)]
        return f"Engine of {type(self.model).__name__}", {
            "layout": f"{self.layout} (rank {self.context.rank} of {self.world.size})",
            "parameters": f"{total:,}, of which {local:,} on this rank",
            "optimizer": ", ".join(dict.fromkeys(kinds)) or "none, for evaluation",
            "data": f"batches of {self.data.batch_size}, epoch {self.data.epoch}" if self.has_data else "none",
            "steps": str(self.steps),
        }

    @property
    def layout(self) -> str:
        """Short description of the parallel layout, such as ``tensor=2, data=2, zero_stage=1``."""
        return self.parallel.describe({axis.name: axis.size for axis in self.context.base_axes})

    # --- a step

    @property
    def has_data(self) -> bool:
        return self._data is not None

    @property
    def data(self) -> ShardedDataLoader:
        if self._data is None:
            raise ConfigError(
                "The engine has no training data.",
                remedy="Pass data to initialize(..., train_data=data, batch_size=32) or fit(data, batch_size=32).",
            )
        return self._data

    @property
    def optimizer(self) -> Optimizer | list[Optimizer] | None:
        """The optimizer, or the list of optimizers if there are several, or None if there is none."""
        return self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers or None

    def __call__(self, batch: Any) -> Tensor:
        """Compute the loss of the global batch and, in training mode, its gradients. All ranks return the same loss.

        In training mode this call also runs the backward pass, because pipeline stages interleave forward and backward.
        Still call ``backward``, so that the loop has the usual form. In ``engine.eval()`` or under ``torch.no_grad()``,
        the call only computes the loss. If the call raises, the gradients of the batch are cleared.

        Args:
            batch: Local batch of this data rank: a dict of forward arguments, a tuple ``(inputs, targets)``, or a list
                of batches, which form one large batch. Ranks that differ along other axes pass the same batch.
        """
        return self._compute_loss(batch, "engine(batch)")

    def _compute_loss(self, batch: Any, caller_name: str, *, force_training: bool = False) -> Tensor:
        batch = self._prepare_batch(batch)
        if not (force_training or (self.model.training and torch.is_grad_enabled())):
            check_ranks_agree_on_call_and_data(f"{caller_name} in eval mode", self.world)
            return self._average_loss_over_data_ranks(self.pipeline.evaluate(batch))
        if self._pending_loss is not None or self._is_backward_done:
            method = "step" if self._is_backward_done else "backward"
            raise InputError(
                f"The engine received a batch before engine.{method} was called for the previous batch.",
                remedy=f"Call engine.{method} first, or accumulate gradients over a list of batches with "
                "engine([first, second]).",
            )
        if not self.optimizers:
            raise ConfigError(
                "The engine cannot train without an optimizer.",
                remedy="Call initialize(model, optimizer), or call engine.eval() to compute losses only.",
            )
        check_ranks_agree_on_call_and_data(
            caller_name, self.world, self.data.get_data_position_hashes() if self.has_data else None
        )
        self._notify_listener("before_forward")
        try:
            self._pending_loss = self._average_loss_over_data_ranks(self.pipeline.step(batch))
        except BaseException:
            with suppress(Exception):  # otherwise the next step would add these incomplete gradients
                self.zero_grad()
            raise
        self._notify_listener("after_backward")
        return self._pending_loss

    def backward(self, loss: Tensor) -> None:
        """Mark the backward pass of the last batch as complete, so that ``engine.step`` can update the weights.

        ``engine(batch)`` has already computed the gradients. ``loss`` must be the tensor that it returned.
        """
        if self._pending_loss is None or loss is not self._pending_loss:
            raise InputError(
                "engine.backward received another loss than the last engine(batch) returned, or the same loss twice.",
                remedy="Call engine.backward(loss) once after each loss = engine(batch). Add further terms to the loss "
                "in loss_fn, and accumulate gradients with engine([first, second]).",
            )
        self._pending_loss, self._is_backward_done = None, True

    def step(self) -> bool:
        """Clip the gradients, update the weights, clear the gradients, and step the scheduler.

        If an error is raised, the gradients are kept. Call ``zero_grad`` to discard them before the next batch.

        Returns:
            Whether the weights were updated. False if ``on_nonfinite="skip"`` and gradients were not finite.
        """
        if not self._is_backward_done:
            raise InputError(
                "engine.step was called before engine.backward.",
                remedy="Call engine.backward(loss) first, or use engine.train_step(batch).",
            )
        check_ranks_agree_on_call_and_data("engine.step", self.world)
        return self._step_optimizers_and_schedulers()

    def _step_optimizers_and_schedulers(self) -> bool:
        self._notify_listener("before_optimizer_step")
        is_updated = self._clip_and_step_optimizers()
        self._is_backward_done = False
        self.steps += 1
        self.skipped += not is_updated
        if is_updated:
            self._step_schedulers("step")
        self._notify_listener("after_optimizer_step")
        return is_updated

    def train_step(self, batch: Any) -> Tensor:
        """Run the forward pass, backward pass and weight update for a batch, and return the loss of the global batch.

        A model in eval mode is trained too, without dropout and without updating the running statistics of norms.
        """
        if not torch.is_grad_enabled():
            check_ranks_agree_on_call_and_data("engine.train_step under torch.no_grad()", self.world)
            raise InputError(
                "engine.train_step cannot train under torch.no_grad().",
                remedy="Call engine.train_step outside torch.no_grad(), or call engine.evaluate(batch).",
            )
        loss = self._compute_loss(batch, "engine.train_step", force_training=True)
        self.backward(loss)
        self._step_optimizers_and_schedulers()
        return loss

    def evaluate(self, batches: Any) -> Tensor:
        """Return the mean loss of one or several batches, weighted by the number of labeled tokens or samples.

        The model is temporarily set to eval mode. Afterwards every module returns to its previous mode.

        Args:
            batches: A batch, or an iterable of batches. All data ranks need the same number of batches.
        """
        wait_for_all_ranks("engine.evaluate", self.world)
        several = self._iter_synchronized_batches(batches) if _is_iterable_of_batches(batches) else [batches]
        with eval_mode(self.model):
            return self._average_loss_over_data_ranks(self.pipeline.mean_loss(map(self._prepare_batch, several)))

    def _iter_synchronized_batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches, and check that all ranks have the same number of batches."""
        for batch in batches:
            check_ranks_agree_on_call_and_data("engine.evaluate with another batch", self.world)
            yield batch
        check_ranks_agree_on_call_and_data("engine.evaluate without another batch", self.world)

    def predict(self, batch: Any, *, gather: bool = True) -> Any:
        """Return the model output for a batch, computed in eval mode and without gradients.

        All pipeline stages return the output unless ``gather=False``. All ranks of a data-parallel replica must make
        this call; under ZeRO stage 3, all ranks.
        """
        has_shards = get_sharding_metadata(self.model).parameter_owner is not None
        wait_for_all_ranks(
            "engine.predict", *(axis for axis in self.context.base_axes if axis.name != "data" or has_shards)
        )
        with eval_mode(self.model):
            return self.pipeline.forward(self._prepare_batch(batch), gather=gather)

    def train(self, mode: bool = True) -> Engine:
        self.model.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    def zero_grad(self) -> None:
        """Discard the gradients of the last batch without updating the weights."""
        self._pending_loss, self._is_backward_done = None, False
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _prepare_batch(self, batch: Any) -> Any:
        if is_list_of_batches(batch):
            return [self._prepare_batch(each) for each in batch]
        return move_to_device(
            batch_to_forward_kwargs(batch, self.model, has_target=self._has_target), self.context.device
        )

    def _average_loss_over_data_ranks(self, loss: Tensor) -> Tensor:
        """Average the loss over the data-parallel ranks if the option ``average_loss_over`` is "ranks"."""
        if self.parallel.average_loss_over == "ranks" and self.context.data.size > 1:
            return all_reduce(loss, self.context.data, purpose="loss") / self.context.data.size
        return loss

    def _clip_and_step_optimizers(self) -> bool:
        if isinstance(zero := self.optimizers[0], ZeroOptimizer):
            before, is_taken = zero.skipped, self.parallel.max_grad_norm or self.parallel.on_nonfinite != "ignore"
            if self.takes_grad_norm and not is_taken:
                zero.clip_grad_norm_(math.inf)
            zero.step()
            self.grad_norm, is_updated = zero.grad_norm, zero.skipped == before
        else:
            is_updated = self._clip_gradients_and_check_finite()
            for optimizer in self.optimizers if is_updated else ():
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return is_updated

    def _clip_gradients_and_check_finite(self) -> bool:
        """Clip the gradients, and return False if the step must be skipped because they are not finite."""
        config = self.parallel
        self.grad_norm = norm = grad_norm(self.model) if config.max_grad_norm or self.takes_grad_norm else None
        if norm is None:
            return True
        if config.on_nonfinite == "ignore" or is_true_or_unknown(torch.isfinite(norm)):
            clip_grads_with_norm_(self.model, norm, config.max_grad_norm or math.inf)
            return True
        if config.on_nonfinite == "skip":
            return False
        names = self._describe_nonfinite_grads()
        raise InputError(
            f"The gradient norm of step {self.steps + 1} is {float(norm)}, with non-finite gradients in {names}.",
            rule="No weight was changed.",
            remedy="Check the batch and the learning rate, or skip such steps with on_nonfinite='skip'.",
        )

    def _describe_nonfinite_grads(self) -> str:
        """Describe which parameters have nonfinite gradients on any rank. Communicates the names of the parameters."""
        grads = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        values = {n: grad.coalesce().values() if grad.is_sparse else grad for n, grad in grads.items()}
        local = [n for n, x in values.items() if not x.isfinite().all()]
        names = list(dict.fromkeys(name for found in all_gather_objects(local, self.world) for name in found))
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        return ", ".join(names[:4]) + more

    @property
    def schedulers(self) -> list[Any]:
        """The user's learning-rate schedulers as a list, which may be empty."""
        scheduler = self.scheduler
        return [] if scheduler is None else list(scheduler) if isinstance(scheduler, (list, tuple)) else [scheduler]

    def _step_schedulers(self, after: str) -> None:
        """Step the schedulers that need no metric, after a "step" or after an "epoch".

        A scheduler with the method ``step(epoch)``, such as those of timm, gets the number of finished epochs, and the
        number of steps in ``step_update``, if it has this method.
        """
        for scheduler in self.schedulers:
            argument = get_required_step_argument(scheduler)
            if argument is None and after == self.scheduler_every:
                scheduler.step()
            elif argument == EPOCH_ARGUMENT and after == "epoch":
                scheduler.step(self.data.epoch)
            elif argument == EPOCH_ARGUMENT and hasattr(scheduler, "step_update"):
                scheduler.step_update(self.steps)

    def _notify_listener(self, event_name: str) -> None:
        if self.listener is not None:
            self.listener(event_name)

    def _check_no_unfinished_step(self, caller_name: str) -> None:
        if self._pending_loss is not None or self._is_backward_done:
            raise InputError(
                f"{caller_name} cannot be called between engine(batch) and engine.step().",
                remedy=f"Call {caller_name} after engine.step(), or discard the gradients with engine.zero_grad().",
            )

    def set_data(self, data: ShardedDataLoader) -> None:
        """Replace the training data of the engine. Schedulers that step once per epoch follow the new data."""
        self._data = data
        data.on_epoch_end = partial(self._step_schedulers, "epoch")

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        if self.context.world is not None:
            raise ConfigError(
                "An engine that runs on several processes cannot be copied.",
                remedy="Copy only the model with copy.deepcopy(engine.model), or use engine.save(folder) and "
                "engine.load(folder) to return to an earlier state.",
            )
        memo[id(self)] = clone = type(self).__new__(type(self))
        clone.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return clone

    # --- checkpoints

    @property
    def world(self) -> Axis:
        """Mesh axis with all ranks that train this model."""
        return self.context.flatten(*AXES) if self.context.world is not None else Axis("world")

    @property
    def is_first(self) -> bool:
        """Whether this process is the first rank, which writes logs and shared files."""
        return self.world.rank == 0

    @deprecate_renamed_function_arguments({"folder": "directory", "keep": "retention"})
    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        extra: Any = None,
        retention: CheckpointRetention | int | None = None,
        in_background: bool = False,
        position: dict[str, Any] | None = None,
    ) -> Path | None:
        """Save the model, optimizer, scheduler and data position in a checkpoint ``directory/step-00000123``.

        See ``save_checkpoint``.

        Args:
            extra: Plain values of your own, which ``load`` returns.
            retention: Number of checkpoints to keep, or a ``CheckpointRetention``. None keeps all.
            in_background: Write in a thread while training continues. The next save, ``engine.wait()`` and the end of
                ``Trainer.fit`` wait for it.
            position: Earlier result of ``engine.data.state()``, if a batch was already fetched but not used for
                training.

        Returns:
            Path of the checkpoint, or None if it is written in the background.
        """
        self._check_no_unfinished_step("engine.save")
        wait_for_all_ranks("engine.save", self.world)
        self.wait()
        if position is None and self.has_data:
            position = self.data.state()
        options: dict[str, Any] = {
            "step": self.steps,
            "scheduler": self.scheduler,
            "extra": pack_engine_state(self.steps, self.skipped, position, extra),
            "retention": retention,
        }
        if not in_background:
            return save_checkpoint(self.model, directory, self.optimizer, **options)
        self._saving = async_save_checkpoint(self.model, directory, self.optimizer, **options)
        return None

    def check_save(self, *, extra: Any = None, position: dict[str, Any] | None = None) -> None:
        """Check that ``save`` would succeed, and otherwise raise its error, without writing a file."""
        engine_state = pack_engine_state(self.steps, self.skipped, position, extra)
        check_can_save(self.model, self.optimizer, scheduler=self.scheduler, extra=engine_state)

    def wait(self) -> Path | None:
        """Wait until a background save has finished, and return the path of the checkpoint, or None."""
        saving, self._saving = self._saving, None
        return saving.wait() if saving is not None else None

    @deprecate_renamed_function_arguments({"folder": "directory"})
    def load(self, directory: str | os.PathLike[str]) -> LoadedCheckpoint:
        """Load a checkpoint, which may have been saved under a different parallel layout. See ``load_checkpoint``.

        Restores weights, optimizer, scheduler, random state, step count and data position. If an error is raised, all
        of them keep their previous state, including the gradients of an unfinished step.
        """
        return self.load_with_callback(directory)

    def load_with_callback(
        self, directory: str | os.PathLike[str], on_loaded: Callable[[LoadedCheckpoint], object] = lambda _: None
    ) -> LoadedCheckpoint:
        """Load a checkpoint and call ``on_loaded`` with it. If one fails, the engine is not changed."""
        wait_for_all_ranks("engine.load", self.world)
        self.wait()
        before = self.steps, self.skipped, self.data.state() if self.has_data else None

        def restore_progress(num_steps: int, num_skipped_steps: int, data_position: dict[str, Any] | None) -> None:
            if self.has_data and data_position is not None:
                self.data.load_state(data_position)
            self.steps, self.skipped = num_steps, num_skipped_steps

        def on_checkpoint_loaded(checkpoint: LoadedCheckpoint) -> None:
            *place, loaded = unpack_engine_state(checkpoint)
            restore_progress(*place)
            on_loaded(loaded)

        try:
            checkpoint = load_checkpoint_with_callback(
                directory, self.model, self.optimizer, self.scheduler, on_checkpoint_loaded
            )
        except BaseException:
            restore_progress(*before)
            raise
        self.zero_grad()
        return unpack_engine_state(checkpoint)[-1]

    @deprecate_renamed_function_arguments({"folder": "directory"})
    def resume(self, directory: str | os.PathLike[str]) -> LoadedCheckpoint | None:
        """Load the newest checkpoint in a folder, or return None if the folder contains no checkpoint."""
        wait_for_all_ranks("engine.resume", self.world)
        return self.load(directory) if has_checkpoint(directory, self.world) else None

    # --- other layouts

    def reshard(self, parallel: ParallelConfig | dict[str, Any]) -> ReshardStats:
        """Change the parallel layout during training, without writing a checkpoint.

        Weights, master weights, optimizer states and random state are converted as if they were saved and loaded. A
        rank copies values that it has under both layouts, and receives each of its other values once. ``engine.model``
        and ``engine.pipeline`` become new objects, while your optimizers and scheduler stay the same objects. During
        the transfer, a rank keeps its shards of both layouts in memory. All ranks must make this call, between two
        steps.

        Returns:
            Number of bytes that this rank sent, received and copied.

        Raises:
            ConfigError: The layout is invalid. Raised on all ranks, with the engine unchanged.
        """
        wait_for_all_ranks("engine.reshard", self.world)
        self.wait()
        self._check_no_unfinished_step("engine.reshard")
        assert self.rebuild is not None
        return self.rebuild(parallel)

    def adopt(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        pipeline: Pipeline,
        parallel: ParallelConfig,
        context: ParallelContext,
    ) -> None:
        """Replace the engine's model, optimizers, pipeline and layout after resharding."""
        self.model, self.optimizers, self.pipeline = model, optimizers, pipeline
        self.parallel, self.context = parallel, context
        if (monitor := get_sharding_metadata(model).monitor) is not None:
            monitor.has_several_optimizers = len(unwrap_zero_optimizers(optimizers)) > 1
        _ = self.world  # connects all ranks now, because later only some ranks may reach a collective
        if self.has_data:
            self.data.set_parallel_context(context)

    @deprecate_renamed_function_arguments({"folder": "directory"})
    def export(self, directory: str | os.PathLike[str], tokenizer: Any = None) -> None:
        """Export the model to a folder, so that ``from_pretrained`` can load it. See ``export_pretrained``."""
        wait_for_all_ranks("engine.export", self.world)
        export_pretrained(self.model, directory, tokenizer=tokenizer)


EPOCH_ARGUMENT, METRIC_ARGUMENTS = "epoch", ("metrics", "metric")
"""Names of the required argument of a scheduler's ``step`` method that the engine or the trainer can pass."""


def get_required_step_argument(scheduler: Any) -> str | None:
    """Return the name of the argument that the ``step`` method of a scheduler requires, or None.

    Raises ConfigError if the argument is neither an epoch nor a metric, as with ``ReduceLROnPlateau``.
    """
    parameters = inspect.signature(scheduler.step).parameters.values()
    names = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not names or (len(names) == 1 and names[0] in (EPOCH_ARGUMENT, *METRIC_ARGUMENTS)):
        return names[0] if names else None
    kind = type(scheduler).__name__
    raise ConfigError(
        f"{kind}.step requires {', '.join(names)}, but the engine can only pass an epoch or a validation loss.",
        remedy=f"Call {kind}.step yourself after engine.step and omit scheduler=, or name its only required argument "
        "epoch or metrics.",
    )


def _is_iterable_of_batches(batches: Any) -> bool:
    """Return whether ``batches`` is an iterable of batches, rather than a single batch."""
    if isinstance(batches, (Mapping, Tensor)):
        return False
    return is_list_of_batches(batches) if isinstance(batches, (list, tuple)) else isinstance(batches, Iterable)
