"""``shardformer run``: host files, the environment of the script, and reports of failures."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardformer.cli import run as cli_run
from shardformer.cli.run import parse_run_arguments
from shardformer.errors import LaunchError, ShardFormerError
from shardformer.launcher import hostfile as launcher_hostfile
from shardformer.launcher.failure_report import format_failure_report
from shardformer.launcher.hostfile import HostEntry, find_local_host_index, read_hostfile, select_hosts_by_name
from shardformer.launcher.shutdown import STACK_LOCATIONS
from tests.scripts import SHARDFORMER

pytestmark = pytest.mark.slow


def start(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS" and not k.startswith("PET_")}
    return subprocess.Popen(
        [*SHARDFORMER, "run", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**clean, **environment},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    with process:
        try:
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    return process.returncode, out, err


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Create a script that prints its rank, its number of threads and its arguments."""
    path = tmp_path / "train.py"
    path.write_text(
        "import os, pickle, sys\n"
        "class Thing: pass\n"
        "pickle.dumps(Thing)\n"  # Works only if __main__ is really this file.
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'OMP_NUM_THREADS')\n"
        "words = [*(os.environ[n] for n in names), __name__, os.path.basename(__file__), *sys.argv[1:]]\n"
        "os.write(1, (' '.join(words) + '\\n').encode())\n"  # one write, so that lines do not mix
    )
    return path


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


def assert_four_parts(error: ShardFormerError, value: str) -> None:
    assert value in error.what
    assert error.remedy
    assert error.remedy.rstrip(".") in str(error)


def test_the_script_gets_its_rank_and_arguments(script: Path) -> None:
    status, out, err = finish(start("--nproc_per_node", "2", script, "--config", "c.py", "--mode", "train", "--", "-m"))
    assert status == 0, err
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert sorted(out.splitlines()) == [
        f"{rank} {rank} 2 {threads} __main__ train.py --config c.py --mode train -- -m" for rank in (0, 1)
    ]
    assert "OMP_NUM_THREADS" not in err


