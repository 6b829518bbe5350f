"""The sets of weights that a training rank holds, by name, and which of them a run needs.

One truth for the trainer, which loads them, and for the plan, which counts their memory.
"""

import argparse

ACTOR = "actor"
REFERENCE = "ref"
TEACHER = "teacher"
OLD_ACTOR = "old_actor"
# The weights that the engines got last: what the old actor becomes at the next push.
ROLLOUT_ACTOR = "rollout_actor"


def other_model_states(args: argparse.Namespace) -> tuple[str, ...]:
    """Names of the states beside the actor's, in the order in which they are loaded."""
    states = []
    if args.use_kl_loss or args.kl_coef:
        states.append(REFERENCE)
    if args.use_opd and args.opd_type == "megatron":
        states.append(TEACHER)
    if args.keep_old_actor:
        states += [OLD_ACTOR, ROLLOUT_ACTOR] if lags_one_push(args) else [OLD_ACTOR]
    return tuple(states)


def lags_one_push(args: argparse.Namespace) -> bool:
    """Whether the old actor is what the engines had before the last push, not what they got by it."""
    return args.update_weights_interval == 1
