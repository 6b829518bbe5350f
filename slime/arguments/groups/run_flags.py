"""Flags of the run as a whole: its machines, requests, log, trackers, dumps and proofs."""

from slime.arguments.flag import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    SECONDS,
    Group,
    Idle,
    PathKind,
    either,
    flag,
    off,
    switch,
)

_SHARED_GPUS = "sharing GPUs between training and engines"
_FAULT_TOLERANCE = "fault tolerance"
_BUFFER_SERVICE = "the client of the rollout buffer service"
_RECORDING_MEMORY = "recording memory"
_CHECKED_NUMBERS = "checking the numbers of a test run"

_NO_TENSORBOARD = Idle(lambda args: not args.use_tensorboard, "without --use-tensorboard")

CONFIGURATION = Group("configuration", (
    flag("--custom-config-path", str, None, "YAML file whose keys are merged into the arguments before anything is derived; "
        "it wins over the command line"),
))  # fmt: skip

CLUSTER = Group("cluster and placement", (
    # Sizes
    flag("--actor-num-nodes", int, 1, "nodes that run training ranks", bounds=AT_LEAST_ONE),
    flag("--actor-num-gpus-per-node", int, 8, "training ranks on each of those nodes, one GPU each; the world size is this "
        "times --actor-num-nodes", bounds=AT_LEAST_ONE),
    flag("--rollout-num-gpus", int, None, "GPUs given to inference, a multiple of --rollout-num-gpus-per-engine; unset: all "
        "actor GPUs with --colocate, none with --debug-train-only, else it must be given; 0 starts routers without engines",
        bounds=AT_LEAST_ZERO),
    flag("--rollout-num-gpus-per-engine", int, 1, "GPUs of one engine; its tensor-parallel size is this divided by its "
        "pipeline size", bounds=AT_LEAST_ONE),
    flag("--num-gpus-per-node", int, 8, "GPUs of one node, for the placement of engines; untyped with --colocate: "
        "--actor-num-gpus-per-node", bounds=AT_LEAST_ONE),
    flag("--distributed-backend", str, "nccl", "process-group backend of the training ranks; without GPUs it is always Gloo",
        "nccl", "gloo"),
    flag("--distributed-timeout-minutes", int, 10, "time limit of one collective, in minutes", bounds=AT_LEAST_ONE),
    flag("--train-backend", str, "megatron", "training engine: Megatron-Core, or PyTorch FSDP2 over the Hugging Face model",
        "megatron", "fsdp", not_yet="the FSDP backend"),
    flag("--max-restarts", int, 0, "how often training restarts from the last checkpoint (--save) after a training rank "
        "failed", bounds=AT_LEAST_ZERO, not_yet="restarting training by itself"),
    # Time limits
    flag("--engine-start-timeout", float, None, "time limit of an engine from its start until it is healthy, in seconds; "
        "unset: from the size of the weights of --hf-checkpoint", bounds=SECONDS),
    flag("--engine-load-timeout", float, None, "time limit of an engine that loads, puts in place or hashes all weights, in "
        "seconds; unset: from the size of the weights of --hf-checkpoint", bounds=SECONDS),
    flag("--train-start-timeout", float, None, "time limit of the training ranks from their start until they hold the model, "
        "in seconds; unset: from the size of the weights of --hf-checkpoint", bounds=SECONDS),
    flag("--checkpoint-publish-timeout", float, None, "time limit of publishing a checkpoint that is written, and deleting "
        "those that --keep-last lets go, in seconds; unset: from the size of the weights of --hf-checkpoint", bounds=SECONDS),
    # Offload
    switch("--colocate", "training and engines share the same GPUs and take turns; implies --offload-train and "
        "--offload-rollout unless those are typed", not_yet=_SHARED_GPUS),
    switch("--offload", "shorthand for --offload-train --offload-rollout",
        not_yet=_SHARED_GPUS),
    either("--offload-train", "move the trainer's memory to the host while engines work; unset: on with --colocate",
        not_yet=_SHARED_GPUS),
    either("--offload-rollout", "free engine memory while the trainer works; unset: on with --colocate",
        not_yet=_SHARED_GPUS),
    # Plan
    switch("--dry-run", "print the plan (placement, batch arithmetic, memory, weight sync, effective values), then exit; "
        "needs neither GPUs nor weights"),
    switch("--check", "do all that a run does before it starts Ray (flags, files, rows, plug-ins, this machine, what is left "
        "to do), say which resources it needs of Ray, then exit"),
    flag("--dry-run-json", str, None, "write the plan to this JSON file; implies --dry-run", path=PathKind.HERE,
        metavar="FILE"),
    flag("--dry-run-gpu-memory-gib", float, None, "memory of one GPU in the plan, in GiB; unset: that of this machine's GPU, "
        "else 80", bounds=ABOVE_ZERO),
    flag("--dry-run-link-gbps", float, 400.0, "link speed that the plan uses for the cost of a weight sync, in Gbit/s",
        bounds=ABOVE_ZERO),
))  # fmt: skip

