"""The three tiers of tests, and the time limit of a test.

    make test-fast   lint, types, and the tests that start no process and derive no policy; run it for every edit
    make test        every feature, every option and every model family at least once, as in CI
    make test-all    every case of every test

Each is a value of pytest's option ``--tier``. Without the option all cases run. Four marks assign a test to tiers:

    @pytest.mark.slow                        # starts processes, or derives a policy, so not in the fast tier
    @pytest.mark.full                        # only in `make test-all`
    @pytest.mark.reduced                     # in `make test`, few cases that cover each value of each parameter
    @pytest.mark.reduced(family=("llama",))  # ... with only these values of the parameter `family`
    @pytest.mark.reduced(cover="mode")       # ... covering only each value of the parameter `mode`
    @pytest.mark.reduced(cover="cell")       # ... covering only each cell of docs/features.md
    @pytest.mark.reduced(one_in=4, first=2)  # in `make test`, every fourth case from the third on
    @pytest.mark.reduced(at_most=2)          # in `make test`, the two of these cases that cover most values
    @pytest.mark.reduced(at_most=2, keep=("llama-2",))  # ... and the cases with these ids, which find other faults
    @pytest.mark.above_budget("reason")      # may exceed the limit BUDGET_S

Tests that request a pool of workers are slow without a mark. In the fast tier, other tests fail if they start a process
or derive a policy.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from shardformer.local_ranks.worker_pool import start_fork_server
from tests import scripts
from tests.feature_table import case_of

LIMIT_MIN = {"fast": 2, "test": 12, "all": 90}
"""Time limit of each tier in minutes, on two idle cores. That of the fast tier excludes the installation."""
TIERS = tuple(LIMIT_MIN)
BUDGET_S = 10.0
"""Time limit of a test. It grows with the load of the machine, and on a slow machine."""
LOOP_S = 0.02
"""Time of a loop of a million additions on the machine of these limits."""
NUM_SLOWEST = 10
PRELOADED = ("torch", "tests.preload")
"""Modules that the workers of pools find imported."""
STARTS_WORKERS = {"pools", "pool", "pool2", "pool4", "timm_pools", "timm_worker", "integrations"}
"""Fixtures that start processes."""
MARKS = (
    "slow: the test starts processes or derives a policy, and is not in the fast tier",
    "full: only `make test-all` runs the test",
    "reduced(**values): the cases that `make test` runs of a parametrised test, see tests/tiers.py",
    "above_budget(reason): the test may take longer than a test's budget",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="all", help="which tests to run, see tests/tiers.py")
    parser.addoption("--no-budget", action="store_true", help="let each test take as long as it needs")


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", mark)
    config.pluginmanager.register(Costs(config), "costs")
    if config.getoption("tier") == "test" and not hasattr(config, "workerinput"):
        scripts.set_up()
        config.add_cleanup(scripts.tear_down)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("tier")
    if tier == "all":
        return
    kept = [item for item in items if not _is_full(item) and (tier == "test" or not _is_slow(item))]
    left_out = _left_out(kept)
    kept = [item for item in kept if item.nodeid not in left_out]
    chosen = {item.nodeid for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = kept


def _is_full(item: pytest.Item) -> bool:
    return item.get_closest_marker("full") is not None


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None or bool(STARTS_WORKERS & set(getattr(item, "fixturenames", ())))


def _left_out(items: Sequence[pytest.Item]) -> set[str]:
    """Return the ids of the cases that the mark ``reduced`` deselects."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("reduced"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    out: set[str] = set()
    for name, group in cases.items():
        mark = group[0].get_closest_marker("reduced")
        assert mark is not None
        options = dict(mark.kwargs)
        keep = set(options.pop("keep", ()))
        kept = _kept([_values_of(item) for item in group], **options)
        ids = [item.nodeid.partition("[")[2].removesuffix("]") for item in group]
        if not keep <= set(ids):
            raise pytest.UsageError(f"{name}: the mark reduced keeps unknown cases {sorted(keep - set(ids))}")
        kept |= {place for place, each in enumerate(ids) if each in keep}
        if not kept:
            raise pytest.UsageError(f"{name}: the mark reduced({mark.kwargs}) leaves no case")
        out |= {item.nodeid for place, item in enumerate(group) if place not in kept}
    return out


