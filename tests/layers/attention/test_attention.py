"""Attention on fused kernels equals the model's own, saves no scores of the batch, and raises if unsupported."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardformer.errors import ConfigError
from shardformer.kernels import attention
from shardformer.kernels import attention as kernels
from shardformer.kernels.attention_registration import (
    ATTENTION_NAME,
    check_flash_attention_is_supported,
    use_flash_attention,
)

B, S, VOCAB, HEADS = 3, 7, 61, 4
CPU = torch.device("cpu")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS, "vocab_size": VOCAB}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def bert(p: float = 0.0) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**SIZES, intermediate_size=48, attention_probs_dropout_prob=p, hidden_dropout_prob=p)
    return BertForMaskedLM._from_config(config, attn_implementation="eager")


def gpt2(p: float = 0.0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=HEADS, vocab_size=VOCAB, attn_pdrop=p, resid_pdrop=p, embd_pdrop=p, **ends
    )
    return GPT2LMHeadModel._from_config(config, attn_implementation="eager")


def llama(p: float = 0.0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, attention_dropout=p)
    return LlamaForCausalLM._from_config(config, attn_implementation="eager")


def mistral(p: float = 0.0) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, sliding_window=3, attention_dropout=p)
    return MistralForCausalLM._from_config(config, attn_implementation="eager")


def deepseek(p: float = 0.0) -> Any:
    """A model whose keys are wider than its values."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    config = DeepseekV3Config(
        **SIZES, **latent, intermediate_size=48, num_key_value_heads=HEADS, first_k_dense_replace=2, attention_dropout=p
    )
    return DeepseekV3ForCausalLM._from_config(config, attn_implementation="eager")


def t5(p: float = 0.0) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=32, d_kv=8, num_heads=HEADS, num_layers=2, d_ff=48, vocab_size=VOCAB, dropout_rate=p)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration._from_config(config, attn_implementation="eager")


def swin(p: float = 0.0) -> Any:
    """A model whose mask contains trainable relative positions."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.0,
        attention_probs_dropout_prob=p,
        num_labels=5,
    )
    return SwinForImageClassification._from_config(config, attn_implementation="eager")


TEXT: dict[str, Callable[..., Any]] = {
    "bert": bert,
    "gpt2": gpt2,
    "llama": llama,
    "mistral": mistral,
    "deepseek": deepseek,
    "t5": t5,
}
FAMILIES = {**TEXT, "swin": swin}
# these compute softmax or norms in fp32 whatever comes
CASTS_TO_FP32 = ("llama", "mistral", "deepseek", "t5", "swin")


def batch(name: str, dtype: torch.dtype = torch.float32, padded: bool = True) -> dict[str, Tensor]:
    if name == "swin":
        return {"pixel_values": torch.randn(B, 3, 16, 16, dtype=dtype), "labels": torch.randint(5, (B,))}
    mask = torch.ones(B, S, dtype=torch.long)
    if padded:
        mask[0, 5:] = mask[2, 6:] = 0
    labels = torch.randint(VOCAB, (B, S)).masked_fill(mask == 0, -100)
    return {"input_ids": torch.randint(VOCAB, (B, S)), "attention_mask": mask, "labels": labels}


def loss_and_grads(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss: Tensor = model(**inputs).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(model: Any, inputs: dict[str, Tensor], name: str) -> None:
    eager = copy.deepcopy(model)
    use_flash_attention(model, CPU)
    (loss, grads), (ref, ref_grads) = loss_and_grads(model, inputs), loss_and_grads(eager, inputs)
    fp64 = ref.dtype == torch.float64 and name not in CASTS_TO_FP32
    torch.testing.assert_close(loss, ref, rtol=1e-10 if fp64 else 1e-6, atol=0)
    assert grads.keys() == ref_grads.keys()
    for key, grad in grads.items():
        # a key's bias has no gradient but noise, as large as that of its weight
        noise = 1e-15 if fp64 else 2e-7
        torch.testing.assert_close(grad, ref_grads[key], rtol=1e-9 if fp64 else 1e-4, atol=noise, msg=key)


class Ops(TorchDispatchMode):
    """Records the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives its bases no types
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients_equal_eager_attention_with_padding(name: str, dtype: torch.dtype) -> None:
    assert_same(FAMILIES[name]().to(dtype).train(), batch(name, dtype), name)


