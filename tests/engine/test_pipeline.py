"""Behavior of ``Pipeline`` beyond equal gradients, under every layout."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import get_rank

from shardformer.comm.collectives import all_reduce, gather_full_tensor
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.config import ShardConfig
from shardformer.errors import ConfigError, InputError, ShardFormerError
from shardformer.gradients.clipping import clip_grad_norm_
from shardformer.gradients.reducer import no_sync
from shardformer.layout.sharding_metadata import get_shard_specs, get_sharding_metadata
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.meta_init.lazy_init import LazyInit
from shardformer.pipeline.pipeline import Pipeline
from shardformer.pipeline.stage_manager import PipelineStageManager
from shardformer.shard_model_api import ShardFormer, shard_model
from shardformer.verify.small_models import SmallModelFactory
from shardformer.weights.state_dict import full_state_dict
from tests.pools import WorkerPools

GPT2 = SmallModelFactory("gpt2", changes={"n_layer": 4})
T5 = SmallModelFactory("t5", changes={"num_layers": 2})
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
EXACT = 1e-12
UPCAST = 1e-7
"""GPT-2 computes its loss in fp32: another cut of a batch rounds otherwise."""

Batch = dict[str, Tensor]


def plain(sample: SmallModelFactory = GPT2) -> nn.Module:
    torch.manual_seed(0)
    return sample().double()


def batch_of(samples: int, length: int, seed: int = 0) -> Batch:
    """Tokens with different numbers of ignored labels per row."""
    ids = torch.randint(3, 127, (samples, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row in range(samples):
        labels[row, : row * 2 % length] = -100
    return {"input_ids": ids, "labels": labels}


def sharded(sample: SmallModelFactory = GPT2, sizes: dict[str, int] | None = None, **stages: Any) -> nn.Module:
    context = ParallelContext.from_default_process_group({"pipe": 2, **(sizes or {})})
    manager = PipelineStageManager(context, **stages)
    return shard_model(plain(sample), config=ShardConfig(pipeline_stage_manager=manager))


def alone() -> nn.Module:
    """Run a function on a grid of one process."""
    context = ParallelContext.from_group(Axis("tensor", ranks=(get_rank(),)))
    return shard_model(plain(), config=ShardConfig(context=context))


def difference(model: nn.Module, reference: nn.Module) -> float:
    """Return the largest difference between gradients of this rank and of the unsharded model."""
    theirs = dict(reference.named_parameters(remove_duplicate=False))
    specs, axis = get_shard_specs(model), get_sharding_metadata(model).context.tensor
    found = [0.0]
    for name, p in model.named_parameters():
        expected = theirs[name].grad
        assert (p.grad is None) == (expected is None), name
        if p.grad is not None and expected is not None:
            found.append(float((gather_full_tensor(p.grad, specs[name], lambda _: axis) - expected).abs().max()))
    return max(found)


def back(reference: nn.Module, *batches: Batch) -> float:
    """Return the loss of the unsharded model over all batches, and compute its gradients."""
    counts = [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
    losses = [reference(**b).loss * n / sum(counts) for b, n in zip(batches, counts, strict=True)]
    loss = torch.stack(losses).sum()
    loss.backward()
    return float(loss.detach())


# -------------------------------------------------------------------------------------------------------------- batches


def _shapes_that_change(micro_batch_size: int) -> list[tuple[float, float]]:
    reference, model = plain(), sharded()
    pipeline, out = Pipeline(model, micro_batch_size=micro_batch_size), []
    for samples, length in [(6, 11), (6, 7), (5, 11), (1, 3), (6, 11)]:
        batch = batch_of(samples, length)
        reference.zero_grad()
        model.zero_grad()
        loss = back(reference, batch)
        out.append((abs(float(pipeline.step(batch)) - loss), difference(model, reference)))
    return out


def test_batches_may_vary_in_length_and_size(pool2: WorkerPool) -> None:
    for found in pool2.run(_shapes_that_change, 2):
        assert all(loss < 1e-6 and gradient < UPCAST for loss, gradient in found), found


def _headers(lengths: list[int]) -> list[int]:
    model = sharded()
    pipeline, out = Pipeline(model, micro_batches=2), []
    for length in lengths:
        with CollectiveRecorder(get_sharding_metadata(model).context) as recorder:
            pipeline.step(batch_of(4, length))
        out.append(recorder.count("send", purpose="header"))
    return out


def test_shapes_are_sent_only_if_they_are_new(pool2: WorkerPool) -> None:
    first, _ = pool2.run(_headers, [11, 11, 7, 11, 7])
    assert first == [1, 0, 1, 0, 0]


def test_one_stage_leaves_the_model_unchanged() -> None:
    model = shard_model(plain(), context=ParallelContext.from_sizes({}))
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    Pipeline(model, micro_batches=2).step(batch_of(4, 7))
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    copied = copy.deepcopy(model)
    copied(**batch_of(2, 7)).loss.backward()
    assert all(p.grad is not None for p in copied.parameters())


def _several_batches() -> tuple[float, float]:
    reference, model = plain(), sharded(schedule="interleaved")
    batches = [batch_of(4, 9), batch_of(3, 5, seed=1)]
    loss = back(reference, *batches)
    return abs(float(Pipeline(model, micro_batches=4).step(batches)) - loss), difference(model, reference)


def test_a_list_of_batches_is_one_large_batch(pool2: WorkerPool) -> None:
    for loss, gradient in pool2.run(_several_batches):
        assert loss < 1e-6
        assert gradient < UPCAST


def _accumulated() -> float:
    reference, model = plain(T5), sharded(T5, {"data": 2})
    pipeline, rank = Pipeline(model, micro_batches=2), pipeline_data_rank(model)
    batches = [{**batch_of(4, 7, seed), "labels": batch_of(4, 7, seed)["input_ids"]} for seed in range(4)]
    for batch in batches:
        (reference(**batch).loss / 2).backward()
    with no_sync(model):
        pipeline.step(batches[rank])
    pipeline.step(batches[2 + rank])
    return difference(model, reference)


def pipeline_data_rank(model: nn.Module) -> int:
    rank: int = get_sharding_metadata(model).context.data.rank
    return rank


def test_gradient_accumulation_reduces_tied_weights_once(pool4: WorkerPool) -> None:
    assert max(pool4.run(_accumulated)) < EXACT


def _grid_of_eight(sequence: bool) -> tuple[float, float]:
    context = ParallelContext.from_default_process_group({"tensor": 2, "pipe": 2, "data": 2})
    config = ShardConfig(context=context, enable_sequence_parallelism=sequence)
    reference, model = plain(), shard_model(plain(), config=config)
    parts = [batch_of(4, 9, seed) for seed in range(2)]
    for part in parts:
        (reference(**part).loss / 2).backward()
    Pipeline(model, micro_batches=3).step(parts[context.data.rank])
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    found = difference_before_clip(model, reference, float(expected))
    return found, abs(float(clip_grad_norm_(model, 0.5)) - float(expected))


def difference_before_clip(model: nn.Module, reference: nn.Module, norm: float) -> float:
    """Undo the scaling of the reference gradients before comparing."""
    for p in reference.parameters():
        if p.grad is not None:
            p.grad.mul_((norm + 1e-6) / 0.5)
    return difference(model, reference)


@pytest.mark.reduced(one_in=2, first=1)
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_pipeline_and_data_parallelism_on_eight_processes(pools: WorkerPools, sequence: bool) -> None:
    for gradient, norm in pools(8).run(_grid_of_eight, sequence):
        assert gradient < UPCAST
        assert norm < UPCAST


# ------------------------------------------------------------------------------------------------------- random numbers


def _losses(make: Callable[[], nn.Module], micro_batches: int) -> tuple[list[float], float, float]:
    model = make().train()
    pipeline = Pipeline(model, micro_batches=micro_batches)
    torch.manual_seed(7)
    losses = [float(pipeline.step(batch_of(6, 11))) for _ in range(2)]
    return losses, float(clip_grad_norm_(model, 1e9)), float(torch.rand(()))


def _layouts() -> list[tuple[list[float], float, float]]:
    with_dropout = SmallModelFactory("gpt2", changes={"n_layer": 4, **DROPOUT})
    found = [_losses(_alone_with(with_dropout), 4)]
    for stages in (
        {}, {"schedule": "gpipe", "partition": [1, 3]}, {"schedule": "interleaved"}, {"schedule": "zbv"},
        {"recompute_layers": 1},
    ):  # fmt: skip
        found.append(_losses(partial(sharded, with_dropout, **stages), 4))
    return found


def _alone_with(sample: SmallModelFactory) -> Callable[[], nn.Module]:
    context = ParallelContext.from_group(Axis("tensor", ranks=(get_rank(),)))
    return lambda: shard_model(plain(sample), config=ShardConfig(context=context))


def test_each_micro_batch_has_its_own_dropout_mask() -> None:
    make = SmallModelFactory("gpt2", changes={"n_layer": 2, **DROPOUT})

    def seen(context: ParallelContext) -> list[Tensor]:
        model, outputs = shard_model(plain(make), config=ShardConfig(context=context)).train(), []
        model.transformer.h[0].mlp.register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
        row = batch_of(1, 11)
        pipeline = Pipeline(model, micro_batches=2)
        pipeline.step({name: torch.cat([values, values]) for name, values in row.items()})
        return outputs

    ((first, second),) = run_as_threads(seen)
    assert first.shape == second.shape and not torch.equal(first == 0, second == 0)


def test_dropout_masks_are_equal_in_every_layout(pool2: WorkerPool) -> None:
    for (losses, norm, after), *others in pool2.run(_layouts):
        assert losses[0] != losses[1], "each step draws anew"
        for other_losses, other_norm, other_after in others:
            assert other_losses == pytest.approx(losses, rel=1e-6)
            assert other_norm == pytest.approx(norm, rel=1e-6)
            assert other_after == after, "random numbers outside are unaffected"


# ---------------------------------------------------------------------------------------------- checkpointing, freezing


def _kept_bytes(**stages: Any) -> tuple[int, float]:
    """Return the bytes saved for backward, and the error of the gradients."""
    reference, model = plain().train(), sharded(**stages).train()
    if stages.pop("by_model", False):
        model.gradient_checkpointing_enable()
    kept = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal kept
        kept += x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        Pipeline(model, micro_batches=2).step(batch_of(4, 11))
    back(reference, batch_of(4, 11))
    return kept, difference(model, reference)


def test_activation_checkpointing_saves_memory_with_equal_gradients(pool2: WorkerPool) -> None:
    usual = pool2.run(_kept_bytes)
    first_only = pool2.run(_kept_bytes, recompute_layers=[2, 0])
    every = pool2.run(_kept_bytes, schedule="interleaved", recompute_layers=5)
    assert max(gradient for _, gradient in usual + first_only + every) < UPCAST
    assert first_only[0][0] < 0.3 * usual[0][0], "stage 0 checkpoints both of its layers"
    assert first_only[1][0] == usual[1][0], "stage 1 keeps all"
    assert every[0][0] < 0.5 * usual[0][0]


def _checkpointed_by_model() -> tuple[float, bool]:
    reference, model = plain().train(), sharded().train()
    model.activation_checkpointing_enable() if hasattr(model, "activation_checkpointing_enable") else (
        model.gradient_checkpointing_enable()
    )
    pipeline = Pipeline(model, micro_batches=2)
    kept = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal kept
        kept += x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        pipeline.step(batch_of(4, 11))
    back(reference, batch_of(4, 11))
    return difference(model, reference), kept < 60_000


def test_gradient_checkpointing_enable_works_in_pipeline_stages(pool2: WorkerPool) -> None:
    for gradient, kept_little in pool2.run(_checkpointed_by_model):
        assert gradient < UPCAST
        assert kept_little


def _frozen(prefixes: tuple[str, ...]) -> tuple[float, float, int]:
    reference, model = plain(), sharded()
    context, batch = get_sharding_metadata(model).context, batch_of(4, 11)
    for name, p in [*reference.named_parameters(), *model.named_parameters()]:
        p.requires_grad_(not name.startswith(prefixes))
    pipeline = Pipeline(model, micro_batches=2)
    with CollectiveRecorder(context) as recorder:
        pipeline.step(batch)
    back(reference, batch)
    while_frozen = difference(model, reference)
    for p in [*reference.parameters(), *model.parameters()]:
        p.requires_grad_()
    model.zero_grad()
    reference.zero_grad()
    pipeline.step(batch)
    back(reference, batch)
    return while_frozen, difference(model, reference), recorder.count("send", purpose="gradient")


LOWER = ("transformer.wte", "transformer.wpe", "transformer.h.0.", "transformer.h.1.", "lm_head")
UPPER = ("transformer.h.2.", "transformer.h.3.", "transformer.ln_f", "lm_head", "transformer.wte")


@pytest.mark.parametrize(("frozen", "sends"), [(LOWER, 0), (UPPER, 2), (("transformer.h.1.",), 2)])
def test_frozen_layers_get_no_gradients(pool2: WorkerPool, frozen: tuple[str, ...], sends: int) -> None:
    (*first, _), (*second, sent) = pool2.run(_frozen, frozen)
    assert max(first + second) < UPCAST
    assert sent == sends


# ------------------------------------------------------------------------------------------------------ outputs, saving


def _outputs() -> tuple[float, float, str, list[str]]:
    reference, model = plain(T5).eval(), sharded(T5, partition=[2, 2]).eval()
    batch = batch_of(5, 7)
    batch["labels"] = batch["labels"].clamp(min=3)
    pipeline = Pipeline(model, micro_batches=2)
    with torch.no_grad():
        expected = reference(**batch)
    found = pipeline.forward(batch, gather=True)
    rank = pipeline.stage_manager.stage
    message = ""
    try:
        _ = pipeline.forward(batch).logits
    except ConfigError as error:
        message = str(error)
    loss = abs(float(pipeline.evaluate(batch)) - float(expected.loss))
    assert (rank == 1) == (message == "")
    return (
        loss,
        float((found.logits - expected.logits).abs().max()),
        message,
        [k for k, v in found.items() if v is not None],
    )


def test_outputs_are_on_the_last_stage_unless_gathered(pool2: WorkerPool) -> None:
    for loss, logits, message, given in pool2.run(_outputs):
        assert loss < EXACT
        assert logits < EXACT
        assert "logits" in given
        assert "encoder_last_hidden_state" not in given, "the last stage did not make it"
        if message:
            assert "logits is not available on pipeline stage 0" in message
            assert "gather=True" in message


def _saved() -> tuple[bool, bool, int]:
    import transformers

    reference, model = plain(), sharded()
    state, whole = full_state_dict(model), reference.state_dict()
    same = list(state) == list(whole) and all(torch.equal(state[name], whole[name]) for name in whole)
    model.float()
    again = True
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        if get_sharding_metadata(model).context.pipe.rank == 0:
            loaded = transformers.GPT2LMHeadModel.from_pretrained(folder).state_dict()
            again = all(torch.equal(loaded[name].double(), whole[name].float().double()) for name in whole)
    return same, again, sum(p.numel() for p in model.parameters())


def test_all_stages_save_the_full_model_together(pool2: WorkerPool) -> None:
    found = pool2.run(_saved)
    assert all(same and again for same, again, _ in found)
    assert sum(size for *_, size in found) < 1.2 * sum(p.numel() for p in plain().parameters())


def _lazy() -> tuple[bool, int]:
    torch.manual_seed(0)
    with LazyInit():
        model = GPT2()
    model = shard_model(model, context=ParallelContext.from_default_process_group({"pipe": 2}))
    torch.manual_seed(0)
    whole = GPT2().state_dict()
    state = full_state_dict(model)
    return all(torch.equal(state[name], whole[name]) for name in whole), sum(p.numel() for p in model.parameters())


def test_a_lazy_model_materializes_only_its_stage(pool2: WorkerPool) -> None:
    whole = sum(p.numel() for p in GPT2().parameters())
    for same, size in pool2.run(_lazy):
        assert same
        assert size < 0.6 * whole


# ---------------------------------------------------------------------------------------------------------- what cannot


def _refused(ask: Callable[[], Any]) -> str:
    try:
        ask()
    except ShardFormerError as error:
        assert error.what
        assert error.remedy
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _ask(what: str) -> str:
    return _refused(partial(INVALID_CALLS[what]))


def _called_alone() -> None:
    sharded()(**batch_of(2, 5))


def _generated() -> None:
    sharded().generate(batch_of(2, 5)["input_ids"], max_new_tokens=2)


def _stage_of_its_own_batch() -> None:
    model = sharded()
    Pipeline(model, micro_batches=2).step(batch_of(4, 5 + get_sharding_metadata(model).context.pipe.rank))


def _stage_of_its_own_tokens() -> None:
    model = sharded()
    Pipeline(model, micro_batches=2).step(batch_of(4, 5, get_sharding_metadata(model).context.pipe.rank))


def _no_labels() -> None:
    sharded_alone = alone()
    Pipeline(sharded_alone, micro_batches=2).step({"input_ids": batch_of(4, 5)["input_ids"]})


def _with(**more: Any) -> None:
    Pipeline(sharded(), micro_batches=2).step({**batch_of(4, 5), **more})


INVALID_CALLS: dict[str, Callable[[], Any]] = {
    "more stages than layers": lambda: sharded(SmallModelFactory("gpt2", changes={"n_layer": 1})),
    "a cut that skips a layer": lambda: sharded(partition=[1, 2]),
    "a cut of three": lambda: sharded(partition=[1, 2, 1]),
    "another way to cut": lambda: sharded(partition="balancd"),
    "costs of other layers": lambda: sharded(layer_costs=[1.0, 2.0]),
    "costs that decide nothing": lambda: sharded(partition="uniform", layer_costs=[1.0] * 4),
    "an unknown schedule": lambda: sharded(schedule="1f1f"),
    "chunks of 1f1b": lambda: sharded(schedule="1f1b", num_model_chunks=2),
    "micro-batches that interleaved forbids": lambda: Pipeline(sharded(schedule="interleaved"), micro_batches=3),
    "no micro-batches": lambda: Pipeline(sharded(), micro_batches=0),
    "both kinds of size": lambda: Pipeline(sharded(), micro_batches=2, micro_batch_size=2),
    "a batch smaller than the micro-batches": lambda: Pipeline(sharded(), micro_batches=4).step(batch_of(3, 5)),
    "a model without a stack": lambda: shard_model(
        nn.Sequential(nn.Linear(4, 4)), context=ParallelContext.from_default_process_group({"pipe": 2})
    ),
    "layers dropped at random": lambda: sharded(SmallModelFactory("opt", changes={"layerdrop": 0.1})),
    "a model that was not sharded": lambda: Pipeline(plain(), micro_batches=2),
    "a stage called alone": _called_alone,
    "text generated over stages": _generated,
    "stages with other shapes": _stage_of_its_own_batch,
    "stages with other tokens": _stage_of_its_own_tokens,
    "a batch without labels": _no_labels,
    "checkpoints of other stages": lambda: sharded(recompute_layers=[1, 2, 3]),
    "no batch at all": lambda: Pipeline(sharded(), micro_batches=2).step([]),
    "a tensor for a batch": lambda: Pipeline(sharded(), micro_batches=2).step(torch.zeros(2, 5)),
    "states of all layers": lambda: _with(output_hidden_states=True),
    "a cache": lambda: _with(use_cache=True),
    "another grid": lambda: shard_model(
        plain(),
        config=ShardConfig(
            context=ParallelContext.from_default_process_group({"pipe": 2}),
            pipeline_stage_manager=PipelineStageManager(ParallelContext.from_default_process_group({"pipe": 2})),
        ),
    ),
}
EXPECTED = {
    "more stages than layers": (
        "ConfigError",
        "2 pipeline stages need at least one layer each, but the number of layers is 1",
        "Use fewer stages",
    ),
    "a cut that skips a layer": ("ConfigError", "assigns 3 layers, but the model has 4"),
    "a cut of three": ("ConfigError", "[1, 2, 1]", "2"),
    "another way to cut": ("ConfigError", "partition='balancd'", "'balanced'"),
    "costs of other layers": ("ConfigError", "costs has 2 entries", "has 4 layers"),
    "costs that decide nothing": ("ConfigError", "partition='uniform'"),
    "an unknown schedule": ("ConfigError", "schedule='1f1f'", "'1f1b'"),
    "chunks of 1f1b": ("ConfigError", "num_model_chunks=1, but got 2", "interleaved"),
    "micro-batches that interleaved forbids": ("ConfigError", "micro_batches=3", "Use 2 or 4"),
    "no micro-batches": ("ConfigError", "micro_batches=0"),
    "both kinds of size": ("ConfigError", "micro_batch_size"),
    "a batch smaller than the micro-batches": ("ConfigError", "3", "4"),
    "a model without a stack": ("Error", "Sequential"),
    "layers dropped at random": ("ConfigError", "layerdrop=0.1", "layerdrop=0"),
    "a model that was not sharded": ("ConfigError", "is not sharded", "shard_model"),
    "a stage called alone": ("ConfigError", "pipeline stages, so you cannot call it directly", "Pipeline(model"),
    "text generated over stages": ("ConfigError", "generate()"),
    "stages with other shapes": ("InputError", "different batch shapes", "data rank"),
    "stages with other tokens": ("InputError", "different batches", "data rank"),
    "a batch without labels": ("ConfigError", "loss=None", "loss_fn"),
    "checkpoints of other stages": ("ConfigError", "but got [1, 2, 3]", "[2, 2]"),
    "no batch at all": ("InputError", "an empty list"),
    "a tensor for a batch": ("InputError", "a Tensor", "'input_ids': ids"),
    "states of all layers": ("output_hidden_states=True", "a pipeline stage runs only its own layers"),
    "a cache": ("use_cache=True", "Set use_cache=False"),
    "another grid": ("ConfigError", "more than one of context", "Pass only one of them"),
}


@pytest.mark.parametrize("what", INVALID_CALLS)
def test_errors_are_raised_on_every_stage(pool2: WorkerPool, what: str) -> None:
    for message in pool2.run(_ask, what):
        for word in EXPECTED[what]:
            assert word in message, message


# ---------------------------------------------------------------------------------------------------------------- bytes


def _hybrid_traffic(sequence: bool) -> dict[str, tuple[int, int]]:
    context = ParallelContext.from_default_process_group({"tensor": 2, "pipe": 2})
    model = shard_model(plain(), config=ShardConfig(context=context, enable_sequence_parallelism=sequence))
    pipeline = Pipeline(model, micro_batches=2)
    pipeline.step(batch_of(4, 12))
    with CollectiveRecorder(context) as recorder:
        pipeline.step(batch_of(4, 12))
    return {
        purpose: (recorder.count(purpose=purpose), recorder.wire_bytes(purpose=purpose))
        for purpose in ("activation", "gradient", "arrival", "header")
    }


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("sequence", [False, True])
def test_each_tensor_rank_sends_its_share_of_a_stage_boundary(pool4: WorkerPool, sequence: bool) -> None:
    """Each of two tensor ranks sends half of B*S*H, and gathers the other half on arrival."""
    activation = 2 * 12 * 48 * 8
    found = pool4.run(_hybrid_traffic, sequence)
    for first_stage, last_stage in ((found[0], found[2]), (found[1], found[3])):
        assert first_stage["activation"] == last_stage["gradient"] == (2, activation)
        assert first_stage["gradient"] == last_stage["activation"] == (0, 0)
        arrivals = (0, 0) if sequence else (2, 2 * activation)
        assert first_stage["arrival"] == last_stage["arrival"] == arrivals
        assert first_stage["header"][0] == 0, "the shapes are known"


def _gathers(schedule: str) -> int:
    context = ParallelContext.from_default_process_group({"tensor": 2, "pipe": 2})
    manager = PipelineStageManager(context, schedule, partition=[1, 3] if schedule == "1f1b" else [1, 1, 1, 1])
    config = ShardConfig(pipeline_stage_manager=manager, enable_sequence_parallelism=True)
    model = shard_model(plain(), config=config)
    with CollectiveRecorder(context) as recorder:
        Pipeline(model, micro_batches=2).step(batch_of(4, 12))
    of_stage = recorder.count("all_gather", purpose="block")
    return int(all_reduce(torch.tensor(of_stage), context.pipe))


def test_a_split_backward_gathers_no_more_than_a_full_one(pool4: WorkerPool) -> None:
    assert pool4.run(_gathers, "interleaved_zb") == pool4.run(_gathers, "1f1b")


def _shared() -> list[tuple[int, ...]]:
    context = ParallelContext.from_default_process_group({"pipe": 2})
    model, shared = ShardFormer(ShardConfig(context=context)).optimize(plain(T5))
    mine = {id(p) for p in model.parameters()}
    assert all(id(p) in mine for held in shared for p in held.values())
    return [tuple(held) for held in shared]


def test_parameters_shared_by_several_stages_are_returned(pool2: WorkerPool) -> None:
    for held in pool2.run(_shared):
        assert held == [(0, 1)], "the embedding, tied to the decoder's and the head; no table, since the cut is between"


def test_a_batch_that_differs_between_stages_raises_without_hanging(pool2: WorkerPool) -> None:
    """The same processes train on the next batch."""
    for loss, gradient in pool2.run(_goes_on):
        assert loss < 1e-6
        assert gradient < UPCAST


def _goes_on() -> tuple[float, float]:
    reference, model = plain(), sharded()
    pipeline = Pipeline(model, micro_batches=2)
    rank = pipeline.stage_manager.stage
    with pytest.raises(InputError):
        pipeline.step(batch_of(4, 5 + rank))
    loss = back(reference, batch_of(4, 9))
    return abs(float(pipeline.step(batch_of(4, 9))) - loss), difference(model, reference)


class Classifier(nn.Module):
    """Model without a sequence of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.body(self.table(ids).mean(1))))
        return logits


