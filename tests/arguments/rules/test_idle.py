"""Flags that change nothing beside the others are warned about, once each."""

import pytest

from tests.support.args import parse

DYNAMIC = "--use-dynamic-batch-size --max-tokens-per-gpu 512"


@pytest.mark.parametrize(
    "words, warning",
    [
        ("--kl-loss-coef 0.1", "--kl-loss-coef: no effect without --use-kl-loss"),
        ("--ref-update-interval 4 --ref-load {tmp}/model",
         "--ref-update-interval: no effect without --use-kl-loss or --kl-coef"),
        ("--keep-old-actor --loss-type sft_loss", "--keep-old-actor: no effect with --loss-type sft_loss"),
        ("--use-tis --loss-type sft_loss", "--use-tis: no effect on the loss of --loss-type sft_loss"),
        ("--entropy-coef 0.1 --loss-type sft_loss", "--entropy-coef: no effect on the loss of --loss-type sft_loss"),
        ("--advantage-estimator ppo --loss-type sft_loss",
         "--advantage-estimator: no effect on the loss of --loss-type sft_loss"),
        ("--keep-old-actor --use-rollout-logprobs",
         "--keep-old-actor: no effect on the policy loss beside --use-rollout-logprobs, whose old log-probs are the engine's"),
        ("--opd-kl-coef 0.5", "--opd-kl-coef: no effect without --use-opd"),
        ("--tis-clip 3", "--tis-clip: no effect without --use-tis"),
        ("--custom-tis-function-path m.f", "--custom-tis-function-path: no effect without --use-tis"),
        ("--opsm-delta 0.1", "--opsm-delta: no effect without --use-opsm"),
        ("--gamma 0.9", "--gamma: no effect with an estimator that discounts nothing (ppo and reinforce_plus_plus do)"),
        ("--discount-masked-tokens", "--discount-masked-tokens: no effect with an estimator that counts no time steps"),
        ("--lambd 0.9", "--lambd: no effect without --advantage-estimator ppo"),
        ("--value-clip 0.1", "--value-clip: no effect without --advantage-estimator ppo"),
        ("--kl-coef 0.1 --ref-load {tmp}/model",
         "--kl-coef: no effect on the advantages of grpo, gspo and cispo: the KL is only logged"),
        ("--use-unbiased-kl", "--use-unbiased-kl: no effect without --use-kl-loss or --kl-coef"),
        ("--kl-loss-type k2", "--kl-loss-type: no effect without --use-kl-loss or --kl-coef"),
        ("--mask-offpolicy-in-partial-rollout", "--mask-offpolicy-in-partial-rollout: no effect without --partial-rollout"),
        (f"--micro-batch-size 4 {DYNAMIC}", "--micro-batch-size: no effect with --use-dynamic-batch-size"),
        ("--max-tokens-per-gpu 512", "--max-tokens-per-gpu: no effect without --use-dynamic-batch-size"),
        ("--num-epoch 2", "--num-epoch 2 is ignored: --num-rollout 4 is given"),
        ("--ckpt-step 7", "--ckpt-step: no effect without a Megatron checkpoint in --load"),
        ("--ckpt-step 7 --load {tmp}/model", "--ckpt-step: no effect without a Megatron checkpoint in --load"),
        ("--ref-ckpt-step 7", "--ref-ckpt-step: no effect without a Megatron checkpoint in --ref-load"),
        ("--ref-ckpt-step 7 --ref-load {tmp}/model", "--ref-ckpt-step: no effect without a Megatron checkpoint in --ref-load"),
        ("--random-init --ref-load {tmp}/model",
         "--random-init: no effect beside --load, --initial-megatron-checkpoint or --ref-load"),
        ("--no-save-optim", "--no-save-optim: no effect without --save"),
        ("--custom-loss-function-path m.f", "--custom-loss-function-path: no effect without --loss-type custom_loss"),
        ("--no-use-tensorboard --tb-project-name p", "--tb-project-name: no effect without --use-tensorboard"),
        ("--eval-prompt-data a {tmp}/prompts.jsonl", "--eval-prompt-data: no effect without --eval-interval"),
    ],
)  # fmt: skip
def test_warning(tmp_path, caplog, words, warning):
    parse(tmp_path, *words.format(tmp=tmp_path).split(), "--dry-run")
    assert [record.getMessage() for record in caplog.records].count(warning) == 1


@pytest.mark.parametrize(
    "words",
    [
        "--kl-loss-coef 0.00 --kl-loss-type low_var_kl",
        "--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k2 --use-unbiased-kl --ref-load {tmp}/model",
        "--partial-rollout --mask-offpolicy-in-partial-rollout",
        f"--micro-batch-size 1 {DYNAMIC}",
        "--save {tmp}/run --no-save-optim",
        "--random-init --load {tmp}/run --save {tmp}/run",
        "--loss-type sft_loss --advantage-estimator grpo --entropy-coef 0.0",
    ],
)
def test_no_warning(tmp_path, caplog, words):
    parse(tmp_path, *words.format(tmp=tmp_path).split(), "--dry-run")
    assert "no effect" not in caplog.text
