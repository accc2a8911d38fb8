"""The tensor-parallel plan of a transformers config as the first draft of a policy.

``config.base_model_tp_plan`` names linears that are sharded by columns or by rows ("layers.*.mlp.up_proj": "colwise").
It leaves out heads, what a forward counts, and many modules: the draft only selects among the roles that the flow of
the data allows, and is validated with the whole policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from shardformer.module_paths import join_path, resolve_path
from shardformer.policies.roles import Attention, Experts, Role

EXPERT_STYLES = {"rowwise": ("colwise", "packed_colwise"), "colwise": ("packed_rowwise",)}
"""The style of the exit of stacked experts -> those of their other weights, which may lie the other way round."""


def transformers_plan_of(model: nn.Module) -> dict[str, str]:
    """Path in ``model``, with ``*`` for an index -> style, of all configs inside that have a plan."""
    plan: dict[str, str] = {}
    for path, module in model.named_modules():
        own: Any = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if isinstance(own, Mapping) and getattr(module, "base_model", None if path else module) is module:
            plan |= {join_path(path, str(name)): str(style) for name, style in own.items()}
    return plan


def role_in_plan(plan: Mapping[str, str], layers: str, roles: Iterable[Role]) -> Role | None:
    """The first of ``roles`` whose weights the plan shards in the same way; None if there is none.

    Args:
        layers: path of the stack.
    """
    return next((role for role in roles if _agrees(plan, f"{layers}.*", role)), None)


def _agrees(plan: Mapping[str, str], layer: str, role: Role) -> bool:
    if isinstance(role, Attention):
        linears = role.projections
        if linears.interleaved or linears.qkv is not None:  # the plan does not tell how heads lie in one matrix
            return False
        columns = [name for name in (linears.q, linears.k, linears.v, linears.kv) if name] + [*linears.gates]
        down = linears.out
    else:
        columns, down = [role.up] if isinstance(role.up, str) else [*role.up], role.down

    def style(name: str) -> str:
        return plan.get(join_path(layer, resolve_path(role.at, name.rstrip("?"))), "")

    if isinstance(role, Experts):
        ups = [style(name) for name in columns if not name.endswith("bias")]
        fused = {"packed": 2}.get(ups[0].partition("_")[0], 1) if ups else 0
        return fused == role.fused and all(up in EXPERT_STYLES.get(style(down), ()) for up in ups)
    return style(down).startswith("rowwise") and all(style(name).startswith("colwise") for name in columns)
