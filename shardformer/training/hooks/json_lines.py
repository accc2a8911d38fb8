"""A hook that writes metrics to a JSON Lines file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from shardformer.errors import check_int
from shardformer.filesystem.atomic_write import to_absolute_path
from shardformer.public_names import deprecate_renamed_arguments
from shardformer.training.hook import RENAMED_DIRECTORY, Hook, TrainerProtocol
from shardformer.training.metrics_log import MetricsRecord, MetricsWriter

VALIDATION = "validation/"
OutputDirectory = Annotated[str | Path, "Directory of the files, which is created if it does not exist."]
EverySteps = Annotated[int, "Number of steps between records. Validation metrics are always written."]


class MetricsHook(Hook):
    """Base class for hooks that write the metrics in ``trainer.values``. Only the first rank writes."""

    _writer: Any = None

    def __init__(self, directory: OutputDirectory, every: EverySteps = 1) -> None:
        check_int(f"{type(self).__name__}.every", every, unit="steps", example=10)
        self.directory, self.every = to_absolute_path(directory), every

    def after_step(self, trainer: TrainerProtocol) -> None:
        if trainer.step % self.every == 0:
            self._write(trainer, {n: v for n, v in trainer.values.items() if not n.startswith(VALIDATION)})

    def after_validation(self, trainer: TrainerProtocol) -> None:
        self._write(trainer, {n: v for n, v in trainer.values.items() if n.startswith(VALIDATION)})

    def after_train(self, trainer: TrainerProtocol) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    on_exception = after_train

    def _write(self, trainer: TrainerProtocol, values: dict[str, float]) -> None:
        """Write metric values. Subclasses open their writer in ``before_train`` on the first rank."""


@deprecate_renamed_arguments(RENAMED_DIRECTORY, attributes=RENAMED_DIRECTORY)
class JsonLines(MetricsHook):
    """Writes the metrics in ``trainer.values`` to ``directory/records.jsonl``, which ``shardformer plot`` can plot.

    A resumed run removes the lines of steps after its checkpoint and appends to the file. A new run keeps the file of
    an earlier run under another name. Only the first rank writes. Hooks that compute metrics must come before this
    hook. Communicates nothing.
    """

    _seconds_before = _seconds = 0.0
    _layout = ""

    def before_train(self, trainer: TrainerProtocol) -> None:
        self._layout = ""  # the first record has the layout
        if trainer.is_first:
            self._writer = MetricsWriter(self.directory, trainer.step or None)

    def state(self) -> Any:
        return {"seconds": self._seconds}

    def load_state(self, state: Any) -> None:
        self._seconds_before = self._seconds = state["seconds"]

    def _write(self, trainer: TrainerProtocol, values: dict[str, float]) -> None:
        self._seconds = self._seconds_before + trainer.seconds
        if self._writer is not None:
            before, self._layout = self._layout, trainer.engine.layout
            changed = self._layout if self._layout != before else ""
            self._writer.write(MetricsRecord(trainer.step, trainer.epoch, self._seconds, values, changed))
