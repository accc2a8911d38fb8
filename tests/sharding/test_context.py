"""Context parallelism of full models equals one process."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import shardformer
from shardformer.context_parallel import ring_attention
from shardformer.context_parallel import ring_attention as ring
from shardformer.context_parallel import sequence_sharded_tensor as cut_tensor
from shardformer.context_parallel import ulysses as heads
from shardformer.context_parallel.sequence_sharded_tensor import SequenceShardedTensor
from shardformer.discovery import forward_trace
from shardformer.discovery import validation as prove_context
from shardformer.discovery.example_inputs import make_example_batches
from shardformer.discovery.shrink_config import shrink_config
from shardformer.layout.sharding_metadata import GradientReduction, get_shard_specs
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext, reshape_sequence_axis
from shardformer.sharding import apply_tensor_parallel as sharding_gradients
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory
from shardformer.verify.training_options import VerifyTraining
from shardformer.verify.verification import verify
from tests.pairwise import in_turn
from tests.sharding.plain_models import in_fp64, plain_of, train_steps

STEPS, LEARNING_RATE, SAMPLES = 2, 0.1, 4
FAMILIES = (
    "llama", "gpt2", "bert", "t5", "opt", "qwen2", "qwen3", "mistral", "roberta", "albert", "ernie", "whisper", "vit",
    "blip-2",
)  # fmt: skip
OF_THEIR_OWN = ("beit", "bloom", "falcon", "gpt_neo", "gptj")
"""Families whose attention cannot be replaced, so that every rank computes it in full."""
LAYOUTS: list[dict[str, Any]] = [
    {"sequence": 2, "way": "ring"},
    {"sequence": 4, "way": "ring"},
    {"sequence": 2, "way": "ulysses"},
    {"sequence": (2, 2), "way": "auto"},
    {"sequence": 2, "way": "gather"},
    {"sequence": 2, "way": "ring", "tensor": 2},
    {"sequence": 2, "way": "ring", "tensor": 2, "enable_sequence_parallelism": True},
    {"sequence": 2, "way": "ring", "data": 2},
]
Batch = Mapping[str, Any]


def train(model: nn.Module, batches: list[dict[str, Any]], **pipeline: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of some steps, and the gradients of the first step."""
    return train_steps(model, batches, lambda model, batch: model(**batch).loss, LEARNING_RATE, **pipeline)


def check(
    plain: nn.Module, batches: list[dict[str, Any]], layout: Mapping[str, Any], bound: float = 1e-9, **pipeline: Any
) -> None:
    """Compare losses, gradients and weights on every rank with one process."""
    sizes = {name: layout[name] for name in ("data", "pipe", "tensor") if name in layout}
    sequence = layout["sequence"]
    ranks = sequence if isinstance(sequence, int) else sequence[0] * sequence[1]
    options = {name: value for name, value in layout.items() if name.startswith("enable_")}
    parts = sizes.get("data", 1)
    alone = copy.deepcopy(plain)
    if parts == 1:
        expected, gradients = train(alone, batches)
    else:  # each data rank averages its own samples
        joined = [[shared(batch, rank, parts) for rank in range(parts)] for batch in batches]
        expected, gradients = train_in_parts(alone, joined)
    weights = dict(alone.named_parameters())

    def compute(context: ParallelContext) -> None:
        grid = reshape_sequence_axis(context, sequence)
        model = shardformer.shard_model(
            copy.deepcopy(plain), context=grid, context_parallel=layout.get("way", "auto"), **options
        )
        own = [shared(batch, context.data.rank, parts) for batch in batches]
        losses, first = train(model, own, **pipeline)
        if parts == 1:
            assert losses == pytest.approx(expected, rel=max(bound, 1e-6))  # in fp32 if a model casts its logits
        specs = get_shard_specs(model)
        for name, param in model.named_parameters():
            if param.is_meta or name not in gradients:
                continue
            coords = {"tensor": context.tensor.rank}
            near(f"gradient of {name}", first[name], specs[name].slice_full_tensor(gradients[name], coords), bound)
            near(name, param.detach(), specs[name].slice_full_tensor(weights[name].detach(), coords), bound)

    run_as_threads(compute, sequence=ranks, one_at_a_time=True, **sizes)


def near(what: str, found: Tensor, expected: Tensor, bound: float) -> None:
    difference = (found - expected).abs().max().item() if found.numel() else 0.0
    assert difference <= bound * max(expected.abs().max().item() if found.numel() else 0.0, 1e-2), (what, difference)


