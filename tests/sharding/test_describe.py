"""``describe_sharding`` reports the changes to a model."""

from __future__ import annotations

import doctest
import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import shardformer
from shardformer.config import ShardConfig
from shardformer.errors import ConfigError
from shardformer.layout.shard_spec import ShardSpec, Split
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import Axis, ParallelContext
from shardformer.pipeline.stage_manager import PipelineStageManager
from shardformer.policies.module_descriptions import ModulePolicyDescription, SubModuleReplacementDescription
from shardformer.policies.policy import FAMILIES, Policy
from shardformer.sharding import describe
from shardformer.sharding import describe as listing
from shardformer.sharding import describe as stage_table
from shardformer.sharding.describe import PipelineStageRow, ShardingDescription
from shardformer.tensor_parallel.parallel_module import ParallelModule
from shardformer.verify.small_models import SMALL_CONFIGS, SmallModelFactory
from tests.policies.toy import ToyLM, ToyPolicy


def _describe(family: str) -> tuple[str, ShardingDescription]:
    model = shardformer.shard_model(SmallModelFactory(family)(), enable_fused_normalization=True)
    description = shardformer.describe_sharding(model)
    return str(description), description


GPT2 = """
GPT2LMHeadModel over tensor=2, by the registered family 'gpt2'
on: tensor parallelism, fused normalization
42,140 parameters, 22,966 of them on this rank (54.5%)

sharded          before     after                     full      on this rank
transformer.wte  Embedding  VocabParallelEmbedding1D  127 x 48  64 x 48
lm_head          Linear     VocabParallelLMHead1D     127 x 48  64 x 48
transformer.h.*: 2 layers
  attn.c_attn    Conv1D     Linear1D_Col              48 x 144  48 x 72
  attn.c_proj    Conv1D     Linear1D_Row              48 x 48   24 x 48
  mlp.c_fc       Conv1D     Linear1D_Col              48 x 70   48 x 35
  mlp.c_proj     Conv1D     Linear1D_Row              70 x 48   35 x 48

changed            before     after
transformer.ln_f   LayerNorm  FusedLayerNorm
transformer.h.*: 2 layers
  attn.split_size  48         24
  ln_1, ln_2       LayerNorm  FusedLayerNorm

replicated on every rank         shape    8.9% of all
transformer.wpe: weight          64 x 48  7.3%
transformer.ln_f: weight, bias   48       0.2%
transformer.h.*: 2 layers
  ln_1, ln_2: weight, bias       48       0.9%
  attn.c_proj, mlp.c_proj: bias  48       0.5%

save_pretrained writes full weights. resize_token_embeddings is not supported.
"""


def test_description_of_gpt2(pool2: WorkerPool) -> None:
    (first, _), (second, _) = pool2.run(_describe, "gpt2")
    assert first == GPT2.strip()
    # The second rank holds the smaller part of the odd vocabulary: 63 of 127.
    assert "127 x 48  63 x 48" in second


@pytest.mark.reduced(family=("llama", "gpt2", "bert", "t5"))
@pytest.mark.parametrize("family", [family for family in SMALL_CONFIGS if family in FAMILIES])
def test_description_is_narrow_and_counts_every_parameter(pool2: WorkerPool, family: str) -> None:
    text, description = pool2.run(_describe, family)[0]
    assert max(len(line) for line in text.splitlines()) <= 120
    model = SmallModelFactory(family)()
    whole = sum(share for *_, share in description.whole)
    names = {n.removesuffix(".weight") for n, _ in model.named_parameters()}
    rows = [re.compile(re.escape(path).replace("\\*", r"\d+")) for path, *_ in description.rows]
    queries = [n for n in names if n.endswith(("q", "query", "q_proj"))]
    assert all(any(row.fullmatch(n) for row in rows) for n in queries)
    assert f"{whole:.1%} of all" in text
    total = sum(p.numel() for p in model.parameters())
    assert f"{total:,} parameters" in text


def _describe_toy() -> str:
    return str(shardformer.describe_sharding(shardformer.shard_model(ToyLM(), ToyPolicy)))


def test_custom_model_is_described_by_its_policy(pool2: WorkerPool) -> None:
    text = pool2.run(_describe_toy)[0]
    assert text.startswith("ToyLM over tensor=2, by the user's policy ToyPolicy\non: tensor parallelism\n")
    assert "save_pretrained" not in text
    assert re.search(r"attn\.q, k, v +Linear +Linear1D_Col +30 x 30 +18 x 30\n", text)
    assert re.search(r"attn\.num_heads +5 +3\n", text)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.ones(10, 4)) for _ in range(2))
        self.bias, self.scale = nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(3))


class ParallelGated(ParallelModule):
    @classmethod
    def from_native_module(cls, module: Any, process_group: Any = None, **kwargs: Any) -> nn.Module:
        new = cls(Axis.of(process_group))
        split = Split.even(10, new.axis.size, axes=(new.axis.name,))
        for name, p in module.named_parameters():
            new.register_shard(name, p, ShardSpec(p.shape, {} if name == "scale" else {0: split}))
        return new


class GatedPolicy(Policy):
    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        sub = SubModuleReplacementDescription(suffix="gated", target_module=ParallelGated)
        return {"Sequential": ModulePolicyDescription(sub_module_replacement=[sub])}


