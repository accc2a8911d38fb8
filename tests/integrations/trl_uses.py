"""Settings that the trainers of TRL refuse, and completions of their ranks. Runs on the workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import transformers

import shardformer
from tests.integrations.small_models import VOCAB, llama
from tests.integrations.trainer_cases import reset_accelerate
from tests.integrations.trl_cases import Case, count_distinct, data_set, make_trainer, tokenizer


def mixing_model() -> Any:
    """Return a model that ignores ``position_ids``, so that packed documents attend to each other."""
    sizes: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
    return transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))


def refusals(folder: str) -> dict[str, str]:
    """Return the messages of the errors by what is refused."""
    import trl

    from shardformer.integrations.transformers import ShardedTrainer
    from shardformer.integrations.trl import DPOTrainer, GRPOTrainer, SFTTrainer, ShardedTRLTrainer

    class ReadsHead(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            hidden = model.base_model(input_ids=inputs["input_ids"]).last_hidden_state
            return (hidden @ model.lm_head.weight.T).logsumexp(-1).mean()

    common: dict[str, Any] = dict(use_cpu=True, bf16=False, report_to=[], max_steps=1, per_device_train_batch_size=4)
    data = {"train_dataset": data_set("text", 16, 1), "processing_class": tokenizer()}
    prompts = {**data, "train_dataset": data_set("prompts", 16, 1), "reward_funcs": count_distinct}

    def sharded() -> Any:
        return shardformer.shard_model(llama(), context=shardformer.launch_from_torch(tensor=2))

    def sft(kind: Any = SFTTrainer, model: Any = None, parallel: Any = None, **options: Any) -> Any:
        reset_accelerate()
        args = trl.SFTConfig(folder, **common, **options)
        parallel = {} if kind is trl.SFTTrainer else {"parallel": parallel or {"tensor": 2}}
        return kind(model or llama(), args=args, **data, **parallel)

    def grpo(parallel: Any, **options: Any) -> Any:
        reset_accelerate()
        args = trl.GRPOConfig(folder, **common, max_completion_length=4, **options)
        return GRPOTrainer(llama(), args=args, parallel=parallel, **prompts)

    def distill() -> Any:
        reset_accelerate()
        args = trl.DistillationConfig(folder, **common, max_completion_length=4)
        kind: Any = type("Distillation", (ShardedTRLTrainer, trl.DistillationTrainer), {})
        return kind(
            llama(), llama(5), args=args, parallel={"tensor": 2}, **{**data, "train_dataset": prompts["train_dataset"]}
        )

    attempts: dict[str, Callable[[], Any]] = {
        "pipe": lambda: sft(parallel={"pipe": 2}),
        "synchronized reference": lambda: DPOTrainer(
            llama(),
            args=trl.DPOConfig(folder, **common, sync_ref_model=True),
            parallel={"data": 2, "zero_stage": 3},
            **{**data, "train_dataset": data_set("pairs", 16, 1)},
        ),
        "vllm": lambda: grpo({"tensor": 2}, use_vllm=True, num_generations=4),
        "generations": lambda: grpo({"tensor": 2}, num_generations=8),
        "packing": lambda: sft(model=mixing_model(), packing=True, max_length=16),
        "packing a sharded model": lambda: sft(model=sharded(), packing=True, max_length=16),
        "mixin of Trainer": lambda: sft(type("Mixed", (ShardedTrainer, trl.SFTTrainer), {})),
        "head": lambda: sft(ReadsHead).train(),
        "distillation": lambda: distill().train(),
        "plain": lambda: sft(trl.SFTTrainer, sharded()).train(),
        "plain evaluates": lambda: sft(trl.SFTTrainer, sharded()).evaluate(data["train_dataset"]),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except shardformer.errors.ConfigError as error:
            found[name] = str(error)
        else:
            found[name] = "not refused"
    return found


def warnings_of_losses(folder: str) -> dict[str, list[str]]:
    """Return the warnings about losses that differ from those of the global batch, by name of the case."""
    pairs: dict[str, Any] = {"kind": "dpo", "rows": "pairs"}
    attempts: dict[str, dict[str, Any]] = {
        **{name: {**pairs, "options": {"loss_type": name}} for name in ("sigmoid", "aot", "aot_unpaired")},
        "tokens": {**pairs, "options": {"loss_type": ["sigmoid", "sft"]}},
        "adapter": {**pairs, "peft": True, "options": {"loss_type": "aot"}},
        "no average": {**pairs, "options": {"loss_type": "aot", "average_tokens_across_devices": False}},
        "SFT": {"rows": "completion", "options": {"packing": True, "max_length": 16, "eval_packing": False}},
        "reward": {"kind": "reward", "model": "reward", "rows": "ranked"},
        "GRPO": {"kind": "grpo", "rows": "prompts"},
    }
    found = {}
    for name, arguments in attempts.items():
        arguments = {**arguments, "options": {**arguments.get("options", {}), "max_steps": 1, "eval_strategy": "no"}}
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            trainer = make_trainer(folder, Case({"data": 2}, **arguments))
            trainer.train()
        assert trainer._trial_output_factors == ()
        found[name] = [text for each in recorded if "global batch" in (text := str(each.message))]
    return found


def completions_of_ranks(layout: dict[str, int], folder: str) -> list[Any]:
    """Return what the reward function of this rank receives in a step."""
    seen: list[Any] = []
    trainer = make_trainer(folder, Case(layout, kind="grpo", rows="prompts", options={"max_steps": 1}))

    def record(completions: list[str], **_: Any) -> list[float]:
        seen.append(list(completions))
        return count_distinct(completions)

    trainer.reward_funcs[0] = record
    trainer.train()
    return seen[0]
