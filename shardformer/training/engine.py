"""Engine: one object that trains a model by the same calls under every layout, in one process or many."""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.checkpoint.directory import CheckpointRetention, list_checkpoints
from shardformer.checkpoint.load import LoadedCheckpoint, load_and_take
from shardformer.checkpoint.reshard_in_memory import ReshardStats
from shardformer.checkpoint.save import AsyncSave, async_save_checkpoint, check_savable, save_checkpoint
from shardformer.comm.collective_call import come, come_to_step, run_on_first_rank
from shardformer.comm.collectives import all_gather_objects, all_reduce
from shardformer.config import ParallelConfig
from shardformer.errors import ConfigError, InputError
from shardformer.filesystem.atomic_write import path_of
from shardformer.filesystem.lock import hold
from shardformer.gradients.clipping import grad_norm, scale_gradients
from shardformer.layout.sharding_metadata import metadata_of
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.mesh.rank_grid import AXES
from shardformer.pipeline.pipeline import Pipeline, evaluating
from shardformer.public_names import renamed_arguments, renamed_parameters
from shardformer.torch_compat import is_true
from shardformer.training.data_loader import ShardedDataLoader, is_batch_list, named_batch, on_device
from shardformer.weights.save_pretrained import export_pretrained
from shardformer.zero.zero_optimizer import ZeroOptimizer

POSITION_KEY, USER_STATE_KEY = "engine", "user"
"""Under which names the engine's own values, and those of the user, stand in ``extra``."""


def pack_engine_state(steps: int, skipped: int, position: Any, extra: Any) -> dict[str, Any]:
    return {POSITION_KEY: {"steps": steps, "skipped": skipped, "data": position}, USER_STATE_KEY: extra}


def unpack_engine_state(loaded: LoadedCheckpoint) -> tuple[int, int, Any, LoadedCheckpoint]:
    """(steps, skipped steps, position in the data, what was loaded, with the user's own values).

    Of a checkpoint that no engine saved its step is known.
    """
    said = loaded.extra
    if not isinstance(said, dict) or said.keys() != {POSITION_KEY, USER_STATE_KEY}:
        return loaded.step, 0, None, loaded
    place = said[POSITION_KEY]
    return place["steps"], place["skipped"], place["data"], replace(loaded, extra=said[USER_STATE_KEY])


def take_folder(folder: str | os.PathLike[str], owner: object, world: Axis) -> None:
    """Takes a folder of checkpoints for this run, on the first rank, for as long as ``owner`` is alive.

    Raises, on all ranks, ConfigError where another process saves into it, InputError where it cannot be written to.
    """
    run_on_first_rank(lambda: hold(path_of(folder), owner), world, f"Saving into {folder}")


def has_checkpoint(folder: str | os.PathLike[str], world: Axis) -> bool:
    """Whether a folder has a checkpoint, as the first rank sees it."""

    def look() -> bool:
        path = path_of(folder)
        return path.is_dir() and bool(list_checkpoints(path))

    return run_on_first_rank(look, world, f"Looking into {folder}")