@pytest.mark.parametrize("name", TEXT)
def test_values_and_gradients_equal_eager_attention_without_padding(name: str) -> None:
    inputs = batch(name, padded=False)
    del inputs["attention_mask"]
    assert_same(TEXT[name]().train(), inputs, name)


def test_left_padding_equals_the_default_of_transformers() -> None:
    """For queries without a visible key, torch's attention returns zeros and transformers' eager attention the mean."""
    model = llama().train()
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    use_flash_attention(model, CPU)
    inputs = batch("llama", padded=False)
    inputs["attention_mask"][0, :3] = 0
    (loss, grads), (ref, ref_grads) = loss_and_grads(model, inputs), loss_and_grads(plain, inputs)
    torch.testing.assert_close(loss, ref)
    for key, grad in grads.items():
        torch.testing.assert_close(grad, ref_grads[key], msg=key)


@pytest.mark.parametrize("name", FAMILIES)
def test_forward_runs_only_the_flash_kernel(name: str) -> None:
    model = FAMILIES[name]()
    use_flash_attention(model, CPU)
    with torch.no_grad(), Ops() as ops:
        model(**batch(name))
    assert FLASH in ops.names
    assert "_softmax" not in ops.names and "_safe_softmax" not in ops.names
    assert all(n in ops.names for n in ["_log_softmax", "nll_loss_forward"])  # the mode records all other operations


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_backward_runs_the_flash_kernel(name: str) -> None:
    model = TEXT[name]()
    use_flash_attention(model, CPU)
    loss = model(**batch(name)).loss
    with Ops() as ops:
        loss.backward()
    assert f"{FLASH}_backward" in ops.names and "_softmax_backward_data" not in ops.names


@pytest.mark.parametrize("name", TEXT)
def test_scores_of_the_batch_are_not_saved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SCORES_AT_ONCE", 0)  # this batch is so small that all would be
    model = TEXT[name]()
    use_flash_attention(model, CPU)
    largest = 0

    def keep(t: Tensor) -> Tensor:
        nonlocal largest
        if t.is_floating_point() and t.shape[-2:] == (S, S):
            largest = max(largest, t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(**batch(name)).loss.backward()
    assert largest <= HEADS * S * S  # T5's bias, which all sequences share


def test_t5_bias_gets_a_gradient() -> None:
    model = t5()
    described = use_flash_attention(model, CPU)
    _, grads = loss_and_grads(model, batch("t5"))
    tables = [g for n, g in grads.items() if "relative_attention_bias" in n]
    assert len(tables) == 2 and all(g.abs().max() > 0 for g in tables)
    assert "chunked backward" in described


def test_bf16_gradients_are_within_rounding_error() -> None:
    for name in ("llama", "t5"):
        model = TEXT[name]().bfloat16()
        exact = copy.deepcopy(model).float()
        use_flash_attention(model, CPU)
        inputs = batch(name)
        torch.testing.assert_close(model(**inputs).loss.float(), exact(**inputs).loss, rtol=2e-2, atol=0)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_autocast_and_checkpointing_give_the_same_gradients(name: str) -> None:
    model = TEXT[name]()
    inputs = batch(name)
    use_flash_attention(model, CPU)
    _, ref = loss_and_grads(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        _, low = loss_and_grads(model, inputs)
    error = sum(float((low[k] - g).norm() ** 2) for k, g in ref.items()) ** 0.5
    assert error < 3e-2 * sum(float(g.norm() ** 2) for g in ref.values()) ** 0.5
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    _, again = loss_and_grads(model, inputs)
    for key, grad in ref.items():
        torch.testing.assert_close(again[key], grad, rtol=1e-5, atol=1e-8, msg=key)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_with_a_cache_gives_the_same_tokens(name: str) -> None:
    model = TEXT[name]().eval()
    prompt = torch.randint(1, VOCAB, (2, 4))
    arguments: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ref = model.generate(prompt, attention_mask=torch.ones_like(prompt), **arguments)
    use_flash_attention(model, CPU)
    assert torch.equal(model.generate(prompt, attention_mask=torch.ones_like(prompt), **arguments), ref)


def test_use_flash_attention_is_idempotent_and_not_saved() -> None:
    model = t5()
    assert use_flash_attention(model, CPU) == use_flash_attention(model, CPU)
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    assert len(configs) == 3 and all(c._attn_implementation == ATTENTION_NAME for c in configs)
    assert ATTENTION_NAME not in model.config.to_json_string(use_diff=False)
    inputs = batch("t5")
    torch.testing.assert_close(copy.deepcopy(model)(**inputs).loss, model(**inputs).loss)


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("bert", "attention_probs_dropout_prob"),
        ("gpt2", "attn_pdrop"),
        ("llama", "attention_dropout"),
        ("t5", "dropout_rate"),
        ("swin", "attention_probs_dropout_prob"),
    ],
)
def test_attention_dropout_on_the_cpu_raises_before_training(name: str, setting: str) -> None:
    model = FAMILIES[name](0.1)
    with pytest.raises(ConfigError, match=f"{setting}=0.0"):
        use_flash_attention(model.eval(), CPU)
    assert model.config._attn_implementation == "eager"
    check_flash_attention_is_supported(model, torch.device("cuda"))


