"""The flags of a run, without its trainer's: machines, prompts, generation, evaluation, rewards, engines, trackers, dumps."""

from slime.arguments.flag import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    SECONDS,
    SEED,
    Bounds,
    Caller,
    Group,
    Idle,
    PathKind,
    either,
    flag,
    off,
    plug_in,
    switch,
    weight,
)
from slime.arguments.value_types import integers, json_object
from slime.utils.prompt_rows import prompt_limit

MANAGER, RANKS = Caller.MANAGER, Caller.RANKS

_NO_FAULT_TOLERANCE = Idle(lambda args: not args.use_fault_tolerance, "without --use-fault-tolerance")
_NO_RECORDING = Idle(lambda args: not args.record_memory_history, "without --record-memory-history")
_NO_TENSORBOARD = Idle(lambda args: not args.use_tensorboard, "without --use-tensorboard")
_OLD_ACTOR_UNREAD = (
    Idle(lambda args: args.loss_type == "sft_loss", "with --loss-type sft_loss"),
    Idle(
        lambda args: args.use_rollout_logprobs and args.loss_type == "policy_loss",
        "on the policy loss beside --use-rollout-logprobs, whose old log-probs are the engine's",
    ),
)
_NO_TRAINER = Idle(lambda args: not args.has_trainer, "without training ranks")
_NO_PARTIAL_ROLLOUT = Idle(lambda args: not args.partial_rollout, "without --partial-rollout")
_DYNAMIC_BATCHES = Idle(lambda args: args.use_dynamic_batch_size, "with --use-dynamic-batch-size")
_STATIC_BATCHES = Idle(lambda args: not args.use_dynamic_batch_size, "without --use-dynamic-batch-size")
_NEVER_EVALUATES = Idle(lambda args: args.eval_interval is None, "without --eval-interval")
_NO_PUSH = Idle(lambda a: not (a.has_trainer and (a.rollout_num_gpus or a.rollout_external)), "without a push")
_NOTHING_PREPARED = Idle(
    lambda args: not args.apply_chat_template and prompt_limit(args) is None,
    "on rows that are neither rendered (--apply-chat-template) nor measured (--rollout-max-prompt-len)",
)
_ALL_STAY = Idle(lambda a: prompt_limit(a) is None, "on chats: all stay, and --rollout-max-context-len cuts them")
_NO_SERVICE = Idle(lambda a: a.rollout_function_path.startswith("slime.rollout."), "with a function that never asks it")
_NO_REHEARSAL = Idle(lambda args: not args.rehearse, "without --rehearse")
_NO_CI_TEST = Idle(lambda args: not args.ci_test, "without --ci-test")
_NO_GATE = Idle(lambda a: not (a.ci_test or a.true_on_policy_mode), "without --ci-test or --true-on-policy-mode")

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
        "megatron", "fsdp"),
    flag("--max-restarts", int, 0, "most restarts of a run after failures, from its last checkpoint", bounds=AT_LEAST_ZERO),
    # Time limits
    flag("--engine-start-timeout", float, None, "time limit of an engine from its start until it is healthy, in seconds; "
        "unset: from the size of the weights of --hf-checkpoint", bounds=SECONDS),
    flag("--engine-load-timeout", float, None, "time limit of an engine that loads, puts in place or hashes all weights, in "
        "seconds; unset: from the size of the weights of --hf-checkpoint", bounds=SECONDS),
    flag("--train-start-timeout", float, None, "time limit of the training ranks from their start until they hold the model, "
        "in seconds; unset: from the size of the weights of --hf-checkpoint", bounds=SECONDS),
    flag("--checkpoint-write-timeout", float, None, "time limit of ranks that wait while others write a checkpoint or an "
        "export, in seconds, where --distributed-timeout-minutes is less; unset: from the size of the weights of "
        "--hf-checkpoint", bounds=SECONDS),
    flag("--checkpoint-publish-timeout", float, None, "time limit of publishing a checkpoint that is written, and deleting "
        "those that --keep-last lets go, in seconds; unset: from the size of the weights of --hf-checkpoint", bounds=SECONDS),
    # Offload
    switch("--colocate", "training and engines share the same GPUs and take turns; implies --offload-train and "
        "--offload-rollout unless those are typed"),
    switch("--offload", "shorthand for --offload-train --offload-rollout"),
    either("--offload-train", "move the trainer's memory to the host while engines work; unset: on with --colocate"),
    either("--offload-rollout", "free engine memory while the trainer works; unset: on with --colocate"),
    # Plan
    switch("--dry-run", "print the plan (placement, batch arithmetic, memory, weight sync, effective values), then exit; "
        "needs neither GPUs nor weights"),
    switch("--check", "check everything that a run checks before it starts Ray (flags, files, rows, plug-ins, this machine, "
        "remaining rollouts), print the resources that it needs from Ray, then exit"),
    flag("--dry-run-json", str, None, "write the plan to a JSON file; implies --dry-run", path=PathKind.HERE, metavar="FILE"),
    flag("--dry-run-gpu-memory-gib", float, None, "memory of one GPU in the plan, in GiB; unset: that of this machine's GPU, "
        "else 80", bounds=ABOVE_ZERO),
    switch("--rehearse", "run one step of some training ranks at the real size on fake GPU tensors, print its memory, waits "
        "and messages, then exit; needs neither GPUs nor weights"),
    flag("--rehearse-ranks", integers, None, "training ranks to rehearse, 0,7 for example, of the actor and of a critic; "
        "unset: the first one of every pipeline stage of each", bounds=AT_LEAST_ZERO, idle=_NO_REHEARSAL),
    flag("--dry-run-link-gbps", float, 400.0, "link speed that the plan uses for the cost of a weight sync, in Gbit/s",
        bounds=ABOVE_ZERO),
))  # fmt: skip

