"""``TensorBoard``: hook that writes metrics for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardformer.errors import ConfigError, check_int
from shardformer.filesystem.atomic_write import path_of
from shardformer.training.hook import Hook, TrainerProtocol
from shardformer.training.hooks.json_lines import VALIDATION


class TensorBoard(Hook):
    """Writes ``trainer.values`` for ``tensorboard --logdir folder``.

    A resumed run hides the values of steps after its checkpoint. Only the first rank writes, without communication.
    Hooks that compute metrics must come before this hook.

    Args:
        folder: Folder of the event files.
        every: Steps between values. Validation metrics are always written.
    """

    def __init__(self, folder: str | Path, every: int = 1) -> None:
        check_int("TensorBoard.every", every, unit="steps", example=10)
        self.folder, self.every = path_of(folder), every
        self._writer: Any = None
        _summary_writer()

    def before_train(self, trainer: TrainerProtocol) -> None:
        if trainer.is_first:
            purge = trainer.step + 1 if trainer.step else None
            self._writer = _summary_writer()(str(self.folder), purge_step=purge)

    def after_step(self, trainer: TrainerProtocol) -> None:
        if trainer.step % self.every == 0:
            self._write(trainer, is_validation=False)

    def after_validation(self, trainer: TrainerProtocol) -> None:
        self._write(trainer, is_validation=True)

    def after_train(self, trainer: TrainerProtocol) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    on_exception = after_train

    def _write(self, trainer: TrainerProtocol, *, is_validation: bool) -> None:
        if self._writer is None:
            return
        for name, value in trainer.values.items():
            if name.startswith(VALIDATION) == is_validation:
                self._writer.add_scalar(name, value, trainer.step)
        if is_validation:
            self._writer.flush()


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "The hook TensorBoard requires tensorboard, which is not installed",
            remedy="Run pip install 'shardformer[tensorboard]', or use the hook JsonLines",
        ) from error
    return SummaryWriter
