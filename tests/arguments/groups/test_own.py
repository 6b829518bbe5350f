"""Every flag of our own: name, type, attribute and default, written down by hand."""

import argparse

import pytest

from slime.arguments import build_parser
from slime.arguments.groups import OWN_GROUPS

BASE = ["--rollout-batch-size", "8"]
ON = object()  # a switch: off by default, True when given

# words on the command line, attribute (None: that of the flag), value, default.
FLAGS = [
    # cluster and placement
    ("--actor-num-nodes 2", None, 2, 1),
    ("--actor-num-gpus-per-node 4", None, 4, 8),
    ("--rollout-num-gpus 3", None, 3, None),
    ("--rollout-num-gpus-per-engine 2", None, 2, 1),
    ("--num-gpus-per-node 4", None, 4, 8),
    ("--colocate", None, ON, None),
    ("--offload", None, ON, None),
    ("--offload-train", None, True, None),
    ("--no-offload-train", "offload_train", False, None),
    ("--offload-rollout", None, True, None),
    ("--no-offload-rollout", "offload_rollout", False, None),
    ("--distributed-backend gloo", None, "gloo", "nccl"),
    ("--distributed-timeout-minutes 30", None, 30, 10),
    ("--engine-start-timeout 90", None, 90.0, None),
    ("--engine-load-timeout 80", None, 80.0, None),
    ("--train-start-timeout 70", None, 70.0, None),
    ("--checkpoint-publish-timeout 60", None, 60.0, None),
    ("--train-backend fsdp", None, "fsdp", "megatron"),
    ("--max-restarts 2", None, 2, 0),
    ("--check", None, ON, None),
    ("--dry-run", None, ON, None),
    ("--dry-run-json plan.json", None, "plan.json", None),
    ("--dry-run-gpu-memory-gib 141", None, 141.0, None),
    ("--dry-run-link-gbps 100", None, 100.0, 400.0),
    # weights and training process
    ("--random-init", None, ON, None),
    ('--train-env-vars {"A":"1"}', None, {"A": "1"}, {}),
    ("--qwen-gdn-backend flashqla", None, "flashqla", "fla"),
    ("--update-weight-mode delta", None, "delta", "full"),
    ("--update-weight-transport disk", None, "disk", "nccl"),
    ("--update-weight-buffer-size 1024", None, 1024, 536870912),
    ("--update-weights-interval 2", None, 2, 1),
    ("--update-weights-in-flight", None, ON, None),
    ("--update-weight-disk-dir d", None, "d", None),
    ("--update-weight-disk-keep-files", None, ON, None),
    ("--update-weight-delta-encoding overwrite", None, "overwrite", "xor"),
    ("--update-weight-delta-checksum blake3", None, "blake3", "xxh3-128"),
    ("--update-weight-delta-checksum adler32", None, "adler32", "xxh3-128"),
    ("--update-weight-local-checkpoint-dir d", None, "d", None),
    ("--custom-update-weight-post-write-path m.f", None, "m.f", None),
    ("--release-train", None, ON, None),
    ("--custom-model-provider-path m.f", None, "m.f", None),
    ("--recompute-loss-function", None, ON, None),
    ("--log-probs-chunk-size 1024", None, 1024, -1),
    ("--only-train-params-name-list a b", None, ["a", "b"], None),
    ("--freeze-params-name-list a b", None, ["a", "b"], None),
    ("--freeze-indexer", None, ON, None),
    ("--use-gated-attention", None, ON, None),
    ("--post-self-attn-layernorm", None, ON, None),
    ("--post-mlp-layernorm", None, ON, None),
    ("--allgather-cp", None, ON, None),
    ("--padded-vocab-size 512", None, 512, None),
    ("--trust-remote-code", None, ON, None),
    ("--model-args-from-hf", None, ON, None),
    # rollout
    ("--hf-checkpoint d", None, "d", None),
    ("--model-name qwen3", None, "qwen3", None),
    ("--rollout-function-path m.f", None, "m.f", "slime.rollout.sglang_rollout.generate_rollout"),
    ("--rollout-temperature 0.8", None, 0.8, 1.0),
    ("--rollout-top-p 0.9", None, 0.9, 1.0),
    ("--rollout-top-k 20", None, 20, -1),
    ("--rollout-max-context-len 100", None, 100, None),
    ("--rollout-max-prompt-len 100", None, 100, None),
    ("--rollout-max-response-len 100", None, 100, None),
    ("--rollout-skip-special-tokens", None, ON, None),
    ("--rollout-stop </a> </b>", None, ["</a>", "</b>"], None),
    ("--rollout-stop-token-ids 1 2", None, [1, 2], None),
    ("--rollout-shuffle", None, ON, None),
    ("--rollout-seed 7", None, 7, 42),
    ("--over-sampling-batch-size 16", None, 16, None),
    ("--keep-surplus-groups", None, ON, None),
    ("--dynamic-sampling-filter-path m.f", None, "m.f", None),
    ("--partial-rollout", None, ON, None),
    ("--mask-offpolicy-in-partial-rollout", None, ON, None),
    ("--custom-generate-function-path m.f", None, "m.f", None),
    ("--max-turns 3", None, 3, None),
    ("--rollout-sample-hook-path m.f --rollout-sample-hook-path m.g", None, ["m.f", "m.g"], []),
    ("--custom-rollout-log-function-path m.f", None, "m.f", None),
    ("--custom-eval-rollout-log-function-path m.f", None, "m.f", None),
    ("--buffer-filter-path m.f", None, "m.f", None),
    ("--rollout-sample-filter-path m.f", None, "m.f", None),
    ("--rollout-all-samples-process-path m.f", None, "m.f", None),
    ("--rollout-data-postprocess-path m.f", None, "m.f", None),
    ("--rollout-data-transport nixl", None, "nixl", "object-store"),
    ("--rollout-external-engine-addrs a:1 b:2", None, ["a:1", "b:2"], None),
    ("--keep-old-actor", None, ON, None),
    ("--async-buffer-size 2", None, 2, 1),
    ("--max-weight-staleness 2", None, 2, None),
    # fault tolerance
    ("--use-fault-tolerance", None, ON, None),
    ("--rollout-health-check-interval 5", None, 5.0, 30.0),
    ("--rollout-health-check-timeout 5", None, 5.0, 30.0),
    ("--rollout-health-check-first-wait 300", None, 300.0, 0.0),
    # data and batch
    ("--num-rollout 3", None, 3, None),
    ("--num-epoch 3", None, 3, None),
    ("--disable-rollout-global-dataset", "rollout_global_dataset", False, True),
    ("--data-source-path m.C", None, "m.C", "slime.rollout.data_source.RolloutDataSourceWithBuffer"),
    ("--prompt-data a.jsonl b.jsonl@[0:5]", None, ["a.jsonl", "b.jsonl@[0:5]"], None),
    ("--streaming-data", None, ON, None),
    ("--num-data-workers 2", None, 2, 0),
    ("--allow-bad-rows", None, ON, None),
    ("--apply-chat-template", None, ON, None),
    ('--apply-chat-template-kwargs {"enable_thinking":false}', None, {"enable_thinking": False}, {}),
    ("--input-key q", None, "q", None),
    ("--label-key a", None, "a", None),
    ('--multimodal-keys {"image":"image_file"}', None, {"image": "image_file"}, None),
    ("--metadata-key m", None, "m", "metadata"),
    ("--tool-key t", None, "t", "tools"),
    ("--fresh-data-state", None, ON, None),
    ("--start-rollout-id 5", None, 5, None),
    ("--rollout-batch-size 4", None, 4, 8),  # required, so it has no default: 8 is what BASE gives
    ("--n-samples-per-prompt 4", None, 4, 1),
    ("--global-batch-size 4", None, 4, None),
    ("--num-steps-per-rollout 4", None, 4, None),
    ("--micro-batch-size 4", None, 4, 1),
    ("--balance-data", None, ON, None),
    ("--balance-by-flops", None, ON, None),
    ("--use-dynamic-batch-size", None, ON, None),
    ("--packing first-fit", None, "first-fit", "best-fit"),
    ("--max-tokens-per-gpu 4096", None, 4096, None),
    ("--data-pad-size-multiplier 64", None, 64, 128),
    ("--loss-mask-type qwen3", None, "qwen3", "qwen"),
    ("--loss-mask-type qwen3_5", None, "qwen3_5", "qwen"),
    ("--loss-mask-type distill_qwen", None, "distill_qwen", "qwen"),
    # evaluation
    ("--eval-function-path m.f", None, "m.f", None),
    ("--eval-interval 5", None, 5, None),
    ("--eval-prompt-data a P --eval-prompt-data b Q", None, ["a", "P", "b", "Q"], None),
    ("--eval-config e.yaml", None, "e.yaml", None),
    ("--skip-eval-before-train", None, ON, None),
    ("--eval-input-key q", None, "q", None),
    ("--eval-label-key a", None, "a", None),
    ("--eval-tool-key t", None, "t", None),
    ("--n-samples-per-eval-prompt 4", None, 4, 1),
    ("--eval-temperature 0", None, 0.0, None),
    ("--eval-top-p 0.7", None, 0.7, None),
    ("--eval-top-k 5", None, 5, None),
    ("--eval-max-response-len 100", None, 100, None),
    ("--eval-max-prompt-len 100", None, 100, None),
    ("--eval-min-new-tokens 1", None, 1, None),
    ("--eval-max-context-len 100", None, 100, None),
    # checkpoints and algorithm
    ("--ref-load d", None, "d", None),
    ("--ref-ckpt-step 3", None, 3, None),
    ("--load d", None, "d", None),
    ("--save d", None, "d", None),
    ("--save-interval 3", None, 3, None),
    ("--keep-last 3", None, 3, None),
    ("--async-save", None, ON, None),
    ("--no-save-optim", None, ON, None),
    ("--save-hf d", None, "d", None),
    ("--initial-megatron-checkpoint d", None, "d", None),
    ("--seed 1", None, 1, 1234),
    ("--clip-grad 0.5", None, 0.5, 1.0),
    ("--calculate-per-token-loss", None, ON, None),
    ("--lr 1e-5", None, 1e-5, 1e-6),
    ("--num-critic-only-steps 3", None, 3, 0),
    ("--megatron-config-path r.yaml", None, "r.yaml", None),
    ("--loss-type sft_loss", None, "sft_loss", "policy_loss"),
    ("--loss-type custom_loss", None, "custom_loss", "policy_loss"),
    ("--custom-loss-function-path m.f", None, "m.f", None),
    *(
        (f"--advantage-estimator {name}", None, name, "grpo")
        for name in ("gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")
    ),
    ("--disable-compute-advantages-and-returns", "compute_advantages_and_returns", False, True),
    ("--custom-advantage-function-path m.f", None, "m.f", None),
    ("--eps-clip 0.1", None, 0.1, 0.2),
    ("--eps-clip-high 0.28", None, 0.28, None),
    ("--eps-clip-c 3", None, 3.0, None),
    ("--value-clip 0.1", None, 0.1, 0.2),
    ("--kl-coef 0.1", None, 0.1, 0.0),
    ("--use-kl-loss", None, ON, None),
    ("--kl-loss-coef 0.1", None, 0.1, 0.0),
    ("--kl-loss-type k2", None, "k2", "k1"),
    ("--kl-loss-type k3", None, "k3", "k1"),
    ("--kl-loss-type low_var_kl", None, "low_var_kl", "k1"),
    ("--use-unbiased-kl", None, ON, None),
    ("--ref-update-interval 4", None, 4, None),
    ("--entropy-coef 0.01", None, 0.01, 0.0),
    ("--gamma 0.99", None, 0.99, 1.0),
    ("--lambd 0.95", None, 0.95, 1.0),
    ("--discount-masked-tokens", None, ON, None),
    ("--normalize-advantages", None, ON, None),
    ("--disable-grpo-std-normalization", "grpo_std_normalization", False, True),
    ("--disable-rewards-normalization", "rewards_normalization", False, True),
    ("--use-rollout-entropy", None, ON, None),
    ("--get-mismatch-metrics", None, ON, None),
    ("--reset-optimizer-states", None, ON, None),
    ("--use-stateless-adam", None, ON, None),
    ("--use-rollout-logprobs", None, ON, None),
    ("--use-tis", None, ON, None),
    ("--tis-clip 3", None, 3.0, 2.0),
    ("--tis-clip-low 0.5", None, 0.5, 0.0),
    ("--tis-threshold 3", None, 3.0, None),
    ("--custom-tis-function-path m.f", None, "m.f", None),
    ("--custom-pg-loss-reducer-function-path m.f", None, "m.f", None),
    ("--use-routing-replay", None, ON, None),
    ("--use-rollout-routing-replay", None, ON, None),
    ("--use-opsm", None, ON, None),
    ("--opsm-delta 1e-3", None, 1e-3, 1e-4),
    ("--use-opd", None, ON, None),
    ("--opd-type sglang", None, "sglang", None),
    ("--opd-type megatron", None, "megatron", None),
    ("--opd-kl-coef 0.5", None, 0.5, 1.0),
    ("--opd-teacher-load d", None, "d", None),
    ("--opd-teacher-ckpt-step 3", None, 3, None),
    ("--true-on-policy-mode", None, ON, None),
    ("--mtp-num-layers 1", None, 1, None),
    ("--mtp-loss-scaling-factor 0.3", None, 0.3, 0.2),
    ("--enable-mtp-training", None, ON, None),
    # reward
    ("--rm-type math", None, "math", None),
    ("--reward-key score", None, "score", None),
    ("--eval-reward-key score", None, "score", None),
    ("--group-rm", None, ON, None),
    ("--rm-url http://h", None, "http://h", None),
    ("--custom-rm-path m.f", None, "m.f", None),
    ("--rm-model-path d", None, "d", None),
    ("--rm-concurrency 8", None, 8, 1024),
    ("--rm-timeout 8", None, 8.0, 600.0),
    ("--custom-reward-post-process-path m.f", None, "m.f", None),
    ("--custom-convert-samples-to-train-data-path m.f", None, "m.f", None),
    # logging, tracking, debugging
    ("--use-wandb", None, ON, None),
    ("--wandb-mode online", None, "online", None),
    ("--wandb-mode offline", None, "offline", None),
    ("--wandb-mode disabled", None, "disabled", None),
    *((f"--wandb-{name} x", None, "x", None) for name in ("dir", "key", "host", "team", "group", "project", "run-id")),
    ("--disable-wandb-random-suffix", "wandb_random_suffix", False, True),
    ("--wandb-always-use-train-step", None, ON, None),
    ("--use-tensorboard", None, True, None),
    ("--no-use-tensorboard", "use_tensorboard", False, None),
    ("--tb-project-name p", None, "p", None),
    ("--tb-experiment-name e", None, "e", None),
    ("--log-multi-turn", None, ON, None),
    ("--log-passrate", None, ON, None),
    ("--log-reward-category c", None, "c", None),
    ("--log-correct-samples", None, ON, None),
    ("--log-level DEBUG", None, "DEBUG", "INFO"),
    ("--log-samples-interval 3", None, 3, 10),
    ("--save-debug-rollout-data t", None, "t", None),
    ("--load-debug-rollout-data t", None, "t", None),
    ("--load-debug-rollout-data-subsample 0.5", None, 0.5, None),
    ("--load-forge-rollout-data t", None, "t", None),
    ("--save-debug-train-data t", None, "t", None),
    ("--dump-details d", None, "d", None),
    ("--debug-rollout-only", None, ON, None),
    ("--debug-train-only", None, ON, None),
    ("--check-weight-update-equal", None, ON, None),
    ("--memory-snapshot-dir d", None, "d", "."),
    ("--memory-snapshot-num-steps 3", None, 3, None),
    ("--memory-probe", None, True, None),
    ("--no-memory-probe", "memory_probe", False, None),
    ("--memory-recorder memray", None, "memray", "torch"),
    ("--record-memory-history", None, ON, None),
    ("--profile-target train_actor train_log_probs", None, ["train_actor", "train_log_probs"], ["train_overall"]),
    ("--ci-test", None, ON, None),
    ("--ci-disable-kl-checker", None, ON, None),
    ("--ci-train-rollout-logprob-abs-diff-threshold 0.2", None, 0.2, 0.1),
    ("--ci-save-grad-norm t", None, "t", None),
    ("--ci-load-grad-norm t", None, "t", None),
    # network, buffer service, Megatron hooks, top level
    ("--use-distributed-post", None, ON, None),
    ("--http-request-timeout 5", None, 5.0, 14400.0),
    ("--http-control-timeout 5", None, 5.0, 300.0),
    ("--http-max-retries 5", None, 5, 60),
    ("--abort-timeout 5", None, 5.0, 300.0),
    ("--rollout-buffer-url http://h", None, "http://h", None),
    ("--fetch-trajectory-retry-times 5", None, 5, -1),
    ("--rollout-task-type code", None, "code", "math"),
    ("--custom-megatron-init-path m.f", None, "m.f", None),
    ("--custom-megatron-before-log-prob-hook-path m.f", None, "m.f", None),
    ("--custom-megatron-before-train-step-hook-path m.f", None, "m.f", None),
    ("--megatron-deepgemm-forward-layers 0 1", None, [0, 1], None),
    ("--megatron-deepgemm-moe-forward-layers 0 1", None, [0, 1], None),
    ("--megatron-deepgemm-forward-modules a b", None, ["a", "b"], None),
    ("--megatron-deepgemm-moe-forward-modules a", None, ["a"], ["mlp.experts"]),
    ("--custom-config-path c.yaml", None, "c.yaml", None),
    # FSDP
    ("--gradient-checkpointing", None, ON, None),
    ("--context-parallel-size 2", None, 2, 1),
    *(
        (f"--attn-implementation {name}", None, name, "auto")
        for name in ("auto", "flash_attention_2", "flash_attention_3", "sdpa", "eager")
    ),
    ("--fsdp-cpu-offload", None, ON, None),
    ("--offload-optimizer-states", "optimizer_cpu_offload", ON, None),
    ("--optimizer-cpu-offload", None, ON, None),
]
# Megatron's spellings that have their place among our groups.
BESIDE_THE_TABLE = {"--ckpt-step", "--no-load-optim", "--no-load-rng", "--finetune"}


