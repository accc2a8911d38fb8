"""Vocabulary-parallel logits behave as the full ones: each operation beside the plain tensor, with what it sends."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardformer.comm.recorder import Recorder
from shardformer.context import Axis
from shardformer.errors import InputError
from shardformer.layers.logits import RULES, VocabParallelLogits, shard_logits
from shardformer.layout import even_bounds
from shardformer.pool import WorkerPool

B, S, V = 2, 3, 127
SHAPE = (B, S, V)
MASK = torch.arange(V) % 3 == 0
LABELS = torch.tensor([[0, 63, -100], [126, 64, 31]])

Operation = Callable[[Tensor], Tensor]

# What sends nothing and stays sharded.
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

# What sends three numbers a token, and is plain.
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

# What gathers the full logits once, and is plain.
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

# What gathers the full logits, writes into them and goes on with the own slice.
WRITTEN: dict[str, Operation] = {
    "write": lambda x: write(x * 1, lambda y: y.__setitem__((Ellipsis, MASK), -2.0)),
    "write by name": lambda x: write(x * 1, lambda y: y.mul_(3.0)),
    "write with an operator": lambda x: write(x * 1, lambda y: y.__itruediv__(2.0)) + 1,
    "write with a function": lambda x: write(x * 1, lambda y: F.relu(y, inplace=True)),
    "write twice": lambda x: write(x * 1, lambda y: y.mul_(2.0).clamp_(min=-1.0)),
    "write and view": lambda x: write(x * 1, lambda y: y.masked_fill_(MASK, -9.0)).view(-1, V).float(),
}


def write(x: Tensor, how: Callable[[Tensor], Any]) -> Tensor:
    how(x)
    return x


TABLE = {"sharded": SHARDED, "loss": LOSSES, "gathered": GATHERED, "written": WRITTEN}

# ---------------------------------------------------------------------------------------------- functions that are sent


def make(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = SHAPE) -> tuple[Tensor, Tensor, Tensor, Recorder]:
    """The plain logits, this rank's part of them, the part as the full logits, and a recorder of what is sent."""
    axis = Axis.of(None)
    bounds = even_bounds(shape[-1], axis.size)
    plain = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    local = plain[..., bounds[axis.rank] : bounds[axis.rank + 1]].clone().requires_grad_()
    # A head's output is not a leaf.
    return plain.requires_grad_(), local, shard_logits(local * 1, axis, bounds), Recorder(axis)


def own(full: Tensor, axis_dim: int = -1) -> Tensor:
    axis = Axis.of(None)
    bounds = even_bounds(full.shape[axis_dim], axis.size)
    return full.narrow(axis_dim, bounds[axis.rank], bounds[axis.rank + 1] - bounds[axis.rank])


def plain_of(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, VocabParallelLogits) else x


def same(ours: Tensor, theirs: Tensor) -> None:
    """16-bit numbers are the same to a last bit, as a sum of gradients may be taken in another order."""
    last_bit = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-6}.get(theirs.dtype, 1e-12)
    torch.testing.assert_close(plain_of(ours), theirs, rtol=last_bit, atol=last_bit)


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
    assert plain.grad is not None
    same(local.grad, own(plain.grad))  # type: ignore[arg-type]


def a_cast_waits() -> None:
    plain, _, logits, recorder = make(torch.bfloat16)
    upcast = logits.float()
    assert isinstance(upcast, VocabParallelLogits) and isinstance(logits, VocabParallelLogits)
    assert upcast.dtype == torch.float32 and upcast._local is logits._local
    assert logits.to(copy=True, dtype=torch.float32)._local.dtype == torch.float32  # type: ignore[attr-defined]
    assert upcast.to_local().dtype == torch.float32 and upcast.full_tensor().dtype == torch.float32
    assert (upcast * 1)._local.dtype == torch.float32  # type: ignore[attr-defined]
    with recorder:
        upcast.view(-1, V).argmax(-1)
    assert recorder.payload_bytes() == B * S * V * 2  # sent in 16 bits
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            ours, theirs = (F.cross_entropy(x.view(-1, V), LABELS.view(-1)) for x in (logits, plain))
            assert ours.dtype == theirs.dtype


