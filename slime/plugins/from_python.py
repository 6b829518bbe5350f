"""Tries plug-ins that users' programs pass in Python instead of by a flag: a class of training ranks, a device, an endpoint for
agents, a sandbox, a harness, and a generator of the rollout buffer. Their words, `--actor-cls` and so on, belong to this
command, and are no flags of a run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import math
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime.agent.adapters.anthropic import AnthropicAdapter
from slime.agent.adapters.openai import OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.harness.base import BaseHarness
from slime.agent.sandbox import (
    EXIT_TIME_BUDGET_EXCEEDED,
    EXIT_TIMED_OUT,
    LocalSandbox,
    Sandbox,
    SandboxError,
    exec_and_wait,
)
from slime.arguments.paths import absolute_plug_in
from slime.plugins.recorder import Recorder
from slime.utils import async_utils, device
from slime.utils.errors import RunError, UserError
from slime.utils.http_utils import close_http_client, post
from slime.utils.misc import Box
from slime.utils.plugin_loader import calling_user_code, load_function
from slime.utils.plugin_points import POINTS
from slime.utils.ports import host_for_url
from slime.utils.processing_utils import load_tokenizer
from slime.utils.run_values import with_run_values
from slime.utils.types import Sample

ACTOR_CLS, ACCELERATOR, ADAPTER_CLS = "--actor-cls", "--accelerator", "--adapter-cls"
SANDBOX_CLS, HARNESS_CLS, BUFFER_GENERATOR = "--sandbox-cls", "--harness-cls", "--buffer-generator"
# Loaded by path, as in a run, because nothing in `slime` may import the service.
_BUFFER = "slime_plugins.rollout_buffer"
_POLL_S, _START_SECONDS = 5.0, 60.0
_BYTES = 4096
_SESSION, _QUESTIONS = "slime-plugins", ("What is 1+1?", "What is 2+2?")


def take_paths(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(paths by this command's own words among `words`, the remaining flags of a run).

    Raises:
        UserError: a path is missing after such a word.
    """
    paths, left, rest = {}, [], iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag not in POINTS or not POINTS[flag].in_python:
            left.append(word)
            continue
        paths[flag] = value if equals else next(rest, "")
        if not paths[flag] or paths[flag].startswith("--"):
            example = "my_file.py" if flag == BUFFER_GENERATOR else "my_file.py:MyClass"
            raise UserError(f"{flag} needs a path, such as {example}: {POINTS[flag].call}")
    return paths, left


def try_rank(record: Recorder, args: argparse.Namespace, batch: dict[str, Any]) -> None:
    """Try a training group of one rank, in a process of its own: it starts, trains `batch`, prepares a push, and ends.

    Raises:
        UserError, RunError: the error with which a run would end.
    """
    import ray

    from slime.ray.cluster import ray_cluster
    from slime.ray.placement_group import create_placement_groups
    from slime.ray.rollout_pipeline import batch_schedule
    from slime.ray.train_group import TrainGroup
    from slime.training.rollout_batch import split_for_data_parallel
    from slime.weights.push import Opening

    path = record.path
    record.named(load_function(path, flag=ACTOR_CLS))
    shards = split_for_data_parallel(batch, batch_schedule(args, batch))
    with calling_user_code(ACTOR_CLS, path, "rollout 0"), ray_cluster(args) as running:
        bundles = create_placement_groups(running)["actor"]
        group = TrainGroup(running, bundles.group, bundles.places, absolute_plug_in(path))
        try:
            group.start()
            with record.call([]) as done:
                done(f"first rollout {group.wait_ready()}")
            with record.call([0, shards]) as done:
                rollout = SimpleNamespace(shards=[Box(ray.put(shard)) for shard in shards])
                group.train(0, rollout, done)
            with record.call([]) as done:
                opening = done(group.open_weight_push())
            if not isinstance(opening, Opening):
                raise UserError(f"open_weight_push returned {opening!r}; expected a slime.weights.push.Opening")
            group.dispose()
        except (RunError, UserError) as error:
            raise UserError(f"{ACTOR_CLS} {path}: {error}") from error
        finally:
            group.kill()


