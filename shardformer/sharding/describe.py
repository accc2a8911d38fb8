"""Describe how a model is sharded: replaced modules, local parameter shapes, and the layers of each stage."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate, groupby, zip_longest
from math import prod
from typing import Any

from torch import nn

from shardformer.layout.sharding_metadata import (
    ShardingMetadata,
    get_shard_specs,
    get_sharding_metadata,
    named_sharded_parameters,
)
from shardformer.pipeline.schedules import make_schedule, round_up_num_micro_batches, simulate_schedule
from shardformer.pipeline.stage_manager import PipelineStages

NAME_WIDTH = 52
"""Width of the first column. Longer lists of names continue on the next line."""

TableRow = tuple[str, tuple[str, ...], int]
"""Path with ``*`` for the index of a layer, the other cells, and the number of rows merged into this row."""


def format_table(
    header: tuple[str, ...], rows: Sequence[TableRow], num_layers_by_stack: Mapping[str, int]
) -> list[str]:
    r"""Format table rows as lines of aligned columns, with a heading for each group of layers.

    Args:
        header: the titles of the columns.
        num_layers_by_stack: ``transformer.h.*`` -> number of layers in that stack.

    >>> print("\n".join(format_table(("", "was", "is"), [("head", ("6", "3"), 1), ("h.*.q", ("6", "3"), 2),
    ...                                           ("h.*.k", ("6", "3"), 2), ("h.*.t", ("9", "5"), 1)], {"h.*": 2})))
            was  is
    head    6    3
    h.*: 2 layers
      q, k  6    3
      t     9    5   1 of 2
    """
    lines: list[tuple[str, ...]] = [header]
    sections: dict[str, list[TableRow]] = {"": []}
    for path, cells, count in rows:
        section = _get_layer_stack_pattern(path)
        sections.setdefault(section, []).append((_remove_stack_prefix(section, path), cells, count))
    for section, members in sections.items():
        if section:
            count = num_layers_by_stack.get(section, 0)
            lines.append((f"{section}: {count} layer{'' if count == 1 else 's'}",))
        for names, cells in _merge_adjacent_rows(members, num_layers_by_stack.get(section, 1)):
            first, *more = wrap_paths(names, NAME_WIDTH)
            indent = "  " if section else ""
            lines += [(indent + first, *cells), *[(f"{indent}  {rest}",) for rest in more]]
    return align_columns(lines)


def align_columns(table_rows: Sequence[Sequence[str]], first_right_aligned_column: int | None = None) -> list[str]:
    """Pad the cells of all lines so that the columns are aligned. Lines of one cell are unchanged.

    Args:
        first_right_aligned_column: the first column to align on the right. None aligns all columns on the left.
    """
    columns = range(max(map(len, table_rows)))
    widths = [max((len(line[i]) for line in table_rows if i < len(line) > 1), default=0) for i in columns]

    def pad_cell(column: int, cell: str) -> str:
        return (
            cell.ljust(widths[column])
            if first_right_aligned_column is None or column < first_right_aligned_column
            else cell.rjust(widths[column])
        )

    return ["  ".join(pad_cell(at, cell) for at, cell in enumerate(line)).rstrip() for line in table_rows]


def wrap_paths(paths_text: str, max_width: int, no_break_pattern: str = "(?<=:) ") -> list[str]:
    """Wrap a list of module paths to lines of at most ``max_width`` characters. A longer path breaks at a dot.

    Args:
        no_break_pattern: pattern of spaces at which a line must not break.
    """
    words = re.sub(no_break_pattern, "\xa0", paths_text).split(" ")
    breaks = [word.rfind(".", 0, max_width) + 1 if len(word) > max_width else 0 for word in words]
    text = " ".join(f"{word[:at]} {word[at:]}" if at else word for word, at in zip(words, breaks, strict=True))
    lines = textwrap.wrap(text, max_width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def make_replicated_parameter_rows(replicated_params: Iterable[tuple[str, str, int, float]]) -> list[TableRow]:
    """Merge the table rows of replicated parameters that belong to the same module or to identical modules."""
    leaves: dict[tuple[str, str, int], tuple[list[str], float]] = {}
    for path, shape, count, share in replicated_params:
        owner, _, leaf = path.rpartition(".")
        names, total = leaves.get((owner, shape, count), ([], 0.0))
        leaves[owner, shape, count] = ([*names, leaf], total + share)
    merged: dict[tuple[str, str, str, int], tuple[list[str], float]] = {}
    for (owner, shape, count), (names, share) in leaves.items():
        section = _get_layer_stack_pattern(owner)
        key = (section, ", ".join(names), shape, count)
        owners, total = merged.get(key, ([], 0.0))
        merged[key] = ([*owners, _remove_stack_prefix(section, owner)], total + share)
    out: list[TableRow] = []
    for (section, names_, shape, count), (owners, share) in merged.items():
        text = f"{', '.join(owners)}: {names_}" if any(owners) else names_
        out.append((f"{section}.{text}" if section else text, (shape, format_percent(share)), count))
    return out


def format_percent(fraction: float) -> str:
    """Format a fraction as ``0.3%``, or as ``<0.1%`` if it would round to zero."""
    return f"{fraction:.1%}" if fraction >= 0.0005 or fraction == 0 else "<0.1%"


def _get_layer_stack_pattern(module_path: str) -> str:
    """Return the path pattern of the layers that contain a module, such as ``h.*`` for ``h.*.attn``."""
    before, star, _ = f"{module_path}.".partition(".*.")
    return f"{before}.*" if star else ""


def _remove_stack_prefix(stack_pattern: str, module_path: str) -> str:
    return module_path[len(stack_pattern) :].lstrip(".") or "the layer itself" if stack_pattern else module_path


def _merge_adjacent_rows(rows: Sequence[TableRow], num_layers: int) -> list[tuple[str, tuple[str, ...]]]:
    """Merge adjacent table rows of one module with equal cells, such as ``attn.q, k, v``."""

    def get_group_key(row: TableRow) -> tuple[str, tuple[str, ...], int, str]:
        path, cells, count = row
        return path.rpartition(".")[0], cells, count, path if ": " in path else ""

    out = []
    for _, neighbours in groupby(rows, get_group_key):
        (first, cells, count), *others = neighbours
        names = [first, *(path.rpartition(".")[2] for path, *_ in others)]
        how_many = f"{count} of {num_layers}" if count < num_layers else f"{count} times"
        out.append((", ".join(names), (*cells, "" if count == num_layers else how_many)))
    return out


WIDTH, OTHER_MODULES_WIDTH = 46, 38
"""Widths of the two columns of names. Longer lists continue on the next line."""
TEXT_WIDTH = 116
MOST_NAMED = 3
"""More shared parameters than this are listed by the modules that contain them."""


@dataclass(frozen=True)
class PipelineStageRow:
    """A table row that describes one pipeline stage.

    Args:
        stage: rank on the pipe axis.
        virtual_stages: indices of its virtual stages.
        layers: paths of its layers, ``model.layers.0-3``.
        other_modules: paths of its modules outside the layers.
        parameters: number of elements of its parameters, over all tensor ranks.
        share: share of all parameters of the model.
        cost: share of the computation, as estimated or passed for the partition.
        checkpointed: number of its layers that recompute activations in the backward pass.
    """

    stage: int
    virtual_stages: tuple[int, ...]
    layers: str
    other_modules: str
    parameters: int
    share: float
    cost: float
    checkpointed: int


def make_stage_rows(stages: PipelineStages) -> list[PipelineStageRow]:
    """Create a table with one row for each pipeline stage. The table is identical on all ranks."""
    names = stages.parameters
    in_layers = {n for n in names if any(n.startswith(f"{path}.") for path in stages.chain.called_layer_paths)}
    total = stages.num_parameters
    cost = max(sum(stages.costs), 1e-30)
    counts = stages.manager.count_recomputed_layers([len(span) for span in stages.spans])
    rows = []
    for stage in range(stages.manager.num_stages):
        virtual = stages.manager.get_virtual_stages_of_rank(stage)
        units = [unit for v in virtual for unit in stages.spans[v]]
        here = {name for name in names if stage in stages.find_owner_ranks(name)}
        size = sum(dict(names[name] for name in here).values())
        rows.append(
            PipelineStageRow(
                stage,
                virtual,
                ", ".join(abbreviate_paths([stages.chain.called_layer_paths[unit] for unit in units])),
                ", ".join(find_covering_paths(here - in_layers, names)),
                size,
                size / max(total, 1),
                sum(stages.costs[unit] for unit in units) / cost,
                sum(counts[v] for v in virtual),
            )
        )
    return rows


def format_stage_table(rows: list[PipelineStageRow], stages: PipelineStages) -> list[str]:
    """Format the table of pipeline stages, followed by sentences about the schedule and shared parameters."""
    head = ("stage", "virtual", "layers", "other modules", "parameters", "share", "cost", "recomputed")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        numbers = [f"{row.parameters:,}", format_percent(row.share), format_percent(row.cost), str(row.checkpointed)]
        layers = wrap_paths(row.layers, WIDTH, no_break_pattern=r" (?=\(|times)")
        virtual = ", ".join(map(str, row.virtual_stages))
        cells = [
            [str(row.stage)],
            [virtual],
            layers,
            wrap_paths(row.other_modules, OTHER_MODULES_WIDTH),
            *([n] for n in numbers),
        ]
        lines += zip_longest(*cells, fillvalue="")
    is_shown = {
        "virtual": any(len(row.virtual_stages) > 1 for row in rows),
        "recomputed": any(row.checkpointed for row in rows),
    }
    shown = [[cell for title, cell in zip(head, line, strict=True) if is_shown.get(title, True)] for line in lines]
    return [
        *align_columns(shown, shown[0].index("parameters")),
        "",
        *_describe_pipeline_schedule(stages),
        *describe_params_shared_by_stages(stages),
    ]


def _describe_pipeline_schedule(stages: PipelineStages) -> list[str]:
    name, num_stages, chunks = stages.manager.schedule, stages.manager.num_stages, stages.manager.num_model_chunks
    few, many = (round_up_num_micro_batches(name, num_stages, chunks, factor * num_stages) for factor in (2, 8))
    with_few, with_many = (simulate_schedule(make_schedule(name, num_stages, count, chunks)) for count in (few, many))
    of = ", each in one virtual stage" if chunks > 1 else ""
    text = (
        f"schedule {name}: with stages of equal cost, a stage is idle {with_few.bubble:.0%} of the time with {few} "
        f"micro-batches and {with_many.bubble:.0%} with {many}. The stages keep the activations of "
        f"{', '.join(map(str, with_many.in_flight))} micro-batches{of}."
    )
    return textwrap.wrap(text, TEXT_WIDTH, break_on_hyphens=False)


def describe_params_shared_by_stages(stages: PipelineStages) -> list[str]:
    """Describe the parameters that pipeline stages share, such as tied weights, in lines of text."""
    groups: dict[tuple[int, ...], dict[str, list[str]]] = {}
    for name, ranks in stages.shared.items():
        first = stages.parameters[name][0]
        groups.setdefault(ranks, {}).setdefault(first, []).append(name)
    lines = []
    for ranks, tensors in groups.items():
        names = []
        for first, aliases in tensors.items():
            others = " and ".join(name for name in aliases if name != first)
            names.append(f"{first} ({others})" if others else first)
        if len(names) > MOST_NAMED:
            everything = [name for aliases in tensors.values() for name in aliases]
            names = [f"all of {', '.join(find_covering_paths(everything, stages.parameters))}"]
        *most, last = map(str, ranks)
        text = f"Stages {', '.join(most)} and {last} share {', '.join(names)} and sum the gradients."
        lines += textwrap.wrap(text, TEXT_WIDTH, break_on_hyphens=False)
    return lines


def abbreviate_paths(paths: Sequence[str]) -> list[str]:
    """Abbreviate layer paths, such as ``h.0-2`` for ``h.0``, ``h.1`` and ``h.2``.

    >>> abbreviate_paths(["h.0", "h.1", "h.2", "h.6", "encoder.0"])
    ['h.0-2, 6', 'encoder.0']
    >>> abbreviate_paths(["h.0", "h.0", "h.1"])
    ['h.0 (2 times)', 'h.1']
    """
    times = Counter(paths)
    if max(times.values(), default=0) > 1:
        return [f"{path} ({n} times)" if n > 1 else path for path, n in times.items()]
    stacks: dict[str, list[int]] = {}
    for path in paths:
        stack, _, last = path.rpartition(".")
        stacks.setdefault(stack if last.isdigit() else path, []).extend([int(last)] if last.isdigit() else [])
    out = []
    for stack, indices in stacks.items():
        # in a run of indices their distance from their places is one
        runs = [[i for _, i in run] for _, run in groupby(enumerate(indices), lambda at: at[1] - at[0])]
        shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        out.append(f"{stack}.{shown}" if shown else stack)
    return out


def find_covering_paths(param_names: Collection[str], all_params: Mapping[str, object]) -> list[str]:
    """Find the shortest list of module paths that contain exactly these parameters.

    >>> names = ["e.word.weight", "e.place.weight", "h.weight"]
    >>> find_covering_paths(names, dict.fromkeys([*names, "h.bias"]))
    ['e', 'h.weight']
    """
    wanted = set(param_names)
    counts = Counter(path for name in all_params for path in _get_path_prefixes(name))
    inside = Counter(path for name in wanted for path in _get_path_prefixes(name))
    found = {next(path for path in _get_path_prefixes(name) if counts[path] == inside[path]) for name in wanted}
    return [path for path in counts if path in found]


def _get_path_prefixes(path: str) -> list[str]:
    """Return all prefixes of a path: ``a``, ``a.b`` and ``a.b.c`` for the path ``a.b.c``."""
    return list(accumulate(path.split("."), "{}.{}".format))


@dataclass(frozen=True)
class ShardingDescription:
    """A description of a sharded model that can be printed, or read row by row.

    In paths, ``*`` is the index of a layer.

    Args:
        title: the model, mesh, source of the policy, enabled options and number of parameters.
        rows: (path, class before, class after, full shape, local shape, count) of sharded modules and parameters.
        changes: (path, before, after, count) of other replacements.
        whole: (path, shape, count, share of all parameters) of replicated parameters.
        notes: sentences.
        layers: path of a stack's layers -> number of layers.
        stages: a row for each pipeline stage. Empty without a pipeline.
        stage_text: table of stages, schedule and shared parameters, as lines.
    """

    title: str
    rows: list[tuple[str, str, str, str, str, int]]
    changes: list[tuple[str, str, str, int]]
    whole: list[tuple[str, str, int, float]]
    notes: list[str]
    layers: dict[str, int]
    stages: list[PipelineStageRow] = field(default_factory=list)
    stage_text: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [self.title]
        if self.stages:
            lines += ["", *self.stage_text]
        if self.rows:
            rows = [(path, tuple(cells), n) for path, *cells, n in self.rows]
            lines += ["", *format_table(("sharded", "before", "after", "full", "on this rank"), rows, self.layers)]
        if self.changes:
            changed = [(path, (before, after), n) for path, before, after, n in self.changes]
            lines += ["", *format_table(("changed", "before", "after"), changed, self.layers)]
        if self.whole:
            share = f"{format_percent(sum(share for *_, share in self.whole))} of all"
            title = "replicated within this stage" if self.stages else "replicated on every rank"
            lines += [
                "",
                *format_table((title, "shape", share), make_replicated_parameter_rows(self.whole), self.layers),
            ]
        return "\n".join([*lines, *[f"\n{note}" for note in self.notes]])


def format_summary(title: str, rows: Mapping[str, str]) -> str:
    """Format a title and a dict of names and values as text.

    >>> print(format_summary("Engine of GPT2LMHeadModel", {"layout": "tensor=2", "steps": "60"}))
    Engine of GPT2LMHeadModel
      layout  tensor=2
      steps   60
    """
    return "\n".join([title, *(f"  {line}" for line in align_columns(list(rows.items())))])


def format_summary_as_html(title: str, rows: Mapping[str, str]) -> str:
    """Format a title and a dict of names and values as an HTML table for notebooks."""
    cell = '<td style="text-align: left">'
    body = "".join(f"<tr>{cell}{escape(name)}</td>{cell}{escape(value)}</td></tr>" for name, value in rows.items())
    return f"<table><caption>{escape(title)}</caption>{body}</table>"


def count_total_and_local_params(model: nn.Module) -> tuple[int, int]:
    """Count the parameters of the full model, and those that this rank stores.

    Replicated parameters count on each rank. Under ZeRO stage 3, the second number includes the shards that this rank
    gathers from other ranks.
    """
    state = get_sharding_metadata(model)
    local = sum(p.numel() for p in model.parameters())
    if state.stages is not None and state.stages.manager.num_stages > 1:
        return state.stages.num_parameters, local
    return sum(prod(entry.spec.shape) for entry in state.entries), local


def sharded_extra_repr(self: nn.Module) -> str:
    """Extend the ``extra_repr`` of a sharded model by a line with its layout and number of parameters."""
    total, local = count_total_and_local_params(self)
    own, context = type(self).extra_repr(self), str(get_sharding_metadata(self).context)
    line = f"# sharded over {context}: {local:,} of {total:,} parameters on this rank"
    return f"{own}\n{line}" if own else line


def describe_sharding(model: nn.Module) -> ShardingDescription:
    """Describe how a model is sharded: the policy, replaced modules, local shapes and replicated parameters.

    Raises:
        ConfigError: if the model is not sharded.
    """
    state = get_sharding_metadata(model)
    specs = get_shard_specs(model)
    stages = state.stages if state.stages is not None and state.stages.manager.num_stages > 1 else None
    layers: dict[str, int] = {}

    def to_layer_pattern(path: str) -> str:
        return _replace_layer_index_and_record_count(model, path, layers, stages)

    shapes = _format_sharded_param_shapes(model)
    rows: Counter[tuple[str, str, str, str, str]] = Counter()
    changes: Counter[tuple[str, str, str]] = Counter()
    for r in state.replacements:
        if stages is None or not stages.is_only_on_other_ranks(r.path):
            of_path = shapes.get(r.path, {}) if r.kind == "module" else {}
            for path, of_param in of_path.items():
                rows[to_layer_pattern(path) or type(model).__name__, r.before, r.after, *of_param] += 1
            if not of_path:
                changes[to_layer_pattern(r.path) or type(model).__name__, r.before, r.after] += 1
    replicated: dict[tuple[str, str], tuple[int, int]] = {}
    for name, p in model.named_parameters():
        if not specs[name].is_sharded:
            of = (to_layer_pattern(name), _format_shape(p.shape))
            count, size = replicated.get(of, (0, 0))
            replicated[of] = (count + 1, size + p.numel())
    total = max(count_total_and_local_params(model)[0], 1)
    rows_of_stages = [] if stages is None else make_stage_rows(stages)
    return ShardingDescription(
        _format_title(model, state, total),
        [(*row, n) for row, n in rows.items()],
        [(*change, n) for change, n in changes.items()],
        [(*of, n, size / total) for of, (n, size) in replicated.items()],
        [
            *state.notes,
            *map(str, state.compilers),
            *([state.gradient_owner.describe()] if state.gradient_owner is not None else []),
        ],
        layers,
        rows_of_stages,
        [] if stages is None else format_stage_table(rows_of_stages, stages),
    )


def _format_sharded_param_shapes(model: nn.Module) -> dict[str, dict[str, tuple[str, str]]]:
    """Format the full and local shape of each sharded parameter, grouped by module.

    A module has one row with the shape of its weight. A module with several sharded parameters, other than a bias, has
    a row for each of them.
    """
    of_params: dict[str, tuple[str, str]] = {}
    by_module: dict[str, list[str]] = {}
    for name, param, spec in named_sharded_parameters(model):
        if spec.is_sharded:
            of_params[name] = _format_shape(spec.shape), _format_shape(param.shape)
            by_module.setdefault(name.rpartition(".")[0], []).append(name)
    found = {name: {name: shapes} for name, shapes in of_params.items()}
    for path, names in by_module.items():
        shown = [name for name in names if name.rpartition(".")[2] != "bias"] or names
        found[path] = {name if len(shown) > 1 else path: of_params[name] for name in shown}
    return found


def _format_title(model: nn.Module, metadata: ShardingMetadata, num_parameters: int) -> str:
    local = sum(p.numel() for p in model.parameters())
    enabled = [name for name, value in metadata.request.options.items() if value is True]
    on = ", ".join(
        name.removeprefix("enable_").replace("_", " ")
        for name in enabled
        if name != "enable_tensor_parallelism" or metadata.context.tensor.size > 1
    )
    return (
        f"{type(model).__name__} over {metadata.context}, by {metadata.request.source}\n"
        + (f"on: {on}\n" if on else "")
        + f"{num_parameters:,} parameters, {local:,} of them on this rank ({local / num_parameters:.1%})"
    )


def _replace_layer_index_and_record_count(
    model: nn.Module, module_path: str, num_layers_by_stack: dict[str, int], stages: PipelineStages | None = None
) -> str:
    """Replace the layer index in a module path with ``*``, and record the number of these layers."""
    out: list[str] = []
    module: Any = model
    parts = module_path.split(".")
    for at, part in enumerate(parts):
        siblings = dict(module.named_children()) if part.isdigit() and isinstance(module, nn.Module) else {}
        is_layer = len({type(m) for m in siblings.values()}) == 1
        out.append("*" if is_layer else part)
        if is_layer and ".".join(out) not in num_layers_by_stack:
            names = [".".join([*parts[:at], name]) for name in siblings]
            num_layers_by_stack[".".join(out)] = sum(
                stages is None or not stages.is_only_on_other_ranks(name) for name in names
            )
        module = getattr(module, part, None)
    return ".".join(out)


def _format_shape(shape: Iterable[int]) -> str:
    return " x ".join(str(n) for n in shape) or "scalar"
