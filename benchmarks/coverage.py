"""Coverage of the architectures in transformers: the sharded fraction of each, and whether it passes ``verify``.

    python benchmarks/coverage.py --out coverage.jsonl                 # all of them, resumes an interrupted run
    python benchmarks/coverage.py --out coverage.jsonl --only "opt|bart"
    python benchmarks/coverage.py --out coverage.jsonl --verify 30     # verify 30 (or "all") sharded types in processes
    python benchmarks/coverage.py --out coverage.jsonl --table         # writes docs/coverage.md
    python benchmarks/coverage_stages.py --out stages.jsonl            # run before --table: pipeline stages
    python benchmarks/coverage_layouts.py --out layouts.jsonl          # run before --table: sequences and grids

Each model type of the auto classes in TASKS is built with its default config, changed only by SETTINGS that
transformers needs. Its policy (registered or derived) is validated on the reduced model, over ranks that are threads.
The sharded fraction is that of the weights of linear layers at the default size. It counts the linear layers that the
forward calls, and stacked weights with three dimensions in layers (experts). Embeddings are not counted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from coverage_page import ATTENTION, ENOUGH, MIXED, OTHER, PAGE, Record, page
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardformer.config import ShardConfig
from shardformer.discovery.derive_policy import OUTSIDE_LAYERS_REASON, DerivedPolicy
from shardformer.discovery.example_inputs import make_example_batches, make_forward_fn
from shardformer.discovery.reduced_model import (
    ReducedModel,
    ReferenceGradients,
    compute_loss_from_all_outputs,
    reduce_model,
)
from shardformer.discovery.shrink_config import build_meta_model
from shardformer.discovery.validation import validate_policy
from shardformer.errors import ShardFormerError
from shardformer.local_ranks.worker_pool import WorkerPool
from shardformer.mesh.parallel_context import ParallelContext
from shardformer.module_paths import is_linear_or_conv1d
from shardformer.policies.policy import Policy
from shardformer.shard_model_api import resolve_policy_and_origin
from shardformer.sharding.plan import make_sharding_plan
from shardformer.verify.comparison import Report
from shardformer.verify.model_source import get_class_names_by_model_type
from shardformer.verify.verification import verify

SECONDS = 30
"""CPU seconds after which an architecture is given up. All times are CPU times."""
POOL_S = 300.0
"""Time limit of a comparison in processes."""
NUMEL = 400_000_000
"""Maximum size of a model without reduced model, which is inspected itself."""

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 4},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 48},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}
"""Settings without which transformers cannot build the default config of a type."""


def native(model_type: str, name: str) -> nn.Module:
    """Build the model at its default size on the meta device, from its text config if the class needs that."""
    config = transformers.CONFIG_MAPPING[model_type](**SETTINGS.get(model_type, {}))
    problem: Exception | None = None
    parts = (getattr(config, part, None) for part in ("text_config", "decoder"))
    for candidate in (config, *(part for part in parts if part is not None)):
        candidate.architectures = [name]
        try:
            return build_meta_model(candidate)
        except Exception as error:
            problem = problem or error
    assert problem is not None
    raise problem


class Mixing(TorchDispatchMode):
    """Records the layers in which softmax attention or a convolution mixes tokens."""

    ENDS = ("mm", "add", "convolution", "layer_norm")
    """Operations whose outputs are no longer attention scores."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.found: dict[str, set[str]] = {}
        self._scores: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        scores = any(id(x) in self._scores for x in tensors)
        if "scaled_dot_product" in name or ("bmm" in name and scores):
            self.note("attends")
        if "convolution" in name and any(n > 1 for n in tensors[1].shape[2:]):
            self.note("convolves")
        if "softmax" in name or (scores and not any(end in name for end in self.ENDS)):
            self._scores |= {id(x): x for x in tree_leaves(out) if isinstance(x, Tensor)}
        return out

    def note(self, what: str) -> None:
        if self.inside:
            self.found[self.inside[0]].add(what)


def look(model: nn.Module, run: Callable[[nn.Module], Any]) -> tuple[str, set[str]]:
    """Return the kind of a model, and the paths of the modules that its forward calls."""
    mixing, called = Mixing(), set[str]()
    hooks = []
    for path, module in model.named_modules():
        layer = path if is_layer(model, path) else None

        def before(module: nn.Module, args: Any, path: str = path, layer: str | None = layer) -> None:
            called.add(path)
            if layer is not None and any(is_linear_or_conv1d(m) for m in module.modules()):
                if not mixing.inside:
                    mixing.found.setdefault(layer, set())
                mixing.inside.append(layer)

        def after(module: nn.Module, args: Any, out: Any, layer: str | None = layer) -> None:
            if layer is not None and mixing.inside and mixing.inside[-1] == layer:
                mixing.inside.pop()

        hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    with torch.no_grad(), mixing:
        run(model)
    for hook in hooks:
        hook.remove()
    layers = list(mixing.found.values())
    attend, convolve = (sum(what in layer for layer in layers) for what in ("attends", "convolves"))
    if not attend:
        return OTHER, called
    return ATTENTION if 2 * attend >= len(layers) > 2 * convolve else MIXED, called


