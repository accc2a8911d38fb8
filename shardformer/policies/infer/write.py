"""A table of roles as Python that can be saved and edited."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from shardformer.policies.role_policy import RolePolicy, Stack

STACK_FIELDS = ("final_norm", "context", "returns", "before", "after", "from_first", "everywhere")


def source_of(policy: RolePolicy, name: str = "MyPolicy") -> str:
    """A module that defines ``policy`` as the class ``name``."""
    stacks = [policy.stack] if isinstance(policy.stack, Stack) else list(policy.stack)
    used = sorted({type(block).__name__ for stack in stacks for block in stack.blocks} | {"RolePolicy", "Stack"})
    lines = [f"from shardformer import {', '.join(used)}", "", "", f"class {name}(RolePolicy):"]
    if "base" in vars(type(policy)):
        lines.append('    base = ""  # paths are those of the whole model')
    if len(stacks) == 1:
        lines += [f"    stack = {_stack(stacks[0], '    ')}"]
    else:
        lines += ["    stack = (", *(f"        {_stack(stack, '        ')}," for stack in stacks), "    )"]
    lines += [f"    {n} = {getattr(policy, n)!r}" for n in ("embeddings", "head", "whole") if getattr(policy, n)]
    lines = [line.replace("'", '"') for line in lines]
    for name in ("against_sequence", "against_pipeline"):
        if getattr(policy, name):
            lines.append(f"    {name} = {json.dumps(getattr(policy, name))}")
    return "\n".join(lines) + "\n"


def _stack(stack: Stack, indent: str) -> str:
    inner = f"{indent}    "
    lines = ["Stack(", f"{inner}{stack.layers!r},", f"{inner}["]
    lines += [f"{inner}    {_call(block)}," for block in stack.blocks]
    lines.append(f"{inner}],")
    lines += [f"{inner}{n}={getattr(stack, n)!r}," for n in STACK_FIELDS if getattr(stack, n)]
    return "\n".join([*lines, f"{indent})"])


def _call(role: Any) -> str:
    """The role with those of its fields that are not as they would be anyway."""
    given = {
        f.name: getattr(role, f.name) for f in fields(role) if getattr(role, f.name) not in (f.default, (), [], {})
    }
    said = [f"{name}={value!r}" for name, value in given.items() if name != "at"]
    return f"{type(role).__name__}({', '.join([repr(role.at), *said])})"
