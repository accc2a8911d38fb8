"""Each of three ways to write a policy gives a sharded model that equals the unsharded model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardformer
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import Axis
from shardformer.pipeline.layer_sequence import LayerStackDescription
from shardformer.policies.module_descriptions import (
    BlockDescription,
    ModulePolicyDescription,
    SubModuleReplacementDescription,
)
from shardformer.policies.policy import Policy
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionProjections, LayerStack
from shardformer.shard_model_api import ModelSharder
from shardformer.tensor_parallel.layers import (
    FusedLinear1D_Col,
    Linear1D_Col,
    Linear1D_Row,
    VocabParallelEmbedding1D,
    VocabParallelLMHead1D,
)
from shardformer.verify.comparison import Report
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory
from tests.policies.toy import HIDDEN, ToyLM, ToyPolicy, check_sample, check_toy, toy_batch, toy_loss
from tests.pools import WorkerPools

SEQUENCE = {"enable_sequence_parallelism": True}
OVERLAP = {**SEQUENCE, "enable_sequence_overlap": True}


# ---------------------------------------------------------------------------------------------------------------- roles


@pytest.mark.reduced(at_most=2)
@pytest.mark.parametrize("config", [{}, SEQUENCE, OVERLAP, {"enable_fused_normalization": True}])
def test_roles_shard_a_custom_model(pool2: WorkerPool, config: Mapping[str, Any]) -> None:
    check_toy(ToyPolicy, pool2, config=config)


def test_five_heads_over_four_tensor_ranks_and_data_ranks(pools: WorkerPools) -> None:
    check_toy(ToyPolicy, pools(4))
    check_toy(ToyPolicy, pools(4), partial(ToyLM, tied=True), SEQUENCE, data=2)


class InSequential(ToyLM):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers)  # type: ignore[assignment]  # another list than ToyLM's

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.layers(self.embed(ids))))
        return logits


def test_stack_can_be_a_sequential(pool2: WorkerPool) -> None:
    check_toy(ToyPolicy, pool2, InSequential, SEQUENCE)


@pytest.mark.reduced(one_in=2)
@pytest.mark.parametrize("config", [{}, SEQUENCE])
def test_norm_after_the_exit_of_a_block_trains_correctly(pool2: WorkerPool, config: Mapping[str, Any]) -> None:
    check_toy(ToyPolicy, pool2, partial(ToyLM, norm_in_mlp=True), config)


class Flat(nn.Module):
    """A layer with the linear layers of its MLP as direct children, as in OPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn = ToyLM().layers[0].attn
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 41), nn.Linear(41, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.fc2(F.relu(self.fc1(self.norm2(x))))
        return out


class FlatLM(ToyLM):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Flat() for _ in range(2))


class FlatPolicy(ToyPolicy):
    attention = Attention(
        "attn", AttentionProjections(q="q", k="k", v="v", out="o"), local_attrs={"num_heads": "heads"}
    )
    stack = LayerStack("layers", [attention, MLP("fc1", up=".fc1", down=".fc2")], final_norm="norm")


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("config", [{}, OVERLAP])
def test_linear_layers_directly_in_the_layer_are_sharded(pool2: WorkerPool, config: Mapping[str, Any]) -> None:
    check_toy(FlatPolicy, pool2, FlatLM, config)


class MyGPT2(RolePolicy):
    stack = LayerStack(
        "h",
        [
            Attention("attn", AttentionProjections(qkv="c_attn", out="c_proj"), local_attrs={"split_size": "width"}),
            MLP("mlp", up="c_fc", down="c_proj"),
        ],
        final_norm="ln_f",
    )
    embeddings, head, keep_replicated, num_heads = "wte", "lm_head", ("wpe",), "n_head"


def test_roles_shard_gpt2(pool2: WorkerPool) -> None:
    check_sample(SmallModelFactory("gpt2"), MyGPT2, pool2, SEQUENCE)


def test_disabled_tensor_parallelism_replicates_the_model(pool2: WorkerPool) -> None:
    off = {"enable_tensor_parallelism": False}
    check_toy(ToyPolicy, pool2, config=off)
    check_toy(ToyPolicy, pool2, config=off, data=2)


# ------------------------------------------------------------------------------------------------------- module_policy


def replaced(*pairs: tuple[str, Any], **kwargs: Any) -> list[SubModuleReplacementDescription]:
    return [SubModuleReplacementDescription(suffix=suffix, target_module=target, **kwargs) for suffix, target in pairs]


