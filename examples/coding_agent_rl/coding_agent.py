"""For each sample an agent works in a sandbox; its model's turns are trained, and its diff is graded in a fresh sandbox.

--custom-generate-function-path examples/coding_agent_rl/coding_agent.py:generate
--custom-config-path examples/coding_agent_rl/coding_agent.yaml
"""

import asyncio
import contextlib
import logging
import shlex
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from examples.coding_agent_rl.settings import Settings
from slime.agent.adapters import BaseAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.sandbox import EXIT_TIMED_OUT, Sandbox, SandboxError, exec_and_wait
from slime.rollout.failures import SampleFailed
from slime.rollout.generate_state import GenerateState, samples_among_some
from slime.utils.async_utils import slots
from slime.utils.errors import UserError
from slime.utils.misc import SingletonMeta
from slime.utils.plugin_loader import load_function
from slime.utils.ports import host_for_url
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

# Whoever owns the directory, whatever hooks it has got meanwhile.
GIT = "git -c safe.directory='*' -c core.hooksPath=/dev/null -c user.name=slime -c user.email=slime@localhost"
# Inside the repository's own directory, so that the diff holds none of it.
PATCH = ".git/slime.patch"
CALL_SECONDS = 300.0
# Of a diff: more is no repair, and sandboxes read no larger files.
PATCH_BYTES = 64 * 2**20
# As git applies it, whatever an agent has set for diffs.
DIFF = (
    "diff --cached --binary --no-ext-diff --no-textconv --no-color --src-prefix=a/ --dst-prefix=b/ --unified=3 --no-relative "
    "--submodule=short"
)


@dataclass(frozen=True)
class Task:
    """What a row's metadata says: where the repository is and how it is set up, what to do, and how that is graded.

    `files` and `eval_files` are texts by path below `workdir`; the latter are written when the agent is gone.
    """

    issue: str
    workdir: str
    eval_cmd: str
    setup_cmd: str = "true"
    files: dict[str, str] = field(default_factory=dict)
    eval_files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, sample: Sample) -> "Task":
        """Raises UserError where the row says too little."""
        given = {name: sample.metadata[name] for name in cls.__dataclass_fields__ if name in sample.metadata}
        if "issue" not in given:
            messages = sample.prompt if isinstance(sample.prompt, list) else [{"content": sample.prompt}]
            given["issue"] = messages[-1]["content"]
        missing = [name for name in ("workdir", "eval_cmd") if name not in given]
        if missing:
            raise UserError(f"the metadata of sample {sample.index} lacks {' and '.join(missing)}; see --metadata-key")
        return cls(**given)