def try_adapter(record: Recorder, args: argparse.Namespace) -> None:
    """Try an endpoint for agents, served on loopback in front of the engine of `args`: a client has two turns with it.

    Raises:
        UserError: it is no endpoint, refuses a turn, or makes no sample of them.
    """
    path = record.path
    kind = load_function(path, flag=ADAPTER_CLS)
    record.named(kind)
    if not inspect.isclass(kind) or not issubclass(kind, OpenAIAdapter | AnthropicAdapter):
        raise UserError(
            f"{ADAPTER_CLS} {path}: it inherits from neither OpenAIAdapter nor AnthropicAdapter of slime.agent.adapters, "
            "whose protocols this command speaks; one of another protocol takes a client of its own"
        )
    engine = f"http://{host_for_url(args.sglang_router_ip)}:{args.sglang_router_port}"
    with calling_user_code(ADAPTER_CLS, path, "a session of two turns"), contextlib.ExitStack() as stack:
        adapter = kind(load_tokenizer(args.hf_checkpoint, args.trust_remote_code), engine)
        served = run_app_in_thread(adapter.app, thread_name="slime-plugins-adapter")
        stack.callback(served.stop)
        try:
            with record.call([*_QUESTIONS]) as done:
                samples = done(async_utils.run(_samples_of_two_turns(adapter, served.url)))
        except RunError as error:
            raise UserError(f"{ADAPTER_CLS} {path}: {error}") from error
        if not samples:
            counts = dict(adapter.trajectories.counts)
            raise UserError(f"{ADAPTER_CLS} {path}: two turns gave no sample to train; its counts are {counts}")


async def _samples_of_two_turns(adapter: OpenAIAdapter | AnthropicAdapter, url: str) -> list[Sample]:
    speaks_openai, messages = isinstance(adapter, OpenAIAdapter), []
    route = "/v1/chat/completions" if speaks_openai else "/v1/messages"
    adapter.open_session(_SESSION)
    try:
        for question in _QUESTIONS:
            messages.append({"role": "user", "content": question})
            body = {"model": "slime-actor", "max_tokens": 1024, "messages": messages}
            reply = await post(url + route, body, max_retries=1, headers={"Authorization": f"Bearer {_SESSION}"})
            said = reply["choices"][0]["message"]["content"] if speaks_openai else reply["content"]
            messages.append({"role": "assistant", "content": said})
        return await adapter.finish_session(_SESSION, base_sample=Sample(index=0))
    finally:
        await close_http_client()


def try_generator(record: Recorder, args: argparse.Namespace, data_source: Any) -> list[Any]:
    """The groups of a rollout that a generator in a process of its own makes, received over a rollout buffer.

    Raises:
        UserError, RunError: the error with which a run would end.
    """
    path = record.path
    serving = load_function(f"{_BUFFER}.service.serving")
    generate_rollout = load_function(f"{_BUFFER}.rollout.generate_rollout")
    generator = load_function(f"{_BUFFER}.generators.load_generator")(path)
    record.named(generator.module.run_rollout)
    trusts = bool(args.trust_remote_code)
    with (
        tempfile.TemporaryDirectory(prefix="slime-plugins-") as directory,
        serving([path], directory, trust_remote_code=trusts) as (url, _),
    ):
        buffered = with_run_values(args)
        vars(buffered).update(
            rollout_buffer_url=url,
            rollout_task_type=generator.task_type,
            fetch_trajectory_retry_times=math.ceil((_START_SECONDS + args.http_request_timeout) / _POLL_S),
        )
        with record.call([f"prompts of {args.prompt_data}"]) as done, _naming(f"{BUFFER_GENERATOR} {path}"):
            return done(generate_rollout(buffered, 0, data_source).samples)


@contextlib.contextmanager
def _naming(subject: str) -> Iterator[None]:
    """In the block, errors get the prefix `subject`."""
    try:
        yield
    except (RunError, UserError) as error:
        raise type(error)(f"{subject}: {error}") from error


