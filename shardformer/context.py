"""The grid of processes: a named axis for each way of being parallel, outermost first: data, pipe, sequence, tensor.

``ParallelContext`` is a value that is passed in; nothing here is kept at module level. With eight processes and
``tensor=2, pipe=2`` the grid is the array ``arange(8).reshape(data=2, pipe=2, sequence=1, tensor=2)``; a group is the
slice along one axis through one rank, so rank 5 = (data 1, pipe 0, tensor 1) shares its tensor group with rank 4.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardformer.errors import ConfigError, LaunchError, nearest
from shardformer.process_group import join_process_group

AXES = ("data", "pipe", "sequence", "tensor")


@dataclass(frozen=True, eq=False)
class Traffic:
    """What this process handed to collectives; ``shardformer.comm.recorder`` fills and reads it."""

    calls: list[Any] = field(default_factory=list)
    enabled: list[bool] = field(default_factory=lambda: [False])


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of the grid as this process sees it: its size, this process's rank on it, and the group along it.

    ``group`` is a process group (or a ``Rehearsal``, which plays one), or None when the axis has size 1; collectives
    over such an axis do nothing.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: Any = None
    ranks: tuple[int, ...] = (0,)
    traffic: Traffic = field(default_factory=Traffic)

    @classmethod
    def of(cls, group: Axis | dist.ProcessGroup | None, name: str = "tensor") -> Axis:
        """An axis from a process group; None means all processes, or a single one when none were launched.

        Raises LaunchError when this process is not in the group, ConfigError for what is not a group.
        """
        if isinstance(group, Axis):
            return group
        if group is None:
            if not dist.is_available() or not dist.is_initialized():
                return cls(name)
            group = dist.group.WORLD
        non_member: Any = dist.GroupMember.NON_GROUP_MEMBER
        lacks = group is non_member
        if not lacks and not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"The group of the {name} axis is {group!r:.80}",
                rule="It is a process group of torch.distributed, or None for all processes",
                remedy="Make it with torch.distributed.new_group(ranks), on all processes, or leave it out",
            )
        if lacks or dist.get_rank(group) < 0:
            raise LaunchError(
                f"The process group given for the {name} axis lacks this process (global rank {dist.get_rank()})",
                rule=f"Every process that shards a model is a member of its own {name} group",
                remedy="Give each process the group that it belongs to, or let launch_from_torch(tensor=...) build it",
            )
        ranks = tuple(dist.get_process_group_ranks(group))
        size = len(ranks)
        return cls(name, size, dist.get_rank(group), group if size > 1 else None, ranks)

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self  # a process group cannot be copied, and a copied model still lives in the same group

    def __str__(self) -> str:
        return f"{self.name} {self.rank}/{self.size}"


@dataclass(frozen=True, eq=False)
class ParallelContext:
    """The named grid of processes and this process's place in it."""

    axes: Mapping[str, Axis]
    device: torch.device
    mesh: DeviceMesh | None = None

    def axis(self, name: str) -> Axis:
        """The axis called ``name``: data, pipe, sequence or tensor."""
        if name not in self.axes:
            raise ConfigError(
                f"There is no axis {name!r}",
                rule=f"The axes are {', '.join(AXES)}",
                remedy=nearest(name, AXES),
            )
        return self.axes[name]

    @property
    def tensor(self) -> Axis:
        return self.axes["tensor"]

    @property
    def pipe(self) -> Axis:
        return self.axes["pipe"]

    @property
    def data(self) -> Axis:
        return self.axes["data"]

    @property
    def traffic(self) -> Traffic:
        return self.tensor.traffic

    @classmethod
    def from_group(cls, group: Axis | dist.ProcessGroup | None, device: torch.device | None = None) -> ParallelContext:
        """A context whose tensor axis is ``group`` (None: all processes) and whose other axes have size 1."""
        tensor = Axis.of(group)
        axes = {name: Axis(name, ranks=(tensor.ranks[tensor.rank],), traffic=tensor.traffic) for name in AXES[:-1]}
        return cls({**axes, "tensor": tensor}, device or local_device())

    @classmethod
    def from_world(cls, sizes: Mapping[str, int | None], device: torch.device | None = None) -> ParallelContext:
        """Builds the grid over all processes of the initialised default group.

        ``sizes`` gives some of the axes. With none of them given, all processes form the tensor axis; with some, the
        one left open (data first, then tensor) takes what remains.

        Raises ConfigError, on every process, when the sizes do not fit the processes or differ between them.
        """
        world = dist.get_world_size()
        shape = _agreed_sizes(dict(sizes), world)
        device = device or local_device()
        mesh_device = "cuda" if device.type == "cuda" else "cpu"
        mesh = DeviceMesh(mesh_device, torch.arange(world).reshape([shape[a] for a in AXES]), mesh_dim_names=AXES)
        traffic = Traffic()
        axes = {name: _axis_of_mesh(mesh, name, traffic) for name in AXES}
        return cls(axes, device, mesh)

    def merged(self, *names: str) -> Axis:
        """One axis over the product of the named ones, for sums over both (size 1 ones are dropped)."""
        wide = [n for n in names if self.axes[n].size > 1]
        if len(wide) <= 1:
            return self.axes[wide[0] if wide else names[0]]
        assert self.mesh is not None, "an axis wider than one beside the tensor axis comes from launch_from_torch"
        label = "_".join(wide)
        mesh = self.mesh[tuple(wide)]._flatten(label)
        group = mesh.get_group()
        ranks = tuple(dist.get_process_group_ranks(group))
        return Axis(label, len(ranks), dist.get_rank(group), group, ranks, self.traffic)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelContext:
        return self

    def __str__(self) -> str:
        return ", ".join(f"{a.name}={a.size}" for a in self.axes.values() if a.size > 1) or "one process"


