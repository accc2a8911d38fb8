"""Edge cases of sharding: trained correctly, or refused with a helpful error."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardformer
from shardformer.comm.collectives import all_gather_objects, compute_numel_and_hash
from shardformer.config import ShardConfig
from shardformer.errors import ConfigError, InputError, PolicyError, ShardFormerError
from shardformer.layout.shard_spec import Split
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh import deadlock_detection, parallel_context
from shardformer.mesh.init_distributed import launch_from_torch
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.policies import policy as policies
from shardformer.policies.legacy import Argument, Col_Layer, ColumnParallelOrEmbedding, Row_Layer
from shardformer.policies.legacy import Layer as ShardedLayer
from shardformer.policies.module_descriptions import ModulePolicyDescription, SubModuleReplacementDescription
from shardformer.policies.policy import Policy
from shardformer.policies.role_policy import RolePolicy
from shardformer.policies.roles import MLP, Attention, AttentionInputs, AttentionProjections, LayerStack
from shardformer.shard_model_api import ModelSharder, ShardFormer, resolve_policy_and_origin, shard_model
from shardformer.sharding.checks import find_externally_referenced_param_ids
from shardformer.tensor_parallel.layers import Linear1D_Col, Linear1D_Row
from shardformer.tensor_parallel.parallel_module import ParallelModule
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory, compute_model_loss
from tests.ops import seeing_parts
from tests.policies.toy import HEADS, HIDDEN, VOCAB, Layer, SelfAttention, ToyLM, ToyPolicy, toy_batch, toy_loss


def sharded(make: Callable[[], nn.Module], policy: Any = ToyPolicy, **options: Any) -> list[nn.Module]:
    """Return the sharded model on each of two ranks."""
    models = [make(), make()]  # created once: threads share the random state and imports
    return run_as_threads(lambda c: shard_model(models[c.tensor.rank], policy, context=c, **options), tensor=2)


def refused(kind: type[ShardFormerError], make: Callable[[], nn.Module], *words: str, policy: Any = ToyPolicy) -> None:
    with pytest.raises(kind) as caught:
        sharded(make, policy)
    for word in words:
        assert word in str(caught.value)


# -------------------------------------------------------------------------------------- modules with different behavior


class Squared(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).square()


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def with_squared_embedding() -> nn.Module:
    model = ToyLM()
    model.embed = Squared(VOCAB, HIDDEN)
    return model


def with_doubled_linear() -> nn.Module:
    model = ToyLM()
    model.layers[0].mlp.fc1.__class__ = Doubled
    return model


def with_patched_linear() -> nn.Module:
    model = ToyLM()
    linear = model.layers[0].mlp.fc1
    linear.forward = lambda x: 2 * F.linear(x, linear.weight, linear.bias)
    return model


def with_hook() -> nn.Module:
    model = ToyLM()
    model.layers[0].attn.q.register_forward_hook(lambda module, args, out: 2 * out)
    return model


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (with_squared_embedding, "Squared has a custom `forward`"),
        (with_doubled_linear, "Doubled has a custom `forward`"),
        (with_patched_linear, "a custom `forward`"),
        (with_hook, "has hooks"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_subclassed_layer_is_not_replaced(make: Callable[[], nn.Module], what: str) -> None:
    refused(ConfigError, make, what)


def test_parametrized_weight_is_not_sharded() -> None:
    with pytest.raises(ConfigError, match="a weight that is computed"):
        Linear1D_Col.from_native_module(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)))


def test_hooks_of_an_embedding_are_kept() -> None:
    def make() -> nn.Module:
        model: Any = SmallModelFactory("llama")()
        model.enable_input_require_grads()
        frozen: nn.Module = model.requires_grad_(False)
        return frozen

    models = [make(), make()]

    def requires(context: ParallelContext) -> tuple[bool, bool]:
        model: Any = shard_model(models[context.tensor.rank], context=context)
        ids = torch.arange(6).view(1, 6)
        with_hooks = model.model.embed_tokens(ids).requires_grad
        model.disable_input_require_grads()
        return with_hooks, model.model.embed_tokens(ids).requires_grad

    assert run_as_threads(requires, tensor=2) == [(True, False)] * 2


class LostExit(ToyPolicy):
    stack = LayerStack(
        "layers",
        [
            Attention("attn", AttentionProjections(q="q", k="k", v="v", out="o"), local_attrs={"num_heads": "heads"}),
            MLP("mlp", up="fc1", down="fc3", optional=True),
        ],
    )


class OtherModule(nn.Module):
    """Replaces the MLP of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc3 = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc3(x)
        return out


