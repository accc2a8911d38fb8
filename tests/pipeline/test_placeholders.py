"""Placeholders for the parameters of other stages have their dtypes and need no memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardformer.pipeline.stage_forward import ParameterPlaceholders, is_all_nan, make_placeholder_output


def parts() -> tuple[nn.Module, ParameterPlaceholders]:
    """An embedding and a head of another stage, and a layer of this one."""
    model = nn.ModuleDict({"table": nn.Embedding(5, 4), "layer": nn.Linear(4, 4), "head": nn.Linear(4, 5)})
    placeholders = ParameterPlaceholders()
    held = {name: name.startswith("layer") for name, _ in model.named_parameters()}
    placeholders.replace_nonlocal_params(model, held)
    return model, placeholders


def stands(model: nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    value: Tensor = getattr(model.get_submodule(owner), name)
    assert is_all_nan(value) and value.untyped_storage().nbytes() <= 8
    return value


def test_placeholder_has_dtype_of_its_stage() -> None:
    model, placeholders = parts()
    model.to(torch.bfloat16)
    dtypes = {"table.weight": torch.float16, "layer.weight": torch.bfloat16}
    placeholders.convert_dtypes(model, dtypes)
    assert stands(model, "table.weight").dtype == torch.float16
    assert stands(model, "table.weight").shape == (5, 4)


def test_placeholder_without_dtype_is_converted_like_local_parameters() -> None:
    """A trace of a single rank receives no dtypes of other stages."""
    model, placeholders = parts()
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        model.to(dtype)
        placeholders.convert_dtypes(model, {})
        assert stands(model, "table.weight").dtype == stands(model, "head.bias").dtype == dtype


def test_module_with_two_names_finds_dtype_by_either() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(5, 4), "layer": nn.Linear(4, 4)})
    model["again"] = model["table"]
    placeholders = ParameterPlaceholders()
    placeholders.replace_nonlocal_params(model, {"table.weight": False, "again.weight": False})
    placeholders.convert_dtypes(model, {"again.weight": torch.float16})
    assert stands(model, "table.weight").dtype == torch.float16


def test_linear_placeholder_uses_autocast_dtype_and_embedding_its_own() -> None:
    linear, table = nn.Linear(4, 3), nn.Embedding(5, 4)
    x, ids = torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert make_placeholder_output(linear, (x,), {}).dtype == linear(x).dtype == dtype
            assert make_placeholder_output(table, (ids,), {}).dtype == table(ids).dtype == torch.float32
    assert make_placeholder_output(linear, (x,), {}).dtype == torch.float32 and is_all_nan(
        make_placeholder_output(linear, (x,), {})
    )
