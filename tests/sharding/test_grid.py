"""2D, 2.5D and 3D tensor parallelism equals one process and communicates the documented bytes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import shardformer
from shardformer.comm.collectives import PendingCollective, get_local_chunk
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.discovery import validation as prove_grid
from shardformer.discovery.example_inputs import make_example_batches
from shardformer.discovery.shrink_config import shrink_config
from shardformer.errors import ConfigError, InputError, PolicyError
from shardformer.layout.sharding_metadata import get_shard_specs
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext, reshape_tensor_axis
from shardformer.sharding import apply_tensor_grid as grid_plan
from shardformer.tensor_parallel.grid_layers import GridNorm, GridTensorParallelRegion
from shardformer.transformers_compat import is_kv_cache
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory, compute_model_loss
from shardformer.verify.train_both import ForceFp64Mode
from shardformer.verify.training_options import VerifyTraining
from shardformer.verify.verification import verify
from tests.pairwise import in_turn
from tests.sharding.plain_models import in_fp64, plain_of, train_steps

STEPS, LEARNING_RATE, SAMPLES, BOUND = 2, 0.1, 3, 1e-10
Sizes = tuple[int, ...]
Batch = Mapping[str, Any]
GRIDS: list[tuple[str, Sizes]] = [
    ("2d", (2, 2)),
    ("3d", (2, 2, 2)),
    ("2d", (1, 4)),
    ("2.5d", (2, 2, 2)),
    ("2d", (4, 1)),
    ("3d", (1, 2, 2)),
    ("2.5d", (1, 2, 2)),
    ("2d", (2, 3)),
    ("3d", (2, 1, 2)),
]
SMALL_GRIDS: list[tuple[str, Sizes]] = [
    ("2d", (2, 2)),
    ("3d", (1, 2, 2)),
    ("2d", (1, 2)),
    ("2.5d", (1, 2, 2)),
    ("2d", (2, 1)),
    ("3d", (1, 2, 2)),
    ("2.5d", (1, 2, 2)),
    ("2d", (2, 2)),
    ("3d", (2, 1, 2)),
]
"""The same modes in the same order, over at most four ranks."""
FAMILIES = [name for name in DEFAULT_HEAD if name not in ("sam", "albert", "gpt_neo")]  # these below, or refused


def batches_of(family: str, samples: int = SAMPLES, steps: int = STEPS) -> list[dict[str, Any]]:
    batches = RandomBatchFactory(DEFAULT_HEAD[family], batch_size=samples)
    return [in_fp64(batches(step)) for step in range(steps)]


def train(
    model: nn.Module, batches: list[dict[str, Any]], casts: float | None = None, **pipeline: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of some steps, and the gradients of the first step."""

    def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        with ForceFp64Mode() if casts is None else nullcontext():  # its backward pass supports only one thread
            return compute_model_loss(model, batch)

    return train_steps(model, batches, loss_of, LEARNING_RATE, **pipeline)


def ranks_of(sizes: Sizes) -> int:
    return int(torch.tensor(sizes).prod())


def check(
    plain: nn.Module,
    batches: list[dict[str, Any]],
    mode: str,
    sizes: Sizes,
    pipe: int = 1,
    casts: float | None = None,
    **pipeline: Any,
) -> None:
    """Compare losses, gradients and weights on every rank with one process.

    Args:
        casts: tolerance if the model's own casts to fp32 are kept.
    """
    alone, bound = copy.deepcopy(plain), casts or BOUND
    expected, gradients = train(alone, batches, casts)
    weights = dict(alone.named_parameters())

    def compute(context: ParallelContext) -> None:
        grid = reshape_tensor_axis(context, sizes)
        model = shardformer.shard_model(copy.deepcopy(plain), context=grid, tensor_parallel_mode=mode)
        losses, first = train(model, batches, casts, **pipeline)
        assert losses == pytest.approx(expected, rel=bound)
        specs = get_shard_specs(model)
        for name, param in model.named_parameters():
            if param.is_meta or name not in gradients or not param.numel():
                continue
            near(f"gradient of {name}", first[name], specs[name].slice_full_tensor(gradients[name], grid.coords), bound)
            near(name, param.detach(), specs[name].slice_full_tensor(weights[name].detach(), grid.coords), bound)

    run_as_threads(compute, tensor=ranks_of(sizes), pipe=pipe, one_at_a_time=True)