def test_attention_dropout_set_later_raises_at_the_call() -> None:
    model = gpt2().train()
    use_flash_attention(model, CPU)
    model.transformer.h[0].attn.attn_dropout.p = 0.2
    with pytest.raises(ConfigError, match=r"dropout=0\.2"):
        model(**batch("gpt2"))
    model.eval()(**batch("gpt2"))


def test_models_with_custom_attention_raise_with_the_class() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM, MptConfig, MptForCausalLM

    with pytest.raises(ConfigError, match="computes attention in MptAttention"):
        use_flash_attention(MptForCausalLM(MptConfig(d_model=32, n_layers=1, n_heads=4, vocab_size=VOCAB)), CPU)
    with pytest.raises(ConfigError, match="no attention module that uses transformers' AttentionInterface"):
        use_flash_attention(nn.Linear(2, 2), CPU)
    sinks = GptOssConfig(
        **SIZES, intermediate_size=48, num_key_value_heads=2, head_dim=8, num_local_experts=2, pad_token_id=0
    )
    with pytest.raises(ConfigError, match="_supports_sdpa=False"):
        use_flash_attention(GptOssForCausalLM(sinks), CPU)


def test_output_attentions_raises() -> None:
    model = bert()
    model.config.output_attentions = True
    with pytest.raises(ConfigError, match="output_attentions=True"):
        use_flash_attention(model, CPU)
    model.config.output_attentions = False
    use_flash_attention(model, CPU)
    q, k, v = torch.randn(3, 1, 2, 3, 4)
    with pytest.raises(ConfigError, match="output_attentions"):
        attention.attention(model, q, k, v, None, output_attentions=True)


def test_fp64_on_cuda_raises() -> None:
    with pytest.raises(ConfigError, match="float64"):
        check_flash_attention_is_supported(llama().double(), torch.device("cuda"))


def test_unsupported_arguments_raise_with_the_reasons_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_check_attention_call", lambda *_: None)
    q, k, v = torch.randn(3, 1, 2, 3, 4)
    with pytest.raises(ConfigError, match="non-zero dropout"):
        attention.attention(nn.Module(), q, k, v, None, dropout=0.5)


# -- the function alone -----------------------------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor, added: Tensor | float = 0.0) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    weights = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + added).softmax(-1)
    out: Tensor = weights @ v
    return out.transpose(1, 2)


def heads(n: int = HEADS, length: int = S, width: int = 8) -> Tensor:
    return torch.randn(B, n, length, width, dtype=torch.float64, requires_grad=True)


CASES: dict[str, Callable[[], tuple[Tensor, Tensor, Tensor]]] = {
    "values narrower": lambda: (heads(), heads(), heads(width=6)),
    "values wider": lambda: (heads(), heads(), heads(width=10)),
    "grouped heads": lambda: (heads(), heads(1), heads(1)),
    "strided": lambda: (heads().mT.contiguous().mT, heads(), heads()),
    "one query for all": lambda: (heads()[:1], heads(), heads()),
    "one token": lambda: (heads(length=1), heads(), heads()),
}


