"""ZeRO: weights after several steps equal one process, and each rank keeps only its shard of the state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardformer.comm.collectives import PendingCollective
from shardformer.errors import ConfigError
from shardformer.gradients.buckets import ReduceScatterToShards
from shardformer.gradients.clipping import clip_grad_norm_, grad_norm
from shardformer.local_ranks.threads import run_as_threads
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.offload.host import OffloadConfig
from shardformer.pipeline.pipeline import Pipeline
from shardformer.shard_model_api import shard_model
from shardformer.verify.small_models import DEFAULT_HEAD, RandomBatchFactory, SmallModelFactory, compute_model_loss
from shardformer.weights.state_dict import full_state_dict
from shardformer.zero.shard_optimizer import shard_optimizer
from shardformer.zero.zero_optimizer import ZeroOptimizer

STEPS, CLIP = 4, 0.5
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Job:
    """A training configuration.

    Args:
        micro: Backward passes per step.
        options: Options of the sharding.
    """

    family: str = "llama"
    data: int = 2
    tensor: int = 1
    stage: int = 1
    optimizer: str = "AdamW"
    micro: int = 1
    offload: str | OffloadConfig | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return SmallModelFactory(self.family)().double()

    def loss(self, model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
        """Return the loss of one data rank. Each rank has its own samples."""
        batch = RandomBatchFactory(DEFAULT_HEAD[self.family], batch_size=3)(100 * step + 10 * micro + rank)
        batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
        return compute_model_loss(model, batch) / self.micro


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Create two parameter groups with different options, and a frozen weight."""
    params = list(model.parameters())
    max(params, key=lambda p: p.dim()).requires_grad_(False)
    trained = [p for p in params if p.requires_grad]
    matrices, rest = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
    settings = {"momentum": 0.9} if name == "SGD" else {}
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}]
    kind: Any = getattr(torch.optim, name)
    made: torch.optim.Optimizer = kind(groups, lr=1e-2, **settings)
    return made


def plainly(job: Job) -> tuple[Weights, list[float]]:
    """Return the weights and gradient norms of one process that sees the data of all ranks."""
    model, norms = job.build(), []
    optimizer = optimizer_of(job.optimizer, model)
    for step in range(STEPS):
        for micro in range(job.micro):
            for rank in range(job.data):
                (job.loss(model, step, micro, rank) / job.data).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


def with_zero(job: Job) -> list[tuple[Weights, list[float], float]]:
    """Return for each rank the weights, the norms, and the number of state elements per parameter element."""
    models = [job.build() for _ in range(job.data * job.tensor)]

    def train(context: ParallelContext) -> tuple[Weights, list[float], float]:
        options = {"extra_kwargs": {"bucket_bytes": 4096}, **job.options}
        model = shard_model(models[context.rank], context=context, **options)
        own = optimizer_of(job.optimizer, model)
        optimizer, norms = shard_optimizer(model, own, stage=job.stage, max_grad_norm=CLIP, offload=job.offload), []
        for step in range(STEPS):
            for micro in range(job.micro):
                with optimizer.no_sync() if micro + 1 < job.micro else nullcontext():
                    job.loss(model, step, micro, context.data.rank).backward()
            optimizer.step()
            norms.append(float(optimizer.grad_norm))  # type: ignore[arg-type]  # it was clipped
            optimizer.zero_grad()
        kept = sum(t.numel() for state in own.state.values() for t in state.values() if t.dim())
        return full_state_dict(model), norms, kept / sum(p.numel() for p in model.parameters() if p.requires_grad)

    return run_as_threads(train, data=job.data, tensor=job.tensor)


SEQUENCE = {"enable_sequence_parallelism": True}


