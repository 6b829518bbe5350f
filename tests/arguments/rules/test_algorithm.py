"""Rules about sampling, lengths, staleness and rewards; objective, replay, distillation, transport of weights, trackers."""

import sys
from types import SimpleNamespace

import pytest

from slime.arguments import parse_args
from slime.arguments.derivation import settle_trackers
from slime.arguments.rules.algorithm import TRACKER_RULES
from slime.utils import reward_types
from slime.utils.errors import UserError
from slime.utils.prompt_rows import SFT_FUNCTION
from tests.support.models.args import command_line, parse, write_config, write_rows
from tests.support.tables.rules import assert_violation, refusal, violations


def asynchronous(tmp_path, words: str):
    return parse_args(argv=[*command_line(tmp_path), "--dry-run", *words.split()], asynchronous=True)


def test_the_smallest_possible_staleness_is_accepted(tmp_path):
    asynchronous(tmp_path, "--async-buffer-size 3 --update-weights-interval 2 --max-weight-staleness 2")
    parse(tmp_path, "--max-weight-staleness", "0", "--dry-run")


def test_weights_are_pushed_at_intervals_by_the_asynchronous_loop_only(tmp_path):
    asynchronous(tmp_path, "--update-weights-interval 2")
    parse(tmp_path, "--debug-train-only", "--update-weights-interval", "2")
    message = (
        "--update-weights-interval 2: train.py pushes the weights after every rollout; use train_async.py, or give 1"
    )
    assert_violation(tmp_path, "--update-weights-interval 2", message)


@pytest.mark.parametrize("words", ["--offload-train", "--offload-rollout", "--offload", "--colocate"])
@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
def test_nobody_sleeps_in_the_asynchronous_loop(tmp_path, words, estimator):
    with pytest.raises(UserError, match="train_async.py generates while it trains"):
        asynchronous(tmp_path, f"--advantage-estimator {estimator} {words}")
    asynchronous(tmp_path, f"--advantage-estimator {estimator}")


def test_generation_that_never_stops_needs_its_loop_and_somebody_who_evaluates(tmp_path):
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    assert_violation(
        tmp_path,
        f"--rollout-function-path {path}",
        f"--rollout-function-path {path} generates while the trainer works: use train_async.py",
    )
    words = f"--rollout-function-path {path} --eval-interval 2 --eval-prompt-data a {{tmp}}/prompts.jsonl"
    message = (
        f"--eval-function-path {path} does not evaluate: give --eval-function-path "
        "slime.rollout.sglang_rollout.generate_rollout"
    )
    assert_violation(tmp_path, words, message, asynchronous=True)
    assert asynchronous(tmp_path, f"--rollout-function-path {path}").update_weights_in_flight is True
    assert asynchronous(tmp_path, "--async-buffer-size 2").update_weights_in_flight is False
    # Generators ask all the time, too: what a push cut off and they asked again would only ever be short answers.
    path = "slime_plugins.rollout_buffer.rollout.generate_rollout"
    words = f"--rollout-function-path {path} --rollout-buffer-url http://127.0.0.1:1"
    assert asynchronous(tmp_path, words).update_weights_in_flight is True


EVALUATED = "--eval-interval 2 --eval-prompt-data a {tmp}/prompts.jsonl"
FINE_TUNED = f"--rollout-function-path {SFT_FUNCTION} --loss-type sft_loss"
REPLAYED = "--rollout-function-path slime.rollout.forge_load.generate_rollout"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (FINE_TUNED,
         f"--eval-function-path {SFT_FUNCTION} does not evaluate: give --eval-function-path "
         "slime.rollout.sglang_rollout.generate_rollout"),
        (f"{REPLAYED} --load-forge-rollout-data {{tmp}}/dump.pt",
         "--eval-function-path slime.rollout.forge_load.generate_rollout takes an evaluation from a dump of its own: give "
         "{{rollout_id}} in the path of --load-forge-rollout-data, or --eval-function-path "
         "slime.rollout.sglang_rollout.generate_rollout"),
    ],
)  # fmt: skip
def test_what_cannot_evaluate_is_not_asked_to(tmp_path, words, message):
    words = f"{words} {EVALUATED}"
    assert_violation(tmp_path, words, message)
    typed = words.format(tmp=tmp_path).split()
    parse(tmp_path, *typed, "--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout")
    # Without engines nothing is evaluated.
    parse(tmp_path, *typed, "--debug-train-only")


