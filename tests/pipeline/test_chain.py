"""The layer sequence: execution order, and the parameters that belong to each layer."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from shardformer.config import ShardConfig
from shardformer.errors import ConfigError
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.pipeline.layer_sequence import (
    LayerRange,
    LayerSequence,
    LayerStackDescription,
    map_tensor_names_to_stages,
    map_tensors_to_layers,
)
from shardformer.pipeline.stage_forward import ParameterPlaceholders, StageForward, StageForwardState
from shardformer.shard_model_api import resolve_policy_and_origin
from shardformer.verify.small_models import RandomBatchFactory, SmallModelFactory


def chain_of(sample: SmallModelFactory) -> tuple[nn.Module, LayerSequence]:
    model = sample()
    policy, _ = resolve_policy_and_origin(model, None)
    policy.set_model(model)
    policy.set_shard_config(ShardConfig(context=ParallelContext.from_sizes({"tensor": 1})))
    return model, policy.layer_sequence()


def home_of(sample: SmallModelFactory) -> dict[str, frozenset[int]]:
    return map_tensors_to_layers(*chain_of(sample))


def test_layer_calls_are_in_execution_order() -> None:
    _, chain = chain_of(SmallModelFactory("whisper"))
    assert [unit.split(".")[-3] for unit in chain.called_layer_paths] == ["encoder", "encoder", "decoder", "decoder"]
    assert chain.stack_start_indices == (0, 2)
    _, albert = chain_of(SmallModelFactory("albert", changes={"num_hidden_layers": 5, "num_hidden_groups": 2}))
    assert [unit[-1] for unit in albert.called_layer_paths] == list("00011"), (
        "groups of the five layers, as the model calls them"
    )


def test_received_states_depend_on_first_layer_of_stage() -> None:
    _, chain = chain_of(SmallModelFactory("t5"))
    assert [chain.get_received_activation_names(unit) for unit in range(4)] == [
        (),
        ("hidden",),
        ("context",),
        ("hidden", "context"),
    ]
    _, swin = chain_of(SmallModelFactory("swin"))
    assert {swin.get_received_activation_names(unit) for unit in range(1, 3)} == {("hidden",)}
    _, blip = chain_of(SmallModelFactory("blip-2"))
    handed = [chain_.get_received_activation_names(unit) for chain_ in [blip] for unit in range(6)]
    assert handed == [(), ("hidden",), ("context",), ("hidden", "context"), ("context",), ("hidden", "context")]


@pytest.mark.parametrize(
    ("family", "first", "last"),
    [
        ("llama", ["model.embed_tokens.weight"], ["model.norm.weight", "lm_head.weight"]),
        ("gpt2", ["transformer.wte.weight", "transformer.wpe.weight"], ["transformer.ln_f.bias", "lm_head.weight"]),
        ("bert", ["bert.embeddings.LayerNorm.weight"], ["cls.predictions.decoder.weight"]),
        ("vit", ["vit.embeddings.cls_token"], ["vit.layernorm.weight", "classifier.weight"]),
        ("opt", ["model.decoder.embed_positions.weight"], ["model.decoder.final_layer_norm.weight", "lm_head.weight"]),
        ("sam", ["vision_encoder.pos_embed"], ["shared_image_embedding.positional_embedding"]),
    ],
)  # fmt: skip
def test_embeddings_belong_to_first_layer_and_head_to_last(family: str, first: list[str], last: list[str]) -> None:
    model, chain = chain_of(SmallModelFactory(family))
    home = map_tensors_to_layers(model, chain)
    assert {home[name] for name in first} == {frozenset({0})}
    assert {home[name] for name in last} == {frozenset({len(chain.called_layer_paths) - 1})}


def test_modules_between_stacks_belong_to_adjacent_stack() -> None:
    whisper = home_of(SmallModelFactory("whisper"))
    assert whisper["model.encoder.conv1.weight"] == {0}
    assert whisper["model.encoder.layer_norm.weight"] == {1}
    assert whisper["model.decoder.embed_tokens.weight"] == {2}
    assert whisper["proj_out.weight"] == {3}
    swin = home_of(SmallModelFactory("swin"))
    assert swin["swin.encoder.layers.0.downsample.reduction.weight"] == {1}
    blip = home_of(SmallModelFactory("blip-2"))
    assert blip["query_tokens"] == {2}
    assert blip["vision_model.post_layernorm.weight"] == {1}
    assert blip["language_projection.weight"] == {4}


def test_modules_read_by_all_layers_are_on_every_stage() -> None:
    t5 = home_of(SmallModelFactory("t5"))
    assert t5["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] == {0, 1}
    assert t5["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] == {2, 3}
    albert = home_of(SmallModelFactory("albert"))
    assert albert["albert.encoder.albert_layer_groups.0.albert_layers.0.ffn.weight"] == {0, 1}
    beit = home_of(
        SmallModelFactory(
            "beit", changes={"use_relative_position_bias": False, "use_shared_relative_position_bias": True}
        )
    )
    shared = [name for name in beit if "shared_position_bias" in name or name.startswith("beit.relative_position_bias")]
    assert shared
    assert {beit[name] for name in shared} == {frozenset({0, 1})}


def test_every_parameter_belongs_to_a_stage() -> None:
    model, chain = chain_of(SmallModelFactory("blip-2"))
    held = map_tensor_names_to_stages(map_tensors_to_layers(model, chain), chain.get_stage_layer_ranges([0, 1, 5, 6]))
    assert all(held[name] for name, _ in model.named_parameters())
    assert {stage for stages in held.values() for stage in stages} == {0, 1, 2}


# ------------------------------------------------------------------------------------------------------------ one stage


def make_stage(model: nn.Module, chain: LayerSequence, span: LayerRange) -> StageForward:
    """Prepare the model for the stage that runs ``span``."""
    home, placeholders = map_tensors_to_layers(model, chain), ParameterPlaceholders()
    placeholders.replace_nonlocal_params(
        model, {name: any(unit in span for unit in units) for name, units in home.items()}
    )
    return StageForward(model, chain, placeholders, home)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_stages_in_sequence_equal_the_model(cut: int) -> None:
    model, chain = chain_of(SmallModelFactory("llama", changes={"num_hidden_layers": 4}))
    batch = RandomBatchFactory("LlamaForCausalLM")(0)
    expected = model.eval()(**batch).loss
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    head, tail = make_stage(first, chain, LayerRange(0, cut)), make_stage(second, chain, LayerRange(cut, 4))
    output, payload = head.run_stage_forward(first, StageForwardState(LayerRange(0, cut), {}), partial(first, **batch))
    assert output is None
    assert payload is not None
    output, rest = tail.run_stage_forward(
        second, StageForwardState(LayerRange(cut, 4), payload), partial(second, **batch)
    )
    assert rest is None
    assert torch.equal(output.loss, expected)
    assert sum(p.numel() for m in (first, second) for p in m.parameters()) == sum(p.numel() for p in model.parameters())


def test_missing_received_states_give_nan() -> None:
    model, chain = chain_of(SmallModelFactory("llama"))
    batch = RandomBatchFactory("LlamaForCausalLM")(0)
    stage = make_stage(model, chain, LayerRange(1, 2))
    output, _ = stage.run_stage_forward(model, StageForwardState(LayerRange(1, 2), {}), partial(model, **batch))
    assert output.loss.isnan()


def test_placeholders_keep_names_and_need_no_memory() -> None:
    model, chain = chain_of(SmallModelFactory("gpt2"))
    before = dict(model.named_parameters())
    make_stage(model, chain, LayerRange(1, 2))
    assert set(dict(model.named_parameters())) < {*before, "lm_head.weight"}
    absent = model.get_submodule("transformer.h.0.mlp.c_fc").weight
    assert tuple(absent.shape) == tuple(before["transformer.h.0.mlp.c_fc.weight"].shape)
    assert absent.untyped_storage().nbytes() == absent.element_size()


def test_placeholders_follow_dtype_conversion() -> None:
    model, chain = chain_of(SmallModelFactory("gpt2"))
    stage = make_stage(model, chain, LayerRange(1, 2))
    for dtype in (torch.float64, torch.bfloat16):
        model.to(dtype)
        hidden = torch.zeros(2, 13, 48, dtype=dtype)
        batch = {"input_ids": torch.ones(2, 13, dtype=torch.long)}
        output, _ = stage.run_stage_forward(
            model, StageForwardState(LayerRange(1, 2), {"hidden": hidden}), partial(model, **batch)
        )
        assert output.logits.dtype == dtype
        assert output.logits.isfinite().all()


def test_copying_a_stage_raises() -> None:
    model, chain = chain_of(SmallModelFactory("gpt2"))
    make_stage(model, chain, LayerRange(0, 2))
    with pytest.raises(ConfigError, match="cannot be copied"):
        copy.deepcopy(model)


class LateNorm(nn.Module):
    """Uses a norm, registered after its layers, before its first or its second layer."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm, self.before = nn.LayerNorm(4), before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at, layer in enumerate(self.layers):
            x = layer(self.norm(x) if at == self.before else x)
        return x


