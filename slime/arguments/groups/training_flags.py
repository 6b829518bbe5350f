"""Flags of the trainer: checkpoints, where weights start and how they reach the engines, what the model is made of."""

import argparse

from slime.arguments.checkpoints import is_megatron_checkpoint
from slime.arguments.flag import (
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    Caller,
    Group,
    Idle,
    PathKind,
    flag,
    plug_in,
    switch,
)
from slime.arguments.hf_config import is_hf_checkpoint
from slime.arguments.value_types import environment_variables

_DELTA_WEIGHT_TRANSPORT = "delta weight transport"
_WEIGHT_TRANSPORT_THROUGH_FILES = "weight transport through files"
_FURTHER_NORM_IN_A_LAYER = "a further norm in a layer"
_FSDP_BACKEND = "the FSDP backend"
_HOOKING_INTO_MEGATRON = "hooking into Megatron"
_BLOCK_FP_FORWARD_IN_THE_TRAINER = "block-FP8 forward in the trainer"

RANKS = Caller.RANKS


def not_from_megatron(name: str) -> Idle:
    """Where the path in `name` is no Megatron checkpoint, whose iterations alone can be chosen from."""

    def when(args: argparse.Namespace) -> bool:
        return getattr(args, name) is None or not is_megatron_checkpoint(getattr(args, name))

    return Idle(when, f"without a Megatron checkpoint in --{name.replace('_', '-')}")


def _starts_elsewhere(args: argparse.Namespace) -> bool:
    # A script that started from random weights resumes from its own checkpoint without a change.
    resumes = args.load is not None and is_megatron_checkpoint(args.load)
    hf_load = args.load is not None and is_hf_checkpoint(args.load)
    return not resumes and (hf_load or args.initial_megatron_checkpoint is not None or args.ref_load is not None)


_STARTS_ELSEWHERE = Idle(_starts_elsewhere, "beside --load, --initial-megatron-checkpoint or --ref-load")
_NEVER_SAVES = Idle(lambda args: args.save is None, "without --save")

CHECKPOINTS = Group("checkpoints", (
    # Load
    flag("--load", str, None, "actor checkpoint: a Megatron directory is resumed, a Hugging Face directory is where a new "
        "run starts", path=PathKind.READ),
    flag("--ckpt-step", int, None, "iteration to take from --load; unset: the latest", bounds=AT_LEAST_ZERO,
        idle=not_from_megatron("load")),
    flag("--ref-load", str, None, "reference checkpoint, Megatron or Hugging Face directory; also the initial one when "
        "--load gives nothing", path=PathKind.READ),
    flag("--ref-ckpt-step", int, None, "iteration to take from --ref-load", bounds=AT_LEAST_ZERO,
        idle=not_from_megatron("ref_load")),
    switch("--no-load-optim", "the optimizer starts fresh; its learning-rate schedule goes on where the checkpoint was"),
    switch("--no-load-rng", "do not restore random generator states"),
    switch("--finetune", "load weights only and start at rollout 0 with fresh data and scheduler"),
    # Save
    flag("--save", str, None, "checkpoint directory; the data state goes to its `rollout/` folder", path=PathKind.WRITTEN),
    flag("--save-interval", int, None, "save every N rollouts, at epoch ends and after the last; needs --save",
        bounds=AT_LEAST_ONE),
    flag("--keep-last", int, None, "keep only the newest N checkpoints, with their data states and exports; unset: all",
        bounds=AT_LEAST_ONE),
    switch("--async-save", "write checkpoints in the background", not_yet="saving in the background"),
    switch("--no-save-optim", "leave the optimizer state out; a run that resumes from it starts its optimizer fresh",
        idle=_NEVER_SAVES),
    flag("--save-hf", str, None, "with every save, also export to this Hugging Face directory; `{rollout_id}` is filled in; "
        "same quantisation as --hf-checkpoint", path=PathKind.WRITTEN, placeholders="rollout_id"),
))  # fmt: skip

