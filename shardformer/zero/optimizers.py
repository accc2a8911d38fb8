"""Optimizers for sharded models (HybridAdam, LAMB and LARS), and a test that detects element-wise optimizers.

An element-wise optimizer, like AdamW, can update a shard of a matrix. Others, like Muon and Adafactor, need full
matrices.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from shardformer.errors import ConfigError
from shardformer.layout.sharding_metadata import max_abs_difference
from shardformer.offload.host import FREE_MEMORY
from shardformer.torch_compat import get_initial_optimizer_state, has_step_hooks, without_fake_tensors


class HybridAdam(Adam):
    """An Adam optimizer that keeps its states in free GPU memory, and offloads states that do not fit to the host.

    Use it with ``shard_optimizer(..., offload=...)``. In the first step, all states are on the host. Afterward, as many
    as fit move to the free GPU memory, and the GPU and the host update their states at the same time. Without a GPU or
    without ``offload``, it is torch's fused Adam. For other optimizers, use ``OffloadConfig("cpu", on_device=...)``.

    Args:
        decoupled_weight_decay: True for AdamW, False for Adam.
        on_device: "free", or the fraction of the states to keep on the device.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled_weight_decay: bool = True,
        on_device: float | str = FREE_MEMORY,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=decoupled_weight_decay
        )
        has_gpu = any(p.is_cuda for group in self.param_groups for p in group["params"])
        self.on_device = 0.0 if on_device == FREE_MEMORY and not has_gpu else on_device


Params = Iterable[Tensor] | Iterable[dict[str, Any]]


