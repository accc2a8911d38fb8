"""The ``shardformer generate`` command, which generates text from a prompt with a trained model."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardformer.cli._options import silence_transformers
from shardformer.cli.run import relaunch_command_in_processes
from shardformer.errors import ConfigError, InputError, get_first_message_line

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from shardformer.train_command.trained_model import SavedModel

OPTION_GROUPS = {
    "Prompt": ("raw", "system"),
    "Generation": ("max_new_tokens", "temperature", "top_k", "top_p", "seed"),
    "Layout": ("tensor",),
    "Output": ("as_json",),
}


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder of a training run or of a checkpoint, a folder written by save_pretrained, or a name on the "
        "Hugging Face Hub.",
    ),
]
PromptArgument = Annotated[
    str,
    typer.Argument(
        metavar="PROMPT", help="Text to continue. For a model trained on conversations: the message to answer."
    ),
]


def generate(
    context: typer.Context,
    model: ModelArgument,
    prompt: PromptArgument,
    raw: Annotated[
        bool, typer.Option("--raw", help="Pass PROMPT to the model unchanged, without the chat template.")
    ] = False,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="System message before PROMPT, for a model trained on conversations."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of new tokens.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="T", help="Sample with temperature T. Default: always take the most likely token."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(metavar="K", min=1, help="Sample from the K most likely tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Sample from the smallest set of tokens with a total probability of P."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="SEED", min=0, help="Random seed for sampling.")] = 0,
    tensor: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Tensor parallel size: the number of shards of every layer."),
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the prompt, the model input, the text and its tokens as JSON.")
    ] = False,
) -> None:
    """Generate text from PROMPT with a trained model, which can be sharded over several processes.

    If the model was trained on conversations, PROMPT is inserted into the chat template as a user message, and the
    answer is printed. The tokens are the same as from transformers' generate() on a single device.
    """
    silence_transformers()
    from shardformer.config import ParallelConfig
    from shardformer.train_command.trained_model import find_saved_model

    options = _validate_sampling_options({"temperature": temperature, "top_k": top_k, "top_p": top_p})
    found = find_saved_model(model)
    tokenizer = found.load_processor()
    is_chat, text_in = _maybe_apply_chat_template(found, tokenizer, prompt, system, raw)
    ids = _tokenize_prompt(tokenizer, text_in, found.model_config, max_new_tokens, is_chat)
    _check_can_generate(found.build_lazy_model(), model)
    relaunch_command_in_processes(context, tensor)
    engine = found.load_engine(ParallelConfig(tensor=tensor))
    stop = _get_stop_kwargs(engine.model, tokenizer) if is_chat else {}
    options = {"max_new_tokens": max_new_tokens, "do_sample": bool(options), **options, **stop}
    tokens = _generate_tokens(engine, ids, seed, options)
    if engine.is_first:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        text = text.removesuffix(*stop.get("stop_strings", [""]))
        result = {"prompt": prompt, "chat_template": is_chat, "input": text_in, "text": text}
        _print_generated_text({**result, "tokens": tokens}, as_json, found.model_config.is_encoder_decoder or is_chat)


def _print_generated_text(generation_result: dict[str, Any], as_json: bool, omit_prompt: bool) -> None:
    if as_json:
        print(json.dumps(generation_result), flush=True)
        return
    if generation_result["chat_template"]:
        note = "The prompt was inserted into the chat template as a user message. Use --raw to continue it unchanged."
        print(note, file=sys.stderr, flush=True)
    print(
        generation_result["text"] if omit_prompt else f"{generation_result['prompt']}{generation_result['text']}",
        flush=True,
    )


def _maybe_apply_chat_template(
    saved_model: SavedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    system_message: str | None,
    skip_chat_template: bool,
) -> tuple[bool, str]:
    """Apply the model's chat template to the prompt, if it has one. Return whether it has, and the input text."""
    if not prompt:
        raise InputError("The prompt '' is empty.", remedy="Pass the text that the model should continue.")
    if skip_chat_template or saved_model.chat_template is None:
        if system_message is not None:
            reason = "--raw skips the chat template" if skip_chat_template else "the model has no chat template"
            raise ConfigError(
                f"--system {system_message!r:.60} has no effect, because {reason}.",
                remedy="Remove --system, or use a model that was trained on conversations, without --raw.",
            )
        return False, prompt
    messages = [] if system_message is None else [{"role": "system", "content": system_message}]
    return True, _apply_chat_template(tokenizer, [*messages, {"role": "user", "content": prompt}], True)


