"""Arguments of the critic's ranks, and where its weights come from."""

import copy

import pytest

from slime.arguments import validate_args
from slime.arguments.checkpoints import WeightSource
from slime.arguments.config_files.role_config import critic_args
from slime.arguments.derivation import settle_precision
from slime.arguments.sizes import train_iterations
from slime.utils.checkpoint_directory import POINTER
from slime.utils.errors import UserError
from tests.support.models.args import parse, write_config

PPO = ("--advantage-estimator", "ppo")


def checkpoint(directory, *iterations):
    for iteration in iterations:
        (directory / f"iter_{iteration:07d}").mkdir(parents=True)
        (directory / f"iter_{iteration:07d}" / "metadata.json").write_text("{}")
    (directory / POINTER).write_text(str(iterations[-1]))
    return directory


def roles(tmp_path, overrides, role="critic"):
    """The flags that give the critic, or the actor, these overrides."""
    path = tmp_path / "roles.yaml"
    path.write_text(f"megatron: [{{role: {role}, overrides: {{{overrides}}}}}]\n")
    return ("--megatron-config-path", str(path))


def source(tmp_path, *words):
    return parse(tmp_path, *PPO, *words).critic_initial_weights


def test_a_run_of_ppo_is_accepted_with_everything_about_its_critic(tmp_path):
    args = parse(tmp_path, *PPO, "--num-critic-only-steps", "2", "--value-clip", "0.3")
    # What follows from the critic asks for nothing that is not built.
    assert args.use_critic and args.offload_train and not args.colocate
    assert not hasattr(parse(tmp_path), "critic_initial_weights")


def test_what_belongs_to_the_actor_is_off(tmp_path):
    model = str(tmp_path / "model")
    words = [
        "--kl-coef",
        "0.1",
        "--ref-load",
        model,
        "--save",
        str(tmp_path / "run"),
        "--save-hf",
        str(tmp_path / "hf"),
    ]
    args = parse(tmp_path, *PPO, "--dry-run", *words, "--save-debug-train-data", str(tmp_path / "{rollout_id}.pt"))
    critic = critic_args(args)
    assert (critic.role, critic.kl_coef, critic.use_kl_loss, critic.keep_old_actor) == ("critic", 0.0, False, False)
    assert (critic.save_hf, critic.save_debug_train_data) == (None, None)
    assert critic.untie_embeddings_and_output_weights and not args.untie_embeddings_and_output_weights
    assert critic.save == str(tmp_path / "run" / "critic")
    assert args.kl_coef == 0.1 and args.save == str(tmp_path / "run")


def test_without_a_directory_for_the_actor_the_critic_has_none(tmp_path):
    assert critic_args(parse(tmp_path, *PPO)).save is None


def test_own_directory_and_training(tmp_path):
    args = parse(tmp_path, *PPO, "--save", str(tmp_path / "run"), *roles(tmp_path, "save: /elsewhere, lr: 0.5"))
    critic = critic_args(args)
    assert (critic.save, critic.lr) == ("/elsewhere", 0.5) and args.lr != 0.5


def test_the_same_directory_as_the_actors_is_refused(tmp_path):
    run = str(tmp_path / "run")
    with pytest.raises(UserError, match="role critic: save .*run: the actor's checkpoints go there"):
        parse(tmp_path, *PPO, "--save", run, *roles(tmp_path, f"save: {run}"))


def test_a_layout_of_its_own_changes_what_follows_from_it(tmp_path):
    words = ["--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    args = parse(tmp_path, *PPO, *words, *roles(tmp_path, "tensor_model_parallel_size: 1"))
    critic = critic_args(args)
    assert (args.data_parallel_size, args.sequence_parallel, args.padded_vocab_size) == (2, True, 512)
    assert (critic.data_parallel_size, critic.sequence_parallel, critic.padded_vocab_size) == (4, False, 384)


def test_it_is_as_deterministic_as_the_actor(tmp_path):
    args = parse(tmp_path, *PPO, "--true-on-policy-mode")
    assert args.deterministic_mode and critic_args(args).deterministic_mode
    assert not critic_args(parse(tmp_path, *PPO)).deterministic_mode


def test_what_the_run_says_of_pipeline_stages_is_nothing_to_a_critic_without_any(tmp_path):
    words = "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1 --batch-p2p-sync"
    args = parse(tmp_path, *PPO, *words.split(), *roles(tmp_path, "pipeline_model_parallel_size: 1"))
    critic = critic_args(args)
    assert (args.decoder_last_pipeline_num_layers, critic.decoder_last_pipeline_num_layers) == (1, None)
    assert (args.data_parallel_size, critic.data_parallel_size) == (1, 2)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ("lr: 0.5", (True, False, "bfloat16")),
        ("fp16: true", (False, True, "float16")),
        ("bf16: false", (False, False, "float32")),
    ],
)
def test_a_precision_of_its_own_stays_where_only_the_ranks_have_gpus(tmp_path, overrides, expected):
    args = copy.copy(parse(tmp_path, *PPO, *roles(tmp_path, overrides)))
    settle_precision(args, on_gpus=True)
    critic = critic_args(args)
    assert args.bf16 and (critic.bf16, critic.fp16, critic.params_dtype_name) == expected


