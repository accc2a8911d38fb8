"""HybridAdam: Adam on both sides of an offload at the same time."""

from __future__ import annotations

from typing import Any

from torch.optim import Adam

from shardformer.optim.settings import FREE


class HybridAdam(Adam):
    """torch's fused Adam, of which ``zero`` with ``offload`` keeps as many states on the GPU as there is room for.

    The first step has all of them on the host. What it left free of the GPU, states move to; from then on both sides
    update at the same time. Without a GPU, and without ``offload``, it is the fused Adam. Any other optimizer may be
    cut so, with ``Offload("cpu", on_device=...)``.

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
        on_device: float | str = FREE,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=decoupled_weight_decay
        )
        has_gpu = any(p.is_cuda for group in self.param_groups for p in group["params"])
        self.on_device = 0.0 if on_device == FREE and not has_gpu else on_device