def is_layer(model: nn.Module, path: str) -> bool:
    """Return whether a module is in a list, at any depth, and more than a linear layer (one of several heads).

    The outermost called module is the layer.
    """
    above, _, name = path.rpartition(".")
    in_list = name.isdigit() and isinstance(model.get_submodule(above), nn.ModuleList)
    return in_list and not is_linear_or_conv1d(model.get_submodule(path))


def reduced_or_itself(model: nn.Module, model_type: str, name: str) -> ReducedModel:
    """Return the model to inspect: the reduced model, or the model itself if there is none and it is small enough."""
    try:
        return reduce_model(model)
    except ShardFormerError:
        if sum(p.numel() for p in model.parameters()) > NUMEL:
            raise
    model = type(model)(model.config).eval()
    batch = make_example_batches(model)[0]
    return ReducedModel(model, make_forward_fn(model, batch), batch)


def survey(model_type: str, name: str, tell: Callable[[Record], None] = lambda record: None) -> Record:
    """Run in a separate process. ``tell`` receives intermediate results before slow parts."""
    record = partial(Record, model_type, name)
    try:
        model = native(model_type, name)
    except Exception as error:
        return record("not built", reason=short(error))
    kind, called = ATTENTION, set[str]()
    try:
        reduced = reduced_or_itself(model, model_type, name)
        kind, called = look(reduced.model, reduced.forward_fn)
    except Exception:
        pass  # modules that cannot be inspected count as weights to shard
    tell(record("given up", kind, seconds=SECONDS, reason=f"more than {SECONDS} s"))
    start = time.process_time()
    try:
        policy, _ = resolve_policy_and_origin(model, None)
    except Exception as error:
        return record("refused", kind, seconds=time.process_time() - start, reason=short(error))
    seconds, inferred = time.process_time() - start, isinstance(policy, DerivedPolicy)
    problem = (
        None
        if inferred
        else validate_policy(ReferenceGradients.from_model(reduced.model, reduced.forward_fn), type(policy), 2)
    )
    try:
        share, whole = cut(model, policy, called)
    except Exception as error:
        return record("refused", kind, seconds=seconds, inferred=inferred, reason=short(error))
    reason = problem or ("" if share >= ENOUGH else "; ".join([*policy.notes[1:], *outside(whole)]))
    return record("sharded", kind, share, seconds, problem is None, inferred, clean(reason))


def cut(model: nn.Module, policy: Policy, called: set[str]) -> tuple[float, list[str]]:
    """Return the sharded fraction of the weights, and the names of unsharded weights outside the layers."""
    policy.set_model(model)
    policy.set_shard_config(ShardConfig(context=ParallelContext.from_sizes({"tensor": 2})))
    parts = set(make_sharding_plan(model, policy).get_sharded_param_names_by_id())
    every = {anywhere(path) for path in called}
    weights: dict[int, tuple[str, int]] = {}
    for path, module in model.named_modules():
        if called and anywhere(path) not in every:
            continue
        for name, p in module.named_parameters(recurse=False):
            in_layer = any(is_layer(model, path.rsplit(".", n)[0]) for n in range(path.count(".") + 1))
            if (is_linear_or_conv1d(module) and name == "weight") or (in_layer and p.dim() == 3 and p.shape[0] > 1):
                weights[id(p)] = (path, p.numel())
    total = sum(numel for _, numel in weights.values())
    whole = [path for p, (path, numel) in weights.items() if p not in parts and numel > total / 50]
    return sum(numel for p, (_, numel) in weights.items() if p in parts) / max(total, 1), whole


def anywhere(path: str) -> str:
    """Replace each index in a path by ``*``, because the reduced model has fewer layers."""
    return re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", path)


def outside(whole: Sequence[str]) -> list[str]:
    alone = [path for path in whole if not re.search(r"\.\d+\.", path)]
    return [f"{OUTSIDE_LAYERS_REASON}: {', '.join(alone)}"] if alone else []


def short(error: Exception) -> str:
    what = getattr(error, "reason", None) or getattr(error, "what", None)
    return clean(what or f"{type(error).__name__}: {error}")


def clean(text: str) -> str:
    """Format a reason as one line, with ``*`` for indices of layers and each name once."""
    words = list(dict.fromkeys(anywhere(word) for word in re.split(r"(?<=,) ", " ".join(text.split()))))
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", " ".join(words))[:400]


