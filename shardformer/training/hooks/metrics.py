"""A hook that computes accuracy, F1 and other metrics on the validation data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shardformer.comm.collectives import all_gather_objects
from shardformer.errors import (
    ConfigError,
    InputError,
    get_first_message_line,
    import_optional_module,
    suggest_similar_names,
)
from shardformer.gradient_accumulation.micro_batches import TARGET_KEY
from shardformer.training.data_loader import batch_to_forward_kwargs
from shardformer.training.hook import Hook, TrainerProtocol, check_trainer_has_validation_data

IGNORED = -100
PERPLEXITY = "perplexity"
SHIFTS = "ForCausalLMLoss"
"""Loss function of transformers that compares the output at a position with the label of the next position."""


class Metrics(Hook):
    """Computes metrics such as accuracy on the validation data, and adds them to ``trainer.values``.

    >>> hooks = [Metrics("accuracy", "f1"), Progress()]                                           # doctest: +SKIP
    >>> hooks = [Metrics(kappa=sklearn.metrics.cohen_kappa_score)]                                # doctest: +SKIP

    For classification, the prediction is the class with the highest logit, and labels of -100 are ignored. For
    multi-label classification, it is every class with a positive logit. For regression, it is the model's output.
    Validation takes longer, because the model runs each batch a second time to get the predictions.

    Metrics cover all samples: after a validation, the data-parallel ranks exchange their predictions and labels.
    """

    def __init__(
        self,
        *names: Annotated[
            str,
            '"perplexity", which is exp of the loss, or names of `sklearn.metrics` functions of labels and '
            'predictions, such as "accuracy". "f1" is binary with two classes and macro-averaged otherwise. The '
            'default is "accuracy" and "f1". For a regression, use "mean_squared_error", for example.',
        ],
        shift: Annotated[
            bool | None,
            "Compare the label of a position with the output of the previous position. None: as in the model's loss.",
        ] = None,
        **functions: Annotated[
            Any, "Functions of (labels, predictions), two arrays, by name; or metrics of torchmetrics."
        ],
    ) -> None:
        if not names and not functions:
            names = ("accuracy", "f1")
        self.shift = shift
        self._with_perplexity = PERPLEXITY in names
        self._functions: dict[str, Callable[[NDArray[Any], NDArray[Any]], float]] = {
            **{name: _get_sklearn_metric_fn(name) for name in names if name != PERPLEXITY},
            **{name: _convert_user_metric_to_fn(name, function) for name, function in functions.items()},
        }
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def setup(self, trainer: TrainerProtocol) -> None:
        check_trainer_has_validation_data(self, trainer)

    def before_validation(self, trainer: TrainerProtocol) -> None:
        self._pairs = []

    def on_validation_batch(self, trainer: TrainerProtocol, batch: Any) -> None:
        if not self._functions:
            return
        trainer.synchronize_ranks()
        engine = trainer.engine
        output = _get_logits(engine.predict(batch))
        labels = _get_labels(batch, engine.model)
        if labels.is_floating_point():
            self._pairs.append(_get_labels_and_predictions(labels, output.cpu()))
            return
        if labels.dim() == output.dim():
            raise InputError(
                f"The Metrics hook requires one class index per prediction, but the labels have shape "
                f"{tuple(labels.shape)}, with as many dimensions as the logits.",
                remedy="Instead, compute the metric in the method on_validation_batch of your own hook.",
            )
        predictions = output.argmax(-1).cpu()
        loss_name = getattr(getattr(engine.model, "loss_function", None), "__name__", "")
        is_shifted = loss_name == SHIFTS if self.shift is None else self.shift
        if is_shifted and labels.dim() > 1:
            predictions, labels = predictions[:, :-1], labels[:, 1:]
        is_counted = labels != IGNORED
        self._pairs.append((labels[is_counted], predictions[is_counted]))

    def after_validation(self, trainer: TrainerProtocol) -> None:
        if self._with_perplexity:
            loss = trainer.values["validation/loss"]
            trainer.values["validation/perplexity"] = math.exp(loss) if loss < 700 else math.inf
        if not self._functions:
            return
        trainer.synchronize_ranks()
        local_pairs, self._pairs = self._pairs, []
        gathered = all_gather_objects(local_pairs, trainer.engine.context.data)
        pairs = [pair for found in gathered for pair in found]
        labels = torch.cat([labels for labels, _ in pairs]).numpy()
        predictions = torch.cat([predictions for _, predictions in pairs]).numpy()
        if len(labels) == 0:
            raise InputError(
                "All labels of the validation data are -100, which the Metrics hook ignores.",
                remedy="Pass validation data with labels, or remove the hook.",
            )
        for name, function in self._functions.items():
            try:
                value = float(function(labels, predictions))
            except ValueError as error:
                label, prediction, reason = labels[0], predictions[0], get_first_message_line(error)
                raise InputError(
                    f"The metric {name!r} cannot compare the label {label} with the prediction {prediction}: {reason}.",
                    remedy="Pass another metric, such as Metrics('mean_squared_error') for a regression.",
                ) from error
            trainer.values[f"validation/{name}"] = value


def _get_labels_and_predictions(labels: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Convert labels and outputs of a regression or multi-label classification to labels and predictions."""
    logits = logits.squeeze(-1) if logits.dim() > labels.dim() else logits
    if logits.shape != labels.shape:
        raise InputError(
            f"The Metrics hook requires labels and outputs of the same shape, but got {tuple(labels.shape)} and "
            f"{tuple(logits.shape)}.",
            remedy="Instead, compute the metric in the method on_validation_batch of your own hook.",
        )
    is_multi_label = labels.dim() > 1 and bool(((labels == 0) | (labels == 1)).all())
    return (labels.long(), (logits > 0).long()) if is_multi_label else (labels, logits.float())


