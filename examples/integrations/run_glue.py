"""Fine-tune a text classifier on files of sentences with labels, as the script run_glue.py of transformers does.

    shardformer run --nproc_per_node 2 examples/integrations/run_glue.py --model_name_or_path MODEL \
        --train_file train.csv --validation_file test.csv --output_dir out --do_train --do_eval

Two lines differ from a script for one device: the import of Trainer, and the argument ``parallel``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    TrainingArguments,
)

from shardformer.integrations.transformers import Trainer


@dataclass
class DataArguments:
    """The model and the data."""

    model_name_or_path: str = field(metadata={"help": "Folder or name of the model and its tokenizer."})
    train_file: str = field(metadata={"help": "CSV file for training, with the columns sentence and label."})
    validation_file: str = field(metadata={"help": "CSV file for evaluation."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer sentences are truncated."})


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, axis=1) == prediction.label_ids).mean())}


def main() -> None:
    data_args, args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw = load_dataset("csv", data_files=files, cache_dir=f"{args.output_dir}/data")
    num_labels = len(set(raw["train"]["label"]))
    tokenizer = AutoTokenizer.from_pretrained(data_args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(data_args.model_name_or_path, num_labels=num_labels)

    def tokenize(rows: dict) -> dict:
        return tokenizer(rows["sentence"], max_length=data_args.max_seq_length, truncation=True)

    with args.main_process_first():
        rows = raw.map(tokenize, batched=True)

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        parallel={"data": 2, "zero_stage": 1},
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
