"""Full weights out of a sharded model: gathered over tensor ranks and stages, and written by the first rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.comm.agree import agree, gather_all
from shardformer.comm.calls import come
from shardformer.comm.collectives import broadcast, gather_objects
from shardformer.comm.gather import gather_full
from shardformer.errors import ConfigError, InputError
from shardformer.layers.tensor.embedding import Embedding1D, VocabParallelEmbedding1D
from shardformer.layout.state import ShardedState, state_of
from shardformer.sharding.replace import check_folder, replace_folder
from shardformer.sharding.stages import Stages


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The plain model's state dict: every parameter and buffer whole, on the CPU, on every rank.

    All ranks of the tensor and pipe axes call it, and under stage 3 of ZeRO all ranks. One full tensor at a time is on
    the device, or one layer. Communicates one all-gather a sharded parameter over each axis that it is cut over, and
    over pipe one broadcast of each tensor.
    """
    state = state_of(model)
    axes = [state.context.tensor, state.context.pipe, *([state.context.data] if state.parameters else [])]
    come("full_state_dict", *axes)
    entries = state.by_param()
    known: dict[int, Tensor] = {}
    out = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        if id(value) not in known:
            entry = entries.get(id(value))
            if state.parameters is not None and entry is not None:
                state.parameters.bring(value)
            whole = value.detach() if entry is None else gather_full(value, entry.spec, state.axis)
            known[id(value)] = whole.cpu()
        out[name] = known[id(value)]
    if state.parameters is not None:
        state.parameters.put_away()
    if state.stages is None or state.context.pipe.size == 1:
        return out
    return _of_all_stages(out, state.stages, state)


_EMBEDDINGS = (nn.Embedding, VocabParallelEmbedding1D, Embedding1D)


def _of_all_stages(own: dict[str, Tensor], stages: Stages, state: ShardedState) -> dict[str, Tensor]:
    """What the stages have together, in the order of the plain model's; tied names give one tensor."""
    pipe, device = state.context.pipe, state.context.device
    whole: dict[str, Tensor] = {}
    dtypes = gather_objects({name: t.dtype for name, t in own.items()}, pipe)
    for name, (first, shape) in stages.state.items():
        if first not in whole:
            source = stages.stages_of(name)[0]
            here = own[name] if source == pipe.rank else torch.empty(shape, dtype=dtypes[source][name])
            whole[first] = broadcast(here.to(device).contiguous(), pipe, source).cpu()
    return {name: whole[first] for name, (first, _) in stages.state.items()}


def install_saving(model: nn.Module, state: ShardedState) -> None:
    """Lets ``save_pretrained`` write full weights and ``num_parameters`` count them, and refuses them of a part."""
    for module in model.modules():
        own = _save_pretrained if module is model else _refuse_part
        for name, method in (("save_pretrained", own), ("resize_token_embeddings", _refuse_resize)):
            if hasattr(module, name):
                setattr(module, name, method.__get__(module))
    if hasattr(model, "num_parameters"):
        model.__dict__["num_parameters"] = _num_parameters.__get__(model)
    if hasattr(model, "save_pretrained"):
        state.notes.append("save_pretrained writes full weights; resize_token_embeddings is refused.")


def _num_parameters(self: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Of the plain model. Communicates nothing."""
    state = state_of(self)
    if state.stages is not None and state.context.pipe.size > 1:
        if only_trainable or exclude_embeddings:
            raise ConfigError(
                "num_parameters of some parameters, on a stage of a pipeline",
                rule="A stage knows how many parameters the whole model has, and which train of its own",
                remedy="Ask the plain model, before it is sharded",
            )
        return int(state.stages.num_parameters)
    embeddings = {id(p) for m in self.modules() if isinstance(m, _EMBEDDINGS) for p in m.parameters()}
    return sum(
        prod(entry.spec.shape)
        for entry in state.entries
        if (entry.param.requires_grad or not only_trainable)
        and not (exclude_embeddings and id(entry.param) in embeddings)
    )


def _save_pretrained(self: Any, save_directory: Any, **kwargs: Any) -> None:
    """As on the plain model: full weights, written by the first rank. All ranks call it.

    They are written beside, and the folder takes its place at once: see ``replace_folder``.
    """
    state = state_of(self)
    context = state.context
    come("save_pretrained", *context.own_axes)
    agree(context, lambda: _check_saving(state, save_directory, kwargs), doing="save this model")
    kwargs.pop("is_main_process", None)
    weights = kwargs.pop("state_dict", None) or full_state_dict(self)
    problem: Exception | None = None
    if all(axis.rank == 0 for axis in context.axes.values()):
        native: Callable[..., None] = type(self).save_pretrained
        try:
            if kwargs.get("push_to_hub"):
                kwargs.setdefault("repo_id", os.path.basename(os.path.realpath(save_directory)))
            replace_folder(save_directory, lambda folder: native(self, folder, state_dict=weights, **kwargs))
        except Exception as error:
            problem = error
    said = [text for _, text in gather_all(str(problem) if problem else "", context)]
    if problem is not None:
        raise problem
    if any(said):
        raise InputError(
            f"The first rank could not write to {save_directory!r}: {max(said)}",
            rule="The first rank writes for all",
            remedy="Give a folder that it can write to",
        )


def _check_saving(state: ShardedState, folder: Any, kwargs: Mapping[str, Any]) -> None:
    check_folder(folder)
    is_first = all(axis.rank == 0 for axis in state.context.axes.values())
    if is_first and not kwargs.get("is_main_process", True):
        raise ConfigError(
            "save_pretrained(is_main_process=False) on the first rank",
            rule="All ranks gather the weights, and the first one writes them",
            remedy="Leave is_main_process out",
        )
    entries = {e.name: e.spec for e in state.entries}
    for name, value in (kwargs.get("state_dict") or {}).items():
        if (spec := entries.get(name)) is not None and tuple(value.shape) != spec.shape:
            raise ConfigError(
                f"save_pretrained was given a state_dict with {name} of the shape {tuple(value.shape)}",
                rule=f"What is saved is whole: {name} has the shape {spec.shape}, of which state_dict() has a part",
                remedy="Leave state_dict out, or give shardformer.full_state_dict(model)",
            )


def _refuse_resize(self: Any, *args: Any, **kwargs: Any) -> None:
    """Refused: the table is cut over the ranks."""
    raise ConfigError(
        "resize_token_embeddings on a sharded model",
        rule="The vocabulary is cut over the tensor ranks when the model is sharded",
        remedy="Resize the plain model, then shard it",
    )


def _refuse_part(self: Any, *args: Any, **kwargs: Any) -> None:
    """Refused: only the model that was sharded knows how to gather its weights."""
    raise ConfigError(
        f"save_pretrained on a {type(self).__name__} inside of a sharded model",
        rule="The model that was sharded saves itself; what stands in it holds this rank's parts",
        remedy="Save the whole model, or write shardformer.full_state_dict(model) yourself",
    )
