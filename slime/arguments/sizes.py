"""Numbers that rules, plan and trainer derive from the flags: which GPUs train and which serve, how ranks are divided, how long
a sample may be, how many optimizer steps there are.

GPUs are numbered as the run's bundles are sorted; training ranks take the first ones. Ranks are divided by tensor, pipeline and
context parallelism; what is left is data parallelism.
"""

import argparse
import math
from dataclasses import dataclass

from slime.arguments.origins import Origin
from slime.utils import env
from slime.utils.device import gpus_on_this_machine


@dataclass(frozen=True)
class GpuRanges:
    """GPUs of a run.

    Attributes:
        gpus: all that the run reserves.
        actor_gpus: the first ones, one training rank on each.
        rollout_gpus: those of the engines that the run starts, from `first_rollout_gpu` on.
    """

    gpus: int
    actor_gpus: int
    rollout_gpus: int
    first_rollout_gpu: int


def layout_of(args: argparse.Namespace) -> GpuRanges:
    """The layout for derived arguments (`has_trainer`, `has_engines`, `rollout_external`, `colocate`, sizes)."""
    actor = args.world_size if args.has_trainer else 0
    rollout = args.rollout_num_gpus or 0
    if not args.has_engines:
        return GpuRanges(actor, actor, 0, 0)
    if args.rollout_external:
        # A run that only generates reserves the training ranks' sizes, too, so that it is placed like one that trains.
        return GpuRanges(args.world_size, actor, 0, actor)
    if not args.has_trainer:
        return GpuRanges(rollout, 0, rollout, 0)
    if args.colocate:
        return GpuRanges(max(actor, rollout), actor, rollout, 0)
    return GpuRanges(actor + rollout, actor, rollout, actor)


MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def model_parallel_size(args: argparse.Namespace) -> int:
    """The ranks that share a sample's work."""
    return math.prod(vars(args)[name] for name in MODEL_PARALLEL)


def divides_the_ranks(args: argparse.Namespace) -> bool:
    """Whether the training ranks can be divided into model-parallel groups."""
    return args.world_size % model_parallel_size(args) == 0


def data_parallel_size(args: argparse.Namespace) -> int:
    """The number of those groups; at least 1, even if the ranks cannot be divided."""
    return max(1, args.world_size // model_parallel_size(args))


def micro_batches_at_a_time(args: argparse.Namespace) -> int:
    """A rank's micro-batches of a step are a multiple of this: an interleaved pipeline takes them in groups."""
    is_interleaved = (args.virtual_pipeline_model_parallel_size or 1) > 1
    return (args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size) if is_interleaved else 1


def longest_sample(args: argparse.Namespace) -> int | None:
    """Tokens of the longest allowed sample, prompt and response; of the response alone where nothing limits the prompt.

    None where nothing limits the response either.
    """
    context, prompt = args.rollout_max_context_len, args.rollout_max_prompt_len
    response = args.rollout_max_response_len
    both = response if prompt is None or response is None else prompt + response
    return min((length for length in (context, both) if length is not None), default=None)


def positions_of_model(args: argparse.Namespace) -> int | None:
    """How many positions the model was made for; None if neither a flag nor the Hugging Face config tells."""
    # A value that was derived from --seq-length says nothing about the model, since RoPE has no table.
    derived = args.origins.get("max_position_embeddings") in (Origin.DEFAULT, Origin.DERIVED)
    return None if derived else args.max_position_embeddings


def train_iterations(args: argparse.Namespace) -> int | None:
    """Optimizer steps of a model over the whole run: `--train-iters`, or the rollouts it trains on / global batch size.

    Rollouts of the critic alone (`--num-critic-only-steps`) do not count: the actor takes no step in them. A run of nothing
    else has the schedule of all its rollouts, which then nobody reads. None where only the data set knows the number.
    """
    if args.train_iters:
        return args.train_iters
    if args.num_rollout is None:
        return None
    rollouts = max(args.num_rollout - args.num_critic_only_steps, 0) or args.num_rollout
    return rollouts * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size


def plans_for_gpus(args: argparse.Namespace) -> bool:
    """Whether the run would use GPUs; a plan is often made on a laptop, for GPUs that are elsewhere. It would, unless
    `SLIME_ACCELERATOR=cpu` says that it uses none; `--dry-run-gpu-memory-gib` says that it does."""
    return args.dry_run_gpu_memory_gib is not None or env.forced_accelerator() != "cpu"


def expects_gpus(args: argparse.Namespace) -> bool | None:
    """Whether the run, or the one that `--dry-run` is about, has GPUs; None if only the cluster will tell when it is joined."""
    if gpus_on_this_machine() > 0 or (args.dry_run and plans_for_gpus(args)):
        return True
    joins = not args.dry_run and env.ray_address() is not None and env.forced_accelerator() != "cpu"
    return None if joins else False
