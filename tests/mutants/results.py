"""Results of mutants, stored as JSON and shown as a table in README.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.mutant import AREAS, Mutant

NO_TEST = "no such test"
FOUND, SURVIVED, LIMIT, BROKEN = "found", "survived", "time limit", "fails without the mutant"
RESULTS, PAGE = Path(__file__).with_name("results.json"), Path(__file__).with_name("README.md")


@dataclass(frozen=True)
class Result:
    """The result of a mutant.

    Args:
        outcome: a test failed, all passed, pytest timed out, or the test also fails without the mutant.
        scope: the tests that ran: those related to the file, or a full tier.
        found_by: node id of the failed test.
        before: commit -> whether this test found the mutant there.
    """

    name: str
    area: str
    outcome: str
    scope: str
    found_by: str | None
    seconds: float
    before: Mapping[str, str]


def read_results(path: Path) -> dict[str, Result]:
    if not path.is_file():
        return {}
    return {entry["name"]: Result(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))}


def write_results(path: Path, results: Mapping[str, Result], mutants: Sequence[Mutant]) -> None:
    """Write the results of existing mutants, and the page."""
    known = [asdict(results[mutant.name]) for mutant in mutants if mutant.name in results]
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    if path.resolve() == RESULTS:
        PAGE.write_text(page_of(results, mutants), encoding="utf-8")


def page_of(results: Mapping[str, Result], mutants: Sequence[Mutant]) -> str:
    """Render README.md."""
    ran = [results[mutant.name] for mutant in mutants if mutant.name in results]
    found = sum(result.outcome == FOUND for result in ran)
    commits = list(dict.fromkeys(commit for result in ran for commit in result.before))
    lines = [
        "# Mutants",
        "",
        "Each mutant is one small fault in the package: a missing collective, a wrong divisor, a dropped refusal.",
        "`make mutants` applies each to a copy of the repository and runs the tests until one fails: first those that",
        "are related to the file, then the rest of the tier. [tables/](tables) has the mutants.",
        "",
        f"{len(mutants)} mutants, {len(ran)} of them tried, {found} found.",
        *(_summary(commit, ran) for commit in commits),
        "",
        "| " + " | ".join(["area", "mutant", "found by", "seconds", *(f"at {commit}" for commit in commits)]) + " |",
        "|---|---|---|---:|" + "---|" * len(commits),
    ]
    for area in AREAS:
        for mutant in (each for each in mutants if each.area == area):
            result = results.get(mutant.name)
            shown = "not tried" if result is None else _shown(result)
            before = ["" if result is None else result.before.get(commit, "") for commit in commits]
            seconds = "" if result is None else f"{result.seconds:.0f}"
            lines.append(f"| {' | '.join([area, mutant.name, shown, seconds, *before])} |")
    missed = [(mutant, results[mutant.name]) for mutant in mutants if mutant.name in results]
    missed = [(mutant, result) for mutant, result in missed if result.outcome != FOUND]
    if missed:
        lines += ["", "## Not found", ""]
        lines += [f"- **{mutant.name}** ({_shown(result)}). {mutant.effect}" for mutant, result in missed]
    return "\n".join(lines) + "\n"


def _summary(commit: str, ran: Sequence[Result]) -> str:
    found = sum(result.before.get(commit) == FOUND for result in ran)
    new = sum(result.before.get(commit) == NO_TEST for result in ran)
    return f"At commit {commit}, the same tests found {found} of them; {new} are found by tests that it does not have."


def _shown(result: Result) -> str:
    if result.outcome == FOUND:
        return "`" + str(result.found_by).replace("|", "\\|") + "`"
    return f"{result.outcome}, {result.scope}"