def local_device() -> torch.device:
    """This process's accelerator by LOCAL_RANK, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cpu")


def launch_from_torch(
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    tensor: int | None = None,
    pipe: int | None = None,
    data: int | None = None,
    backend: str | None = None,
    seed: int | None = None,
    timeout_s: float = 600.0,
) -> ParallelContext:
    """Joins the processes that a launcher started, and lays the grid over them.

    Works under ``shardformer run``, torchrun and SLURM (srun). With no size given all processes form the tensor axis.

    Args:
        config: a dict, or a Python file whose names are its keys, with ``parallel = dict(tensor=2, data=2)`` or
            ``parallel = dict(tensor=dict(size=2, mode="1d"))``; keyword arguments win over it.
        tensor, pipe, data: sizes of these axes. One of tensor and data that is left open takes what remains of the
            processes; pipe is 1 unless given.
        backend: a torch.distributed backend; by default gloo, and with CUDA nccl beside it.
        seed: seeds torch on every process, the same everywhere.
        timeout_s: after this many seconds a collective that not all processes joined is an error.

    Raises LaunchError without a launcher's environment, ConfigError when the sizes do not fit the processes.
    """
    settings = _read_config(config)
    sizes = {"tensor": tensor, "pipe": pipe, "data": data}
    for name, size in _parallel_sizes(settings).items():
        if sizes.get(name) is None:
            sizes[name] = size
    if not dist.is_initialized():
        join_process_group(local_device(), backend, timeout_s)
    if seed is None:
        seed = settings.get("seed")
    if seed is not None:
        torch.manual_seed(seed)
    return ParallelContext.from_world(sizes)


def launch(
    config: Mapping[str, Any] | str | None = None,
    *,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    local_rank: int | None = None,
    **kwargs: Any,
) -> ParallelContext:
    """``launch_from_torch`` for a program that knows its rank, the number of processes and rank 0's address itself."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=host, MASTER_PORT=str(port))
    os.environ["LOCAL_RANK"] = str(rank if local_rank is None else local_rank)
    return launch_from_torch(config, **kwargs)


def launch_from_slurm(config: Mapping[str, Any] | str | None = None, **kwargs: Any) -> ParallelContext:
    """The same as ``launch_from_torch``, which reads SLURM's environment too."""
    return launch_from_torch(config, **kwargs)


