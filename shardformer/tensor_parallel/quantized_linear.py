"""Tensor-parallel linear layers with the 4-bit weights of bitsandbytes (Dettmers et al. 2023, "QLoRA").

A 4-bit weight is one sequence of bytes with two values each, row after row, and one scale (``absmax``) per block of
values. A shard of it takes its bytes and the scales of its blocks, so that its values are exactly those of the full
weight:

    columns    the rows of this rank are adjacent in the sequence
    rows       the columns of this rank are adjacent in each row

A slice that divides a block repeats its scale for smaller blocks, down to 32 values. Scales that are quantized
themselves (double quantization) are stored in fp32, because their own blocks do not follow the rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardformer.errors import ConfigError
from shardformer.layout.packed_weights import (
    FAST_CPU_KERNEL,
    QuantizedWeightsMixin,
    add_mixin_classes,
    find_quantized_weights,
    store_weights_as_attributes,
)
from shardformer.layout.shard_spec import Slice
from shardformer.module_paths import get_parent_and_attribute_name

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit, Params4bit

MIN_BLOCK = 32
"""Smallest number of values that share a scale."""
QUANTIZER_ATTRIBUTES = ("hf_quantizer", "is_quantized", "quantization_method")
"""Attributes of a quantized transformers model, which prevent that the model is cast."""
HOOK_TABLES = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_")))


class UnalignedQuantizedSliceError(ConfigError):
    """Raised if sharding a 4-bit weight would split one of its quantization blocks."""


class QuantizedParallelLinear(QuantizedWeightsMixin):
    """Mixin for tensor-parallel linear layers whose weights are quantized by bitsandbytes.

    The layer communicates as a parallel linear layer with an adapter does: at its entry and its exit. ``weight`` is the
    packed local shard, which adapters of PEFT dequantize.
    """

    def multiply(self: Any, hidden_states: Tensor) -> Tensor:
        """Multiply the input by this rank's shard of the weight, and add the bias unless it is added later."""
        product = self.__dict__["product"]
        product.__dict__["weight"] = self.weight
        product._parameters["bias"] = getattr(self, "fused_bias", None)
        product.__dict__["training"] = self.training
        y: Tensor = type(product).forward(product, hidden_states)
        return y

    def forward(self: Any, hidden_states: Tensor) -> Any:
        if self.is_inside_adapter:
            return self.multiply(hidden_states)
        if self.block is not None and hasattr(self, "fused_bias"):
            return super().forward(hidden_states)  # type: ignore[misc]  # of a column-parallel linear in a block
        return self.finalize_adapter_output(self.multiply(self.prepare_adapter_input(hidden_states)))


def make_meta_linear_like(quantized_linear: Any) -> nn.Linear:
    """Create a plain linear layer on the meta device with the shape, bias and hooks of a quantized layer."""
    plain = nn.Linear(quantized_linear.in_features, quantized_linear.out_features, bias=False, device="meta")
    plain.weight.requires_grad_(False)
    plain.register_parameter("bias", quantized_linear.bias)
    vars(plain).update({name: getattr(quantized_linear, name) for name in HOOK_TABLES})
    return plain.train(quantized_linear.training)


@contextmanager
def temporarily_replace_quantized_linears(model: nn.Module) -> Iterator[None]:
    """Temporarily replace quantized linear layers with plain ones, so that a sharding policy can be chosen.

    The policy is then the same as for the unquantized model. Each plain layer has a single value in memory.
    """
    owners = {name.rpartition(".")[0] for name in find_quantized_weights(model)}
    shown: dict[int, nn.Module] = {}
    places: list[tuple[dict[str, Any], str, Any]] = []
    for path in sorted(owners):
        native = model.get_submodule(path)
        if isinstance(native, nn.Linear):
            holder, name = get_parent_and_attribute_name(model, path)
            places.append((holder._modules, name, native))
            shown.setdefault(id(native), make_meta_linear_like(native))
            shown[id(native)].weight = _make_zero_weight_like(native)
    attributes = [
        (vars(m), name, vars(m)[name]) for m in model.modules() for name in QUANTIZER_ATTRIBUTES if name in vars(m)
    ]
    try:
        for table, name, native in places:
            table[name] = shown[id(native)]
        for table, name, _ in attributes if places else ():
            del table[name]
        yield
    finally:
        for table, name, value in (*places, *attributes):
            table[name] = value


def _make_zero_weight_like(quantized_linear: nn.Linear) -> nn.Parameter:
    dtype = getattr(getattr(quantized_linear.weight, "quant_state", None), "dtype", None) or torch.get_default_dtype()
    zero = torch.zeros((), dtype=dtype, device=quantized_linear.weight.device)
    return nn.Parameter(zero.expand(quantized_linear.out_features, quantized_linear.in_features), requires_grad=False)


def store_quantized_shard(parallel_linear: Any, quantized_linear: Linear4bit, coords: Mapping[str, int]) -> None:
    """Store this rank's shard of a 4-bit weight in a tensor-parallel linear layer.

    The layer was built from the result of ``make_meta_linear_like``. Communicates nothing.
    """
    spec = parallel_linear.shard_specs.pop("weight")
    dim = next(iter(spec.splits))
    vars(parallel_linear)["product"] = _copy_linear_without_weight(quantized_linear, *spec.get_local_shape(coords))
    shard = slice_4bit_weight(quantized_linear.weight, dim, spec.get_local_slices(dim, coords))
    store_weights_as_attributes(parallel_linear, {"weight": shard}, unsharded_numel=prod(spec.shape))
    add_mixin_classes(parallel_linear, QuantizedParallelLinear)


