"""Model heads with micro-batches that have different label counts, and two ways to run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.gradient_accumulation.micro_batch_loss import MicroBatchLossScaler
from shardformer.verify.small_models import FAMILY_OF, RandomBatchFactory, SmallModelFactory

SIZES = (3, 2, 2, 1)
Batch = dict[str, Any]
LossOf = Callable[[nn.Module, Mapping[str, Any]], Tensor]

# Statistics of the whole batch, so that a loss is no mean over rows while it trains.
BATCH_NORM = ("BeitForSemanticSegmentation",)


@contextmanager
def weighing(weights: MicroBatchLossScaler, index: int) -> Iterator[None]:
    """Scale the mean losses of micro-batch ``index`` to their share of the full batch."""
    weights.start_recording_loss_calls(index)
    try:
        yield
    finally:
        weights.stop_recording_loss_calls()


def model_of(head: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    model = SmallModelFactory(FAMILY_OF[head], head, changes)().double()
    return model.eval() if head in BATCH_NORM else model.train()


def batch_of(head: str, nothing_in: Sequence[int] = (3, 4), **changes: Any) -> Batch:
    """A batch of 8 rows. All labels of the rows ``nothing_in`` are ignored, if labels can be ignored."""
    num_labels = 2 if head == "AlbertForPreTraining" else 3
    batch = RandomBatchFactory(head, batch_size=sum(SIZES), num_labels=num_labels, **changes)(0)
    batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    labels = batch.get("labels")
    if labels is not None and labels.dim() > 1 and not labels.is_floating_point():
        ignored = 255 if head.endswith("Segmentation") else -100
        generator = torch.Generator().manual_seed(7)
        labels[torch.rand(labels.shape, generator=generator) < 0.4] = ignored
        labels[list(nothing_in)] = ignored
    if "start_positions" in batch:  # outside the text, and equal in the first micro-batch
        batch["start_positions"][:3] = batch["end_positions"][:3]
        batch["start_positions"][[4, 7]] = 99
    return batch


def cut(batch: Mapping[str, Any], sizes: Sequence[int] = SIZES) -> list[Batch]:
    """Micro-batches of rows. Values without rows are copied to each."""
    parts: list[Batch] = [{} for _ in sizes]
    for name, value in batch.items():
        pieces = value.split(list(sizes)) if isinstance(value, Tensor) and value.dim() else [value] * len(sizes)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return parts


def own_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    output = model(**batch)
    losses = [x for x in (getattr(output, "loss", None), getattr(output, "mc_loss", None)) if x is not None]
    return losses[0] + 0.3 * losses[1] if len(losses) > 1 else losses[0]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def at_once(model: nn.Module, batch: Batch, loss_of: LossOf = own_loss) -> tuple[Tensor, dict[str, Tensor]]:
    loss = loss_of(model, batch)
    loss.backward()
    return loss.detach(), gradients(model)


def in_parts(
    model: nn.Module, weights: MicroBatchLossScaler, parts: Sequence[Batch], loss_of: LossOf = own_loss
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run each backward pass before the next forward pass, as the last stage of 1F1B does."""
    losses = []
    for index, part in enumerate(parts):
        with weighing(weights, index):
            loss = loss_of(model, part)
        loss = weights.scale_loss(index, loss)
        loss.backward()
        losses.append(loss.detach())
    weights.run_deferred_checks()
    return torch.stack(losses).sum(), gradients(model)


def sizes_of(parts: Sequence[Batch]) -> list[int]:
    return [len(next(x for x in part.values() if isinstance(x, Tensor) and x.dim())) for part in parts]
