"""The grid as one process sees it: an axis for each way of being parallel, and what carries tensors along it.

``ParallelContext`` is a value that is passed in; nothing here is kept at module level.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardformer.mesh.axis import Axis
from shardformer.mesh.grid import AXES, Grid
from shardformer.mesh.lost import Peers
from shardformer.mesh.processes import Processes, ProcessGroupTransport
from shardformer.mesh.sizes import GridSizes, RingOfGroups, Sizes, agreed_grid
from shardformer.mesh.traffic import Traffic
from shardformer.mesh.transport import NOBODY, Lines, Transport, World


@dataclass(frozen=True, eq=False)
class ParallelContext:
    """The named grid of processes and this process's place in it.

    Args:
        rank: this process's global rank.
        axes: the axes of the grid, and behind them those of its views.
        world: makes the transport of a new axis; None for a context of sizes and coordinates alone.
        mesh: the same grid for FSDP2 and torch's checkpointing; None where it does not hold all processes.
        traffic: what this process hands to collectives.
    """

    grid: Grid
    rank: int
    axes: Mapping[str, Axis]
    device: torch.device
    world: World | None = None
    mesh: DeviceMesh | None = None
    traffic: Traffic = field(default_factory=Traffic)
    _by_lines: dict[Lines, Axis] = field(default_factory=dict)

    def axis(self, name: str) -> Axis:
        """The axis called ``name``: data, pipe, sequence, tensor, or one of a view. ConfigError for another name."""
        self.grid.check(name)
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
    def sequence(self) -> Axis:
        return self.axes["sequence"]

    @property
    def alike(self) -> Axis:
        """The ranks that are given the same batch, on one stage: those of sequence and of tensor.

        All processes ask for it first at the same time: it may have to be connected.
        """
        return self.merged("sequence", "tensor")

    @property
    def own_axes(self) -> list[Axis]:
        """The axes of the grid itself, without those of its views: together they count each rank once."""
        return [self.axes[name] for name in self.grid.sizes]

    @property
    def is_here(self) -> bool:
        """Whether the calling thread runs this rank: any thread does where the rank is a process."""
        thread = None if self.world is None else self.world.thread
        return thread is None or thread is threading.current_thread()

    def finest(self, names: Iterable[str]) -> set[str]:
        """The named axes, with those of a view in the place of an axis that one refolds."""
        views = {view.of[0]: tuple(view.sizes) for view in self.grid.views if len(view.of) == 1}
        return {finer for name in names for finer in views.get(name, (name,))}

    @property
    def sizes(self) -> dict[str, int]:
        """Name of an axis -> how many ranks it has."""
        return {name: axis.size for name, axis in self.axes.items()}

    @property
    def coords(self) -> dict[str, int]:
        """Name of an axis -> this process's rank on it."""
        return {name: axis.rank for name, axis in self.axes.items()}

    @classmethod
    def of(
        cls,
        sizes: Mapping[str, int],
        coords: Mapping[str, int] | None = None,
        *,
        world: World | None = None,
        device: torch.device | None = None,
    ) -> ParallelContext:
        """A context from sizes and coordinates (0 where none is given), which needs no process.

        Without a ``world`` it says who is where, and its collectives raise LaunchError. The device is the CPU unless
        one is given.

        >>> str(ParallelContext.of({"data": 2, "tensor": 4}, {"tensor": 3}).tensor)
        'tensor 3/4'
        """
        grid = Grid.of(sizes)
        return cls(grid, grid.rank_at(coords or {}), {}, device or torch.device("cpu"), world)._with_axes(AXES)

    @classmethod
    def from_group(cls, group: Axis | dist.ProcessGroup | None, device: torch.device | None = None) -> ParallelContext:
        """A context whose tensor axis is ``group`` (None: all processes) and whose other axes have size 1."""
        tensor = Axis.of(group)
        grid, rank = Grid.of({"tensor": tensor.size}, tensor.ranks), tensor.ranks[tensor.rank]
        axes = {name: Axis(name, ranks=(rank,), traffic=tensor.traffic) for name in AXES[:-1]}
        world = tensor.transport.world or Processes(tensor.ranks)
        by_lines = {grid.lines("tensor"): tensor}
        axes["tensor"] = tensor
        return cls(grid, rank, axes, device or local_device(), world, None, tensor.traffic, by_lines)

    @classmethod
    def from_world(cls, sizes: Sizes | Callable[[], Sizes], device: torch.device | None = None) -> ParallelContext:
        """Builds the grid over all processes of the initialised default group.

        ``sizes`` gives some of the axes, or is what gives them. With none of them given, all processes form the tensor
        axis; with some, the one left open (data first, then tensor) takes what remains.

        Raises ConfigError, on every process, when the sizes do not fit the processes or differ between them.
        Communicates one gather of the sizes and of the hosts' names.
        """
        grid, device = agreed_grid(sizes), device or local_device()
        if device.type == "cuda" and not torch.cuda.is_initialized():  # a mesh would take the device of LOCAL_RANK
            torch.cuda.set_device(device)
            torch.cuda.init()
        ranks = torch.tensor(grid.ranks).reshape(list(grid.sizes.values()))
        mesh = DeviceMesh("cuda" if device.type == "cuda" else "cpu", ranks, mesh_dim_names=AXES)
        context = cls(grid, dist.get_rank(), {}, device, Processes(grid.ranks), mesh)
        for name in AXES:
            if grid.sizes[name] > 1:
                group = mesh.get_group(name)
                # some versions of torch give a mesh NCCL where the user chose gloo and there is a GPU
                is_chosen = dist.get_backend_config(group) == dist.get_backend_config()
                transport = ProcessGroupTransport(group) if is_chosen else None
                context._new_axis(name, grid.lines(name), transport)
        return context._with_axes(AXES)

    def merged(self, *names: str, only: Mapping[str, Sequence[int]] | None = None) -> Axis:
        """One axis over the product of the named ones (size 1 ones are dropped), in the order of the grid.

        Args:
            only: axis -> the ranks on it that take part. Of a process that takes no part the axis has size 1.

        All processes call it, in one order: a line that is new gets its transport. Raises ConfigError for axes that
        overlap, as one of the grid with a part of a view of it.
        """
        wide = [name for name in names if self.axis(name).size > 1]
        if only is None and len(wide) <= 1:
            return self.axes[wide[0] if wide else names[0]]
        lines = self.grid.lines(*wide, only=only)
        return self._by_lines.get(lines) or self._new_axis("_".join(wide), lines)

    def view(self, of: str | Sequence[str], **sizes: int) -> ParallelContext:
        """The same grid, whose axis ``of``, or product of axes, is also seen as the named axes.

        ``context.view("tensor", row=2, column=2).axis("row")`` holds this process and one two tensor ranks away. All
        processes call it, in one order: new axes get their transports. Raises ConfigError when the sizes do not
        multiply to what they refold.
        """
        grid = self.grid.view([of] if isinstance(of, str) else of, sizes)
        return replace(self, grid=grid)._with_axes(sizes)

    def _with_axes(self, names: Sequence[str] | Mapping[str, int]) -> ParallelContext:
        axes = dict(self.axes)
        for name in names:
            lines = self.grid.lines(name)
            axis = self._by_lines.get(lines) or self._new_axis(name, lines)
            axes[name] = axis if axis.name == name else replace(axis, name=name)
        return replace(self, axes=axes)

    def _new_axis(self, name: str, lines: Lines, transport: Transport | None = None) -> Axis:
        line = next((line for line in lines if self.rank in line), (self.rank,))
        if transport is None:
            transport = NOBODY if self.world is None else self.world.connect(lines)
        place = line.index(self.rank)
        if isinstance(transport, ProcessGroupTransport):
            hosts = [self.grid.hosts[self.grid.ranks.index(rank)] for rank in line] if self.grid.hosts else ()
            transport.peers = Peers(line, place, name, hosts, self.traffic)
        crosses = self.grid.crosses_hosts(line)
        axis = Axis(name, len(line), place, transport, line, self.traffic, crosses)
        return self._by_lines.setdefault(lines, axis)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelContext:
        return self

    def __str__(self) -> str:
        base = (self.axes[name] for name in AXES)
        return ", ".join(f"{a.name}={a.size}" for a in base if a.size > 1) or "one process"


def with_sequence(context: ParallelContext, sequence: RingOfGroups | None) -> ParallelContext:
    """The context whose sequence axis is also seen as a ring of groups, where two numbers were given."""
    if sequence is None or isinstance(sequence, int):
        return context
    ring, group = sequence
    return context.view("sequence", ring=ring, ulysses=group)


def with_tensor(context: ParallelContext, tensor: GridSizes | None) -> ParallelContext:
    """The context whose tensor axis is also seen as a grid, where two or three numbers were given."""
    if not isinstance(tensor, tuple | list) or len(tensor) == 1:
        return context
    row, column, *depth = tensor
    return context.view("tensor", row=row, column=column, depth=depth[0] if depth else 1)


def local_device() -> torch.device:
    """This process's accelerator by LOCAL_RANK, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cpu")
