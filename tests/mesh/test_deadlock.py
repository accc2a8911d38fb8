"""Deadlocked ranks are detected from their reports, unless one of them may continue."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh import deadlock_detection
from shardformer.mesh import deadlock_detection as presence
from shardformer.mesh.deadlock_detection import RankWaitReport, find_deadlocked_ranks, format_deadlock_error
from shardformer.mesh.init_distributed import launch_from_torch


def waits(group: str, number: int, begun: dict[str, int], place: str = "", **others: Any) -> RankWaitReport:
    """Report of a rank that waits in a collective of a group, which is named by its ranks."""
    fields = {"what": "all_reduce", "seconds": 60.0, **others}
    ranks = list(map(int, group))
    return RankWaitReport(
        group=group, ranks=ranks, number=number, begun=begun, place=place or f"{group} {number}", **fields
    )


def receives(source: int, number: int, begun: dict[str, int]) -> RankWaitReport:
    """Reports in which rank 0 waits for a message over a group of three."""
    return RankWaitReport(60.0, "a receive", "012>0", [source], number, "receive", begun)


LATE, SENT = (waits("012", 2, {"012": 2, "012>0": sent}) for sent in (2, 3))
COMPUTES = RankWaitReport(begun={"01": 1, "12": 1, "02": 1})
ELSEWHERE = RankWaitReport(60.0, "a receive", begun={"01": 1, "12": 1})
IN_A_RING = [
    waits("01", 2, {"01": 2, "02": 1, "0123": 0}),  # for rank 1
    waits("12", 2, {"01": 1, "12": 2, "0123": 0}),  # for rank 2
    waits("02", 2, {"12": 1, "02": 2, "0123": 0}),  # for rank 0
]
BARRIER = {"what": "barrier", "place": "a barrier"}
CASES: dict[str, tuple[list[RankWaitReport], dict[int, int]]] = {
    "three in a ring": (IN_A_RING, {0: 1, 1: 2, 2: 0}),
    "others wait for them": ([*IN_A_RING, waits("0123", 1, {"0123": 1})], {0: 1, 1: 2, 2: 0, 3: 0}),
    "one computes": ([COMPUTES, *IN_A_RING[1:]], {}),
    "one may receive something": ([IN_A_RING[0], ELSEWHERE, IN_A_RING[2]], {}),
    "one came a moment ago": ([*IN_A_RING[:2], waits("02", 2, {"12": 1, "02": 2}, seconds=1.0)], {}),
    "one is not heard of": (IN_A_RING[:2], {}),
    "a long transfer": ([waits("01", 3, {"01": 3}), waits("01", 3, {"01": 3}, "else")], {}),
    "an early one that was begun": ([waits("01", 2, {"01": 5}), waits("01", 2, {"01": 2}, "else")], {}),
    "others wait for a long transfer": (
        [waits("01", 3, {"01": 3}), waits("01", 3, {"01": 3}), waits("0123", 1, {"0123": 1}, **BARRIER)],
        {},
    ),
    "other collectives of one number": (
        [waits("01", 3, {"01": 3}), waits("01", 3, {"01": 3}, **BARRIER)],
        {0: 1, 1: 0},
    ),
    "for what was not sent": ([receives(1, 3, {"012": 1, "012>2": 9}), LATE], {0: 1, 1: 0}),
    "for what was sent, and has not arrived": ([receives(1, 2, {"012": 1}), SENT], {}),
    "for what was perhaps sent": ([receives(1, 3, {"012": 1}), waits("012", 2, {"012": 2, "012>?": 1})], {}),
    "for what was never sent": ([receives(1, 1, {"012": 1}), waits("012", 2, {"012": 2})], {0: 1, 1: 0}),
    "one line": ([waits("01", 3, {"01": 3}, "x"), waits("01", 3, {"01": 3}, "x", what="barrier")], {}),
    "a group that another does not know": ([IN_A_RING[0], waits("12", 2, {"12": 2}), IN_A_RING[2]], {}),
}


@pytest.mark.parametrize("case", CASES)
def test_deadlocked_ranks_are_detected(case: str) -> None:
    reports, expected = CASES[case]
    known = {rank: RankWaitReport.from_json(report.to_json()) for rank, report in enumerate(reports)}
    found = find_deadlocked_ranks(known, 10.0)
    assert found == expected
    if found:
        assert "rank 0 waits in" in format_deadlock_error(found, known)


def watched(is_slow: bool) -> tuple[int, str]:
    """Count how often a process would have exited, and return its message.

    Rank 0 waits in an all-reduce, rank 1 in a barrier of another group. Instead of exiting, a thread makes the missing
    call of the other rank.
    """
    limits = {"WATCH_AFTER_S": 0.3, "WATCH_EVERY_S": 0.1, "BLOCKED_AFTER_S": 0.3, "LOOK_EVERY_S": 0.05}
    before = {name: getattr(presence, name) for name in limits}
    end, said, lock, has_gone_on = (
        deadlock_detection.DeadlockMonitor._exit_if_own_rank_deadlocked,
        list[str](),
        threading.Lock(),
        list[int](),
    )
    context = launch_from_torch(data=2)
    other = dist.new_group([0, 1])

    def add() -> None:
        dist.all_reduce(torch.ones(1))

    def meet() -> None:
        dist.barrier(other)

    own, others = (add, meet) if context.rank == 0 else (meet, add)

    def go_on() -> None:
        with lock:
            if not has_gone_on:
                has_gone_on.append(1)
                others()

    def end_process(self: deadlock_detection.DeadlockMonitor, ranks: list[int], message: str = "") -> None:
        said.append(message)
        threading.Thread(target=go_on).start()
        deadlock_detection.WATCH_AFTER_S = 60.0

    try:
        deadlock_detection.DeadlockMonitor._exit_if_own_rank_deadlocked = end_process  # type: ignore[method-assign]
        for name, value in limits.items():
            setattr(presence, name, value)
        if is_slow:
            time.sleep(1.5 * context.rank)
            dist.barrier()
        else:
            own()
            go_on()
    finally:
        dist.barrier()
        deadlock_detection.DeadlockMonitor._exit_if_own_rank_deadlocked = end  # type: ignore[method-assign]
        for name, value in before.items():
            setattr(presence, name, value)
    return len(said), "".join(said)


def test_deadlocked_processes_exit(pool2: WorkerPool) -> None:
    said = "".join(message for _, message in pool2.run(watched, False))
    assert "rank 0 waits in test_deadlock.py" in said and "dist.all_reduce(" in said
    assert "rank 1 waits in test_deadlock.py" in said and "dist.barrier(other)" in said
    assert [ends for ends, _ in pool2.run(watched, True)] == [0, 0]


SCRIPT = """
    import torch, torch.distributed as dist, shardformer
    from shardformer.mesh import deadlock_detection as presence

    presence.WATCH_AFTER_S, presence.WATCH_EVERY_S, presence.BLOCKED_AFTER_S = 2.0, 0.3, 1.0
    context = shardformer.launch_from_torch(data=2)
    model = shardformer.shard_model(torch.nn.Linear(4, 4), context=context)
    for number in range(3):
        model(torch.ones(2, 4)).sum().backward()
        if context.rank == 0 and number == 1:
            dist.barrier()
"""


@pytest.mark.full
@pytest.mark.slow
def test_deadlock_in_user_loop_prints_source_lines(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**env, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = "".join(process.communicate(timeout=60)[1] for process in processes)
    assert all(process.returncode == 1 for process in processes)
    assert said.count("the ranks wait for each other") == 1
    assert "train.py:11 (dist.barrier())" in said and "train.py:9 (model(torch.ones(2, 4)).sum().backward())" in said
