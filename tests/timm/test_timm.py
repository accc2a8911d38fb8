"""timm's models equal the plain models after sharding. All tests run in workers that import timm."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import shardformer
from shardformer.discovery.reduced_model import ReferenceGradients
from shardformer.discovery.validation import validate_policy
from shardformer.errors import ShardFormerError
from shardformer.layout.sharding_metadata import GradientReduction
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.shard_model_api import resolve_policy_and_origin
from shardformer.verify.train_both import VerifyPipeline
from shardformer.verify.verification import verify
from tests.ops import seeing_parts
from tests.pairwise import in_turn
from tests.pools import WorkerPools
from tests.timm.models import MODELS, STAGED, Small, images, loss
from tests.timm.process import timm

SEQUENCE = {"enable_sequence_parallelism": True}
MODES: dict[str, dict[str, bool]] = {
    "plain": {},
    "sequence": SEQUENCE,
    "overlap": {**SEQUENCE, "enable_sequence_overlap": True},
}
TRIED = [(name, mode) for name in MODELS for mode in MODES if mode == "plain" or name not in STAGED]
FEATURES = {"plain": "tensor parallel", "sequence": "sequence parallel", "overlap": "overlap"}
NORMS = {"enable_fused_normalization": True}


def of(name: str, *features: str, beside: tuple[Any, ...] = ()) -> Any:
    """Return a test parameter that fills cells of docs/features.md."""
    return pytest.param(name, *beside, marks=pytest.mark.feature(*features, family=f"timm:{MODELS[name][1]}"))


def in_worker(pool: WorkerPool, fn: Callable[..., Any], *args: Any) -> Any:
    return pool.run(fn, *args)[0]


def differences(name: str, ranks: tuple[int, ...], changes: dict[str, Any], options: dict[str, bool]) -> list[str]:
    """Return the differences for each number of ranks (threads of this worker); all gradients are compared."""
    torch.manual_seed(0)
    model = Small(name, changes)().double()
    x = images(0)["x"].double()
    reference = ReferenceGradients.from_model(model, lambda sharded: sharded(x))
    policy = type(resolve_policy_and_origin(model, None)[0])
    return [
        f"over {n}: {said}" for n in ranks if (said := validate_policy(reference, policy, n, **options)) is not None
    ]


def sharded(name: str, options: dict[str, bool], use: Callable[[Any], Any], ranks: int = 2) -> Any:
    """Return the result of ``use`` for the sharded model on the first rank."""
    plain = Small(name)()

    def shard(context: ParallelContext) -> Any:
        return use(shardformer.shard_model(copy.deepcopy(plain), context=context, **options))

    return run_as_threads(shard, tensor=ranks)[0]


@pytest.mark.reduced(one_in=5)
@pytest.mark.parametrize(("name", "mode"), [of(name, FEATURES[mode], beside=(mode,)) for name, mode in TRIED])
def test_sharded_model_equals_plain_model(timm_worker: WorkerPool, name: str, mode: str) -> None:
    assert in_worker(timm_worker, differences, name, (2, 4), {}, MODES[mode]) == []


@pytest.mark.parametrize("name", STAGED)
def test_stages_over_three_ranks(timm_worker: WorkerPool, name: str) -> None:
    """Each rank has one of three heads in the first stage, and two of six in the second."""
    assert in_worker(timm_worker, differences, name, (3,), {}, {}) == []


@pytest.mark.reduced(one_in=3, at_most=2)
@pytest.mark.parametrize(
    ("name", "tensor", "mode"),
    [
        ("vit", 2, "overlap"),
        ("vit with all between", 4, "sequence"),
        ("deit distilled", 2, "plain"),
        ("beit", 2, "sequence"),
        ("beit", 4, "plain"),
        ("eva02", 2, "overlap"),
        ("eva02 with a norm in the mlp", 2, "sequence"),
        ("swin", 2, "plain"),
        ("swin", 4, "plain"),
        ("swin v2", 2, "plain"),
    ],
)
def test_weights_after_three_steps(timm_pools: WorkerPools, name: str, tensor: int, mode: str) -> None:
    report = verify(Small(name), images, tensor=tensor, loss_fn=loss, config=MODES[mode], pool=timm_pools(tensor))
    assert report.passed, str(report)
    assert report.gradient.where and any("over tensor (block)" in name for name in report.collectives)


@pytest.mark.reduced(cover="mode", at_most=1)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("vit", "plain"),
        ("vit with all between", "sequence"),
        ("deit distilled", "overlap"),
        ("beit", "plain"),
        ("eva02", "overlap"),
        ("swin", "plain"),
        ("swin v2", "plain"),
    ],
)
def test_tensor_times_data(timm_pools: WorkerPools, name: str, mode: str) -> None:
    """Each data-parallel rank has two of four images, and every gradient is that of all four."""
    report = verify(Small(name), images, tensor=2, data=2, loss_fn=loss, config=MODES[mode], pool=timm_pools(4))
    assert report.passed, str(report)
    assert any("over data (gradients)" in name for name in report.collectives), report.collectives


def without(what: str, name: str, options: dict[str, bool]) -> list[str]:
    stand_in: Any = {
        "shardformer.sharding.apply_tensor_parallel.get_gradient_reduction": lambda *_: GradientReduction(),
        "shardformer.tensor_parallel.linear_communication.start_all_reduce": lambda x, *_, **__: _Done(x),
    }[what]
    with patch(what, stand_in):
        return differences(name, (2,), {}, options)


class _Done:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def wait(self) -> Tensor:
        return self.x


@pytest.mark.parametrize(
    ("what", "name", "mode", "said"),
    [
        ("shardformer.tensor_parallel.linear_communication.start_all_reduce", "beit", "plain", "output differs"),
        (
            "shardformer.sharding.apply_tensor_parallel.get_gradient_reduction",
            "vit with all between",
            "plain",
            "attn.q_norm.weight",
        ),
        (
            "shardformer.sharding.apply_tensor_parallel.get_gradient_reduction",
            "beit",
            "sequence",
            "blocks.0.gamma_1 differs",
        ),
        (
            "shardformer.sharding.apply_tensor_parallel.get_gradient_reduction",
            "swin v2",
            "plain",
            "attn.cpb_mlp.0.weight differs",
        ),
    ],
)
def test_a_missing_sum_is_detected(timm_worker: WorkerPool, what: str, name: str, mode: str, said: str) -> None:
    found = in_worker(timm_worker, without, what, name, MODES[mode])
    assert len(found) == 1 and said in found[0], found


@pytest.mark.parametrize(
    "name",
    [of(name, "fused norm") for name in ("vit with all between", "deit distilled", "beit", "eva02", "swin", "swin v2")],
)
def test_fused_norms(timm_worker: WorkerPool, name: str) -> None:
    assert in_worker(timm_worker, differences, name, (2,), {}, NORMS) == []


@pytest.mark.parametrize(
    "name",
    [
        of(name, "JIT-fused operators")
        for name in ("vit with all between", "deit distilled", "beit", "eva02", "swin", "swin v2")
    ],
)
def test_activations_with_bias_and_gate(timm_worker: WorkerPool, name: str) -> None:
    options = {"enable_jit_fused": True, **NORMS}
    with timm_worker.with_timeout(300) as pool:
        assert in_worker(pool, differences, name, (2,), {"drop_path_rate": 1e-9}, options) == []


def dropped(mode: dict[str, bool], checkpointed: bool) -> list[list[bool]]:
    """Return the samples that each DropPath dropped: six calls, and again in the recomputation under checkpointing.

    The first layer drops none, and a recomputation ends before the last DropPath of a layer.
    """
    context = ParallelContext.from_default_process_group({"tensor": 2, "data": 1})
    torch.manual_seed(0)
    model: Any = Small("vit", {"drop_path_rate": 0.5, "depth": 4})()
    found: list[list[bool]] = []
    for module in model.modules():
        if type(module).__name__ == "DropPath":
            module.register_forward_hook(
                seeing_parts(lambda m, args, out: found.append((out.flatten(1) == 0).all(1).tolist()))
            )
    model = shardformer.shard_model(model.train(), context=context, **mode)
    model.set_grad_checkpointing(checkpointed)
    loss(model, images(0)).backward()
    return found


@pytest.mark.reduced(at_most=3)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("mode", list(MODES))
def test_ranks_drop_the_same_samples(timm_pools: WorkerPools, mode: str, checkpointed: bool) -> None:
    first, second = timm_pools(2).run(dropped, MODES[mode], checkpointed)
    assert first == second and len({tuple(samples) for samples in first}) > 1
    assert first[6:] == ([first[4], first[2], first[0]] if checkpointed else [])


def test_the_class_is_the_family(timm_worker: WorkerPool) -> None:
    said = in_worker(timm_worker, described, "deit distilled")
    assert "by the registered family 'timm:VisionTransformer'" in said
    assert "LayerNorm  ShardedNorm" in in_worker(timm_worker, described, "eva02 with a norm in the mlp")
    swin = in_worker(timm_worker, described, "swin", 4)
    assert "layers.0.blocks.*.attn is replicated, because it has 3 heads for 4 tensor ranks." in swin
    assert "attn.relative_position_bias_table  parameter" in swin


def described(name: str, ranks: int = 2) -> str:
    said: str = sharded(name, {}, lambda model: str(shardformer.describe_sharding(model)), ranks)
    return said


def test_full_weights_are_those_of_the_plain_model(timm_worker: WorkerPool) -> None:
    for name in ("beit", "swin v2"):
        assert in_worker(timm_worker, full_weights, name) == ([], [])


def full_weights(name: str) -> tuple[list[str], list[str]]:
    torch.manual_seed(0)
    plain = Small(name)().state_dict()
    torch.manual_seed(0)
    state = sharded(name, {}, shardformer.full_state_dict)
    return list(plain.keys() ^ state.keys()), [n for n, value in plain.items() if not torch.equal(state[n], value)]


def error_of(name: str, options: dict[str, bool], method: str = "") -> str:
    try:
        sharded(name, options, lambda model: getattr(model, method)(torch.ones(2, 3, 32, 32)) if method else None)
    except ShardFormerError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("name", [of(name, "sequence parallel", "overlap") for name in STAGED])
def test_sequence_parallelism_is_refused(
    timm_worker: WorkerPool, name: str, record_property: Callable[[str, object], None]
) -> None:
    said = in_worker(timm_worker, error_of, name, SEQUENCE)
    assert "its windows partition the image anew" in said
    record_property("feature", "refused: " + said.partition(": ")[2].partition(". ")[0])


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("forward_intermediates", {}, "nothing"),
        ("forward_intermediates", SEQUENCE, "Set enable_sequence_parallelism=False"),
        ("set_input_size", {}, "Call set_input_size on the plain model"),
        ("reset_classifier", {}, "Call reset_classifier on the plain model"),
    ],
)
def test_methods_of_timm_after_sharding(
    timm_worker: WorkerPool, method: str, options: dict[str, bool], said: str
) -> None:
    assert said in in_worker(timm_worker, error_of, "beit", options, method)


def test_another_class_of_timm_is_named(timm_pools: WorkerPools) -> None:
    with pytest.raises(ShardFormerError, match=r"model type 'timm:MlpMixer'"):
        timm_pools(1).run(shard_mixer)


def shard_mixer() -> None:
    mixer = timm("models.mlp_mixer").MlpMixer(img_size=32, patch_size=8, embed_dim=24, num_blocks=1, num_classes=3)
    run_as_threads(lambda context: shardformer.shard_model(mixer, context=context), tensor=2)


def test_transformers_runs_with_timm(timm_worker: WorkerPool) -> None:
    assert in_worker(timm_worker, bert_beside_timm) is None


def bert_beside_timm() -> str | None:
    timm()
    from shardformer.policies.families import BertPolicy
    from shardformer.verify.small_models import SmallModelFactory

    ids = torch.arange(10).view(2, 5)
    return validate_policy(
        ReferenceGradients.from_model(SmallModelFactory("bert")().double(), lambda model: model(input_ids=ids)),
        BertPolicy,
        2,
    )


PAGE = Path(__file__).parents[2] / "docs" / "timm.md"


def run_the_page() -> tuple[str, bool]:
    """Return the output of the script of docs/timm.md, and whether timm's model loads its final weights."""
    plain = timm().create_model("vit_tiny_patch16_224", num_classes=10, img_size=64, depth=3)
    source = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)[0]
    names: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, str(PAGE), "exec"), names)
    plain.load_state_dict(names["state"])
    return printed.getvalue(), bool(names["loss"] < 1.0)


