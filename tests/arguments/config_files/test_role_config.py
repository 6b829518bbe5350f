"""`--megatron-config-path`: what the actor and the critic have apart."""

import pytest

from slime.arguments.config_files.role_config import apply_role_config, role_args
from slime.arguments.origins import Origin
from slime.arguments.parser import ArgumentParser
from slime.plan.text import custom_values
from slime.utils.errors import UserError
from tests.support.models.args import parse
from tests.support.tables.config_files import parsed_with_file, written


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("--megatron-config-path", default=None)
    parser.add_argument("--advantage-estimator", choices=["grpo", "ppo"], default="ppo")
    # What a critic may have for itself is known by its name or by the group that it is in.
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument_group("Megatron: optimizer and schedule").add_argument("--min-lr", type=float, default=0.0)
    parser.add_argument("--save", default=None)
    parser.add_argument("--load", default=None)
    parser.add_argument("--kl-coef", type=float, default=0.0)
    parser.add_argument("--use-opd", action="store_true")
    parser.add_argument("--custom-advantage-function-path", default=None)
    parser.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    parser.add_argument("--disable-grpo-std-normalization", action="store_false", dest="grpo_std_normalization")
    return parser


def apply(tmp_path, text, *words):
    parser = make_parser()
    args = parsed_with_file(parser, "--megatron-config-path", written(tmp_path, text, "roles.yaml"), *words)
    args.custom_config = {"horizon": 1, "depth": 2}
    vars(args).update(args.custom_config)
    return args, apply_role_config(args, parser)


BOTH = """megatron:
  - name: policy
    role: actor
    overrides: {lr: 2e-6, min_lr: 1e-6, disable-grpo-std-normalization: true}
  - name: value
    role: critic
    args:
      lr: 1e-5
      save: critic
"""


def test_the_run_has_the_actors_values_and_the_critic_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args, violations = apply(tmp_path, BOTH, "--kl-coef", "0.1", "--save", "/actor", "--min-lr", "1e-7")
    assert violations == []
    assert (args.lr, args.grpo_std_normalization, args.save) == (2e-6, False, "/actor")
    assert args.origins["lr"] is Origin.YAML and "lr" in args.typed_flags
    critic = role_args(args, "critic")
    assert (critic.lr, critic.save, critic.min_lr) == (1e-5, str(tmp_path / "critic"), 1e-7)
    # Not overridden for the critic: how the run trains, not how its actor does. What belongs to the run is the same for both.
    assert args.min_lr == 1e-6 and critic.grpo_std_normalization is False
    assert vars(role_args(args, "actor")) == vars(args)


def test_defaults_of_the_critic(tmp_path):
    args, _ = apply(tmp_path, "", "--kl-coef", "0.1", "--use-opd", "--custom-advantage-function-path", "m.f")
    critic = role_args(args, "critic")
    assert (critic.kl_coef, critic.use_opd, critic.custom_advantage_function_path) == (0.0, False, None)
    assert critic.untie_embeddings_and_output_weights is True and critic.disable_param_buffer_cpu_backup is False
    assert (args.kl_coef, args.use_opd, args.untie_embeddings_and_output_weights) == (0.1, True, False)


def test_a_critic_may_override_its_defaults(tmp_path):
    args, _ = apply(tmp_path, "megatron: [{role: critic, overrides: {kl_coef: 0.3}}]\n", "--kl-coef", "0.1")
    assert role_args(args, "critic").kl_coef == 0.3 and args.kl_coef == 0.1


def test_the_old_form(tmp_path, caplog):
    args, violations = apply(tmp_path, "critic: {lr: 1e-5}\n")
    assert violations == [] and args.role_overrides == {"critic": {"lr": 1e-5}}
    assert "roles.yaml:1: `critic:` is the old form" in caplog.text


