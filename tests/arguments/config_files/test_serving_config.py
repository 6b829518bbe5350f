"""`--sglang-config`: models, groups and their GPUs."""

from types import SimpleNamespace

import pytest

from slime.arguments.config_files.serving_config import (
    arguments_of_group,
    load_serving_config,
    served_groups,
)
from slime.backends.sglang_utils.server_arguments import compute_server_arguments
from slime.scheduling.served_models import ModelServing, ServerGroup
from tests.support.models.args import parse, write_config
from tests.support.tables.config_files import written
from tests.support.tables.rules import violations as refusals


def load(tmp_path, text, **changes):
    given = {"hf_checkpoint": "/actor", "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 2}
    path = str(written(tmp_path, text, "serving.yaml"))
    return load_serving_config(SimpleNamespace(sglang_config=path, **{**given, **changes}))


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


def test_defaults_are_filled_in(tmp_path):
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
    lines = [entry.where.removeprefix(f"{tmp_path}/serving.yaml:") for entry in (actor, *actor.groups, reward)]
    assert lines == ["2", "5", "8", "9", "10"]


def test_weights_of_another_model_may_be_updated(tmp_path):
    text = "sglang:\n  - {name: a, model_path: /b, update_weights: true, server_groups: [{num_gpus: 8}]}\n"
    ((model,), violations) = load(tmp_path, text)
    assert model.update_weights and violations == []


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
        (model("{num_gpus: 8, num-gpus-per-engine: 4}"), 4, "num-gpus-per-engine: did you mean num_gpus_per_engine?"),
        ("sglang:\n  - name: a\n    update-weights: false\n    server_groups: [{num_gpus: 8}]\n", 3, "update_weights?"),
        (model("{num_gpus: 8, overrides: {sglang_dtype: float32, dtype: bfloat16}}"), 4, "a second line sets dtype"),
        (model("{num_gpus: 8, overrides: {model-path: /a, model_path: /b}}"), 4, "a second line sets model_path"),
        (model("{num_gpus: 8, overrides: {zzz: 1}}"), 4, "unknown server argument zzz: `train.py --help-grep"),
        (model("{num_gpus: 8, worker_type: encode}"), 4, "worker_type 'encode': one of regular, prefill"),
        (model("{num_gpus: 0}"), 4, "num_gpus 0: give a number above 0"),
        (model("{num_gpus: true}"), 4, "num_gpus True"),
        (model("{num_gpus: 7}"), 4, "num_gpus 7 is no multiple of num_gpus_per_engine 2"),
        (model("{worker_type: regular}"), 4, "the group needs `num_gpus`"),
        (model("{num_gpus: 8, overrides: 3}"), 4, "overrides: expected"),
        (model("{num_gpus: 4, overrides: {model_path: /b}}", "{num_gpus: 4}"), 2, "different models (/actor, /b)"),
        ("sglang:\n  - server_groups: [{num_gpus: 8, overrides: {dtype: float32}}]\n", 2, "the model needs a `name`"),
        ("sglang:\n  - {name: a}\n", 2, "model a: give `server_groups`"),
        ("sglang:\n  - name: a\n    server_groups: [{num_gpus: 8}]\n    engine_groups: []\n", 4, "give `server_groups` once"),
        ("sglang:\n  - name: a\n    update_weights: 1\n    server_groups: [{num_gpus: 8}]\n", 3, "give true or false"),
        ("sglang: []\n", 1, "`sglang:` must be a list with at least one entry"),
        ("sglan: []\n", 1, "unknown key sglan: did you mean sglang?"),
    ],
)  # fmt: skip
def test_wrong_lines(tmp_path, text, line, message):
    _, violations = load(tmp_path, text)
    assert any(f"{tmp_path}/serving.yaml:{line}: " in violation and message in violation for violation in violations)


