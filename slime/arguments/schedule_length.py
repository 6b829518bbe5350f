"""How many optimizer steps a run has: the length of its schedules of learning rate and weight decay."""

import argparse


def train_iterations(args: argparse.Namespace) -> int | None:
    """Optimizer steps of a model over the whole run: `--train-iters`, or the rollouts it trains on / global batch size.

    Rollouts of the critic alone (`--num-critic-only-steps`) do not count: the actor takes no step in them. A run of nothing
    else has the schedule of all its rollouts, which then nobody reads. None where only the data set knows the number.
    """
    if getattr(args, "train_iters", None):
        return args.train_iters
    if args.num_rollout is None:
        return None
    rollouts = _rollouts_that_train(args) * args.rollout_batch_size * args.n_samples_per_prompt
    return rollouts // args.global_batch_size


def _rollouts_that_train(args: argparse.Namespace) -> int:
    """The rollouts out of `--num-rollout` that train the model of `args`; all of them if none would."""
    return max(args.num_rollout - getattr(args, "num_critic_only_steps", 0), 0) or args.num_rollout