def test_values_of_ones_own(tmp_path):
    text = "megatron: [{role: actor, overrides: {custom: {horizon: 3}}}]\n"
    args, violations = apply(tmp_path, text)
    assert violations == [] and args.horizon == 3
    assert args.custom_config == {"horizon": 3, "depth": 2}, "this is what counts"
    flat = "megatron: [{role: actor, overrides: {horizon: 3}}]\n"
    assert "goes below `custom:`" in apply(tmp_path, flat)[1][0]
    args, violations = apply(tmp_path, flat, "--custom-advantage-function-path", "m.f")
    assert violations == [] and args.horizon == 3 and role_args(args, "critic").horizon == 1


def test_values_of_the_actors_own_are_told_and_win_unless_the_run_uses_their_names(tmp_path):
    run, roles = tmp_path / "run.yaml", tmp_path / "roles.yaml"
    run.write_text("custom: {horizon: 1, depth: 2}\n")
    roles.write_text("megatron: [{role: actor, overrides: {custom: {horizon: 3}}}]\n")
    words = ["--custom-config-path", str(run), "--megatron-config-path", str(roles)]
    args = parse(tmp_path, *words)
    assert (args.horizon, args.depth, custom_values(args)) == (3, 2, {"horizon": 3, "depth": 2})
    roles.write_text("megatron: [{role: actor, overrides: {custom: {world_size: 77}}}]\n")
    with pytest.raises(UserError, match=r"roles.yaml: world_size is set by the run itself.* 77"):
        parse(tmp_path, *words)


def test_sizes_of_a_role_have_no_effect_and_are_warned_about(tmp_path, caplog):
    args, violations = apply(tmp_path, "megatron: [{role: critic, num_nodes: 2, num-gpus-per-node: 4}]\n")
    assert violations == [] and args.role_overrides == {"critic": {}}
    assert "num_nodes has no effect" in caplog.text and "num-gpus-per-node has no effect" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "megatron: [{role: critic, overrides: {num_nodes: 2, num_gpus_per_node: 4, lr: 1e-5}}]\n",
        "critic: {num-gpus-per-node: 4, lr: 1e-5}\n",
    ],
)
def test_sizes_below_the_overrides_have_no_effect_either(tmp_path, caplog, text):
    args, violations = apply(tmp_path, text)
    assert violations == [] and args.role_overrides == {"critic": {"lr": 1e-5}}
    assert "roles.yaml:1: num" in caplog.text and "has no effect" in caplog.text


@pytest.mark.parametrize(
    ("line", "warned"),
    [
        ("kl_coef: 0.1", True),
        ("use-opd: true", True),
        ("custom_advantage_function_path: a.f", True),
        ("kl_coef: 0", False),
        ("use_opd: false", False),
    ],
)
def test_what_makes_advantages_has_no_effect_on_a_critic(tmp_path, caplog, line, warned):
    apply(tmp_path, f"megatron:\n  - {{role: critic, overrides: {{{line}}}}}\n")
    told = f"roles.yaml:2: {line.split(':')[0]} has no effect on the critic: the actor's ranks make its returns"
    assert (told in caplog.text) == warned
    caplog.clear()
    apply(tmp_path, f"megatron:\n  - {{role: actor, overrides: {{{line}}}}}\n")
    assert "has no effect on" not in caplog.text


def test_a_critic_without_ppo_is_warned_about(tmp_path, caplog):
    apply(tmp_path, "megatron: [{role: actor}]\n", "--advantage-estimator", "grpo")
    apply(tmp_path, "megatron: [{role: critic}]\n")
    assert "the run has no critic" not in caplog.text
    apply(tmp_path, "megatron: [{role: critic}]\n", "--advantage-estimator", "grpo")
    assert "the run has no critic" in caplog.text


