"""The flags of the trainer: initial weights, the way of weights to the engines, the model, the objective."""

import argparse

from slime.algorithms.estimators import ESTIMATORS, estimator, names_of_estimators
from slime.arguments.flag import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    SEED,
    Caller,
    Group,
    Idle,
    PathKind,
    flag,
    off,
    plug_in,
    share,
    switch,
    weight,
)
from slime.arguments.hf_config import is_hf_checkpoint
from slime.arguments.value_types import environment_variables
from slime.utils.checkpoint_directory import is_megatron_checkpoint
from slime.utils.weight_transports import WEIGHT_TRANSPORTS

_OF_GLM = "{--spec} of layers that have it: slime_plugins.models.glm4 get_glm_spec"

RANKS = Caller.RANKS


def _not_from_megatron(name: str) -> Idle:
    """Idle unless the path in `name` is a Megatron checkpoint: only these hold iterations to choose from."""
    return Idle(
        lambda args: vars(args)[name] is None or not is_megatron_checkpoint(vars(args)[name]),
        f"without a Megatron checkpoint in --{name.replace('_', '-')}",
    )


def _starts_elsewhere(args: argparse.Namespace) -> bool:
    # A script that started from random weights must be able to resume from its own checkpoint without a change.
    resumes = args.load is not None and is_megatron_checkpoint(args.load)
    hf_load = args.load is not None and is_hf_checkpoint(args.load)
    return not resumes and (hf_load or args.initial_megatron_checkpoint is not None or args.ref_load is not None)


def _no_kl_by_oversight(args: argparse.Namespace) -> bool:
    # A script that types a weight of 0 switches the KL off on purpose, and may keep its other flags.
    return _NO_KL.when(args) and not ("kl_loss_coef" in args.typed_flags and args.kl_loss_coef == 0)


def _lacks(args: argparse.Namespace, fact: str, own: str = "custom_advantage_function_path") -> bool:
    """Whether the estimator is without `fact`, and no function of the user's at `own`, which may read any flag, replaces it."""
    return not getattr(estimator(args.advantage_estimator), fact) and vars(args)[own] is None


def _keeps_rewards(fact: str, done: str) -> Idle:
    """Idle with estimators that do not do with rewards what `done` says."""
    reason = f"with an estimator that does not {done} ({names_of_estimators(fact, joined_by='and')} do)"
    return Idle(lambda args: _lacks(args, fact, "custom_reward_post_process_path"), reason)


