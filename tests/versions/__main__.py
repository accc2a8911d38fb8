"""Tests with the versions that users have: ``python -m tests.versions`` (``make test-versions``).

Creates a virtual environment for each row of ``rows.py``, runs each step of ``steps.py`` in it, prints a table and
writes docs/versions.md. An existing environment is reused with its versions; delete its folder to install newer ones.
An environment takes about 6 GB if pip finds a CUDA build of torch.

The outcomes are stored next to the environments. A run of some rows or steps replaces their outcomes, and writes the
page if no step of a row is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.versions.page import PAGE, Found, page
from tests.versions.rows import ROOT, ROWS, Environment, Row, interpreter_of
from tests.versions.steps import STEPS, Outcome, Step, prepare


def main() -> int:
    asked = _arguments()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)  # full rows in a log
    possible = [
        row for row in ROWS if Environment(row, asked.envs / row.name).is_complete or interpreter_of(row.python)
    ]
    for row in ROWS:
        if row not in possible:
            console.print(f"{row.name}: Python {row.python} is not found, the row is left out", style="yellow")
    rows = [row for row in possible if not asked.rows or any(words in row.name for words in asked.rows)]
    steps = [step for step in STEPS if not asked.only or step.name in asked.only]
    for row in rows:
        Environment(row, (asked.envs / row.name).absolute()).make()
    results = [read_found(row, asked.envs.absolute()) for row in possible]
    run_rows(results, rows, steps, asked.jobs, console)
    console.print(_table(results))
    if all(step.name in each.outcomes for each in results for step in STEPS):
        (ROOT / PAGE).write_text(page(results), encoding="utf-8")
        console.print(f"{PAGE} is written")
    return int(any(outcome.problem for each in results for outcome in each.outcomes.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tests the package with the versions that users have.")
    parser.add_argument(
        "--rows", action="append", metavar="WORDS", help="rows with these words in their names; repeatable"
    )
    parser.add_argument("--envs", type=Path, default=ROOT / ".venvs", metavar="FOLDER", help="where environments are")
    parser.add_argument("--only", action="append", choices=[step.name for step in STEPS], help="a step; repeatable")
    parser.add_argument("--jobs", type=int, default=2, help="rows in parallel")
    return parser.parse_args()


def read_found(row: Row, envs: Path) -> Found:
    """Return a row with the outcomes of earlier runs, unless the versions in its environment have changed."""
    environment = Environment(row, envs / row.name)
    versions = environment.versions() if environment.is_complete else ("", "", "")
    kept = environment.work / "outcomes.json"
    if kept.is_file():
        before = json.loads(kept.read_text(encoding="utf-8"))
        if before["versions"] == list(versions):
            outcomes = {name: Outcome(**values) for name, values in before["outcomes"].items()}
            return Found(environment, versions, outcomes)
    return Found(environment, versions, {})


def keep_found(found: Found) -> None:
    outcomes = {name: asdict(outcome) for name, outcome in found.outcomes.items()}
    text = json.dumps({"versions": found.versions, "outcomes": outcomes}, indent=1)
    (found.environment.work / "outcomes.json").write_text(text, encoding="utf-8")


def run_rows(results: Sequence[Found], rows: Sequence[Row], steps: Sequence[Step], jobs: int, console: Console) -> None:
    """Run step by step, so that each row has saved its checkpoint before another row loads it."""
    before = dict(zip((each.name for each in results), [*results[-1:], *results[:-1]]))
    chosen = [each for each in results if each.environment.row in rows]
    for each in chosen:
        prepare(each.environment.work)

    def run(step: Step, each: Found) -> None:
        outcome = step.run(each.environment, before[each.name].environment.work)
        each.outcomes[step.name] = outcome
        keep_found(each)
        console.print(f"{each.name}  {step.name}: {outcome.word} in {outcome.seconds:.0f} s")
        if outcome.problem:
            console.print(f"  {outcome.problem}\n  see {step.log(each.environment)}", markup=False)

    with ThreadPoolExecutor(jobs) as executor:
        for step in steps:
            list(executor.map(run, [step] * len(chosen), chosen))


def _table(results: Sequence[Found]) -> Table:
    table = Table("Python", "torch", "transformers", *(step.name for step in STEPS))
    for each in results:
        words = (each.outcomes[step.name].word if step.name in each.outcomes else "" for step in STEPS)
        table.add_row(*each.versions, *words)
    return table


if __name__ == "__main__":
    sys.exit(main())