def test_gradients_of_a_precision_of_its_own_are_added_up_as_before_where_ranks_have_no_gpus(tmp_path):
    words = ["--dry-run", "--dry-run-gpu-memory-gib", "80"]
    args = copy.copy(parse(tmp_path, *PPO, *words, *roles(tmp_path, "bf16: true")))
    settle_precision(args, on_gpus=False)
    critic = critic_args(args)
    assert critic.bf16 and critic.accumulate_allreduce_grads_in_fp32
    assert not (args.bf16 or args.accumulate_allreduce_grads_in_fp32)


# What differs between the roles where nothing says how either is trained. Where the actor starts anew it is told not to load
# what only a resume loads.
BY_ROLE = {
    "role", "save", "untie_embeddings_and_output_weights", "disable_param_buffer_cpu_backup", "origins", "typed_flags",
    "finetune", "no_load_optim", "no_load_rng",
}  # fmt: skip


@pytest.mark.parametrize(
    "overrides",
    [
        "global_batch_size: 4", "num_steps_per_rollout: 2", "rollout_batch_size: 8, n_samples_per_prompt: 4, num_rollout: 7",
        "rotary_base: 1000000", "num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, vocab_size: 300",
        "use_dynamic_batch_size: true, max_tokens_per_gpu: 512", "bf16: true", "async_save: true, save_interval: 2",
        "use_rollout_entropy: true, gamma: 0.9, num_critic_only_steps: 0", "n_samples_per_prompt: 1",
    ],
)  # fmt: skip
def test_run_network_and_batches_are_the_same_where_the_actors_overrides_name_them(tmp_path, overrides):
    model = write_config(tmp_path / "other", rope_theta=1e6 if "rotary_base" in overrides else 1e4)
    words = ["--hf-checkpoint", str(model), "--save", str(tmp_path / "run")]
    args = parse(tmp_path, *PPO, *words, *roles(tmp_path, overrides, "actor"))
    critic = critic_args(args)
    assert {name for name in vars(args) if vars(critic)[name] != vars(args)[name]} <= BY_ROLE
    assert train_iterations(critic) == train_iterations(args)


