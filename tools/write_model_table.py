"""Writes the table of models into docs/en/advanced/models.md: a row per script of scripts/models/.

    python tools/write_model_table.py                        # rewrite the table
    python tools/write_model_table.py --check                # exit status 1 when it is not up to date
    python tools/write_model_table.py --rehearse NAME ...    # rehearse these models at their true size, record it, rewrite

What is tested of a family is read from the tables that its tests go by (`tests/support/models/tiny_families.py`,
`tests/e2e/test_families.py` and `tests/e2e/test_mixture_loop.py`); what a rehearsal found is kept beside the page, in
model-rehearsals.json.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.models.families import FAMILIES, TRAINED_MODEL_TYPES  # noqa: E402
from slime.utils.filesystem import write_text_atomically  # noqa: E402
from tests.e2e import test_families, test_mixture_loop  # noqa: E402
from tests.support.models.tiny_families import TINY_FAMILIES  # noqa: E402
from tools.published_models import PUBLISHED_MODELS  # noqa: E402

PAGE = ROOT / "docs" / "en" / "advanced" / "models.md"
RECORDS = PAGE.with_name("model-rehearsals.json")
BEGIN, END = "<!-- model table: begin -->", "<!-- model table: end -->"
NOT_YET = "not yet"
_SERVED = {entries["model_type"] for entries in (*test_families.SERVED.values(), test_mixture_loop.SERVED)}
_HEADER = (
    "Script", "`model_type`", "Trains; logits and gradients of transformers; checkpoint given back", "Layouts of its test",
    "Served by SGLang on CPU, five rollouts", "Rehearsed: layout", "Peak GiB of rank 0, planned", "Seconds",
)  # fmt: skip
_BATCH = (
    "--num-rollout", "1", "--rollout-batch-size", "32", "--n-samples-per-prompt", "8", "--rm-type", "math",
    "--rollout-max-response-len", "4096", "--bf16", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4608",
    "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1",
)  # fmt: skip
# Above so many layers x hidden size^2 a model is cut over 8 tensor-parallel ranks.
_LARGE = 40 * 4096**2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail when the table is not up to date")
    parser.add_argument(
        "--rehearse", nargs="+", default=(), metavar="NAME", help="scripts to rehearse and record first"
    )
    options = parser.parse_args()
    records = recorded()
    for name in options.rehearse:
        records[name] = rehearse(name)
        write_text_atomically(RECORDS, json.dumps(dict(sorted(records.items())), indent=2) + "\n")
    old = PAGE.read_text()
    new = with_table(old, records)
    if options.check:
        return int(old != new)
    write_text_atomically(PAGE, new)
    return 0


def recorded() -> dict[str, dict[str, Any]]:
    """What rehearsals found: name of a script -> layout, GiB as rehearsed and as planned, seconds."""
    return json.loads(RECORDS.read_text())


def with_table(page: str, records: dict[str, dict[str, Any]]) -> str:
    """The page with the table between its two marks."""
    rows = [_row(path.stem, records.get(path.stem)) for path in sorted((ROOT / "scripts" / "models").glob("*.sh"))]
    lines = [_HEADER, ["---"] * len(_HEADER), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def _row(name: str, record: dict[str, Any] | None) -> list[str]:
    model_type = PUBLISHED_MODELS[name]["model_type"]
    own = FAMILIES[model_type].model_types
    # Layers that are all dense hold layouts that experts do not.
    tiny = [row for key, row in TINY_FAMILIES.items() if row.model_type in own and not key.endswith(" dense")]
    tested = bool(tiny) and model_type in TRAINED_MODEL_TYPES
    layouts = dict.fromkeys(layout for row in tiny for layout in row.layouts)
    is_served = not _SERVED.isdisjoint(own)
    return [
        f"`{name}`",
        f"`{model_type}`",
        "yes" if tested else NOT_YET,
        ", ".join(layouts) if tested else "",
        "yes" if is_served else NOT_YET if not tested else "no test",
        record["layout"] if record else NOT_YET,
        f"{record['rehearsed_gib']:.1f}, {record['planned_gib']:.1f}" if record else "",
        str(record["seconds"]) if record else "",
    ]


def rehearse(name: str) -> dict[str, Any]:
    """Rehearse a step of GRPO on rank 0, at the model's true size.

    Raises:
        RuntimeError: the rehearsal failed, with the end of what it printed.
    """
    config = PUBLISHED_MODELS[name]
    text = config.get("text_config", config)
    large = text["num_hidden_layers"] * text["hidden_size"] ** 2 > _LARGE
    tensor, nodes = (8, 8) if large else (2, 1)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        prompts = Path(directory) / "prompts.jsonl"
        prompts.write_text('{"prompt": "1 + 1?", "label": "2"}\n' * 32)
        words = [
            "--hf-checkpoint", directory, "--model-args-from-hf", "--prompt-data", str(prompts), *_BATCH,
            "--actor-num-nodes", str(nodes), "--actor-num-gpus-per-node", "8", "--rollout-num-gpus", "8",
            "--tensor-model-parallel-size", str(tensor), "--sequence-parallel", "--rehearse", "--rehearse-ranks", "0",
        ]  # fmt: skip
        result = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *words], cwd=ROOT, capture_output=True, text=True, timeout=600,
            env={**os.environ, "SLIME_ACCELERATOR": "cpu"},
        )  # fmt: skip
    memory = re.search(r"together +([\d.]+) GiB +([\d.]+) GiB", result.stdout)
    seconds = re.search(r"rehearsed in (\d+) s", result.stdout)
    if result.returncode or not memory or not seconds:
        raise RuntimeError(f"{name}: exit status {result.returncode}: {(result.stdout + result.stderr)[-3000:]}")
    return {
        "layout": f"TP {tensor}, DP {8 * nodes // tensor}",
        "rehearsed_gib": float(memory[1]),
        "planned_gib": float(memory[2]),
        "seconds": int(seconds[1]),
    }


if __name__ == "__main__":
    sys.exit(main())