def near(what: str, found: Tensor, expected: Tensor, bound: float) -> None:
    assert found.shape == expected.shape, what
    difference = (found - expected).abs().max().item()
    assert difference <= bound * max(expected.abs().max().item(), 1e-3), (what, difference)


@pytest.mark.slow
@pytest.mark.reduced(one_in=3)
@pytest.mark.feature("tensor grids")
@pytest.mark.parametrize(("family", "mode", "sizes"), in_turn(FAMILIES, *SMALL_GRIDS), ids=str)
def test_grid_training_equals_one_process(family: str, mode: str, sizes: Sizes) -> None:
    check(plain_of(family), batches_of(family), mode, sizes)


@pytest.mark.full
@pytest.mark.feature("tensor grids")
@pytest.mark.parametrize(("family", "mode", "sizes"), in_turn(FAMILIES, *GRIDS), ids=str)
def test_larger_grids_equal_one_process(family: str, mode: str, sizes: Sizes) -> None:
    check(plain_of(family), batches_of(family), mode, sizes)


@pytest.mark.slow
@pytest.mark.reduced(cover="mode", at_most=1)
@pytest.mark.parametrize(("mode", "sizes"), GRIDS, ids=str)
def test_every_grid_shape_equals_one_process(mode: str, sizes: Sizes) -> None:
    check(plain_of("llama"), batches_of("llama", samples=5), mode, sizes)


@pytest.mark.reduced(at_most=1)
@pytest.mark.slow
@pytest.mark.feature("tensor grids")
@pytest.mark.parametrize(("family", "mode", "sizes"), [("albert", "2d", (2, 2)), ("gpt_neo", "3d", (2, 2, 2))], ids=str)
def test_unusual_layer_structures_equal_one_process(family: str, mode: str, sizes: Sizes) -> None:
    """ALBERT's attention adds its residual itself. GPT-Neo alternates between two kinds of attention."""
    check(plain_of(family), batches_of(family), mode, sizes)


@pytest.mark.feature("tensor grids")
@pytest.mark.parametrize(
    ("family", "mode", "sizes", "word", "why"),
    [
        ("sam", "2d", (2, 2), "refused", "its mask decoder passes on two hidden states, and a grid shards only one"),
        (
            "albert",
            "3d",
            (1, 2, 2),
            "part",
            "only in 2D and 2.5D; in 3D, its attention would read features of other samples",
        ),
    ],
    ids=str,
)
def test_unsupported_mode_of_a_family_is_refused(
    family: str, mode: str, sizes: Sizes, word: str, why: str, record_property: Callable[[str, object], None]
) -> None:
    with pytest.raises(ConfigError, match=f"does not support tensor_parallel_mode='{mode}'"):
        run_as_threads(lambda c: sharded(c, family, mode, sizes), tensor=ranks_of(sizes))
    record_property("feature", f"{word}: {why}")


@pytest.mark.slow
@pytest.mark.reduced(one_in=4, first=1)
@pytest.mark.parametrize(
    ("family", "mode", "sizes"),
    [("llama", "2d", (1, 2)), ("t5", "2d", (2, 1)), ("whisper", "3d", (2, 1, 2)), ("blip-2", "2d", (2, 1))],
    ids=str,
)
def test_grid_works_in_a_pipeline(family: str, mode: str, sizes: Sizes) -> None:
    check(plain_of(family), batches_of(family, samples=4), mode, sizes, pipe=2, casts=1e-5, micro_batches=2)


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize(("mode", "sizes"), [("2d", (2, 2)), ("3d", (2, 1, 2))], ids=str)
def test_checkpointed_layers_have_the_same_gradients(mode: str, sizes: Sizes) -> None:
    plain = copy.deepcopy(plain_of("llama"))
    plain.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    check(plain, [*batches_of("llama", 3), *batches_of("llama", 4)], mode, sizes, casts=1e-5)