class PassedOver(ToyPolicy):
    stack = LayerStack("layers", [LostExit.stack.blocks[0], MLP("mlp", up="fc1", down="fc2", optional=True)])
    keep_replicated = ("layers.*.mlp.fc3",)


def with_another_mlp() -> nn.Module:
    model = ToyLM()
    model.layers[1].mlp = OtherModule()
    return model


def test_optional_role_without_any_exit_is_refused() -> None:
    words = ("'layers.*.mlp.fc3' as the output layer of 'layers.*.mlp', but the model", "Did you mean 'mlp.fc2'")
    refused(PolicyError, ToyLM, *words, policy=LostExit)
    sharded(with_another_mlp, PassedOver)  # skipped, because another module replaces it


class ResidualInside(SelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_residual_around_the_exit_is_refused_in_the_first_forward_pass() -> None:
    def train(context: ParallelContext) -> None:
        model = ToyLM()
        model.layers[0].attn.__class__ = ResidualInside
        toy_loss(shard_model(model, ToyPolicy, context=context), toy_batch(0)).backward()

    with pytest.raises(PolicyError, match="ResidualInside contains a residual connection, which must be outside"):
        run_as_threads(train, tensor=2)


class EntersAtQ(ToyPolicy):
    stack = LayerStack(
        "layers",
        [
            Attention(
                "attn",
                AttentionProjections(q="q", k="k", v="v", out="o"),
                inputs=AttentionInputs(entry="q"),
                local_attrs={"num_heads": "heads"},
            ),
            MLP("mlp", up="fc1", down="fc2"),
        ],
        final_norm="norm",
    )


@pytest.mark.parametrize("options", [{}, {"enable_sequence_parallelism": True}], ids=["plain", "sequence"])
def test_attention_can_enter_at_its_first_projection(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    plain = ToyLM().double()
    if not options:  # under sequence parallelism each rank has only its chunk between the blocks
        for layer in plain.layers:
            layer.attn.__class__ = ResidualInside
    toy_loss(plain, toy_batch(0)).backward()

    def train(context: ParallelContext) -> None:
        model = copy.deepcopy(plain)
        model.zero_grad()
        shard_model(model, EntersAtQ, context=context, **options)
        toy_loss(model, toy_batch(0)).backward()
        expected = [layer.norm1.weight.grad for layer in plain.layers]
        torch.testing.assert_close([layer.norm1.weight.grad for layer in model.layers], expected)

    run_as_threads(train, tensor=2)


def test_second_derivative_raises() -> None:
    def penalize(context: ParallelContext) -> None:
        model = shard_model(ToyLM(), ToyPolicy, context=context)
        loss = toy_loss(model, toy_batch(0))
        grads = torch.autograd.grad(loss, [model.layers[0].norm1.weight], create_graph=True)
        (loss + grads[0].square().sum()).backward()

    with pytest.raises(ConfigError, match="does not support backward"):
        run_as_threads(penalize, tensor=2)


# ------------------------------------------------------------------------------------------------------- random numbers


def draws_same_numbers(name: str) -> bool:
    context = launch_from_torch()
    torch.manual_seed(context.tensor.rank)
    model = shard_model(SmallModelFactory(name)(), context=context)
    numbers = torch.rand(3)
    assert model is not None
    return all(torch.equal(numbers, other) for other in all_gather_objects(numbers, context.tensor))


def test_ranks_draw_the_same_numbers_outside_blocks_without_dropout(pool2: WorkerPool) -> None:
    assert pool2.run(draws_same_numbers, "llama") == [True, True]


class FunctionalDropout(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attn(self.norm1(x)), 0.5, self.training)
        return x + self.mlp(self.norm2(x))


def drops_same_values() -> bool:
    context = launch_from_torch()
    torch.manual_seed(context.tensor.rank)
    model = ToyLM()
    for layer in model.layers:
        layer.__class__ = FunctionalDropout
    shard_model(model, ToyPolicy, context=context).train()
    seen: list[Tensor] = []
    model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    for step in range(2):
        toy_loss(model, toy_batch(step)).backward()
    return all(all(map(torch.equal, seen, other)) for other in all_gather_objects(seen, context.tensor))


def test_functional_dropout_trains_correctly(pool2: WorkerPool) -> None:
    assert pool2.run(drops_same_values) == [True, True]


def after_a_broken_forward() -> bool:
    context = launch_from_torch()
    torch.manual_seed(0)
    dropouts = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    model = shard_model(
        SmallModelFactory("gpt2", changes=dropouts)(), context=context, enable_sequence_parallelism=True
    ).train()
    batch = RandomBatchFactory("GPT2LMHeadModel")(0)

    @seeing_parts
    def fail(module: nn.Module, args: Any) -> None:
        raise torch.OutOfMemoryError("pretended")

    broken = model.get_submodule("transformer.h.1.mlp.act")
    hook = broken.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        compute_model_loss(model, batch)
    hook.remove()
    seen: list[Tensor] = []
    model.get_submodule("transformer.drop").register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    compute_model_loss(model, batch).backward()
    return all(torch.equal(seen[0], other) for other in all_gather_objects(seen[0], context.tensor))


def test_failed_forward_inside_a_block_leaves_no_state(pool2: WorkerPool) -> None:
    assert pool2.run(after_a_broken_forward) == [True, True]


# -------------------------------------------------------------------------------------------- before and after sharding


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (129, 1030)])
def test_checksum_covers_every_element(kind: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = (10 * torch.randn(shape)).to(kind)
    assert compute_numel_and_hash(x) == compute_numel_and_hash(x.clone())
    for place in (0, x.numel() // 2, x.numel() - 1):
        other = x.clone()
        other.view(-1)[place] = 1 - other.view(-1)[place].to(torch.int64)
        assert compute_numel_and_hash(other) != compute_numel_and_hash(x)


def test_checksum_depends_on_the_order_of_chunks() -> None:
    x = torch.randn(3, 1024)
    assert compute_numel_and_hash(x) != compute_numel_and_hash(x[[1, 0, 2]])


def test_optimizer_created_before_sharding_is_refused() -> None:
    def shard(context: ParallelContext) -> None:
        model = ToyLM()
        optimizer = torch.optim.AdamW(model.parameters())
        shard_model(model, ToyPolicy, context=context)
        assert optimizer

    with pytest.raises(
        ConfigError, match=r"An optimizer already contains the parameter '.*create the optimizer from model.parameters"
    ):
        run_as_threads(shard, tensor=2)


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_no_search_if_only_the_model_refers_to_its_parameters(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for other references visits all objects of the process, which takes longer than sharding."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("the collector is asked")

    monkeypatch.setattr(gc, "get_referrers", refuse)
    run_as_threads(lambda context: bool(shard_model(SmallModelFactory(family)(), context=context)), tensor=2)


def test_parameter_referenced_elsewhere_is_detected() -> None:
    model = ToyLM(tied=True)
    assert find_externally_referenced_param_ids(model) == set()
    kept = [model.head.weight, model.norm.weight]
    assert find_externally_referenced_param_ids(model) == {id(p) for p in kept}
    del kept
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    assert find_externally_referenced_param_ids(model) == {id(p) for p in model.layers.parameters()}
    del optimizer
    assert find_externally_referenced_param_ids(model) == set()


def test_parameters_added_after_sharding_are_refused() -> None:
    def use(context: ParallelContext) -> None:
        model: Any = shard_model(ToyLM(), ToyPolicy, context=context)
        model.score = nn.Linear(HIDDEN, 2)
        toy_loss(model, toy_batch(0))

    with pytest.raises(ConfigError, match=r"score.weight of ToyLM was added after the model was sharded"):
        run_as_threads(use, tensor=2)


def test_write_error_of_the_first_rank_is_raised_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    models = [SmallModelFactory("llama")(), SmallModelFactory("llama")()]

    def save(context: ParallelContext) -> str:
        model: Any = shard_model(models[context.tensor.rank], context=context)
        try:
            model.save_pretrained(tmp_path / "file" / "model")
        except ShardFormerError as error:
            return type(error).__name__
        return "nothing"

    assert run_as_threads(save, tensor=2) == ["ConfigError", "InputError"]


def saved_by_one(folder: str) -> str:
    (
        deadlock_detection.SURE_AFTER_S,
        deadlock_detection.LOOK_EVERY_S,
        parallel_context.ASK_AFTER_S,
        parallel_context.ASK_EVERY_S,
    ) = 0.2, 0.1, 0.1, 0.1
    context = launch_from_torch()
    model: Any = shard_model(SmallModelFactory("llama")(), context=context)
    if context.tensor.rank == 0:
        try:
            model.save_pretrained(folder)
        except InputError as error:
            return str(error)
        finally:
            torch.distributed.barrier()
    else:
        torch.distributed.barrier()
    return ""


def test_saving_on_one_rank_only_is_refused(pool2: WorkerPool, tmp_path: Path) -> None:
    message = pool2.run(saved_by_one, str(tmp_path))[0]
    assert "rank 1 waits for other ranks" in message and "not under `if rank == 0:`" in message


def test_outputs_of_an_unsharded_model_are_unchanged() -> None:
    models = [SmallModelFactory("llama", changes={"attn_implementation": "eager"})() for _ in range(2)]

    def run(context: ParallelContext) -> int:
        model = shard_model(models[context.tensor.rank], context=context, enable_tensor_parallelism=False)
        return len(model(input_ids=torch.arange(6).view(1, 6), output_attentions=True).attentions)

    assert run_as_threads(run, tensor=2) == [2, 2]


# -------------------------------------------------------------------------------------------------- unreferenced models


def left_over(family: str) -> int:
    """Return the number of parameters that outlive a trained model."""
    context = launch_from_torch(tensor=2)
    model = shard_model(SmallModelFactory(family)(), context=context, enable_sequence_parallelism=True)
    compute_model_loss(model, RandomBatchFactory(DEFAULT_HEAD[family])(0)).backward()
    refs = [weakref.ref(p) for p in model.parameters()]
    del model
    gc.collect()
    return sum(ref() is not None for ref in refs)


@pytest.mark.parametrize("family", ["llama", "bert", "albert"])
def test_unreferenced_model_is_freed(pool2: WorkerPool, family: str) -> None:
    assert pool2.run(left_over, family) == [0, 0]


def part_alone() -> list[tuple[int, int]]:
    """Return checksums of the gradients of a submodule whose model was freed, with different data per rank."""
    context = launch_from_torch(tensor=1, data=2)
    model: Any = shard_model(SmallModelFactory("llama")(), context=context)
    part = model.model
    del model
    gc.collect()
    part(input_ids=torch.arange(6).view(1, 6) + context.data.rank).last_hidden_state.square().sum().backward()
    return [compute_numel_and_hash(p.grad) for p in part.parameters()]


def test_submodule_keeps_synchronizing_its_gradients(pool2: WorkerPool) -> None:
    mine, theirs = pool2.run(part_alone)
    assert mine == theirs


# ------------------------------------------------------------------------------------------------------ wrong arguments


class UnevenFirstForm(Policy):
    @staticmethod
    def argument_policy(model_config: Any, shard_config: int) -> dict[Any, Argument]:
        attributes = {"num_heads": HEADS // shard_config}
        return {SelfAttention: Argument(attributes, [UnevenFirstForm.attn_in, UnevenFirstForm.attn_out])}

    @staticmethod
    def attn_in() -> list[ShardedLayer]:
        return [Col_Layer(f"{n}.weight", f"{n}.bias") for n in "qkv"]

    @staticmethod
    def attn_out() -> list[ShardedLayer]:
        return [Row_Layer("o.weight", "o.bias")]


def test_rule_that_splits_heads_is_refused() -> None:
    refused(
        ConfigError,
        ToyLM,
        "num_heads=5 is not divisible by the tensor size",
        "Use a tensor size of 1, 5",
        policy=UnevenFirstForm,
    )


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize(
    ("family", "heads"),
    [
        ("falcon", {"num_attention_heads": 8, "num_kv_heads": 2}),
        ("chatglm", {"num_attention_heads": 8, "multi_query_group_num": 2}),
    ],
)
def test_uneven_kv_heads_in_a_fused_projection_are_refused(family: str, heads: dict[str, int]) -> None:
    """The second of three ranks has query heads 3, 4 and 5: one on the first KV head and two on the second."""
    models = [SmallModelFactory(family, changes=heads)() for _ in range(3)]
    with pytest.raises(ConfigError, match=r"tensor parallel size of 3 splits the 2 KV heads of .* unevenly"):
        run_as_threads(lambda context: shard_model(models[context.tensor.rank], context=context), tensor=3)


@pytest.mark.parametrize("make", [ShardFormer, lambda config: ModelSharder(ToyLM(), config, ToyPolicy)])
def test_invalid_config_is_refused(make: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigError, match="must be a ShardConfig"):
        make({"enable_sequence_parallelism": True})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"enable_sequence_parallelism": "false"}, "enable_sequence_parallelism='false'"),
        ({"extra_kwargs": {"check_inputs": "no"}}, "check_inputs='no'"),
        ({"extra_kwargs": {"bucket_bytes": "25MB"}}, "bucket_bytes='25MB'"),
        ({"extra_kwargs": {"bucket_bytes": -1}}, "bucket_bytes=-1"),
        ({"extra_kwargs": [1]}, r"extra_kwargs=\[1\]"),
    ],
)
def test_values_of_wrong_types_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardConfig(**fields)


