"""The recorder's events: starts and waits in order, with their call sites."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardformer.comm.collectives import all_reduce, start_all_reduce
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.pipeline.p2p_communication import PointToPointCommunicator


def test_starts_and_waits_are_recorded_in_order() -> None:
    def collect(context: ParallelContext) -> list[tuple[str, int]]:
        with CollectiveRecorder(context) as recorder:
            first = start_all_reduce(torch.zeros(1), context.tensor)
            second = start_all_reduce(torch.zeros(2), context.tensor)
            second.wait()
            first.wait()
        unheard = start_all_reduce(torch.zeros(3), context.tensor)
        unheard.wait()
        assert context.traffic.events == context.traffic.calls == []
        assert [call.payload_bytes for call in recorder.calls] == [4, 8]
        return [(kind, call.payload_bytes) for kind, call in recorder.events]

    assert run_as_threads(collect, tensor=2)[0] == [("start", 4), ("start", 8), ("wait", 8), ("wait", 4)]


def test_receive_is_an_event_but_no_call() -> None:
    def talk(context: ParallelContext) -> tuple[list[str], list[str], int]:
        wires = PointToPointCommunicator(context)
        with CollectiveRecorder(context) as recorder:
            if context.pipe.rank == 0:
                wires.send(torch.zeros(2), 1, "activation").wait()
            else:
                wires.receive(torch.zeros(2), 0, "activation").wait()
        return (
            [f"{kind} {call.op}" for kind, call in recorder.events],
            [call.op for call in recorder.calls],
            recorder.wire_bytes(),
        )

    assert run_as_threads(talk, pipe=2) == [
        (["start send", "wait send"], ["send"], 8),
        (["start receive", "wait receive"], [], 0),
    ]


class Reduce(nn.Module):
    def __init__(self, axis: Axis, *parts: nn.Module) -> None:
        super().__init__()
        self.axis, self.parts = axis, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return all_reduce(x.clone(), self.axis)


def test_collective_records_module_and_action() -> None:
    def run(context: ParallelContext) -> list[tuple[str, str]]:
        axis = context.tensor
        model = nn.Sequential(Reduce(axis), Reduce(axis, Reduce(axis)))
        with CollectiveRecorder(context, model) as recorder:
            model(torch.ones(1))
            with context.traffic.temporarily_set_call_site(pipeline_action="F0@1"):
                all_reduce(torch.ones(1), axis)
        model(torch.ones(1))
        assert context.traffic.where == ("", "")
        assert not any(module._forward_hooks for module in model.modules())
        return [tuple(call.where) for call in recorder.calls]

    assert run_as_threads(run, tensor=2)[1] == [("0", ""), ("1.parts.0", ""), ("1", ""), ("", "F0@1")]
