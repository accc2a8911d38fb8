"""Inputs other than token ids: embeddings with gradients, and learned keys and values."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import shardformer
from shardformer.errors import ConfigError, InputError
from shardformer.layout.sharding_metadata import get_shard_specs, get_sharding_metadata
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext

CACHE = "cache" if "cache" in signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
"""Name of the cache in arguments and outputs of this transformers version."""
IDS = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(1))
LAYOUTS: list[dict[str, Any]] = [
    {"sequence": 2},
    {"tensor": 2},
    {"tensor": 2, "enable_sequence_parallelism": True},
    {"sequence": 2, "tensor": 2},
    {"sequence": 2, "data": 2},
]


def llama(kv_heads: int = 4) -> Any:
    small = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**small, num_key_value_heads=kv_heads)
    return transformers.LlamaForCausalLM(config).double().train()


def of_ranks(layout: dict[str, Any], run: Any) -> None:
    sizes = {name: size for name, size in layout.items() if name in ("data", "tensor", "sequence", "pipe")}
    options = {name: value for name, value in layout.items() if name not in sizes}
    run_as_threads(lambda context: run(context, options), **sizes)


def perturbed(model: Any) -> tuple[Tensor, Tensor]:
    """Run the backward pass of embeddings from the model's table plus a perturbation. Returns the perturbation."""
    delta = torch.zeros(2, 8, 32, dtype=torch.float64, requires_grad=True)
    loss = model(inputs_embeds=model.get_input_embeddings()(IDS) + delta, labels=IDS).loss
    loss.backward()
    assert delta.grad is not None
    return delta.grad, loss


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_of_input_embeddings_and_their_table_are_full(layout: dict[str, Any]) -> None:
    plain = llama()
    expected, _ = perturbed(copy.deepcopy(plain))
    trained = copy.deepcopy(plain)
    perturbed(trained)
    gradients = {name: p.grad for name, p in trained.named_parameters()}

    def check(context: ParallelContext, options: dict[str, Any]) -> None:
        model = shardformer.shard_model(copy.deepcopy(plain), context=context, **options)
        found, _ = perturbed(model)
        torch.testing.assert_close(found, expected)
        specs, coords = get_shard_specs(model), get_sharding_metadata(model).coords
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, specs[name].slice_full_tensor(gradients[name], coords), msg=name)

    of_ranks(layout, check)


def test_autograd_grad_returns_the_full_gradient() -> None:
    plain = llama()

    def gradient(model: Any) -> Tensor:
        delta = torch.zeros(2, 8, 32, dtype=torch.float64, requires_grad=True)
        loss = model(inputs_embeds=model.get_input_embeddings()(IDS).detach() + delta, labels=IDS).loss
        return torch.autograd.grad(loss, delta)[0]

    expected = gradient(copy.deepcopy(plain))

    def check(context: ParallelContext, options: dict[str, Any]) -> None:
        torch.testing.assert_close(gradient(shardformer.shard_model(copy.deepcopy(plain), context=context)), expected)

    of_ranks({"sequence": 2}, check)


class Prefix(nn.Module):
    """Trained keys and values before the first token, for each layer."""

    def __init__(self, kv_heads: int, length: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.numbers = nn.Parameter(torch.randn(2, 2, kv_heads, length, 8, generator=generator, dtype=torch.float64))

    def gradient(self, model: Any, trains: bool = True) -> tuple[float, Tensor | None]:
        cache = transformers.DynamicCache()
        for layer, (keys, values) in enumerate(self.numbers if trains else self.numbers.detach()):
            cache.update(keys.expand(2, -1, -1, -1), values.expand(2, -1, -1, -1), layer)
        mask = torch.ones(2, 11, dtype=torch.long)
        loss = model(input_ids=IDS, attention_mask=mask, labels=IDS, **{CACHE: cache}).loss
        loss.backward()
        grad, self.numbers.grad = self.numbers.grad, None
        return loss.item(), grad


@pytest.mark.reduced(at_most=6)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"tensor": 3}, {"tensor": 4}, {"sequence": 2}], ids=str)
def test_learned_prefix_has_the_gradient_of_one_process(kv_heads: int, layout: dict[str, Any]) -> None:
    plain = llama(kv_heads).requires_grad_(False)
    expected = Prefix(kv_heads).gradient(plain)

    def check(context: ParallelContext, options: dict[str, Any]) -> None:
        model = shardformer.shard_model(copy.deepcopy(plain), context=context, **options)
        loss, found = Prefix(kv_heads).gradient(model)
        assert loss == pytest.approx(expected[0])
        torch.testing.assert_close(found, expected[1])

    of_ranks(layout, check)


