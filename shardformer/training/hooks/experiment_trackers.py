"""Hooks that send metrics and the run configuration to Weights & Biases or MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from shardformer.errors import ConfigError, get_first_message_line, import_optional_module
from shardformer.training.hook import TrainerProtocol
from shardformer.training.hooks.json_lines import EverySteps, MetricsHook, OutputDirectory

Project = Annotated[str, "Project or experiment in the tracker."]
RunName = Annotated[str | None, "Name of the run. By default, the tracker chooses a name."]
RecordedConfig = Annotated[
    Mapping[str, Any] | None, "Values to record with the run. `shardformer train` passes its configuration."
]
MAX_MLFLOW_VALUE = 6000
"""Maximum number of characters of a parameter in MLflow."""


class _ExperimentTracker(MetricsHook):
    """Base class for hooks that send metrics to an experiment tracker. A resumed run continues its earlier record."""

    _module_name = ""

    def __init__(
        self, directory: str | Path, project: str, name: str | None, config: Mapping[str, Any] | None, every: int
    ) -> None:
        super().__init__(directory, every)
        name = self._module_name
        what = f"The hook {type(self).__name__}"
        self._module = import_optional_module(name, what, name, "use the hook TensorBoard or JsonLines")
        self.project, self.name = project, name
        self.config = dict(config or {})
        self._run_id: str | None = None

    def state(self) -> Any:
        return {"run_id": self._run_id}

    def load_state(self, state: Any) -> None:
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

    A resumed run continues its record. Only the first rank sends. Hooks that compute metrics must come before this
    hook. Log in with ``wandb login``, or set ``WANDB_MODE=offline`` to write files without a network.
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

    def _write(self, trainer: TrainerProtocol, values: dict[str, float]) -> None:
        if self._writer is not None:
            self._writer.run.log(values, step=trainer.step)


class _WandbWriter:
    def __init__(self, run: Any) -> None:
        self.run = run

    def close(self) -> None:
        self.run.finish()


class Mlflow(_ExperimentTracker):
    """Sends the metrics in ``trainer.values`` and the run configuration to MLflow.

    A resumed run continues its record. Only the first rank sends. Hooks that compute metrics must come before this
    hook. The environment variable ``MLFLOW_TRACKING_URI`` specifies the server or the database.
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

    def _write(self, trainer: TrainerProtocol, values: dict[str, float]) -> None:
        if self._writer is not None:
            self._module.log_metrics(values, step=trainer.step)


class _MlflowWriter:
    def __init__(self, module: Any) -> None:
        self._module = module

    def close(self) -> None:
        self._module.end_run()


def _flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert a nested config to a single dict with keys such as ``model.name``."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= _flatten_config(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
