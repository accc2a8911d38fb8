"""Plain against sharded, number by number."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from shardformer.verify.report import Bounds, Difference, Report
from shardformer.verify.run import MAX_NORM, Job, Trajectory
from shardformer.verify.training import ADAPTIVE_BOUND, LEARNING_RATE

NOTHING = Difference(0.0, "", -1.0)
"""Before anything was compared: what is then found equal to the bit is still said to be somewhere."""

NOISE_FACTOR = 4.0
"""How many times its own noise a difference may be, where the noise is wider than the bound."""


def compare(job: Job, plain: Trajectory, sharded: Trajectory, name: str, layout: str) -> Report:
    bounds = job.bounds
    if job.training.is_adaptive and job.training.dtype is None:
        bounds = replace(bounds, loss=ADAPTIVE_BOUND, gradient=ADAPTIVE_BOUND)
    loss = _worst_scalar(plain.losses, sharded.losses, bounds.loss)
    norm = _worst_scalar(plain.norms, sharded.norms, bounds.gradient)
    gradient, missing = _worst_gradient(plain, sharded, bounds)
    weight, gone = _worst_weight(job, plain, sharded, bounds)
    options = [k.removeprefix("enable_") for k, v in job.config.items() if v is True]
    return Report(
        name,
        ", ".join([layout, *options]),
        job.steps,
        str(job.computes_in).removeprefix("torch."),
        bounds,
        loss,
        gradient,
        weight,
        norm,
        sharded.collectives,
        list(zip(plain.losses, sharded.losses, strict=True)),
        missing=missing + [f"{name} (weight)" for name in gone],
    )


def _worst_scalar(plain: list[float], sharded: list[float], bound: float) -> Difference:
    found = []
    for step, (a, b) in enumerate(zip(plain, sharded, strict=True)):
        relative = abs(a - b) / max(abs(a), 1e-30) if a == a and b == b else float("inf")
        found.append(Difference(relative, f"step {step}", relative / bound))
    return max(found, key=lambda d: d.used)


def _worst_gradient(plain: Trajectory, sharded: Trajectory, bounds: Bounds) -> tuple[Difference, list[str]]:
    worst, missing = NOTHING, []
    for step, (ours, theirs) in enumerate(zip(sharded.grads, plain.grads, strict=True)):
        largest = max((float(g.abs().max()) for g in theirs.values() if g is not None and g.numel()), default=0.0)
        for name in {**theirs, **ours}:
            a, b = theirs.get(name), ours.get(name)
            if a is None or b is None:
                if a is not b:
                    missing.append(f"{name} (step {step})")
                continue
            noise = NOISE_FACTOR * (plain.noise.get(name, 0.0) + bounds.eps * largest)
            worst = _worse(worst, a, b, a, bounds.gradient, noise, f"{name}, step {step}")
    return worst, missing


def _worst_weight(job: Job, plain: Trajectory, sharded: Trajectory, bounds: Bounds) -> tuple[Difference, list[str]]:
    """The differences against how far each weight has moved, not against the weight."""
    worst = NOTHING
    gone = [name for name in {**plain.after, **sharded.after} if (name in plain.after) != (name in sharded.after)]
    steps = len(plain.losses)
    for name, after in plain.after.items():
        if name in gone or (job.training.is_adaptive and _is_rounding(plain, name)):
            continue
        moved = after - plain.before[name]
        rounding = bounds.eps * float(after.abs().max()) if after.numel() else 0.0
        scale = LEARNING_RATE * steps * steps * min(1.0, MAX_NORM / max(min(plain.norms), 1e-30))
        noise = NOISE_FACTOR * (rounding + scale * plain.noise.get(name, 0.0) + scale * bounds.eps)
        worst = _worse(worst, after, sharded.after[name], moved, bounds.gradient, noise, name)
    return worst, gone


def _is_rounding(plain: Trajectory, name: str) -> bool:
    """Whether a gradient is 0 but for rounding, as that of a bias of keys: an adaptive step makes it as long as any."""
    grads = [grad for step in plain.grads if (grad := step.get(name)) is not None and grad.numel()]
    return plain.noise.get(name, 0.0) > 1e-3 * max((float(grad.abs().max()) for grad in grads), default=0.0)


def _worse(worst: Difference, a: Tensor, b: Tensor, size: Tensor, bound: float, noise: float, where: str) -> Difference:
    if a.shape != b.shape:
        return Difference(float("inf"), f"{where}: {tuple(b.shape)} for {tuple(a.shape)}", float("inf"))
    if not a.numel():
        return worst
    difference, magnitude = float((a - b).abs().max()), float(size.abs().max())
    allowed = bound * magnitude + noise
    used = difference / allowed if allowed > 0 else (0.0 if difference == 0 else float("inf"))
    if difference != difference:
        used = float("inf")
    if used <= worst.used:
        return worst
    return Difference(difference / max(magnitude, noise / bound, 1e-300), where, used)
