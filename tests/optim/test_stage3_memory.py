"""Buffers of stage 3: they are reused unless they are referenced, and some layers stay gathered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardformer.comm.recorder import CollectiveRecorder
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.offload.host import OffloadConfig
from shardformer.torch_compat import get_storage_id
from shardformer.zero import stage3_parameters as units
from shardformer.zero.stage3_parameters import GatherBufferPool
from shardformer.zero.zero_optimizer import ZeroOptimizer
from tests.optim.test_stage3 import Stack, loss_of, over_ranks

CPU = torch.device("cpu")


def chunks(size: int = 4000) -> GatherBufferPool:
    made = GatherBufferPool()
    made.choose_buffer_size([size, size, 100, size // 2])
    return made


def used(memory: GatherBufferPool, numel: int) -> int:
    """Return the address of a buffer that was taken and returned."""
    x = memory.acquire_buffer(numel, torch.float32, CPU)
    address, key = x.data_ptr(), get_storage_id(x)
    del x
    memory.return_buffer(key)
    return address


def test_buffer_is_reused() -> None:
    memory = chunks()
    address = used(memory, 1000)
    assert memory.acquire_buffer(900, torch.float16, CPU).data_ptr() != address  # it would fill less than half
    assert memory.acquire_buffer(900, torch.float32, CPU).data_ptr() == address


def test_referenced_buffer_is_not_reused() -> None:
    memory = chunks()
    x = memory.acquire_buffer(1000, torch.float32, CPU).fill_(7)
    view, address, key = x[5:9], x.data_ptr(), get_storage_id(x)
    del x
    memory.return_buffer(key)
    assert not memory._lent
    y = memory.acquire_buffer(1000, torch.float32, CPU).zero_()
    assert y.data_ptr() != address and view.tolist() == [7] * 4


def test_other_sizes_allocate_memory() -> None:
    memory = chunks()
    used(memory, 2000)
    assert not memory._free


@pytest.mark.parametrize("offload", [None, OffloadConfig("cpu", parameters=True)])
def test_layers_and_gradients_use_few_buffers(offload: OffloadConfig | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank allocates no more buffers than are used at a time, over all steps."""
    monkeypatch.setattr(units, "SMALL_GROUP_NUMEL", 0)
    made: list[int] = []
    take = GatherBufferPool.acquire_buffer

    def counting(self: GatherBufferPool, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        before = len(self._free)
        out = take(self, numel, dtype, device)
        made.append(get_storage_id(out) in self._lent and before == len(self._free))
        return out

    monkeypatch.setattr(GatherBufferPool, "acquire_buffer", counting)

    def use(model: Stack, optimizer: ZeroOptimizer, context: ParallelContext) -> None:
        for step in range(4):
            loss_of(model, step, context.rank).backward()
            optimizer.step()
            optimizer.zero_grad()

    over_ranks(use, offload=offload)
    assert len(made) > 100 and sum(made) <= 2 * 6


def test_offloaded_parameters_use_no_device_memory() -> None:
    def use(model: Stack, optimizer: ZeroOptimizer, context: ParallelContext) -> list[tuple[bool, bool]]:
        loss_of(model, 0, context.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [(shard.full is None, shard._link is not None) for shard in optimizer.shards]

    for found in over_ranks(use, offload=OffloadConfig("cpu", parameters=True)):
        assert len(found) > 1 and all(left and rests for left, rests in found)


def test_kept_layers_are_not_gathered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "SMALL_GROUP_NUMEL", 0)
    sent = []
    for room in (True, 1000, 2**30):

        def use(model: Stack, optimizer: ZeroOptimizer, context: ParallelContext) -> int:
            for step in range(3):
                with CollectiveRecorder(context) as recorder:
                    loss_of(model, step, context.rank).backward()
            return recorder.wire_bytes(purpose="parameters")

        sent.append(over_ranks(use, reshard_after_forward=room)[0])
    layer = 8 * 54
    assert sent[1] <= sent[0] - layer and sent[2] <= sent[1] - layer
