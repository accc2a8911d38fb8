"""Loss and gradients of micro-batches equal those of the full batch, or a ConfigError is raised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from shardformer.errors import ConfigError
from shardformer.gradient_accumulation.micro_batch_loss import MicroBatchLossScaler
from shardformer.layout.shard_spec import get_even_split_bounds
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import Axis
from shardformer.tensor_parallel.vocab_parallel_logits import VocabParallelLogits, wrap_local_logits_as_full_logits
from shardformer.verify.small_models import HEAD_CLASSES
from tests.pipeline.heads import (
    SIZES,
    Batch,
    at_once,
    batch_of,
    cut,
    gradients,
    in_parts,
    model_of,
    own_loss,
    sizes_of,
    weighing,
)

WITHOUT_LOSS = (
    "Model", "Backbone", "EncoderModel", "VisionModel", "ForImageTextRetrieval", "QFormerModel", "WithProjection",
)  # fmt: skip
MASKED_IMAGES = ("ViTForMaskedImageModeling", "SwinForMaskedImageModeling", "Swinv2ForMaskedImageModeling")
TRAINABLE = [
    head
    for head in (head for heads in HEAD_CLASSES.values() for head in heads)
    if head.endswith("LMHeadModel") or head in ("GPT2DoubleHeadsModel", "Blip2Model") or not head.endswith(WITHOUT_LOSS)
]  # fmt: skip
IN_FP32 = ("GPTNeo", "GPTJ")  # attention that transformers computes in fp32 whatever the model is in


@pytest.fixture(autouse=True)
def stays_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the fp32 casts of transformers' losses, which would hide differences."""
    to_fp32 = Tensor.float
    monkeypatch.setattr(Tensor, "float", lambda self: self if self.dtype == torch.float64 else to_fp32(self))


