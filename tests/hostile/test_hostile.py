"""A fixed subset of the hostile cases. ``make hostile`` runs all of them."""

from __future__ import annotations

import pytest

from tests.hostile import arguments, divergence, mutations
from tests.hostile.faults import Fault, ended
from tests.hostile.net import EQUAL, FINDINGS, HANGS, RAW, WRONG, Case, Trace, drawn, outcome

SOME = {"argument": (arguments.cases, 12), "divergence": (divergence.cases, 8), "mutation": (mutations.cases, 5)}


@pytest.mark.reduced(at_most=1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_every_case_gives_the_right_result_or_an_error(kind: str) -> None:
    make, count = SOME[kind]
    found = [outcome(case) for case in drawn((c for c in make() if "compile" not in c.name), count, seed=0)]
    assert [str(each) for each in found if each.what in FINDINGS] == []


def _hangs(context: object) -> None:
    context.tensor.transport.all_gather_ints([context.rank] * 2) if context.rank else None  # type: ignore[attr-defined]


def _raises(context: object) -> None:
    raise TypeError("of Python")


@pytest.mark.parametrize(
    ("run", "plain", "what"),
    [
        (lambda context: Trace([1.0]), lambda: Trace([1.0]), EQUAL),
        (lambda context: Trace([1.0 + context.rank]), lambda: Trace([1.0]), WRONG),
        (lambda context: Trace([float("nan")]), lambda: Trace([1.0]), WRONG),
        (lambda context: Trace(seen=[1]), lambda: Trace(), WRONG),
        (_raises, lambda: None, RAW),
        (_hangs, lambda: None, HANGS),
    ],
)
def test_outcomes_are_distinguished(run: object, plain: object, what: str) -> None:
    assert outcome(Case("argument", "", {"tensor": 2}, run, plain)).what == what  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.reduced(one_in=2)
@pytest.mark.parametrize("fault", [Fault("exit 0", "forward", "tensor"), Fault("swallow", "step", "data")], ids=str)
def test_a_rank_that_exits_while_others_wait_is_reported(fault: Fault) -> None:
    what, seconds = ended(fault)
    assert what == "ended and named" and seconds < 60, what
