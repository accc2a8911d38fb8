"""Builds small versions of models, on which sharding policies are derived and validated in seconds.

A reduced model also shows which input tokens affect the outputs, for example if packed documents are separated.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property, partial
from itertools import product
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardformer.discovery import example_inputs
from shardformer.discovery.example_inputs import (
    SEEDS,
    ConstantDrawsForward,
    Forward,
    UnknownInputsError,
    draw_like,
    iter_batches_with_labels,
    make_forward_fn,
)
from shardformer.discovery.shrink_config import (
    SMALL_NUMEL,
    ConfigShrinker,
    find_layer_kinds,
    find_missing_module_paths,
    get_num_layers_to_keep,
    match_image_and_text_widths,
    replace_numbers,
)
from shardformer.errors import ConfigError, PolicyError, get_first_message_line
from shardformer.gradient_accumulation.micro_batches import MEDIA_TOKEN_FIELDS, get_special_token_ids
from shardformer.meta_init.lazy_init import copy_and_materialize, has_deferred_weights
from shardformer.sharding.checks import has_library_forward
from shardformer.torch_compat import DropoutBase, TorchDispatchMode, has_real_data, tree_leaves

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RELATIVE = 1e-4
"""Tolerance relative to the largest value of a gradient. Some models cast to fp32, but real errors are much larger."""
ROUNDING = 64
"""Tolerance in eps times the largest gradient, for gradients that are zero except for rounding (bias of a key)."""

FP32_EPS = torch.finfo(torch.float32).eps / 2
"""Relative rounding error of one operation in a model that casts to fp32."""
OPERATIONS = 16  # number of operations whose rounding errors may accumulate


@dataclass(frozen=True)
class ReferenceGradients:
    """Loss and gradients of an unsharded model for one batch, to compare with those of sharded models."""

    model: nn.Module
    forward_fn: Forward
    loss: float
    gradients: dict[str, Tensor | None]
    further_batches: tuple[
        ReferenceGradients, ...
    ] = ()  # references of additional batches with different inputs (images)
    long_batches: tuple[ReferenceGradients, ...] = ()  # references of batches with longer sequences

    @cached_property
    def gradient_tolerances(self) -> dict[str, float]:
        """Largest difference that counts as a rounding error, for the gradient of each parameter."""
        return compute_gradient_tolerances(self.gradients)

    @cached_property
    def fp32_tolerances(self) -> dict[str, float]:
        """Tolerances of the gradients for models that compute in fp32 internally.

        The rounding error depends on cancellation, because the gradient of a scale is a sum over all tokens and may
        be much smaller than its terms. It is therefore measured by changing each weight by an fp32 rounding error.
        """
        moved = copy_with_shared_weights(self.model)
        draws = torch.Generator().manual_seed(0)
        for p in moved.parameters():
            signs = torch.randint(0, 2, p.shape, generator=draws).to(p) * 2 - 1
            p.data = p.detach() * (1 + FP32_EPS * signs)  # not in place, because the values are shared
        found = ReferenceGradients.from_model(moved, self.forward_fn).gradients
        both = {name: (g, found[name]) for name, g in self.gradients.items() if g is not None and g.numel()}
        measured = {n: OPERATIONS * (a - b).abs().max().item() for n, (a, b) in both.items() if b is not None}
        most = ROUNDING * FP32_EPS * max((a.abs().max().item() for a, _ in both.values()), default=0.0)
        return {name: min(x, most) for name, x in measured.items()}  # excludes a router that selects another expert

    def is_within_tolerance(self, param_name: str, grad_difference: float) -> bool:
        """Return whether rounding may explain the difference in a parameter's gradient."""
        return grad_difference <= self.gradient_tolerances[param_name] or grad_difference <= self.fp32_tolerances.get(
            param_name, 0.0
        )

    def find_trained_parameters(self) -> set[str]:
        """Return the names of the parameters whose gradient is not zero."""
        return {name for name, g in self.gradients.items() if g is not None and g.any()}

    @staticmethod
    def from_model(model: nn.Module, forward_fn: Forward) -> ReferenceGradients:
        """Run a forward and a backward pass of ``model``, and return its loss and gradients."""
        model.zero_grad()
        with torch.enable_grad():  # the caller may have disabled gradients
            loss = compute_loss_from_all_outputs(forward_fn(model))
            loss.backward()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return ReferenceGradients(model, forward_fn, loss.item(), gradients)

    def check_is_informative(self) -> None:
        """Raise ValueError if a comparison with this reference could not find an error.

        This happens if the loss or a gradient is not finite, for example because a mask overflows, or if all are 0.
        """
        of = [("The output", torch.tensor(self.loss)), *(("A gradient", g) for g in self.gradients.values())]
        for what, tensor in of:
            if tensor is not None and not tensor.isfinite().all():
                dtype = next(self.model.parameters()).dtype
                raise ValueError(f"{what} of {type(self.model).__name__} is NaN or infinite in {dtype}.")
        if not self.loss or not any(g is not None and bool(g.any()) for g in self.gradients.values()):
            what = "All gradients" if self.loss else "All outputs"
            raise ValueError(
                f"{what} of {type(self.model).__name__} are exactly 0, so a comparison would not find errors."
            )

    @cached_property
    def zero_gradient_patterns(self) -> set[str]:
        """Names of parameters, with * for indices, whose gradients are exactly 0 in all layers."""
        found: dict[str, bool] = {}
        for name, g in self.gradients.items():
            if g is not None and g.numel():
                pattern = replace_numbers(name)
                found[pattern] = found.get(pattern, True) and not g.any()
        return {pattern for pattern, is_zero in found.items() if is_zero}

    def is_gradient_always_zero(self, param_name: str) -> bool:
        """Return whether the gradients of a parameter, and of the same parameter in other layers, are exactly 0."""
        return replace_numbers(param_name) in self.zero_gradient_patterns


