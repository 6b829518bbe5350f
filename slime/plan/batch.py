"""The numbers of a run: prompts, rollouts, optimizer steps, micro-batches, bytes of a train batch, parameters, and how far
generation is ahead of training."""

import argparse
import dataclasses

from slime.arguments.derivation import FULLY_ASYNC
from slime.arguments.megatron.values import pipeline_stages
from slime.arguments.rules.algorithm import unavoidable_staleness
from slime.arguments.sizes import longest_sample, micro_batches_at_a_time
from slime.estimates.layout import ParallelLayout
from slime.estimates.parameters import count_parameters, rank_parameters
from slime.estimates.shape import ModelShape
from slime.plan.placement import sleeping_sides, trains
from slime.plan.setup import planned_sample, prompt_is_limited
from slime.plan.structure import BatchPlan, OverlapPlan, ParameterPlan

# Functions whose rollouts generate all that they hand out in their own turn, but for groups that came back from another.
_IN_TURN = "slime.rollout.sglang_rollout."
# Bytes of a critic's value for one token.
_VALUE_BYTES = 4


def plan_batch(args: argparse.Namespace, layout: ParallelLayout | None) -> BatchPlan:
    """The batches of a run. Micro-batches are counted for samples of the longest allowed length."""
    rollouts = args.rollout_batch_size * args.n_samples_per_prompt
    global_batch = args.global_batch_size
    steps = max(1, rollouts // global_batch)
    data = layout.data if layout is not None else 1
    budget = None
    if layout is not None and args.use_dynamic_batch_size:
        budget = args.max_tokens_per_gpu * layout.context
    longest, limited, sample = longest_sample(args), prompt_is_limited(args), _sample_length(args)
    return BatchPlan(
        prompts=args.rollout_batch_size,
        samples_per_prompt=args.n_samples_per_prompt,
        rollouts=rollouts,
        global_batch_size=global_batch,
        optimizer_steps=steps,
        rollouts_per_rank_and_step=global_batch / data,
        token_budget=budget,
        longest_sample=longest,
        prompt_is_limited=limited,
        assumed_sample=sample if longest is None and layout is not None else None,
        micro_batches=_micro_batches(args, layout, global_batch, budget, sample),
        num_rollout=args.num_rollout,
        total_optimizer_steps=None if args.num_rollout is None else args.num_rollout * steps,
        object_store=train_batch_bytes(args) if layout is not None else None,
        kept_per_token=kept_tokens(args) if layout is not None else 0,
        in_manager=args.rollout_data_transport == "nixl",
    )


def train_batch_bytes(args: argparse.Namespace) -> int:
    """Bytes of one rollout step's train batch before the ranks have it, if all samples are as long as allowed; 0 if the run
    does not train.

    It is a lower bound if no flag limits the prompt. Images do not count, since no flag tells their sizes. Sets of kept tokens
    count with the largest size that they may have. `batches_at_a_time` tells how many such batches there are.
    """
    if not (args.has_trainer and trains(args)):
        return 0
    per_token = sum(bytes_per_token(args).values())
    if args.use_critic:
        # Ranks of the critic may be laid out differently, so they have shards of their own. Its values travel to the actor, and
        # what the actor computes from them travels back.
        per_token = 2 * (per_token + _VALUE_BYTES)
    return args.rollout_batch_size * args.n_samples_per_prompt * (_sample_length(args) or 0) * per_token


def batches_at_a_time(args: argparse.Namespace) -> int:
    """The most train batches that there are at a time: the driver frees one before it asks for the next, but rollouts that are
    generated ahead wait with theirs."""
    return 1 + (args.async_buffer_size if args.asynchronous else 0)


def plan_overlap(args: argparse.Namespace) -> OverlapPlan | None:
    """What overlaps; None if the run takes no training step."""
    if not (args.has_trainer and trains(args)):
        return None
    batches, sleeps = batches_at_a_time(args), sleeping_sides(args)
    asleep = "ends" if args.release_train else "sleeps"
    return OverlapPlan(
        loop="train_async.py" if args.asynchronous else "train.py",
        never_stops=args.rollout_function_path.startswith(FULLY_ASYNC),
        rollouts_ahead=batches - 1,
        trainer=(asleep if sleeps.trainer else "stays") if args.has_engines else None,
        engines=("sleeps" if sleeps.engines else "stays") if args.has_engines else None,
        push_interval=args.update_weights_interval if args.has_engines else None,
        in_flight=args.has_engines and args.update_weights_in_flight,
        oldest=_oldest_weights(args) if args.has_engines else None,
        batches=batches,
    )


def _oldest_weights(args: argparse.Namespace) -> int | None:
    """By how many pushes the weights of a trained token may be older than those that train on it; None: no flag bounds that."""
    in_turn = args.rollout_function_path.startswith(_IN_TURN)
    # Groups that come back to a later rollout bring tokens of an earlier one, which may be kept out of training.
    brings_back = args.partial_rollout and not args.mask_offpolicy_in_partial_rollout
    if in_turn and not brings_back and not args.keep_surplus_groups:
        return unavoidable_staleness(args)
    return args.max_weight_staleness


def bytes_per_token(args: argparse.Namespace) -> dict[str, int]:
    """Bytes per token of every column of a train batch with a row per sample of its length, by name; 0 if the run has none."""
    kept, chosen = kept_tokens(args), (args.num_layers or 0) * (args.moe_router_topk or 0)
    return {
        "tokens": 8,
        "loss_masks": 4,
        "rollout_log_probs": 4,
        "teacher_log_probs": 4 if args.use_opd else 0,
        "rollout_routed_experts": 4 * chosen if args.use_rollout_routing_replay else 0,
        "rollout_top_p_token_ids": 4 * kept,
        "rollout_top_p_token_offsets": 4 if kept else 0,
    }


def kept_tokens(args: argparse.Namespace) -> int:
    """The largest number of tokens that sampling may keep at one place of a training rollout, if engines report the kept ones
    (`--rollout-top-k`, which a `--rollout-top-p` below 1 sets too); else 0."""
    return max(0, min(args.rollout_top_k, args.vocab_size or args.rollout_top_k))


def _sample_length(args: argparse.Namespace) -> int | None:
    longest = longest_sample(args)
    # If the longest sample leaves the prompt out, it counts with one token, the least that it has.
    return longest + (not prompt_is_limited(args)) if longest is not None else planned_sample(args)


def _micro_batches(
    args: argparse.Namespace, layout: ParallelLayout | None, global_batch: int, budget: int | None, sample: int | None
) -> int | None:
    """Micro-batches of one optimizer step on one data-parallel rank; all ranks have the same number."""
    if layout is None:
        return None
    if budget is None:
        together = args.micro_batch_size
    elif sample is None:
        return None
    else:
        together = max(1, budget // sample)
    count = -(-global_batch // together)
    group = micro_batches_at_a_time(args)
    multiple = layout.data * group
    return -(-count // multiple) * group


def plan_parameters(args: argparse.Namespace, shape: ModelShape, layout: ParallelLayout | None) -> ParameterPlan:
    """The numbers of parameters. The total is that of the checkpoint; those of ranks count the padded vocabulary."""
    total = count_parameters(shape).total
    if layout is None:
        return ParameterPlan(total, None, ())
    if args.train_backend != "megatron":
        return ParameterPlan(total, -(-total // layout.world_size), ())
    counts = count_parameters(shape, padded_vocabulary=True)
    held = [rank_parameters(shape, counts, layout, stage) for stage in pipeline_stages(args)]
    return ParameterPlan(total, max(rank.total for rank in held), tuple(dataclasses.asdict(rank) for rank in held))