@pytest.mark.parametrize(
    "overrides, differing",
    [
        ("lr: 0.01, lr_decay_iters: 9", {"lr", "lr_decay_iters"}),
        (
            "gradient_checkpointing: true",
            {"gradient_checkpointing", "recompute_granularity", "recompute_method", "recompute_num_layers"},
        ),
        ("tensor_model_parallel_size: 2", {"tensor_model_parallel_size", "data_parallel_size", "padded_vocab_size"}),
        ("custom_megatron_init_path: a.py:f", {"custom_megatron_init_path"}),
    ],
)
def test_how_one_is_trained_is_not_how_the_other_is(tmp_path, monkeypatch, overrides, differing):
    """Whichever of the two is meant, what follows from its values is its own, too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("def f(args):\n    pass\n")
    for role in ("actor", "critic"):
        args = parse(tmp_path, *PPO, "--actor-num-gpus-per-node", "2", *roles(tmp_path, overrides, role))
        critic = critic_args(args)
        of_role, of_other = (args, critic) if role == "actor" else (critic, args)
        assert {name for name in vars(args) if vars(critic)[name] != vars(args)[name]} - BY_ROLE == differing
        assert vars(of_other) | {"role": 0} != vars(of_role) | {"role": 0}
        assert of_role.recompute_granularity == ("full" if "gradient" in overrides else None)
        assert of_role.custom_megatron_init_path in (None, f"{tmp_path}/a.py:f")
        assert of_other.recompute_granularity is of_other.custom_megatron_init_path is None


def test_a_run_that_is_checked_again_has_the_same_critic(tmp_path):
    words = [*PPO, *roles(tmp_path, "kl_coef: 0.3, recompute_activations: true, bf16: true")]
    args = parse(tmp_path, *words)
    before, critic = copy.deepcopy(vars(args)), vars(critic_args(args))
    validate_args(args)
    assert vars(args) == before and vars(critic_args(args)) == critic
    assert (critic["kl_coef"], critic["recompute_granularity"], critic["params_dtype_name"]) == (
        0.3,
        "selective",
        "bfloat16",
    )


@pytest.mark.parametrize("name", ["async_save: true", "save_interval: 1", "release_train: true"])
def test_how_the_run_saves_is_the_same_for_both(tmp_path, name):
    """The driver waits for one kind of save, at one time, and both models write theirs then."""
    words = [*PPO, "--save", str(tmp_path / "run"), *roles(tmp_path, name)]
    with pytest.raises(UserError, match=f"roles.yaml:1: {name.split(':')[0]} is the same for actor and critic"):
        parse(tmp_path, *words)


def test_a_new_critic_starts_where_the_actor_starts(tmp_path):
    assert source(tmp_path) == WeightSource("hf", str(tmp_path / "model"))
    assert source(tmp_path, "--random-init") == WeightSource("random")
    reference = checkpoint(tmp_path / "sft", 3)
    assert source(tmp_path, "--ref-load", str(reference)) == WeightSource("megatron", str(reference))


def test_a_run_that_ended_before_the_actors_first_checkpoint_starts_again(tmp_path):
    run = tmp_path / "run"
    checkpoint(run / "critic", 0)
    assert source(tmp_path, "--load", str(run), "--save", str(run)).kind == "hf"


def test_the_critic_resumes_with_the_actor(tmp_path):
    run = checkpoint(tmp_path / "run", 3, 5)
    checkpoint(run / "critic", 3, 5)
    below = str(run / "critic")
    assert source(tmp_path, "--load", str(run)) == WeightSource("megatron", below, 5, resume=True)
    assert source(tmp_path, "--load", str(run), "--ckpt-step", "3") == WeightSource("megatron", below, 3, resume=True)


def test_a_critic_that_was_published_before_the_run_ended_goes_back_to_the_actors_iteration(tmp_path):
    run = checkpoint(tmp_path / "run", 3)
    checkpoint(run / "critic", 3, 5)
    assert source(tmp_path, "--load", str(run)).step == 3


def test_a_directory_of_its_own(tmp_path):
    run, own = checkpoint(tmp_path / "run", 5), checkpoint(tmp_path / "own", 5)
    found = source(tmp_path, "--load", str(run), *roles(tmp_path, f"load: {own}, save: {own}"))
    assert found == WeightSource("megatron", str(own), 5, resume=True)


def test_first_launch_with_a_directory_of_its_own(tmp_path):
    run, own = str(tmp_path / "run"), str(tmp_path / "own")
    assert source(tmp_path, "--load", run, "--save", run, *roles(tmp_path, f"load: {own}, save: {own}")).kind == "hf"


@pytest.mark.parametrize(
    "iterations, overrides, message",
    [
        (
            (),
            "lr: 0.1",
            r"the actor resumes at iteration 5 of .*run, but the critic has no .* in .*run/critic \(it has none\)",
        ),
        ((3,), "lr: 0.1", r"\(it has iter_0000003\); give the directory as `load` .* `finetune: true`"),
    ],
)
def test_both_have_to_be_at_the_same_iteration(tmp_path, iterations, overrides, message):
    run = checkpoint(tmp_path / "run", 5)
    if iterations:
        checkpoint(run / "critic", *iterations)
    with pytest.raises(UserError, match=message):
        source(tmp_path, "--load", str(run), *roles(tmp_path, overrides))


def test_a_critic_ahead_of_a_new_actor_is_refused_unless_only_its_weights_are_meant(tmp_path):
    own = checkpoint(tmp_path / "own", 7)
    with pytest.raises(UserError, match="role critic: load .*own is at iteration 7, but the actor starts at 0"):
        source(tmp_path, *roles(tmp_path, f"load: {own}"))
    found = source(tmp_path, *roles(tmp_path, f"load: {own}, finetune: true"))
    assert found == WeightSource("megatron", str(own))


@pytest.mark.parametrize("save", ["run", "elsewhere"])
def test_a_critic_that_starts_anew_beside_an_actor_that_resumes(tmp_path, caplog, save):
    """A run that goes on elsewhere has nothing of a critic yet, whatever lies beside the actor's checkpoint."""
    run, before = checkpoint(tmp_path / "run", 5), checkpoint(tmp_path / "before", 5)
    if save == "elsewhere":
        checkpoint(run / "critic", 5)
    words = ["--load", str(run), "--save", str(tmp_path / save)]
    found = source(tmp_path, *words, *roles(tmp_path, "finetune: true"))
    assert (found.path, found.resume) == (str(run), False)
    assert source(tmp_path, *words, *roles(tmp_path, f"load: {before}, finetune: true")) == WeightSource(
        "megatron", str(before)
    )
    missing = f"but the critic has no checkpoint of that iteration in {tmp_path}/{save}/critic (it has none)"
    assert f"{missing}: with `finetune: true` it starts anew" in caplog.text


