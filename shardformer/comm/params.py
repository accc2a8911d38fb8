"""Parameters by name: their layouts, and the full tensors that they are parts of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from shardformer.comm.collectives import all_gather
from shardformer.layout.spec import ShardSpec
from shardformer.mesh.axis import Axis


def param_specs(model: nn.Module) -> dict[str, ShardSpec]:
    """The layout of every parameter by its name, tied names too; a replicated one has no splits."""
    by_id: dict[int, ShardSpec] = {}
    for module in model.modules():
        specs: dict[str, ShardSpec] = module.__dict__.get("shard_specs", {})
        for name, spec in specs.items():
            param = module._parameters.get(name)
            if param is not None:
                by_id[id(param)] = spec
    return {
        name: by_id.get(id(p), ShardSpec(tuple(p.shape))) for name, p in model.named_parameters(remove_duplicate=False)
    }


def tensor_axis(model: nn.Module) -> Axis:
    """The tensor axis that the model's layers are cut along; one of size 1 when none is."""
    for module in model.modules():
        for name in ("axis", "shard_axis"):  # of a parallel layer; of one whose parameters are cut where they stand
            axis = module.__dict__.get(name)
            if isinstance(axis, Axis) and axis.name == "tensor":
                return axis
    return Axis("tensor")


PIPE_PLACE = "_shardformer_pipe"


@dataclass(frozen=True)
class PipePlace:
    """What a stage of a pipeline must know of its parameters: which of them another stage counts."""

    axis: Axis
    counted_elsewhere: frozenset[str]

    def __deepcopy__(self, memo: object) -> PipePlace:
        return self


def pipe_place(model: nn.Module) -> PipePlace:
    """The pipe axis that the model is a stage on; one of size 1 when it is whole."""
    place = model.__dict__.get(PIPE_PLACE)
    return place if isinstance(place, PipePlace) else PipePlace(Axis("pipe"), frozenset())


def gather_param(local: Tensor, spec: ShardSpec, axis: Axis) -> Tensor:
    """The full tensor of one whose part this is, on every rank. One all-gather when it is sharded."""
    if not spec.is_sharded or axis.size == 1:
        return local.detach().clone()
    dim, split = next(iter(spec.splits.items()))
    lengths = [split.length(r) for r in range(axis.size)]
    joined = all_gather(local.detach(), axis, dim, lengths=lengths, purpose="gather")
    return spec.join(list(joined.split(lengths, dim)))
