"""The process mesh: coordinates, groups, and all ways to specify its sizes."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardformer.comm.collectives import all_reduce
from shardformer.config import ShardConfig
from shardformer.errors import ConfigError, LaunchError, WorkerError
from shardformer.layout.activation_layout import ActivationLayout
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.init_distributed import get_first_slurm_host, launch, launch_from_slurm, launch_from_torch
from shardformer.mesh.parallel_context import Axis, ParallelContext, reshape_sequence_axis
from shardformer.mesh.rank_grid import AXES, count_ranks_on_axis
from tests.pools import WorkerPools

Place = dict[str, tuple[int, int, tuple[int, ...]]]


def place(context: ParallelContext) -> Place:
    """Return axis -> (rank, size, global ranks)."""
    return {name: (axis.rank, axis.size, axis.ranks) for name, axis in context.axes.items() if axis.size > 1}


def grid(sizes: Mapping[str, int | None]) -> Place:
    return place(ParallelContext.from_default_process_group(sizes))


# ------------------------------------------------------------------------------------------------------------- the grid


def test_tensor_ranks_are_consecutive(pool4: WorkerPool) -> None:
    assert pool4.run(grid, {"tensor": 2}) == [
        {"data": (0, 2, (0, 2)), "tensor": (0, 2, (0, 1))},
        {"data": (0, 2, (1, 3)), "tensor": (1, 2, (0, 1))},
        {"data": (1, 2, (0, 2)), "tensor": (0, 2, (2, 3))},
        {"data": (1, 2, (1, 3)), "tensor": (1, 2, (2, 3))},
    ]


@pytest.mark.reduced(at_most=6)
@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, {"tensor": 4}),
        ({"tensor": None, "data": None}, {"tensor": 4}),
        ({"tensor": 4}, {"tensor": 4}),
        ({"tensor": 1}, {"data": 4}),
        ({"data": 4}, {"data": 4}),
        ({"data": 1}, {"tensor": 4}),
        ({"data": 2}, {"data": 2, "tensor": 2}),
        ({"tensor": 2, "data": 2}, {"data": 2, "tensor": 2}),
        ({"tensor": 2, "pipe": 1, "sequence": 1}, {"data": 2, "tensor": 2}),
        ({"sequence": 2}, {"data": 2, "sequence": 2}),
        ({"sequence": 2, "data": 1}, {"sequence": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_missing_axis_size_is_inferred(pool4: WorkerPool, sizes: dict[str, int | None], shape: dict[str, int]) -> None:
    for found in pool4.run(grid, sizes):
        assert {name: size for name, (_, size, _) in found.items()} == shape


def sums() -> dict[str, float]:
    """Return the sum of the global ranks over each axis, and over both together."""
    context = ParallelContext.from_default_process_group({"tensor": 2, "data": 2})
    axes = {
        **context.axes,
        "both": context.flatten("data", "tensor"),
        "pipe and tensor": context.flatten("pipe", "tensor"),
    }
    return {name: float(all_reduce(torch.tensor(float(dist.get_rank())), axis)) for name, axis in axes.items()}


def test_all_reduce_runs_along_the_axis(pool4: WorkerPool) -> None:
    for rank, found in enumerate(pool4.run(sums)):
        tensor = 1.0 if rank < 2 else 5.0
        assert found == {
            "data": 2.0 if rank % 2 == 0 else 4.0,
            "pipe": float(rank),
            "sequence": float(rank),
            "tensor": tensor,
            "both": 6.0,
            "pipe and tensor": tensor,
        }


def words() -> tuple[list[str], bool, bool]:
    context = ParallelContext.from_default_process_group({"tensor": 2})
    duplicate = copy.deepcopy(context)
    texts = [str(context), str(context.tensor), str(ParallelContext.from_group(context.data)), str(context.device)]
    return texts, duplicate is context, copy.deepcopy(context.tensor) is context.tensor


def test_context_has_str_and_deepcopies_to_itself(pool4: WorkerPool) -> None:
    texts, same_context, same_axis = pool4.run(words)[1]
    assert texts[:2] == ["data=2, tensor=2", "tensor 1/2"]
    assert same_context and same_axis


def test_single_process_does_not_communicate(pools: WorkerPools) -> None:
    assert pools(1).run(grid, {}) == [{}]
    context = ParallelContext.from_group(None)  # without a launcher
    assert str(context) == "one process"
    assert all(axis.size == 1 and axis.group is None for axis in context.axes.values())
    assert (context.data.name, context.tensor.name) == ("data", "tensor")
    x = torch.ones(1)
    assert all_reduce(x, context.tensor) is x


def test_unknown_axis_suggests_nearest_name() -> None:
    context = ParallelContext.from_group(None)
    assert [context.axis(name).name for name in AXES] == list(AXES)
    with pytest.raises(ConfigError, match=r"no axis 'tensro'.*data, pipe, sequence, tensor.*'tensor'"):
        context.axis("tensro")


# ------------------------------------------------------------------------------------------------------- around a group


def around_groups() -> list[tuple[int, int, tuple[int, ...], bool]]:
    """Return axes of the world, a pair and a single process."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    singles = [dist.new_group([r]) for r in range(4)]
    mine = Axis.of(pairs[0 if rank in (0, 3) else 1])
    axes = [Axis.of(None), Axis.of(dist.group.WORLD), mine, Axis.of(singles[rank]), Axis.of(mine)]
    assert axes[4] is mine
    return [(axis.rank, axis.size, axis.ranks, axis.group is None) for axis in axes]


