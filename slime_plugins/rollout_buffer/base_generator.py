"""A base for one's own generators: it goes through the prompts, asks the engines, and sends the trajectories.

TASK_TYPE = "echo"

class Echo(BaseGenerator):
    async def trajectory(self, row):
        turn = await self.chat(row["prompt"])
        return self.item(turn, reward=float(len(turn.text)))

def run_rollout(data):
    Echo(data).run()
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import copy
import itertools
import logging
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime.utils import env
from slime.utils.async_utils import run
from slime.utils.data_files import iterate_rows, parse_data_path, raise_bad_row
from slime.utils.engine_protocol import of_another_distribution, within_budget
from slime.utils.epoch_order import Part, epoch_order
from slime.utils.errors import RunError, UserError
from slime.utils.http_utils import HttpError, post, post_control
from slime.utils.processing_utils import load_tokenizer, render_chat, without_end_mark
from slime.utils.sample_fields import first_not_finite

logger = logging.getLogger("generator")

# The status of the service when enough groups wait, and of engines when enough requests do.
_TRY_LATER = 429
# If so many trajectories in a row, of more than one prompt, fail, they have one cause, which does not go away.
_MOST_FAILURES = 32
# So often an answer may be cut off before that counts as a fault.
_MOST_INTERRUPTIONS = 50
_WAIT_S = 0.5
_DEFAULT_CONCURRENCY = 64


@dataclass(frozen=True)
class Turn:
    """An answer of the engine.

    Attributes:
        messages: the chat with the answer at its end.
        text: the answer, without the token that ends the model's turn.
        prompt_ids: the tokens of the chat before the answer.
        output_ids: the answer's tokens, as the engine sampled them.
        log_probs: the log-probs of `output_ids`.
        truncated: whether a length limit cut the answer off.
        weight_versions: the versions of the weights that made it, in their order; empty if the engine does not tell.
    """

    messages: list[dict[str, Any]]
    text: str
    prompt_ids: list[int]
    output_ids: list[int]
    log_probs: list[float]
    truncated: bool
    weight_versions: list[str]


class BaseGenerator(abc.ABC):
    """Makes `num_repeat_per_sample` trajectories of each prompt, many at a time, epoch after epoch.

    An instance id is `PASS-ROW`, so that a row is another group each time that it comes; those in `skip_instance_ids` are left
    out. How often it comes follows from the weight of its file: with the same weight for all files, once in each epoch.

    Args:
        data: what the run has sent (`rollout.start_request`).
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        # The instances of the trajectories that failed since the last one that succeeded.
        self._failed_instances: list[str] = []
        # What was warned of; "" is nothing.
        self._told = {""}
        self.tokenizer = load_tokenizer(data["tokenizer_path"], trust_remote_code=bool(data.get("trust_remote_code")))

    @abc.abstractmethod
    async def trajectory(self, row: dict[str, Any]) -> dict[str, Any]:
        """The fields of an item, without ids, for `row`, which has `prompt`, `label` and the other fields of its line.

        `row` is a copy of the trajectory's own, which may be changed.

        They are best made by `item`. If it raises, or takes longer than the service's `--trajectory-timeout`, the error is
        logged and the trajectory is sent without a reward, so that its group is dropped. The generator itself ends only if
        engines stay away.
        """

    def run(self) -> None:
        """Make trajectories until the process is ended. A module's `run_rollout(data)` calls it.

        Raises:
            UserError, RunError: the rows are of no use, or engines or buffer are gone.
        """
        try:
            run(self._work())
        except BaseExceptionGroup as failed:
            # Many tasks may fail of one cause, so the first error is enough.
            first: BaseException = failed
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None

    async def chat(self, prompt: str | list[dict[str, Any]], **sampling_params: Any) -> Turn:
        """The engine's answer to a chat, or to one message of a user, sampled as the run samples, or with `sampling_params`.

        A push of weights only pauses the answer; if an engine gives it up for another reason, it is begun anew. With
        `--use-fault-tolerance` it waits for engines that are away, up to `--http-request-timeout`. The answer has no more
        tokens than the context leaves room for.

        Raises:
            UserError: the chat fills the context, so that no token is left for an answer.
            HttpError: the engine refuses, or stays away.
            RunError: the answer was interrupted again and again, or lacks a finite log-prob for each of its tokens.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        text = render_chat(self.tokenizer, messages, template_kwargs=self.data.get("apply_chat_template_kwargs"))
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        params = {**self.data["sampling_params"], **sampling_params}
        self._limit_to_context(params, len(ids))
        others = ", ".join(of_another_distribution(sampling_params, self.data["sampling_params"]))
        if others not in self._told:
            self._told.add(others)
            logger.warning(
                "chat is asked with %s, and the trainer computes log-probs by the sampling of the run (--rollout-temperature, "
                "--rollout-top-p, --rollout-top-k): such answers count as the policy's, and are not; give the flags these "
                "values, or leave them out here",
                others,
            )
        payload = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
        headers = _bearer(self.data.get("remote_engine_api_key"))
        url = f"{self.data['remote_engine_url']}/generate"
        for _ in range(_MOST_INTERRUPTIONS):
            answer = await self._answered(url, payload, headers)
            meta_info = answer["meta_info"]
            reason = (meta_info.get("finish_reason") or {}).get("type")
            if reason == "abort":
                await asyncio.sleep(_WAIT_S)
                continue
            sampled = [(entry[1], entry[0]) for entry in meta_info.get("output_token_logprobs") or ()]
            log_probs = [log_prob for _, log_prob in sampled]
            wrong, counted = first_not_finite(log_probs), meta_info.get("completion_tokens")
            if wrong is not None:
                raise RunError(f"{url}: the engine gave token {wrong} of an answer the log-prob {log_probs[wrong]}")
            if counted not in (None, len(sampled)):
                raise RunError(f"{url}: the engine counts {counted} tokens, and tells the log-probs of {len(sampled)}")
            # A chat template ends turns itself.
            text = without_end_mark(answer["text"])
            # An answer that pushes of weights went through has parts of several versions.
            spans = [span["version"] for span in meta_info.get("weight_versions") or ()]
            return Turn(
                [*messages, {"role": "assistant", "content": text}],
                text,
                ids,
                [token for token, _ in sampled],
                log_probs,
                reason == "length",
                [str(version) for version in spans or [meta_info.get("weight_version")] if version is not None],
            )
        raise RunError(
            f"{url}: an answer was interrupted {_MOST_INTERRUPTIONS} times; does something abort the engines?"
        )

    def _limit_to_context(self, params: dict[str, Any], length: int) -> None:
        """Limit `max_new_tokens` to what a chat of `length` tokens leaves of the context, since engines refuse more."""
        limit = self.data.get("context_length")
        if limit is None:
            return
        if length >= limit:
            raise UserError(
                f"the chat has {length} tokens, and with its answer it may have {limit} (--rollout-max-context-len; or what "
                "engines take, which is a little less than --sglang-context-length or the model's own): no answer is possible"
            )
        wanted = params.get("max_new_tokens")
        params |= within_budget(params, limit - length if wanted is None else min(wanted, limit - length))

    async def _answered(self, url: str, payload: dict[str, Any], headers: dict[str, str] | None) -> Any:
        """As `post`, repeated while no engine serves, because a dead engine may take longer to come back than `post` tries."""
        limit = float(self.data.get("engine_wait_s") or 0.0)
        deadline = time.monotonic() + limit
        while True:
            try:
                return await post(url, payload, headers=headers)
            except HttpError as error:
                if not _is_away(error) or time.monotonic() >= deadline:
                    raise
                logger.warning(
                    "no engine serves; it is waited for, %g s in all (--http-request-timeout): %s", limit, error
                )
                await asyncio.sleep(_WAIT_S)

    def item(self, turn: Turn, reward: Any, **extra_info: Any) -> dict[str, Any]:
        """The fields of a trajectory of one turn, with the tokens and log-probs of the engine."""
        return {
            "messages": turn.messages,
            "reward": reward,
            "tokens": [*turn.prompt_ids, *turn.output_ids],
            "loss_mask": [1] * len(turn.output_ids),
            "rollout_log_probs": turn.log_probs,
            "extra_info": {"truncated": turn.truncated, "weight_versions": turn.weight_versions, **extra_info},
        }

    async def _work(self) -> None:
        rows: list[dict[str, Any]] = []
        parts = []
        for file in self.data["input_files"]:
            of_file = list(self._rows(file))
            rows += of_file
            parts.append(Part(len(of_file), parse_data_path(file).weight))
        if not rows:
            raise UserError(f"{', '.join(self.data['input_files'])}: there is no row")
        instances = self._instances(rows, parts)
        # Each worker makes whole groups, so that groups become full in about the order in which they began.
        size = int(self.data["num_repeat_per_sample"])
        workers = max(1, int(self.data.get("num_process") or _DEFAULT_CONCURRENCY) // size)
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._make_groups(instances, size))

    def _rows(self, file: str) -> Iterator[dict[str, Any]]:
        """The rows of a file, with the prompt under `prompt` and the label under `label`."""
        on_bad_row = _leave_out if self.data.get("allow_bad_rows") else raise_bad_row
        for place, row in iterate_rows(file, on_bad_row=on_bad_row):
            key = self.data.get("input_key") or ("prompt" if "prompt" in row else "input")
            if key not in row:
                on_bad_row(place, f"there is no {key} (--input-key) among {', '.join(row)}")
                continue
            yield {**row, "prompt": row[key], "label": row.get(self.data.get("label_key") or "label")}

    def _instances(self, rows: list[dict[str, Any]], parts: list[Part]) -> Iterator[tuple[str, dict[str, Any]]]:
        skipped = set(self.data.get("skip_instance_ids") or ())
        passes = [0] * len(rows)
        # Endless, to make up for groups that are dropped; the run ends it when it has enough.
        for epoch in itertools.count():
            for position in epoch_order(parts, int(self.data.get("seed", 0)), epoch, bool(self.data.get("shuffle"))):
                instance_id = f"{passes[position]}-{position}"
                passes[position] += 1
                if instance_id not in skipped:
                    yield instance_id, rows[position]

    async def _make_groups(self, instances: Iterator[tuple[str, dict[str, Any]]], size: int) -> None:
        for instance_id, row in instances:
            async with asyncio.TaskGroup() as group:
                for _ in range(size):
                    group.create_task(self._make_item(instance_id, row))

    async def _make_item(self, instance_id: str, row: dict[str, Any]) -> None:
        limit = self.data.get("trajectory_timeout")
        try:
            async with asyncio.timeout(limit) as timeout:
                fields = await self.trajectory(copy.deepcopy(row))
            self._failed_instances.clear()
        except Exception as error:
            if self._is_without_engines(error):
                raise
            told = f"{type(error).__name__}: {error}"
            if timeout.expired():
                told = f"it was not done within {limit:g} s (--trajectory-timeout of the service)"
            logger.exception("the trajectory of instance %s failed: %s", instance_id, told)
            self._stop_when_all_fail(instance_id, told)
            messages = [{"role": "user", "content": str(row["prompt"])}]
            fields = {"messages": messages, "reward": None, "extra_info": {"error": told}}
        await self.send({"uid": uuid.uuid4().hex, "instance_id": instance_id, **fields})

    def _is_without_engines(self, error: Exception) -> bool:
        """Whether `error` says that the run's engines stay away, without which nothing can be made."""
        engines = self.data.get("remote_engine_url")
        if engines is None or not isinstance(error, HttpError):
            return False
        # An error of another service, such as one for rewards, only fails the trajectory that asked it.
        return error.url.startswith(f"{engines}/") and _is_away(error)

    def _stop_when_all_fail(self, instance_id: str, told: str) -> None:
        self._failed_instances.append(instance_id)
        # All trajectories of one group may fail because of their prompt.
        if len(self._failed_instances) >= _MOST_FAILURES and len(set(self._failed_instances)) > 1:
            raise RunError(
                f"{len(self._failed_instances)} trajectories in a row failed, the last with {told}; start again what they ask "
                "for and does not answer, or mend what they do, and then start the run"
            )

    async def send(self, item: dict[str, Any]) -> None:
        """Send an item of this run to the buffer, after a wait if enough groups wait there.

        Raises:
            HttpError: the buffer refuses the item, or is gone.
        """
        url = f"{self.data['remote_buffer_url']}/buffer/write"
        if self.data.get("run_id") is not None:
            item = {**item, "run_id": self.data["run_id"]}
        while True:
            with contextlib.suppress(_Later):
                return await _post_item(url, item)
            await asyncio.sleep(_WAIT_S)


def _leave_out(place: str, cause: str) -> None:
    logger.warning("%s is left out: %s", place, cause)


class _Later(Exception):
    """The buffer has enough groups for now."""


async def _post_item(url: str, item: dict[str, Any]) -> None:
    try:
        await post_control(url, item, headers=_bearer(env.buffer_service_key()))
    except HttpError as error:
        if error.status == _TRY_LATER:
            raise _Later from error
        raise


def _is_away(error: HttpError) -> bool:
    """Whether the request was not served, but may be served later."""
    return error.status is None or error.status == _TRY_LATER or error.status >= 500


def _bearer(key: str | None) -> dict[str, str] | None:
    return None if key is None else {"Authorization": f"Bearer {key}"}
