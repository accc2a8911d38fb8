"""Worker pools: results of calls, and errors if a worker raises, dies or hangs."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardformer.errors import ConfigError, InputError, LaunchError, WorkerError
from shardformer.local_ranks.worker_pool import WorkerPool
from tests.pools import WorkerPools

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """A pool for calls that kill its workers."""
    with WorkerPool(2, grace_s=0.5) as pool:
        yield pool


# ---------------------------------------------------------------------------------------------- functions that are sent


def rank_and_environment() -> tuple[int, int, list[str]]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    return dist.get_rank(), dist.get_world_size(), [os.environ[name] for name in names]


def summed(x: Tensor, factor: float = 1.0) -> Tensor:
    x = x * factor
    dist.all_reduce(x)
    return x


def echo(*values: object) -> tuple[object, ...]:
    return values


def disturb() -> None:
    os.environ["DISTURBED"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.rand(7), random.random()


def state() -> tuple[object, ...]:
    return (
        os.environ.get("DISTURBED"),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.rand(1).item(),
        random.random(),
    )


def summed_over_mesh() -> tuple[float, int]:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    x = torch.ones(1)
    dist.all_reduce(x, group=mesh["tensor"].get_group())
    return x.item(), len(os.listdir("/proc/self/fd"))


def initialised_by_itself() -> float:
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    return summed(torch.ones(1)).item()


def refuse(kind: type[ConfigError] | type[InputError], only: int | None = None) -> None:
    if only is None or dist.get_rank() == only:
        raise kind(f"value={dist.get_rank()}", rule="It is 7", remedy="Use 7")


def raise_alone(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("only here")
    dist.barrier()


def raise_each_its_own() -> None:
    raise KeyError(dist.get_rank())


def leave() -> None:
    sys.exit("left")


def unsendable() -> Callable[[], None]:
    return lambda: None


def exit_with_3() -> None:
    os._exit(3)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    faulthandler._sigsegv()  # type: ignore[attr-defined]  # private, so typeshed has it not


def die_alone(rank: int, how: Callable[[], None]) -> None:
    if dist.get_rank() == rank:
        how()
    dist.barrier()


def sleep_on_one(rank: int) -> None:
    if dist.get_rank() == rank:
        sleep_long()


def sleep_long() -> None:
    time.sleep(600)


# ------------------------------------------------------------------------------------------------------ what comes back


def test_results_are_in_rank_order(pools: WorkerPools) -> None:
    for n in (1, 2, 4):
        assert pools(n).run(rank_and_environment) == [(r, n, [str(r), str(r), str(n), "127.0.0.1"]) for r in range(n)]


def test_collectives_work_in_consecutive_calls(pool4: WorkerPool) -> None:
    for factor in (1.0, 2.0):
        for result in pool4.run(summed, torch.ones(3), factor=factor):
            torch.testing.assert_close(result, torch.full((3,), 4 * factor))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensors_of_every_dtype_are_returned(pool2: WorkerPool, dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, 1.0], [2.0, 3.0]]).to(dtype)
    for (back,) in pool2.run(echo, x):
        assert isinstance(back, Tensor)
        torch.testing.assert_close(back, x, rtol=0, atol=0)


def test_view_is_returned_without_its_full_storage(pool2: WorkerPool) -> None:
    x = torch.arange(1000.0, requires_grad=True)
    view, parameter = pool2.run(echo, x[10:12], nn.Parameter(torch.ones(2)))[0]
    assert isinstance(view, Tensor) and isinstance(parameter, nn.Parameter)
    assert view.tolist() == [10.0, 11.0] and view.requires_grad
    assert view.untyped_storage().nbytes() == 8


def test_every_call_starts_in_the_same_state(pool2: WorkerPool) -> None:
    first = pool2.run(state)
    assert first[0] == first[1]
    assert first[0][:4] == (None, torch.float32, True, 1)
    pool2.run(disturb)
    assert pool2.run(state) == first


def test_process_groups_are_destroyed_between_calls(pool2: WorkerPool) -> None:
    open_files = []
    for _ in range(8):
        (total, files), _ = pool2.run(summed_over_mesh)
        assert total == 2.0
        open_files.append(files)
    assert open_files[-1] <= open_files[1]


def test_function_can_initialize_as_under_torchrun(pool2: WorkerPool) -> None:
    for _ in range(2):
        assert pool2.run(initialised_by_itself) == [2.0, 2.0]
    assert pool2.run(summed, torch.ones(1))[0].item() == 2.0


def test_functions_of_module_imported_by_path_can_be_sent(
    pool2: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As pytest's importlib mode leaves it: the package is there, but not to be found by others.
    file = tmp_path / "test_pool.py"
    file.write_text("class Box:\n    pass\n\ndef boxed():\n    return Box()\n")
    spec = importlib.util.spec_from_file_location("elsewhere.test_pool", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "elsewhere", ModuleType("elsewhere"))
    monkeypatch.setitem(sys.modules, "elsewhere.test_pool", module)
    spec.loader.exec_module(module)
    assert [type(box) for box in pool2.run(module.boxed)] == [module.Box, module.Box]


def test_unpicklable_call_is_refused(pool2: WorkerPool) -> None:
    with pytest.raises(ConfigError, match=r"lambda.*top level of a module"):
        pool2.run(lambda: None)
    assert pool2.run(echo, 1) == [(1,), (1,)]


# --------------------------------------------------------------------------------------------------- a worker raises


def test_same_error_on_all_ranks_is_raised_and_keeps_workers(pool: WorkerPool) -> None:
    pool.run(summed, torch.ones(1))
    before = pool.pids
    with pytest.raises(ConfigError, match=r"value=0\. It is 7\. Use 7\.") as caught:
        pool.run(refuse, ConfigError)
    assert caught.value.remedy == "Use 7"
    assert "in refuse" in str(caught.value.__cause__)
    assert pool.run(summed, torch.ones(1))[0].item() == 2.0
    assert pool.pids == before


@pytest.mark.parametrize(
    ("fn", "args", "words"),
    [
        (refuse, (InputError, 1), ["rank 1 raised InputError: value=1"]),
        (raise_each_its_own, (), ["rank 0 raised KeyError: 0; rank 1 raised KeyError: 1", "in raise_each_its_own"]),
        (leave, (), ["failed: ranks 0, 1 raised SystemExit: left. ", "in leave"]),
        (unsendable, (), ["ranks 0, 1 raised", "<lambda>"]),
        (
            raise_alone,
            (1,),
            ["failed: rank 1 raised ValueError: only here. ", "rank 0 was still running or waiting", "in barrier"],
        ),
    ],
)
def test_other_errors_name_their_ranks(
    pool: WorkerPool, fn: Callable[..., object], args: tuple[object, ...], words: list[str]
) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(fn, *args)
    for part in words:
        assert part in str(caught.value)


def test_failed_import_is_named_at_start() -> None:
    with WorkerPool(1, module_names=("no_such_module",)) as pool, pytest.raises(WorkerError, match="no_such_module"):
        pool.run(echo)


# ------------------------------------------------------------------------------------------- a worker dies or hangs


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (exit_with_3, "rank 1 ended with exit code 3"),
        (kill_itself, "rank 1 was killed by SIGKILL"),
        (crash, "rank 1 was killed by SIGSEGV"),
    ],
)
def test_dead_worker_is_named_and_replaced(pool: WorkerPool, how: Callable[[], None], words: str) -> None:
    pool.run(echo)
    pids, start = pool.pids, time.monotonic()
    with pytest.raises(WorkerError, match=words) as caught:
        pool.run(die_alone, 1, how)
    assert time.monotonic() - start < 10
    assert f"die_alone failed: {words}" in str(caught.value)
    assert ("in crash" in str(caught.value)) == (how is crash)
    assert not any(alive(pid) for pid in pids)
    assert pool.run(summed, torch.ones(1))[0].item() == 2.0


def test_hang_is_reported_with_source_line(pool: WorkerPool) -> None:
    pool.run(echo)
    pids = pool.pids
    with pool.with_timeout(0.5), pytest.raises(WorkerError) as caught:
        pool.run(sleep_on_one, 1)
    assert "failed: rank 1 had not answered after 0.5 s. " in str(caught.value)
    assert "in sleep_long" in str(caught.value) and "in sleep_on_one" in str(caught.value)
    assert "rank 0" not in str(caught.value)
    assert pool.timeout_s == 60.0
    assert not any(alive(pid) for pid in pids)
    assert pool.run(summed, torch.ones(1))[0].item() == 2.0


def test_worker_that_died_between_calls_is_replaced(pool: WorkerPool) -> None:
    pool.run(echo)
    os.kill(pool.pids[0], signal.SIGKILL)
    while alive(pool.pids[0]):
        time.sleep(0.01)
    assert pool.run(summed, torch.ones(1))[0].item() == 2.0


# -------------------------------------------------------------------------------------------------------- the end


def test_closed_pool_leaves_no_process_and_refuses_calls() -> None:
    with WorkerPools() as pools:
        assert pools(2) is pools(2) and pools(1) is not pools(2)
        assert pools(2).run(echo, 1) == [(1,), (1,)] and pools(1).run(echo, 2) == [(2,)]
        pool, pids = pools(2), pools(1).pids + pools(2).pids
    assert len(pids) == 3 and not any(alive(pid) for pid in pids)
    with pytest.raises(LaunchError, match="closed WorkerPool"):
        pool.run(echo)


def test_pool_without_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_workers=0"):
        WorkerPool(0)
    with pytest.raises(ConfigError, match="threads=0"):
        WorkerPool(1, num_threads=0)


def test_workers_exit_when_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import threading, time
            from shardformer.local_ranks.worker_pool import WorkerPool

            def hang():
                time.sleep(600)

            if __name__ == "__main__":
                with WorkerPool(2) as pool:
                    pool.run(max, 1, 2)
                    print(*pool.pids, flush=True)
                    pool.run(hang)
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(alive(pid) for pid in pids)
        parent.kill()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Return whether any thread of the process is alive, because the first may end before the others."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return False
    for thread in threads:
        try:
            status = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if status.rpartition(")")[2].split()[0] not in ("Z", "X"):
            return True
    return False
