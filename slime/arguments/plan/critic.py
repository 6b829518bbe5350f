"""The memory of a critic beside the actor, on the same GPUs.

Only one of the two works at a time, but nothing moves the other to the host yet: its weights, gradients and optimizer state
stay where they are.
"""

import argparse

from slime.arguments.critic import critic_args
from slime.arguments.plan.setup import parallel_layout, shape_of, tokens_of_stream, training_setup
from slime.scheduling.memory import RankMemory, training_memory, worst_rank

NOTE = (
    "the critic stays on the GPU while the actor works, and the actor while the critic works: moving one of them to the host "
    "is not built yet"
)


def critic_bytes(args: argparse.Namespace, actor: RankMemory, micro_batches: int | None) -> int:
    """What a rank needs for the critic on top of the peak of the actor.

    Either the critic rests at that moment, or it works and needs so much that the peak is its own.

    Args:
        actor: the actor's memory on the rank with the highest peak.

    Raises:
        UserError: the critic's sizes do not divide the number of ranks, or its layers cannot be split.
    """
    critic = critic_args(args)
    # In place of a vocabulary projection it has one row. It never pushes, and keeps no other set of weights.
    critic.untie_embeddings_and_output_weights = False
    critic.has_engines = critic.offload_train = False
    layout = parallel_layout(critic)
    setup = training_setup(critic, layout, tokens_of_stream(critic, layout), micro_batches)
    worst = worst_rank(training_memory(shape_of(critic), setup))
    return max(worst.persistent, worst.total - worst.logits + actor.persistent - actor.total)
