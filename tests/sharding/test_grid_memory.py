"""Memory of a rank on a tensor grid: its share of saved activations and of weights."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

import shardformer
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext, reshape_tensor_axis
from tests.ops import seeing_parts

pytestmark = pytest.mark.slow

SAMPLES, TOKENS, WIDTH = 8, 64, 128


def plain() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=352, num_hidden_layers=2, num_attention_heads=8, vocab_size=512
    )
    return transformers.LlamaForCausalLM(config)


def saved_by(model: nn.Module) -> int:
    """Return the bytes that autograd saves from the first to the last layer, counting each storage once."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}
    inside = False

    def pack(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        if inside and memory.data_ptr() not in weights:
            held[memory.data_ptr()] = memory.nbytes()
        return x

    @seeing_parts
    def begin(*_: object) -> None:
        nonlocal inside
        inside = True

    @seeing_parts
    def end(*_: object) -> None:
        nonlocal inside
        inside = False

    layers = model.get_submodule("model.layers")
    layers[0].register_forward_pre_hook(begin)
    layers[-1].register_forward_hook(end)
    tokens = torch.arange(SAMPLES * TOKENS).view(SAMPLES, TOKENS) % 512
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return sum(held.values())


@pytest.mark.reduced(cover="mode", mode=("2d", "3d"), at_most=1)
@pytest.mark.parametrize(
    ("mode", "sizes"),
    [("2d", (2, 2)), ("2d", (4, 1)), ("2d", (1, 4)), ("2.5d", (2, 2, 2)), ("3d", (2, 2, 2)), ("3d", (2, 1, 2))],
    ids=str,
)
def test_activations_and_weights_are_sharded_over_all_ranks(mode: str, sizes: tuple[int, ...]) -> None:
    ranks = torch.Size(sizes).numel()
    copies = sizes[2] if mode == "2.5d" else 1

    def hold(context: ParallelContext) -> tuple[int, int]:
        model = shardformer.shard_model(plain(), context=reshape_tensor_axis(context, sizes), tensor_parallel_mode=mode)
        return saved_by(model), sum(p.numel() for p in model.get_submodule("model.layers").parameters() if p.dim() > 1)

    weights = sum(p.numel() for p in plain().get_submodule("model.layers").parameters() if p.dim() > 1)
    alone = saved_by(plain())
    for saved, own in run_as_threads(hold, tensor=ranks):
        assert saved * ranks <= 1.05 * alone
        assert own * ranks == weights * copies