FAULT_TOLERANCE = Group("fault tolerance", (
    switch("--use-fault-tolerance", "watch engines and routers, replace dead ones, and record failing samples instead of "
        "stopping the run"),
    flag("--rollout-health-check-interval", float, 30.0, "pause between two checks while engines generate, in seconds",
        bounds=ABOVE_ZERO, idle=_NO_FAULT_TOLERANCE),
    flag("--rollout-health-check-timeout", float, 30.0, "an engine that has not answered a check after this many seconds "
        "counts as dead, unless it loads or compiles", bounds=Bounds(low=3, finite=True), idle=_NO_FAULT_TOLERANCE),
    flag("--rollout-health-check-first-wait", float, 0.0, "grace before the first check, in seconds; raise it when engines "
        "compile kernels for long", bounds=AT_LEAST_ZERO, idle=_NO_FAULT_TOLERANCE),
))  # fmt: skip

NETWORK = Group("network and buffer service", (
    # Requests
    flag("--http-request-timeout", float, 14400.0, "limit of one generation, filter or data-source call, s", bounds=ABOVE_ZERO),
    flag("--http-control-timeout", float, 300.0, "time limit of one control request, in seconds", bounds=SECONDS),
    flag("--http-max-retries", int, 60, "attempts of a request, 1 s apart; connection errors, 429, 5xx, 408 of the router",
        bounds=AT_LEAST_ONE),
    flag("--abort-timeout", float, 300.0, "time limit for ending the requests and tasks of a step, in seconds; the step does "
        "not wait for later ones", bounds=ABOVE_ZERO),
    switch("--use-distributed-post", "send requests by --num-gpus-per-node client processes on every node, in turn"),
    # Buffer service
    flag("--rollout-buffer-url", str, None, "address of the service from which slime_plugins.rollout_buffer takes groups",
        idle=_NO_SERVICE),
    flag("--fetch-trajectory-retry-times", int, -1, "polls of the buffer service for the groups of a request; -1: no limit"),
    flag("--rollout-task-type", str, "math", "generator that the buffer service starts: its TASK_TYPE"),
))  # fmt: skip

