"""The ``shardformer check`` command, which reports whether this machine is ready to train, and what is missing."""

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

from shardformer.errors import OLDEST_RELEASES, ConfigError, WorkerError, check_minimum_library_version

TIMEOUT_S = 60.0
TESTED = {"python": ((3, 11), (3, 13)), "torch": ((2, 11), (2, 14)), "transformers": ((5, 17), (5, 24))}
"""Oldest and newest tested minor version, as in docs/versions.md."""
_OPTIONAL_PACKAGES = {
    # package: (module, what it is for, the command to install it)
    "accelerate": ("accelerate", "integrations.accelerate", "pip install 'shardformer[accelerate]'"),
    "bitsandbytes": ("bitsandbytes", "quantized models (QLoRA)", "pip install 'shardformer[qlora]'"),
    "datasets": ("datasets", "data.format = 'datasets', and parquet files", "pip install 'shardformer[data]'"),
    "flash-attn": ("flash_attn", "flash attention kernels on CUDA", "pip install flash-attn --no-build-isolation"),
    "lightning": ("lightning", "integrations.lightning", "pip install 'shardformer[lightning]'"),
    "matplotlib": ("matplotlib", "plots of metrics and schedules", "pip install 'shardformer[plot]'"),
    "mlflow": ("mlflow", "the hook mlflow", "pip install 'shardformer[mlflow]'"),
    "peft": ("peft", "adapters (LoRA)", "pip install 'shardformer[peft]'"),
    "pillow": ("PIL", "image data", "pip install 'shardformer[data]'"),
    "ray": ("ray", "Ray Train", "pip install 'shardformer[ray]'"),
    "scikit-learn": ("sklearn", "the hook metrics", "pip install 'shardformer[metrics]'"),
    "tensorboard": ("tensorboard", "the hook tensor_board", "pip install 'shardformer[tensorboard]'"),
    "timm": ("timm", "vision models of timm", "pip install 'shardformer[timm]'"),
    "trl": ("trl", "integrations.trl", "pip install 'shardformer[trl]'"),
    "wandb": ("wandb", "the hook wandb", "pip install 'shardformer[wandb]'"),
}
_BACKENDS: dict[str, tuple[Literal["missing", "failed"], str]] = {
    # backend: (status without it, how to install it)
    "gloo": ("failed", "install a build of torch with gloo, such as those of pytorch.org"),
    "nccl": ("missing", "install a CUDA build of torch (needed only for GPUs)"),
}

_GROUP_TITLES = {
    "versions": "Versions", "devices": "Devices", "backends": "Communication", "optional": "Optional packages",
}  # fmt: skip


@dataclass(frozen=True)
class EnvironmentCheckResult:
    """Result of one environment check, such as the version of torch. Only the status ``failed`` prevents training.

    ``missing`` is for optional parts, ``untested`` for versions that are newer than the tested ones, and for optional
    packages that are too old.
    """

    group: Literal["versions", "devices", "backends", "optional"]
    name: str
    status: Literal["ok", "missing", "untested", "failed"]
    value: str
    remedy: str = ""


