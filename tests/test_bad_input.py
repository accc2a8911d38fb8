"""Invalid input raises on every rank before training, leaves the model unchanged, and never hangs."""

from __future__ import annotations

import os
import subprocess
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

import shardformer
from shardformer.discovery.derive_policy import PolicyDerivationError
from shardformer.errors import ConfigError, InputError, LaunchError, PolicyError, ShardFormerError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.init_distributed import launch_from_torch
from shardformer.mesh.rank_failures import LostPeerError
from shardformer.policies.module_descriptions import ModulePolicyDescription, SubModuleReplacementDescription
from shardformer.policies.policy import Policy
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, LayerStack
from shardformer.shard_model_api import ShardFormer, shard_model
from shardformer.sharding import checks as agree
from shardformer.tensor_parallel.layers import Linear1D_Col, Linear1D_Row
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory
from tests.policies.toy import ScaledToyLM, ToyLM, ToyPolicy, toy_batch, toy_loss
from tests.scripts import SHARDFORMER

pytestmark = pytest.mark.slow

SEQUENCE = {"enable_sequence_parallelism": True}


@dataclass(frozen=True)
class Refusal:
    """The error of one rank, and whether the rank's model is unchanged."""

    kind: str
    what: str
    rule: str
    remedy: str
    untouched: bool

    @property
    def text(self) -> str:
        return " ".join((self.what, self.rule, self.remedy))


def refusal_of(act: Callable[[], Any], model: nn.Module | None = None) -> Refusal:
    before = fingerprint(model)
    try:
        act()
    except ShardFormerError as error:
        return Refusal(type(error).__name__, error.what, error.rule, error.remedy, fingerprint(model) == before)
    return Refusal("nothing", "it was not refused", "", "", False)


def fingerprint(model: nn.Module | None) -> list[str]:
    """Return everything that sharding changes: modules, parameters, hooks, attributes and the config."""
    if model is None:
        return []
    out = [str(vars(getattr(model, "config", object)) if hasattr(model, "config") else "")]
    for path, m in model.named_modules():
        plain = {k: v for k, v in vars(m).items() if isinstance(v, int | float | str | bool)}
        hooks = [len(v) for k, v in vars(m).items() if k.endswith("_hooks")]
        tensors = [
            (n, id(p), p.shape, p.is_meta or p.double().sum().item()) for n, p in m.named_parameters(recurse=False)
        ]
        methods = sorted(k for k, v in vars(m).items() if callable(v) and not isinstance(v, nn.Module))
        out.append(f"{path} {type(m).__name__} {plain} {hooks} {tensors} {methods}")
    return out


def refused(refusals: list[Refusal], kind: type[ShardFormerError], *words: str) -> None:
    """Assert that every rank raised the same type of error with a remedy, and left its model unchanged."""
    for refusal in refusals:
        assert refusal.kind == kind.__name__, refusal
        assert refusal.untouched, refusal
        assert refusal.what and refusal.remedy
        for word in words:
            assert word in refusal.text, refusal


class NotAPolicy:
    stack = "layers"


class NoStack(Policy):
    def module_policy(self) -> Mapping[Any, ModulePolicyDescription]:
        return {"Layer": describe(("mlp.fc1", Linear1D_Col), ("mlp.fc2", Linear1D_Row))}


def describe(*pairs: tuple[str, Any], **kwargs: Any) -> ModulePolicyDescription:
    return ModulePolicyDescription(
        sub_module_replacement=[SubModuleReplacementDescription(suffix, target, **kwargs) for suffix, target in pairs]
    )


class Written(Policy):
    """A policy with a single rule for a Layer of the toy model."""

    def __init__(self, key: str, *pairs: tuple[str, Any], **kwargs: Any) -> None:
        super().__init__()
        self.rules = {key: describe(*pairs, **kwargs)}

    def module_policy(self) -> Any:
        return self.rules


def narrow() -> nn.Module:
    model = ToyLM()
    for layer in model.layers:
        layer.mlp.fc1, layer.mlp.fc2 = nn.Linear(30, 1), nn.Linear(1, 30)
    return model