@pytest.fixture(scope="module")
def parser():
    return build_parser()


@pytest.fixture(scope="module")
def defaults(parser):
    return parser.parse_args(BASE)


@pytest.mark.parametrize("words, attribute, value, default", FLAGS, ids=[row[0] for row in FLAGS])
def test_flag(parser, defaults, words, attribute, value, default):
    attribute = attribute or words.split()[0].removeprefix("--").replace("-", "_")
    value, default = (True, False) if value is ON else (value, default)
    found = getattr(parser.parse_args([*BASE, *words.split(" ")]), attribute)
    assert (found, type(found)) == (value, type(value))
    before = getattr(defaults, attribute)
    assert (before, type(before)) == (default, type(default))


def test_the_table_is_complete():
    parser = argparse.ArgumentParser(add_help=False)
    for group in OWN_GROUPS:
        group.add_to(parser)
    flags = {option for action in parser._actions for option in action.option_strings}
    tested = {word for row in FLAGS for word in row[0].split() if word.startswith("--")}
    assert flags - tested == BESIDE_THE_TABLE
    assert tested <= flags


@pytest.mark.parametrize("words", ["--train-backend deepspeed", "--kl-loss-type k4", "--log-level LOUD", "--seed one"])
def test_values_outside_a_flags_range_are_refused(parser, words):
    with pytest.raises(ValueError, match=words.split()[0]):
        parser.parse_args([*BASE, *words.split()])
