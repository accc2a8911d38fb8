"""Hooks that write metrics to JSON Lines, TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from shardformer.errors import ConfigError, check_int, get_first_message_line, import_optional_module
from shardformer.filesystem import to_absolute_path
from shardformer.public_names import deprecate_renamed_arguments
from shardformer.training.hook import RENAMED_DIRECTORY, Hook, TrainerProtocol
from shardformer.training.metrics_log import MetricsRecord, MetricsWriter

VALIDATION = "validation/"
OutputDirectory = Annotated[str | Path, "Directory of the files, which is created if it does not exist."]
EverySteps = Annotated[int, "Number of steps between records. Validation metrics are always written."]


class MetricsLoggingHook(Hook):
    """Base class for hooks that write the metrics in ``trainer.values``. Only the first rank writes."""

    uses_first_rank_state = True
    _writer: Any = None

    def __init__(self, directory: OutputDirectory, every: EverySteps = 1) -> None:
        check_int(f"{type(self).__name__}.every", every, unit="steps", example=10)
        self.directory, self.every = to_absolute_path(directory), every

    def after_step(self, trainer: TrainerProtocol) -> None:
        if trainer.step % self.every == 0:
            self._write_metrics(trainer, {n: v for n, v in trainer.values.items() if not n.startswith(VALIDATION)})

    def after_validation(self, trainer: TrainerProtocol) -> None:
        self._write_metrics(trainer, {n: v for n, v in trainer.values.items() if n.startswith(VALIDATION)})

    def after_train(self, trainer: TrainerProtocol) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    on_exception = after_train

    def _write_metrics(self, trainer: TrainerProtocol, metric_values: dict[str, float]) -> None:
        """Write the metrics of the current step. Subclasses open their writer in ``before_train`` on the first rank."""


@deprecate_renamed_arguments(RENAMED_DIRECTORY, renamed_attributes=RENAMED_DIRECTORY)
class JsonLines(MetricsLoggingHook):
    """Writes the metrics in ``trainer.values`` to ``directory/records.jsonl``, which ``shardformer plot`` can plot.

    Put hooks that compute metrics before this hook. Only the first rank writes the file. This hook doesn't communicate.

    If you resume a run, the hook removes the lines for steps that the run repeats, and then appends to the file. If you
    start a new run in the same folder, the hook renames the file from the earlier run.
    """

    _seconds_before = _seconds = 0.0
    _layout = ""

    def before_train(self, trainer: TrainerProtocol) -> None:
        self._layout = ""  # the first record has the layout
        if trainer.is_first:
            self._writer = MetricsWriter(self.directory, trainer.step or None)

    def state(self) -> dict[str, Any]:
        return {"seconds": self._seconds}

    def load_state(self, state: dict[str, Any]) -> None:
        self._seconds_before = self._seconds = state["seconds"]

    def _write_metrics(self, trainer: TrainerProtocol, metric_values: dict[str, float]) -> None:
        self._seconds = self._seconds_before + trainer.seconds
        if self._writer is not None:
            before, self._layout = self._layout, trainer.engine.layout
            changed = self._layout if self._layout != before else ""
            self._writer.write(MetricsRecord(trainer.step, trainer.epoch, self._seconds, metric_values, changed))


_WRITER = (
    "torch.utils.tensorboard.writer",
    "The hook TensorBoard",
    "tensorboard",
    "use the hook JsonLines",
    "tensorboard",
)


@deprecate_renamed_arguments(RENAMED_DIRECTORY, renamed_attributes=RENAMED_DIRECTORY)
class TensorBoard(MetricsLoggingHook):
    """Writes the metrics in ``trainer.values`` to event files, which you can view with TensorBoard.

    Put hooks that compute metrics before this hook. If a resumed run repeats steps, TensorBoard hides their old values.
    Only the first rank writes the files. This hook doesn't communicate.
    """

    def __init__(self, directory: OutputDirectory, every: EverySteps = 1) -> None:
        super().__init__(directory, every)
        import_optional_module(*_WRITER)

    def before_train(self, trainer: TrainerProtocol) -> None:
        if trainer.is_first:
            purge = trainer.step + 1 if trainer.step else None
            self._writer = import_optional_module(*_WRITER).SummaryWriter(str(self.directory), purge_step=purge)

    def _write_metrics(self, trainer: TrainerProtocol, metric_values: dict[str, float]) -> None:
        if self._writer is not None:
            for name, value in metric_values.items():
                self._writer.add_scalar(name, value, trainer.step)

    def after_validation(self, trainer: TrainerProtocol) -> None:
        super().after_validation(trainer)
        if self._writer is not None:
            self._writer.flush()


Project = Annotated[str, "Project or experiment in the tracker."]
RunName = Annotated[str | None, "Name of the run. By default, the tracker chooses a name."]
RecordedConfig = Annotated[
    Mapping[str, Any] | None, "Values to record with the run. `shardformer train` passes its configuration."
]
MAX_MLFLOW_VALUE = 6000
"""Maximum number of characters of a parameter in MLflow."""


class _ExperimentTracker(MetricsLoggingHook):
    """Base class for hooks that send metrics to an experiment tracker. A resumed run continues its earlier record."""

    _module_name = ""

    def __init__(
        self, directory: str | Path, project: str, run_name: str | None, config: Mapping[str, Any] | None, every: int
    ) -> None:
        super().__init__(directory, every)
        library, what = self._module_name, f"The hook {type(self).__name__}"
        self._module = import_optional_module(library, what, library, "use the hook TensorBoard or JsonLines")
        self.project, self.name = project, run_name
        self.config = dict(config or {})
        self._run_id: str | None = None

    def state(self) -> dict[str, Any]:
        return {"run_id": self._run_id}

    def load_state(self, state: dict[str, Any]) -> None:
        self._run_id = state["run_id"]

    def before_train(self, trainer: TrainerProtocol) -> None:
        trainer.synchronize_ranks()
        if not trainer.is_first:
            return
        try:
            self._start_run()
        except ConfigError:
            raise
        except Exception as error:  # libraries raise their own errors, such as for a missing login
            reason = get_first_message_line(error)
            raise ConfigError(
                f"The hook {type(self).__name__} cannot start a run: {reason}.",
                remedy=f"Set up {self._module_name} as its documentation describes, or remove the hook.",
            ) from error

    def _start_run(self) -> None:
        """Start or continue a run in the tracker, and set ``_run_id`` and ``_writer``. Called on the first rank."""


class Wandb(_ExperimentTracker):
    """Sends the metrics in ``trainer.values`` and the run configuration to Weights & Biases.

    Log in with ``wandb login``, or set ``WANDB_MODE=offline`` to write files without a network. Put hooks that compute
    metrics before this hook. A resumed run continues its earlier record. Only the first rank sends the metrics.
    """

    _module_name = "wandb"

    def __init__(
        self,
        directory: OutputDirectory,
        project: Project = "shardformer",
        name: RunName = None,
        config: RecordedConfig = None,
        every: EverySteps = 1,
    ) -> None:
        super().__init__(directory, project, name, config, every)

    def _start_run(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        run = self._module.init(
            project=self.project, name=self.name, config=self.config, dir=str(self.directory), id=self._run_id,
            resume="allow" if self._run_id else None,
        )  # fmt: skip
        self._run_id, self._writer = run.id, _WandbWriter(run)

    def _write_metrics(self, trainer: TrainerProtocol, metric_values: dict[str, float]) -> None:
        if self._writer is not None:
            self._writer.run.log(metric_values, step=trainer.step)


class _WandbWriter:
    def __init__(self, wandb_run: Any) -> None:
        self.run = wandb_run

    def close(self) -> None:
        self.run.finish()


class Mlflow(_ExperimentTracker):
    """Sends the metrics in ``trainer.values`` and the run configuration to MLflow.

    Set the environment variable ``MLFLOW_TRACKING_URI`` to your server or database. Put hooks that compute metrics
    before this hook. A resumed run continues its earlier record. Only the first rank sends the metrics.
    """

    _module_name = "mlflow"

    def __init__(
        self,
        project: Project = "shardformer",
        name: RunName = None,
        config: RecordedConfig = None,
        every: EverySteps = 1,
    ) -> None:
        super().__init__(".", project, name, config, every)

    def _start_run(self) -> None:
        self._module.set_experiment(self.project)
        run = self._module.start_run(run_id=self._run_id, run_name=self.name)
        if self._run_id is None:
            flat = {key: str(value)[:MAX_MLFLOW_VALUE] for key, value in _flatten_config(self.config).items()}
            self._module.log_params(flat)
        self._run_id, self._writer = run.info.run_id, _MlflowWriter(self._module)

    def _write_metrics(self, trainer: TrainerProtocol, metric_values: dict[str, float]) -> None:
        if self._writer is not None:
            self._module.log_metrics(metric_values, step=trainer.step)


class _MlflowWriter:
    def __init__(self, mlflow_module: Any) -> None:
        self._module = mlflow_module

    def close(self) -> None:
        self._module.end_run()


def _flatten_config(config: Mapping[str, Any], key_prefix: str = "") -> dict[str, Any]:
    """Convert a nested config to a single dict with keys such as ``model.name``."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= _flatten_config(value, f"{key_prefix}{key}.")
        else:
            found[key_prefix + key] = value
    return found