def test_dumps_of_evaluations_have_a_place_of_their_own(tmp_path):
    words = f"{REPLAYED} {EVALUATED} --load-forge-rollout-data".format(tmp=tmp_path).split()
    parse(tmp_path, *words, f"{tmp_path}/{{rollout_id}}.pt")


def test_a_dict_of_a_reward_has_an_entry_that_counts(tmp_path):
    """A post-processing function takes dicts whole, but not those of an evaluation."""
    for words in ("--reward-key score", f"--custom-reward-post-process-path {__file__}:converts"):
        parse(tmp_path, "--rm-type", "dapo", *words.split())
    (tmp_path / "eval.yaml").write_text(f"datasets: [{{name: a, path: {tmp_path}/prompts.jsonl, rm_type: boxed_dapo}}]")
    words = f"--eval-interval 2 --eval-config {tmp_path}/eval.yaml"
    message = "{tmp}/eval.yaml:1: rm_type boxed_dapo grades with a dict; give --reward-key score, the entry that counts"
    assert_violation(tmp_path, f"{words} --custom-reward-post-process-path {__file__}:converts", message)
    parse(tmp_path, *words.split(), "--eval-reward-key", "score")


def test_masked_partial_rollouts_are_on_policy(tmp_path):
    parse(tmp_path, "--true-on-policy-mode", "--partial-rollout", "--mask-offpolicy-in-partial-rollout", "--dry-run")


def test_the_position_limit_is_the_models_only_when_it_is_known(tmp_path):
    assert parse(tmp_path, "--rollout-max-context-len", "512").rollout_max_prompt_len == 511


def test_an_empty_stop_string(tmp_path):
    message = "--rollout-stop: an empty stop string would end every response at once; give text, or drop the flag"
    assert_violation(tmp_path, ["--rollout-stop", "###", ""], message)


def test_reward_types_of_own_functions_and_boxed_ones_are_free(tmp_path):
    parse(tmp_path, "--rm-type", "boxed_math")
    parse(tmp_path, "--rm-type", "mine", "--custom-rm-path", "tests.support.reward")


@pytest.mark.parametrize("name", ["remote_rm", "boxed_remote_rm"])
def test_a_reward_over_http_needs_an_address(tmp_path, name):
    assert_violation(
        tmp_path, f"--rm-type {name}", f"--rm-type {name} needs --rm-url, the address of the service that grades"
    )
    assert parse(tmp_path, "--rm-type", name, "--rm-url", "http://h:1/x").rm_type == name
    parse(tmp_path, "--rm-type", name, "--debug-train-only")


IFEVAL = {"lm_eval", "langdetect", "nltk", "immutabledict"}


@pytest.mark.parametrize(
    "installed, is_refused",
    [(set(), True), (IFEVAL, False), ({"instructions_registry"}, False), *((IFEVAL - {name}, True) for name in IFEVAL)],
)
def test_checks_of_instructions_must_be_installed(tmp_path, monkeypatch, installed, is_refused):
    monkeypatch.setattr(reward_types, "find_spec", lambda name: name if name in installed else None)
    message = "--rm-type boxed_ifbench needs the package lm-eval[ifeval], or IFBench on PYTHONPATH"
    if is_refused:
        assert violations(tmp_path, "--rm-type boxed_ifbench") == [message]
    else:
        parse(tmp_path, "--rm-type", "boxed_ifbench")
    # A plan, and a run that grades nothing, do without them.
    assert parse(tmp_path, "--rm-type", "boxed_ifbench", "--dry-run").plan_notes == [message] * is_refused
    parse(tmp_path, "--rm-type", "ifbench", "--debug-train-only")
    (tmp_path / "eval.yaml").write_text(f"datasets: [{{name: a, path: {tmp_path}/prompts.jsonl, rm_type: ifbench}}]")
    notes = parse(tmp_path, "--eval-interval", "2", "--eval-config", f"{tmp_path}/eval.yaml", "--dry-run").plan_notes
    assert [note.partition(" needs")[0] for note in notes] == [f"{tmp_path}/eval.yaml:1: rm_type ifbench"] * is_refused


