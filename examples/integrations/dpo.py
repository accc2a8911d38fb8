"""Direct preference optimization with TRL, as its script trl/scripts/dpo.py does.

    shardformer run --nproc_per_node 2 examples/integrations/dpo.py --model_name_or_path MODEL \
        --dataset_name trl-lib/ultrafeedback_binarized --output_dir out

Two lines differ from a script for one device: the import of DPOTrainer, and the argument ``parallel``.
"""

from __future__ import annotations

from datasets import load_dataset
from trl import DPOConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config

from shardformer.integrations.trl import DPOTrainer


def main(script_args: ScriptArguments, training_args: DPOConfig, model_args: ModelConfig) -> None:
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    has_test = training_args.eval_strategy != "no"
    trainer = DPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if has_test else None,
        peft_config=get_peft_config(model_args),
        parallel={"data": 2, "zero_stage": 1},
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    trainer.save_state()


if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, DPOConfig, ModelConfig)).parse_args_and_config())