_STARTS_ELSEWHERE = Idle(_starts_elsewhere, "beside --load, --initial-megatron-checkpoint or --ref-load")
_NOT_THROUGH_FILES = Idle(lambda args: args.update_weight_transport != "disk", "without --update-weight-transport disk")
_NO_DELTA = Idle(lambda args: args.update_weight_mode != "delta", "without --update-weight-mode delta")
_NEVER_SAVES = Idle(lambda args: args.save is None, "without --save")
_DIRECTORY = "{--save}, the directory of checkpoints, such as {--save} outputs/checkpoints"
_NO_KL_LOSS = Idle(lambda args: not args.use_kl_loss, "without --use-kl-loss")
_NO_KL = Idle(lambda args: not args.use_kl_loss and args.kl_coef == 0, "without --use-kl-loss or --kl-coef")
_NO_KL_BY_OVERSIGHT = Idle(_no_kl_by_oversight, _NO_KL.reason)
_KL_ONLY_LOGGED = Idle(
    lambda args: _lacks(args, "counts_kl") and args.loss_type != "sft_loss",
    f"on the advantages of {names_of_estimators('counts_kl', without=True, joined_by='and')}: the KL is only logged",
)
_IMITATION = Idle(lambda args: args.loss_type == "sft_loss", "on the loss of --loss-type sft_loss")
_DISCOUNTS_NOTHING = Idle(
    lambda args: _lacks(args, "discounts"),
    f"with an estimator that discounts nothing ({names_of_estimators('discounts', joined_by='and')} do)",
)
_COUNTS_NO_STEPS = Idle(lambda args: _lacks(args, "discounts"), "with an estimator that counts no time steps")
_NO_CRITIC = Idle(
    lambda args: not estimator(args.advantage_estimator).needs_critic,
    f"without --advantage-estimator {names_of_estimators('needs_critic')}",
)
_ONE_SIDE = Idle(
    lambda args: args.loss_type == "policy_loss" and estimator(args.advantage_estimator).clips_one_side,
    f"with {names_of_estimators('clips_one_side')}, which clips one side alone",
)
_NO_CUSTOM_LOSS = Idle(lambda args: args.loss_type != "custom_loss", "without --loss-type custom_loss")
_NO_MTP = Idle(lambda args: not args.enable_mtp_training, "without --enable-mtp-training")
_NO_TIS = Idle(lambda a: not (a.use_tis or a.custom_tis_function_path), "without --use-tis", tells_default=True)
_NO_OPSM = Idle(lambda args: not args.use_opsm, "without --use-opsm", tells_default=True)
_NEVER_DRIFTS = Idle(
    lambda a: a.loss_type == "policy_loss" and a.num_steps_per_rollout == 1
    and not (a.use_rollout_logprobs or a.keep_old_actor or a.rollout_data_postprocess_path),
    "with one step per rollout, where old log-probs are those of the trained weights, without --use-rollout-logprobs",
)  # fmt: skip
_NO_OPD = Idle(lambda args: not args.use_opd, "without --use-opd")
_SKIPPED = Idle(lambda args: not args.compute_advantages_and_returns, "with --disable-compute-advantages-and-returns")
_READ_BY_NOBODY = Idle(
    lambda a: _SKIPPED.when(a) and a.loss_type == "policy_loss" and not a.rollout_data_postprocess_path, _SKIPPED.reason
)

CHECKPOINTS = Group("checkpoints", (
    # Load
    flag("--load", str, None, "actor checkpoint: from a Megatron directory the run resumes, from a Hugging Face directory a "
        "new run starts", path=PathKind.READ),
    flag("--ckpt-step", int, None, "iteration to take from --load; unset: the latest", bounds=AT_LEAST_ZERO,
        idle=_not_from_megatron("load")),
    flag("--ref-load", str, None, "reference checkpoint, Megatron or Hugging Face directory; also the initial one when "
        "--load gives nothing", path=PathKind.READ),
    flag("--ref-ckpt-step", int, None, "iteration to take from --ref-load", bounds=AT_LEAST_ZERO,
        idle=_not_from_megatron("ref_load")),
    switch("--no-load-optim", "the optimizer starts fresh; its learning-rate schedule goes on where the checkpoint was"),
    switch("--no-load-rng", "do not restore random generator states"),
    switch("--finetune", "load weights only and start at rollout 0 with fresh data and scheduler"),
    # Save
    flag("--save", str, None, "checkpoint directory; the data state goes to its `rollout/` folder", path=PathKind.WRITTEN),
    flag("--save-interval", int, None, "save every N rollouts, at epoch ends and after the last; needs --save",
        bounds=AT_LEAST_ONE, needs=_DIRECTORY),
    flag("--keep-last", int, None, "keep only the newest N checkpoints, with their data states and exports; unset: all",
        bounds=AT_LEAST_ONE, needs=_DIRECTORY),
    switch("--async-save", "write checkpoints while training goes on, from a copy in host memory", idle=_NEVER_SAVES),
    switch("--no-save-optim", "leave the optimizer state out; a run that resumes from it starts its optimizer fresh",
        idle=_NEVER_SAVES),
    flag("--save-hf", str, None, "with every save, also export to this Hugging Face directory, on a disk that all nodes "
        "share; `{rollout_id}` is filled in; same quantisation as --hf-checkpoint",
        path=PathKind.WRITTEN, placeholders="rollout_id", needs=_DIRECTORY),
))  # fmt: skip

