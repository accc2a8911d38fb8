"""Runs mutants: ``python -m tests.mutants --help``."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.mutants.mutant import AREAS, DoesNotApplyError, Mutant
from tests.mutants.results import BROKEN, FOUND, LIMIT, NO_TEST, RESULTS, SURVIVED, Result, read_results, write_results
from tests.mutants.tables import all_mutants
from tests.mutants.targets import related_tests
from tests.mutants.trees import (
    FAILED,
    NO_SUCH_TEST,
    OWN_TESTS,
    copy_of_commit,
    copy_of_working_tree,
    present,
    run_tests,
    tier_arguments,
)


@dataclass(frozen=True)
class Options:
    """How mutants are tested.

    Args:
        tier: the tier of tests, from which related tests are selected as well.
        related_only: whether to skip the other tests of the tier.
        limit_s: time limit of each call of pytest.
        jobs: number of parallel processes for the other tests of the tier.
    """

    tier: str
    related_only: bool
    limit_s: float
    jobs: int


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes the copies and ends their processes
    every = all_mutants()
    by_name = {mutant.name: mutant for mutant in every}
    if unknown := set(options.names) - set(by_name):
        sys.exit(f"There is no mutant {', '.join(sorted(unknown))}. See the files in {OWN_TESTS}/tables.")
    chosen = [by_name[name] for name in options.names or by_name if options.area in (None, by_name[name].area)]
    results = read_results(options.out)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        base = Path(folder) / "base"
        base.mkdir()
        if options.check_before is not None:
            copy_of_commit(options.check_before, base)
        else:
            copy_of_working_tree(base)
        if options.recheck:
            return recheck(
                [(mutant, results[mutant.name]) for mutant in chosen if mutant.name in results], base, options
            )
        for mutant in chosen:
            if options.check_before is None:
                result = tried(mutant, base, Options(options.tier, options.related_only, options.limit, options.jobs))
            elif mutant.name not in results or results[mutant.name].found_by is None:
                continue
            else:
                before = found_before(mutant, base, results[mutant.name], options.limit)
                known = results[mutant.name]
                result = replace(known, before={**known.before, options.check_before: before})
            results[mutant.name] = result
            write_results(options.out, results, every)
            said = result.before.get(options.check_before or "") or result.outcome
            print(
                f"{mutant.area:<12} {mutant.name:<44} {said:<12} {result.seconds:5.0f} s  {result.found_by or ''}",
                flush=True,
            )
        ran = [results[mutant.name] for mutant in chosen if mutant.name in results]
        if options.check_before is None:
            failing = failing_without([result.found_by for result in ran if result.found_by], base, options.limit)
            results |= {r.name: replace(r, outcome=BROKEN) for r in ran if r.found_by in failing}
            write_results(options.out, results, every)
            ran = [results[mutant.name] for mutant in chosen]
    return int(any(result.outcome != FOUND for result in ran))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Checks that tests find known faults.")
    parser.add_argument("--tier", choices=("fast", "test", "all"), default="test", help="which tests may find them")
    parser.add_argument("--area", choices=AREAS)
    parser.add_argument("--names", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the JSON file of results, which is added to")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="for each call of pytest")
    parser.add_argument("--jobs", type=int, default=1, help="tests at once in the rest of the tier")
    parser.add_argument("--related-only", action="store_true", help="leave out the rest of the tier")
    parser.add_argument(
        "--recheck", action="store_true", help="run only the recorded finder of each mutant, and write no results"
    )
    parser.add_argument(
        "--check-before",
        metavar="COMMIT",
        help="for each mutant with a recorded finder, run only that test at this commit with the mutant applied",
    )
    return parser


def tried(mutant: Mutant, base: Path, options: Options) -> Result:
    """Run the tests on a copy with the mutant."""
    seconds = 0.0
    for scope, arguments in _scopes(mutant, base, options):
        with tempfile.TemporaryDirectory(dir=base.parent, prefix="tree-") as folder:
            tree = _copied(base, Path(folder))
            mutant.apply(tree)
            run = run_tests(tree, arguments, options.limit_s)
        seconds += run.seconds
        if run.failed is not None:
            return Result(mutant.name, mutant.area, FOUND, scope, run.failed, round(seconds, 1), {})
        if run.status is None:
            return Result(mutant.name, mutant.area, LIMIT, scope, None, round(seconds, 1), {})
        if run.status not in (0, *NO_SUCH_TEST):
            raise RuntimeError(f"pytest ended with status {run.status} and no failed test: {mutant.name}, {scope}")
    return Result(mutant.name, mutant.area, SURVIVED, scope, None, round(seconds, 1), {})


def _scopes(mutant: Mutant, base: Path, options: Options) -> list[tuple[str, list[str]]]:
    """Yield the sets of tests that run in sequence: the related tests, then the others of the tier."""
    # excluded, because it fails for any edit of a mutated file
    common = [*tier_arguments(base, options.tier), f"--ignore={OWN_TESTS}"]
    related = present(base, mutant.first if options.related_only else related_tests(mutant))
    scopes = [("related tests", [*common, *related])] if related else []
    if not options.related_only:
        rest = [f"--deselect={test}" if "::" in test else f"--ignore={test}" for test in related]
        workers = ["--numprocesses", str(options.jobs), "--dist", "worksteal"] if options.jobs > 1 else []
        scopes.append((f"tier {options.tier}", [*common, *rest, *workers, "tests"]))
    return scopes


def _copied(base: Path, folder: Path) -> Path:
    """Copy a tree with its compiled files, which belong to the unedited source."""
    tree = folder / "repository"
    shutil.copytree(base, tree, ignore=shutil.ignore_patterns(".mutants-*"))
    return tree


def failing_without(finders: Sequence[str], base: Path, limit_s: float) -> set[str]:
    """Return which of some tests also fail without a mutant."""
    failing: set[str] = set()
    while left := [test for test in dict.fromkeys(finders) if test not in failing]:
        with tempfile.TemporaryDirectory(dir=base.parent, prefix="tree-") as folder:
            run = run_tests(_copied(base, Path(folder)), [*tier_arguments(base, "all"), *left], limit_s)
        if run.failed not in left:
            if run.status != 0:
                print(f"Not all finders could be run without a mutant: pytest ended with status {run.status}.")
            break
        failing.add(run.failed)
    return failing


def recheck(known: Sequence[tuple[Mutant, Result]], base: Path, options: argparse.Namespace) -> int:
    """Run the recorded finder of each mutant. Return 1 if one of them no longer fails."""
    lost = []
    for mutant, result in known:
        if result.found_by is not None and (outcome := found_before(mutant, base, result, options.limit)) != FOUND:
            lost.append(mutant.name)
            print(f"{mutant.area:<12} {mutant.name:<44} {outcome}: {result.found_by}", flush=True)
    print(f"{len(known)} mutants with results, {len(lost)} of them no longer found by their tests")
    return int(bool(lost))


def found_before(mutant: Mutant, base: Path, result: Result, limit_s: float) -> str:
    """Return whether the finding test also finds the mutant in another commit."""
    assert result.found_by is not None
    with tempfile.TemporaryDirectory(dir=base.parent, prefix="tree-") as folder:
        tree = _copied(base, Path(folder))
        try:
            mutant.apply(tree)
        except DoesNotApplyError:
            return "the code was different"
        if not present(tree, [result.found_by]):
            return NO_TEST
        run = run_tests(tree, [*tier_arguments(base, "all"), result.found_by], limit_s)
    if run.status in NO_SUCH_TEST:
        return NO_TEST
    return FOUND if run.status == FAILED else SURVIVED if run.status == 0 else LIMIT


if __name__ == "__main__":
    sys.exit(main())
