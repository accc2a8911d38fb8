"""Measures which input tokens affect the outputs of a language model, on a small copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.discovery.reduced_model import reduce_model
from shardformer.discovery.shrink_config import SMALL_NUMEL
from shardformer.errors import ConfigError, get_first_message_line
from shardformer.meta_init.lazy_init import copy_and_materialize, has_deferred_weights

# B batch, S sequence, V vocabulary

LENGTH = 8
NOISE = 1e-5
"""Relative tolerance for equal outputs, because experts that receive different tokens round differently."""
PERTURBATION = 0.05
"""Scale of the noise that is added to parameters, because parameters initialized to 0 would hide dependences."""
IGNORED = -100
"""Label that the loss ignores."""


@dataclass(frozen=True)
class LabelDependence:
    """The input tokens on which a language model's prediction of a label depends.

    Args:
        on_label: Whether the label token or later tokens change the prediction.
        on_later: Whether later tokens change the prediction.
        in_place: Whether the loss compares the label with the output at the same position.
    """

    on_label: bool
    on_later: bool
    in_place: bool


def measure_label_dependence(model: Any) -> LabelDependence | None:
    """Measure which input tokens affect the prediction of a label, or return None if the model cannot be measured.

    The measurement uses a copy of the model, or a reduced model if the model is large.
    """
    for dtype in (torch.float64, torch.float32):
        try:
            small, ids_BS = _make_small_model(model)
            return _measure_dependence(small.to(dtype), ids_BS)
        except Exception:  # the model requires other inputs or fp32, or returns other outputs
            continue
    return None


def check_packing_is_supported(
    model: Any, option: str = "data.packing = true", remedy: str = "Remove data.packing"
) -> None:
    """Raise ConfigError if a model attends across documents that are packed into one row.

    The documents are separated by restarting ``position_ids``. The output of a packed document is compared with that of
    the document alone, on a copy of the model or a reduced model. Communicates nothing, and keeps the random state.
    ``option`` is the setting that the error names.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            small, ids_BS = _make_small_model(model)
            is_separated = _isolates_packed_documents(small.to(torch.float64), ids_BS)
            reason = "lets packed documents attend to each other"
        except Exception as error:  # the model takes no position_ids
            is_separated, reason = False, f"does not accept packed documents: {get_first_message_line(error)}"
    if not is_separated:
        raise ConfigError(
            f"{option} requires a model that separates packed documents by their position_ids, but "
            f"{type(model).__name__} {reason}.",
            remedy=remedy,
        )


def _isolates_packed_documents(model: nn.Module, ids_BS: Tensor) -> bool:
    ids_BS, start = ids_BS[:, :LENGTH], LENGTH // 2
    positions_BS = torch.arange(start).repeat(2).expand_as(ids_BS)
    with torch.no_grad():
        packed_BSV = model(input_ids=ids_BS, position_ids=positions_BS, use_cache=False)["logits"]
        alone_BSV = model(input_ids=ids_BS[:, start:], position_ids=positions_BS[:, start:], use_cache=False)["logits"]
    difference = (packed_BSV[:, start:] - alone_BSV).abs().max()
    return bool(difference <= NOISE * alone_BSV.abs().max())


def _make_small_model(model: Any) -> tuple[nn.Module, Tensor]:
    """Return a copy of the model on the CPU (or a reduced model if it is large), and a sequence of input tokens."""
    if sum(p.numel() for p in model.parameters()) > SMALL_NUMEL:
        reduced = reduce_model(model)
        small, ids_BS = reduced.model, reduced.batch["input_ids"][:1]
    else:
        small = (copy_and_materialize if has_deferred_weights(model) else copy.deepcopy)(model)
        special = {value for name, value in model.config.to_dict().items() if name.endswith("_token_id")}
        plain = [token for token in range(model.get_input_embeddings().num_embeddings) if token not in special]
        ids_BS = torch.tensor(plain)[torch.randperm(len(plain))[None, :LENGTH]]
    with torch.no_grad():
        for param in small.parameters():
            param.add_(PERTURBATION * torch.randn_like(param))
    return small.cpu().eval(), ids_BS


def _measure_dependence(model: nn.Module, ids_BS: Tensor) -> LabelDependence:
    position = ids_BS.shape[1] // 2
    labels_BS = torch.full_like(ids_BS, IGNORED)
    labels_BS[:, position] = ids_BS[:, position]
    output: Mapping[str, Tensor] = model(input_ids=ids_BS, labels=labels_BS)
    logits_BSV = output["logits"]
    (gradient_BSV,) = torch.autograd.grad(output["loss"], [logits_BSV])
    compared = gradient_BSV.abs().sum((0, 2)).nonzero().flatten().tolist()

    def depends_from(first: int) -> bool:
        other_BS = ids_BS.clone()
        other_BS[:, first:] = ids_BS.roll(1, 1)[:, first:]
        with torch.no_grad():
            other_BSV = model(input_ids=other_BS)["logits"]
        if not torch.isfinite(other_BSV).all():
            raise ValueError("The logits of the model contain NaN or infinite values.")
        difference = (other_BSV - logits_BSV)[:, compared].abs().max()
        return bool(difference > NOISE * logits_BSV.abs().max())

    return LabelDependence(depends_from(position), depends_from(position + 1), in_place=compared == [position])
