"""The plan as text: aligned columns, at most 120 wide (a longer word stays whole), plain ASCII, no colour.

The placement is a picture with one column per GPU and one block per node; further nodes that look alike share one line per
pipeline stage. At the end come the flags whose values are not their defaults, as they would be typed, each with its origin.
"""

import argparse
import itertools
import json
import os
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from slime.arguments.origins import Origin
from slime.models.layer_pattern import written_pattern
from slime.observability.run_record import REDACTED, plain_arguments
from slime.plan.structure import (
    GIB,
    BatchPlan,
    GpuPlan,
    LayoutPlan,
    MemoryPlan,
    NodePlan,
    OverlapPlan,
    ParameterPlan,
    PartPlan,
    PhasePlan,
    PlacementPlan,
    Plan,
    ServedModelPlan,
    ServingMemoryPlan,
    SyncPlan,
    TrainingMemoryPlan,
    ValuePlan,
)

WIDTH = 120

_PART_NAMES = {
    "kv_cache": "KV cache",
    "states": "states of linear attention",
    "reserve": "left free (activations, graphs)",
    "data": "rollout data",
    "overhead": "context and libraries",
    "logits": "logits and their gradient",
    "optimizer": "optimizer state",
}
_TRAINER_MEANWHILE = {"stays": "keeps its memory", "sleeps": "sleeps", "ends": "is ended"}
_ENGINES_MEANWHILE = {"stays": "engines keep theirs", "sleeps": "engines on its GPUs sleep"}
_PARAMETER_NAMES = {
    "output_head": "head",
    "dense_mlp": "MLP",
    "shared_experts": "shared experts",
    "routed_experts": "experts",
}