def test_axis_from_process_group(pool4: WorkerPool) -> None:
    world = (0, 1, 2, 3)
    found = pool4.run(around_groups)
    assert found[3] == [(3, 4, world, False), (3, 4, world, False), (1, 2, (0, 3), False), (0, 1, (3,), True)] + [
        (1, 2, (0, 3), False)
    ]
    assert found[1][2] == (0, 2, (1, 2), False)


def test_group_without_this_process_is_refused(pool4: WorkerPool) -> None:
    with pytest.raises(LaunchError) as caught:
        pool4.run(lacking)
    assert "does not contain this process" in str(caught.value)


def lacking() -> None:
    """Pass the group of the other ranks on each process."""
    groups = [dist.new_group([r for r in range(4) if r != left_out]) for left_out in range(4)]
    Axis.of(groups[dist.get_rank()])


# ------------------------------------------------------------------------------------------------------------ launching


def launched(config: Any, options: dict[str, Any]) -> tuple[Place, float]:
    return place(launch_from_torch(config, **options)), float(torch.rand(1))


@pytest.mark.reduced(at_most=4)
@pytest.mark.parametrize(
    "config",
    [
        {"parallel": {"tensor": 2, "data": 2}},
        {"parallel": {"tensor": 2}},
        {"parallel": {"data": 2}},
        {"parallel": {"tensor": {"size": 2, "mode": "1d"}}},
        {"parallel": {"tensor": {"size": 2, "mode": None}, "pipeline": 1}},
        {"parallel": {"tensor": {"size": 2}, "pipe": {"size": 1}}, "epochs": 3},
        {"parallel": {"tensor": 2, "sequence": 1}},
    ],
    ids=str,
)
def test_config_forms(pool4: WorkerPool, config: dict[str, Any]) -> None:
    assert [found for found, _ in pool4.run(launched, config, {})] == pool4.run(grid, {"tensor": 2, "data": 2})


