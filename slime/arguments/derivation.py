"""Values that follow from other flags: other names of one setting, sizes and modes, time limits, the source of the weights.

Each function fills values that were left unset; none overrides a typed one.
"""

import argparse
import contextlib
import importlib.util
import logging
import math
from collections.abc import Iterator
from typing import Any

from slime.algorithms.estimators import estimator
from slime.arguments.checkpoints import WeightSource, resolve_initial_weights
from slime.arguments.config_files.eval_file import load_eval_config
from slime.arguments.config_files.role_config import CRITIC, critic_weights, switch_off
from slime.arguments.config_files.serving_config import load_serving_config, served_models
from slime.arguments.flag import flag_of
from slime.arguments.megatron.effects import ACTS_WITH
from slime.arguments.megatron.values import derive_megatron_values
from slime.arguments.origins import Origin
from slime.arguments.server_flags import TOLD_TOKENS
from slime.arguments.sizes import (
    MODEL_PARALLEL,
    data_parallel_size,
    divides_the_ranks,
    expects_gpus,
    model_parallel_size,
)
from slime.arguments.violations import Violation, about, broken, divisors
from slime.utils.checkpoint_directory import require_backend
from slime.utils.errors import UserError
from slime.utils.eval_config import build_eval_dataset_configs
from slime.utils.hf_files import checkpoint_bytes, time_limits
from slime.utils.ports import host_for_url

logger = logging.getLogger(__name__)

# The package of our own rollout and evaluation functions, which return as many rollouts as are asked for, and data sources.
OWN = "slime.rollout."
# Our function that generates answers, asks for their rewards, and evaluates.
GRADING_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"
FULLY_ASYNC = "slime.rollout.fully_async_rollout"
ROLLOUT_BUFFER = "slime_plugins.rollout_buffer"
_SPLIT_OF_STAGES = frozenset({
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout",
})  # fmt: skip


def derive(args: argparse.Namespace) -> list[Violation]:
    """Derive all values in dependency order; returns violations that make a value impossible to derive."""
    violations: list[Violation] = []
    derive_placement(args)
    _model_values(args, violations)
    _engines(args, violations)
    _batch_sizes(args, violations)
    _unset_values(args)
    _evaluation(args, violations)
    settle_trackers(args)
    derive_initial_weights(args)
    derive_time_limits(args)
    return violations


def derive_critic(critic: argparse.Namespace) -> list[Violation]:
    """The same for a critic: derive the values that follow from flags that it may have for itself. The rest is the run's."""
    violations: list[Violation] = []
    own = critic.role_overrides.get(CRITIC, {}).keys()
    # If this model lacks a layout of the run's, that is no reason to refuse it.
    if critic.tensor_model_parallel_size == 1 and "sequence_parallel" not in own:
        critic.sequence_parallel = False
    if critic.pipeline_model_parallel_size == 1:
        vars(critic).update(dict.fromkeys(_SPLIT_OF_STAGES - own))
    critic.deterministic_mode |= critic.true_on_policy_mode
    _model_values(critic, violations)
    critic.typed_flags -= {name for group in ACTS_WITH for name in group.idle(critic)} - own
    switch_off(critic)
    if not critic.untie_embeddings_and_output_weights:
        template = "{--untie-embeddings-and-output-weights}: a critic's head gives values, and is never tied; drop it"
        violations.append(broken(critic, template))
    return violations


def _model_values(args: argparse.Namespace, violations: list[Violation]) -> None:
    args.world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.has_trainer and not divides_the_ranks(args):
        model_parallel = model_parallel_size(args)
        typed = [f"{{{flag_of(name)}=}}" for name in MODEL_PARALLEL if vars(args)[name] > 1]
        template = f"{' x '.join(typed)}{f' = {model_parallel}' if len(typed) > 1 else ''}" + (
            " must divide the number of training ranks, {world_size} ({--actor-num-nodes=} x {--actor-num-gpus-per-node=}); "
            "{--actor-num-gpus-per-node} {per_node} would do, or smaller sizes"
        )
        per_node = model_parallel // math.gcd(model_parallel, args.actor_num_nodes)
        violations.append(broken(args, template, per_node=per_node))
    args.data_parallel_size = data_parallel_size(args)
    settle_precision(args, on_gpus=expects_gpus(args))
    derive_megatron_values(args)