def shared(batch: Batch, rank: int, parts: int) -> dict[str, Any]:
    each = SAMPLES // parts
    return {
        name: x[rank * each : (rank + 1) * each] if isinstance(x, Tensor) and x.dim() and len(x) == SAMPLES else x
        for name, x in batch.items()
    }


def train_in_parts(model: nn.Module, batches: list[list[dict[str, Any]]]) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    first: dict[str, Tensor] = {}
    for parts in batches:
        for part in parts:
            (model(**part).loss / len(parts)).backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return [], first


def batches_of(family: str, length: int = 13) -> list[dict[str, Any]]:
    source = RandomBatchFactory(DEFAULT_HEAD[family], batch_size=SAMPLES, sequence_length=length)
    return [in_fp64(source(step)) for step in range(STEPS)]


def bound_of(family: str) -> float:
    """Return a wider bound for models that cast logits or norms to fp32."""
    exact = ("bert", "roberta", "albert", "ernie", "whisper", "vit", "t5")
    return 1e-9 if family in exact else 3e-6


CASES = [
    (family, layout)
    for family, layout in in_turn([f for f in FAMILIES for _ in range(2)], *[(x,) for x in LAYOUTS])
    if family != "blip-2" or layout["sequence"] == 2  # its images have five positions
]


@pytest.mark.slow
@pytest.mark.reduced(at_most=6)
@pytest.mark.feature("context parallel")
@pytest.mark.parametrize(("family", "layout"), CASES, ids=str)
def test_context_parallel_training_equals_one_process(family: str, layout: dict[str, Any]) -> None:
    check(plain_of(family), batches_of(family), layout, bound_of(family))


WHOLE: list[dict[str, Any]] = [
    {"sequence": 2},
    {"sequence": 3, "tensor": 2},
    {"sequence": 2, "data": 2},
    {"sequence": 2, "pipe": 2},
]


@pytest.mark.slow
@pytest.mark.reduced(at_most=3)
@pytest.mark.feature("context parallel")
@pytest.mark.filterwarnings("ignore:The attention of:UserWarning")
@pytest.mark.parametrize(
    ("family", "layout"), in_turn([f for f in OF_THEIR_OWN for _ in range(2)], *[(x,) for x in WHOLE]), ids=str
)
def test_custom_attention_receives_all_positions(
    family: str, layout: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    pipeline = {"micro_batches": 2} if "pipe" in layout else {}
    check(plain_of(family), batches_of(family), layout, 3e-6, **pipeline)
    record_property("feature", "part: only attention is not sharded, because the model has its own attention code")


@pytest.mark.filterwarnings("ignore:The attention of:UserWarning")
def test_replicated_attention_supports_checkpointing() -> None:
    plain = copy.deepcopy(plain_of("gptj"))
    plain.gradient_checkpointing_enable()  # type: ignore[operator]
    check(plain, batches_of("gptj"), {"sequence": 2}, 3e-6)


def test_replicated_attention_is_reported() -> None:
    def said(context: ParallelContext) -> str:
        if context.rank:
            return str(shardformer.shard_model(copy.deepcopy(plain_of("bloom")), context=context))
        with pytest.warns(
            UserWarning,
            match="so each of the 2 ranks on this axis computes the full attention",
        ):
            model = shardformer.shard_model(copy.deepcopy(plain_of("bloom")), context=context)
        return str(shardformer.describe_sharding(model))

    found = run_as_threads(said, sequence=2)[0]
    assert "attention is computed in full on every rank" in found
    assert "transformer.h.*.self_attention" in found


def whole_is_refused(family: str, **how: Any) -> str:
    found = refused(plain_of(family), **how)
    assert found.count(". ") >= 1, "the error has a remedy"
    return found


def test_explicit_attention_method_is_never_replaced() -> None:
    assert "implements its own attention in BloomAttention" in whole_is_refused("bloom", context_parallel="ring")
    assert "implements its own attention in BloomAttention" in whole_is_refused("bloom", sequence=(1, 2))

    def both(context: ParallelContext) -> None:
        model = copy.deepcopy(plain_of("bloom"))
        with pytest.raises(shardformer.ShardFormerError, match="enable_sequence_parallelism=True with sequence > 1"):
            shardformer.shard_model(model, context=context, enable_sequence_parallelism=True)

    run_as_threads(both, sequence=2, tensor=2)


@pytest.mark.parametrize("length", [7, 8, 11, 16, 31])
def test_any_sequence_length_works(length: int) -> None:
    check(plain_of("llama"), batches_of("llama", length), {"sequence": 3, "way": "ring"}, bound_of("llama"))


def text(**more: Any) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 100, (SAMPLES, 13), generator=generator)
    return [{"input_ids": ids, "labels": ids, **more}] * STEPS