@pytest.mark.full
@pytest.mark.reduced(one_in=2)
@pytest.mark.parametrize(("mode", "sizes"), [("2d", (2, 2)), ("3d", (2, 1, 2))], ids=str)
def test_checkpointed_stacks_have_the_same_gradients(mode: str, sizes: Sizes) -> None:
    """Swin merges patches after each stack, inside the same checkpoint."""
    plain = copy.deepcopy(plain_of("swin"))
    plain.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    check(plain, [*batches_of("swin", 3), *batches_of("swin", 4)], mode, sizes, casts=1e-5)


@pytest.mark.full
def test_checkpointed_stacks_redraw_the_same_dropout() -> None:
    torch.manual_seed(0)
    plain = SmallModelFactory("swin", changes={"hidden_dropout_prob": 0.3})().double().train()
    batch = batches_of("swin", 3, steps=1)[0]

    def gradients(context: ParallelContext, again: bool) -> dict[str, Tensor]:
        grid = reshape_tensor_axis(context, (2, 2))
        model: Any = shardformer.shard_model(copy.deepcopy(plain), context=grid, tensor_parallel_mode="2d")
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(7)
        compute_model_loss(model, batch).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    first, second = (
        run_as_threads(lambda context, again=again: gradients(context, again), tensor=4, one_at_a_time=True)  # type: ignore[misc]
        for again in (False, True)
    )
    for once, again in zip(first, second, strict=True):
        for name, grad in once.items():
            near(name, again[name], grad, 1e-5)


def mixture(family: str, head: str) -> tuple[nn.Module, list[dict[str, Any]]]:
    torch.manual_seed(0)
    config = shrink_config(transformers.AutoConfig.for_model(family, architectures=[head]))
    config._experts_implementation = "eager"
    model = getattr(transformers, head)(config).double().train()
    batch = next(batch for batch in make_example_batches(model))
    return model, [{**in_fp64(batch), "labels": batch["input_ids"]}] * STEPS


@pytest.mark.reduced(one_in=2)
@pytest.mark.slow
@pytest.mark.usefixtures("found_once")
@pytest.mark.parametrize(("family", "head"), [("mixtral", "MixtralForCausalLM"), ("qwen2_moe", "Qwen2MoeForCausalLM")])
def test_mixture_of_experts_receives_all_features(family: str, head: str) -> None:
    model, batches = mixture(family, head)
    check(model, batches, "2d", (2, 2))
    with pytest.raises(ConfigError, match="needs all hidden features"):
        check(model, batches, "3d", (1, 2, 2))


def test_description_of_a_grid() -> None:
    said = run_as_threads(lambda c: str(shardformer.describe_sharding(sharded(c, "llama", "2d", (2, 2)))), tensor=4)[0]
    assert "has 1/2 of the samples and 1/2 of the hidden features: 1/4 of the activations" in said
    assert "it sends 2.5 N H + 0.75 W elements" in said and "parallelism sends 6 N H" in said


# --- use cases


@pytest.mark.reduced(at_most=1)
@pytest.mark.slow
@pytest.mark.usefixtures("found_once")
@pytest.mark.parametrize(
    ("family", "head", "mode", "sizes"),
    [("cohere", "CohereForCausalLM", "2d", (2, 2)), ("olmo", "OlmoForCausalLM", "3d", (2, 1, 2))],
    ids=str,
)
def test_norms_with_explicit_formulas_are_recognized(family: str, head: str, mode: str, sizes: Sizes) -> None:
    """Cohere casts differently from torch. OLMo's norm has no parameters and a hard-coded epsilon."""
    torch.manual_seed(0)
    plain = getattr(transformers, head)(shrink_config(transformers.AutoConfig.for_model(family, architectures=[head])))
    check(plain.double().train(), [dict(make_example_batches(plain)[0])], mode, sizes)


