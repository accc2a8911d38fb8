"""Defines ``Trainer``, a training loop that calls hooks before and after each step, epoch and validation."""

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
from shardformer.comm.collectives import broadcast_object
from shardformer.errors import ConfigError
from shardformer.launcher.shutdown import is_aborted_by_launcher
from shardformer.pipeline.pipeline import ensure_training_mode, get_training_modes, set_training_modes
from shardformer.sharding.describe import format_summary, format_summary_as_html
from shardformer.training.data_loader import ShardedDataLoader, create_data_loader_on_all_ranks, is_list_of_batches
from shardformer.training.engine import METRIC_ARGUMENTS, Engine, get_required_step_argument
from shardformer.training.hook import Hook
from shardformer.training.hooks.progress import Progress
from shardformer.training.hooks.throughput import Throughput
from shardformer.training.preemption import HookSynchronizer, RequestedActions
from shardformer.zero.optimizer_state_view import rollback_optimizers_on_error

HOOKS, TRAINER_USER_KEY = "hooks", "user"
"""Keys of the hook states and of the user's values in a checkpoint."""


class Trainer:
    """Runs the training loop of an engine, and calls hooks for logging, checkpoints and validation.

    >>> trainer = shardformer.Trainer(engine)                                                     # doctest: +SKIP
    >>> trainer.fit(epochs=3, validation=held_out)                                                # doctest: +SKIP

    In addition to what the engine communicates, a step communicates five integers: whether a hook failed on any rank,
    and the requests of hooks on any rank.

    Attributes:
        engine: Engine that trains the model.
        hooks: Hooks in the order in which they are called. Hooks that compute metrics must come before hooks that write
            them. The default is ``Throughput()`` and ``Progress()``.
        batch: Local batch of the current step.
        loss: Loss of the last step.
        values: Metrics of the last step and the last validation by name, such as "loss", "learning_rate" and
            "validation/loss". Hooks add to them, and loggers write all of them.
        samples: Global batch size of the last step.
        tokens: Number of ``input_ids`` in the global batch, or of samples if there are none.
        last_step: Step at which ``fit`` ends, or None.
        last_epoch: Epoch at which ``fit`` ends, or None.
        problem: Error that ends the run, or None.
        stopped_by: Reason why the run stopped early, or None.
        was_interrupted: Whether a signal stopped the run.
        signal: Signal that this rank received, or None.
        extra: Plain values of your own to store in checkpoints.
    """

    def __init__(self, engine: Engine, hooks: Sequence[Hook] | None = None) -> None:
        self.engine = engine
        self.hooks: list[Hook] = [Throughput(), Progress()] if hooks is None else list(hooks)
        not_a_hook = next((hook for hook in self.hooks if not isinstance(hook, Hook)), None)
        if not_a_hook is not None:
            raise ConfigError(
                f"hooks must contain instances of shardformer.hooks.Hook, but got {not_a_hook!r:.80}.",
                remedy="Pass instances of subclasses of Hook, such as Throughput().",
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
        self._synchronizer = HookSynchronizer()
        self._stop_reason, self._current_activity = "", ""
        self._validation: ShardedDataLoader | None = None
        self._save_functions: list[Callable[..., object]] = []
        self._position: Any = None
        self._validated_step = -1
        self._training_modes: dict[str, bool] = {}
        self._started_at = time.perf_counter()

    def __repr__(self) -> str:
        return format_summary(*self._get_summary_title_and_rows())

    def _repr_html_(self) -> str:
        return format_summary_as_html(*self._get_summary_title_and_rows())

    def _get_summary_title_and_rows(self) -> tuple[str, dict[str, str]]:
        title, rows = self.engine.summary()
        total = f" of {self.num_steps}" if self.engine.has_data and self.num_steps is not None else ""
        hooks = ", ".join(self._get_hooks_by_name()) or "none"
        return title.replace("Engine", "Trainer", 1), {**rows, "steps": f"{rows['steps']}{total}", "hooks": hooks}

    # --- interface for hooks

    @property
    def step(self) -> int:
        """Number of training steps so far, including the steps before the run was resumed."""
        return self.engine.steps

    @property
    def epoch(self) -> int:
        """Number of complete passes over the training data so far."""
        return self._training_data.epoch

    @property
    def num_steps(self) -> int | None:
        """Total number of training steps when ``fit`` ends, or None if it is unknown."""
        if self.last_step is not None or self.last_epoch is None:
            return self.last_step
        try:
            return self.last_epoch * len(self._training_data)
        except TypeError:
            return None

    @property
    def signal(self) -> Signals | None:
        return self._synchronizer.signal

    @property
    def seconds(self) -> float:
        """Seconds since ``fit`` was called."""
        return time.perf_counter() - self._started_at

    @property
    def is_first(self) -> bool:
        """Whether this process is the first rank, which writes logs and shared files."""
        return self.engine.is_first

    @property
    def has_validation(self) -> bool:
        """Whether ``fit`` received validation data."""
        return self._validation is not None

    def stop(self, why: str = "a hook requested it") -> None:
        """Request that training stops on all ranks before the next step. ``why`` is reported as the reason."""
        self._synchronizer.request_actions_on_all_ranks(stop=True)
        self._stop_reason = why

    def validate(self) -> None:
        """Request that all ranks run a validation before the next step."""
        self._synchronizer.request_actions_on_all_ranks(validate=True)

    def save(self) -> None:
        """Request that all ranks save a checkpoint before the next step, with a hook such as ``Checkpoint``."""
        self._synchronizer.request_actions_on_all_ranks(save=True)

    # --- the loop

    @property
    def _training_data(self) -> ShardedDataLoader:
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
        """Train the model up to a total number of steps or epochs.

        A run that resumes from a checkpoint continues up to the same total.

        Args:
            train: Training data that replaces ``engine.data``, in any form that ``initialize`` accepts.
            steps: Total number of steps. Pass either ``steps`` or ``epochs``.
            epochs: Total number of epochs.
            validation: Validation data in any form that ``initialize`` accepts, or a ``ShardedDataLoader``.
            validate_every: Number of steps between validations. By default, a validation runs after every epoch. In
                both cases, a validation also runs after the last step.
            batch_size: Global batch size of ``train`` and ``validation``. The default is the batch size of
                ``engine.data``. A DataLoader specifies its own batch size.

        Returns:
            The last ``values``. If an error ends the run, it is raised on all ranks.
        """
        total = steps if epochs is None else epochs
        if (steps is None) == (epochs is None) or isinstance(total, bool) or not isinstance(total, int) or total < 0:
            raise ConfigError(
                f"fit() requires either steps or epochs, but got steps={steps!r} and epochs={epochs!r}.",
                remedy="Pass one of them as an integer, for example fit(epochs=3) or fit(steps=1000).",
            )
        self._set_data_loaders(train, validation, validate_every, batch_size)
        self._check_metric_schedulers()
        self.last_step, self.last_epoch = steps, epochs
        self.problem, self.stopped_by, self.was_interrupted = None, None, False
        self._synchronizer, self._started_at = HookSynchronizer(), time.perf_counter()
        self._training_modes = get_training_modes(ensure_training_mode(self.engine.model))
        self.engine.listener = self._call_hooks
        try:
            with self._synchronizer.capture_signals(self._print_signal_message):
                self._call_hooks_and_synchronize_ranks("setup")
                self._call_hooks_and_synchronize_ranks("before_train")
                self._position = self._training_data.state()
                if self._save_functions:
                    self.engine.check_save(**self._get_checkpoint_save_kwargs())
                self._run_training_loop(validate_every)
                self._finish_training()
        except BaseException as error:
            self.problem = error
            for hook in self.hooks:
                self._call_hook(hook, "on_exception")
            raise
        finally:
            self.engine.listener = None
            self._save_functions.clear()
        return self.values

    def evaluate(self, validation: Any, *, batch_size: int | None = None) -> dict[str, float]:
        """Compute the loss on validation data, and the metrics that hooks such as ``Metrics`` add, without training.

        Args:
            validation: Data in any form that ``initialize`` accepts, or a ``ShardedDataLoader``.
            batch_size: Global batch size. The default is the batch size of ``engine.data``.

        Returns:
            ``values``, which contain "validation/loss".
        """
        self._set_data_loaders(None, validation, None, batch_size)
        assert self._validation is not None
        self._synchronizer = HookSynchronizer()
        self._run_validation(self._validation, is_training=False)
        return self.values

    def _run_training_loop(self, validate_every: int | None) -> None:
        data = self._training_data
        while not self._is_finished():
            self._call_hooks_and_synchronize_ranks("before_epoch")
            batches = iter(data)
            while (batch := self._next_batch(batches)) is not None:
                self._run_requested_actions()
                if self.stopped_by is not None:
                    data.load_state(self._position)  # this batch was not used
                    return
                self._train_step(batch)
                self._position = data.state()
                if validate_every is not None and self.step % validate_every == 0:
                    self.validate()
                if self._is_last_step():
                    break
            if data.seen == 0:  # the epoch is finished
                self._position = data.state()
                self._call_hooks_and_synchronize_ranks("after_epoch")
                if validate_every is None:
                    self.validate()
            if self._is_finished() and self._validated_step != self.step:
                self.validate()
            self._run_requested_actions()
            if self.stopped_by is not None:
                return

    def _finish_training(self) -> None:
        self._call_hooks_and_synchronize_ranks("after_train")
        requests = self._synchronizer.pop_requested_actions()
        if requests.save:
            self._save_checkpoint()
        self.engine.wait()
        self.synchronize_ranks()
        if (requests | self._synchronizer.pop_requested_actions()).signal:  # after the last step
            self.stopped_by, self.was_interrupted = "a signal", True
        self._call_hooks_and_synchronize_ranks("after_fit")

    def _print_signal_message(self, received_signal: Signals) -> None:
        """Print immediately that a signal will stop the run, because the current step may take minutes."""
        if not self.is_first or is_aborted_by_launcher():
            return
        activities = [f"finishing {self._current_activity}"] * bool(self._current_activity)
        activities += ["saving"] * bool(self._save_functions)
        text = " and ".join(activities) or "stopping"
        text = (
            f"{text[:1].upper()}{text[1:]}."
            if received_signal is SIGINT
            else f"Received {received_signal.name}: {text}."
        )
        more = " Press Ctrl-C again to stop at once." if received_signal is SIGINT else ""
        # print is not reentrant, and the signal may arrive while something is printed
        os.write(2, f"\n{text}{more}\n".encode())

    def _next_batch(self, batch_iter: Iterator[Any]) -> Any:
        """Return the next training batch, or None at the end of the epoch.

        If reading the data fails, all ranks raise the error before the next step.
        """
        try:
            self.batch = next(batch_iter, None)
            if self.batch is not None:
                self._call_hooks("before_step")
            return self.batch
        except Exception as error:
            if self._synchronizer.is_broken:
                raise
            if self.signal is None:  # a signal may have ended the data loading processes too
                self._synchronizer.record_hook_failure(None, "the training data", error)
            return {}

    def _train_step(self, batch: Any) -> None:
        self._current_activity = f"step {self.step + 1}"
        if not self.engine.model.training:  # a hook left the model in eval mode
            self.engine.train()
            set_training_modes(self.engine.model, self._training_modes)
        self.samples = self._training_data.batch_samples
        self.tokens = round(self.samples * _compute_mean_tokens_per_sample(batch))
        # read before train_step, in which the scheduler sets the rate of the next step
        rate = next((float(optimizer.param_groups[0]["lr"]) for optimizer in self.engine.optimizers), None)
        self.loss = self.engine.train_step(batch)
        self.values["loss"] = float(self.loss)
        if rate is not None:
            self.values["learning_rate"] = rate
        if self.engine.grad_norm is not None:
            self.values["grad_norm"] = float(self.engine.grad_norm)
        self._call_hooks("after_step")
        self._current_activity = ""

    def _run_requested_actions(self) -> None:
        """Validate, save a checkpoint or stop on all ranks if a hook on any rank requested it."""
        self.synchronize_ranks()
        requests = self._pop_requested_actions()
        if requests.validate and self._validation is not None:
            self._run_validation(self._validation, is_training=True)
        requests |= self._pop_requested_actions()
        if requests.save:
            self._save_checkpoint()
        if requests.stop and self.stopped_by is None:
            self.stopped_by = self._stop_reason or "a hook of another rank requested it"

    def _pop_requested_actions(self) -> RequestedActions:
        """Return the actions that hooks requested, and clear them. After a signal, call ``on_signal`` first."""
        requests = self._synchronizer.pop_requested_actions()
        if requests.signal and not self.was_interrupted:
            self._call_hooks_and_synchronize_ranks("on_signal")
            self.stopped_by, self.was_interrupted = "a signal", True
            requests |= self._synchronizer.pop_requested_actions()
        return requests

    @property
    def _metric_schedulers(self) -> list[Any]:
        return [each for each in self.engine.schedulers if get_required_step_argument(each) in METRIC_ARGUMENTS]

    def _check_metric_schedulers(self) -> None:
        """Raise ConfigError for a scheduler that cannot follow the validation loss."""
        for scheduler in self._metric_schedulers:
            kind = type(scheduler).__name__
            if self._validation is None:
                raise ConfigError(
                    f"{kind} changes the learning rate after a validation, but fit() has no validation data.",
                    remedy="Pass validation= to fit(), or use another scheduler.",
                )
            if getattr(scheduler, "mode", "min") != "min":
                raise ConfigError(
                    f"{kind} has mode={scheduler.mode!r}, but the trainer passes it the validation loss.",
                    remedy="Use mode='min', or call its step method in your own hook and omit scheduler=.",
                )

    def _run_validation(self, data_loader: ShardedDataLoader, *, is_training: bool) -> None:
        def iter_batches() -> Iterator[Any]:
            for batch in data_loader:
                yield batch
                for hook in self.hooks:
                    self._call_hook(hook, "on_validation_batch", batch)
                if self.hooks:
                    self.synchronize_ranks()

        self._validated_step, self._current_activity = self.step, "the validation"
        self._call_hooks_and_synchronize_ranks("before_validation")
        data_loader.rewind()
        self.values["validation/loss"] = float(self.engine.evaluate(iter_batches()))
        for scheduler in self._metric_schedulers if is_training else ():
            scheduler.step(self.values["validation/loss"])
        self._call_hooks_and_synchronize_ranks("after_validation")
        self._current_activity = ""

    def _save_checkpoint(self) -> None:
        if not self._save_functions:
            return
        self._call_hooks_and_synchronize_ranks("before_save")
        for save in self._save_functions:
            save(**self._get_checkpoint_save_kwargs())
        self._call_hooks_and_synchronize_ranks("after_save")

    def _get_checkpoint_save_kwargs(self) -> dict[str, Any]:
        """Return the arguments for ``engine.save``: the hook states and the position in the training data."""
        hooks = self._get_hooks_by_name()
        states = {name: hook.state() for name, hook in hooks.items()}
        of_first = {name: states[name] for name, hook in hooks.items() if hook.uses_first_rank_state}
        if of_first:
            states |= broadcast_object(of_first, self.engine.world)
        return {"extra": {HOOKS: states, TRAINER_USER_KEY: self.extra}, "position": self._position}

    def on_save(self, save: Callable[..., object]) -> None:
        """Register a function ``save(extra=, position=)`` that saves checkpoints. Call this method in ``Hook.setup``.

        The registration lasts until ``fit`` ends. ``fit`` checks before the first step that the run can be saved.
        """
        self._save_functions.append(save)

    def load(self, folder: str | os.PathLike[str]) -> LoadedCheckpoint:
        """Load a checkpoint, and restore the engine and the states of all hooks.

        If an error is raised, the engine and the hooks keep their previous state.
        """
        hooks, saved = self._get_hooks_by_name(), dict[str, Any]()

        def load_hook_states(loaded_checkpoint: LoadedCheckpoint) -> None:
            if isinstance(loaded_checkpoint.extra, dict) and HOOKS in loaded_checkpoint.extra:
                saved.update(loaded_checkpoint.extra)
            for name, state in saved.get(HOOKS, {}).items():
                if state is not None and name in hooks:
                    hooks[name].load_state(state)

        with rollback_optimizers_on_error((), self.hooks):
            loaded = self.engine.load_with_callback(folder, load_hook_states)
        self.extra = saved.get(TRAINER_USER_KEY, self.extra)
        left = [name for name, state in saved.get(HOOKS, {}).items() if state is not None and name not in hooks]
        if left and self.is_first:
            text = f"The checkpoint contains the states of hooks that Trainer lacks: {', '.join(left)}. "
            warnings.warn(text + "Pass these hooks to Trainer to restore their states.", stacklevel=2)
        return loaded

    def _get_hooks_by_name(self) -> dict[str, Hook]:
        """Return a dict of hooks with class names as keys. A second hook of the same class has the key ``Name 2``."""
        names = [type(hook).__name__ for hook in self.hooks]
        numbers = [names[:i].count(name) + 1 for i, name in enumerate(names)]
        return {f"{name} {n}" if n > 1 else name: hook for name, n, hook in zip(names, numbers, self.hooks)}

    def synchronize_ranks(self) -> None:
        """Exchange hook errors and requests between all ranks. Hooks must call this method before they communicate.

        Do not call it between ``before_forward`` and ``after_optimizer_step``. Communicates five integers. Raises on
        all ranks the error of a hook that failed on any rank.
        """
        self._synchronizer.exchange_requested_actions(self.engine)

    def _call_hooks_and_synchronize_ranks(self, method_name: str) -> None:
        """Call a method of all hooks, and raise an error on all ranks if a hook failed on any rank."""
        self._call_hooks(method_name)
        self.synchronize_ranks()

    def _call_hooks(self, method_name: str) -> None:
        for hook in self.hooks:
            self._call_hook(hook, method_name)

    def _call_hook(self, hook: Hook, method_name: str, *args: Any) -> None:
        """Call a method of a hook, unless a hook has failed since the ranks last synchronized."""
        if self._synchronizer.failure is not None and method_name != "on_exception":
            return
        try:
            getattr(hook, method_name)(self, *args)
        except Exception as error:
            if self._synchronizer.is_broken and method_name != "on_exception":
                raise
            self._synchronizer.record_hook_failure(hook, method_name, error)

    # --- arguments of fit

    def _set_data_loaders(
        self, train_data: Any, validation_data: Any, validate_every: int | None, batch_size: int | None
    ) -> None:
        previous = self.engine.data if self.engine.has_data else None
        if train_data is not None:
            self.engine.set_data(self._make_data_loader(train_data, batch_size, previous))
        if validation_data is not None:
            validation_data = self._make_data_loader(
                validation_data, batch_size, previous, shuffle=False, merge_last=True
            )
        self._validation = validation_data
        if validate_every is not None and validation_data is None:
            raise ConfigError(
                f"validate_every={validate_every!r} requires validation data.",
                remedy="Pass fit(..., validation=data), or remove validate_every.",
            )
        if validate_every is not None and (isinstance(validate_every, bool) or validate_every < 1):
            raise ConfigError(
                f"validate_every must be a positive number of steps, but got {validate_every!r}.",
                remedy="For example, pass validate_every=100.",
            )

    def _make_data_loader(
        self, data: Any, batch_size: int | None, previous_loader: ShardedDataLoader | None, **options: Any
    ) -> ShardedDataLoader:
        """Create the data loader for data that was passed to ``fit``, with the options of the engine's data loader."""
        if isinstance(data, ShardedDataLoader):
            return data
        if isinstance(data, DataLoader):
            options = {"merge_last": True} if options else {}
        elif previous_loader is not None:
            batch_size = previous_loader.batch_size if batch_size is None else batch_size
            options["collate_fn"] = previous_loader.collate_fn
        return create_data_loader_on_all_ranks(data, self.engine.context, batch_size=batch_size, **options)

    def _is_finished(self) -> bool:
        return self._is_last_step() or (self.last_epoch is not None and self.epoch >= self.last_epoch)

    def _is_last_step(self) -> bool:
        return self.last_step is not None and self.step >= self.last_step


def _compute_mean_tokens_per_sample(batch: Any) -> float:
    """Return the mean number of tokens per sample in a batch, or 1 if the batch contains no ``input_ids``."""
    batches = batch if is_list_of_batches(batch) else [batch]
    columns = [each.get("input_ids") for each in batches if isinstance(each, Mapping)]
    ids = [x for x in columns if isinstance(x, Tensor) and x.dim() > 1 and len(x)]
    return sum(x.numel() for x in ids) / sum(len(x) for x in ids) if ids else 1.0