@pytest.mark.parametrize("data", [1, 2])
def test_any_model_runs_in_one_stage(data: int) -> None:
    """Three uneven micro-batches, with different numbers of samples per data rank."""

    def loss_fn(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
        return nn.functional.cross_entropy(logits, batch["classes"])

    torch.manual_seed(0)
    plain = Classifier().double()
    batch = {"ids": torch.randint(11, (7, 5)), "classes": torch.randint(3, (7,))}
    loss = loss_fn(plain(batch["ids"]), batch)
    loss.backward()

    def do(context: ParallelContext) -> tuple[float, list[Tensor]]:
        model = shard_model(copy.deepcopy(plain), context=context)
        model.zero_grad()
        cut = slice(0, 4) if context.data.rank == 0 else slice(4, 7)
        own = {name: x[cut] for name, x in batch.items()} if data > 1 else batch
        pipeline = Pipeline(model, micro_batches=3, loss_fn=loss_fn, average_loss_over="tokens")
        found = float(pipeline.step(own))
        return found, [p.grad for p in model.parameters() if p.grad is not None]

    for found, gradients in run_as_threads(do, data=data):
        assert found == pytest.approx(float(loss.detach()), rel=1e-12)
        for ours, param in zip(gradients, plain.parameters(), strict=True):
            assert param.grad is not None
            assert float((ours - param.grad).abs().max()) < 1e-12
