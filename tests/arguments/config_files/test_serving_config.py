"""`--sglang-config`: models, groups and their GPUs."""

import pytest

from slime.arguments.config_files.serving_config import ModelServing, ServerGroup, load_serving_config

FIELDS = ("mem_fraction_static", "tp_size", "context_length")


def load(tmp_path, text, **changes):
    path = tmp_path / "serving.yaml"
    path.write_text(text)
    given = {"hf_checkpoint": "/actor", "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 2, "known_fields": FIELDS}
    return load_serving_config(str(path), **{**given, **changes})


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
        (model("{num_gpus: 8, overrides: {zzz: 1}}"), 4, "unknown server argument zzz: known: context_length"),
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
    assert len(violations) == 2
    assert "num_gpus 'x'" in violations[0] and "a second model a; the first: " in violations[1]


def test_a_model_needs_a_path(tmp_path):
    _, (message,) = load(tmp_path, model("{num_gpus: 8}"), hf_checkpoint=None)
    assert "give `model_path`, or --hf-checkpoint" in message
