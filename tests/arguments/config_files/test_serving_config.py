"""`--sglang-config`: models, groups and their GPUs."""

import pytest

from slime.arguments.config_files.serving_config import ModelServing, ServerGroup, load_serving_config, server_flags
from tests.support.models.args import parse
from tests.support.tables.config_files import written


def load(tmp_path, text, **changes):
    given = {
        "hf_checkpoint": "/actor",
        "rollout_num_gpus": 8,
        "rollout_num_gpus_per_engine": 2,
        "flags": server_flags(),
    }
    return load_serving_config(str(written(tmp_path, text, "serving.yaml")), **{**given, **changes})


TWO_MODELS = """sglang:
  - name: actor
    num_gpus_per_engine: 1
    server_groups:
      - worker_type: prefill
        num_gpus: 2
        overrides: {mem-fraction-static: 0.8}
      - {worker_type: decode, num_gpus: 2, num_gpus_per_engine: 2}
      - {worker_type: placeholder, num_gpus: 1}
  - name: reward
    model_path: /reward
    engine_groups:
      - {num_gpus: 3, num_gpus_per_engine: 3}
"""


def test_defaults_are_filled_in(tmp_path, caplog):
    models, violations = load(tmp_path, TWO_MODELS)
    assert violations == []
    actor, reward = models
    assert actor == ModelServing(
        "actor", "/actor", True,
        (ServerGroup("prefill", 2, 1, {"mem_fraction_static": 0.8}), ServerGroup("decode", 2, 2, {}),
         ServerGroup("placeholder", 1, 1, {})),
    )  # fmt: skip
    assert [group.num_engines for group in actor.groups] == [2, 1, 0]
    assert reward.update_weights is False and reward.groups[0].num_engines == 1
    assert [record.getMessage().split(": ", 1)[1][:25] for record in caplog.records] == ["model reward is not --hf-"]


def test_weights_of_another_model_may_be_updated(tmp_path, caplog):
    text = "sglang:\n  - {name: a, model_path: /b, update_weights: true, server_groups: [{num_gpus: 8}]}\n"
    ((model,), violations) = load(tmp_path, text)
    assert model.update_weights and violations == [] and not caplog.records


def test_without_engines_there_is_one_model_without_groups(tmp_path):
    models, violations = load(tmp_path, TWO_MODELS, rollout_num_gpus=0)
    assert models == [ModelServing("default", "/actor", True, ())] and violations == []


def test_the_gpus_sum_up(tmp_path):
    _, (message,) = load(tmp_path, TWO_MODELS, rollout_num_gpus=16)
    assert "the groups have 8 GPUs in all, --rollout-num-gpus says 16; give --rollout-num-gpus 8" in message
    assert load(tmp_path, TWO_MODELS, rollout_num_gpus=None)[1] == []


def model(*lines):
    return "sglang:\n  - name: actor\n    server_groups:\n" + "".join(f"      - {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (model("{num_gpu: 8}"), 4, "unknown key num_gpu: did you mean num_gpus?"),
        (model("{num_gpus: 8, overrides: {mem_fraction_statc: 1}}"), 4, "did you mean mem_fraction_static?"),
        (model("{num_gpus: 8, overrides: {zzz: 1}}"), 4, "unknown server argument zzz: `train.py --help-grep"),
        (model("{num_gpus: 8, worker_type: encode}"), 4, "worker_type 'encode': one of regular, prefill"),
        (model("{num_gpus: 0}"), 4, "num_gpus 0: give a number above 0"),
        (model("{num_gpus: true}"), 4, "num_gpus True"),
        (model("{num_gpus: 7}"), 4, "num_gpus 7 is no multiple of num_gpus_per_engine 2"),
        (model("{worker_type: regular}"), 4, "the group needs `num_gpus`"),
        (model("{num_gpus: 8, worker_type: prefill}"), 3, "prefill and decode groups need each other"),
        (model("{num_gpus: 8, overrides: 3}"), 4, "overrides: expected"),
        (model("{num_gpus: 4, overrides: {model_path: /b}}", "{num_gpus: 4}"), 2, "different models (/actor, /b)"),
        ("sglang:\n  - server_groups: [{num_gpus: 8}]\n", 2, "the model needs a `name`"),
        ("sglang:\n  - {name: a}\n", 2, "model a: give `server_groups`"),
        ("sglang:\n  - name: a\n    server_groups: [{num_gpus: 8}]\n    engine_groups: []\n", 4, "give `server_groups` (once"),
        ("sglang:\n  - name: a\n    update_weights: 1\n    server_groups: [{num_gpus: 8}]\n", 3, "give true or false"),
        ("sglang: []\n", 1, "`sglang:` must be a list with at least one entry"),
        ("sglan: []\n", 1, "unknown key sglan: did you mean sglang?"),
    ],
)  # fmt: skip
def test_wrong_lines(tmp_path, text, line, message):
    _, violations = load(tmp_path, text)
    assert any(f"{tmp_path}/serving.yaml:{line}: " in violation and message in violation for violation in violations)


