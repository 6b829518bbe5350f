"""Every rule about engines and router is broken once, and its message read."""

import re

import pytest

from slime.arguments import parse_args
from slime.arguments.server_flags import REFUSED
from slime.backends.sglang_utils.server_arguments import compute_server_arguments
from slime.models.families import undivided_by_engines
from slime.utils.errors import UserError
from tests.support.models.args import command_line, parse, write_config


def refusal(directory, words: str) -> str:
    with pytest.raises(UserError) as error:
        parse(directory, *words.split())
    return str(error.value)


def test_ranks_may_share_key_value_heads_and_attention_may_be_parallel_over_data(tmp_path):
    engine = ("--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "4", "--dry-run")
    parse(tmp_path, *engine)  # 2 key-value heads on 4 ranks
    with pytest.raises(UserError, match="4 tensor-parallel ranks cannot share"):
        parse_with_heads(tmp_path, 6, *engine)
    groups = (*engine, "--sglang-enable-dp-attention", "--sglang-dp-size", "2")
    parse_with_heads(tmp_path, 6, *groups, num_experts=4)
    with pytest.raises(UserError, match="no experts that the groups could share"):
        parse_with_heads(tmp_path, 6, *groups)


def parse_with_heads(directory, heads: int, *words: str, **config):
    base = command_line(directory)
    write_config(directory / "model", num_attention_heads=heads, **config)
    return parse_args(argv=[*base, *words])


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("num_gpus_per_engine: 4", None),
        ("num_gpus_per_engine: 1", "--sglang-dp-size 2 does not divide the engine's tensor-parallel size 1"),
        ("num_gpus_per_engine: 1, overrides: {dp_size: 1}", None),
        ("num_gpus_per_engine: 4, overrides: {enable_dp_attention: false}", "2 needs --sglang-enable-dp-attention"),
        ("num_gpus_per_engine: 4, overrides: {dp_size: 3}", "--sglang-dp-size 3 does not divide"),
    ],
)
def test_groups_of_attention_are_those_of_a_group_of_engines(tmp_path, group, message):
    serving = tmp_path / "serving.yaml"
    serving.write_text(f"sglang:\n  - name: actor\n    server_groups:\n      - {{num_gpus: 4, {group}}}\n")
    words = f"--sglang-config {serving} --rollout-num-gpus 4 --sglang-enable-dp-attention --sglang-dp-size 2 --dry-run"
    if message is None:
        parse_with_heads(tmp_path, 4, *words.split(), num_experts=4)
        return
    with pytest.raises(UserError, match=f"serving.yaml:4: .*{message}"):
        parse_with_heads(tmp_path, 4, *words.split(), num_experts=4)


@pytest.mark.parametrize(
    ("config", "stages", "message"),
    [
        ({"tie_word_embeddings": True}, 2, None),
        ({}, 4, "--sglang-pp-size 4: the model has 2 layers; give 2, or fewer"),
        ({"model_type": "llama", "tie_word_embeddings": False}, 2, None),
        ({"model_type": "llama", "tie_word_embeddings": True}, 1, None),
        (
            {"model_type": "llama", "tie_word_embeddings": True},
            2,
            "last stage of a model of type llama gets no head that is",
        ),
        ({"model_type": "qwen3_next"}, 2, "SGLang does not divide models of type qwen3_next; leave it out"),
        ({"model_type": "mimo"}, 2, "SGLang does not divide models of type mimo; leave it out"),
    ],
)
@pytest.mark.parametrize("by_file", [False, True], ids=["flag", "file"])
def test_models_that_have_no_stages_are_refused_by_a_plan_too(tmp_path, by_file, config, stages, message):
    base, engine = command_line(tmp_path), f"num_gpus: {stages}, num_gpus_per_engine: {stages}"
    write_config(tmp_path / "model", **config)
    serving = tmp_path / "serving.yaml"
    serving.write_text(
        f"sglang:\n  - name: actor\n    server_groups: [{{{engine}, overrides: {{pp_size: {stages}}}}}]\n"
    )
    words = f"--rollout-num-gpus {stages} --debug-rollout-only --dry-run"
    flags = f"--rollout-num-gpus-per-engine {stages} --sglang-pp-size {stages}"
    argv = [*base, *words.split(), *([f"--sglang-config={serving}"] if by_file else flags.split())]
    if message is None:
        parse_args(argv=argv)
        return
    with pytest.raises(UserError, match=f"serving.yaml:3: .*{message}" if by_file else message):
        parse_args(argv=argv)