def _engines(args: argparse.Namespace, violations: list[Violation]) -> None:
    args.rollout_num_engines = (args.rollout_num_gpus or 0) // args.rollout_num_gpus_per_engine
    limit = "sglang_router_request_timeout_secs"
    if limit not in args.typed_flags:
        # An answer that the router ends before the client does is begun anew.
        setattr(args, limit, max(vars(args)[limit], math.ceil(args.http_request_timeout)))
    args.served_models = None
    if args.sglang_config is not None and args.has_engines:
        # Read once, because the processes of the run may be on machines without the file.
        args.served_models, found = load_serving_config(args)
        sizes = "--rollout-num-gpus", "--rollout-num-gpus-per-engine", "--hf-checkpoint"
        violations += about(found, "--sglang-config", *sizes)
        # The engines that generate; other models are asked by the user's functions.
        args.rollout_num_engines = sum(group.num_engines for group in served_models(args)[0].groups)


def settle_precision(args: argparse.Namespace, *, on_gpus: bool | None) -> None:
    """What follows from the devices: parameters are bfloat16 on GPUs and float32 on CPU, unless a dtype was typed; gradients of
    bfloat16 parameters are added up in float32, unless bfloat16 was asked for. `on_gpus` None: not known, and likely."""
    args.on_gpus = on_gpus
    if not {"bf16", "fp16"} & args.typed_flags:
        args.bf16 = on_gpus is not False
    args.params_dtype_name = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
    in_float32 = args.bf16 and not args.grad_reduce_in_bf16 and args.main_grads_dtype == "fp32"
    if "accumulate_allreduce_grads_in_fp32" not in args.typed_flags:
        args.accumulate_allreduce_grads_in_fp32 = in_float32


