"""Every objective of the trainer on one GPU, beside plain loops in float64 on the host.

    python tools/bench/gpu/grid.py [--objectives grpo gspo …]
    python tools/bench/gpu/grid.py --device cpu --tiny

The objectives and batches are those of the tests (`tests/support/processes/objective_grid.py`): a tiny model in float32 and
awkward samples on a single rank, over Megatron and over FSDP, which has no critic. Loss, metrics, gradient norm, advantages and
returns have to agree within the rounding that `tests/support/oracles/rounding.py` derives. Beside the needs of all
measurements, this one needs transformers and pytest.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.support.processes.objective_grid import (
    CRITIC_OBJECTIVES,
    HIDDEN,
    LAYERS,
    OBJECTIVES,
    ROLES,
    VOCABULARY,
    grid_args,
    make_rank,
    run_objective,
)
from tools.bench.gpu.common import Report, alone, make_parser, run

_TINY = ("grpo", "gspo", "value")
_BACKENDS = {"megatron": tuple(ROLES), "fsdp": ("actor",)}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--objectives", nargs="+", choices=[*OBJECTIVES, *CRITIC_OBJECTIVES], help="unset: all of them")
    return run(measure, parser)


def measure(options: argparse.Namespace) -> Report:
    """Compare every objective. If one stops or differs, the others still run."""
    from tests.support.models.tiny_model import write_tiny_model
    from tests.support.oracles.plain_grid import PlainGrid

    chosen = options.objectives or (_TINY if options.tiny else [*OBJECTIVES, *CRITIC_OBJECTIVES])
    rows = []
    with tempfile.TemporaryDirectory(prefix="slime-grid-") as directory:
        write_tiny_model(Path(directory), vocab_size=VOCABULARY, layers=LAYERS, hidden=HIDDEN, head_dim=8)
        plain = PlainGrid(directory)
        for backend, roles in _BACKENDS.items():
            for role in roles:
                names = [name for name in ROLES[role][0] if name in chosen]
                if names:
                    rows += _of_role(backend, role, names, directory, plain)
    compared = [row["agrees"] for row in rows if row["agrees"] is not None]
    notes = [f"{sum(compared)} of {len(compared)} objectives agree"]
    if len(compared) < len(rows):
        notes.append("of the others the loops know nothing: they ran, and that is all")
    return Report("grid", rows, notes, "all agree", all(compared), failed=not all(compared))


def _of_role(backend: str, role: str, names: list[str], hf_dir: str, plain: Any) -> list[dict[str, Any]]:
    objectives, flags = ROLES[role]
    flags = {**flags, "train_backend": backend}
    with alone():
        rank = make_rank(grid_args(hf_dir, **flags), role)
        rows = [row_of(rank, name, {**flags, **objectives[name]}, hf_dir, plain) for name in names]
    return [{"backend": backend, **row} for row in rows]


def row_of(rank: Any, objective: str, changes: dict[str, Any], hf_dir: str, plain: Any) -> dict[str, Any]:
    """A row that says whether the objective agrees with the loops on all its batches, and if not, why.

    Args:
        changes: the arguments that the objective changes.
        plain: the `PlainGrid` of the model in `hf_dir`.
    """
    from tests.support.oracles.plain_grid import WITHOUT_LOOPS, assert_like_loops

    error, is_compared = None, objective not in WITHOUT_LOOPS
    try:
        found = {}
        for batch, samples in plain.batches.items():
            rank.args = grid_args(hf_dir, batch, **changes)
            found[objective, batch] = run_objective(rank, samples, objective)
        if is_compared:
            assert_like_loops(hf_dir, plain, objective, found)
    except Exception as stopped:
        # On a new device any error may occur, and the table has to show which one.
        error = f"{type(stopped).__name__}: {stopped}"
    agrees = error is None if is_compared or error else None
    return {"objective": objective, "role": rank.role, "agrees": agrees, "what differs": error}


if __name__ == "__main__":
    sys.exit(main())