def compute_gradient_tolerances(gradients: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Compute the largest difference that counts as a rounding error, for the gradient of each parameter."""
    nonempty = {name: g for name, g in gradients.items() if g is not None and g.numel()}
    largest = {name: g.abs().max().item() for name, g in nonempty.items()}
    floor = ROUNDING * max((torch.finfo(g.dtype).eps * largest[name] for name, g in nonempty.items()), default=0.0)
    return {name: max(RELATIVE * x, floor) for name, x in largest.items()}


def count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def copy_with_shared_weights(model: nn.Module) -> nn.Module:
    """Copy a model so that the copy shares the parameter values but has its own gradients."""
    own: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters() if type(p) is nn.Parameter
    }
    return copy.deepcopy(model, own)


def compute_loss_from_all_outputs(model_output: Any, *, equal_sample_weights: bool = False) -> Tensor:
    """Compute a test loss that depends on all outputs of a model.

    Args:
        equal_sample_weights: whether all samples have equal weights.
    """
    floats = [
        x for x in tree_leaves(unwrap_model_output(model_output)) if isinstance(x, Tensor) and x.is_floating_point()
    ]
    return torch.stack([compute_weighted_mean_square(x, x.shape[equal_sample_weights:]).double() for x in floats]).sum()


def compute_weighted_mean_square(tensor: Tensor, weight_shape: torch.Size) -> Tensor:
    """Compute a mean square with different weights for the elements of a tensor's last dimensions."""
    weights = torch.linspace(0.5, 1.5, weight_shape.numel(), dtype=tensor.dtype, device=tensor.device)
    weights = weights.view(weight_shape)
    return (tensor * weights).square().mean()


def unwrap_model_output(model_output: Any) -> Any:
    """Return the fields of a model output as a dict. A tensor or tuple is returned unchanged."""
    if is_dataclass(model_output) and not hasattr(model_output, "keys"):
        return vars(model_output)
    return dict(model_output) if hasattr(model_output, "keys") else model_output


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to zero, because sharded models draw different random numbers."""
    for module in model.modules():
        if isinstance(module, DropoutBase):
            module.p = 0.0
        for owner in (module, getattr(module, "config", None)):
            for name, value in list(vars(owner).items()) if owner is not None else ():
                if "drop" in name and isinstance(value, float):
                    setattr(owner, name, 0.0)


def copy_patched_forward_methods(reduced_model: nn.Module, model: nn.Module) -> None:
    """Copy the user's replacements of `forward` methods from ``model`` to its small version.

    Raises:
        ValueError: if the reduced model lacks the module, or if the method is not bound to its module, because it would
            run on the module of ``model``.
    """
    places = dict(reduced_model.named_modules())
    for path, module in model.named_modules():
        if "forward" not in vars(module):
            continue
        method = vars(module)["forward"]
        if not (inspect.ismethod(method) and method.__self__ is module):
            raise ValueError(
                f"The replaced forward method of {path} is not bound to this module, so it cannot be copied. "
                "Bind it with types.MethodType(function, module)."
            )
        if path in places:
            places[path].__dict__["forward"] = MethodType(method.__func__, places[path])
    if missing := _count_patched_forward_methods(model).keys() - _count_patched_forward_methods(reduced_model).keys():
        path = next(iter(missing))[0]
        raise ValueError(f"The forward method of {path} was replaced, but a small version of the model lacks {path}.")


def _count_patched_forward_methods(model: nn.Module) -> Counter[tuple[str, Any]]:
    found = ((path, vars(m)["forward"]) for path, m in model.named_modules() if "forward" in vars(m))
    return Counter((replace_numbers(path), getattr(method, "__func__", None)) for path, method in found)


@contextmanager
def check_original_weights_not_read(original_model: nn.Module) -> Iterator[None]:
    """Raise ValueError if a copied model uses weights or buffers of the original model in this context.

    This happens if a replaced `forward` or a hook is a closure over a module, because copies share the closure. A
    comparison with such a copy would be meaningless, and its gradients would be added to those of the model.
    """
    watch = _WeightReadDetector(original_model)
    try:
        with watch:
            yield
    except Exception as error:
        if not watch.found:
            raise
        raise ValueError(_NOT_INDEPENDENT) from error
    if watch.found:
        raise ValueError(_NOT_INDEPENDENT)


_NOT_INDEPENDENT = (
    "A replaced forward method or a hook refers to modules of the original model, so a copy of the model cannot run. "
    "Use the module argument instead."
)


class _WeightReadDetector(TorchDispatchMode):
    """Dispatch mode that raises RuntimeError if an operation reads a weight or buffer of ``watched_model``."""

    def __init__(self, watched_model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        tensors = (
            x
            for x in (*watched_model.parameters(), *watched_model.buffers())
            if has_real_data(x) and x.layout == torch.strided
        )
        self._storages = {x.untyped_storage().data_ptr() for x in tensors if x.numel()}
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and has_real_data(x):
                self.found = self.found or x.untyped_storage().data_ptr() in self._storages
        if self.found:
            raise RuntimeError(_NOT_INDEPENDENT)
        return func(*args, **(kwargs or {}))


def make_validation_cache_key(model: nn.Module) -> Hashable | None:
    """Return a cache key for validation results, or None for a model with user code or without a config."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string") or not all(map(has_library_forward, model.modules())):
        return None
    kinds = frozenset((replace_numbers(path), type(module)) for path, module in model.named_modules())
    return type(model), config.to_json_string(), kinds