class MyBert(Policy):
    """Names layers by class name, embeddings and head by path."""

    layer_key: Any = "BertLayer"

    def config_sanity_check(self) -> None:
        assert self.model is not None and self.shard_config.enable_tensor_parallelism

    def preprocess(self) -> nn.Module:
        assert self.model.config.vocab_size == 127
        return super().preprocess()

    def module_policy(self) -> Mapping[Any, ModulePolicyDescription]:
        config, size = self.model.config, self.axis.size
        heads = config.num_attention_heads // size
        layer = ModulePolicyDescription(
            attribute_replacement={
                "attention.self.all_head_size": config.hidden_size // size,
                "attention.self.num_attention_heads": heads,
            },
            sub_module_replacement=replaced(
                ("attention.self.query", Linear1D_Col),
                ("attention.self.key", Linear1D_Col),
                ("attention.self.value", Linear1D_Col),
                ("attention.output.dense", Linear1D_Row),
                ("intermediate.dense", Linear1D_Col),
                ("output.dense", Linear1D_Row),
            )
            + replaced(("crossattention.self.query", Linear1D_Col), ignore_if_not_exist=True),
        )
        return {
            self.layer_key: layer,
            "BertEmbeddings": ModulePolicyDescription(
                sub_module_replacement=replaced(("word_embeddings", VocabParallelEmbedding1D))
            ),
            "BertLMPredictionHead": ModulePolicyDescription(
                sub_module_replacement=replaced(("decoder", VocabParallelLMHead1D))
            ),
        }

    def postprocess(self) -> nn.Module:
        embedding, head = self.model.bert.embeddings.word_embeddings, self.model.cls.predictions.decoder
        assert head.weight is embedding.weight  # tied as before
        return super().postprocess()


class MyBertByClass(MyBert):
    def module_policy(self) -> Mapping[Any, ModulePolicyDescription]:
        from transformers.models.bert.modeling_bert import BertLayer

        self.layer_key = BertLayer
        return super().module_policy()


class MyBertByPath(MyBert):
    layer_key = "bert.encoder.layer.*"


class MyBertByQualifiedName(MyBert):
    layer_key = "transformers.models.bert.modeling_bert.BertLayer"


@pytest.mark.reduced(at_most=2)
@pytest.mark.parametrize("policy", [MyBert, MyBertByClass, MyBertByPath, MyBertByQualifiedName])
def test_module_policy_shards_bert(pool2: WorkerPool, policy: type[Policy]) -> None:
    check_sample(SmallModelFactory("bert"), policy, pool2)


class MyBertInBlocks(MyBert):
    """With blocks and a stack, a custom policy supports merged collectives and sequence parallelism."""

    def module_policy(self) -> Mapping[Any, ModulePolicyDescription]:
        out = dict(super().module_policy())
        out["BertLayer"].blocks = [
            BlockDescription(
                "attention.self", [f"attention.self.{n}" for n in ("query", "key", "value")], "attention.output.dense"
            ),
            BlockDescription("intermediate", ["intermediate.dense"], "output.dense"),
        ]
        return out

    def stacks(self) -> list[LayerStackDescription]:
        return [LayerStackDescription("bert.encoder.layer")]


def test_block_merges_three_collectives(pool2: WorkerPool) -> None:
    alone = check_sample(SmallModelFactory("bert"), MyBert, pool2)
    blocks = check_sample(SmallModelFactory("bert"), MyBertInBlocks, pool2)

    def count(report: Report) -> int:
        return sum(n for name, (n, _) in report.collectives.items() if "all_reduce" in name and "block" in name)

    assert count(alone) - count(blocks) == 2 * 2  # two layers, in which q, k and v share one collective
    check_sample(SmallModelFactory("bert"), MyBertInBlocks, pool2, SEQUENCE)


class Doubled(nn.Module):
    """A user-defined replacement of an activation without weights."""

    @staticmethod
    def from_native_module(module: nn.Module, process_group: Any, factor: float) -> nn.Module:
        assert torch.distributed.get_world_size(process_group) == 2  # torch's own group
        return Scaled(factor)


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class OwnColumn(Linear1D_Col):
    """A user-defined layer that takes a torch process group."""

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> nn.Module:
        assert isinstance(process_group, torch.distributed.ProcessGroup)
        return super().from_native_module(module, process_group, **kwargs)


def squared_relu(self: nn.Module, x: Tensor) -> Tensor:
    return F.relu(x).square()


def with_zero_bias(module: Any) -> None:
    with torch.no_grad():
        module.norm1.bias.fill_(0.5)


class EveryField(Policy):
    """Uses all fields of a description. The resulting model differs from the plain one."""

    def module_policy(self) -> Mapping[Any, ModulePolicyDescription]:
        return {
            "Layer": ModulePolicyDescription(
                attribute_replacement={"attn.num_heads": 2 if self.axis.rank else 3},
                param_replacement=[with_zero_bias],
                sub_module_replacement=[
                    *replaced(*((f"attn.{n}", OwnColumn) for n in "qkv"), kwargs={"split": self.heads(6)}),
                    *replaced(("attn.o", Linear1D_Row), kwargs={"split": self.heads(6)}),
                    *replaced(("mlp.fc1", Linear1D_Col)),
                    *replaced(("mlp.fc2", Linear1D_Row)),
                    *replaced(("mlp.norm", Doubled), kwargs={"factor": 2.0}),
                ],
            ),
            "FeedForward": ModulePolicyDescription(method_replacement={"act": squared_relu}),
        }

    def heads(self, width: int) -> shardformer.layout.Split:
        return shardformer.Split.even(HIDDEN, self.axis.size, unit=width)