def test_a_model_of_a_type_that_nobody_knows_has_stages_if_its_head_is_its_own():
    assert [*undivided_by_engines({"model_type": "unknown"}, 2)] == []
    (problem,) = undivided_by_engines({"model_type": "unknown", "tie_word_embeddings": True}, 2)
    assert "last stage of a model of type unknown gets no head" in problem
    assert [*undivided_by_engines({"model_type": ["qwen3"], "num_hidden_layers": "one"}, 2)] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--rollout-num-gpus 3 --rollout-num-gpus-per-engine 3 --sglang-pp-size 2",
            "--rollout-num-gpus-per-engine 3 is not divisible by --sglang-pp-size 2; .* --rollout-num-gpus-per-engine 6",
        ),
        (
            "--sglang-tp-size 2",
            "--sglang-tp-size 2 contradicts the tensor-parallel size 1 .*; .*--rollout-num-gpus-per-engine 2",
        ),
        (
            "--rollout-num-gpus 3 --rollout-num-gpus-per-engine 3",
            "--rollout-num-gpus-per-engine 3: 3 tensor-parallel ranks cannot share the model's 4 attention heads and 2 "
            "key-value heads evenly; 2 or 4 would do",
        ),
        (
            "--debug-rollout-only --rollout-num-gpus 8 --rollout-num-gpus-per-engine 8 --dry-run",
            "8 tensor-parallel ranks cannot share the model's 4 attention heads .*; 4 would do",
        ),
        ("--prefill-num-servers 1 --rollout-num-gpus 1", "(?m)of the 1 engines .* give 1, and --rollout-num-gpus 2$"),
        ("--prefill-num-servers 2 --rollout-num-gpus 2", "(?m)of the 2 engines .* give 1$"),
        ("--sglang-tp 2", "--sglang-tp-size 2 contradicts"),
        ("--sglang-dp-size 2", "--sglang-dp-size 2 needs --sglang-enable-dp-attention"),
        ("--router-dp-aware", "no engine has groups to choose among; drop it, or add --sglang-enable-dp-attention"),
        (
            "--sglang-dp-size 3 --sglang-enable-dp-attention --rollout-num-gpus 2 --rollout-num-gpus-per-engine 2",
            "--sglang-dp-size 3 does not divide the engine's tensor-parallel size 2; give --sglang-dp-size 1",
        ),
        ("--sglang-mem-fraction-static 80", "--sglang-mem-fraction-static 80.0: .* such as 0.8"),
        (
            "--sglang-context-length 256 --rollout-max-context-len 300",
            "--rollout-max-context-len 300 is above --sglang-context-length 256: .* give --sglang-context-length 300",
        ),
        (
            "--prefill-num-servers 1 --sglang-config serving.yaml",
            "--prefill-num-servers and --sglang-config exclude each other",
        ),
        (
            "--prefill-num-servers 1 --rollout-external-engine-addrs a:1",
            "--prefill-num-servers and --rollout-external-engine-addrs exclude each other",
        ),
        ("--prefill-num-servers 4 --rollout-num-gpus 4", "--prefill-num-servers 4: of the 4 engines .* give 1 to 3"),
        ("--prefill-num-servers 0 --rollout-num-gpus 4", "--prefill-num-servers 0: .* give 1 to 3"),
        ("--sglang-router-ip 10.0.0.1", "--sglang-router-ip and --sglang-router-port belong together"),
        ("--sglang-router-port 30000", "--sglang-router-ip and --sglang-router-port belong together"),
        (
            "--sglang-router-ip http://10.0.0.1 --sglang-router-port 1",
            r"--sglang-router-ip http://10.0.0.1: .* such as 10.0.0.1 or \[fd00::1\]",
        ),
        ("--sglang-router-ip 10.0.0.1:80 --sglang-router-port 1", "--sglang-router-ip 10.0.0.1:80: give the address alone"),
        ("--sglang-router-ip 10.0.0.1 --sglang-router-port 70000", "--sglang-router-port 70000: .* 1 to 65535"),
        (
            "--sglang-router-ip 10.0.0.1 --sglang-router-port 80 --router-cache-threshold 0.5",
            "--router-cache-threshold has no effect on the router of --sglang-router-ip 10.0.0.1",
        ),
        (
            "--sglang-router-ip 10.0.0.1 --sglang-router-port 80 --router-request-timeout-secs 5",
            "--sglang-router-request-timeout-secs has no effect on the router of",
        ),
        ("--router-cb-failure-threshold 3", "--router-cb-failure-threshold: .* add --no-router-disable-circuit-breaker"),
        (
            "--router-health-check-interval-secs 3 --router-health-failure-threshold 2",
            "--router-health-failure-threshold, --router-health-check-interval-secs: .* --no-router-disable-health-check",
        ),
        (
            "--router-queue-size 9 --router-rate-limit-tokens-per-second 2 --router-max-concurrent-requests 0",
            "--router-queue-size, --router-rate-limit-tokens-per-second: no effect .*; add --router-max-concurrent-requests",
        ),
        (
            "--router-balance-abs-threshold 9 --router-max-tree-size 9 --router-policy round_robin",
            "--router-balance-abs-threshold, --router-max-tree-size: no effect .*; add --router-policy cache_aware",
        ),
        ("--router-retry-max-retries 3 --router-disable-retries", "--router-retry-max-retries: .* --no-router-disable-retries"),
        (
            "--router-policy power_of_two --rollout-num-gpus 2",
            "--router-policy power_of_two: .* would choose at random; give round_robin, cache_aware or consistent_hashing",
        ),
        ("--router-policy power_of_two --rollout-external-engine-addrs a:1 b:1 --dry-run", "-policy power_of_two: .* random;"),
        (
            "--prefill-num-servers 2 --rollout-num-gpus 4 --router-prefill-policy power_of_two "
            "--router-decode-policy power_of_two",
            "--router-prefill-policy power_of_two: .* random; .*\n.*--router-decode-policy power_of_two: .* random; ",
        ),
        (
            "--prefill-num-servers 1 --rollout-num-gpus 3 --sglang-disaggregation-transfer-backend fake",
            "--sglang-disaggregation-transfer-backend fake moves no caches, and answers would be noise; give mooncake",
        ),
        ("--router-decode-policy random", "--router-decode-policy random has no effect: no engine only prefills or decodes"),
        (
            "--sglang-disaggregation-transfer-backend nixl",
            "--sglang-disaggregation-transfer-backend nixl has no effect: .* give --prefill-num-servers, or drop it",
        ),
        ("--sglang-num-reserved-decode-tokens 9", "-reserved-decode-tokens 9 has no effect: no engine only prefills"),
        ("--sglang-disaggregation-mode prefill", "-mode prefill: it follows from --prefill-num-servers, or the worker types"),
        ("--router-pd-disaggregation", "--router-pd-disaggregation: it follows from --prefill-num-servers"),
        ("--router-backend openai", "--router-backend openai: .* give sglang"),
        ("--sglang-host 0.0.0.0", "--sglang-host 0.0.0.0: .* SLIME_HOST_IP"),
        ("--sglang-skip-tokenizer-init", "--sglang-skip-tokenizer-init: rollouts need the text"),
        ("--sglang-delete-ckpt-after-loading", "--sglang-delete-ckpt-after-loading: it deletes --hf-checkpoint"),
        ("--router-worker-urls http://a:1", "--router-worker-urls http://a:1: the run starts its engines"),
    ],
)  # fmt: skip
def test_a_broken_rule_names_flags_values_and_a_way_out(tmp_path, words, message):
    assert re.search(message, refusal(tmp_path, words)), refusal(tmp_path, words)