def render(plan: Plan) -> str:
    """The whole text, without a newline at its end."""
    sections = [
        _section("PLAN", [_headline(plan)]),
        _section("PLACEMENT", placement_lines(plan.placement, plan.layout)),
        _section("BATCH", list(_batch(plan.batch))),
        _section("OVERLAP", list(_overlap(plan.overlap, plan.batch))),
        _section("PARAMETERS", list(_parameters(plan.parameters, plan.layout))),
        _section("MEMORY", list(_memory(plan.memory, plan.missing, plan.batch))),
        _section("WEIGHT SYNC", list(_sync(plan.sync, plan.placement.models))),
        _section("VALUES that differ from the defaults", list(_values(plan))),
        _section("WARNINGS", list(_bullets(plan.warnings))),
        _section("NOTES", list(_bullets(plan.notes))),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _section(title: str, lines: list[str]) -> list[str]:
    if not lines:
        return []
    return [title, *(f"  {line}".rstrip() for line in lines)]


def _headline(plan: Plan) -> str:
    placement = plan.placement
    nodes = f"{len(placement.nodes)} node{'s' if len(placement.nodes) != 1 else ''} x {placement.gpus_per_node}"
    kind = "GPU" if plan.device == "GPU" else "logical GPU"
    return f"{plan.model}, {plan.precision}, {placement.mode}: {placement.num_gpus} {kind}{_s(placement.num_gpus)} on {nodes}"


def _batch(batch: BatchPlan) -> Iterator[str]:
    yield (
        f"{batch.prompts} prompts x {batch.samples_per_prompt} samples = {batch.rollouts} rollouts / "
        f"{batch.global_batch_size} per step = {batch.optimizer_steps} optimizer step{_s(batch.optimizer_steps)} per "
        "rollout step"
    )
    if batch.rollouts_per_rank_and_step != batch.global_batch_size:
        yield f"{batch.rollouts_per_rank_and_step:g} rollouts per data-parallel rank and optimizer step"
    budget = f"; token budget of a micro-batch: {batch.token_budget}" if batch.token_budget else ""
    if batch.longest_sample is not None:
        open_end = "" if batch.prompt_is_limited else " and the prompt, which no flag limits"
        yield f"longest allowed sample: {batch.longest_sample} tokens{open_end}{budget}"
    elif batch.assumed_sample is not None:
        yield f"no flag limits a sample: {batch.assumed_sample} tokens are assumed (--seq-length){budget}"
    if batch.micro_batches is not None:
        yield _micro_batches(batch)
    if batch.object_store:
        yield f"train batch in {_place(batch)}, host memory: {_at_least(batch)}{_size(batch.object_store)} of a rollout step"
        if batch.kept_per_token:
            yield f"  with {batch.kept_per_token} ids in the set of kept tokens of each token, the most that there may be"
    if batch.total_optimizer_steps is not None:
        yield f"{batch.num_rollout} rollout steps = {batch.total_optimizer_steps} optimizer steps in all"


def _place(batch: BatchPlan) -> str:
    return "the rollout manager" if batch.in_manager else "Ray's object store"


def _at_least(batch: BatchPlan) -> str:
    return "at least " if batch.longest_sample is not None and not batch.prompt_is_limited else ""


def _overlap(overlap: OverlapPlan | None, batch: BatchPlan) -> Iterator[str]:
    if overlap is None:
        return
    ahead = f"the next {_several(overlap.rollouts_ahead, 'rollout')}"
    if overlap.never_stops:
        yield f"{overlap.loop}: generation never stops; while a rollout is trained, {ahead} may take finished groups and wait"
    elif overlap.rollouts_ahead:
        yield f"{overlap.loop}: while a rollout is trained, {ahead} may be generated and wait"
    else:
        yield f"{overlap.loop}: a rollout is generated, then trained; nothing overlaps"
    if overlap.trainer is not None and not overlap.rollouts_ahead:
        trainer = _TRAINER_MEANWHILE[overlap.trainer]
        yield f"while engines generate, the trainer {trainer}; while it trains, {_ENGINES_MEANWHILE[overlap.engines]}"
    if overlap.push_interval is not None:
        way = "under running requests, which go on" if overlap.in_flight else "while no request is under way"
        yield f"engines get weights after every {_several(overlap.push_interval, 'rollout')}, {way}"
        yield _oldest(overlap.oldest)
    if batch.object_store:
        total = _size(overlap.batches * batch.object_store)
        yield f"train batches in {_place(batch)} at a time: {overlap.batches}, {_at_least(batch)}{total}"


def _oldest(pushes: int | None) -> str:
    if pushes is None:
        return "trained tokens may be made with weights of any age: --max-weight-staleness limits it"
    if pushes == 0:
        return "trained tokens are made with the weights that train on them"
    return f"trained tokens are made with weights up to {pushes} push{_s(pushes, 'es')} older than those that train on them"


def _several(count: int, name: str) -> str:
    return name if count == 1 else f"{count} {name}s"


def _micro_batches(batch: BatchPlan) -> str:
    text = f"{batch.micro_batches} micro-batch{_s(batch.micro_batches, 'es')} per rank and optimizer step"
    if not batch.token_budget:
        return text
    if batch.longest_sample is None:
        return f"{text}, if all samples are that long"
    at_least = "" if batch.prompt_is_limited else "at least "
    return f"{at_least}{text}, all samples at their longest"


def _parameters(parameters: ParameterPlan | None, layout: LayoutPlan | None) -> Iterator[str]:
    if parameters is None:
        return
    yield f"{parameters.total:,} in the model"
    if not parameters.stages or layout is None:
        return
    names = [name for name in parameters.stages[0] if any(stage[name] for stage in parameters.stages)]
    header = ["millions per rank", *(_PARAMETER_NAMES.get(name, name) for name in names), "total"]
    rows = []
    for stages, values in _equal_runs(parameters.stages):
        label = "all ranks" if len(parameters.stages) == 1 else f"stage {stages}"
        layers = layout.layers[int(stages.split("-")[0])] if layout.layers else None
        label += "" if layers is None else f", {layers} layers"
        rows.append([label, *(f"{values[name] / 1e6:.1f}" for name in names), f"{sum(values.values()) / 1e6:.1f}"])
    yield from table([header, *rows])


def _memory(memory: MemoryPlan | None, missing: Sequence[str], batch: BatchPlan) -> Iterator[str]:
    if memory is None:
        yield from textwrap.wrap(
            f"not estimated: the model's shape is not known. Missing: {', '.join(missing)} (or --hf-checkpoint with a "
            "config.json and --model-args-from-hf)",
            WIDTH - 2,
        )
        return
    if memory.gpu_memory is None:
        yield f"on CPU: {memory.gpu_memory_from}"
    else:
        yield f"one GPU: {memory.gpu_memory / GIB:g} GiB ({memory.gpu_memory_from})"
    unit = _unit(memory)
    if memory.training is not None:
        yield ""
        yield from _training(memory.training, unit)
    if memory.serving is not None:
        yield ""
        title = f"engine, per GPU{_stage_of(memory.serving)}"
        yield from _parts(title, memory.serving.parts, memory.serving.total, unit)
        yield from _peaks(memory.serving, unit)
        yield from _cache(memory.serving, batch)
    if memory.phases:
        yield ""
        header = [f"on one GPU, {unit.name}", "trainer", "engine", "together", ""]
        yield from table([header, *(_phase(phase, unit) for phase in memory.phases)], left=(0, 4))


def _training(training: TrainingMemoryPlan, unit: "_Unit") -> Iterator[str]:
    title = f"training rank at its peak ({training.moment}){_stage_of(training)}"
    yield from _parts(title, training.parts, training.total, unit)
    yield from _peaks(training, unit)
    if training.host:
        yield f"host memory, {unit.name}: {unit(training.host)} of a rank, {unit(training.host_of_node)} of a node"
        yield from _of_a_rank(training.host_parts, unit)
    if training.saving:
        rank, node = unit(training.saving), unit(training.saving_of_node)
        yield f"host memory for a checkpoint while it is written, {unit.name}: {rank} of a rank, {node} of a node"
        yield from _of_a_rank(training.saving_parts, unit)
    if training.loading:
        yield f"host memory while weights are loaded, in float32, {unit.name}: at most {unit(training.loading)} of a rank"


def _stage_of(part: TrainingMemoryPlan | ServingMemoryPlan) -> str:
    stages = len(part.stage_totals)
    return f", pipeline stage {part.stage} of 0-{stages - 1}" if stages > 1 else ""


def _peaks(part: TrainingMemoryPlan | ServingMemoryPlan, unit: "_Unit") -> Iterator[str]:
    """One line with the peaks of all pipeline stages, if there are several."""
    if len(part.stage_totals) > 1:
        peaks = ", ".join(f"{stages}: {unit(total)}" for stages, total in _equal_runs(part.stage_totals))
        yield from textwrap.wrap(f"peak by pipeline stage, {unit.name}: {peaks}", WIDTH - 2, subsequent_indent="  ")


def _of_a_rank(parts: Sequence[PartPlan], unit: "_Unit") -> Iterator[str]:
    listed = ", ".join(f"{part.name} {unit(part.bytes)}" for part in parts)
    yield from textwrap.wrap(f"of a rank: {listed}", WIDTH - 4, initial_indent="  ", subsequent_indent="    ")


def _cache(serving: ServingMemoryPlan, batch: BatchPlan) -> Iterator[str]:
    sequences = f", {serving.sequences:.1f} samples of the longest length" if serving.sequences is not None else ""
    sequences += "" if batch.prompt_is_limited or not sequences else " without their prompts"
    yield f"KV cache of an engine: {serving.cache_tokens} tokens{sequences}"
    share = f"; --sglang-mem-fraction-static {serving.static_fraction:g}" if serving.static_fraction else ""
    yield f"  {serving.cache_bytes_per_token / 1024:.1f} KiB per token and GPU{share}"


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.2f} MiB"


