"""Legacy policies, and the legacy run command."""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import shardformer
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.policies.legacy import Argument, Col_Layer, Layer, Row_Layer
from shardformer.policies.policy import Policy
from shardformer.tensor_parallel.layers import Linear1D_Col, Linear1D_Row, VocabParallelEmbedding1D
from shardformer.verify.small_models import SmallModelFactory
from tests.policies.toy import ToyLM, check_sample, toy_batch, toy_loss
from tests.scripts import SHARDFORMER


class FirstBert(Policy):
    """A legacy policy with explicit classes."""

    @staticmethod
    def argument_policy(model_config: Any, shard_config: int) -> dict[Any, Argument]:
        from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer, BertLMPredictionHead

        heads = model_config.num_attention_heads // shard_config
        return {
            BertLayer: Argument(
                attr_dict={
                    "attention.self.all_head_size": model_config.hidden_size // shard_config,
                    "attention.self.num_attention_heads": heads,
                },
                param_funcs=[FirstBert.attn_in, FirstBert.attn_out, FirstBert.mlp_in, FirstBert.mlp_out],
            ),
            BertEmbeddings: Argument(attr_dict={}, param_funcs=[FirstBert.embedding]),
            BertLMPredictionHead: Argument(attr_dict={}, param_funcs=[FirstBert.unembedding]),
        }

    @staticmethod
    def binding_policy() -> dict[str, str] | None:
        return {"bert.embeddings.word_embeddings.weight": "cls.predictions.decoder.weight"}

    @staticmethod
    def attn_in() -> list[Layer]:
        names = [f"attention.self.{n}" for n in ("query", "key", "value")]
        layers = [Col_Layer(weight=f"{n}.weight", bias=f"{n}.bias", replace_layer=Linear1D_Col) for n in names]
        return [*layers, Col_Layer(weight="crossattention.self.query.weight", ignore=True)]

    @staticmethod
    def attn_out() -> list[Layer]:
        return [Row_Layer(weight="attention.output.dense.weight", bias="attention.output.dense.bias")]

    @staticmethod
    def mlp_in() -> list[Layer]:
        return [Col_Layer(weight="intermediate.dense.weight", bias="intermediate.dense.bias")]

    @staticmethod
    def mlp_out() -> list[Layer]:
        return [Row_Layer(weight="output.dense.weight", bias="output.dense.bias", replace_layer=Linear1D_Row)]

    @staticmethod
    def embedding() -> list[Layer]:
        return [Col_Layer(weight="word_embeddings.weight", replace_layer=VocabParallelEmbedding1D)]

    @staticmethod
    def unembedding() -> list[Layer]:
        return [Col_Layer(weight="decoder.weight", bias="decoder.bias", gather_output=True)]


class FirstBertDefaults(FirstBert):
    """A legacy policy that names no classes, keeps the logits sharded, and returns exceptions from unused functions."""

    @staticmethod
    def argument_policy(model_config: Any, shard_config: int) -> dict[Any, Argument]:
        out = FirstBert.argument_policy(model_config, shard_config)
        embeddings, head = list(out)[1:]
        own = FirstBertDefaults
        out[embeddings], out[head] = Argument({}, [own.embedding]), Argument({}, [own.unembedding])
        return out

    @staticmethod
    def embedding() -> list[Layer]:
        return [Col_Layer(weight="word_embeddings.weight")]

    @staticmethod
    def unembedding() -> list[Layer]:
        return [Col_Layer(weight="decoder.weight", bias="decoder.bias")]

    @staticmethod
    def binding_policy() -> Any:
        return NotImplementedError

    @staticmethod
    def inject_policy() -> Any:
        return None