ROLES = "--prefill-num-servers 1 --rollout-num-gpus"
STAGES = "--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2 --sglang-pp-size 2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{ROLES} 2 --use-rollout-routing-replay", "-replay beside .*: the engine that prefills keeps the experts of a"),
        (f"{ROLES} 2 --update-weights-in-flight", "-flight beside .*: a paused engine transfers no caches"),
        (
            f"{ROLES} 4 --rollout-num-gpus-per-engine 2 --sglang-pp-size 2",
            "--sglang-pp-size in engines that only prefill or decode: there a stage of SGLang carries out a push before it",
        ),
        (f"{STAGES} --use-rollout-routing-replay", "-replay with --sglang-pp-size 2: each stage keeps the experts"),
        (f"{STAGES} --sglang-speculative-algorithm EAGLE", "EAGLE with --sglang-pp-size 2: SGLang only drafts with stages in"),
        (f"{STAGES} --sglang-enable-hierarchical-cache", "-cache with --sglang-pp-size 2: the first stage reports that all"),
        (f"{STAGES} --sglang-enable-return-hidden-states", "-states with --sglang-pp-size 2: only the last stage has them"),
        (f"{STAGES} --sglang-return-hidden-states-mode last", "-mode last with --sglang-pp-size 2: only the last stage has"),
        ("--update-weights-in-flight --sglang-enable-hierarchical-cache", "-in-flight: a paused engine does not see that"),
        ("--sglang-encoder-only", "--sglang-encoder-only: engines of SGLang that only encode media take no weights"),
    ],
)  # fmt: skip
def test_what_sglang_cannot_do_together_is_refused_with_its_reason(tmp_path, words, message):
    """Also a plan has no engines that do it."""
    for argv in (words, f"{words} --dry-run"):
        assert re.search(message, refusal(tmp_path, argv)), refusal(tmp_path, argv)