class Endpoint(metaclass=SingletonMeta):
    """The adapter of this process: agents of all samples ask it, each in its session."""

    def __init__(self, args: Any, settings: Settings) -> None:
        """Raises UserError where samples would have to hold what adapters do not record."""
        if args.use_rollout_routing_replay or samples_among_some(args):
            raise UserError(
                "agents' turns are recorded without the experts and the kept tokens of engines; leave out "
                "--use-rollout-routing-replay, --rollout-top-p and --rollout-top-k"
            )
        router = f"http://{host_for_url(args.sglang_router_ip)}:{args.sglang_router_port}"
        self.adapter: BaseAdapter = load_function(args.agent_adapter, flag="agent_adapter")(
            tokenizer=load_tokenizer(args.hf_checkpoint, args.trust_remote_code),
            sglang_url=router,
            tool_parser=args.agent_tool_parser,
            reasoning_parser=args.agent_reasoning_parser,
            max_turns_per_sid=args.max_turns,
            fork_threshold_tokens=settings.fork_threshold_tokens,
            chat_template_kwargs=args.apply_chat_template_kwargs,
        )
        self.served = run_app_in_thread(
            self.adapter.app,
            host=settings.adapter_host,
            port=settings.adapter_port,
            thread_name="coding-agent-adapter",
            # A line for each turn of each agent would be all that there is in the log.
            runner_kwargs={"access_log": None},
        )


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """The samples of an agent's work, all with its reward; the last of them in an evaluation.

    When the step is wound down before the diff is graded, it is the sample itself, ABORTED and without a reward.

    Raises:
        SampleFailed: a sandbox or an engine failed, the diff cannot be applied, the time of the whole was over, or there is
            nothing to train. The framework marks the sample FAILED then: it is counted, and trains nothing.
    """
    settings, task = Settings.from_environment(), Task.of(sample)
    endpoint = await asyncio.to_thread(Endpoint, args, settings)
    session = uuid.uuid4().hex
    try:
        async with asyncio.timeout(settings.rollout_guard_sec):
            status, patch = await work(args, settings, endpoint, task, sample, session, sampling_params)
            if GenerateState(args).aborted:
                # Nobody knows what the agent would have done.
                sample.status, sample.reward = Sample.Status.ABORTED, None
                return sample
            if failure := endpoint.adapter.failure_of(session):
                raise SampleFailed(f"the agent's last turn failed: {failure}", retryable=False)
            reward = await grade(args, settings, task, sample, patch) if patch.strip() else 0.0
            samples = await finished(endpoint, session, sample, reward, status)
    except SandboxError as error:
        raise SampleFailed(str(error), retryable=False) from error
    except TimeoutError as error:
        reason = f"it took longer than SWE_ROLLOUT_GUARD_SEC {settings.rollout_guard_sec}"
        raise SampleFailed(reason, retryable=False) from error
    finally:
        endpoint.adapter.drop_session(session)
    if not samples:
        reason = f"the agent ended with status {status}, and no turn of the model's is there to be trained"
        raise SampleFailed(reason, retryable=False)
    return samples[-1] if evaluation else samples


async def finished(endpoint: Endpoint, session: str, sample: Sample, reward: float, status: int) -> list[Sample]:
    """The samples of a session. Raises SampleFailed where engines told of its turns what does not fit together."""
    try:
        return await endpoint.adapter.finish_session(
            session, base_sample=sample, reward=reward, extra_metadata={"agent_status": status}
        )
    except ValueError as error:
        raise SampleFailed(str(error), retryable=False) from error


async def work(
    args: Any,
    settings: Settings,
    endpoint: Endpoint,
    task: Task,
    sample: Sample,
    session: str,
    sampling_params: dict[str, Any],
) -> tuple[int, str]:
    """(the agent's exit status, its diff)."""
    harness = load_function(args.agent_harness, flag="agent_harness")()
    harness.poll_interval_sec = args.agent_poll_interval_sec
    async with booted(args, settings, sample, "work") as sandbox:
        if args.agent_installs_cli:
            await harness.install_cli(sandbox)
        commit = await set_up(sandbox, task)
        endpoint.adapter.open_session(
            session,
            sampling_params,
            GenerateState(args).context_length(args),
            # An evaluation set may have its own.
            chat_template_kwargs=sample.apply_chat_template_kwargs,
        )
        status = await harness.run(
            sandbox,
            workdir=task.workdir,
            session_id=session,
            adapter_url=endpoint.served.url,
            time_budget_sec=settings.agent_time_budget_sec,
            prompt=task.issue,
        )
        diff = (
            # A git that ended with its agent has left its lock.
            f"rm -f .git/index.lock && {GIT} add --all && {GIT} {DIFF} {commit} > {PATCH} && "
            f"{{ [ $(wc -c < {PATCH}) -le {PATCH_BYTES} ] || {{ echo 'the diff is too large' >&2; exit 1; }}; }}"
        )
        if told := await failed_there(sandbox, task, diff):
            # The agent has wrecked its repository.
            logger.warning("sample %s: there is no diff: %s", sample.index, told)
            return status, ""
        return status, await sandbox.read_file(f"{task.workdir}/{PATCH}")


