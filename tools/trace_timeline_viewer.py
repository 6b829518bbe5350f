#!/usr/bin/env python3
"""Draw a timeline of the samples of a rollout, from the traces in its dump.

    python tools/trace_timeline_viewer.py DIR/rollout_data/3.pt

`--save-debug-rollout-data` and `--dump-details` write such dumps. The page is one self-contained file beside the dump; it is
written again if the dump is newer. Unless --no-serve is given, the tool serves it to browsers of this machine until Ctrl-C.
"""

import argparse
import http.server
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.utils.errors import UserError
from slime.utils.filesystem import write_text_atomically
from tools.command_line import run_tool

PAGE = Path(__file__).with_name("trace_timeline.html")
# The placeholder for the data in the page.
_DATA = "/*DATA*/"
_LOOPBACK = "127.0.0.1"


def timeline(samples: Iterable[Any]) -> dict[str, Any]:
    """The data of the page: a row per trace, in the order of the groups, with times in seconds since the first time of all.

    A row is `{"samples", "group", "lanes", "spans", "events"}`. Samples that were made from one sample share its trace and its
    row. A span's `lane` is below the lane of the span around it, and below those of spans that are still open when it begins. A
    span without an end lasts until the last known time and has the status "unfinished".

    Raises:
        UserError: no sample has a trace.
    """
    rows: dict[str, dict[str, Any]] = {}
    for position, sample in enumerate(samples):
        trace = vars(sample).get("trace")
        if not trace or not trace["events"]:
            continue
        row = rows.setdefault(trace["trace_id"], {"samples": [], "group": sample.group_index, "events": {}})
        row["samples"].append(position if sample.index is None else sample.index)
        # A copy of a sample has records of its own from the moment at which it was made.
        for record in trace["events"]:
            row["events"].setdefault(record.get("span_id") or (record["name"], record["time"]), record)
    if not rows:
        raise UserError("no sample of the dump has a trace: rollout functions of this framework record them")
    records = [record for row in rows.values() for record in row["events"].values()]
    times = [record[name] for record in records for name in ("start", "end", "time") if record.get(name) is not None]
    first, last = min(times), max(times)
    ordered = sorted(rows.values(), key=lambda row: (row["group"] is None, row["group"] or 0, min(row["samples"])))
    return {"seconds": last - first, "rows": [_row(row, first, last) for row in ordered]}


def _row(row: dict[str, Any], first: float, last: float) -> dict[str, Any]:
    spans = [dict(record) for record in row["events"].values() if record["kind"] == "span"]
    for span in spans:
        if span["end"] is None:
            span["end"], span["status"] = last, "unfinished"
    spans.sort(key=lambda span: (span["start"], -span["end"]))
    lanes = _lanes(spans)
    shown = ("name", "status", "attempt", "attrs")
    drawn = [
        {**{name: span[name] for name in shown}, "start": span["start"] - first, "end": span["end"] - first,
         "lane": lanes[span["span_id"]]}
        for span in spans
    ]  # fmt: skip
    events = [
        {"name": record["name"], "time": record["time"] - first, "attrs": record["attrs"],
         "lane": lanes.get(record["parent_id"], 0)}
        for record in row["events"].values() if record["kind"] == "event"
    ]  # fmt: skip
    return {
        "samples": row["samples"], "group": row["group"], "lanes": max(lanes.values(), default=0) + 1, "spans": drawn,
        "events": events,
    }  # fmt: skip


def _lanes(spans: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Id of a span -> its lane; `spans` are sorted by their starts."""
    lanes: dict[str, int] = {}
    # For each lane, the end of its last span.
    taken: list[float] = []
    for span in spans:
        lane = lanes.get(span["parent_id"], -1) + 1
        while lane < len(taken) and taken[lane] > span["start"]:
            lane += 1
        taken += [float("-inf")] * (lane + 1 - len(taken))
        lanes[span["span_id"]], taken[lane] = lane, span["end"]
    return lanes


def page_of(dump: Path, rebuild: bool = False) -> Path:
    """The page of a dump, a file beside it. It is written if it is missing, if the dump is newer, or if `rebuild` is true.

    Raises:
        UserError: the dump cannot be read, or has no traces.
        OSError: the page cannot be written.
    """
    from slime.rollout.rollout_dump import load_rollout

    page = dump.with_name(f"{dump.name}.timeline.html")
    if not dump.is_file():
        raise UserError(f"DUMP {dump} is no file; give a dump that --save-debug-rollout-data or --dump-details wrote")
    if not rebuild and page.is_file() and page.stat().st_mtime >= dump.stat().st_mtime:
        return page
    # The path is a template, in which single braces would be placeholders.
    samples = load_rollout(str(dump).replace("{", "{{").replace("}", "}}"), 0, flag="DUMP")
    # The data become a JavaScript expression, which may have NaN. Texts of models and tools must not close the script element.
    data = json.dumps({"dump": str(dump), **timeline(samples)}, default=str).replace("<", "\\u003c")
    write_text_atomically(page, PAGE.read_text(encoding="utf-8").replace(_DATA, data, 1))
    return page


def server_of(page: Path, port: int) -> http.server.ThreadingHTTPServer:
    """A server for one page at `port` of the loopback address; 0: a free port.

    Raises:
        UserError: the port is taken.
    """

    class OnePage(http.server.BaseHTTPRequestHandler):
        """Answers "/" with the page and serves no other file."""

        def do_GET(self) -> None:
            if self.path != "/":
                self.send_error(404)
                return
            content = page.read_bytes()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            """Log no requests."""

    try:
        return http.server.ThreadingHTTPServer((_LOOPBACK, port), OnePage)
    except OSError as error:
        raise UserError(f"--port {port}: {os.strerror(error.errno)}; give another, or 0 for a free one") from None


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("dump", metavar="DUMP", type=Path, help="a dump of a rollout or of an evaluation")
    parser.add_argument("--rebuild", action="store_true", help="make the page anew")
    parser.add_argument(
        "--serve", action=argparse.BooleanOptionalAction, default=True, help="serve the page, or only make it"
    )
    parser.add_argument("--port", type=int, default=9999, help="of this machine; 0: a free one (default: %(default)s)")
    args = parser.parse_args(words)
    if not 0 <= args.port < 65536:
        parser.error(f"--port {args.port}: give a number from 0 to 65535")
    page = page_of(args.dump, args.rebuild)
    print(page, flush=True)
    if not args.serve:
        return
    with server_of(page, args.port) as server:
        try:
            print(f"http://{_LOOPBACK}:{server.server_port}/ (Ctrl-C ends it)", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    run_tool(main)
