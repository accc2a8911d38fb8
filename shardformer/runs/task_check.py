"""Does a model learn what its task says? Found by running a small one, not by its name.

A model that is to predict the next token must not read it. Whether it does is decided by its attention (that of BERT
reads the whole sequence), by its config (``is_decoder``) and by its loss (which compares a label with the output at the
position before, or with that at its own).
"""

# B batch, S sequence, V vocabulary

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.lazy.materialize import copy_with_values, is_lazy
from shardformer.lazy.recorder import LazyInit
from shardformer.policies.infer.twin import twin_of
from shardformer.runs.config import RunConfig
from shardformer.runs.samples import IGNORED
from shardformer.testing.zoo.shrink import SMALL_NUMEL

LENGTH = 8
DECODER = "is_decoder"
"""The field with which an encoder of transformers becomes a decoder."""
NOISE = 1e-5
"""By how much outputs differ that do not depend on what was changed, of their size: experts get other rows."""
MOVED = 0.05
"""How far parameters are moved: those that a class begins with at 0 hide what depends on what."""


def check_task(config: RunConfig, model: Any) -> None:
    """Raises ConfigError for a model that sees the token that it is to predict, or not what it needs for it.

    What cannot be run by itself, with tokens alone, is not checked. Communicates nothing; the random state is kept.
    """
    task = config.model.task
    if task not in ("causal", "masked"):
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sees = seen_by_loss(model)
        if sees is None:
            return
        name = type(model).__name__
        if task == "causal" and sees.itself:
            raise ConfigError(
                f"model.task = 'causal', and {name} reads the token that it is to predict",
                rule="The next token is predicted from those before it: the output at a position does not depend on "
                "later tokens",
                remedy=_remedy(model),
            )
        if task == "masked" and not (sees.later and sees.in_place):
            what = "reads no later tokens" if not sees.later else "compares a label with the output before it"
            raise ConfigError(
                f"model.task = 'masked', and {name} {what}",
                rule="A masked token is predicted in its place, from the tokens on both sides of it",
                remedy="Write model.task = 'causal', or give a masked language model",
            )


@dataclass(frozen=True)
class Seen:
    """What the output that the loss compares with a label depends on.

    Args:
        itself: whether on the token that is the label, or on later ones.
        later: whether on later ones.
        in_place: whether it is the output at the label's own position.
    """

    itself: bool
    later: bool
    in_place: bool


def seen_by_loss(model: Any) -> Seen | None:
    """By trying it on a copy, or on a small model of the same class; None where that cannot be told."""
    for dtype in (torch.float64, torch.float32):
        try:
            small, ids_BS = _small(model)
            return _seen(small.to(dtype), ids_BS)
        except Exception:  # it takes more than tokens and labels, gives something else, or computes in fp32 alone
            continue
    return None


def _small(model: Any) -> tuple[nn.Module, Tensor]:
    """A model that runs on the CPU at once, and tokens for it."""
    if sum(p.numel() for p in model.parameters()) > SMALL_NUMEL:
        twin = twin_of(model)
        small, ids_BS = twin.model, twin.batch["input_ids"][:1]
    else:
        small = (copy_with_values if is_lazy(model) else copy.deepcopy)(model)
        special = {value for name, value in model.config.to_dict().items() if name.endswith("_token_id")}
        plain = [token for token in range(model.get_input_embeddings().num_embeddings) if token not in special]
        ids_BS = torch.tensor(plain)[torch.randperm(len(plain))[None, :LENGTH]]
    with torch.no_grad():
        for param in small.parameters():
            param.add_(MOVED * torch.randn_like(param))
    return small.cpu().eval(), ids_BS


def _remedy(model: Any) -> str:
    """The other task; and ``is_decoder``, where that makes the attention of this class causal."""
    masked = "Write model.task = 'masked'"
    if getattr(model.config, DECODER, True):
        return f"{masked}, or give a model that predicts the next token"
    config = copy.deepcopy(model.config)
    setattr(config, DECODER, True)
    with LazyInit():
        decoder = type(model)(config)
    sees = seen_by_loss(decoder)
    if sees is None or sees.itself:
        return f"{masked}, or give a model that predicts the next token"
    return f"{masked}; or model.config.{DECODER} = true, with which its attention is causal"


def _seen(model: nn.Module, ids_BS: Tensor) -> Seen:
    place = ids_BS.shape[1] // 2
    labels_BS = torch.full_like(ids_BS, IGNORED)
    labels_BS[:, place] = ids_BS[:, place]
    output: Mapping[str, Tensor] = model(input_ids=ids_BS, labels=labels_BS)
    logits_BSV = output["logits"]
    (gradient_BSV,) = torch.autograd.grad(output["loss"], [logits_BSV])
    compared = gradient_BSV.abs().sum((0, 2)).nonzero().flatten().tolist()
    in_place = compared == [place]

    def depends_from(first: int) -> bool:
        other_BS = ids_BS.clone()
        other_BS[:, first:] = ids_BS.roll(1, 1)[:, first:]
        with torch.no_grad():
            other_BSV = model(input_ids=other_BS)["logits"]
        if not torch.isfinite(other_BSV).all():
            raise ValueError("its output is not finite")
        difference = (other_BSV - logits_BSV)[:, compared].abs().max()
        return bool(difference > NOISE * logits_BSV.abs().max())

    return Seen(depends_from(place), depends_from(place + 1), in_place)
