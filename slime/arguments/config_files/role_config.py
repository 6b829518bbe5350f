"""`--megatron-config-path`: arguments that differ between the actor and the critic.

    megatron:
      - {name: actor, role: actor, overrides: {lr: 1.0e-6}}
      - {name: critic, role: critic, overrides: {lr: 1.0e-5, save: /checkpoints/critic}}

The run's arguments are those of the actor, so its overrides are merged into them like lines of `--custom-config-path`,
before anything is derived or checked. Of the critic's arguments those stay aside that it may have for itself.

The overrides of a critic may say how it is built and trained. What it is trained on, and where, is the run's: it is a second
model on the devices of the training ranks. Its arguments (`critic_args`) are those of the run, with two differences: it has
values of its own, from which the same further values are derived as for the actor; and what concerns the actor alone is
switched off. The critic follows the actor: it starts where the actor starts, and resumes at the iteration at which the actor
resumes. Unless its overrides say otherwise, its checkpoints lie in `critic/` below the actor's.
"""

import argparse
import copy
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slime.algorithms.estimators import estimator, names_of_estimators
from slime.arguments.checkpoints import WeightSource, checkpoint_source
from slime.arguments.config_files.custom_config import read_flag_values, set_from_file, sets_plug_in
from slime.arguments.config_files.flag_names import FlagNames, attribute_name
from slime.arguments.flag import attribute_of, flag_of
from slime.arguments.help_text import groups_of
from slime.arguments.hf_config import is_hf_checkpoint
from slime.arguments.origins import Origin
from slime.arguments.paths import PATHS, absolute
from slime.arguments.violations import Kind, Violation, without_consequences
from slime.observability.run_record import shown
from slime.utils.checkpoint_directory import is_megatron_checkpoint, iteration_directory, latest_iteration
from slime.utils.errors import UserError
from slime.utils.misc import near_name
from slime.utils.yaml_file import YamlMapping, load_yaml

logger = logging.getLogger(__name__)

FLAG = "--megatron-config-path"
ROLES = (ACTOR, CRITIC) = ("actor", "critic")
_ENTRY_KEYS = ("name", "role", "overrides", "args", "num_nodes", "num_gpus_per_node")
_IGNORED_KEYS = ("num_nodes", "num_gpus_per_node")
_FILE_FLAGS = ("custom_config_path", "megatron_config_path")

# What a critic does not take over from the actor: it has no reference and no teacher, its output layer is a value head
# of its own, and its parameters are kept on the host while the actor works.
CRITIC_DEFAULTS: dict[str, Any] = {
    "kl_coef": 0.0,
    "use_opd": False,
    "custom_advantage_function_path": None,
    "untie_embeddings_and_output_weights": True,
    "disable_param_buffer_cpu_backup": False,
}
# Those of them that go into advantages and returns, which the actor's ranks make.
_UNREAD = ("kl_coef", "use_opd", "custom_advantage_function_path")

# What a critic may have for itself: titles of groups of flags, and further flags. All others are the run's. How a model is
# trained each has apart; of the network and of its batches the critic has what the actor has, unless it overrides that itself.
_TRAINING = (
    frozenset({"FSDP", "Megatron hooks", *map("Megatron: {}".format, (
        "parallelism", "precision and fusion", "optimizer and schedule", "recomputation and offload", "other"))}),
    frozenset({*CRITIC_DEFAULTS, "load", "ckpt_step", "finetune", "no_load_optim", "no_load_rng", "save", "no_save_optim",
        "no_save_rng", "only_train_params_name_list", "freeze_params_name_list", "freeze_indexer", "qwen_gdn_backend", "seed",
        "lr", "clip_grad", "calculate_per_token_loss", "recompute_loss_function", "reset_optimizer_states",
        "use_stateless_adam", "value_clip"}),
)  # fmt: skip
_NETWORK = (
    frozenset(map("Megatron: {}".format, ("model shape", "experts", "latent and linear attention"))),
    frozenset({"hf_checkpoint", "model_name", "model_args_from_hf", "custom_model_provider_path", "use_gated_attention",
        "post_self_attn_layernorm", "post_mlp_layernorm", "dsa_indexer_layers", "dsa_indexer_rope_interleave", "allgather_cp",
        "padded_vocab_size", "bf16", "fp16", "micro_batch_size", "max_tokens_per_gpu", "data_pad_size_multiplier"}),
)  # fmt: skip