def _copy_linear_without_weight(linear: Linear4bit, out_features: int, in_features: int) -> Linear4bit:
    """Copy a linear layer with new sizes, but without its parameters and hooks."""
    new = copy.copy(linear)
    vars(new).update({name: type(getattr(linear, name))() for name in HOOK_TABLES})
    vars(new).update(_parameters={"bias": None}, in_features=in_features, out_features=out_features)
    vars(new).update({FAST_CPU_KERNEL: False, "quant_state": None})  # which the weight has, too
    return new


def make_unsharded_4bit_placeholder(parallel_linear: Any) -> nn.Module:
    """Create an unsharded bitsandbytes layer with the sizes of a parallel layer. Its weight is one expanded zero."""
    from bitsandbytes.nn import Params4bit

    plain = _copy_linear_without_weight(
        parallel_linear.product, parallel_linear.out_features, parallel_linear.in_features
    )
    weight, num_bytes = parallel_linear.weight, -(-parallel_linear.out_features * parallel_linear.in_features // 2)
    settings = {
        name: getattr(weight, name) for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage")
    }
    empty = weight.data.as_subclass(Tensor).new_zeros(()).expand(num_bytes // weight.itemsize, 1)
    vars(plain)["weight"] = Params4bit(empty, quant_state=weight.quant_state, bnb_quantized=True, **settings)
    if parallel_linear.bias is not None:
        plain._parameters["bias"] = nn.Parameter(
            parallel_linear.bias.detach().new_zeros(()).expand(parallel_linear.out_features),
            requires_grad=parallel_linear.bias.requires_grad,
        )
    return plain.train(parallel_linear.training)  # type: ignore[no-any-return]


def choose_quant_block_size(quant_state: QuantState, dim: int, local_slices: Sequence[Slice]) -> int | None:
    """Find the largest quantization block size at which no slice splits a block, or return None if none exists."""
    block = int(quant_state.blocksize)
    if quant_state.shape[1] % block:  # for which bitsandbytes computes wrong values on the CPU
        return None
    while dim == 1 and block >= MIN_BLOCK and any(edge % block for pair in local_slices for edge in pair):
        block //= 2
    return block if block >= MIN_BLOCK else None


def slice_4bit_weight(weight: Params4bit, dim: int, local_slices: Sequence[Slice]) -> Params4bit:
    """Slice the rows (dim 0) or columns (dim 1) of a 4-bit weight, without changing its values.

    Raises UnalignedQuantizedSliceError if a slice divides a block of 32 values, and ConfigError if this release of
    bitsandbytes computes other values.
    """
    from bitsandbytes.functional import QuantState, dequantize_4bit
    from bitsandbytes.nn import Params4bit

    state = weight.quant_state
    block = choose_quant_block_size(state, dim, local_slices)
    rows, width = state.shape
    if block is None:
        columns = ", ".join(f"{a}-{b}" for a, b in local_slices)
        raise UnalignedQuantizedSliceError(
            f"The 4-bit weight has {width} columns, which is not a multiple of the quantization block size "
            f"{state.blocksize}"
            if width % state.blocksize
            else f"The columns {columns} of the 4-bit weight do not start and end at a multiple of {MIN_BLOCK}, so "
            "sharding would split a quantization block",
            remedy="List the layer in llm_int8_skip_modules of the BitsAndBytesConfig"
            + ("." if width % state.blocksize else ", or use fewer tensor ranks."),
        )
    packed = weight.data.as_subclass(Tensor).reshape(-1).view(torch.uint8).view(rows, -1)
    scales = get_fp32_block_scales(state).repeat_interleave(state.blocksize // block).view(rows, -1)
    units = (1, 1) if dim == 0 else (2, block)
    packed, scales = (
        torch.cat([x.narrow(dim, a // unit, (b - a) // unit) for a, b in local_slices], dim)
        for x, unit in zip((packed, scales), units, strict=True)
    )
    length = sum(b - a for a, b in local_slices)
    shape = (length, width) if dim == 0 else (rows, length)
    local = Params4bit(
        packed.contiguous().view(weight.dtype).reshape(-1, 1),
        requires_grad=False,
        quant_state=QuantState(
            scales.reshape(-1).contiguous(), torch.Size(shape), state.code, block, state.quant_type, state.dtype
        ),
        blocksize=block,
        compress_statistics=False,
        quant_type=weight.quant_type,
        quant_storage=weight.quant_storage,
        bnb_quantized=True,
    )
    full = dequantize_4bit(weight.data, state)
    expected = torch.cat([full.narrow(dim, a, b - a) for a, b in local_slices], dim)
    if not torch.equal(dequantize_4bit(local.data, local.quant_state), expected):
        raise ConfigError(
            "Cannot shard a 4-bit weight, because the installed version of bitsandbytes stores the values in an "
            "unknown order.",
            remedy="Upgrade bitsandbytes, or use data parallelism instead of tensor parallelism.",
        )
    return local


def get_fp32_block_scales(quant_state: QuantState) -> Tensor:
    """Return the scale of each quantization block of a 4-bit weight in fp32."""
    scales: Tensor = quant_state.absmax
    if quant_state.nested:
        from bitsandbytes.functional import dequantize_blockwise

        scales = dequantize_blockwise(quant_state.absmax, quant_state.state2) + quant_state.offset
    return scales.float()
