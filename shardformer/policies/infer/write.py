"""A table of roles as Python that can be saved and edited."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from shardformer.policies.role_policy import Role, RolePolicy, Stack


def python_of(policy: RolePolicy, name: str = "MyPolicy") -> str:
    """The same, below what is noted of the policy."""
    return "".join(f"# {note}\n" for note in policy.notes) + "\n" + source_of(policy, name)


def source_of(policy: RolePolicy, name: str = "MyPolicy") -> str:
    """A module that defines ``policy`` as the class ``name``."""
    stacks = [policy.stack] if isinstance(policy.stack, Stack) else list(policy.stack)
    used: set[str] = {"RolePolicy"}
    lines = [f"class {name}(RolePolicy):"]
    if "base" in vars(type(policy)):
        lines.append('    base = ""  # paths are those of the whole model')
    if len(stacks) == 1:
        lines += [f"    stack = {_stack(stacks[0], '    ', used)}"]
    else:
        lines += ["    stack = (", *(f"        {_stack(stack, '        ', used)}," for stack in stacks), "    )"]
    lines += [f"    {n} = {getattr(policy, n)!r}" for n in ("embeddings", "head", "whole") if getattr(policy, n)]
    lines = [line.replace("'", '"') for line in lines]
    for reason in ("against_sequence", "against_pipeline"):
        if getattr(policy, reason):
            lines.append(f"    {reason} = {json.dumps(getattr(policy, reason))}")
    return "\n".join([f"from shardformer import {', '.join(sorted(used))}", "", "", *lines]) + "\n"


def role_source(role: Role) -> str:
    """A role as Python, in one line."""
    return _written(role, set()).replace("'", '"')


def _stack(stack: Stack, indent: str, used: set[str]) -> str:
    """The stack with a line for each of its blocks; the names of the classes that are written are ``used``."""
    used.add("Stack")
    inner = f"{indent}    "
    lines = ["Stack(", f"{inner}{stack.layers!r},", f"{inner}["]
    lines += [f"{inner}    {_written(block, used)}," for block in stack.blocks]
    lines.append(f"{inner}],")
    lines += [f"{inner}{n}={text}," for n, text in _said(stack, used) if n not in ("layers", "blocks")]
    return "\n".join([*lines, f"{indent})"])


def _written(value: Any, used: set[str]) -> str:
    if not is_dataclass(value):
        return repr(value)
    used.add(type(value).__name__)
    said = [text if n in ("at", "projections") else f"{n}={text}" for n, text in _said(value, used)]
    return f"{type(value).__name__}({', '.join(said)})"


def _said(value: Any, used: set[str]) -> list[tuple[str, str]]:
    """The fields that are not as they would be anyway, and their text."""
    out = []
    for f in fields(value):
        usual = f.default if f.default_factory is MISSING else f.default_factory()
        if getattr(value, f.name) not in (usual, (), [], {}):
            out.append((f.name, _written(getattr(value, f.name), used)))
    return out