PRECISIONS = (torch.float64, torch.float32)
ONE_AT_A_TIME = threading.RLock()  # ranks that are threads share the random state, which validation sets
UNTRIED = "the layout was not validated, because no small batch could be generated"
"""The reason why an input with which the reduced model was never called is not supported."""
LONG_LENGTHS = (36, 18)  # lengths of longer sequences to try
MAX_UNMATCHED_NUMEL = 10 * SMALL_NUMEL
"""Largest number of parameters of a reduced model before the widths of its submodels are matched."""


@dataclass(frozen=True)
class MediaForwardPass:
    """A forward pass with images or audio, for a small version of a model."""

    forward_fn: Forward
    input_names: tuple[str, ...]  # names of the additional inputs


@dataclass(frozen=True)
class ReducedModel:
    """A small version of a model, with example batches on which it can be trained."""

    model: nn.Module
    forward_fn: Forward
    batch: Mapping[str, Tensor]
    media_forward_passes: tuple[MediaForwardPass, ...] = ()  # calls with additional inputs
    untried_inputs: tuple[str, ...] = ()  # image and audio inputs for which no batch could be generated

    def compute_reference_gradients(self, forward_fn: Forward | None = None) -> ReferenceGradients:
        """Compute the loss and gradients of each example batch. ``forward_fn`` replaces the first batch."""
        return replace(
            ReferenceGradients.from_model(self.model, forward_fn or self.forward_fn),
            further_batches=self.compute_media_gradients(),
        )

    def compute_media_gradients(self) -> tuple[ReferenceGradients, ...]:
        """Compute the loss and gradients of each example batch with images or audio."""
        return tuple(
            ReferenceGradients.from_model(self.model, further.forward_fn) for further in self.media_forward_passes
        )

    def add_long_batch(self, reference: ReferenceGradients) -> ReferenceGradients:
        """Add a batch with longer sequences to a reference, because layers may run other code for them.

        The reference is returned unchanged if the model does not accept longer sequences.
        """
        lengths = {name: x.shape[1] for name, x in self.batch.items() if self._has_token_dim(x)}
        for size in LONG_LENGTHS if lengths else ():
            if (repeats := size // max(lengths.values())) > 1:
                longer = {n: torch.cat([x] * repeats, 1) if n in lengths else x for n, x in self.batch.items()}
                run = draw_like(self.forward_fn, make_forward_fn(self.model, longer))
                try:
                    found = ReferenceGradients.from_model(copy.deepcopy(self.model), run)
                    found.check_is_informative()
                    return replace(reference, long_batches=(replace(found, model=self.model),))
                except Exception:  # the model limits the length, or other inputs must match it
                    continue
        return reference

    def _has_token_dim(self, model_input: Tensor) -> bool:
        dims_of_tokens = 3 if model_input.is_floating_point() else 2
        return model_input.dim() == dims_of_tokens and len(model_input) == self.num_samples

    def get_unvalidated_input_reasons(self, media_failure: str | None) -> dict[str, str]:
        """Return the reason why each unvalidated input could not be validated, by input name.

        Args:
            media_failure: why the calls with additional inputs failed, or None if they passed.
        """
        further = (
            [name for each in self.media_forward_passes for name in each.input_names]
            if media_failure is not None
            else []
        )
        return {**dict.fromkeys(self.untried_inputs, UNTRIED), **dict.fromkeys(further, media_failure or "")}

    @property
    def num_samples(self) -> int:
        return Counter(len(x) for x in self.batch.values() if x.dim()).most_common(1)[0][0]


def reduce_model(
    model: nn.Module, batch: Mapping[str, Tensor] | None = None, *, with_media_tokens: bool = False
) -> ReducedModel:
    """Build a small version of a model that can be trained on the CPU, in fp64 if possible.

    Args:
        batch: keyword arguments of `forward`, or None to generate them.
        with_media_tokens: whether the batch contains images and audio in the text, instead of text only.

    Raises:
        PolicyError: if no reduced model can be built and run, and the model is too large to be copied.
    """
    problems: list[str] = []
    copies = _get_model_copy_fns(model)
    try:
        makes = [*_iter_reduced_model_builders(model), *copies]
    except Exception as error:  # the class needs more than a config, or cannot be built with different configs
        makes, problems = copies, [_format_short_error(error)]
    for make, dtype in product(makes, PRECISIONS):
        try:
            reduced = _build_on_cpu(make, dtype)
            if make not in copies:
                if count := len(find_layer_kinds(model) - find_layer_kinds(reduced)):
                    raise ValueError(f"{count} layer types of the model are missing in a small version of the model.")
                copy_patched_forward_methods(reduced, model)
            with check_original_weights_not_read(model):
                run, batch_used = _find_trainable_batch(reduced, batch, with_media_tokens=with_media_tokens)
            further = (
                ()
                if batch is not None or with_media_tokens
                else tuple(_iter_media_forward_passes(reduced, batch_used, run))
            )
            tried = {*batch_used, *(name for each in further for name in each.input_names)}
            media = example_inputs.get_media_argument_names(reduced) if batch is None else []
            return ReducedModel(reduced, run, batch_used, further, tuple(name for name in media if name not in tried))
        except UnknownInputsError:
            raise  # applies to every reduced model
        except PolicyError as error:
            problems.append(error.what)
        except Exception as error:  # unknown constraints between config fields
            problems.append(_format_short_error(error))
    found = "; ".join(dict.fromkeys(problems)) or f"it has {count_parameters(model):,} parameters and no config"
    raise PolicyError(
        f"Cannot build and run a small version of {type(model).__name__} to derive or validate a policy: {found}.",
        remedy="Write a policy (docs/policies.md), or pass an example batch to derive_policy(model, batch).",
    )


def _format_short_error(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:160].rstrip('.')}"