def test_fixed_prefix_and_own_cache_continue_like_the_plain_model() -> None:
    plain = llama(2)
    loss, _ = Prefix(2).gradient(copy.deepcopy(plain), trains=False)
    with torch.no_grad():
        first = plain(input_ids=IDS[:, :5], use_cache=True)[CACHE]
        expected = plain(input_ids=IDS[:, 5:], **{CACHE: copy.deepcopy(first)}).logits

    def check(context: ParallelContext) -> None:
        model: Any = shardformer.shard_model(copy.deepcopy(plain), context=context)
        assert Prefix(2).gradient(model, trains=False)[0] == pytest.approx(loss)
        model.eval()
        with torch.no_grad():
            own = model(input_ids=IDS[:, :5], use_cache=True)[CACHE]
            for cache in (own, copy.deepcopy(first)):  # its own, and one of the plain model
                logits = model(input_ids=IDS[:, 5:], **{CACHE: cache}).logits
                torch.testing.assert_close(getattr(logits, "full_tensor", lambda x=logits: x)(), expected)

    run_as_threads(check, tensor=2)


def test_cache_with_wrong_heads_is_refused_and_unchanged() -> None:
    def check(context: ParallelContext) -> None:
        model: Any = shardformer.shard_model(llama(4), context=context)
        cache = transformers.DynamicCache()
        keys = torch.zeros(2, 3, 1, 8, dtype=torch.float64)
        cache.update(keys, keys, 0)
        with pytest.raises(ConfigError, match=r"cache of layer 0 has keys of shape \(2, 3, 1, 8\)"):
            model(input_ids=IDS, **{CACHE: cache})
        assert cache.layers[0].keys.shape == keys.shape

    run_as_threads(check, tensor=2)


def masked(model: Any) -> Tensor:
    """Return the gradient of an attention bias passed as a mask."""
    causal = torch.full((8, 8), float("-inf"), dtype=torch.float64).triu(1)
    bias = torch.zeros(2, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    model(input_ids=IDS, attention_mask=bias + causal, labels=IDS).loss.backward()
    assert bias.grad is not None
    return bias.grad


def test_trained_mask_is_refused_on_all_ranks() -> None:
    plain = llama()
    assert masked(copy.deepcopy(plain)).any()

    def check(context: ParallelContext) -> None:
        model = shardformer.shard_model(copy.deepcopy(plain), context=context)
        with pytest.raises(InputError, match="different gradients for the input attention_mask"):
            masked(model)

    run_as_threads(check, tensor=2)


def test_passed_encoder_states_receive_the_full_gradient() -> None:
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    plain = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).double().train()

    def gradient(model: Any) -> Tensor:
        states = torch.ones(2, 6, 32, dtype=torch.float64, requires_grad=True)
        model(encoder_outputs=(states,), labels=IDS).loss.backward()
        assert states.grad is not None
        return states.grad

    expected = gradient(copy.deepcopy(plain))

    def check(context: ParallelContext, options: dict[str, Any]) -> None:
        model = shardformer.shard_model(copy.deepcopy(plain), context=context, **options)
        torch.testing.assert_close(gradient(model), expected)

    of_ranks({"tensor": 2}, check)
    of_ranks({"tensor": 2, "enable_sequence_parallelism": True}, check)


@pytest.mark.parametrize("what", ["embeddings", "prefix"])
def test_pipeline_refuses_inputs_it_cannot_train(what: str) -> None:
    def check(context: ParallelContext) -> None:
        pipeline = shardformer.Pipeline(shardformer.shard_model(llama(), context=context), micro_batches=2)
        batch: dict[str, Any] = {"input_ids": IDS, "labels": IDS}
        if what == "prefix":
            cache = transformers.DynamicCache()
            cache.update(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8), 0)
            batch[CACHE] = cache
        else:
            batch = {"inputs_embeds": torch.zeros(2, 8, 32, dtype=torch.float64, requires_grad=True), "labels": IDS}
        with pytest.raises(ConfigError, match=r"[Pp]ipeline parallelism"):
            pipeline.step(batch)

    run_as_threads(check, pipe=2)