def _every_field() -> tuple[float, str]:
    plain, sharded = ToyLM(), ToyLM()
    sharded.load_state_dict(plain.state_dict())
    layers: Any = plain.layers
    for layer in layers:
        with_zero_bias(layer)
        layer.mlp.norm = Scaled(2.0)
        layer.mlp.act = squared_relu.__get__(layer.mlp)
    model = shardformer.shard_model(sharded, EveryField)
    batch = toy_batch(0)
    difference = toy_loss(plain, batch) - toy_loss(model, batch)
    return abs(float(difference.detach())), str(shardformer.describe_sharding(model))


def test_every_field_of_a_description_has_an_effect(pool2: WorkerPool) -> None:
    for difference, text in pool2.run(_every_field):
        assert difference < 1e-6
        for name in ("squared_relu", "with_zero_bias", "OwnColumn", "Scaled", "num_heads"):
            assert name in text


# ------------------------------------------------------------------------------------------------------ the quick start


def _quick_start() -> list[str]:
    import transformers

    from shardformer.compat import ShardConfig, ShardFormer

    shardformer.launch_from_torch(config={})
    model = SmallModelFactory("bert")()
    group = torch.distributed.new_group([0, 1])
    shard_config = ShardConfig(
        tensor_parallel_process_group=group,
        pipeline_stage_manager=None,
        enable_tensor_parallelism=True,
        enable_fused_normalization=True,
        enable_flash_attention=True,
        enable_jit_fused=False,
        enable_sequence_parallelism=True,
        enable_sequence_overlap=True,
        enable_all_optimization=False,
        extra_kwargs={},
    )
    shard_former = ShardFormer(shard_config=shard_config)
    sharded_model, shared_params = shard_former.optimize(model).to("cpu")
    assert isinstance(sharded_model, transformers.BertForMaskedLM) and shared_params == []
    sharded_model(**RandomBatchFactory("BertForMaskedLM")(0)).loss.backward()

    ours, shared_params = shard_former.optimize(SmallModelFactory("bert")(), MyBertInBlocks())
    assert shared_params == []
    by_hand = SmallModelFactory("bert")()
    assert ModelSharder(by_hand, ShardConfig(), MyBert()).shard() == []
    first_form = SmallModelFactory("bert")()
    ModelSharder(first_form, MyBert).shard()
    return [str(shardformer.describe_sharding(m)).splitlines()[0] for m in (sharded_model, ours, by_hand, first_form)]


def test_quick_start_example_runs_unmodified(pool2: WorkerPool) -> None:
    head = "BertForMaskedLM over tensor=2, by "
    links = [
        "the registered family 'bert'",
        *[f"the user's policy {n}" for n in ("MyBertInBlocks", "MyBert", "MyBert")],
    ]
    assert pool2.run(_quick_start) == [[head + link for link in links]] * 2


# --------------------------------------------------------------------------------------------------- without any policy


def _by_hand() -> tuple[float, bool, list[str]]:
    group = torch.distributed.group.WORLD
    torch.manual_seed(3)
    native = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 14), nn.Linear(14, 6))
    table = VocabParallelEmbedding1D.from_native_module(native[0], group)
    up = Linear1D_Col.from_native_module(native[1], group)
    down = Linear1D_Row.from_native_module(native[2], group)
    fused = FusedLinear1D_Col.from_native_module(nn.Linear(6, 12), process_group=group, n_fused=2)
    ids = torch.arange(10).view(2, 5)
    difference = native(ids) - down(up(table(ids)))
    torch.manual_seed(4)
    full = nn.Linear(6, 14).weight
    torch.manual_seed(4)
    direct = Linear1D_Col(6, 14, process_group=Axis.of(group))
    part = full.chunk(2)[direct.axis.rank]
    modules = (table, up, down, fused, direct)
    assert all(isinstance(m, shardformer.tensor_parallel.ParallelModule) for m in modules)
    return float(difference.detach().abs().max()), torch.equal(direct.weight, part), [type(m).__name__ for m in modules]


def test_parallel_layers_work_standalone(pool2: WorkerPool) -> None:
    for difference, same, names in pool2.run(_by_hand):
        assert difference < 1e-6 and same
        assert names == [
            "VocabParallelEmbedding1D",
            "Linear1D_Col",
            "Linear1D_Row",
            "FusedLinear1D_Col",
            "Linear1D_Col",
        ]
