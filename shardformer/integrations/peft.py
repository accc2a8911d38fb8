"""Support for PEFT adapters (LoRA, DoRA, IA3, AdaLoRA, LoHa, LoKr, VeRA, prompts) on sharded models.

>>> model = peft.get_peft_model(model, peft.LoraConfig(...))                # doctest: +SKIP
>>> model = shardformer.shard_model(model, context=context)                 # doctest: +SKIP

PEFT's functions can also add adapters to a model that is already sharded: ``peft.get_peft_model``,
``PeftModel.from_pretrained``, ``peft.inject_adapter_in_model`` and ``add_adapter`` of transformers create a
``PeftModel`` or a tuner. Their constructors are replaced by functions that shard the new adapters if the model is
sharded. They are replaced when PEFT is imported, before or after ``shard_model``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from torch import nn

from shardformer.integrations import shard_peft_model
from shardformer.integrations.peft_models import add_and_shard_adapters, patch_peft_methods
from shardformer.integrations.shard_peft_model import has_adapters
from shardformer.layout.sharding_metadata import METADATA_ATTRIBUTE
from shardformer.torch_patches import (
    LibraryPatch,
    Undo,
    call_after_import,
    chain_undo_functions,
    install_patch,
    replace_attribute,
)

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["PEFT_ENTRY_POINTS", "from_pretrained", "get_peft_model", "has_adapters", "shard_model_with_adapters"]


OWNER = "shardformer.integrations.peft"
IMPORT_PATCH = LibraryPatch("sys.meta_path", OWNER, "replaces PEFT's constructors when you import PEFT")
ADAPTER_PATCH = LibraryPatch(
    "peft.PeftModel.__init__, peft.PeftMixedModel.__init__, peft.tuners.tuners_utils.BaseTuner.__init__",
    OWNER,
    "shards the adapters that PEFT adds to a sharded model",
)
_IS_CHANGING: ContextVar[bool] = ContextVar("is_changing", default=False)


def _patch_peft_constructors() -> Undo:
    from peft import PeftMixedModel, PeftModel
    from peft.tuners.tuners_utils import BaseTuner

    kinds = ((PeftModel, True), (PeftMixedModel, True), (BaseTuner, False))
    new = [(kind, _wrap_peft_constructor(kind.__init__, is_model_wrapper=is_wrapper)) for kind, is_wrapper in kinds]
    return chain_undo_functions(*(replace_attribute(kind, "__init__", made) for kind, made in new))


def _wrap_peft_constructor(original_init: Callable[..., None], *, is_model_wrapper: bool) -> Callable[..., None]:
    """Wrap a PEFT constructor so that it also shards the adapters that it adds to a sharded model.

    Args:
        is_model_wrapper: whether the user calls the constructed object instead of the model.
    """

    @wraps(original_init)
    def sharding_init(
        self: PeftModel, model: nn.Module, peft_config: Any, adapter_name: str = "default", *args: Any, **kwargs: Any
    ) -> None:
        if METADATA_ATTRIBUTE not in getattr(model, "__dict__", {}) or _IS_CHANGING.get():
            original_init(self, model, peft_config, adapter_name, *args, **kwargs)
            return

        def run_original_init() -> PeftModel:
            token = _IS_CHANGING.set(True)
            try:
                original_init(self, model, peft_config, adapter_name, *args, **kwargs)
            finally:
                _IS_CHANGING.reset(token)
            return self if is_model_wrapper else model

        config = peft_config[adapter_name] if isinstance(peft_config, dict) else peft_config
        add_and_shard_adapters(model, config, run_original_init)

    return sharding_init


PEFT_ENTRY_POINTS = ("peft", IMPORT_PATCH, partial(install_patch, ADAPTER_PATCH, _patch_peft_constructors))
"""Arguments of ``call_after_import``, which let PEFT's functions add adapters to sharded models."""


def shard_model_with_adapters(
    model: nn.Module, shard_fn: Callable[..., Any], finish_fn: Callable[[nn.Module], object]
) -> tuple[nn.Module, Any]:
    """Shard a model together with its PEFT adapters. See ``shardformer.integrations.shard_peft_model``."""
    return shard_peft_model.shard_model_with_adapters(model, shard_fn, finish_fn, patch_peft_methods)


def get_peft_model(model: nn.Module, *args: Any, **kwargs: Any) -> PeftModel:
    """Add adapters to a sharded or plain model with ``peft.get_peft_model``. All ranks must call it."""
    import peft

    call_after_import(*PEFT_ENTRY_POINTS)
    return peft.get_peft_model(model, *args, **kwargs)


def from_pretrained(model: nn.Module, *args: Any, **kwargs: Any) -> PeftModel:
    """Load adapters into a sharded or plain model with ``PeftModel.from_pretrained``. All ranks must call it."""
    import peft

    call_after_import(*PEFT_ENTRY_POINTS)
    return peft.PeftModel.from_pretrained(model, *args, **kwargs)