def test_values_of_a_file_are_named_with_their_line(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "eval.yaml").write_text(
        f"datasets:\n  - name: a\n    path: {rows}\n    rm_type: maths\n    max_response_len: 1000\n"
    )
    words = f"--eval-interval 2 --eval-config {tmp_path}/eval.yaml"
    lines = violations(tmp_path, words)
    assert lines[0] == (
        f"{tmp_path}/eval.yaml:5: max_response_len 1000 is above the model's --max-position-embeddings 512; give at most that"
    )
    assert lines[1].startswith(f"{tmp_path}/eval.yaml:4: rm_type maths is no built-in reward; known types: dapo")
    message = "{tmp}/eval.yaml:5: max_response_len 1000 must be below --eval-max-context-len 100, at most 99"
    assert_violation(tmp_path, f"{words} --eval-max-context-len 100", message)


def test_no_set_asks_for_more_tokens_than_its_responses_may_have(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl")
    words = f"--eval-interval 2 --eval-prompt-data math {rows} --eval-min-new-tokens 20"
    message = "--eval-min-new-tokens: set math asks for 20 tokens and allows 16; ask for fewer"
    assert_violation(tmp_path, f"{words} --rollout-max-response-len 16", message)
    assert_violation(tmp_path, f"{words} --eval-max-response-len 16", message)
    fitting = "--rollout-max-response-len 16 --eval-max-response-len 20 --dry-run"
    assert parse(tmp_path, *words.split(), *fitting.split()).eval_datasets[0].min_new_tokens == 20
    (tmp_path / "eval.yaml").write_text(
        f"datasets:\n  - {{name: a, path: {rows}, min_new_tokens: 9, max_response_len: 8}}\n"
    )
    message = "--eval-min-new-tokens: set a asks for 9 tokens and allows 8; ask for fewer"
    assert_violation(tmp_path, f"--eval-interval 2 --eval-config {tmp_path}/eval.yaml", message)


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ("--rollout-max-prompt-len 400 --rollout-max-response-len 400", "--max-position-embeddings 512"),
        ("--eval-max-prompt-len 400 --rollout-max-response-len 400", "--max-position-embeddings 512"),
        ("--rollout-max-prompt-len 80 --rollout-max-response-len 80 --sglang-context-length 100", "context-length 100"),
        ("--rollout-max-prompt-len 400 --rollout-max-response-len 112", None),
        ("--rollout-max-prompt-len 400 --rollout-max-response-len 400 --rollout-max-context-len 512", None),
    ],
)
def test_prompt_and_response_that_fit_only_alone(tmp_path, caplog, words, warned):
    parse(tmp_path, *words.split())
    found = [record.getMessage() for record in caplog.records if "together above" in record.getMessage()]
    assert found == [] if warned is None else warned in found[0]


def asks_the_teacher(args, sample, sampling_params):
    """Stands for a generate function of the user's."""


def sets_advantages(args, rollout_id, rollout_data):
    """Stands for a function of the user's on the ranks."""