@pytest.mark.slow
@pytest.mark.reduced(at_most=6, keep=("llama-2x4-stage1-SGD-",))
@pytest.mark.parametrize(
    ("job", "bound"),
    [
        (Job(micro=3), 1e-12),
        (Job(stage=0, micro=2), 1e-12),
        pytest.param(Job("t5", tensor=4, stage=0, optimizer="SGD"), 1e-10, marks=pytest.mark.full),
        pytest.param(Job("gpt2", tensor=2, stage=0, optimizer="SGD", options=SEQUENCE), 1e-8, marks=pytest.mark.full),
        (Job(stage=2, micro=2), 1e-12),
        (Job(data=3, stage=2, optimizer="SGD"), 1e-8),  # in another order it sums to another last bit, which fp32 keeps
        (Job("bert", data=3, optimizer="SGD", micro=2), 1e-10),
        (Job("t5", tensor=4, stage=2, optimizer="SGD"), 1e-10),
        (Job("gpt2", tensor=2, stage=2, optimizer="SGD", options=SEQUENCE), 1e-8),  # its logits are cast to fp32
        (Job(tensor=4, optimizer="SGD", options=SEQUENCE, micro=2), 1e-8),  # two ranks hold each KV head
        (Job(data=1, tensor=2, optimizer="SGD"), 1e-8),
        (Job("vit", tensor=2, stage=2), 1e-4),
        (Job(stage=0, offload="cpu"), 1e-12),
        pytest.param(Job(stage=1, micro=2, offload="cpu"), 1e-12, marks=pytest.mark.full),
        (Job(stage=2, micro=2, offload="cpu"), 1e-12),
        (Job("t5", tensor=2, stage=2, optimizer="SGD", offload="cpu"), 1e-10),
    ],
    ids=lambda x: f"{x.family}-{x.data}x{x.tensor}-stage{x.stage}-{x.optimizer}" if isinstance(x, Job) else "",
)
def test_weights_equal_one_process(job: Job, bound: float) -> None:
    check_weights(job, bound)


def check_weights(job: Job, bound: float) -> None:
    """Compare the weights, the norms, and the size of the state."""
    want, norms = plainly(job)
    for weights, ours, kept in with_zero(job):
        for name, value in want.items():
            if value.is_floating_point():
                # the gradient of a key bias is only rounding error
                scale = value.abs().max().clamp(min=1e-2)
                assert float((weights[name].double() - value).abs().max() / scale) < bound, name
        assert max(abs(a - b) / b for a, b in zip(ours, norms, strict=True)) < max(bound, 1e-7)
        moments = 2 if job.optimizer == "AdamW" else 1
        assert kept < moments * (1.1 / job.data if job.stage else 1.1)


# ----------------------------------------------------------------------------------------- modules that are not sharded


