"""Test whether an optimizer is element-wise, like AdamW, or needs full matrices, like Muon and Adafactor.

An element-wise optimizer can update a shard of a matrix. Others need full matrices.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from copy import copy
from functools import partial
from math import inf, prod
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardformer.errors import ConfigError
from shardformer.layout.sharding_metadata import max_abs_difference
from shardformer.torch_compat import get_initial_optimizer_state, has_step_hooks, without_fake_tensors

SMALL_SHAPES, LARGE_SHAPES = ((6, 4), (4, 6)), ((134, 130), (4, 6))
CUTS, NUM_FIRST_STEPS, BOUND, MIN_LR = (1, 2, 10), 3, 1e-6, 1e-2
GRADIENTS = (
    *((1 / 2, 1), (1 / 3, 1), (1 / 4, 1), (1e-6, 1), (1, 5), (0, 1)),
    *((10, 1), (1e3, 1), (1e3, 3), (1e-1, 1), (1e-2, 3), (1e2, 5)),
)
"""Factor and exponent of the normally distributed gradients of each trial step."""
REMEDY = "Use another optimizer, such as AdamW, or use only data parallelism without ZeRO"


def _create_trial_params_and_grads(matrix_shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Create random test matrices, each stacked with its gradients for all trial steps."""
    inputs = []
    for shape in matrix_shapes:
        generator = torch.Generator("cpu").manual_seed(0)
        value = torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator).flatten()
        rolled = [value.roll(5 * step + 1) for step in range(len(GRADIENTS))]
        grads = [g.abs() ** power * g.sign() * scale for g, (scale, power) in zip(rolled, GRADIENTS, strict=True)]
        inputs.append(torch.stack([value, *grads]).unflatten(1, shape))
    return inputs


@without_fake_tensors()
def requires_full_matrices(optimizer: Optimizer) -> bool:
    """Return whether an optimizer must receive full matrices, because it would update slices differently.

    An attribute ``needs_full_matrices`` of the optimizer or of its class decides, if it is True or False. Otherwise, a
    copy of the optimizer runs 12 steps on small matrices, and then on larger ones, with the settings of each parameter
    group. The gradients shrink, grow, are zero, or differ by orders of magnitude. The trial cannot detect a rule that
    applies only later, or only to larger matrices.

    Raises:
        ConfigError: The optimizer fails in the first steps, or its update of one matrix depends on another matrix.
    """
    if (needed := getattr(optimizer, "needs_full_matrices", None)) is not None:
        return bool(needed)
    return any([_run_or_reuse_trial(optimizer, *item) for item in _get_distinct_param_groups(optimizer).items()])


def _run_or_reuse_trial(optimizer: Optimizer, settings_key: str, param_group: dict[str, Any]) -> bool:
    """Run the full-matrix trial for a parameter group, or reuse the result of an identical optimizer."""
    kind, plain = type(optimizer), vars(torch.optim.SGD([torch.zeros(1)]))
    key = (kind.step, settings_key)
    # a scheduler replaces methods, which the trial ignores; any other attribute may determine the updates
    own = [n for n, v in vars(optimizer).items() if n not in plain and not (callable(v) and hasattr(kind, n))]
    is_plain = not optimizer.state and all(name.startswith("_shardformer") for name in own)
    if is_plain and key in _RESULTS.get(kind, {}):
        return _RESULTS[kind][key]
    result = any(
        _group_requires_full_matrices(optimizer, param_group, shapes) for shapes in (SMALL_SHAPES, LARGE_SHAPES)
    )
    if is_plain:
        _RESULTS.setdefault(kind, {})[key] = result
    return result


_RESULTS: WeakKeyDictionary[type[Optimizer], dict[tuple[Any, str], bool]] = WeakKeyDictionary()


