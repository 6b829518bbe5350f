import pytest

from tests.support.args import parse
from tests.support.rules import assert_violation


def asks_the_teacher(args, sample, sampling_params):
    """Stands for a generate function of the user's."""


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "--loss-type custom_loss",
            "--loss-type custom_loss needs --custom-loss-function-path, such as my_losses.py:my_loss",
        ),
        (
            "--eps-clip 2",
            "--eps-clip 2.0: the probability ratio may fall to 1 - 2.0, and it is never below 0; give at most 1, which "
            "switches the lower bound off (0.2 is usual)",
        ),
        ("--eps-clip-c 0.5", "--eps-clip-c 0.5: it must be above 1 (3.0 is usual)"),
        (
            "--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.2 --ref-load {tmp}/model",
            "--kl-coef 0.1 and --kl-loss-coef 0.2 count the KL twice, in the reward and in the loss; set one of them to 0",
        ),
        (
            "--kl-coef 0.1",
            "--kl-coef 0.1 needs --ref-load, the reference checkpoint; --hf-checkpoint's directory would do",
        ),
        ("--use-kl-loss", "--use-kl-loss needs --ref-load, the reference checkpoint; --hf-checkpoint's directory would do"),
        ("--ref-update-interval 4", "--ref-update-interval 4 needs --ref-load, the reference checkpoint"),
        (
            "--advantage-estimator reinforce_plus_plus",
            "--advantage-estimator reinforce_plus_plus needs --normalize-advantages",
        ),
        (
            "--advantage-estimator reinforce_plus_plus_baseline",
            "--advantage-estimator reinforce_plus_plus_baseline needs --normalize-advantages",
        ),
        (
            "--num-critic-only-steps 2",
            "--num-critic-only-steps 2: --advantage-estimator grpo has no critic; give --advantage-estimator ppo, or 0",
        ),
        (
            "--enable-mtp-training",
            "--enable-mtp-training needs --mtp-num-layers, the number of those layers in the model (1 is usual)",
        ),
        (
            "--use-rollout-logprobs --use-tis",
            "--use-rollout-logprobs and --use-tis exclude each other: with the engine's log-probs as old ones there is no "
            "difference left to correct; keep one",
        ),
        ("--tis-clip-low 3", "--tis-clip-low 3.0 is above --tis-clip 2.0; 0 is usual"),
        (
            "--tis-threshold 3 --tis-clip 4",
            "--tis-threshold 3.0 and --tis-clip 4.0 are two names of one bound with two values; keep one",
        ),
        (
            "--use-opd",
            "--use-opd needs --opd-type: sglang (teacher behind --rm-url) or megatron (teacher in the trainer)",
        ),
        (
            "--use-opd --opd-type megatron",
            "--opd-type megatron needs --opd-teacher-load, the teacher's checkpoint; or give --opd-type sglang",
        ),
        (
            "--use-opd --opd-type sglang --opd-teacher-load /t",
            "--opd-type sglang: the teacher is behind --rm-url; drop --opd-teacher-load /t, or give --opd-type megatron",
        ),
        (
            "--use-opd --opd-type sglang",
            "--opd-type sglang needs a function that asks the teacher: --custom-rm-path "
            "slime.rollout.on_policy_distillation.reward_func, or one of yours that sets teacher_log_probs",
        ),
        (
            "--use-opd --opd-type sglang --custom-rm-path slime.rollout.on_policy_distillation.reward_func",
            "--custom-rm-path slime.rollout.on_policy_distillation.reward_func needs --rm-url, the teacher's address, such as "
            "http://10.0.0.1:30000",
        ),
        (
            "--opd-teacher-load /t",
            "--opd-teacher-load /t has no effect without --use-opd; add --use-opd --opd-type megatron, or drop it",
        ),
    ],
)  # fmt: skip
def test_rule(tmp_path, words, message):
    assert_violation(tmp_path, words, message)


def test_the_lower_bound_of_cispo_is_warned_about(tmp_path, caplog):
    parse(tmp_path, "--advantage-estimator", "cispo", "--dry-run")
    assert (
        "--advantage-estimator cispo with --eps-clip 0.2: its lower bound is normally off (--eps-clip 1.0)"
        in caplog.text
    )
    caplog.clear()
    parse(tmp_path, "--advantage-estimator", "cispo", "--eps-clip", "1", "--dry-run")
    assert caplog.text == ""