@pytest.mark.parametrize("before", [0, 1])
def test_argument_from_another_stage_raises(before: int) -> None:
    chain = LayerSequence((LayerStackDescription("layers", layer_calls=("layers.0", "layers.1", "layers.2")),))
    model = LateNorm(before)
    stage = make_stage(model, chain, LayerRange(0, 2))
    message = (
        rf"argument input of the layer layers\.{before} contains NaN.* only on another pipeline stage"
        r".*on_every_stage"
    )
    with pytest.raises(ConfigError, match=message):
        stage.run_stage_forward(model, StageForwardState(LayerRange(0, 2), {}), partial(model, torch.ones(1, 4)))
    whole = LateNorm(before)
    output, _ = make_stage(whole, chain, LayerRange(0, 3)).run_stage_forward(
        whole, StageForwardState(LayerRange(0, 3), {}), partial(whole, torch.full((1, 4), torch.nan))
    )
    assert output.isnan().all(), "what is NaN by itself is as in the plain model"


class ScaledLinear(nn.Linear):
    """Linear layer with a scale argument."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) if scale is None else super().forward(x) * scale


def test_nan_arguments_are_allowed_without_other_stages() -> None:
    chain = LayerSequence((LayerStackDescription("0", layer_calls=("0.0",)),))
    model = nn.Sequential(nn.ModuleList([ScaledLinear(4, 4)]))
    span, nan = LayerRange(0, 1), torch.full((1, 4), torch.nan)
    output, _ = make_stage(model, chain, span).run_stage_forward(
        model, StageForwardState(span, {}), lambda: model[0][0](torch.ones(1, 4), scale=nan)
    )
    assert output.isnan().all()


class Twice(nn.Module):
    """Runs its layers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return x


def test_layers_that_run_twice_raise() -> None:
    model, chain = Twice(), LayerSequence((LayerStackDescription("layers", layer_calls=("layers.0", "layers.1")),))
    stage = make_stage(model, chain, LayerRange(0, 2))
    with pytest.raises(ConfigError, match="twice in one forward pass"):
        stage.run_stage_forward(model, StageForwardState(LayerRange(0, 2), {}), partial(model, torch.zeros(1, 4)))
