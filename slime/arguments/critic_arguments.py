"""What the ranks of a critic are told, and where its weights come from.

The critic is a second model on the training ranks' devices. Its arguments are the run's with the overrides of its role and
with what does not concern it switched off. It follows the actor: it starts where the actor starts, and resumes at the
iteration at which the actor resumes. Unless its role says otherwise, its checkpoints lie in `critic/` below the actor's.
"""

import argparse
from pathlib import Path

from slime.arguments.checkpoints import (
    WeightSource,
    checkpoint_source,
    is_megatron_checkpoint,
    iteration_directory,
    latest_iteration,
)
from slime.arguments.config_files.role_config import CRITIC, role_args
from slime.arguments.hf_config import is_hf_checkpoint
from slime.arguments.megatron.values import derive_virtual_stages
from slime.arguments.model_shape import padded_vocabulary
from slime.arguments.sizes import data_parallel_size
from slime.utils.errors import UserError

# Below the directory of the actor's checkpoints.
DIRECTORY = "critic"
# What belongs to the actor alone. The critic has no other set of weights, its loss is its own, it is not exported, and it
# learns in every rollout.
_OF_THE_ACTOR = {
    "use_kl_loss": False, "keep_old_actor": False, "ref_update_interval": None, "opd_type": None, "save_hf": None,
    "custom_loss_function_path": None, "rollout_data_postprocess_path": None, "save_debug_train_data": None,
    "num_critic_only_steps": 0,
}  # fmt: skip


def critic_args(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments of the critic's ranks: a copy of the checked arguments of the run, changed."""
    critic = role_args(args, CRITIC)
    for name, value in _OF_THE_ACTOR.items():
        setattr(critic, name, value)
    critic.role = CRITIC
    critic.initial_weights = getattr(args, "critic_initial_weights", None)
    if "save" not in _overrides(args):
        critic.save = None if args.save is None else str(Path(args.save) / DIRECTORY)
    _derive_layout(critic)
    return critic


def _derive_layout(critic: argparse.Namespace) -> None:
    """Values that follow from parallel sizes, which may be overridden."""
    critic.data_parallel_size = data_parallel_size(critic)
    critic.sequence_parallel = critic.sequence_parallel and critic.tensor_model_parallel_size > 1
    if "virtual_pipeline_model_parallel_size" not in critic.typed_flags | _overrides(critic).keys():
        critic.virtual_pipeline_model_parallel_size = None
        derive_virtual_stages(critic)
    if "padded_vocab_size" not in critic.typed_flags and critic.vocab_size is not None:
        critic.padded_vocab_size = None
        critic.padded_vocab_size = padded_vocabulary(critic)


def critic_weights(args: argparse.Namespace) -> WeightSource:
    """The source of the critic's weights; `args.initial_weights` says where the actor's come from.

    Raises:
        UserError: the actor resumes, and the critic has no checkpoint of that iteration; the actor starts anew, and the
            critic would resume; a directory is no checkpoint.
    """
    overrides, actor = _overrides(args), args.initial_weights
    load, from_weights_only = overrides.get("load"), bool(overrides.get("finetune"))
    if actor.resume and not from_weights_only:
        return _resumed(args, load)
    if load is not None and (is_megatron_checkpoint(load) or not _is_first_launch(load, overrides)):
        return _started(args, load, overrides)
    if "hf_checkpoint" in overrides:
        return checkpoint_source(overrides["hf_checkpoint"], None, _key(args, "hf_checkpoint"))
    # Its own resume is the actor's affair; here only the weights are meant.
    return WeightSource(actor.kind, actor.path, actor.step)


def _resumed(args: argparse.Namespace, load: str | None) -> WeightSource:
    actor = args.initial_weights
    iteration = latest_iteration(actor.path) if actor.step is None else actor.step
    path = Path(load) if load is not None else Path(actor.path) / DIRECTORY
    anew = "give `finetune: true` in the overrides of the critic in --megatron-config-path, and it starts anew"
    step = _overrides(args).get("ckpt_step", iteration)
    if step != iteration:
        raise UserError(
            f"{_key(args, 'ckpt_step')} {step}: the actor resumes at iteration {iteration}, and both have to be at the same "
            f"one; drop it, or {anew}"
        )
    # A run that ended while it published may have a newer critic than actor: the actor's pointer decides.
    if not (iteration_directory(path, iteration) / "metadata.json").is_file():
        found = sorted(directory.name for directory in path.glob("iter_*")) if path.is_dir() else []
        raise UserError(
            f"the actor resumes at iteration {iteration} of {actor.path}, but {path} has no checkpoint of the critic of that "
            f"iteration (it has {', '.join(found[-5:]) or 'none'}); give the directory as `load` of the critic in "
            f"--megatron-config-path, or {anew}"
        )
    return WeightSource("megatron", str(path), iteration, resume=True)


def _started(args: argparse.Namespace, load: str, overrides: dict) -> WeightSource:
    source = checkpoint_source(load, overrides.get("ckpt_step"), _key(args, "load"), _key(args, "ckpt_step"))
    if source.kind == "megatron" and not overrides.get("finetune"):
        raise UserError(
            f"{_key(args, 'load')} {load} is at iteration {latest_iteration(load)}, but the actor starts at 0 from "
            f"{args.initial_weights}; give the actor its checkpoint in --load, or the critic `finetune: true` to take only "
            "the weights"
        )
    return source


def _is_first_launch(load: str, overrides: dict) -> bool:
    """Whether the critic is to resume from its own directory of checkpoints, which holds none yet."""
    return overrides.get("save") == load and not is_hf_checkpoint(load)


def _overrides(args: argparse.Namespace) -> dict:
    return getattr(args, "role_overrides", {}).get(CRITIC, {})


def _key(args: argparse.Namespace, name: str) -> str:
    return f"{args.megatron_config_path}, role critic: {name}"
