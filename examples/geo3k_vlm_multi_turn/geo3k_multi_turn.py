"""Dialogues of the model with an environment, whose observations may be images.

--custom-generate-function-path examples/geo3k_vlm_multi_turn/geo3k_multi_turn.py:generate
--custom-config-path examples/geo3k_vlm_multi_turn/geo3k.yaml
"""

import copy
from typing import Any

from examples.geo3k_vlm_multi_turn.environment import finished
from slime.rollout.dialogue import dialogue
from slime.rollout.generate_state import GenerateState
from slime.utils.errors import UserError
from slime.utils.plugin_loader import load_function
from slime.utils.types import Sample


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """An answer of as many turns as the environment takes, `--max-turns` at most.

    The environment steps after every turn that the model has ended, the last one too. What it told of its last step is in
    `metadata["environment"]`, for rewards of your own.

    Raises:
        UserError: `--partial-rollout` is given, the prompt is a text, or the run names no environment.
    """
    if args.partial_rollout:
        raise UserError("examples/geo3k_vlm_multi_turn: an environment cannot be gone on with; drop --partial-rollout")
    if not isinstance(sample.prompt, list):
        raise UserError("examples/geo3k_vlm_multi_turn: prompts are messages here; drop --apply-chat-template")
    if not hasattr(args, "rollout_interaction_env_path"):
        raise UserError("examples/geo3k_vlm_multi_turn: --custom-config-path names no rollout_interaction_env_path")
    build_env = load_function(f"{args.rollout_interaction_env_path}:build_env")
    environment = await finished(build_env(sample, args))
    observation, information = await finished(environment.reset())
    sample.metadata["environment"] = information
    if observation is not None:
        sample.prompt = [*sample.prompt, environment.format_observation(observation)]
    end_of_turn = GenerateState(args).tokenizer.eos_token
    # Turns are counted here: a dialogue with a limit of its own ends before the environment has seen the last one.
    without_limit = copy.copy(args)
    without_limit.max_turns = None

    async def reply(said: str) -> dict[str, Any] | None:
        step = await finished(environment.step(said.removesuffix(end_of_turn)))
        observation, is_over, sample.metadata["environment"] = step
        is_last = args.max_turns is not None and sample.metadata["round_number"] >= args.max_turns
        return None if is_over or is_last else environment.format_observation(observation)

    return await dialogue(without_limit, sample, sampling_params, reply)
