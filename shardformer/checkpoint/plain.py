"""Values of Python as JSON and back, exactly: settings of optimizers, states of schedulers, and what a user adds.

JSON knows neither tuples nor keys that are numbers nor tensors; these are lists with a word in front. Nothing else is
written, so that nothing has to be unpickled.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from shardformer.errors import InputError

KIND, MOST = "$", 2**12
"""The key that tells what a dictionary stands for; numbers that a tensor among the settings may have."""
_SEQUENCES = {"tuple": tuple, "set": set, "deque": deque, "list": list}


def to_json(value: Any, where: str) -> Any:
    """What JSON can hold of a value. Raises InputError, which names ``where`` it stands, for one that it cannot."""
    if value is None or (isinstance(value, (bool, int, float, str)) and type(value).__module__ == "builtins"):
        return value
    if type(value) is list:
        return [to_json(each, f"{where}[{i}]") for i, each in enumerate(value)]
    for kind, of in _SEQUENCES.items():
        if type(value) is of or (kind == "tuple" and isinstance(value, (tuple, torch.Size))):
            return {KIND: kind, "of": [to_json(each, f"{where}[{i}]") for i, each in enumerate(value)]}
    if type(value) in (dict, Counter, OrderedDict, defaultdict):
        pairs = [(to_json(k, f"a key of {where}"), to_json(v, f"{where}[{k!r}]")) for k, v in value.items()]
        if type(value) is Counter or KIND in value or not all(type(k) is str for k in value):
            return {KIND: "Counter" if type(value) is Counter else "dict", "of": [list(pair) for pair in pairs]}
        return dict(pairs)
    if isinstance(value, Tensor) and value.numel() <= MOST and not value.is_complex():
        dtype = str(value.dtype).removeprefix("torch.")
        return {KIND: "tensor", "dtype": dtype, "of": value.detach().cpu().tolist()}
    if isinstance(value, (numpy.generic, numpy.ndarray)) and value.size <= MOST and value.dtype.kind in "biuf":
        return {KIND: "numpy", "dtype": value.dtype.name, "of": value.tolist()}
    if isinstance(value, torch.dtype):
        return {KIND: "dtype", "of": str(value).removeprefix("torch.")}
    raise InputError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, and cannot be saved",
        rule="Beside weights and states a checkpoint holds numbers, words, and lists, tuples, dictionaries and small "
        f"tensors (up to {MOST} numbers) of them: nothing in it is code",
        remedy="Give what it is made of, as its state_dict() does",
    )


def from_json(value: Any) -> Any:
    """What ``to_json`` was given."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get(KIND)
    if kind is None:
        return {key: from_json(each) for key, each in value.items()}
    of = value["of"]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](from_json(each) for each in of)
    if kind == "tensor":
        return torch.tensor(of, dtype=getattr(torch, value["dtype"]))
    if kind == "numpy":
        return numpy.array(of, dtype=value["dtype"])[()]
    if kind == "dtype":
        return getattr(torch, of)
    pairs = {_hashable(from_json(k)): from_json(v) for k, v in of}
    return Counter(pairs) if kind == "Counter" else pairs


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