class _Unit:
    """Sizes in one unit."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self._size = name, size

    def __call__(self, count: float) -> str:
        return f"{count / self._size:.2f}"


def _unit(memory: MemoryPlan) -> _Unit:
    """GiB; MiB for small models on CPU."""
    totals = [part.total for part in (memory.training, memory.serving) if part is not None]
    small = memory.gpu_memory is None and max(totals, default=0) < GIB
    return _Unit("MiB", 2**20) if small else _Unit("GiB", GIB)


def _parts(title: str, parts: Sequence[PartPlan], total: int, unit: _Unit) -> Iterator[str]:
    rows = [[title, unit.name, "lower it with"]]
    rows += [[f"  {_PART_NAMES.get(part.name, part.name)}", unit(part.bytes), part.lower or ""] for part in parts]
    rows.append(["  together", unit(total), ""])
    yield from table(rows, left=(0, 2))


def _phase(phase: PhasePlan, unit: _Unit) -> list[str]:
    verdict = {True: "fits", False: "DOES NOT FIT", None: "not known: the trainer is not estimated"}[phase.fits]
    if phase.trainer is None:
        return [phase.name, "?", unit(phase.engine), "?", verdict]
    return [phase.name, unit(phase.trainer), unit(phase.engine), unit(phase.total), verdict]


def _sync(sync: SyncPlan | None, models: Sequence[ServedModelPlan]) -> Iterator[str]:
    if sync is None:
        return
    updated = [model.name for model in models if model.update_weights]
    of = f" of model {', '.join(updated)}" if len(models) > 1 else ""
    line = (
        f"{_size(sync.bytes)} to every engine{of} by {sync.transport}, in about {sync.buckets} bucket{_s(sync.buckets)}"
    )
    time = f"{sync.seconds:.2g} s or more at {sync.link_gbps:g} Gbit/s"
    told = time if not sync.shared_handles else "on the same GPU, over no link"
    yield from textwrap.wrap(f"{line}: {told}", WIDTH - 2, subsequent_indent="  ")
    if not sync.shared_handles:
        return
    if sync.seconds and sync.direct_experts:
        yield f"before that, ranks gather all but experts, and get those that their GPU hosts: {_size(sync.gathered)} at most,"
        yield f"{time}; less where the link within a node is faster"
    elif sync.seconds:
        yield f"before that, ranks gather what they hold: {time}; less where the link within a node is faster"


def _values(plan: Plan) -> Iterator[str]:
    rows = [[value.origin, f"{value.flag} {value.typed}".rstrip()] for value in plan.values]
    rows += [["YAML (custom)", f"{name}: {json.dumps(value)}"] for name, value in plan.custom_values.items()]
    if rows:
        yield from table(rows, left=(0, 1))


def _bullets(messages: Iterable[str]) -> Iterator[str]:
    for message in messages:
        yield from textwrap.wrap(
            message, WIDTH - 2, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
        )


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Columns padded to their widest entry; those in `left` start at the left, the others end at the right.

    What stands in the last column and would be wider than the line goes on below, in the same column.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in left or column == len(row) - 1 and cell == "" else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        start = sum(widths[:-1]) + 2 * (len(widths) - 1)
        if len(row) - 1 in left and start + len(row[-1]) > WIDTH - 2:
            wrapped = textwrap.wrap(row[-1], max(WIDTH - 2 - start, 20), break_on_hyphens=False, break_long_words=False)
            lines.append("  ".join([*cells[:-1], wrapped[0]]))
            lines += [" " * start + more for more in wrapped[1:]]
        else:
            lines.append("  ".join(cells).rstrip())
    return lines


def _equal_runs(values: Sequence) -> Iterator[tuple[str, object]]:
    """Runs of equal neighbours as ("first-last", value)."""
    start = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[start]:
            yield (str(start) if index - 1 == start else f"{start}-{index - 1}"), values[start]
            start = index


def _s(count: int, ending: str = "s") -> str:
    return "" if count == 1 else ending


_COLUMNS = 8
_LABEL = 12
_CELL = 12
# Coordinates in the order in which they count, as the letters of the legend.
_COORDINATES = (("tp", "tensor"), ("cp", "context"), ("ep", "expert"), ("dp", "data"), ("pp", "pipeline"))


def placement_lines(placement: PlacementPlan, layout: LayoutPlan | None) -> list[str]:
    """The picture with its legend."""
    lines = list(_legend(placement, layout))
    used = [name for name in _COORDINATES if layout is not None and getattr(layout, name[1]) > 1]
    for first, last in _alike(placement.nodes):
        lines.append("")
        lines += _node(placement.nodes[first], used)
        lines += [_summary(run, used) for run in _same_stages(placement.nodes[first + 1 : last + 1])]
    return lines


def _legend(placement: PlacementPlan, layout: LayoutPlan | None) -> Iterator[str]:
    if layout is not None:
        sizes = {
            "TP": layout.tensor,
            "CP": layout.context,
            "EP": layout.expert,
            "ETP": layout.expert_tensor,
            "DP": layout.data,
            "PP": layout.pipeline,
        }
        shown = "  ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name in ("TP", "DP"))
        more = "  sequence parallel" if layout.sequence_parallel else ""
        more += f"  virtual stages {layout.virtual_pipeline}" if layout.virtual_pipeline > 1 else ""
        yield f"{placement.training_ranks} training rank{'s' if placement.training_ranks != 1 else ''}: {shown}{more}"
    if placement.engines:
        yield f"{placement.engines} engine{'s' if placement.engines != 1 else ''} (engine.part of it)"
    if placement.mode == "external engines" and not placement.training_ranks:
        yield "nothing runs on these GPUs: the sizes of training ranks, which this run does not start, stay reserved"
    for model in placement.models if len(placement.models) > 1 else ():
        engines = "no engine" if model.engines is None else f"engine {_range(model.engines)}"
        kept = "" if model.update_weights else f", weights of {model.path} that stay"
        yield f"model {model.name}, with a router of its own: {engines}{kept}"


def _alike(nodes: Sequence[NodePlan]) -> Iterator[tuple[int, int]]:
    """(first, last) position of every run of nodes with the same look."""
    start = 0
    for index in range(1, len(nodes) + 1):
        if index == len(nodes) or _look(nodes[index]) != _look(nodes[start]):
            yield start, index - 1
            start = index


def _same_stages(nodes: Sequence[NodePlan]) -> Iterator[Sequence[NodePlan]]:
    """Runs of neighbours that hold the same pipeline stages, so that the nodes of a stage are easily found."""
    for _, run in itertools.groupby(nodes, lambda node: sorted({gpu.pipeline or 0 for gpu in node.gpus})):
        yield list(run)


def _look(node: NodePlan) -> tuple:
    """A key that is equal for nodes that can share a line: which rank and engine are on each GPU, relative to the first GPU."""
    first = node.gpus[0]
    steps = ("tensor", "context", "expert", "data", "pipeline", "engine", "engine_rank")
    return tuple(
        (gpu.rank is None, gpu.worker, *(_step(getattr(first, name), getattr(gpu, name)) for name in steps))
        for gpu in node.gpus
    )


def _step(first: int | None, value: int | None) -> int | None:
    return None if first is None or value is None else value - first


def _node(node: NodePlan, used: Sequence[tuple[str, str]]) -> list[str]:
    lines = []
    for start in range(0, len(node.gpus), _COLUMNS):
        gpus = node.gpus[start : start + _COLUMNS]
        lines.append(_row(f"node {node.node}" if start == 0 else "", (f"GPU {start + i}" for i in range(len(gpus)))))
        if any(gpu.rank is not None for gpu in gpus):
            lines.append(_row("  rank", (_text(gpu.rank) for gpu in gpus)))
        for label, name in used:
            if any(gpu.rank is not None for gpu in gpus):
                lines.append(_row(f"    {label}", (_text(getattr(gpu, name)) for gpu in gpus)))
        if any(gpu.engine is not None for gpu in gpus):
            lines.append(_row("  engine", (_engine(gpu) for gpu in gpus)))
    return lines


def _row(label: str, cells: Iterable[str]) -> str:
    return (label.ljust(_LABEL) + "".join(cell.ljust(_CELL) for cell in cells)).rstrip()


def _text(value: int | None) -> str:
    return "-" if value is None else str(value)


def _engine(gpu: GpuPlan) -> str:
    if gpu.engine is None:
        return "-"
    return f"{gpu.engine}.{gpu.engine_rank}{f' {gpu.worker}' if gpu.worker else ''}"


def _summary(nodes: Sequence[NodePlan], used: Sequence[tuple[str, str]]) -> str:
    gpus = [gpu for node in nodes for gpu in node.gpus]
    parts = []
    if gpus[0].rank is not None:
        parts.append(f"ranks {_range(gpu.rank for gpu in gpus)}")
        parts += [f"{label} {_range(getattr(gpu, name) for gpu in gpus)}" for label, name in used]
    if gpus[0].engine is not None:
        parts.append(f"engine {_range(gpu.engine for gpu in gpus)}")
    numbers = _range(node.node for node in nodes)
    return f"node{'s' if len(nodes) > 1 else ''} {numbers} alike: {', '.join(parts) or 'reserved'}"


def _range(values: Iterable[int | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = min(known), max(known)
    return str(low) if low == high else f"{low}-{high}"


# These flags ask for a plan, and say nothing about the run.
_LEFT_OUT = {"help", "help_grep", "dry_run", "dry_run_json", "rehearse", "rehearse_ranks"}


def plan_values(args: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[ValuePlan, ...]:
    """The flags whose values are not their defaults, in the order of the parser; secrets are redacted."""
    plain = plain_arguments(args)
    actions: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        actions.setdefault(action.dest, []).append(action)
    found = []
    for name, same in actions.items():
        origin = args.origins.get(name, Origin.DEFAULT)
        if name in _LEFT_OUT or name not in plain or origin is Origin.DEFAULT:
            continue
        if not _is_default(vars(args)[name], parser.get_default(name), origin):
            found.append(_value(same, plain[name], str(origin)))
    return tuple(found)


def custom_values(args: argparse.Namespace) -> dict[str, Any]:
    """The values of YAML files that belong to no flag; secrets are redacted."""
    return plain_arguments(args)["custom_config"]


def _is_default(value: Any, default: Any, origin: Origin) -> bool:
    """Whether a value is the default; a default path that was made absolute counts as such."""
    if value == default:
        return True
    return origin is Origin.DERIVED and isinstance(default, str) and value == os.path.abspath(default)


def _value(actions: list[argparse.Action], value: Any, origin: str) -> ValuePlan:
    if isinstance(value, bool):
        switch = _switch(actions, value)
        if switch is not None:
            return ValuePlan(switch, True, "", origin)
    action = next((action for action in actions if action.nargs != 0), actions[0])
    flag = _long_spellings(action)[0]
    return ValuePlan(flag, value, _typed(action, flag, value), origin)


def _switch(actions: list[argparse.Action], value: bool) -> str | None:
    """The switch that brings the value about; None if there is none, because a switch cannot be taken back."""
    plain = [action for action in actions if action.nargs == 0 and action.const is value]
    # `--disable-bias-linear` is more usual than `--no-add-bias-linear`.
    for action in plain:
        return _long_spellings(action)[0]
    for action in actions:
        if isinstance(action, argparse.BooleanOptionalAction):
            return next((flag for flag in _long_spellings(action) if flag.startswith("--no-") is not value), None)
    return None


def _long_spellings(action: argparse.Action) -> list[str]:
    return [option for option in action.option_strings if option.startswith("--")]


def _typed(action: argparse.Action, flag: str, value: Any) -> str:
    """The words after the flag, quoted for a shell."""
    kind = getattr(action.type, "__name__", "str")
    if value is None:
        return "(unset)"
    if kind in ("json_object", "json_value") or isinstance(value, dict):
        return _word(value if isinstance(value, str) else json.dumps(value))
    if not isinstance(value, list | tuple):
        return _word(str(value))
    if isinstance(action, argparse._AppendAction) and action.nargs is None:
        return f" {flag} ".join(_word(_item_text(item)) for item in value)
    if action.nargs in (None, "?") and kind != "str":
        return _word(written_pattern(value) if kind == "layer_pattern" else ",".join(map(str, value)))
    return " ".join(_word(_item_text(item)) for item in value)


def _item_text(item: Any) -> str:
    return json.dumps(item) if isinstance(item, dict | list) else str(item)


def _word(text: str) -> str:
    return text if text == REDACTED else shlex.quote(text)