LOGGING = Group("logging and tracking", (
    flag("--log-level", str.upper, "INFO", "Python log level in every process of the run; SLIME_DEBUG=1 means DEBUG with "
        "tracebacks", "DEBUG", "INFO", "WARNING", "ERROR"),
    flag("--log-samples-interval", int, 10, "show the first and the last sample of the run's first rollout and of one in so "
        "many after it, and of every evaluation set likewise; 0: never", bounds=AT_LEAST_ZERO),
    switch("--log-passrate", "log pass@{1,2,4,...}"),
    switch("--log-multi-turn", "log the number of turns and response lengths without the text of tools"),
    flag("--log-reward-category", str, None, "entry of reward dictionaries whose values are counted"),
    switch("--log-correct-samples", "log lengths, and with --use-rollout-entropy the entropy, of correct responses apart"),
    either("--use-tensorboard", "write event files; unset: yes, unless another tracker is chosen or the package is missing"),
    flag("--tb-project-name", str, None, "first directory below outputs/; unset: slime. TENSORBOARD_DIR wins",
        idle=_NO_TENSORBOARD),
    flag("--tb-experiment-name", str, None, "second directory; unset: a time stamp", idle=_NO_TENSORBOARD),
    switch("--use-wandb", "report to Weights & Biases"),
    flag("--wandb-mode", str, None, "takes precedence over WANDB_MODE; offline writes to --wandb-dir only", "online",
        "offline", "disabled"),
    flag("--wandb-dir", str, None, "directory of W&B's files; unset: the run's output directory", path=PathKind.WRITTEN),
    flag("--wandb-key", str, None, "API key of W&B; better in WANDB_API_KEY. Never logged"),
    flag("--wandb-host", str, None, "address of your own W&B server"),
    flag("--wandb-team", str, None, "team (entity) of W&B that owns the run"),
    flag("--wandb-group", str, None, "group of runs, and first part of the run's name"),
    flag("--wandb-project", str, None, "project of W&B"),
    flag("--wandb-run-id", str, None, "id of the run, to continue one; unset: made by the driver and shared"),
    off("--disable-wandb-random-suffix", "wandb_random_suffix", "leave the 6 random characters out of the run's name"),
    switch("--wandb-always-use-train-step", "plot everything over optimizer steps instead of rollouts"),
))  # fmt: skip

DEBUGGING = Group("debugging", (
    # Modes
    switch("--debug-rollout-only", "engines only, no training ranks; not with --debug-train-only"),
    switch("--debug-train-only", "training ranks only: no engines, no evaluation, no weight push"),
    switch("--check-weight-update-equal", "check that engine weights equal trainer weights: by checksums at the start, and by "
        "log-probs after every push", idle=_NO_PUSH),
    # Dumps
    flag("--save-debug-rollout-data", str, None, "dump rollouts; `{rollout_id}` is filled in", path=PathKind.WRITTEN,
        placeholders="rollout_id"),
    flag("--load-debug-rollout-data", str, None, "train on dumped rollouts; implies --debug-train-only", path=PathKind.READ,
        placeholders="rollout_id"),
    flag("--load-debug-rollout-data-subsample", float, None, "share of the dump to train on, above 0 and at most 1: one half "
        "from its beginning, one from its end", needs="{--load-debug-rollout-data}, the dump to take it from"),
    flag("--load-forge-rollout-data", str, None, "dump that slime.rollout.forge_load.generate_rollout replays beside running "
        "engines; with `{rollout_id}`, one for each rollout, and rollout 0's if there is none", path=PathKind.READ,
        placeholders="rollout_id"),
    flag("--save-debug-train-data", str, None, "dump train batches; `{rollout_id}` and `{rank}` are filled in",
        path=PathKind.WRITTEN, placeholders="rollout_id rank"),
    flag("--dump-details", str, None, "directory for both dumps: rollout_data/{rollout_id}.pt and train_data/{rollout_id}.pt",
        path=PathKind.WRITTEN),
    # Memory and time
    either("--memory-probe", "before the first step, run one micro-batch of the longest allowed length; unset: on GPUs",
        idle=_NO_TRAINER),
    switch("--record-memory-history", "training ranks record their allocations, for a snapshot when memory runs out"),
    flag("--memory-recorder", str, "torch", "torch: GPU memory; memray: host memory", "torch", "memray", idle=_NO_RECORDING),
    flag("--memory-snapshot-dir", str, ".", "directory of the snapshots", path=PathKind.WRITTEN, idle=_NO_RECORDING),
    flag("--memory-snapshot-num-steps", int, None, "take a snapshot after this many rollouts since the first of the run, "
        "and stop recording", bounds=AT_LEAST_ONE, idle=_NO_RECORDING),
    flag("--profile-target", str, ["train_overall"], "parts to trace", "train_overall", "train_actor", "train_log_probs",
        nargs="+", idle=Idle(lambda args: not args.use_pytorch_profiler, "without --use-pytorch-profiler")),
    # Assertions
    switch("--ci-test", "stop if a metric leaves the range of a healthy test run"),
    switch("--ci-disable-kl-checker", "leave out --ci-test's checks of the KL", idle=_NO_CI_TEST),
    flag("--ci-train-rollout-logprob-abs-diff-threshold", float, 0.1, "largest difference between log-probs of engine and "
        "trainer: of the mean with --ci-test, of any token with --true-on-policy-mode", bounds=AT_LEAST_ZERO, idle=_NO_GATE),
    flag("--ci-save-grad-norm", str, None, "file for the gradient norm of every step: template with `{role}`, `{rollout_id}` "
        "and `{step_id}`", path=PathKind.WRITTEN, placeholders="role rollout_id step_id"),
    flag("--ci-load-grad-norm", str, None, "files of an earlier run to compare with, within 1 % or 0.01: template with "
        "`{role}`, `{rollout_id}` and `{step_id}`", path=PathKind.READ, placeholders="role rollout_id step_id"),
))  # fmt: skip