WEIGHTS = Group("weights and training process", (
    # Process
    switch("--random-init", "start from random weights instead of those of --hf-checkpoint", idle=_STARTS_ELSEWHERE),
    flag("--initial-megatron-checkpoint", str, None, "where the weights come from when --load holds no checkpoint: as "
        "--ref-load, but no reference model; takes precedence over --ref-load there", path=PathKind.READ),
    flag("--train-env-vars", environment_variables, {}, "extra environment of the train actors, as JSON object; applied "
        "last. The actors set it themselves before they import anything, so that it stands in no log; only what the dynamic "
        "loader, the interpreter, the thread libraries and Ray read (LD_*, PYTHON*, OMP_*, RAY_* and the like) is handed to "
        "Ray, but none of its tokens and passwords"),
    switch("--trust-remote-code", "allow code shipped inside checkpoints, for tokenizer, config and engine alike"),
    switch("--model-args-from-hf", "derive all model-shape flags from the config of --hf-checkpoint; typed flags must agree "
        "with it"),
    switch("--release-train", "end the train actors during generation and recreate them from a checkpoint for each step; "
        "needs --save and --update-weight-transport disk, and saves every rollout",
        not_yet="ending the trainer during generation"),
    flag("--log-probs-chunk-size", int, -1, "rows per float32 chunk when computing log-probs; 0 or less: chosen so that a "
        "chunk stays under 256 MiB"),
    switch("--recompute-loss-function", "compute log-probs and loss once more in the backward pass instead of keeping their "
        "activations: less memory, more time", not_yet="recomputing the loss"),
    # Sync
    flag("--update-weight-mode", str, "full", "send all parameters, or only the bytes that changed since the last sync; "
        "delta needs --update-weight-transport disk", "full", "delta", not_yet=_DELTA_WEIGHT_TRANSPORT),
    flag("--update-weight-transport", str, "nccl", "direct transfer (process group, or shared handles with --colocate), or "
        "files in --update-weight-disk-dir", "nccl", "disk", not_yet=_WEIGHT_TRANSPORT_THROUGH_FILES),
    flag("--update-weight-buffer-size", int, 536870912, "upper size of one weight transfer bucket, in bytes",
        bounds=AT_LEAST_ONE),
    flag("--update-weights-interval", int, 1, "push weights every N rollouts, in the asynchronous loop; see also "
        "--max-weight-staleness", bounds=AT_LEAST_ONE, not_yet="the asynchronous loop"),
    switch("--update-weights-in-flight", "pause running requests, swap the weights and go on; the version of each token is "
        "recorded", not_yet="swapping weights under running requests"),
    # Disk sync
    flag("--update-weight-disk-dir", str, None, "directory that trainer and engines share; every sync writes one "
        "sub-directory (transport disk)", path=PathKind.WRITTEN, not_yet=_WEIGHT_TRANSPORT_THROUGH_FILES),
    switch("--update-weight-disk-keep-files", "keep published full checkpoints after the engines loaded them (transport "
        "disk)", not_yet=_WEIGHT_TRANSPORT_THROUGH_FILES),
    flag("--update-weight-delta-encoding", str, "xor", "payload of --update-weight-mode delta: bit difference, to be applied "
        "exactly once, or positions with their new bytes, repeatable", "xor", "overwrite", not_yet=_DELTA_WEIGHT_TRANSPORT),
    flag("--update-weight-delta-checksum", str, "xxh3-128", "digest of every tensor, checked after a delta was applied",
        "xxh3-128", "blake3", "adler32", not_yet=_DELTA_WEIGHT_TRANSPORT),
    flag("--update-weight-local-checkpoint-dir", str, None, "host-local Hugging Face checkpoint that is kept current and "
        "reloaded; delta cannot do without", path=PathKind.READ, not_yet=_WEIGHT_TRANSPORT_THROUGH_FILES),
    plug_in("--custom-update-weight-post-write-path", RANKS, "called on each rank after it wrote its sync files (transport "
        "disk)", not_yet=_WEIGHT_TRANSPORT_THROUGH_FILES),
    # Trained parameters
    flag("--only-train-params-name-list", str, None, "regular expressions (re.search); parameters that match none of them "
        "are frozen", nargs="+"),
    flag("--freeze-params-name-list", str, None, "regular expressions (re.search); parameters that match one are frozen; not "
        "with --only-train-params-name-list", nargs="+"),
    switch("--freeze-indexer", "freeze the weights that choose keys in sparse attention; an error when the model has none"),
    # Model
    plug_in("--custom-model-provider-path", RANKS, "function that builds the Megatron model",
        not_yet="an own model provider"),
    flag("--qwen-gdn-backend", str, "fla", "kernel family of gated-delta-net layers (Qwen3-Next and its kin)", "fla",
        "flashqla", not_yet="a gated-delta-net layer"),
    switch("--use-gated-attention", "another name of --attention-output-gate", not_yet="gated attention"),
    switch("--post-self-attn-layernorm", "one more norm after attention", not_yet=_FURTHER_NORM_IN_A_LAYER),
    switch("--post-mlp-layernorm", "one more norm after the MLP", not_yet=_FURTHER_NORM_IN_A_LAYER),
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
        "installed", "auto", "flash_attention_2", "flash_attention_3", "sdpa", "eager", not_yet=_FSDP_BACKEND),
    switch("--fsdp-cpu-offload", "with --train-backend fsdp, keep parameters and optimizer state in host memory",
        not_yet=_FSDP_BACKEND),
    switch("--optimizer-cpu-offload --offload-optimizer-states", "keep the optimizer state in host memory, with either "
        "backend"),
))  # fmt: skip

MEGATRON_HOOKS = Group("Megatron hooks", (
    plug_in("--custom-megatron-init-path", RANKS, "called after Megatron is initialised", not_yet=_HOOKING_INTO_MEGATRON),
    plug_in("--custom-megatron-before-log-prob-hook-path", RANKS, "called before each forward-only pass",
        not_yet=_HOOKING_INTO_MEGATRON),
    plug_in("--custom-megatron-before-train-step-hook-path", RANKS, "called before the forward pass of each optimizer step",
        not_yet=_HOOKING_INTO_MEGATRON),
    flag("--megatron-deepgemm-forward-layers", int, None, "decoder layers, counted from 0 over all pipeline stages, whose "
        "forward uses the engine's block-FP8 GEMM", not_yet=_BLOCK_FP_FORWARD_IN_THE_TRAINER, nargs="+"),
    flag("--megatron-deepgemm-forward-modules", str, None, "endings of the names of the modules to replace in those layers",
        not_yet=_BLOCK_FP_FORWARD_IN_THE_TRAINER, nargs="+"),
    flag("--megatron-deepgemm-moe-forward-layers", int, None, "decoder layers, counted from 0 over all pipeline stages, "
        "whose forward uses the engine's block-FP8 GEMM", not_yet=_BLOCK_FP_FORWARD_IN_THE_TRAINER, nargs="+"),
    flag("--megatron-deepgemm-moe-forward-modules", str, ["mlp.experts"], "endings of the names of the modules to replace in "
        "those layers", not_yet=_BLOCK_FP_FORWARD_IN_THE_TRAINER, nargs="+"),
))  # fmt: skip