FAULT_TOLERANCE = Group("fault tolerance", (
    switch("--use-fault-tolerance", "watch the engines, replace dead ones, and record failing samples instead of stopping "
        "the run", not_yet=_FAULT_TOLERANCE),
    flag("--rollout-health-check-interval", float, 30.0, "pause between two checks while engines generate, in seconds",
        bounds=ABOVE_ZERO, not_yet=_FAULT_TOLERANCE),
    flag("--rollout-health-check-timeout", float, 30.0, "an engine that has not answered a check after this many seconds is "
        "dead", bounds=ABOVE_ZERO, not_yet=_FAULT_TOLERANCE),
    flag("--rollout-health-check-first-wait", float, 0.0, "grace before the first check, in seconds; raise it when engines "
        "compile kernels for long", bounds=AT_LEAST_ZERO, not_yet=_FAULT_TOLERANCE),
))  # fmt: skip

NETWORK = Group("network and buffer service", (
    # Requests
    flag("--http-request-timeout", float, 14400.0, "one generation request, seconds", bounds=ABOVE_ZERO),
    flag("--http-control-timeout", float, 300.0, "one control request, seconds", bounds=ABOVE_ZERO),
    flag("--http-max-retries", int, 60, "attempts, 1 s apart; connection errors, 429 and 5xx only", bounds=AT_LEAST_ONE),
    flag("--abort-timeout", float, 300.0, "limit for bringing engines and tasks of a step to their end, in seconds; who has "
        "not answered by then is left behind", bounds=ABOVE_ZERO),
    switch("--use-distributed-post", "spread generation requests over one client process per node",
        not_yet="a client process on every node"),
    # Buffer service
    flag("--rollout-buffer-url", str, None, "address of an external rollout buffer service",
        not_yet=_BUFFER_SERVICE),
    flag("--fetch-trajectory-retry-times", int, -1, "polls of that service per step; -1: no limit",
        not_yet=_BUFFER_SERVICE),
    flag("--rollout-task-type", str, "math", "task name in requests to that service",
        not_yet=_BUFFER_SERVICE),
))  # fmt: skip

LOGGING = Group("logging and tracking", (
    flag("--log-level", str.upper, "INFO", "Python log level in every process of the run; SLIME_DEBUG=1 means DEBUG with "
        "tracebacks", "DEBUG", "INFO", "WARNING", "ERROR"),
    flag("--log-samples-interval", int, 10, "show the first and the last sample of the run's first rollout and of one in so "
        "many after it, and of every evaluation set likewise; 0: never", bounds=AT_LEAST_ZERO),
    switch("--log-passrate", "log pass@{1,2,4,...}"),
    switch("--log-multi-turn", "log the number of turns and response lengths without the text of tools",
        not_yet="counting the turns of dialogues"),
    flag("--log-reward-category", str, None, "entry of reward dictionaries whose values are counted"),
    switch("--log-correct-samples", "log the response lengths (and entropy, where it is computed) of correct samples apart"),
    either("--use-tensorboard", "write event files; unset: yes, unless another tracker is chosen or the package is missing"),
    flag("--tb-project-name", str, None, "first directory below outputs/; unset: slime. TENSORBOARD_DIR wins",
        idle=_NO_TENSORBOARD),
    flag("--tb-experiment-name", str, None, "second directory; unset: a time stamp", idle=_NO_TENSORBOARD),
    switch("--use-wandb", "report to Weights & Biases"),
    flag("--wandb-mode", str, None, "takes precedence over WANDB_MODE; offline writes to --wandb-dir only", "online",
        "offline", "disabled"),
    flag("--wandb-dir", str, None, "directory of its local files; unset: the run's output directory", path=PathKind.WRITTEN),
    flag("--wandb-key", str, None, "API key; better in WANDB_API_KEY. Never logged"),
    flag("--wandb-host", str, None, "address of an own server"),
    flag("--wandb-team", str, None, "team (entity) that owns the run"),
    flag("--wandb-group", str, None, "group of runs, and first part of the run's name"),
    flag("--wandb-project", str, None, "project"),
    flag("--wandb-run-id", str, None, "id of the run, to continue one; unset: made by the driver and shared"),
    off("--disable-wandb-random-suffix", "wandb_random_suffix", "leave the 6 random characters out of the run's name"),
    switch("--wandb-always-use-train-step", "plot everything over optimizer steps instead of rollouts"),
))  # fmt: skip