class FirstGPT2(Policy):
    @staticmethod
    def argument_policy(model_config: Any, shard_config: int) -> dict[Any, Argument]:
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2LMHeadModel

        return {
            GPT2Block: Argument(
                attr_dict={"attn.split_size": model_config.hidden_size // shard_config},
                param_funcs=[FirstGPT2.attn_in, FirstGPT2.attn_out, FirstGPT2.mlp_in, FirstGPT2.mlp_out],
            ),
            GPT2LMHeadModel: Argument(param_funcs=[FirstGPT2.embedding, FirstGPT2.unembedding]),
        }

    @staticmethod
    def attn_in() -> list[Layer]:
        return [Col_Layer(weight="attn.c_attn.weight", bias="attn.c_attn.bias", n_cast=3, replace_layer=Linear1D_Col)]

    @staticmethod
    def attn_out() -> list[Layer]:
        return [Row_Layer(weight="attn.c_proj.weight", bias="attn.c_proj.bias")]

    @staticmethod
    def mlp_in() -> list[Layer]:
        return [Col_Layer(weight="mlp.c_fc.weight", bias="mlp.c_fc.bias")]

    @staticmethod
    def mlp_out() -> list[Layer]:
        return [Row_Layer(weight="mlp.c_proj.weight", bias="mlp.c_proj.bias")]

    @staticmethod
    def embedding() -> list[Layer]:
        return [Col_Layer(weight="transformer.wte.weight")]

    @staticmethod
    def unembedding() -> list[Layer]:
        return [Col_Layer(weight="lm_head.weight")]


@pytest.mark.parametrize("policy", [FirstBert, FirstBertDefaults])
def test_bert_trains_with_a_legacy_policy(pool2: WorkerPool, policy: type[Policy]) -> None:
    check_sample(SmallModelFactory("bert"), policy, pool2)


def test_gpt2_trains_with_a_legacy_policy(pool2: WorkerPool) -> None:
    check_sample(SmallModelFactory("gpt2"), FirstGPT2, pool2)


class Bound(Policy):
    """Shards an untied embedding and head, and ties them."""

    @staticmethod
    def argument_policy(model_config: Any, shard_config: int) -> dict[Any, Argument]:
        return {ToyLM: Argument(param_funcs=[Bound.embedding, Bound.unembedding])}

    @staticmethod
    def embedding() -> list[Layer]:
        return [Col_Layer(weight="embed.weight")]

    @staticmethod
    def unembedding() -> list[Layer]:
        return [Col_Layer(weight="head.weight")]

    @staticmethod
    def binding_policy() -> dict[str, str] | None:
        return {"embed.weight": "head.weight"}

    @staticmethod
    def inject_policy() -> tuple[Any, ...]:
        return (ToyLM, LoudToyLM)


class LoudToyLM(ToyLM):
    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward(ids)


def _bound() -> tuple[bool, str, float, str]:
    plain, quiet = LoudToyLM(tied=True), ToyLM()
    quiet.load_state_dict(plain.state_dict())
    model: Any = shardformer.shard_model(quiet, Bound)
    batch = toy_batch(0)
    difference = (toy_loss(plain, batch) - toy_loss(model, batch)).detach()
    return (
        model.head.weight is model.embed.weight,
        type(model).__name__,
        abs(float(difference)),
        str(shardformer.describe_sharding(model)),
    )


def test_binding_policy_ties_weights_and_inject_policy_sets_the_class(pool2: WorkerPool) -> None:
    for tied, name, difference, text in pool2.run(_bound):
        assert tied and name == "LoudToyLM" and difference < 2e-5
        assert "tied to embed.weight" in text and "LoudToyLM" in text


def test_default_functions_return_nothing() -> None:
    names = ("attn_in", "attn_out", "mlp_in", "mlp_out", "embedding", "unembedding")
    assert [getattr(Policy, name)() for name in names] == [[]] * 6
    assert not Policy.binding_policy() and not Policy.inject_policy()


SCRIPT = """
    import argparse

    import torch
    from transformers import BertConfig, BertForMaskedLM

    import shardformer
    from shardformer import shard_model

    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--mode", choices=["train", "inference"])
    args = parser.parse_args()
    context = shardformer.launch_from_torch(config=args.config)

    config = BertConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                        intermediate_size=48, max_position_embeddings=32)
    model = BertForMaskedLM(config)
    sharded_model = shard_model(model)
    ids = torch.arange(12).view(2, 6)
    if args.mode == "train":
        optimizer = torch.optim.SGD(sharded_model.parameters(), lr=0.1)
        for _ in range(2):
            loss = sharded_model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
        print(f"trained on {context.tensor}: {loss.item():.4f}\\n", end="")
    else:
        with torch.no_grad():
            best = sharded_model.eval()(input_ids=ids).logits.argmax(-1)
        print(f"{context.tensor} says {best.shape[0]} x {best.shape[1]}\\n", end="")
"""


@pytest.mark.reduced(at_most=1)
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "inference"])
def test_legacy_run_command_works(tmp_path: Path, mode: str) -> None:
    (tmp_path / "test.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "config.py").write_text("parallel = dict(tensor=dict(size=2, mode='1d'))\nseed = 5\n")
    command = ["run", "--nproc_per_node", "2", "test.py", "--config", "config.py", "--mode", mode]
    main = [*SHARDFORMER, *command]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PET_")}
    done = subprocess.run(main, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    if mode == "train":
        assert [re.sub(r"[\d.]+$", "", line) for line in lines] == [f"trained on tensor {r}/2: " for r in (0, 1)]
        assert lines[0].split()[-1] == lines[1].split()[-1]
    else:
        assert lines == [f"tensor {r}/2 says 2 x 6" for r in (0, 1)]
