"""Losses that compare the samples of a batch with each other, as contrastive ones do.

Such a loss is not the mean of the losses of parts of the batch: micro-batches and data ranks each compare their own
samples alone. ``gather_over_data`` gives every data rank the samples of all. A ``Trial`` finds such a loss, of the
model or of a ``loss_fn``, in the first step: a few samples are run apart and together, without gradients.
"""

from __future__ import annotations

import math
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardformer.comm.collectives import all_gather, all_gather_numbers, all_reduce
from shardformer.errors import ConfigError, ShardFormerError
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.pipeline.label_tracing import LabelTracer
from shardformer.pipeline.micro_batch_loss import ABSOLUTE, IS_TRYING, RELATIVE, Gathers, LossCall, LossWeights
from shardformer.pipeline.micro_batches import Ids, batch_size_of, merge_outputs, split_batch
from shardformer.pipeline.runtime import Batch, LastStage, LossFn
from shardformer.pipeline.stage_forward import StageForward
from shardformer.random_state import fork_random_state
from shardformer.torch_compat import disable_current_modes, is_compiled

# A, B two parts of a batch; AB both as one batch

ROUNDINGS = 8
"""Of a number in fewer bits."""
REPEATED = 1e-2
"""How far the same computation may differ, as a part of that."""
SAMPLES = 2
"""In a part that is tried, where the batch has enough: BatchNorm takes no single one."""


def gather_over_data(x: Tensor, context: Any) -> Tensor:
    """The samples of all data ranks, in rank order, on every one of them, with gradients.

    For a ``loss_fn`` that compares all samples of the batch with each other. Every data rank then computes the loss of
    the whole batch, and the engine's mean over data ranks is that loss, with the gradients of one device. It needs one
    micro-batch: those of one rank run one after the other.

    >>> def contrastive(output, batch):                                                           # doctest: +SKIP
    ...     images, texts = (shardformer.pipeline.gather_over_data(x, engine.context) for x in output)
    ...     return torch.nn.functional.cross_entropy(images @ texts.T, torch.arange(len(images)))

    Args:
        x: this rank's samples along dim 0; their number may differ by rank.
        context: the grid that ``launch_from_torch`` returned, or ``engine.context``.

    Communicates one all-gather of the joined tensor over data; in the backward one all-reduce of it.
    """
    if not isinstance(context, ParallelContext):
        raise ConfigError(
            f"gather_over_data was given a {type(context).__name__} as context",
            remedy="Pass engine.context, or what launch_from_torch returned",
        )
    if IS_TRYING.get():
        raise Gathers
    if context.data.size == 1:
        return x
    lengths = [row[0] for row in all_gather_numbers([len(x)], context.data)]
    gathered: Tensor = _GatherSamples.apply(x, context.data, lengths)
    return gathered


class _GatherSamples(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, lengths: list[int]) -> Tensor:
        ctx.axis, ctx.lengths = axis, lengths
        return all_gather(x.detach(), axis, 0, lengths=lengths, purpose="samples").clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        summed = all_reduce(grad.contiguous().clone(), ctx.axis, purpose="samples")
        begin = sum(ctx.lengths[: ctx.axis.rank])
        return summed[begin : begin + ctx.lengths[ctx.axis.rank]], None, None


# ---------------------------------------------------------------------------------------------------------- a trial


class Finding(IntEnum):
    """What a rank found out of the losses of a trial."""

    FINE = 0
    UNKNOWN = 1  # the loss cannot be tried, or it is one that the step itself refuses
    CHANGES = 2  # the same samples have another loss the second time
    GATHERS = 3  # it gathers the samples of other data ranks
    COMPARES = 4


def findings_of(every: Sequence[Sequence[int]]) -> list[int] | None:
    """What (finding, whether random numbers were drawn) of all ranks mean together; None where nothing is sure.

    A loss that changes where nobody draws reads the samples of other data ranks, which are others the second time.
    """
    found = [finding for finding, _ in every]
    if Finding.CHANGES not in found:
        return found
    return None if any(drew for _, drew in every) else [*found, Finding.GATHERS]


