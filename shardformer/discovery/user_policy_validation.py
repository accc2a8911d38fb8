"""Validates a policy that a user wrote, or one of the package for a model with other code than its library's.

A copy of the model is sharded and trained before the model itself is changed.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardformer.config import ShardConfig
from shardformer.consistency.initial_weights import model_fingerprint
from shardformer.discovery.derive_policy import DerivedPolicy
from shardformer.discovery.forward_trace import TRACE_LOCK, trace_forward
from shardformer.discovery.reduced_model import (
    RELATIVE,
    ReducedModel,
    ReferenceGradients,
    copy_sharing_values,
    copy_small_model,
    probe_loss,
    reduce_model,
    runs_library_code,
)
from shardformer.discovery.shrink_config import SMALL_NUMEL, layer_kind
from shardformer.discovery.validation import (
    MismatchError,
    compare_gradients,
    error_summary,
    failing_module,
    user_code_location,
    validate_policy,
)
from shardformer.errors import PolicyError, ShardFormerError
from shardformer.kernels.fused_ops import is_elementwise
from shardformer.layout.sharding_metadata import metadata_of
from shardformer.layout.tensor_relations import max_difference
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.module_paths import as_path_list, get_at, join_path, match_paths
from shardformer.policies.policy import Policy
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, Experts, LayerStack, Role
from shardformer.sharding.apply import shard_with
from shardformer.sharding.plan import ShardingPlan
from shardformer.torch_compat import TorchDispatchMode, tree_leaves

OF_DESCRIPTIONS = (
    "What a column-parallel linear gives, this rank's part, a row-parallel one takes: cut both or neither. Attributes "
    "that the forward reads, as numbers of heads, become this rank's by attribute_replacement"
)
OF_VOCABULARY = (
    "The table of tokens goes into `embeddings`, the linear that gives a score for each token into `head`; what else "
    "is large, as a table of positions, into `keep_replicated`"
)
OF_MLP = (
    "The linears that read its input go into `up`, the last one into `down`, a norm between them into `norm`; what "
    "mixes features in between stays whole"
)


def suggest_fix(policy: Policy, role: Role | str | None, twin: ReducedModel, at: str | None) -> str:
    """What to look at, of the role that is wrong where one is, else where it showed."""
    if isinstance(role, Attention) and isinstance(policy, RolePolicy):
        heads = role.num_heads or policy.num_heads
        unsaid = _unlisted_numbers(policy, role, twin)
        return (
            "The linears that read its input are q, k and v, or qkv, and the one behind the heads is out; num_heads, "
            f"here {heads!r}, is what its forward takes them apart by; local_attrs= names what it reads that has to be "
            "this rank's" + (f". It reads {unsaid}, of which local_attrs= says nothing" if unsaid else "") + "."
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


def _unlisted_numbers(policy: RolePolicy, role: Attention, twin: ReducedModel) -> str:
    """The numbers that an attention's forward reads and its role does not name, where they may count heads."""
    numbers = trace_forward(twin.model, twin.run).numbers
    names = [name for name, _ in twin.model.named_modules()]
    policy.set_model(twin.model)
    stacks = [policy.stack] if isinstance(policy.stack, LayerStack) else policy.stack
    for stack in stacks:
        for path in (
            match_paths(join_path(policy.base, stack.layers, "*", role.at), names) if role in stack.blocks else []
        ):
            heads = role.num_heads or policy.num_heads
            owner = (
                twin.model.get_submodule(path) if str(heads).startswith(".") else getattr(twin.model, "config", None)
            )
            count = get_at(owner, heads.removeprefix(".")) if isinstance(heads, str) else heads
            read = {n: v for n, v in numbers.get(path, {}).items() if n not in role.local_attrs and n != "layer_idx"}
            return ", ".join(f"{name}={value}" for name, value in read.items() if value == count)
    return ""


TRIAL_RANKS = 2


