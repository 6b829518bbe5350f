"""One `/generate` request: what is sent for a sample, checked here because engines die of some mistakes."""

from typing import Any

import numpy as np

from slime.rollout.failures import SampleFailed
from slime.rollout.generate_state import GenerateState, deterministic_inference
from slime.utils.errors import UserError
from slime.utils.token_fields import held, token_array
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
    if getattr(args, "router_policy", None) == "consistent_hashing" and sample.session_id:
        return {"X-SMG-Routing-Key": sample.session_id}
    return None