class Trial:
    """A few samples of this rank's batch, as micro-batches of one forward, and what their losses show.

    Args:
        parts: A and B.
        both: AB.
        sizes: the samples of A and of B.
        weighs: whether the losses of micro-batches are put together by what counts in them, and not by ``loss_weight``.
        refused: whether the step refuses a loss of which what counts cannot be told.
    """

    def __init__(
        self, parts: Sequence[Batch], both: Batch, sizes: Sequence[int], *, weighs: bool, refused: bool
    ) -> None:
        self.parts, self.both, self.sizes, self.weighs, self._refused = parts, both, sizes, weighs, refused

    def micro_batches(self, data_rank: int) -> list[Batch]:
        """A and B, to be weighted; A, B and AB; and A once more, or B on all data ranks but the first."""
        return [*self.parts, *self.parts, self.both, self.parts[min(data_rank, 1)]]

    def find(self, losses: Sequence[float], *, data_rank: int, eps: float) -> Finding:
        """What the losses of the micro-batches show: of A and B weighted, and added; of A, of B, of AB, and again.

        Args:
            eps: of the type that the model computes in.
        """
        weighted, first, second, both, again = losses
        if not all(map(math.isfinite, (first, second, both, again))):
            return Finding.UNKNOWN
        room = ABSOLUTE + max(RELATIVE, ROUNDINGS * eps) * max(map(abs, (first, second, both)))
        if abs(again - (second if data_rank else first)) > REPEATED * room:
            return Finding.CHANGES
        if math.isfinite(weighted):
            return Finding.FINE if abs(weighted - both) <= room else Finding.COMPARES
        if self._refused:
            return Finding.UNKNOWN
        is_mean = min(first, second) - room <= both <= max(first, second) + room
        return Finding.FINE if is_mean or abs(both - first - second) <= room else Finding.COMPARES


