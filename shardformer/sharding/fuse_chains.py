"""Compiled chains in a model: which modules take part, which linears hand their bias on, and what is said of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from shardformer.errors import ConfigError
from shardformer.layers.fused import JitActivation, JitDropout, jit_problem, start_chain
from shardformer.layers.fused_kernels import Op, Program, fuses
from shardformer.layers.tensor.linear import Linear1D_Col, Linear1D_Row
from shardformer.mesh.context import local_device
from shardformer.policies.describe import BlockDescription, StackDescription
from shardformer.policies.policy import Policy
from shardformer.sharding.describe import ShardRecord
from shardformer.sharding.plan import Plan

FORMS = BIASED, GATE, RESIDUAL = ("bias and activation", "activation and gate", "bias, dropout and residual")
SAID = {"mul": "gate", "dropout": "dropout if any", "add": "residual where it follows at once"}


def check_chains(model: nn.Module, policy: Policy) -> None:
    """Raises ConfigError where nothing compiles, or there is nothing that chains know."""
    problem = jit_problem()
    if problem is not None:
        raise ConfigError(
            "enable_jit_fused=True",
            rule=f"Chains are compiled by torch.compile, and {problem}",
            remedy="Bring what is missing, or leave enable_jit_fused off",
        )
    first: ConfigError | None = None
    for _, module in _elementwise(model, policy.stacks()):
        try:
            _fused(module)
            return
        except ConfigError as error:
            first = first or error
    raise first or ConfigError(
        f"enable_jit_fused=True, but {type(model).__name__} has no activation that is a module of its own",
        rule="An option without effect is an error",
        remedy="Leave enable_jit_fused off",
    )


def fuse_chains(model: nn.Module, plan: Plan, record: ShardRecord) -> None:
    """Linears before an activation or a residual hand their bias on, and what follows takes it into one kernel."""
    left: Counter[str] = Counter()
    for path, native in _elementwise(model, plan.stacks):
        try:
            new = _fused(native)
        except ConfigError:
            left[type(native).__name__] += 1
            continue
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, new)
        record.add(path, native, new, kind="chain")
    found: dict[str, list[Program]] = {form: [] for form in FORMS}
    for target in plan.targets:
        activations = [m.op for m in target.module.modules() if isinstance(m, JitActivation)]
        drops = any(isinstance(m, JitDropout) for m in target.module.modules())
        for block in target.description.blocks or []:
            for form, programs in _hand_on(target.module, block, activations, drops):
                found[form] += programs
    record.notes.append(_note(found, left, local_device()))


def _fused(module: nn.Module) -> JitActivation | JitDropout:
    kind = JitDropout if isinstance(module, nn.Dropout) else JitActivation
    return kind.from_native_module(module)


def _hand_on(
    module: nn.Module, block: BlockDescription, activations: list[Op], drops: bool
) -> Iterator[tuple[str, list[Program]]]:
    """Makes the linears of one block begin chains; gives each form of chain, and the chains of it."""
    columns, row = [module.get_submodule(name) for name in block.columns], module.get_submodule(block.row)
    if block.activated and len(columns) > 1:
        yield GATE, [(op, Op("mul")) for op in activations]
    if block.activated:
        for column in columns:
            if isinstance(column, Linear1D_Col) and column.bias is not None:
                column.finish = start_chain
                yield BIASED, [(Op("bias"), op) for op in activations]
    if isinstance(row, Linear1D_Row) and (row.bias is not None or drops):
        row.finish = start_chain
        first = () if row.bias is None else (Op("bias"),)
        yield RESIDUAL, [(*first, Op("dropout"), Op("add"))]


def _note(found: Mapping[str, list[Program]], left: Counter[str], device: torch.device) -> str:
    programs = dict.fromkeys(program for form in FORMS for program in found[form])
    ours: list[str] = []
    others: list[str] = []
    for program in programs:
        (ours if fuses(program, device) else others).append(" + ".join(SAID.get(op.kind, op.kind) for op in program))
    note = f"Chains: {'; '.join(ours) or 'none that one kernel makes faster'}."
    if others:
        note += f" By torch's own kernels, which are as fast on {device.type}: {'; '.join(others)}."
    if lacking := [form for form in FORMS if not found[form]]:
        note += f" None of {', or of '.join(lacking)}: no block that is cut has one."
    if left:
        note += f" In no chain: {', '.join(f'{n} {kind}' for kind, n in left.items())}."
    return note


def _elementwise(model: nn.Module, stacks: list[StackDescription]) -> list[tuple[str, nn.Module]]:
    """The activations and dropouts of the layers: modules without parameters, buffers or children.

    A softmax is over a dim, and stochastic depth over samples: they are no part of a chain, and take its values.
    """
    inside = tuple(f"{s.layers}." for s in stacks)
    return [
        (path, m)
        for path, m in model.named_modules()
        if (path.startswith(inside) or not stacks)
        and not isinstance(m, nn.Identity | nn.Softmax)
        and not type(m).__name__.endswith(("DropPath", "Attention"))
        and not any(True for _ in m.children())
        and not m._parameters
        and not m._buffers
    ]
