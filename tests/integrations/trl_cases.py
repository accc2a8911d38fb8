"""Runs of TRL's trainers, plain or sharded, which the tests compare. The functions run on the workers."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from shardformer.config import ParallelConfig
from tests.integrations.small_models import VOCAB, gpt2, llama, weight_difference
from tests.integrations.trainer_cases import reset_accelerate
from tests.integrations.training_cases import (
    GLOBAL_BATCH,
    TrainingCase,
    resume_twice,
    train_in_new_folder,
    training_settings,
)

GENERATING = ("grpo", "rloo")
"""Trainers that generate completions."""
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}w2 {{ m['content'] }} </s> {% endgeneration %}"
    "{% else %}w1 {{ m['content'] }} {% endif %}{% endfor %}"
)
LOGGED = {
    "sft": ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens"),
    "dpo": ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "rewards/chosen", "rewards/rejected",
            "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected", "logits/chosen"),
    "reward": ("loss", "grad_norm", "num_tokens", "min_reward", "mean_reward", "max_reward", "accuracy", "margin"),
    "kto": ("loss", "grad_norm", "num_tokens", "rewards/chosen", "rewards/rejected", "logps/chosen", "kl"),
    "rloo": ("loss", "grad_norm", "num_tokens", "reward", "reward_std", "completions/mean_length", "entropy"),
    "grpo": ("loss", "grad_norm", "num_tokens", "reward", "reward_std", "completions/mean_length", "entropy",
             "rewards/count_distinct/mean", "clip_ratio/region_mean", "frac_reward_zero_std"),
}  # fmt: skip
"""Trainer -> numbers of its log that must equal those of one process."""


@dataclass(frozen=True)
class Case(TrainingCase):
    """One training configuration under one layout.

    Args:
        rows: format of the rows, see ``data_set``.
        peft: whether to train a LoRA adapter.
        plain_ranks: number of processes of the plain run. With more than one, TRL draws other completions.
    """

    kind: str = "sft"
    model: str = "llama"
    rows: str = "text"
    options: dict[str, Any] = field(default_factory=dict)
    peft: bool = False
    plain_ranks: int = 1

    @property
    def name(self) -> str:
        options = (f"{key}-{value}" for key, value in self.options.items())
        return "_".join(
            [self.kind, self.model, self.rows, "peft" if self.peft else "full", str(self.plain_ranks), *options]
        )


def tokenizer() -> Any:
    """Return a tokenizer with one token for each word, and a chat template that marks what assistants say."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*SPECIAL, *(f"w{number}" for number in range(VOCAB - len(SPECIAL)))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=CHAT, **names)


def data_set(rows: str, count: int, seed: int) -> Any:
    """Return random texts of different lengths.

    Args:
        rows: "text", "completion" (of a prompt), "chat", "pairs" (of completions of a prompt), "judged" (completions),
            "ranked" (texts), or "prompts".
    """
    import datasets

    datasets.disable_progress_bars()
    draw = random.Random(seed)

    def text(shortest: int = 2, longest: int = 9) -> str:
        return " ".join(f"w{draw.randrange(VOCAB - len(SPECIAL))}" for _ in range(draw.randint(shortest, longest)))

    def row() -> dict[str, Any]:
        if rows == "chat":
            turns = [("user", text(1, 3)), ("assistant", text(1, 6))] * draw.randint(1, 2)
            return {"messages": [{"role": role, "content": content} for role, content in turns]}
        if rows == "pairs":
            return {"prompt": text(1, 4), "chosen": " " + text(1, 6), "rejected": " " + text(1, 6)}
        if rows == "prompts":
            return {"prompt": text(1, 5)}
        if rows == "judged":
            return {"prompt": text(1, 4), "completion": " " + text(1, 6), "label": draw.random() < 0.5}
        if rows == "ranked":
            return {"chosen": text(), "rejected": text()}
        return {"prompt": text(1, 4), "completion": " " + text(1, 6)} if rows == "completion" else {"text": text()}

    return datasets.Dataset.from_list([row() for _ in range(count)])


def on_disk(rows: Any, folder: str) -> Any:
    """Return a data set that the first rank writes to a folder."""
    import datasets

    if int(os.environ["RANK"]) == 0:
        rows.save_to_disk(folder)
    torch.distributed.barrier()
    return datasets.load_from_disk(folder)


def reward_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**llama().config.to_dict(), num_labels=1)
    )


def count_distinct(completions: list[str], **_: Any) -> list[float]:
    """Reward of completions: the number of their distinct words."""
    return [float(len(set(text.split()))) for text in completions]


MODELS = {"llama": llama, "gpt2": gpt2, "reward": reward_model}