def test_invalid_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model must be a torch\.nn\.Module, but got 'bert'"):
        shard_model("bert")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ConfigError, match=r"without .parameters\(\)"):
        shardformer.clip_grad_norm_(ToyLM().parameters(), 1.0)  # type: ignore[arg-type]  # wrong on purpose


def test_invalid_policy_is_refused() -> None:
    refused(PolicyError, ToyLM, "in the argument config", policy=ShardConfig())
    with pytest.raises(
        PolicyError, match=r"sets 'embedings', which is not a field of a policy.*Rename 'embedings' to 'embeddings'"
    ):
        type("Misspelt", (RolePolicy,), {"embedings": "embed"})
    with pytest.raises(PolicyError, match=r"'num_heads': 'head'.*'heads'"):
        Attention("attn", AttentionProjections(out="o"), {"num_heads": "head"})
    with pytest.raises(PolicyError, match="must be a subclass"):
        shardformer.register_policy("toy", ToyPolicy())  # type: ignore[arg-type]  # wrong on purpose


class NoMaker(ColumnParallelOrEmbedding):
    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> Any:
        return None


class BadTarget(ToyPolicy):
    def module_policy(self) -> Any:
        descriptions = copy.deepcopy(dict(super().module_policy()))
        for description in descriptions.values():
            for sub in description.sub_module_replacement or []:
                if sub.target_module in (Linear1D_Col, Linear1D_Row):
                    sub.target_module = NoMaker
        return descriptions