@pytest.mark.parametrize(
    "overrides, own",
    [
        ("load: {tmp}/before, finetune: true", "run/critic"),
        ("load: {tmp}/before, finetune: true, ckpt_step: 3", "run/critic"),
        ("load: {tmp}/before, finetune: true, save: {tmp}/own", "own"),
        ("load: {tmp}/own, finetune: true, save: {tmp}/own", "own"),
        ("save: {tmp}/own", "own"),
        ("load: {tmp}/other", "run/critic"),
        ("load: {tmp}/before", "run/critic"),
        ("load: {tmp}/before, save: {tmp}/own", "own"),
        ("ckpt_step: 3", "run/critic"),
    ],
)
def test_the_same_command_goes_on_with_the_critic_as_this_run_trained_it(tmp_path, caplog, overrides, own):
    """What its first start took from elsewhere is not taken again, although another checkpoint may have the same iteration."""
    run = checkpoint(tmp_path / "run", 3, 5)
    checkpoint(tmp_path / "before", 3, 5)
    write_config(tmp_path / "other")
    checkpoint(tmp_path / own, 3, 5)
    words = ["--load", str(run), "--save", str(run), *roles(tmp_path, overrides.format(tmp=tmp_path))]
    assert source(tmp_path, *words) == WeightSource("megatron", str(tmp_path / own), 5, resume=True)
    told = "role critic: ckpt_step: no effect, the critic resumes where the actor does, at iteration 5"
    assert (told in caplog.text) == ("ckpt_step" in overrides)


def test_a_run_that_branches_off_another_takes_the_critic_that_it_is_told(tmp_path):
    """What lies beside the actor's checkpoint, or where this run will save, comes after that."""
    run, other, own = (checkpoint(tmp_path / name, 3, 5) for name in ("run", "other", "own"))
    checkpoint(run / "critic", 3, 5)
    words = ["--load", str(run), "--save", str(tmp_path / "new")]
    for overrides, taken in (
        (f"load: {other}, save: {own}", other),
        (f"load: {other}", other),
        ("lr: 0.1", run / "critic"),
    ):
        found = source(tmp_path, *words, *roles(tmp_path, overrides))
        assert found == WeightSource("megatron", str(taken), 5, resume=True), overrides


def test_a_step_without_a_checkpoint_to_take_it_from_is_warned_of(tmp_path, caplog):
    told = f"{tmp_path}/roles.yaml, role critic: ckpt_step: no effect without a Megatron checkpoint in `load`"
    own, other = checkpoint(tmp_path / "own", 3, 5), write_config(tmp_path / "other")
    assert source(tmp_path, *roles(tmp_path, f"ckpt_step: 3, load: {own}, finetune: true")).step == 3
    assert told not in caplog.text
    for overrides in ("ckpt_step: 3", f"ckpt_step: 3, load: {other}"):
        caplog.clear()
        assert source(tmp_path, *roles(tmp_path, overrides)).kind == "hf"
        assert told in caplog.text, overrides


def test_weights_of_another_model(tmp_path):
    other = write_config(tmp_path / "other")
    assert source(tmp_path, *roles(tmp_path, f"hf_checkpoint: {other}")) == WeightSource("hf", str(other))
    assert source(tmp_path, *roles(tmp_path, f"load: {other}")) == WeightSource("hf", str(other))


def test_the_shape_of_another_model_is_that_of_its_config(tmp_path):
    other = write_config(tmp_path / "other", rope_theta=5e5, num_hidden_layers=3)
    args = parse(tmp_path, *PPO, *roles(tmp_path, f"hf_checkpoint: {other}"))
    critic = critic_args(args)
    assert (args.rotary_base, args.num_layers, critic.rotary_base, critic.num_layers) == (10000, 2, 500000, 3)
    with pytest.raises(UserError, match="roles.yaml:1: role critic: hf_validate_args failed(.|\n)*--num-layers +2 +3"):
        parse(tmp_path, *PPO, "--num-layers", "2", *roles(tmp_path, f"hf_checkpoint: {other}"))


def test_a_critic_without_a_hugging_face_directory_says_its_shape_itself(tmp_path):
    with pytest.raises(UserError, match="roles.yaml:1: role critic: the model's shape is not known"):
        parse(tmp_path, *PPO, *roles(tmp_path, "hf_checkpoint: null"))
    shape = (
        "num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, vocab_size: 300, swiglu: true"
    )
    shape += ", disable_bias_linear: true, normalization: RMSNorm, model_name: qwen3"
    found = source(tmp_path, *roles(tmp_path, f"hf_checkpoint: null, {shape}"))
    assert found == WeightSource("hf", str(tmp_path / "model"))


@pytest.mark.parametrize("path", ["/nowhere", "{tmp}"])
def test_what_is_no_checkpoint_is_refused(tmp_path, path):
    with pytest.raises(UserError, match="role critic: load"):
        source(tmp_path, *roles(tmp_path, f"load: {path.format(tmp=tmp_path)}"))
