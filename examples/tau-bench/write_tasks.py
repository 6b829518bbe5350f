"""Write the tasks of τ-bench as prompts of a run: a line for each, with its environment, split and number.

python examples/tau-bench/write_tasks.py --env retail --task-split train --output tasks.jsonl
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.utils.plugin_loader import load_function
from tools.command_line import run_tool

HERE = Path(__file__).parent


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=("retail", "airline"), default="retail")
    parser.add_argument("--task-split", default="train", help="train, dev or test; airline has test alone (train)")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args(argv)
    get_env = load_function(f"{HERE}/generate_with_tau.py:library")("tau_bench.envs").get_env
    # A customer whom a person plays asks no service.
    environment = get_env(given.env, user_strategy="human", user_model="", task_split=given.task_split, task_index=0)
    of_all = {"env": given.env, "task_split": given.task_split}
    rows = [
        {"prompt": f"{given.env} {index}", "metadata": {**of_all, "task_index": index}}
        for index in range(len(environment.tasks))
    ]
    given.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} tasks written to {given.output}")


if __name__ == "__main__":
    run_tool(main)