def test_config_file(pool4: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text("import os\nparallel = dict(tensor=dict(size=4 // 2, mode='1d'))\nseed = 5\n")
    want = pool4.run(grid, {"tensor": 2})
    torch.manual_seed(5)
    number = float(torch.rand(1))
    for file in (str(path), path):
        assert pool4.run(launched, file, {}) == [(here, number) for here in want]


def test_arguments_override_config(pool4: WorkerPool) -> None:
    config = {"parallel": {"tensor": 4}, "seed": 5}
    torch.manual_seed(6)
    number = float(torch.rand(1))
    found = pool4.run(launched, config, {"tensor": 1, "seed": 6})
    assert [(set(here), drawn) for here, drawn in found] == [({"data"}, number)] * 4


def test_default_is_tensor_parallel_over_all_processes(pool2: WorkerPool) -> None:
    for config in (None, {}, {"parallel": None}, {"parallel": {}}):
        assert [here for here, _ in pool2.run(launched, config, {})] == pool2.run(grid, {"tensor": 2})


@pytest.mark.reduced(at_most=7)
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"parallel": {"tensr": 2}}, r"parallel axis='tensr'.*'tensor'"),
        ({"parallel": {"tensor": {"size": 2, "mode": "2d"}}}, r"mode='2d'.*rows and columns"),
        ({"parallel": {"tensor": {"size": 2, "mode": "2c"}}}, r"mode='2c'.*'2d'"),
        ({"parallel": {"tensor": {"size": 6, "mode": "2.5d", "depth": 2}}}, r"tensor=6 ranks in depth=2"),
        ({"parallel": {"tensor": {"size": 2, "mod": "1d"}}}, r"'mod'.*'mode'"),
        ({"parallel": {"tensor": "2"}}, r"tensor='2'"),
        ({"parallel": {"tensor": True}}, r"tensor=True"),
        ({"parallel": 2}, r"parallel = 2"),
        ({"paralel": {"tensor": 2}}, r"paralel = "),
        ({"tensor": 2}, r"tensor = 2, which is not a valid option"),
        ({"parallel": {"pipe": 1, "pipeline": 1}}, r"both pipe=1 and pipeline=1"),
        ({"seed": "x"}, r"seed='x'"),
        (3, r"config=3"),
        ("nowhere.py", r"'nowhere.py' does not exist"),
    ],
)
def test_invalid_config_is_refused(pool2: WorkerPool, config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        pool2.run(launched, config, {})


def launched_on_one(config: Any, options: dict[str, Any]) -> None:
    """Launch with other arguments on the second process."""
    odd = dist.get_rank() == 1
    launch_from_torch(config if odd else None, **(options if odd else {}))


def test_config_error_on_one_process_raises_on_all(pool2: WorkerPool, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("parallel = dict(tensor=2\n")
    for config, options in ((str(broken), {}), ("nowhere.py", {}), ({"seed": 1.5}, {}), (None, {"seed": "x"})):
        with pytest.raises((ConfigError, WorkerError)) as caught:
            pool2.run(launched_on_one, config, options)
        assert "rank 0 raised ConfigError" in str(caught.value.__cause__ or caught.value)
    assert pool2.run(launched, None, {})


@pytest.mark.parametrize("options", [{"backend": "gloo"}, {"timeout_s": 5.0}, {"timeout_s": -1}, {"timeout_s": "x"}])
def test_backend_is_refused_after_initialization(pool2: WorkerPool, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        pool2.run(launched, None, options)


def launched_by(how: str) -> tuple[Place, dict[str, str | None]]:
    """Launch a process without torchrun, with an explicit rank or a SLURM environment."""
    rank, port = os.environ["RANK"], os.environ["MASTER_PORT"]
    dist.destroy_process_group()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        del os.environ[name]
    if how == "itself":
        context = launch({"parallel": {"tensor": 2}}, rank=int(rank), world_size=2, host="127.0.0.1", port=int(port))
    else:
        node = {"SLURM_JOB_NODELIST": "127.0.0.1"} if how == "nodes" else {"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}
        # what decides the port, such that it is one that is free here
        os.environ.update(
            SLURM_STEP_ID="0", SLURM_PROCID=rank, SLURM_NTASKS="2", SLURM_LOCALID=rank,
            SLURM_JOB_ID=str(int(port) - 20000 + 60000), **node,
        )  # fmt: skip
        if not 20000 <= int(port) < 40000:
            os.environ["MASTER_PORT"] = port
        context = launch_from_slurm(seed=1)
    x = all_reduce(torch.ones(1), context.tensor)
    assert x.item() == 2.0
    return place(context), {name: os.environ.get(name) for name in names if name != "MASTER_PORT"}


@pytest.mark.parametrize("how", ["itself", "nodes", "address"])
def test_launch_without_torchrun(pool2: WorkerPool, how: str) -> None:
    for rank, (found, env) in enumerate(pool2.run(launched_by, how)):
        assert found == {"tensor": (rank, 2, (0, 1))}
        assert env == {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node[03-05,9],gpu1", "node03"),
        ("node[9,03-05]", "node9"),
        ("gpu1,node[03-05]", "gpu1"),
        ("rack-2-node[11-12]", "rack-2-node11"),
        ("a,b,c", "a"),
    ],
)
def test_first_slurm_host(nodes: str, first: str) -> None:
    assert get_first_slurm_host(nodes) == first


@pytest.mark.parametrize("missing", [["RANK"], ["MASTER_ADDR", "MASTER_PORT"], ["RANK", "WORLD_SIZE"]], ids="+".join)
def test_missing_environment_variables_are_named(monkeypatch: pytest.MonkeyPatch, missing: list[str]) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    for name in missing:
        monkeypatch.delenv(name)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    with pytest.raises(
        LaunchError,
        match=f"{', '.join(missing)} are not set, because no launcher has started this process.*shardformer run",
    ):
        launch_from_torch()


# ------------------------------------------------------------------------------------------------ merged axes and views


def axes_of_a_view() -> dict[str, tuple[tuple[int, ...], float]]:
    """Return axis -> (global ranks, their sum over the axis)."""
    context = ParallelContext.from_default_process_group({"tensor": 4}).reshape_axis("tensor", row=2, column=2)
    assert context.mesh is not None and (context.sizes["row"], context.tensor.size) == (2, 4)
    assert context.flatten("row", "column") is context.tensor
    found = {name: context.axis(name) for name in ("row", "column", "tensor")}
    found["some"] = context.flatten("tensor", only_coords={"tensor": (0, 1, 3)})
    return {n: (a.ranks, float(all_reduce(torch.tensor(float(dist.get_rank())), a))) for n, a in found.items()}


def test_view_communicates_along_its_axes(pool4: WorkerPool) -> None:
    found = pool4.run(axes_of_a_view)
    assert [f["row"] for f in found] == [((0, 2), 2.0), ((1, 3), 4.0), ((0, 2), 2.0), ((1, 3), 4.0)]
    assert [f["column"] for f in found] == [((0, 1), 1.0), ((0, 1), 1.0), ((2, 3), 5.0), ((2, 3), 5.0)]
    assert [f["tensor"] for f in found] == [((0, 1, 2, 3), 6.0)] * 4
    assert [f["some"] for f in found] == [((0, 1, 3), 4.0), ((0, 1, 3), 4.0), ((2,), 2.0), ((0, 1, 3), 4.0)]


def view_of_a_group() -> list[tuple[tuple[int, ...], float]]:
    """Create a view of a group without one of the processes, and then a view over all processes."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 2])
    axes = []
    if rank in (0, 2):
        context = ParallelContext.from_group(pair).reshape_axis("tensor", row=2, column=1)
        axes = [context.axis("row"), context.axis("column")]
    axes.append(ParallelContext.from_group(None).reshape_axis("tensor", row=2, column=2).axis("row"))
    return [(axis.ranks, float(all_reduce(torch.tensor(float(rank)), axis))) for axis in axes]


def test_view_of_group_is_created_by_its_members(pool4: WorkerPool) -> None:
    found = pool4.run(view_of_a_group)
    assert found[2] == [((0, 2), 2.0), ((2,), 2.0), ((0, 2), 2.0)]
    assert found[1] == [((1, 3), 4.0)]


def parts_of_a_group() -> tuple[tuple[int, ...], float] | None:
    rank, most = dist.get_rank(), dist.new_group([0, 1, 3])
    if rank == 2:
        return None
    axis = ParallelContext.from_group(most).flatten("tensor", only_coords={"tensor": (1, 2)})
    return axis.ranks, float(all_reduce(torch.tensor(float(rank)), axis))


def test_flatten_over_some_ranks_of_an_axis(pool4: WorkerPool) -> None:
    assert pool4.run(parts_of_a_group) == [((0,), 0.0), ((1, 3), 4.0), None, ((1, 3), 4.0)]


def hosts(names: list[str]) -> list[bool | None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: names[dist.get_rank()])
        context = ParallelContext.from_default_process_group({"tensor": 2})
    axes = [context.tensor, context.data, context.pipe, context.flatten("data", "tensor")]
    return [axis.crosses_hosts for axis in axes]


def test_axis_reports_whether_it_crosses_hosts(pool4: WorkerPool) -> None:
    assert pool4.run(hosts, ["a", "a", "b", "b"]) == [[False, True, False, True]] * 4
    assert pool4.run(hosts, ["a"] * 4) == [[False] * 4] * 4
    assert ParallelContext.from_group(None).tensor.crosses_hosts is None


def test_context_without_world_cannot_communicate() -> None:
    context = ParallelContext.from_sizes({"data": 2, "tensor": 4}, {"data": 1, "tensor": 2}).reshape_axis(
        "tensor", row=2, column=2
    )
    assert (context.rank, context.tensor.ranks, context.flatten("data", "row").ranks) == (6, (4, 5, 6, 7), (0, 2, 4, 6))
    assert context.coords == {"data": 1, "pipe": 0, "sequence": 0, "tensor": 2, "row": 1, "column": 0}
    assert context.tensor.group is None
    with pytest.raises(LaunchError, match="all_reduce was called on a mesh axis that has no process group"):
        all_reduce(torch.ones(1), context.tensor, op="max")
    with pytest.raises(ConfigError, match=r"no axis 'rwo'.*tensor, row, column.*'row'"):
        context.axis("rwo")


def test_custom_activation_layout_uses_sequence_axis() -> None:
    context = ParallelContext.from_sizes({"sequence": 2})
    with pytest.raises(ConfigError, match=r"the sequence axis, which has size 2"):
        ShardConfig(context=context, activation_layout=ActivationLayout()).resolve_context()


def test_sequence_axis_as_ring_of_ulysses_groups() -> None:
    context = reshape_sequence_axis(ParallelContext.from_sizes({"sequence": 6}, {"sequence": 4}), (3, 2))
    assert (str(context.axis("ring")), str(context.axis("ulysses"))) == ("ring 2/3", "ulysses 0/2")
    assert count_ranks_on_axis((3, 2)) == count_ranks_on_axis(6) == 6
    for wrong in ((2, 2, 2), (0, 2), ()):
        with pytest.raises(ConfigError, match=r"sequence"):
            count_ranks_on_axis(wrong)  # type: ignore[arg-type]