def _apply_chat_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], add_generation_prompt: bool
) -> str:
    try:
        found: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return found
    except Exception as error:  # templates raise their own errors
        reason = get_first_message_line(error)
        raise InputError(
            f"The chat template of the model rejected the messages {messages!r:.120}: {reason}.",
            remedy="Remove --system, or pass the full text of the conversation as PROMPT with --raw.",
        ) from error


def _get_stop_kwargs(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return arguments for ``model.generate`` that stop after the model's answer."""
    ask, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    prompt, whole = _apply_chat_template(tokenizer, [ask], True), _apply_chat_template(tokenizer, [ask, answer], False)
    end = whole.removeprefix(f"{prompt}b").strip() if whole.startswith(f"{prompt}b") else ""
    ids = model.generation_config.eos_token_id
    ends = [*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id]
    options: dict[str, Any] = {"eos_token_id": sorted({token for token in ends if token is not None})}
    if end and end != tokenizer.eos_token:
        options |= {"stop_strings": [end], "tokenizer": tokenizer}
    return options


def _validate_sampling_options(sampling_options: dict[str, float | None]) -> dict[str, Any]:
    """Check sampling options such as ``temperature``, and drop those that are None. Raises ConfigError."""
    options = {name: value for name, value in sampling_options.items() if value is not None}
    for name, most in (("temperature", float("inf")), ("top_p", 1.0)):
        if (value := options.get(name)) is not None and not 0 < value <= most:
            flag = f"--{name.replace('_', '-')}"
            limit = "greater than 0" if most > 1 else "greater than 0 and at most 1"
            raise ConfigError(f"{flag} must be {limit}, but got {value}.", remedy=f"For example, use {flag} 0.8.")
    return options


def _tokenize_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, model_config: PreTrainedConfig, max_new_tokens: int, is_chat: bool
) -> Tensor:
    """Tokenize a prompt into token ids of shape (1, sequence length). Raises InputError if the prompt is too long."""
    from shardformer.train_command.build import get_max_sequence_length

    if not hasattr(tokenizer, "decode"):
        raise ConfigError("The model has no tokenizer.", remedy="Pass a language model with a tokenizer.")
    special = {"add_special_tokens": False} if is_chat else {}  # a template contains them
    ids: Tensor = tokenizer(prompt, return_tensors="pt", **special)["input_ids"]
    length, most = ids.shape[1], get_max_sequence_length(model_config)
    if most is not None and not model_config.is_encoder_decoder and length + max_new_tokens > most:
        shorter = f", or --max-new-tokens {most - length}" if length < most else ""
        raise InputError(
            f"The prompt of {length} tokens and --max-new-tokens {max_new_tokens} together exceed the model's maximum "
            f"sequence length of {most} tokens.",
            remedy=f"Use a shorter prompt{shorter}.",
        )
    return ids


def _check_can_generate(model: PreTrainedModel, model_name: str) -> None:
    if not model.can_generate():
        raise ConfigError(
            f"{model_name!r} is a {type(model).__name__}, which cannot generate text.",
            remedy="Pass a model with a language modeling head.",
        )


def _generate_tokens(engine: Any, input_ids: Tensor, seed: int, generate_kwargs: dict[str, Any]) -> list[int]:
    """Generate new token ids. All ranks draw the same samples, because they have the same seed and logits."""
    import torch

    torch.manual_seed(seed)
    input_ids = input_ids.to(engine.context.device)
    with torch.no_grad():
        output: list[int] = engine.model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), **generate_kwargs
        )[0].tolist()
    return output if engine.model.config.is_encoder_decoder else output[input_ids.shape[1] :]
