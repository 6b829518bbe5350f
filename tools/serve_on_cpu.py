"""Start a plain SGLang server on a machine without a GPU, for a run's `--rollout-external-engine-addrs`.

.venv/bin/python tools/serve_on_cpu.py --model-path DIR --port 30000 --enable-deterministic-inference

The server is the unmodified package with our CPU adapter, and belongs to no run. SGLang's own command line gets the settings
that a run gives its engines on CPU, and after them all words of this command. With a GPU start SGLang as its documentation
says: `python -m sglang.launch_server`.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.backends.sglang_utils.server_arguments import defaults_on_cpu, environment_on_cpu
from slime.utils import env
from slime.utils.child_process import environment_for_python
from slime.utils.device import gpus_on_this_machine
from tools.command_line import require_checkpoint, run_tool

SERVE = "from slime.backends.sglang_utils.server_process import serve_plainly; serve_plainly()"


def command_line(model: str, words: list[str]) -> list[str]:
    """The words for SGLang: the settings for `model` on CPU, and after them `words`, which win."""
    settings: list[str] = []
    for name, value in defaults_on_cpu(model).items():
        flag = "--" + name.replace("_", "-")
        if value is not False:
            settings += [flag] if value is True else [flag, str(value)]
    return [*settings, *words]


def main() -> None:
    """Replace this process by the server, in the environment that it needs at its start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True, help="Hugging Face directory")
    parser.add_argument(
        "--tp-size", "--tp", "--tensor-parallel-size", type=int, default=1, help="tensor-parallel ranks"
    )
    parser.add_argument(
        "--pp-size", "--pp", "--pipeline-parallel-size", type=int, default=1, help="pipeline stages of such ranks"
    )
    options, words = parser.parse_known_args()
    # Without this check SGLang would start for seconds, and then look for a model of that name in the network.
    require_checkpoint("--model-path", Path(options.model_path))
    if gpus_on_this_machine() > 0:
        parser.error(
            "this machine has GPUs: start `python -m sglang.launch_server` there, or set SLIME_ACCELERATOR=cpu"
        )
    sizes = ["--tp-size", str(options.tp_size), "--pp-size", str(options.pp_size)]
    words = command_line(options.model_path, ["--model-path", options.model_path, *sizes, *words])
    ranks = options.tp_size * options.pp_size
    environment = environment_on_cpu(environment_for_python(), ranks, env.threads_of_user() or 1)
    os.execve(sys.executable, [sys.executable, "-c", SERVE, *words], environment)


if __name__ == "__main__":
    run_tool(main)
