"""Coverage of the architectures in transformers by layouts other than tensor parallelism and pipelines.

    python benchmarks/coverage_layouts.py --out layouts.jsonl                     # all of them, resumes
    python benchmarks/coverage_layouts.py --out layouts.jsonl --layout context    # only sequence, context, 2d or 3d
    python benchmarks/coverage_layouts.py --out layouts.jsonl --only "opt|bart"
    python benchmarks/coverage.py --out coverage.jsonl --layouts layouts.jsonl --table

The reduced model of each model type (``coverage.py``) trains over each of LAYOUTS in processes. ``shardformer.verify``
compares loss, gradients and weights over three steps with the plain model, in fp64 if the model supports it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from coverage import batch, clean, loss, read, small, verdict_of
from coverage_page import LAYOUTS, Layout
from rich.console import Console
from rich.progress import track

from shardformer.errors import ShardFormerError, WorkerError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.verify.model_source import get_class_names_by_model_type
from shardformer.verify.verification import verify

POOL_S = 120.0


def over(layout: Layout, model_type: str, name: str, pool: WorkerPool) -> dict[str, Any]:
    """Run ``shardformer.verify`` over a layout. ``passed`` is None if the layout is not supported."""
    said: dict[str, Any] = {"type": model_type, "name": name, "layout": layout.name}
    try:
        model_fn, batch_fn = partial(small, model_type, name), partial(batch, model_type, name)
        dtype = next(model_fn().parameters()).dtype
        report = verify(model_fn, batch_fn, layout.sizes, config=layout.config, loss_fn=loss, dtype=dtype, pool=pool)
        return {**said, "passed": report.passed, "said": verdict_of(report)}
    except WorkerError as error:
        return {**said, "passed": False, "said": clean(error.what)}
    except ShardFormerError as error:
        return {**said, "passed": None, "said": clean(error.what)}
    except Exception as error:
        return {**said, "passed": False, "said": clean(f"{type(error).__name__}: {error}")}


def survey(layout: Layout, todo: Sequence[tuple[str, str]], out: Path, console: Console) -> None:
    with WorkerPool(layout.ranks, timeout_s=POOL_S) as pool:
        for model_type, name in track(todo, layout.name, console=console):
            began = time.perf_counter()
            verdict = over(layout, model_type, name, pool)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(verdict) + "\n")
            seconds = time.perf_counter() - began
            console.print(f"{model_type}: {verdict['said'][:120]}, {seconds:.0f} s", highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--out", type=Path, default=Path("layouts.jsonl"), help="JSON lines, to which new results are added"
    )
    parser.add_argument("--only", type=re.compile, default=re.compile(".*"), help="regular expression for model types")
    parser.add_argument("--layout", choices=[x.name for x in LAYOUTS], action="append", help="by default each")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    console = Console(stderr=True)
    done = {(line["layout"], line["type"]) for line in read(args.out)}
    types: Mapping[str, str] = get_class_names_by_model_type()
    for layout in LAYOUTS:
        if layout.name in (args.layout or [layout.name]):
            todo = [(t, n) for t, n in sorted(types.items()) if args.only.fullmatch(t) and (layout.name, t) not in done]
            survey(layout, todo, args.out, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
