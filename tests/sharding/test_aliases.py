"""Modules with several names are sharded under all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardformer
from shardformer.errors import PolicyError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.policies.module_descriptions import ModulePolicyDescription, SubModuleReplacementDescription
from shardformer.tensor_parallel.layers import Linear1D_Col, Linear1D_Row
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory
from tests.policies.toy import VOCAB, ToyLM, ToyPolicy, toy_batch, toy_loss


def with_names(model: ToyLM) -> ToyLM:
    """Add the embedding as a second submodule, in a list and a dict, and as a plain attribute."""
    model.second = model.embed
    model.tables = [model.embed, {"words": model.embed}]
    model.pair = (model.embed, 1)
    vars(model)["hidden_name"] = model.embed
    return model


def test_all_names_of_a_module_return_the_same_output() -> None:
    plain = with_names(ToyLM())
    tokens = torch.arange(VOCAB)
    expected = plain.embed(tokens).detach()

    def rows(context: ParallelContext) -> list[Tensor]:
        model: Any = shardformer.shard_model(copy.deepcopy(plain), ToyPolicy(), context=context)
        names = [model.second, model.tables[0], model.tables[1]["words"], model.pair[0], model.hidden_name]
        assert all(name is model.embed for name in names)
        return [name(tokens).detach() for name in names]

    for found in run_as_threads(rows, tensor=2):
        assert all(torch.allclose(row, expected) for row in found)


def test_transformers_second_name_of_an_embedding_is_trained_too() -> None:
    plain: Any = SmallModelFactory("llama")().double().train()
    plain.alias = plain.model.embed_tokens
    ids = RandomBatchFactory(DEFAULT_HEAD["llama"])(0)["input_ids"]
    plain.alias(ids).square().sum().backward()
    expected = plain.alias.weight.grad.abs().sum().item()

    def gradient(context: ParallelContext) -> float:
        model: Any = copy.deepcopy(plain)
        model.zero_grad()
        shardformer.shard_model(model, context=context)
        model.alias(ids).square().sum().backward()
        return float(model.model.embed_tokens.weight.grad.abs().sum())

    assert sum(run_as_threads(gradient, tensor=2)) == pytest.approx(expected)


class ReadsRows(nn.Module):
    """Owns the weight of the embedding, and reads it in a method that the forward calls."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.rows = weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.look_up(ids)

    def look_up(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.rows)


def test_tied_weight_read_in_full_by_another_module_is_refused() -> None:
    plain = ToyLM()
    plain.reader = ReadsRows(plain.embed.weight)

    def refused(context: ParallelContext) -> None:
        with pytest.raises(PolicyError, match=r"reader\.rows is tied to the sharded parameter embed\.weight"):
            shardformer.shard_model(copy.deepcopy(plain), ToyPolicy(), context=context)

    run_as_threads(refused, tensor=2)


class TwoRules(ToyPolicy):
    other: type[nn.Module] = Linear1D_Col

    def module_policy(self) -> Any:
        subs = [
            SubModuleReplacementDescription("first", Linear1D_Col, {"gather_output": True}),
            SubModuleReplacementDescription("second", self.other, {"gather_output": True}),
        ]
        return {"": ModulePolicyDescription(sub_module_replacement=subs)}

    def replicated_paths(self) -> None:
        """Policy without any other rule."""


class OtherRule(TwoRules):
    other = Linear1D_Row


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_equal_rules_for_one_module_are_merged() -> None:
    plain, x = TwoNames(), torch.randn(3, 6)
    expected = plain(x)
    TwoRules.stack = OtherRule.stack = ()
    TwoRules.embeddings = OtherRule.embeddings = TwoRules.head = OtherRule.head = ()

    def same(context: ParallelContext) -> None:
        model: Any = copy.deepcopy(plain)
        with pytest.raises(PolicyError, match="'first' and 'second' are the same module"):
            shardformer.shard_model(model, OtherRule(), context=context)
        shardformer.shard_model(model, TwoRules(), context=context)
        assert model.first is model.second
        torch.testing.assert_close(model(x), expected)

    run_as_threads(same, tensor=2)


@pytest.mark.parametrize("layout", [{"pipe": 2}, {"tensor": 2}])
def test_repeated_layer_in_a_list_runs_every_time(layout: dict[str, int]) -> None:
    torch.manual_seed(0)
    plain = ToyLM(num_layers=2)
    plain.layers = nn.ModuleList([plain.layers[0], plain.layers[1], plain.layers[0]])
    batch = toy_batch(0)
    loss = toy_loss(plain, batch)
    loss.backward()
    expected = plain.layers[0].norm1.weight.grad

    def trained(context: ParallelContext) -> None:
        model: Any = copy.deepcopy(plain)
        model.zero_grad()
        shardformer.shard_model(model, ToyPolicy(), context=context)
        if context.pipe.size > 1:
            pipeline = shardformer.Pipeline(
                model,
                micro_batches=2,
                loss_fn=lambda out, part: F.cross_entropy(out.flatten(0, 1), part["labels"].flatten()),
            )
            found = pipeline.step(batch)
        else:
            found = toy_loss(model, batch)
            found.backward()
        torch.testing.assert_close(found.detach(), loss.detach())
        torch.testing.assert_close(model.layers[0].norm1.weight.grad, expected)

    run_as_threads(trained, **layout)