WEIGHTS = Group("weights and training process", (
    # Process
    switch("--random-init", "start from random weights instead of those of --hf-checkpoint", idle=_STARTS_ELSEWHERE),
    flag("--initial-megatron-checkpoint", str, None, "initial weights if --load holds no checkpoint; unlike --ref-load it "
        "makes no reference model, and it takes precedence over --ref-load", path=PathKind.READ),
    flag("--train-env-vars", environment_variables, {}, "extra environment of the train actors, as JSON object; applied "
        "last. The actors set it themselves before their imports, so that no log has it. Only variables of the dynamic loader, "
        "the interpreter, thread libraries and Ray (LD_*, PYTHON*, OMP_*, RAY_* and the like) are handed to Ray, without its "
        "tokens and passwords"),
    switch("--trust-remote-code", "allow code shipped inside checkpoints, for tokenizer, config and engine alike"),
    switch("--model-args-from-hf", "derive all model-shape flags from the config of --hf-checkpoint; typed flags must agree "
        "with it"),
    switch("--release-train", "end the train actors during generation and recreate them from a checkpoint for each step; "
        "needs --save and --update-weight-transport disk, and saves every rollout"),
    flag("--log-probs-chunk-size", int, -1, "rows per float32 chunk when computing log-probs; 0 or less: chosen so that a "
        "chunk stays under 256 MiB, and no chunks where kernels are compiled"),
    switch("--recompute-loss-function", "compute log-probs and loss once more in the backward pass instead of keeping their "
        "activations: less memory, more time; a custom loss is called twice"),
    # Sync
    flag("--update-weight-mode", str, "full", "send all parameters, or only the bytes that changed since the last sync; "
        "delta needs --update-weight-transport disk", "full", "delta"),
    flag("--update-weight-transport", str, "nccl", "direct transfer (process group, or shared handles with --colocate), or "
        "files in --update-weight-disk-dir", *WEIGHT_TRANSPORTS),
    flag("--update-weight-buffer-size", int, 536870912, "upper size of one weight transfer bucket, in bytes",
        bounds=AT_LEAST_ONE),
    flag("--update-weights-interval", int, 1, "push weights every N rollouts, in train_async.py", bounds=AT_LEAST_ONE),
    switch("--update-weights-in-flight", "pause running requests, swap the weights and go on; the version of each token is "
        "recorded", idle=Idle(lambda args: not args.asynchronous, "without train_async.py")),
    # Disk sync
    flag("--update-weight-disk-dir", str, None, "directory that trainer and engines share; every sync writes one "
        "sub-directory (transport disk)", path=PathKind.WRITTEN, idle=_NOT_THROUGH_FILES),
    switch("--update-weight-disk-keep-files", "keep published weights after the engines loaded them", idle=_NOT_THROUGH_FILES),
    flag("--update-weight-delta-encoding", str, "xor", "payload of --update-weight-mode delta: bit difference, to be applied "
        "exactly once, or positions with their new bytes, repeatable", "xor", "overwrite", idle=_NO_DELTA),
    flag("--update-weight-delta-checksum", str, "xxh3-128", "digest of every tensor, checked after a delta was applied",
        "xxh3-128", "blake3", "adler32", idle=_NO_DELTA),
    flag("--update-weight-local-checkpoint-dir", str, None, "directory on every engine host for a copy of the weights, which "
        "pushes update; --update-weight-mode delta needs it", path=PathKind.READ, idle=_NOT_THROUGH_FILES),
    plug_in("--custom-update-weight-post-write-path", RANKS, "called on each rank when the files of a sync are written",
        idle=_NOT_THROUGH_FILES),
    plug_in("--sglang-custom-pull-weights-pre-read-hook", Caller.MANAGER, "called on hosts of engines before they read a push",
        needs="{--update-weight-local-checkpoint-dir}", idle=_NOT_THROUGH_FILES),
    # Trained parameters
    flag("--only-train-params-name-list", str, None, "regular expressions (re.search); parameters that match none of them "
        "are frozen", nargs="+"),
    flag("--freeze-params-name-list", str, None, "regular expressions (re.search); parameters that match one are frozen; not "
        "with --only-train-params-name-list", nargs="+"),
    switch("--freeze-indexer", "freeze the weights that choose keys in sparse attention, which only --dsa-indexer-loss-coeff "
        "trains; an error when the model has none"),
    # Model
    plug_in("--custom-model-provider-path", RANKS, "function that builds the Megatron model"),
    flag("--qwen-gdn-backend", str, "fla", "kernels of gated-delta-net layers (Qwen3-Next and its kin) on GPUs: package "
        "flash-linear-attention or flash-qla", "fla", "flashqla", needs="{--spec} of such layers"),
    switch("--use-gated-attention", "another name of --attention-output-gate"),
    switch("--post-self-attn-layernorm", "one more norm after attention", needs=_OF_GLM),
    switch("--post-mlp-layernorm", "one more norm after the MLP", needs=_OF_GLM),
    flag("--dsa-indexer-layers", int, None, "for each layer 1 if it has an indexer of sparse attention, 0 if it uses the "
        "choice of the last layer with one; unset: all have one", nargs="+", bounds=share(1)),
    switch("--dsa-indexer-rope-interleave", "the indexer rotates neighbouring channels together instead of the two halves"),
    switch("--allgather-cp", "context parallelism with contiguous shards and gathered keys and values; sparse-attention "
        "(DSA) models only"),
    flag("--padded-vocab-size", int, None, "force the padded vocabulary size; unset: --vocab-size up to a multiple of "
        "--make-vocab-size-divisible-by x tensor-parallel size", bounds=AT_LEAST_ONE),
))  # fmt: skip