ROLLOUT = Group("rollout", (
    # Model
    flag("--hf-checkpoint", str, None, "Hugging Face directory: tokenizer, config, initial engine weights; also the initial "
        "training weights when --load and --ref-load give none. Engines get the trainer's weights before they are first "
        "used", path=PathKind.READ),
    flag("--model-name", str, None, "name of the model family for the conversion of weights; unset: from the config of "
        "--hf-checkpoint"),
    flag("--rollout-external-engine-addrs", str, None, "engines that this run did not start and will not stop; not with "
        "--prefill-num-servers or --sglang-config", metavar="HOST:PORT", nargs="+"),
    # Sampling
    flag("--rollout-temperature", float, 1.0, "sampling temperature, above 0; the trainer divides its logits by it too, but "
        "not in sft_loss", bounds=weight(2, "0.6 to 1.2", low=None)),
    flag("--rollout-top-p", float, 1.0, "nucleus mass; below 1 the trainer's log-probs cover the same kept set of tokens as "
        "the engine's"),
    flag("--rollout-top-k", int, -1, "sample among this many tokens only, as for --rollout-top-p; -1: off, but 2048 with a "
        "--rollout-top-p below 1"),
    flag("--rollout-max-context-len", int, None, "limit of prompt plus response, in tokens; keep it within the model's "
        "position limit; unset: a few tokens less than that, as engines take no more", bounds=AT_LEAST_ONE),
    flag("--rollout-max-prompt-len", int, None, "longer prompts are dropped when the data set loads; unset: "
        "--rollout-max-context-len minus 1, if given", bounds=AT_LEAST_ONE, idle=_ALL_STAY),
    flag("--rollout-max-response-len", int, None, "token budget of one response; unset: what the context limit leaves",
        bounds=AT_LEAST_ONE),
    switch("--rollout-skip-special-tokens", "drop special tokens from the response text"),
    flag("--rollout-stop", str, None, "stop strings", nargs="+"),
    flag("--rollout-stop-token-ids", int, None, "stop token ids", bounds=AT_LEAST_ZERO, nargs="+"),
    # Scheduling
    switch("--rollout-shuffle", "permute the data set every epoch"),
    flag("--rollout-seed", int, 42, "seed of --rollout-shuffle and of deterministic sampling", bounds=SEED),
    flag("--over-sampling-batch-size", int, None, "prompts that a step starts with, at least --rollout-batch-size; a group "
        "that a filter drops is replaced by one other; unset: --rollout-batch-size", bounds=AT_LEAST_ONE),
    switch("--keep-surplus-groups", "use finished groups beyond the target in the next step, one weight version older, "
        "instead of returning their prompts"),
    switch("--partial-rollout", "aborted responses go back to the buffer and continue later"),
    switch("--mask-offpolicy-in-partial-rollout", "with --partial-rollout, train only the tokens written after the "
        "resumption", idle=_NO_PARTIAL_ROLLOUT),
    flag("--max-turns", int, None, "most turns of the model in a dialogue; unset: no limit", bounds=AT_LEAST_ONE),
    flag("--rollout-data-transport", str, "object-store", "way of batches from the rollout manager to the training ranks: "
        "Ray's object store, or nixl (package of that name) from memory to memory", "object-store", "nixl", idle=_NO_TRAINER),
    # Staleness
    switch("--keep-old-actor", "keep a lagging copy of the actor that supplies the old log-probs", idle=_OLD_ACTOR_UNREAD),
    flag("--async-buffer-size", int, 1, "rollouts that train_async.py may generate or queue beyond the one being trained, at "
        "least 1", bounds=AT_LEAST_ONE, idle=Idle(lambda args: not args.asynchronous, "without train_async.py")),
    flag("--max-weight-staleness", int, None, "most weight versions that a sample is old; unset: any", bounds=AT_LEAST_ZERO),
    # Plug ins
    plug_in("--rollout-function-path", MANAGER, "function that produces one rollout step",
        "slime.rollout.sglang_rollout.generate_rollout"),
    plug_in("--dynamic-sampling-filter-path", MANAGER, "decides per group whether it is kept"),
    plug_in("--custom-generate-function-path", MANAGER, "replaces the generation of one sample inside the default loop"),
    plug_in("--custom-rollout-log-function-path", MANAGER, "custom rollout logging; a true result suppresses the default"),
    plug_in("--custom-eval-rollout-log-function-path", MANAGER, "custom logging of evaluations, likewise"),
    plug_in("--buffer-filter-path", MANAGER, "picks groups out of the buffer"),
    plug_in("--rollout-sample-filter-path", MANAGER, "marks samples whose loss is masked"),
    plug_in("--rollout-all-samples-process-path", MANAGER, "sees every finished group, filtered ones included"),
    plug_in("--rollout-data-postprocess-path", RANKS, "runs on each train rank after advantages, before training"),
    flag("--rollout-sample-hook-path", str, [], "plug-in path, repeatable and applied in order: hook on every generated "
        "sample before its reward", plug_in=MANAGER, action="append"),
))  # fmt: skip

