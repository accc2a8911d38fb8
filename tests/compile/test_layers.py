"""Compiled layers compute the same as eager layers, as one graph, or are refused before training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import shardformer
from shardformer.comm import CollectiveRecorder
from shardformer.errors import ConfigError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.sharding.compiled_layers import CompiledForward, get_layer_stack_compilers
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory

pytestmark = [
    pytest.mark.slow,  # compiles
    # warnings about what torch.compile does while it traces
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),
]

BACKEND = "aot_eager"
"""Traces and differentiates the graph as inductor does, and runs it without a compiler."""
BOUND = 1e-10
NUM_LAYERS = 2
NUM_STEPS = 2
EVERY_LENGTH = range(9, 19)
Values = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    torch.compiler.reset()


def model_of(family: str, context: ParallelContext, *, checkpointing: bool = False, **options: Any) -> Any:
    """Return a sharded model of two layers in fp64."""
    layers = {"gpt2": "n_layer", "t5": "num_layers"}.get(family, "num_hidden_layers")
    torch.manual_seed(0)
    plain = SmallModelFactory(family, changes={layers: NUM_LAYERS})().double().train()
    model = shardformer.shard_model(plain, context=context, **options)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


def train(
    model: Any,
    context: ParallelContext,
    *,
    call: Callable[..., Any] | None = None,
    zero: int | None = None,
    lengths: Sequence[int] = (13,) * NUM_STEPS,
    dtype: torch.dtype | None = None,
) -> Values:
    """Train a few steps, with other samples on each data rank. Returns losses, first gradients and final weights."""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if zero is not None:
        optimizer = shardformer.shard_optimizer(model, optimizer, stage=zero)
    found: Values = {}
    for step, length in enumerate(lengths):
        batch = RandomBatchFactory(DEFAULT_HEAD[model.config.model_type], sequence_length=length)(step)
        batch = {name: x.chunk(context.data.size)[context.data.rank] for name, x in batch.items()}
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = (model if call is None else call)(**batch).loss
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        if step == 0 and zero is None:
            found |= {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return found | shardformer.full_state_dict(model)


def worst_difference(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert ours.keys() == expected.keys()
    return max(float((ours[name] - x).abs().max() / x.abs().max().clamp(min=1e-3)) for name, x in expected.items())


def compare(
    context: ParallelContext,
    family: str = "llama",
    backend: str = BACKEND,
    graphs: int = 1,
    layers: int = NUM_LAYERS,
    **options: Any,
) -> float:
    """Return the largest relative difference between training with eager and with compiled layers."""
    training = {name: options.pop(name) for name in ("zero", "lengths", "dtype") if name in options}
    expected = train(model_of(family, context, **options), context, **training)
    model = model_of(family, context, compile=backend, **options)
    ours = train(model, context, **training)
    for stack in get_layer_stack_compilers(model):
        assert len(stack.layers) == layers
        assert 1 <= len(stack.graphs) <= graphs
        assert stack.eager_calls == 0
    return worst_difference(ours, expected)


SEQUENCE = {"enable_sequence_parallelism": True}


@pytest.mark.reduced(one_in=9)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"tensor": 2}, {}),
        ({"tensor": 3}, {**SEQUENCE, "lengths": EVERY_LENGTH, "graphs": 2}),
        ({"data": 2, "tensor": 2}, {"zero": 2}),
        ({"tensor": 2}, {**SEQUENCE, "checkpointing": True, "lengths": (13, 11, 13), "graphs": 2}),
        ({"tensor": 2}, {"family": "albert", "layers": 1}),
        ({"tensor": 2}, {"family": "qwen3"}),
        ({"data": 2}, {"zero": 3}),
        ({"tensor": 2}, {"family": "gpt2", "enable_jit_fused": True, "enable_fused_normalization": True}),
        ({"tensor": 2}, {"family": "t5", "graphs": 2, "enable_flash_attention": True}),
        ({"sequence": 2}, {"context_parallel": "ring", "lengths": (9, 12, 13), "graphs": 2}),
        ({"sequence": 2}, {"context_parallel": "ulysses", "checkpointing": True}),
        ({"sequence": 2, "tensor": 2}, SEQUENCE),
        ({"sequence": 2}, {"context_parallel": "ring", "lengths": EVERY_LENGTH, "graphs": 2}),
        ({"tensor": 4}, {"tensor_parallel_mode": "2d"}),
        ({"tensor": 4}, {"tensor_parallel_mode": "2d", "family": "gpt2", "checkpointing": True}),
        ({"tensor": 8}, {"tensor_parallel_mode": "2.5d"}),
        ({"tensor": 8}, {"tensor_parallel_mode": "3d"}),
    ],
    ids=[
        "tensor",
        "sequence",
        "zero2",
        "checkpointing",
        "shared layer",
        "norms in a block",
        "zero3",
        "fused",
        "t5",
        "ring",
        "ulysses",
        "ring and sequence",
        "ring of every length",
        "2d",
        "2d and checkpointing",
        "2.5d",
        "3d",
    ],
)
def test_same_losses_gradients_and_weights(sizes: dict[str, int], options: dict[str, Any]) -> None:
    found = run_as_threads(lambda context: compare(context, **options), one_at_a_time=True, **sizes)
    assert max(found) < BOUND


@pytest.mark.full
def test_recomputation_after_a_forward_pass_of_another_length() -> None:
    def do(context: ParallelContext) -> float:
        def gradients(**options: Any) -> Values:
            model = model_of("llama", context, checkpointing=True, **SEQUENCE, **options)
            losses = [model(**RandomBatchFactory("LlamaForCausalLM", sequence_length=n)(0)).loss for n in (13, 10)]
            for loss in losses:  # recomputes the first forward pass after the second
                loss.backward()
            return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

        return worst_difference(gradients(compile=BACKEND), gradients())

    assert max(run_as_threads(do, one_at_a_time=True, tensor=2)) < BOUND


@pytest.mark.full
@pytest.mark.above_budget("inductor compiles C++ code")
@pytest.mark.parametrize("options", [{}, {**SEQUENCE, "checkpointing": True}], ids=["tensor", "checkpointing"])
def test_inductor_gives_the_same_result(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    found = run_as_threads(
        lambda context: compare(context, backend="inductor", **options), one_at_a_time=True, tensor=2
    )
    assert max(found) < 1e-6  # inductor keeps the RMS norm's fp32


OTHER_FAMILIES = (
    "bert",
    "opt",
    "bloom",
    "falcon",
    "gpt_neo",
    "gptj",
    "qwen2",
    "mistral",
    "roberta",
    "ernie",
    "vit",
    "beit",
)


@pytest.mark.full
@pytest.mark.above_budget("traces layers with many branches")
@pytest.mark.parametrize("options", [{}, SEQUENCE], ids=["tensor", "sequence"])
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_other_families(family: str, options: dict[str, Any]) -> None:
    def do(context: ParallelContext) -> float:
        def losses(compile: bool | str) -> Values:
            torch.manual_seed(0)
            plain = SmallModelFactory(family)().double().train()
            model = shardformer.shard_model(plain, context=context, compile=compile, **options)
            batch = RandomBatchFactory(DEFAULT_HEAD[family])(0)
            loss = model(**{n: x.double() if x.is_floating_point() else x for n, x in batch.items()}).loss
            loss.backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            return {"loss": loss.detach(), **gradients}

        return worst_difference(losses(BACKEND), losses(False))

    assert max(run_as_threads(do, one_at_a_time=True, tensor=2)) < BOUND


@pytest.mark.full
def test_autocast_differs_by_less_than_its_own_rounding() -> None:
    """The eager backward adds the gradients of q, k and v in another order, which 16 bits show."""
    found = run_as_threads(lambda context: compare(context, dtype=torch.bfloat16), one_at_a_time=True, tensor=2)
    assert 0 < max(found) < 0.02


def test_pipeline_stages_with_dropout() -> None:
    def do(context: ParallelContext) -> float:
        def stages(**options: Any) -> Values:
            config = shardformer.ParallelConfig(pipe=2, recompute_layers=1, schedule="zbv", **options)
            torch.manual_seed(1)
            plain = (
                SmallModelFactory("gpt2", changes={"n_layer": 4, "resid_pdrop": 0.1, "attn_pdrop": 0.1})()
                .double()
                .train()
            )
            model = shardformer.shard_model(plain, config=config.make_shard_config(context))
            pipeline = shardformer.Pipeline(model, micro_batches=2)
            loss = pipeline.step(RandomBatchFactory("GPT2LMHeadModel")(0))
            for stack in get_layer_stack_compilers(model):
                assert len(stack.layers) == 2  # those of this rank
                assert stack.graphs
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            return {"loss": loss, **gradients}

        return worst_difference(stages(compile=BACKEND), stages())

    assert max(run_as_threads(do, pipe=2, one_at_a_time=True)) < BOUND


def test_model_compile_compiles_the_layers_and_describes_them() -> None:
    def do(context: ParallelContext) -> tuple[float, list[str]]:
        model = model_of("llama", context)
        assert "Compiled" not in str(shardformer.describe_sharding(model))
        model.compile(backend="eager", fullgraph=True)
        model.compile(backend=BACKEND)  # the last call counts
        (before,) = get_layer_stack_compilers(model)
        texts = [str(before)]
        copied = copy.deepcopy(model)
        found = train(model, context)
        texts.append(str(shardformer.describe_sharding(model)).splitlines()[-1])
        assert not get_layer_stack_compilers(copied)[0].graphs
        assert worst_difference(train(copied, context), found) == 0
        assert get_layer_stack_compilers(copied)[0].graphs
        return worst_difference(found, train(model_of("llama", context), context)), texts

    for difference, texts in run_as_threads(do, one_at_a_time=True, tensor=2):
        assert difference < BOUND
        assert texts == [
            "Compiled with aot_eager: 2 layers of model.layers, at their first forward pass.",
            "Compiled with aot_eager: 2 layers of model.layers, 1 graph, no graph break.",
        ]


@pytest.mark.parametrize("sizes", [pytest.param({"tensor": 2}, marks=pytest.mark.full), {"data": 2}], ids=str)
def test_torch_compile_of_the_model(sizes: dict[str, int]) -> None:
    def do(context: ParallelContext) -> float:
        model = model_of("llama", context)
        found = train(model, context, call=torch.compile(model, backend=BACKEND))
        return worst_difference(found, train(model_of("llama", context), context))

    assert max(run_as_threads(do, one_at_a_time=True, **sizes)) < BOUND


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("options", [SEQUENCE, {}], ids=["sequence", "tensor"])
def test_compiled_layers_communicate_as_eager_ones(options: dict[str, Any]) -> None:
    def do(context: ParallelContext) -> None:
        def table(model: Any) -> Any:
            model(**RandomBatchFactory("LlamaForCausalLM")(0)).loss.backward()
            with CollectiveRecorder(context) as recorder:
                model(**RandomBatchFactory("LlamaForCausalLM")(0)).loss.backward()
            return recorder.summarize_calls()

        expected = table(model_of("llama", context, **options))
        found = table(model_of("llama", context, compile=BACKEND, **options))
        assert found == expected

    run_as_threads(do, one_at_a_time=True, tensor=2)


def test_recompilation_limit_is_reported_with_the_reason() -> None:
    @torch._dynamo.config.patch(recompile_limit=1)
    def do(context: ParallelContext) -> float:
        model = model_of("llama", context, compile=BACKEND)
        expected = train(model_of("llama", context), context, lengths=(13, 11, 12))
        with pytest.warns(
            UserWarning,
            match=r"^The layer model.layers.0 runs some calls without .* limit of 1 compiled graphs \(.*size",
        ):
            found = train(model, context, lengths=(13, 11, 12))
        (stack,) = get_layer_stack_compilers(model)
        assert stack.eager_calls == 2 * NUM_LAYERS
        assert str(stack).endswith("4 calls without compilation.")
        return worst_difference(found, expected)

    assert max(run_as_threads(do, data=1)) < BOUND


@pytest.mark.full
def test_cache_is_not_filled_in_training_and_generation_is_eager() -> None:
    def do(context: ParallelContext) -> None:
        model = model_of("llama", context, compile=BACKEND)
        model.config.use_cache = True
        prompt = torch.tensor([[5, 6, 7]])
        expected = model_of("llama", context).eval().generate(prompt, max_new_tokens=4, do_sample=False)
        train(model, context)
        (stack,) = get_layer_stack_compilers(model)
        assert len(stack.graphs) == 1
        fresh = model_of("llama", context, compile=BACKEND).eval()
        assert fresh.generate(prompt, max_new_tokens=4, do_sample=False).equal(expected)
        assert not get_layer_stack_compilers(fresh)[0].graphs

    run_as_threads(do, one_at_a_time=True, tensor=2)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"sequence": 2}, {"compile": BACKEND, "family": "t5"}, "computes the relative position bias of this model in"),
        ({"tensor": 2}, {"compile": "inductr"}, "compile='inductr' is not one of .* Did you mean 'inductor'"),
        ({"tensor": 2}, {"compile": 1}, "compile=1"),
    ],
    ids=["context", "backend", "type"],
)
def test_unsupported_options_are_refused(sizes: dict[str, int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_as_threads(lambda context: model_of(context=context, **{"family": "llama", **options}), **sizes)


def test_layer_that_cannot_be_traced_is_refused_in_the_first_forward_pass() -> None:
    def do(context: ParallelContext) -> None:
        model = model_of("llama", context, compile=BACKEND)
        norm = model.model.layers[1].input_layernorm
        before = norm.forward
        norm.forward = lambda x: before(x) * (2.0 if x.sum().item() > 0 else 1.0)
        with pytest.raises(
            ConfigError, match=r"^The layer model.layers.1 \(LlamaDecoderLayer\) cannot be compiled as one graph: "
        ):
            train(model, context)

    run_as_threads(do, data=2, one_at_a_time=True)


def test_layer_keeps_its_signature_and_other_forwards_are_found() -> None:
    def do(context: ParallelContext) -> None:
        model = model_of("llama", context, compile=BACKEND)
        layer = model.model.layers[0]
        assert isinstance(layer.forward, CompiledForward)
        assert layer.forward.__wrapped__.__name__ == type(layer).forward.__name__

    run_as_threads(do, data=1)


@pytest.mark.full
def test_engine_compiles_again_after_resharding() -> None:
    """The first layout compiles what ``torch.compile(model)`` requests, the second what its config does."""

    def do(context: ParallelContext) -> float:
        def losses(backend: str) -> list[Tensor]:
            torch.manual_seed(0)
            plain = SmallModelFactory("llama")().double().train()
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
            passed = torch.compile(plain, backend=backend) if backend else plain
            parallel = shardformer.ParallelConfig(tensor=2)
            engine = shardformer.initialize(passed, optimizer, parallel=parallel, context=context)
            assert engine.model is plain
            found = [engine.train_step(RandomBatchFactory("LlamaForCausalLM")(0))]
            assert [bool(stack.graphs) for stack in get_layer_stack_compilers(engine.model)] == [True] * bool(backend)
            engine.reshard(shardformer.ParallelConfig(data=2, compile=backend or False))
            found.append(engine.train_step(RandomBatchFactory("LlamaForCausalLM")(1)))
            assert [bool(stack.graphs) for stack in get_layer_stack_compilers(engine.model)] == [True] * bool(backend)
            return [loss.detach() for loss in found]

        return max(abs(float(a - b)) for a, b in zip(losses(BACKEND), losses(""), strict=True))

    assert max(run_as_threads(do, tensor=2, one_at_a_time=True)) < BOUND


@pytest.mark.full  # the test above passes such a model to the engine
def test_model_from_torch_compile_is_sharded_without_the_wrapper() -> None:
    def do(context: ParallelContext) -> float:
        torch.manual_seed(0)
        plain = SmallModelFactory("llama", changes={"num_hidden_layers": NUM_LAYERS})().double().train()
        model = shardformer.shard_model(torch.compile(plain, backend=BACKEND, dynamic=True), context=context)
        assert model is plain
        (stack,) = get_layer_stack_compilers(model)
        assert stack.options["dynamic"] is True
        assert str(stack) == "Compiled with aot_eager: 2 layers of model.layers, at their first forward pass."
        with pytest.raises(ConfigError, match=r"is the result of torch.compile, not a sharded model"):
            shardformer.full_state_dict(torch.compile(model, backend=BACKEND))
        found = train(model, context)
        assert stack.graphs
        return worst_difference(found, train(model_of("llama", context), context))

    assert max(run_as_threads(do, data=1)) < BOUND


def test_arguments_of_model_compile() -> None:
    def do(context: ParallelContext) -> None:
        model = model_of("llama", context)
        model.compile(disable=True)
        assert not get_layer_stack_compilers(model)
        with pytest.raises(ConfigError, match="both mode and options"):
            model.compile(mode="reduce-overhead", options={"max_autotune": True})
        with pytest.raises(ConfigError, match=r"has no argument 'fullgraf'.*fullgraph"):
            model.compile(fullgraf=True)
        with pytest.raises(RuntimeError, match="Unrecognized mode=reduce-overheads"):
            model.compile(mode="reduce-overheads")
        passed: list[dict[str, Any]] = []

        def backend(graph: Any, inputs: Any, **options: Any) -> Any:
            passed.append(options)
            return graph

        model.compile(backend=backend, mode="reduce-overhead")
        train(model, context, lengths=(13,))
        assert passed == [{"mode": "reduce-overhead"}]

    run_as_threads(do, data=1)


def test_cuda_graphs_leave_out_operators_that_call_python() -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("shardformer::")}
    marks = {f"shardformer::{name}_random_state" for name in ("enter", "leave", "swap")}  # never in a compiled graph
    for name in names - marks:
        overload = getattr(torch.ops.shardformer, name.partition("::")[2]).default
        assert torch.Tag.cudagraph_unsafe in overload.tags, name
    assert "shardformer::all_reduce" in names


def test_resharding_warns_after_model_compile() -> None:
    plain = SmallModelFactory("llama")().double().train()
    engine = shardformer.initialize(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    engine.model.compile(backend=BACKEND)
    with pytest.warns(UserWarning, match=r"Call engine.model.compile\(\) again"):
        engine.reshard({"zero_stage": 1})
    assert not get_layer_stack_compilers(engine.model)
    engine.train_step(RandomBatchFactory("LlamaForCausalLM")(0))
