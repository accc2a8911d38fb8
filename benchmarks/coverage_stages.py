"""Coverage of the architectures in transformers by pipeline stages.

    python benchmarks/coverage_stages.py --out stages.jsonl                # all of them, resumes an interrupted run
    python benchmarks/coverage_stages.py --out stages.jsonl --only "opt|bart"
    python benchmarks/coverage.py --out coverage.jsonl --stages stages.jsonl --table

The reduced model of each model type (``coverage.py``) trains over two stages in two processes, with unsharded layers.
``shardformer.verify`` compares loss, gradients and weights over three steps, each with micro-batches of two samples and
of one. Models with batch norms use a single micro-batch, because the norm sees one at a time, as in gradient
accumulation. The loss is the model's own, or the mean square of its logits if it has none for labels like its tokens.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from coverage import batch_of, clean, read, small, verdict_of
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from shardformer.errors import ShardFormerError, WorkerError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.verify.model_source import TASKS, get_class_names_by_model_type
from shardformer.verify.small_models import count_samples
from shardformer.verify.train_both import VerifyPipeline
from shardformer.verify.verification import verify

POOL_S = 120.0
WHY = {
    "phimoe": "it selects experts at random in training, so micro-batches select other experts than the batch",
    "nllb-moe": "the capacity of experts depends on the batch size, so micro-batches drop other tokens than the batch",
    "levit": "its batch norms over three samples amplify rounding errors; the first step is bitwise equal",
    "neomme": "its lambdas differ: their gradient is 0 except for rounding errors",
}
"""Known reasons of types that differ."""


def task_of(name: str) -> str:
    """Return the task of a class, the first one if it has several."""
    for task in TASKS:
        named = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values()
        if any(name == (names if isinstance(names, str) else names[0]) for names in named):
            return task
    return ""


def without_layerdrop(model_type: str, name: str) -> nn.Module:
    """Return the reduced model without layer drop, which a pipeline does not support, and without masking of sounds."""
    model = small(model_type, name)
    if hasattr(model, "config"):
        model.config.use_cache = False
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for field, value in list(getattr(holder, "__dict__", {}).items()):
                if re.search("layerdrop$|^mask_(time|feature)_prob$", field) and isinstance(value, float):
                    setattr(holder, field, 0.0)
    return model


@lru_cache(maxsize=2)
def three_samples(model_type: str, name: str) -> dict[str, Tensor]:
    given = dict(batch_of(model_type, name))
    size = next(iter(given.values())).shape[0]
    return {n: torch.cat([x, x[:1].roll(1, -1)]) if x.dim() and x.shape[0] == size else x for n, x in given.items()}


def batch(model_type: str, name: str, labelled: bool, step: int) -> Mapping[str, Tensor]:
    """Return a batch with different tokens in each step, and micro-batches with different label counts."""
    out = {n: x.roll(step, -1) if n == "input_ids" else x for n, x in three_samples(model_type, name).items()}
    if not labelled:
        return out
    task = task_of(name)
    if task.endswith("CLASSIFICATION"):
        return {**out, "labels": torch.arange(next(iter(out.values())).shape[0]) % 2}
    labels = out.get("decoder_input_ids", out["input_ids"]).clone()
    labels[0, :3] = -100
    return {**out, "labels": labels}


def of_logits(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    x: Tensor = model(**batch).logits
    weights = torch.linspace(0.5, 1.5, x[0].numel(), dtype=x.dtype).view(x[0].shape)
    return (x * weights).square().mean()


def in_stages(model_type: str, name: str, pool: WorkerPool) -> dict[str, Any]:
    """Run ``shardformer.verify`` with the model's own loss, or a loss on its logits."""
    reduced, record = without_layerdrop(model_type, name), {"type": model_type, "name": name}
    dtype = next(reduced.parameters()).dtype
    has_batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in reduced.modules())
    verdicts = []
    for labelled in (True, False):
        try:
            report = verify(
                partial(without_layerdrop, model_type, name),
                partial(batch, model_type, name, labelled),
                tensor=1,
                dtype=dtype,
                loss_fn=None if labelled else of_logits,
                pipeline=VerifyPipeline(2, 1 if has_batch_norm else 2, {}, None if labelled else count_samples),
                pool=pool,
            )
            verdicts.append({**record, "passed": report.passed, "said": verdict_of(report)})
        except WorkerError as error:
            in_plain = "_train_unsharded" in str(error)
            said = "the plain model does not train on this batch: " if in_plain else ""
            verdicts.append({**record, "passed": None if in_plain else False, "said": said + clean(error.what)})
        except ShardFormerError as error:
            verdicts.append({**record, "passed": False, "said": clean(error.what)})
        except Exception as error:
            verdicts.append({**record, "passed": False, "said": clean(f"{type(error).__name__}: {error}")})
        if verdicts[-1]["passed"]:
            break
    last = verdicts[-1]
    return {**last, "said": WHY[model_type]} if last["passed"] is False and model_type in WHY else last


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--out", type=Path, default=Path("stages.jsonl"), help="JSON lines, to which new results are added"
    )
    parser.add_argument("--only", type=re.compile, default=re.compile(".*"), help="regular expression for model types")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    console = Console(stderr=True)
    done = {line["type"] for line in read(args.out)}
    todo = [
        (t, n) for t, n in sorted(get_class_names_by_model_type().items()) if args.only.fullmatch(t) and t not in done
    ]
    with WorkerPool(2, timeout_s=POOL_S) as pool:
        for model_type, name in track(todo, "architectures", console=console):
            began = time.perf_counter()
            try:
                verdict = in_stages(model_type, name, pool)
            except Exception as error:
                verdict = {"type": model_type, "name": name, "passed": None, "said": clean(str(error))}
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(verdict) + "\n")
            console.print(
                f"{model_type}: {verdict['said'][:120]}, {time.perf_counter() - began:.0f} s", highlight=False
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
