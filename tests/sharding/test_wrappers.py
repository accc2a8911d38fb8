"""Wrappers of torch around a sharded model are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardformer.errors import ConfigError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, LayerStack
from shardformer.shard_model_api import shard_model


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.down(self.up(x).relu()))


class Model(nn.Module):
    """The shards have the same size on all ranks, so torch's wrappers mistake them for full parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class ModelPolicy(RolePolicy):
    stack = LayerStack("layers", [MLP("", up="up", down="down")])


def _each_layer(model: nn.Module) -> nn.Module:
    for layer in model.get_submodule("layers").children():
        fully_shard(layer)
    return model


CPU = torch.device("cpu")
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "DistributedDataParallel around": lambda model: DistributedDataParallel(nn.Sequential(model)),
    "FullyShardedDataParallel": lambda model: FullyShardedDataParallel(model, device_id=CPU),
    "FullyShardedDataParallel around": lambda model: FullyShardedDataParallel(nn.Sequential(model), device_id=CPU),
    "fully_shard": fully_shard,
    "fully_shard around": lambda model: fully_shard(nn.Sequential(model)),
    "fully_shard layers": _each_layer,
}


def _wrap(how: str, sizes: dict[str, int]) -> str:
    torch.manual_seed(0)
    model = shard_model(Model(), ModelPolicy, context=ParallelContext.from_default_process_group(sizes))
    try:
        WRAPPERS[how](model)(torch.randn(2, 3, 8))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", WRAPPERS)
@pytest.mark.parametrize("axis", ["tensor", "data"])
def test_wrapper_around_a_sharded_model_is_refused(pool2: WorkerPool, how: str, axis: str) -> None:
    for said in pool2.run(_wrap, how, {axis: 2}):
        assert how.split()[0] in said and f"The model is sharded over {axis}=2 and cannot be wrapped in" in said
        assert "launch_from_torch(data=...)" in said


def _of_another_model() -> bool:
    """A sharded model that a wrapped module calls but does not contain."""
    model = shard_model(Model(), ModelPolicy, context=ParallelContext.from_default_process_group({"tensor": 2}))
    teacher = [model.eval().requires_grad_(False)]

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.scale * teacher[0](x))

    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    out = DistributedDataParallel(Student(), process_group=group)(torch.randn(2, 3, 8))
    return bool(out.isfinite().all())


def test_wrapper_around_another_model_is_accepted(pool2: WorkerPool) -> None:
    assert pool2.run(_of_another_model) == [True, True]
