"""Flags of the data and of generation: prompts, batches, sampling, evaluation, rewards."""

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
    switch,
    weight,
)
from slime.arguments.value_types import json_object

MANAGER, RANKS = Caller.MANAGER, Caller.RANKS

_OLD_ACTOR_UNREAD = (
    Idle(lambda args: args.loss_type == "sft_loss", "with --loss-type sft_loss"),
    Idle(
        lambda args: args.use_rollout_logprobs and args.loss_type == "policy_loss",
        "on the policy loss beside --use-rollout-logprobs, whose old log-probs are the engine's",
    ),
)
_NO_PARTIAL_ROLLOUT = Idle(lambda args: not args.partial_rollout, "without --partial-rollout")
_DYNAMIC_BATCHES = Idle(lambda args: args.use_dynamic_batch_size, "with --use-dynamic-batch-size")
_STATIC_BATCHES = Idle(lambda args: not args.use_dynamic_batch_size, "without --use-dynamic-batch-size")
_NEVER_EVALUATES = Idle(lambda args: args.eval_interval is None, "without --eval-interval")

ROLLOUT = Group("rollout", (
    # Model
    flag("--hf-checkpoint", str, None, "Hugging Face directory: tokenizer, config, initial engine weights; also the initial "
        "training weights when --load and --ref-load give none. Engines get the trainer's weights before they are first "
        "used", path=PathKind.READ),
    flag("--model-name", str, None, "name of the model family for the conversion of weights; unset: from the config of "
        "--hf-checkpoint"),
    flag("--rollout-external-engine-addrs", str, None, "engines that this run did not start and will not stop; not with "
        "--prefill-num-servers or --sglang-config", metavar="HOST:PORT",
        not_yet="serving by engines that the run did not start", nargs="+"),
    # Sampling
    flag("--rollout-temperature", float, 1.0, "sampling temperature, above 0; the trainer divides its logits by it too, but "
        "not in sft_loss", bounds=weight(2, "0.6 to 1.2", low=None)),
    flag("--rollout-top-p", float, 1.0, "nucleus mass; below 1 the trainer's log-probs cover the same kept set of tokens as "
        "the engine's"),
    flag("--rollout-top-k", int, -1, "sample among this many tokens only; -1: off"),
    flag("--rollout-max-context-len", int, None, "limit of prompt plus response, in tokens; keep it within the model's "
        "position limit; unset: that limit", bounds=AT_LEAST_ONE),
    flag("--rollout-max-prompt-len", int, None, "longer prompts are dropped when the data set loads; unset: "
        "--rollout-max-context-len minus 1, if given", bounds=AT_LEAST_ONE),
    flag("--rollout-max-response-len", int, None, "token budget of one response; unset: what the context limit leaves",
        bounds=AT_LEAST_ONE),
    switch("--rollout-skip-special-tokens", "drop special tokens from the response text"),
    flag("--rollout-stop", str, None, "stop strings", nargs="+"),
    flag("--rollout-stop-token-ids", int, None, "stop token ids", bounds=AT_LEAST_ZERO, nargs="+"),
    # Scheduling
    switch("--rollout-shuffle", "permute the data set every epoch"),
    flag("--rollout-seed", int, 42, "seed of that permutation and of deterministic sampling", bounds=SEED),
    flag("--over-sampling-batch-size", int, None, "prompts of the first draw of a step, at least --rollout-batch-size; what "
        "a filter drops is replaced one for one; unset: --rollout-batch-size", bounds=AT_LEAST_ONE),
    switch("--keep-surplus-groups", "use finished groups beyond the target in the next step, one weight version older, "
        "instead of returning their prompts"),
    switch("--partial-rollout", "aborted responses go back to the buffer and continue later"),
    switch("--mask-offpolicy-in-partial-rollout", "with --partial-rollout, train only the tokens written after the "
        "resumption", idle=_NO_PARTIAL_ROLLOUT),
    flag("--max-turns", int, None, "turns of a dialogue; custom generate functions read args.max_turns", bounds=AT_LEAST_ONE),
    flag("--rollout-data-transport", str, "object-store", "how batches travel from the rollout manager to the training ranks",
        "object-store", "nixl", not_yet="another transport of batches than the object store"),
    # Staleness
    switch("--keep-old-actor", "keep a lagging copy of the actor that supplies the old log-probs", idle=_OLD_ACTOR_UNREAD),
    flag("--async-buffer-size", int, 1, "rollouts that train_async.py may generate or queue beyond the one being trained, at "
        "least 1", bounds=AT_LEAST_ONE, not_yet="the asynchronous loop"),
    flag("--max-weight-staleness", int, None, "largest allowed age of a trained sample, in weight versions; older ones are "
        "generated again; unset: any", bounds=AT_LEAST_ZERO, not_yet="a limit on the age of samples"),
    # Plug ins
    plug_in("--rollout-function-path", MANAGER, "function that produces one rollout step",
        "slime.rollout.sglang_rollout.generate_rollout"),
    plug_in("--dynamic-sampling-filter-path", MANAGER, "decides per group whether it is kept"),
    plug_in("--custom-generate-function-path", MANAGER, "replaces the generation of one sample inside the default loop"),
    plug_in("--custom-rollout-log-function-path", MANAGER, "custom rollout logging; a true result suppresses the default"),
    plug_in("--custom-eval-rollout-log-function-path", MANAGER, "the same for evaluation"),
    plug_in("--buffer-filter-path", MANAGER, "picks groups out of the buffer"),
    plug_in("--rollout-sample-filter-path", MANAGER, "marks samples whose loss is masked"),
    plug_in("--rollout-all-samples-process-path", MANAGER, "sees every finished group, filtered ones included"),
    plug_in("--rollout-data-postprocess-path", RANKS, "runs on each train rank after advantages, before training"),
    flag("--rollout-sample-hook-path", str, [], "plug-in path, repeatable and applied in order: hook on every generated "
        "sample before its reward", plug_in=MANAGER, action="append"),
))  # fmt: skip

