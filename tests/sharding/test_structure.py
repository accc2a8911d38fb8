"""Changes to a sharded model by users and libraries work or are refused."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune

import shardformer
from shardformer.errors import ConfigError, InputError
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.sharding.forward_checks import ForwardCheckHooks, ModelStructureSnapshot
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory


def plain() -> Any:
    return SmallModelFactory("llama")().train()


def batch(step: int = 0) -> dict[str, Any]:
    return RandomBatchFactory(DEFAULT_HEAD["llama"])(step)


def sharded(context: ParallelContext, **options: Any) -> Any:
    return shardformer.shard_model(plain(), context=context, **options)


def other_head(model: Any) -> None:
    model.lm_head = nn.Linear(48, 127, bias=False)


def other_linear(model: Any) -> None:
    model.model.layers[0].mlp.up_proj = nn.Linear(48, 35, bias=False)


def other_mlp(model: Any) -> None:
    model.model.layers[1].mlp = plain().model.layers[1].mlp


def other_norm(model: Any) -> None:
    model.model.norm = copy.deepcopy(model.model.norm)


def tied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def gone(model: Any) -> None:
    model.model.norm.weight = None


def more(model: Any) -> None:
    model.adapter = nn.Linear(2, 2)


def patched(model: Any) -> None:
    linear = model.model.layers[0].mlp.up_proj
    linear.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 2, linear)


def other_class(model: Any) -> None:
    head = model.lm_head
    head.__class__ = type("Mine", (type(head),), {"forward": lambda self, x: type(head).forward(self, x)})


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.model.layers[0].mlp.down_proj, "weight", amount=0.5)


def whole(model: Any) -> None:
    for part, weight in zip(
        model.model.layers[0].mlp.parameters(), plain().model.layers[0].mlp.parameters(), strict=True
    ):
        part.data = weight.data


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (other_head, "lm_head.weight of LlamaForCausalLM was added after the model was sharded"),
    (other_linear, "model.layers.0.mlp.up_proj.weight of LlamaForCausalLM"),
    (other_mlp, "model.layers.1.mlp.gate_proj.weight of LlamaForCausalLM"),
    (other_norm, "model.norm.weight of LlamaForCausalLM"),
    (tied, "lm_head.weight of LlamaForCausalLM was replaced by another parameter after"),
    (gone, "model.norm.weight of LlamaForCausalLM was removed after"),
    (patched, "forward method of .*mlp.up_proj .Linear1D_Col. was replaced after the model was sharded"),
    (other_class, "forward method of lm_head .Mine. was replaced after the model was sharded"),
    (pruned, "down_proj.weight_orig of LlamaForCausalLM was replaced by another parameter after"),
    (whole, r"gate_proj.weight of LlamaForCausalLM must have the shape .* but got \[70, 48\]"),
    (more, "adapter.weight of LlamaForCausalLM was added after the model was sharded"),
]


@pytest.mark.reduced(at_most=12)
@pytest.mark.parametrize(("change", "said"), CHANGES, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("late", [False, True])
def test_changes_after_sharding_are_detected_in_the_next_forward(
    change: Callable[[Any], None], said: str, late: bool
) -> None:
    def do(context: ParallelContext) -> None:
        model = sharded(context)
        if late:
            model(**batch()).loss.backward()
        change(model)
        with pytest.raises(ConfigError, match=said):
            model(**batch())

    run_as_threads(do, tensor=2)


def test_parameters_added_to_a_model_without_any_are_detected() -> None:
    model = nn.Sequential(nn.ReLU())
    fingerprint = ModelStructureSnapshot(model, [])
    model.append(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"1\.weight of Sequential was added after the model was sharded"):
        fingerprint.check_unchanged(model)


def test_harmless_changes_after_sharding_are_accepted() -> None:
    def do(context: ParallelContext) -> None:
        model = sharded(context)
        expected = model(**batch()).loss
        layer = model.model.layers[1]
        model.model.layers[1] = nn.Identity()
        model.model.layers[1] = layer
        model.model.layers[0].mlp.act_fn = nn.SiLU()
        model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
        model.something = nn.Dropout(0.0)
        assert torch.equal(model(**batch()).loss, expected)

    run_as_threads(do, tensor=2)


def see(*_: Any) -> None:
    """A user's hook."""


def may_see(*_: Any) -> None:
    """A user's hook that accepts local values."""


may_see.sees_parts = True  # type: ignore[attr-defined]  # of a function


def inside(model: Any) -> Any:
    return model.model.layers[0].mlp.act_fn


def between(model: Any) -> Any:
    return model.model.layers[0]


def block(model: Any) -> Any:
    return model.model.layers[0].self_attn


