"""docs/coverage.md: the results for every architecture that transformers can build."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coverage.md"
ENOUGH = 0.8

ATTENTION, MIXED, OTHER = "attention and MLP", "attention among others", "no softmax attention"
KINDS = {
    ATTENTION: "At least half of the layers mix tokens with softmax attention, and less than half with a convolution.",
    MIXED: "Less than half of the layers use softmax attention, or at least half of the layers use a convolution or a "
    "scan (state spaces, linear attention, gated delta nets).",
    OTHER: "No layer uses softmax attention. Examples are convolutional networks, state spaces, linear attention and "
    "Fourier transforms.",
}


@dataclass(frozen=True)
class Record:
    """The results of one architecture. ``outcome`` is "sharded", "refused", "not built" or "given up"."""

    type: str
    name: str
    outcome: str
    kind: str = ATTENTION
    share: float = 0.0
    seconds: float = 0.0
    proven: bool = False
    inferred: bool = True
    reason: str = ""

    @property
    def reached(self) -> bool:
        return self.outcome == "sharded" and self.proven and self.share >= ENOUGH


@dataclass(frozen=True)
class Layout:
    """A layout for the reduced models: its sizes as for ``verify``, and the options of ShardConfig."""

    name: str
    title: str
    ranks: int
    sizes: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)


LAYOUTS = (
    Layout("sequence", "tensor 2, sequence parallel", 2, {"tensor": 2}, {"enable_sequence_parallelism": True}),
    Layout("context", "sequence 2 (context parallel)", 2, {"sequence": 2}),
    Layout("2d", "2D grid of 2 x 2", 4, {"tensor": (2, 2)}, {"tensor_parallel_mode": "2d"}),
    Layout("3d", "3D grid of 2 x 1 x 2", 4, {"tensor": (2, 1, 2)}, {"tensor_parallel_mode": "3d"}),
)


def page(
    records: Sequence[Record],
    verdicts: Sequence[Mapping[str, Any]],
    stages: Mapping[str, Mapping[str, Any]],
    layouts: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Render the page.

    Args:
        records, verdicts: results of coverage.py, and of ``verify`` for some types.
        stages, layouts: results of coverage_stages.py by type, and of coverage_layouts.py.
    """
    built = [r for r in records if r.outcome != "not built"]
    lines = [
        "# Coverage",
        "",
        "This page shows which share of its weights ShardFormer shards for each model type of transformers "
        f"{transformers.__version__}. It contains all types with a class for causal or masked language modeling, "
        "sequence to sequence, or image or audio classification.",
        "",
        "`python benchmarks/coverage.py --out coverage.jsonl --table` measures the share for the default config of "
        "each type, with a registered or a derived policy. The share counts the weights of linear layers and experts "
        "that the forward pass uses.",
        "",
        "| kind of model | can be built | any part sharded | at least 80 % of its linear weights |",
        "|---|---|---|---|",
    ]
    for kind in KINDS:
        of = [r for r in built if r.kind == kind]
        reached = sum(r.reached for r in of)
        share = f"{reached} ({reached / max(len(of), 1):.0%})"
        lines.append(f"| {kind} | {len(of)} | {sum(r.outcome == 'sharded' for r in of)} | {share} |")
    lines += ["", "The kind of a model depends on how its layers mix tokens:", ""]
    lines += [f"- *{kind}*: {text}" for kind, text in KINDS.items()]
    seconds = sorted(r.seconds for r in built if r.inferred and r.outcome == "sharded")
    if seconds:
        lines += [
            "",
            f"On one core, deriving a policy took {seconds[len(seconds) // 2]:.1f} s for the median model, and less "
            f"than {seconds[int(len(seconds) * 0.9)]:.0f} s for nine of ten models.",
        ]
    if verdicts:
        passed = sum(v["passed"] for v in verdicts)
        every = {r.type for r in built if r.outcome == "sharded"} <= {v["verify"] for v in verdicts}
        number = f"all {len(verdicts)}" if every else f"{len(verdicts)}, drawn at random,"
        lines += [
            "",
            f"`shardformer.verify` trained {number} sharded models for three steps on two processes, in fp64 if the "
            f"model supports it. {passed} of them equal the plain model.",
            *(f"- {v['verify']}: {v['said']}" for v in verdicts if not v["passed"]),
        ]
    lines += in_stages(built, stages) if stages else []
    lines += in_layouts(built, layouts) if layouts else []
    for kind in KINDS:
        rest = [r for r in built if r.kind == kind and not r.reached]
        lines += ["", f"## Below 80 %: {kind}", "", "| type | share | reason |", "|---|---|---|"] if rest else []
        lines += [f"| {r.type} | {r.share:.0%} | {cell(r.reason)} |" for r in rest]
    lines += [
        "",
        "## Models that cannot be built",
        "",
        "transformers itself raises an error if you build a model from the default config of one of these types:",
        "",
    ]
    lines += [f"- {r.type}: {cell(r.reason)[:160]}" for r in records if r.outcome == "not built"]
    lines += ["", "## At least 80 %", ""]
    for kind in KINDS:
        reached = [f"{r.type} {r.share:.0%}" for r in built if r.kind == kind and r.reached]
        lines += [f"*{kind}*: {', '.join(reached)}.", ""] if reached else []
    return "\n".join(lines).rstrip() + "\n"


