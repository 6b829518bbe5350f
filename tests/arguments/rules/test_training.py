"""Rules about the objective, replay, distillation, trained parameters, the transport of weights, and trackers."""

from types import SimpleNamespace

import pytest

from slime.arguments.derivation import settle_trackers
from slime.arguments.rules.training import tracker_violations
from tests.support.args import parse
from tests.support.rules import assert_violation, violations


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


EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 "


@pytest.mark.parametrize("flag", ["--use-routing-replay", "--use-rollout-routing-replay"])
def test_a_model_without_experts_has_nothing_to_replay(tmp_path, flag):
    message = "the model has no experts (--num-experts), so there is no routing to replay; drop the flag"
    assert_violation(tmp_path, flag, f"{flag}: {message}")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--loss-type sft_loss", "nobody has chosen experts for these samples before"),
        ("--moe-router-fusion", "the kernel of --moe-router-fusion chooses experts by itself"),
        (
            "--moe-router-load-balancing-type sinkhorn",
            "--moe-router-load-balancing-type sinkhorn assigns experts over all",
        ),
        (
            "--moe-router-load-balancing-type aux_loss sinkhorn --moe-aux-loss-coeff 0.1 0.1",
            "--moe-router-load-balancing-type sinkhorn assigns experts over all",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path, words, part):
    lines = violations(tmp_path, f"{EXPERTS} --use-routing-replay {words}")
    assert any(line.startswith("--use-routing-replay") and part in line for line in lines), "\n".join(lines)


def test_the_flag_itself_is_no_reason_to_refuse(tmp_path):
    lines = violations(tmp_path, f"{EXPERTS} --use-routing-replay")
    assert not any("replay" in line for line in lines), "\n".join(lines)


def test_the_experts_of_the_engines_are_not_asked_for_yet(tmp_path):
    args = parse(tmp_path, "--use-rollout-routing-replay", "--dry-run", "--debug-rollout-only")
    assert args.use_routing_replay
    assert any(note.startswith("--use-rollout-routing-replay: asking the engines") for note in args.plan_notes)


RELEASE = "--release-train recreates the trainer from a checkpoint for each step"
COMPLETE_DELTA = (
    "--update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir /d "
    "--update-weight-local-checkpoint-dir /l"
)
COMPLETE_RELEASE = "--release-train --save /s --update-weight-transport disk --update-weight-disk-dir /d"


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "--only-train-params-name-list a --freeze-params-name-list b",
            "--only-train-params-name-list and --freeze-params-name-list exclude each other: each says which parameters are "
            "trained; keep one",
        ),
        (
            "--freeze-params-name-list layers(",
            "--freeze-params-name-list layers(: it is no regular expression (missing ), unterminated subpattern at position "
            "6); write one such as 'layers\\.0\\.'",
        ),
        (
            "--update-weight-transport disk",
            "--update-weight-transport disk needs --update-weight-disk-dir, a directory that trainer and engines share",
        ),
        (
            "--update-weight-mode delta",
            "--update-weight-mode delta with --update-weight-transport nccl: deltas travel as files; give "
            "--update-weight-transport disk",
        ),
        (
            "--update-weight-mode delta --update-weight-transport disk",
            "--update-weight-mode delta needs --update-weight-local-checkpoint-dir, a directory on every engine host to which "
            "the deltas are applied",
        ),
        (
            f"{COMPLETE_DELTA} --colocate",
            "--update-weight-mode delta with --colocate: weights are handed over in memory there; give "
            "--update-weight-mode full",
        ),
        ("--release-train", f"{RELEASE}; give --save"),
        (
            "--release-train",
            f"{RELEASE} and hands weights over as files: give --update-weight-mode full --update-weight-transport disk "
            "instead of full over nccl",
        ),
        (f"{COMPLETE_RELEASE} --save-interval 2", f"{RELEASE}, so --save-interval 2 must be 1"),
        (
            f"{COMPLETE_RELEASE} --train-backend fsdp",
            "--release-train with --train-backend fsdp: only megatron can; drop it",
        ),
        (
            f"{COMPLETE_RELEASE} --advantage-estimator ppo",
            "--release-train with --advantage-estimator ppo: the critic would be lost; drop it",
        ),
        (f"{COMPLETE_RELEASE} --keep-old-actor", "--release-train with --keep-old-actor: the copy would be lost; drop one"),
        (
            "--use-stateless-adam --no-save-optim --optimizer sgd",
            "--use-stateless-adam with --optimizer sgd: give --optimizer adam",
        ),
        (
            "--use-stateless-adam --no-save-optim --no-decoupled-weight-decay",
            "--use-stateless-adam with --no-decoupled-weight-decay: its decay is decoupled; drop one of them",
        ),
        ("--use-stateless-adam", "--use-stateless-adam has no optimizer state to save: add --no-save-optim"),
    ],
)  # fmt: skip
def test_rule_of_weights(tmp_path, words, message):
    assert_violation(tmp_path, words, message)


