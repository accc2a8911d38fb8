"""Runs the checks of one GPU in order, each with its own time limit, and writes a table and ``gpu.json``."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardformer.errors import ShardFormerError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.verify.train_both import VerifyJob
from shardformer.verify.verification import run_verify_job
from tests.gpu.checks import ONE_RANK
from tests.gpu.ranks import two_ranks
from tests.gpu.throughput import measure
from tests.pools import WorkerPools

LIMIT_S = 285.0
"""Time limit of all checks together."""
THROUGHPUT_S = 60.0
GRACE_S = 2.0
"""Time for a worker's error to arrive before the check is stopped from outside."""
LEAST_S = 5.0
"""Minimum remaining time to start a check."""
OF_A_GPU = ("memory",)
"""Checks that need a GPU."""


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        ranks: processes that it takes.
        limit_s: seconds after which it failed, the start of its processes included.
        run: takes the pool of its processes; returns a summary and figures, and raises if the check fails.
    """

    name: str
    ranks: int
    limit_s: float
    run: Callable[[WorkerPool], tuple[str, Mapping[str, float]]]


@dataclass
class Result:
    """The result of a check: ``outcome`` is "passed", "failed" or "not run"."""

    name: str
    outcome: str
    said: str
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)


def checks_of(device: str, **throughput: Any) -> list[Check]:
    """All checks, the throughput last."""
    is_gpu = torch.device(device).type == "cuda"
    alone = [Check(name, 1, 60.0, _alone(name, device)) for name in ONE_RANK if is_gpu or name not in OF_A_GPU]
    together = [Check(f"two ranks: {name}", 2, 45.0, _together(job)) for name, job in two_ranks(device).items()]
    seconds = throughput.pop("seconds", THROUGHPUT_S)
    return [*alone, *together, Check("throughput", 1, seconds + 40.0, _throughput(device, seconds, throughput))]


def _alone(name: str, device: str) -> Callable[[WorkerPool], tuple[str, Mapping[str, float]]]:
    return lambda pool: (pool.run(ONE_RANK[name], device)[0], {})


def _together(job: VerifyJob) -> Callable[[WorkerPool], tuple[str, Mapping[str, float]]]:
    def run(pool: WorkerPool) -> tuple[str, Mapping[str, float]]:
        report = pool.run(run_verify_job, job)[0]
        assert report is not None
        if not report.passed:
            raise AssertionError(str(report))
        worst = max(report.loss.relative, report.gradient.relative, report.weight.relative)
        return f"off by at most {worst:.1e}", {"difference": worst}

    return run


def _throughput(
    device: str, seconds: float, size: dict[str, Any]
) -> Callable[[WorkerPool], tuple[str, Mapping[str, float]]]:
    def run(pool: WorkerPool) -> tuple[str, Mapping[str, float]]:
        found = pool.run(measure, device, seconds, **size)[0]
        said = f"{found['engine']:,.0f} tokens/s through the engine, {found['plain']:,.0f} plain: {found['ratio']:.2f}"
        return f"{said} ({found['parameters'] / 1e6:.0f} M parameters, bf16)", found

    return run


def run_checks(checks: Sequence[Check], limit_s: float = LIMIT_S, say: Callable[[str], None] = print) -> list[Result]:
    """Runs each check within its limit and all of them within ``limit_s``; a failed check does not stop the others."""
    end, results = time.monotonic() + limit_s, list[Result]()
    with WorkerPools(threads=4) as pools:
        for check in checks:
            left = min(check.limit_s, end - time.monotonic())
            results.append(_run(check, pools(check.ranks), left))
            say(f"{results[-1].outcome:8} {check.name} ({results[-1].seconds:.1f} s): {results[-1].said}")
    return results


def _run(check: Check, pool: WorkerPool, left: float) -> Result:
    if left < LEAST_S:
        return Result(check.name, "not run", "no time was left")
    start = time.monotonic()
    try:
        with _at_most(left + GRACE_S), pool.with_timeout(left):
            said, figures = check.run(pool)
        outcome = "passed"
    except (ShardFormerError, AssertionError, RuntimeError, TimeoutError) as error:
        said, figures, outcome = str(error).strip(), {}, "failed"
    return Result(check.name, outcome, said, time.monotonic() - start, figures)


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after ``seconds``. The limit of a pool does not cover the start of its processes."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def table(results: Sequence[Result], device: str) -> str:
    """The results as a table."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=f"Checks on {device}")
    for title in ("check", "result", "seconds", "found"):
        shown.add_column(title, justify="right" if title == "seconds" else "left")
    for result in results:
        last = result.said.splitlines()[-1] if result.said else ""
        shown.add_row(result.name, result.outcome, f"{result.seconds:.1f}", last[:200])
    console = Console(width=140, color_system=None)
    with console.capture() as text:
        console.print(shown)
    return text.get()


def write(path: Path, results: Sequence[Result], device: str) -> None:
    """Writes the results with the name of the GPU and the versions."""
    import transformers

    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__}
    seconds = sum(result.seconds for result in results)
    found = {"gpu": device, **versions, "seconds": seconds, "checks": [asdict(result) for result in results]}
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
