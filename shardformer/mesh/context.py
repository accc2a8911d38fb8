"""The grid of processes: a named axis for each way of being parallel, outermost first: data, pipe, sequence, tensor.

``ParallelContext`` is a value that is passed in; nothing here is kept at module level. With eight processes and
``tensor=2, pipe=2`` the grid is the array ``arange(8).reshape(data=2, pipe=2, sequence=1, tensor=2)``; a group is the
slice along one axis through one rank, so rank 5 = (data 1, pipe 0, tensor 1) shares its tensor group with rank 4.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardformer.errors import ConfigError, nearest
from shardformer.mesh.axis import Axis, Traffic

AXES = ("data", "pipe", "sequence", "tensor")


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