def apply_role_config(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Merge the actor's overrides into `args`, and values of its own into `args.custom_config`; `args.role_overrides` holds
    those of both roles, and `args.critic_values` what the critic has for itself, in a run that has one.

    Returns:
        One message per wrong line.
    """
    args.role_overrides, violations = load_role_configs(args, parser)
    overrides = args.role_overrides.get(ACTOR, {})
    before = {name: vars(args).get(name) for name in overrides}, set(args.typed_flags)
    for name, value in overrides.items():
        set_from_file(args, name, value, f"{place_in(args.megatron_config_path, ACTOR, name)}: role actor")
    known = {action.dest for action in parser._actions}
    args.custom_config = {**args.custom_config, **{name: overrides[name] for name in overrides if name not in known}}
    has_critic = estimator(args.advantage_estimator).needs_critic
    args.critic_values = _values_of_critic(args, parser, *before) if has_critic else {}
    if CRITIC in args.role_overrides and not has_critic:
        line = "%s: the run has no critic (--advantage-estimator %s has), its entry has no effect"
        logger.warning(line, FLAG, names_of_estimators("needs_critic"))
    return violations


def _values_of_critic(
    args: argparse.Namespace, parser: argparse.ArgumentParser, before: dict[str, Any], typed: set[str]
) -> dict[str, Any]:
    """The values that a critic may have for itself, before anything is derived from them. It inherits those of the run, but not
    those with which only the actor is trained.

    Args:
        before: the values that the overrides of the actor replaced; typed: what had been typed before them.
    """
    overrides, network = _overrides(args), attributes_of(parser, *_NETWORK)
    trained = attributes_of(parser, *_TRAINING) - network
    shared = {action.dest for action in parser._actions} - trained
    values = {name: vars(args)[name] for name in trained | network}
    values |= {name: value for name, value in before.items() if name not in shared}
    if args.role_overrides:
        values["typed_flags"] = (args.typed_flags - (before.keys() - shared - typed)) | overrides.keys()
    return values | overrides


def attributes_of(parser: argparse.ArgumentParser, titles: frozenset[str], names: frozenset[str]) -> set[str]:
    """The attributes of the flags in groups with these titles, and of those among `names` that the parser knows."""
    of_groups = {action.dest for title, actions in groups_of(parser) if title in titles for action in actions}
    return of_groups | {action.dest for action in parser._actions if action.dest in names}


def load_role_configs(
    args: argparse.Namespace, parser: argparse.ArgumentParser
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The overrides per role in the file of `--megatron-config-path`, converted by their flags.

    Returns:
        Role → attribute → value, with the values of the user's own among them; one message per wrong line.
    """
    path = args.megatron_config_path
    if path is None:
        return {}, []
    roles: dict[str, dict[str, Any]] = {}
    violations: list[str] = []
    names = FlagNames(parser)
    try:
        entries = _entries(load_yaml(path, FLAG), violations)
    except UserError as error:
        return {}, [str(error)]
    for role, overrides in entries:
        _drop_ignored(overrides)
        plug_ins_set = sets_plug_in(args, overrides, names)
        values, custom, wrong = read_flag_values(overrides, names, plug_ins_set=plug_ins_set)
        violations += wrong
        for dest in _FILE_FLAGS:
            if dest in values:
                violations.append(f"{overrides.where(values.pop(dest)[0])}: a role cannot name another file")
        if role == CRITIC:
            own = attributes_of(parser, *_TRAINING) | attributes_of(parser, *_NETWORK)
            for dest, (key, value) in list(values.items()):
                place = f"{overrides.where(key)}: {key}"
                if dest not in own:
                    violations.append(f"{place} is the same for actor and critic; give it on the command line")
                    del values[dest]
                elif dest in _UNREAD and value:
                    logger.warning("%s has no effect on the critic: the actor's ranks make its returns; drop it", place)
        # The processes that use a role's paths do not run where the command was typed.
        flags = {dest: absolute(value) if dest in PATHS and value else value for dest, (_, value) in values.items()}
        roles[role] = {**flags, **custom}
        if roles[role]:
            logger.info("%s, role %s: %s", path, role, ", ".join(roles[role]))
    return roles, violations


def role_args(args: argparse.Namespace, role: str) -> argparse.Namespace:
    """The arguments of one role, as a copy: the actor's are the run's, the critic's as the module says.

    Raises:
        ValueError: no such role.
    """
    if role not in ROLES:
        raise ValueError(f"role {role!r}: it must be one of {', '.join(ROLES)}")
    if role == ACTOR:
        return copy.copy(args)
    result = begin_critic(args)
    switch_off(result)
    return result


def begin_critic(args: argparse.Namespace) -> argparse.Namespace:
    """A copy of `args` with the critic's own values."""
    critic = copy.copy(args)
    vars(critic).update(args.critic_values)
    critic.typed_flags = set(critic.typed_flags)
    critic.origins = {**args.origins, **dict.fromkeys(_overrides(args), Origin.YAML)}
    return critic


def switch_off(critic: argparse.Namespace) -> None:
    """Switch off, in the critic's arguments and in place, what concerns the actor alone."""
    vars(critic).update(_not_of_critic(critic))


def _not_of_critic(args: argparse.Namespace) -> dict[str, Any]:
    """Attribute → the value with which what concerns the actor alone is off, unless the critic's overrides set it."""
    overrides = _overrides(args)
    return {**{name: value for name, value in CRITIC_DEFAULTS.items() if name not in overrides}, **_OF_THE_ACTOR}


def keep_critic(args: argparse.Namespace, critic: argparse.Namespace) -> None:
    """Have `critic_args` build arguments like `critic`, which are derived and checked, out of `args`, which are too."""
    constant = {*_not_of_critic(args), "origins"}
    # Where the ranks have GPUs and this machine has none, or the other way round, the run's precision is settled once more.
    precision = {"bf16", "fp16", "params_dtype_name", "accumulate_allreduce_grads_in_fp32"}
    kept = precision if {"bf16", "fp16"} & _overrides(args).keys() else set()
    args.critic_values = {
        name: value
        for name, value in vars(critic).items()
        if name not in constant and (name in kept or name not in vars(args) or value != vars(args)[name])
    }


def of_critic(args: argparse.Namespace, found: Iterable[Violation], of_run: Iterable[Violation]) -> Iterator[Violation]:
    """Those of the violations `found` of the critic's arguments that are not the run's as well, each with its line."""
    said = {violation.message for violation in of_run}
    wrong = {flag for violation in of_run if violation.kind is Kind.OUT_OF_BOUNDS for flag in violation.flags}
    for violation in without_consequences(found, wrong) if args.role_overrides else ():
        if violation.message not in said:
            place = place_in(args.megatron_config_path, CRITIC, *map(attribute_of, violation.flags))
            yield violation.at(f"{place}: role critic")


def place_in(path: str, role: str, *names: str) -> str:
    """`file:line` of the first override of `role` that sets one of the attributes, else of its overrides, else the file.

    `path`: a file that `load_role_configs` could read.
    """
    overrides = dict(_entries(load_yaml(path, FLAG), [])).get(role)
    if overrides is None:
        return path
    meant = (key for key in overrides if attribute_of(flag_of(attribute_name(key))) in names)
    return overrides.where(next(meant, None))


def _entries(mapping: YamlMapping, violations: list[str]) -> list[tuple[str, YamlMapping]]:
    """(role, its overrides) of every entry that makes sense; what does not goes to `violations`."""
    found: dict[str, YamlMapping] = {}
    for key in mapping:
        if key not in ("megatron", "critic"):
            hint = near_name(key, ("megatron", "critic")) or "megatron"
            violations.append(f"{mapping.where(key)}: unknown key {key}: did you mean {hint}?")
    if "critic" in mapping:
        _add_old_form(mapping, found)
    listed = mapping.get("megatron", [])
    if not isinstance(listed, list):
        raise UserError(f"{mapping.where('megatron')}: megatron: expected a list of `{{name, role, overrides}}`")
    for entry in listed:
        if not isinstance(entry, YamlMapping):
            wrong = f"{shown('megatron', entry)} is no entry; write `{{role: actor, …}}`"
            raise UserError(f"{mapping.where('megatron')}: megatron: {wrong}")
        try:
            role = _role_of(entry)
            if role in found:
                raise UserError(
                    f"{entry.where()}: a second entry for the role {role}; the first is {found[role].where()}"
                )
            found[role] = _overrides_of(entry)
        except UserError as error:
            violations.append(str(error))
    return list(found.items())


def _add_old_form(mapping: YamlMapping, found: dict[str, YamlMapping]) -> None:
    """`critic: {lr: …}` at the top, from before roles were listed."""
    overrides = mapping["critic"]
    if not isinstance(overrides, YamlMapping):
        raise UserError(f"{mapping.where('critic')}: critic: expected `name: value` lines below it")
    if {attribute_name(key) for key in overrides} & {"overrides", "args"}:
        overrides = _overrides_of(overrides)
    logger.warning("%s: `critic:` is the old form; list it as `megatron: [{role: critic, …}]`", mapping.where("critic"))
    found["critic"] = overrides


def _role_of(entry: YamlMapping) -> str:
    unknown = [key for key in entry if attribute_name(key) not in _ENTRY_KEYS]
    if unknown:
        near = near_name(attribute_name(unknown[0]), _ENTRY_KEYS)
        hint = f"flags of the role go below `overrides:`; known: {', '.join(_ENTRY_KEYS)}"
        hint = f"did you mean {near}?" if near else hint
        raise UserError(f"{entry.where(unknown[0])}: unknown key {unknown[0]}: {hint}")
    _drop_ignored(entry)
    role = entry.get("role", entry.get("name"))
    if role not in ROLES:
        where = entry.where("role" if "role" in entry else None)
        raise UserError(f"{where}: role {role!r}: it must be one of {', '.join(ROLES)}")
    return role


def _drop_ignored(mapping: YamlMapping) -> None:
    for key in [key for key in mapping if attribute_name(key) in _IGNORED_KEYS]:
        logger.warning("%s: %s has no effect: roles share the GPUs of the actor", mapping.where(key), key)
        del mapping[key]


def _overrides_of(entry: YamlMapping) -> YamlMapping:
    given = [key for key in entry if key in ("overrides", "args")]
    if len(given) > 1:
        raise UserError(f"{entry.where(given[1])}: `args` is another spelling of `overrides`; keep one")
    if not given or entry[given[0]] is None:
        return YamlMapping(entry.path, entry.line)
    overrides = entry[given[0]]
    if not isinstance(overrides, YamlMapping):
        expected = f"expected `name: value` lines below it, not {shown(given[0], overrides)}"
        raise UserError(f"{entry.where(given[0])}: {given[0]}: {expected}")
    return overrides


# The critic's directory of checkpoints, below that of the actor.
DIRECTORY = "critic"
# Values that belong to the actor alone. The critic has no other set of weights, has a loss of its own, is not exported, and
# learns in every rollout.
_OF_THE_ACTOR = {
    "use_kl_loss": False, "keep_old_actor": False, "ref_update_interval": None, "opd_type": None, "save_hf": None,
    "custom_loss_function_path": None, "rollout_data_postprocess_path": None, "save_debug_train_data": None,
    "num_critic_only_steps": 0, "use_routing_replay": False,
}  # fmt: skip


def critic_args(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments of the critic's ranks: a copy of the checked arguments of the run, changed."""
    critic = role_args(args, CRITIC)
    critic.role = CRITIC
    critic.initial_weights = args.critic_initial_weights
    if "save" not in _overrides(args):
        critic.save = None if args.save is None else str(Path(args.save) / DIRECTORY)
    return critic


def critic_weights(args: argparse.Namespace) -> WeightSource:
    """The source of the critic's weights; `args.initial_weights` says where the actor's come from.

    Raises:
        UserError: the actor resumes, and the critic has no checkpoint of that iteration; the actor starts anew, and the
            critic would resume; a directory is no checkpoint.
    """
    overrides, actor = _overrides(args), args.initial_weights
    load, resumed = overrides.get("load"), _resumed(args) if actor.resume else None
    if resumed is not None:
        return resumed
    if "ckpt_step" in overrides and (load is None or not is_megatron_checkpoint(load)):
        logger.warning("%s: no effect without a Megatron checkpoint in `load`", _key(args, "ckpt_step"))
    # Its own directory of checkpoints, which holds none yet, is where it is to resume from later.
    is_first_launch = load is not None and overrides.get("save") == load and not is_hf_checkpoint(load)
    if load is not None and (is_megatron_checkpoint(load) or not is_first_launch):
        return _started(args, load, overrides)
    if overrides.get("hf_checkpoint") is not None:
        return checkpoint_source(overrides["hf_checkpoint"], None, _key(args, "hf_checkpoint"))
    # The actor decides whether the critic resumes; here only the weights are meant.
    return WeightSource(actor.kind, actor.path, actor.step)


def _resumed(args: argparse.Namespace) -> WeightSource | None:
    """The critic's checkpoint of the iteration at which the actor resumes; None if it has none and is to start anew."""
    overrides, actor = _overrides(args), args.initial_weights
    iteration = latest_iteration(actor.path) if actor.step is None else actor.step
    anew, save = bool(overrides.get("finetune")), overrides.get("save")
    # What it starts from is in `load`, what this run has made of that where it saves.
    own = save or (args.save and str(Path(args.save) / DIRECTORY))
    goes_on = args.save is not None and Path(args.save).resolve() == Path(actor.path).resolve()
    told = () if anew else (overrides.get("load"), save, str(Path(actor.path) / DIRECTORY))
    places = [own if anew or goes_on else None, *told]
    places = [place for place in dict.fromkeys(places) if place]
    # The actor's pointer decides, because a run that ended while it published may have a newer critic than actor.
    for place in places:
        if (iteration_directory(place, iteration) / "metadata.json").is_file():
            if overrides.get("ckpt_step", iteration) != iteration:
                line = "%s: no effect, the critic resumes where the actor does, at iteration %d"
                logger.warning(line, _key(args, "ckpt_step"), iteration)
            return WeightSource("megatron", place, iteration, resume=True)
    found = sorted({directory.name for place in places for directory in Path(place).glob("iter_*")})
    lack = (
        f"the actor resumes at iteration {iteration} of {actor.path}, but the critic has no checkpoint of that iteration in "
        f"{' or '.join(places)} (it has {', '.join(found[-5:]) or 'none'})"
    )
    if anew:
        if places:
            logger.warning("%s: with `finetune: true` it starts anew", lack)
        return None
    raise UserError(
        f"{lack}; give the directory as `load` of the critic in --megatron-config-path, or give `finetune: true` in its "
        "overrides, and it starts anew"
    )


def _started(args: argparse.Namespace, load: str, overrides: dict) -> WeightSource:
    source = checkpoint_source(load, overrides.get("ckpt_step"), _key(args, "load"), _key(args, "ckpt_step"))
    if source.kind == "megatron" and not overrides.get("finetune"):
        raise UserError(
            f"{_key(args, 'load')} {load} is at iteration {latest_iteration(load)}, but the actor starts at 0 from "
            f"{args.initial_weights}; give the actor its checkpoint in --load, or the critic `finetune: true` to take only "
            "the weights"
        )
    return source


def _overrides(args: argparse.Namespace) -> dict:
    return args.role_overrides.get(CRITIC, {})


def _key(args: argparse.Namespace, name: str) -> str:
    return f"{args.megatron_config_path}, role critic: {name}"
