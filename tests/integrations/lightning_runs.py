"""Small training runs of Lightning, which the tests compare between layouts and with one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import shardformer
from shardformer.integrations.lightning import ShardFormerStrategy
from shardformer.weights.state_dict import full_state_dict

VOCAB = 61
BATCH, STEPS = 4, 4


def llama() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
    heads: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def token_rows(count: int = BATCH * STEPS, length: int = 9) -> list[dict[str, Tensor]]:
    """Return rows of random tokens, each with another number of labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (count, length), generator=generator)
    labels = ids.clone()
    for row, label in enumerate(labels):
        label[3 + row % 5 :] = -100
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


class LanguageModel(pl.LightningModule):
    """An ordinary LightningModule."""

    def __init__(self, model: Any, lr: float = 1e-2) -> None:
        super().__init__()
        self.model, self.lr = model, lr
        self.losses: list[float] = []
        self.norms: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.logged_metrics["train_loss"]))

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)
        self.log("rows", float(len(batch["input_ids"])), sync_dist=True, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7), "interval": "step"}]


class Result(TypedDict):
    """Losses, full weights and logged metrics of a run."""

    losses: list[float]
    weights: dict[str, Tensor]
    metrics: dict[str, float]


def result_of(module: LanguageModel, trainer: pl.Trainer, parallel: dict[str, Any] | None) -> Result:
    metrics = {name: float(x) for name, x in trainer.callback_metrics.items()}
    return Result(losses=module.losses, weights=weights_of(module.model, parallel), metrics=metrics)


def trainer_of(parallel: dict[str, Any] | None, **options: Any) -> pl.Trainer:
    """Return a Trainer of one plain process (None) or of a layout over all processes."""
    size = torch.distributed.get_world_size() if parallel is not None else 1
    strategy = SingleDeviceStrategy(torch.device("cpu")) if parallel is None else ShardFormerStrategy(parallel)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1)
    found = {"max_steps": STEPS, "enable_checkpointing": False, **options}
    return pl.Trainer(accelerator="cpu", devices=size, strategy=strategy, **quiet, **found)


def loader(parallel: dict[str, Any] | None, rows: list[Any], batch: int = BATCH) -> DataLoader[Any]:
    """Return a loader in the order of Lightning's sampler. ``batch`` counts the rows of all data-parallel ranks."""
    if parallel is None:
        return DataLoader(rows, batch, sampler=DistributedSampler(rows, num_replicas=1, rank=0))  # type: ignore[arg-type]
    ranks = torch.distributed.get_world_size() // (parallel.get("tensor", 1) * parallel.get("sequence", 1))
    return DataLoader(rows, batch // ranks)  # type: ignore[arg-type]


def weights_of(model: nn.Module, parallel: dict[str, Any] | None) -> dict[str, Tensor]:
    state = model.state_dict() if parallel is None else full_state_dict(model)
    return {name: x.detach().clone().as_subclass(Tensor) for name, x in state.items()}


def fit(
    parallel: dict[str, Any] | None, saved: Path | None = None, resumed: Path | None = None, **options: Any
) -> Result:
    """Train a small LLaMA. Save a checkpoint at the end, and resume from another one."""
    warnings.simplefilter("ignore")
    module = LanguageModel(llama())
    trainer = trainer_of(parallel, **options)
    trainer.fit(module, loader(parallel, token_rows()), loader(parallel, token_rows()[:8]), ckpt_path=resumed)
    if saved is not None:
        trainer.save_checkpoint(saved)
    return result_of(module, trainer, parallel)


def compare_with_one_process(parallel: dict[str, Any], options: dict[str, Any]) -> tuple[Result, Result]:
    return fit(None, **options), fit(parallel, **options)


class Metrics(LanguageModel):
    """Returns a dict, logs a metric of torchmetrics, and uses Lightning's communication."""

    def __init__(self) -> None:
        super().__init__(llama())
        self.large = torchmetrics.SumMetric()
        self.register_buffer("calls", torch.zeros(()))
        self.gathered: list[int] = []
        self.decisions: list[bool] = []

    def training_step(self, batch: Any, index: int) -> Any:
        self.calls += 1
        return {"loss": super().training_step(batch, index)}

    def validation_step(self, batch: Any, index: int) -> None:
        labels = batch["input_ids"]
        self.large.update((labels > 9).sum())
        self.log("large", self.large)
        self.gathered = list(self.all_gather(labels).shape)
        rank = self.trainer.global_rank
        self.decisions = [self.trainer.strategy.reduce_boolean_decision(rank == 0, all=each) for each in (True, False)]


def fit_metrics(parallel: dict[str, Any] | None) -> tuple[Result, list[int], list[bool]]:
    """Train, then validate with the same Trainer."""
    warnings.simplefilter("ignore")
    module = Metrics()
    trainer = trainer_of(parallel)
    rows = loader(parallel, token_rows()[:8], 8)
    trainer.fit(module, loader(parallel, token_rows()), rows)
    trainer.validate(module, rows, verbose=False)
    return result_of(module, trainer, parallel), module.gathered, module.decisions


def resume(folder: Path, parallel: dict[str, Any] | None) -> Result:
    """Resume a checkpoint of the first epoch for one more."""
    return fit(parallel, resumed=folder, max_steps=-1, max_epochs=2)


def save(folder: Path, parallel: dict[str, Any] | None) -> Result:
    return fit(parallel, saved=folder, max_steps=-1, max_epochs=1)


def read_plain(folder: Path) -> dict[str, Tensor]:
    """Load a checkpoint of Lightning into a plain model."""
    model = llama()
    shardformer.load_checkpoint(model, folder)
    return weights_of(model, None)


def saved_by_callback(folder: Path, parallel: dict[str, Any]) -> list[str]:
    """Train with ModelCheckpoint, which keeps the last two checkpoints, and return the names of its folder."""
    warnings.simplefilter("ignore")
    keeping = ModelCheckpoint(
        folder, "{step}", monitor="step", mode="max", save_top_k=2, every_n_train_steps=1, save_last=True
    )
    module = LanguageModel(llama())
    trainer = trainer_of(parallel, callbacks=[keeping], enable_checkpointing=True)
    trainer.fit(module, loader(parallel, token_rows()), loader(parallel, token_rows()[:8]))
    again = trainer_of(parallel, enable_checkpointing=True)
    again.validate(
        LanguageModel(llama()), loader(parallel, token_rows()[:8]), ckpt_path=keeping.best_model_path, verbose=False
    )
    assert float(again.callback_metrics["val_loss"]) == float(trainer.callback_metrics["val_loss"])
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*"))


class Manual(LanguageModel):
    def __init__(self) -> None:
        super().__init__(llama())
        self.automatic_optimization = False


class TwoModels(LanguageModel):
    def __init__(self) -> None:
        super().__init__(llama())
        self.head = nn.Linear(2, 2)


class OwnParameter(LanguageModel):
    def __init__(self) -> None:
        super().__init__(llama())
        self.scale = nn.Parameter(torch.ones(()))


def plain() -> LanguageModel:
    return LanguageModel(llama())


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "automatic_optimization": (Manual, dict),
    "two models": (TwoModels, dict),
    "own parameter": (OwnParameter, dict),
    "sync_batchnorm": (plain, lambda: {"sync_batchnorm": True}),
    "averaging": (plain, lambda: {"callbacks": [StochasticWeightAveraging(1e-2)]}),
    "checkpoint plugin": (plain, lambda: {"plugins": [AsyncCheckpointIO()]}),
    "16-mixed": (plain, lambda: {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}),
}
"""What is refused -> functions that create the module and the options of the Trainer."""
REFUSED_ARGUMENTS: dict[str, dict[str, Any]] = {
    "pipe": {"parallel": {"pipe": 2}},
    "micro_batches": {"parallel": {"micro_batches": 2}},
    "max_grad_norm": {"parallel": {"max_grad_norm": 1.0}},
    "on_nonfinite": {"parallel": {"on_nonfinite": "skip"}},
    "find_unused_parameters": {"find_unused_parameters": True},
}
"""What is refused when the strategy is created -> its arguments."""


