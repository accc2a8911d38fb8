"""Fine-tune BERT on sentence pairs under several layouts, and compare how it converges.

    python examples/convergence.py --data mrpc --model DIR --all

trains in one process, with tensor parallelism over two, with context parallelism over two, and in two pipeline stages
with ZeRO 1 over four. It then prints accuracy, F1 and loss of each layout, and plots the losses. ``--data`` is a folder
with the Microsoft Research Paraphrase Corpus, ``--model`` a folder with a pretrained BERT and its tokenizer. To train
with a single layout, use a launcher:

    shardformer run --nproc_per_node 2 examples/convergence.py --data mrpc --model DIR --tensor 2 --out runs/tensor
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import shardformer
from shardformer.hooks import JsonLines, Metrics, Progress, Throughput
from shardformer.training.metrics_log import read_metrics_records

# settings of the published table: micro-batches of two samples, eight per step
BATCH, ACCUMULATION, EPOCHS, RATE, WARMUP = 2, 8, 3, 2.4e-5, 0.03
LAYOUTS = {
    "one process": (1, []),
    "tensor 2": (2, ["--tensor", "2"]),
    "sequence 2": (2, ["--sequence", "2"]),
    "pipe 2, data 2, ZeRO 1": (4, ["--pipe", "2", "--zero-stage", "1"]),
}


def read_pairs(file: Path, count: int | None) -> list[tuple[str, str, int]]:
    """Return (sentence, sentence, whether they are paraphrases) for each line."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [(row["#1 String"], row["#2 String"], int(row["Quality"])) for row in rows][:count]


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    config = transformers.AutoConfig.from_pretrained(args.model, num_labels=2)
    if not args.dropout:
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = transformers.BertForSequenceClassification.from_pretrained(args.model, config=config)

    def collate(pairs: list[tuple[str, str, int]]) -> dict[str, Any]:
        first, second, labels = zip(*pairs)
        return {
            **tokenizer(first, second, padding=True, truncation=True, max_length=128, return_tensors="pt"),
            "labels": torch.tensor(labels),
        }

    data = read_pairs(args.data / "msr_paraphrase_train.txt", args.samples)
    test = read_pairs(args.data / "msr_paraphrase_test.txt", args.samples)
    steps = args.epochs * -(-len(data) // (BATCH * ACCUMULATION))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, int(WARMUP * steps), steps)

    engine = shardformer.initialize(
        model,
        optimizer,
        train_data=data,
        batch_size=BATCH * ACCUMULATION,
        scheduler=schedule,
        parallel=shardformer.ParallelConfig(
            tensor=args.tensor,
            sequence=args.sequence,
            pipe=args.pipe,
            zero_stage=args.zero_stage,
            micro_batch_size=BATCH,
        ),
        data_options={"collate_fn": collate, "seed": args.seed},
    )
    hooks = [Throughput(), Metrics("accuracy", "f1"), Progress(), JsonLines(args.out)]
    values = shardformer.Trainer(engine, hooks).fit(epochs=args.epochs, validation=test)
    if engine.is_first:
        (args.out / "result.json").write_text(json.dumps(values, indent=2), encoding="utf-8")


def train_all(args: argparse.Namespace) -> None:
    """Train each layout in separate processes, then print the table and save the plot."""
    names = ["one process", *(name for name in args.layouts if name != "one process")]
    for name in names:
        processes, options = LAYOUTS[name]
        print(f"== {name}", flush=True)
        launcher = [sys.executable, "-m", "shardformer", "run", "--nproc_per_node", str(processes)]
        shared = ["--data", args.data, "--model", args.model, "--epochs", args.epochs, "--seed", args.seed]
        shared += ["--samples", args.samples] if args.samples else []
        shared += ["--dropout"] if args.dropout else []
        command = [*launcher, __file__, *map(str, shared), *options, "--out", str(folder_of(args.out, name))]
        subprocess.run(command, check=True)
    print(table(args.out, names))
    draw(args.out, names)


def folder_of(out: Path, name: str) -> Path:
    return out / name.replace(",", "").replace(" ", "-")


def table(out: Path, names: list[str]) -> str:
    lines = [
        "| layout | processes | accuracy | F1 | loss | largest difference in the loss of a step |",
        "|---|---|---|---|---|---|",
    ]
    plain = losses(out, "one process")
    for name in names:
        found = json.loads((folder_of(out, name) / "result.json").read_text(encoding="utf-8"))
        apart = max(abs(a - b) / a for a, b in zip(plain, losses(out, name), strict=True))
        values = " | ".join(f"{found[f'validation/{key}']:.5f}" for key in ("accuracy", "f1", "loss"))
        lines.append(f"| {name} | {LAYOUTS[name][0]} | {values} | {apart:.1e} |")
    return "\n".join(lines)


def losses(out: Path, name: str) -> list[float]:
    return [record.values["loss"] for record in read_metrics_records(folder_of(out, name)) if "loss" in record.values]


def draw(out: Path, names: list[str]) -> None:
    """Plot the losses, and below them their relative difference from those of one process."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(8, 6), height_ratios=(2, 1), layout="constrained")
    plain = losses(out, "one process")
    styles = {
        "one process": ("#0072B2", "-", 3.0),
        "tensor 2": ("#D55E00", "--", 1.6),
        "sequence 2": ("#009E73", "-.", 1.4),
    }
    for name in names:
        color, line, width = styles.get(name, ("#111111", ":", 1.4))
        found = losses(out, name)
        above.plot(range(1, len(found) + 1), smooth(found), line, color=color, linewidth=width, label=name)
        if name != "one process":
            apart = [max(abs(a - b) / a, 1e-9) for a, b in zip(plain, found)]
            below.semilogy(range(1, len(apart) + 1), apart, ".", color=color, markersize=2.5, label=name)
    above.set_title("Loss per step, mean of 25", loc="left", fontsize=10)
    below.set_title("Relative difference to one process", loc="left", fontsize=10)
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(color="#E4E4E4", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9, markerscale=3)
    figure.savefig(out / "convergence.png", dpi=130)
    print(f"Plot saved to {out / 'convergence.png'}")


def smooth(values: list[float], width: int = 25) -> list[float]:
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - width + 1) : i + 1])]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with msr_paraphrase_train.txt and ..._test.txt"
    )
    parser.add_argument("--model", required=True, help="folder, or name on the hub, of a pretrained BERT")
    parser.add_argument("--out", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--all", action="store_true", help="train all layouts, then print the table and save the plot")
    parser.add_argument(
        "--layouts", nargs="*", choices=LAYOUTS, default=[*LAYOUTS], help="layouts of --all, in addition to one process"
    )
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=1)
    parser.add_argument("--pipe", type=int, default=1)
    parser.add_argument("--zero-stage", type=int, default=None)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--samples", type=int, help="maximum number of samples in the training and the test set")
    parser.add_argument("--dropout", action="store_true", help="enable the dropout of the model")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    (train_all if arguments.all else train)(arguments)
