"""A first answer and its check, each in a context of its own: one execution, two training samples."""

from slime.rollout.dialogue import ask
from slime.rollout.rm_hub.math_utils import last_boxed_only_string, remove_boxed
from slime.utils.types import Sample


def second_question(messages: list[dict], response: str) -> list[dict]:
    """`messages` with what the first answer's last box holds, and nothing of how it came about."""
    found = remove_boxed(last_boxed_only_string(response) or "") or "none"
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}\nFirst answer: {found}. Check it."}]


async def generate(args, sample, sampling_params, evaluation=False):
    """Both samples, for training; each is graded by what it says itself. An evaluation wants the last word alone."""
    first = await ask(args, sample, sample.prompt, dict(sampling_params))
    if first.status is Sample.Status.ABORTED:
        return first
    second = await ask(args, sample, second_question(sample.prompt, first.response), dict(sampling_params))
    return second if evaluation else [first, second]