def one_head() -> nn.Module:
    return SmallModelFactory("gpt2", changes={"n_head": 1})()


def meta() -> nn.Module:
    with torch.device("meta"):
        return SmallModelFactory("gpt2")()


def unknown() -> nn.Module:
    import transformers

    # without attention and MLP, no policy can be derived
    return transformers.MambaModel(
        transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4, vocab_size=31)
    )


def embedding_with_max_norm() -> nn.Module:
    model = ToyLM()
    model.embed.max_norm = 1.0
    return model


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    arguments: Mapping[str, Any]
    kind: type[ShardFormerError]
    words: tuple[str, ...]


OWN: Mapping[str, Any] = {"policy": ToyPolicy}
CASES: dict[str, Case] = {
    "more ranks than heads": Case(
        one_head, {}, ConfigError, ("tensor size of 2", "1 attention heads", "tensor size of at most 1")
    ),
    "more ranks than MLP features": Case(
        narrow, OWN, ConfigError, ("parallel size of 2", "1 features of layers.*.mlp.fc1", "parallel size of at most 1")
    ),
    "an unknown family": Case(
        unknown,
        {},
        PolicyDerivationError,
        ("No layer of MambaModel can be sharded over tensor=2", "finds no stack of layers", "data=2", "stage=3"),
    ),
    "no family at all": Case(
        ScaledToyLM,
        {},
        PolicyDerivationError,
        ("No policy for ScaledToyLM", "forward(ids, scale)", 'batch={"ids": ..., "scale": ...}'),
    ),
    "a rule without a match": Case(
        ToyLM,
        {"policy": Written("Layr", ("mlp.fc1", Linear1D_Col))},
        PolicyError,
        ("rule for 'Layr' matches no module of ToyLM", "'Layer'"),
    ),
    "a submodule that does not exist": Case(
        ToyLM,
        {"policy": Written("Layer", ("mlp.fc1", Linear1D_Col), ("mlp.fc3", Linear1D_Row))},
        PolicyError,
        ("no module 'layers.0.mlp.fc3'", "'mlp.fc1'", "ignore_if_not_exist=True"),
    ),
    "a layer of the wrong kind, found half-way": Case(
        ToyLM,
        {"policy": Written("Layer", ("mlp.fc1", Linear1D_Col), ("norm2", Linear1D_Row))},
        ConfigError,
        ("Linear1D_Row can only replace a linear layer, but got a LayerNorm", "the path of the linear layer itself"),
    ),
    "an argument that a layer does not take, found half-way": Case(
        ToyLM,
        {"policy": Written("Layer", ("mlp.fc1", Linear1D_Col), kwargs={"gather_outputs": True})},
        PolicyError,
        ("'layers.0.mlp.fc1'", "gather_outputs", "from_native_module"),
    ),
    "an embedding that needs its whole table": Case(
        embedding_with_max_norm, OWN, ConfigError, ("max_norm=1.0", "keep the embedding replicated")
    ),
    "overlap without sequence parallelism": Case(
        ToyLM,
        {**OWN, "enable_sequence_overlap": True},
        ConfigError,
        ("enable_sequence_overlap=True", "enable_sequence_parallelism=True"),
    ),
    "sequence parallelism without tensor parallelism": Case(
        ToyLM, {**OWN, **SEQUENCE, "enable_tensor_parallelism": False}, ConfigError, ("enable_tensor_parallelism=True",)
    ),
    "sequence parallelism with a policy without stacks": Case(
        ToyLM, {"policy": NoStack, **SEQUENCE}, ConfigError, ("NoStack", "RolePolicy with a LayerStack")
    ),
    "an unknown option": Case(
        ToyLM, {**OWN, "enable_flash_atention": 1}, ConfigError, ("'enable_flash_atention'", "'enable_flash_attention'")
    ),
    "an unknown extra": Case(
        ToyLM, {**OWN, "extra_kwargs": {"bucket_byte": 1}}, ConfigError, ("'bucket_byte'", "'bucket_bytes'")
    ),
    "a pipeline": Case(
        ToyLM,
        {**OWN, "pipeline_stage_manager": object()},
        ConfigError,
        ("pipeline_stage_manager=<object", "PipelineStageManager(context"),
    ),
    "another mode of tensor parallelism": Case(
        ToyLM, {**OWN, "tensor_parallel_mode": "4d"}, ConfigError, ("tensor_parallel_mode='4d'", "'1d', '2d'")
    ),
    "fused norms on a model without norms": Case(
        lambda: nn.Sequential(nn.Linear(4, 4)),
        {"policy": Written("", ("0", Linear1D_Col)), "enable_fused_normalization": True},
        ConfigError,
        ("Sequential has no norm", "Set enable_fused_normalization=False"),
    ),
    "flash attention on a model that has its own": Case(
        ToyLM, {**OWN, "enable_flash_attention": True}, ConfigError, ("enable_flash_attention",)
    ),
    "what is no policy": Case(ToyLM, {"policy": NotAPolicy()}, PolicyError, ("NotAPolicy", "policies.Policy")),
    "weights on the meta device": Case(meta, {}, ConfigError, ("meta device", "'transformer.wte.weight'", "LazyInit")),
    "a model made in inference mode": Case(
        torch.inference_mode()(lambda: ToyLM()), OWN, ConfigError, ("created under torch.inference_mode()", "outside")
    ),
    "a group that is none": Case(
        ToyLM, {**OWN, "tensor_parallel_process_group": [0, 1]}, ConfigError, ("[0, 1]", "new_group")
    ),
}  # fmt: skip


