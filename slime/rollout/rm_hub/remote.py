"""Rewards from a service: `--rm-type remote_rm --rm-url http://…`; `examples/reward_server/` is such a service.

Each sample is one POST of `{prompt, response, label}`. The answer, in JSON, is the reward: a number, or a dict with
`--reward-key`. The images of a prompt are sent as its row names them, as paths or data URIs. Many requests are under way at a
time (`--rm-concurrency`), so that a service may gather them into batches.

The token that the service may ask for is read from `SLIME_RM_API_KEY`, or from the file that `SLIME_RM_API_KEY_FILE` names, and
never appears in a message.
"""

import asyncio
import logging
import random
from typing import Any

from slime.observability.run_record import redacted_text
from slime.utils import env
from slime.utils.errors import UserError
from slime.utils.http_utils import HttpError, is_news, origin_of, outages, post_control
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 10
MAX_WAIT_S = 30.0
TOTAL_TIMEOUT_S = 120.0
_RETRIED_REFUSALS = (408, 425, 429)


async def remote_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """The answer of the service at `args.rm_url` for `sample`.

    After a failure that may pass (no connection, 429, 5xx) the request is made again, up to 10 times in all, after 1, 2, 4, …
    30 s and up to half a second more, within 120 s in all. Other refusals (4xx) are final, since the same request would be
    refused again. While the service has not been reached for these 120 s it is asked once for each sample, so that a run whose
    service is dead ends after them and not after as long for each sample.

    Raises:
        UserError: there is no address.
        HttpError: the service refused, or did not answer within the attempts and the time.
    """
    if not args.rm_url:
        raise UserError("--rm-type remote_rm needs --rm-url, the address of the reward service")
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    key = env.reward_service_key()
    headers = {"Authorization": f"Bearer {key}"} if key else None
    loop = asyncio.get_running_loop()
    deadline = loop.time() + TOTAL_TIMEOUT_S
    failure = HttpError(f"{redacted_text(args.rm_url)} did not answer")
    attempts = 1 if outages.seconds(origin_of(args.rm_url)) > TOTAL_TIMEOUT_S else MAX_ATTEMPTS
    for attempt in range(1, attempts + 1):
        try:
            async with asyncio.timeout_at(deadline) as limit:
                return await post_control(args.rm_url, payload, 1, headers)
        except TimeoutError:
            if not limit.expired():
                raise
            break
        except HttpError as error:
            failure = _without(key, error)
        if failure.status is not None and failure.status < 500 and failure.status not in _RETRIED_REFUSALS:
            raise failure
        wait = min(2.0 ** (attempt - 1), MAX_WAIT_S) + random.uniform(0.0, 0.5)
        if attempt == attempts or loop.time() + wait >= deadline:
            break
        if is_news(args.rm_url, failure.status):
            logger.warning("%s; trying again for up to %.0f s", failure, deadline - loop.time())
        await asyncio.sleep(wait)
    message = f"{failure} ({attempt} attempts; --rm-type remote_rm gives up after {TOTAL_TIMEOUT_S:g} s)"
    raise HttpError(message, status=failure.status, body=failure.body)


def _without(key: str | None, error: HttpError) -> HttpError:
    """`error` without the key, which a service may repeat in its answer, and without secrets in the address."""
    hint = "; does SLIME_RM_API_KEY hold its token?" if error.status in (401, 403) else ""
    message, body = (redacted_text(text.replace(key, "…") if key else text) for text in (str(error), error.body))
    return HttpError(message + hint, status=error.status, body=body)
