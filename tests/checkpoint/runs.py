"""Training runs of small models under any layout, for the checkpoint tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from shardformer.checkpoint.load import LoadedCheckpoint, load_checkpoint
from shardformer.checkpoint.save import save_checkpoint
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.pipeline import Pipeline
from shardformer.pipeline.stage_manager import PipelineStageManager
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory
from shardformer.zero.shard_optimizer import shard_optimizer

SAMPLES = 4


@dataclass(frozen=True)
class Layout:
    data: int = 1
    tensor: int = 1
    pipe: int = 1
    sequence: int = 1
    stage: int | None = None
    sequence_parallel: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{name}{n}" for name in ("data", "sequence", "tensor", "pipe") if (n := getattr(self, name)) > 1]
        parts += [self.options["tensor_parallel_mode"]] if self.options else []
        return "-".join([*parts, *([f"zero{self.stage}"] if self.stage is not None else [])]) or "one"


LAYOUTS = {
    str(layout): layout
    for layout in (
        Layout(),
        Layout(tensor=2),
        Layout(pipe=2, tensor=2),
        Layout(data=4, stage=2),
        Layout(data=2, tensor=2, stage=3),
        Layout(tensor=4, sequence_parallel=True),
        Layout(data=2, sequence=2),
        Layout(tensor=4, stage=1, options={"tensor_parallel_mode": "2d"}),
    )
}


@dataclass(eq=False)
class Run:
    """A model in training on one rank."""

    context: ParallelContext
    model: nn.Module
    optimizer: Any
    scheduler: Any
    pipeline: Pipeline

    def train(self, step: int) -> float:
        """Train one step on a global batch of ``SAMPLES`` samples and return its loss."""
        batch = RandomBatchFactory(DEFAULT_HEAD.get(self.family, "LlamaForCausalLM"), batch_size=SAMPLES)(step)
        data = self.context.data
        each = SAMPLES // data.size
        own = {
            k: (v.double() if v.is_floating_point() else v)[data.rank * each : (data.rank + 1) * each]
            for k, v in batch.items()
        }
        loss = self.pipeline.step(own)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss)

    family: str = "llama"


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    if family in DEFAULT_HEAD:
        return SmallModelFactory(family)().double()
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(
            family, hidden_size=64, intermediate_size=80, num_hidden_layers=4, vocab_size=127,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        )
    )  # fmt: skip
    return model.double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two parameter groups."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3)


def start(plain: nn.Module, layout: Layout, context: ParallelContext, family: str) -> Run:
    """Start a run with a copy of the model ``plain``."""
    config: dict[str, Any] = {**layout.options, "context": context}
    if layout.pipe > 1:
        config["pipeline_stage_manager"] = PipelineStageManager(context)
    if layout.sequence_parallel and family in DEFAULT_HEAD:  # an inferred one may have positions of its own
        config["enable_sequence_parallelism"] = True
    model = shard_model(copy.deepcopy(plain), **config)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    trained: Any = shard_optimizer(model, optimizer, stage=layout.stage) if layout.stage is not None else optimizer
    pipeline = Pipeline(model, micro_batches=2 if layout.pipe > 1 else 1, average_loss_over="tokens")
    return Run(context, model, trained, scheduler, pipeline, family)


def on_ranks(layout: Layout, family: str, do: Callable[[Run], Any]) -> list[Any]:
    """Return the result of ``do`` on each rank of a run."""
    plain = build(family)
    return run_as_threads(
        lambda context: do(start(plain, layout, context, family)),
        data=layout.data,
        tensor=layout.tensor,
        pipe=layout.pipe,
        sequence=layout.sequence,
    )


def save(run: Run, folder: Path, step: int) -> Path:
    return save_checkpoint(
        run.model, folder, run.optimizer, step=step, scheduler=run.scheduler, extra={"seen": step * SAMPLES}
    )


def load(run: Run, folder: Path) -> LoadedCheckpoint:
    return load_checkpoint(run.model, folder, run.optimizer, scheduler=run.scheduler)


class Lookahead(torch.optim.Optimizer):
    """Average the weights of an inner optimizer every second step. Both optimizers have a state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for param in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[param]
            if not state:
                state.update(slow=param.clone(), step=0)
            state["step"] += 1
            if state["step"] % 2 == 0:
                param.copy_(state["slow"].lerp_(param, 0.5))