def _get_logits(model_output: Any) -> Tensor:
    """Get the logits from a model output, which may be a tensor, a tuple, a dict or a ``ModelOutput``."""
    if isinstance(model_output, Mapping):
        model_output = model_output["logits"] if "logits" in model_output else next(iter(model_output.values()))
    found = (
        model_output[0] if isinstance(model_output, (list, tuple)) else getattr(model_output, "logits", model_output)
    )
    assert isinstance(found, Tensor)
    return found.detach()


def _get_labels(batch: Any, model: nn.Module) -> Tensor:
    """Get the labels of a batch from the key ``labels`` of a dict or the last item of a tuple."""
    named = batch_to_forward_kwargs(batch, model, has_target=True)
    found = named.get("labels", named.get(TARGET_KEY))
    if not isinstance(found, Tensor):
        contents = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise InputError(
            f"The Metrics hook found no labels in a validation batch, which consists of {contents}.",
            remedy="Pass the labels under the key 'labels' of a dict, or as the last item of a tuple.",
        )
    return found.cpu()


def _get_sklearn_metric_fn(metric_name: str) -> Callable[[NDArray[Any], NDArray[Any]], float]:
    instead = f"pass a function: Metrics({metric_name}=...)"
    import_optional_module("sklearn", f"Metrics({metric_name!r})", "metrics", instead, "scikit-learn")
    from sklearn import metrics

    if metric_name == "f1":
        return lambda labels, predictions: metrics.f1_score(
            labels,
            predictions,
            average="binary" if labels.ndim == 1 and set(labels) | set(predictions) <= {0, 1} else "macro",
        )
    found = getattr(metrics, f"{metric_name}_score", None) or getattr(metrics, metric_name, None)
    if not callable(found) or isinstance(found, type):
        known = [n.removesuffix("_score") for n in metrics.__all__ if callable(getattr(metrics, n)) and n[0].islower()]
        raise ConfigError(
            f"Metrics does not support the metric {metric_name!r}.",
            rule="Use 'perplexity' or the name of a function in sklearn.metrics, with or without the suffix _score.",
            remedy=suggest_similar_names(metric_name, [*known, "f1", PERPLEXITY]),
        )
    return found  # type: ignore[no-any-return]


def _convert_user_metric_to_fn(
    metric_name: str, function_or_torchmetric: Any
) -> Callable[[NDArray[Any], NDArray[Any]], float]:
    def compute_metric(labels: NDArray[Any], predictions: NDArray[Any]) -> float:
        function_or_torchmetric.reset()
        function_or_torchmetric.update(torch.from_numpy(predictions), torch.from_numpy(labels))
        return float(function_or_torchmetric.compute())

    if all(
        hasattr(function_or_torchmetric, name) for name in ("update", "compute", "reset")
    ):  # a metric of torchmetrics
        return compute_metric
    if not callable(function_or_torchmetric):
        raise ConfigError(
            f"The argument {metric_name} of Metrics must be a function or a torchmetrics metric, but got "
            f"{function_or_torchmetric!r:.60}.",
            remedy=f"Pass a function, as in Metrics({metric_name}=lambda labels, predictions: ...).",
        )
    return function_or_torchmetric  # type: ignore[no-any-return]