def test_target_that_returns_no_module_is_refused() -> None:
    refused(PolicyError, ToyLM, "from_native_module must return an nn.Module, but returned None", policy=BadTarget)


class Gate(nn.Module):
    """Multiplies each feature by a value from a table, which is a buffer of the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(1.0, HIDDEN + 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_buffer("table")


def with_gate() -> nn.Module:
    model = ToyLM()
    model.norm = nn.Sequential(Gate(), nn.LayerNorm(HIDDEN))
    return model


class FullGate(ParallelModule):
    """Keeps the full table. The subclasses have the mistakes of a first own layer."""

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Any = None, **kwargs: Any) -> nn.Module:
        new = cls(Axis.of(process_group))
        new.register_buffer("table", cls.select(module.get_buffer("table"), new.axis))
        return new

    @classmethod
    def select(cls, table: Tensor, axis: Axis) -> Tensor:
        return table

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_buffer("table")


class SlicedGate(FullGate):
    @classmethod
    def select(cls, table: Tensor, axis: Axis) -> Tensor:
        return table[Split.even(len(table), axis.size).indices(axis.rank)]


class GateWithTypeError(FullGate):
    @classmethod
    def select(cls, table: Tensor, axis: Axis) -> Tensor:
        Split.fused([len(table)], axis.size, axes=("tensor",))  # type: ignore[call-arg]  # wrong on purpose
        return table


class GateWithoutGroup(FullGate):
    @classmethod
    def from_native_module(cls, module: nn.Module) -> nn.Module:  # type: ignore[override]  # wrong on purpose
        return cls()


def policy_with_gate(target: type[nn.Module], suffix: str = "norm.0", **kwargs: Any) -> type[Policy]:
    class GatePolicy(Policy):
        def module_policy(self) -> Any:
            sub = SubModuleReplacementDescription(suffix, target, kwargs or None)
            return {"ToyLM": ModulePolicyDescription(sub_module_replacement=[sub])}

    return GatePolicy


def test_persistent_buffer_must_be_full() -> None:
    """Otherwise, the state dict would contain only this rank's values."""
    sharded(with_gate, policy_with_gate(FullGate))
    words = ("norm.0", "'table'", "(15,)", "(30,)", "Register the full buffer", "persistent=False")
    refused(PolicyError, with_gate, *words, policy=policy_with_gate(SlicedGate))