@pytest.mark.full
@pytest.mark.usefixtures("found_once")
def test_replicated_attention_receives_local_samples() -> None:
    torch.manual_seed(0)
    config = shrink_config(transformers.AutoConfig.for_model("diffllama", architectures=["DiffLlamaForCausalLM"]))
    plain = transformers.DiffLlamaForCausalLM(config).double().train()
    check(plain, [dict(make_example_batches(plain)[0])], "2d", (2, 2))


def test_unknown_norm_receives_all_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove_grid, "_GRID_RESULTS", {})
    monkeypatch.setattr(grid_plan, "get_norm_kind", lambda module: None)
    check(plain_of("bert"), batches_of("bert"), "2d", (2, 2))


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize(("mode", "sizes"), [("2d", (2, 2)), ("3d", (2, 1, 2))], ids=str)
def test_positions_and_masks_per_sample_work(mode: str, sizes: Sizes) -> None:
    """Packed documents and padding: the reduced model has one mask for all samples, the batches have one each."""
    batches = batches_of("llama", samples=5)
    for batch in batches:
        length = batch["input_ids"].shape[1]
        starts = torch.tensor([0, 2, 5, 3, 0])[:, None]
        places = torch.arange(length).expand(5, -1)
        batch["position_ids"] = torch.where(places < starts, places, places - starts)
        batch["attention_mask"] = (places >= torch.tensor([0, 0, 0, 0, 3])[:, None]).long()
    check(plain_of("llama"), batches, mode, sizes)


def sharded(context: ParallelContext, family: str, mode: str, sizes: Sizes, **options: Any) -> nn.Module:
    plain = copy.deepcopy(plain_of(family))
    return shardformer.shard_model(
        plain, context=reshape_tensor_axis(context, sizes), tensor_parallel_mode=mode, **options
    )


@pytest.mark.slow
@pytest.mark.reduced(cover="mode", at_most=1)
@pytest.mark.parametrize(
    ("family", "mode", "sizes"),
    [
        ("llama", "2d", (2, 2)),
        ("llama", "2.5d", (1, 2, 2)),
        ("llama", "3d", (1, 2, 2)),
        ("t5", "2d", (2, 1)),
        ("bloom", "3d", (2, 1, 2)),
        ("gpt2", "2d", (2, 2)),
        ("falcon", "2d", (2, 1)),
    ],
    ids=str,
)
def test_generation_equals_one_process(family: str, mode: str, sizes: Sizes) -> None:
    plain: Any = copy.deepcopy(plain_of(family)).eval()
    batch = batches_of(family)[0]
    ids = batch["input_ids"]
    expected = plain.generate(ids, max_new_tokens=6, do_sample=False)
    beams = plain.generate(ids, max_new_tokens=6, num_beams=2, do_sample=False)

    def generate(context: ParallelContext) -> None:
        model: Any = sharded(context, family, mode, sizes)
        assert not any(map(is_kv_cache, model(**batch).values()))  # a cache would hold only this rank's samples
        model.eval()
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
        assert torch.equal(model.generate(ids, max_new_tokens=6, num_beams=2, do_sample=False), beams)
        with torch.no_grad():
            cut, whole = (m(**batch, use_cache=False).logits for m in (model, plain))
        assert (cut - whole).abs().max() < 1e-6

    run_as_threads(generate, tensor=ranks_of(sizes), one_at_a_time=True)


