"""``describe``: what became of a model, on a page that can be read."""

from __future__ import annotations

import doctest
import re

import pytest
from torch import nn

import shardformer
from shardformer.errors import ConfigError
from shardformer.policies.registry import FAMILIES
from shardformer.pool import WorkerPool
from shardformer.samples import SMALL, Sample
from shardformer.sharding import listing
from shardformer.sharding.record import Description
from tests.policies.toy import ToyLM, ToyPolicy


def _describe(family: str) -> tuple[str, Description]:
    model = shardformer.shard_model(Sample(family)(), enable_fused_normalization=True)
    description = shardformer.describe(model)
    return str(description), description


GPT2 = """
GPT2LMHeadModel over tensor=2, by the registered family 'gpt2'
on: tensor parallelism, fused normalization
42,140 parameters, 22,966 of them on this rank (54.5%)

cut              was        is                        full      on this rank
transformer.wte  Embedding  VocabParallelEmbedding1D  127 x 48  64 x 48
lm_head          Linear     VocabParallelLMHead1D     127 x 48  64 x 48
transformer.h.*: 2 layers
  attn.c_attn    Conv1D     Linear1D_Col              48 x 144  48 x 72
  attn.c_proj    Conv1D     Linear1D_Row              48 x 48   24 x 48
  mlp.c_fc       Conv1D     Linear1D_Col              48 x 70   48 x 35
  mlp.c_proj     Conv1D     Linear1D_Row              70 x 48   35 x 48

changed            was        is
transformer.ln_f   LayerNorm  FusedLayerNorm
transformer.h.*: 2 layers
  attn.split_size  48         24
  ln_1, ln_2       LayerNorm  FusedLayerNorm

whole on every rank              shape    8.9% of all
transformer.wpe: weight          64 x 48  7.3%
transformer.ln_f: weight, bias   48       0.2%
transformer.h.*: 2 layers
  ln_1, ln_2: weight, bias       48       0.9%
  attn.c_proj, mlp.c_proj: bias  48       0.5%

save_pretrained writes full weights; resize_token_embeddings is refused.
"""


def test_the_page_of_a_gpt2(pool2: WorkerPool) -> None:
    (first, _), (second, _) = pool2.run(_describe, "gpt2")
    assert first == GPT2.strip()
    # The second rank holds the smaller part of the odd vocabulary: 63 of 127.
    assert "127 x 48  63 x 48" in second


@pytest.mark.parametrize("family", [family for family in SMALL if family in FAMILIES])
def test_a_page_is_narrow_and_accounts_for_every_parameter(pool2: WorkerPool, family: str) -> None:
    text, description = pool2.run(_describe, family)[0]
    assert max(len(line) for line in text.splitlines()) <= 120
    model = Sample(family)()
    whole = sum(share for *_, share in description.whole)
    names = {n.removesuffix(".weight") for n, _ in model.named_parameters()}
    rows = [re.compile(re.escape(path).replace("\\*", r"\d+")) for path, *_ in description.rows]
    queries = [n for n in names if n.endswith(("q", "query", "q_proj"))]
    assert all(any(row.fullmatch(n) for row in rows) for n in queries)
    assert f"{whole:.1%} of all" in text
    total = sum(p.numel() for p in model.parameters())
    assert f"{total:,} parameters" in text


def _describe_toy() -> str:
    return str(shardformer.describe(shardformer.shard_model(ToyLM(), ToyPolicy)))


def test_a_model_of_ones_own_is_described_by_its_own_policy(pool2: WorkerPool) -> None:
    text = pool2.run(_describe_toy)[0]
    assert text.startswith("ToyLM over tensor=2, by the user's policy ToyPolicy\non: tensor parallelism\n")
    assert "save_pretrained" not in text
    assert re.search(r"attn\.q, k, v +Linear +Linear1D_Col +30 x 30 +18 x 30\n", text)
    assert re.search(r"attn\.num_heads +5 +3\n", text)


def test_layers_that_differ_are_counted() -> None:
    print_out = doctest.testmod(listing)
    assert print_out.attempted and not print_out.failed


def test_long_lists_of_names_go_on_in_the_next_line() -> None:
    parameters = [(f"h.*.block_{i}.norm.weight", "64", 2, 0.01) for i in range(9)]
    lines = listing.table(("whole", "shape", "share"), listing.whole_rows(parameters), {"h.*": 2})
    assert max(map(len, lines)) < 80
    assert lines[-1].endswith("block_8.norm: weight") and lines[2].endswith("64     9.0%")


@pytest.mark.parametrize("model", [ToyLM(), nn.Linear(2, 2)])
def test_a_model_that_is_not_sharded_has_no_page(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"is not sharded\..*Call shardformer.shard_model"):
        shardformer.describe(model)