def verdict_of(report: Report) -> str:
    """Return the last line of a report. If it failed, without the largest difference, which changes with each run."""
    line = clean(str(report).splitlines()[-1])
    return line if report.passed else re.sub(r" Largest difference .*", "", line)


def apart(model_type: str, name: str) -> Record:
    """Run ``survey`` in a separate process with a time limit."""
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)

    def work(to: Connection) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        to.send(survey(model_type, name, to.send))

    process = fork.Process(target=work, args=(send,))
    process.start()
    send.close()
    record = Record(model_type, name, "given up", reason="its process ended")
    try:
        while True:
            record = receive.recv()
    except EOFError:
        process.join()
    return record


def small(model_type: str, name: str) -> nn.Module:
    """Return the reduced model without randomness in training."""
    model = reduce_model(native(model_type, name)).model
    if hasattr(model, "config") and hasattr(model.config, "apply_spec_augment"):
        model.config.apply_spec_augment = False
    for module in model.modules():
        if hasattr(module, "jitter_noise"):  # noise on the input of a router
            module.jitter_noise = 0.0
    return model


def batch(model_type: str, name: str, step: int) -> Mapping[str, Tensor]:
    """Return a batch for the reduced model, with different tokens in each step."""
    taken = batch_of(model_type, name)
    return {n: x.roll(step, -1) if n == "input_ids" else x for n, x in taken.items()}


@lru_cache(maxsize=1)
def batch_of(model_type: str, name: str) -> Mapping[str, Tensor]:
    return reduce_model(native(model_type, name)).batch


def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return compute_loss_from_all_outputs(make_forward_fn(model, batch)(model), equal_sample_weights=True)


def verified(model_type: str, name: str, pool: WorkerPool) -> dict[str, Any]:
    """Run ``shardformer.verify`` on the reduced model over two processes, in fp64 if the model supports it."""
    arguments = model_type, name
    try:
        dtype = next(small(*arguments).parameters()).dtype
        model_fn, batch_fn = partial(small, *arguments), partial(batch, *arguments)
        report = verify(model_fn, batch_fn, loss_fn=loss, dtype=dtype, pool=pool)
        return {"verify": model_type, "passed": report.passed, "said": verdict_of(report)}
    except Exception as error:
        return {"verify": model_type, "passed": False, "said": short(error)}


def read(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--out", type=Path, default=Path("coverage.jsonl"), help="JSON lines, to which new results are added"
    )
    parser.add_argument("--only", type=re.compile, default=re.compile(".*"), help="regular expression for model types")
    parser.add_argument("--verify", default="0", metavar="N", help="verify N of the sharded types, or all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the selection of N types")
    parser.add_argument("--stages", type=Path, default=Path("stages.jsonl"), help="output of coverage_stages.py")
    parser.add_argument("--layouts", type=Path, default=Path("layouts.jsonl"), help="output of coverage_layouts.py")
    parser.add_argument("--table", action="store_true", help=f"write {PAGE.name}")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    console = Console(stderr=True)
    lines = list(read(args.out))
    records = {line["type"]: Record(**line) for line in lines if "type" in line}
    verdicts = {line["verify"]: line for line in lines if "verify" in line}

    def keep(line: Mapping[str, Any]) -> None:
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    count = len(records) if args.verify == "all" else int(args.verify)
    if not args.table and not count:
        todo = [
            (t, n)
            for t, n in sorted(get_class_names_by_model_type().items())
            if args.only.fullmatch(t) and t not in records
        ]
        for model_type, name in track(todo, "architectures", console=console):
            record = records[model_type] = apart(model_type, name)
            keep(asdict(record))
            said = f"{record.outcome}, {record.share:.0%}, {record.seconds:.1f} s, {record.kind}; {record.reason[:90]}"
            console.print(f"{model_type}: {said}", highlight=False)
    able = sorted(t for t, r in records.items() if r.outcome == "sharded" and args.only.fullmatch(t))
    chosen = random.Random(args.seed).sample(able, min(count, len(able)))
    with WorkerPool(2, timeout_s=POOL_S) as pool:
        for model_type in track(
            [t for t in chosen if t not in verdicts], "verify", console=console, disable=not chosen
        ):
            found = verdicts[model_type] = verified(model_type, records[model_type].name, pool)
            keep(found)
            console.print(f"{model_type}: {found['said']}", highlight=False)
    if args.table:
        ordered = [records[t] for t in sorted(records)]
        stages = {line["type"]: line for line in read(args.stages)}
        text = page(ordered, [verdicts[t] for t in sorted(verdicts)], stages, list(read(args.layouts)))
        PAGE.write_text(text, encoding="utf-8")
    return int(any(not found["passed"] for found in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