def assert_same_grads(out: Tensor, ref: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(out, ref)
    grad = torch.randn_like(ref)
    for a, b in zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(ref, inputs, grad), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("case", CASES)
def test_shapes_that_need_padding_or_expansion(case: str) -> None:
    q, k, v = CASES[case]()
    out, weights = attention.attention(nn.Module(), q, k, v, None, is_causal=False)
    assert weights is None and out.is_contiguous()
    assert_same_grads(out, plain(q, k, v), [q, k, v])


def test_causal_queries_ignore_the_unused_end_of_a_cache() -> None:
    q, k, v = heads(length=3), heads(), heads()
    later = torch.full((3, S), float("-inf"), dtype=q.dtype).triu(1)
    assert_same_grads(attention.attention(nn.Module(), q, k, v, None)[0], plain(q, k, v, later), [q, k, v])


@pytest.mark.parametrize("kind", ["none", "causal", "bool of each", "float of each", "bias of each"])
def test_position_bias_gradient_equals_the_reference(kind: str) -> None:
    q, k, v = heads(), heads(2), heads(2)
    bias = torch.randn(B if kind == "bias of each" else 1, HEADS, S, S, dtype=torch.float64, requires_grad=True)
    seen = torch.ones(S, S, dtype=torch.bool)
    mask = None
    if kind == "causal":
        seen = seen.tril()
    elif kind != "none":
        seen = torch.rand(B, 1, 1, S) > 0.3
        seen[..., 0] = True
        mask = seen if kind == "bool of each" else torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -1e30)
    out, _ = attention.attention(nn.Module(), q, k, v, mask, is_causal=kind == "causal", position_bias=bias)
    ref = plain(q, k, v, bias + torch.zeros((), dtype=q.dtype).expand(seen.shape).masked_fill(~seen, float("-inf")))
    assert_same_grads(out, ref, [q, k, v, bias])


# -- CUDA, as far as a machine without one can tell ------------------------------------------------------------------


@pytest.fixture
def flash_attn_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A fake flash-attn package that records its calls and computes with torch."""
    calls: list[dict[str, Any]] = []

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool
    ) -> Tensor:
        calls.append({"q": q.shape, "k": k.shape, "dropout": dropout_p, "causal": causal})
        arguments: dict[str, Any] = {"is_causal": causal, "scale": softmax_scale, "enable_gqa": True}
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, **arguments).transpose(1, 2)

    package = types.ModuleType("flash_attn")
    vars(package)["flash_attn_func"] = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    attention.get_flash_attn_func.cache_clear()
    yield calls
    attention.get_flash_attn_func.cache_clear()


class OnCuda(Tensor):
    """A CPU tensor that reports to be on CUDA."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]  # the stub lets it be written
        return True


def test_flash_attn_runs_for_16_bits_without_a_mask(flash_attn_package: list[dict[str, Any]]) -> None:
    q, k, v = (t.detach().bfloat16() for t in (heads(), heads(2), heads(2)))
    module = nn.Module()
    out, _ = attention.attention(module, q.as_subclass(OnCuda), k, v, None, is_causal=True)
    assert flash_attn_package == [{"q": (B, S, HEADS, 8), "k": (B, S, 2, 8), "dropout": 0.0, "causal": True}]
    torch.testing.assert_close(out.as_subclass(Tensor), attention.attention(module, q, k, v, None, is_causal=True)[0])
    assert "flash-attn" in use_flash_attention(llama(), torch.device("cuda"))


@pytest.mark.parametrize("what", ["mask", "fp32", "bias", "wide"])
def test_flash_attn_is_not_used_for_unsupported_arguments(what: str, flash_attn_package: list[dict[str, Any]]) -> None:
    q, k, v = (heads(width=512 if what == "wide" else 8).detach().bfloat16() for _ in range(3))
    if what == "fp32":
        q, k, v = q.float(), k.float(), v.float()
    mask = torch.ones(B, 1, S, S, dtype=torch.bool) if what == "mask" else None
    bias = torch.zeros(1, HEADS, S, S, dtype=torch.bfloat16) if what == "bias" else None
    attention.attention(nn.Module(), q.as_subclass(OnCuda), k, v, mask, position_bias=bias)
    assert flash_attn_package == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", TEXT)
def test_values_and_gradients_on_cuda(name: str, dtype: torch.dtype) -> None:
    model = TEXT[name]().cuda().to(dtype)
    exact = copy.deepcopy(model).float()
    use_flash_attention(model, torch.device("cuda"))
    inputs = {k: v.cuda() for k, v in batch(name).items()}
    (loss, grads), (ref, ref_grads) = loss_and_grads(model, inputs), loss_and_grads(exact, inputs)
    bound = 2e-3 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(loss.float(), ref, rtol=bound, atol=0)
    error = sum(float((grads[k].float() - g).norm() ** 2) for k, g in ref_grads.items()) ** 0.5
    assert error < bound * sum(float(g.norm() ** 2) for g in ref_grads.values()) ** 0.5
