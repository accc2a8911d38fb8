"""How many heads an attention has, who says so, which projection is which, and which numbers count what."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from torch import nn

HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Count:
    """Query and KV heads, and the fields of an Attention that say so where the config's usual ones do not."""

    heads: int
    kv_heads: int
    said: Mapping[str, Any] = field(default_factory=dict)

    def of_config(self, config: Any) -> Iterator[tuple[str, str]]:
        for name, kind, count in ((HEADS[0], "heads", self.heads), (HEADS[1], "kv_heads", self.kv_heads)):
            if _field(config, name) == count:
                yield name, kind


def projections_of(names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Which projection could be which: by the letters of their names, or else in the order of their calls."""
    called = list(names.values())
    letters = {re.sub(r"(^|.*\.)", "", name)[:2].lower(): name for name in called}
    by_letter = {letter: name for key, name in letters.items() if (letter := key[:1]) in "qkv" and key != "kv"}
    gates = [name for name in called if name not in by_letter.values()]
    if len(called) == 1:
        return [{"qkv": called[0]}]
    if len(called) == 2:
        return [
            {"q": called[0], "kv": called[1]},
            {"qkv": called[0], "gates": called[1:]},
            {"qkv": called[1], "gates": called[:1]},
        ]
    if set(by_letter) == set("qkv"):
        return [{**by_letter, **({"gates": gates} if gates else {})}]
    if len(called) == 3:
        kv = [{"q": called[0], "kv": called[1], "gates": called[2:]}] if letters.get("kv") else []
        return [dict(zip("qkv", called, strict=True)), *kv]
    return []


def head_counts(
    model: nn.Module,
    at: str,
    projections: Mapping[str, Any],
    features: Mapping[str, int],
    width: int,
    reads_inner: bool,
    head_dim: int = 0,
) -> Iterator[Count]:
    """The counts that fit the shapes, those that every config has first.

    Args:
        head_dim: the features of a head, as they were seen. Of a model without a config the counts of these come first,
            and at last the number itself.
    """
    config: Any = getattr(model, "config", None)
    usual = {name: _field(config, name) for name in HEADS}
    heads_of = {**{n: v for n, v in usual.items() if type(v) is int}, **_said(config, model.get_submodule(at))}
    if config is None and head_dim and width % head_dim == 0:
        seen = width // head_dim
        heads_of = dict(sorted({**heads_of, str(seen): seen}.items(), key=lambda item: item[1] != seen))
    found = set()
    for (name, heads), (kv_name, kv_heads) in product(heads_of.items(), [("", 0), *heads_of.items(), ("1", 1)]):
        kv = kv_heads or heads
        if heads < 1 or width % heads or heads % kv or (heads, kv) in found:
            continue
        if not _fits(projections, features, heads, kv, width // heads, reads_inner):
            continue
        found.add((heads, kv))
        usual_kv = usual[HEADS[1]] if isinstance(usual[HEADS[1]], int) and usual[HEADS[1]] else usual[HEADS[0]]
        said: dict[str, Any] = {}
        if heads != usual[HEADS[0]] or kv != usual_kv:
            said = {"num_heads": _number_or(name), "num_kv_heads": _number_or(kv_name or name)}
        yield Count(heads, kv, said)


def _number_or(name: str) -> int | str:
    """The number that a name says itself, as no config and no attribute does."""
    return int(name) if name.isdigit() else name


def _said(config: Any, module: nn.Module) -> dict[str, int]:
    """Numbers that could count heads: in the config, in the configs inside it, and of the module's own.

    Those are tried that are called heads; of a config that calls nothing so, all.
    """
    places = {"": config, ".config.": getattr(module, "config", None), ".": module}
    inner = {f"{n}.": c for n, c in _fields(config).items() if hasattr(c, "model_type")}
    every = {
        f"{prefix}{name}": value
        for prefix, place in {**places, **inner}.items()
        for name, value in _fields(place).items()
        if type(value) is int
    }
    called = {n: v for n, v in every.items() if "head" in n.split(".")[-1] and not n.endswith(("dim", "size"))}
    return called or every


def _field(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a config may refuse to name one number for layers that differ
        return None


def _fields(thing: Any) -> dict[str, Any]:
    return {n: v for n, v in vars(thing).items() if not n.startswith("_")} if thing is not None else {}


def _fits(
    projections: Mapping[str, Any], features: Mapping[str, int], heads: int, kv: int, head_dim: int, reads_inner: bool
) -> bool:
    def has(part: str, *sizes: int) -> bool:
        return part not in projections or features[projections[part]] in sizes

    q = projections.get("q")
    if q is not None and features[q] % heads:
        return False
    unit = features[q] // heads if q is not None else head_dim
    return (
        (q is None or reads_inner or unit == head_dim)
        and has("k", kv * unit)
        and has("v", kv * head_dim)
        and has("qkv", (heads + 2 * kv) * head_dim)
        and (has("kv", 2 * kv * head_dim) or (reads_inner and features[projections["kv"]] % kv == 0))
        and all(features[gate] % heads == 0 for gate in projections.get("gates", ()))
    )


def counted(numbers: Mapping[str, int], count: Count, width: int) -> dict[str, str]:
    """What the numbers count that an attention's module reads, where it is heads or their features."""
    heads, kv_heads = count.heads, count.kv_heads
    kinds: dict[str, str] = {}
    for name, value in numbers.items():
        about_kv = "kv" in name or "key_value" in name
        if re.search(r"(?<!all_)head_(size|dim)$", name):
            continue  # of one head: where there is only one, in a first stage, it looks like the width of all
        if "group" in name and value == heads // kv_heads:
            kinds[name] = "groups"
        elif value == kv_heads and (about_kv or kv_heads not in (heads, 1)):
            kinds[name] = "kv_heads"
        elif value == heads:
            kinds[name] = "heads"
        elif value == heads // kv_heads > 1:
            kinds[name] = "groups"
        elif value == width:
            kinds[name] = "width"
    return kinds
