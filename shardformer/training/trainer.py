"""``Trainer``: the loop around an engine, and the moments at which hooks are called."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from signal import SIGINT, Signals
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from shardformer.checkpoint.load import LoadedCheckpoint
from shardformer.errors import ConfigError
from shardformer.launcher.shutdown import is_ended
from shardformer.pipeline.pipeline import modes_of, set_modes, start_training
from shardformer.training.data_loader import ShardedDataLoader, batches_of, is_batch_list
from shardformer.training.engine import Engine, needs_metric
from shardformer.training.hook import Hook
from shardformer.training.hooks.progress import Progress
from shardformer.training.hooks.throughput import Throughput
from shardformer.training.preemption import StepRequests, StepSynchronizer
from shardformer.zero.optimizer_state_view import unchanged_on_error

HOOKS, TRAINER_USER_KEY = "hooks", "user"
"""Under which names the states of the hooks, and the user's own values, stand in a checkpoint."""


class Trainer:
    """Trains with an engine, and calls hooks at the moments of the run.

    >>> trainer = shardformer.Trainer(engine)                                                     # doctest: +SKIP
    >>> trainer.fit(epochs=3, validation=held_out)                                                # doctest: +SKIP

    Communicates, beside what the engine does, five numbers a step: whether a hook failed on a rank, and what the hooks
    of any rank ask for.

    Attributes:
        engine: what trains.
        hooks: in the order in which they are called: those that measure before those that write. Where none are given
            they are ``Throughput()`` and ``Progress()``.
        batch: this rank's part of the batch of the step.
        loss: of the last step.
        values: name -> number, of the last step and the last validation: "loss", "learning_rate", "validation/loss",
            and what hooks add. Loggers write all of it.
        samples, tokens: of the whole batch of the last step. A token is a number of ``input_ids``; where a batch has
            none, a sample.
        last_step, last_epoch: where ``fit`` is to end; None where the other one says it.
        problem: the error that ends the run; None without.
        stopped_by: why it ended before its last step, in words; None where it did not.
        was_interrupted: whether that was a signal.
        signal: the one that came to this rank; None without.
        extra: plain values of your own, which a checkpoint keeps.
    """

    def __init__(self, engine: Engine, hooks: Sequence[Hook] | None = None) -> None:
        self.engine = engine
        self.hooks: list[Hook] = [Throughput(), Progress()] if hooks is None else list(hooks)
        strange = next((hook for hook in self.hooks if not isinstance(hook, Hook)), None)
        if strange is not None:
            raise ConfigError(
                f"hooks holds {strange!r:.80}", remedy="Write class MyHook(shardformer.hooks.Hook), and give MyHook()"
            )
        self.batch: Any = None
        self.loss: Tensor | None = None
        self.values: dict[str, float] = {}
        self.samples = self.tokens = 0
        self.last_step: int | None = None
        self.last_epoch: int | None = None
        self.problem: BaseException | None = None
        self.stopped_by: str | None = None
        self.was_interrupted = False
        self.extra: Any = None
        self._agreement = StepSynchronizer()
        self._why, self._doing = "", ""
        self._validation: ShardedDataLoader | None = None
        self._saves: list[Callable[..., Any]] = []
        self._position: Any = None
        self._validated_step = -1
        self._modes: dict[str, bool] = {}
        self._began = time.perf_counter()

    # --- what hooks read and ask for

    @property
    def step(self) -> int:
        """Training steps that were made, those before this run too."""
        return self.engine.steps

    @property
    def epoch(self) -> int:
        """Epochs that were finished."""
        return self._data.epoch

    @property
    def num_steps(self) -> int | None:
        """At which step ``fit`` is to end; None where that is not known."""
        if self.last_step is not None or self.last_epoch is None:
            return self.last_step
        try:
            return self.last_epoch * len(self._data)
        except TypeError:
            return None

    @property
    def signal(self) -> Signals | None:
        return self._agreement.signal

    @property
    def seconds(self) -> float:
        """Since ``fit`` was called."""
        return time.perf_counter() - self._began

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes what all know."""
        return self.engine.is_first

    @property
    def has_validation(self) -> bool:
        """Whether ``fit`` was given data to try the model on."""
        return self._validation is not None

    def stop(self, why: str = "a hook asked for it") -> None:
        """The run ends on all ranks before the next step."""
        self._agreement.ask(stop=True)
        self._why = why

    def validate(self) -> None:
        """All ranks try the model on the validation data before the next step."""
        self._agreement.ask(validate=True)

    def save(self) -> None:
        """All ranks save a checkpoint before the next step, where a hook says how: see ``Checkpoint``."""
        self._agreement.ask(save=True)

    # --- the loop

    @property
    def _data(self) -> ShardedDataLoader:
        if self.engine.data is None:
            raise ConfigError(
                "The engine has no training data",
                remedy="Give initialize(..., train_data=data, batch_size=32), or fit(train, batch_size=32)",
            )
        return self.engine.data

    def fit(
        self,
        train: Any = None,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        validation: Any = None,
        validate_every: int | None = None,
        batch_size: int | None = None,
    ) -> dict[str, float]:
        """Trains up to a number of steps or epochs, counted from the beginning of training.

        A run that goes on from a checkpoint makes what is left of them.

        Args:
            train: data in the place of the engine's, as ``initialize`` takes it.
            steps, epochs: how many in all; one of the two.
            validation: data to try the model on, as ``initialize`` takes it, or ``ShardedDataLoader``.
            validate_every: steps from one validation to the next; None: behind every epoch. One more is at the end.
            batch_size: of ``train`` and ``validation``; None: that of the engine's data. A DataLoader has its own.

        Returns the last values. Raises, on all ranks, what ended the run.
        """
        self._check_end(steps, epochs)
        self._take_data(train, validation, validate_every, batch_size)
        self.last_step, self.last_epoch = steps, epochs
        self.problem, self.stopped_by, self.was_interrupted = None, None, False
        self._agreement, self._began = StepSynchronizer(), time.perf_counter()
        self._modes = modes_of(start_training(self.engine.model))
        self.engine.listener = self._call
        try:
            with self._agreement.signals(self._tell_signal):
                self._call_hooks("setup")
                self._call_hooks("before_train")
                self._position = self._data.state()
                if self._saves:
                    self.engine.check_save(**self._saved())
                self._run(validate_every)
                self._call_hooks("after_train")
                if self._agreement.synchronize().save:
                    self._save()
                self.engine.wait()
        except BaseException as error:
            self.problem = error
            for hook in self.hooks:
                self._try(hook, "on_exception")
            raise
        finally:
            self.engine.listener = None
            self._saves.clear()
        return self.values

    def _run(self, validate_every: int | None) -> None:
        data = self._data
        while not self._is_over():
            self._call_hooks("before_epoch")
            batches = iter(data)
            while (batch := self._next(batches)) is not None:
                self._between_steps()
                if self.stopped_by is not None:
                    data.load_state(self._position)  # this batch was not trained on
                    return
                self._train(batch)
                self._position = data.state()
                if validate_every is not None and self.step % validate_every == 0:
                    self.validate()
                if self._is_over_at(self.step):
                    break
            if data.seen == 0:  # the epoch is finished
                self._position = data.state()
                self._call_hooks("after_epoch")
                if validate_every is None:
                    self.validate()
            if self._is_over() and self._validated_step != self.step:
                self.validate()
            self._between_steps()
            if self.stopped_by is not None:
                return

    def _tell_signal(self, number: Signals) -> None:
        """Says at once what happens now: a step may take minutes."""
        if not self.is_first or is_ended():
            return
        name = "Ctrl-C" if number is SIGINT else number.name
        doing = [f"finishing {self._doing}"] * bool(self._doing) + ["saving"] * bool(self._saves)
        more = " (press again to stop at once)" if number is SIGINT else ""
        # not print: the signal may come while something is printed
        os.write(2, f"\n{name}: {' and '.join(doing) or 'stopping'}{more}\n".encode())

    def _next(self, batches: Iterator[Any]) -> Any:
        """The next batch; None behind the last. Where it cannot be had all ranks hear of it before the next step."""
        try:
            self.batch = next(batches, None)
            if self.batch is not None:
                self._call("before_step")
            return self.batch
        except Exception as error:
            if self._agreement.is_broken:
                raise
            self._agreement.fail(None, "the training data", error)
            return {}

    def _train(self, batch: Any) -> None:
        self._doing = f"step {self.step + 1}"
        if not self.engine.model.training:  # a hook evaluated, and left it so
            self.engine.train()
            set_modes(self.engine.model, self._modes)
        self.samples = self._data.batch_samples
        self.tokens = round(self.samples * _tokens_of_sample(batch))
        rate = _learning_rate(self.engine)  # of this step: the scheduler is about to set that of the next
        self.loss = self.engine.train_step(batch)
        self.values["loss"] = float(self.loss)
        if rate is not None:
            self.values["learning_rate"] = rate
        if self.engine.grad_norm is not None:
            self.values["grad_norm"] = float(self.engine.grad_norm)
        self._call("after_step")

    def _between_steps(self) -> None:
        """What was asked for since the last step, by any rank."""
        self.agree()
        asked = self._asked()
        if asked.validate:
            self._validate()
        asked |= self._asked()
        if asked.save:
            self._save()
        if asked.stop and self.stopped_by is None:
            self.stopped_by = self._why or "a hook of another rank asked for it"

    def _asked(self) -> StepRequests:
        """What all ranks have heard of since the last time; a signal ends the run, also one that came meanwhile."""
        asked = self._agreement.synchronize()
        if asked.signal and not self.was_interrupted:
            self._call_hooks("on_signal")
            self.stopped_by, self.was_interrupted = "a signal", True
            asked |= self._agreement.synchronize()
        return asked

    def _validate(self) -> None:
        if self._validation is None:
            return
        self._validated_step = self.step
        self._doing = "the validation"
        self._call_hooks("before_validation")
        self._validation.rewind()
        self.values["validation/loss"] = float(self.engine.evaluate(self._each_of(self._validation)))
        for scheduler in self.engine.schedulers:
            if needs_metric(scheduler):
                scheduler.step(self.values["validation/loss"])
        self._call_hooks("after_validation")

    def _each_of(self, batches: ShardedDataLoader) -> Iterator[Any]:
        for batch in batches:
            yield batch
            for hook in self.hooks:
                self._try(hook, "on_validation_batch", batch)
            if self.hooks:
                self.agree()

    def _save(self) -> None:
        if not self._saves:
            return
        self._call_hooks("before_save")
        for save in self._saves:
            save(**self._saved())
        self._call_hooks("after_save")

    def _saved(self) -> dict[str, Any]:
        """What a checkpoint has beside what the engine saves."""
        states = {name: hook.state() for name, hook in self._named_hooks().items()}
        return {"extra": {HOOKS: states, TRAINER_USER_KEY: self.extra}, "position": self._position}

    def on_save(self, save: Callable[..., Any]) -> None:
        """Lets ``save(extra=, position=)`` be called where a checkpoint is asked for: for hooks that save.

        Until ``fit`` ends; a hook says it in ``setup``. What cannot be saved is then refused before the first step.
        """
        self._saves.append(save)

    def load(self, folder: Any) -> LoadedCheckpoint:
        """Goes on from a checkpoint that a trainer saved: ``engine.load``, and the states of the hooks.

        Where it raises, the engine and the hooks are as they were before.
        """
        with unchanged_on_error((), self.hooks):
            loaded = self.engine.load_and_take(folder, self._take_hooks)
        said = loaded.extra
        if isinstance(said, dict) and HOOKS in said:
            self.extra = said[TRAINER_USER_KEY]
            hooks = self._named_hooks()
            left = [name for name, state in said[HOOKS].items() if state is not None and name not in hooks]
            if left and self.is_first:
                warnings.warn(f"The checkpoint has states of hooks that are not here: {', '.join(left)}", stacklevel=2)
        return loaded

    def _take_hooks(self, loaded: LoadedCheckpoint) -> None:
        hooks, said = self._named_hooks(), loaded.extra
        states = said[HOOKS] if isinstance(said, dict) and HOOKS in said else {}
        for name, state in states.items():
            if state is not None and name in hooks:
                hooks[name].load_state(state)

    def _named_hooks(self) -> dict[str, Hook]:
        """By the names of their classes; of the second one of a class, ``Name 2``."""
        named: dict[str, Hook] = {}
        for hook in self.hooks:
            kind, number = type(hook).__name__, 1
            while (name := kind if number == 1 else f"{kind} {number}") in named:
                number += 1
            named[name] = hook
        return named

    def agree(self) -> None:
        """All ranks learn whether a hook failed on one of them; a hook calls it before it communicates.

        At any moment but those between ``before_forward`` and ``after_optimizer_step``. Raises, on all ranks, what
        failed on one. Communicates five numbers.
        """
        self._agreement.check(self.engine)

    def _call_hooks(self, moment: str) -> None:
        """One outside of steps, behind which all ranks agree."""
        self._call(moment)
        self.agree()

    def _call(self, moment: str) -> None:
        for hook in self.hooks:
            self._try(hook, moment)

    def _try(self, hook: Hook, moment: str, *args: Any) -> None:
        """A hook that fails is the last one that is called on this rank, until all ranks hear of it."""
        if self._agreement.failure is not None and moment != "on_exception":
            return
        try:
            getattr(hook, moment)(self, *args)
        except Exception as error:
            if self._agreement.is_broken and moment != "on_exception":
                raise
            self._agreement.fail(hook, moment, error)

    # --- what fit was given

    def _check_end(self, steps: int | None, epochs: int | None) -> None:
        given = [n for n in (steps, epochs) if n is not None]
        if len(given) != 1 or isinstance(given[0], bool) or not isinstance(given[0], int) or given[0] < 0:
            raise ConfigError(
                f"fit(steps={steps!r}, epochs={epochs!r})", remedy="Write fit(epochs=3), or fit(steps=1000)"
            )

    def _take_data(self, train: Any, validation: Any, every: int | None, batch_size: int | None) -> None:
        before = self.engine.data
        if train is not None:
            self.engine.set_data(self._batches(train, batch_size, before))
        if validation is not None:
            validation = self._batches(validation, batch_size, before, shuffle=False, merge_last=True)
        self._validation = validation
        if every is not None and (validation is None or isinstance(every, bool) or every < 1):
            raise ConfigError(
                f"validate_every={every!r}" + (" without validation data" if validation is None else ""),
                rule="It is a number of steps, from 1 on, behind which the model is tried on the validation data",
                remedy="Write fit(..., validation=data, validate_every=100), or leave it out",
            )

    def _batches(
        self, data: Any, batch_size: int | None, before: ShardedDataLoader | None, **options: Any
    ) -> ShardedDataLoader:
        """Of data that ``fit`` was given; what it does not say is as in the engine's data."""
        if isinstance(data, ShardedDataLoader):
            return data
        if isinstance(data, DataLoader):
            options = {"merge_last": True} if options else {}
        elif before is not None:
            batch_size = before.batch_size if batch_size is None else batch_size
            options["collate_fn"] = before.collate_fn
        return batches_of(data, self.engine.context, batch_size=batch_size, **options)

    def _is_over(self) -> bool:
        return self._is_over_at(self.step) or (self.last_epoch is not None and self.epoch >= self.last_epoch)

    def _is_over_at(self, step: int) -> bool:
        return self.last_step is not None and step >= self.last_step


def _tokens_of_sample(batch: Any) -> float:
    """Numbers of ``input_ids`` in a sample of this rank's part, on average; 1 where there are none."""
    parts = [
        part.get("input_ids") for part in (batch if is_batch_list(batch) else [batch]) if isinstance(part, Mapping)
    ]
    ids = [part for part in parts if isinstance(part, Tensor) and part.dim() > 1 and len(part)]
    return sum(part.numel() for part in ids) / sum(len(part) for part in ids) if ids else 1.0


def _learning_rate(engine: Engine) -> float | None:
    optimizer = engine.optimizer[0] if isinstance(engine.optimizer, list) else engine.optimizer
    return None if optimizer is None else float(optimizer.param_groups[0]["lr"])