def test_only_engines_need_whole_numbers_of_gpus(tmp_path):
    (served,), violations = load(
        tmp_path, model("{num_gpus: 6}", "{worker_type: placeholder, num_gpus: 3}"), rollout_num_gpus=9
    )
    assert violations == [] and [group.num_gpus for group in served.groups] == [6, 3]


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
        (
            "preferred_sampling_params: {min_p: 0.1}",
            "preferred_sampling_params is set by the run: it would change what",
        ),
        ("port: 1", "port is set by the run: every engine takes a free port of its node; drop it"),
        (
            "context-length: 64",
            "context-length is set by the run: all engines need the same; give --sglang-context-length",
        ),
        (
            "speculative_algorithm: EAGLE",
            "speculative_algorithm is set by the run: all engines need the same; give --sglang-speculative-algorithm",
        ),
        (
            "enable_symm_mem: true",
            "enable_symm_mem is set by the run: all engines need the same; give --sglang-enable-symm",
        ),
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


SIZES = """sglang:
  - name: actor
    server_groups:
      - {num_gpus: 4, num_gpus_per_engine: 2, overrides: {max_running_requests: 4, dtype: bfloat16}}
      - {worker_type: placeholder, num_gpus: 1}
      - {num_gpus: 1, num_gpus_per_engine: 1}
"""


def test_a_run_takes_engines_of_several_sizes(tmp_path):
    path = written(tmp_path, SIZES, "serving.yaml")
    words = ["--rollout-num-gpus", "6", "--sglang-config", str(path), "--sglang-dtype", "float32", "--seed", "7"]
    args = parse(tmp_path, *words)
    assert args.rollout_num_engines == 3, "in flight is --sglang-server-concurrency for each of them"
    (served,), _ = load_serving_config(args)
    found = []
    for group in (served.groups[0], served.groups[2]):
        of_group = arguments_of_group(args, group)
        of_group.router_api_key = "key"
        values = compute_server_arguments(of_group, 1, host="h", port=1, nccl_port=2, on_cpu=True).values
        found.append(
            [values[name] for name in ("tp_size", "dtype", "max_running_requests", "random_seed", "model_path")]
        )
    model = args.hf_checkpoint
    seed = 7 + args.num_gpus_per_node
    assert found == [[2, "bfloat16", 4, seed, model], [1, "float32", 64, seed, model]]
    assert args.sglang_dtype == "float32" and args.sglang_config == str(path), "what was parsed stays"


def group_lines(*groups):
    return "sglang:\n  - name: actor\n    server_groups:\n" + "".join(f"      - {group}\n" for group in groups)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (group_lines("{num_gpus: 2, num_gpus_per_engine: 2}", "{num_gpus: 2, overrides: {quantization: fp8}}"),
         ["5: --sglang-quantization fp8: quantisation by the engine (pushed weights would not be quantised) is not built yet; "
          "drop the flag"]),
        (group_lines("{num_gpus: 3, num_gpus_per_engine: 3}", "{num_gpus: 1}"),
         ["4: num_gpus_per_engine 3: 3 tensor-parallel ranks cannot share the model's 4 attention heads and 2 key-value heads "
          "evenly; 2 or 4 would do"]),
    ],
    ids=["overrides", "heads"],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_line(tmp_path, text, lines):
    path = written(tmp_path, text, "serving.yaml")
    found = refusals(tmp_path, f"--rollout-num-gpus 4 --sglang-config {path}")
    assert [line.removesuffix(" (--dry-run plans with it)") for line in found] == [f"{path}:{line}" for line in lines]
    if "cannot share" not in lines[0]:
        assert parse(tmp_path, "--rollout-num-gpus", "4", "--sglang-config", str(path), "--dry-run").plan_notes == found


def test_stages_divide_the_engines_of_their_group(tmp_path):
    groups = ("{num_gpus: 2, num_gpus_per_engine: 2, overrides: {pp_size: 2}}", "{num_gpus: 2, overrides: {pp: 2}}")
    path = written(tmp_path, group_lines(*groups), "serving.yaml")
    assert refusals(tmp_path, f"--rollout-num-gpus 4 --sglang-config {path}") == [
        f"{path}:5: num_gpus_per_engine 1 is not divisible by --sglang-pp-size 2; give --sglang-pp-size 1, or "
        "num_gpus_per_engine 2"
    ]
    path = written(tmp_path, group_lines(groups[0], "{num_gpus: 2}"), "serving.yaml")
    args = parse(tmp_path, "--rollout-num-gpus", "4", "--sglang-config", str(path))
    assert [arguments_of_group(args, group).sglang_pp_size for group in served_groups(args)] == [2, None]


