"""Fine-tune a causal language model on a text file, as the script run_clm.py of transformers does.

    shardformer run --nproc_per_node 2 examples/integrations/run_clm.py --model_name_or_path MODEL \
        --train_file train.txt --validation_file test.txt --output_dir out --do_train --do_eval

Two lines differ from a script for one device: the import of Trainer, and the argument ``parallel``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, TrainingArguments, default_data_collator

from shardformer.integrations.transformers import Trainer


@dataclass
class DataArguments:
    """The model and the data."""

    model_name_or_path: str = field(metadata={"help": "Folder or name of the model and its tokenizer."})
    train_file: str = field(metadata={"help": "Text file for training."})
    validation_file: str = field(metadata={"help": "Text file for evaluation."})
    block_size: int = field(default=128, metadata={"help": "Number of tokens per sample."})


def main() -> None:
    data_args, args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(data_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(data_args.model_name_or_path)
    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw = load_dataset("text", data_files=files, cache_dir=f"{args.output_dir}/data")

    def tokenize(rows: dict) -> dict:
        return tokenizer(rows["text"])

    def group(rows: dict) -> dict:
        tokens = [token for row in rows["input_ids"] for token in row]
        size = data_args.block_size
        blocks = [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
        return {"input_ids": blocks, "labels": blocks}

    with args.main_process_first():
        tokenized = raw.map(tokenize, batched=True, remove_columns=["text"])
        blocks = tokenized.map(group, batched=True, remove_columns=tokenized["train"].column_names)

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=blocks["train"],
        eval_dataset=blocks["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        parallel={"tensor": 2},
    )
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