def _read_config(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    if not os.path.isfile(config):
        raise ConfigError(
            f"The config file {os.fspath(config)!r} does not exist",
            rule="config is a dict or the path of a Python file whose names are the settings",
            remedy="Give the path relative to where the command runs, for example --config config.py",
        )
    return {k: v for k, v in runpy.run_path(os.fspath(config)).items() if not k.startswith("_")}


def _parallel_sizes(settings: Mapping[str, Any]) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for name, value in settings.items():  # most names are the user's own, but these were meant for us
        if get_close_matches(name.lower(), ["parallel"], cutoff=0.85) and name != "parallel":
            misplaced = f"{name} = {value!r:.60}"
        elif name in (*AXES, "pipeline") and isinstance(value, int):
            misplaced = f"{name} = {value} outside of parallel"
        else:
            continue
        raise ConfigError(
            f"The config says {misplaced}",
            rule="The sizes of the axes stand in a dict called parallel",
            remedy="Write parallel = dict(tensor=2)",
        )
    asked = settings.get("parallel") or {}
    if not isinstance(asked, Mapping):
        raise ConfigError(
            f"The config says parallel = {asked!r:.80}",
            rule="It is a dict: the name of an axis -> its size",
            remedy="Write parallel = dict(tensor=2)",
        )
    for name, value in asked.items():
        axis = {"pipeline": "pipe"}.get(str(name), name)
        if axis not in AXES:
            raise ConfigError(
                f"The config asks for parallel axis {name!r}",
                rule=f"The axes are {', '.join(AXES)}",
                remedy=nearest(name, AXES),
            )
        size = value.get("size", 1) if isinstance(value, Mapping) else value
        if isinstance(value, Mapping) and (unknown := set(value) - {"size", "mode"}):
            raise ConfigError(
                f"The config says {sorted(map(str, unknown))[0]!r} of the parallel axis {name!r}",
                rule="Of an axis it says the size, and of the tensor axis the mode",
                remedy=nearest(sorted(map(str, unknown))[0], ("size", "mode")),
            )
        mode = value.get("mode") if isinstance(value, Mapping) else None
        if axis == "tensor" and mode not in (None, "1d"):
            raise ConfigError(
                f"The config asks for tensor parallel mode {mode!r}",
                rule="This version has the mode '1d'",
                remedy="Write parallel = dict(tensor=dict(size=2, mode='1d'))",
            )
        sizes[axis] = size
    return sizes


def _agreed_sizes(sizes: dict[str, int | None], world: int) -> dict[str, int]:
    """The sizes of all axes. Every process raises when one of them asks for what cannot be, or for something else."""
    shape: dict[str, int] = {}
    problem: ConfigError | None = None
    try:
        shape = _resolve_sizes(sizes, world)
    except ConfigError as error:
        problem = error
    answers: list[Any] = [None] * world
    dist.all_gather_object(answers, (shape, str(problem) if problem else ""))
    if problem is not None:
        raise problem
    for rank, (theirs, trouble) in enumerate(answers):
        if trouble or theirs != shape:
            asked = trouble or ", ".join(f"{name}={size}" for name, size in theirs.items())
            raise ConfigError(
                f"Process {dist.get_rank()} lays the grid {', '.join(f'{n}={s}' for n, s in shape.items())}, "
                f"and process {rank} says: {asked}",
                rule="All processes lay the same grid",
                remedy="Give the same sizes on every process",
            )
    return shape


def _resolve_sizes(sizes: dict[str, int | None], world: int) -> dict[str, int]:
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ConfigError(
                f"{name}={size!r}",
                rule="The size of an axis is a whole number, one or more",
                remedy=f"Use {name}=1 or leave it out",
            )
    if (sizes.get("sequence") or 1) > 1:
        raise ConfigError(
            f"sequence={sizes['sequence']}",
            rule="This version lays processes along the data, pipe and tensor axes",
            remedy="Leave sequence out: enable_sequence_parallelism cuts the sequence along the tensor axis",
        )
    tensor, data, pipe = sizes.get("tensor"), sizes.get("data"), sizes.get("pipe") or 1
    given = {n: s for n, s in (("tensor", tensor), ("pipe", sizes.get("pipe")), ("data", data)) if s is not None}
    known = prod(given.values())
    if world % known and (tensor is None or data is None):
        asked = " times ".join(f"{name}={size}" for name, size in given.items())
        raise ConfigError(
            f"{asked} does not divide the number of processes, {world}",
            rule="The sizes of the axes multiply to the number of processes",
            remedy=f"Use {_that_divide(given, world)}, or start {known} processes or a multiple",
        )
    if tensor is None:
        tensor = world // known if data is not None or sizes.get("pipe") is None else 1
    if data is None:
        data = world // (tensor * pipe)
    if tensor * pipe * data != world:
        shown = [f"tensor={tensor}", *([f"pipe={pipe}"] if pipe > 1 else []), f"data={data}"]
        raise ConfigError(
            f"{' times '.join(shown)} is not the number of processes, {world}",
            rule="The sizes of the axes multiply to the number of processes",
            remedy=f"Leave one of them out (it takes what remains), or start {tensor * pipe * data} processes",
        )
    return {"data": data, "pipe": pipe, "sequence": 1, "tensor": tensor}


def _that_divide(given: Mapping[str, int], world: int) -> str:
    if len(given) > 1:
        return f"sizes whose product is one of {', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}"
    (name,) = given
    return " or ".join(f"{name}={n}" for n in range(1, world + 1) if world % n == 0)


def _axis_of_mesh(mesh: DeviceMesh, name: str, traffic: Traffic) -> Axis:
    group = mesh.get_group(name)
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(name, len(ranks), mesh.get_local_rank(name), group if len(ranks) > 1 else None, ranks, traffic)
