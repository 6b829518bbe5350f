"""The rewards that `--rm-type` names. `boxed_` before a name grades the content of the last box instead of the response."""

import random
from collections.abc import Callable
from typing import Any

from slime.rollout.rm_hub.deepscaler import solution_part
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.rm_hub.math_utils import extract_boxed_answer, grade_answer_verl
from slime.utils.errors import UserError
from slime.utils.reward_types import BOXED, known_reward_types
from slime.utils.types import Sample


def compute_builtin_reward(args: Any, sample: Sample) -> Any:
    """The reward of `sample` by its `metadata["rm_type"]`, else `--rm-type`. May block; run it off the event loop.

    Raises:
        UserError: no or an unknown type, or a label that the type needs is missing.
    """
    rm_type = _type_of(args, sample)
    name = rm_type.removeprefix(BOXED)
    if name not in _REWARDS:
        source = "metadata rm_type" if sample.metadata.get("rm_type") else "--rm-type"
        raise UserError(
            f"sample {sample.index}: {source} is {rm_type or 'missing'}; known types: {known_reward_types()}, or give "
            "--custom-rm-path"
        )
    response = sample.response
    # math looks for the box itself; deepscaler looks for the end of the reasoning before it.
    if rm_type.startswith(BOXED) and name not in ("math", "deepscaler"):
        response = extract_boxed_answer(response) or ""
    return _REWARDS[name](args, sample, response)


def needs_worker(args: Any, sample: Sample) -> bool:
    """Whether the reward of `sample` may be decided in a worker process for symbolic comparison."""
    return _type_of(args, sample).removeprefix(BOXED) in _SYMBOLIC


def _type_of(args: Any, sample: Sample) -> str:
    return str(sample.metadata.get("rm_type") or args.rm_type or "").strip()


def _label(sample: Sample, rm_type: str) -> str:
    if sample.label is None or sample.label == "":
        raise UserError(f"sample {sample.index} has no label, which --rm-type {rm_type} needs; see --label-key")
    return str(sample.label)


def _math(args: Any, sample: Sample, response: str) -> int:
    return int(grade_answer_verl(response, _label(sample, "math")))


def _deepscaler(args: Any, sample: Sample, response: str) -> int:
    label = _label(sample, "deepscaler")
    solution = solution_part(response)
    if solution is None:
        sample.metadata["fail_reason"] = "no </think> and no ###Response in the response"
        return 0
    return int(grade_answer_verl(solution, label))


def _dapo(args: Any, sample: Sample, response: str) -> dict[str, Any]:
    return compute_score(response, _label(sample, "dapo"))


def _f1(args: Any, sample: Sample, response: str) -> float:
    return f1_score(response, _label(sample, "f1"))[0]


def _random(args: Any, sample: Sample, response: str) -> int:
    """A coin that falls the same way when a seeded run is repeated."""
    if sample.index is None:
        return random.SystemRandom().randint(0, 1)
    return random.Random(f"{args.rollout_seed}-{sample.index}").randint(0, 1)


_REWARDS: dict[str, Callable[[Any, Sample, str], Any]] = {
    "dapo": _dapo,
    "deepscaler": _deepscaler,
    "f1": _f1,
    "math": _math,
    "random": _random,
}
_SYMBOLIC = frozenset({"deepscaler", "math"})
