"""Numbers out of their bounds, far from what is usual, and flags that change nothing."""

import pytest

from slime.arguments import parse_args
from slime.arguments.flag import attribute_of
from slime.arguments.groups import BOUNDS, OWN_FLAGS, OWN_GROUPS
from slime.arguments.help_text import groups_of
from slime.arguments.megatron.effects import ACTS_WITH, FIXED, NO_EFFECT
from slime.arguments.megatron.names import MEANINGS
from slime.arguments.parser import build_parser
from slime.arguments.rules.not_built import rows
from slime.arguments.value_types import human_int
from slime.utils.errors import UserError
from tests.support.models.args import parse
from tests.support.tables.rules import assert_violation, violations


def test_other_rules_are_told_with_them(tmp_path):
    words = "--keep-last 0 --rollout-temperature 0 --eval-interval 3 --save-interval 2"
    assert violations(tmp_path, words) == [
        "--keep-last 0: it must be at least 1",
        "--rollout-temperature 0.0: training needs a value above 0 (1.0 is usual); --eval-temperature may be 0",
        "--eval-interval 3 needs data sets: give --eval-prompt-data name path, or --eval-config",
        "--save-interval 2 needs --save, the directory of checkpoints, such as --save outputs/checkpoints",
    ]


def test_what_a_flag_needs_is_another_flag(tmp_path):
    args = parse(tmp_path, "--dry-run")
    needing = {name: flag.needs for name, flag in OWN_FLAGS.items() if flag.needs is not None}
    assert len(needing) >= 8
    for name, needs in needing.items():
        other = attribute_of(needs.partition("}")[0].removeprefix("{"))
        assert other in vars(args) and other != name, name


@pytest.mark.parametrize("experts", ["", "moe-"])
def test_modules_that_multiply_in_fp8_need_the_layers_that_they_are_in(tmp_path, experts):
    """Without layers none would, and nothing would say so."""
    given = f"--megatron-deepgemm-{experts}forward"
    assert violations(tmp_path, f"{given}-modules mlp.experts mlp.router") == [
        f"{given}-modules mlp.experts mlp.router needs {given}-layers"
    ]


def test_no_rule_speaks_of_a_number_that_was_replaced(tmp_path):
    words = "--tensor-model-parallel-size 0 --actor-num-gpus-per-node 3 --eval-top-p 2"
    assert violations(tmp_path, words) == [
        "--tensor-model-parallel-size 0: it must be at least 1",
        "--eval-top-p 2.0: it is a share of the probability, above 0 and at most 1",
    ]


def test_a_longer_flag_is_another_flag(tmp_path):
    assert violations(tmp_path, "--lr -1 --lr-warmup-fraction 2") == [
        "--lr -1.0: it must be at least 0",
        "--lr-warmup-fraction 2.0: it must be at least 0 and below 1, 0.1 for example",
    ]


def test_all_of_them_are_named_before_anything_is_derived(tmp_path):
    assert violations(tmp_path, "--rollout-batch-size 0 --micro-batch-size 0") == [
        "--rollout-batch-size 0: it must be at least 1",
        "--micro-batch-size 0: it must be at least 1",
    ]


def test_a_missing_batch_size_has_no_consequences():
    with pytest.raises(UserError) as error:
        parse_args(argv=["--dry-run"])
    assert "--global-batch-size" not in str(error.value) and "--rollout-batch-size is needed" in str(error.value)


def test_every_number_of_ours_has_bounds():
    """A new flag gets bounds, or a reason why every number is right."""
    free = {
        "log_probs_chunk_size": "0 or less: chosen by the run",
        "fetch_trajectory_retry_times": "-1: no limit",
        "entropy_coef": "a negative weight asks for less entropy",
        "tis_threshold": "another name of --tis-clip",
        # Bounds that stand in rules of their own, beside what else is said of the flag.
        "rollout_temperature": "rules/rollout", "rollout_top_p": "rules/rollout", "rollout_top_k": "rules/rollout",
        "eval_temperature": "rules/rollout", "eval_top_p": "rules/rollout", "eval_top_k": "rules/rollout",
        "eps_clip_c": "rules/objective", "prefill_num_servers": "rules/serving", "sglang_router_port": "rules/serving",
        "load_debug_rollout_data_subsample": "rules/checkpoints",
    }  # fmt: skip
    ours = {group.title for group in OWN_GROUPS} | {"SGLang engines and router"}
    numbers = {
        action.dest
        for title, actions in groups_of(build_parser())
        if title in ours
        for action in actions
        if action.type in (int, float, human_int)
    }
    bounded = {name for name, bounds in BOUNDS.items() if bounds.low is not None}
    assert numbers - bounded == set(free)


def test_every_declared_attribute_exists():
    """What is declared under another name is never asked for."""
    existing = {action.dest for action in build_parser()._actions}
    declared = {
        *BOUNDS, *OWN_FLAGS, *FIXED, *NO_EFFECT, *MEANINGS, *(name for group in ACTS_WITH for name in group.names),
        *(row.name for row in rows() if "*" not in row.name),
    }  # fmt: skip
    assert declared - existing == set()