def check(as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False) -> None:
    """Check whether this machine is ready for distributed training.

    Shows the versions, devices, communication backends and optional packages, and runs a two-process all-reduce.
    """
    findings = [
        *_check_versions(),
        *_check_devices(),
        *_check_communication_backends(),
        _check_all_reduce(),
        *_check_optional_packages(),
    ]
    ready = all(finding.status != "failed" for finding in findings)
    if as_json:
        print(json.dumps({"ready": ready, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print_results_table(findings, ready)
    if not ready:
        raise typer.Exit(1)


def _check_versions() -> list[EnvironmentCheckResult]:
    findings = [
        EnvironmentCheckResult("versions", "shardformer", "ok", version("shardformer")),
        _check_library_version("python", platform.python_version(), "install Python 3.11 or newer"),
    ]
    for name, module in (("torch", "torch"), ("transformers", "transformers.modeling_utils")):
        remedy = f"pip install '{name}>={_format_version(TESTED[name][0])}'"
        try:
            importlib.import_module(module)
            found = version(name)
        except Exception as error:  # a broken installation may raise anything
            what = " ".join(str(error).split())
            findings.append(
                EnvironmentCheckResult("versions", name, "failed", f"{type(error).__name__}: {what}", remedy)
            )
            continue
        findings.append(_check_library_version(name, found, remedy))
    return findings


def _check_library_version(library_name: str, installed_version: str, remedy: str) -> EnvironmentCheckResult:
    """Check whether the installed version of a library was tested. Older ones fail, newer ones are ``untested``."""
    major, minor = (int(part) for part in installed_version.split(".")[:2])
    oldest, newest = TESTED[library_name]
    if (major, minor) < oldest:
        return EnvironmentCheckResult("versions", library_name, "failed", installed_version, remedy)
    if (major, minor) > newest:
        tested = f"{_format_version(oldest)} to {_format_version(newest)}"
        note = f"{installed_version} is newer than the tested versions, {tested}, and may work"
        return EnvironmentCheckResult("versions", library_name, "untested", installed_version, note)
    return EnvironmentCheckResult("versions", library_name, "ok", installed_version)


def _format_version(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _check_devices() -> list[EnvironmentCheckResult]:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = _get_total_and_available_host_memory_gib()
    size = "" if memory is None else f", {memory[0]:.0f} GiB memory, {memory[1]:.0f} GiB available"
    findings = [EnvironmentCheckResult("devices", "CPU", "ok", f"{num_cores} cores{size}")]
    try:
        import torch
    except ImportError:
        return findings
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        free, total = (number / 2**30 for number in torch.cuda.mem_get_info(i))
        size = f"{total:.0f} GiB memory, {free:.0f} GiB free"
        findings.append(EnvironmentCheckResult("devices", f"cuda:{i}", "ok", f"{properties.name}, {size}"))
    if len(findings) == 1:
        findings.append(EnvironmentCheckResult("devices", "GPU", "missing", "none; training runs on the CPU"))
    return findings


def _get_total_and_available_host_memory_gib() -> tuple[float, float] | None:
    """Return the total and the available host memory in GiB, or None if the operating system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        sizes_kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
        return sizes_kib["MemTotal"] / 2**20, sizes_kib["MemAvailable"] / 2**20
    except (OSError, KeyError, ValueError):
        return None


def _check_communication_backends() -> list[EnvironmentCheckResult]:
    try:
        from torch import distributed
    except ImportError:
        return []
    findings = []
    for name, (status, remedy) in _BACKENDS.items():
        if distributed.is_available() and getattr(distributed, f"is_{name}_available")():
            findings.append(EnvironmentCheckResult("backends", name, "ok", "available"))
        else:
            findings.append(EnvironmentCheckResult("backends", name, status, "not in this torch", remedy))
    return findings


def _check_all_reduce() -> EnvironmentCheckResult:
    name = "all-reduce, 2 processes"
    try:
        milliseconds = measure_all_reduce_latency_ms()
    except WorkerError as error:
        remedy = "Check if a firewall or container blocks the loopback device; GLOO_SOCKET_IFNAME=lo selects it"
        return EnvironmentCheckResult("backends", name, "failed", error.what, remedy)
    return EnvironmentCheckResult("backends", name, "ok", f"{milliseconds:.2f} ms for 1 MB over gloo")


def measure_all_reduce_latency_ms(num_processes: int = 2, timeout_s: float = TIMEOUT_S) -> float:
    """Measure the median time in milliseconds of a 1 MB all-reduce between new processes with gloo.

    Raises WorkerError if a process fails or times out. All processes are ended.
    """
    code = "import sys; from shardformer.cli import check; check.time_all_reduce(*map(int, sys.argv[1:3]), sys.argv[3])"
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
                f"{num_processes} processes did not finish an all-reduce within {timeout_s:g} s.",
                remedy="Check whether a firewall or container blocks the loopback network interface of this machine.",
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
                f"Rank {rank} exited with code {process.returncode} during an all-reduce: {last_line}.",
                remedy="Fix this error, and run shardformer check again.",
            )
    return float(outputs[0][0].split()[-1])


def time_all_reduce(rank: int, num_processes: int, store_path: str) -> None:
    """Run several all-reduces with the other ranks, verify the sums, and print the median time in milliseconds."""
    import datetime
    from statistics import median

    import torch
    from torch import distributed

    from shardformer.mesh.init_distributed import destroy_process_group

    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store_path}", rank=rank, world_size=num_processes, timeout=timeout
    )
    times_s, expected = [], num_processes * (num_processes + 1) / 2
    for _ in range(25):
        numbers = torch.full((250_000,), float(rank + 1))
        distributed.barrier()
        start = time.perf_counter()
        distributed.all_reduce(numbers)
        times_s.append(time.perf_counter() - start)
        if not bool((numbers == expected).all()):
            total = numbers[0].item()
            raise ArithmeticError(f"All-reduce returned the wrong sum {total} instead of {expected}.")
    destroy_process_group()
    print(1e3 * median(times_s[5:]))


def _check_optional_packages() -> list[EnvironmentCheckResult]:
    findings = []
    for package, (module, purpose, command) in _OPTIONAL_PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            findings.append(EnvironmentCheckResult("optional", package, "missing", purpose, command))
            continue
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "found"
        try:
            if package in OLDEST_RELEASES:
                check_minimum_library_version(package, found)
        except ConfigError as error:
            findings.append(EnvironmentCheckResult("optional", package, "untested", error.what, error.remedy))
            continue
        findings.append(EnvironmentCheckResult("optional", package, "ok", found))
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    compiler = next((path for name in candidates if (path := shutil.which(name))), None)
    if compiler:
        findings.append(EnvironmentCheckResult("optional", "C++ compiler", "ok", f"{compiler}, for torch.compile"))
    else:
        command = "xcode-select --install" if sys.platform == "darwin" else "apt-get install g++"
        findings.append(
            EnvironmentCheckResult("optional", "C++ compiler", "missing", "torch.compile and fused_activation", command)
        )
    return findings


def _print_results_table(results: list[EnvironmentCheckResult], is_ready: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    marks = {
        "ok": ("ok", "green"), "missing": ("not found", "yellow"), "untested": ("untested", "yellow"),
        "failed": ("failed", "bold red"),
    }  # fmt: skip
    console = Console(highlight=False)
    width = max(len(finding.name) for finding in results) + 2
    for group, members in groupby(results, key=lambda finding: finding.group):
        console.print(Text(_GROUP_TITLES[group], "bold"))
        for finding in members:
            line = Text(f"  {finding.name:{width}}")
            line.append(f"{marks[finding.status][0]:11}", marks[finding.status][1]).append(finding.value)
            console.print(line, soft_wrap=True)
        console.print()
    remedies = [finding for finding in results if finding.remedy]
    if remedies:
        console.print(Text("How to install what is missing, if you need it" if is_ready else "What to do", "bold"))
    for finding in remedies:
        # not wrapped, so that the command can be copied
        console.print(f"  {finding.name}: {finding.remedy}", soft_wrap=True, markup=False)
    console.print("\nReady to train." if is_ready else "\nNot ready: see the failed checks above.")