DATA = Group("data and batches", (
    # Prompts
    flag("--prompt-data", str, None, ".jsonl or .parquet files, each with an optional slice such as data.jsonl@[0:100]; read "
        "in order", nargs="+"),
    plug_in("--data-source-path", MANAGER, "data source class", "slime.rollout.data_source.RolloutDataSourceWithBuffer"),
    off("--disable-rollout-global-dataset", "rollout_global_dataset", "no built-in data set: the data source or the rollout "
        "function brings prompts"),
    switch("--streaming-data", "read rows on demand through an index of offsets instead of loading the files; same order",
        not_yet="reading data on demand"),
    flag("--num-data-workers", int, 0, "processes that render templates and tokenise prompts; 0: none beside the rollout "
        "manager", bounds=AT_LEAST_ZERO, not_yet="preparing prompts in further processes"),
    switch("--allow-bad-rows", "skip and count unreadable rows instead of stopping at file:line"),
    switch("--apply-chat-template", "render prompts through the tokenizer's chat template, with generation prompt"),
    flag("--apply-chat-template-kwargs", json_object, {}, "extra template arguments, as JSON object"),
    flag("--input-key", str, None, "prompt field; unset: `prompt`, else `input`"),
    flag("--label-key", str, None, "label field; unset: `label` if the rows have it"),
    flag("--multimodal-keys", json_object, None, "fields with media, as JSON object from media type to field: {\"image\": "
        "\"image_file\"}", not_yet="a data set with images, video or audio"),
    flag("--metadata-key", str, "metadata", "field with the metadata object"),
    flag("--tool-key", str, "tools", "field with tool schemas for the chat template"),
    switch("--fresh-data-state", "start the data source from zero although the checkpoint has no state for it"),
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
    switch("--use-dynamic-batch-size", "pack samples into micro-batches up to a token budget"),
    flag("--max-tokens-per-gpu", int, None, "that budget, in tokens per GPU; a micro-batch holds this times "
        "--context-parallel-size", bounds=AT_LEAST_ONE, idle=_STATIC_BATCHES),
    flag("--packing", str, "best-fit", "how dynamic batching fills micro-batches", "best-fit", "first-fit"),
    switch("--balance-data", "equalise estimated FLOPs over data-parallel ranks"),
    switch("--balance-by-flops", "pack micro-batches by estimated FLOPs instead of tokens; implies --balance-data"),
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
    flag("--eval-input-key", str, None, "unset: --input-key"),
    flag("--eval-label-key", str, None, "unset: --label-key"),
    flag("--eval-tool-key", str, None, "unset: --tool-key"),
    flag("--n-samples-per-eval-prompt", int, 1, "responses per eval prompt", bounds=AT_LEAST_ONE),
    flag("--eval-temperature", float, None, "unset: the rollout's; 0 is greedy", bounds=weight(2, "0 to 1", low=None)),
    flag("--eval-top-p", float, None, "unset: the rollout's"),
    flag("--eval-top-k", int, None, "unset: the rollout's"),
    flag("--eval-max-response-len", int, None, "unset: the rollout's", bounds=AT_LEAST_ONE),
    flag("--eval-max-prompt-len", int, None, "prompt length filter of eval sets", bounds=AT_LEAST_ONE),
    flag("--eval-min-new-tokens", int, None, "lower bound of generated tokens", bounds=AT_LEAST_ZERO),
    flag("--eval-max-context-len", int, None, "unset: --rollout-max-context-len", bounds=AT_LEAST_ONE),
))  # fmt: skip

REWARD = Group("reward", (
    flag("--rm-type", str, None, "built-in grader; sample metadata may override it"),
    plug_in("--custom-rm-path", MANAGER, "own reward function or class"),
    flag("--reward-key", str, None, "entry to use when rewards are dictionaries"),
    flag("--eval-reward-key", str, None, "the same in evaluation; unset: --reward-key"),
    switch("--group-rm", "grade a whole prompt group in one call"),
    flag("--rm-url", str, None, "address of a remote reward service, for own reward functions"),
    flag("--rm-model-path", str, None, "model_path of class-style rewards; unset: --hf-checkpoint", path=PathKind.READ),
    flag("--rm-concurrency", int, 1024, "reward calls in flight; of math and deepscaler at most one per core, up to 32",
        bounds=AT_LEAST_ONE),
    flag("--rm-timeout", float, 600.0, "limit of a reward call, in seconds; it is made twice before the sample fails",
        bounds=ABOVE_ZERO),
    plug_in("--custom-reward-post-process-path", MANAGER, "replaces group normalisation"),
    plug_in("--custom-convert-samples-to-train-data-path", MANAGER, "replaces the conversion to the train batch"),
))  # fmt: skip
