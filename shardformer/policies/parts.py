"""What a role says of a module beside its projections: what some models lack, parameters of its own, norms inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from torch import Tensor

from shardformer.errors import PolicyError
from shardformer.layout.split import Split
from shardformer.policies.describe import ModulePolicyDescription
from shardformer.policies.heads import HeadLayout
from shardformer.policies.roles import Counted


def parameter_split(path: str, full: Tensor, said: Counted, layout: HeadLayout) -> dict[int, Split]:
    """How the dims of a parameter, or of a buffer, are cut of which one counts what is ``said``."""
    kind, dim = (said, None) if isinstance(said, str) else said
    if kind == "inside":
        return {}
    splits = {"heads": layout.query_split(1), "kv_heads": layout.kv_split(1), "width": layout.query_split()}
    size = splits[kind].full
    dims = [d for d, n in enumerate(full.shape) if n == size] if dim is None else [dim % max(full.dim(), 1)]
    if len(dims) != 1 or full.shape[dims[0]] != size:
        raise PolicyError(
            f"{path} has the shape {tuple(full.shape)}, and counts={said!r}",
            rule=f"One of its dims has the size of what it counts, here {size}",
            remedy=f"Name the dim too, ({kind!r}, dim), where several have that size, or correct what it counts",
        )
    return {dims[0]: splits[kind]}


def merged(descriptions: Sequence[ModulePolicyDescription]) -> ModulePolicyDescription:
    """What several descriptions of one kind of module say together."""
    out = ModulePolicyDescription({}, [], [], {}, [], {})
    for d in descriptions:
        assert out.attribute_replacement is not None and out.sub_module_replacement is not None
        assert out.blocks is not None and out.parameters is not None
        out.attribute_replacement.update(d.attribute_replacement or {})
        out.sub_module_replacement += d.sub_module_replacement or []
        out.blocks += d.blocks or []
        out.parameters.update(d.parameters or {})
    return out


def expert_dims(shapes: Mapping[str, Sequence[int]], down: str, fused: int) -> list[dict[str, int]]:
    """Each way in which the parameters of stacked experts fit together: which dim holds an expert's features.

    Of these ``down`` has one set, and the others ``fused`` times as many; biases without them are left out. Where they
    are as many as the hidden features, several ways fit.
    """
    ways = []
    for at in (2, 1):
        width, hidden = shapes[down][at], shapes[down][3 - at]
        of = {
            name: [d for d in range(1, len(s)) if s[d] == fused * width and (len(s) == 2 or s[3 - d] == hidden)]
            for name, s in shapes.items()
        } | {down: [at]}
        of = {name: dims for name, dims in of.items() if dims or len(shapes[name]) == 3}
        ways += [dict(zip(of, dims, strict=True)) for dims in product(*of.values())]
    return ways