def check_registered_policy(model: nn.Module, policy: Policy) -> None:
    """Raises PolicyError where layers run code that the policy was not written for, and that no proof covers.

    Where that code needs tokens that sequence parallelism has on other ranks, the policy refuses that from now on.
    Communicates nothing. A model of the library's own code is not looked at any further.
    """
    own = copy.copy(policy)
    own.set_model(model)
    layers = [stack.layers for stack in own.stacks()]
    foreign = dict(user_code_modules(model, layers))
    if not foreign:
        return
    path, module = next(iter(foreign.items()))
    against, along_sequence = _registered_policy_fault(model, type(policy), layers, foreign)
    if isinstance(policy, RolePolicy) and along_sequence is not None:
        why = f"with the code of {path} ({type(module).__name__}) {along_sequence}"
        policy.no_sequence_parallel = policy.no_sequence_parallel or why
    if against is not None:
        raise PolicyError(
            f"{path} ({type(module).__name__}) runs code that {type(policy).__name__} was not written for: {against}",
            rule="A registered policy is used for the code of its library; other code is proven on a small twin",
            remedy="Write policy=shardformer.derive_policy(model), a policy of your own (docs/policies.md), or use the "
            "library's class",
        )


def user_code_modules(model: nn.Module, layers: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of some layers whose forward is no library's, without those that look at one feature at a time."""
    for stack in layers:
        for path, module in model.get_submodule(stack).named_modules(prefix=stack):
            if not runs_library_code(module) and (module._modules or not is_elementwise(module)):
                yield path, module


def _registered_policy_fault(
    model: nn.Module, policy: type[Policy], layers: list[str], foreign: dict[str, nn.Module]
) -> tuple[str | None, str | None]:
    """Why it must not be used, and why not with sequence parallelism; None where nobody can tell."""
    try:
        twin = reduce_model(model)
        _take_over(twin.model, foreign)
        lacks = _user_code_kinds(foreign) - _user_code_kinds(dict(user_code_modules(twin.model, layers)))
        if lacks:
            return f"no small twin of the model has {', '.join(sorted(lacks))}", None
        reference = twin.reference()
    except PolicyError as error:
        return error.what, None
    except Exception as error:
        return f"on a small twin it does not run ({type(error).__name__}: {str(error)[:120]})", None
    if (against := validate_policy(reference, policy, TRIAL_RANKS)) is not None:
        return against, None
    return None, validate_policy(reference, policy, TRIAL_RANKS, enable_sequence_parallelism=True)


def _take_over(twin: nn.Module, foreign: dict[str, nn.Module]) -> None:
    """Gives a twin that was built of the config what somebody changed in the model that was built."""
    own = dict(twin.named_modules())
    for path, module in foreign.items():
        other = own.get(path)
        if other is None:
            continue
        if type(other) is not type(module) and issubclass(type(module), type(other)):
            other.__class__ = type(module)
        method = vars(module).get("forward")
        if "forward" not in vars(other) and inspect.ismethod(method) and method.__self__ is module:
            other.__dict__["forward"] = MethodType(method.__func__, other)


def _user_code_kinds(foreign: dict[str, nn.Module]) -> set[str]:
    """What runs other code, in words: a class, or the function that took the place of its forward."""
    return {
        f"the {type(m).__name__}" + (f" with {vars(m)['forward'].__qualname__}" if "forward" in vars(m) else "")
        for m in foreign.values()
        if "forward" not in vars(m) or hasattr(vars(m)["forward"], "__qualname__")
    }


POLICY_HOOKS = ("preprocess", "postprocess", "inject_policy", "binding_policy")
"""Functions of a policy that may make another model of the plain one, on purpose."""
RULE = (
    "A policy is right when nobody can tell the sharded model from the plain one; that is tried on a small copy first"
)
MOST_RANKS = 4
"""Over how many ranks a small model of the classes of a larger one is cut; it has six heads."""
PROCESSED = 100_000_000
"""Numbers that all ranks together may compute with: what takes longer than a few seconds is not tried."""


@dataclass(frozen=True)
class PolicyFault:
    """What is wrong with a policy, in words; the module where it shows, and what to write, where these are known."""

    what: str
    at: str | None = None
    remedy: str | None = None


class _NotValidated(Exception):
    """Why nothing can be told about a policy; it is taken at its word then."""


_KNOWN: dict[Hashable, PolicyError | str | None] = {}
_ONE_AT_A_TIME = threading.RLock()


def validate_user_policy(plan: ShardingPlan, policy: Policy, tensor: int) -> str | None:
    """Raises PolicyError where a model that is cut by a user's policy can be told from the plain one.

    Made once for one policy and models that are alike. Communicates nothing.

    Args:
        plan: what the policy does to the model.
        policy: it has been told of the model and the config.
        tensor: over how many ranks.

    Returns why it was not tried, to be noted; None where it was, and is right.
    """
    if not policy.validate or isinstance(policy, DerivedPolicy) or _is_ours(plan, policy):
        return None
    model = plan.model
    own = {n: v for n, v in vars(policy).items() if n not in ("model", "axis", "shard_config", "find_submodel_policy")}
    key = (type(model), type(policy), repr(own), tensor, hash((*model_fingerprint(model), *plan.fingerprint())))
    with _ONE_AT_A_TIME:
        if key not in _KNOWN:
            try:
                _KNOWN[key] = _checked(plan, policy, tensor)
            except _NotValidated as error:
                _KNOWN[key] = f"{type(policy).__name__} was not tried on a copy of the model: {error}."
        known = _KNOWN[key]
    if isinstance(known, PolicyError):
        raise PolicyError(known.what, rule=known.rule, remedy=known.remedy)
    return known


def _is_ours(plan: ShardingPlan, policy: Policy) -> bool:
    """Whether it is one of ours for the code that it was written for."""
    layers = [stack.layers for stack in plan.stacks]
    return (
        type(policy).__module__.startswith("shardformer.") and next(user_code_modules(plan.model, layers), None) is None
    )


def _checked(plan: ShardingPlan, policy: Policy, tensor: int) -> PolicyError | None:
    if code := next(_user_code_in_policy(plan, policy), None):
        raise _NotValidated(f"it has code of its own, {code}")
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),
        ):
            return _PolicyTrial(*_model_for_trial(plan.model, policy, tensor)).refusal()
    except PolicyError as error:  # no copy can be made or fed
        raise _NotValidated(error.what[:1].lower() + error.what[1:]) from error


