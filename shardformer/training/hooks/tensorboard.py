"""A hook that writes metrics to TensorBoard event files."""

from __future__ import annotations

from shardformer.errors import import_optional_module
from shardformer.public_names import deprecate_renamed_arguments
from shardformer.training.hook import RENAMED_DIRECTORY, TrainerProtocol
from shardformer.training.hooks.json_lines import EverySteps, MetricsHook, OutputDirectory

_WRITER = (
    "torch.utils.tensorboard.writer",
    "The hook TensorBoard",
    "tensorboard",
    "use the hook JsonLines",
    "tensorboard",
)


@deprecate_renamed_arguments(RENAMED_DIRECTORY, attributes=RENAMED_DIRECTORY)
class TensorBoard(MetricsHook):
    """Writes the metrics in ``trainer.values`` to event files, which you can view with TensorBoard.

    A resumed run hides the values of steps after its checkpoint. Only the first rank writes. Hooks that compute
    metrics must come before this hook. Communicates nothing.
    """

    def __init__(self, directory: OutputDirectory, every: EverySteps = 1) -> None:
        super().__init__(directory, every)
        import_optional_module(*_WRITER)

    def before_train(self, trainer: TrainerProtocol) -> None:
        if trainer.is_first:
            purge = trainer.step + 1 if trainer.step else None
            self._writer = import_optional_module(*_WRITER).SummaryWriter(str(self.directory), purge_step=purge)

    def _write(self, trainer: TrainerProtocol, values: dict[str, float]) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, trainer.step)

    def after_validation(self, trainer: TrainerProtocol) -> None:
        super().after_validation(trainer)
        if self._writer is not None:
            self._writer.flush()
