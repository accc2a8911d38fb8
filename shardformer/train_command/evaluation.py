"""Evaluates a trained model on the validation data of its run configuration."""

from __future__ import annotations

from importlib.util import find_spec

from shardformer.train_command.build import build_hooks
from shardformer.train_command.load_data import load_data
from shardformer.train_command.model_config import get_class_names, get_image_size
from shardformer.train_command.run import load_data_and_model
from shardformer.train_command.trained_model import TrainedModel
from shardformer.training.data_loader import create_data_loader
from shardformer.training.hooks import Metrics
from shardformer.training.initialize import initialize
from shardformer.training.trainer import Trainer


def evaluate_model(found: TrainedModel) -> dict[str, float] | None:
    """Return loss, metrics and number of samples on the first rank, and None on the others.

    The metrics are those of the run's hook ``metrics``. Without this hook, they are the perplexity of a language model,
    or the accuracy of a classifier if scikit-learn is installed. Communicates as ``Engine.evaluate`` and ``Metrics``.
    """
    run = found.run
    assert run is not None
    if found.checkpoint is None:
        data, model = load_data_and_model(run)
        engine = initialize(model, None, parallel=run.layout)
    else:
        data = load_data(run, get_image_size(found.model_config), get_class_names(found.model_config))
        engine = found.load(run.layout)
    hooks = [hook for hook in build_hooks(run) if isinstance(hook, Metrics)]
    if not hooks and not run.model.task.endswith("classification"):
        hooks = [Metrics("perplexity")]
    elif not hooks and find_spec("sklearn") is not None:
        hooks = [Metrics("accuracy")]
    options = {"batch_size": run.data.batch_size, "shuffle": False, "merge_last": True, "collate_fn": data.collate}
    validation = create_data_loader(data.validation, engine.context, **options)
    values = Trainer(engine, hooks).evaluate(validation)
    found_values = {name.removeprefix("validation/"): value for name, value in values.items()}
    return {**found_values, "samples": len(data.validation)} if engine.is_first else None
