"""Fused activations with bias and gate in every family: loss and gradients are equal."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from shardformer.errors import ConfigError
from shardformer.kernels import fused_ops
from shardformer.kernels import fused_ops as fused
from tests.families.option import CASTS, FAMILIES, assert_same, plain, sharded

GELU, TANH, SILU, RELU = "gelu", "gelu tanh", "silu", "relu"
# Operations in the fused kernels. Falcon and T5 have neither a bias nor a gate.
KERNELS: dict[str, set[str]] = {
    **{family: {f"bias {GELU}"} for family in ("bert", "roberta", "ernie", "whisper", "vit", "swin", "swinv2", "beit")},
    **{family: {f"bias {TANH}"} for family in ("gpt2", "gpt_neo", "gptj", "albert", "bloom")},
    **{family: {f"bias {RELU}", f"bias {GELU}"} for family in ("blip-2", "sam")},
    "opt": {f"bias {RELU}"},
    **{family: {f"{SILU} gate"} for family in ("llama", "qwen2", "qwen3", "mistral")},
    "falcon": {GELU},
    "t5": {RELU},
}
WRITTEN_OUT = [family for family, ran in KERNELS.items() if ran == {f"bias {TANH}"}]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Return the names of the fused kernels that ran."""
    found: set[str] = set()
    lock, compute = threading.Lock(), fused_ops.apply_bias_activation_gate

    def noted(act: Any, x: Tensor, bias: Tensor | None, gate: Tensor | None) -> Tensor:
        name = TANH if isinstance(act, functools.partial) else getattr(act, "__name__", "")
        with lock:
            found.add(" ".join(["bias"] * (bias is not None) + [name] + ["gate"] * (gate is not None)))
        return compute(act, x, bias, gate)

    monkeypatch.setattr(fused, "get_compiled_bias_act_gate", lambda device: noted)
    yield found


@pytest.mark.feature("JIT-fused operators", family="chatglm")
def test_family_without_an_activation_module_is_refused(record_property: Callable[[str, object], None]) -> None:
    with pytest.raises(ConfigError, match="no GELU, SiLU or ReLU module") as refused:
        sharded("chatglm", "enable_jit_fused")
    record_property("feature", "refused: it has" + refused.value.what.rpartition(" has")[2])


@pytest.mark.slow
@pytest.mark.feature("JIT-fused operators")
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "chatglm"])
def test_activations_run_as_fused_kernels(family: str, ran: set[str]) -> None:
    ours = sharded(family, "enable_jit_fused")
    assert_same(ours, plain(family), CASTS)
    assert ran == KERNELS[family]
    assert ("GELU" in ours.replaced()) == (family in WRITTEN_OUT)