@pytest.mark.parametrize(
    "words",
    [
        "--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2 --sglang-tp-size 2",
        "--sglang-dp-size 1 --sglang-pp 1",
        "--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2 --sglang-pp-size 2 --sglang-enable-mixed-chunk",
        # Inside, beside, and with GPUs of both kinds.
        "--colocate --actor-num-gpus-per-node 2 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2",
        "--colocate --actor-num-gpus-per-node 3 --num-gpus-per-node 8 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2 "
        "--use-dynamic-batch-size --max-tokens-per-gpu 512",
        "--colocate --rollout-num-gpus 2 --rollout-num-gpus-per-engine 2",
        "--sglang-context-length 300 --rollout-max-context-len 300 --sglang-mem-fraction-static 0.8",
        "--sglang-router-ip router.local --sglang-router-port 80 --router-policy random --router-api-key k",
        "--prefill-num-servers 1 --rollout-num-gpus 3 --router-decode-policy round_robin "
        "--sglang-disaggregation-transfer-backend nixl --sglang-disaggregation-ib-device mlx5_0",
        "--router-prefill-policy random --rollout-external-engine-addrs a:1 b:1 --dry-run",
        "--prefill-num-servers 1 --rollout-num-gpus 2 --sglang-router-ip 10.0.0.1 --sglang-router-port 80",
        "--router-cb-failure-threshold 3 --no-router-disable-circuit-breaker --router-backend sglang",
        "--router-queue-timeout-secs 9 --router-max-concurrent-requests 64 --router-cache-threshold 0.5",
        "--prefill-num-servers 1 --rollout-num-gpus 2 --router-cache-threshold 0.5 --router-policy random "
        "--router-prefill-policy cache_aware",
        "--no-sglang-skip-tokenizer-init",
    ],
)
def test_what_the_rules_allow(tmp_path, words):
    parse(tmp_path, *words.split())


GPUS = "--colocate --dry-run --dry-run-gpu-memory-gib 80 --num-gpus-per-node 8 --use-dynamic-batch-size --max-tokens-per-gpu 64"
# The first rank of each stage sends: 0, 4 and 8.
STAGES = "--num-gpus-per-node 16 --actor-num-gpus-per-node 12 --pipeline-model-parallel-size 3 --rollout-num-gpus 16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--actor-num-gpus-per-node 3 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 4",
            "--rollout-num-gpus-per-engine 4 with --colocate: an engine would have the GPUs 0 to 3 of the run, some beside "
            "those of the 3 training ranks.* with rank 0, .*; give --rollout-num-gpus-per-engine 1 or 2, or --update",
        ),
        # It has those of all ranks, and no others; the second one has none of the rank that sends; files know no devices.
        ("--actor-num-gpus-per-node 2 --rollout-num-gpus 2 --rollout-num-gpus-per-engine 2", None),
        ("--actor-num-gpus-per-node 3 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2", None),
        (
            "--actor-num-gpus-per-node 1 --rollout-num-gpus 2 --rollout-num-gpus-per-engine 2 "
            "--update-weight-transport disk --update-weight-disk-dir pushes",
            None,
        ),
        (
            f"{STAGES} --rollout-num-gpus-per-engine 8",
            "GPUs 8 to 15 .* with rank 8, .* give --rollout-num-gpus-per-engine 2 or 4, or",
        ),
        (f"{STAGES} --rollout-num-gpus-per-engine 4", None),
        # The senders 0 to 2.
        (f"{STAGES} --rollout-num-gpus-per-engine 8 --use-tp-pp-dp-mapping", None),
    ],
)
def test_on_gpus_an_engine_that_has_others_too_has_not_that_of_a_sender(tmp_path, words, message):
    """A group of NCCL has each GPU once."""
    base = command_line(tmp_path)
    write_config(tmp_path / "model", num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8)
    words = [*base, *GPUS.split(), *words.split()]
    if message is None:
        parse_args(argv=words)
    else:
        with pytest.raises(UserError, match=message):
            parse_args(argv=words)