@renamed_arguments({}, attributes={"reshape": "reshard", "take_over": "adopt", "take_data": "set_data"})
class Engine:
    """Trains a model under any layout: what ``shardformer.initialize`` returns.

    >>> engine = shardformer.initialize(model, optimizer, train_data=data, batch_size=32)         # doctest: +SKIP
    >>> for batch in engine.data:                                                                 # doctest: +SKIP
    ...     loss = engine(batch)
    ...     engine.backward(loss)
    ...     engine.step()

    The three calls are one ``engine.train_step(batch)``.

    Attributes:
        model: the sharded model.
        optimizers: what steps: the user's, or what ``shard_optimizer`` made of them. Without any nothing is trained.
        scheduler: the user's; it steps behind each step that was made, or behind each epoch.
        data: the training data, this rank's part of each batch; None where none was given.
        pipeline: through which every batch goes.
        parallel, context: what was asked for, and the grid that it became.
        steps: training steps that were made.
        skipped: of these, how many left the weights as they were, since gradients were not finite.
        grad_norm: of the last step, before it was clipped; None where it was not taken.
        takes_grad_norm: whether it is taken without clipping, too; the same on all ranks.
        listener: is told the name of each moment of a step (see ``shardformer.training.hook``); None: nobody.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        pipeline: Pipeline,
        parallel: ParallelConfig,
        context: ParallelContext,
        *,
        scheduler: Any = None,
        scheduler_every: str = "step",
        data: ShardedDataLoader | None = None,
        has_target: bool = False,
    ) -> None:
        self._trains(model, optimizers, pipeline)
        self.parallel, self.context = parallel, context
        self.scheduler, self._scheduler_every = scheduler, scheduler_every
        self.data: ShardedDataLoader | None = None
        self._has_target = has_target
        self.steps = self.skipped = 0
        self.grad_norm: Tensor | None = None
        self.takes_grad_norm = False
        self.listener: Callable[[str], None] | None = None
        self._pending: Tensor | None = None
        self._is_backward_done = False
        self._saving: AsyncSave | None = None
        _ = self.world  # all ranks connect it here, and none has to later, where only some may come
        self.rebuild: Callable[[Any], ReshardStats] | None = None
        if data is not None:
            self.set_data(data)

    def _trains(self, model: nn.Module, optimizers: list[Optimizer], pipeline: Pipeline) -> None:
        self.model, self.optimizers, self.pipeline = model, optimizers, pipeline
        if (watch := metadata_of(model).monitor) is not None:
            watch.has_several_optimizers = sum(len(getattr(each, "inner", (each,))) for each in optimizers) > 1

    # --- a step

    @property
    def optimizer(self) -> Any:
        """What steps, as ``save_checkpoint`` takes it."""
        return self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers or None

    def __call__(self, batch: Any) -> Tensor:
        """The loss of the whole batch, on all ranks.

        Args:
            batch: this data rank's part of it: a dict by name, a row ``(inputs, targets)``, or a list of such, which
                then are one large batch. On ranks that differ along other axes it is the same.

        In training it does the backward too, since the stages of a pipeline go forward and backward in turn;
        ``backward`` is called all the same, so that the loop reads as any. In ``engine.eval()``, or under
        ``torch.no_grad()``, the loss is all that is computed. Where it raises no gradients are left of the batch.
        """
        return self._compute(batch, "engine(batch)")

    def _compute(self, batch: Any, call: str, *, trains: bool = False) -> Tensor:
        batch = self._taken(batch)
        if not (trains or (self.model.training and torch.is_grad_enabled())):
            come_to_step(f"{call} in eval mode", self.world)
            return self._of_all_data(self.pipeline.evaluate(batch))
        if self._pending is not None or self._is_backward_done:
            raise InputError(
                f"The engine was given a batch before {'step' if self._is_backward_done else 'backward'} was called "
                "for the last one",
                remedy="Give all batches of a step at once: engine([first, second]); each token then weighs the same",
            )
        self._check_trains()
        come_to_step(call, self.world, self.data.facts() if self.data is not None else None)
        self._tell("before_forward")
        try:
            self._pending = self._of_all_data(self.pipeline.step(batch))
        except BaseException:
            with suppress(Exception):  # those of a part of the batch, which the next step would add to its own
                self.zero_grad()
            raise
        self._tell("after_backward")
        return self._pending

    def backward(self, loss: Tensor) -> None:
        """What brings the gradients of the batch: of the very loss that the engine gave."""
        if self._pending is None or loss is not self._pending:
            what = "another one than the engine gave last" if self._pending is not None else "not one that waits for it"
            raise InputError(
                f"backward was called with a loss that is {what}",
                rule="The gradients are those of the loss as the engine gives it, which is that of the whole batch",
                remedy="Write loss = engine(batch); engine.backward(loss). Do not divide it by a number of "
                "batches: give them as a list. What is to be added to the loss belongs into loss_fn",
            )
        self._pending, self._is_backward_done = None, True

    def step(self) -> bool:
        """Clips, updates the weights, throws the gradients away, and lets the scheduler step.

        Returns whether weights were updated: not where gradients were not finite, and such steps are to be skipped.
        Where it raises, the gradients are still there: ``zero_grad`` throws them away, and the next batch may follow.
        """
        if not self._is_backward_done:
            raise InputError(
                "step was called before backward" if self._pending is not None else "step was called without a batch",
                remedy="Call engine.backward(loss) first, or use engine.train_step(batch)",
            )
        come_to_step("engine.step", self.world)
        return self._step()

    def _step(self) -> bool:
        self._tell("before_optimizer_step")
        is_made = self._update()
        self._is_backward_done = False
        self.steps += 1
        self.skipped += not is_made
        if is_made and self._scheduler_every == "step":
            self._step_schedulers()
        self._tell("after_optimizer_step")
        return is_made

    def train_step(self, batch: Any) -> Tensor:
        """Forward, backward and update for a batch. Returns its loss, as ``engine(batch)``.

        A model in eval mode is trained, too: without dropout, and without updating the running averages of its norms.
        """
        if not torch.is_grad_enabled():
            come_to_step("engine.train_step under torch.no_grad()", self.world)
            raise InputError(
                "engine.train_step was called under torch.no_grad()",
                remedy="Call it outside of torch.no_grad(), or use engine.evaluate(batch)",
            )
        loss = self._compute(batch, "engine.train_step", trains=True)
        self.backward(loss)
        self._step()
        return loss

    def evaluate(self, batches: Any) -> Tensor:
        """The loss of a batch, or of many: of all that counts in them together. On all ranks, without a backward.

        The model is in eval mode meanwhile. Afterwards each of its modules is in the mode that it was in.

        Args:
            batches: a batch as for a step, or an iterable of such, of which all data ranks have as many.
        """
        come("engine.evaluate", self.world)
        several = self._counted(batches) if _is_stream(batches) else [batches]
        with evaluating(self.model):
            return self._of_all_data(self.pipeline.mean_loss(self._taken(batch) for batch in several))

    def _counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, of which all ranks are known to have one more before each is run."""
        for batch in batches:
            come_to_step("engine.evaluate with another batch", self.world)
            yield batch
        come_to_step("engine.evaluate without another batch", self.world)

    def predict(self, batch: Any, *, gather: bool = True) -> Any:
        """The model's output for a batch, in eval mode, without gradients; on all stages, unless not gathered.

        The ranks of one data rank call it together; under stage 3 of ZeRO all ranks do.
        """
        has_shards = metadata_of(self.model).parameter_owner is not None
        come("engine.predict", *(axis for axis in self.context.base_axes if axis.name != "data" or has_shards))
        with evaluating(self.model):
            return self.pipeline.forward(self._taken(batch), gather=gather)

    def train(self, mode: bool = True) -> Engine:
        self.model.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    def zero_grad(self) -> None:
        """Throws away what a backward left that is not to be stepped with."""
        self._pending, self._is_backward_done = None, False
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _taken(self, batch: Any) -> Any:
        if is_batch_list(batch):
            return [self._taken(each) for each in batch]
        return on_device(named_batch(batch, self.model, has_target=self._has_target), self.context.device)

    def _of_all_data(self, loss: Tensor) -> Tensor:
        """Where each data rank has a loss of its own, their mean."""
        if self.parallel.average_loss_over == "ranks" and self.context.data.size > 1:
            return all_reduce(loss, self.context.data, purpose="loss") / self.context.data.size
        return loss

    def _update(self) -> bool:
        if isinstance(zero := self.optimizers[0], ZeroOptimizer):
            before, is_taken = zero.skipped, self.parallel.max_grad_norm or self.parallel.on_nonfinite != "ignore"
            if self.takes_grad_norm and not is_taken:
                zero.clip_grad_norm_(math.inf)
            zero.step()
            self.grad_norm, is_made = zero.grad_norm, zero.skipped == before
        else:
            is_made = self._clip()
            for optimizer in self.optimizers if is_made else ():
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return is_made

    def _clip(self) -> bool:
        """Returns whether the step is to be made."""
        asked, takes_norm = self.parallel, self.parallel.max_grad_norm or self.takes_grad_norm
        self.grad_norm = norm = grad_norm(self.model) if takes_norm else None
        is_right = norm is None or asked.on_nonfinite == "ignore" or is_true(torch.isfinite(norm))
        if norm is not None and is_right:  # else they stay as they are, for what is not finite to be found
            scale_gradients(self.model, norm, asked.max_grad_norm or math.inf)
        if is_right or asked.on_nonfinite == "skip" or norm is None:
            return is_right
        raise InputError(
            f"The norm of the gradients of step {self.steps + 1} is {float(norm)}{self._nonfinite()}",
            rule="A step with gradients that are not finite would make the weights so too; no weight was changed",
            remedy="Lower the learning rate, look at the batch, or write on_nonfinite='skip'",
        )

    def _nonfinite(self) -> str:
        """The parameters whose gradients are not finite, on any rank. Communicates their names."""
        grads = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        values = {n: grad.coalesce().values() if grad.is_sparse else grad for n, grad in grads.items()}
        mine = [n for n, x in values.items() if not x.isfinite().all()]
        names = list(dict.fromkeys(name for found in all_gather_objects(mine, self.world) for name in found))
        return f", not finite in {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"

    @property
    def schedulers(self) -> list[Any]:
        """Those that were given, in a list."""
        given = self.scheduler
        return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]

    def _step_schedulers(self) -> None:
        for scheduler in self.schedulers:
            if not needs_metric(scheduler):
                scheduler.step()

    def _end_epoch(self) -> None:
        if self._scheduler_every == "epoch":
            self._step_schedulers()

    def _tell(self, moment: str) -> None:
        if self.listener is not None:
            self.listener(moment)

    def _check_between_steps(self, what: str) -> None:
        if self._pending is not None or self._is_backward_done:
            raise InputError(
                f"{what} in the middle of a step",
                remedy="Call it behind engine.step(), or call engine.zero_grad() before it",
            )

    def _check_trains(self) -> None:
        if not self.optimizers:
            raise ConfigError(
                "The engine was to train, and has no optimizer",
                remedy="Give initialize(model, optimizer), or call engine.eval() first",
            )

    def set_data(self, data: ShardedDataLoader) -> None:
        """Trains on other data from here on."""
        self.data = data
        data.on_epoch_end = self._end_epoch

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        if self.context.world is not None:
            raise ConfigError(
                "An engine over several processes was to be copied, as by copy.deepcopy",
                remedy="For a second model that does not train, copy it: copy.deepcopy(engine.model). To go back "
                "to what the engine was, write engine.save(folder), and engine.load(folder) later",
            )
        memo[id(self)] = twin = type(self).__new__(type(self))
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return twin

    # --- saving and going on

    @property
    def world(self) -> Axis:
        """All ranks that train the model together."""
        return self.context.flatten(*AXES) if self.context.world is not None else Axis("world")

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes what all know."""
        return self.world.rank == 0

    @renamed_parameters({"folder": "directory", "keep": "retention"})
    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        extra: Any = None,
        retention: CheckpointRetention | int | None = None,
        in_background: bool = False,
        position: Any = None,
    ) -> Path | None:
        """Saves all that training needs to go on, into ``directory/step-00000123``: see ``save_checkpoint``.

        Args:
            extra: plain values of your own, which ``load`` gives back.
            in_background: whether a thread writes it while training goes on; it is waited for before the next save, in
                ``engine.wait()``, and when a ``Trainer`` ends.
            position: what ``engine.data.state()`` gave, where a batch was fetched since that is not trained on yet.

        Returns the path of the checkpoint; None in the background.
        """
        self._check_between_steps("A checkpoint was to be saved")
        come("engine.save", self.world)
        self.wait()
        if position is None and self.data is not None:
            position = self.data.state()
        said = pack_engine_state(self.steps, self.skipped, position, extra)
        make = async_save_checkpoint if in_background else save_checkpoint
        made = make(
            self.model,
            directory,
            self.optimizer,
            step=self.steps,
            scheduler=self.scheduler,
            extra=said,
            retention=retention,
        )
        self._saving = made if isinstance(made, AsyncSave) else None
        return None if isinstance(made, AsyncSave) else made

    def check_save(self, *, extra: Any = None, position: Any = None) -> None:
        """Raises, on all ranks, the error that ``save`` would raise for this training run. Writes nothing."""
        said = pack_engine_state(self.steps, self.skipped, position, extra)
        check_savable(self.model, self.optimizer, scheduler=self.scheduler, extra=said)

    def wait(self) -> Path | None:
        """Waits for the checkpoint that is written in the background. Returns its path; None where there is none."""
        saving, self._saving = self._saving, None
        return saving.wait() if saving is not None else None

    @renamed_parameters({"folder": "directory"})
    def load(self, directory: str | os.PathLike[str]) -> LoadedCheckpoint:
        """Goes on from a checkpoint that was saved under any layout: see ``load_checkpoint``.

        Weights, optimizer, scheduler, random numbers, the number of steps and the position in the data. Where it
        raises, all of them, and the gradients of a step that was begun, are as they were before.
        """
        return self.load_and_take(directory)

    def load_and_take(
        self, folder: str | os.PathLike[str], take: Callable[[LoadedCheckpoint], object] = lambda _: None
    ) -> LoadedCheckpoint:
        """``load``, where more than the engine takes up what was saved: see the function of this name."""
        come("engine.load", self.world)
        self.wait()
        before = self.steps, self.skipped, None if self.data is None else self.data.state()

        def take_place(found: LoadedCheckpoint) -> None:
            steps, skipped, position, loaded = unpack_engine_state(found)
            if self.data is not None and position is not None:
                self.data.load_state(position)
            self.steps, self.skipped = steps, skipped
            take(loaded)

        try:
            found = load_and_take(folder, self.model, self.optimizer, self.scheduler, take_place)
        except BaseException:
            self.steps, self.skipped, position = before
            if self.data is not None and position is not None:
                self.data.load_state(position)
            raise
        self.zero_grad()
        return unpack_engine_state(found)[-1]

    @renamed_parameters({"folder": "directory"})
    def resume(self, directory: str | os.PathLike[str]) -> LoadedCheckpoint | None:
        """``load`` where the folder holds a checkpoint; None where training is to begin: for runs that start again."""
        come("engine.resume", self.world)
        return self.load(directory) if has_checkpoint(directory, self.world) else None

    # --- under another layout

    def reshard(self, parallel: ParallelConfig | dict[str, Any]) -> ReshardStats:
        """Goes on under another layout of the same processes, without the disk.

        Weights, masters, optimizer states and random numbers move as a checkpoint would bring them: what a rank has
        under both layouts it copies, each other number that it will hold is sent to it once. ``engine.model`` and
        ``engine.pipeline`` are new objects; optimizers that you gave, and the scheduler, stay the same ones. While it
        moves, a rank has its parts under both layouts.

        Returns the bytes that this rank sent, received and copied. All ranks call it, between two steps. Raises
        ConfigError, on all ranks and with the engine as it was, for a layout that cannot be.
        """
        come("engine.reshape", self.world)
        self.wait()
        self._check_between_steps("The layout was to be changed")
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
        """Trains this model from here on."""
        self._trains(model, optimizers, pipeline)
        self.parallel, self.context = parallel, context
        _ = self.world
        if self.data is not None:
            self.data.share_among(context)

    @renamed_parameters({"folder": "directory"})
    def export(self, directory: str | os.PathLike[str], tokenizer: Any = None) -> None:
        """Writes a folder that ``from_pretrained`` of transformers reads: see ``export_pretrained``."""
        come("engine.export", self.world)
        export_pretrained(self.model, directory, tokenizer=tokenizer)


def needs_metric(scheduler: Any) -> bool:
    """Whether a scheduler is stepped with a metric, as torch's ``ReduceLROnPlateau`` is."""
    parameters = inspect.signature(scheduler.step).parameters.values()
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _is_stream(batches: Any) -> bool:
    """Whether this is not one batch, but an iterable of some."""
    if isinstance(batches, (Mapping, Tensor)):
        return False
    return is_batch_list(batches) if isinstance(batches, (list, tuple)) else isinstance(batches, Iterable)
