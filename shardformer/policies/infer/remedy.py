"""What to write in place of a role that is wrong."""

from __future__ import annotations

from shardformer.policies.infer.flow import observe
from shardformer.policies.infer.twin import Twin
from shardformer.policies.paths import join, matching, value_at
from shardformer.policies.policy import Policy
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, Experts, Role, Stack

OF_DESCRIPTIONS = (
    "What a column-parallel linear gives, this rank's part, a row-parallel one takes: cut both or neither. Attributes "
    "that the forward reads, as numbers of heads, become this rank's by attribute_replacement"
)
OF_VOCABULARY = (
    "The table of tokens goes into `embeddings`, the linear that gives a score for each token into `head`; what else "
    "is large, as a table of positions, into `whole`"
)
OF_MLP = (
    "The linears that read its input go into `up`, the last one into `down`, a norm between them into `norm`; what "
    "mixes features in between stays whole"
)


def remedy_for(policy: Policy, role: Role | str | None, twin: Twin, at: str | None) -> str:
    """What to look at, of the role that is wrong where one is, else where it showed."""
    if isinstance(role, Attention) and isinstance(policy, RolePolicy):
        heads = role.num_heads or policy.num_heads
        unsaid = _unsaid(policy, role, twin)
        return (
            "The linears that read its input are q, k and v, or qkv, and the one behind the heads is out; num_heads, "
            f"here {heads!r}, is what its forward takes them apart by; counts= names what it reads that has to be this "
            "rank's" + (f". It reads {unsaid}, of which counts= says nothing" if unsaid else "") + "."
        )
    if isinstance(role, MLP):
        return f"{OF_MLP}."
    if isinstance(role, Experts):
        return "The weights that read its input go into `up`, the last one into `down`; say `fused` and `dims`."
    if isinstance(role, str):
        return f"{OF_VOCABULARY}."
    if isinstance(policy, RolePolicy):
        return "Each role by itself is right: look at what two of them have in common."
    return (f"Look at {at}. " if at else "") + f"{OF_DESCRIPTIONS}."


def _unsaid(policy: RolePolicy, role: Attention, twin: Twin) -> str:
    """The numbers that an attention's forward reads and its role does not name, where they may count heads."""
    numbers = observe(twin.model, twin.run).numbers
    names = [name for name, _ in twin.model.named_modules()]
    policy.set_model(twin.model)
    stacks = [policy.stack] if isinstance(policy.stack, Stack) else policy.stack
    for stack in stacks:
        for path in matching(join(policy.base, stack.layers, "*", role.at), names) if role in stack.blocks else []:
            heads = role.num_heads or policy.num_heads
            owner = (
                twin.model.get_submodule(path) if str(heads).startswith(".") else getattr(twin.model, "config", None)
            )
            count = value_at(owner, heads.removeprefix(".")) if isinstance(heads, str) else heads
            read = {n: v for n, v in numbers.get(path, {}).items() if n not in role.counts and n != "layer_idx"}
            return ", ".join(f"{name}={value}" for name, value in read.items() if value == count)
    return ""
