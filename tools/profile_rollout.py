#!/usr/bin/env python3
"""Make all engines behind a router write a profile.

    python tools/profile_rollout.py --router-url http://10.0.0.1:3000 --output-dir /shared/profiles
    python tools/profile_rollout.py --router-url http://10.0.0.1:3000 --action stop

A profile ends after --num-steps steps of an engine, or by `--action stop`. Each engine writes its own traces on its own
machine, for Perfetto or chrome://tracing. Without --output-dir they go to the directory in the engine's variable
SGLANG_TORCH_PROFILER_DIR, or to /tmp if it is not set. If router and engines ask for a key (--router-api-key of the run), write
it into a file and name that by --api-key-file.
"""

import argparse
import concurrent.futures
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.utils.errors import RunError, UserError
from slime.utils.ports import engine_urls
from tools.command_line import run_tool

ACTIVITIES = ("CPU", "GPU", "MEM", "RPD")


def engines_behind(router: str, key: str | None, timeout: float) -> list[str]:
    """The URLs of the engines that a router lists.

    Raises:
        RunError: the router does not answer, or its answer is not a router's.
        UserError: the router lists no engine.
    """
    answer = _ask("GET", f"{router}/workers", key, timeout)
    try:
        urls = engine_urls(answer.json()["workers"])
    except (ValueError, KeyError, TypeError):
        raise RunError(
            f"--router-url {router}: answered GET /workers with {answer.text[:200]!r}: it is no router"
        ) from None
    if not urls:
        raise UserError(f"--router-url {router}: lists no engine; wait until the run has started them")
    return urls


def tell_engines(urls: list[str], path: str, settings: dict[str, Any], key: str | None, timeout: float) -> list[str]:
    """POST `settings` to `path` of all engines at once. Returns a line for each engine that failed."""

    def told(url: str) -> str | None:
        try:
            _ask("POST", url + path, key, timeout, json=settings)
        except RunError as error:
            return str(error)
        return None

    with concurrent.futures.ThreadPoolExecutor(max_workers=min(len(urls), 64)) as pool:
        return [failure for failure in pool.map(told, urls) if failure is not None]


def _ask(method: str, url: str, key: str | None, timeout: float, **options: Any) -> Any:
    import requests

    with requests.Session() as session:
        # Engines are inside the cluster, and a proxy would not reach them.
        session.trust_env = False
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            answer = session.request(method, url, headers=headers, timeout=timeout, **options)
        except requests.Timeout:
            # An engine answers a stop only after it has written its profile, which may take longer than the limit.
            raise RunError(f"{url}: did not answer within --timeout {timeout:g} s") from None
        except requests.RequestException as error:
            raise RunError(
                f"{url}: {type(error).__name__}; does the run live, and does this machine reach it?"
            ) from None
    if answer.status_code in (401, 403):
        raise RunError(f"{url}: asks for another key ({answer.status_code}); give it by --api-key-file")
    if not answer.ok:
        raise RunError(f"{url}: answered {answer.status_code}: {answer.text[:200]}")
    return answer


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of the profile, as an engine takes them."""
    # Engines have another working directory, so the path must be absolute.
    directory = None if args.output_dir is None else str(args.output_dir.absolute())
    return {
        "output_dir": directory, "num_steps": args.num_steps, "activities": args.activities,
        "profile_by_stage": args.profile_by_stage, "with_stack": args.with_stack, "record_shapes": args.record_shapes,
    }  # fmt: skip


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--router-url", required=True, help="such as http://10.0.0.1:3000")
    parser.add_argument("--action", choices=("start", "stop"), default="start", help="(default: %(default)s)")
    parser.add_argument("--output-dir", type=Path, help="where engines write")
    parser.add_argument("--num-steps", type=int, default=3, help="forward passes to record (default: %(default)s)")
    parser.add_argument(
        "--activities", nargs="+", choices=ACTIVITIES, default=["CPU", "GPU"], help="(default: CPU GPU)"
    )
    parser.add_argument("--profile-by-stage", action="store_true", help="prefill and decode in files of their own")
    parser.add_argument("--with-stack", action="store_true", help="record where in the source operators are called")
    parser.add_argument("--record-shapes", action="store_true", help="record the shapes of their inputs")
    parser.add_argument("--api-key-file", type=Path, help="a file with the key that router and engines ask for")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for an answer (default: %(default)g)")
    args = parser.parse_args(words)
    if args.num_steps < 1:
        parser.error(f"--num-steps {args.num_steps}: must be at least 1")
    if args.timeout <= 0:
        parser.error(f"--timeout {args.timeout:g}: must be above 0")
    if not args.router_url.startswith(("http://", "https://")):
        parser.error(f"--router-url {args.router_url}: give it with http:// or https://")
    if args.api_key_file is not None and not args.api_key_file.is_file():
        parser.error(f"--api-key-file {args.api_key_file}: is no file")
    key = None if args.api_key_file is None else args.api_key_file.read_text(encoding="utf-8").strip()
    urls = engines_behind(args.router_url.rstrip("/"), key, args.timeout)
    starts = args.action == "start"
    failures = tell_engines(urls, f"/{args.action}_profile", settings_of(args) if starts else {}, key, args.timeout)
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    directory = args.output_dir.absolute() if args.output_dir else "the directory of SGLANG_TORCH_PROFILER_DIR or /tmp"
    where = f", and write into {directory} after {args.num_steps} steps" if starts else ""
    print(
        f"{len(urls) - len(failures)} of {len(urls)} engines {'have begun' if starts else 'have ended'} a profile{where}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    run_tool(main)
