"""What the last stage does with its outputs: the batch's loss out of the micro-batches', or the batch's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardformer.errors import ConfigError, InputError
from shardformer.pipeline.loss import LossWeights
from shardformer.pipeline.microbatches import merge_outputs
from shardformer.pipeline.placeholders import is_placeholder
from shardformer.pipeline.samples import compares_outputs
from shardformer.pipeline.stage_forward import StageForward
from shardformer.pipeline.targets import tensors_of

IGNORED = -100
"""The label of what does not count, in torch and transformers."""

Batch = Mapping[str, Any]
LossFn = Callable[[Any, Batch], Tensor]


class Head:
    """What is done with the outputs of the last stage: their losses are weighted, or they are kept.

    Args:
        parts, sizes: the micro-batches, and how many samples each has.
        stage_forward: the forward of the last stage; others' heads see no output.
        weights: of the micro-batches in the loss of the batch; None where the outputs are wanted.
        loss_fn: (output, micro-batch) -> loss; None for the model's own.
        looks: whether ``compares`` is to become whether ``loss_fn`` compares the samples of the first micro-batch.
    """

    def __init__(
        self,
        parts: Sequence[Batch],
        sizes: Sequence[int],
        stage_forward: StageForward,
        weights: LossWeights | None,
        loss_fn: LossFn | None,
        *,
        looks: bool = False,
    ) -> None:
        self._looks, self.compares = looks, False
        self._parts, self.sizes, self._stage_forward = parts, sizes, stage_forward
        self._weights, self._loss_fn = weights, loss_fn
        self._outputs: dict[int, Any] = {}
        self.loss: Tensor | None = None
        self.counted: float | None = None
        self.factors = torch.zeros((), dtype=torch.float64)
        self.output: Any = None

    def before(self, micro_batch: int) -> None:
        """When the last layer has run."""
        if self._weights is not None:
            self._weights.start(micro_batch)

    def after(self, micro_batch: int, output: Any) -> Tensor | None:
        """When the model gave its output: the loss to go back from, or None."""
        if self._weights is None:
            self._outputs[micro_batch] = output
            return None
        try:
            loss = self._loss_of(output, self._parts[micro_batch])
        finally:
            self._weights.stop()
        self._check_first(loss, output)
        if self._looks and self._loss_fn is not None:
            part, size = self._parts[micro_batch], self.sizes[micro_batch]
            self.compares, self._looks = compares_outputs(self._loss_fn, output, part, size, len(self._parts)), False
        loss = self._weights.of(micro_batch, loss)
        value = loss.detach().double()
        self.loss = value if self.loss is None else self.loss + value
        return loss

    def _loss_of(self, output: Any, part: Batch) -> Tensor:
        given = output if self._loss_fn is None else self._loss_fn(output, part)
        loss = loss_in(given)
        if loss is not None:
            return loss
        who = "model" if self._loss_fn is None else "loss function"
        raise ConfigError(
            f"The {who} returned {_in_words(given)}, in which there is no loss",
            rule="A step goes back from a tensor of one number: what is returned itself, its .loss, its ['loss'], or "
            "the first element of a tuple. A model of transformers returns a loss where the batch has labels",
            remedy="Add labels to the batch, or pass loss_fn=, a function (output, micro-batch) -> loss",
        )

    def _check_first(self, loss: Tensor, output: Any) -> None:
        """The first loss of all is a number, unless the model gives none; not NaN that stands for another stage's."""
        ended_well, self._stage_forward.ended_well = self._stage_forward.ended_well, None
        outputs = [t for _, t in tensors_of({"output": output})]
        if not ended_well or not is_placeholder(loss) or not any(map(is_placeholder, outputs)):
            return
        given = [(name[-1], t) for part in self._parts for name, t in tensors_of(part) if not t.is_floating_point()]
        labels = [t for name, t in given if "label" in str(name)]
        if labels and all(bool((t == IGNORED).all()) for t in labels):
            raise InputError(
                f"All labels of the batch are {IGNORED}: the loss is NaN, as the plain model's",
                rule=f"A mean is over the labels that count, and {IGNORED} marks those that do not",
                remedy="Look at the collator or the mask that writes the labels, and leave such a batch out",
            )
        raise ConfigError(
            "The loss is NaN: it reads something in the model's output that an earlier stage computed",
            rule="The last stage has what its own layers and what stands behind them give",
            remedy="Give Pipeline(..., loss_fn=) that reads the last states or the logits only; where the model's "
            "head reads states between its layers, leave pipe out",
        )

    @property
    def is_explained(self) -> bool:
        """Whether the loss is made of means over classes that the batch holds."""
        return self._weights is not None and self._weights.is_explained

    def close(self) -> None:
        """After the last forward, or an error."""
        if self._weights is not None:
            self._weights.stop()

    def finish(self) -> None:
        if self._weights is None:
            ordered = [self._outputs[i] for i in sorted(self._outputs)]
            self.output = without_placeholders(merge_outputs(ordered, self.sizes)) if ordered else None
        elif self.loss is not None:
            self._weights.finish()
            self.counted, self.factors = self._weights.counted, self._weights.factors


def loss_in(output: Any) -> Tensor | None:
    """The loss in what a model returned, a tensor of one number; None without.

    In each form that the Trainer of transformers takes: ``output.loss``, ``output["loss"]`` or the first element of a
    tuple; or the output itself.
    """
    found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    elif found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        return None
    return found.reshape(()) if found.dim() else found


def _in_words(output: Any) -> str:
    shape = f" of shape {tuple(output.shape)}" if isinstance(output, Tensor) else ""
    has_key = isinstance(output, Mapping) and "loss" in output
    if has_key or hasattr(output, "loss"):
        loss = output["loss"] if has_key else output.loss
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r:.40}"
        shape = f" with loss={what}"
    return f"a {type(output).__name__}{shape}"


class NoOutput:
    """What ``Pipeline.forward`` gives on a stage that has no output."""

    def __init__(self, stage: int, last: int) -> None:
        self._stage, self._last = stage, last

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error(name)

    def __getitem__(self, key: Any) -> Any:
        raise self._error(repr(key))

    def _error(self, name: str) -> ConfigError:
        return ConfigError(
            f"{name} was asked of stage {self._stage}",
            rule=f"The last stage, {self._last} on the pipe axis, has the model's outputs",
            remedy="Call forward(batch, gather=True) on all stages, or look at the output on the last stage only",
        )


def without_placeholders(output: Any) -> Any:
    """The output without what other stages made of it, which is NaN here where the output itself is not."""
    tensors = [t for _, t in tensors_of({"output": output}) if t.is_floating_point() and t.numel()]
    placeholders = {id(t) for t in tensors if is_placeholder(t)}
    if len(placeholders) == len(tensors):
        return output
    return tree_map_only(Tensor, lambda t: None if id(t) in placeholders else t, output)
