"""Two hosts, simulated by network namespaces of this machine, and a link between them that is interrupted.

sudo python -m tests.hostile.links          # Linux, with ip and unshare
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("host0", "host1")
TIMEOUT_S = 20
ANSWERS_S = 90.0
TRAIN = f"""
import sys, time
import torch, transformers
import shardformer

axis = sys.argv[1]
context = shardformer.launch_from_torch(**{{axis: 2}}, timeout_s={TIMEOUT_S})
torch.manual_seed(0)
config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                  vocab_size=64)
model = shardformer.shard_model(transformers.LlamaForCausalLM(config).train(), context=context)
pipeline = shardformer.Pipeline(model, micro_batches=2) if axis == "pipe" else None
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
for step in range(400):
    given = dict(input_ids=ids, labels=ids)
    pipeline.step(given) if pipeline else model(**given).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 50:
        print("trains", flush=True)
    time.sleep(0.02)
print("DONE", flush=True)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def two_hosts() -> Iterator[None]:
    """Create the hosts, each with an address in 10.77.0.0/24 and a name that resolves to 127.0.0.1."""
    for host in HOSTS:
        ip("netns", "add", host)
    try:
        ip("link", "add", "end0", "netns", HOSTS[0], "type", "veth", "peer", "name", "end1", "netns", HOSTS[1])
        for n, host in enumerate(HOSTS):
            ip("-n", host, "addr", "add", f"10.77.0.{n + 1}/24", "dev", f"end{n}")
            ip("-n", host, "link", "set", f"end{n}", "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield
    finally:
        for host in HOSTS:
            ip("netns", "del", host)


def start(host: str, axis: str, folder: Path, first: str = "10.77.0.1") -> subprocess.Popen[str]:
    """Start the launcher of one host. Its output goes to a file with its name."""
    (folder / "train.py").write_text(TRAIN)
    (folder / f"hosts-{host}").write_text(f"127.0.0.1 localhost {host}\n")
    node = HOSTS.index(host)
    meet = f"--nnodes 2 --node_rank {node} --nproc_per_node 1 --master_addr {first} --master_port 29511"
    run = f"{sys.executable} -m shardformer run {meet} {folder}/train.py {axis}"
    inside = f"hostname {host} && mount --bind {folder}/hosts-{host} /etc/hosts && exec {run}"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = ["ip", "netns", "exec", host, "unshare", "--uts", "--mount", "sh", "-c", inside]
    with open(folder / host, "w") as said:
        return subprocess.Popen(command, env=env, stdout=said, stderr=subprocess.STDOUT, text=True)


def cut(axis: str, seconds: float | None) -> str:
    """Interrupt the link for ``seconds`` or permanently. Return an empty string, or a description of the error."""
    with two_hosts(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launchers = [start(host, axis, folder) for host in HOSTS]
        began = time.monotonic()
        while "trains" not in (folder / HOSTS[0]).read_text() and time.monotonic() - began < ANSWERS_S:
            time.sleep(0.2)
        ip("-n", HOSTS[0], "link", "set", "end0", "down")
        if seconds is not None:
            time.sleep(seconds)
            ip("-n", HOSTS[0], "link", "set", "end0", "up")
        return _judged(launchers, folder, axis, ends_well=seconds is not None)


def _judged(launchers: list[subprocess.Popen[str]], folder: Path, axis: str, ends_well: bool) -> str:
    for launcher in launchers:
        try:
            launcher.wait(ANSWERS_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            return "a launcher does not end"
    for n, host in enumerate(HOSTS):
        said = (folder / host).read_text()
        if ends_well and "DONE" not in said:
            return f"{host} did not end well:\n{said[-1500:]}"
        peer = f"rank {1 - n} on host {HOSTS[1 - n]} on the {axis} axis"
        if not ends_well and not re.search(rf"LostPeerError.*{peer}.*after step \d+", said):
            return f"{host} does not name its peer:\n{said[-1500:]}"
    return ""


def absent(host: str, first: str, words: str) -> str:
    """Start one host alone or with a wrong address. It must report what it waits for within 30 s."""
    with two_hosts(), tempfile.TemporaryDirectory() as name:
        launcher, began = start(host, "data", Path(name), first), time.monotonic()
        said = ""
        while words not in said and time.monotonic() - began < 40:
            time.sleep(0.2)
            said = (Path(name) / host).read_text()
        seconds = time.monotonic() - began
        launcher.terminate()
        launcher.wait(ANSWERS_S)
        return "" if words in said and seconds < 30 else f"after {seconds:.0f} s:\n{said[-1500:]}"


def main() -> None:
    axes = ("tensor", "pipe", "data")
    tries: dict[str, Callable[[], str]] = {
        **{f"cut for 5 s ({axis} 2)": partial(cut, axis, 5.0) for axis in axes},
        **{f"cut for good ({axis} 2)": partial(cut, axis, None) for axis in axes},
        "the second host does not come": partial(absent, HOSTS[0], "10.77.0.1", "for node 1"),
        "the first host does not come": partial(
            absent, HOSTS[1], "10.77.0.1", "could not connect to node 0 at 10.77.0.1"
        ),
        "a wrong address": partial(absent, HOSTS[1], "10.77.0.9", "could not connect to node 0 at 10.77.0.9"),
    }
    wrong = 0
    for name, attempt in tries.items():
        problem = attempt()
        wrong += bool(problem)
        print(f"{name}: {problem or 'as it is to be'}", flush=True)
    sys.exit(min(wrong, 1))


if __name__ == "__main__":
    main()