class Net(nn.Module):
    """A module that skips one of its layers in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor, use_b: bool = True) -> Tensor:
        h = torch.tanh(self.a(x))
        out: Tensor = self.c(torch.tanh(self.b(h)) if use_b else h)
        return out


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(1)
    return Net().to(dtype)


def images(step: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def uses_b(step: int, rank: int) -> bool:
    """Step 1 skips the layer on rank 0, step 2 on all ranks."""
    return not (step == 2 or (step == 1 and rank == 0))


def trained(
    model: Net, optimizer: torch.optim.Optimizer, ranks: list[int], steps: int = 4, weight: float = 1.0
) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        for rank in ranks:
            (model(images(step, rank, dtype), uses_b(step, rank)).square().mean() * weight).backward()
        optimizer.step()
        optimizer.zero_grad()


def over_ranks(
    use: Callable[[Net, ZeroOptimizer, ParallelContext], Any],
    ranks: int = 2,
    dtype: torch.dtype = torch.float64,
    **how: Any,
) -> list[Any]:
    """Return the result of ``use`` on each rank, for a module that differs between ranks before ``shard_optimizer``."""
    models = [net(dtype) for _ in range(ranks)]
    with torch.no_grad():
        for rank, model in enumerate(models):
            model.a.weight += rank

    def run(context: ParallelContext) -> Any:
        model = models[context.rank]
        optimizer = shard_optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.05), context=context, **how)
        return use(model, optimizer, context)

    return run_as_threads(run, data=ranks)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_layer_skipped_by_some_or_all_ranks(ranks: int, stage: int) -> None:
    """Skipped layers keep their state as in one process, and all ranks start with the weights of the first."""
    plain = net()
    trained(plain, torch.optim.AdamW(plain.parameters(), lr=0.05), list(range(ranks)), weight=1 / ranks)

    def use(model: Net, optimizer: ZeroOptimizer, context: ParallelContext) -> Weights:
        trained(model, optimizer, [context.rank])
        return dict(model.state_dict())

    for weights in over_ranks(use, ranks, stage=stage):
        assert max(float((weights[n] - p.detach()).abs().max()) for n, p in plain.named_parameters()) < 1e-12


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_step_reduces_gradients_accumulated_in_no_sync(stage: int) -> None:
    def use(model: Net, optimizer: ZeroOptimizer, context: ParallelContext) -> tuple[Weights, Weights]:
        before = full_state_dict(model)
        for step in range(2):
            with optimizer.no_sync():
                model(images(step, context.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return before, full_state_dict(model)

    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for step in range(2):
        for rank in range(2):
            (plain(images(step, rank)).square().mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    for before, after in over_ranks(use, stage=stage):
        for name, value in plain.state_dict().items():
            assert not torch.equal(after[name], before[name]), name
            torch.testing.assert_close(after[name], value, rtol=0, atol=1e-12)


def test_16_bit_parameters_equal_one_process_bitwise() -> None:
    plain = net(torch.float32)
    masters = [p.detach().clone().requires_grad_() for p in plain.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.05)
    plain.to(torch.bfloat16)
    for step in range(4):
        for rank in (0, 1):
            (plain(images(step, rank, torch.bfloat16)).square().mean() / 2).backward()
        for master, p in zip(masters, plain.parameters(), strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, p in zip(masters, plain.parameters(), strict=True):
                p.copy_(master)

    def use(model: Net, optimizer: ZeroOptimizer, context: ParallelContext) -> Weights:
        for step in range(4):
            model(images(step, context.rank, torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict())

    for weights in over_ranks(use, dtype=torch.float32, precision="bf16"):
        assert all(torch.equal(weights[name], p) for name, p in plain.named_parameters())
    assert any(not torch.equal(m, p.float()) for m, p in zip(masters, plain.parameters(), strict=True))


def test_full_gradient_and_global_norm() -> None:
    plain = net()
    for rank in (0, 1):
        (plain(images(0, rank)).square().mean() / 2).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])

    def use(model: Net, optimizer: ZeroOptimizer, context: ParallelContext) -> None:
        model(images(0, context.rank)).square().mean().backward()
        for name, p in plain.named_parameters():
            assert torch.allclose(optimizer.full_gradient(name), p.grad, atol=1e-14)  # type: ignore[arg-type]
        assert torch.allclose(grad_norm(model), norm)
        assert torch.allclose(clip_grad_norm_(model, 0.1), norm)
        assert torch.allclose(grad_norm(model), torch.tensor(0.1, dtype=torch.float64), atol=1e-5)
        assert torch.allclose(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01), grad_norm(model) * 10)
        with pytest.raises(ConfigError, match="received the parameter shards of a ZeroOptimizer"):
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        with pytest.raises(ConfigError, match=r"no trainable parameter 'd.weight'"):
            optimizer.full_gradient("d.weight")

    over_ranks(use)


def test_schedulers_closures_and_saved_states() -> None:
    def use(model: Net, optimizer: ZeroOptimizer, context: ParallelContext) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        def step() -> float:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(images(0, context.rank)).square().mean()
                optimizer.backward(loss)
                return loss

            loss = float(optimizer.step(closure).detach())
            scheduler.step()
            return loss

        step()
        assert optimizer.param_groups[0]["lr"] == 0.025
        weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        rates = scheduler.state_dict()
        losses = [step(), step()]
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        scheduler.load_state_dict(rates)
        assert [step(), step()] == losses
        saved["place"]["coords"]["data"] += 1
        with pytest.raises(ConfigError, match="The optimizer state does not match this rank"):
            optimizer.load_state_dict(saved)

    over_ranks(use)


# ------------------------------------------------------------------------------------------------------------ pipelines


STAGED = RandomBatchFactory(DEFAULT_HEAD["gpt2"], batch_size=4)


def check_stages(trained_by: Callable[[nn.Module, ParallelContext], Any]) -> list[Any]:
    """Compare GPT-2 over two stages (both have the embedding) and two data ranks with one process.

    Args:
        trained_by: Trains the sharded model for three steps with SGD. Its results on all ranks are returned.
    """

    def build() -> nn.Module:
        torch.manual_seed(0)
        return SmallModelFactory("gpt2").with_min_layers(4)().double()

    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for rank in (0, 1):
            (plain(**STAGED(10 * step + rank)).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    models = [build() for _ in range(4)]

    def train(context: ParallelContext) -> tuple[Weights, Any]:
        model = shard_model(models[context.rank], context=context)
        given = trained_by(model, context)
        return full_state_dict(model), given

    found = run_as_threads(train, pipe=2, data=2, one_at_a_time=True)
    for weights, _ in found:
        for name, value in plain.state_dict().items():
            assert float((weights[name] - value).abs().max()) < 1e-8, name
    return [given for _, given in found]


@pytest.mark.reduced(at_most=1)
@pytest.mark.parametrize("stage", [0, 2])
def test_over_stages_and_data_ranks(stage: int) -> None:
    """The state of a parameter that several stages share is sharded over all of its ranks."""

    def train(model: nn.Module, context: ParallelContext) -> None:
        pipeline = Pipeline(model, micro_batches=2)
        own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = shard_optimizer(model, own, stage=stage, max_grad_norm=CLIP)
        for step in range(3):
            pipeline.step(STAGED(10 * step + context.data.rank))
            optimizer.step()
            optimizer.zero_grad()

    check_stages(train)


# -------------------------------------------------------------------------------------------------------------- refused


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def sharing(model: Any) -> nn.Module:
    """Let two parameters share memory."""
    model.c.bias = nn.Parameter(model.a.weight.data.view(-1)[:3])
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "how", "said"),
    [
        (adam, {"stage": 4}, "stage=4"),
        (adam, {"precision": "fp8"}, "precision='fp8'"),
        (lambda model: adam(net()), {}, "contains a parameter of shape .7, 5. that is not a parameter of the model"),
        (lambda model: adam(sharing(model)), {}, "share memory, such as c.bias and a.weight"),
        (lambda model: [adam(model), adam(model)], {}, "The parameter a.weight is in two optimizers"),
        (
            lambda model: torch.optim.LBFGS(model.parameters()),
            {},
            "LBFGS cannot be sharded, because a test on tiny matrices raised",
        ),
    ],
)
def test_unsupported_arguments_are_rejected(make: Callable[[nn.Module], Any], how: dict[str, Any], said: str) -> None:
    model = net()
    with pytest.raises(ConfigError, match=said):
        shard_optimizer(model, make(model), **how)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.NAdam])
def test_elementwise_optimizers_are_accepted(kind: Any) -> None:
    model = net()
    assert shard_optimizer(model, kind(model.parameters(), lr=0.1)).param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.AdamW])
def test_existing_state_is_sharded(kind: Any, stage: int) -> None:
    """Adagrad creates its state immediately, AdamW in the first step."""

    def stepped(model: Net) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = kind(model.parameters(), lr=0.05)
        for rank in (0, 1):
            (model(images(9, rank)).square().mean() / 2).backward()
        made.step()
        made.zero_grad()
        return made

    plain = net()
    trained(plain, stepped(plain), [0, 1], weight=1 / 2)
    models = [net() for _ in range(2)]

    def train(context: ParallelContext) -> Weights:
        model = models[context.rank]
        trained(model, shard_optimizer(model, stepped(model), stage=stage, context=context), [context.rank])
        return full_state_dict(model)

    for weights in run_as_threads(train, data=2):
        assert max(float((weights[n] - p.detach()).abs().max()) for n, p in plain.named_parameters()) < 1e-12


def test_ddp_around_the_model_is_rejected(pool2: WorkerPool) -> None:
    pool2.run(wrapped)


def wrapped() -> None:
    model = net()
    shard_optimizer(model, adam(model))
    with pytest.raises(ConfigError, match="cannot be wrapped in DistributedDataParallel"):
        nn.parallel.DistributedDataParallel(model)


def test_copied_model_does_not_use_zero() -> None:
    def use(model: Net, optimizer: ZeroOptimizer, context: ParallelContext) -> None:
        reference = copy.deepcopy(model)
        reference(images(0, context.rank)).square().mean().backward()
        model(images(0, context.rank)).square().mean().backward()
        assert torch.equal(reference.a.weight.grad, optimizer.full_gradient("a.weight"))  # type: ignore[arg-type]
        reference.zero_grad()
        assert reference.a.weight.grad is None and optimizer.full_gradient("a.weight") is not None
        model.zero_grad()
        assert optimizer.full_gradient("a.weight") is None

    over_ranks(use)


def in_a_process() -> Weights:
    context = ParallelContext.from_default_process_group({"data": 2})
    model = net()
    optimizer = shard_optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.05), stage=2)
    trained(model, optimizer, [context.rank])
    return dict(model.state_dict())


def test_processes_equal_threads(pool2: WorkerPool) -> None:
    plain = net()
    trained(plain, torch.optim.AdamW(plain.parameters(), lr=0.05), [0, 1], weight=1 / 2)
    for weights in pool2.run(in_a_process):
        assert max(float((weights[n] - p.detach()).abs().max()) for n, p in plain.named_parameters()) < 1e-12


def test_changes_after_shard_optimizer_are_rejected() -> None:
    model = net()
    model.b.requires_grad_(False)
    optimizer = shard_optimizer(model, adam(model))
    with pytest.raises(ConfigError, match="shard_optimizer was called twice"):
        shard_optimizer(model, adam(model))
    with pytest.raises(ConfigError, match="add_param_group"):
        optimizer.add_param_group({"params": list(model.b.parameters())})
    model.b.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"b.weight was unfrozen after shard_optimizer was called"):
        model(images(0, 0))


# ------------------------------------------------------------------------------------- what others do to the parameters


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_writes_to_parameters_between_steps_take_effect(stage: int) -> None:
    """Load or clamp weights, also in 16 bits with master weights."""
    with torch.no_grad():
        loaded = {name: (p * 0.5).bfloat16() for name, p in net(torch.float32).state_dict().items()}

    def use(model: Net, optimizer: ZeroOptimizer, context: ParallelContext) -> Weights:
        def step(number: int) -> None:
            model(images(number, context.rank, torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step(0)
        model.load_state_dict(loaded)
        with torch.no_grad():
            model.b.weight.clamp_(-0.1, 0.1)
        before = copy.deepcopy(model.state_dict())
        model.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = 1e-6  # which moves no number of 16 bits
        step(1)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        step(2)
        masters = copy.deepcopy(optimizer.state_dict()["masters"])
        optimizer.load_state_dict(saved)
        model.load_state_dict(weights)  # equal in 16 bits, so the more precise master weights remain
        step(2)
        assert all(torch.equal(a, b) for a, b in zip(masters, optimizer.state_dict()["masters"], strict=True))
        return dict(model.state_dict())

    first, second = over_ranks(use, dtype=torch.float32, precision="bf16", stage=stage)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert float(first["b.weight"].abs().max()) <= 0.1001


def test_changes_that_zero_would_ignore_are_rejected() -> None:
    def use(model: Net, optimizer: ZeroOptimizer, context: ParallelContext) -> None:
        def backward() -> None:
            model(images(0, context.rank)).square().mean().backward()

        backward()
        model.a.weight.grad = torch.ones_like(model.a.weight)
        with pytest.raises(ConfigError, match=r"new tensor was assigned to the .grad of a.weight"):
            optimizer.step()
        optimizer.zero_grad()
        backward()
        kept = model.c.bias.data
        model.c.bias.data = kept.clone()
        with pytest.raises(
            ConfigError, match=r"memory of parameter c.bias was replaced after shard_optimizer was called"
        ):
            optimizer.step()
        model.c.bias.data = kept
        model.c.weight = nn.Parameter(model.c.weight.detach().clone())
        with pytest.raises(ConfigError, match=r"c.weight was replaced by another parameter"):
            optimizer.step()

    over_ranks(use)


# --------------------------------------------------------------------------------------- would it be noticed if not so?


def no_counts(original: Any) -> Any:
    """Count every parameter as present on every rank."""
    return lambda self, part, had, scale: original(self, part, torch.ones_like(had), scale)


def own_part(original: Any) -> Any:
    """Let every rank use its own gradients only."""

    def start(self: ReduceScatterToShards, bucket: Any) -> None:
        axis = bucket.axis
        original(self, bucket)
        size = bucket.flat.numel() // axis.size
        part = bucket.flat[axis.rank * size : (axis.rank + 1) * size].clone()
        waited = bucket.work
        bucket.work = PendingCollective([waited], lambda: part)

    return start


@pytest.mark.parametrize("what", ["the counts", "the sum"])
def test_missing_communication_would_be_detected(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardformer.zero.flat_shards import FlatParamShard

    owner, name, change = (
        (FlatParamShard, "accumulate_reduced_grads", no_counts)
        if what == "the counts"
        else (ReduceScatterToShards, "start_reduction", own_part)
    )
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    with pytest.raises(AssertionError):
        test_layer_skipped_by_some_or_all_ranks(2, 1)
