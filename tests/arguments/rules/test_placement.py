import pytest

from slime.arguments import parse_args
from slime.utils.errors import UserError
from tests.support.args import command_line, parse
from tests.support.rules import assert_violation


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "--debug-rollout-only --debug-train-only",
            "--debug-rollout-only and --debug-train-only exclude each other; drop one.",
        ),
        (
            "--debug-rollout-only --load-debug-rollout-data x.pt",
            "--debug-rollout-only and --debug-train-only exclude each other; drop one. --load-debug-rollout-data implies "
            "--debug-train-only",
        ),
        (
            "--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2",
            "--rollout-num-gpus 3 is no multiple of --rollout-num-gpus-per-engine 2; give 2 or 4",
        ),
        (
            "--rollout-num-gpus 1 --rollout-num-gpus-per-engine 2",
            "--rollout-num-gpus 1 is no multiple of --rollout-num-gpus-per-engine 2; give 2",
        ),
        (
            "--rollout-num-gpus 12 --rollout-num-gpus-per-engine 12",
            "--rollout-num-gpus-per-engine 12 is above --num-gpus-per-node 8 and no multiple of it: an engine fills whole "
            "nodes or a part of one",
        ),
        (
            "--rollout-external-engine-addrs 10.0.0.5",
            "--rollout-external-engine-addrs 10.0.0.5: give host:port, such as 10.0.0.5:30000",
        ),
        (
            "--attn-implementation sdpa",
            "--attn-implementation has no effect with --train-backend megatron; drop it",
        ),
        ("--fsdp-cpu-offload", "--fsdp-cpu-offload has no effect with --train-backend megatron; drop it"),
        (
            "--train-backend fsdp --tensor-model-parallel-size 2 --actor-num-gpus-per-node 2",
            "--tensor-model-parallel-size 2: --train-backend fsdp shards parameters over all ranks instead; give 1, or "
            "--train-backend megatron",
        ),
        (
            "--train-backend fsdp --advantage-estimator ppo",
            "--advantage-estimator ppo: --train-backend fsdp has no critic; give grpo, or --train-backend megatron",
        ),
        (
            "--train-backend fsdp --use-opd --opd-type megatron --opd-teacher-load {tmp}/model",
            "--opd-type megatron needs --train-backend megatron; with fsdp give --opd-type sglang",
        ),
    ],
)  # fmt: skip
def test_rule(tmp_path, words, message):
    assert_violation(tmp_path, words, message)


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
