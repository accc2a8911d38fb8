"""An ordinary accelerate loop, in one process with accelerate's own class, or sharded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader

import shardformer
from shardformer.config import ParallelConfig
from shardformer.sharding.compiled_layers import get_layer_stack_compilers
from tests.integrations.errors import errors_of
from tests.integrations.small_models import (
    full_weights,
    largest_difference,
    llama,
    token_rows,
    weight_difference,
)
from tests.integrations.trainer_cases import add_adapter, reset_accelerate

GLOBAL_BATCH = 8


def make_accelerator(layout: dict[str, Any], **options: Any) -> Any:
    import accelerate

    from shardformer.integrations.accelerate import Accelerator

    reset_accelerate()
    plugin = accelerate.utils.DataLoaderConfiguration(split_batches=True)
    options = {"cpu": True, "dataloader_config": plugin, **options}
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return accelerate.Accelerator(**options)
    return Accelerator(**options, parallel=ParallelConfig(**layout))


class Loop:
    """A training script. ``split_batches=True`` keeps the global batch, and so the losses, at every layout."""

    def __init__(
        self,
        layout: dict[str, Any],
        accumulation: int = 1,
        shuffle: bool = False,
        adapter: str = "",
        **options: Any,
    ) -> None:
        torch.manual_seed(5)
        accelerator = make_accelerator(layout, gradient_accumulation_steps=accumulation, **options)
        module = add_adapter(llama().double(), adapter, 0) if adapter else llama()
        trained = [p for p in module.parameters() if p.requires_grad]
        # with a smaller eps, rounding errors decide the steps of values whose gradient is almost 0
        optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)
        collate = transformers.default_data_collator
        loader = DataLoader(token_rows(), batch_size=GLOBAL_BATCH, shuffle=shuffle, collate_fn=collate)
        evaluation = DataLoader(token_rows(14, seed=3), batch_size=GLOBAL_BATCH, collate_fn=collate)
        scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 2, 20)
        prepared = accelerator.prepare(module, optimizer, loader, evaluation, scheduler)
        self.model, self.optimizer, self.loader, self.evaluation, self.scheduler = prepared
        self.accelerator, self.accumulation = accelerator, accumulation
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []

    def train(self, steps: int) -> None:
        accelerator, end = self.accelerator, len(self.losses) + steps * self.accumulation
        while True:
            for batch in self.loader:
                with accelerator.accumulate(self.model):
                    counts = (batch["labels"][..., 1:] != -100).sum().float()
                    total = accelerator.reduce(counts, "mean")
                    loss = self.model(**batch, num_items_in_batch=total).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        self.norms.append(float(accelerator.clip_grad_norm_(self.model.parameters(), 0.5)))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.losses.append(float(accelerator.reduce(loss.detach(), "mean")))
                self.rates.append(self.scheduler.get_last_lr()[0])
                if len(self.losses) == end:
                    return

    def predict(self) -> tuple[torch.Tensor, list[Any]]:
        """Return the predicted tokens of the evaluation data, gathered as tensors and as objects."""
        self.model.eval()
        tensors, objects = [], []
        for batch in self.evaluation:
            with torch.no_grad():
                predicted = self.model(input_ids=batch["input_ids"]).logits.argmax(-1)
            tensors.append(self.accelerator.gather_for_metrics(predicted))
            objects += self.accelerator.gather_for_metrics([str(row.tolist()) for row in predicted])
        self.model.train()
        return torch.cat(tensors), objects


def train_loop(case: dict[str, Any]) -> dict[str, Any]:
    """Train, predict, save and continue, and return the differences from one process."""
    folder, layout = case["folder"], case["layout"]
    options = {name: value for name, value in case.items() if name not in ("folder", "layout")}
    loop = Loop(layout, **options)
    loop.train(2)
    tokens, texts = loop.predict()
    key = "loop" + "".join(f"_{name}{value}" for name, value in options.items())
    place = os.path.join(folder, key + "".join(f"_{name}{value}" for name, value in layout.items()))
    loop.accelerator.save_state(place)
    loop.accelerator.wait_for_everyone()
    weights = full_weights(loop.accelerator.unwrap_model(loop.model))
    loop.train(1)
    after = full_weights(loop.accelerator.unwrap_model(loop.model))
    own = weights, after, (loop.losses, loop.norms, loop.rates), tokens, texts
    reference = os.path.join(folder, key + ".pt")
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        torch.save(own, reference)
        return {}
    weights_1, after_1, (losses_1, norms_1, rates_1), tokens_1, texts_1 = torch.load(reference)
    found: dict[str, Any] = {
        "loss": largest_difference(loop.losses, losses_1),
        "grad_norm": largest_difference(loop.norms, norms_1),
        "rates": largest_difference(loop.rates, rates_1),
        "weights": weight_difference(weights, weights_1),
        "predictions": float(tokens.shape != tokens_1.shape or (tokens != tokens_1).float().mean()),
        "texts": float(texts != texts_1),
    }
    for name, saved, reached in (("resumed", place, after), ("crossed", os.path.join(folder, key), after_1)):
        again = Loop(layout, **options)
        again.accelerator.load_state(saved)
        again.train(1)
        found[name] = weight_difference(full_weights(again.model), reached)
    return found


def train_loops(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [train_loop(case) for case in cases]


def compiled_loop(layout: dict[str, Any]) -> tuple[float, str, list[int]]:
    """Train with a dynamo backend and without. Return the difference, the class of the model and numbers of graphs."""
    eager, compiled = Loop(layout), Loop(layout, dynamo_backend="aot_eager")
    eager.train(2)
    compiled.train(2)
    difference = largest_difference([*compiled.losses, *compiled.norms], [*eager.losses, *eager.norms])
    graphs = [len(stack.graphs) for stack in get_layer_stack_compilers(compiled.model)]
    return difference, type(compiled.model).__name__, graphs


def refusals() -> dict[str, str]:
    """Return the messages of the errors by what is refused."""
    import accelerate
    from accelerate import ParallelismConfig
    from accelerate.utils import DataLoaderConfiguration

    from shardformer.integrations.accelerate import Accelerator

    def sharded() -> Any:
        return shardformer.shard_model(llama(), context=shardformer.launch_from_torch(tensor=2))

    tensor_parallel = ParallelismConfig(tp_size=2)
    dispatching = DataLoaderConfiguration(dispatch_batches=True)
    attempts: dict[str, Callable[[], Any]] = {
        "fsdp_plugin": lambda: Accelerator(cpu=True, fsdp_plugin=object()),
        "deepspeed_plugin": lambda: Accelerator(cpu=True, deepspeed_plugin=object()),
        "megatron_lm_plugin": lambda: Accelerator(cpu=True, megatron_lm_plugin=object()),
        "parallelism_config": lambda: Accelerator(cpu=True, parallelism_config=tensor_parallel),
        "dispatch_batches": lambda: Accelerator(cpu=True, dataloader_config=dispatching),
        "pipe": lambda: Accelerator(cpu=True, parallel={"pipe": 2}),
        "plain": lambda: accelerate.Accelerator(cpu=True).prepare(sharded()),
        "plain, evaluation": lambda: accelerate.Accelerator(cpu=True).prepare_model(sharded(), evaluation_mode=True),
        "other layout": lambda: Accelerator(cpu=True, parallel={"data": 2}).prepare(sharded()),
    }
    return errors_of(attempts)


def losses_of_notebook() -> list[float]:
    """Return the losses of the cell in ``notebook.py`` in one process."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in DataLoader(token_rows(), batch_size=8, collate_fn=transformers.default_data_collator):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def helpers(layout: dict[str, Any]) -> dict[str, Any]:
    """Return what the counting, splitting and gathering functions of the accelerator return on this rank."""
    from shardformer.integrations.accelerate import Accelerator

    reset_accelerate()
    accelerator = Accelerator(cpu=True, parallel=layout)
    torch.manual_seed(100 + int(os.environ["RANK"]))
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 16, 16, replacement=False)
    loaders = DataLoader(list(range(16)), 4, shuffle=True), DataLoader(list(range(16)), 4, sampler=sampler)  # type: ignore
    loader, weighted = accelerator.prepare(*loaders)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer, prepared = accelerator.prepare(optimizer, scheduler)
    optimizer.step()
    prepared.step()
    with accelerator.split_between_processes(["a", "b", "c"]) as part:
        split = list(part)
    if accelerator.is_main_process:
        accelerator.set_trigger()
    value = torch.tensor(1.0 + 2 * accelerator.process_index) if accelerator.num_processes > 1 else torch.tensor(3.0)
    return {
        "num_processes": accelerator.num_processes,
        "is_main": accelerator.is_main_process,
        "is_last": accelerator.is_last_process,
        "split": split,
        "order": [int(x) for batch in loader for x in batch],
        "weighted": [int(x) for _ in range(2) for batch in weighted for x in batch][16 // accelerator.num_processes :],
        "steps": scheduler.last_epoch,
        "reduced": [float(accelerator.reduce(value, how)) for how in ("sum", "mean", "max")],
        "triggered": [accelerator.check_trigger(), accelerator.check_trigger()],
    }


def misuses(folder: str) -> dict[str, str]:
    """Return the messages of the errors by what is misused."""
    from shardformer.integrations.accelerate import Accelerator

    def prepare_two_optimizers() -> None:
        model = llama()
        optimizers = [torch.optim.SGD(params, lr=0.1) for params in (model.model.parameters(), [model.lm_head.weight])]
        Accelerator(cpu=True, parallel={"data": 2, "zero_stage": 1}).prepare(model, *optimizers)

    def prepare_joint_optimizer() -> None:
        models = llama(), llama(1)
        optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
        Accelerator(cpu=True, parallel={"data": 2, "zero_stage": 1}).prepare(*models, optimizer)

    os.makedirs(os.path.join(folder, "shardformer_0"), exist_ok=True)
    return errors_of(
        {
            "two optimizers": prepare_two_optimizers,
            "joint optimizer": prepare_joint_optimizer,
            "reduction": lambda: Accelerator(cpu=True, parallel={"data": 2}).reduce(torch.ones(1), "min"),
            "load before prepare": lambda: Accelerator(cpu=True, parallel={"data": 2}).load_state(folder),
        }
    )


def optimizer_prepared_after_model() -> str:
    """Return the class of an optimizer that is created from the parameters of a model that ``prepare`` returned."""
    from shardformer.integrations.accelerate import Accelerator

    reset_accelerate()
    accelerator = Accelerator(cpu=True, parallel={"data": 2, "zero_stage": 1})
    model = accelerator.prepare(llama())
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return type(optimizer.optimizer).__name__


def train_with_joint_optimizer(layout: dict[str, Any], folder: str) -> list[float]:
    """Train two models with one optimizer, and return the losses, also those after a checkpoint was loaded."""
    reset_accelerate()
    accelerator = make_accelerator(layout)
    models = [llama(), llama(1)]
    groups = [
        {"params": [p for model in models for p in model.parameters() if p.dim() > 1]},
        {"params": [p for model in models for p in model.parameters() if p.dim() < 2], "lr": 3e-2},
    ]
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(96).reshape(12, 8) * 7 % 31]
    loader = DataLoader(rows, batch_size=4)
    *models, optimizer, loader = accelerator.prepare(*models, torch.optim.AdamW(groups, lr=1e-2), loader)
    losses: list[float] = []
    for epoch in range(2):
        for batch in loader:
            loss = models[0](**batch).loss + 2 * models[1](**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        if not epoch:
            accelerator.save_state(folder)
            losses += train_step_and_restore(accelerator, models, optimizer, batch, folder)
    return losses


def train_step_and_restore(accelerator: Any, models: Any, optimizer: Any, batch: Any, folder: str) -> list[float]:
    """Train another step, and load the checkpoint. Returns the losses after the step and after loading."""
    (models[0](**batch).loss - models[1](**batch).loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    found = []
    for _ in range(2):
        with torch.no_grad():
            loss = models[0](**batch).loss + models[1](**batch).loss
        found.append(float(accelerator.reduce(loss, "mean")))
        accelerator.load_state(folder)
    return found