def test_only_a_model_that_is_not_trained_may_have_another_config_than_its_checkpoint(tmp_path):
    words = ["--sglang-json-model-override-args", '{"rope_theta": 1}']
    parse(tmp_path, *words, "--debug-rollout-only")
    group = "{num_gpus: 1, overrides: {json_model_override_args: '{\"rope_theta\": 1}'}}"
    path = written(tmp_path, group_lines(group), "serving.yaml")
    (line,) = refusals(tmp_path, f"--rollout-num-gpus 1 --sglang-config {path}")
    assert line.startswith(f"{path}:4: --sglang-json-model-override-args ") and "the trainer does not see it" in line
    judge = f"  - {{name: judge, update_weights: false, server_groups: [{group}]}}\n"
    path = written(tmp_path, group_lines("{num_gpus: 1}") + judge, "serving.yaml")
    parse(tmp_path, "--rollout-num-gpus", "2", "--sglang-config", str(path))


JUDGE = """  - name: judge
    model_path: {path}
    server_groups:
      - {{num_gpus: 1, overrides: {{context_length: 64, quantization: fp8}}}}
"""


def test_a_frozen_model_beside_the_trained_one_has_its_own_checkpoint_and_settings(tmp_path, caplog):
    other = tmp_path / "judge"
    other.mkdir()
    written(other, '{"num_attention_heads": 2, "num_key_value_heads": 2}', "config.json")
    path = written(tmp_path, group_lines("{num_gpus: 1}") + JUDGE.format(path=other), "serving.yaml")
    words = f"--rollout-num-gpus 2 --sglang-config {path} --colocate --actor-num-gpus-per-node 2 --sglang-dtype float32"
    args = parse(tmp_path, *words.split())
    assert f"{path}:5: not --hf-checkpoint: its weights stay" in caplog.text
    assert args.rollout_num_engines == 1, "requests of the rollout go to the first model"
    assert [(model.name, model.update_weights) for model in args.served_models] == [("actor", True), ("judge", False)]
    args.router_api_key = "key"
    args.use_rollout_routing_replay = True
    ((actor,), (judge,)) = (model.groups for model in args.served_models)

    def values(group, **options):
        of_group = arguments_of_group(args, group, **options)
        return compute_server_arguments(of_group, 1, host="h", port=1, nccl_port=2, on_cpu=False).values

    of_judge, of_actor = values(judge), values(actor)
    assert (of_judge["model_path"], of_actor["model_path"]) == (str(other), args.hf_checkpoint)
    assert (of_judge["context_length"], of_judge["quantization"], of_judge["dtype"]) == (64, "fp8", "float32")
    # Nobody pushes it what it has when it falls asleep.
    assert of_judge["enable_memory_saver"] and of_judge["enable_weights_cpu_backup"]
    assert of_actor["enable_memory_saver"] and not of_actor.get("enable_weights_cpu_backup")
    assert of_actor["enable_return_routed_experts"] and "enable_return_routed_experts" not in of_judge
    awake = values(judge, sleeps=False)
    assert "enable_memory_saver" not in awake and "enable_weights_cpu_backup" not in awake
    args.sglang_dtype, args.bf16, args.params_dtype_name = None, True, "bfloat16"
    assert values(actor)["dtype"] == "bfloat16" and "dtype" not in values(judge), "which has that of its checkpoint"