def test_the_script_of_the_page_runs(timm_pools: WorkerPools) -> None:
    (printed, learnt), (nothing, _) = timm_pools(2).run(run_the_page)
    assert "VisionTransformer over tensor=2" in printed and nothing == ""
    assert re.search(r"attn.num_heads +3 +2", printed) and learnt


def test_timm_is_not_imported_by_the_tests(timm_worker: WorkerPool) -> None:
    with pytest.raises(ImportError, match="for the workers"):
        timm()


@pytest.mark.reduced(one_in=3)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [of(name, "pipeline parallel", beside=way) for name, *way in in_turn(MODELS, ("1f1b",), ("interleaved",))],
)
def test_pipeline_parallel(timm_pools: WorkerPools, name: str, schedule: str) -> None:
    """Four layers on two ranks; both have the bias or rotations that all layers read."""
    small = Small(name, None if name in STAGED else {"depth": 4})
    pipeline = VerifyPipeline(2, 2, {"schedule": schedule})
    with timm_pools(2).with_timeout(300) as pool:
        report = verify(small, images, tensor=1, steps=2, loss_fn=loss, pipeline=pipeline, pool=pool)
    assert report.passed, str(report)
    assert report.gradient.where and any("over pipe (activation)" in said for said in report.collectives)


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("name", ["vit with all between", "beit with one bias for all", "eva with mixed rope", "swin"])
def test_tensor_times_pipe(timm_pools: WorkerPools, name: str) -> None:
    small, pipeline = Small(name, None if name in STAGED else {"depth": 4}), VerifyPipeline(2, 2)
    report = verify(small, images, tensor=2, steps=2, loss_fn=loss, pipeline=pipeline, pool=timm_pools(4))
    assert report.passed, str(report)
