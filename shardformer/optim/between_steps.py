"""Between two steps, what an optimizer keeps under ZeRO can be read, and written to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from shardformer.mesh.context import ParallelContext
from shardformer.optim.offload.host import Host
from shardformer.optim.offload.paged import Files
from shardformer.optim.shards import Shard
from shardformer.optim.stage3.walk import Walk
from shardformer.optim.update import HandOut


@contextmanager
def reading(shards: Sequence[Shard]) -> Iterator[None]:
    """The pieces and their states have their values in here."""
    for shard in shards:
        shard.take()
    try:
        yield
    finally:
        for shard in shards:
            shard.drop(keeps_memory=True)


@contextmanager
def loading(shards: Sequence[Shard], walk: Walk | None, host: Host | None, context: ParallelContext) -> Iterator[None]:
    """The pieces may be written to in here; behind it the parameters of all ranks have what was written.

    Communicates one all-gather of the parameters.
    """
    with torch.no_grad(), ExitStack() as stack:
        for shard in shards:
            stack.enter_context(shard.changing())
        yield
        for shard in shards:
            if shard.rounded is None:  # else it is rounded once, behind this
                shard.store()
    if walk is not None:
        walk.put_away()
    hand_out = HandOut()
    hand_out.add(shards)
    with torch.no_grad():
        hand_out.finish()
    for shard in shards:
        shard.know_values()
    if isinstance(host, Files):
        host.end_writing(context)