def gradients_at_the_logits() -> None:
    plain, local, logits, _ = make()
    seen: list[Tensor] = []
    for x in (plain * 1, logits):
        x.retain_grad()
        x.register_hook(lambda grad: seen.append(grad))
        assert x.grad is None and x.retains_grad
        x.register_hook(lambda grad: grad * 2 * MASK)
        F.cross_entropy(x.view(-1, V), LABELS.view(-1)).backward()
        seen.append(x.grad)
    assert [type(x) for x in seen] == [Tensor, Tensor, VocabParallelLogits, VocabParallelLogits]
    same(seen[2], seen[0])
    same(seen[3], seen[1])
    same(local.grad, own(plain.grad))  # type: ignore[arg-type]
    logits.grad = None
    assert logits.grad is None


def backward_from_the_logits() -> None:
    plain, local, logits, recorder = make()
    gradient = torch.linspace(0, 1, B * S * V, dtype=torch.float64).view(SHAPE)
    (plain * 1).backward(gradient)
    with recorder:
        logits.backward(gradient, retain_graph=True)
        torch.autograd.backward([logits], [gradient])
    assert recorder.calls == []
    same(local.grad / 2, own(plain.grad))  # type: ignore[operator, arg-type]
    other, _, again, _ = make()
    ours, theirs = (
        torch.autograd.grad(F.cross_entropy(x.view(-1, V), LABELS.view(-1)), [x])[0] for x in (again, other)
    )
    assert isinstance(ours, VocabParallelLogits)
    same(ours, theirs)


class Doubled(torch.autograd.Function):
    """Somebody's own function, which torch's autograd calls with the whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp().sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grads[0].unsqueeze(-1) * x.exp()


class Head(nn.Module):
    """A head whose full weight is known, and which computes this rank's columns."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        weight = torch.randn(V, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        self.weight, self.sharded = nn.Parameter(own(weight, 0).clone() if sharded else weight), sharded

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight.T
        return shard_logits(out, Axis.of(None), even_bounds(V, Axis.of(None).size)) if self.sharded else out


