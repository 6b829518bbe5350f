"""A tiny model of every family on one GPU beside its reference on the host: logits, chosen experts, gradients, checkpoint.

    python tools/bench/gpu/families.py [--families qwen3 deepseek_v3 …]
    python tools/bench/gpu/families.py --device cpu --tiny

Models, references and checks are those of the tests (`tests/support/models/tiny_families.py`), in float32, with a single rank.
Differences of gradients are given as a share of the largest gradient of their tensor. Beside the needs of all measurements,
this one needs transformers and pytest.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.support.models.tiny_families import TINY_FAMILIES, VOCABULARY
from tools.bench.gpu.common import Report, alone, make_parser, run

# The rounding of float32 in a tiny model, when sums have another order.
LOGITS, GRADIENTS = 1e-4, 1e-3
# Differences are divided by at least this much, so that tensors whose gradients are nearly zero do not look wrong.
_SMALLEST_SCALE = 1e-3


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--families", nargs="+", choices=list(TINY_FAMILIES), help="unset: all of them")
    return run(measure, parser)


def measure(options: argparse.Namespace) -> Report:
    """Measure every family. If one stops, the others still run."""
    names = options.families or (list(TINY_FAMILIES)[:1] if options.tiny else list(TINY_FAMILIES))
    with tempfile.TemporaryDirectory(prefix="slime-families-") as directory, alone():
        rows = [row_of(name, Path(directory)) for name in names]
    agree = all(row["agrees"] for row in rows)
    target = f"logits within {LOGITS:g}, gradients within {GRADIENTS:g}, the same experts, the same bits exported"
    return Report(
        "families", rows, [f"{sum(row['agrees'] for row in rows)} of {len(rows)} agree"], target, agree, not agree
    )


def row_of(name: str, directory: Path) -> dict[str, Any]:
    """A row with the differences of the family from its reference, or with the error that stopped it."""
    from tests.support.processes.family_checks import assert_gives_checkpoint_back, reference, run_families

    row: dict[str, Any] = {"family": name, "agrees": False}
    try:
        model = TINY_FAMILIES[name].save(directory / name)
        found = run_families({None: {name: str(directory / name)}})[None][name]
        if isinstance(found, str):
            return {**row, "what stopped it": found.strip().splitlines()[-1]}
        (directory / f"{name}-gradients").mkdir(parents=True)
        expected = reference(model, directory / f"{name}-gradients")
        row["logits"] = float((found.logits[:, :VOCABULARY] - expected.logits).abs().max())
        row["gradients"] = max(
            float((found.gradients[key] - wanted).abs().max()) / max(float(wanted.abs().max()), _SMALLEST_SCALE)
            for key, wanted in expected.gradients.items()
        )
        row["same experts"] = len(found.chosen) == len(expected.chosen) and all(
            ours.equal(theirs) for ours, theirs in zip(found.chosen, expected.chosen, strict=True)
        )
        assert_gives_checkpoint_back([found], directory / name)
        row["agrees"] = row["logits"] <= LOGITS and row["gradients"] <= GRADIENTS and row["same experts"]
    except Exception as stopped:
        # On a new device any error may occur, and the table has to show which one.
        row["what stopped it"] = f"{type(stopped).__name__}: {stopped}".splitlines()[0]
    return row


if __name__ == "__main__":
    sys.exit(main())