class LAMB(Optimizer):
    """Adam with layer-wise learning rates, which make each update proportional to the norm of its parameter.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2020), algorithm 2.

    Args:
        lr: Norm of an update divided by the norm of the parameter.
        betas: Decay rates of the running means of the gradient and of its square.
        weight_decay: Decoupled weight decay, applied before the normalization.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        _check_positive(lr=lr, eps=eps)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimizer step. Communicates nothing."""
        loss = _run_closure(closure)
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["step"] += 1
                state["mean"].lerp_(p.grad, 1 - first)
                state["square"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                mean = state["mean"] / (1 - first ** state["step"])
                square = state["square"] / (1 - second ** state["step"])
                update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * p
                p.sub_(update * (group["lr"] * _compute_trust_ratio(p, update)))
        return loss


class LARS(Optimizer):
    """SGD with momentum that scales the learning rate of each parameter by parameter norm / gradient norm.

    You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017), section 4. 1-D parameters, such
    as biases and norms, and groups with ``trust=0`` use the plain learning rate.

    Args:
        trust: Trust coefficient: the norm of an update divided by the parameter norm, at a learning rate of 1.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        eps: float = 1e-8,
    ) -> None:
        _check_positive(lr=lr, eps=eps)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "eps": eps}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimizer step. Communicates nothing."""
        loss = _run_closure(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, rate = self.state[p], group["lr"]
                if p.dim() > 1 and group["trust"]:
                    decayed = p.grad.norm() + group["weight_decay"] * p.norm() + group["eps"]
                    rate = rate * torch.where(p.norm() > 0, group["trust"] * p.norm() / decayed, 1.0)
                update = (p.grad + group["weight_decay"] * p) * rate
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].mul_(group["momentum"]).add_(update)
                p.sub_(state["momentum"])
        return loss


def _compute_trust_ratio(p: Tensor, update: Tensor) -> Tensor:
    """Return the norm of a parameter divided by the norm of its update, or 1 if either norm is 0."""
    long, short = p.norm(), update.norm()
    return torch.where((long > 0) & (short > 0), long / short, 1.0)


def _run_closure(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ConfigError(
                f"{name} must be greater than 0, but got {value}.", remedy=f"Omit {name} to use the default."
            )


SHAPES, CUT, STEPS, BOUND = ((6, 4), (4, 6)), 10, 3, 1e-6


def _create_test_matrices() -> list[Tensor]:
    return [torch.randn(s, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for s in SHAPES]


@without_fake_tensors()
def needs_full_matrices(optimizer: Optimizer) -> bool:
    """Return whether an optimizer computes different updates if it receives only slices of a matrix.

    To find out, the optimizer runs a few steps on small matrices, with the settings of each parameter group.

    Raises:
        ConfigError: The optimizer fails on these matrices, or its update of one matrix depends on another matrix.
    """
    return any([_group_needs_full_matrices(optimizer, group) for group in optimizer.param_groups])


def _group_needs_full_matrices(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    (first, second), name = _create_test_matrices(), type(optimizer).__name__
    try:
        together = _run_trial_steps(optimizer, group, [first, second])
        again = _run_trial_steps(optimizer, group, [first, second])
        alone = _run_trial_steps(optimizer, group, [first]) + _run_trial_steps(optimizer, group, [second])
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be sharded: a test on small matrices raised {type(error).__name__}: {error!s:.120}.",
            remedy="Use another optimizer, such as AdamW, or train without ZeRO.",
        ) from error
    if (difference := _max_difference_of_lists(together, again)) >= BOUND:
        raise ConfigError(
            f"{name} cannot be sharded, because its updates are random (two runs differ by {difference:.1e}).",
            remedy="Use another optimizer, such as AdamW, or train without ZeRO.",
        )
    if (difference := _max_difference_of_lists(together, alone)) >= BOUND:
        raise ConfigError(
            f"{name} cannot be sharded, because its update of one parameter depends on other parameters (difference: "
            f"{difference:.1e}).",
            remedy="Use another optimizer, such as AdamW, or train without ZeRO.",
        )
    try:
        slices = _run_trial_steps(
            optimizer, group, [first.flatten()[:CUT], first.flatten()[CUT:]], full_matrices=[first]
        )
    except Exception:  # some optimizers accept only matrices
        return True
    return _max_difference_of_lists([torch.cat(slices)], [alone[0].flatten()]) >= BOUND


@without_fake_tensors()
def can_step_params_separately(optimizer: Optimizer) -> bool:
    """Return whether an optimizer computes the same updates if each parameter is updated in a separate step.

    This is False if the optimizer counts steps globally or per parameter group. It is also False if the optimizer has
    step hooks, which would run several times.
    """
    if has_step_hooks(optimizer):
        return False
    values = _create_test_matrices()
    return all(
        _max_difference_of_lists(
            _run_trial_steps(optimizer, group, values),
            _run_trial_steps(optimizer, group, values, steps_params_separately=True),
        )
        == 0
        for group in optimizer.param_groups
    )


def _max_difference_of_lists(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    return max(map(max_abs_difference, first, second))


def _run_trial_steps(
    optimizer: Optimizer,
    group: dict[str, Any],
    values: Sequence[Tensor],
    full_matrices: Sequence[Tensor] | None = None,
    *,
    steps_params_separately: bool = False,
) -> list[Tensor]:
    """Run a few steps of a copied optimizer on small test matrices, and return the updated matrices.

    Args:
        full_matrices: The matrices of which ``values`` are slices. Slices of their gradients are used.
    """
    params = [nn.Parameter(value.clone()) for value in values]
    tried = _copy_optimizer(optimizer, group, params)
    for step in range(STEPS):
        grads = [value.roll(step + 1, 0) / (step + 2) for value in full_matrices or values]
        if full_matrices is not None:
            grads = list(torch.cat([g.flatten() for g in grads]).split([value.numel() for value in values]))
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        for turn in [[param] for param in params] if steps_params_separately else [params]:
            tried.param_groups[0]["params"] = turn
            tried.step()
    return [param.detach() for param in params]


def _copy_optimizer(optimizer: Optimizer, group: dict[str, Any], params: list[nn.Parameter]) -> Any:
    """Copy an optimizer without its state and hooks, and use other parameters in the copy.

    Instance attributes that replace methods are dropped, because a scheduler's ``step`` would step the original.
    """
    kind = type(optimizer)
    own = {k: v for k, v in optimizer.__dict__.items() if not (callable(v) and hasattr(kind, k))}
    hooks: dict[str, Any] = {name: OrderedDict() for name in own if name.startswith("_optimizer_step_")}
    tried: Any = object.__new__(kind)
    here = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in group.items()}  # lr may be a tensor on a GPU
    if "capturable" in here:
        here["capturable"] = False  # not supported on the CPU; does not change the result
    tried.__dict__.update(own, param_groups=[{**here, "params": params}], state=defaultdict(dict), **hooks)
    for param in params:
        if state := get_initial_optimizer_state(optimizer, group, param):
            tried.state[param] = state
    return tried


def compute_state_after_step(optimizer: Optimizer, group: dict[str, Any], value: Tensor) -> dict[str, Any]:
    param = nn.Parameter(value.clone())
    param.grad = torch.ones_like(param)
    tried = _copy_optimizer(optimizer, group, [param])
    tried.step()
    return dict(tried.state[param])


def estimate_state_bytes(optimizer: Optimizer, group: dict[str, Any], param: Tensor, itemsize: int = 0) -> float:
    """Estimate the size in bytes of a parameter's optimizer state, by running one step on a smaller parameter.

    Args:
        itemsize: Bytes per element of the weights that the optimizer updates. By default those of ``param``.
    """
    small = [min(n, 4) for n in param.shape]
    with without_fake_tensors():
        state = compute_state_after_step(optimizer, group, torch.zeros(small))
    found = 0.0
    for x in (x for x in state.values() if isinstance(x, Tensor) and x.dim()):
        full = [n if have == part else have for n, part, have in zip(param.shape, small, x.shape, strict=False)]
        found += prod(full) * ((itemsize or param.element_size()) if x.is_floating_point() else x.element_size())
    return found