def trial_of(
    batch: Batch, main: str | None, ids: Ids, *, fails_alone: bool, weighs: bool, refused: bool
) -> Trial | None:
    """A trial of the first samples of a batch; None where they cannot be told from the others.

    Args:
        main, ids: as for ``split_batch``.
        fails_alone: whether other ranks wait for one whose forward fails: then only what is sure to be a batch is run.
        weighs, refused: of the trial.
    """
    try:
        size = batch_size_of(batch, main)
        each = min(SAMPLES, size // 2)
        if each == SAMPLES or (each and not fails_alone):
            cuts = [each, each, size - 2 * each]
            first, second = split_batch(batch, [n for n in cuts if n], main, ids)[:2]
            both = split_batch(batch, [n for n in (2 * each, cuts[2]) if n], main, ids)[0]
            return Trial([first, second], both, [each, each], weighs=weighs, refused=refused)
        if size and not fails_alone:
            both = merge_outputs([batch, batch], [size, size])
            return Trial([batch, batch], both, [size, size], weighs=weighs, refused=refused)
    except ShardFormerError:
        pass
    return None


class TrialHead(LastStage):
    """Notes the losses of a trial. It raises no error: a loss that cannot be tried is not judged."""

    def __init__(
        self, trial: Trial, parts: Sequence[Batch], stage_forward: StageForward, loss_fn: LossFn | None
    ) -> None:
        self._tried = _TriedWeights(trial.parts, trial.sizes) if trial.weighs else None
        super().__init__(parts, [1] * len(parts), stage_forward, self._tried, loss_fn)
        self._noted = [math.nan] * len(parts)
        self.gathers = False

    def before(self, micro_batch: int) -> None:
        if micro_batch < 2:
            super().before(micro_batch)

    def after(self, micro_batch: int, output: Any) -> None:
        token = IS_TRYING.set(True)
        try:
            loss = self._loss_of(output, self._parts[micro_batch])
            self.close()
            if micro_batch < 2:
                loss = loss * math.nan if self._tried is None else self._tried.of(micro_batch, loss)
            self._noted[micro_batch] = float(loss)
        except Gathers:
            self.gathers = True
        except Exception:  # what cannot be tried is not judged
            return
        finally:
            IS_TRYING.reset(token)
            self.close()

    def losses(self) -> list[float]:
        """In the order of ``Trial.find``."""
        try:
            if self._tried is not None:
                self._tried.finish()
        except ConfigError:
            self._noted[0] = math.nan
        return [self._noted[0] + self._noted[1], *self._noted[2:]]


class _TriedWeights(LossWeights):
    """Weights that refuse nothing in the middle of a forward, but afterwards."""

    _problem: Exception | None = None

    def call(self, index: int, trace: LabelTracer | None, call: LossCall) -> Tensor:
        if self._problem is None:
            try:
                return super().call(index, trace, call)
            except Exception as problem:
                self._problem = problem
        return call.given()

    def of(self, index: int, loss: Tensor) -> Tensor:
        if self._problem is not None:
            raise self._problem
        return super().of(index, loss)


@contextmanager
def tried(model: nn.Module, device: torch.device) -> Iterator[list[nn.Module]]:
    """What forwards do in here to the random states, to buffers and to plain values in modules is undone behind it.

    Hooks that a script registered are not called. Gives a list that then holds the modules that wrote to their buffers.
    """
    writers: list[nn.Module] = []
    own = __name__.partition(".")[0]
    modules = [module for module in model.modules() if type(module).__module__.partition(".")[0] != own]
    plain = [({n: v for n, v in vars(m).items() if isinstance(v, (int, float, str, type(None)))}, m) for m in modules]
    buffers = [(m, {n: (b, None if b is None else b.clone()) for n, b in m._buffers.items()}) for m in modules]
    hooks = [(each, dict(each)) for m in model.modules() for each in (m._forward_pre_hooks, m._forward_hooks) if each]
    eager = torch.compiler.set_stance("force_eager") if any(map(is_compiled, model.modules())) else nullcontext()
    try:
        for each, registered in hooks:
            for number in [number for number, hook in registered.items() if _is_of_script(hook)]:
                del each[number]
        with torch.no_grad(), fork_random_state(device), eager, disable_current_modes():  # no mode counts or traces it
            yield writers
    finally:
        for each, registered in hooks:
            each.clear()
            each.update(registered)
        for values, module in plain:
            vars(module).update(values)
        with torch.no_grad():
            for module, held in buffers:
                for name, (buffer, before) in held.items():
                    is_same, module._buffers[name] = module._buffers.get(name) is buffer, buffer
                    if buffer is not None and before is not None and not (is_same and torch.equal(buffer, before)):
                        buffer.copy_(before)
                        writers.append(module)


def _is_of_script(hook: Any) -> bool:
    """Whether a hook is a script's, and no library's."""
    while isinstance(hook, partial):
        hook = hook.func
    own, root = (str(name).partition(".")[0] for name in (__name__, getattr(hook, "__module__", "")))
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return root != own and not any(file.startswith(sysconfig.get_path(name)) for name in ("purelib", "platlib"))


def judge(findings: Sequence[int], into: str, *, refuses: bool, gathers: bool, normalizes: bool) -> None:
    """Raises ConfigError, or warns, where the loss of a batch that is divided compares its samples.

    Args:
        findings: of all ranks.
        into: what the batch is divided into, in words.
        refuses: whether the loss is to be that of the whole batch: the user did not choose the mean of the parts'.
        gathers: whether a loss that gathers the samples of all data ranks is right: with one micro-batch.
        normalizes: whether it does so in train mode alone, by statistics over the batch.
    """
    is_gathered = Finding.GATHERS in findings
    if (is_gathered and gathers) or not (is_gathered or Finding.COMPARES in findings):
        return
    if normalizes and refuses:
        warnings.warn(
            f"In train mode the model normalizes by statistics over the batch, as BatchNorm does, and the batch is "
            f"divided {into}: each part has statistics of its own, so that loss and weights differ from those of one "
            "device. Put these layers into eval mode, or use GroupNorm or LayerNorm; over data ranks with one "
            "micro-batch, torch.nn.SyncBatchNorm; see docs/engine.md",
            stacklevel=2,
        )
    if normalizes:
        return
    how = "the loss of four samples is not that of two and two"
    if is_gathered:
        how = "it gathers those of other data ranks, and a micro-batch has some of them alone"
    what = f"The loss compares the samples of a batch with each other ({how}), and the batch is divided {into}"
    if refuses:
        raise ConfigError(
            what,
            rule="Each part of a batch is run without the samples of the others. The loss of the whole batch is put "
            "together of the parts' losses, as means or sums of what counts in each",
            remedy="Leave the batch in one micro-batch on one data rank; or pass a loss_fn that gathers the embeddings "
            "with gather_over_data, and use one micro-batch. To train on the mean of the parts' losses, each over its "
            "own samples, pass loss_weight=, or ParallelConfig(average_loss_over='ranks') over data ranks; see "
            "docs/engine.md",
        )
    warnings.warn(
        f"{what}: each part compares its own samples alone, so that loss and weights differ from those of one device. "
        "Use one micro-batch, and shardformer.pipeline.gather_over_data in loss_fn; see docs/engine.md",
        stacklevel=2,
    )
