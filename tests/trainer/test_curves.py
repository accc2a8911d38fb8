"""Curves of characters show what was recorded, at any width."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from shardformer.trainer.curves import HEIGHT, curves, summary
from shardformer.trainer.picture import Runs
from shardformer.trainer.records import Record


def run(count: int, start: float = 3.0, speed: float = 1000.0) -> list[Record]:
    found = []
    for step in range(1, count + 1):
        values = {"loss": start / step, "tokens_per_s": speed, "memory_bytes": 2e9}
        found.append(Record(step, 0, step * 0.5, values))
    return [*found, Record(count, 1, count * 0.5, {"validation/loss": start})]


def of(*values: float, name: str = "loss") -> list[Record]:
    return [Record(step, 0, float(step), {name: value}) for step, value in enumerate(values, start=1)]


def texts(runs: Runs, *names: str, dots: bool = False) -> list[str]:
    return [str(line) for line in curves(runs, 60, list(names) or None, dots=dots)]


@pytest.mark.parametrize("dots", [True, False])
@pytest.mark.parametrize("width", [20, 40, 60, 99, 100, 133])
def test_no_line_is_wider_than_the_terminal(width: int, dots: bool) -> None:
    bad = [*run(200, 5.0), *of(*[math.nan] * 9, math.inf), *of(math.nan, name="validation/loss")]
    lines = curves({"a" * 50: run(30), "b" * 150: bad}, width, dots=dots)
    assert max(len(str(line)) for line in lines) <= max(width, 40)


def test_a_wide_terminal_has_two_charts_beside_each_other_and_the_odd_one_above() -> None:
    titles = [str(line).split() for line in curves({"a": run(20)}, 100) if "per" in str(line) or "loss" in str(line)]
    assert titles == [["loss"], ["tokens", "per", "second", "memory", "per", "process"]]


def test_a_falling_curve_falls() -> None:
    lines = texts({"a": run(40)[:-1]}, "loss")
    assert lines[0].strip() == "loss"
    body = [line.partition("|")[2] for line in lines[1 : 1 + HEIGHT]]
    first = [line.find("*") for line in body if "*" in line]
    assert first == sorted(first) and first[0] == 0
    assert body[-1].endswith("*****")
    assert lines[HEIGHT + 2].split() == ["1", "step", "40"]


def test_a_value_stands_at_its_label() -> None:
    lines = texts({"a": of(0.0, 1.0, 2.0, 3.0, 4.0)}, "loss")
    labelled = {line.split()[0]: line for line in lines[1 : 1 + HEIGHT] if not line.strip().startswith("|")}
    assert list(labelled) == ["4", "3", "2", "1", "0"]
    places = [labelled[label].find("*") for label in "01234"]
    assert places == sorted(places) and labelled["4"].endswith("*") and labelled["0"][3] == "*"


def test_braille_dots_are_those_of_the_values() -> None:
    low, high = texts({"a": of(0.0, 0.0, 1.0)}, "loss", dots=True)[HEIGHT], texts({"a": of(0.0, 1.0)}, dots=True)[1]
    assert low.endswith("⣀⣀⣀") is False and low.partition("┤")[2].startswith("⣀⣀⣀⣀")
    assert high.endswith("⠉") or high.endswith("⠈")


@pytest.mark.parametrize(
    "values", [(2.5,), (2.5, 2.5), (0.0, 0.0), (-3.0, 4.0), (1e-9, 2e-9), (1e30, 1.0), (1e16, 1e16 + 2)]
)
@pytest.mark.parametrize("name", ["loss", "tokens_per_s", "memory_bytes", "other"])
def test_any_finite_values_can_be_drawn(name: str, values: tuple[float, ...]) -> None:
    lines = texts({"a": of(*values, name=name)})
    assert "*" in "".join(lines[1 : 1 + HEIGHT])


def test_labels_are_even_and_hold_the_values() -> None:
    chance = random.Random(0)
    for _ in range(200):
        low = chance.uniform(-5, 5) * 10 ** chance.randint(-4, 3)
        high = low + chance.uniform(0.01, 1) * 10 ** chance.randint(-4, 3)
        lines = texts({"a": of(low, high, name="other")})
        heads = [line.partition("|")[0].strip() for line in lines[1 : 1 + HEIGHT]]
        assert not any(heads[1::2])
        labels = [float(head) for head in heads[::2]]
        step = labels[0] - labels[1]
        assert [a - b for a, b in pairwise(labels)] == pytest.approx([step] * 4, rel=1e-4)
        assert labels[-1] <= low + step / 1e4 and high <= labels[0] + step / 1e4
        assert high - low >= step  # the curve fills some of the chart


def test_a_loss_over_many_decades_is_logarithmic() -> None:
    lines = texts({"a": of(*(10.0 ** -(n / 10) for n in range(60)))}, "loss")
    assert lines[0].strip() == "loss, logarithmic"
    rows = {row for row, line in enumerate(lines[1 : 1 + HEIGHT]) if "*" in line}
    assert rows == set(range(HEIGHT))  # on a plain axis half of the values were in the lowest line


def test_many_values_are_a_moving_mean() -> None:
    up_and_down = of(*([1.0, 2.0] * 200), name="other")
    lines = texts({"a": up_and_down})
    assert "moving mean" in lines[0]
    assert 1.4 <= float(lines[HEIGHT].partition("|")[0]) < float(lines[1].partition("|")[0]) <= 1.6
    assert "moving mean" not in texts({"a": run(30)}, "loss")[0]


def test_each_run_has_its_mark_and_its_name() -> None:
    lines = curves({"left": run(40)[:-1], "right": run(40, 9.0)[:-1]}, 60, ["loss"], dots=False)
    assert str(lines[-1]) == "* left   o right"
    drawn = [(text, number) for line in lines[:-1] for text, number in line.pieces if number is not None]
    assert {(text[0], number) for text, number in drawn} == {("*", 0), ("o", 1)}


def test_the_validation_is_drawn_beside_the_training() -> None:
    records = [*run(40), Record(20, 0, 9.0, {"validation/loss": 1.5})]
    with_marks = texts({"a": records, "b": run(40, 9.0)}, "loss")
    assert with_marks[-1] == "* a (validation 1)   o b (validation 2)"
    body = "".join(line.partition("|")[2] for line in with_marks[1 : 1 + HEIGHT])
    assert (body.count("1"), body.count("2")) == (2, 1)
    with_dots = texts({"a": records}, "loss", dots=True)
    assert "".join(with_dots[: 1 + HEIGHT]).count("●") == 2
    assert with_dots[-1] == "● validation"


def test_a_value_of_the_validation_alone_is_a_curve() -> None:
    lines = texts({"a": of(0.1, 0.5, 0.9, name="validation/f1")})
    assert lines[0].strip() == "f1, of the validation data"
    assert "*" in "".join(lines[1 : 1 + HEIGHT])


def test_what_is_not_finite_is_said_with_its_run_and_marked_at_its_step() -> None:
    bad = [*of(3.0, 2.0, math.nan, math.inf, 1.0), *of(math.nan, name="validation/loss")]
    lines = curves({"good": run(5), "bad": bad}, 60, ["loss"], dots=False)
    said = [str(line).strip() for line in lines]
    assert "! bad: 2 of 5 not finite, first at step 3" in said
    assert "! bad: validation: 1 of 1 not finite, first at step 1" in said
    axis = next(line for line in lines if str(line).strip().startswith("+"))
    assert str(axis).count("!") == 3
    assert {number for text, number in axis.pieces if "!" in text} == {1}


def test_a_curve_breaks_where_a_value_is_not_finite() -> None:
    whole = "".join(texts({"a": of(1.0, 1.0, 1.0, 1.0)})[: 1 + HEIGHT]).count("*")
    broken = "".join(texts({"a": of(1.0, math.nan, 1.0, 1.0)})[: 1 + HEIGHT]).count("*")
    assert 1 + whole // 3 <= broken < whole // 2


def test_a_value_that_is_never_finite_is_said() -> None:
    lines = texts({"a": of(math.nan, math.nan)})
    assert lines[0] == "loss: no finite value"
    assert lines[1].strip() == "! 2 of 2 not finite, first at step 1"


def test_a_run_is_summed_up() -> None:
    speeds = [
        Record(41 + n, 0, 20.0 + n, {"tokens_per_s": speed}) for n, speed in enumerate([4000.0, 80000.0, math.nan])
    ]
    assert summary({"a": [*run(40)[:-1], *speeds], "b": of(4.0, 2.0, math.nan), "c": of(math.inf), "d": []}) == [
        {
            "run": "a", "step": "43", "time": "0:22", "last loss": "0.0750", "best loss": "0.0750",
            "last validation loss": "", "best validation loss": "", "mean tokens/s": "2952", "peak memory": "2.0 GB",
        },
        {
            "run": "b", "step": "3", "time": "0:03", "last loss": "nan", "best loss": "2.0000",
            "last validation loss": "", "best validation loss": "", "mean tokens/s": "", "peak memory": "",
        },
        {
            "run": "c", "step": "1", "time": "0:01", "last loss": "inf", "best loss": "inf",
            "last validation loss": "", "best validation loss": "", "mean tokens/s": "", "peak memory": "",
        },
        {
            "run": "d", "step": "0", "time": "0:00", "last loss": "", "best loss": "",
            "last validation loss": "", "best validation loss": "", "mean tokens/s": "", "peak memory": "",
        },
    ]  # fmt: skip


def test_small_and_large_losses_keep_their_digits() -> None:
    small, large = summary({"small": of(1.5e-6), "large": of(2.5e9)})
    assert (small["last loss"], large["last loss"]) == ("1.500e-06", "2.500e+09")