def padded(left: int, right: int) -> Tensor:
    mask = torch.ones(SAMPLES, 13, dtype=torch.int64)
    mask[0, :left] = 0
    mask[1, 13 - right :] = 0
    return mask


PACKED = torch.tensor([[*range(5), *range(8)], [*range(13)], [*range(9), *range(4)], [*range(1), *range(12)]])


@pytest.mark.reduced
@pytest.mark.parametrize("way", ["ring", "ulysses", "gather"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"attention_mask": padded(4, 0)},
        {"attention_mask": padded(0, 6)},
        {"position_ids": PACKED},
        {"position_ids": torch.arange(3, 16)[None]},
    ],
    ids=["nothing", "left", "right", "documents", "positions"],
)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_padding_packed_documents_and_windows_work(family: str, more: dict[str, Any], way: str) -> None:
    check(plain_of(family), text(**more), {"sequence": 2, "way": way}, 3e-6)


@pytest.mark.slow
@pytest.mark.reduced(family=("gpt2", "whisper"), at_most=1)
@pytest.mark.parametrize("layout", [{"sequence": 2, "pipe": 2}, {"sequence": 2, "pipe": 2, "tensor": 2}])
@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "whisper"])
def test_pipeline_stage_sends_its_positions(family: str, layout: dict[str, Any]) -> None:
    check(plain_of(family), batches_of(family), layout, bound_of(family), micro_batches=2)


def hybrid(family: str, head: str) -> tuple[nn.Module, list[dict[str, Any]]]:
    torch.manual_seed(0)
    config = shrink_config(transformers.AutoConfig.for_model(family, architectures=[head]))
    plain = getattr(transformers, head)(config).double().train()
    return plain, [{**batch, "labels": batch["input_ids"]} for batch in make_example_batches(plain)[:1]] * STEPS


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.usefixtures("found_once")
@pytest.mark.parametrize(
    ("family", "head", "layout", "again"),
    [
        ("qwen3_next", "Qwen3NextForCausalLM", {"sequence": 2}, False),
        ("jamba", "JambaForCausalLM", {"sequence": 2, "tensor": 2, "enable_sequence_parallelism": True}, False),
        ("minimax", "MiniMaxForCausalLM", {"sequence": 3, "way": "gather"}, True),
    ],
    ids=str,
)
def test_token_mixers_other_than_attention_receive_all_tokens(
    family: str, head: str, layout: dict[str, Any], again: bool
) -> None:
    """Linear attention and state space models, also with activation checkpointing."""
    plain, batches = hybrid(family, head)
    if again:
        plain.gradient_checkpointing_enable()  # type: ignore[operator]
    check(plain, batches, layout, 3e-6)  # they compute in fp32 inside


@pytest.mark.slow
@pytest.mark.usefixtures("found_once")
def test_full_sequence_modules_are_detected_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = hybrid("jamba", "JambaForCausalLM")

    def said(context: ParallelContext) -> str:
        model = shardformer.shard_model(copy.deepcopy(plain), context=context)
        return str(shardformer.describe_sharding(model))

    assert "(other than attention): model.layers.*.mamba." in run_as_threads(said, sequence=2)[0]
    monkeypatch.setattr(prove_context, "_CONTEXT_RESULTS", {})
    monkeypatch.setattr(forward_trace.LayerListTrace, "find_token_mixing_modules", lambda _: iter(()))
    assert "differs" in refused(plain)


@pytest.mark.parametrize("family", ["llama", "t5", "vit"])
def test_checkpointed_layers_have_the_same_gradients(family: str) -> None:
    plain = plain_of(family)
    expected = train(copy.deepcopy(plain), batches_of(family))[1]

    def compute(context: ParallelContext) -> None:
        model: Any = shardformer.shard_model(copy.deepcopy(plain), context=context, context_parallel="ring")
        model.gradient_checkpointing_enable()
        for name, gradient in train(model, batches_of(family))[1].items():
            near(name, gradient, expected[name], 3e-6)

    run_as_threads(compute, sequence=2, one_at_a_time=True)