def test_a_second_entry_says_where_the_first_stands_although_that_is_empty(tmp_path):
    _, (message,) = apply(tmp_path, "megatron:\n  - {role: actor}\n  - {role: actor}\n")
    assert message.endswith(f"the first is {tmp_path}/roles.yaml:2")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("megatron:\n  - {role: reference}\n", 2, "role 'reference': it must be one of actor, critic"),
        ("megatron:\n  - {name: policy}\n", 2, "role 'policy'"),
        ("megatron:\n  - {role: actor}\n  - {role: actor}\n", 3, "a second entry for the role actor; the first"),
        ("critic: {}\nmegatron:\n  - {role: critic}\n", 3, "a second entry for the role critic"),
        ("megatron:\n  - role: actor\n    override: {lr: 1}\n", 3, "did you mean overrides?"),
        ("megatron:\n  - role: actor\n    lr: 1\n", 3, "flags of the role go below `overrides:`"),
        ("megatron:\n  - role: actor\n    args: {lr: 1}\n    overrides: {}\n", 4, "keep one"),
        ("megatron:\n  - role: actor\n    overrides: 3\n", 3, "expected `name: value` lines"),
        ("megatron:\n  - role: actor\n    overrides:\n      lr: fast\n", 4, "invalid float value"),
        ("megatron:\n  - role: actor\n    overrides: {min_lrr: 1}\n", 3, "did you mean min_lr?"),
        ("megatron:\n  - role: actor\n    overrides: {megatron_config_path: x}\n", 3, "cannot name another file"),
        ("megatron:\n  - role: critic\n    overrides: {qkv_format: thd}\n", 3, "qkv_format does not exist any more"),
        ("megatrn: []\n", 1, "did you mean megatron?"),
        ("megatron: 3\n", 1, "expected a list"),
        ("megatron: [3]\n", 1, "is no entry"),
    ],
)
def test_wrong_lines(tmp_path, text, line, message):
    _, violations = apply(tmp_path, text)
    assert len(violations) == 1
    assert f"{tmp_path}/roles.yaml:{line}: " in violations[0] and message in violations[0]


def test_an_unknown_role_is_refused(tmp_path):
    args, _ = apply(tmp_path, "")
    with pytest.raises(ValueError, match="role 'reward'"):
        role_args(args, "reward")


def test_the_critic_has_its_own_training_and_nothing_else(tmp_path):
    path = tmp_path / "roles.yaml"
    path.write_text(
        "megatron:\n  - role: critic\n    overrides:\n      lr: -1\n      tensor_model_parallel_size: 2\n"
        "      rollout_batch_size: 64\n      sglang_page_size: 1\n      max_tokens_per_gpu: 100\n"
    )
    with pytest.raises(UserError) as error:
        parse(tmp_path, "--advantage-estimator", "ppo", "--megatron-config-path", str(path), "--dry-run")
    lines = str(error.value).splitlines()
    assert {line.removeprefix(str(path)).split(";")[0] for line in lines} == {
        ":6: rollout_batch_size is the same for actor and critic",
        ":7: sglang_page_size is the same for actor and critic",
        ":4: role critic: --lr -1.0: it must be at least 0",
        ":5: role critic: --tensor-model-parallel-size 2 must divide the number of training ranks, 1 (--actor-num-nodes 1 x "
        "--actor-num-gpus-per-node 1)",
    }


