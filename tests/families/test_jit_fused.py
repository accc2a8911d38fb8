"""Compiled chains in every family: which of them run, with the loss and all gradients of the plain model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from shardformer.errors import ConfigError
from shardformer.layers import fused_kernels as chain_kernels
from shardformer.layers.fused_kernels import Signature
from tests.families.option import CASTS, FAMILIES, assert_same, plain, sharded

GELU, NEW, SILU, RELU, FAST = "gelu", "gelu_new", "silu", "relu", "gelu_fast"
RESIDUAL = "bias add"  # the small models have no dropout between the two
# What runs as one kernel where every chain is worth one. T5 has no bias, no gate and no dropout here.
CHAINS: dict[str, set[str]] = {
    **{family: {f"bias {GELU}", RESIDUAL} for family in ("bert", "roberta", "ernie", "whisper", "vit")},
    **{family: {f"bias {GELU}"} for family in ("swin", "swinv2", "beit")},
    **{family: {f"bias {NEW}", RESIDUAL} for family in ("gpt2", "gpt_neo", "gptj", "albert")},
    **{family: {f"bias {RELU}", RESIDUAL} for family in ("opt", "blip-2")},
    "sam": {f"bias {RELU}"},
    **{family: {f"{SILU} mul"} for family in ("llama", "qwen2", "qwen3", "mistral")},
    "bloom": {f"bias {FAST}", RESIDUAL},
    "falcon": set(),
    "t5": set(),
}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Every chain is a kernel, made without the compiler; gives what ran forward."""
    found: set[str] = set()
    lock = threading.Lock()

    def kernel(function: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
        def noted(*inputs: Tensor) -> Any:
            with lock:
                found.add(" ".join(op.kind for op in signature.program))
            return function(*inputs)

        return noted

    monkeypatch.setattr(chain_kernels, "FUSES_ALL", ("cpu",))
    monkeypatch.setattr(chain_kernels, "_Kernel", kernel)
    chain_kernels._kernel.cache_clear()
    yield found
    chain_kernels._kernel.cache_clear()


@pytest.mark.feature("JIT-fused operators", family="chatglm")
def test_a_family_whose_activation_is_no_module(record_property: Callable[[str, object], None]) -> None:
    with pytest.raises(ConfigError, match="no activation that is a module of its own") as refused:
        sharded("chatglm", "enable_jit_fused")
    record_property("feature", "refused: it has" + refused.value.what.partition(" has")[2])


@pytest.mark.feature("JIT-fused operators")
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "chatglm"])
def test_the_chains_of_a_family(family: str, ran: set[str]) -> None:
    ours = sharded(family, "enable_jit_fused")
    assert_same(ours, plain(family), CASTS)
    assert "JitActivation" in ours.replaced()
    assert CHAINS[family] <= ran