def test_names_are_unique_and_all_mistakes_are_told(tmp_path):
    text = "sglang:\n  - {name: a, server_groups: [{num_gpus: 4}]}\n  - {name: a, server_groups: [{num_gpus: x}]}\n"
    text += "  - {name: a, server_groups: [{num_gpus: 4}]}\n"
    _, violations = load(tmp_path, text)
    parts = ("a second model a; the first: ", "num_gpus 'x'", "a second model a; the first: ")
    assert len(violations) == 3 and all(part in line for part, line in zip(parts, violations, strict=True))


def test_one_slip_hides_no_other(tmp_path):
    text = (
        "sglang:\n  - name: a\n    update_weights: maybe\n    server_groups:\n"
        "      - {worker_type: prefil, num_gpus: 4}\n      - {num_gpu: 4}\n      - {num_gpus: 0, overrides: 3}\n"
    )
    _, violations = load(tmp_path, text)
    lines = {int(violation.removeprefix(f"{tmp_path}/serving.yaml:").split(":")[0]) for violation in violations}
    assert lines == {3, 5, 6, 7} and len(violations) == 6


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mem_fraction_static: high", "mem_fraction_static: invalid float value: 'high' (the default"),
        ("mem_fraction_static: 70", "mem_fraction_static 70.0: it is a share of the GPU's memory, such as 0.8"),
        ("attention_backend: foo", "attention_backend: invalid choice: 'foo'"),
        ("tp_size: 4", "tp_size is set by the run: it follows from num_gpus_per_engine and pp_size; drop it"),
        ("api_key: k", "api_key is set by the run: router and engines of a run share one key"),
        ("port: 1", "port is set by the run: every engine takes a free port of its node; drop it"),
    ],
)
def test_overrides_are_checked_like_flags(tmp_path, override, message):
    _, violations = load(tmp_path, model(f"{{num_gpus: 8, overrides: {{{override}}}}}"))
    assert len(violations) == 1 and message.split(" (the")[0] in violations[0], violations


def test_overrides_are_converted_like_flags(tmp_path):
    ((served,), _) = load(
        tmp_path, model("{num_gpus: 8, overrides: {mem-fraction-static: 1e-1, enable_metrics: false}}")
    )
    assert served.groups[0].overrides == {"mem_fraction_static": 0.1, "enable_metrics": False}


def test_the_directory_of_another_model_must_exist(tmp_path):
    path = tmp_path / "serving.yaml"
    path.write_text(
        "sglang:\n  - {name: b, model_path: /nope, update_weights: false, server_groups: [{num_gpus: 1}]}\n"
    )
    args = parse(tmp_path, "--sglang-config", str(path), "--dry-run")
    assert f"{path}: model b: model_path /nope: no such directory; give a Hugging Face directory" in args.plan_notes


def test_a_model_needs_a_path(tmp_path):
    _, (message,) = load(tmp_path, model("{num_gpus: 8}"), hf_checkpoint=None)
    assert "give `model_path`, or --hf-checkpoint" in message