def test_a_module_runs_like_python_m(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    status, out, err = finish(start("--nproc-per-node=2", "-m", "train", "-m", "x", OMP_NUM_THREADS="3"))
    assert status == 0, err
    assert sorted(out.splitlines()) == [f"{rank} {rank} 2 3 __main__ train.py -m x" for rank in (0, 1)]


def test_the_first_failed_rank_is_reported_last(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    while not os.path.exists(__file__ + '.failing'):\n"
        "        time.sleep(0.01)\n"
        "    time.sleep(0.05)\n"
        "    raise RuntimeError('connection closed')\n"
        "open(__file__ + '.failing', 'w').close()\n"
        "raise ValueError('label 7 is out of\\nthe vocabulary')\n"
    )
    status, _, err = finish(start("--nproc_per_node", "2", bad))
    assert status == 1
    last = err.strip().splitlines()[-1]
    how = "(exit code 1|ended by the launcher while it was exiting)"
    assert re.search(f"rank 1 failed first, {how}: ValueError: label 7 is out of the vocabulary", last), last
    assert "worker.py" not in err
    assert err.count("Traceback") <= 2  # the workers' own tracebacks, and none of the launcher


def test_a_killed_rank_is_reported(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import os, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\ntime.sleep(60)\n")
    status, _, err = finish(start("--nproc_per_node", "2", bad))
    assert status == 1
    assert "rank 1 failed first, killed by SIGKILL" in err.strip().splitlines()[-1]


WAITS = """
import ctypes, os, signal, sys, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "slow":
    time.sleep(1)
    raise ValueError("rank 1 is gone")
child = os.fork()
if child == 0:
    time.sleep(60)
os.kill(child, signal.SIGTERM)
print("a child ended by", os.waitpid(child, 0)[1], flush=True)
mutex, library = ctypes.create_string_buffer(256), ctypes.CDLL(None)
library.pthread_mutex_lock(mutex)
library.pthread_mutex_lock(mutex)
"""
"""Rank 1 dies. Rank 0 notices late, or never, because it is in a call during which Python runs no signal handlers."""


def test_a_waiting_rank_has_time_to_report_its_error(tmp_path: Path) -> None:
    waits = tmp_path / "waits.py"
    waits.write_text(WAITS)
    status, _, err = finish(start("--nproc_per_node", "2", waits, "slow"))
    assert status == 1
    assert "rank 0 failed as well, exit code 1: ValueError: rank 1 is gone" in err
    assert "rank 1 failed first, killed by SIGKILL" in err.strip().splitlines()[-1]


def test_a_rank_without_error_is_ended_and_its_children_at_once(tmp_path: Path) -> None:
    waits = tmp_path / "waits.py"
    waits.write_text(WAITS)
    began = time.monotonic()
    status, out, err = finish(start("--nproc_per_node", "2", waits, "never"))
    assert status == 1
    assert time.monotonic() - began < 25, "the launcher kills after 30 seconds"
    assert f"a child ended by {signal.SIGTERM:d}" in out
    assert "rank 0" not in err
    assert "rank 1 failed first, killed by SIGKILL" in err.strip().splitlines()[-1]


FORKS = """
import os, signal, time
for _ in range(100):
    child = os.fork()
    if child == 0:
        time.sleep(1)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
print("all ended", flush=True)
"""


def test_a_forked_child_ends_on_sigterm_and_the_rank_continues(tmp_path: Path) -> None:
    forks = tmp_path / "forks.py"
    forks.write_text(FORKS)
    status, out, err = finish(start("--nproc_per_node", "1", forks))
    assert status == 0, err
    assert "all ended" in out


def test_two_hosts_of_a_host_file_form_one_run(script: Path) -> None:
    path = hostfile(script.parent, "127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = ("--hostfile", path, "--master_port", str(port), "--node_rank")
    both = [start(*common, str(node), script, OMP_NUM_THREADS="1") for node in (0, 1)]
    results = [finish(process) for process in both]
    assert [status for status, _, _ in results] == [0, 0], results
    assert [out.split()[:3] for _, out, _ in results] == [["0", "0", "2"], ["1", "0", "2"]]


def test_an_error_prints_a_message_without_traceback_and_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    missing = tmp_path / "trian.py"
    status, _, err = finish(start("--nproc_per_node", "2", missing))
    assert status == 2
    assert err.startswith("LaunchError: ") and "Traceback" not in err
    assert str(missing) in err and "train.py" in err
    assert "Traceback" in finish(start("--nproc_per_node", "2", missing, SHARDFORMER_TRACEBACK="1"))[2]


def test_an_error_raised_on_all_ranks_is_printed_once(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from shardformer.config import ShardConfig\n"
        "def configure():\n"
        "    return ShardConfig(enable_sequence_overlap=True)\n"
        "import glob, os, pathlib, time\n"
        "here = f'{__file__}.{os.getppid()}'\n"
        "pathlib.Path(f'{here}.{os.environ[\"RANK\"]}').touch()\n"
        "while len(glob.glob(f'{here}.*')) < 2:\n"
        "    time.sleep(0.001)  # the launcher ends a rank that is still importing when the other has failed\n"
        "configure()\n"
    )
    status, _, err = finish(start("--nproc_per_node", "2", bad))
    assert status == 1 and "Traceback" not in err and "__post_init__" not in err
    assert err.count("enable_sequence_overlap=True requires") == 1
    assert err.count(f'File "{bad}", line 3, in configure') == 1
    last = err.strip().splitlines()[-1]
    assert "all 2 ranks: exit code 1, ConfigError" in last and "SHARDFORMER_TRACEBACK=1" in last
    _, _, err = finish(start("--nproc_per_node", "2", bad, SHARDFORMER_TRACEBACK="1"))
    assert err.count("Traceback") == 2 and "__post_init__" in err


def test_a_rank_that_exited_early_is_reported_instead_of_the_waiting_one(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if dist.get_rank() == 1:\n"
        "    os._exit(0)\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    status, _, err = finish(start("--nproc_per_node", "2", bad, GLOO_SOCKET_IFNAME="lo"))
    last = err.strip().splitlines()[-1]
    assert status == 1
    assert "rank 1 exited before rank 0" in last and "failed first" not in last and "peer" not in last


def failure(exitcode: int, message: str = "", time_s: float = 0.0, **note: object) -> Any:
    found = {"message": message, "extraInfo": {"time_s": time_s, **note}} if message else "<NONE>"
    return SimpleNamespace(
        pid=0, exitcode=exitcode, timestamp=int(time_s), error_file_data={"message": found}, signal_name=lambda: "SIGX"
    )


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ({0: failure(1, "b", 5.2), 1: failure(1, "a", 5.1)}, 1),
        ({0: failure(1, "connection closed", 5.2), 1: failure(-9, time_s=6)}, 1),
        ({0: failure(1, "Connection reset by peer", 5.1), 1: failure(1, "a", 5.2)}, 1),
        ({0: failure(-15, time_s=4), 1: failure(1, "a", 5.1)}, 1),
        ({0: failure(143, time_s=4), 1: failure(1, "a", 5.1)}, 1),
        ({0: failure(-15), 1: failure(-15)}, 0),
    ],
)
def test_the_cause_is_distinguished_from_its_consequences(failures: dict[int, Any], first: int) -> None:
    assert f"rank {first} failed first" in format_failure_report(failures).splitlines()[-1]


OURS = ["ConfigError", "x=3", "It is even", "Use 2"]


@pytest.mark.parametrize(
    ("failures", "ranks", "words"),
    [
        # on another machine, whose ranks the launcher does not know
        ({0: failure(1, "Connection closed by peer")}, range(0), "a process of its group exited before rank 0"),
        ({2: failure(1, "Connection closed by peer")}, range(3), "ranks 0, 1 exited before rank 2"),
        # the launcher ended rank 1 while it was exiting, and rank 0, which had raised the error first
        *(
            (
                {r: failure(c, "x=3", r, parts=OURS, world_size=2) for r, c in enumerate(codes)},
                range(2),
                "all 2 ranks: exit code 1, ConfigError",
            )
            for codes in ((1, -15), (-15, 1))
        ),
        ({1: failure(1, "x=3", 1, parts=OURS, world_size=4), 0: failure(-15)}, range(2), "run: rank 1 of 4: exit"),
    ],
)
def test_the_last_line_names_the_ranks(failures: dict[int, Any], ranks: range, words: str) -> None:
    assert words in format_failure_report(failures, ranks).splitlines()[-1]


def test_a_rank_that_executed_other_code_is_reported_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = ["LostPeerError", "Rank 0 does not reach rank 1", "Ranks make the same calls", "See rank 1"]
    failures = {0: failure(1, lost[1], 5, parts=lost, world_size=2), 1: failure(143)}
    monkeypatch.setitem(STACK_LOCATIONS, 1, '  File "train.py", line 7, in <module>\n    time.sleep(100)')
    said = format_failure_report(failures, range(2)).splitlines()
    assert said[-4].startswith("shardformer run: rank 1 had not failed") and said[-1].strip() == "time.sleep(100)"
    fault = {0: failure(1, "ValueError: x", 5), 1: failure(143)}
    assert "rank 0 failed first" in format_failure_report(fault, range(2)).splitlines()[-1]


def test_a_host_file_may_have_comments_and_no_slots(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "# the cluster\nnode1 slots=4  # first\n\n  node2   slots = 2\n10.0.0.3\n")
    assert read_hostfile(path) == [HostEntry("node1", 4), HostEntry("node2", 2), HostEntry("10.0.0.3", None)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", "lists no machine"),
        ("# only this\n", "lists no machine"),
        ("node1 slots=four\n", "slots=four"),
        ("node1\nnode2 slots=0\n", "Line 2"),
        ("node1 4\n", "'node1 4'"),
        ("slots=4\n", "'slots=4'"),
        ("node1\nnode1 slots=2\n", "repeats the name 'node1'"),
    ],
)
def test_an_invalid_host_file_raises(tmp_path: Path, text: str, value: str) -> None:
    with pytest.raises(LaunchError) as caught:
        read_hostfile(hostfile(tmp_path, text))
    assert_four_parts(caught.value, value)


def test_a_missing_host_file_raises(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        read_hostfile(tmp_path / "none")
    assert_four_parts(caught.value, "none")


def test_selected_hosts_keep_the_order_of_the_file() -> None:
    hosts = [HostEntry("a", 1), HostEntry("b", 2), HostEntry("c", 3)]
    assert select_hosts_by_name("c,a", hosts) == [HostEntry("a", 1), HostEntry("c", 3)]
    assert select_hosts_by_name("x, y", None) == [HostEntry("x"), HostEntry("y")]
    for names in ("d", "", "a,a"):
        with pytest.raises(LaunchError) as caught:
            select_hosts_by_name(names, hosts)
        assert_four_parts(caught.value, repr(names))


def test_this_machine_is_found_by_name_or_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node2")
    monkeypatch.setattr(socket, "getfqdn", lambda: "node2.cluster")
    # without a name server, only 127.0.0.1 is an address of this machine
    monkeypatch.setattr(launcher_hostfile, "_is_local_address", lambda name: name == "127.0.0.1")
    assert find_local_host_index([HostEntry("node1"), HostEntry("node2"), HostEntry("127.0.0.1")]) == 1
    assert find_local_host_index([HostEntry("node1.cluster"), HostEntry("NODE2.cluster")]) == 1
    assert find_local_host_index([HostEntry("node1.other"), HostEntry("node2.other")]) == 1
    assert find_local_host_index([HostEntry("192.0.2.1"), HostEntry("127.0.0.1")]) == 1
    with pytest.raises(LaunchError) as caught:
        find_local_host_index([HostEntry("node7"), HostEntry("node8")])
    assert_four_parts(caught.value, "matches 0 hosts of the list node7, node8")
    assert "--node_rank 0 or 1" in caught.value.remedy


def test_local_addresses_are_recognized() -> None:
    assert launcher_hostfile._is_local_address("127.0.0.1")
    assert not launcher_hostfile._is_local_address("192.0.2.1")  # reserved for documentation


def test_a_host_file_sets_missing_options(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "192.0.2.1 slots=4\n127.0.0.1 slots=4\n")
    options = parse_run_arguments(["--hostfile", str(path), "train.py", "--hostfile", "mine"])
    filled = (options.nnodes, options.nproc_per_node, options.node_rank, options.master_addr)
    assert filled == ("2", "4", 1, "192.0.2.1")
    assert options.training_script_args == ["--hostfile", "mine"]
    said = ["--nproc_per_node", "2", "--node_rank", "0", "--master_addr", "10.0.0.9"]
    options = parse_run_arguments(["--hostfile", str(path), *said, "train.py"])
    assert (options.nproc_per_node, options.node_rank, options.master_addr) == ("2", 0, "10.0.0.9")


def test_without_hosts_the_options_equal_those_of_torchrun() -> None:
    from torch.distributed.run import get_args_parser

    for arguments in (["--nnodes", "2", "--node_rank", "1", "-t", "3", "a.py", "-x"], ["--standalone", "-m", "a.b"]):
        ours, theirs = vars(parse_run_arguments(arguments)), vars(get_args_parser().parse_args(arguments))
        ours["local_addr"] = None  # shardformer sets 127.0.0.1 for a single machine
        assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ([], "No script was passed"),
        (["--nproc_per_node", "2"], "No script was passed"),
        (["--frobnicate=2", "a.py"], "--frobnicate"),
        (["--nproc", "2", "a.py"], "'--nproc' is ambiguous"),
        (["--nproc_per_node", "many", "a.py"], "'many'"),
        (["--nproc_per_node", "0", "a.py"], "must be at least 1"),
        (["--nnodes", "none", "a.py"], "'none'"),
        (["--nnodes", "2", "--node_rank", "2", "a.py"], "--node_rank 2"),
        (["--host", "127.0.0.1", "--standalone", "a.py"], "--standalone"),
        (["--host", "127.0.0.1", "--rdzv_endpoint", "x:1", "a.py"], "rendezvous"),
        (["--host", "127.0.0.1", "--nnodes", "2", "a.py"], "--nnodes 2 does not match"),
        (["--nproc_per_node", "99999999999999999999", "a.py"], "too many processes"),
        (["--nproc_per_node", "1000000", "a.py"], "1000000 processes"),
        (["--nnodes", "99999999999999999999", "a.py"], "--nnodes '9999"),
        (["--standalone", "--nnodes", "2", "a.py"], "--standalone runs on one machine"),
        (["--standalone", "--master_port", "1234", "a.py"], "--master-port 1234 has no effect with --standalone"),
        (
            ["--rdzv_backend", "c10d", "--master_addr", "x", "a.py"],
            "--master-addr x has no effect with --rdzv-backend c10d",
        ),
        (
            ["--monitor-interval", "inf", "a.py"],
            "--monitor-interval must be a number of seconds up to 86400, but got inf",
        ),
        (["--shutdown-timeout", "99999999999999", "a.py"], "--shutdown-timeout"),
        (["--signals-to-handle", "SIGKILL", "a.py"], "'SIGKILL'"),
        (["--local-addr", "nowhere.invalid", "a.py"], "'nowhere.invalid'"),
    ],
)
def test_invalid_options_raise(arguments: list[str], value: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_run_arguments(arguments)
    assert_four_parts(caught.value, value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rdzv_backend", "nope", "--rdzv_endpoint", "host:1"], "'nope' is not registered"),
        (["--master_port", "99999999"], "99999999"),
        (["--redirects", "9x"], "9x"),
        (["--max_restarts", "-1"], "max_restarts"),
        (["--log-dir", __file__], "is a file"),
        (["--rdzv_backend", "etcd", "--rdzv_endpoint", "localhost:1"], "etcd"),
    ],
)
def test_errors_of_torchs_launcher_become_launch_errors(tmp_path: Path, options: list[str], said: str) -> None:
    (tmp_path / "a.py").touch()
    with pytest.raises(LaunchError) as caught:
        cli_run._launch_with_torchrun(parse_run_arguments([*options, str(tmp_path / "a.py")]))
    assert_four_parts(caught.value, said)