def test_full_weights_are_gathered_and_saved(tmp_path: Any) -> None:
    plain: Any = plain_of("gpt2")

    def save(context: ParallelContext) -> None:
        model: Any = sharded(context, "gpt2", "2d", (2, 2))
        full = shardformer.full_state_dict(model)
        assert all(torch.equal(full[name], value) for name, value in plain.state_dict().items())
        model.save_pretrained(tmp_path)

    run_as_threads(save, tensor=4)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert all(torch.equal(p, again.state_dict()[name]) for name, p in plain.state_dict().items())


def test_gradient_norm_equals_one_process() -> None:
    batch = batches_of("bert")[0]
    plain = copy.deepcopy(plain_of("bert"))
    compute_model_loss(plain, batch).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()

    def norm(context: ParallelContext) -> float:
        model = sharded(context, "bert", "2.5d", (2, 1, 2))
        compute_model_loss(model, batch).backward()
        return shardformer.clip_grad_norm_(model, 1e9).item()

    assert run_as_threads(norm, tensor=4, one_at_a_time=True) == pytest.approx([expected] * 4, rel=1e-6)


def _learns_with_dropout() -> tuple[list[float], dict[str, Tensor]]:
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    torch.manual_seed(0)
    plain = transformers.BertForMaskedLM(config).train()
    ids = torch.arange(24).view(4, 6)

    context = shardformer.launch_from_torch(tensor=(2, 2))
    torch.manual_seed(context.rank)
    model = shardformer.shard_model(plain, context=context, tensor_parallel_mode="2d")
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(6):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, dict(shardformer.full_state_dict(model))


def test_dropout_keeps_replicated_values_identical(pool4: WorkerPool) -> None:
    first, *others = pool4.run(_learns_with_dropout)
    assert first[0][0] > first[0][-1]
    for losses, weights in others:
        assert losses == first[0]
        assert all(torch.equal(weights[name], value) for name, value in first[1].items())


# --- communication and memory


@pytest.mark.slow
def test_communicated_bytes_match_the_formulas() -> None:
    hidden, width, layers, samples, length = 32, 64, 2, 4, 8
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    torch.manual_seed(0)
    plain, ids = transformers.LlamaForCausalLM(config), torch.arange(samples * length).view(samples, length) % 64
    weights = 4 * hidden * hidden + 3 * hidden * width

    def sent(context: ParallelContext, mode: str, sizes: Sizes) -> tuple[float, float]:
        grid = reshape_tensor_axis(context, sizes)
        model = shardformer.shard_model(copy.deepcopy(plain), context=grid, tensor_parallel_mode=mode)
        with CollectiveRecorder(grid) as recorder:
            model(input_ids=ids, labels=ids).loss.backward()
        table = recorder.summarize_calls()
        of_weights = sum(n / grid.sizes[axis] for (_, axis, why), (_, n) in table.items() if why == "weights")
        parts = ("all_gather", "reduce_scatter")
        streams = {("column", op) for op in parts} | {("depth", op) for op in parts if mode == "3d"}
        of_stream = sum(
            n / grid.sizes[axis]
            for (op, axis, why), (_, n) in table.items()
            if (axis, op) in streams and why == "block"
        )
        return of_stream / 4, of_weights / 4  # in numbers of fp32

    def rest(ranks: int) -> float:
        return (ranks - 1) / ranks

    tokens = samples * length
    for mode, sizes in (("2d", (2, 2)), ("2d", (4, 1)), ("2.5d", (1, 2, 2)), ("3d", (2, 2, 2))):
        rows, columns, third = (*sizes, 1)[:3]
        depth, contraction = (1, third) if mode == "3d" else (third, 1)
        found = run_as_threads(lambda c, m=mode, s=sizes: sent(c, m, s), tensor=ranks_of(sizes), one_at_a_time=True)
        part = tokens * hidden / (depth * rows * contraction)
        ends = 2 * part * rest(columns) if mode != "3d" else None  # the stack's entry, backward, and its exit
        # outputs of columns and inputs of rows, forward and backward, and the latter gathered again
        core = tokens / (rows * columns) * rest(contraction) * (2 * (4 * hidden + 3 * width) + hidden + width)
        expected = layers * (10 * part * rest(columns) + core)
        for of_stream, of_weights in found:
            assert of_weights == pytest.approx(layers * 3 * weights / (columns * contraction) * rest(rows))
            if ends is not None:
                assert of_stream == pytest.approx(expected + ends)
            else:  # the ends gather over depth too
                assert of_stream == pytest.approx(expected + 2 * tokens * hidden / (rows * columns) * rest(contraction))


