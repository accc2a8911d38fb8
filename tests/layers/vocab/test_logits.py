"""Vocabulary-parallel logits behave like the full logits: each operation, and its communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import Axis
from shardformer.tensor_parallel.vocab_parallel_logits import (
    LOGITS_RULES,
    VocabParallelLogits,
    wrap_local_logits_as_full_logits,
)
from tests.layers.vocab.vocab import SHAPE, B, S, V, make, own, plain_of, same

MASK = torch.arange(V) % 3 == 0
LABELS = torch.tensor([[0, 63, -100], [126, 64, 31]])

Operation = Callable[[Tensor], Tensor]

# operations that do not communicate and return sharded logits
SHARDED: dict[str, Operation] = {
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "to dtype": lambda x: x.to(torch.bfloat16),
    "to copy": lambda x: x.to(copy=True, dtype=torch.float32, device=x.device),
    "to positional copy": lambda x: x.to(torch.device("cpu"), torch.float32, False, True),
    "to other": lambda x: x.to(torch.zeros(1, dtype=torch.float32)),
    "type": lambda x: x.type(torch.float32),
    "type_as": lambda x: x.type_as(torch.zeros(1, dtype=torch.float32)),
    "cpu": lambda x: x.cpu(),
    "there and back": lambda x: x.float().to(torch.bfloat16).float(),
    "contiguous": lambda x: x[:, 1:].contiguous(),
    "clone": lambda x: x.clone(),
    "view": lambda x: x.view(-1, V),
    "view list": lambda x: x.view([B * S, V]),
    "view last open": lambda x: x.view(B * S, -1),
    "view by size": lambda x: x.view(-1, x.size(-1)),
    "reshape": lambda x: x[:, 1:].reshape(-1, x.shape[-1]),
    "torch.reshape": lambda x: torch.reshape(x, (-1, V)),
    "flatten": lambda x: x.flatten(0, 1),
    "torch.flatten": lambda x: torch.flatten(x, start_dim=0, end_dim=-2),
    "unflatten": lambda x: x.unflatten(1, (1, 3)),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "squeeze all": lambda x: x[:1, :1].squeeze(),
    "squeeze what stays": lambda x: x.squeeze(1),
    "squeeze some": lambda x: x[:, :1].squeeze((0, 1, 2)),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "unsqueeze behind": lambda x: x.unsqueeze(-1).squeeze(-1),
    "expand": lambda x: x[:, :1].expand(-1, 4, V),
    "expand more dims": lambda x: x.expand(2, B, S, -1),
    "transpose": lambda x: x.transpose(0, 1),
    "transpose vocabulary": lambda x: x.transpose(1, 2).transpose(-1, -2),
    "permute": lambda x: x.permute(2, 0, 1).permute(1, 2, 0),
    "index": lambda x: x[0],
    "index last token": lambda x: x[:, -1],
    "index kept dim": lambda x: x[:, -1, :],
    "index shift": lambda x: x[..., :-1, :],
    "index ellipsis": lambda x: x[1, ...],
    "index None": lambda x: x[:, None, 0],
    "index whole vocabulary": lambda x: x[..., :V],
    "index behind": lambda x: x.transpose(1, 2)[:, :, :-1],
    "index mask": lambda x: x[LABELS != -100],
    "index numbers": lambda x: x[torch.tensor([1, 0, 1]), torch.tensor([2, 2, 0])],
    "index apart": lambda x: x.unsqueeze(1)[torch.tensor([0, 1]), :, torch.tensor([2, 0])],
    "select": lambda x: x.select(1, 2),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "index_select": lambda x: x.index_select(0, torch.tensor([1, 1])),
    "chunk": lambda x: x.chunk(2)[1],
    "split": lambda x: x.split(2, dim=1)[0],
    "torch.split": lambda x: torch.split(x, [1, 2], 1)[1],
    "unbind": lambda x: x.unbind()[1],
    "iterate": lambda x: next(reversed(list(x))),
    "softcap": lambda x: torch.tanh(x / 30.0) * 30.0,
    "scale": lambda x: 0.5 * x - 1 + 2 / (3.0 + x.abs()) + (1 - x),
    "power": lambda x: -(x**2),
    "clamp": lambda x: x.clamp(min=-1, max=1),
    "add alpha": lambda x: torch.add(x, 1.0, alpha=3),
    "add bias of the vocabulary": lambda x: x + torch.linspace(0, 1, V, dtype=x.dtype).view(1, V),
    "add to a number a token": lambda x: torch.ones(B, S, 1, dtype=x.dtype) - x,
    "add what broadcasts": lambda x: x[0] + torch.ones(2, 1, V, dtype=x.dtype),
    "guidance": lambda x: x[:1] + 1.5 * (x[:1] - x[1:]),
    "masked_fill": lambda x: x.masked_fill(MASK, -5.0),
    "where": lambda x: torch.where(MASK, x, -5.0),
    "promote": lambda x: x.float() * torch.ones(V, dtype=torch.float64),
    "no grad bias, transposed": lambda x: x.transpose(1, 2) + torch.ones(V, 1, dtype=x.dtype),
}

# operations that send three numbers per token and return a plain tensor
LOSSES: dict[str, Operation] = {
    "cross_entropy": lambda x: F.cross_entropy(x.view(-1, V), LABELS.view(-1)),
    "CrossEntropyLoss": lambda x: nn.CrossEntropyLoss(ignore_index=31)(x.view(-1, V), LABELS.clamp(min=0).view(-1)),
    "cross_entropy none": lambda x: F.cross_entropy(x.view(-1, V), LABELS.view(-1), reduction="none"),
    "cross_entropy sum": lambda x: F.cross_entropy(x.double().view(-1, V), LABELS.view(-1), reduction="sum"),
    "cross_entropy smooth": lambda x: F.cross_entropy(x.view(-1, V), LABELS.view(-1), label_smoothing=0.2),
    "cross_entropy of the middle": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS),
    "cross_entropy of the middle, none": lambda x: F.cross_entropy(x.permute(0, 2, 1), LABELS, reduction="none"),
    "cross_entropy of a token": lambda x: F.cross_entropy(x[0, 1], LABELS[0, 1]),
    "cross_entropy by name": lambda x: F.cross_entropy(input=x.view(-1, V), target=LABELS.view(-1)),
    "shifted": lambda x: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, V), LABELS[..., 1:].reshape(-1)),
    "scaled": lambda x: F.cross_entropy((x * 2.5).view(-1, V), LABELS.view(-1)),
}

# operations that gather the full logits once and return a plain tensor
GATHERED: dict[str, Operation] = {
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: x.softmax(-1),
    "F.log_softmax": lambda x: F.log_softmax(x.float(), dim=-1),
    "nll": lambda x: F.nll_loss(F.log_softmax(x.view(-1, V), -1), LABELS.view(-1)),
    "topk": lambda x: x.topk(3).values,
    "columns": lambda x: x[..., 60:70],
    "column": lambda x: x[:, 0, 64],
    "gather": lambda x: x.gather(-1, LABELS.clamp(min=0).unsqueeze(-1)),
    "sum": lambda x: x.sum(),
    "mean and max": lambda x: x.mean(-1) + x.max(-1).values,
    "mse": lambda x: F.mse_loss(x, torch.ones(SHAPE, dtype=x.dtype)),
    "matmul": lambda x: x @ torch.ones(V, 2, dtype=x.dtype),
    "cat": lambda x: torch.cat([x, x], 0),
    "stack": lambda x: torch.stack((x, x)),
    "view through the vocabulary": lambda x: x.view(B, -1),
    "flatten all": lambda x: x.flatten(),
    "weighted cross_entropy": lambda x: F.cross_entropy(x.view(-1, V), LABELS.view(-1), weight=MASK.to(x.dtype) + 1),
    "soft targets": lambda x: F.cross_entropy(x.view(-1, V), torch.full((B * S, V), 1 / V, dtype=x.dtype)),
    "split the vocabulary": lambda x: x.split(100, -1)[1],
    "compare": lambda x: (x > 0).to(x.dtype) * 2,
    "add a tensor with a gradient": lambda x: x + torch.ones(V, dtype=x.dtype, requires_grad=True),
    "read in place": lambda x: F.dropout(x, 0.0, inplace=False) + F.elu(x, inplace=False),
}

# operations that gather the full logits, write to them and keep the local slice
WRITTEN: dict[str, Operation] = {
    "write": lambda x: write(x * 1, lambda y: y.__setitem__((Ellipsis, MASK), -2.0)),
    "write by name": lambda x: write(x * 1, lambda y: y.mul_(3.0)),
    "write with an operator": lambda x: write(x * 1, lambda y: y.__itruediv__(2.0)) + 1,
    "write with a function": lambda x: write(x * 1, lambda y: F.relu(y, inplace=True)),
    "write twice": lambda x: write(x * 1, lambda y: y.mul_(2.0).clamp_(min=-1.0)),
    "write into a view": lambda x: write(x * 1, lambda y: y.view(-1, V).mul_(MASK)),
    "write into an index": lambda x: write(x * 1, lambda y: y[:, -1].__setitem__((0, slice(60, 70)), 1.0)),
    "write into a part of a view": lambda x: write(
        x * 1, lambda y: y.transpose(0, 1).narrow(0, 1, 2)[1].view(-1, V).exp_()
    ),
    "write into detached": lambda x: write(x * 1, lambda y: y.detach().clamp_(min=0)),
    "write into data": lambda x: write(x * 1, lambda y: y.data.clamp_(min=0)),
    "write without gradient": lambda x: write(x * 1, torch.no_grad()(lambda y: y.mul_(MASK))) * 1,
    "write into a copy by index": lambda x: write(x * 1, lambda y: y[torch.tensor([1])].zero_()),
    "write into a cast": lambda x: write(x * 1, lambda y: y.half().zero_()),
    "view before the write": lambda x: before(x * 1, lambda y: y.view(-1, V)[1:], lambda y: y.mul_(MASK)),
    "view beside the write": lambda x: before(x * 1, lambda y: y[0], lambda y: y[:, 0].mul_(3.0)),
    "cast before the write": lambda x: before(x * 1, lambda y: y.float(), lambda y: y.mul_(3.0)),
    "cast between writes": lambda x: before(
        write(x * 1, lambda y: y.sub_(1.0)), lambda y: y.float(), lambda y: y.sub_(3.0)
    ),
    "write and view": lambda x: write(x * 1, lambda y: y.masked_fill_(MASK, -9.0)).view(-1, V).float(),
}


def write(x: Tensor, how: Callable[[Tensor], Any]) -> Tensor:
    how(x)
    return x


def before(x: Tensor, look: Operation, how: Callable[[Tensor], Any]) -> Tensor:
    """Return what a view that was taken before the write shows after it."""
    seen = look(x)
    how(x)
    return seen * 1


TABLE = {"sharded": SHARDED, "loss": LOSSES, "gathered": GATHERED, "written": WRITTEN}

# ---------------------------------------------------------------------------------------------- functions that are sent


def beside_the_plain_tensor(kind: str, name: str, dtype: torch.dtype) -> None:
    plain, local, logits, recorder = make(dtype)
    operation = TABLE[kind][name]
    expected = operation(plain)
    with recorder:
        result = operation(logits)
    assert isinstance(result, VocabParallelLogits) == (kind in ("sharded", "written")), type(result)
    assert (result.shape, result.dtype, result.device) == (expected.shape, expected.dtype, expected.device)
    assert result.requires_grad == expected.requires_grad
    purposes = [call.purpose for call in recorder.calls]
    assert purposes == {"sharded": [], "loss": ["loss"], "gathered": ["gather"], "written": ["gather"]}[kind]
    same(result, expected)
    if expected.requires_grad:
        weight = torch.linspace(-1, 2, expected.numel()).reshape(expected.shape)
        (plain_of(result).double() * weight).sum().backward()
        (expected.double() * weight).sum().backward()
        assert local.grad is not None and plain.grad is not None
        same(local.grad, own(plain.grad))


def described_on_one_rank_only() -> str:
    _, _, logits, recorder = make()
    text = ""
    with recorder:
        if recorder.source.rank == 1:
            text = f"{logits!r} {logits} {[logits]}"
            assert repr(logits.double().half()) and logits.type() == "torch.DoubleTensor"
    assert recorder.calls == []
    return text


def asked_what_it_is() -> None:
    plain, _, logits, recorder = make()
    with recorder:
        for question in (
            "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda", "itemsize", "nbytes",
            "size()", "size(-1)", "dim()", "numel()", "is_floating_point()", "is_contiguous()", "element_size()",
            "__len__()", "type()", "get_device()",
        ):  # fmt: skip
            ours, theirs = (eval(f"x.{question}", {"x": x}) for x in (logits, plain))
            assert ours == theirs or question == "is_leaf", question
        assert logits.new_zeros(2, 2).dtype == torch.float64
        assert torch.zeros_like(logits).shape == SHAPE and type(torch.zeros_like(logits)) is Tensor
        assert torch.ones(2).to(logits).dtype == torch.float64
        assert torch.is_tensor(logits) and torch.is_floating_point(logits) and logits.grad_fn is not None
        assert not logits.detach().requires_grad and not logits.data.requires_grad
        with torch.no_grad():
            assert not logits.view(-1, V).requires_grad and not logits.float().requires_grad
    assert recorder.calls == []


def gathered_once() -> None:
    plain, local, logits, recorder = make()
    with recorder:
        with torch.no_grad():
            assert torch.equal(logits.argmax(-1), plain.argmax(-1))
            assert logits.tolist() == plain.tolist() and logits[0, 0].max().item() == plain[0, 0].max().item()
        assert recorder.source.traffic.calls[0].payload_bytes == B * S * V * 8
        no_grad_calls = len(recorder.source.traffic.calls)
        (logits.softmax(-1).square().sum() + logits.logsumexp(-1).sum()).backward()
    # Once without a gradient (and once for the row), once with one.
    assert (no_grad_calls, len(recorder.calls)) == (2, 3)
    (plain.softmax(-1).square().sum() + plain.logsumexp(-1).sum()).backward()
    assert plain.grad is not None and local.grad is not None
    same(local.grad, own(plain.grad))


def a_vocabulary_of_one_column_a_rank() -> None:
    plain, _, logits, _ = make(shape=(2, 1, 2))
    for operation in (lambda x: x.squeeze(), lambda x: x.squeeze(-1), lambda x: x[:1].squeeze().view(-1, 2)):
        assert isinstance(operation(logits), VocabParallelLogits)
        same(operation(logits), operation(plain))


def gathered_anew_after_inference() -> None:
    plain, _, logits, _ = make()
    scale = torch.ones(V, dtype=torch.float64, requires_grad=True)
    values = logits.detach()
    with torch.inference_mode():
        assert torch.equal(values.argmax(-1), plain.argmax(-1))
    (values.softmax(-1) * values.sigmoid().sum() * scale).sum().backward()
    (values @ scale).sum().backward()
    assert scale.grad is not None


def a_cast_waits() -> None:
    plain, _, logits, recorder = make(torch.bfloat16)
    upcast = logits.float()
    assert isinstance(upcast, VocabParallelLogits) and isinstance(logits, VocabParallelLogits)
    assert upcast.dtype == torch.float32 and upcast.local is logits.local
    again, times_one = logits.to(copy=True, dtype=torch.float32), upcast * 1
    assert isinstance(again, VocabParallelLogits) and isinstance(times_one, VocabParallelLogits)
    assert again.local.dtype == times_one.local.dtype == torch.float32
    assert upcast.to_local().dtype == torch.float32 and upcast.full_tensor().dtype == torch.float32
    with recorder:
        upcast.view(-1, V).argmax(-1)
    assert recorder.payload_bytes() == B * S * V * 2  # sent in 16 bits
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            ours, theirs = (F.cross_entropy(x.view(-1, V), LABELS.view(-1)) for x in (logits, plain))
            assert ours.dtype == theirs.dtype


def torch_s_own_errors(how: str) -> None:
    plain, _, logits, _ = make()
    attempts: dict[str, Callable[[Tensor], Any]] = {
        "view": lambda x: x.view(7, V),
        "index": lambda x: x[5],
        "shapes": lambda x: F.cross_entropy(x.view(-1, V), LABELS.view(-1)[:3]),
        "backward": lambda x: x.backward(),
        "add": lambda x: x + torch.ones(V - 1),
    }
    messages = []
    for x in (plain, logits):
        try:
            attempts[how](x)
        except (RuntimeError, IndexError, ValueError) as error:
            messages.append(str(error))
    assert len(messages) == 2 and messages[0] == messages[1], messages


# ---------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.reduced(at_most=90)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in TABLE.items() for name in names])
def test_operation_equals_that_of_the_plain_tensor(pool2: WorkerPool, kind: str, name: str, dtype: torch.dtype) -> None:
    pool2.run(beside_the_plain_tensor, kind, name, dtype)


@pytest.mark.parametrize("name", ["view", "index mask", "squeeze all", "guidance", "where"])
def test_operation_on_four_ranks_equals_that_of_the_plain_tensor(pool4: WorkerPool, name: str) -> None:
    pool4.run(beside_the_plain_tensor, "sharded", name, torch.float64)


def test_printing_on_one_rank_does_not_communicate(pool2: WorkerPool) -> None:
    _, text = pool2.run(described_on_one_rank_only)
    described = "VocabParallelLogits(shape=(2, 3, 127), dtype=torch.float64, vocabulary 64:127 on tensor 1/2"
    assert text.count(described) == 3 and text.count("full_tensor()") == 3


def test_reading_metadata_does_not_communicate(pool2: WorkerPool) -> None:
    pool2.run(asked_what_it_is)


def test_the_full_logits_are_gathered_once(pool2: WorkerPool) -> None:
    pool2.run(gathered_once)


def test_squeeze_keeps_a_vocabulary_dim_with_one_local_column(pool2: WorkerPool) -> None:
    pool2.run(a_vocabulary_of_one_column_a_rank)


def test_logits_gathered_in_inference_mode_are_not_cached_for_backward(pool2: WorkerPool) -> None:
    pool2.run(gathered_anew_after_inference)


def test_cast_to_fp32_is_deferred(pool2: WorkerPool) -> None:
    pool2.run(a_cast_waits)


@pytest.mark.parametrize("how", ["view", "index", "shapes", "backward", "add"])
def test_invalid_call_raises_the_error_of_torch(pool2: WorkerPool, how: str) -> None:
    pool2.run(torch_s_own_errors, how)


def test_logits_on_one_rank_are_plain() -> None:
    x = torch.randn(2, 3)
    assert wrap_local_logits_as_full_logits(x, Axis("tensor"), [0, 3]) is x


def test_rules_name_functions_of_torch() -> None:
    assert {torch.Tensor.view, torch.reshape, F.cross_entropy, torch.Tensor.shape.__get__} <= LOGITS_RULES.keys()
    assert all(callable(function) for function in LOGITS_RULES)
