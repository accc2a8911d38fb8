"""``shardformer check``: its results, and exit status 1 for a failed requirement."""

from __future__ import annotations

import json
import re
import time
import tomllib
from pathlib import Path

import pytest
import typer

from shardformer.cli import check as cli_check
from shardformer.cli.check import EnvironmentCheckResult, check, measure_all_reduce_latency_ms
from shardformer.errors import WorkerError


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the all-reduce, so that no processes are started."""
    monkeypatch.setattr(cli_check, "measure_all_reduce_latency_ms", lambda: 0.5)


@pytest.mark.slow
def test_two_processes_run_an_all_reduce() -> None:
    assert 0 < measure_all_reduce_latency_ms() < 10_000


@pytest.mark.slow
def test_a_hanging_all_reduce_is_killed_and_reported() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"did not finish an all-reduce within 0\.2 s"):
        measure_all_reduce_latency_ms(timeout_s=0.2)
    assert time.monotonic() - start < 20


@pytest.mark.slow
def test_a_failed_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-device")
    with pytest.raises(WorkerError, match=r"Rank \d exited with code 1 during an all-reduce"):
        measure_all_reduce_latency_ms()


@pytest.mark.usefixtures("quick")
def test_json_has_all_results(capsys: pytest.CaptureFixture[str]) -> None:
    check(as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["ready"] is True
    found = {finding["name"]: finding for finding in report["findings"]}
    wanted = {"shardformer", "python", "torch", "transformers", "CPU", "gloo", "nccl", "C++ compiler"}
    groups = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    users = {
        name: each for name, each in groups["optional-dependencies"].items() if name not in ("test", "dist", "docs")
    }
    extras = {re.split(r"[\[>]", package)[0] for packages in users.values() for package in packages}
    assert wanted | extras <= found.keys()
    assert re.search(r"GiB memory, \d+ GiB available", found["CPU"]["value"]) or not Path("/proc/meminfo").exists()
    for finding in found.values():
        assert finding["value"]
        if finding["group"] == "optional" and finding["status"] == "missing":
            assert finding["remedy"]


@pytest.mark.usefixtures("quick")
def test_the_table_reports_that_the_machine_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    check(as_json=False)
    out = capsys.readouterr().out
    assert "all-reduce" in out and "0.50 ms for 1 MB over gloo" in out
    assert out.strip().endswith("Ready to train.")
    assert "not found" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_failed_requirement_exits_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hang() -> float:
        raise WorkerError("2 processes [x] did not finish.", rule="They talk.", remedy="Look at the firewall.")

    monkeypatch.setattr(cli_check, "measure_all_reduce_latency_ms", hang)
    with pytest.raises(typer.Exit) as caught:
        check(as_json=False)
    assert caught.value.exit_code == 1
    out = capsys.readouterr().out
    assert "failed" in out and "GLOO_SOCKET_IFNAME" in out and "Not ready" in out


@pytest.mark.usefixtures("quick")
def test_an_old_version_fails_with_the_command_to_update(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cli_check.version
    monkeypatch.setattr(cli_check, "version", lambda name: "2.10.1+cpu" if name == "torch" else real(name))
    torch = next(finding for finding in cli_check._check_versions() if finding.name == "torch")
    assert torch == EnvironmentCheckResult("versions", "torch", "failed", "2.10.1+cpu", "pip install 'torch>=2.11'")


def test_a_missing_optional_package_has_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_check.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cli_check.shutil, "which", lambda name: None)
    findings = cli_check._check_optional_packages()
    assert {finding.status for finding in findings} == {"missing"}
    assert all("install" in finding.remedy for finding in findings)


def test_an_optional_package_that_is_too_old_has_the_command_to_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_check.importlib.util, "find_spec", lambda name: object() if name == "peft" else None)
    monkeypatch.setattr(cli_check, "version", lambda name: "0.17.1")
    peft = next(finding for finding in cli_check._check_optional_packages() if finding.name == "peft")
    assert peft.status == "untested" and "peft 0.17.1" in peft.value
    assert peft.remedy == "Run pip install --upgrade 'peft>=0.18'"


def with_version(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    found = cli_check.version
    monkeypatch.setattr(cli_check, "version", lambda asked: value if asked == name else found(asked))
    if name == "python":
        monkeypatch.setattr(cli_check.platform, "python_version", lambda: value)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("name", "value", "tested"),
    [("python", "3.99.0", "3.11 to"), ("torch", "2.99.0a0+git", "2.11 to"), ("transformers", "6.0.0.dev0", "5.17 to")],
)
def test_a_version_newer_than_the_tested_ones_is_untested(
    name: str, value: str, tested: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_version(monkeypatch, name, value)
    check(as_json=False)
    out = capsys.readouterr().out
    assert f"{name}: {value} is newer than the tested versions, {tested}" in out
    assert out.strip().endswith("Ready to train.")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("name", "value"), [("torch", "2.10.1"), ("transformers", "4.57.0")])
def test_an_unsupported_version_exits_with_status_1(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_version(monkeypatch, name, value)
    with pytest.raises(typer.Exit):
        check(as_json=False)
    assert f"pip install '{name}>=" in capsys.readouterr().out
