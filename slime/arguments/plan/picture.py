"""The placement as a picture: one column per GPU, one block per node; nodes that go on alike
are told in one line for each pipeline stage.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from slime.arguments.plan.structure import GpuPlan, LayoutPlan, NodePlan, PlacementPlan

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


def _alike(nodes: Sequence[NodePlan]) -> Iterator[tuple[int, int]]:
    """Runs of nodes with the same look."""
    start = 0
    for index in range(1, len(nodes) + 1):
        if index == len(nodes) or _look(nodes[index]) != _look(nodes[start]):
            yield start, index - 1
            start = index


def _same_stages(nodes: Sequence[NodePlan]) -> Iterator[Sequence[NodePlan]]:
    """Runs of neighbours that hold the same pipeline stages: who looks for a stage finds its nodes."""
    for _, run in itertools.groupby(nodes, lambda node: sorted({gpu.pipeline or 0 for gpu in node.gpus})):
        yield list(run)


def _look(node: NodePlan) -> tuple:
    """What two nodes must share to be told in one line: who is on each GPU, and how its places go on from the first GPU's."""
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
    return f"node{'s' if len(nodes) > 1 else ''} {numbers} alike: {', '.join(parts)}"


def _range(values: Iterable[int | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = min(known), max(known)
    return str(low) if low == high else f"{low}-{high}"
