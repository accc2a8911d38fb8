"""Vocabulary-parallel logits under autograd, in Hugging Face losses and models, and unsupported uses."""

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

from shardformer.comm.recorder import CollectiveRecorder
from shardformer.errors import InputError
from shardformer.layout.shard_spec import get_even_split_bounds
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import Axis
from shardformer.tensor_parallel.vocab_parallel_logits import VocabParallelLogits, wrap_local_logits_as_full_logits
from tests.layers.vocab.vocab import SHAPE, B, S, V, make, own, plain_of, same

MASK = torch.arange(V) % 3 == 0
LABELS = torch.tensor([[0, 63, -100], [126, 64, 31]])

# ---------------------------------------------------------------------------------------------- functions that are sent


def grad_of(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


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
    same(grad_of(local), own(grad_of(plain)))
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
    same(grad_of(local) / 2, own(grad_of(plain)))
    other, _, again, _ = make()
    ours, theirs = (
        torch.autograd.grad(F.cross_entropy(x.view(-1, V), LABELS.view(-1)), [x])[0] for x in (again, other)
    )
    assert isinstance(ours, VocabParallelLogits)
    same(ours, theirs)


class Doubled(torch.autograd.Function):
    """A custom autograd function, which autograd calls with the wrapper."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp().sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grads[0].unsqueeze(-1) * x.exp()


class Head(nn.Module):
    """A head that has its full weight and computes the local columns."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        weight = torch.randn(V, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        self.weight, self.sharded = nn.Parameter(own(weight, 0).clone() if sharded else weight), sharded

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight.T
        return (
            wrap_local_logits_as_full_logits(out, Axis.of(None), get_even_split_bounds(V, Axis.of(None).size))
            if self.sharded
            else out
        )


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
        grads.append(grad_of(head.weight))
    same(grads[1], own(grads[0], 0))
    if seen:
        same(seen[1], seen[0])


def unnamed(function: Callable[..., Any], x: Tensor) -> Any:
    """Call an operation as C++ code does."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(x)


def refused(how: str) -> str:
    _, _, logits, _ = make()
    attempts: dict[str, Callable[[], Any]] = {
        "deepcopy": lambda: copy.deepcopy(logits),
        "copy": lambda: copy.copy(logits),
        "pickle": lambda: pickle.dumps(logits),
        "C++": lambda: unnamed(torch.exp, logits),
        "shape in place": lambda: logits.unsqueeze_(0),
        "write by data": lambda: setattr(logits, "data", torch.zeros(SHAPE)),
        "label": lambda: F.cross_entropy(logits.view(-1, V), torch.full((B * S,), V)),
    }
    try:
        attempts[how]()
    except InputError as error:
        return str(error)
    return "nothing was refused"


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
            torch.testing.assert_close(grad_of(local), own(grad_of(plain)), rtol=1e-2, atol=1e-5)


def tiny(name: str) -> tuple[nn.Module, str, dict[str, Tensor]]:
    """Return a Hugging Face model that computes its loss, the name of its head, and a batch with labels."""
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
    """Let the head return the local columns. The gradient below it is then one summand per rank."""

    def cut(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return wrap_local_logits_as_full_logits(own(out), axis, get_even_split_bounds(V, axis.size))

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
    with CollectiveRecorder(axis) as recorder:
        output = model(**batch)
    assert [call.purpose for call in recorder.calls] == ["loss"]
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)  # transformers casts to fp32
    logits = [x for x in output.values() if isinstance(x, VocabParallelLogits)]
    assert len(logits) == 1
    torch.testing.assert_close(logits[0].full_tensor(), next(x for x in expected.values() if x.shape[-1:] == (V,)))
    if "next_sentence_label" in batch or "mc_labels" in batch:
        return  # each rank has the full gradient of the other head, which the sum below would count twice
    output.loss.backward()
    for key, p in model.named_parameters():
        if key in grads:
            assert p.grad is not None
            dist.all_reduce(p.grad)
            torch.testing.assert_close(p.grad, grads[key], rtol=1e-5, atol=1e-8)


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


def samples_by_hand() -> None:
    plain, _, logits, _ = make()
    seen = []
    for x in (plain, logits):
        with torch.no_grad():
            last = x[:, -1, :]
            kept, _ = torch.topk(last, 5)
            last[last < kept[:, [-1]]] = -torch.inf
            seen.append(F.softmax(last, -1))
            seen.append(plain_of(x).clone())
    same(seen[2], seen[0])
    same(seen[3], seen[1])


# ---------------------------------------------------------------------------------------------------------------- tests


def test_hooks_and_kept_gradients_are_those_of_the_full_logits(pool2: WorkerPool) -> None:
    pool2.run(gradients_at_the_logits)


def test_backward_from_and_to_the_logits(pool2: WorkerPool) -> None:
    pool2.run(backward_from_the_logits)


@pytest.mark.parametrize(
    "how",
    [
        "full backward hook", "reentrant checkpoint", "non-reentrant checkpoint", "own function",
        "own function after a write",
    ],
)  # fmt: skip
def test_gradients_are_correct_if_autograd_copies_the_wrapper(pool2: WorkerPool, how: str) -> None:
    pool2.run(handed_on_by_autograd, how)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("deepcopy", "copy.deepcopy"),
        ("copy", "copy and pickle do not support"),
        ("pickle", "copy and pickle do not support"),
        ("C++", "aten.exp.default does not support"),
        ("shape in place", "changes the shape or dtype of vocabulary-parallel logits"),
        ("write by data", "Attributes and out= cannot be set"),
        ("label", "The label 127 is outside the vocabulary"),
    ],
)
def test_unsupported_uses_raise(pool2: WorkerPool, how: str, words: str) -> None:
    for message in pool2.run(refused, how):
        assert words in message
        assert how == "label" or "full_tensor()" in message


def test_hugging_face_loss_functions(pool2: WorkerPool) -> None:
    pool2.run(through_hugging_face_s_losses)


@pytest.mark.parametrize("name", ["bert", "gpt2 double", "t5", "gemma2", "llama"])
def test_unmodified_models_train_on_sharded_logits(pool2: WorkerPool, name: str) -> None:
    pool2.run(through_a_whole_model, name)


def test_generate_with_sharded_logits(pool2: WorkerPool) -> None:
    pool2.run(generates)


def test_sampling_that_writes_to_the_last_logits(pool2: WorkerPool) -> None:
    pool2.run(samples_by_hand)
