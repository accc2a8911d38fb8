"""Dropout by hand-written models: inside a block each tensor rank needs its own mask, outside all need the same.

Models that a policy shards need neither class: their blocks switch the random stream at entry and exit, for any
dropout inside, also in attention (``shardformer.layers.random_stream``).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.layers.random_stream import RandomStream
from shardformer.layers.tensor.parallel_module import GroupLike
from shardformer.mesh.axis import Axis


class DropoutForParallelInput(nn.Module):
    """Dropout on this rank's part of an activation: the masks differ by tensor rank. Communicates nothing."""

    def __init__(self, p: float = 0.5, inplace: bool = False, process_group: GroupLike = None) -> None:
        super().__init__()
        self.p, self.inplace = p, inplace
        self._stream = RandomStream(Axis.of(process_group))

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        native = _plain_dropout(cls, module, kwargs)
        return cls(native.p, native.inplace, process_group).train(native.training)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        self._stream.enter(x)
        try:
            return F.dropout(x, self.p, True, self.inplace)
        finally:
            self._stream.leave()


class DropoutForReplicatedInput(nn.Dropout):
    """Dropout on an activation that all tensor ranks hold: all draw the same mask."""

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: GroupLike = None, **kwargs: Any) -> nn.Module:
        native = _plain_dropout(cls, module, kwargs)
        return cls(native.p, native.inplace).train(native.training)


def _plain_dropout(cls: type[nn.Module], module: nn.Module, options: dict[str, Any]) -> nn.Dropout:
    if not isinstance(module, nn.Dropout) or options:
        given = f" and {', '.join(f'{k}={v!r}' for k, v in options.items())}" if options else ""
        raise ConfigError(
            f"{cls.__name__} was given a {type(module).__name__}{given}",
            rule="It stands for an nn.Dropout, from which it takes everything",
            remedy="Name the dropout itself in the policy, without kwargs",
        )
    return module


def silence_dropout(model: nn.Module) -> None:
    """Sets every dropout to zero: two layouts draw different random numbers, of the same kind."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        config = getattr(module, "config", None)
        for name, value in list(vars(config).items()) if config is not None else []:
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