def test_every_sharded_parameter_of_a_user_defined_layer_is_listed() -> None:
    def text(context: ParallelContext) -> str:
        model = nn.Sequential(OrderedDict(gated=Gated()))
        return str(shardformer.describe_sharding(shardformer.shard_model(model, GatedPolicy, context=context)))

    described = run_as_threads(text, tensor=3)[0]
    assert "gated.gate, up  Gated   ParallelGated  10 x 4  4 x 4\n" in described
    assert "gated: scale" in described


def test_differing_layers_are_counted() -> None:
    print_out = doctest.testmod(listing)
    assert print_out.attempted and not print_out.failed


def test_long_lists_of_names_are_wrapped() -> None:
    parameters = [(f"h.*.block_{i}.norm.weight", "64", 2, 0.01) for i in range(9)]
    lines = describe.format_table(
        ("whole", "shape", "share"), describe.make_replicated_parameter_rows(parameters), {"h.*": 2}
    )
    assert max(map(len, lines)) < 80
    assert lines[-1].endswith("block_8.norm: weight") and lines[2].endswith("64     9.0%")


@pytest.mark.parametrize("model", [ToyLM(), nn.Linear(2, 2)])
def test_unsharded_model_has_no_description(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"is not sharded\..*Call shardformer.shard_model"):
        shardformer.describe_sharding(model)


# --- the stages of a pipeline


STAGES = """
GPT2LMHeadModel over pipe=2, tensor=2, by the registered family 'gpt2'
on: tensor parallelism
75,016 parameters, 22,870 of them on this rank (30.5%)

stage  virtual  layers              other modules                     parameters  share   cost  recomputed
0      0, 2     transformer.h.0, 2  transformer.wte, transformer.wpe      42,044  56.0%  45.6%           2
1      1, 3     transformer.h.1, 3  transformer.ln_f, lm_head             39,068  52.1%  54.4%           2

schedule interleaved: with stages of equal cost, a stage is idle 11% of the time with 4 micro-batches and 3% with
16. The stages keep the activations of 5, 3 micro-batches, each in one virtual stage.
Stages 0 and 1 share transformer.wte.weight (lm_head.weight) and sum the gradients.

sharded          before     after                     full      on this rank
transformer.wte  Embedding  VocabParallelEmbedding1D  127 x 48  64 x 48
transformer.h.*: 2 layers
  attn.c_attn    Conv1D     Linear1D_Col              48 x 144  48 x 72
"""


def _describe_stages(
    family: str, schedule: str = "1f1b", head: str = "", tensor: int = 1, **stages: object
) -> tuple[str, list[PipelineStageRow], dict[str, int], int]:
    context = ParallelContext.from_default_process_group({"tensor": tensor, "pipe": 2, "data": 1})
    manager = PipelineStageManager(context, schedule, **stages)  # type: ignore[arg-type]  # options by name
    config = ShardConfig(pipeline_stage_manager=manager)
    model = shardformer.compat.ShardFormer(config).optimize(SmallModelFactory(family, head).with_min_layers(4)())[0]
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    description = shardformer.describe_sharding(model)
    return str(description), description.stages, sizes, sum(sizes.values())


def test_description_of_pipeline_stages(pool4: WorkerPool) -> None:
    pages = pool4.run(_describe_stages, "gpt2", "interleaved", tensor=2, recompute_layers=1)
    assert pages[0][0].startswith(STAGES.strip())
    assert all(page[1] == pages[0][1] for page in pages)
    assert "lm_head" in pages[2][0] and "on this rank (26.5%)" in pages[2][0]


@pytest.mark.parametrize("family", ["llama", "t5", "albert", "bert", "blip-2", "swin"])
def test_stage_rows_match_the_parameters_of_each_stage(pool2: WorkerPool, family: str) -> None:
    pages = pool2.run(_describe_stages, family)
    total = sum(p.numel() for p in SmallModelFactory(family).with_min_layers(4)().parameters())
    for stage, (text, rows, _, here) in enumerate(pages):
        row = rows[stage]
        assert (row.stage, row.virtual_stages, row.parameters) == (stage, (stage,), here)
        assert f"{total:,} parameters, {here:,} of them on this rank ({here / total:.1%})" in text
        assert max(len(line) for line in text.splitlines()) <= 120
        assert row.share == pytest.approx(here / total) and row.checkpointed == 0 and "recomputed" not in text
    assert sum(row.cost for row in rows) == pytest.approx(1)
    both = pages[0][2].keys() & pages[1][2].keys()
    assert ("Stages 0 and 1 share" in " ".join(pages[0][0].split())) == (sum(row.parameters for row in rows) > total)
    assert all(name.rpartition(".")[0] in pages[0][0] or "layer_groups" in name for name in both)


def test_layers_are_abbreviated_to_ranges_and_calls_to_counts(pool2: WorkerPool) -> None:
    assert "model.layers.0-1  model.embed_tokens" in pool2.run(_describe_stages, "llama")[1][0]
    page = pool2.run(_describe_stages, "albert")[0][0]
    assert "albert_layer_groups.0 (2 times)" in page
    words = " ".join(page.split())
    assert "all of albert.embeddings.word_embeddings, albert.encoder.albert_layer_groups, " in words


def test_shared_parameters_are_listed_after_the_stages() -> None:
    print_out = doctest.testmod(stage_table)
    assert print_out.attempted and not print_out.failed