DATA = Group("data and batches", (
    # Prompts
    flag("--prompt-data", str, None, ".jsonl or .parquet files, each with an optional slice and weight such as "
        "data.jsonl@[0:100]*2.5; read in order", nargs="+"),
    plug_in("--data-source-path", MANAGER, "data source class", "slime.rollout.data_source.RolloutDataSourceWithBuffer"),
    off("--disable-rollout-global-dataset", "rollout_global_dataset", "no built-in data set: the data source or the rollout "
        "function brings prompts"),
    switch("--streaming-data", "read rows on demand through an index of offsets instead of loading the files; same order"),
    flag("--num-data-workers", int, 0, "processes that render templates and tokenise prompts; 0: none beside the rollout "
        "manager", bounds=AT_LEAST_ZERO, idle=_NOTHING_PREPARED),
    switch("--allow-bad-rows", "skip and count unreadable rows instead of stopping at file:line"),
    switch("--apply-chat-template", "render prompts through the tokenizer's chat template, with generation prompt"),
    flag("--apply-chat-template-kwargs", json_object, {}, "extra template arguments, as JSON object"),
    flag("--input-key", str, None, "prompt field; unset: `prompt`, else `input`"),
    flag("--label-key", str, None, "label field; unset: `label` if the rows have it"),
    flag("--multimodal-keys", json_object, None, "the field with images (paths, data URIs, base64), as JSON object: "
        "{\"image\": \"images\"}; prompts have <image> for each"),
    flag("--metadata-key", str, "metadata", "field with the metadata object"),
    flag("--tool-key", str, "tools", "field with tool schemas for the chat template"),
    switch("--fresh-data-state", "start from the first row where a checkpoint has no readable data state of this data"),
    flag("--loss-mask-type", str, "qwen", "how supervised fine-tuning finds assistant tokens", "qwen", "qwen3", "qwen3_5",
        "distill_qwen"),
    # Batches
    flag("--num-rollout", int, None, "number of rollout steps", bounds=AT_LEAST_ZERO),
    flag("--num-epoch", int, None, "passes over the data, when --num-rollout is unset", bounds=AT_LEAST_ONE),
    flag("--start-rollout-id", int, None, "first rollout id; unset: from the checkpoint, else 0", bounds=AT_LEAST_ZERO),
    flag("--rollout-batch-size", int, None, "prompts per rollout step; must be given", bounds=AT_LEAST_ONE),
    flag("--n-samples-per-prompt", int, 1, "rollouts per prompt", bounds=AT_LEAST_ONE),
    flag("--global-batch-size", int, None, "rollouts (not samples) per optimizer step; --rollout-batch-size x "
        "--n-samples-per-prompt must be a multiple; unset: from --num-steps-per-rollout", bounds=AT_LEAST_ONE),
    flag("--num-steps-per-rollout", int, None, "optimizer steps per rollout step; sets --global-batch-size; neither given: "
        "one step", bounds=AT_LEAST_ONE),
    # Micro batches
    flag("--micro-batch-size", int, 1, "samples per micro-batch when batching is static", bounds=AT_LEAST_ONE,
        idle=_DYNAMIC_BATCHES),
    switch("--use-dynamic-batch-size", "pack samples into micro-batches up to a token budget",
        needs="{--max-tokens-per-gpu}, the token budget of a micro-batch (8192 is usual)"),
    flag("--max-tokens-per-gpu", int, None, "token budget of --use-dynamic-batch-size, per GPU; a micro-batch holds this "
        "times --context-parallel-size", bounds=AT_LEAST_ONE, idle=_STATIC_BATCHES),
    flag("--packing", str, "best-fit", "how dynamic batching fills micro-batches", "best-fit", "first-fit",
        idle=(_STATIC_BATCHES, Idle(lambda args: args.balance_by_flops, "with --balance-by-flops"))),
    switch("--balance-data", "equalise estimated FLOPs over data-parallel ranks"),
    switch("--balance-by-flops", "pack micro-batches by estimated FLOPs instead of tokens; implies --balance-data",
        needs="{--use-dynamic-batch-size}"),
    flag("--data-pad-size-multiplier", int, 128, "packed streams are padded to a multiple of tensor-parallel size times this",
        bounds=AT_LEAST_ONE),
))  # fmt: skip