@pytest.mark.parametrize(
    "line, message",
    [
        ("rotary_base: 77", "role critic: hf_validate_args failed: the flags and"),
        ("fp8_format: e4m3", "role critic: --fp8-format e4m3 needs a GPU and Transformer Engine"),
        ("overlap_param_gather: true", "role critic: --overlap-param-gather has nothing to act on without"),
        ("optimizer: muon", "role critic: --optimizer muon: another optimizer than Adam and SGD is not built yet"),
        ("optimizer: sgd", "role critic: --optimizer sgd: Megatron distributes the state of Adam alone"),
        ("lr_warmup_iters: 1000", "role critic: --lr-warmup-iters 1000 must be below the 4 optimizer steps"),
        ("min_lr: 1.0", "role critic: --min-lr 1.0 is above --lr 1e-06"),
        ("adam_beta1: 1.5", "role critic: --adam-beta1 1.5: it must be"),
        ("recompute_granularity: full", "role critic: --recompute-granularity full needs --recompute-method"),
        ("freeze_params_name_list: ['(']", "role critic: --freeze-params-name-list (: it is no regular expression"),
        ("micro_batch_size: 3", "role critic: --global-batch-size 8 is no multiple of --micro-batch-size 3"),
        ("use_stateless_adam: true", "role critic: --use-stateless-adam has no optimizer state to save"),
        ("custom_megatron_init_path: a.py:f", "role critic: --custom-megatron-init-path {tmp}/a.py:f: there is no file"),
        ("untie_embeddings_and_output_weights: false", "role critic: --untie-embeddings-and-output-weights: a critic's head"),
        ("hf_checkpoint: nowhere", "role critic: --hf-checkpoint {tmp}/nowhere: no such directory"),
        ("save: /proc/critic", "role critic: --save /proc/critic: /proc cannot be written"),
        ("custom_megatron_init_path: ''", "role critic: --custom-megatron-init-path: the path is empty"),
        *(
            (line, f"{line.split(':')[0]} is the same for actor and critic; give it on the command line")
            for line in (
                "random_init: true", "ref_load: x", "initial_megatron_checkpoint: x", "gamma: 0.9", "lambd: 0.9",
                "eps_clip: 0.1", "loss_type: sft_loss", "advantage_estimator: grpo", "exit_on_missing_checkpoint: true",
            )
        ),
    ],
)  # fmt: skip
def test_what_a_run_is_refused_for_a_critic_is_too(tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "roles.yaml"
    path.write_text(f"megatron:\n  - role: critic\n    overrides:\n      seed: 3\n      {line}\n")
    with pytest.raises(UserError) as error:
        parse(tmp_path, "--advantage-estimator", "ppo", "--megatron-config-path", str(path))
    told = [found for found in str(error.value).splitlines() if found.startswith(f"{path}:")]
    assert len(told) == 1 and told[0].startswith(f"{path}:5: {message.format(tmp=tmp_path)}")


def test_what_the_run_is_refused_for_is_not_told_of_its_critic_again(tmp_path):
    path = tmp_path / "roles.yaml"
    path.write_text("megatron: [{role: critic, overrides: {clip_grad: 0.5}}]\n")
    words = [
        "--lr",
        "-1",
        "--min-lr",
        "1",
        "--global-batch-size",
        "3",
        "--freeze-params-name-list",
        "(",
        "--fp8-format",
        "e4m3",
    ]
    refused = []
    for file in ([], ["--megatron-config-path", str(path)]):
        with pytest.raises(UserError) as error:
            parse(tmp_path, "--advantage-estimator", "ppo", *words, *file)
        refused.append(str(error.value))
    assert refused[0] == refused[1] and len(refused[0].splitlines()) >= 4


def test_what_a_plan_notes_of_a_critic(tmp_path):
    path = tmp_path / "roles.yaml"
    path.write_text("megatron: [{role: critic, overrides: {optimizer: muon}}]\n")
    notes = parse(tmp_path, "--advantage-estimator", "ppo", "--megatron-config-path", str(path), "--dry-run").plan_notes
    assert [note.partition(": another")[0] for note in notes] == [f"{path}:1: role critic: --optimizer muon"]


def test_paths_of_a_critic_are_absolute_and_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    text = "megatron: [{role: critic, overrides: {save: ~/critic, load: critic}}]\n"
    args, _ = apply(tmp_path, text)
    assert args.role_overrides == {"critic": {"save": f"{tmp_path}/critic", "load": f"{tmp_path}/critic"}}


def test_a_value_that_replaces_a_typed_one_is_told_with_its_line(tmp_path, caplog):
    (tmp_path / "roles.yaml").write_text(
        "megatron:\n  - role: actor\n    overrides:\n      clip_grad: 0.5\n      lr: 1e-5\n"
    )
    parse(tmp_path, "--lr", "1e-6", "--megatron-config-path", f"{tmp_path}/roles.yaml")
    assert f"{tmp_path}/roles.yaml:5: role actor: lr 1e-05 replaces 1e-06 of the command line" in caplog.text
