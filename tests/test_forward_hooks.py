"""Forward hooks run in one written order, whichever feature was installed first."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

import shardformer
from shardformer.comm.recorder import CollectiveRecorder
from shardformer.forward_hooks import POSITIONS_ATTRIBUTE, HookOrder, register_forward_hooks
from shardformer.local_ranks.threads import run_as_threads
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.verify.small_models import SmallModelFactory

OUTSIDE = [order for order in HookOrder if order < HookOrder.CHECKS]


def traced(orders: list[HookOrder]) -> list[str]:
    """Register hooks of all orders between two hooks of a user, and return the calls of a forward pass."""
    module, calls = nn.Linear(2, 2), list[str]()

    def note(what: str) -> Callable[..., None]:
        return lambda *_: calls.append(what)

    module.register_forward_pre_hook(note("user"))
    module.register_forward_hook(note("user"))
    for order in orders:
        register_forward_hooks(module, order, note(order.name), note(order.name))
    module.register_forward_pre_hook(note("later"))
    module(torch.zeros(2))
    return calls


def test_every_order_of_registration_gives_the_written_order() -> None:
    outside, inside = ([o.name for o in HookOrder if (o in OUTSIDE) == is_outside] for is_outside in (True, False))
    expected = [*outside, "user", *inside, "later", "user", *reversed(inside), *reversed(outside)]
    assert traced(list(HookOrder)) == expected
    numbers = random.Random(0)
    for _ in range(50):
        assert traced(numbers.sample(list(HookOrder), len(HookOrder))) == expected


def test_hooks_of_equal_order_are_nested() -> None:
    for order, expected in ((HookOrder.STACK, "abba"), (HookOrder.PARAMETERS, "baab")):
        module, calls = nn.Linear(2, 2), list[str]()
        for name in "ab":
            note = partial(lambda calls, name, *_: calls.append(name), calls, name)
            register_forward_hooks(module, order, note, note)
        module(torch.zeros(2))
        assert "".join(calls) == expected


def test_removed_hooks_leave_nothing() -> None:
    module = nn.Linear(2, 2)
    kept = register_forward_hooks(module, HookOrder.STACK, lambda *_: None, lambda *_: None)
    register_forward_hooks(module, HookOrder.CASTS, lambda *_: None, lambda *_: None)()
    assert len(module._forward_pre_hooks) == len(module._forward_hooks) == 1
    kept()
    assert not module._forward_pre_hooks and not module._forward_hooks and not vars(module)[POSITIONS_ATTRIBUTE]


def test_a_copied_module_keeps_the_order() -> None:
    module = nn.Linear(2, 2)
    calls: list[str] = []
    register_forward_hooks(module, HookOrder.CASTS, lambda *_: calls.append("casts"))
    copied = copy.deepcopy(module)
    register_forward_hooks(copied, HookOrder.STACK, lambda *_: calls.append("stack"))
    copied(torch.zeros(2))
    assert calls == ["stack", "casts"]


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(5, 120, (2, 12), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


def installed_in(order: tuple[str, ...], context: ParallelContext, plain: nn.Module) -> tuple[float, Any, list[str]]:
    """Train one step with the features installed in this order. Return the loss, the weights and the order of hooks."""
    model = shardformer.shard_model(copy.deepcopy(plain), context=context)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    records: list[Any] = []
    for feature in order:
        if feature == "stage 3":
            optimizer = shardformer.shard_optimizer(model, optimizer, stage=3)
        elif feature == "offload":
            shardformer.offload.offload_activations(model, "host", min_bytes=0)
        else:
            records.append(CollectiveRecorder(context, model).__enter__())
    loss = model(**batch(context.data.rank)).loss
    optimizer.backward(loss)
    optimizer.step()
    hooks = vars(model)[POSITIONS_ATTRIBUTE]
    tables = [hooks[key][0].name for table in (model._forward_pre_hooks, model._forward_hooks) for key in table]
    for recorder in records:
        recorder.__exit__(None, None, None)
        tables += [f"{name} {count}" for name, count in sorted(recorder.summarize_calls().items())]
    return float(loss.detach()), shardformer.full_state_dict(model), tables


def test_features_installed_in_any_order_train_identically() -> None:
    plain = SmallModelFactory("llama")()
    ways = list(permutations(["stage 3", "offload", "recorder"]))
    runs = [
        run_as_threads(lambda context, way=way: installed_in(way, context, plain), data=2, one_at_a_time=True)
        for way in ways
    ]
    for run in runs:
        for (loss, weights, tables), (first_loss, first_weights, first_tables) in zip(run, runs[0], strict=True):
            assert loss == first_loss
            assert tables == first_tables
            torch.testing.assert_close(weights, first_weights, rtol=0, atol=0)