FSDP = Group("FSDP", (
    switch("--gradient-checkpointing", "recompute every block in the backward pass instead of keeping its activations; with "
        "Megatron: --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 unless those are typed"),
    flag("--context-parallel-size", int, 1, "ranks that split one sequence, with either backend", bounds=AT_LEAST_ONE),
    flag("--attn-implementation", str, "auto", "attention kernel of --train-backend fsdp; auto takes the fastest that is "
        "installed", "auto", "flash_attention_2", "flash_attention_3", "sdpa", "eager"),
    switch("--fsdp-cpu-offload", "with --train-backend fsdp, keep parameters and optimizer state in host memory"),
    switch("--optimizer-cpu-offload --offload-optimizer-states", "keep the optimizer's state in host memory; with "
        "--train-backend megatron it is updated there"),
))  # fmt: skip

MEGATRON_HOOKS = Group("Megatron hooks", (
    plug_in("--custom-megatron-init-path", RANKS, "called after Megatron is initialised"),
    plug_in("--custom-megatron-before-log-prob-hook-path", RANKS, "called before each forward-only pass"),
    plug_in("--custom-megatron-before-train-step-hook-path", RANKS, "called before the forward pass of each optimizer step"),
    flag("--megatron-deepgemm-forward-layers", int, None, "decoder layers, counted from 0, with modules whose forward pass "
        "multiplies in FP8 as engines do", bounds=AT_LEAST_ZERO, nargs="+", needs="{--megatron-deepgemm-forward-modules}"),
    flag("--megatron-deepgemm-forward-modules", str, None, "endings of the names of these modules, or of modules around them, "
        "such as mlp.linear_fc1", nargs="+", needs="{--megatron-deepgemm-forward-layers}"),
    flag("--megatron-deepgemm-moe-forward-layers", int, None, "decoder layers whose experts multiply in FP8 as engines do",
        bounds=AT_LEAST_ZERO, nargs="+"),
    flag("--megatron-deepgemm-moe-forward-modules", str, ["mlp.experts"], "endings of the names of these experts", nargs="+",
        needs="{--megatron-deepgemm-moe-forward-layers}"),
))  # fmt: skip