EVALUATION = Group("evaluation", (
    flag("--eval-function-path", str, None, "plug-in path; unset: the rollout function", plug_in=MANAGER),
    flag("--eval-interval", int, None, "evaluate every N rollouts, at epoch ends and after the last; needs "
        "--eval-prompt-data or --eval-config", bounds=AT_LEAST_ONE),
    flag("--eval-prompt-data", str, None, "pairs `name path`; repeated flags add up; one lone path is named `aime`",
        idle=_NEVER_EVALUATES, action="extend", nargs="+"),
    flag("--eval-config", str, None, "YAML or JSON file of evaluation sets, each with own sampling and reward; replaces "
        "--eval-prompt-data", path=PathKind.HERE, idle=_NEVER_EVALUATES),
    switch("--skip-eval-before-train", "no evaluation before the first rollout"),
    flag("--eval-input-key", str, None, "prompt field in evaluation; unset: --input-key"),
    flag("--eval-label-key", str, None, "label field in evaluation; unset: --label-key"),
    flag("--eval-tool-key", str, None, "field with tool schemas in evaluation; unset: --tool-key"),
    flag("--n-samples-per-eval-prompt", int, 1, "responses per eval prompt", bounds=AT_LEAST_ONE),
    flag("--eval-temperature", float, None, "temperature; unset: rollout's; 0: greedy", bounds=weight(2, "0 to 1", low=None)),
    flag("--eval-top-p", float, None, "nucleus mass in evaluation; unset: the rollout's"),
    flag("--eval-top-k", int, None, "top k in evaluation; unset: the rollout's"),
    flag("--eval-max-response-len", int, None, "token budget of an eval response; unset: the rollout's", bounds=AT_LEAST_ONE),
    flag("--eval-max-prompt-len", int, None, "longer prompts of eval sets are dropped", bounds=AT_LEAST_ONE),
    flag("--eval-min-new-tokens", int, None, "least tokens of an eval response", bounds=AT_LEAST_ZERO),
    flag("--eval-max-context-len", int, None, "prompt plus response; unset: --rollout-max-context-len", bounds=AT_LEAST_ONE),
))  # fmt: skip