def assert_same(
    ours: tuple[Tensor, dict[str, Tensor]], whole: tuple[Tensor, dict[str, Tensor]], bound: float = 1e-12
) -> None:
    torch.testing.assert_close(ours[0], whole[0], rtol=bound, atol=bound)
    largest = max(float(grad.abs().max()) for grad in whole[1].values())
    assert ours[1].keys() == whole[1].keys() and largest > 0
    for name, grad in whole[1].items():
        torch.testing.assert_close(ours[1][name], grad, rtol=0, atol=bound * largest, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.reduced(at_most=30)
@pytest.mark.slow
@pytest.mark.parametrize("head", [head for head in TRAINABLE if head not in MASKED_IMAGES])
def test_every_head_trains_as_on_the_full_batch(head: str) -> None:
    model, batch = model_of(head), batch_of(head)
    parts = cut(batch)
    ours = in_parts(model, MicroBatchLossScaler(parts, SIZES), parts)
    assert_same(ours, at_once(model, batch), 1e-9 if head.startswith(IN_FP32) else 1e-12)


@pytest.mark.parametrize("head", ["LlamaForCausalLM", "BertForPreTraining", "T5ForConditionalGeneration"])
def test_mean_of_means_differs_from_full_loss(head: str) -> None:
    model, batch = model_of(head), batch_of(head, nothing_in=())
    means = sum(own_loss(model, part) * size / sum(SIZES) for part, size in zip(cut(batch), SIZES, strict=True))
    assert abs((means - own_loss(model, batch)).item()) > 1e-5


@pytest.mark.parametrize(
    ("problem_type", "num_labels", "labels"),
    [
        ("regression", 1, torch.arange(8.0).double()),
        ("regression", 3, torch.arange(24.0).double().view(8, 3)),
        ("multi_label_classification", 3, (torch.arange(24).view(8, 3) % 2).double()),
    ],
)
def test_regression_and_multi_label_losses(problem_type: str, num_labels: int, labels: Tensor) -> None:
    head = "BertForSequenceClassification"
    model = model_of(head, problem_type=problem_type, num_labels=num_labels)
    batch = {**batch_of(head), "labels": labels}
    parts = cut(batch)
    assert_same(in_parts(model, MicroBatchLossScaler(parts, SIZES), parts), at_once(model, batch))


@pytest.mark.parametrize("nothing_in", [(0, 1, 2), (7,), (3, 4, 5, 6)])
@pytest.mark.parametrize("head", ["LlamaForCausalLM", "BertForMaskedLM", "GPT2DoubleHeadsModel"])
def test_micro_batch_without_labels_adds_zero(head: str, nothing_in: tuple[int, ...]) -> None:
    model, batch = model_of(head), batch_of(head, nothing_in)
    parts = cut(batch)
    assert_same(in_parts(model, MicroBatchLossScaler(parts, SIZES), parts), at_once(model, batch))


@pytest.mark.parametrize(
    ("head", "last_layer"),
    [
        ("LlamaForCausalLM", "model.layers.1"),
        ("BertForPreTraining", "bert.encoder.layer.1"),
        ("BertForQuestionAnswering", "bert.encoder.layer.1"),
        ("GPT2DoubleHeadsModel", "transformer.h.1"),
        ("T5ForConditionalGeneration", "decoder.block.1"),
        ("WhisperForConditionalGeneration", "model.decoder.layers.1"),
    ],
)
def test_recording_the_head_only_is_sufficient(head: str, last_layer: str) -> None:
    model, batch = model_of(head), batch_of(head, nothing_in=(0, 1, 2))
    whole = at_once(model, batch)
    parts = cut(batch)
    weights, losses, running = MicroBatchLossScaler(parts, SIZES), [], [0]
    model.get_submodule(last_layer).register_forward_hook(lambda *_: weights.start_recording_loss_calls(running[0]))
    for running[0], part in enumerate(parts):
        assert weights._recorder is None
        loss = own_loss(model, part)
        weights.stop_recording_loss_calls()
        loss = weights.scale_loss(running[0], loss)
        loss.backward()
        losses.append(loss.detach())
    weights.run_deferred_checks()
    assert_same((torch.stack(losses).sum(), gradients(model)), whole)


def test_batch_without_labels_has_nan_loss() -> None:
    model, batch = model_of("LlamaForCausalLM"), batch_of("LlamaForCausalLM", range(8))
    parts = cut(batch)
    assert in_parts(model, MicroBatchLossScaler(parts, SIZES), parts)[0].isnan() and own_loss(model, batch).isnan()


def test_first_forward_can_be_any_micro_batch() -> None:
    model, batch = model_of("LlamaForCausalLM"), batch_of("LlamaForCausalLM")
    parts = cut(batch)
    weights = MicroBatchLossScaler(parts, SIZES)
    losses = []
    for index in (2, 0, 3, 1):
        with weighing(weights, index):
            loss = own_loss(model, parts[index])
        losses.append(weights.scale_loss(index, loss))
    loss = torch.stack(losses).sum()
    loss.backward()
    assert_same((loss.detach(), gradients(model)), at_once(model, batch))


@pytest.mark.parametrize("copied", [False, True], ids=["as given", "copied on their way"])
@pytest.mark.parametrize("head", ["LlamaForCausalLM", "BertForMaskedLM"])
def test_micro_batches_of_different_lengths(head: str, copied: bool) -> None:
    model = model_of(head)
    long, short = batch_of(head), batch_of(head, sequence_length=9)
    padded = {
        name: torch.cat([long[name], F.pad(x, (0, 4), value=-100 if name == "labels" else 0)])
        for name, x in short.items()
    }
    parts = [*cut(short), *cut(long)]
    given = [dict(part) for part in parts]
    if copied:
        parts = [{name: x.clone() for name, x in part.items()} for part in parts]
    assert_same(in_parts(model, MicroBatchLossScaler(given, 2 * SIZES), parts), at_once(model, padded))


def test_positions_outside_texts_are_ignored() -> None:
    model = model_of("LlamaForQuestionAnswering")
    parts = [
        part
        for length in (9, 13)
        for part in cut(batch_of("LlamaForQuestionAnswering", sequence_length=length), (3, 5))
    ]
    expected = 0.0
    for name in ("start", "end"):
        sums, counts = [], []
        for part in parts:
            logits, labels = model(**part)[f"{name}_logits"], part[f"{name}_positions"]
            inside = labels < logits.shape[1]
            sums.append(F.cross_entropy(logits[inside], labels[inside], reduction="sum"))
            counts.append(int(inside.sum()))
        assert sum(counts) < 16 or name == "end"
        expected += torch.stack(sums).sum().item() / sum(counts) / 2
    loss, _ = in_parts(model, MicroBatchLossScaler(parts, sizes_of(parts)), parts)
    assert float(loss) == pytest.approx(expected, rel=1e-12)


# Heads and targets as people write them.


class Tagger(nn.Module):
    """Logits of 5 classes for tokens (B, S), and a custom loss."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.loss = nn.Embedding(11, 5, dtype=torch.float64), loss

    def forward(self, ids: Tensor, **batch: Any) -> Tensor:
        return self.loss(self.table(ids), **batch)


def run(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


def tagged(loss: Callable[..., Tensor], **more: Any) -> tuple[nn.Module, Batch, list[Batch]]:
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(5, (8, 6), generator=generator)
    labels[torch.rand(8, 6, generator=generator) < 0.3] = -100
    batch = {"ids": torch.randint(11, (8, 6), generator=generator), "labels": labels, **more}
    return Tagger(loss), batch, cut(batch)


WEIGHT = torch.tensor([0.1, 2.0, 0.5, 1.0, 3.0], dtype=torch.float64)
MASK = torch.arange(48).view(8, 6) % 5 != 0


def of_copy(x: Tensor, labels: Tensor) -> Tensor:
    shifted = labels.clone()
    shifted[:, :-1] = labels[:, 1:]
    shifted[:, -1] = -100
    return F.cross_entropy(x.view(-1, 5), shifted.view(-1))


def both_ways(x: Tensor, labels: Tensor) -> Tensor:
    first, last = labels[:, :3], labels[:, 3:]
    one = nn.CrossEntropyLoss()(x[:, :3].reshape(-1, 5), first.reshape(-1))
    return one - 0.5 * nn.NLLLoss()(x[:, 3:].reshape(-1, 5).log_softmax(-1), last.flatten())


LOSSES: dict[str, Callable[..., Tensor]] = {
    "of images' layout": lambda x, labels: F.cross_entropy(x.transpose(1, 2), labels),
    "with class weights": lambda x, labels: F.cross_entropy(x.view(-1, 5), labels.view(-1), WEIGHT),
    "smoothed": lambda x, labels: F.cross_entropy(x.view(-1, 5), labels.view(-1), label_smoothing=0.1),
    "smoothed with class weights": lambda x, labels: nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1)(
        x.view(-1, 5), labels.view(-1)
    ),
    "another class ignored": lambda x, labels: F.cross_entropy(
        x.view(-1, 5), torch.where(labels == -100, 2, labels).view(-1), ignore_index=2
    ),
    "filled": lambda x, labels: F.cross_entropy(x.view(-1, 5), labels.masked_fill(labels == 3, -100).view(-1)),
    "turned": lambda x, labels: F.cross_entropy(x.transpose(0, 1).reshape(-1, 5), labels.t().reshape(-1)),
    "written into a copy": of_copy,
    "selected": lambda x, labels: F.cross_entropy(x[labels >= 0], labels[labels >= 0]),
    "two of different sign": both_ways,
    "the old names of reductions": lambda x, labels: F.cross_entropy(x.view(-1, 5), labels.view(-1), reduce=True),
    "elements": lambda x, labels: F.smooth_l1_loss(x[..., 0], labels.double()),
    "selected elements": lambda x, labels: F.huber_loss(x[..., 0][labels > 0], labels[labels > 0].double()),
    "weighted elements": lambda x, labels: F.mse_loss(x[..., 0], labels.double(), weight=(labels + 101.0)),
    "rows": lambda x, labels: F.cosine_embedding_loss(
        x[:, 0], x[:, 1], torch.where(labels[:, 0] > 1, 1, -1), reduction="mean"
    ),
    "rows of a distribution": lambda x, labels: F.kl_div(
        x[:, 0].log_softmax(-1), x[:, 1].detach().softmax(-1), reduction="batchmean"
    ),
    "probabilities": lambda x, labels: F.cross_entropy(x[:, 0], x[:, 1].detach().softmax(-1)),
    "labels of no tensor": lambda x, labels: F.cross_entropy(x[:, 0], x[:, 1].detach().argmax(-1)),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_common_user_losses_equal_full_batch(name: str) -> None:
    model, batch, parts = tagged(LOSSES[name])
    assert_same(in_parts(model, MicroBatchLossScaler(parts, SIZES), parts, run), at_once(model, batch, run))


def test_labels_selected_by_batch_mask() -> None:
    model, batch, parts = tagged(lambda x, labels, mask: F.cross_entropy(x[mask], labels[mask]), mask=MASK)
    assert_same(in_parts(model, MicroBatchLossScaler(parts, SIZES), parts, run), at_once(model, batch, run))


FORMS: dict[str, Callable[..., Tensor]] = {
    "as they are": lambda x, labels, mask: F.cross_entropy(x.view(-1, 5), labels.view(-1)),
    "shifted": lambda x, labels, mask: F.cross_entropy(
        x.view(-1, 5), F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    ),
    "cut": lambda x, labels, mask: F.cross_entropy(x[:, :-2].flatten(0, 1), labels[:, 2:].flatten()),
    "clamped": lambda x, labels, mask: F.cross_entropy(
        x.view(-1, 5), labels.abs().clamp(0, 5).view(-1), ignore_index=5
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_copied_labels_are_found_by_content(name: str) -> None:
    model, batch, parts = tagged(FORMS[name], mask=MASK)
    if name == "clamped":
        batch["labels"].abs_()
        parts = cut(batch)
    given = [{key: x.clone() for key, x in part.items()} for part in parts]
    assert_same(in_parts(model, MicroBatchLossScaler(given, SIZES), parts, run), at_once(model, batch, run))


def test_label_names_are_preferred_among_equal_tensors() -> None:
    def loss(x: Tensor, labels: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(x.view(-1, 5), labels.view(-1))

    model, batch, _ = tagged(loss)
    batch["labels"][:3] = batch["labels"][:3].abs() % 5
    batch = {"ids": batch["ids"], "tokens": batch["labels"].abs() % 5, "labels": batch["labels"]}
    parts = cut(batch)
    given = [{key: x.clone() for key, x in part.items()} for part in parts]
    assert_same(in_parts(model, MicroBatchLossScaler(given, SIZES), parts, run), at_once(model, batch, run))


def test_unused_tensors_are_preferred_among_equal_tensors() -> None:
    head = "BertForQuestionAnswering"
    model, batch = model_of(head), batch_of(head)
    assert torch.equal(batch["start_positions"][:3], batch["end_positions"][:3])
    parts = cut(batch)
    given = [{key: x.clone() for key, x in part.items()} for part in parts]
    assert_same(in_parts(model, MicroBatchLossScaler(given, SIZES), parts), at_once(model, batch))


def test_predictions_do_not_modify_labels() -> None:
    def loss(x: Tensor, labels: Tensor) -> Tensor:
        labels[labels == 0] = -100
        return F.cross_entropy(x.view(-1, 5), labels.view(-1))

    model, batch, parts = tagged(loss)
    parts = [{key: x.clone() for key, x in part.items()} for part in parts]
    weights = MicroBatchLossScaler(parts, SIZES)
    with weighing(weights, 0):
        run(model, parts[0])
    assert torch.equal(parts[1]["labels"], batch["labels"][3:5])
    assert_same(in_parts(model, weights, parts, run), at_once(model, batch, run))


def test_earlier_label_form_resolves_ambiguity() -> None:
    model, batch, parts = tagged(FORMS["shifted"], mask=MASK)
    found: dict[int, Any] = {}
    given = [{key: x.clone() for key, x in part.items()} for part in parts]
    in_parts(model, MicroBatchLossScaler(given, SIZES, label_transforms=found), parts, run)
    batch["labels"][:3] = -100  # shifted or not, all the same
    given = [{key: x.clone() for key, x in part.items()} for part in parts]
    assert_same(
        in_parts(model, MicroBatchLossScaler(given, SIZES, label_transforms=found), parts, run),
        at_once(model, batch, run),
    )
    with pytest.raises(ConfigError, match="labels were predicted from the batch"):
        in_parts(model, MicroBatchLossScaler(given, SIZES), parts, run)


# Sums, and what is refused.


def test_sum_over_num_items_in_batch_is_unchanged() -> None:
    model, batch = model_of("LlamaForCausalLM"), batch_of("LlamaForCausalLM")
    batch["num_items_in_batch"] = (batch["labels"][:, 1:] != -100).sum()
    parts = cut(batch)
    whole = at_once(model, batch)
    assert_same(in_parts(model, MicroBatchLossScaler(parts, SIZES), parts), whole)
    del batch["num_items_in_batch"]
    assert_same(at_once(model, batch), whole)


def mean_by_hand(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="sum") / (labels != -100).sum()


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "no loss": (lambda x, labels: x.square().mean(), "without calling a loss function of torch.nn.functional"),
    "no reduction": (
        lambda x, labels: F.cross_entropy(x.view(-1, 5), labels.view(-1), reduction="none").mean(),
        "except with reduction='none'",
    ),
    "something else in the loss": (
        lambda x, labels: LOSSES["filled"](x, labels) + 0.01 * x.square().mean(),
        "its mean losses sum to",
    ),
    "no sum of means": (lambda x, labels: LOSSES["filled"](x, labels).exp(), "its mean losses sum to"),
    "factors of a micro-batch": (
        lambda x, labels: LOSSES["filled"](x, labels) * (labels != -100).sum(),
        "multiplies its mean losses by",
    ),
    "a mean by hand": (mean_by_hand, "multiplies its mean losses by"),
    "labels that only the model knows": (
        lambda x, labels: F.cross_entropy(x.view(-1, 5), torch.where(x[..., 0] > 0, labels, -100).view(-1)),
        "micro-batch contains no tensor of shape .* with these labels",
    ),
    "labels that cannot be foreseen": (
        lambda x, labels: (
            F.cross_entropy(x[:, 0], torch.where(x[:, 0, 1] > 0, 0, len(x) - 3).abs(), ignore_index=-1)
            if len(x) == 3
            else F.cross_entropy(x[:, 0], torch.zeros_like(x[:, 0, 0]).long(), ignore_index=0)
        ),
        "averages over 0 labels in micro-batch 1, but 2 labels were predicted",
    ),
    "a loss for each row": (lambda x, labels: LOSSES["filled"](x, labels) + torch.zeros(len(x)), "has the shape"),
    "a loss of some micro-batches": (
        lambda x, labels: LOSSES["filled"](x, labels) + (LOSSES["selected"](x, labels) if len(x) == 3 else 0),
        r"The model called 1 loss functions for micro-batch .*, but 2 for micro-batch 0",
    ),
    "another loss in some micro-batches": (
        lambda x, labels: LOSSES["elements" if len(x) == 1 else "filled"](x, labels),
        "for micro-batch 3, but a different function or reduction for micro-batch 0",
    ),
}


@pytest.mark.parametrize("later", [False, True], ids=["at once", "when the device is asked"])
@pytest.mark.parametrize("name", REFUSED)
def test_loss_other_than_sum_of_means_raises(name: str, later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, what = REFUSED[name]
    model, _, parts = tagged(loss)
    if later:
        monkeypatch.setattr(
            MicroBatchLossScaler,
            "_check_or_defer_on_gpu",
            lambda self, valid, describe: self._deferred_checks.append((valid, describe)),
        )
    with pytest.raises(ConfigError, match=what) as error:
        in_parts(model, MicroBatchLossScaler(parts, SIZES), parts, run)
    assert "loss_weight" in error.value.remedy


def test_manual_mean_with_equal_counts_raises() -> None:
    model, batch, _ = tagged(mean_by_hand)
    parts = cut({**batch, "labels": batch["labels"].abs() % 5}, (2, 2, 2, 2))
    with pytest.raises(ConfigError, match="the 12 labels of micro-batch 0"):
        in_parts(model, MicroBatchLossScaler(parts, (2, 2, 2, 2)), parts, run)


@pytest.mark.parametrize("head", MASKED_IMAGES)
def test_manual_mean_works_with_loss_weight(head: str) -> None:
    model, batch = model_of(head), batch_of(head)
    num_masked = torch.tensor([1, 2, 3, 1, 2, 3, 1, 2])[:, None]
    order = torch.rand(batch["bool_masked_pos"].shape, generator=torch.Generator().manual_seed(3)).argsort(dim=1)
    batch["bool_masked_pos"] = order < num_masked
    parts = cut(batch)
    with pytest.raises(ConfigError, match="reduction='none'"):
        in_parts(model, MicroBatchLossScaler(parts, SIZES), parts)
    model.zero_grad()
    weights = MicroBatchLossScaler(parts, SIZES, loss_weight=lambda part: int(part["bool_masked_pos"].sum()))
    # transformers adds 1e-5 to what it divides by
    assert_same(in_parts(model, weights, parts), at_once(model, batch), 1e-5)


def test_micro_batch_with_zero_weight_adds_zero() -> None:
    model, batch, parts = tagged(LOSSES["filled"])
    batch["labels"][3:5] = -100
    weights = MicroBatchLossScaler(
        parts, SIZES, lambda part: int(((part["labels"] != -100) & (part["labels"] != 3)).sum())
    )
    assert_same(in_parts(model, weights, parts, run), at_once(model, batch, run))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_invalid_loss_weights_raise(weight: float) -> None:
    with pytest.raises(ConfigError, match="loss_weight must return"):
        MicroBatchLossScaler([{}, {}], (1, 1), lambda part: weight)


def test_single_micro_batch_keeps_its_loss() -> None:
    model, batch, _ = tagged(lambda x, labels: x.square().mean())
    assert_same(in_parts(model, MicroBatchLossScaler([batch], [8]), [batch], run), at_once(model, batch, run))


def test_recording_stops_after_error_and_restarts() -> None:
    model, batch, parts = tagged(LOSSES["filled"])
    weights = MicroBatchLossScaler(parts, SIZES)
    with pytest.raises(ZeroDivisionError), weighing(weights, 0):
        run(model, parts[0])
        raise ZeroDivisionError
    weights.stop_recording_loss_calls()
    assert weights._recorder is None and not _get_current_function_mode_stack()
    weights.start_recording_loss_calls(0)
    weights.start_recording_loss_calls(0)
    weights.stop_recording_loss_calls()
    assert not _get_current_function_mode_stack()
    assert_same(in_parts(model, weights, parts, run), at_once(model, batch, run))


def test_loss_is_equal_without_gradients() -> None:
    model, batch = model_of("BertForPreTraining"), batch_of("BertForPreTraining")
    parts = cut(batch)
    weights, total = MicroBatchLossScaler(parts, SIZES), 0.0
    with torch.no_grad():
        for index, part in enumerate(parts):
            with weighing(weights, index):
                loss = own_loss(model, part)
            total += float(weights.scale_loss(index, loss))
        weights.run_deferred_checks()
        assert total == pytest.approx(float(own_loss(model, batch)), rel=1e-12)


def _cut_vocabulary(upcast: bool) -> None:
    """Compare vocabulary-parallel logits with full logits."""
    axis, bounds = Axis.of(None), get_even_split_bounds(127, 2)
    generator = torch.Generator().manual_seed(4)
    plain = torch.randn(8, 6, 127, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(127, (8, 6), generator=generator)
    labels[:3], labels[6, 1:] = -100, -100
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    expected = F.cross_entropy(plain.view(-1, 127), shifted.flatten())
    expected.backward()
    local = plain.detach()[..., bounds[axis.rank] : bounds[axis.rank + 1]].clone().requires_grad_()
    parts = cut({"labels": labels})
    weights, total, at = MicroBatchLossScaler(parts, SIZES), 0.0, 0
    for index, size in enumerate(SIZES):
        logits = wrap_local_logits_as_full_logits(local[at : at + size] * 1, axis, bounds)
        assert isinstance(logits, VocabParallelLogits)
        at += size
        with weighing(weights, index):
            logits = logits.float() if upcast else logits
            target = F.pad(parts[index]["labels"], (0, 1), value=-100)[:, 1:].contiguous()
            loss = F.cross_entropy(logits.view(-1, 127), target.view(-1))
        loss = weights.scale_loss(index, loss)
        loss.backward()
        total += float(loss)
    weights.run_deferred_checks()
    bound = 1e-6 if upcast else 1e-12
    assert total == pytest.approx(float(expected), rel=bound)
    assert plain.grad is not None and local.grad is not None
    own = plain.grad[..., bounds[axis.rank] : bounds[axis.rank + 1]]
    torch.testing.assert_close(local.grad, own, rtol=0, atol=bound)


@pytest.mark.parametrize("upcast", [False, True])
def test_vocabulary_parallel_logits(pool2: WorkerPool, upcast: bool) -> None:
    pool2.run(_cut_vocabulary, upcast)
