"""How long a sample of the training data may be, from the flags that limit it."""

import argparse

from slime.arguments.origins import Origin


def longest_sample(args: argparse.Namespace) -> int | None:
    """Tokens of the longest allowed sample, prompt and response; of the response alone where nothing limits the prompt.

    None where nothing limits the response either.
    """
    context, prompt = args.rollout_max_context_len, args.rollout_max_prompt_len
    response = args.rollout_max_response_len
    both = response if prompt is None or response is None else prompt + response
    return min((length for length in (context, both) if length is not None), default=None)


def prompt_is_limited(args: argparse.Namespace) -> bool:
    """Whether `longest_sample` counts the prompt."""
    return args.rollout_max_context_len is not None or args.rollout_max_prompt_len is not None


def planned_sample(args: argparse.Namespace) -> int | None:
    """`longest_sample`, or where there is none the length that is assumed (`--seq-length`)."""
    return longest_sample(args) or args.seq_length


def positions_of_model(args: argparse.Namespace) -> int | None:
    """Positions that the model was made for; None where neither a flag nor the Hugging Face config tells."""
    # Derived from --seq-length it says nothing about the model: RoPE has no table.
    derived = args.origins.get("max_position_embeddings") in (Origin.DEFAULT, Origin.DERIVED)
    return None if derived else args.max_position_embeddings