def test_groups_of_one_have_no_advantages(tmp_path, caplog):
    args = parse(tmp_path, "--n-samples-per-prompt", "1")
    assert args.grpo_std_normalization is False
    assert "all advantages are zero" in caplog.text
    caplog.clear()
    parse(tmp_path, "--n-samples-per-prompt", "1", "--disable-rewards-normalization")
    assert caplog.text == ""
    whitened = ("--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages")
    parse(tmp_path, "--n-samples-per-prompt", "1", *whitened, "--dry-run")
    assert caplog.text == "", "its rewards are not centred"


def test_an_actor_that_never_trains_is_warned_about(tmp_path, caplog):
    words = ("--advantage-estimator", "ppo", "--num-rollout", "4", "--dry-run", "--num-critic-only-steps")
    parse(tmp_path, *words, "4")
    assert "--num-critic-only-steps 4 of --num-rollout 4: the critic alone is trained, the actor never" in caplog.text
    caplog.clear()
    parse(tmp_path, *words, "3")
    assert "the actor never" not in caplog.text


def test_mismatch_metrics_need_no_function(tmp_path):
    parse(tmp_path, "--get-mismatch-metrics")


@pytest.mark.parametrize("estimator", ["gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_run_takes_the_estimator(tmp_path, estimator):
    parse(tmp_path, "--advantage-estimator", estimator, "--normalize-advantages", "--eps-clip", "1.0")


@pytest.mark.parametrize(
    "words",
    [
        "--use-tis --tis-clip 3 --tis-clip-low 0.5", "--use-tis --tis-threshold 3", "--use-opsm --opsm-delta 0.1",
        "--use-tis --custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function",
        "--kl-coef 0.1 --ref-load {tmp}/model --advantage-estimator reinforce_plus_plus --gamma 0.9 "
        "--discount-masked-tokens --normalize-advantages",
        "--use-opd --opd-type megatron --opd-teacher-load {tmp}/model --opd-kl-coef 0.5",
        "--use-opd --opd-type sglang --rm-url http://10.0.0.1:30000 "
        "--custom-rm-path slime.rollout.on_policy_distillation.reward_func",
        "--use-opd --opd-type sglang --custom-generate-function-path {file}:asks_the_teacher",
    ],
)  # fmt: skip
def test_a_run_takes_the_objective_without_a_warning(tmp_path, caplog, words):
    parse(tmp_path, *words.format(tmp=tmp_path, file=__file__).split())
    assert caplog.text == ""


def test_a_served_teacher_at_another_temperature_is_warned_about(tmp_path, caplog):
    words = "--use-opd --opd-type sglang --rm-url http://10.0.0.1:30000 --rollout-temperature 0.7"
    parse(tmp_path, *words.split(), "--custom-rm-path", "slime.rollout.on_policy_distillation.reward_func")
    assert "--opd-type sglang with --rollout-temperature 0.7: the teacher is asked for log-probs at that" in caplog.text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--eps-clip 0.2 --eps-clip-high 0.1", "--eps-clip-high 0.1 is below --eps-clip 0.2"),
        ("--use-tis --tis-clip 0.5", "--tis-clip-low 0.0 and --tis-clip 0.5 leave 1 out"),
        ("--use-tis --tis-clip-low 1.5", "--tis-clip-low 1.5 and --tis-clip 2.0 leave 1 out"),
        ("--advantage-estimator cispo --eps-clip 5 --eps-clip-high 0.3", None),
        ("--eps-clip 1", None),
        ("--eps-clip 0.2 --eps-clip-high 0.28 --tis-clip 0.5", None),
    ],
)
def test_ranges_that_are_hardly_meant(tmp_path, caplog, words, told):
    parse(tmp_path, *words.split())
    lines = [line for line in caplog.messages if "eps-clip" in line or "leave 1 out" in line]
    assert [line[: len(told)] for line in lines] == [told] if told else lines == []