def _batch_sizes(args: argparse.Namespace, violations: list[Violation]) -> None:
    """rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout."""
    per_rollout = args.rollout_batch_size * args.n_samples_per_prompt
    steps, batch = args.num_steps_per_rollout, args.global_batch_size
    if steps is None and batch is None:
        steps = 1
    # A user's rollout function may return another number of rollouts; the schedule counts those that came.
    if args.rollout_function_path.startswith(OWN):
        violations += _identity_violations(args, per_rollout, steps, batch)
    args.num_steps_per_rollout = steps or max(1, per_rollout // batch)
    args.global_batch_size = batch or max(1, per_rollout // args.num_steps_per_rollout)
    args.over_sampling_batch_size = args.over_sampling_batch_size or args.rollout_batch_size


def _identity_violations(
    args: argparse.Namespace, per_rollout: int, steps: int | None, batch: int | None
) -> Iterator[Violation]:
    product = "{--rollout-batch-size=} x {--n-samples-per-prompt=} = {all} rollouts per step"
    values = {"all": per_rollout, "steps": steps, "fitting": ", ".join(map(str, divisors(per_rollout)))}
    if steps is not None and per_rollout % steps:
        template = " cannot be split into {--num-steps-per-rollout} {steps}; {fitting} would do"
        yield broken(args, product + template, **values)
    elif steps is not None and batch is not None and batch * steps != per_rollout:
        template = (
            ", but {--global-batch-size=} x {--num-steps-per-rollout} {steps} = {product}; drop one of them, or give "
            "{--global-batch-size} {each}"
        )
        yield broken(args, product + template, product=batch * steps, each=per_rollout // steps, **values)
    elif steps is None and per_rollout % batch:
        yield broken(args, product + " is no multiple of {--global-batch-size=}; {fitting} would do", **values)


def _unset_values(args: argparse.Namespace) -> None:
    if args.rollout_max_context_len is not None and args.rollout_max_prompt_len is None:
        args.rollout_max_prompt_len = args.rollout_max_context_len - 1
    args.eval_max_context_len = args.eval_max_context_len or args.rollout_max_context_len
    args.eps_clip_high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    args.balance_data = args.balance_data or args.balance_by_flops
    args.use_routing_replay = args.use_routing_replay or args.use_rollout_routing_replay
    args.grpo_std_normalization &= args.n_samples_per_prompt != 1
    if args.rollout_top_p != 1 and args.rollout_top_k == -1:
        # An engine reports sets only of a limited top-k, and must have room to report tokens that tie at the cut.
        args.rollout_top_k = max(1, min(TOLD_TOKENS, args.sglang_sampling_mask_max_tokens or TOLD_TOKENS) // 2)
        args.origins["rollout_top_k"] = Origin.DERIVED  # also where the -1 was typed
        args.eval_top_k = -1 if args.eval_top_k is None else args.eval_top_k
        if args.has_engines and args.rollout_top_k < TOLD_TOKENS // 2:
            line = "--sglang-sampling-mask-max-tokens %d cuts --rollout-top-k to %d; give %d, or --rollout-top-k"
            logger.warning(line, args.sglang_sampling_mask_max_tokens, args.rollout_top_k, TOLD_TOKENS)
    args.eval_reward_key = args.eval_reward_key or args.reward_key
    args.eval_function_path = args.eval_function_path or args.rollout_function_path
    args.update_weights_in_flight |= args.rollout_function_path.startswith((FULLY_ASYNC, ROLLOUT_BUFFER))
    args.rm_model_path = args.rm_model_path or args.hf_checkpoint
    for name in ("rollout", "train") if args.dump_details is not None else ():
        if f"save_debug_{name}_data" not in args.typed_flags:
            setattr(args, f"save_debug_{name}_data", f"{args.dump_details}/{name}_data/{{rollout_id}}.pt")
    if args.true_on_policy_mode:
        args.deterministic_mode |= args.train_backend == "megatron"
        args.sglang_enable_deterministic_inference = True
        if "ci_train_rollout_logprob_abs_diff_threshold" not in args.typed_flags:
            args.ci_train_rollout_logprob_abs_diff_threshold = 0.0
    if args.sglang_router_ip is not None and args.sglang_router_ip.count(":") > 1:
        # URLs need an IPv6 address in brackets.
        args.sglang_router_ip = host_for_url(args.sglang_router_ip)


def _evaluation(args: argparse.Namespace, violations: list[Violation]) -> None:
    args.eval_datasets = []
    words = args.eval_prompt_data
    if args.eval_config is not None:
        if words:
            logger.warning("--eval-config %s replaces --eval-prompt-data %s", args.eval_config, " ".join(words))
        args.eval_datasets, found = load_eval_config(args, args.eval_config)
        violations += about(found, "--eval-config")
        args.eval_prompt_data = [
            word for dataset in args.eval_datasets for word in (dataset.name, dataset.path)
        ] or None
        return
    if not words:
        return
    words = ["aime", *words] if len(words) == 1 else words
    if len(words) % 2:
        template = "{--eval-prompt-data} needs pairs `name path`, but has {count} words: {words}"
        violations.append(broken(args, template, count=len(words), words=" ".join(words)))
        return
    args.eval_prompt_data = words
    entries: list[dict[str, Any]] = [{"name": words[i], "path": words[i + 1]} for i in range(0, len(words), 2)]
    try:
        args.eval_datasets = build_eval_dataset_configs(args, entries, {})
    except UserError as error:
        violations += about([error], "--eval-prompt-data")


def resolve_aliases(args: argparse.Namespace) -> list[Violation]:
    """Write each alias into the setting that it means; returns violations of aliases that contradict it."""
    args.dry_run = args.dry_run or args.rehearse or args.dry_run_json is not None
    if args.use_gated_attention:
        _type(args, "attention_output_gate", True)
    recomputation = {"recompute_granularity", "recompute_method", "recompute_num_layers"}
    recomputation |= {"recompute_activations", "moe_layer_recompute"}
    megatron_recomputes = args.gradient_checkpointing and args.train_backend == "megatron"
    if megatron_recomputes and args.typed_flags.isdisjoint(recomputation):
        args.recompute_granularity, args.recompute_method, args.recompute_num_layers = "full", "uniform", 1
    if args.tis_threshold is None:
        return []
    if "tis_clip" in args.typed_flags and args.tis_clip != args.tis_threshold:
        template = "{--tis-threshold=} and {--tis-clip=} are two names of one bound with two values; keep one"
        return [broken(args, template)]
    _type(args, "tis_clip", args.tis_threshold)
    return []


def _type(args: argparse.Namespace, name: str, value: Any) -> None:
    """Set `name` as if it had been given in place of its alias, so that nothing derived overrules it."""
    if name not in args.typed_flags:
        # The alias was typed, so messages name it.
        args.origins[name] = Origin.DERIVED
    setattr(args, name, value)
    args.typed_flags.add(name)


def derive_placement(args: argparse.Namespace) -> None:
    """Fill modes, sizes and offloads, in place."""
    args.debug_train_only = args.debug_train_only or args.load_debug_rollout_data is not None
    if args.debug_train_only:
        args.rollout_num_gpus = 0
    args.has_trainer, args.has_engines = not args.debug_rollout_only, not args.debug_train_only
    # These engines are asked for their sizes when the run starts, because the command line must not wait for the network.
    args.rollout_external = bool(args.rollout_external_engine_addrs) and args.has_engines
    args.rollout_external_engine_infos = None
    if args.colocate and "num_gpus_per_node" not in args.typed_flags:
        args.num_gpus_per_node = args.actor_num_gpus_per_node
    # It is a shorthand, which arguments that were checked before do not have any more.
    if vars(args).get("offload"):
        # `--offload --no-offload-train` asks for only one of the two.
        args.offload_train = args.offload_train is not False
        args.offload_rollout = args.offload_rollout is not False
    args.use_critic = estimator(args.advantage_estimator).needs_critic
    if args.use_critic and args.offload_train is None:
        # Actor and critic take turns on the same GPUs; a rule refuses what was typed against it.
        args.offload_train = True
    if args.colocate and args.rollout_num_gpus is None:
        args.rollout_num_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.debug_rollout_only:
        _without_trainer(args)
    if args.colocate:
        # A trainer that ends during generation has nothing to move.
        args.offload_train = not args.release_train if args.offload_train is None else args.offload_train
        args.offload_rollout = args.offload_rollout is not False
    args.offload_train, args.offload_rollout = bool(args.offload_train), bool(args.offload_rollout)
    # Offloading moves these buffers itself; a second copy on the host would only take memory.
    args.disable_param_buffer_cpu_backup = args.disable_grad_buffer_cpu_backup = args.offload_train
    if args.use_critic:
        args.critic_num_nodes, args.critic_num_gpus_per_node = args.actor_num_nodes, args.actor_num_gpus_per_node
    if args.release_train and args.save_interval is None:
        args.save_interval = 1


def _without_trainer(args: argparse.Namespace) -> None:
    """The training sizes of a run that only generates are those of its engines."""
    if args.rollout_external:
        return
    gpus = args.rollout_num_gpus or 0
    # A usual node has 8.
    args.actor_num_gpus_per_node = min(8, gpus)
    args.actor_num_nodes = gpus // args.actor_num_gpus_per_node if gpus else 0
    args.colocate = args.offload_train = args.offload_rollout = False


def derive_time_limits(args: argparse.Namespace) -> None:
    """Fill the limits that were not typed."""
    for name, seconds in time_limits(checkpoint_bytes(args.hf_checkpoint)).items():
        if vars(args)[name] is None:
            setattr(args, name, seconds)


def derive_initial_weights(args: argparse.Namespace) -> None:
    """Set `initial_weights` and, in a run with a critic, `critic_initial_weights`; None where a source cannot be used."""
    args.initial_weights = None
    if args.has_trainer:
        with contextlib.suppress(UserError):
            args.initial_weights = source_of_actor(args)
    source = args.initial_weights
    if source is not None and not source.resume:
        args.no_load_optim = args.no_load_rng = args.finetune = True
        if source.step is not None:
            args.ckpt_step = source.step
        if args.start_rollout_id is None:
            args.start_rollout_id = 0
    if args.use_critic:
        args.critic_initial_weights = None
        with contextlib.suppress(UserError):
            args.critic_initial_weights = critic_weights(args) if source is not None else None


def source_of_actor(args: argparse.Namespace) -> WeightSource:
    """The source of the actor's weights, with an iteration to resume from where it resumes.

    Raises:
        UserError: there is none that can be used.
    """
    source = resolve_initial_weights(args)
    require_backend(args.train_backend, source.kind, source.path, source.step)
    return source


def settle_trackers(args: argparse.Namespace) -> None:
    """Fill in `use_tensorboard` where it was not typed: yes, if no other tracker is chosen and the package is there."""
    if args.use_tensorboard is None:
        args.use_tensorboard = not args.use_wandb and importlib.util.find_spec("tensorboard") is not None
