from slime.observability.console import evaluation_line, rollout_line


def test_line_of_a_step_has_what_the_run_has():
    metrics = {"rollout/raw_reward": 0.5, "train/loss": 0.25, "perf/rollout_time": 2.0, "perf/step_time": 3.04}
    line = rollout_line(0, 10, metrics)
    assert line == "rollout 1/10 | reward 0.500 | loss 0.2500 | seconds: generate 2.0, step 3.0"


def test_line_of_an_evaluation_shows_the_sets_only():
    metrics = {"eval/math": 0.5, "eval/math-truncated_ratio": 0.1, "eval/math/response_len/mean": 3, "eval/step": 7}
    assert evaluation_line(7, metrics) == "evaluation at rollout 7: math 0.5000"