@pytest.mark.parametrize(("group", "told"), [("num_gpus: 4", True), ("worker_type: placeholder, num_gpus: 4", False)])
def test_such_an_engine_of_a_file_is_told_by_its_line(tmp_path, group, told):
    """It would have those of the only rank; or nobody has them."""
    serving = tmp_path / "serving.yaml"
    groups = f"      - {{{group}, num_gpus_per_engine: 4}}\n      - {{num_gpus: 2, num_gpus_per_engine: 2}}\n"
    serving.write_text(f"sglang:\n  - name: actor\n    server_groups:\n{groups}")
    words = f"{GPUS} --rollout-num-gpus 6 --sglang-config {serving}"
    if told:
        assert "serving.yaml:4: num_gpus_per_engine 4 with --colocate: an engine would have the GPUs 0 to 3" in refusal(
            tmp_path, words
        )
    else:
        parse(tmp_path, *words.split())


def test_engines_of_a_file_that_train_tell_enough_kept_tokens(tmp_path):
    serving = tmp_path / "serving.yaml"
    group = "- {num_gpus: 1, num_gpus_per_engine: 1, overrides: {sampling_mask_max_tokens: %d}}"
    grader = f"  - name: grader\n    update_weights: false\n    server_groups:\n      {group % 8}\n"
    words = f"--rollout-num-gpus 2 --rollout-top-k 5000 --sglang-config {serving}"
    serving.write_text(f"sglang:\n  - name: actor\n    server_groups:\n      {group % 6000}\n{grader}")
    assert parse(tmp_path, *words.split()).rollout_top_k == 5000
    serving.write_text(f"sglang:\n  - name: actor\n    server_groups:\n      {group % 600}\n{grader}")
    assert "serving.yaml:4: --rollout-top-k 5000: an engine reports at most" in refusal(tmp_path, words)


def test_a_run_that_only_trains_ignores_the_flags_of_engines(tmp_path):
    words = (
        "--debug-train-only --sglang-tp-size 7 --sglang-host h --prefill-num-servers 9 --router-port 1 --sglang-dp 2"
    )
    parse(tmp_path, *words.split())


@pytest.mark.parametrize(("typed", "address"), [("fd00::1", "[fd00::1]"), ("[::1]", "[::1]"), ("10.0.0.1", "10.0.0.1")])
def test_an_ipv6_address_gets_brackets(tmp_path, typed, address):
    args = parse(tmp_path, "--sglang-router-ip", typed, "--sglang-router-port", "80")
    assert args.sglang_router_ip == address


def test_keys_are_not_repeated_in_a_refusal(tmp_path):
    message = refusal(tmp_path, "--sglang-api-key s3cret --sglang-admin-api-key s3cret2")
    assert "--sglang-api-key <redacted>: " in message and "--router-api-key" in message
    assert "s3cret" not in message


def test_refused_flags_exist(tmp_path):
    args = parse(tmp_path)
    assert [name for name in REFUSED if not hasattr(args, name)] == []


def test_a_server_field_has_the_same_value_under_all_its_names(tmp_path):
    words = ["--sglang-cuda-graph-bs", "1", "2", "--sglang-ep", "1", "--rollout-num-gpus", "1"]
    args = parse(tmp_path, *words)
    assert args.sglang_cuda_graph_bs == args.sglang_cuda_graph_bs_decode == [1, 2]
    assert args.sglang_ep == args.sglang_expert_parallel_size == args.sglang_ep_size == 1
    assert args.sglang_dp is None and args.origins["sglang_ep"] == "command line"
    typed = compute_server_arguments(args, 0, host="h", port=1, nccl_port=2, on_cpu=True).typed
    assert typed >= {"cuda_graph_bs_decode", "ep_size"} and not typed & {"cuda_graph_bs", "ep", "expert_parallel_size"}