def converts(args, samples):
    """Stands for one that makes a train batch."""


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
        "--use-tis --tis-clip 3 --tis-clip-low 0.5", "--use-tis --tis-threshold 3",
        "--use-opsm --opsm-delta 0.1 --use-rollout-logprobs", "--use-opsm --num-steps-per-rollout 2",
        "--use-tis --custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function",
        "--custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function --tis-clip 3",
        "--kl-coef 0.1 --ref-load {tmp}/model --advantage-estimator reinforce_plus_plus --gamma 0.9 "
        "--discount-masked-tokens --normalize-advantages",
        "--use-opd --opd-type megatron --opd-teacher-load {tmp}/model --opd-kl-coef 0.5",
        "--use-opd --opd-type sglang --rm-url http://10.0.0.1:30000 "
        "--custom-rm-path slime.rollout.on_policy_distillation.reward_func",
        "--use-opd --opd-type sglang --custom-generate-function-path {file}:asks_the_teacher",
        "--disable-compute-advantages-and-returns --loss-type sft_loss",
        "--disable-compute-advantages-and-returns --rollout-data-postprocess-path {file}:sets_advantages",
        "--disable-compute-advantages-and-returns --custom-convert-samples-to-train-data-path {file}:converts",
        "--disable-compute-advantages-and-returns --advantage-estimator ppo --debug-rollout-only",
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
        ("--opd-type sglang --rollout-top-p 0.9", "--rollout-top-p 0.9 and --rollout-top-k 2048"),
        ("--opd-type sglang --rollout-top-k 50", "--rollout-top-p 1.0 and --rollout-top-k 50"),
        ("--opd-type megatron --opd-teacher-load {tmp}/model --rollout-top-p 0.9", None),
    ],
)
def test_a_served_teacher_beside_a_nucleus_is_warned_about(tmp_path, caplog, words, told):
    words = f"--use-opd {words}".format(tmp=tmp_path)
    parse(tmp_path, *words.split(), "--custom-generate-function-path", f"{__file__}:asks_the_teacher")
    lines = [line for line in caplog.messages if "log-probs of the student are among the tokens" in line]
    assert [line.partition(": ")[0] for line in lines] == ([f"--opd-type sglang with {told}"] if told else [])


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


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--loss-type sft_loss", "no earlier pass has chosen experts for these samples"),
        ("--moe-router-fusion", "the kernel of --moe-router-fusion chooses experts by itself"),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path, words, part):
    lines = violations(tmp_path, f"{EXPERTS} --use-routing-replay {words}")
    assert any(line.startswith("--use-routing-replay") and part in line for line in lines), "\n".join(lines)


def test_the_flag_itself_is_no_reason_to_refuse(tmp_path):
    lines = violations(tmp_path, f"{EXPERTS} --use-rollout-routing-replay")
    assert not any("replay" in line for line in lines), "\n".join(lines)


@pytest.mark.parametrize("further", ["", "--use-routing-replay", "--loss-type sft_loss"])
@pytest.mark.parametrize("types", ["sinkhorn", "aux_loss sinkhorn --moe-aux-loss-coeff 0.1 0.1"])
def test_experts_for_which_tokens_compete_are_refused(tmp_path, types, further):
    lines = violations(tmp_path, f"{EXPERTS} --moe-router-load-balancing-type {types} {further}")
    assert any("sinkhorn: with sinkhorn, all tokens of a stream compete" in line for line in lines), "\n".join(lines)


@pytest.mark.parametrize("types", ["global_aux_loss", "global_aux_loss aux_loss seq_aux_loss"])
def test_every_other_balance_and_all_of_them_together_are_fine(tmp_path, types):
    weights = " ".join(["0.1"] * len(types.split()))
    lines = violations(tmp_path, f"{EXPERTS} --moe-router-load-balancing-type {types} --moe-aux-loss-coeff {weights}")
    assert not any("balancing" in line or "not built" in line for line in lines), "\n".join(lines)


@pytest.mark.parametrize(("words", "warned"), [("", True), ("--debug-train-only", False)])
def test_engines_that_weigh_what_experts_give_are_warned_about(tmp_path, caplog, words, warned):
    entries = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "norm_topk_prob": False}
    config = write_config(tmp_path / "experts", model_type="qwen3_moe", **entries)
    args = parse(tmp_path, "--hf-checkpoint", str(config), "--moe-apply-probs-on-input", *words.split())
    assert args.moe_apply_probs_on_input
    told = [
        line for line in caplog.messages if line.startswith("--moe-apply-probs-on-input: engines multiply the output")
    ]
    assert len(told) == warned


