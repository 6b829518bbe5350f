#!/usr/bin/env python3
"""Serve a model on Megatron ranks as a teacher for distillation: log-probs of whole sequences, over HTTP.

    python tools/serve_megatron_teacher.py --hf-checkpoint MODEL --tensor-model-parallel-size 2 --bf16
    python tools/serve_megatron_teacher.py --hf-checkpoint MODEL --load MEGATRON_CHECKPOINT
    torchrun --nnodes 2 --nproc-per-node 8 … tools/serve_megatron_teacher.py --hf-checkpoint MODEL \\
        --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2

The first form starts all ranks on this machine, with or without GPUs. They end together, even after `kill -9`. The model's
flags come from the config.json of --hf-checkpoint; all flags of a run's training ranks may be added, such as --bf16 or --load.

POST /generate {"input_ids": [...], "sample_n": N, "label_token_ids": [[...], ...], "temperature": T, "seed": S} answers with
log_probs of all tokens but the first; for each of these also with N sampled ids and their log-probs, and with the log-probs of
the labels. POST /update_weights_from_disk {"model_path": DIR} loads other weights of the same model. A run with --opd-type
sglang takes the server's address as --rm-url. SLIME_RM_API_KEY (or SLIME_RM_API_KEY_FILE) is the token that clients must send.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import functools
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.observability.logging_utils import configure_logger
from slime.utils import env
from slime.utils.child_process import ChildProcess, environment_for_python, exit_when_parent_dies
from slime.utils.errors import UserError
from slime.utils.filesystem import make_scratch_directory, remove_scratch_directory
from slime.utils.ports import LOOPBACK, group_environment, host_for_url
from tools.command_line import model_alone, require_checkpoint, run_tool

if TYPE_CHECKING:
    from tools.teacher.ranks import TeacherRank

_POLL_SECONDS = 0.2
_LEAVE_SECONDS = 5.0
# The time between an error on rank 0 and the end of another rank that may have caused it.
_DEATH_SECONDS = 2.0
_MEETING = datetime.timedelta(minutes=10)
# The flags of a run that only builds a model.
_RUN = (
    "--model-args-from-hf", "--debug-train-only", "--disable-rewards-normalization",
)  # fmt: skip


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    given, others = make_parser().parse_known_args(words)
    require_checkpoint("--hf-checkpoint", given.hf_checkpoint)
    refuse_wrong_numbers(given)
    if given.teacher_host not in (LOOPBACK, "::1", "localhost") and env.reward_service_key() is None:
        raise UserError(
            f"--teacher-host {given.teacher_host}: everybody on the network could ask; set SLIME_RM_API_KEY"
        )
    # torchrun ends its processes in its own way.
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        exit_when_parent_dies()
    if "RANK" in os.environ:
        status = serve(given, others, [])
        return status if os.environ["RANK"] != "0" else end_at_once(status)
    scratch, ranks = make_scratch_directory("teacher"), []
    try:
        store = start_other_ranks(ranks_of_copy(given), words, scratch, ranks)
        status = serve(given, others, ranks)
    finally:
        for rank in ranks:
            rank.terminate()
        remove_scratch_directory(scratch)
    del store
    return end_at_once(status)


_SIZES = {
    "tensor-model-parallel-size": "ranks that share each layer",
    "pipeline-model-parallel-size": "stages of such ranks",
    "expert-model-parallel-size": "ranks that experts are spread over",
    "expert-tensor-parallel-size": "ranks that share each expert; unset: as many as share a layer",
}
# Option -> (type, default, least value, help).
_NUMBERS: dict[str, tuple[type, float | None, float, str]] = {
    "teacher-port": (int, None, 0, "where it listens, 0: at any port that is free; unset: TEACHER_PORT, else 7999"),
    "teacher-warmup-port": (int, None, 1, "where the warm-up request goes on --teacher-host; unset: where it listens"),
    "teacher-warmup-timeout-s": (float, 3000.0, 0, "for the warm-up request"),
    "teacher-sample-reduction-chunk-size": (int, 4096, 1, "rows of logits at a time, for draws"),
    "teacher-label-reduction-chunk-size": (int, 4096, 1, "rows of logits at a time, for log-probs of ids"),
    "megatron-server-max-length": (int, 0, 0, "tokens; longer sequences are refused (413), 0: none is"),
    "megatron-server-update-timeout-s": (float, 3600.0, 0, "for updates that name no timeout_s"),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add, of_checkpoint = parser.add_argument, "Hugging Face directory: config, tokenizer, and weights unless --load"
    add("--hf-checkpoint", type=Path, required=True, help=of_checkpoint)
    for name, what in _SIZES.items():
        add(f"--{name}", type=int, default=None if name == "expert-tensor-parallel-size" else 1, help=what)
    add("--context-parallel-size", type=int, default=1, help="a teacher has 1")
    add("--teacher-host", default=LOOPBACK, help="address to listen on; not loopback: set SLIME_RM_API_KEY")
    for name, (kind, default, _, what) in _NUMBERS.items():
        add(f"--{name}", type=kind, default=default, help=f"{what} (default: {default})" if default else what)
    warmed = "--megatron-server-warmup"
    add(warmed, action=argparse.BooleanOptionalAction, default=True, help="ask a first question at the start")
    return parser


def refuse_wrong_numbers(given: argparse.Namespace) -> None:
    """Raise UserError if a number is out of its bounds."""
    least_of = {**dict.fromkeys(_SIZES, 1), **{name: least for name, (_, _, least, _) in _NUMBERS.items()}}
    if given.context_parallel_size != 1:
        raise UserError(
            f"--context-parallel-size {given.context_parallel_size}: give --tensor-model-parallel-size for long sequences; the "
            "ranks of a teacher do not share a sequence"
        )
    for name, least in least_of.items():
        value, most = vars(given)[name.replace("-", "_")], 65535 if name.endswith("-port") else math.inf
        if value is not None and not least <= value <= most:
            raise UserError(
                f"--{name} {value}: give a number from {least}" + (f" to {most}" if most < math.inf else "")
            )


def ranks_of_copy(given: argparse.Namespace) -> int:
    """The number of ranks that hold one copy of the model."""
    tensor, experts = given.tensor_model_parallel_size, given.expert_model_parallel_size
    expert_ranks = experts * (given.expert_tensor_parallel_size or tensor)
    return math.lcm(tensor, expert_ranks) * given.pipeline_model_parallel_size


def end_at_once(status: int) -> NoReturn:
    """End rank 0 without its interpreter, which would wait for a thread that may itself wait for ranks that have ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def start_other_ranks(count: int, words: list[str], scratch: Path, ranks: list[ChildProcess]) -> Any:
    """Make this process rank 0, start ranks 1 … count − 1 and add them to `ranks`. Returns the store at which ranks meet."""
    from slime.utils.process_groups import create_store

    store = create_store(LOOPBACK, _MEETING)
    os.environ.update(
        group_environment(LOOPBACK), MASTER_ADDR=LOOPBACK, MASTER_PORT=str(store.port), WORLD_SIZE=str(count)
    )
    # The store exists already. Without this variable torch would open a second one on rank 0, which listens on all addresses.
    os.environ.update(LOCAL_WORLD_SIZE=str(count), TORCHELASTIC_USE_AGENT_STORE="True", RANK="0", LOCAL_RANK="0")
    for rank in range(1, count):
        own = {**environment_for_python(), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(
            ChildProcess(f"rank {rank}", [sys.executable, __file__, *words], scratch / f"rank-{rank}.log", own)
        )
        ranks[-1].start()
    return store


def serve(given: argparse.Namespace, words: list[str], others: list[ChildProcess]) -> int:
    """Run as the rank that the environment names. Returns the exit status."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    configure_logger("INFO" if rank == 0 else "ERROR")
    if world != ranks_of_copy(given):
        raise UserError(
            f"{world} ranks were started, and {ranks_of_copy(given)} hold a copy of the model: the product of the "
            "--*-model-parallel-size flags"
        )
    args = parse_model(given, words, world // local_world, local_world)
    from tools.teacher.ranks import TeacherRank

    teacher = TeacherRank(
        args,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_world_size=local_world,
        sample_rows=given.teacher_sample_reduction_chunk_size,
        label_rows=given.teacher_label_reduction_chunk_size,
    )
    if rank != 0:
        teacher.start()
        teacher.follow()
        return 0
    return asyncio.run(listen(given, args, teacher, others))


def parse_model(given: argparse.Namespace, words: list[str], nodes: int, ranks_of_node: int) -> argparse.Namespace:
    """The arguments of a run with this model on these ranks."""
    from slime.arguments import parse_args

    sizes = [f"--{name}={value}" for name in _SIZES if (value := vars(given)[name.replace("-", "_")])]
    # A run without engines needs a dump. This file exists, and nothing reads it.
    data = ["--load-debug-rollout-data", str(given.hf_checkpoint / "config.json")]
    ranks = ["--actor-num-nodes", str(nodes), "--actor-num-gpus-per-node", str(ranks_of_node)]
    ranks += ["--rollout-batch-size", str(nodes * ranks_of_node)]
    of_model = ["--hf-checkpoint", str(given.hf_checkpoint)]
    args = parse_args(model_alone, argv=[*of_model, *_RUN, *words, *sizes, *data, *ranks])
    if args.context_parallel_size > 1 or args.train_backend != "megatron":
        raise UserError("a teacher has ranks of --train-backend megatron, and --context-parallel-size 1")
    return args


async def listen(
    given: argparse.Namespace, args: argparse.Namespace, teacher: TeacherRank, others: list[ChildProcess]
) -> int:
    """Serve on rank 0 until a signal arrives or a rank ends. Returns the exit status."""
    from aiohttp import web

    from tools.teacher.server import TeacherServer, ask_first, identity_of

    key, names = env.reward_service_key(), [name.replace("-", "_") for name in _SIZES]
    server = TeacherServer(
        teacher.lead,
        {"hf_checkpoint": args.hf_checkpoint, **{name: vars(args)[name] for name in names}},
        hf_checkpoint=args.hf_checkpoint,
        vocab_size=args.vocab_size,
        max_length=given.megatron_server_max_length,
        loaded=identity_of(teacher.source),
        decode=decoder_of(args),
        update_seconds=given.megatron_server_update_timeout_s,
        api_key=key,
    )
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=_LEAVE_SECONDS, access_log=None)
    await runner.setup()
    port = env.whole_number("TEACHER_PORT", 7999) if given.teacher_port is None else given.teacher_port
    await web.TCPSite(runner, given.teacher_host, port).start()
    host, port = host_for_url(given.teacher_host), runner.addresses[0][1]
    print(f"teacher: http://{host}:{port}", flush=True)
    warm_up = None
    if given.megatron_server_warmup:
        local = LOOPBACK if given.teacher_host in ("0.0.0.0", "::", "") else host
        url = f"http://{local}:{given.teacher_warmup_port or port}"
        warm_up = functools.partial(ask_first, url, key, given.teacher_warmup_timeout_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.end, 0)
    tasks = [asyncio.create_task(server.run(teacher.start, warm_up)), asyncio.create_task(watch(others, server.end))]
    status, reason = await server.ended
    for task in tasks:
        task.cancel()
    if reason is not None:
        print("error:", reason, file=sys.stderr)
        for rank in others:
            if await asyncio.to_thread(rank.wait, _DEATH_SECONDS) is not None:
                print(f"{rank.name}: {rank.describe_end()}", file=sys.stderr)
    await runner.cleanup()
    if reason is None:
        # Ranks that need longer than the limit are ended while they compute.
        with contextlib.suppress(Exception):
            await server.leave(_LEAVE_SECONDS)
    return status


async def watch(ranks: list[ChildProcess], end: Callable[[int, str], None]) -> None:
    """Wait until one of the ranks has ended, then call `end` with status and reason."""
    while True:
        for rank in ranks:
            if (status := rank.poll()) is not None:
                return end(max(status, 1), f"{rank.name} ended")
        await asyncio.sleep(_POLL_SECONDS)


def decoder_of(args: argparse.Namespace) -> Callable[[Sequence[int]], list[str] | None]:
    """A function that returns the text of each token, or None if --hf-checkpoint has no tokenizer. It is loaded once, before
    the first request, because a run's first requests all ask for texts."""
    from slime.utils.processing_utils import load_tokenizer

    try:
        tokenizer = load_tokenizer(args.hf_checkpoint, args.trust_remote_code)
    except UserError:
        return lambda tokens: None
    return lambda tokens: tokenizer.batch_decode([[token] for token in tokens])


if __name__ == "__main__":
    run_tool(main)
