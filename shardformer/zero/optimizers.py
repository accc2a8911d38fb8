"""Optimizers for sharded models: HybridAdam, and the layer-wise optimizers LAMB and LARS."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from shardformer.errors import ConfigError
from shardformer.offload.host import FREE_MEMORY


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
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
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
    """SGD with momentum that scales each parameter's learning rate by the ratio of parameter norm to gradient norm.

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


def _compute_trust_ratio(param: Tensor, update: Tensor) -> Tensor:
    """Compute the ratio of the parameter norm to the update norm, or 1 if either norm is 0."""
    long, short = param.norm(), update.norm()
    return torch.where((long > 0) & (short > 0), long / short, 1.0)


def _run_closure(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _check_positive(**options: float) -> None:
    for name, value in options.items():
        if not value > 0:
            raise ConfigError(
                f"{name} must be greater than 0, but got {value}.", remedy=f"Omit {name} to use the default."
            )
