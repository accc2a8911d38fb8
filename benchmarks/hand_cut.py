"""A LLaMA split into stages by hand for torch.distributed.pipelining, the reference of ``pipeline.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

SCHEDULES: Mapping[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved_zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
"""torch's class for each schedule of ShardFormer."""


class LlamaStage(nn.Module):
    """The layers ``start`` to ``end`` (exclusive) of a transformers LLaMA, whose modules it takes over.

    The first stage has the embedding, the last one the norm and the head.
    """

    def __init__(self, whole: Any, start: int, end: int) -> None:
        super().__init__()
        model = whole.model
        self.embed_tokens = model.embed_tokens if start == 0 else None
        self.layers = nn.ModuleList(model.layers[start:end])
        self.rotary_emb = model.rotary_emb
        is_last = end == len(model.layers)
        self.norm, self.lm_head = (model.norm, whole.lm_head) if is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """Map token ids (first stage) or hidden states to hidden states, or to logits on the last stage."""
        hidden = self.embed_tokens(x) if self.embed_tokens is not None else x
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotary = self.rotary_emb(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(
                hidden, attention_mask=None, position_embeddings=rotary, position_ids=positions, use_cache=False
            )
        return self.lm_head(self.norm(hidden)) if self.norm is not None and self.lm_head is not None else hidden


def causal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean next-token loss, without a copy of the logits."""
    following = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), following.reshape(-1))


class HandCut:
    """Steps of torch's schedule over hand-split stages.

    Args:
        whole: the model, of which this rank keeps its stages.
        bounds: first layer and end (exclusive) of each virtual stage.
        placement: the rank of each virtual stage.
    """

    def __init__(
        self,
        whole: nn.Module,
        schedule: str,
        micro_batches: int,
        bounds: Sequence[tuple[int, int]],
        placement: Sequence[int],
        group: ProcessGroup | None,
    ) -> None:
        rank = torch.distributed.get_rank(group)
        own = [v for v, at in enumerate(placement) if at == rank]
        self.modules = nn.ModuleList(LlamaStage(whole, *bounds[v]) for v in own)
        device = torch.device("cpu")
        stages = [
            PipelineStage(module, v, len(placement), device, group=group)
            for module, v in zip(self.modules, own, strict=True)
        ]
        given = stages if schedule not in ("gpipe", "1f1b") else stages[0]
        self._schedule = SCHEDULES[schedule](given, micro_batches, loss_fn=causal_loss)
        self._is_first, self._is_last = 0 in own, len(placement) - 1 in own

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """Run a forward and a backward pass of a batch. Return its loss on the rank that has it, and NaN on others."""
        for param in self.modules.parameters():
            param.grad = None
        losses: list[Tensor] = []
        options: dict[str, Any] = {"target": batch["labels"], "losses": losses} if self._is_last else {}
        self._schedule.step(*([batch["input_ids"]] if self._is_first else []), return_outputs=False, **options)
        return float(torch.stack(losses).detach().mean()) if losses else float("nan")