def test_a_frozen_model_drafts_where_its_group_says_so_and_not_because_the_run_does(tmp_path):
    other = write_config(tmp_path / "judge", model_type="mimo", num_nextn_predict_layers=1)
    groups = "[{num_gpus: 1}, {num_gpus: 1, overrides: {speculative_algorithm: NEXTN}}]"
    judge = f"  - {{name: judge, model_path: {other}, server_groups: {groups}}}\n"
    path = written(tmp_path, group_lines("{num_gpus: 1}") + judge, "serving.yaml")
    args = parse(tmp_path, "--rollout-num-gpus", "3", "--sglang-config", str(path), "--dry-run")
    args.sglang_speculative_algorithm, args.sglang_speculative_num_steps = "EAGLE", 3
    found = [arguments_of_group(args, group) for model in args.served_models for group in model.groups]
    assert [group.sglang_speculative_algorithm for group in found] == ["EAGLE", None, "NEXTN"]
    assert [group.sglang_speculative_num_steps for group in found] == [3, None, None]
    assert args.sglang_speculative_algorithm == "EAGLE"


def test_prefixes_in_host_memory_are_of_engines_that_no_push_pauses(tmp_path):
    overrides = "{num_gpus: 1, overrides: {enable_hierarchical_cache: true}}"
    copy = "  - {{name: reference, update_weights: false, server_groups: [{}]}}\n"
    words = ["--update-weights-in-flight", "--rollout-num-gpus", "2", "--sglang-config"]
    frozen = written(tmp_path, group_lines("{num_gpus: 1}") + copy.format(overrides), "frozen.yaml")
    assert parse(tmp_path, *words, str(frozen)).update_weights_in_flight
    pushed = written(tmp_path, group_lines(overrides) + copy.format("{num_gpus: 1}"), "pushed.yaml")
    (found,) = refusals(tmp_path, " ".join([*words, str(pushed)]))
    assert found.startswith(
        f"{pushed}:4: --sglang-enable-hierarchical-cache with --update-weights-in-flight: a paused engine"
    )


def test_a_copy_of_the_trained_model_may_stay_as_it_is(tmp_path, caplog):
    copy = "  - {name: reference, update_weights: false, server_groups: [{num_gpus: 1}]}\n"
    path = written(tmp_path, group_lines("{num_gpus: 1}") + copy, "serving.yaml")
    args = parse(tmp_path, "--rollout-num-gpus", "2", "--sglang-config", str(path))
    assert args.served_models[1].model_path == args.hf_checkpoint and not args.served_models[1].update_weights
    assert "weights stay" not in caplog.text


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (group_lines("{num_gpus: 4, overrides: {model_path: /b}}"), 2, "the first model generates training samples"),
        (group_lines("{num_gpus: 4}") + "    model_path: /b\n    update_weights: true\n", 2,
         "the trainer's weights are those of --hf-checkpoint; leave model_path out, or give it there"),
        (group_lines("{num_gpus: 4}") + "    update_weights: false\n", 2, "the first model generates training samples"),
        (group_lines("{num_gpus: 2}") + "  - {name: b, model_path: /b, server_groups: [{num_gpus: 2}]}\n", 5,
         "no config.json in /b; give the directory of a Hugging Face checkpoint"),
        (group_lines("{num_gpus: 2}") + "  - {name: default, server_groups: [{num_gpus: 2}]}\n", 5,
         "`default` means the first model; give another name"),
        (group_lines("{num_gpus: 2}") + "  - {name: b, server_groups: [{worker_type: placeholder, num_gpus: 2}]}\n", 5,
         "model b: no group has engines; give it one that is no placeholder, or leave the model out"),
        (group_lines("{num_gpus: 4, worker_type: prefill}"), 2, "prefill and decode groups need each other"),
        (group_lines("{num_gpus: 4, worker_type: decode}"), 2, "prefill and decode groups need each other"),
        (group_lines("{num_gpus: 1, worker_type: prefill}", "{num_gpus: 1, worker_type: decode}", "{num_gpus: 2}"), 2,
         "regular engines would get no requests beside those that prefill and decode"),
        (group_lines("{num_gpus: 2}", "{worker_type: encoder, num_gpus: 2}"), 2,
         "worker_type encoder: engines of SGLang that only encode media take no weights, and ask nobody for a key; "),
    ],
    ids=["another first", "another updated", "frozen first", "no checkpoint", "name", "no engines", "prefill alone",
         "decode alone", "regular beside", "encoder"],
)  # fmt: skip
def test_models_that_the_trainer_cannot_go_by_are_refused_by_line(tmp_path, text, line, message):
    path = written(tmp_path, text, "serving.yaml")
    (found,) = refusals(tmp_path, f"--rollout-num-gpus 4 --sglang-config {path}")
    assert found.startswith(f"{path}:{line}: ") and message in found


