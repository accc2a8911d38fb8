"""Other uses of the sharded Trainer: what it refuses, callbacks, and other ways to start it. Runs on the workers."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import shardformer
from shardformer.config import ParallelConfig
from tests.integrations.errors import errors_of
from tests.integrations.small_models import bert, class_rows, gpt2, llama, t5, token_rows
from tests.integrations.trainer_cases import reset_accelerate


def refusals(folder: str) -> dict[str, str]:
    """Return the messages of the errors by what is refused."""
    from accelerate import ParallelismConfig
    from torch.distributed.fsdp import fully_shard

    from shardformer.integrations import transformers as integration
    from shardformer.integrations.transformers import Seq2SeqTrainer, Trainer

    rows = token_rows(8)
    generating = transformers.Seq2SeqTrainingArguments(folder, use_cpu=True, report_to=[], predict_with_generate=True)

    class OwnLoss(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(**inputs).loss

    class PlainLoader(Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, 4, shuffle=True, collate_fn=self.data_collator)

    def args(**options: Any) -> Any:
        return transformers.TrainingArguments(folder, use_cpu=True, report_to=[], max_steps=1, **options)

    def sharded() -> Any:
        return shardformer.shard_model(llama(), context=shardformer.launch_from_torch(tensor=2))

    def start(parallel: dict[str, Any], compute_loss_func: Any = None, **options: Any) -> Any:
        data: dict[str, Any] = {"train_dataset": rows, "compute_loss_func": compute_loss_func}
        return Trainer(llama(), args(**options), **data, parallel=ParallelConfig(**parallel))

    def start_with_deepspeed() -> Any:  # whose arguments need the library
        changed = args()
        changed.deepspeed = {"zero_optimization": {"stage": 2}}
        return Trainer(llama(), changed, parallel={"tensor": 2})

    def without_cpu() -> Any:  # the workers have no LOCAL_RANK, by which accelerate recognizes several processes
        found = transformers.TrainingArguments(folder, report_to=[])
        if found.world_size > 1:  # older releases of accelerate recognize them
            found.__class__ = type("OneProcess", (transformers.TrainingArguments,), {"world_size": 1})
        return found

    def start_twice() -> Any:
        settings: dict[str, Any] = {"use_cpu": True, "report_to": []}
        twice = integration.TrainingArguments(folder, parallel={"tensor": 2}, **settings)
        return Trainer(llama(), twice, parallel={"data": 2})

    attempts: dict[str, Callable[[], Any]] = {
        "pipe and label smoothing": lambda: start({"pipe": 2}, label_smoothing_factor=0.1),
        "pipe and compute_loss": lambda: OwnLoss(llama(), args(), train_dataset=rows, parallel={"pipe": 2}),
        "pipe and compute_loss_func": lambda: start({"pipe": 2}, lambda *args, **kwargs: None),
        "pipe and generate": lambda: Seq2SeqTrainer(t5(), generating, parallel={"pipe": 2}),
        "pipe and NEFTune": lambda: start({"pipe": 2}, neftune_noise_alpha=5.0),
        "plain loader": lambda: PlainLoader(llama(), args(), train_dataset=rows, parallel={"data": 2}).train(),
        "two layouts": start_twice,
        "one process": lambda: Trainer(llama(), without_cpu(), parallel={"data": 2}),
        "fully_shard": lambda: Trainer(fully_shard(llama()), args(), parallel={"data": 2}),
        "deepspeed": start_with_deepspeed,
        "parallelism_config": lambda: start({"tensor": 2}, parallelism_config=ParallelismConfig(tp_size=2)),
        "auto_find_batch_size": lambda: start({"tensor": 2}, auto_find_batch_size=True),
        "sequence and generate": lambda: Seq2SeqTrainer(t5(), generating, parallel={"sequence": 2}),
        "max_grad_norm": lambda: start({"tensor": 2, "max_grad_norm": 1.0}),
        "fsdp": lambda: start({"tensor": 2}, fsdp=True),
        "lomo": lambda: start({"tensor": 2}, optim="lomo"),
        "liger": lambda: start({"tensor": 2}, use_liger_kernel=True),
        "plain Trainer": lambda: transformers.Trainer(sharded(), args(), train_dataset=rows).train(),
        "plain Trainer evaluates": lambda: transformers.Trainer(sharded(), args(), eval_dataset=rows).evaluate(),
        "other layout": lambda: Trainer(sharded(), args(), parallel=ParallelConfig(data=2)),
    }
    return errors_of(attempts)


class Stop(transformers.TrainerCallback):
    """Callback that stops the training after three steps, and counts them."""

    steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        control.should_training_stop = self.steps == 3


def train_with_callbacks(folder: str) -> dict[str, Any]:
    from shardformer.integrations.transformers import Trainer

    reset_accelerate()
    os.environ["TENSORBOARD_LOGGING_DIR"] = f"{folder}/logs"
    options: dict[str, Any] = dict(use_cpu=True, report_to=["tensorboard"], save_steps=2, log_level="error")
    sizes: dict[str, Any] = dict(per_device_train_batch_size=8, max_steps=8, include_num_input_tokens_seen="all")
    args = transformers.TrainingArguments(folder, **options, **sizes, logging_steps=1, disable_tqdm=True)
    stop = Stop()
    trainer = Trainer(gpt2(), args, train_dataset=token_rows(), parallel={"tensor": 2}, callbacks=[stop])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    missing: list[Any] = []
    warn = type(trainer).__mro__[2]._issue_warnings_after_load
    type(trainer).__mro__[2]._issue_warnings_after_load = lambda self, result: missing.append(result.missing_keys)
    try:
        trainer._load_from_checkpoint(f"{folder}/checkpoint-2")
    finally:
        type(trainer).__mro__[2]._issue_warnings_after_load = warn
    return {"steps": stop.steps, "tokens": trainer.state.num_input_tokens_seen, "missing_keys": len(missing[0])}


class Scorer(nn.Module):
    """A model that is not from transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(127, 8), nn.Linear(8, 127)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.out(self.embed(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def other_ways_to_start(folder: str) -> dict[str, list[float]]:
    """Return the losses with ``model_init``, with the user's optimizer, and with a plain module."""
    from shardformer.integrations.transformers import Trainer, TrainingArguments

    world = int(os.environ["WORLD_SIZE"])

    class LaterTrainer(transformers.Trainer):
        """A subclass of a library, which does not know of ShardFormer."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.was_created = True

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            assert self.was_created
            return super().training_step(*args, **kwargs)

    def losses(
        layout: dict[str, Any], *, make: Any = None, model: Any = None, own: bool = False, kind: Any = None
    ) -> Any:
        reset_accelerate()
        size = 8 // (layout.get("data", 1) if world > 1 else 1)
        options: dict[str, Any] = dict(use_cpu=True, report_to=[], logging_steps=1, max_steps=2, log_level="error")
        options |= {"per_device_train_batch_size": size, "disable_tqdm": True}
        more: dict[str, Any] = {"model_init": make} if make else {"model": model}
        if kind is None:
            args = transformers.TrainingArguments(folder, **options)
            more["parallel"] = layout if world > 1 else None
        else:  # an unmodified Trainer
            parser = transformers.HfArgumentParser(TrainingArguments)
            text = [
                "--output_dir",
                folder,
                "--use_cpu",
                "true",
                *(["--parallel", json.dumps(layout)] if world > 1 else []),
            ]
            (args,) = parser.parse_args_into_dataclasses(text)
            for name, value in options.items():
                setattr(args, name, value)
        if own:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            more["optimizers"] = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        trainer = (kind or Trainer)(args=args, train_dataset=token_rows(), **more)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        trainer.save_model(f"{folder}/saved")
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    return {
        "model_init": losses({"tensor": 2}, make=lambda: llama()),
        "own optimizer": losses({"tensor": 2}, model=llama(), own=True),
        "own optimizer and ZeRO": losses({"data": 2, "zero_stage": 1}, model=llama(), own=True),
        "unmodified Trainer": losses({"tensor": 2}, model=llama(), kind=transformers.Trainer),
        "unmodified subclass": losses({"data": 2, "zero_stage": 1}, model=llama(), kind=LaterTrainer),
        "plain module": losses({"data": 2, "zero_stage": 2}, model=Scorer()),
    }


def warnings_of_own_losses(folder: str) -> dict[str, list[str]]:
    """Train with losses of a user's ``compute_loss``, and return the warnings of different numbers of labels."""
    from shardformer.integrations.transformers import Trainer

    class Masked(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            labels = inputs["labels"]
            losses = nn.functional.cross_entropy(
                model(inputs["input_ids"]).logits.transpose(1, 2), labels.clamp(min=0), reduction="none"
            )
            return (losses * labels.ne(-100)).sum() / labels.ne(-100).sum()

    class Mean(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            logits = model(inputs["input_ids"]).logits
            return nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())

    class Items(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any, **kwargs: Any) -> Any:
            logits = model(inputs["input_ids"]).logits.flatten(0, 1)
            total = nn.functional.cross_entropy(logits, inputs["labels"].flatten(), reduction="sum")
            return total / num_items_in_batch

    found = {}
    for kind in (Masked, Mean, Items):
        reset_accelerate()
        options: dict[str, Any] = dict(use_cpu=True, report_to=[], max_steps=2, log_level="error", disable_tqdm=True)
        args = transformers.TrainingArguments(folder, per_device_train_batch_size=4, save_strategy="no", **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Trainer.train(kind(llama(), args, train_dataset=token_rows(), parallel={"data": 2}))
        found[kind.__name__] = [str(each.message) for each in caught if "average of their losses" in str(each.message)]
    return found


class OwnHead(nn.Module):
    """A body of transformers with the user's head. Its forward takes no argument that shows what its inputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = bert().bert
        self.heads = nn.ModuleList([nn.Linear(32, 3), nn.Linear(32, 3)])

    def forward(self, input_ids: Any = None, task: Any = None, labels: Any = None) -> dict[str, torch.Tensor]:
        logits = self.heads[int(task[0])](self.body(input_ids).pooler_output)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class OwnSubclass(transformers.BertPreTrainedModel):  # type: ignore[misc]
    """A subclass of a model of transformers, which cannot be run without the user's own input."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.encoder, self.score = transformers.BertModel(config), nn.Linear(32, 3)
        self.post_init()

    def forward(self, input_ids: Any = None, weight: Any = None, labels: Any = None) -> dict[str, torch.Tensor]:
        logits = self.score(self.encoder(input_ids).pooler_output) * weight[:, None]
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Normalized(nn.Module):
    """A model with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(127, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.out(self.norm(self.embed(input_ids).mean(1)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def own_models(folder: str) -> dict[str, list[float]]:
    """Return the losses of models that only run with the inputs of the user's data."""
    from accelerate.utils import DataLoaderConfiguration
    from torch.utils.data import DataLoader

    from shardformer.integrations.accelerate import Accelerator
    from shardformer.integrations.transformers import Trainer

    layout = {"tensor": 2} if int(os.environ["WORLD_SIZE"]) > 1 else {}
    weighted = [{**row, "weight": 1.0 + n % 3} for n, row in enumerate(class_rows())]
    with_tasks = [{**row, "task": n // 8 % 2, "unused": n} for n, row in enumerate(class_rows())]
    options: dict[str, Any] = dict(use_cpu=True, report_to=[], logging_steps=1, max_steps=3, log_level="error")
    options |= {"per_device_train_batch_size": 8, "disable_tqdm": True, "train_sampling_strategy": "sequential"}

    def by_trainer(model: Any) -> list[float]:
        reset_accelerate()
        args = transformers.TrainingArguments(folder, remove_unused_columns=False, **options)
        trainer = Trainer(model, args, train_dataset=weighted, parallel=layout)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def by_accelerate(model: Any) -> list[float]:
        reset_accelerate()
        split = DataLoaderConfiguration(split_batches=True)
        accelerator, losses = Accelerator(cpu=True, dataloader_config=split, parallel=layout), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(with_tasks, 8, collate_fn=transformers.default_data_collator)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            del batch["unused"]
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    subclass = bert().config
    torch.manual_seed(0)
    return {
        "own subclass": by_trainer(OwnSubclass(subclass)),
        "own head": by_accelerate(OwnHead()),
    }


def detection(folder: str, layout: dict[str, Any]) -> dict[str, list[float]]:
    """Return the losses and gradient norms of object detection, whose loss divides by the number of boxes."""
    from shardformer.integrations.transformers import Trainer

    reset_accelerate()
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(image_size=[16, 16], patch_size=4, num_detection_tokens=5, num_labels=3)
    drop = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    rows = []
    for n in range(24):
        boxes, count = torch.rand(3, 4) * 0.3 + 0.3, 1 + n % 3
        target = {"class_labels": torch.arange(count), "boxes": boxes[:count]}
        rows.append({"pixel_values": torch.randn(3, 16, 16), "labels": target})

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        return {"pixel_values": torch.stack([x["pixel_values"] for x in batch]), "labels": [x["labels"] for x in batch]}

    options: dict[str, Any] = dict(use_cpu=True, report_to=[], logging_steps=1, max_steps=3, log_level="error")
    options |= {"per_device_train_batch_size": 8 // layout.get("data", 1), "disable_tqdm": True}
    args = transformers.TrainingArguments(folder, remove_unused_columns=False, **options)
    model = transformers.YolosForObjectDetection(transformers.YolosConfig(**sizes, **drop))
    trainer = Trainer(model, args, train_dataset=rows, data_collator=collate, parallel=layout)
    trainer.train()
    history = trainer.state.log_history
    return {name: [entry[name] for entry in history if name in entry] for name in ("loss", "grad_norm")}


def warnings_of_batch_norm(folder: str) -> list[str]:
    """Return the warnings about statistics of the batch of a data-parallel rank."""
    from shardformer.integrations.transformers import Trainer

    reset_accelerate()
    args = transformers.TrainingArguments(folder, use_cpu=True, report_to=[], log_level="error")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(Normalized(), args, train_dataset=class_rows(), parallel={"data": 2})
    return [str(each.message) for each in caught if "BatchNorm" in str(each.message)]


def contrastive(folder: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Return the losses of in-batch negatives and the warnings about them, with and without gathered embeddings."""
    from shardformer.integrations.transformers import Trainer

    class Negatives(Trainer):
        gathers = False

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            first, second = (model(inputs[name]).last_hidden_state[:, 0] for name in ("input_ids", "others"))
            if self.gathers:
                first, second = (shardformer.pipeline.gather_over_data(x, self.context) for x in (first, second))
            return nn.functional.cross_entropy(first @ second.T, torch.arange(len(first)))

    class Gathered(Negatives):
        gathers = bool(layout)

    ids = torch.randint(3, 127, (32, 2, 9), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [{"input_ids": first, "others": second} for first, second in ids]
    options: dict[str, Any] = dict(use_cpu=True, report_to=[], logging_steps=1, max_steps=2, log_level="error")
    options |= {"per_device_train_batch_size": 8 // layout.get("data", 1), "disable_tqdm": True}
    found: dict[str, Any] = {}
    for kind in (Negatives, Gathered):
        reset_accelerate()
        args = transformers.TrainingArguments(folder, remove_unused_columns=False, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = kind(bert().bert, args, train_dataset=rows, parallel=layout)
            trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        messages = [str(each.message) for each in caught if "compares the" in str(each.message)]
        found[kind.__name__] = losses, messages
    return found