@pytest.mark.slow
def test_each_rank_stores_its_share_of_the_weights() -> None:
    plain = plain_of("llama")
    whole = sum(p.numel() for p in plain.get_submodule("model.layers").parameters() if p.dim() > 1)

    def own(context: ParallelContext, mode: str, sizes: Sizes) -> int:
        model = sharded(context, "llama", mode, sizes)
        return sum(p.numel() for p in model.get_submodule("model.layers").parameters() if p.dim() > 1)

    for mode, sizes, cut in (("2d", (2, 2), 4), ("2.5d", (2, 1, 2), 2), ("3d", (2, 2, 2), 8)):
        found = run_as_threads(lambda c, m=mode, s=sizes: own(c, m, s), tensor=ranks_of(sizes), one_at_a_time=True)
        assert found == pytest.approx([whole / cut] * len(found), rel=0.1)  # heads and sizes that are odd


# --- the tests detect removed collectives


def _kept(self: GridTensorParallelRegion, x: Tensor, *_: Any) -> PendingCollective:
    return PendingCollective((), lambda: get_local_chunk(x, self.grid.column, x.dim() - 1))


LEFT_OUT: dict[str, Callable[..., Any]] = {
    "start_output_reduce_scatter": _kept,
    "start_weight_grad_reduce_scatter": lambda self, grad, dim: PendingCollective(
        (), lambda: get_local_chunk(grad, self.grid.row, dim)
    ),
}


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("name", LEFT_OUT)
def test_removed_collective_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove_grid, "_GRID_RESULTS", {})
    monkeypatch.setattr(GridTensorParallelRegion, name, LEFT_OUT[name])
    with pytest.raises(ConfigError, match="differs"):  # found by the validation on the reduced model
        run_as_threads(lambda context: sharded(context, "qwen2", "2d", (2, 2)), tensor=4)


def test_norm_over_local_features_only_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove_grid, "_GRID_RESULTS", {})
    monkeypatch.setattr(GridNorm, "forward", lambda self, x: nn.functional.rms_norm(x, x.shape[-1:]) * self.weight)
    with pytest.raises(ConfigError, match="differs"):
        run_as_threads(lambda context: sharded(context, "mistral", "2d", (1, 2)), tensor=2)


# --- unsupported combinations


