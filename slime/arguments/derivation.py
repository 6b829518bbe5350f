"""Values that follow from other flags. Each function fills what was left unset; none overrides what was typed."""

import argparse
import logging
import math
from collections.abc import Iterator
from typing import Any

from slime.arguments.config_files.eval_file import load_eval_config
from slime.arguments.initial_weights import derive_initial_weights
from slime.arguments.megatron.values import derive_megatron_values
from slime.arguments.parallel_sizes import MODEL_PARALLEL, data_parallel_size, divides_the_ranks, model_parallel_size
from slime.arguments.placement import derive_placement
from slime.arguments.planned_device import plans_for_gpus
from slime.arguments.plug_ins import flag_of
from slime.arguments.rules.advice import divisors
from slime.arguments.serving_values import bracket_router_address
from slime.arguments.time_limits import derive_time_limits
from slime.arguments.tracking import settle_trackers
from slime.utils.device import gpus_on_this_machine
from slime.utils.errors import UserError
from slime.utils.eval_config import build_eval_dataset_configs

logger = logging.getLogger(__name__)

# Where the rollout functions live that return exactly the rollouts that were asked for.
_OWN_ROLLOUTS = "slime.rollout."


def derive(args: argparse.Namespace) -> list[str]:
    """Derive all values in dependency order; returns violations that make a value impossible to derive."""
    violations: list[str] = []
    derive_placement(args)
    _parallel_sizes(args, violations)
    settle_precision(args, on_gpus=gpus_on_this_machine() > 0 or (args.dry_run and plans_for_gpus(args)))
    derive_megatron_values(args)
    _batch_sizes(args, violations)
    _rollout_limits(args)
    _algorithm(args)
    _evaluation(args, violations)
    _dumps(args)
    _on_policy_proof(args)
    settle_trackers(args)
    bracket_router_address(args)
    derive_initial_weights(args)
    derive_time_limits(args)
    return violations


def _parallel_sizes(args: argparse.Namespace, violations: list[str]) -> None:
    args.world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.has_trainer and not divides_the_ranks(args):
        model_parallel = model_parallel_size(args)
        typed = [f"{flag_of(name)} {getattr(args, name)}" for name in MODEL_PARALLEL if getattr(args, name) > 1]
        product = f" = {model_parallel}" if len(typed) > 1 else ""
        per_node = model_parallel // math.gcd(model_parallel, args.actor_num_nodes)
        violations.append(
            f"{' x '.join(typed)}{product} must divide the number of training ranks, {args.world_size} (--actor-num-nodes "
            f"{args.actor_num_nodes} x --actor-num-gpus-per-node {args.actor_num_gpus_per_node}); "
            f"--actor-num-gpus-per-node {per_node} would do, or smaller sizes"
        )
    args.data_parallel_size = data_parallel_size(args)
    args.rollout_num_engines = (args.rollout_num_gpus or 0) // args.rollout_num_gpus_per_engine


def settle_precision(args: argparse.Namespace, *, on_gpus: bool) -> None:
    """Parameters are bfloat16 on GPUs and float32 on CPU, unless a dtype was typed."""
    if not {"bf16", "fp16"} & args.typed_flags:
        args.bf16 = on_gpus
    args.params_dtype_name = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"


def _batch_sizes(args: argparse.Namespace, violations: list[str]) -> None:
    """rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout."""
    per_rollout = args.rollout_batch_size * args.n_samples_per_prompt
    product = (
        f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt} "
        f"= {per_rollout} rollouts per step"
    )
    steps, batch = args.num_steps_per_rollout, args.global_batch_size
    if steps is None and batch is None:
        steps = 1
    # An own rollout function may return another number of rollouts; the schedule counts what came.
    if args.rollout_function_path.startswith(_OWN_ROLLOUTS):
        violations += _identity_violations(product, per_rollout, steps, batch)
    args.num_steps_per_rollout = steps or max(1, per_rollout // batch)
    args.global_batch_size = batch or max(1, per_rollout // args.num_steps_per_rollout)
    args.over_sampling_batch_size = args.over_sampling_batch_size or args.rollout_batch_size


def _identity_violations(product: str, per_rollout: int, steps: int | None, batch: int | None) -> Iterator[str]:
    if steps is not None and per_rollout % steps:
        yield f"{product} cannot be split into --num-steps-per-rollout {steps}; {_listed(divisors(per_rollout))} would do"
    elif steps is not None and batch is not None and batch * steps != per_rollout:
        yield (
            f"{product}, but --global-batch-size {batch} x --num-steps-per-rollout {steps} = {batch * steps}; "
            f"drop one of them, or give --global-batch-size {per_rollout // steps}"
        )
    elif steps is None and per_rollout % batch:
        yield f"{product} is no multiple of --global-batch-size {batch}; {_listed(divisors(per_rollout))} would do"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _rollout_limits(args: argparse.Namespace) -> None:
    if args.rollout_max_context_len is not None and args.rollout_max_prompt_len is None:
        args.rollout_max_prompt_len = args.rollout_max_context_len - 1
    if args.eval_max_context_len is None:
        args.eval_max_context_len = args.rollout_max_context_len


def _algorithm(args: argparse.Namespace) -> None:
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    if args.balance_by_flops:
        args.balance_data = True
    if args.use_rollout_routing_replay:
        args.use_routing_replay = True
    if args.n_samples_per_prompt == 1:
        args.grpo_std_normalization = False
    args.eval_reward_key = args.eval_reward_key or args.reward_key
    args.eval_function_path = args.eval_function_path or args.rollout_function_path
    args.rm_model_path = args.rm_model_path or args.hf_checkpoint


def _evaluation(args: argparse.Namespace, violations: list[str]) -> None:
    args.eval_datasets = []
    words = args.eval_prompt_data
    if args.eval_config is not None:
        if words:
            logger.warning("--eval-config %s replaces --eval-prompt-data %s", args.eval_config, " ".join(words))
        args.eval_datasets, found = load_eval_config(args, args.eval_config)
        violations += found
        args.eval_prompt_data = [
            word for dataset in args.eval_datasets for word in (dataset.name, dataset.path)
        ] or None
        return
    if not words:
        return
    if len(words) == 1:
        words = ["aime", *words]
    if len(words) % 2:
        violations.append(f"--eval-prompt-data needs pairs `name path`, but has {len(words)} words: {' '.join(words)}")
        return
    args.eval_prompt_data = words
    entries: list[dict[str, Any]] = [{"name": words[i], "path": words[i + 1]} for i in range(0, len(words), 2)]
    try:
        args.eval_datasets = build_eval_dataset_configs(args, entries, {})
    except UserError as error:
        violations.append(str(error))


def _dumps(args: argparse.Namespace) -> None:
    if args.dump_details is None:
        return
    for name in ("rollout", "train"):
        if f"save_debug_{name}_data" not in args.typed_flags:
            setattr(args, f"save_debug_{name}_data", f"{args.dump_details}/{name}_data/{{rollout_id}}.pt")


def _on_policy_proof(args: argparse.Namespace) -> None:
    if not args.true_on_policy_mode:
        return
    args.deterministic_mode = args.sglang_enable_deterministic_inference = True
    if "ci_train_rollout_logprob_abs_diff_threshold" not in args.typed_flags:
        args.ci_train_rollout_logprob_abs_diff_threshold = 0.0