REWARD = Group("reward", (
    flag("--rm-type", str, None, "built-in grader; sample metadata may override it"),
    plug_in("--custom-rm-path", MANAGER, "own reward function or class"),
    flag("--reward-key", str, None, "entry to use when rewards are dictionaries"),
    flag("--eval-reward-key", str, None, "entry to use in evaluation; unset: --reward-key"),
    switch("--group-rm", "grade a whole prompt group in one call"),
    flag("--rm-url", str, None, "address of the service of --rm-type remote_rm, of a teacher, or for own functions"),
    flag("--rm-model-path", str, None, "model_path of class-style rewards; unset: --hf-checkpoint", path=PathKind.READ),
    flag("--rm-concurrency", int, 1024, "reward calls in flight; math, deepscaler, ifbench: at most one per core, up to 32",
        bounds=AT_LEAST_ONE),
    flag("--rm-timeout", float, 600.0, "limit of a reward call, in seconds; it is made twice before the sample fails",
        bounds=ABOVE_ZERO),
    plug_in("--custom-reward-post-process-path", MANAGER, "replaces group normalisation"),
    plug_in("--custom-convert-samples-to-train-data-path", MANAGER, "replaces the conversion to the train batch"),
))  # fmt: skip

SERVING = Group("SGLang engines and router", (
    flag("--sglang-router-ip", str, None, "use the router that runs at this address (IPv4, IPv6 or host name) instead of "
        "starting one; needs --sglang-router-port. It must not serve engines of others", metavar="ADDRESS"),
    flag("--sglang-router-port", int, None, "port of the router of --sglang-router-ip"),
    flag("--sglang-router-request-timeout-secs --router-request-timeout-secs", int, 14400, "seconds that our router gives one "
        "request; unset: --http-request-timeout, the limit of our client, where that is more. A router of --sglang-router-ip "
        "keeps its own limit", bounds=AT_LEAST_ONE),
    flag("--router-policy --sglang-router-policy --sglang-router-strategy", str, None, "how the router chooses the engine of a "
        "request; unset: its own default, cache_aware. consistent_hashing: by its session. power_of_two is refused",
        "cache_aware", "round_robin", "random", "power_of_two", "consistent_hashing"),
    flag("--router-api-key", str, None, "key that router and engines ask for; unset: one is generated for the run. Give that "
        "of the router of --sglang-router-ip if it has one. Never logged", metavar="KEY"),
    flag("--sglang-server-concurrency", int, 512, "requests in flight per engine; times the number of engines it bounds what "
        "the rollout generates at a time", bounds=AT_LEAST_ONE),
    flag("--prefill-num-servers", int, None, "engines of --rollout-num-gpus-per-engine GPUs that only prefill; the others "
        "decode. Excludes --sglang-config and --rollout-external-engine-addrs"),
    flag("--sglang-config", str, None, "YAML with the serving topology: models, groups of engines, overrides of server "
        "arguments for each. Excludes --prefill-num-servers and --rollout-external-engine-addrs", path=PathKind.HERE,
        metavar="FILE"),
))  # fmt: skip
