"""One `/generate` request: what is sent for a sample, checked here because engines die of some mistakes.

Addresses of the routers that serve this run, and of the engines behind them.
"""

import functools
import logging
from typing import Any

import numpy as np

from slime.rollout.failures import SampleFailed
from slime.rollout.generate_state import GenerateState, deterministic_inference
from slime.utils import http_utils
from slime.utils.errors import RunError, UserError
from slime.utils.ports import host_for_url
from slime.utils.sample_fields import held, token_array
from slime.utils.types import Sample


def token_budget(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> int:
    """Tokens that `sample` may still get: the response limit minus what it has, within the context length.

    Raises:
        UserError: neither limit is known.
    """
    limits = []
    if sampling_params.get("max_new_tokens") is not None:
        limits.append(sampling_params["max_new_tokens"] - sample.response_length)
    context_length = GenerateState(args).context_length(args)
    if context_length is not None:
        limits.append(context_length - len(held(sample, "tokens")))
    if not limits:
        raise UserError(
            "neither --rollout-max-response-len nor --rollout-max-context-len is given, and config.json of "
            "--hf-checkpoint has no max_position_embeddings: a response would have no limit"
        )
    return min(limits)


def build_payload(state: GenerateState, sample: Sample, sampling_params: dict[str, Any], budget: int) -> dict[str, Any]:
    """Body of the request that continues `sample.tokens` by at most `budget` tokens.

    Raises:
        UserError: an id outside the vocabulary, or `min_p` together with deterministic inference; both would end the
            engine.
    """
    check_token_ids(state, sample)
    if sampling_params.get("min_p") and deterministic_inference(state.args):
        raise UserError(
            f"min_p {sampling_params['min_p']} cannot be used with --sglang-enable-deterministic-inference: "
            "it ends the engine; leave one of them out"
        )
    params = {name: value for name, value in sampling_params.items() if value is not None}
    params["max_new_tokens"] = budget
    payload = {"input_ids": token_array(sample, "tokens"), "sampling_params": params, "return_logprob": True}
    if state.args.use_rollout_routing_replay:
        experts = sample.rollout_routed_experts
        payload |= {"return_routed_experts": True, "routed_experts_start_len": 0 if experts is None else len(experts)}
    return payload


def check_token_ids(state: GenerateState, sample: Sample) -> None:
    """Raise UserError, naming sample, id and vocabulary size, when an id lies outside the vocabulary."""
    tokens = token_array(sample, "tokens")
    if tokens.min() >= 0 and tokens.max() < state.vocab_size:
        return
    position = int(np.argmax((tokens < 0) | (tokens >= state.vocab_size)))
    raise UserError(
        f"sample {sample.index}: token id {tokens[position]} at position {position} is outside the vocabulary of "
        f"{state.vocab_size} tokens (config.json of --hf-checkpoint); do tokenizer and model belong together?"
    )


def check_prompt_length(args: Any, sample: Sample) -> None:
    """Raise SampleFailed when the prompt is empty or leaves no room for a single token."""
    length, limit = len(held(sample, "tokens")), GenerateState(args).context_length(args)
    if length == 0:
        raise SampleFailed("the prompt has no tokens", retryable=False)
    if limit is not None and length >= limit:
        raise SampleFailed(
            f"the prompt has {length} tokens, the context length is {limit} "
            "(--rollout-max-context-len or, in evaluation, --eval-max-context-len; --sglang-context-length; the model's own)",
            retryable=False,
        )


def routing_headers(args: Any, sample: Sample) -> dict[str, str] | None:
    """The header by which a consistent-hashing router keeps a session on one engine."""
    if args.router_policy == "consistent_hashing" and sample.session_id:
        return {"X-SMG-Routing-Key": sample.session_id}
    return None


logger = logging.getLogger(__name__)


def router_urls(args: Any) -> dict[str, str]:
    """Served model → base URL of its router; the first router of the run has the name `default` if none is given."""
    routers = dict(getattr(args, "sglang_model_routers", {}))
    first = (args.sglang_router_ip, args.sglang_router_port)
    if first not in [tuple(address) for address in routers.values()]:
        routers = {"default": first, **routers}
    return {name: f"http://{host_for_url(ip)}:{port}" for name, (ip, port) in routers.items()}


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """URL of `endpoint` at the router of `model_name`; an unknown name gives the first router, with a warning.

    The first router answers to `default` as well.
    """
    urls = router_urls(args)
    if model_name in urls:
        return urls[model_name] + endpoint
    name, first = next(iter(urls.items()))
    if model_name != "default":
        _warn_once(f"no model is served under the name {model_name!r}; {name!r} is asked. Known: {', '.join(urls)}")
    return first + endpoint


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


async def list_engine_urls(model_name: str, router_url: str, max_retries: int | None = None) -> list[str]:
    """URLs of the engines of a served model, as its router lists them.

    Raises:
        RunError: the router does not answer, or answers something else.
    """
    answer = await http_utils.get(f"{router_url}/workers", max_retries=max_retries)
    if not isinstance(answer, dict) or "workers" not in answer:
        raise RunError(
            f"the router of model {model_name!r} at {router_url} did not list its workers but answered {answer!r}"
        )
    urls = [worker["url"] for worker in answer["workers"]]
    http_utils.trust_engine_urls(urls)
    return urls