def test_a_pet_variable_that_is_not_a_number_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_STANDALONE", "x")
    with pytest.raises(LaunchError) as caught:
        parse_run_arguments(["a.py"])
    assert_four_parts(caught.value, "PET_...")


def test_a_pipe_as_script_raises(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.py")
    with pytest.raises(LaunchError) as caught:
        cli_run._check_script_exists(parse_run_arguments([str(tmp_path / "a.py")]))
    assert_four_parts(caught.value, "is a pipe")


def test_a_folder_without_main_as_script_raises(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        cli_run._check_script_exists(parse_run_arguments([str(tmp_path)]))
    assert_four_parts(caught.value, "has no __main__.py")
    (tmp_path / "__main__.py").touch()
    cli_run._check_script_exists(parse_run_arguments([str(tmp_path)]))


def test_an_ambiguous_abbreviation_lists_each_option_once() -> None:
    for short, remedy in (("--nproc", "--nproc-per-node?"), ("--node", "--node-rank?")):
        with pytest.raises(LaunchError) as caught:
            parse_run_arguments([short, "2", "a.py"])
        assert caught.value.remedy == f"Did you mean {remedy}"


def test_hosts_with_different_slots_need_nproc_per_node(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "127.0.0.1 slots=4\nnode2\n")
    with pytest.raises(LaunchError) as caught:
        parse_run_arguments(["--hostfile", str(path), "--node_rank", "0", "a.py"])
    assert_four_parts(caught.value, "127.0.0.1 4, node2 without slots")
    assert (
        parse_run_arguments(
            ["--hostfile", str(path), "--node_rank", "0", "--nproc_per_node", "3", "a.py"]
        ).nproc_per_node
        == "3"
    )


@pytest.mark.parametrize("arguments", [["none.py"], ["-m", "no_such_module"], ["--no_python", "no-such-program"]])
def test_a_missing_script_raises(arguments: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        cli_run._check_script_exists(parse_run_arguments(arguments))
    assert_four_parts(caught.value, arguments[-1])


@pytest.mark.parametrize("how", ["stopped", "deaf"])
def test_the_launcher_kills_and_reports_a_process_that_ignores_sigterm(how: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '1' and sys.argv[1] == 'deaf':\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.write(1, b'ready\\n')\n"
        "if os.environ['RANK'] == '1' and sys.argv[1] == 'stopped':\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "time.sleep(100)\n"
    )
    process = start("--nproc_per_node", "2", "--shutdown-timeout", "4", script, how, PYTHON_EXEC=sys.executable)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    begin = time.monotonic()
    process.terminate()
    code, _, err = finish(process)
    assert code == 128 + signal.SIGTERM and time.monotonic() - begin < 10
    assert err.lstrip().startswith("SIGTERM: waiting at most 4 s for 2 processes to end; send it again to end them")
    assert "ended by SIGTERM" in err
    assert ("it was stopped (SIGSTOP" if how == "stopped" else "it did not end on SIGTERM") in err
    assert f'rank 0 was at\n  File "{script}", line 7, in <module>\n    time.sleep(100)' in err