def test_bounds_hold_for_attributes_with_another_name_than_their_flag(tmp_path):
    assert_violation(tmp_path, "--norm-epsilon 0", "--norm-epsilon 0.0: it must be above 0")


@pytest.mark.parametrize("flag", ["--lr", "--rollout-temperature", "--kl-coef", "--entropy-coef", "--weight-decay"])
def test_far_too_large_weights_and_rates_are_warned_of(tmp_path, caplog, flag):
    words = [*f"--ref-load {tmp_path}/model --advantage-estimator ppo".split(), flag]
    parse(tmp_path, *words, "0.05")
    assert "far above what is usual" not in caplog.text
    parse(tmp_path, *words, "30")
    assert f"{flag} 30.0: that is far above what is usual" in caplog.text


DYNAMIC = "--use-dynamic-batch-size --max-tokens-per-gpu 512"
SFT = "slime.rollout.sft_rollout.generate_rollout"
BUFFER = "slime_plugins.rollout_buffer.rollout.generate_rollout"
EVALUATED = (
    "--eval-function-path slime.rollout.sglang_rollout.generate_rollout --eval-interval 2 --eval-prompt-data a "
    "{tmp}/prompts.jsonl"
)
OF_SAMPLES = "--custom-generate-function-path m.f --custom-rm-path m.f --rollout-sample-hook-path m.f"
FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
AS_THEY_ARE = "on rows that are neither rendered (--apply-chat-template) nor measured (--rollout-max-prompt-len)"


SKIPPED = "--disable-compute-advantages-and-returns"
CONVERTED = f"{SKIPPED} --custom-convert-samples-to-train-data-path m.f"
OWN_LOSS = f"{SKIPPED} --loss-type custom_loss --custom-loss-function-path m.f"
TEACHER = "--use-opd --opd-type megatron --opd-teacher-load {tmp}/model"


