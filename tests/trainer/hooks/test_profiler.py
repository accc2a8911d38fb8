"""Files that the Profiler writes on each rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardformer.errors import ConfigError
from shardformer.training.hook import Hook, TrainerProtocol
from shardformer.training.hooks.profiler import Profiler, read_memory_timeline
from shardformer.training.trainer import Trainer
from tests.trainer.hooks.runs import engine_of


def test_traces_tables_and_memory_plots_are_written(tmp_path: Path) -> None:
    hook = Profiler(tmp_path, wait=0, active=1, repeat=2)
    Trainer(engine_of(), [hook]).fit(steps=6)
    names = sorted(path.name for path in (tmp_path / "rank0").iterdir())
    assert names == [f"step-{n}{end}" for n in (2, 4) for end in ("-memory.png", ".json", ".txt")]
    events = json.loads((tmp_path / "rank0/step-2.json").read_text())["traceEvents"]
    assert any("addmm" in event.get("name", "") for event in events)
    assert "addmm" in (tmp_path / "rank0/step-2.txt").read_text()
    times, held = read_memory_timeline(tmp_path / "rank0/step-2.json")
    assert times == sorted(times)
    assert max(held) > 0


class Fails(Hook):
    def after_step(self, trainer: TrainerProtocol) -> None:
        raise ValueError("on purpose")


def test_an_error_stops_the_profiler(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"on purpose"):
        Trainer(engine_of(), [Profiler(tmp_path, wait=0), Fails()]).fit(steps=6)
    Trainer(engine_of(), [Profiler(tmp_path, wait=0, active=1)]).fit(steps=3)  # torch has one at a time


def test_a_run_without_a_trace_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"too short"):
        Trainer(engine_of(), [Profiler(tmp_path, wait=9)]).fit(steps=2)


def test_a_run_that_ends_in_the_warm_up_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"too short"):
        Trainer(engine_of(), [Profiler(tmp_path, wait=1)]).fit(steps=2)
    assert list((tmp_path / "rank0").iterdir()) == []


@pytest.mark.parametrize("options", [{"wait": -1}, {"active": 0}, {"repeat": True}])
def test_invalid_numbers_raise(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Profiler(tmp_path, **options)


@pytest.mark.parametrize("what", ["rank0", "rank0/step-2.json", "rank0/step-2.txt"])
def test_a_symbolic_link_is_not_written_through(what: str, tmp_path: Path) -> None:
    precious, link = tmp_path / "precious", tmp_path / "profile" / what
    link.parent.mkdir(parents=True)
    precious.mkdir() if what == "rank0" else precious.write_text("precious")
    link.symlink_to(precious)
    trainer = Trainer(engine_of(), [Profiler(tmp_path / "profile", wait=0, active=1, memory=False)])
    if what == "rank0":
        with pytest.raises(ConfigError, match="rank0', which is a symbolic link"):
            trainer.fit(steps=3)
        assert list(precious.iterdir()) == []
    else:
        trainer.fit(steps=3)
        assert precious.read_text() == "precious" and not link.is_symlink()