@pytest.mark.parametrize(
    ("tensor", "sizes", "mode", "said"),
    [
        (6, 6, "2d", "Pass the numbers of rows and columns"),
        (4, 4, "3d", "a perfect cube"),
        (6, 6, "2.5d", "Pass the numbers of rows, columns and squares"),
        (4, (2, 2), "3d", "Pass three sizes"),
        (8, (2, 2, 2), "2d", "Use tensor=\\(2, 4\\)"),
        (4, (2, 2), "1d", "got a grid of 2 x 2"),
        (4, (2, 2), "4d", "is not one of"),
        (10, (1, 10), "2d", "exceeds the"),
    ],
    ids=str,
)
def test_invalid_sizes_are_refused(tensor: int, sizes: Any, mode: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_as_threads(lambda context: sharded(context, "llama", mode, sizes), tensor=tensor)


def test_unsupported_combinations_are_refused() -> None:
    with pytest.raises(ConfigError, match="enable_sequence_parallelism=True"):
        shardformer.compat.ShardConfig(tensor_parallel_mode="2d", enable_sequence_parallelism=True)
    with pytest.raises(ConfigError, match="the sequence axis"):
        run_as_threads(lambda c: sharded(c, "llama", "2d", (2, 1)), tensor=2, sequence=2)


def test_policy_for_one_tensor_axis_is_refused() -> None:
    class Own(shardformer.policies.Policy):
        def module_policy(self) -> Any:
            sub = shardformer.policies.SubModuleReplacementDescription("fc", shardformer.tensor_parallel.Linear1D_Col)
            return {"h.0": shardformer.policies.ModulePolicyDescription(sub_module_replacement=[sub])}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList([nn.Sequential()])
            self.h[0].fc = nn.Linear(4, 4)

    with pytest.raises((PolicyError, ConfigError), match="requires a LayerStack"):
        run_as_threads(
            lambda c: shardformer.shard_model(
                Model(), Own, context=reshape_tensor_axis(c, (2, 1)), tensor_parallel_mode="2d"
            ),
            tensor=2,
        )


def test_cache_of_another_forward_is_refused_in_training() -> None:
    def go_on(context: ParallelContext) -> None:
        model: Any = sharded(context, "llama", "2d", (2, 1))
        ids = batches_of("llama")[0]["input_ids"]
        with torch.no_grad():
            kept = model.eval()(ids, use_cache=True)
        (name,) = [name for name, value in kept.items() if is_kv_cache(value)]  # as this transformers calls it
        model.train()(ids, **{name: kept[name]})

    with pytest.raises(InputError, match="do not support a KV cache in training"):
        run_as_threads(go_on, tensor=2)


# --- over processes


def run_page(block: str) -> float:
    names: dict[str, Any] = {
        "model": SmallModelFactory("llama")(),
        "batch": RandomBatchFactory(DEFAULT_HEAD["llama"], batch_size=SAMPLES)(0),
    }
    exec(compile(block, "tensor-grids.md", "exec"), names)
    return float(names["loss"].detach())


def test_examples_of_the_grid_page_run(pool4: WorkerPool) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tensor-grids.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    losses = pool4.run(run_page, block)
    assert losses == pytest.approx([losses[0]] * 4)


@pytest.mark.reduced(one_in=4, first=1)
@pytest.mark.parametrize(
    ("family", "mode", "sizes", "training"),
    [
        ("llama", "2d", (2, 2), VerifyTraining()),
        ("bert", "2.5d", (2, 1, 2), VerifyTraining(zero_stage=1, optimizer="AdamW")),
        ("t5", "2d", (4, 1), VerifyTraining(zero_stage=3)),
        ("gpt2", "3d", (2, 1, 2), VerifyTraining(zero_stage=2, gradient_accumulation_steps=2)),
    ],
    ids=str,
)
def test_grid_works_over_processes(
    pool4: WorkerPool, family: str, mode: str, sizes: Sizes, training: VerifyTraining
) -> None:
    config = {"tensor_parallel_mode": mode}
    report = verify(
        SmallModelFactory(family), RandomBatchFactory(DEFAULT_HEAD[family], batch_size=SAMPLES), {"tensor": sizes},
        dtype=torch.float64, config=config,
        training=training, pool=pool4, loss_fn=compute_model_loss,
    )  # fmt: skip
    assert report.passed, str(report)


def test_grid_works_with_data_parallel_ranks(pool4: WorkerPool) -> None:
    report = verify(
        SmallModelFactory("llama"), RandomBatchFactory(DEFAULT_HEAD["llama"], batch_size=6), {"tensor": (2, 1)}, 2,
        dtype=torch.float64,
        config={"tensor_parallel_mode": "2d"}, training=VerifyTraining(zero_stage=2), pool=pool4,
    )  # fmt: skip
    assert report.passed, str(report)
