"""The default rollout function, and the public names of generation.

`generate_rollout` is what `--rollout-function-path` names by default: one step of training rollouts, or an evaluation,
against SGLang engines behind a router. The parts: `rollout_step` (groups of a step), `generation` (one sample),
`abort`, `evaluation`.
"""

from typing import Any

from slime.rollout.abort import abort
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.engine_request import get_model_url
from slime.rollout.evaluation import eval_rollout
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import generate, generate_and_rm, generate_and_rm_group
from slime.rollout.rollout_step import RolloutStep
from slime.utils.async_utils import run

__all__ = [
    "GenerateState",
    "abort",
    "eval_rollout",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
]


async def generate_rollout_async(args: Any, rollout_id: int, data_source: Any) -> RolloutFnTrainOutput:
    """One step: `rollout_batch_size` groups, sorted by the index of their first sample.

    Unfinished and surplus groups return to `data_source` through `add_samples`.

    Raises:
        UserError: the data source ran dry, or a user function raised or returned something unusable.
        RunError: engines or reward services failed.
    """
    return await RolloutStep(args, rollout_id, data_source).run()


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The synchronous form, for the rollout manager; with `evaluation` all sets of `args.eval_datasets`."""
    if evaluation:
        return run(eval_rollout(args, rollout_id))
    return run(generate_rollout_async(args, rollout_id, data_source))
