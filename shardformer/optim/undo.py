"""What trains a model is as it was before, where an operation on it fails."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch.optim import Optimizer

Attributes = dict[str, Any]


@contextmanager
def unchanged_on_error(optimizers: Sequence[Optimizer], others: Sequence[Any] = ()) -> Iterator[None]:
    """Puts optimizers and other objects back as they were when the body raises: the same objects, with their content.

    Args:
        optimizers: with their groups, the lists of parameters in these, and states. Tensors are not copied: one that
            the body writes into stays as it was written.
        others: schedulers and hooks, whose attributes and containers among them are put back.
    """
    before = [_Optimizer(each) for each in optimizers]
    attributes = [(each, {name: _copied(value) for name, value in vars(each).items()}) for each in others]
    states = [(each, copy.deepcopy(each.state_dict())) for each in others if hasattr(each, "state_dict")]
    try:
        yield
    except BaseException:
        for optimizer in before:
            optimizer.put_back()
        for each, values in attributes:
            vars(each).clear()
            vars(each).update(values)
        for each, state in states:
            with suppress(Exception):  # what failed may be this very call
                each.load_state_dict(state)
        raise


def _copied(value: Any) -> Any:
    return copy.copy(value) if type(value) in (list, dict, set) else value


class _Optimizer:
    """An optimizer as it is now."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._attributes = optimizer, dict(vars(optimizer))
        self._groups = [(group, dict(group), list(group["params"])) for group in optimizer.param_groups]
        self._state = optimizer.state
        self._states = [(param, state, _copied(state)) for param, state in optimizer.state.items()]

    def put_back(self) -> None:
        attributes = vars(self._optimizer)
        attributes.clear()
        attributes.update(self._attributes)
        for group, content, params in self._groups:
            group.clear()
            group.update(content)
            group["params"][:] = params
        groups: list[Attributes] = self._optimizer.param_groups
        groups[:] = [group for group, _, _ in self._groups]
        self._state.clear()
        for param, state, content in self._states:
            if type(state) is dict:
                state.clear()
                state.update(content)
            self._state[param] = state