def _refuse(name: str) -> Refusal:
    case = CASES[name]
    model = case.model()
    return refusal_of(lambda: shard_model(model, **case.arguments), model)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_raise(pool2: WorkerPool, name: str) -> None:
    refused(pool2.run(_refuse, name), CASES[name].kind, *CASES[name].words)


class Broken(ToyPolicy):
    def module_policy(self) -> Any:
        if self.axis.rank == 1:
            raise KeyError("only here")
        return super().module_policy()


class BrokenAtTheEnd(ToyPolicy):
    """Fails on one rank after the model was changed."""

    def postprocess(self) -> nn.Module:
        if self.axis.rank == 1:
            raise PolicyError("Only here.", rule="It is a test.", remedy="None.")
        return super().postprocess()


class OnlyMLP(RolePolicy):
    stack = LayerStack("layers", [MLP("mlp", up="fc1", down="fc2")], final_norm="norm")
    embeddings, head, keep_replicated = "embed", "head", ("layers",)


def frozen() -> nn.Module:
    model = ToyLM()
    model.norm.requires_grad_(False)
    return model


def ranks_differ(rank: int, how: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return this rank's model and arguments for a named disagreement."""
    model: nn.Module = ToyLM()
    arguments: dict[str, Any] = {"policy": ToyPolicy}
    if how == "layers" and rank:
        model = ToyLM(num_layers=3)
    if how == "frozen" and rank:
        model = frozen()
    if how == "dtype" and rank:
        model.norm.double()
    if how == "policy" and rank:
        arguments["policy"] = OnlyMLP
    if how == "options" and rank:
        arguments["enable_fused_normalization"] = True
    if how == "extras" and rank:
        arguments["extra_kwargs"] = {"bucket_bytes": 1000}
    if how == "sharded" and rank:
        arguments["policy"] = NoStack
        model = nn.Sequential(Linear1D_Col(4, 4, process_group=shardformer.mesh.parallel_context.Axis("tensor")))
    if how == "one raises":
        arguments["policy"] = Broken
    if how == "one raises at the end":
        arguments["policy"] = BrokenAtTheEnd
    if how == "one is broken":
        arguments["policy"] = ToyPolicy if not rank else Written("Layer", ("mlp.fc1", nn.Linear))
    return model, arguments


def _disagree(how: str) -> tuple[str, str]:
    model, arguments = ranks_differ(dist.get_rank(), how)
    before = fingerprint(model)
    try:
        shard_model(model, **arguments)
    except Exception as error:
        assert fingerprint(model) == before
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("layers", ("differs between ranks", "layers.2", "rank 0", "rank 1", "same settings")),
        ("frozen", ("differs between ranks", "norm.weight", "requires_grad=True", "requires_grad=False")),
        ("dtype", ("differs between ranks", "norm.weight", "float32", "float64")),
        ("policy", ("differs between ranks", "the user's policy ToyPolicy", "the user's policy OnlyMLP")),
        (
            "options",
            ("differs between ranks", "'enable_fused_normalization': False", "'enable_fused_normalization': True"),
        ),
        ("extras", ("differs between ranks", "bucket_bytes")),
    ],
)
def test_ranks_with_different_arguments_raise(pool2: WorkerPool, how: str, words: tuple[str, ...]) -> None:
    for kind, text in pool2.run(_disagree, how):
        assert kind == "ConfigError"
        assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("one raises", "KeyError", ("KeyError: 'only here'",)),
        ("one raises at the end", "PolicyError", ("Only here",)),
        ("one is broken", "PolicyError", ("has no from_native_module",)),
        ("sharded", "ConfigError", ("Sequential is already sharded",)),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(pool2: WorkerPool, how: str, kind: str, words: tuple[str, ...]) -> None:
    (first, text), (second, cause) = pool2.run(_disagree, how)
    assert first == "ConfigError" and text.startswith("Rank 1 cannot shard this model: ")
    assert second == kind
    assert all(word in text for word in words), text
    assert cause


