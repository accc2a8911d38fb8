"""``shardformer check``: is this machine ready, and what would make it more so?"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardformer.errors import WorkerError

TIMEOUT_S = 60.0
TESTED = {"python": ((3, 11), (3, 13)), "torch": ((2, 11), (2, 14)), "transformers": ((5, 17), (5, 24))}
"""The oldest and the newest minor version in docs/versions.md."""
_OPTIONAL_PACKAGES = {
    # package: (module, what it brings, the command that brings it)
    "flash-attn": ("flash_attn", "flash attention kernels on CUDA", "pip install flash-attn --no-build-isolation"),
    "matplotlib": ("matplotlib", "pictures of memory and schedules", "pip install matplotlib"),
    "tensorboard": ("tensorboard", "training curves", "pip install tensorboard"),
    "timm": ("timm", "vision models beside those of transformers", "pip install 'shardformer[timm]'"),
}
_BACKENDS: dict[str, tuple[Literal["missing", "failed"], str]] = {
    # backend: (what it is not to have it, how to have it)
    "gloo": ("failed", "install a build of torch with gloo (those of pytorch.org have it)"),
    "nccl": ("missing", "install a CUDA build of torch (needed only with GPUs)"),
    "mpi": ("missing", "build torch from source with MPI (rarely wanted)"),
}


@dataclass(frozen=True)
class CheckResult:
    """One line of the table. Only a ``failed`` finding prevents training.

    ``missing`` is optional, and ``untested`` a version that ShardFormer supports and was not tested with.
    """

    group: Literal["versions", "devices", "backends", "optional"]
    name: str
    status: Literal["ok", "missing", "untested", "failed"]
    value: str
    remedy: str = ""


def check(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Show versions, devices, backends and optional parts, and try two processes that talk."""
    findings = [*_versions(), *_devices(), *_backends(), _all_reduce(), *_optional_parts()]
    ready = all(finding.status != "failed" for finding in findings)
    if as_json:
        print(json.dumps({"ready": ready, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print_table(findings, ready)
    if not ready:
        raise typer.Exit(1)


def _versions() -> list[CheckResult]:
    findings = [
        CheckResult("versions", "shardformer", "ok", version("shardformer")),
        _version("python", platform.python_version(), "install Python 3.11 or newer"),
    ]
    for name, module in (("torch", "torch"), ("transformers", "transformers.modeling_utils")):
        remedy = f"pip install '{name}>={_minor(TESTED[name][0])}'"
        try:
            importlib.import_module(module)
            found = version(name)
        except Exception as error:  # A broken installation raises whatever it likes, and is what we look for.
            what = " ".join(str(error).split())
            findings.append(CheckResult("versions", name, "failed", f"{type(error).__name__}: {what}", remedy))
            continue
        findings.append(_version(name, found, remedy))
    return findings


def _version(name: str, found: str, remedy: str) -> CheckResult:
    """``failed`` if it is older than what is supported, ``untested`` if it is newer than what was tested."""
    major, minor = (int(part) for part in found.split(".")[:2])
    oldest, newest = TESTED[name]
    if (major, minor) < oldest:
        return CheckResult("versions", name, "failed", found, remedy)
    if (major, minor) > newest:
        note = f"{found} is newer than the tested versions, {_minor(oldest)} to {_minor(newest)}; it may work as well"
        return CheckResult("versions", name, "untested", found, note)
    return CheckResult("versions", name, "ok", found)


def _minor(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _devices() -> list[CheckResult]:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    findings = [CheckResult("devices", "CPU", "ok", f"{num_cores} cores")]
    try:
        import torch
    except ImportError:
        return findings
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        memory_gib = properties.total_memory / 2**30
        findings.append(CheckResult("devices", f"cuda:{i}", "ok", f"{properties.name}, {memory_gib:.0f} GiB"))
    if len(findings) == 1:
        findings.append(CheckResult("devices", "GPU", "missing", "none; training runs on the CPU"))
    return findings


def _backends() -> list[CheckResult]:
    try:
        from torch import distributed
    except ImportError:
        return []
    findings = []
    for name, (status, remedy) in _BACKENDS.items():
        if distributed.is_available() and getattr(distributed, f"is_{name}_available")():
            findings.append(CheckResult("backends", name, "ok", "available"))
        else:
            findings.append(CheckResult("backends", name, status, "not in this torch", remedy))
    return findings


def _all_reduce() -> CheckResult:
    name = "all-reduce of 1 MB, 2 processes"
    try:
        milliseconds = measure_all_reduce()
    except WorkerError as error:
        remedy = "See whether a firewall or container blocks the loopback device; GLOO_SOCKET_IFNAME=lo chooses it"
        return CheckResult("backends", name, "failed", error.what, remedy)
    return CheckResult("backends", name, "ok", f"{milliseconds:.2f} ms over gloo")


def measure_all_reduce(num_processes: int = 2, timeout_s: float = TIMEOUT_S) -> float:
    """Milliseconds of one all-reduce of 1 MB over gloo, the median of 20, in processes of our own.

    Raises WorkerError when a process fails or the time is over; no process is left behind.
    """
    code = "import sys; from shardformer.cli.check import probe; probe(*map(int, sys.argv[1:3]), sys.argv[3])"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="shardformer-check-") as folder:
        store, deadline = str(Path(folder, "store")), time.monotonic() + timeout_s
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), str(num_processes), store],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(num_processes)
        ]
        try:
            outputs = [process.communicate(timeout=max(0.1, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired as error:
            raise WorkerError(
                f"{num_processes} processes did not finish an all-reduce in {timeout_s:g} s",
                rule="Processes of one machine talk over its loopback device",
                remedy="Check firewall and container settings",
            ) from error
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
    for rank, (process, (_, stderr)) in enumerate(zip(processes, outputs)):
        if process.returncode != 0:
            last_line = (stderr.strip().splitlines() or ["no message"])[-1]
            raise WorkerError(
                f"Rank {rank} of an all-reduce ended with exit code {process.returncode}: {last_line}",
                rule="Both processes of the check end well",
                remedy="Run it alone to see more: shardformer check",
            )
    return float(outputs[0][0].split()[-1])


def probe(rank: int, num_processes: int, store: str) -> None:
    """What each process of the check runs: all-reduces whose sum is known, and the median time on standard output."""
    import datetime
    from statistics import median

    import torch
    from torch import distributed

    from shardformer.mesh.init_distributed import destroy_process_group

    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_processes, timeout=timeout
    )
    times_s = []
    for _ in range(25):
        numbers = torch.full((250_000,), float(rank + 1))
        distributed.barrier()
        start = time.perf_counter()
        distributed.all_reduce(numbers)
        times_s.append(time.perf_counter() - start)
        if not bool((numbers == num_processes * (num_processes + 1) / 2).all()):
            raise ArithmeticError(f"the sum over ranks is wrong: {numbers[0].item()}")
    destroy_process_group()
    print(1e3 * median(times_s[5:]))


def _optional_parts() -> list[CheckResult]:
    findings = []
    for package, (module, brings, command) in _OPTIONAL_PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            findings.append(CheckResult("optional", package, "missing", brings, command))
            continue
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "found"
        findings.append(CheckResult("optional", package, "ok", found))
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    compiler = next((path for name in candidates if (path := shutil.which(name))), None)
    if compiler:
        findings.append(CheckResult("optional", "C++ compiler", "ok", compiler))
    else:
        command = "xcode-select --install" if sys.platform == "darwin" else "apt-get install g++"
        findings.append(
            CheckResult("optional", "C++ compiler", "missing", "torch.compile for enable_jit_fused", command)
        )
    return findings


def _print_table(findings: list[CheckResult], ready: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    marks = {"ok": "[green]ok[/]", "missing": "[yellow]not here (optional)[/]", "failed": "[red]failed[/]"}
    marks["untested"] = "[yellow]not tested[/]"
    table = Table(title="shardformer check")
    for column in ("", "what", "", "value"):
        table.add_column(column, overflow="fold")
    for group, members in groupby(findings, key=lambda finding: finding.group):
        for number, finding in enumerate(members):
            table.add_row("" if number else group, finding.name, marks[finding.status], escape(finding.value))
        table.add_section()
    console = Console()
    console.print(table)
    for finding in findings:
        if finding.remedy:
            # One line each, unwrapped, so that the command can be copied.
            console.print(f"{finding.name}: {finding.remedy}", soft_wrap=True, markup=False, highlight=False)
    console.print("Ready to train." if ready else "Not ready: see what failed above.")