@pytest.mark.parametrize(("updates", "url", "refused"), [
    ("", "", True), ("update_weights: false, ", "", False), ("", " --rm-url http://10.0.0.1:30000", False),
])  # fmt: skip
def test_a_teacher_that_the_run_serves_gets_no_pushes(tmp_path, updates, url, refused):
    teacher = f"  - {{name: teacher, {updates}server_groups: [{{num_gpus: 2}}]}}\n"
    path = written(tmp_path, group_lines("{num_gpus: 2}") + teacher, "serving.yaml")
    words = "--use-opd --opd-type sglang --custom-rm-path slime.rollout.on_policy_distillation.reward_func"
    words += f"{url} --rollout-num-gpus 4 --sglang-config {path}"
    if not refused:
        parse(tmp_path, *words.split())
        return
    (found,) = refusals(tmp_path, words)
    assert "the model `teacher` of --sglang-config" in found and "give it update_weights: false" in found


def test_a_run_that_only_generates_may_serve_any_model_first(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    written(other, "{}", "config.json")
    path = written(tmp_path, group_lines(f"{{num_gpus: 4, overrides: {{model_path: {other}}}}}"), "serving.yaml")
    words = f"--debug-rollout-only --rollout-num-gpus 4 --sglang-config {path}"
    assert parse(tmp_path, *words.split()).served_models[0].model_path == str(other)


def test_an_engine_of_a_group_has_equally_many_gpus_on_each_of_its_nodes(tmp_path):
    placeholder = "{worker_type: placeholder, num_gpus: 1}"
    path = written(tmp_path, group_lines(placeholder, "{num_gpus: 3, num_gpus_per_engine: 3}"), "serving.yaml")
    words = f"--actor-num-gpus-per-node 1 --num-gpus-per-node 2 --sglang-config {path} --rollout-num-gpus"
    message = (
        "num_gpus_per_engine 3: an engine would have the GPUs 2 to 4 of the run, 2 and 1 on its nodes (--num-gpus-per-node 2, "
        "training takes the first 1), and needs equally many on each; give num_gpus_per_engine 1, or another number of GPUs to "
        "what comes before it"
    )
    assert any(f"{path}:" in line and message in line for line in refusals(tmp_path, f"{words} 4"))
    path.write_text(group_lines("{num_gpus: 2, num_gpus_per_engine: 2}"))
    assert parse(tmp_path, *f"{words} 2".split()).rollout_num_engines == 1


def test_the_size_of_a_group_is_its_own(tmp_path):
    """`--rollout-num-gpus-per-engine` is the default of groups, and no size of the run."""
    path = written(tmp_path, group_lines("{num_gpus: 1, num_gpus_per_engine: 1}", "{num_gpus: 2}"), "serving.yaml")
    words = f"--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2 --sglang-config {path}"
    assert parse(tmp_path, *words.split()).rollout_num_engines == 2
    (line,) = refusals(tmp_path, f"{words} --sglang-tp-size 2")
    assert line == "--sglang-tp-size 2: in --sglang-config each group has a size of its own; drop it"


def test_a_run_that_only_trains_ignores_the_file(tmp_path):
    path = written(tmp_path, group_lines("{worker_type: encoder, num_gpus: 3}"), "serving.yaml")
    assert parse(tmp_path, "--debug-train-only", "--sglang-config", str(path)).rollout_num_engines == 0


def test_a_model_needs_a_path(tmp_path):
    _, (message,) = load(tmp_path, model("{num_gpus: 8}"), hf_checkpoint=None)
    assert "give `model_path`, or --hf-checkpoint" in message