def test_type_error_of_an_own_layer_names_its_cause() -> None:
    def message(target: type[nn.Module], suffix: str = "norm.0", **kwargs: Any) -> str:
        with pytest.raises(PolicyError) as caught:
            sharded(with_gate, policy_with_gate(target, suffix, **kwargs))
        return str(caught.value)

    for kwargs in ({}, {"unused": 1}):
        of_code = message(GateWithTypeError, **kwargs)
        line = inspect.getsourcelines(GateWithTypeError.select)[1] + 2
        assert f"TypeError at {Path(__file__)}:{line}: " in of_code and "unexpected keyword argument 'axes'" in of_code
        assert "kwargs" not in of_code
    assert "from_native_module(module, process_group, **kwargs)" in message(GateWithoutGroup)
    assert "Fix the kwargs" in message(GateWithoutGroup, factor=2)
    assert "Fix the kwargs" in message(Linear1D_Col, "head", gather=True)


def test_registered_policy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "_REGISTERED", {})

    class Mine(ToyPolicy):
        pass

    shardformer.register_policy("toy", Mine)
    model = ToyLM()
    model.config = type("Config", (), {"model_type": "toy"})()
    policy, source = resolve_policy_and_origin(model, None)
    assert isinstance(policy, Mine) and "registered by the user for 'toy'" in source