ALGORITHM = Group("algorithm", (
    # Training
    flag("--seed", int, 1234, "training seed; the seed of an engine is this + its rank x GPUs per node", bounds=SEED),
    flag("--lr", float, 1e-06, "learning rate, the highest one of the schedule", bounds=weight(0.1, "1e-7 to 1e-3")),
    flag("--clip-grad", float, 1.0, "gradient norm limit; 0: no clipping", bounds=AT_LEAST_ZERO),
    switch("--calculate-per-token-loss", "average the loss over the tokens of the step instead of over its rollouts"),
    switch("--reset-optimizer-states", "clear the optimizer's moments and step after each rollout"),
    switch("--use-stateless-adam", "Adam that keeps no moments between steps; needs --optimizer adam and --no-save-optim"),
    # Objective
    flag("--loss-type", str, "policy_loss", "training objective; custom_loss needs --custom-loss-function-path",
        "policy_loss", "sft_loss", "custom_loss"),
    plug_in("--custom-loss-function-path", RANKS, "the loss of custom_loss", idle=_NO_CUSTOM_LOSS),
    flag("--advantage-estimator", str, "grpo", "advantage method; ppo trains a critic on the actor's GPUs, "
        "reinforce_plus_plus* need --normalize-advantages", *ESTIMATORS, idle=_IMITATION),
    off("--disable-compute-advantages-and-returns", "compute_advantages_and_returns",
        "skip advantages (supervised fine-tuning, own losses)"),
    plug_in("--custom-advantage-function-path", RANKS, "replaces the advantage estimator", idle=(_IMITATION, _SKIPPED)),
    plug_in("--custom-pg-loss-reducer-function-path", RANKS, "own reduction of the policy-gradient term", idle=_IMITATION),
    # Clipping
    flag("--eps-clip", float, 0.2, "the probability ratio may fall by this", bounds=AT_LEAST_ZERO, idle=_IMITATION),
    flag("--eps-clip-high", float, None, "the ratio may rise so far; unset: --eps-clip", bounds=AT_LEAST_ZERO, idle=_IMITATION),
    flag("--eps-clip-c", float, None, "dual-clip bound, above 1 (arXiv 1912.09729); unset: off", idle=(_IMITATION, _ONE_SIDE)),
    flag("--value-clip", float, 0.2, "the critic's value may move this far from its old value", bounds=AT_LEAST_ZERO,
        idle=_NO_CRITIC),
    # KL and entropy
    flag("--kl-coef", float, 0.0, "weight of the KL against --ref-load inside the reward; not together with --kl-loss-coef",
        bounds=weight(1, "0 to 0.1"), idle=(_IMITATION, _KL_ONLY_LOGGED, _READ_BY_NOBODY)),
    switch("--use-kl-loss", "KL against the reference model (--ref-load) as a loss term", idle=_IMITATION),
    flag("--kl-loss-coef", float, 0.0, "weight of the KL loss; 0: only logged", bounds=weight(1, "0 to 0.1"), idle=_NO_KL_LOSS),
    flag("--kl-loss-type", str, "k1", "estimator of the KL, in reward and loss", "k1", "k2", "k3", "low_var_kl",
        idle=_NO_KL_BY_OVERSIGHT),
    switch("--use-unbiased-kl", "weight the estimator of the KL loss by the importance ratio", idle=_NO_KL_LOSS),
    flag("--ref-update-interval", int, None, "copy the actor into the reference model every N rollouts; unset: the reference "
        "never changes", bounds=AT_LEAST_ONE, idle=_NO_KL),
    flag("--entropy-coef", float, 0.0, "weight of the entropy bonus", bounds=weight(1, "0 to 0.01", low=None), idle=_IMITATION),
    switch("--use-rollout-entropy", "store per-token entropy with the log-probs"),
    # Advantages
    flag("--gamma", float, 1.0, "discount of later rewards, per token", bounds=share(1), idle=_DISCOUNTS_NOTHING),
    flag("--lambd", float, 1.0, "decay of generalised advantage estimation, per token", bounds=share(0.95), idle=_NO_CRITIC),
    switch("--discount-masked-tokens", "count masked tokens (tool output, say) as time steps in discounting and advantage "
        "estimation", idle=_COUNTS_NO_STEPS),
    switch("--normalize-advantages", "whiten advantages over tokens of all data- and context-parallel ranks", idle=_SKIPPED),
    off("--disable-grpo-std-normalization", "grpo_std_normalization", "centre group rewards only, without division by their "
        "deviation (arXiv 2503.20783)", idle=_keeps_rewards("scales", "divide rewards by their deviation")),
    off("--disable-rewards-normalization", "rewards_normalization", "use rewards as they are",
        idle=_keeps_rewards("centers", "centre rewards in their group")),
    # Critic
    flag("--num-critic-only-steps", int, 0, "leading rollouts that train only the critic (--advantage-estimator ppo)",
        bounds=AT_LEAST_ZERO),
    flag("--megatron-config-path", str, None, "YAML file with values that hold for the actor or the critic alone"),
    # Multi-token prediction
    flag("--mtp-num-layers", int, None, "multi-token-prediction layers of the model", bounds=AT_LEAST_ZERO),
    switch("--enable-mtp-training", "train the multi-token-prediction layers; needs --mtp-num-layers",
        needs="{--mtp-num-layers}, the number of those layers in the model (1 is usual)"),
    flag("--mtp-loss-scaling-factor", float, 0.2, "weight of the loss of these layers", bounds=weight(), idle=_NO_MTP),
))  # fmt: skip

