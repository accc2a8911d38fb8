"""``store_activations``: lets a model's saved activations lie on the host, or in parts on the tensor ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from shardformer.activations.store import ActivationStore
from shardformer.errors import ConfigError, nearest
from shardformer.layers.tensor.stream import first_tensor
from shardformer.layout.state import ROOT, ShardedState, known_state

WHERE = ("device", "host", "tensor", "tensor+host")
STORE = "_shardformer_activations"
"""The attribute of a model that holds its store."""


def store_activations(model: nn.Module, on: str = "host", *, min_bytes: int = 2**16) -> ActivationStore:
    """Keeps what a model's forward saves for its backward where it takes less memory of the device.

    Call it once, before training. Losses and gradients stay what they are, to the bit.

    Args:
        model: any module; for the tensor ranks one that ``shard_model`` returned.
        on: where what is saved is kept until the backward needs it.
            ``"host"``: it is copied to the host, beside the computation, and back before it is needed.
            ``"tensor"``: of the hidden states that enter a layer, which all tensor ranks hold alike, each rank keeps
            1/T, and the backward gathers them. With activation checkpointing these are nearly all that is saved;
            without it they are a small part, and the rest stays as it is.
            ``"tensor+host"``: both: each rank's part goes to the host.
            ``"device"``: nothing moves, and the figures say how much it is.
        min_bytes: what is smaller stays where it is.

    Parameters, views and casts of them, buffers, and tensors that are no plain strided memory stay. Inside of a
    checkpoint nothing is saved but its inputs. Where hooks of somebody else stand around the model
    (``save_on_cpu``, a checkpoint around all of it), those keep what it saves.

    Communicates for ``"tensor"``: in the backward, for each layer's input of S bytes, one all-gather of
    T * ceil(S / T) bytes, and at the same time one of 8 T bytes: a checksum of the whole that each rank kept.
    Where they differ every rank raises InputError.

    Raises ConfigError for a second call, and for ``"tensor"`` on a model of which no layer is given what all tensor
    ranks hold alike: one that was not sharded, or whose sequence is cut between its layers.

    Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020),
    section 6.1: partitioned activation checkpointing, Pa and Pa+cpu.
    """
    if on not in WHERE:
        raise ConfigError(f"on={on!r}", rule=f"Activations are kept on {', '.join(WHERE)}", remedy=nearest(on, WHERE))
    if STORE in model.__dict__:
        raise ConfigError(
            f"store_activations of a {type(model).__name__} whose activations are stored",
            rule="What a model saves is kept in one way",
            remedy="Call .remove() of what the first call returned, then call it again",
        )
    axis = known_state(model).axes["tensor"] if "tensor" in on else None
    layers = _whole_layers(model, on) if axis is not None else {}
    store = ActivationStore("host" in on, axis, min_bytes)
    _attach(model, store, layers)
    for _, _, state in _sharded(model):
        stage_forward = getattr(state.stages, "stage_forward", None)
        if stage_forward is not None:
            store.on_remove(_listed(stage_forward.when_left, store.leave))
    return store


def _sharded(model: nn.Module) -> list[tuple[str, nn.Module, ShardedState]]:
    """(path, module, state) of each model in here that was sharded: this one, or those that it wraps."""
    found = [(path, module, module.__dict__.get(ROOT)) for path, module in model.named_modules()]
    return [(path, module, state) for path, module, state in found if isinstance(state, ShardedState)]


def _attach(model: nn.Module, store: ActivationStore, layers: dict[str, nn.Module]) -> None:
    model.__dict__[STORE] = store
    store.on_remove(partial(model.__dict__.pop, STORE, None))
    store.on_remove(model.register_forward_pre_hook(store.enter, prepend=True).remove)
    store.on_remove(model.register_forward_hook(store.leave, always_call=True).remove)
    for path, layer in layers.items():
        store.on_remove(layer.register_forward_pre_hook(partial(_enter_layer, store, path), with_kwargs=True).remove)


def _enter_layer(store: ActivationStore, path: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
    store.enter_layer(path, first_tensor(args, kwargs))


def _listed(listeners: list[Any], listener: Any) -> Any:
    listeners.append(listener)
    return partial(listeners.remove, listener)


def _whole_layers(model: nn.Module, on: str) -> dict[str, nn.Module]:
    """Path -> each layer whose hidden states all tensor ranks hold alike, by the layout of the stream around it."""
    layers, cut = dict[str, nn.Module](), ""
    for _, module, state in _sharded(model):
        policy: Any = state.request.policy
        for stack in policy.chain().stacks:
            layout = stack.layout_in(state.stream)
            if layout.cuts_stacks:
                cut = str(layout)
            else:
                layers |= {path: module.get_submodule(path) for path in stack.units}
    if not layers:
        has = f"cuts the stream between its layers: {cut}" if cut else "has no layers that are known"
        raise ConfigError(
            f"on={on!r} for a {type(model).__name__} that {has}",
            rule="Of what enters a layer each tensor rank keeps a part where all of them hold the same; where the "
            "sequence is cut each holds its own part already",
            remedy='Take on="host", or shard the model with tensor parallelism alone',
        )
    return layers