def try_accelerator(record: Recorder) -> None:
    """Try a device: it is registered, and every method that a run uses is called. The trainer does not run on it here.

    Raises:
        UserError: it raises, or gives an answer that a run cannot use.
    """
    path = record.path
    factory = load_function(path, flag=ACCELERATOR)
    record.named(factory)
    name = getattr(factory, "name", "")
    if not isinstance(name, str) or name in ("", "cpu", "cuda"):
        raise UserError(
            f"{ACCELERATOR} {path}: its name is {name!r}; give the class a `name` of its own, which SLIME_ACCELERATOR selects"
        )
    before = os.environ.get("SLIME_ACCELERATOR")
    try:
        os.environ["SLIME_ACCELERATOR"] = name
        device.register_accelerator(name, factory)
        with calling_user_code(ACCELERATOR, path, "its questions"):
            accelerator = device.get_accelerator()
            for question, ask, is_right, expected in _questions(accelerator):
                with record.call([question]) as done:
                    found = done(ask())
                if not is_right(found):
                    raise UserError(f"{ACCELERATOR} {path}: {question} gave {found!r}; expected {expected}")
    finally:
        os.environ.pop("SLIME_ACCELERATOR")
        if before is not None:
            os.environ["SLIME_ACCELERATOR"] = before
        device.get_accelerator.cache_clear()


_Question = tuple[str, Callable[[], Any], Callable[[Any], bool], str]


def _questions(accelerator: Any) -> Iterator[_Question]:
    """(the question, how it is asked, whether an answer is right, a description of right answers)."""
    import torch

    def is_none(found: Any) -> bool:
        return found is None

    def is_count(found: Any) -> bool:
        return isinstance(found, int) and not isinstance(found, bool) and found >= 0

    def as_tensors() -> list[float]:
        matrix = torch.full((4, 4), 2.0, device=accelerator.current_device())
        product = matrix @ matrix
        accelerator.synchronize()
        return product.sum().cpu().reshape(1).tolist()

    def copied_aside() -> bool:
        source = torch.arange(_BYTES, device=accelerator.current_device()).to(torch.uint8)
        buffer = accelerator.host_buffer(_BYTES)
        with accelerator.aside():
            buffer.copy_(source, non_blocking=True)
        accelerator.join_aside()
        accelerator.mark()()
        return bool(torch.equal(buffer, source.cpu()))

    def drawn_again() -> bool:
        state = accelerator.generator_state()
        if state is None:
            return True
        draws = []
        for _ in range(2):
            accelerator.set_generator_state(state)
            draws.append(torch.rand(8, device=accelerator.current_device()).cpu())
        return bool(torch.equal(*draws))

    def fused() -> bool:
        ones = torch.ones(8, device=accelerator.current_device())
        compiled = accelerator.fused(torch.sigmoid)
        result = compiled(ones) if compiled is not None and compiled.works else None
        return result is None or bool(torch.allclose(result, torch.sigmoid(ones)))

    yield "device(0)", lambda: accelerator.device(0), lambda found: isinstance(found, torch.device), "a torch.device"
    yield "set_device(0)", lambda: accelerator.set_device(0), is_none, "nothing"
    yield "a product on current_device()", as_tensors, lambda found: found == [256.0], "[256.0]"
    yield "a copy to host_buffer() in aside()", copied_aside, bool, "the same bytes once mark() returns"
    yield "set_generator_state(generator_state())", drawn_again, bool, "the same draws again"
    yield "fused()", fused, bool, "None, or a `CompiledFunction` of what the function computes"
    yield "keep_freed_memory()", accelerator.keep_freed_memory, is_none, "nothing"
    yield "compute_in_this_thread()", accelerator.compute_in_this_thread, is_none, "nothing"
    yield "release_cached_memory()", accelerator.release_cached_memory, is_none, "nothing"
    yield "collect_shared_memory()", accelerator.collect_shared_memory, is_none, "nothing"
    yield "reset_peak_memory()", accelerator.reset_peak_memory, is_none, "nothing"
    yield "memory_allocated()", accelerator.memory_allocated, is_count, "bytes"
    peak = accelerator.peak_memory_allocated
    yield "peak_memory_allocated()", peak, lambda found: found is None or is_count(found), "bytes, or None"
    yield (
        "memory_of_device()",
        accelerator.memory_of_device,
        lambda found: len(found) == 2 and all(map(is_count, found)) and found[0] <= found[1],
        "(free, all) bytes",
    )
    yield "device_name()", accelerator.device_name, lambda found: isinstance(found, str) and bool(found), "a name"
    yield (
        "device_uuid(0)",
        lambda: accelerator.device_uuid(0),
        lambda found: isinstance(found, str | int),
        "text or a number",
    )
    for backend in dict.fromkeys((accelerator.process_group_backend, accelerator.host_group_backend)):
        asked = f"a sum over a group of {backend!r}"
        yield asked, lambda backend=backend: _summed(accelerator, backend), lambda found: found == [3.0], "[3.0]"


