"""Communication in a training step of a sharded LLaMA, by the recorder and by the counters of the loopback device.

    python benchmarks/wire_bytes.py
    sudo python benchmarks/wire_bytes.py --namespace

The recorder counts collectives when they start, and the minimum bytes that they need. The kernel counts all bytes on
the loopback device, including headers and acknowledgements, once per byte sent: those of both ranks and both
directions. It also counts the traffic of other programs. Therefore ``--namespace`` runs the command in a separate
network namespace, which needs root and iproute2 (Linux).

A counter around the full command (``--steps N`` and ``--steps N+1``, and the difference) gives the same result.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch.distributed as dist
from common import MB, Llama

import shardformer
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.mesh.parallel_context import ParallelContext

DEVICES = Path("/proc/net/dev")


@dataclass(frozen=True)
class Sent:
    """Traffic of a step: (kind, axis, purpose) -> (collectives, wire bytes); loopback bytes and packets if known."""

    recorded: dict[tuple[str, str, str], tuple[int, int]]
    loopback: tuple[float, float] | None
    loss: float


def measure(size: Llama, batch: int, num_steps: int, options: dict[str, Any]) -> Sent:
    """Measure in every process, without the first step, in which ranks compare batches and optimizer states."""
    context = ParallelContext.from_default_process_group({"tensor": 2})
    model = shardformer.shard_model(size.build(), context=context, **options)
    step = common.train_step(model, size.batches(batch), common.adamw(model))
    loss = step(0)
    before = counted()
    for index in range(num_steps):
        with CollectiveRecorder(context) as recorder:
            loss = step(index)
    after = counted()
    nothing = counted()  # traffic of the measurement itself
    loopback = None
    if before and after and nothing:
        per_step = [(b - a - (c - b)) / num_steps for a, b, c in zip(before, after, nothing)]
        loopback = (per_step[0], per_step[1])
    return Sent(recorder.summarize_calls(), loopback, loss)


def counted() -> tuple[int, int] | None:
    """Return bytes and packets received on the loopback device, or None without counters. No rank may send."""
    dist.barrier()
    found = read_loopback() if dist.get_rank() == 0 else None
    dist.barrier()
    return found


def read_loopback() -> tuple[int, int] | None:
    if not DEVICES.exists():
        return None
    for line in DEVICES.read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            received = counts.split()
            return int(received[0]), int(received[1])
    return None


def report(sent: Sent) -> str:
    rows = [
        [f"{kind}, {purpose}", str(count), f"{wire_bytes / MB:.3f}"]
        for (kind, _, purpose), (count, wire_bytes) in sent.recorded.items()
    ]
    values = list(sent.recorded.values())
    rows.append(["all", str(sum(n for n, _ in values)), f"{sum(b for _, b in values) / MB:.3f}"])
    out = common.table(["collective", "calls per step", "least MB per step"], rows)
    if sent.loopback is None:
        return f"{out}\n\nthis system does not say what crosses its loopback device"
    crossed, packets = sent.loopback
    return f"{out}\n\nbytes that crossed loopback a step: {crossed / MB:.3f} MB in {packets:,.0f} packets"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.namespace:
        return enter_namespace(list(sys.argv[1:] if argv is None else argv))
    size = Llama(args.hidden, args.intermediate, args.heads, args.sequence, args.layers, args.vocabulary)
    options = {f"enable_{name.replace('-', '_')}": True for name in args.options}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with common.two_processes(args.threads) as pool:
        sent = pool.run(measure, size, args.batch, args.steps, options)[0]
    if args.json:
        found = {"recorded": {" ".join(k): v for k, v in sent.recorded.items()}, "loopback": sent.loopback}
        print(common.as_json("wire_bytes", vars(args), found))
    else:
        title = (
            f"{args.layers} layers, hidden {args.hidden}, intermediate {args.intermediate}, {args.heads} heads, "
            f"vocabulary {args.vocabulary}, fp32, batch {args.batch} x {args.sequence}, two ranks, "
            f"{' and '.join(args.options) or 'no options'}"
        )
        print(f"\n{title}\n\n{report(sent)}")
    return 0


def enter_namespace(argv: list[str]) -> int:
    """Run this script again in a separate network namespace. Does not return."""
    if not (shutil.which("unshare") and shutil.which("ip")) or os.geteuid() != 0:
        print("--namespace needs root, and the commands unshare and ip (util-linux and iproute2)", file=sys.stderr)
        return 2
    again = [sys.executable, __file__, *[a for a in argv if a != "--namespace"]]
    os.execvp("unshare", ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *again])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3, help="number of measured steps")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=688)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--options", nargs="*", default=[], help="options of ShardConfig, such as sequence-parallelism")
    parser.add_argument("--threads", type=int, default=1, help="torch threads per process")
    parser.add_argument("--namespace", action="store_true", help="run in a separate network namespace")
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON instead of a table")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
