from slime.observability.console import evaluation_line, evaluation_name, rollout_line


def test_line_of_a_step_has_its_id_the_progress_and_what_the_run_has():
    metrics = {"rollout/raw_reward": 0.5, "train/loss": 0.25, "perf/rollout_time": 2.0, "perf/step_time": 3.04}
    line = rollout_line(3, 10, metrics)
    assert line == "rollout 3 (4/10) | reward 0.500 | loss 0.2500 | seconds: generate 2.0, step 3.0"


def test_line_of_a_step_tells_what_did_not_go_as_usual():
    metrics = {
        "rollout/failed_samples": 2, "rollout/aborted_samples": 0, "rollout/surplus_groups": 1.0,
        "rollout/dynamic_filter/drop_zero_std_0.0": 3, "rollout/dynamic_filter/drop_zero_std_1.0": 4,
    }  # fmt: skip
    line = rollout_line(0, 1, metrics)
    assert line == "rollout 0 (1/1) | failed samples 2 | surplus groups 1 | filtered groups 7 | seconds: "


def test_line_of_an_evaluation_shows_the_sets_only():
    metrics = {"eval/math": 0.5, "eval/math-truncated_ratio": 0.1, "eval/math/response_len/mean": 3, "eval/step": 7}
    assert evaluation_line(evaluation_name(6), metrics) == "evaluation after rollout 6: math 0.5000"
    assert evaluation_line(evaluation_name(0, before=True), metrics) == "evaluation before rollout 0: math 0.5000"
