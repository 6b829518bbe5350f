"""On-policy distillation from a teacher behind HTTP: an engine that scores the student's samples (`--opd-type sglang`).

    --use-opd --opd-type sglang --rm-url http://TEACHER:PORT/generate
    --custom-rm-path slime.rollout.on_policy_distillation.reward_func
    --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards

Without `--rm-url` the teacher is the model `teacher` of `--sglang-config`, served by the run. The token that a service at
`--rm-url` may ask for is read as `slime.rollout.rm_hub.remote` reads it.

The teacher's log-probs of the response tokens become `sample.teacher_log_probs`, a column of the train batch; what they are
worth is decided by `--opd-kl-coef`. The reward itself is 0, unless a function of the user's calls `reward_func` and returns a
reward of its own.

The teacher gets token ids, so both tokenizers must give them the same meaning: with the first sample the teacher is asked for
the text of every token, which is compared with the student's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from slime.rollout.engine_request import get_model_url, router_urls
from slime.rollout.train_data import relative_rewards
from slime.utils import env
from slime.utils.engine_answers import TokenLogProbs
from slime.utils.errors import UserError
from slime.utils.finite_number import finite_number
from slime.utils.http_utils import HttpError, post_generate
from slime.utils.processing_utils import load_tokenizer, sees_images
from slime.utils.sample_fields import held, read_only, token_array
from slime.utils.types import Sample, failed_and_masked

# The name of a teacher that the run serves itself.
SERVED_TEACHER = "teacher"
# A teacher that takes other weights, or is served by a run that ends a step early, gives up what it was asked, and is asked
# again, so many times.
_ABORTED_TIMES = 5
_WAIT_S = 0.5
# Teachers whose tokenizer was compared, by address.
_compared: set[str] = set()


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Have the teacher score `sample` at the student's temperature; sets `teacher_log_probs`, returns 0.

    Raises:
        UserError: no address, the teacher reads the tokens as other text than the student, or the prompt has images.
        HttpError: the teacher refuses the request, cannot be reached, or gives no log-probs of the sample's tokens.
    """
    if sees_images(sample):
        raise UserError(
            f"sample {sample.index} has images, and a teacher behind HTTP is asked with token ids alone; distil on prompts "
            "without images, or give a --custom-rm-path of your own"
        )
    url = _teacher_url(args)
    is_first = url not in _compared
    key = env.reward_service_key() if args.rm_url else None
    headers = {"Authorization": f"Bearer {key}"} if key else None
    for is_last in (*[False] * _ABORTED_TIMES, True):
        answer = await post_generate(url, _request(args, sample, with_text=is_first), headers)
        if is_last or not _is_aborted(answer):
            break
        await asyncio.sleep(_WAIT_S)
    sample.teacher_log_probs = _response_log_probs(answer, sample, url)
    if is_first and url not in _compared:
        # In a thread: it loads a tokenizer, and looks at each token of a response that may be long.
        await asyncio.to_thread(_compare_tokenizers, args, answer, url)
        _compared.add(url)
    return 0.0


def post_process_rewards(args: Any, samples: Sequence[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """(raw rewards, rewards): what the samples have, 0 where that is a teacher's answer; then as without this function.

    A reward that is the answer itself, from a function that returned it, is turned into `teacher_log_probs`.

    Raises:
        HttpError: an answer does not hold the log-probs of the sample's tokens.
        UserError: a reward is no finite number.
    """
    raw = [_number(args, sample) for sample in samples]
    if not any(raw):
        return raw, list(raw)
    return raw, list(relative_rewards(args, samples, raw))


def _number(args: Any, sample: Sample) -> float:
    if isinstance(sample.reward, dict) and "meta_info" in sample.reward:
        if held(sample, "teacher_log_probs") is None:
            sample.teacher_log_probs = _response_log_probs(sample.reward, sample, "the teacher")
        return 0.0
    value = sample.get_reward_value(args)
    if value is None and failed_and_masked(sample):
        return 0.0
    number = finite_number(value)
    if number is None:
        raise UserError(f"the reward of sample {sample.index} is {value!r}; expected a finite number")
    return number


def _teacher_url(args: Any) -> str:
    if not args.rm_url and SERVED_TEACHER in router_urls(args):
        return get_model_url(args, SERVED_TEACHER)
    if not args.rm_url:
        raise UserError(
            "distillation over HTTP needs --rm-url, the teacher's address, such as http://10.0.0.1:30000, or a model "
            f"`{SERVED_TEACHER}` in --sglang-config"
        )
    # The address of a server alone means its one method that scores.
    return args.rm_url if urlsplit(args.rm_url).path.strip("/") else args.rm_url.rstrip("/") + "/generate"


def _request(args: Any, sample: Sample, *, with_text: bool) -> dict[str, Any]:
    payload = {
        "input_ids": token_array(sample, "tokens"),
        "sampling_params": {
            "temperature": args.rollout_temperature,
            "max_new_tokens": 0,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    return {**payload, "return_text_in_logprobs": True} if with_text else payload


def _is_aborted(answer: Any) -> bool:
    meta_info = answer.get("meta_info") if isinstance(answer, dict) else None
    return ((meta_info or {}).get("finish_reason") or {}).get("type") == "abort"


def _response_log_probs(answer: Any, sample: Sample, source: str) -> np.ndarray:
    meta_info = answer.get("meta_info") if isinstance(answer, dict) else None
    entries = (meta_info or {}).get("input_token_logprobs")
    if entries is None or not len(entries):
        raise HttpError(f"{source} answered without meta_info.input_token_logprobs for sample {sample.index}")
    # The first token has nothing before it that could predict it.
    log_probs = _log_probs(entries)[1:]
    response = log_probs[max(len(log_probs) - sample.response_length, 0) :]
    wrong = response[~np.isfinite(response)]
    if len(wrong) or len(response) != sample.response_length:
        raise HttpError(
            f"{source} gave log-probs for sample {sample.index} that are no numbers or too few: {len(response)} of "
            f"{sample.response_length}, {len(wrong)} of them no numbers"
        )
    # A copy: what stands before the response is not kept.
    return read_only(response.copy())


def _log_probs(entries: Any) -> np.ndarray:
    if isinstance(entries, TokenLogProbs):
        return entries.log_probs
    values = [entry[0] for entry in entries]
    return np.array([value if isinstance(value, int | float) else math.nan for value in values], np.float64)


def _compare_tokenizers(args: Any, answer: dict[str, Any], url: str) -> None:
    entries = answer["meta_info"]["input_token_logprobs"]
    if isinstance(entries, TokenLogProbs):  # without text
        return
    entries = [entry for entry in entries if len(entry) > 2 and entry[2] is not None]
    if not entries:
        return
    tokenizer = load_tokenizer(args.hf_checkpoint, args.trust_remote_code)
    for (_, token, text, *_), own in zip(entries, tokenizer.batch_decode([[e[1]] for e in entries]), strict=True):
        # Part of a character is shown in various ways.
        if text != own and "\ufffd" not in text + own:
            raise UserError(
                f"--rm-url {url}: the teacher reads token {token} as {text!r}, the tokenizer of --hf-checkpoint "
                f"{args.hf_checkpoint} as {own!r}; distillation needs a teacher with the same tokenizer"
            )