@pytest.mark.parametrize("words", [COMPLETE_DELTA, COMPLETE_RELEASE, "--use-stateless-adam --no-save-optim"])
def test_complete_settings_break_no_rule(tmp_path, words):
    parse(tmp_path, *words.split(), "--dry-run")


def test_a_released_trainer_saves_every_rollout(tmp_path):
    assert parse(tmp_path, *COMPLETE_RELEASE.split(), "--dry-run").save_interval == 1


def test_one_advice_for_deltas_of_colocated_engines(tmp_path):
    lines = violations(tmp_path, "--update-weight-mode delta --colocate")
    assert not any("give --update-weight-transport disk" in line or "local-checkpoint-dir" in line for line in lines)


def test_an_old_actor_in_the_synchronous_loop_is_warned_about(tmp_path, caplog):
    parse(tmp_path, "--keep-old-actor", "--dry-run")
    assert (
        caplog.text.count("--keep-old-actor without train_async.py: a rollout trains on the weights that generated it")
        == 1
    )
    caplog.clear()
    parse(tmp_path, "--keep-old-actor", "--debug-train-only", "--dry-run")
    assert "--keep-old-actor" not in caplog.text
    parse(tmp_path, "--keep-old-actor", "--use-rollout-logprobs", "--dry-run")
    assert "the old log-probs come from those before" not in caplog.text


@pytest.mark.parametrize(
    ("typed", "wandb", "installed", "written"),
    [
        (None, False, True, True), (None, True, True, False), (None, False, False, False),
        (True, True, True, True), (False, False, True, False),
    ],
)  # fmt: skip
def test_event_files_are_written_unless_another_tracker_is_chosen(monkeypatch, typed, wandb, installed, written):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    args = SimpleNamespace(use_tensorboard=typed, use_wandb=wandb)
    settle_trackers(args)
    assert args.use_tensorboard is written


def tracker_problems(**changes):
    values = {"use_wandb": True, "use_tensorboard": True, "wandb_host": None, "typed_flags": set()}
    return list(tracker_violations(SimpleNamespace(**{**values, **changes})))


def test_missing_packages_are_named(monkeypatch):
    assert tracker_problems() == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert tracker_problems() == [
        "--use-wandb needs the package wandb: pip install wandb",
        "--use-tensorboard needs the package tensorboard: pip install tensorboard",
    ]


def test_the_host_is_an_address():
    (message,) = tracker_problems(wandb_host="wandb.example.com")
    assert "--wandb-host wandb.example.com: it must start with http" in message


def test_flags_without_effect_are_warned_about(caplog):
    assert tracker_problems(use_wandb=False, typed_flags={"wandb_key", "wandb_group", "lr"}) == []
    assert "--wandb-group, --wandb-key: no effect without --use-wandb" in caplog.text