def _disagree_on_a_grid() -> str:
    context = launch_from_torch(tensor=2, data=2)
    policy = Broken if context.data.rank == 1 else ToyPolicy
    return refusal_or_kind(lambda: shard_model(ToyLM(), policy, context=context))


def refusal_or_kind(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_error_on_one_rank_of_a_grid_is_raised_on_all(pool4: WorkerPool) -> None:
    answers = pool4.run(_disagree_on_a_grid)
    assert [a.split(":")[0] for a in answers] == ["ConfigError"] * 3 + ["KeyError"]
    assert all("Rank 3 cannot shard this model: KeyError" in a for a in answers[:3])


def _ranks_hold_different_weights() -> tuple[bool, str]:
    torch.manual_seed(dist.get_rank())
    model = ToyLM()
    first = model.norm.weight, [p.detach().clone() for p in model.parameters()]
    weights: list[Any] = [first[1]]
    dist.broadcast_object_list(weights, src=0)
    shard_model(model, ToyPolicy)
    full = shardformer.full_state_dict(model)
    same = all(torch.equal(a, b) for a, b in zip(full.values(), weights[0]))
    return same, str(shardformer.describe_sharding(model))


def test_different_initial_weights_are_replaced_by_those_of_rank_0(pool2: WorkerPool) -> None:
    for same, text in pool2.run(_ranks_hold_different_weights):
        assert same
        assert "The tensor ranks had different initial weights. They now use those of rank 0." in text


def _lay_grid(**sizes: Any) -> Refusal:
    return refusal_of(lambda: launch_from_torch(**sizes))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tensor": 3}, ("tensor=3", "number of processes, 2", "Use tensor=1 or tensor=2", "multiple of 3 processes")),
        ({"tensor": 2, "data": 2}, ("tensor=2 times data=2", "2", "start 4 processes")),
        ({"data": 3}, ("is not divisible by data=3", "Use data=1 or data=2", "multiple of 3 processes")),
        ({"tensor": 0}, ("tensor=0", "at least 1")),
        ({"config": {"parallel": {"tensr": 2}}}, ("'tensr'", "'tensor'")),
        ({"config": {"parallel": {"tensor": {"size": 2, "mode": "2d"}}}}, ("'2d'", "tensor=(2, 1)")),
        ({"config": {"parallel": {"tensor": {"sise": 2}}}}, ("'sise'", "'size'")),
        ({"config": {"parallel": {"tensor": "two"}}}, ("tensor='two'", "not an integer")),
        ({"pipe": 3}, ("is not divisible by pipe=3", "pipe=1 or pipe=2")),
        ({"config": {"paralel": {"tensor": 2}}}, ("paralel", "dict(tensor=2)")),
        ({"config": {"tensor": 2}}, ("tensor = 2, which is not a valid option", "dict(tensor=2)")),
        ({"config": {"parallel": 2}}, ("parallel = 2", "dict(tensor=2)")),
        ({"config": "nowhere.py"}, ("'nowhere.py' does not exist", "--config config.py")),
    ],
)
def test_axis_sizes_that_do_not_match_the_processes_raise(
    pool2: WorkerPool, sizes: Any, words: tuple[str, ...]
) -> None:
    refused(pool2.run(_lay_grid, **sizes), ConfigError, *words)