def _summed(accelerator: Any, backend: str) -> list[float]:
    """The sum of [3] over a group of one rank."""
    import torch
    import torch.distributed as dist

    with tempfile.TemporaryDirectory(prefix="slime-plugins-") as directory, contextlib.ExitStack() as stack:
        dist.init_process_group(backend, init_method=f"file://{directory}/meeting", rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        tensor = torch.full((1,), 3.0, device=accelerator.group_device(None))
        dist.all_reduce(tensor)
        return tensor.cpu().tolist()


def try_sandbox(record: Recorder) -> None:
    """Try a sandbox: it is entered, every method that agents use is called, and it is left.

    Raises:
        UserError: it raises, or gives a wrong answer.
    """
    path = record.path
    factory = load_function(path, flag=SANDBOX_CLS)
    record.named(factory)

    async def main() -> None:
        async with factory() as sandbox:
            if not isinstance(sandbox.sandbox_id, str) or not sandbox.sandbox_id:
                raise UserError(
                    f"{SANDBOX_CLS} {path}: its sandbox_id is {sandbox.sandbox_id!r}; give it a name of its own"
                )
            async for question, ask, expected in _questions_to_sandbox(sandbox):
                with record.call([question]) as done:
                    found = done(await ask)
                if found != expected:
                    raise UserError(f"{SANDBOX_CLS} {path}: {question} gave {found!r}; expected {expected!r}")

    with _blaming(SANDBOX_CLS, path), calling_user_code(SANDBOX_CLS, path, "its questions"):
        asyncio.run(main())


async def _questions_to_sandbox(sandbox: Sandbox) -> AsyncIterator[tuple[str, Awaitable[Any], Any]]:
    """(the question, how it is asked, the expected answer)."""

    async def refused() -> str:
        try:
            return repr(await sandbox.exec("exit 3", check=True))
        except SandboxError:
            return "a SandboxError"

    async def hung() -> int:
        return (await sandbox.exec("sleep 60", timeout=1))[0]

    async def copied(content: Any) -> str:
        await sandbox.write_file(name, content)
        return await sandbox.read_file(name)

    async def ended() -> tuple[int, int]:
        code, output = await exec_and_wait(
            sandbox, cmd="echo $$; sleep 60", time_budget_sec=1, tag="slime-long", poll_interval_sec=0.1
        )
        # Signal 0 to the command's shell fails if that was ended.
        left, _, _ = await sandbox.exec(f"kill -0 {int(output)}")
        return code, int(left == 0)

    _, place, _ = await sandbox.exec('printf %s "${TMPDIR:-/tmp}"', check=True)
    name = f"{place}/slime plugins/file"
    yield (
        "exec('echo out; echo told >&2; exit 3')",
        sandbox.exec("echo out; echo told >&2; exit 3"),
        (3, "out\n", "told\n"),
    )
    yield "exec with env", sandbox.exec('echo "$A"', env={"A": "b c"}), (0, "b c\n", "")
    yield "exec with check of a command that fails", refused(), "a SandboxError"
    yield "exec('sleep 60', timeout=1)", hung(), EXIT_TIMED_OUT
    yield "a text, written and read", copied("täxt\n"), "täxt\n"
    yield "bytes, written and read", copied(b"\xff\x00"), "\udcff\x00"
    yield "a file of this machine, written and read", copied(Path(__file__)), Path(__file__).read_text(encoding="utf-8")
    for again in ("", ", again"):
        waited = exec_and_wait(sandbox, cmd="echo out; exit 5", time_budget_sec=60, tag="slime", poll_interval_sec=0.1)
        yield f"exec_and_wait{again}", waited, (5, "out\n")
    yield "exec_and_wait over budget, and whether it goes on", ended(), (EXIT_TIME_BUDGET_EXCEEDED, 0)


@contextlib.contextmanager
def _blaming(flag: str, path: str) -> Iterator[None]:
    """In the block, errors for the user also name the plug-in."""
    try:
        yield
    except (RunError, UserError) as error:
        raise error if f"{flag} {path}" in str(error) else UserError(f"{flag} {path}: {error}") from error


def try_harness(record: Recorder) -> None:
    """Try a harness: it runs in a sandbox of this machine, with an adapter that answers every request with one text.

    Raises:
        UserError: it raises, has no name, makes no request, or makes one without the key of its session.
    """
    path = record.path
    factory = load_function(path, flag=HARNESS_CLS)
    record.named(factory)

    async def main() -> None:
        asked: list[str] = []
        harness = factory()
        if not isinstance(harness.name, str) or not harness.name:
            raise UserError(f"its name is {harness.name!r}; give the class a `name`")
        if isinstance(harness, BaseHarness):
            harness.poll_interval_sec = 0.1
        async with _adapter(asked) as url, LocalSandbox(network="host") as sandbox:
            await sandbox.exec("mkdir work", check=True)
            given = {"workdir": "work", "session_id": "session-1", "adapter_url": url, "time_budget_sec": 60}
            with record.call([sandbox.sandbox_id, given]) as done:
                code = done(await harness.run(sandbox, **given, prompt="Say hello."))
            with record.call(["requests to the adapter"]) as done:
                done(asked)
        if isinstance(code, bool) or not isinstance(code, int):
            raise UserError(f"run returned {code!r}; expected the exit status of the agent")
        if code != 0:
            raise UserError(
                f"run returned {code}: is the agent on PATH here? In a sandbox of a run `install_cli` puts it there"
            )
        if not asked or set(asked) != {"session-1"}:
            raise UserError(
                f"the adapter was asked with the keys {asked}; expected the session, 'session-1', at each request"
            )

    with _blaming(HARNESS_CLS, path), calling_user_code(HARNESS_CLS, path, "a run"):
        asyncio.run(main())


@contextlib.asynccontextmanager
async def _adapter(asked: list[str]) -> AsyncIterator[str]:
    """Serve a stand-in for an adapter; yields its URL. The key of each request is appended to `asked`."""
    from aiohttp import web

    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, "input_tokens": 1, "output_tokens": 1}
    common = {"id": "answer-1", "model": "slime-actor", "usage": usage}
    block = {"type": "text", "text": "Hello."}
    message = {**common, "type": "message", "role": "assistant", "content": [block], "stop_reason": "end_turn"}
    choice = {"index": 0, "finish_reason": "stop"}
    said = {"role": "assistant", "content": block["text"]}
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": block["text"]}}
    # Path of a protocol → (the answer, the events of a stream that say the same).
    answers = {
        "/v1/chat/completions": (
            {**common, "object": "chat.completion", "choices": [{**choice, "message": said}]},
            [{**common, "object": "chat.completion.chunk", "choices": [{**choice, "delta": said}]}],
        ),
        "/v1/messages": (
            message,
            [
                {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}},
                {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
                delta,
                {"type": "content_block_stop", "index": 0},
                {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage},
                {"type": "message_stop"},
            ],
        ),
    }

    async def answer(request: web.Request) -> web.Response:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        asked.append(key or request.headers.get("x-api-key", ""))
        whole, events = answers[request.path]
        if not (await request.json()).get("stream"):
            return web.json_response(whole)
        lines = [f"event: {event.get('type', 'chunk')}\ndata: {json.dumps(event)}\n\n" for event in events]
        done = "data: [DONE]\n\n" if whole is not message else ""
        return web.Response(text="".join(lines) + done, content_type="text/event-stream")

    app = web.Application()
    app.add_routes([web.post(path, answer) for path in answers])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