def test_engines_need_a_number_of_gpus(tmp_path):
    words = command_line(tmp_path)
    del words[words.index("--rollout-num-gpus") : words.index("--rollout-num-gpus") + 2]
    with pytest.raises(UserError) as error:
        parse_args(argv=words)
    assert str(error.value) == (
        "--rollout-num-gpus is not set: give the number of GPUs for the engines, or --colocate, or --debug-train-only"
    )


def test_engines_need_a_model_directory(tmp_path):
    words = command_line(tmp_path)[3:]
    with pytest.raises(UserError) as error:
        parse_args(argv=[*words, "--random-init"])
    assert (
        "--hf-checkpoint is needed: the engines load their config and tokenizer from it"
        in str(error.value).splitlines()
    )


def test_external_engines_need_no_gpus_of_the_run(tmp_path):
    args = parse(tmp_path, "--rollout-external-engine-addrs", "10.0.0.5:30000", "http://[fd00::1]:30000", "--dry-run")
    assert args.rollout_external and args.rollout_external_engine_infos is None


MIMO = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
EAGLE = "--sglang-speculative-algorithm EAGLE"
STEPS = "--sglang-speculative-num-steps 3 --sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 4"
GROUPS = "--rollout-num-gpus-per-engine 2 --sglang-enable-dp-attention --sglang-dp-size 2"


def parse_drafting(directory, words: str, **entries):
    base = command_line(directory)
    write_config(directory / "model", **{**MIMO, **entries})
    return parse_args(argv=[*base, *words.split()])


@pytest.mark.parametrize(
    "words",
    [
        EAGLE,
        f"{EAGLE} {STEPS}",
        f"--sglang-speculative-algorithm NEXTN {STEPS} --colocate --update-weights-in-flight",
        f"{EAGLE} --enable-mtp-training",
        f"{EAGLE} --debug-rollout-only",
    ],
)
def test_engines_may_draft_with_the_layer_of_the_model(tmp_path, words):
    assert parse_drafting(tmp_path, words).sglang_speculative_algorithm in ("EAGLE", "NEXTN")


def test_groups_of_attention_lie_within_a_stage(tmp_path):
    engine = "--rollout-num-gpus 4 --rollout-num-gpus-per-engine 4 --sglang-pp-size 2 --dry-run"
    words = f"{engine} --sglang-enable-dp-attention --sglang-dp-size"
    args = parse_with_heads(tmp_path, 4, *words.split(), "2", num_experts=4)
    assert (args.sglang_pp_size, args.sglang_dp_size) == (2, 2)
    assert not any("--sglang-pp-size" in note for note in args.plan_notes)
    with pytest.raises(UserError, match="--sglang-dp-size 4 does not divide the engine's tensor-parallel size 2"):
        parse_with_heads(tmp_path, 4, *words.split(), "4", num_experts=4)


def test_a_router_chooses_among_the_groups_that_engines_have(tmp_path):
    words = f"{GROUPS} --rollout-num-gpus 4 --router-dp-aware"
    assert parse_drafting(tmp_path, words, num_experts=8).router_dp_aware
    with pytest.raises(UserError, match="--router-dp-aware beside .*the router would keep dead engines"):
        parse_drafting(tmp_path, f"{words} --prefill-num-servers 1", num_experts=8)


