"""An attention module and an MLP whose outputs the layer adds share one collective."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from shardformer.comm.recorder import CollectiveRecorder
from shardformer.errors import PolicyError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.policies.families import GPTJPolicy
from shardformer.policies.roles import MLP, LayerStack
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory, compute_model_loss

assert isinstance(GPTJPolicy.stack, LayerStack) and isinstance(GPTJPolicy.stack.blocks[1], MLP)
MLP_ROLE = GPTJPolicy.stack.blocks[1]
PARALLEL = {"gptj": {}, "falcon": {}, "falcon of one KV head": {"new_decoder_architecture": False, "multi_query": True}}


def collectives(family: str, changes: dict[str, Any], training: bool = True, **options: bool) -> Counter[str]:
    """Return the collectives of the blocks in one forward pass."""
    models: list[nn.Module] = [SmallModelFactory(family, changes=changes)().train(training) for _ in range(2)]

    def forward(context: ParallelContext) -> Counter[str]:
        model = shard_model(models[context.tensor.rank], context=context, **options)
        with CollectiveRecorder(context) as recorder:
            compute_model_loss(model, RandomBatchFactory(DEFAULT_HEAD[family])(0))
        return Counter(call.op for call in recorder.calls if call.purpose == "block")

    return run_as_threads(forward, tensor=2)[0]


@pytest.mark.parametrize("name", PARALLEL)
def test_shared_exit_uses_one_collective(name: str) -> None:
    changes: dict[str, Any] = {"num_kv_heads": None} if name == "falcon of one KV head" else {}
    changes |= PARALLEL[name]
    assert collectives(name.partition(" ")[0], changes)["all_reduce"] == 1 + 2  # the embedding, two layers
    cut = collectives(name.partition(" ")[0], changes, enable_sequence_parallelism=True)
    # Falcon's layers read the embedding directly, so its sum is scattered, too. GPT-J applies dropout before
    assert cut["reduce_scatter"] == 2 + (name != "gptj")


def test_separate_dropout_uses_separate_exits() -> None:
    assert collectives("gptj", {"resid_pdrop": 0.1})["all_reduce"] == 1 + 4


def test_separate_residuals_use_separate_exits() -> None:
    old = {"new_decoder_architecture": False, "parallel_attn": False, "num_kv_heads": None}
    assert collectives("falcon", old)["all_reduce"] == 1 + 4


@pytest.mark.parametrize("path", [".attn.out_proj", "attn.out_proj.", "attn.out", "attn"])
def test_a_shared_exit_that_is_no_linear_layer_is_named(path: str) -> None:
    class Misnamed(GPTJPolicy):
        stack = replace(GPTJPolicy.stack, blocks=[GPTJPolicy.stack.blocks[0], replace(MLP_ROLE, shared_exit=path)])

    models = [SmallModelFactory("gptj")() for _ in range(2)]
    with pytest.raises(PolicyError, match=rf"transformer\.h\.\*\.+{re.escape(path.strip('.'))}"):
        run_as_threads(lambda context: shard_model(models[context.rank], Misnamed, context=context), tensor=2)