async def failed_there(sandbox: Sandbox, task: Task, cmd: str) -> str:
    """What a short command in the repository said, "" where it ended well: the sandbox is there, and what is in it is wrong.

    Raises:
        SandboxError: the sandbox is gone, or too slow for the command.
    """
    code, out, told = await sandbox.exec(
        f"cd -- {shlex.quote(task.workdir)} && {cmd}", timeout=CALL_SECONDS, idempotent=False
    )
    if code == EXIT_TIMED_OUT:
        raise SandboxError(f"sandbox {sandbox.sandbox_id}: git did not end within {CALL_SECONDS:g} s")
    if code == 0:
        return ""
    await sandbox.exec("true", check=True)
    return (told or out).strip()[-500:] or f"status {code}"


async def grade(args: Any, settings: Settings, task: Task, sample: Sample, patch: str) -> float:
    """1 where the row's tests pass on the diff, in a sandbox that no agent has seen; 0 where they fail or do not end.

    Raises:
        SampleFailed: the diff cannot be applied, so that nobody knows what the agent's work is worth.
    """
    async with booted(args, settings, sample, "grade") as sandbox:
        await set_up(sandbox, task)
        await sandbox.write_file(f"{task.workdir}/{PATCH}", patch)
        if told := await failed_there(sandbox, task, f"{GIT} apply --whitespace=nowarn {PATCH}"):
            raise SampleFailed(f"the diff cannot be applied to what setting up the row makes: {told}", retryable=False)
        await make_way(sandbox, task)
        await write_files(sandbox, task.workdir, task.eval_files)
        status, _ = await exec_and_wait(
            sandbox, cmd=task.eval_cmd, time_budget_sec=settings.eval_timeout_sec, tag="grade", workdir=task.workdir,
            want_output=False, poll_interval_sec=args.agent_poll_interval_sec,
        )  # fmt: skip
        return float(status == 0)


@contextlib.asynccontextmanager
async def booted(args: Any, settings: Settings, sample: Sample, purpose: str) -> AsyncIterator[Sandbox]:
    """A sandbox that is there; a start that fails is tried again, `SWE_BOOT_CONCURRENCY` of them at a time."""
    make = load_function(args.agent_sandbox, flag="agent_sandbox")
    async with contextlib.AsyncExitStack() as stack:
        for left in reversed(range(settings.boot_retries + 1)):
            try:
                async with slots("coding-agent-boots", settings.boot_concurrency):
                    sandbox = await stack.enter_async_context(make(sample.metadata, purpose))
                break
            except SandboxError:
                if not left:
                    raise
        yield sandbox


async def set_up(sandbox: Sandbox, task: Task) -> str:
    """The commit of all that is there before the agent. What is no repository yet becomes one."""
    await write_files(sandbox, task.workdir, task.files)
    script = (
        f"mkdir -p {shlex.quote(task.workdir)} && cd -- {shlex.quote(task.workdir)} && {{ {task.setup_cmd}\n}} >&2 && "
        f"{{ [ -e .git ] || {GIT} init --quiet; }} && {GIT} add --all && "
        f"{GIT} commit --quiet --no-gpg-sign --allow-empty -m start && {GIT} rev-parse HEAD"
    )
    _, commit, _ = await sandbox.exec(script, check=True, timeout=CALL_SECONDS)
    return commit.strip()


async def make_way(sandbox: Sandbox, task: Task) -> None:
    """Remove what the diff has put where eval files are, and where their directories are, if it is no directory."""
    for path in (PurePosixPath(f"./{name}") for name in task.eval_files):
        above = [f"[ -d {name} ] || rm -f -- {name}" for name in map(shlex.quote, map(str, path.parents[-2::-1]))]
        script = "\n".join(
            [f"cd -- {shlex.quote(task.workdir)} || exit", *above, f"rm -rf -- {shlex.quote(str(path))}"]
        )
        await sandbox.exec(script, check=True, timeout=CALL_SECONDS)


async def write_files(sandbox: Sandbox, workdir: str, files: dict[str, str]) -> None:
    """Texts by their path below `workdir`."""
    for path, text in files.items():
        await sandbox.write_file(f"{workdir}/{path}", text)
