"""Command ``shardformer generate``, which continues a prompt with a trained model."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from shardformer.cli._options import silence_transformers
from shardformer.cli.run import launch_processes
from shardformer.errors import ConfigError, InputError

OPTION_GROUPS = {
    "Generation": ("max_new_tokens", "temperature", "top_k", "top_p", "seed"),
    "Layout": ("tensor",),
    "Output": ("as_json",),
}


def generate(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The folder of a run, a checkpoint, a folder written by save_pretrained, or a name on the Hugging "
            "Face hub.",
        ),
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of new tokens.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="T", help="Sample, with logits divided by T. By default the likeliest token is taken."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(metavar="K", min=1, help="Sample from the K likeliest tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Sample from the likeliest tokens whose probabilities sum to P, up to 1."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="SEED", min=0, help="Seed of the samples.")] = 0,
    tensor: Annotated[int, typer.Option(metavar="N", min=1, help="Processes that each hold a shard of a layer.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print prompt, text and token ids as JSON.")] = False,
) -> None:
    """Continue PROMPT with a trained model, which may be sharded over several processes.

    The tokens equal those of generate() of transformers in one process.
    """
    silence_transformers()
    from shardformer.config import ParallelConfig
    from shardformer.train_command.trained_model import find_trained_model

    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    options = {name: value for name, value in sampling.items() if value is not None}
    _check_sampling(options)
    found = find_trained_model(model)
    tokenizer = found.load_processor()
    ids = _encode(tokenizer, prompt, found.model_config, max_new_tokens)
    _check_can_generate(found.build(), model)
    launch_processes(context, tensor)
    engine = found.load(ParallelConfig(tensor=tensor))
    tokens = _generate(engine, ids, seed, {"max_new_tokens": max_new_tokens, "do_sample": bool(options), **options})
    if engine.is_first:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        shown = text if found.model_config.is_encoder_decoder else f"{prompt}{text}"
        print(json.dumps({"prompt": prompt, "text": text, "tokens": tokens}) if as_json else shown, flush=True)


def _check_sampling(options: dict[str, float]) -> None:
    """Raise ConfigError for a temperature or a probability outside its range."""
    for name, most in (("temperature", float("inf")), ("top_p", 1.0)):
        if name in options and not 0 < options[name] <= most:
            flag = f"--{name.replace('_', '-')}"
            limit = "above 0" if most > 1 else "above 0 and up to 1"
            raise ConfigError(f"{flag} {options[name]} is not {limit}", remedy=f"Use {flag} 0.8, or remove it")


def _encode(tokenizer: Any, prompt: str, model_config: Any, max_new_tokens: int) -> Any:
    """Return the token ids of a prompt (1, S). Raises InputError if it is empty or too long."""
    from shardformer.train_command.build import max_positions

    if not hasattr(tokenizer, "decode"):
        raise ConfigError("The model has no tokenizer, so it cannot generate text", remedy="Pass a language model")
    if not prompt:
        raise InputError("The prompt '' is empty", remedy="Pass a text to continue")
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    most = max_positions(model_config)
    if most is not None and not model_config.is_encoder_decoder and ids.shape[1] + max_new_tokens > most:
        raise InputError(
            f"The prompt has {ids.shape[1]} tokens, and --max-new-tokens {max_new_tokens} exceeds the {most} positions "
            "of the model",
            remedy=f"Use --max-new-tokens {most - ids.shape[1]}" if ids.shape[1] < most else "Use a shorter prompt",
        )
    return ids


def _check_can_generate(model: Any, name: str) -> None:
    if not model.can_generate():
        raise ConfigError(
            f"The {type(model).__name__} of {name!r} cannot generate text",
            remedy="Pass a model with a language modeling head",
        )


def _generate(engine: Any, ids: Any, seed: int, options: dict[str, Any]) -> list[int]:
    """Return the new tokens. All ranks draw the same samples, because they have the same seed and the same logits."""
    import torch

    torch.manual_seed(seed)
    ids = ids.to(engine.context.device)
    with torch.no_grad():
        output: list[int] = engine.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
    return output if engine.model.config.is_encoder_decoder else output[ids.shape[1] :]