OFF_POLICY = Group("off-policy corrections", (
    # Importance sampling
    switch("--use-rollout-logprobs", "the engine's log-probs act as old log-probs; not with --use-tis", idle=_IMITATION),
    switch("--get-mismatch-metrics", "compare the log-probs of engine and trainer without changing the loss", idle=_IMITATION),
    switch("--use-tis", "weight tokens by their trainer-to-engine probability ratio, truncated by --tis-clip and "
        "--tis-clip-low", idle=_IMITATION),
    flag("--tis-clip", float, 2.0, "upper bound of the weights of --use-tis", bounds=ABOVE_ZERO, idle=_NO_TIS),
    flag("--tis-clip-low", float, 0.0, "lower bound of the weights of --use-tis", bounds=AT_LEAST_ZERO, idle=_NO_TIS),
    flag("--tis-threshold", float, None, "another name of --tis-clip"),
    plug_in("--custom-tis-function-path", RANKS, "replaces the weighting of --use-tis, given or not", idle=_IMITATION),
    # Replay
    switch("--use-routing-replay", "training sends tokens to the experts that the log-prob pass chose (arXiv 2507.18071)"),
    switch("--use-rollout-routing-replay", "as --use-routing-replay, with the experts that engines chose (arXiv 2510.11370)"),
    # Masks
    switch("--use-opsm", "mask sequences with negative advantage that drifted off-policy by more than --opsm-delta",
        idle=(_IMITATION, _NEVER_DRIFTS)),
    flag("--opsm-delta", float, 0.0001, "limit of --use-opsm: mean log-ratio per token", bounds=AT_LEAST_ZERO, idle=_NO_OPSM),
    switch("--true-on-policy-mode", "demand bitwise equal log-probs of engine and trainer: deterministic kernels on both "
        "sides, one optimizer step per rollout, a weight push after each; a difference above "
        "--ci-train-rollout-logprob-abs-diff-threshold (then 0) at any token stops the run", idle=_IMITATION),
))  # fmt: skip

DISTILLATION = Group("on-policy distillation", (
    switch("--use-opd", "distil from a teacher, on top of any estimator; needs --opd-type", idle=(_IMITATION, _READ_BY_NOBODY),
        needs="{--opd-type}: sglang (teacher behind {--rm-url}) or megatron (teacher in the trainer)"),
    flag("--opd-type", str, None, "where the teacher is: behind HTTP (--rm-url), or as further weights in the trainer "
        "(--opd-teacher-load)", "sglang", "megatron", idle=_NO_OPD),
    flag("--opd-kl-coef", float, 1.0, "weight of the distillation term", bounds=weight(), idle=_NO_OPD),
    flag("--opd-teacher-load", str, None, "checkpoint of a teacher of the same architecture; --opd-type megatron only",
        path=PathKind.READ),
    flag("--opd-teacher-ckpt-step", int, None, "iteration to take from --opd-teacher-load", bounds=AT_LEAST_ZERO,
        idle=_not_from_megatron("opd_teacher_load")),
))  # fmt: skip
