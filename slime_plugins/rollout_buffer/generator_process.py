"""The process of a generator: `python -m slime_plugins.rollout_buffer.generator_process SOURCE FILE`, started by the service.

It calls `run_rollout(data)` of SOURCE, a module or a file, with the JSON of FILE, and ends with the service.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import sys
from pathlib import Path

from slime.utils.child_process import exit_when_parent_dies
from slime.utils.errors import RunError, UserError

# The variable with the engines' key, which must not be in FILE, because that lies on a disk.
ENGINE_KEY = "SLIME_ENGINE_API_KEY"


def main() -> int:
    exit_when_parent_dies()
    # Imported only after `exit_when_parent_dies`: a user's module may take long to import, and the process must not outlive the
    # service meanwhile.
    from slime_plugins.rollout_buffer.generators import load_generator

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    source, file = sys.argv[1:]
    data = json.loads(Path(file).read_text(encoding="utf-8"))
    data["remote_engine_api_key"] = os.environ.get(ENGINE_KEY)
    try:
        result = load_generator(source).module.run_rollout(data)
        if inspect.iscoroutine(result):
            asyncio.run(result)
    except (UserError, RunError) as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
