"""``Trainer``: the loop around an engine, and the moments at which hooks are called."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardformer.checkpoint.load import Loaded
from shardformer.comm.collectives import all_reduce, gather_objects
from shardformer.engine.data import Batches
from shardformer.engine.engine import Engine, needs_metric
from shardformer.errors import ConfigError, InputError, ShardFormerError
from shardformer.trainer.hook import Hook

SIGNALS = (signal.SIGTERM, signal.SIGINT)
FAILED, STOP, VALIDATE, SAVE, SIGNAL = range(5)
HOOKS = "hooks"
"""Where, in what a checkpoint holds beside the model, the states of the hooks are."""


class Trainer:
    """Trains with an engine, and calls hooks at the moments of the run.

    >>> trainer = shardformer.Trainer(engine, hooks=[shardformer.hooks.Progress()])               # doctest: +SKIP
    >>> trainer.fit(epochs=3, validation=held_out)                                                # doctest: +SKIP

    Communicates, beside what the engine does, five numbers a step: whether a hook failed on a rank, and what the hooks
    of any rank ask for.

    Attributes:
        engine: what trains.
        hooks: in the order in which they are called.
        batch: this rank's part of the batch of the step.
        loss: of the last step.
        values: name -> number, of the last step and the last validation: "loss", "learning_rate", "validation/loss",
            and what hooks add. Loggers write all of it.
        samples, tokens: of the whole batch of the last step.
        last_step, last_epoch: where ``fit`` is to end; None where the other one says it.
        problem: the error that ends the run; None without.
        stopped_by: why it ended before its last step, in words; None where it did not.
    """

    def __init__(self, engine: Engine, hooks: Sequence[Hook] = ()) -> None:
        self.engine, self.hooks = engine, list(hooks)
        strange = next((hook for hook in self.hooks if not isinstance(hook, Hook)), None)
        if strange is not None:
            raise ConfigError(
                f"hooks holds {strange!r:.80}",
                rule="A hook is an object of a class that is derived from shardformer.Hook",
                remedy="Write class MyHook(shardformer.Hook), and give MyHook()",
            )
        self.batch: Any = None
        self.loss: Tensor | None = None
        self.values: dict[str, float] = {}
        self.samples = self.tokens = 0
        self.last_step: int | None = None
        self.last_epoch: int | None = None
        self.problem: BaseException | None = None
        self.stopped_by: str | None = None
        self.extra: Any = None
        self._failure: tuple[Hook | None, str, Exception] | None = None
        self._asked = [False] * 5
        self._why = ""
        self._validation: Batches | None = None
        self._saves: list[Any] = []
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
    def seconds(self) -> float:
        """Since ``fit`` was called."""
        return time.perf_counter() - self._began

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes what all know."""
        return self.engine.is_first

    def stop(self, why: str = "a hook asked for it") -> None:
        """The run ends on all ranks before the next step."""
        self._asked[STOP], self._why = True, why

    def validate(self) -> None:
        """All ranks try the model on the validation data before the next step."""
        self._asked[VALIDATE] = True

    def save(self) -> None:
        """All ranks save a checkpoint before the next step, where a hook says how: see ``Checkpoint``."""
        self._asked[SAVE] = True

    # --- the loop

    @property
    def _data(self) -> Batches:
        if self.engine.data is None:
            raise ConfigError(
                "The engine has no training data",
                rule="A trainer goes through the data of its engine",
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
            validation: data to try the model on, as ``initialize`` takes it, or ``Batches``.
            validate_every: steps from one validation to the next; None: behind every epoch.
            batch_size: of ``train`` and ``validation``; None: that of the engine's data.

        Returns the last values. Raises, on all ranks, what ended the run.
        """
        self._check_end(steps, epochs)
        self._take_data(train, validation, validate_every, batch_size)
        self.last_step, self.last_epoch = steps, epochs
        self.problem = self.stopped_by = None
        self._began = time.perf_counter()
        self.engine.listener = self._call
        try:
            with self._signals():
                self._call("before_train")
                self._agree()
                self._run(validate_every)
                self._call("after_train")
                self._agree()
                self.engine.wait()
        except BaseException as error:
            self.problem = error
            for hook in self.hooks:
                self._try(hook, "on_exception")
            raise
        finally:
            self.engine.listener = None
        return self.values

    def _run(self, validate_every: int | None) -> None:
        data = self._data
        while not self._is_over():
            self._call("before_epoch")
            batches, position = iter(data), data.state()
            while (batch := self._next(batches)) is not None:
                self._between_steps(position)
                if self.stopped_by is not None:
                    return
                self._train(batch)
                position = data.state()
                if validate_every is not None and self.step % validate_every == 0:
                    self.validate()
                if self._is_over_at(self.step):
                    break
            if data.seen == 0:  # the epoch is finished
                self._call("after_epoch")
                if validate_every is None and self._validation is not None:
                    self.validate()
            self._between_steps(data.state() if data.seen == 0 else position)
            if self.stopped_by is not None:
                return

    def _next(self, batches: Iterator[Any]) -> Any:
        """The next batch; None behind the last. Where it cannot be had all ranks hear of it before the next step."""
        try:
            self.batch = next(batches, None)
            if self.batch is not None:
                self._call("before_step")
            return self.batch
        except Exception as error:
            self._failure = self._failure or (None, "the training data", error)
            return {}

    def _train(self, batch: Any) -> None:
        self.engine.train()
        self.samples, self.tokens = self._data.batch_samples, self._data.batch_samples * _tokens_of(batch)
        self.loss = self.engine.train_step(batch)
        self.values["loss"] = float(self.loss)
        if (rate := _learning_rate(self.engine)) is not None:
            self.values["learning_rate"] = rate
        if self.engine.grad_norm is not None:
            self.values["grad_norm"] = float(self.engine.grad_norm)
        self._call("after_step")

    def _between_steps(self, position: Any) -> None:
        """What was asked for since the last step, by any rank."""
        asked = self._agree()
        if asked[SIGNAL]:
            self._call("on_signal")
            asked = [a or b for a, b in zip(asked, self._agree(), strict=True)]
            self.stopped_by = "a signal"
        if asked[VALIDATE]:
            self._validate()
            asked = [a or b for a, b in zip(asked, self._agree(), strict=True)]
        if asked[SAVE]:
            self._save(position)
            self._agree()
        if asked[STOP] and self.stopped_by is None:
            self.stopped_by = self._why or "a hook of another rank asked for it"

    def _validate(self) -> None:
        if self._validation is None:
            return
        self._call("before_validation")
        self._validation.rewind()
        self.values["validation/loss"] = float(self.engine.evaluate(self._each_of(self._validation)))
        for scheduler in self.engine.schedulers:
            if needs_metric(scheduler):
                scheduler.step(self.values["validation/loss"])
        self._call("after_validation")

    def _each_of(self, batches: Batches) -> Iterator[Any]:
        for batch in batches:
            yield batch
            for hook in self.hooks:
                self._try(hook, "on_validation_batch", batch)

    def _save(self, position: Any) -> None:
        if not self._saves:
            return
        self._call("before_save")
        states = [hook.state() for hook in self.hooks]
        for save in self._saves:
            save(extra={HOOKS: states, "user": self.extra}, position=position)
        self._call("after_save")

    def on_save(self, save: Any) -> None:
        """Lets ``save(extra=, position=)`` be called where a checkpoint is asked for: for hooks that save."""
        self._saves.append(save)

    def load(self, folder: Any) -> Loaded:
        """Goes on from a checkpoint that a trainer saved: ``engine.load``, and the states of the hooks."""
        loaded = self.engine.load(folder)
        said = loaded.extra
        if isinstance(said, dict) and HOOKS in said:
            self.extra = said["user"]
            for hook, state in zip(self.hooks, said[HOOKS]):
                if state is not None:
                    hook.load_state(state)
        return loaded

    # --- hooks, on all ranks

    def _call(self, moment: str) -> None:
        for hook in self.hooks:
            self._try(hook, moment)

    def _try(self, hook: Hook, moment: str, *args: Any) -> None:
        """A hook that fails is the last one that is called on this rank, until all ranks hear of it."""
        if self._failure is not None and moment != "on_exception":
            return
        try:
            getattr(hook, moment)(self, *args)
        except Exception as error:
            self._failure = self._failure or (hook, moment, error)

    def _agree(self) -> list[bool]:
        """What any rank asks for. Raises on all ranks what failed on one. Communicates five numbers."""
        self._asked[FAILED] = self._failure is not None
        world, device = self.engine.world, self.engine.context.device
        mine = torch.tensor(self._asked, dtype=torch.int32, device=device)
        asked = [bool(x) for x in all_reduce(mine, world, purpose="agreement").tolist()]
        self._asked = [False] * 5
        if asked[FAILED]:
            failure, self._failure = self._failure, None
            said = None if failure is None else _in_words(failure, world.rank)
            first = next(said for said in gather_objects(said, world) if said is not None)
            raise first from (failure[2] if failure is not None else None)
        return asked

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the run behind the step that runs; a second one ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}

        def note(number: int, frame: Any) -> None:
            self._asked[SIGNAL] = True
            for each, handler in before.items():
                signal.signal(each, handler)

        for number in SIGNALS:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # --- what fit was given

    def _check_end(self, steps: int | None, epochs: int | None) -> None:
        given = [n for n in (steps, epochs) if n is not None]
        if len(given) != 1 or isinstance(given[0], bool) or not isinstance(given[0], int) or given[0] < 0:
            raise ConfigError(
                f"fit(steps={steps!r}, epochs={epochs!r})",
                rule="A run ends after a number of steps, or of epochs, counted from the beginning of training",
                remedy="Write fit(epochs=3), or fit(steps=1000)",
            )

    def _take_data(self, train: Any, validation: Any, every: int | None, batch_size: int | None) -> None:
        context, before = self.engine.context, self.engine.data
        size = batch_size if batch_size is not None else before.batch_size if before is not None else None
        if train is not None:
            self.engine.take_data(train if isinstance(train, Batches) else Batches(train, context, batch_size=size))
        if isinstance(validation, Batches) or validation is None:
            self._validation = validation
        else:
            collate = before.collate_fn if before is not None else None
            self._validation = Batches(
                validation, context, batch_size=size, shuffle=False, merge_last=True, collate_fn=collate
            )
        if every is not None and (validation is None or isinstance(every, bool) or every < 1):
            raise ConfigError(
                f"validate_every={every!r}" + (" without validation data" if validation is None else ""),
                rule="It is a number of steps, from 1 on, behind which the model is tried on the validation data",
                remedy="Write fit(..., validation=data, validate_every=100), or leave it out",
            )

    def _is_over(self) -> bool:
        return self._is_over_at(self.step) or (self.last_epoch is not None and self.epoch >= self.last_epoch)

    def _is_over_at(self, step: int) -> bool:
        return self.last_step is not None and step >= self.last_step


def _in_words(failure: tuple[Hook | None, str, Exception], rank: int) -> ShardFormerError:
    hook, moment, error = failure
    if isinstance(error, ShardFormerError) and hook is None:
        return error
    where = moment if hook is None else f"The hook {type(hook).__name__} ({moment})"
    return InputError(
        f"{where[:1].upper()}{where[1:]} failed on rank {rank}: {type(error).__name__}: {error}",
        rule="A hook, or the data, that fails on one rank ends the run on all of them",
        remedy="Mend it, and go on from the last checkpoint",
    )


def _tokens_of(batch: Any) -> int:
    """Of a sample: the length of ``input_ids``, or 1 where there are none."""
    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    return int(ids.shape[1]) if isinstance(ids, Tensor) and ids.dim() > 1 else 1


def _learning_rate(engine: Engine) -> float | None:
    optimizer = engine.optimizer[0] if isinstance(engine.optimizer, list) else engine.optimizer
    return None if optimizer is None else float(optimizer.param_groups[0]["lr"])