def _get_model_copy_fns(model: nn.Module) -> list[Callable[[], nn.Module]]:
    make_copy = partial(copy_and_materialize if has_deferred_weights(model) else copy.deepcopy, model)
    return [make_copy] if count_parameters(model) <= SMALL_NUMEL else []


def copy_as_reduced_model(model: nn.Module) -> ReducedModel:
    """Copy a small model without its hooks, and find an example batch to train the copy on the CPU.

    Raises:
        PolicyError: if the model is too large, or the copy cannot be run.
    """
    problem = f"it has more than {SMALL_NUMEL:,} parameters"
    for make, dtype in product(_get_model_copy_fns(model), PRECISIONS):
        try:
            reduced = remove_all_hooks(_build_on_cpu(make, dtype))
            with check_original_weights_not_read(model):
                return ReducedModel(reduced, *_find_trainable_batch(reduced, None, allow_guessed_inputs=True))
        except PolicyError as error:
            problem = error.what
        except Exception as error:  # user code may raise anything
            problem = f"{type(error).__name__}: {get_first_message_line(error)[:160]}"
    raise PolicyError(
        f"Cannot run a copy of {type(model).__name__} to validate its policy: {problem}.",
        remedy="To validate the policy, call "
        "shardformer.verify.verification.verify(make_model, batches, tensor=2, policy=...).",
    )