def handed_on_by_autograd(how: str) -> None:
    hidden = torch.randn(B, S, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    seen: list[Tensor] = []
    grads: list[Tensor] = []
    for sharded in (False, True):
        head = Head(sharded)
        x = hidden.clone().requires_grad_()
        if how == "full backward hook":
            head.register_full_backward_hook(lambda module, into, out: seen.append(plain_of(out[0])))
        if how == "reentrant checkpoint":
            out = checkpoint(head, x, use_reentrant=True)
        elif how == "non-reentrant checkpoint":
            out = checkpoint(head, x, use_reentrant=False)
        else:
            out = head(x)
        assert isinstance(out, Tensor)
        if how == "own function after a write":
            out.div_(2.0)
        loss = F.cross_entropy(out.view(-1, V), LABELS.view(-1)) + out.logsumexp(-1).mean()
        if how.startswith("own function"):
            loss = loss + Doubled.apply(out).sum() + Doubled.apply(out.view(-1, V)).mean()
        loss.backward()
        grads.append(head.weight.grad)  # type: ignore[arg-type]
    same(grads[1], own(grads[0], 0))
    if seen:
        same(seen[1], seen[0])


def unnamed(function: Callable[..., Any], x: Tensor) -> Any:
    """As code in C++ calls it."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(x)


def refused(how: str) -> str:
    _, _, logits, _ = make()
    attempts: dict[str, Callable[[], Any]] = {
        "deepcopy": lambda: copy.deepcopy(logits),
        "copy": lambda: copy.copy(logits),
        "pickle": lambda: pickle.dumps(logits),
        "C++": lambda: unnamed(torch.exp, logits),
        "write into a view": lambda: logits.view(-1, V).zero_(),
        "write into an index": lambda: logits[:, 0].__setitem__((0, 0), 1.0),
        "write by data": lambda: setattr(logits, "data", torch.zeros(SHAPE)),
        "label": lambda: F.cross_entropy(logits.view(-1, V), torch.full((B * S,), V)),
    }
    try:
        attempts[how]()
    except InputError as error:
        return str(error)
    return "nothing was refused"


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


def through_hugging_face_s_losses() -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
    from transformers.modeling_outputs import CausalLMOutput

    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for call in (
            lambda x: ForCausalLMLoss(x, LABELS, V),
            lambda x: ForCausalLMLoss(x, LABELS, V, num_items_in_batch=4),
            lambda x: ForCausalLMLoss(x, LABELS.clamp(min=0), V, num_items_in_batch=torch.tensor(4), ignore_index=0),
            lambda x: ForCausalLMLoss(x, None, V, shift_labels=LABELS),
            lambda x: ForMaskedLMLoss(x, LABELS, V),
        ):
            plain, local, logits, recorder = make(dtype)
            expected = call(plain)
            with recorder:
                output = CausalLMOutput(loss=call(logits), logits=logits)
            assert output.loss is not None and output.logits is output[1] is logits
            assert [c.purpose for c in recorder.calls] == ["loss"]
            output.loss.backward()
            expected.backward()
            assert output.loss.dtype == expected.dtype
            torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(local.grad, own(plain.grad), rtol=1e-2, atol=1e-5)  # type: ignore[arg-type]


def tiny(name: str) -> tuple[nn.Module, str, dict[str, Tensor]]:
    """A model of Hugging Face's whose head computes its loss inline, the name of its head, and a batch with labels."""
    import transformers as hf

    torch.manual_seed(0)
    ids = torch.tensor([[5, 9, 120, 64, 63, 7], [8, 126, 33, 4, 2, 11]])
    labels = ids.masked_fill(ids == 7, -100)
    if name == "bert":
        config: Any = hf.BertConfig(vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        next_sentence = torch.tensor([0, 1])
        batch = {"labels": labels, "next_sentence_label": next_sentence}
        return hf.BertForPreTraining(config), "cls.predictions.decoder", {"input_ids": ids, **batch}
    if name == "gpt2 double":
        config = hf.GPT2Config(vocab_size=V, n_embd=16, n_layer=1, n_head=2, num_labels=1)
        choices = {"mc_labels": torch.tensor([1]), "mc_token_ids": torch.tensor([[5, 4]])}
        return hf.GPT2DoubleHeadsModel(config), "lm_head", {"input_ids": ids[None], "labels": labels[None], **choices}
    if name == "t5":
        config = hf.T5Config(vocab_size=V, d_model=16, d_kv=8, num_layers=1, num_heads=2, d_ff=32)
        config.decoder_start_token_id = 0
        return hf.T5ForConditionalGeneration(config), "lm_head", {"input_ids": ids, "labels": labels}
    if name == "gemma2":
        config = hf.Gemma2Config(
            vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            head_dim=8, intermediate_size=32, attn_implementation="eager",
        )  # fmt: skip
        return hf.Gemma2ForCausalLM(config), "lm_head", {"input_ids": ids, "labels": labels}
    config = hf.LlamaConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    return hf.LlamaForCausalLM(config), "lm_head", {"input_ids": ids, "labels": labels}


def cut_head(model: nn.Module, name: str, axis: Axis) -> None:
    """The head hands out this rank's columns; each rank's gradient below it is then one summand."""

    def cut(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return shard_logits(own(out), axis, even_bounds(V, axis.size))

    model.get_submodule(name).register_forward_hook(cut)


def through_a_whole_model(name: str) -> None:
    model, head, batch = tiny(name)
    model.double().eval()
    expected = model(**batch)
    expected.loss.backward()
    grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    axis = Axis.of(None)
    cut_head(model, head, axis)
    with Recorder(axis) as recorder:
        output = model(**batch)
    assert [call.purpose for call in recorder.calls] == ["loss"]
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)  # transformers casts to fp32 by itself
    logits = [x for x in output.values() if isinstance(x, VocabParallelLogits)]
    assert len(logits) == 1
    torch.testing.assert_close(logits[0].full_tensor(), next(x for x in expected.values() if x.shape[-1:] == (V,)))
    if "next_sentence_label" in batch or "mc_labels" in batch:
        return  # the other head's gradient is whole on each rank, so that the sum below would count it twice
    output.loss.backward()
    for key, p in model.named_parameters():
        if key in grads:
            assert p.grad is not None
            dist.all_reduce(p.grad)
            torch.testing.assert_close(p.grad, grads[key], rtol=1e-5, atol=1e-8, msg=lambda text: f"{key}: {text}")


def generates() -> None:
    model, head, batch = tiny("llama")
    model.eval()
    prompt: Any = {"input_ids": batch["input_ids"], "max_new_tokens": 4, "pad_token_id": 0}
    more: Any = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    generate: Any = model.generate
    options = ({}, {"num_beams": 2}, {"repetition_penalty": 1.3}, more)
    expected = [generate(**prompt, do_sample=False, **o) for o in options]
    cut_head(model, head, Axis.of(None))
    for option, want in zip(options, expected, strict=True):
        got = generate(**prompt, do_sample=False, **option)
        assert torch.equal(got["sequences"], want["sequences"]) if option is more else torch.equal(got, want)
        if option is more:
            same(got["logits"][0], want["logits"][0])
    kept = model(input_ids=batch["input_ids"], logits_to_keep=2).logits
    assert isinstance(kept, VocabParallelLogits) and kept.shape == (2, 2, V)


# ----------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in TABLE.items() for name in names])
def test_an_operation_gives_what_the_plain_tensor_gives(
    pool2: WorkerPool, kind: str, name: str, dtype: torch.dtype
) -> None:
    pool2.run(beside_the_plain_tensor, kind, name, dtype)


@pytest.mark.parametrize("name", ["view", "index mask", "squeeze all", "guidance", "where"])
def test_an_operation_over_four_ranks(pool4: WorkerPool, name: str) -> None:
    pool4.run(beside_the_plain_tensor, "sharded", name, torch.float64)


def test_printing_sends_nothing_and_may_be_done_on_one_rank(pool2: WorkerPool) -> None:
    _, text = pool2.run(described_on_one_rank_only)
    described = "VocabParallelLogits(shape=(2, 3, 127), dtype=torch.float64, vocabulary 64:127 held by tensor 1/2"
    assert text.count(described) == 3 and text.count("full_tensor()") == 3


def test_questions_about_its_shape_send_nothing(pool2: WorkerPool) -> None:
    pool2.run(asked_what_it_is)


def test_the_full_logits_are_gathered_once(pool2: WorkerPool) -> None:
    pool2.run(gathered_once)


def test_a_cast_to_fp32_waits_until_values_are_needed(pool2: WorkerPool) -> None:
    pool2.run(a_cast_waits)


def test_hooks_and_kept_gradients_are_those_of_the_full_logits(pool2: WorkerPool) -> None:
    pool2.run(gradients_at_the_logits)


def test_backward_may_start_at_the_logits_and_end_there(pool2: WorkerPool) -> None:
    pool2.run(backward_from_the_logits)


@pytest.mark.parametrize(
    "how",
    [
        "full backward hook", "reentrant checkpoint", "non-reentrant checkpoint", "own function",
        "own function after a write",
    ],
)  # fmt: skip
def test_gradients_are_right_where_autograd_hands_the_whole_on(pool2: WorkerPool, how: str) -> None:
    pool2.run(handed_on_by_autograd, how)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("deepcopy", "copy.deepcopy"),
        ("copy", "copied or pickled"),
        ("pickle", "copied or pickled"),
        ("C++", "aten.exp.default was called"),
        ("write into a view", "zero_ writes into a view"),
        ("write into an index", "__setitem__ writes into a view"),
        ("write by data", "attribute"),
        ("label", "A label is 127"),
    ],
)
def test_what_would_go_wrong_in_silence_is_refused(pool2: WorkerPool, how: str, words: str) -> None:
    for message in pool2.run(refused, how):
        assert words in message
        assert how == "label" or "full_tensor()" in message or "logits.clone()" in message


@pytest.mark.parametrize("how", ["view", "index", "shapes", "backward", "add"])
def test_a_mistake_gets_torch_s_own_message(pool2: WorkerPool, how: str) -> None:
    pool2.run(torch_s_own_errors, how)


def test_hugging_face_s_loss_functions(pool2: WorkerPool) -> None:
    pool2.run(through_hugging_face_s_losses)


@pytest.mark.parametrize("name", ["bert", "gpt2 double", "t5", "gemma2", "llama"])
def test_unmodified_models(pool2: WorkerPool, name: str) -> None:
    pool2.run(through_a_whole_model, name)


def test_generate(pool2: WorkerPool) -> None:
    pool2.run(generates)


def test_on_one_process_the_logits_are_the_plain_ones() -> None:
    x = torch.randn(2, 3)
    assert shard_logits(x, Axis("tensor"), [0, 3]) is x


def test_the_table_names_functions_that_torch_has() -> None:
    assert {torch.Tensor.view, torch.reshape, F.cross_entropy, torch.Tensor.shape.__get__} <= RULES.keys()
    assert all(callable(function) for function in RULES)