def test_sharded_logits_behave_like_full_logits() -> None:
    plain = plain_of("gpt2")
    batch = batches_of("gpt2")[0]
    expected = copy.deepcopy(plain)(**batch)

    def compute(context: ParallelContext) -> None:
        model = shardformer.shard_model(copy.deepcopy(plain), context=context, context_parallel="ring")
        out = model(**batch)
        logits = out.logits
        assert isinstance(logits, SequenceShardedTensor)
        assert logits.shape == expected.logits.shape
        assert logits.local.shape[1] < logits.shape[1]
        near("logits", logits.full_tensor().detach(), expected.logits.detach(), 1e-9)
        assert torch.equal(logits.argmax(-1) + 0, expected.logits.argmax(-1))
        near("row", logits[:, -1].detach(), expected.logits[:, -1].detach(), 1e-9)
        near("mean", logits.mean().detach(), expected.logits.mean().detach(), 1e-9)
        shifted = nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]), batch["input_ids"][:, 1:].reshape(-1)
        )
        whole = expected.logits[:, :-1].reshape(-1, logits.shape[-1])
        near("loss", shifted, nn.functional.cross_entropy(whole, batch["input_ids"][:, 1:].reshape(-1)), 1e-9)

    run_as_threads(compute, sequence=3, one_at_a_time=True)


def test_decoding_with_a_cache_runs_in_full_on_all_ranks() -> None:
    plain: Any = plain_of("llama")
    prompt = torch.arange(5, 9)[None]
    expected = copy.deepcopy(plain).eval().generate(prompt, max_new_tokens=6, do_sample=False)

    def compute(context: ParallelContext) -> None:
        model: Any = shardformer.shard_model(copy.deepcopy(plain), context=context).eval()
        assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), expected)

    run_as_threads(compute, sequence=2, one_at_a_time=True)


def losses_with_dropout(sequence: int, way: str, rate: float) -> list[float]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=100, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=rate
    )
    plain = transformers.GPT2LMHeadModel(config).double().train()
    context = ParallelContext.from_default_process_group({"sequence": sequence})
    model = shardformer.shard_model(plain, context=context, context_parallel=way)
    torch.manual_seed(5 + context.sequence.rank)
    return train(model, text())[0]


def test_attention_dropout_is_independent_of_the_ranks(pool2: WorkerPool, pool4: WorkerPool) -> None:
    found = [
        pool.run(losses_with_dropout, ranks, way, 0.4)
        for pool, ranks, way in ((pool2, 2, "ring"), (pool2, 2, "ulysses"), (pool4, 4, "gather"))
    ]
    for losses in (losses for ranks in found for losses in ranks):
        assert losses == pytest.approx(found[0][0], rel=1e-6)
    assert abs(found[0][0][0] - pool2.run(losses_with_dropout, 2, "ring", 0.0)[0][0]) > 1e-4, "it drops"


def refused(plain: nn.Module, batch: Batch | None = None, sequence: Any = 2, **options: Any) -> str:
    """Return the error message of every rank."""

    def compute(context: ParallelContext) -> str:
        try:
            model = shardformer.shard_model(
                copy.deepcopy(plain), context=reshape_sequence_axis(context, sequence), **options
            )
            if batch is not None:
                model(**batch)
        except shardformer.ShardFormerError as error:
            return str(error)
        return "nothing"

    ranks = sequence if isinstance(sequence, int) else sequence[0] * sequence[1]
    said = run_as_threads(compute, sequence=ranks, one_at_a_time=True)
    assert len(set(said)) == 1
    return said[0]


IDS = torch.arange(5, 18)[None]


@pytest.mark.parametrize(
    ("batch", "sequence", "said"),
    [
        ({"input_ids": IDS[:, :3]}, 2, "A sequence of 3 positions"),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(1, 1, 13, 13, dtype=torch.bool)},
            2,
            "a full attention mask",
        ),
        ({"input_ids": IDS, "output_hidden_states": True}, 2, "output_hidden_states=True"),
        ({"input_ids": IDS, "output_attentions": True}, 2, "output_attentions=True"),
        (None, (1, 12), "query heads"),
    ],
    ids=["short", "mask", "hidden states", "weights", "heads"],
)
def test_unsupported_inputs_are_refused_on_all_ranks(batch: Batch | None, sequence: Any, said: str) -> None:
    batch = {"input_ids": IDS} if batch is None else batch
    found = refused(plain_of("llama"), batch, sequence)
    assert said in found
    assert found.count(". ") >= 1, "the error has a remedy"