@pytest.mark.parametrize("words", ["--softmax-scale 0.1", "--rotary-seq-len-interpolation-factor 2"])
def test_a_model_of_the_trainer_alone_is_warned_about(tmp_path, caplog, words):
    parse(tmp_path, *words.split(), "--debug-train-only")
    assert "engines go by config.json" not in caplog.text
    parse(tmp_path, *words.split())
    assert [
        line.partition(": engines go by")[0].split()[0] for line in caplog.messages if "go by config.json" in line
    ] == [words.split()[0]]


COMPLETE_DELTA = (
    "--update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir /d "
    "--update-weight-local-checkpoint-dir /l"
)
COMPLETE_RELEASE = "--release-train --save /s --update-weight-transport disk --update-weight-disk-dir /d"


@pytest.mark.parametrize("words", [COMPLETE_DELTA, COMPLETE_RELEASE, "--use-stateless-adam --no-save-optim"])
def test_complete_settings_break_no_rule(tmp_path, words):
    parse(tmp_path, *words.split(), "--dry-run")


def test_a_released_trainer_saves_every_rollout(tmp_path):
    assert parse(tmp_path, *COMPLETE_RELEASE.split(), "--dry-run").save_interval == 1
    # The optimizer that has nothing to save needs no more than that.
    parse(tmp_path, *COMPLETE_RELEASE.split(), "--use-stateless-adam", "--no-save-optim", "--dry-run")


def test_nobody_ends_in_the_asynchronous_loop(tmp_path):
    with pytest.raises(UserError, match="--release-train: train_async.py generates while it trains"):
        asynchronous(tmp_path, COMPLETE_RELEASE)


def test_one_advice_for_deltas_of_colocated_engines(tmp_path):
    lines = violations(tmp_path, "--update-weight-mode delta --colocate")
    assert not any("give --update-weight-transport disk" in line or "local-checkpoint-dir" in line for line in lines)


def test_an_old_actor_in_the_synchronous_loop_is_warned_about(tmp_path, caplog):
    parse(tmp_path, "--keep-old-actor", "--dry-run")
    assert (
        caplog.text.count(
            "--keep-old-actor without train_async.py: the weights that generated a rollout train on it, but"
        )
        == 1
    )
    caplog.clear()
    parse(tmp_path, "--keep-old-actor", "--debug-train-only", "--dry-run")
    assert "--keep-old-actor" not in caplog.text
    parse(tmp_path, "--keep-old-actor", "--use-rollout-logprobs", "--dry-run")
    assert "the old log-probs come from the weights before" not in caplog.text


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("", ()),
        ("--async-buffer-size 2", ("--async-buffer-size 2", "--update-weights-interval 1")),
        ("--update-weights-interval 2", ("--async-buffer-size 1", "--update-weights-interval 2")),
        ("--update-weights-in-flight", ("--update-weights-in-flight",)),
        # Nobody reads the copy's log-probs.
        ("--async-buffer-size 2 --update-weights-in-flight --use-rollout-logprobs", ()),
    ],
)
def test_an_old_actor_that_did_not_generate_every_sample_is_warned_about(tmp_path, caplog, words, names):
    asynchronous(tmp_path, f"--keep-old-actor {words}")
    warnings = [r.getMessage() for r in caplog.records if "--keep-old-actor with" in r.getMessage()]
    assert len(warnings) == bool(names)
    assert all(name in warning for warning in warnings for name in names)


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
    values = {"use_wandb": True, "use_tensorboard": True, "wandb_host": None, "typed_flags": set(),
              "use_pytorch_profiler": False, "profile": False}  # fmt: skip
    args = SimpleNamespace(**{**values, **changes})
    return [violation.message for rule in TRACKER_RULES for violation in rule(args)]


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


def test_a_digest_whose_package_is_missing_is_refused(tmp_path, monkeypatch):
    delta = "--update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir {tmp}/pushes"
    words = f"{delta} --update-weight-local-checkpoint-dir {{tmp}}/local --update-weight-delta-checksum"
    parse(tmp_path, *f"{words} xxh3-128".format(tmp=tmp_path).split())
    monkeypatch.setitem(sys.modules, "blake3", None)
    assert [found.flags for found in refusal(tmp_path, f"{words} blake3")] == [("--update-weight-delta-checksum",)]