def reduce_or_copy_model(model: nn.Module) -> ReducedModel:
    """Build a small version of a model, or copy the model if that is not possible.

    Raises:
        PolicyError: if neither is possible.
    """
    try:
        return reduce_model(model)
    except PolicyError as error:
        problem = error.what
    try:
        return copy_as_reduced_model(model)
    except PolicyError as error:
        raise PolicyError(
            f"Cannot run a small version or a copy of {type(model).__name__} to validate how it is sharded: {problem}; "
            f"{error.what}.",
            remedy="Change the model's constructor to take only a config and store it as self.config, or give default "
            "values to all arguments of forward except the input tokens or features.",
        ) from None


def remove_all_hooks(model: nn.Module) -> nn.Module:
    """Remove all forward and backward hooks from a model, and return the model."""
    for module in model.modules():
        for name, table in vars(module).items():
            if name.startswith("_") and name.endswith(("forward_hooks", "forward_pre_hooks", "backward_hooks")):
                table.clear()
    return model


def _build_on_cpu(build_model: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model().to(device="cpu", dtype=dtype).eval().requires_grad_(True)
    return add_noise_to_constant_values(model)


PERTURBATION = 0.05
"""Scale of the noise that is added to parameters, because parameters initialized to 0 would hide dependences."""


def add_noise_to_constant_values(model: nn.Module, *, to_all_values: bool = False) -> nn.Module:
    """Add seeded noise to parameters in place, so that no value hides how the outputs depend on the other values.

    A layer initialized to zeros hides all layers before it, and a scale of ones hides how its elements are sharded.

    Args:
        to_all_values: whether noise is also added to parameters whose values differ.

    Returns:
        The same model.
    """
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel():
                noise = PERTURBATION * torch.randn(p.shape, generator=draws).to(p)
                first = p.flatten()[0]
                if not to_all_values and first and (p == first).all():
                    p.data = p + noise.abs() * first.sign()  # a positive scale stays positive
                else:
                    p.data = torch.where(p.eq(0) | to_all_values, p + noise, p)
    return model


def _iter_reduced_model_builders(model: nn.Module) -> Iterator[Callable[[], nn.Module]]:
    if not hasattr(getattr(model, "config", None), "to_dict"):
        return
    shrinker = ConfigShrinker(model)
    # with the default number of layers, or as many as needed for one of each kind
    separate = (False, True) if shrinker.has_different_hidden_sizes else (False,)
    names = ("separate_hidden_sizes", "recompute_derived", "even", "layers")
    for values in product(separate, (False, True), (False, True), dict.fromkeys((0, get_num_layers_to_keep(model)))):
        yield partial(_build_reduced_model, shrinker, **dict(zip(names, values, strict=True)))


def _build_reduced_model(shrinker: ConfigShrinker, **shrink_options: Any) -> nn.Module:
    small = shrinker.make_small_config(**shrink_options)
    # matching the widths of submodels may reduce the model further
    if (numel := shrinker.count_model_parameters(small)) <= MAX_UNMATCHED_NUMEL:
        model = type(shrinker.model)(small)
        model = match_image_and_text_widths(model, small) if hasattr(model, "get_input_embeddings") else model
        numel = count_parameters(model)
    if numel > SMALL_NUMEL:
        raise ValueError(f"A small version of the model has {numel:,} parameters, more than {SMALL_NUMEL:,}.")
    if missing := find_missing_module_paths(model, shrinker.full_width_model):
        raise ValueError(f"A small version of the model lacks {missing[0]}.")
    return model


def _find_trainable_batch(
    reduced_model: nn.Module,
    user_batch: Mapping[str, Tensor] | None,
    *,
    with_media_tokens: bool = False,
    allow_guessed_inputs: bool = False,
) -> tuple[Forward, Mapping[str, Tensor]]:
    """Find the first batch on which the model can be trained, and return its forward function and the batch.

    The batch contains labels if possible. The model is set to training mode if it trains deterministically.
    """
    problem: Exception | None = None
    for inputs in (
        [user_batch]
        if user_batch is not None
        else _iter_example_batches(
            reduced_model, with_media_tokens=with_media_tokens, allow_guessed_inputs=allow_guessed_inputs
        )
    ):
        for candidate in (*iter_batches_with_labels(reduced_model, inputs), inputs):
            run = make_forward_fn(reduced_model, candidate)
            try:
                native = copy.deepcopy(reduced_model)  # some modules store results of a forward pass
                if candidate is not inputs and getattr(run(native), "loss", None) is None:
                    continue
                reference = ReferenceGradients.from_model(native, run)
                reference.check_is_informative()
                reseeded = make_forward_fn(reduced_model, candidate, seed=1)
                return _set_training_mode_if_deterministic(reduced_model, reference, reseeded), candidate
            except Exception as error:
                problem = error if problem is None or candidate is inputs else problem
    assert problem is not None
    raise problem


def _iter_example_batches(
    reduced_model: nn.Module, *, with_media_tokens: bool, allow_guessed_inputs: bool = False
) -> Iterator[Mapping[str, Tensor]]:
    """Yield example batches for a model, with guessed inputs last.

    Args:
        with_media_tokens: whether batches with images or audio in the text come before batches with text only.
    """
    guessed = example_inputs.guess_example_batches(reduced_model) if allow_guessed_inputs else []
    try:
        known = example_inputs.make_example_batches(reduced_model)
    except UnknownInputsError:
        if not guessed:
            raise
        known = []
    ways = [
        example_inputs.iter_batches_with_media_tokens(
            reduced_model, dict(example_inputs.iter_inputs_for_known_arguments(reduced_model))
        ),
        known,
    ]
    for way in ways if with_media_tokens else reversed(ways):
        yield from way
    yield from guessed


def find_accepted_example_batch(model: nn.Module) -> Mapping[str, Tensor]:
    """Return the first example batch that a model accepts, with labels if they make the model return a loss.

    Raises the error of the first batch if the model accepts none.
    """
    problem: Exception | None = None
    for inputs in _iter_example_batches(model, with_media_tokens=True):
        for candidate in (*iter_batches_with_labels(model, inputs), inputs):
            try:
                with torch.no_grad():
                    output = make_forward_fn(model, candidate)(model)
                if candidate is inputs or getattr(output, "loss", None) is not None:
                    return candidate
            except Exception as error:
                problem = problem or error
    assert problem is not None
    raise problem


def _iter_media_forward_passes(
    reduced_model: nn.Module, text_batch: Mapping[str, Tensor], text_forward_fn: Forward
) -> Iterator[MediaForwardPass]:
    """Yield a forward pass with images or audio if the model accepts them and ``text_batch`` has none."""
    made = dict(example_inputs.iter_inputs_for_known_arguments(reduced_model))
    for inputs in (*example_inputs.iter_batches_with_media_tokens(reduced_model, made), made):
        floats = [name for name, x in inputs.items() if x.is_floating_point()]
        adds_media = _has_media_tokens(reduced_model, inputs) and not _has_media_tokens(reduced_model, text_batch)
        names = tuple(name for name in floats if adds_media or name not in text_batch)
        for candidate in (*iter_batches_with_labels(reduced_model, inputs), inputs) if names else ():
            run = draw_like(text_forward_fn, make_forward_fn(reduced_model, candidate))
            try:
                if candidate is not inputs and getattr(run(copy.deepcopy(reduced_model)), "loss", None) is None:
                    continue
                ReferenceGradients.from_model(copy.deepcopy(reduced_model), run).check_is_informative()
            except Exception:  # a layout for another model
                continue
            yield MediaForwardPass(run, names)
            return


def _has_media_tokens(reduced_model: nn.Module, inputs: Mapping[str, Tensor]) -> bool:
    special = get_special_token_ids(getattr(reduced_model, "config", None))
    ids = [x for name, x in special.items() if name.startswith(tuple(example_inputs.MODALITIES))]
    return MEDIA_TOKEN_FIELDS in inputs and bool(torch.isin(inputs[MEDIA_TOKEN_FIELDS], torch.tensor([*ids, -1])).any())


def _set_training_mode_if_deterministic(
    reduced_model: nn.Module, eval_reference: ReferenceGradients, reseeded_forward_fn: Forward
) -> Forward:
    """Put a model into training mode without dropout, or into eval mode if training fails or is not deterministic.

    Returns the forward pass for this mode. If training is random, it replaces random numbers by constants.
    """
    run = eval_reference.forward_fn
    disable_dropout(reduced_model.train())
    trained_in_eval = eval_reference.find_trained_parameters()
    unchanged = _find_trained_parameters(reduced_model, run, reseeded_forward_fn)
    if unchanged is not None and unchanged >= trained_in_eval:
        return run
    for value in SEEDS:
        forward_fn, reseeded = (ConstantDrawsForward(fn, value) for fn in (run, reseeded_forward_fn))
        trained = _find_trained_parameters(reduced_model, forward_fn, reseeded)
        if trained is not None and trained >= trained_in_eval:  # otherwise random numbers may disable layers
            return forward_fn
    reduced_model.train(unchanged is not None)
    return run


def _find_trained_parameters(
    reduced_model: nn.Module, forward_fn: Forward, reseeded_forward_fn: Forward
) -> set[str] | None:
    """Return the names of the parameters with gradients, or None if a model does not train deterministically."""
    try:
        first, again = copy.deepcopy(reduced_model), copy.deepcopy(reduced_model)
        reference = ReferenceGradients.from_model(first, forward_fn)
        reference.check_is_informative()
        losses = [compute_loss_from_all_outputs(call(again)).item() for call in (forward_fn, reseeded_forward_fn)]
    except Exception:  # the caller tries another mode
        return None
    return reference.find_trained_parameters() if set(losses) == {reference.loss} else None


# B batch, S sequence, V vocabulary

LENGTH = 8
NOISE = 1e-5
"""Relative tolerance for equal outputs, because experts that receive different tokens round differently."""
IGNORED = -100
"""Label that the loss ignores."""


@dataclass(frozen=True)
class TokensAffectingPrediction:
    """Input tokens that affect how a language model predicts a label.

    Args:
        depends_on_label: Whether the label token or later tokens change the prediction.
        depends_on_later_tokens: Whether later tokens change the prediction.
        is_label_aligned: Whether the loss compares the label with the output at the same position.
    """

    depends_on_label: bool
    depends_on_later_tokens: bool
    is_label_aligned: bool


def measure_label_dependence(model: PreTrainedModel) -> TokensAffectingPrediction | None:
    """Measure which input tokens affect the prediction of a label, or return None if the model does not run.

    The measurement uses a copy of the model, or a reduced model if the model is large.
    """
    for dtype in (torch.float64, torch.float32):
        try:
            small, ids_BS = _make_small_model_and_token_ids(model)
            return _measure_small_model_dependence(small.to(dtype), ids_BS)
        except Exception:  # the model requires other inputs or fp32, or returns other outputs
            continue
    return None


def check_packing_support(
    model: PreTrainedModel, option_name: str = "data.packing = true", remedy: str = "Remove data.packing"
) -> None:
    """Raise ConfigError if a model lets documents attend to each other when they are packed into one row.

    The documents are separated by restarting ``position_ids``. The output of a packed document is compared with that of
    the document alone, on a copy of the model or a reduced model. Communicates nothing, and keeps the random state.
    ``option_name`` is the setting that the error names.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            small, ids_BS = _make_small_model_and_token_ids(model)
            is_separated = _are_packed_documents_isolated(small.to(torch.float64), ids_BS)
            reason = "lets packed documents attend to each other"
        except Exception as error:  # the model takes no position_ids
            is_separated, reason = False, f"does not accept packed documents: {get_first_message_line(error)}"
    if not is_separated:
        raise ConfigError(
            f"{option_name} is not supported for {type(model).__name__}, because this model {reason}.",
            rule="Packing requires a model that uses position_ids to separate the documents in a row.",
            remedy=remedy,
        )


def _are_packed_documents_isolated(model: nn.Module, input_ids_BS: Tensor) -> bool:
    input_ids_BS, start = input_ids_BS[:, :LENGTH], LENGTH // 2
    positions_BS = torch.arange(start).repeat(2).expand_as(input_ids_BS)
    with torch.no_grad():
        packed_BSV = model(input_ids=input_ids_BS, position_ids=positions_BS, use_cache=False)["logits"]
        alone_BSV = model(input_ids=input_ids_BS[:, start:], position_ids=positions_BS[:, start:], use_cache=False)[
            "logits"
        ]
    difference = (packed_BSV[:, start:] - alone_BSV).abs().max()
    return bool(difference <= NOISE * alone_BSV.abs().max())


def _make_small_model_and_token_ids(model: PreTrainedModel) -> tuple[nn.Module, Tensor]:
    """Return a CPU copy or a small version of a model, and a sequence of input tokens."""
    if sum(p.numel() for p in model.parameters()) > SMALL_NUMEL:
        reduced = reduce_model(model)
        small, ids_BS = reduced.model, reduced.batch["input_ids"][:1]
    else:
        small = (copy_and_materialize if has_deferred_weights(model) else copy.deepcopy)(model)
        special = {value for name, value in model.config.to_dict().items() if name.endswith("_token_id")}
        plain = [token for token in range(model.get_input_embeddings().num_embeddings) if token not in special]
        ids_BS = torch.tensor(plain)[torch.randperm(len(plain))[None, :LENGTH]]
    return add_noise_to_constant_values(small.cpu().eval(), to_all_values=True), ids_BS


def _measure_small_model_dependence(model: nn.Module, input_ids_BS: Tensor) -> TokensAffectingPrediction:
    position = input_ids_BS.shape[1] // 2
    labels_BS = torch.full_like(input_ids_BS, IGNORED)
    labels_BS[:, position] = input_ids_BS[:, position]
    output: Mapping[str, Tensor] = model(input_ids=input_ids_BS, labels=labels_BS)
    logits_BSV = output["logits"]
    (gradient_BSV,) = torch.autograd.grad(output["loss"], [logits_BSV])
    compared = gradient_BSV.abs().sum((0, 2)).nonzero().flatten().tolist()

    def depends_on_tokens_from(start_position: int) -> bool:
        other_BS = input_ids_BS.clone()
        other_BS[:, start_position:] = input_ids_BS.roll(1, 1)[:, start_position:]
        with torch.no_grad():
            other_BSV = model(input_ids=other_BS)["logits"]
        if not torch.isfinite(other_BSV).all():
            raise ValueError("The logits of the model contain NaN or infinite values.")
        difference = (other_BSV - logits_BSV)[:, compared].abs().max()
        return bool(difference > NOISE * logits_BSV.abs().max())

    return TokensAffectingPrediction(
        depends_on_tokens_from(position), depends_on_tokens_from(position + 1), is_label_aligned=compared == [position]
    )