@pytest.mark.parametrize("roles", ["--rollout-num-gpus 2", "--rollout-num-gpus 4 --prefill-num-servers 1"])
@pytest.mark.parametrize("groups", ["", f"{GROUPS} --sglang-enable-dp-lm-head"], ids=["", "groups"])
@pytest.mark.parametrize("drafts", ["", EAGLE], ids=["", "drafts"])
def test_drafts_groups_of_attention_and_roles_go_together(tmp_path, drafts, groups, roles):
    args = parse_drafting(tmp_path, f"{drafts} {groups} {roles}", num_experts=8)
    assert (args.sglang_speculative_algorithm, args.sglang_enable_dp_attention) == (
        "EAGLE" if drafts else None, True if groups else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "entries", "message"),
    [
        (
            EAGLE,
            {"num_nextn_predict_layers": 0},
            "-algorithm EAGLE: engines draft with one layer .* has none that they can",
        ),
        (
            EAGLE,
            {"num_nextn_predict_layers": 2},
            "-algorithm EAGLE: engines draft with one layer .* has 2 that they can draft",
        ),
        (
            EAGLE,
            {"model_type": "qwen3"},
            "-algorithm EAGLE: engines draft with one layer .* has none that they can draft with",
        ),
        (
            STEPS,
            {},
            "--sglang-speculative-num-draft-tokens 4 has no effect without --sglang-speculative-algorithm; drop it",
        ),
        (
            f"{EAGLE} --sglang-speculative-num-steps 3",
            {},
            "go together: .* give all three, such as 3, 1 and 4, or none",
        ),
        (
            f"{EAGLE} --sglang-enable-deterministic-inference",
            {},
            "EAGLE with --sglang-enable-deterministic-inference .* drop",
        ),
        (
            f"{EAGLE} --true-on-policy-mode",
            {},
            r"\(which --true-on-policy-mode implies\): the answer for a seed would",
        ),
        (
            f"{EAGLE} --rollout-top-p 0.9",
            {},
            "--rollout-top-p 0.9, --rollout-top-k .*: engines that .* draft, do not report the kept",
        ),
        (
            f"{EAGLE} {GROUPS} --rollout-num-gpus 2",
            {"num_experts": 8},
            "EAGLE with --sglang-enable-dp-attention needs --sglang-enable-dp-lm-head: .* log-probs of its prompt; add it",
        ),
    ],
)
def test_what_does_not_go_with_drafts_is_refused(tmp_path, words, entries, message):
    with pytest.raises(UserError) as error:
        parse_drafting(tmp_path, words, **entries)
    assert re.search(message, str(error.value)), str(error.value)


def test_drafts_of_a_group_are_refused_by_its_line(tmp_path):
    path = tmp_path / "serving.yaml"
    path.write_text(
        "sglang:\n  - name: actor\n    server_groups:\n      - {num_gpus: 1, overrides: {speculative_num_steps: 3}}\n"
    )
    with pytest.raises(UserError, match=f"{path}:4: --sglang-speculative-num-steps 3 has no effect without"):
        parse_drafting(tmp_path, f"--sglang-config {path}")


@pytest.mark.parametrize(("prefill", "decode"), [(True, True), (False, False), (True, False), (False, True)])
def test_engines_that_prefill_and_decode_draft_together_or_not_at_all(tmp_path, prefill, decode):
    """Of a model whose weights stay each group says for itself whether it drafts."""
    path = tmp_path / "serving.yaml"
    groups = "".join(
        f"      - {{num_gpus: 1, worker_type: {role}, overrides: {{{'speculative_algorithm: EAGLE' if given else ''}}}}}\n"
        for role, given in {"prefill": prefill, "decode": decode}.items()
    )
    path.write_text(
        "sglang:\n  - {name: actor, server_groups: [{num_gpus: 1}]}\n"
        f"  - name: start\n    update_weights: false\n    server_groups:\n{groups}"
    )
    words = f"--sglang-config {path} --rollout-num-gpus 3"
    if prefill == decode:
        assert len(parse_drafting(tmp_path, words).served_models) == 2
        return
    with pytest.raises(
        UserError, match="--sglang-config: .* must all draft, or none of them: .* give speculative_algorithm to all"
    ):
        parse_drafting(tmp_path, words)


def test_replay_of_experts_wants_no_graphs_of_prefill_in_groups_of_attention(tmp_path):
    replay = "--num-experts 8 --use-rollout-routing-replay --debug-rollout-only"
    for graph in ("disabled", "breakable"):
        words = f"{GROUPS} {replay} --rollout-num-gpus 2 --sglang-cuda-graph-backend-prefill {graph}"
        if graph == "disabled":
            parse_with_heads(tmp_path, 4, *words.split(), num_experts=8)
            continue
        with pytest.raises(
            UserError, match="-backend-prefill breakable with .*: SGLang would return the experts of other tokens"
        ):
            parse_with_heads(tmp_path, 4, *words.split(), num_experts=8)
