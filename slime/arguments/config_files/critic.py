"""What the overrides of a critic may say: how it is trained. What it is trained on, and where, is the run's."""

import argparse
from collections.abc import Callable, Iterator

from slime.arguments.config_files.yaml_file import YamlMapping
from slime.arguments.help_text import groups_of
from slime.arguments.parallel_sizes import MODEL_PARALLEL, divides_the_ranks, model_parallel_size
from slime.arguments.sizes import replace_wrong_sizes

# Groups of flags that a run has once, for actor and critic together, and the flags in them that a critic may have alone.
_GROUPS_OF_THE_RUN = (
    "configuration", "cluster and placement", "rollout", "data and batches", "evaluation", "reward", "fault tolerance",
    "network and buffer service", "logging and tracking", "debugging", "SGLang", "Router",
)  # fmt: skip
_OF_A_CRITIC_TOO = frozenset(
    {"hf_checkpoint", "model_name", "micro_batch_size", "max_tokens_per_gpu", "data_pad_size_multiplier"}
)


def check_flags(overrides: YamlMapping, keys: dict[str, str], parser: argparse.ArgumentParser) -> Iterator[str]:
    """A message for every override of a flag that a critic cannot have for itself. `keys`: attribute → key in the file."""
    of_the_run = {
        action.dest
        for title, actions in groups_of(parser)
        if title.startswith(_GROUPS_OF_THE_RUN)
        for action in actions
    }
    for name in keys.keys() & (of_the_run - _OF_A_CRITIC_TOO):
        key = keys[name]
        yield f"{overrides.where(key)}: {key} is the same for actor and critic; give it on the command line"


def size_violations(critic: argparse.Namespace, run: argparse.Namespace, place: Callable[..., str]) -> Iterator[str]:
    """A message for every size of the critic that cannot be.

    Args:
        critic: a copy, which holds possible sizes afterwards.
        place: `file:line` of the first override of the critic that sets one of the attributes.
    """
    critic.typed_flags = set(critic.typed_flags)
    for name, message in replace_wrong_sizes(critic).items():
        yield f"{place(name)}: role critic: {message}"
    own = any(getattr(critic, name) != getattr(run, name) for name in MODEL_PARALLEL)
    if own and not divides_the_ranks(critic):
        yield (
            f"{place(*MODEL_PARALLEL)}: role critic: {' x '.join(MODEL_PARALLEL)} = {model_parallel_size(critic)} must divide "
            f"the {critic.world_size} training ranks, which it shares with the actor; 1 for each would do"
        )