@pytest.mark.slow
@pytest.mark.reduced(at_most=2)
@pytest.mark.feature("context parallel")
@pytest.mark.parametrize("family", [name for name in DEFAULT_HEAD if name not in (*FAMILIES, *OF_THEIR_OWN)])
def test_unsupported_model_is_refused_and_unchanged(
    family: str, record_property: Callable[[str, object], None]
) -> None:
    said = re.sub(r" for \w+(?=[:,])", "", refused(plain_of(family)).partition(". ")[0])
    _, refusal, reason = said.partition("does not support context parallelism with sequence=2: ")
    assert refusal
    record_property("feature", f"refused: {reason}")


def test_method_that_does_not_fit_the_axis_is_refused() -> None:
    assert "context_parallel='ring'" in refused(plain_of("llama"), sequence=(2, 2), context_parallel="ring")
    with pytest.raises(shardformer.ShardFormerError, match=r"context_parallel='rign'.*'ring'"):
        shardformer.compat.ShardConfig(context_parallel="rign")


def test_different_batches_on_sequence_ranks_are_refused() -> None:
    def compute(context: ParallelContext) -> str:
        model = shardformer.shard_model(copy.deepcopy(plain_of("llama")), context=context)
        with pytest.raises(shardformer.ShardFormerError, match="received different batches"):
            model(input_ids=IDS + context.sequence.rank)
        return "said"

    assert run_as_threads(compute, sequence=2, one_at_a_time=True) == ["said", "said"]


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize(
    "sizes",
    [{"tensor": 2, "sequence": 2}, {"tensor": 1, "sequence": (2, 2)}, {"tensor": 1, "sequence": 4}],
    ids=str,
)
def test_processes_give_the_results_of_one_process(pool4: WorkerPool, sizes: dict[str, Any]) -> None:
    report = verify(SmallModelFactory("llama"), RandomBatchFactory("LlamaForCausalLM"), sizes, pool=pool4)
    assert report.passed, str(report)


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("zero", [1, 3])
def test_zero_works_with_the_sequence_axis(pool4: WorkerPool, zero: int) -> None:
    sizes = {"tensor": 1, "sequence": 2}
    report = verify(
        SmallModelFactory("gpt2"),
        RandomBatchFactory("GPT2LMHeadModel"),
        sizes,
        2,
        training=VerifyTraining(zero),
        pool=pool4,
    )
    assert report.passed, str(report)


def run_page(block: str) -> float:
    names = {"model": SmallModelFactory("llama")().train(), "batch": RandomBatchFactory("LlamaForCausalLM")(0)}
    exec(compile(block, "long-sequences.md", "exec"), names)
    return float(names["loss"].detach())  # type: ignore[attr-defined]


def test_examples_of_the_long_sequences_page_run(pool4: WorkerPool) -> None:
    page = (Path(__file__).parents[2] / "docs" / "long-sequences.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    losses = pool4.run(run_page, block)
    assert losses == pytest.approx([losses[0]] * 4)


# --- the tests detect removed collectives


def _nothing_arrives(axis: Any, to: int, out: Tensor, source: int, into: Tensor) -> tuple[()]:
    into.zero_()
    return ()


def _not_swapped(x: list[Tensor], shapes: Any, axis: Any) -> list[Tensor]:
    return [x[axis.rank].new_zeros(shape) for shape in shapes]


LEFT_OUT: dict[str, tuple[str, Any, str, Any]] = {
    "keys of other ranks": ("ring", ring, "_start_send_recv", _nothing_arrives),
    "gradients of keys, home": ("ring", ring_attention._KVGradExchange, "receive_and_accumulate", lambda self: None),
    "keys that are gathered": ("gather", ring, "all_gather", lambda x, axis, *_, **__: torch.cat([x] * axis.size, 3)),
    "heads for positions": ("ulysses", heads, "_all_to_all", _not_swapped),
    "the loss": ("ring", cut_tensor, "all_reduce", lambda x, *_, **__: x),
    "gradients of weights": (
        "ring",
        sharding_gradients,
        "get_gradient_reduction",
        lambda *_: GradientReduction(divisor=2.0),
    ),
}


@pytest.mark.reduced(at_most=2)
@pytest.mark.parametrize("name", LEFT_OUT)
def test_removed_collective_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    way, owner, attribute, instead = LEFT_OUT[name]
    monkeypatch.setattr(prove_context, "_CONTEXT_RESULTS", {})
    monkeypatch.setattr(owner, attribute, instead)
    found = refused(plain_of("llama"), context_parallel=way)
    assert re.search("differs|does not run", found), "found by the validation"