def in_stages(built: Sequence[Record], stages: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [
        "",
        "## Stages of a pipeline",
        "",
        "`python benchmarks/coverage_stages.py --out stages.jsonl` tests pipelines. It splits a reduced model of each "
        "type into two stages, and compares it with the plain model. `shardformer.verify` runs three steps of two "
        "micro-batches, with padding and ignored labels. Models with batch norms have one micro-batch.",
        "",
        "| kind of model | compared | equal |",
        "|---|---|---|",
    ]
    for kind in KINDS:
        of = [stages[r.type] for r in built if r.kind == kind and r.type in stages]
        of = [line for line in of if line["passed"] is not None]
        passed = sum(line["passed"] for line in of)
        lines.append(f"| {kind} | {len(of)} | {passed} ({passed / max(len(of), 1):.0%}) |")
    rest = [line for line in stages.values() if line["passed"] is False and line["type"] in {r.type for r in built}]
    title = "Types that differ from the plain model in two stages, or raise an error:"
    lines += ["", title, "", "| type | reason |", "|---|---|"] if rest else []
    prefix = r"^\w+ does not support pipeline parallelism \(pipe=\d+\): "
    why = {line["type"]: re.sub(prefix, "", line["said"]) for line in rest}
    return lines + [f"| {name} | {cell(why[name])} |" for name in sorted(why)]


def cell(text: str) -> str:
    return (text or "nothing to cut").replace("|", "\\|")[:300]


def in_layouts(built: Sequence[Record], found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Render the layouts over which each type trains, for types that tensor parallelism shards."""
    kind_of = {r.type: r.kind for r in built if r.outcome == "sharded"}
    lines = [
        "",
        "## Sequence parallelism and grids",
        "",
        "`python benchmarks/coverage_layouts.py --out layouts.jsonl` tests other layouts, with all types that tensor "
        "parallelism shards. It trains a reduced model of each type for three steps on two or four processes, and "
        "compares it with the plain model.",
        "",
        "Each cell contains three numbers: the types that equal the plain model, the types that raise an error, and "
        "all other types.",
        "",
        f"| layout | {' | '.join(KINDS)} |",
        f"|---|{'---|' * len(KINDS)}",
    ]
    tried = [layout for layout in LAYOUTS if any(line["layout"] == layout.name for line in found)]
    for layout in tried:
        of = [line for line in found if line["layout"] == layout.name and line["type"] in kind_of]
        cells = [counted([line["passed"] for line in of if kind_of[line["type"]] == kind]) for kind in KINDS]
        lines.append(f"| {layout.title} | {' | '.join(cells)} |")
    for layout in tried:
        of = [line for line in found if line["layout"] == layout.name and line["type"] in kind_of]
        rest = sorted((line for line in of if line["passed"] is not True), key=lambda line: str(line["type"]))
        why: dict[str, list[str]] = {}
        for line in rest:
            why.setdefault(reason(line["said"]), []).append(line["type"])
        lines += ["", f"Types that fail with {layout.title}:", "", "| reason | types |", "|---|---|"] if rest else []
        lines += [f"| {cell(text)} | {', '.join(types)} |" for text, types in sorted(why.items())]
    return lines


def counted(passed: Sequence[bool | None]) -> str:
    yes, refused = passed.count(True), passed.count(None)
    return f"{yes} of {len(passed)} ({yes / max(len(passed), 1):.0%}), {refused}, {passed.count(False)}"


def reason(said: str) -> str:
    """Remove names of models and modules and sizes from a reason, so that it is the same for all types."""
    start = r"^\w+='?\w+'?(?: with sequence=\d+)?,? (?:for|does not (?:work for|support)(?: this)?) \w+"
    said = re.sub(start + "(?:: |, which | )?", "", said)
    said = re.sub(r"(its own attention in|run|(?:mask|tensor|layer,) of shape) .*", r"\1 …", said)
    return re.sub(r"'[\w.*]+'|\b\w+\.[\w.*]+|\b\w+Attention\b", "…", said)[:200]
