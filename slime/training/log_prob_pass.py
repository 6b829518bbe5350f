"""Whether the actor's log-probs are computed in a pass of their own before training."""

from __future__ import annotations

import argparse

from slime.algorithms.estimators import estimator
from slime.training.step_statistics import wants_step_statistics
from slime.utils.plugin_loader import load_function


def needs_log_prob_pass(args: argparse.Namespace, steps: int) -> bool:
    """Whether the data needs `log_probs` (or `entropy`) before training in `steps` optimizer steps.

    With one optimizer step per rollout the policy that trains still is the policy that is asked for, so the training forward
    gives the old log-probs too. Several steps, other weights (`--keep-old-actor`), or anything that reads the log-probs before
    or beside the loss need the pass. Whether a function of the user's reads them cannot be known: all that may, count.
    Supervised fine-tuning has no old policy. The steps are those of the data: an own rollout function or a dump may bring more
    rollouts than the flags announce.
    """
    if args.use_rollout_entropy:
        return True
    if args.loss_type == "sft_loss":
        return False
    return (
        args.loss_type != "policy_loss"
        or steps > 1
        or args.keep_old_actor
        or _advantages_read_them(args)
        or _loss_compares_them(args)
        or args.rollout_data_postprocess_path is not None
    )


def _advantages_read_them(args: argparse.Namespace) -> bool:
    return args.kl_coef != 0 or args.use_critic or args.use_opd or args.custom_advantage_function_path is not None


def _loss_compares_them(args: argparse.Namespace) -> bool:
    """With the engine's log-probs, with those of whole sequences, or over whole steps; or the pass records routing."""
    return (
        args.use_rollout_logprobs
        or args.get_mismatch_metrics
        or estimator(args.advantage_estimator).ratio_of_sequence
        or (args.use_routing_replay and not args.use_rollout_routing_replay)
        or _correction_asks_for_the_step(args)
    )


def _correction_asks_for_the_step(args: argparse.Namespace) -> bool:
    path = args.custom_tis_function_path
    if not args.use_tis or path is None:
        return False
    return wants_step_statistics(load_function(path, flag="--custom-tis-function-path"), args)
