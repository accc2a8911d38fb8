"""Every layer, buffer, mask, loss and state is on the rank's device: checked on a fake accelerator, without a GPU."""

from __future__ import annotations

import pytest

from shardformer.local_ranks.worker_pool import WorkerPool
from tests.gpu.fake_steps import Layout, misplaced_by_hand, misplaced_in_training, run_forgetful

pytestmark = pytest.mark.slow

SEQUENCE = {"enable_sequence_parallelism": True}
LAYOUTS = {
    "tensor": Layout({"tensor": 2}),
    "sequence-parallel": Layout({"tensor": 2}, SEQUENCE),
    "overlap": Layout({"tensor": 2}, {**SEQUENCE, "enable_sequence_overlap": True}),
    "data": Layout({"data": 2}),
    "fused-adam": Layout({"data": 2}, zero={"stage": 2}, adam={"fused": True}),
    "zero-1": Layout({"tensor": 2, "data": 2}, zero={"stage": 1}),
    "zero-2": Layout({"data": 2}, zero={"stage": 2}),
    "zero-3": Layout({"data": 2}, zero={"stage": 3}),
    "bf16": Layout({"data": 2}, zero={"stage": 2, "precision": "bf16"}),
    "bf16-3": Layout({"tensor": 2, "data": 2}, zero={"stage": 3, "precision": "bf16"}),
    "fp16": Layout({"data": 2}, zero={"stage": 2, "precision": "fp16"}),
    "offload": Layout({"data": 2}, zero={"stage": 2, "precision": "bf16", "offload": "cpu"}),
    "activations": Layout({"tensor": 2}, activations="host"),
    "pipeline": Layout({"pipe": 2}),
    "context": Layout({"sequence": 2}),
    "fused": Layout({"tensor": 2}, {"enable_fused_normalization": True, "enable_jit_fused": True}),
    "flash": Layout({"tensor": 2}, {"enable_flash_attention": True}),
}
OTHERS = {
    "gpt2": ["zero-3", "context", "pipeline"],
    "bert": ["sequence-parallel", "offload"],
    "t5": ["sequence-parallel", "zero-3", "pipeline"],
    "bloom": ["tensor", "context"],
    "vit": ["tensor", "pipeline"],
}
CASES = [("llama", name) for name in LAYOUTS] + [(family, name) for family, names in OTHERS.items() for name in names]


@pytest.mark.reduced(one_in=6, at_most=2)
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_step_leaves_no_tensor_on_another_device(fake_gpu: WorkerPool, family: str, layout: str) -> None:
    assert fake_gpu.run(misplaced_in_training, family, LAYOUTS[layout]) == [[]]


def test_a_tensor_that_is_left_on_the_cpu_raises(fake_gpu: WorkerPool) -> None:
    [said] = fake_gpu.run(run_forgetful)
    assert "fakegpu:0 and cpu" in said


def test_buffers_and_states_on_another_device_are_named(fake_gpu: WorkerPool) -> None:
    [found] = fake_gpu.run(misplaced_by_hand)
    assert found == ["buffer mask on cpu", "AdamW: exp_avg of 0 on cpu"]