def _shard_over(**sizes: int) -> Refusal:
    context, model = launch_from_torch(**sizes), nn.Bilinear(4, 4, 2)
    return refusal_of(lambda: shard_model(model, context=context), model)


def test_an_axis_that_shards_nothing_raises(pool2: WorkerPool) -> None:
    refused(pool2.run(_shard_over, sequence=2), ConfigError, "sequence=2")


def _lay_different_grids() -> Refusal:
    return refusal_of(lambda: launch_from_torch(tensor=2 - dist.get_rank()))


def test_processes_with_different_grids_raise(pool2: WorkerPool) -> None:
    refused(
        pool2.run(_lay_different_grids),
        ConfigError,
        "tensor=2",
        "tensor=1",
        "Pass the same axis sizes on every process",
    )


def _without_a_launcher(act: str) -> Refusal:
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    model = ToyLM()
    acts: dict[str, Callable[[], Any]] = {
        "launch_from_torch": launch_from_torch,
        "shard_model": lambda: shard_model(model, ToyPolicy),
        "ShardFormer": lambda: ShardFormer().optimize(model, ToyPolicy),
    }
    return refusal_of(acts[act], model)


@pytest.mark.parametrize("act", ["launch_from_torch", "shard_model", "ShardFormer"])
def test_a_process_without_launcher_raises(pool2: WorkerPool, act: str) -> None:
    words = ("RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT", "shardformer run --nproc_per_node 2", "torchrun")
    refused(pool2.run(_without_a_launcher, act), LaunchError, *words)


def _group_lacks_this_rank(ranks: list[int]) -> Refusal:
    group = dist.new_group(ranks)
    model = ToyLM()
    return refusal_of(lambda: shard_model(model, ToyPolicy, tensor_parallel_process_group=group), model)


def test_a_group_without_one_of_the_processes_raises(pool2: WorkerPool) -> None:
    first, second = pool2.run(_group_lacks_this_rank, [0])
    refused([first, second], LaunchError, "does not contain this process (global rank 1)", "group")
    assert first.what.startswith("Process 1 cannot shard the model: ")