def _model_for_trial(model: nn.Module, policy: Policy, tensor: int) -> tuple[ReducedModel, Policy, int]:
    """A copy of a small model; of a larger one a small model of its classes, for a policy that fits that as well."""
    numel = sum(p.numel() for p in model.parameters())
    if numel <= SMALL_NUMEL:
        if numel * tensor > PROCESSED:
            raise _NotValidated(f"{tensor} ranks of {numel:,} parameters would take too long")
        return copy_small_model(model), policy, tensor
    if not _names_its_numbers(policy):
        raise _NotValidated(
            f"it has more than {SMALL_NUMEL:,} parameters, and a smaller model might have other numbers of heads than "
            "the policy says; where it names the fields of the config or attributes that hold them, it is tried"
        )
    twin = reduce_model(model)
    if layer_kind(twin.model) != layer_kind(model) or any("forward" in vars(m) for m in model.modules()):
        raise _NotValidated("what a small model of its config has is made of other modules")
    return twin, policy, min(tensor, MOST_RANKS)


def _names_its_numbers(policy: Policy) -> bool:
    if not isinstance(policy, RolePolicy) or type(policy).module_policy is not RolePolicy.module_policy:
        return False
    stacks = [policy.stack] if isinstance(policy.stack, LayerStack) else policy.stack
    roles = [*policy.unstacked_blocks, *(role for stack in stacks for role in stack.blocks)]
    attentions: list[Any] = [policy, *(role for role in roles if isinstance(role, Attention))]
    return not any(isinstance(n, int) for each in attentions for n in (each.num_heads, each.num_kv_heads))


def _user_code_in_policy(plan: ShardingPlan, policy: Policy) -> Iterator[str]:
    """What of a policy does what only its author knows, or needs processes."""
    yield from (f"{name}()" for name in POLICY_HOOKS if getattr(type(policy), name) is not getattr(Policy, name))
    yield from (f"the method {path!r}" for path in plan.methods)
    yield from (f"param_replacement of {path!r}" for path, _ in plan.functions)
    for sub in plan.replacements.values():
        if not getattr(sub.target_module.from_native_module, "__module__", "").startswith("shardformer."):
            yield f"the class {sub.target_module.__name__}"