def refused(name: str) -> str:
    """Return the error of a fit, which must leave the weights unchanged."""
    warnings.simplefilter("ignore")
    make, options = REFUSED[name]
    module = make()
    before = weights_of(module, None)
    try:
        trainer_of({}, **options()).fit(module, loader({}, token_rows()))
    except shardformer.ConfigError as error:
        assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
        return str(error)
    return "not refused"


def refusals() -> dict[str, str]:
    """Return the messages of the errors by what is refused."""
    found = {name: refused(name) for name in REFUSED}
    for name, options in REFUSED_ARGUMENTS.items():
        with pytest.raises(shardformer.ConfigError) as error:
            ShardFormerStrategy(**options)
        found[name] = str(error.value)
    return found


def seed_of_workers(parallel: dict[str, Any]) -> int:
    """Return the rank by which the workers of a data loader are seeded."""
    warnings.simplefilter("ignore")
    os.environ["PL_SEED_WORKERS"] = "1"
    try:
        rows = loader(parallel, token_rows())
        trainer = trainer_of(parallel, max_steps=1)
        trainer.fit(LanguageModel(llama()), rows)
        return int(trainer.fit_loop._combined_loader.flattened[0].worker_init_fn.keywords["rank"])
    finally:
        del os.environ["PL_SEED_WORKERS"]


def fit_two_epochs() -> Result:
    return fit(None, max_steps=-1, max_epochs=2)


def fit_twice(first: dict[str, Any] | None, second: dict[str, Any] | None) -> list[float] | str:
    """Continue to train a module with another Trainer, and return its losses or the error."""
    warnings.simplefilter("ignore")
    module = LanguageModel(llama())
    try:
        for parallel in (first, second):
            trainer_of(parallel, max_steps=2).fit(module, loader(parallel, token_rows()))
    except shardformer.ConfigError as error:
        return str(error)
    return module.losses


class SkipsBatches(LanguageModel):
    def training_step(self, batch: Any, index: int) -> Any:
        return None


def skip_batches() -> str:
    """Return the error of a training step without a loss on data ranks."""
    with pytest.raises(shardformer.ConfigError) as error:
        trainer_of({}).fit(SkipsBatches(llama()), loader({}, token_rows()))
    return str(error.value)
