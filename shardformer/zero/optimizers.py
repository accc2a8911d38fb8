"""HybridAdam, and the layer-wise optimizers LAMB and LARS."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from shardformer.errors import ConfigError
from shardformer.offload.host import FREE_MEMORY


class HybridAdam(Adam):
    """torch's fused Adam. ``shard_optimizer`` with ``offload`` keeps as many of its states on the GPU as fit.

    The first step has all of them on the host. What it left free of the GPU, states move to; from then on both sides
    update at the same time. Without a GPU, and without ``offload``, it is the fused Adam. Any other optimizer may be
    cut so, with ``OffloadConfig("cpu", on_device=...)``.

    Args:
        decoupled_weight_decay: that of AdamW; False: that of Adam.
        on_device: "free", or the share of the numbers whose states stay on the device.
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
    """Adam whose step is as long, relative to the parameter, as the learning rate says.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2020), algorithm 2.

    Args:
        lr: the length of a step over the length of the parameter.
        betas: how much of the mean of the gradients, and of their squares, stays at each step.
        weight_decay: is added to the direction of the step, and so is part of its length.
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
        """One step. Communicates nothing."""
        loss = _loss_of(closure)
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
                p.sub_(update * (group["lr"] * _ratio(p, update)))
        return loss


class LARS(Optimizer):
    """SGD with momentum whose rate is scaled, for each parameter, by its length over that of its gradient.

    You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017), section 4. Parameters with one
    dim, and all of a group with ``trust=0``, take the plain rate, as biases and norms do there.

    Args:
        trust: how long a step may be over the length of the parameter, at a learning rate of 1.
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
        """One step. Communicates nothing."""
        loss = _loss_of(closure)
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


def _ratio(p: Tensor, update: Tensor) -> Tensor:
    """The length of a parameter over that of its update; 1 where either is 0."""
    long, short = p.norm(), update.norm()
    return torch.where((long > 0) & (short > 0), long / short, 1.0)


def _loss_of(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _check_positive(**given: float) -> None:
    for name, value in given.items():
        if not value > 0:
            raise ConfigError(f"{name}={value}", rule="It is more than 0", remedy="Leave it out for the usual one")