class _LowPrecisionDetector(TorchDispatchMode):
    """Whether something is computed in fewer bits than a difference would be told by, or would be by layers of ours."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no types
        self.seen: torch.dtype | None = None
        for module in model.modules():
            module.register_forward_pre_hook(self._look)

    def _look(self, *_: Any) -> None:
        if torch.is_autocast_enabled("cpu"):
            self.seen = torch.get_autocast_dtype("cpu")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.is_floating_point() and x.element_size() < 4:
                self.seen = x.dtype
        return out


class _PolicyTrial:
    """A plain copy of a model, what it gives, and what is tried on more copies.

    Raises _NotTried for a copy that does not give the same twice: nothing could be told from it.
    """

    def __init__(self, twin: ReducedModel, policy: Policy, tensor: int) -> None:
        self._twin, self._policy, self._tensor = twin, policy, tensor
        try:
            native = copy.deepcopy(twin.model)  # some modules keep what a forward made
            first = ReferenceGradients.of(native, twin.run)
            with TRACE_LOCK, _LowPrecisionDetector(native) as few, torch.no_grad():
                again = probe_loss(twin.run(native)).item()
            copy_sharing_values(twin.model)
        except Exception as error:
            raise _NotValidated(error_summary(error)) from error
        if not abs(first.loss - again) <= 0.01 * RELATIVE * abs(first.loss):
            raise _NotValidated("it does not compute the same twice")
        self._draws = _draws(native, twin)
        if few.seen is not None:
            raise _NotValidated(f"it computes in {few.seen} inside, whose roundings are larger than what is looked for")
        self._reference = replace(first, model=twin.model)
        self._parts: dict[type[nn.Module], Policy] = {}

    def refusal(self) -> PolicyError | None:
        """What is to be said of the policy; None for one that nobody could tell from the plain model."""
        wrong = self._wrong(self._policy)
        if wrong is None:
            return None
        if self._draws:
            raise _NotValidated("it draws random numbers, and a rank may draw others for its part than one device does")
        role, wrong = next(self._blamed(), (None, wrong))
        name, model = type(self._policy).__name__, type(self._twin.model).__name__
        by = f"{name} over {self._tensor} ranks" if role is None else f"the {_name_of(role)} of {name} alone"
        return PolicyError(
            f"Cut by {by}, {model} {wrong.what}",
            rule=RULE,
            remedy=(wrong.remedy or suggest_fix(self._policy, role, self._twin, wrong.at)).rstrip(".")
            + ". Where the difference is meant, say prove = False in the policy",
        )

    def _blamed(self) -> Iterator[tuple[Role | str, PolicyFault]]:
        """The roles that are wrong, each by itself, and how."""
        if not isinstance(self._policy, RolePolicy):
            return
        for role, policy in _single_role_policies(self._policy):
            try:
                if (wrong := self._wrong(policy)) is not None:
                    yield role, wrong
            except _NotValidated:
                continue

    def _wrong(self, policy: Policy, gave: dict[str, Tensor] | None = None) -> PolicyFault | None:
        """What is wrong with a policy; where an output differs, where that begins is seen the second time.

        Args:
            gave: path of each module of the plain copy -> what it gave.
        """
        models = [copy_sharing_values(self._twin.model) for _ in range(self._tensor)]
        first: list[str] = []

        def train(context: ParallelContext) -> None:
            model = models[context.tensor.rank]
            self._shard(policy, model, context)
            if gave is not None and context.tensor.rank == 0:
                _note_differences(model, gave, first)
            loss = probe_loss(self._twin.run(model))
            if not abs(loss.item() - self._reference.loss) <= RELATIVE * abs(self._reference.loss):
                raise MismatchError("its output differs")
            loss.backward()
            compare_gradients(self._reference, model, metadata_of(model).coords)

        try:
            run_as_threads(train, tensor=self._tensor, in_turn=True)
            return None
        except _NotValidated:
            raise
        except MismatchError as difference:
            if gave is None:
                return self._wrong(policy, _outputs_of(copy_sharing_values(self._twin.model), self._twin))
            at = next(iter(first), None)
            if "output" not in str(difference):
                return PolicyFault(f"trains otherwise: {difference}" + (f", and what {at!r} gives" if at else ""), at)
            return PolicyFault("computes something else" + (f", first in {at!r}" if at else ""), at)
        except PolicyError as error:
            return PolicyFault(f"does not run: {error.what}", remedy=error.remedy)
        except ShardFormerError as error:  # of an option or an input: the model's own forward will say so
            raise _NotValidated(error.what) from error
        except Exception as error:  # a forward that the cut breaks can raise anything
            at = next((found for model in models if (found := failing_module(error, model))), None)
            inside = f" in {at!r}" if at else ""
            return PolicyFault(f"does not run: {error_summary(error)}{inside}{user_code_location(error)}", at)

    def _shard(self, policy: Policy, model: nn.Module, context: ParallelContext) -> None:
        """By a copy of the policy. What is wrong here is wrong with the model itself too, and said of that."""
        own = copy.copy(policy)
        if (find := policy.find_submodel_policy) is not None:
            own.find_submodel_policy = lambda part: copy.copy(self._parts.setdefault(type(part), find(part)))
        try:
            config = ShardConfig(context=context, extra_kwargs=dict(policy.shard_config.extra_kwargs))
            shard_with(model, config, own)
        except Exception as error:
            raise _NotValidated(error_summary(error)) from error


def _draws(model: nn.Module, twin: ReducedModel) -> bool:
    """Whether a forward draws random numbers of torch."""
    seen: list[Tensor] = []
    hooks = [
        model.register_forward_pre_hook(lambda *_: seen.append(torch.get_rng_state())),
        model.register_forward_hook(lambda *_: seen.append(torch.get_rng_state())),
    ]
    with torch.no_grad():
        twin.run(model)
    for hook in hooks:
        hook.remove()
    return not torch.equal(seen[0], seen[-1])


def _single_role_policies(policy: RolePolicy) -> Iterator[tuple[Role | str, RolePolicy]]:
    """Policies that say one thing of a table each, and leave the rest whole."""

    def with_only(**fields: Any) -> RolePolicy:
        one: Any = copy.copy(policy)
        nothing: dict[str, Any] = {
            "stack": (),
            "embeddings": (),
            "head": (),
            "unstacked_blocks": (),
            "submodels": (),
            "keep_replicated": (),
        }
        vars(one).update(nothing | fields | {"replicated": lambda: None})
        return one  # type: ignore[no-any-return]  # what is written over is no attribute of a class

    for stack in [policy.stack] if isinstance(policy.stack, LayerStack) else policy.stack:
        for role in stack.blocks:
            yield role, with_only(stack=replace(stack, blocks=[role]))
    for role in policy.unstacked_blocks:
        yield role, with_only(unstacked_blocks=[role])
    for names in ({"embeddings": policy.embeddings}, {"head": policy.head}):
        if any(names.values()):
            (kind, paths), *_ = names.items()
            yield f"{kind} {', '.join(map(repr, as_path_list(paths)))}", with_only(**names)


def _name_of(role: Role | str) -> str:
    return role if isinstance(role, str) else f"{type(role).__name__} {role.at!r}"


def _outputs_of(model: nn.Module, twin: ReducedModel) -> dict[str, Tensor]:
    """The first tensor that each module gave, by its path."""
    gave: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        module.register_forward_hook(lambda _, __, out, path=path: _keep(gave, path, out))
    with torch.no_grad():
        twin.run(model)
    return gave


def _keep(gave: dict[str, Tensor], path: str, output: Any) -> None:
    if (first := _first_tensor(output)) is not None:
        gave.setdefault(path, first.detach().clone())


def _first_tensor(output: Any) -> Tensor | None:
    return next((x for x in tree_leaves(output) if isinstance(x, Tensor)), None)


def _note_differences(model: nn.Module, gave: dict[str, Tensor], first: list[str]) -> None:
    """Notes each module that gives another tensor of the same shape than the plain one, from the first on."""

    def note(path: str, output: Any) -> None:
        x, y = _first_tensor(output), gave.get(path)
        if type(x) is not Tensor or y is None or x.shape != y.shape or not x.is_floating_point():
            return  # logits over a part of the vocabulary would be gathered, and the other ranks do not look
        if max_difference(x.detach(), y) > RELATIVE * y.abs().max():
            first.append(path)

    for path, module in model.named_modules():
        if path:
            module.register_forward_hook(lambda _, __, out, path=path: note(path, out))