def make_trainer(folder: str, case: Case, seed: int = 0) -> Any:
    """Create a plain trainer if the case has no layout, and a sharded one otherwise."""
    import trl

    import shardformer.integrations.trl as integration

    reset_accelerate()
    name = case.kind.capitalize() if case.kind == "reward" else case.kind.upper()
    data = case.layout.get("data", 1) if case.layout else case.plain_ranks
    own: dict[str, Any] = {"learning_rate": 1e-2 if case.kind == "sft" else 1e-3, "bf16": False}
    own |= {"max_completion_length": 6, "num_generations": 4} if case.kind in GENERATING else {}
    args = getattr(trl, f"{name}Config")(folder, **training_settings(data, case.options, **own))
    options: dict[str, Any] = {"processing_class": tokenizer()}
    count = 160 if case.options.get("packing") else 40
    options |= {"train_dataset": data_set(case.rows, count, 1), "eval_dataset": data_set(case.rows, GLOBAL_BATCH, 3)}
    if case.options.get("precompute_ref_log_probs"):  # all ranks read the computed values from a file
        options |= {name: on_disk(options[name], f"{folder}_{name}") for name in ("train_dataset", "eval_dataset")}
    if case.layout:
        options |= {"parallel": ParallelConfig(**case.layout)}
    if case.peft:
        import peft

        targets = ["q_proj", "v_proj", "down_proj"]
        options |= {"peft_config": peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)}
    if case.kind in GENERATING:
        options |= {"reward_funcs": [count_distinct]}
    model = MODELS[case.model](seed)
    if case.options.get("beta") and case.kind in GENERATING:  # loads the reference model
        model.config._name_or_path = f"{folder}_reference"
        if int(os.environ["RANK"]) == 0:
            llama(5).save_pretrained(model.config._name_or_path)
        torch.distributed.barrier()
    if case.kind in ("dpo", "kto") and not case.peft and not case.options.get("precompute_ref_log_probs"):
        options |= {"ref_model": MODELS[case.model](5)}
    theirs: Any = getattr(trl, f"{name}Trainer")
    mixed = getattr(integration, f"{name}Trainer", None) or type(name, (integration.ShardedTRLTrainer, theirs), {})
    trainer = (mixed if case.layout else theirs)(model, args=args, **options)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def logged(trainer: Any, kind: str) -> dict[str, list[float]]:
    names = [*LOGGED[kind], *(f"eval_{name}" for name in LOGGED[kind] if name not in ("grad_norm", "learning_rate"))]
    history = trainer.state.log_history
    return {name: [float(entry[name]) for entry in history if name in entry] for name in names}


def metric_difference(name: str, logs: dict[str, list[float]], logs_1: dict[str, list[float]]) -> float:
    """Return the largest difference, relative to the largest value.

    Some metrics are differences or means close to 0, with the rounding errors of their terms. Rewards are beta (0.1)
    times a difference of log-probabilities.
    """
    ours, reference = logs[name], logs_1[name]
    scale = max(map(abs, reference), default=0.0)
    if name.rpartition("eval_")[2].startswith(("rewards/", "kl")) and "logps/chosen" in logs_1:
        scale = max(scale, 0.1 * max(map(abs, logs_1["logps/chosen"])))
    if name.endswith("_reward") and "max_reward" in logs_1:
        scale = max(scale, *map(abs, logs_1["max_reward"]))
    assert len(ours) == len(reference) > 0, name
    return max(abs(a - b) for a, b in zip(ours, reference, strict=True)) / max(scale, 1e-12)


def train(case: Case, root: str) -> dict[str, float]:
    """Train 4 steps. Save the weights and logs in one process; otherwise compare with them, and resume twice.

    Resumes in the middle of the epoch: from the own checkpoint, and from that of the plain trainer.
    """
    (weights, logs), reference = train_in_new_folder(case, root, make_trainer, partial(logged, kind=case.kind))
    if reference is None:
        return {}
    weights_1, logs_1 = reference
    found = {name: metric_difference(name, logs, logs_1) for name in logs}
    found["weights"] = weight_difference(weights, weights_1)
    # adapters are saved without the model, and the initial model computes the log-probabilities of the reference
    seed = 0 if case.peft or case.options.get("precompute_ref_log_probs") else 9
    return found | resume_twice(case, root, partial(make_trainer, case=case, seed=seed), weights_1)


def train_all(cases: Sequence[Case], root: str) -> list[dict[str, float]]:
    return [train(case, root) for case in cases]


def files_of(case: Case, root: str) -> list[str]:
    """Return the names of the files of the last checkpoint."""
    return sorted(path.name for path in Path(root, case.folder, "checkpoint-4").iterdir())
