"""Writes the planned memory of the published configurations into docs/en/advanced/memory-plan.md.

    python tools/write_memory_table.py           # rewrite the table
    python tools/write_memory_table.py --check   # exit status 1 when it is not up to date

Every row is an unchanged launch script. If its training does not fit a GPU of 80 GiB, a second row has the same with the
optimizer's state in host memory.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.arguments import parse_args  # noqa: E402
from slime.plan import Plan, make_plan  # noqa: E402
from slime.plan.structure import GIB  # noqa: E402
from slime.utils.filesystem import write_text_atomically  # noqa: E402

PAGE = ROOT / "docs" / "en" / "advanced" / "memory-plan.md"
BEGIN, END = "<!-- memory table: begin -->", "<!-- memory table: end -->"
CONFIGURATIONS = {
    "Qwen3-4B": "run-qwen3-4B.sh",
    "Qwen3-30B-A3B": "run-qwen3-30B-A3B.sh",
    "GLM-4.5-355B": "run-glm4.7-355B-A32B.sh",
    "DeepSeek-R1": "run-deepseek-r1.sh",
}
GPU_GIB, LINK_GBPS = 80, 400
OFFLOAD = "--optimizer-cpu-offload"
_HEADER = (
    "Configuration", "GPUs", "Layout", "Parameters per rank", "Weights", "Gradients", "Optimizer", "Activations, logits",
    "Rest", "Training peak", "Host memory per node", "Engine weights", "KV cache tokens per engine", "Weight sync",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail when the table is not up to date")
    options = parser.parse_args()
    old = PAGE.read_text()
    new = with_table(old, memory_table())
    if options.check:
        return int(old != new)
    write_text_atomically(PAGE, new)
    return 0


def with_table(page: str, table: str) -> str:
    """The page, with `table` between its two marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def memory_table() -> str:
    """The table in Markdown; sizes in GiB."""
    rows = []
    for name, script in CONFIGURATIONS.items():
        words = words_of(script)
        plan = plan_of(words)
        rows.append(_row(name, plan))
        if any(phase.fits is False for phase in plan.memory.phases) and OFFLOAD not in words:
            rows.append(_row(f"{name} with `{OFFLOAD}`", plan_of([*words, OFFLOAD])))
    lines = [_HEADER, ["---", *["---:"] * (len(_HEADER) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def words_of(script: str) -> list[str]:
    """The words of a launch script's command line."""
    environment = {
        "PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHON": sys.executable, "PRINT_COMMAND": "1",
        "BASE_DIR": "/nowhere",
    }  # fmt: skip
    command = ["bash", str(ROOT / "scripts" / script)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {' '.join(output.splitlines())}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.split("\0")[:-1]
    return words[2:]  # without interpreter and script


def plan_of(words: list[str]) -> Plan:
    """The plan for GPUs of 80 GiB."""
    planned = ["--dry-run", "--dry-run-gpu-memory-gib", str(GPU_GIB), "--dry-run-link-gbps", str(LINK_GBPS)]
    return make_plan(parse_args(argv=[*words, *planned]))


def _row(name: str, plan: Plan) -> list[str]:
    training, serving, layout = plan.memory.training, plan.memory.serving, plan.layout
    parts = {part.name: part.bytes for part in training.parts}
    sizes = {"TP": layout.tensor, "PP": layout.pipeline, "CP": layout.context, "EP": layout.expert, "DP": layout.data}
    computing = parts.get("activations", 0) + parts.get("logits", 0)
    named = [parts.get(key, 0) for key in ("weights", "gradients", "optimizer")]
    fits = plan.memory.phases[0].fits
    weights = next(part.bytes for part in serving.parts if part.name == "weights")
    return [
        name,
        str(plan.placement.num_gpus),
        " ".join(f"{key}{size}" for key, size in sizes.items() if size > 1),
        f"{plan.parameters.per_rank / 1e9:.2f} B",
        *(_gib(size) for size in named),
        _gib(computing),
        _gib(training.total - sum(named) - computing),
        f"{_gib(training.total)}{'' if fits else ' (does not fit)'}",
        _gib(training.host_of_node),
        _gib(weights),
        f"{serving.cache_tokens:,}",
        f"{_gib(plan.sync.bytes)} GiB, {plan.sync.seconds:.1f} s",
    ]


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


if __name__ == "__main__":
    sys.exit(main())
