"""``Metrics``: accuracy, F1 and others of the whole validation data, whatever the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardformer.comm.collectives import all_gather_objects
from shardformer.errors import ConfigError, InputError, did_you_mean
from shardformer.pipeline.micro_batches import TARGET_KEY
from shardformer.training.data_loader import named_batch
from shardformer.training.hook import Hook, TrainerProtocol, check_validates

IGNORED = -100
PERPLEXITY = "perplexity"
SHIFTS = "ForCausalLMLoss"
"""The loss of transformers whose labels are the tokens themselves: what a position says is meant for the next."""


class Metrics(Hook):
    """Puts metrics of the validation data into ``trainer.values``, as ``validation/accuracy``.

    >>> hooks = [Metrics("accuracy", "f1"), Progress()]                                           # doctest: +SKIP
    >>> hooks = [Metrics(kappa=sklearn.metrics.cohen_kappa_score)]                                # doctest: +SKIP

    What is compared are the classes with the highest logits, and labels that are not -100. They are gathered over the
    data ranks, so that a metric is that of all samples. The model goes over each batch once more for its output.

    Args:
        names: "perplexity", which is exp of the loss; or of scikit-learn: "accuracy", "f1" (of class 1 where there are
            two classes, else the mean over classes) and any other function of ``sklearn.metrics`` that compares labels
            with predictions. None at all: "accuracy" and "f1".
        shift: whether the label of a position is compared with the output of the one before; None: for a model whose
            loss does so.
        functions: name -> function of (labels, predictions), two arrays of whole numbers; or a metric of torchmetrics.

    Communicates, behind a validation, the predictions and labels of each data rank. Raises ConfigError for a metric
    that there is not, or whose library is not installed, and in a run without validation data; InputError for batches
    without labels.
    """

    def __init__(self, *names: str, shift: bool | None = None, **functions: Any) -> None:
        if not names and not functions:
            names = ("accuracy", "f1")
        self.shift = shift
        self._with_perplexity = PERPLEXITY in names
        self._functions: dict[str, Callable[[Any, Any], float]] = {}
        for name in names:
            if name != PERPLEXITY:
                self._functions[name] = _of_sklearn(name)
        for name, function in functions.items():
            self._functions[name] = _checked(name, function)
        self._found: list[tuple[Tensor, Tensor]] = []

    def setup(self, trainer: TrainerProtocol) -> None:
        check_validates(self, trainer)

    def before_validation(self, trainer: TrainerProtocol) -> None:
        self._found = []

    def on_validation_batch(self, trainer: TrainerProtocol, batch: Any) -> None:
        if not self._functions:
            return
        trainer.agree()
        engine = trainer.engine
        output = _logits(engine.predict(batch))
        labels = _labels(batch, engine.model)
        if labels.dim() == output.dim():
            raise InputError(
                f"Metrics compares classes, and the labels of this model have the shape {tuple(labels.shape)}",
                remedy="Leave the hook out, or compute your own in on_validation_batch",
            )
        predictions = output.argmax(-1).cpu()
        if self._shifts(engine.model) and labels.dim() > 1:
            predictions, labels = predictions[:, :-1], labels[:, 1:]
        counts = labels != IGNORED
        self._found.append((labels[counts], predictions[counts]))

    def after_validation(self, trainer: TrainerProtocol) -> None:
        if self._with_perplexity:
            loss = trainer.values["validation/loss"]
            trainer.values["validation/perplexity"] = math.exp(loss) if loss < 700 else math.inf
        if not self._functions:
            return
        trainer.agree()
        mine, self._found = self._found, []
        everyone = all_gather_objects(mine, trainer.engine.context.data)
        pairs = [pair for found in everyone for pair in found]
        labels = torch.cat([labels for labels, _ in pairs]).numpy()
        predictions = torch.cat([predictions for _, predictions in pairs]).numpy()
        if len(labels) == 0:
            raise InputError(
                "The validation data has no label that counts",
                remedy="Give validation data with labels, or leave the hook Metrics out",
            )
        for name, function in self._functions.items():
            trainer.values[f"validation/{name}"] = float(function(labels, predictions))

    def _shifts(self, model: Any) -> bool:
        if self.shift is not None:
            return self.shift
        return getattr(getattr(model, "loss_function", None), "__name__", "") == SHIFTS


def _logits(output: Any) -> Tensor:
    """Out of what a model gives."""
    if isinstance(output, Mapping):
        output = output["logits"] if "logits" in output else next(iter(output.values()))
    found = output[0] if isinstance(output, (list, tuple)) else getattr(output, "logits", output)
    assert isinstance(found, Tensor)
    return found.detach()


def _labels(batch: Any, model: Any) -> Tensor:
    """Of a batch: what stands under ``labels``, or behind the inputs of a row."""
    found = (batch if isinstance(batch, Mapping) else named_batch(batch, model, has_target=True)).get("labels")
    if found is None and not isinstance(batch, Mapping):
        found = named_batch(batch, model, has_target=True).get(TARGET_KEY)
    if not isinstance(found, Tensor):
        raise InputError(
            f"The batch has no labels: {', '.join(map(str, batch)) if isinstance(batch, Mapping) else type(batch)}",
            rule="Metrics compares what the model says with what stands under 'labels', or behind the inputs of a row",
            remedy="Give validation data with labels, or leave the hook out",
        )
    return found.cpu()


def _of_sklearn(name: str) -> Callable[[Any, Any], float]:
    try:
        from sklearn import metrics
    except ImportError as error:
        raise ConfigError(
            f"Metrics({name!r}), and scikit-learn is not installed",
            remedy=f"pip install 'shardformer[metrics]', or give a function: Metrics({name}=...)",
        ) from error
    if name == "f1":
        return lambda labels, predictions: metrics.f1_score(
            labels, predictions, average="binary" if set(labels) | set(predictions) <= {0, 1} else "macro"
        )
    found = getattr(metrics, f"{name}_score", None) or getattr(metrics, name, None)
    if not callable(found) or isinstance(found, type):
        known = [n.removesuffix("_score") for n in metrics.__all__ if callable(getattr(metrics, n)) and n[0].islower()]
        raise ConfigError(
            f"Metrics({name!r})",
            rule="A name is perplexity, or a function of sklearn.metrics with or without _score at its end",
            remedy=did_you_mean(name, [*known, "f1", PERPLEXITY]),
        )
    return found  # type: ignore[no-any-return]


def _checked(name: str, given: Any) -> Callable[[Any, Any], float]:
    if hasattr(given, "update") and hasattr(given, "compute") and hasattr(given, "reset"):
        return lambda labels, predictions: _of_torchmetrics(given, labels, predictions)
    if not callable(given):
        raise ConfigError(
            f"Metrics({name}={given!r:.60})",
            rule="A metric is a function of (labels, predictions), or a metric of torchmetrics",
            remedy=f"Write Metrics({name}=lambda labels, predictions: ...)",
        )
    return given  # type: ignore[no-any-return]


def _of_torchmetrics(metric: Any, labels: Any, predictions: Any) -> float:
    metric.reset()
    metric.update(torch.from_numpy(predictions), torch.from_numpy(labels))
    return float(metric.compute())