@pytest.mark.parametrize(
    ("where", "sizes", "options", "said"),
    [
        (inside, {"tensor": 2}, {}, "inside a block each tensor rank has only its own heads or features"),
        (between, {"tensor": 2}, {}, ""),
        (block, {"tensor": 2}, {}, ""),
        (between, {"tensor": 2}, {"enable_sequence_parallelism": True}, "each rank has a shard of the sequence"),
        (block, {"sequence": 2}, {}, "each rank has a shard of the sequence"),
        (inside, {"data": 2}, {}, ""),
    ],
    ids=range(6),
)
@pytest.mark.parametrize("when", ["before", "behind"])
def test_hook_on_local_values_is_refused(
    where: Callable[[Any], Any], sizes: dict[str, int], options: dict[str, Any], said: str, when: str
) -> None:
    def do(context: ParallelContext) -> str:
        model = plain()
        if when == "before":
            where(model).register_forward_hook(see)
        try:
            model = shardformer.shard_model(model, context=context, **options)
            if when == "behind":
                where(model).register_forward_pre_hook(see)
            model(**batch())
        except ConfigError as error:
            return str(error)
        return ""

    for found in run_as_threads(do, **sizes):
        assert said in found
        assert bool(found) == bool(said)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hook_on_a_sharded_parameter_is_refused(register: str) -> None:
    def do(context: ParallelContext) -> None:
        model = plain()
        getattr(model.model.layers[0].mlp.up_proj.weight, register)(lambda x: None)
        with pytest.raises(ConfigError, match=r"up_proj.weight' of .* has a hook"):
            shardformer.shard_model(model, context=context)

    run_as_threads(do, tensor=2)


def test_hook_on_the_input_of_an_exit_module_is_refused() -> None:
    def do(context: ParallelContext) -> None:
        model: Any = shardformer.shard_model(SmallModelFactory("bert")().train(), context=context)
        output = model.bert.encoder.layer[0].output
        output.register_forward_hook(see)
        given = RandomBatchFactory(DEFAULT_HEAD["bert"])(0)
        model(**given)
        output.register_forward_pre_hook(see)
        with pytest.raises(ConfigError, match=r"The hook .* on bert.encoder.layer.0.output would"):
            model(**given)

    run_as_threads(do, tensor=2)


def test_batch_without_labels_is_reported_in_a_pipeline() -> None:
    def do(context: ParallelContext) -> None:
        pipeline = shardformer.Pipeline(sharded(context), micro_batches=2)
        given = batch()
        pipeline.step({**given, "labels": torch.full_like(given["labels"], -100)})

    with pytest.raises(InputError, match="all labels of the batch are -100"):
        run_as_threads(do, pipe=2)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile reads it from the inputs
def test_stage_can_be_compiled_per_layer() -> None:
    def do(context: ParallelContext) -> None:
        model = sharded(context)
        pipeline = shardformer.Pipeline(model, micro_batches=2)
        expected = float(pipeline.step(batch()))
        layers = [layer for layer in model.model.layers if list(layer.children())]
        for layer in layers:
            layer.mlp.compile(backend="eager")
        assert float(pipeline.step(batch())) == pytest.approx(expected, rel=1e-5)
        with pytest.raises(ConfigError, match=r"model.compile does not support pipeline parallelism.*compile=True"):
            model.compile(backend="eager")
        layers[0].compile(backend="eager")
        with pytest.raises(ConfigError, match=r"does not support compiled modules, but .* is compiled"):
            pipeline.step(batch())

    run_as_threads(do, pipe=2, one_at_a_time=True)


def test_removed_hook_is_accepted() -> None:
    def do(context: ParallelContext) -> None:
        model = sharded(context)
        handle = inside(model).register_forward_hook(see)
        with pytest.raises(ConfigError, match=r"The hook .* on model\.layers\.0\.mlp\.act_fn"):
            model(**batch())
        handle.remove()
        model(**batch())
        inside(model).register_forward_hook(may_see)
        model(**batch())

    run_as_threads(do, tensor=2)


def test_sharding_another_model_does_not_recompile_the_first() -> None:
    """torch.compile guards the function that it read from the model's checks."""

    def do(context: ParallelContext) -> None:
        before = dict(vars(ForwardCheckHooks))
        model = sharded(context)
        (guard,) = {
            h.__self__
            for h in model._forward_pre_hooks.values()
            if isinstance(getattr(h, "__self__", 0), ForwardCheckHooks)
        }
        own = guard._eager
        sharded(context)(**batch())
        assert dict(vars(ForwardCheckHooks)) == before
        assert guard._eager is own

    run_as_threads(do, tensor=2)


def test_copied_model_is_checked_independently() -> None:
    def do(context: ParallelContext) -> None:
        model = sharded(context)
        copied = copy.deepcopy(model)
        copied(**batch()).loss.backward()
        other_head(copied)
        with pytest.raises(ConfigError, match="was added after"):
            copied(**batch())
        model(**batch())

    run_as_threads(do, tensor=2)


# --- models that differ between ranks


def other_epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 1e-3


def other_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def other_config(model: Any) -> None:
    model.config.rms_norm_eps = 1e-3


def other_mode(model: Any) -> None:
    model.eval()


def other_rate(model: Any) -> None:
    model.model.layers[0].self_attn.attention_dropout = 0.3


@pytest.mark.parametrize("change", [other_epsilon, other_activation, other_config, other_mode, other_rate])
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"data": 2}], ids=str)
def test_models_that_differ_between_ranks_are_refused(change: Callable[[Any], None], sizes: dict[str, int]) -> None:
    def do(context: ParallelContext) -> None:
        model = plain()
        if context.rank == 1:
            change(model)
        with pytest.raises(ConfigError, match="The sharding plan differs between ranks"):
            shardformer.shard_model(model, context=context)

    run_as_threads(do, **sizes)