def _kept(
    cases: Sequence[dict[str, Any]],
    *,
    one_in: int = 0,
    first: int = 0,
    cover: str = "",
    at_most: int | None = None,
    **limits: Sequence[Any],
) -> set[int]:
    """Return the indices of the cases that the mark ``reduced`` keeps."""
    if one_in:
        return set(range(first, len(cases), one_in)[:at_most])
    allowed = [place for place, case in enumerate(cases) if all(case[name] in limits[name] for name in limits)]
    shown = [{name: value for name, value in cases[p].items() if not cover or name.startswith(cover)} for p in allowed]
    chosen = {id(case) for case in _covering(shown)[:at_most]}
    return {place for place, case in zip(allowed, shown) if id(case) in chosen}


def _values_of(item: pytest.Item) -> dict[str, Any]:
    """Return the parameters of a case, and the cells of docs/features.md that it fills."""
    params: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    plain = (str, int, float, bool, type(None))
    values = {name: value if isinstance(value, plain) else repr(value) for name, value in params.items()}
    case = case_of(item)
    return values | ({} if case is None else {f"cell of {column}": case.family for column in case.columns})


def _covering(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Select few cases that contain each value of each parameter.

    Of the cases that add the same number of new values, the one with the least used values is taken, then the first
    one.
    """
    missing = {(name, value) for case in cases for name, value in case.items()}
    taken: dict[tuple[str, Any], int] = dict.fromkeys(missing, 0)
    chosen: list[dict[str, Any]] = []
    while missing:
        best = max(
            cases, key=lambda case: (len(missing & set(case.items())), -sum(taken[pair] for pair in case.items()))
        )
        chosen.append(best)
        missing -= set(best.items())
        for pair in best.items():
            taken[pair] += 1
    return chosen


@pytest.fixture(scope="session", autouse=True)
def _workers_start_fast(request: pytest.FixtureRequest) -> None:
    """If several processes run tests, start their fork servers before the first pool needs one."""
    if request.config.getoption("tier") != "fast" and hasattr(request.config, "workerinput"):
        start_fork_server(PRELOADED)


@pytest.fixture(autouse=True)
def _no_process_in_the_fast_tier(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.config.getoption("tier") != "fast":
        yield
        return
    with _refusing(request.node.nodeid):
        yield


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Make a test fail if it starts a process or derives a policy."""

    def refuse(what: str) -> Any:
        def refused(*args: Any, **kwargs: Any) -> Any:
            pytest.fail(f"{name} {what}, which takes seconds. Mark the test with pytest.mark.slow.")

        return refused

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", refuse("starts a process"))
        patch.setattr(subprocess.Popen, "__del__", lambda self: None)
        patch.setattr(multiprocessing.process.BaseProcess, "start", refuse("starts a process"))
        patch.setattr("shardformer.discovery.derive_policy.derive_policy_from_forward", refuse("derives a policy"))
        yield


@functools.cache
def slowness() -> float:
    """Return the time of a fixed loop relative to the machine of the limits, at least 1."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        total = 0
        for number in range(10**6):
            total += number
        times.append(time.perf_counter() - start)
    return max(1.0, min(times) / LOOP_S)


class Costs:
    """Fails tests that exceed their time limit, and lists the slowest tests at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.checks = config.getoption("tier") != "all" and not config.getoption("no_budget")
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        outcome: Any = yield
        report: pytest.TestReport = outcome.get_result()
        budget = BUDGET_S * max(1.0, os.getloadavg()[0] / (2 * (os.cpu_count() or 1))) * slowness()
        if not self.checks or report.when != "call" or not report.passed or call.duration <= budget:
            return
        if item.get_closest_marker("above_budget") is None:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {call.duration:.1f} s, and a test may take {budget:.0f} s. Make it cheaper, leave "
                'cases to `make test-all`, or give the reason: @pytest.mark.above_budget("...").'
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self.seconds) <= NUM_SLOWEST:
            return
        terminalreporter.section(f"the {NUM_SLOWEST} slowest of {len(self.seconds)} tests")
        for name, seconds in sorted(self.seconds.items(), key=lambda each: -each[1])[:NUM_SLOWEST]:
            terminalreporter.line(f"{seconds:7.1f} s  {name}")
