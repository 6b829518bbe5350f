"""Requests to engines as SGLang 0.5.21 reads them: which lengths it refuses (status 400), and how many prompts there are."""

from collections.abc import Mapping
from typing import Any

import numpy as np

# An engine's scheduler takes an input only if it leaves more tokens of the context length than these: one is kept free by
# `max_req_len`, and five more by `max_req_input_len`.
_KEPT_FREE = 6
# The field of a prompt → how deeply lists are nested in one; in the order in which engines look for the fields.
_LEVELS_OF_A_PROMPT = {"text": 0, "input_ids": 1, "input_embeds": 2}


def longest_input(context_length: int, reserved: int = 0) -> int:
    """How many tokens an engine of this context length takes as an input.

    A prompt and its response have no more together, although an engine would write a few tokens more: what is within this limit
    can be sent again, to be gone on with or for a teacher's log-probs.

    Args:
        reserved: tokens that an engine which drafts adds to each input before it compares.
    """
    return context_length - 1 - max(_KEPT_FREE, reserved)


def reserved_for_drafts(steps: int | None) -> int:
    """How many tokens an engine that drafts in so many steps adds to each input; None: the steps that SGLang takes by itself.

    It adds max(topk × steps, draft tokens). Runs draft with a topk of 1, for which it drafts one token more than there are
    steps, whatever its setting for that number says.
    """
    return 1 + (3 if steps is None else steps)


def within_budget(sampling_params: Mapping[str, Any], budget: int, generated: int = 0) -> dict[str, Any]:
    """`sampling_params` for at most `budget` tokens behind `generated` ones of the same response.

    What these leave of `min_new_tokens` is lowered to the budget, because engines refuse a minimum above the maximum.
    """
    params = {**sampling_params, "max_new_tokens": budget}
    if params.get("min_new_tokens") is not None:
        params["min_new_tokens"] = min(max(params["min_new_tokens"] - generated, 0), budget)
    return params


# Sampling parameters that say from which distribution a token is drawn, and what each is where a request does not have it.
_OF_A_DISTRIBUTION = {
    "temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
    "frequency_penalty": 0,
}  # fmt: skip


def of_another_distribution(given: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """`NAME VALUE` of each of the sampling parameters `given` by which tokens are drawn from another distribution than by
    `own`. What is not given, or None, is taken to be as in `own`."""
    return [
        f"{name} {given[name]}"
        for name, neutral in _OF_A_DISTRIBUTION.items()
        if given.get(name) is not None and given[name] != own.get(name, neutral)
    ]


def num_prompts(payload: Mapping[str, Any]) -> int | None:
    """The number of prompts in a request; None if it has one prompt that is not in a list."""
    for name, levels in _LEVELS_OF_A_PROMPT.items():
        prompts = payload.get(name)
        if prompts is not None:
            inner = prompts
            while levels >= 0 and isinstance(inner, list | tuple | np.ndarray) and len(inner):
                inner, levels = inner[0], levels - 1
            return len(prompts) if levels < 0 else None
    return None


def is_multiplied(payload: Mapping[str, Any]) -> bool:
    """Whether a request asks for several answers to a prompt. SGLang makes a request of each, with ids that it tells nobody;
    only the end of the connection ends those."""
    params = payload.get("sampling_params")
    first = params[0] if isinstance(params, list) and params else params
    return isinstance(first, dict) and first.get("n") not in (None, 1)