DEBUGGING = Group("debugging", (
    # Modes
    switch("--debug-rollout-only", "engines only, no training ranks; not with --debug-train-only"),
    switch("--debug-train-only", "training ranks only: no engines, no evaluation, no weight push"),
    switch("--check-weight-update-equal", "prove that engine weights equal trainer weights: by checksums at start, by a "
        "log-prob probe after every sync"),
    # Dumps
    flag("--save-debug-rollout-data", str, None, "dump rollouts; `{rollout_id}` is filled in", path=PathKind.WRITTEN,
        placeholders="rollout_id"),
    flag("--load-debug-rollout-data", str, None, "train on dumped rollouts; implies --debug-train-only", path=PathKind.READ,
        placeholders="rollout_id"),
    flag("--load-debug-rollout-data-subsample", float, None, "take this share of such a dump, above 0 and at most 1: its "
        "first and last halves"),
    flag("--load-forge-rollout-data", str, None, "dump that slime.rollout.forge_load.generate_rollout replays while the "
        "engines live", path=PathKind.READ, not_yet="replaying a dump beside living engines"),
    flag("--save-debug-train-data", str, None, "dump train batches; `{rollout_id}` and `{rank}` are filled in",
        path=PathKind.WRITTEN, placeholders="rollout_id rank"),
    flag("--dump-details", str, None, "directory for both dumps: rollout_data/{rollout_id}.pt and train_data/{rollout_id}.pt",
        path=PathKind.WRITTEN),
    # Memory and time
    either("--memory-probe", "before the first step, run one micro-batch of the longest allowed length; unset: on GPUs",
        not_yet="the probe of the longest micro-batch"),
    switch("--record-memory-history", "record allocations, for snapshots of the memory", not_yet=_RECORDING_MEMORY),
    flag("--memory-recorder", str, "torch", "what records them: GPU or host memory", "torch", "memray",
        not_yet=_RECORDING_MEMORY),
    flag("--memory-snapshot-dir", str, ".", "directory of the snapshots", path=PathKind.WRITTEN, not_yet=_RECORDING_MEMORY),
    flag("--memory-snapshot-num-steps", int, None, "stop recording after that many rollouts", bounds=AT_LEAST_ONE,
        not_yet=_RECORDING_MEMORY),
    flag("--profile-target", str, ["train_overall"], "what --use-pytorch-profiler traces", "train_overall", "train_actor",
        "train_log_probs", not_yet="profiling", nargs="+"),
    # Assertions
    switch("--ci-test", "stop when a number leaves the range that a healthy test run has",
        not_yet=_CHECKED_NUMBERS),
    switch("--ci-disable-kl-checker", "leave out --ci-test's checks of the KL", not_yet=_CHECKED_NUMBERS),
    flag("--ci-train-rollout-logprob-abs-diff-threshold", float, 0.1, "largest mean difference between log-probs of engine "
        "and trainer that --ci-test allows", bounds=AT_LEAST_ZERO, not_yet=_CHECKED_NUMBERS),
    flag("--ci-save-grad-norm", str, None, "file for the gradient norm of every step: template with `{role}`, `{rollout_id}` "
        "and `{step_id}`", path=PathKind.WRITTEN, placeholders="role rollout_id step_id",
        not_yet=_CHECKED_NUMBERS),
    flag("--ci-load-grad-norm", str, None, "files of an earlier run to compare with, within 1 % or 0.01: template with "
        "`{role}`, `{rollout_id}` and `{step_id}`", path=PathKind.READ, placeholders="role rollout_id step_id",
        not_yet=_CHECKED_NUMBERS),
))  # fmt: skip