def _second_try() -> list[str]:
    """Raise on every process, raise on some, then shard correctly."""
    wrong, right = dist.new_group([1, 3]), [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    tries: list[Any] = ["no group", wrong, right]
    answers = []
    for group in tries:
        act = partial(shard_model, ToyLM(), ToyPolicy, tensor_parallel_process_group=group)
        answers.append(refusal_of(act).kind)
    return answers


def test_sharding_works_after_a_failed_attempt(pool4: WorkerPool) -> None:
    assert pool4.run(_second_try) == [["ConfigError", "LaunchError", "nothing"]] * 4


def test_a_group_without_half_of_the_processes_raises(pool4: WorkerPool) -> None:
    refused(pool4.run(_group_lacks_this_rank, [1, 3]), LaunchError, "does not contain this process")


def _members_give_different_groups() -> Refusal:
    pair, whole = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    if dist.get_rank() == 3:
        return Refusal("ConfigError", "the two differ [0, 1] [0, 1, 2]", "it takes no part", "none", True)
    if dist.get_rank() == 2:  # a process that is only in the larger group cannot know this, and its wait times out
        _get_default_store().set_timeout(timedelta(seconds=2))
    group = whole if dist.get_rank() else pair
    model = ToyLM()
    with patch.object(agree, "OTHER_PROCESSES_TIMEOUT_S", 0.5):
        return refusal_of(lambda: shard_model(model, ToyPolicy, tensor_parallel_process_group=group), model)


def test_ranks_with_different_groups_raise(pool4: WorkerPool) -> None:
    *two, third, _ = pool4.run(_members_give_different_groups)
    refused(two, ConfigError, "[0, 1]", "[0, 1, 2]", "Pass the same process group")
    refused([third], LostPeerError, "Process 0 did not reach shard_model", "[0, 1, 2]")


def _one_has_a_model_of_its_own(order: str) -> list[str]:
    """Rank 0 shards a model alone, before, between or after the models that both ranks shard."""
    alone, both = dist.new_group([0]), dist.new_group([0, 1])
    titles = []
    for what in order:
        if what == "2" or dist.get_rank() == 0:
            group = both if what == "2" else alone
            model = shard_model(ToyLM(), ToyPolicy, tensor_parallel_process_group=group)
            titles.append(str(shardformer.describe_sharding(model)).split(", ")[0])
    return titles


@pytest.mark.parametrize("order", ["122", "212"])
def test_models_on_one_and_on_two_processes_coexist(pool2: WorkerPool, order: str) -> None:
    first, second = pool2.run(_one_has_a_model_of_its_own, order)
    assert first == [f"ToyLM over {'tensor=2' if n == '2' else 'one process'}" for n in order]
    assert second == ["ToyLM over tensor=2"] * 2


def _subgroups() -> tuple[float, str]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    plain = ToyLM()
    model = ToyLM()
    model.load_state_dict(plain.state_dict())
    shard_model(model, ToyPolicy, tensor_parallel_process_group=pairs[dist.get_rank() // 2])
    batch = toy_batch(dist.get_rank() // 2)
    difference = (toy_loss(model, batch) - toy_loss(plain, batch)).detach()
    return abs(float(difference)), str(shardformer.describe_sharding(model)).splitlines()[0]


def test_each_half_of_the_processes_can_shard_a_model(pool4: WorkerPool) -> None:
    for difference, title in pool4.run(_subgroups):
        assert difference < 1e-5 and title.startswith("ToyLM over tensor=2")


def _bystanders() -> float:
    """Only the first two processes shard a model."""
    pair = dist.new_group([0, 1])
    start = time.monotonic()
    if dist.get_rank() < 2:
        with patch.object(agree, "OTHER_PROCESSES_TIMEOUT_S", 0.5):
            shard_model(ToyLM(), ToyPolicy, tensor_parallel_process_group=pair)
    return time.monotonic() - start


def test_processes_outside_the_group_need_not_shard(pool4: WorkerPool) -> None:
    assert max(pool4.run(_bystanders)) < 5.0


def _shard_again(wrap: bool, ranks: int) -> Refusal:
    context = launch_from_torch(tensor=ranks, data=dist.get_world_size() // ranks)
    model = shard_model(ToyLM(), ToyPolicy, context=context)
    again = nn.Sequential(model) if wrap else model
    return refusal_of(lambda: shard_model(again, ToyPolicy, context=context), again)


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_sharding_a_model_twice_raises(pool2: WorkerPool, wrap: bool, ranks: int) -> None:
    refused(pool2.run(_shard_again, wrap, ranks), ConfigError, "already sharded", "build the model again")


def _use(how: str) -> Refusal:
    options: dict[str, Any] = SEQUENCE if how == "hidden states" else {}
    model = shard_model(SmallModelFactory("gpt2")(), **options)
    batch: dict[str, Any] = RandomBatchFactory("GPT2LMHeadModel")(0)
    if how == "token":
        batch["input_ids"][1, 2] = 127
    elif how == "negative token":
        batch["input_ids"][1, 2] = -1
    elif how == "label":
        batch["labels"][0, 4] = 127
    elif how == "negative label":
        batch["labels"][0, 4] = -2
    elif how == "different batches":
        batch = RandomBatchFactory("GPT2LMHeadModel")(dist.get_rank())
    elif how == "different shapes":
        batch = RandomBatchFactory("GPT2LMHeadModel", sequence_length=13 + dist.get_rank())(0)
    elif how == "attentions":
        batch["output_attentions"] = True
    elif how == "hidden states":
        batch["output_hidden_states"] = True
    acts: dict[str, Callable[[], Any]] = {
        "resize": lambda: model.resize_token_embeddings(130),
        "resize inside": lambda: model.transformer.resize_token_embeddings(130),
        "save inside": lambda: model.transformer.save_pretrained("nowhere"),
    }
    return refusal_of(acts.get(how, lambda: model(**batch).loss.backward()), model)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("token", InputError, ("token id 127", "has 127 tokens", "tokenizer")),
        ("negative token", InputError, ("token id -1", "has 127 tokens")),
        ("label", InputError, ("127", "126")),
        ("negative label", InputError, ("-2", "-100")),
        ("different batches", InputError, ("2 tensor ranks received different batches", "context.data.rank")),
        ("different shapes", InputError, ("2 tensor ranks received different batches", "context.data.rank")),
        ("attentions", ConfigError, ("output_attentions=True", "Set output_attentions=False")),
        ("hidden states", ConfigError, ("output_hidden_states=True", "each rank has a shard of the sequence")),
        ("resize", ConfigError, ("resize_token_embeddings", "Resize the embeddings before you shard the model")),
        ("resize inside", ConfigError, ("resize_token_embeddings", "Resize the embeddings before you shard the model")),
        ("save inside", ConfigError, ("save_pretrained cannot save GPT2Model alone", "Save the full model")),
    ],
)
def test_an_invalid_batch_or_call_raises(pool2: WorkerPool, how: str, kind: Any, words: tuple[str, ...]) -> None:
    refused(pool2.run(_use, how), kind, *words)


def _after_a_bad_batch() -> tuple[float, float]:
    plain = SmallModelFactory("gpt2")()
    model = SmallModelFactory("gpt2")()
    model.load_state_dict(plain.state_dict())
    shard_model(model)
    batch = RandomBatchFactory("GPT2LMHeadModel")(0)
    bad = {**batch, "labels": batch["labels"].clone().fill_(500)}
    assert refusal_of(lambda: model(**bad)).kind == "InputError"
    return float(model(**batch).loss.detach()), float(plain(**batch).loss.detach())


def test_training_continues_after_an_invalid_batch(pool2: WorkerPool) -> None:
    for ours, theirs in pool2.run(_after_a_bad_batch):
        assert abs(ours - theirs) < 1e-5


DYING = """
    import os, sys, time
    import torch
    from torch import nn
    import shardformer
    from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory

    context = shardformer.launch_from_torch(tensor={tensor})
    torch.manual_seed(0)
    model = shardformer.shard_model(SmallModelFactory("gpt2")(), context=context)
    batches = RandomBatchFactory("GPT2LMHeadModel")
    for step in range(1000):
        if step == 2 and int(os.environ["RANK"]) == 1:
            open(sys.argv[1], "w").write(str(time.time()))
            {end}
        model(**batches(step)).loss.backward()
"""


@pytest.mark.reduced(one_in=2)
@pytest.mark.parametrize(
    ("tensor", "end", "said"),
    [
        (2, "os._exit(7)", "rank 1 failed first, exit code 7"),
        (1, "os.kill(os.getpid(), 9)", "rank 1 failed first, killed by SIGKILL"),  # both ranks are on the data axis
    ],
)
def test_a_dead_worker_ends_the_others_and_is_reported(tmp_path: Path, tensor: int, end: str, said: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(DYING.format(tensor=tensor, end=end)))
    main = [*SHARDFORMER, "run", "--nproc_per_node", "2"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PET_")}
    died = tmp_path / "died"
    done = subprocess.run([*main, str(script), str(died)], env=env, capture_output=True, text=True, timeout=300)
    assert time.time() - float(died.read_text()) < 60
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith(f"shardformer run: {said}")