def _get_distinct_param_groups(optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return one parameter group for each combination of settings, ignoring learning rates."""
    ignored = ("params", "param_names", "lr", "initial_lr")
    return {repr([x for x in group.items() if x[0] not in ignored]): group for group in optimizer.param_groups}


def _group_requires_full_matrices(
    optimizer: Optimizer, param_group: dict[str, Any], matrix_shapes: Sequence[tuple[int, int]]
) -> bool:
    inputs, name, run = (
        _create_trial_params_and_grads(matrix_shapes),
        type(optimizer).__name__,
        partial(_run_trial_steps, optimizer),
    )
    try:
        together = run(param_group, inputs)
        again = run(param_group, inputs) if matrix_shapes is SMALL_SHAPES else together
        alone = [run(param_group, [each]) for each in inputs]
    except Exception as error:
        if matrix_shapes is LARGE_SHAPES:
            return False
        raise ConfigError(
            f"{name} cannot be sharded, because a test on tiny matrices raised {type(error).__name__}: {error!s:.120}.",
            remedy=f"If the optimizer works without ShardFormer, set {name}.needs_full_matrices = True. Otherwise, use "
            "another optimizer, such as AdamW.",
        ) from error
    if all(torch.equal(values, torch.cat([each[0].flatten() for each in inputs])) for values in together):
        raise ConfigError(
            f"{name} cannot be sharded, because its step() does not update the parameters in its param_groups.",
            remedy="Let step() update the parameters in self.param_groups, and keep no other references to parameters.",
        )
    if (difference := _compute_max_difference(together, again)) >= BOUND:
        raise ConfigError(
            f"{name} cannot be sharded, because its updates are random: two identical runs differ by {difference:.1e}.",
            remedy=f"{REMEDY}.",
        )
    if (difference := _compute_max_difference(together, [torch.cat(v) for v in zip(*alone, strict=False)])) >= BOUND:
        raise ConfigError(
            f"{name} cannot be sharded, because its update of one parameter depends on other parameters: if the "
            f"parameter is updated alone, the result differs by {difference:.1e}.",
            remedy=f"{REMEDY}. To clip gradients by their global norm, pass max_grad_norm.",
        )
    try:
        slices = run(param_group, inputs[0].flatten(1).tensor_split(CUTS, 1))
    except Exception:  # some optimizers accept only matrices
        return True
    return len(slices) < len(alone[0]) or _compute_max_difference(alone[0], slices) >= BOUND


@without_fake_tensors()
def can_step_params_separately(optimizer: Optimizer) -> bool:
    """Return whether an optimizer can update each parameter in a separate step with the same result.

    This is False if the optimizer counts steps globally or per parameter group. It is also False if the optimizer has
    step hooks, which would run several times.
    """
    if has_step_hooks(optimizer):
        return False
    inputs = _create_trial_params_and_grads(SMALL_SHAPES)
    try:
        for group in _get_distinct_param_groups(optimizer).values():
            together, separate = (_run_trial_steps(optimizer, group, inputs, step_separately=x) for x in (False, True))
            if len(together) != len(separate) or _compute_max_difference(together, separate) > 0:
                return False
    except Exception:  # possible if the attribute needs_full_matrices is set
        return False
    return True


def _compute_max_difference(results: Sequence[Tensor], other_results: Sequence[Tensor]) -> float:
    """Compute the largest difference between two runs, until the first run becomes infinite or NaN."""
    worst = 0.0
    for step, (values, others) in enumerate(zip(results, other_results, strict=False)):
        if not values.isfinite().all():
            return inf if step < NUM_FIRST_STEPS else worst
        if not torch.equal(values, others):
            scale = values.abs().clamp(min=1)
            worst = max(worst, max_abs_difference(values / scale, others / scale))
    return worst


def _run_trial_steps(
    optimizer: Optimizer,
    param_group: dict[str, Any],
    param_and_grad_values: Sequence[Tensor],
    *,
    step_separately: bool = False,
) -> list[Tensor]:
    """Step a copy of an optimizer on test parameters, and return their flattened values after each step.

    An error after the first steps ends the run.

    Args:
        param_and_grad_values: The values and gradients of each parameter, as from ``_create_trial_params_and_grads``.
    """
    params = [nn.Parameter(values[0].clone()) for values in param_and_grad_values]
    tried = _copy_optimizer_for_trial(optimizer, param_group, params)
    group = tried.param_groups[0]
    if isinstance(rate := group.get("lr"), float | int | Tensor):  # a scheduler may start at 0
        group["lr"] = rate.clamp(min=MIN_LR) if isinstance(rate, Tensor) else max(rate, MIN_LR)
    results: list[Tensor] = []
    for step in range(len(GRADIENTS)):
        for param, values in zip(params, param_and_grad_values, strict=True):
            param.grad = values[step + 1].clone()
        try:
            for turn in [[param] for param in params] if step_separately else [params]:
                group["params"] = turn
                tried.step()
        except Exception:
            if step < NUM_FIRST_STEPS:
                raise
            break
        results.append(torch.cat([param.detach().flatten() for param in params]))
    return results


def _copy_optimizer_for_trial(optimizer: Optimizer, param_group: dict[str, Any], params: list[nn.Parameter]) -> Any:
    """Copy an optimizer without its state and hooks, and make the copy update ``params``."""
    here: dict[str, Any] = {}
    memo: dict[int, Any] = {id(param_group): here, id(optimizer.param_groups): [here]}
    here.update({name: _copy_value(v, memo) for name, v in param_group.items() if name != "params"}, params=params)
    if "capturable" in here:
        here["capturable"] = False  # not supported on the CPU; does not change the result
    tried = _copy_attributes(optimizer, memo)
    for param in params:
        if state := get_initial_optimizer_state(optimizer, param_group, param):
            tried.state[param] = state
    return tried


def _copy_attributes(optimizer: Optimizer, memo: dict[int, Any]) -> Any:
    """Copy an optimizer, and replace its parameter groups by their copies in ``memo``.

    Instance attributes that replace methods are dropped, because a scheduler's ``step`` would step the original.
    """
    kind = type(optimizer)
    tried: Any = object.__new__(kind)
    memo[id(optimizer)] = tried
    groups = [memo[id(group)] for group in optimizer.param_groups if id(group) in memo]
    groups = memo.setdefault(id(optimizer.param_groups), groups)
    state = memo.setdefault(id(optimizer.state), defaultdict(dict))
    own = {k: v for k, v in optimizer.__dict__.items() if not (callable(v) and hasattr(kind, k))}
    for name, value in {**own, "param_groups": groups, "state": state}.items():
        is_hook, is_new = name.startswith("_optimizer_step_"), name in ("param_groups", "state")
        tried.__dict__[name] = OrderedDict() if is_hook else value if is_new else _copy_value(value, memo)
    return tried


def _copy_value(value: Any, memo: dict[int, Any]) -> Any:
    """Copy an optimizer attribute, so that a trial does not modify the original. Parameters are replaced by zeros.

    Args:
        memo: The copies so far, by the id of the original.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Optimizer):
        return _copy_attributes(value, memo)
    if isinstance(value, nn.Parameter):
        copied: Any = nn.Parameter(torch.zeros((), dtype=value.dtype, device="cpu").expand(value.shape), False)
    elif isinstance(value, Tensor):  # lr may be a tensor on a GPU
        copied = value.detach().to("cpu", copy=True)
    elif isinstance(value, torch.Generator):
        copied = torch.Generator(value.device).set_state(value.get_state())
    elif isinstance(value, MethodType):
        return MethodType(value.__func__, _copy_value(value.__self__, memo))
    elif type(value) is tuple:
        return tuple(_copy_value(each, memo) for each in value)
    elif isinstance(value, dict | list | deque):
        copied = memo[id(value)] = copy(value)
        for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
            copied[key] = _copy_value(each, memo)
    else:
        copied = copy(value) if isinstance(value, set) else value
    memo[id(value)] = copied
    return copied


def compute_state_after_one_step(
    optimizer: Optimizer, param_group: dict[str, Any], param_value: Tensor
) -> dict[str, Any]:
    param = nn.Parameter(param_value.clone())
    param.grad = torch.ones_like(param)
    tried = _copy_optimizer_for_trial(optimizer, param_group, [param])
    tried.step()
    return dict(tried.state[param])


def estimate_optimizer_state_bytes(
    optimizer: Optimizer, param_group: dict[str, Any], param: Tensor, weight_itemsize: int = 0
) -> float:
    """Estimate the bytes of a parameter's optimizer state by running one step on a smaller parameter.

    Args:
        weight_itemsize: Bytes per element of the weights that the optimizer updates. By default those of ``param``.
    """
    small = [min(n, 4) for n in param.shape]
    with without_fake_tensors():
        state = compute_state_after_one_step(optimizer, param_group, torch.zeros(small))
    found = 0.0
    for x in (x for x in state.values() if isinstance(x, Tensor) and x.dim()):
        full = [n if have == part else have for n, part, have in zip(param.shape, small, x.shape, strict=False)]
        found += prod(full) * ((weight_itemsize or param.element_size()) if x.is_floating_point() else x.element_size())
    return found
