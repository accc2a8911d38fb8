"""Peak memory of tensors in a training step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile


@dataclass
class Peak:
    """Peak memory ``num_bytes``, set at the end of the step."""

    num_bytes: int = 0


@contextmanager
def measure_peak(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Peak]:
    """Measure the peak memory of the training step that runs inside the block.

    Tensors that exist before the step are counted one by one. Allocations in the step are counted by torch's profiler,
    which sees all of them on the CPU. Gradients must be None before and after. Python and its libraries are not
    counted.
    """
    peak = Peak()
    before = _bytes_of(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        yield peak
    with TemporaryDirectory(prefix="shardformer-") as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: float(event["ts"])):
        held += int(event["args"]["Bytes"])
        highest = max(highest, held)
    peak.num_bytes = before + highest


def _bytes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for t in [*model.parameters(), *model.buffers(), *states]
    }
    return sum(storage.nbytes() for storage in storages.values())