@pytest.mark.parametrize(
    "words, warning",
    [
        ("--kl-loss-coef 0.1", "--kl-loss-coef: no effect without --use-kl-loss"),
        ("--ref-update-interval 4 --ref-load {tmp}/model",
         "--ref-update-interval: no effect without --use-kl-loss or --kl-coef"),
        ("--keep-old-actor --loss-type sft_loss", "--keep-old-actor: no effect with --loss-type sft_loss"),
        ("--use-tis --loss-type sft_loss", "--use-tis: no effect on the loss of --loss-type sft_loss"),
        ("--get-mismatch-metrics --loss-type sft_loss",
         "--get-mismatch-metrics: no effect on the loss of --loss-type sft_loss"),
        ("--kl-coef 0.1 --ref-load {tmp}/model --loss-type sft_loss",
         "--kl-coef: no effect on the loss of --loss-type sft_loss"),
        ("--custom-advantage-function-path m.f --loss-type sft_loss",
         "--custom-advantage-function-path: no effect on the loss of --loss-type sft_loss"),
        (f"--normalize-advantages {CONVERTED}", f"--normalize-advantages: no effect with {SKIPPED}"),
        (f"--normalize-advantages {OWN_LOSS}", f"--normalize-advantages: no effect with {SKIPPED}"),
        (f"--custom-advantage-function-path m.f {OWN_LOSS}", f"--custom-advantage-function-path: no effect with {SKIPPED}"),
        (f"--kl-coef 0.1 --ref-load {{tmp}}/model {CONVERTED}", f"--kl-coef: no effect with {SKIPPED}"),
        (f"{TEACHER} {CONVERTED}", f"--use-opd: no effect with {SKIPPED}"),
        ("--entropy-coef 0.1 --loss-type sft_loss", "--entropy-coef: no effect on the loss of --loss-type sft_loss"),
        ("--advantage-estimator ppo --loss-type sft_loss",
         "--advantage-estimator: no effect on the loss of --loss-type sft_loss"),
        ("--keep-old-actor --use-rollout-logprobs",
         "--keep-old-actor: no effect on the policy loss beside --use-rollout-logprobs, whose old log-probs are the engine's"),
        ("--check-weight-update-equal --rollout-num-gpus 0 --router-api-key k",
         "--check-weight-update-equal: no effect without a push"),
        ("--check-weight-update-equal --debug-rollout-only",
         "--check-weight-update-equal: no effect without a push"),
        ("--opd-kl-coef 0.5", "--opd-kl-coef: no effect without --use-opd"),
        ("--tis-clip 3", "--tis-clip: no effect without --use-tis"),
        *((f"{words} --loss-type sft_loss", f"{words.split()[0]}: no effect on the loss of --loss-type sft_loss")
          for words in ("--eps-clip 0.1", "--eps-clip-high 0.1", "--custom-pg-loss-reducer-function-path m.f")),
        ("--eps-clip-c 3 --advantage-estimator cispo --loss-type sft_loss",
         "--eps-clip-c: no effect on the loss of --loss-type sft_loss"),
        ("--custom-tis-function-path m.f --loss-type sft_loss",
         "--custom-tis-function-path: no effect on the loss of --loss-type sft_loss"),
        ("--opsm-delta 0.1", "--opsm-delta: no effect without --use-opsm"),
        ("--use-opsm", "--use-opsm: no effect with one step per rollout, where old log-probs are those of the trained weights, "
         "without --use-rollout-logprobs"),
        ("--gamma 0.9", "--gamma: no effect with an estimator that discounts nothing (reinforce_plus_plus and ppo do)"),
        ("--discount-masked-tokens", "--discount-masked-tokens: no effect with an estimator that counts no time steps"),
        ("--lambd 0.9", "--lambd: no effect without --advantage-estimator ppo"),
        ("--value-clip 0.1", "--value-clip: no effect without --advantage-estimator ppo"),
        ("--kl-coef 0.1 --ref-load {tmp}/model",
         "--kl-coef: no effect on the advantages of grpo, gspo and cispo: the KL is only logged"),
        ("--use-unbiased-kl", "--use-unbiased-kl: no effect without --use-kl-loss"),
        ("--use-unbiased-kl --kl-coef 0.1 --ref-load {tmp}/model --advantage-estimator ppo",
         "--use-unbiased-kl: no effect without --use-kl-loss"),
        ("--eps-clip-c 3 --eps-clip 1 --advantage-estimator cispo",
         "--eps-clip-c: no effect with cispo, which clips one side alone"),
        ("--packing first-fit", "--packing: no effect without --use-dynamic-batch-size"),
        (f"--packing first-fit {DYNAMIC} --balance-by-flops", "--packing: no effect with --balance-by-flops"),
        ("--disable-grpo-std-normalization --advantage-estimator ppo",
         "--disable-grpo-std-normalization: no effect with an estimator that does not divide rewards by their deviation "
         "(grpo, gspo and cispo do)"),
        ("--disable-rewards-normalization --advantage-estimator ppo",
         "--disable-rewards-normalization: no effect with an estimator that does not centre rewards in their group "
         "(grpo, gspo, cispo and reinforce_plus_plus_baseline do)"),
        ("--rollout-max-prompt-len 9 --loss-type sft_loss",
         "--rollout-max-prompt-len: no effect on chats: all stay, and --rollout-max-context-len cuts them"),
        *((f"{words} --rollout-function-path {SFT} --loss-type sft_loss",
           f"{words.split()[0]}: no effect with {SFT}: it only takes chats")
          for words in ("--over-sampling-batch-size 8", "--keep-surplus-groups", f"--dynamic-sampling-filter-path {FILTER}",
                        f"--rollout-all-samples-process-path {FILTER}", "--partial-rollout", "--group-rm",
                        "--custom-generate-function-path m.f", "--custom-rm-path m.f", "--rollout-sample-hook-path m.f")),
        ("--partial-rollout --rollout-function-path slime.rollout.forge_load.generate_rollout",
         "--partial-rollout: no effect with slime.rollout.forge_load.generate_rollout: it replays a dump"),
        ("--rollout-buffer-url http://a:1", "--rollout-buffer-url: no effect with a function that never asks it"),
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
        ("--profile-target train_actor", "--profile-target: no effect without --use-pytorch-profiler"),
        ("--memory-probe --debug-rollout-only --rollout-num-gpus 1", "--memory-probe: no effect without training ranks"),
        ("--rollout-data-transport nixl --debug-rollout-only --rollout-num-gpus 1",
         "--rollout-data-transport: no effect without training ranks"),
        ("--memory-recorder memray", "--memory-recorder: no effect without --record-memory-history"),
        ("--memory-snapshot-num-steps 3", "--memory-snapshot-num-steps: no effect without --record-memory-history"),
        ("--eval-prompt-data a {tmp}/prompts.jsonl", "--eval-prompt-data: no effect without --eval-interval"),
        ("--num-data-workers 2", f"--num-data-workers: no effect {AS_THEY_ARE}"),
        ("--num-data-workers 2 --rollout-max-prompt-len 4 --loss-type sft_loss",
         f"--num-data-workers: no effect {AS_THEY_ARE}"),
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
        "--num-data-workers 2 --apply-chat-template",
        "--eps-clip-c 3 --packing best-fit --rollout-max-prompt-len 9 --over-sampling-batch-size 8",
        f"--packing first-fit {DYNAMIC}",
        "--disable-grpo-std-normalization --disable-rewards-normalization",
        "--disable-rewards-normalization --advantage-estimator reinforce_plus_plus_baseline --normalize-advantages",
        "--n-samples-per-prompt 1 --advantage-estimator ppo",
        # A function of the user's may read the teacher's log-probs.
        f"{TEACHER} {OWN_LOSS}",
        f"{TEACHER} {CONVERTED} --rollout-data-postprocess-path m.f",
        "--num-data-workers 2 --rollout-max-context-len 5",
        # Evaluation reads them.
        f"--rollout-function-path {SFT} --loss-type sft_loss {EVALUATED} {OF_SAMPLES}",
        f"--rollout-function-path {BUFFER} --rollout-buffer-url http://a:1 {EVALUATED} {OF_SAMPLES}",
    ],
)
def test_no_warning(tmp_path, caplog, words):
    parse(tmp_path, *words.format(tmp=tmp_path).split(), "--dry-run")
    assert "no effect" not in caplog.text
