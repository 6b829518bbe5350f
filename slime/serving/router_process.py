"""Entry point of the router process: `python -m slime.serving.router_process --arguments-file FILE`.

Runs the unmodified `sglang_router` and ends with its parent. `sglang_router.launch_router` is not used: it imports a
debugging server whose dependencies take two seconds. The arguments file may hold an API key: it is deleted when read.
"""

import argparse
import json
from pathlib import Path

from slime.utils.child_process import exit_when_parent_dies


def main(argv: list[str] | None = None) -> None:
    """Serve until the process is told to end."""
    exit_when_parent_dies()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--arguments-file", type=Path, required=True)
    arguments_file = parser.parse_args(argv).arguments_file
    fields = json.loads(arguments_file.read_text())
    arguments_file.unlink()

    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    # Pairs have become lists on their way.
    fields["prefill_urls"] = [tuple(worker) for worker in fields.get("prefill_urls", ())]
    Router.from_args(RouterArgs(**fields)).start()


if __name__ == "__main__":
    main()
