"""Rules about generation (sampling, lengths, staleness, rewards), training (objective, replay, distillation, trained
parameters), the way of weights to the engines, and trackers."""

import argparse
import importlib.util
import logging
import math
import re
from collections.abc import Iterator

from slime.algorithms.estimators import estimator, names_of_estimators
from slime.arguments.checkpoints import REFERENCE, TEACHER, other_model_states
from slime.arguments.config_files.eval_file import places_in
from slime.arguments.derivation import FULLY_ASYNC, GRADING_FUNCTION, OWN, ROLLOUT_BUFFER
from slime.arguments.flag import flag_of
from slime.arguments.sizes import positions_of_model
from slime.arguments.violations import Kind, Rule, Violation, broken, refused, refused_each, warned, where
from slime.utils.checkpoint_directory import is_iteration_in
from slime.utils.filesystem import holding
from slime.utils.prompt_rows import SFT_FUNCTION
from slime.utils.reward_types import REMOTE, bare_reward_type, is_reward_type, known_reward_types, lacks_checks

logger = logging.getLogger(__name__)

_ABOVE_POSITIONS = "is above the model's {--max-position-embeddings=}; give at most that"
_SCHEMES = ("http://", "https://")
_LENGTHS = tuple(f"{kind}_max_{part}_len" for kind in ("rollout", "eval") for part in ("context", "prompt", "response"))


def lengths(args: argparse.Namespace) -> Iterator[Violation]:
    """Prompt and response must fit into the context, and the context into the positions of the model."""
    for kind in ("rollout", "eval"):
        context = vars(args)[f"{kind}_max_context_len"]
        for part in ("prompt", "response"):
            flag, length = f"--{kind}-max-{part}-len", vars(args)[f"{kind}_max_{part}_len"]
            if context is not None and length is not None and length >= context:
                most = {"most": context - 1}
                yield broken(args, "{0=} must be below {1=}, at most {most}", flag, f"--{kind}-max-context-len", **most)
    limit = positions_of_model(args)
    for name in _LENGTHS if limit is not None else ():
        length = vars(args)[name]
        # A length that was derived from the context is too long only if the context is, and the context is checked here too.
        if name in args.typed_flags and length is not None and length > limit:
            yield broken(args, f"{{0=}} {_ABOVE_POSITIONS}", flag_of(name))


def lengths_of_sets(args: argparse.Namespace) -> Iterator[Violation]:
    """The lengths in `--eval-config` must fit as those of the flags must, and no set may ask for more than it allows."""
    limit, context = positions_of_model(args), args.eval_max_context_len
    place = places_in(args.eval_config if args.eval_datasets else None)
    for dataset in args.eval_datasets:
        where, length = place(dataset.name, "max_response_len"), dataset.max_response_len
        if length is not None and (dataset.min_new_tokens or 0) > length:
            template = "{--eval-min-new-tokens}: set {name} asks for {least} tokens and allows {length}; ask for fewer"
            yield broken(args, template, least=dataset.min_new_tokens, name=dataset.name, length=length)
        if where is None:
            continue
        if context is not None and length >= context:
            template = "max_response_len {length} must be below {--eval-max-context-len=}, at most {most}"
            yield broken(args, template, length=length, most=context - 1).at(where)
        elif limit is not None and length > limit:
            yield broken(args, f"max_response_len {{length}} {_ABOVE_POSITIONS}", length=length).at(where)


def summed_lengths(args: argparse.Namespace) -> Iterator[Violation]:
    """Warns of prompts and responses that are too long together, so that engines refuse the requests; yields nothing."""
    for kind, response in (
        ("rollout", args.rollout_max_response_len),
        ("eval", args.eval_max_response_len or args.rollout_max_response_len),
    ):
        prompt = vars(args)[f"{kind}_max_prompt_len"]
        if vars(args)[f"{kind}_max_context_len"] is not None or prompt is None or response is None:
            continue
        limits = {"--max-position-embeddings": positions_of_model(args)}
        limits["--sglang-context-length"] = args.sglang_context_length
        flag, limit = min(((flag, n) for flag, n in limits.items() if n), key=lambda pair: pair[1], default=("", 0))
        if limit and prompt + response > limit:
            logger.warning(
                "--%s-max-prompt-len %d and a response of %d tokens are together above %s %d, and engines refuse such "
                "requests; --%s-max-context-len %d shortens the responses", kind, prompt, response, flag, limit, kind, limit,
            )  # fmt: skip
    yield from ()


def staleness(args: argparse.Namespace) -> Iterator[Violation]:
    least = unavoidable_staleness(args)
    if args.max_weight_staleness is not None and args.max_weight_staleness < least:
        template = (
            "{--max-weight-staleness=}: with {--async-buffer-size=} and {--update-weights-interval=} samples are up to {least} "
            "versions old when they are trained; give at least {least}, or a smaller buffer"
        )
        yield broken(args, template, least=least)


def unavoidable_staleness(args: argparse.Namespace) -> int:
    """Pushes while a rollout waits: `async_buffer_size` others train before it, with a push per `update_weights_interval`."""
    return math.ceil(args.async_buffer_size / args.update_weights_interval) if args.asynchronous else 0


def reward_types(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yields (flag or place in a file, name) of every built-in reward that the run asks for."""
    # A custom reward function may define reward types of its own.
    if args.custom_rm_path is not None:
        return
    if args.rm_type:
        yield "--rm-type", args.rm_type
    place = places_in(args.eval_config if args.eval_datasets else None)
    for dataset in args.eval_datasets:
        if dataset.rm_type and dataset.custom_rm_path is None:
            yield f"{place(dataset.name, 'rm_type')}: rm_type", dataset.rm_type


def rewards(args: argparse.Namespace) -> Iterator[Violation]:
    for place, name in reward_types(args):
        flags, template, kind = ["--rm-type"] if place == "--rm-type" else [], None, Kind.WRONG
        own = args.reward_key or args.custom_reward_post_process_path
        if not is_reward_type(name):
            template = "{place} {name} is no built-in reward; known types: {known}, or give {--custom-rm-path}"
        elif bare_reward_type(name) == REMOTE and args.rm_url is None and args.has_engines:
            template = "{place} {name} needs {--rm-url}, the address of the service that grades"
        elif bare_reward_type(name) == "dapo" and not (own if flags else args.eval_reward_key):
            template = "{place} {name} grades with a dict; give {--reward-key} score, the entry that counts"
        elif args.has_engines and lacks_checks(name):
            template, kind = "{place} {name} needs the package lm-eval[ifeval], or IFBench on PYTHONPATH", Kind.MISSING
        if template is not None:
            yield broken(args, template, *flags, kind=kind, place=place, name=name, known=known_reward_types())


_OF_STEPS = ("over_sampling_batch_size", "keep_surplus_groups", "rollout_all_samples_process_path")
# Evaluation by the usual function reads these, too.
_OF_SAMPLES = ("custom_generate_function_path", "custom_rm_path", "rollout_sample_hook_path")
_OF_GENERATION = (*_OF_STEPS, *_OF_SAMPLES, "partial_rollout", "group_rm")
_REPLAYED = f"{OWN}forge_load"
# Our rollout functions, by the beginning of their paths -> (why they do not read some flags, which these are).
_UNREAD = {
    FULLY_ASYNC: ("its rollouts take finished groups in turn", _OF_STEPS),
    ROLLOUT_BUFFER: ("its groups come generated and graded", (*_OF_GENERATION, "buffer_filter_path")),
    SFT_FUNCTION: ("it only takes chats", (*_OF_GENERATION, "dynamic_sampling_filter_path")),
    _REPLAYED: ("it replays a dump", (*_OF_GENERATION, "dynamic_sampling_filter_path", "buffer_filter_path")),
}


def unread_flags(args: argparse.Namespace) -> Iterator[Violation]:
    """Flags that a rollout function of ours never reads; beside one that generates nothing they are only warned of."""
    path, batch = args.rollout_function_path, args.rollout_batch_size
    why, names = next((row for start, row in _UNREAD.items() if path.startswith(start)), ("", ()))
    evaluates = args.eval_interval is not None and not args.eval_function_path.startswith(tuple(_UNREAD))
    for name in names:
        value = vars(args)[name]
        if not value or (name == "over_sampling_batch_size" and value == batch) or (evaluates and name in _OF_SAMPLES):
            continue
        if path.startswith((FULLY_ASYNC, ROLLOUT_BUFFER)):
            yield broken(
                args, "{0=}: no effect with {--rollout-function-path=}: {why}; drop the former", flag_of(name), why=why
            )
        else:
            logger.warning("%s: no effect with %s: %s", flag_of(name), path, why)


_PROOF = "with {--true-on-policy-mode} samples must come from the weights that train on them"
ROLLOUT_RULES: tuple[Rule, ...] = (
    refused(lambda args: not args.rollout_temperature > 0,
        "{--rollout-temperature=}: training needs a value above 0 (1.0 is usual); {--eval-temperature} may be 0"),
    refused(lambda args: args.eval_temperature is not None and args.eval_temperature < 0,
        "{--eval-temperature=}: it must not be negative; 0 is greedy"),
    refused_each(("rollout_top_p", "eval_top_p"), lambda args, mass: mass is not None and not 0 < mass <= 1,
        "{0=}: it is a share of the probability, above 0 and at most 1"),
    refused_each(("rollout_top_k", "eval_top_k"), lambda args, count: count is not None and count != -1 and count < 1,
        "{0=}: give -1 for no cut, or at least 1"),
    refused(lambda args: "" in (args.rollout_stop or []),
        "{--rollout-stop}: an empty stop string would end every response at once; give text, or drop the flag"),
    lengths, lengths_of_sets, summed_lengths, unread_flags, staleness,
    refused(lambda args: args.asynchronous and (args.colocate or args.release_train or args.offload_rollout
            or args.offload_train and (not args.use_critic or not args.typed_flags.isdisjoint({"offload", "offload_train"}))),
        "{--colocate}, {--offload} and {--release-train}: train_async.py generates while it trains, so trainer and engines "
        "need GPUs of their own and cannot sleep or end; use train.py, or drop the flag"),
    refused(lambda args: not args.asynchronous and args.has_engines and args.update_weights_interval != 1,
        "{--update-weights-interval=}: train.py pushes the weights after every rollout; use train_async.py, or give 1"),
    refused(lambda args: not args.asynchronous and args.rollout_function_path.startswith(FULLY_ASYNC),
        "{--rollout-function-path=} generates while the trainer works: use train_async.py"),
    *where(lambda args: args.rollout_function_path.startswith(ROLLOUT_BUFFER),
        refused(lambda args: args.rollout_buffer_url is None,
            "{--rollout-function-path=} takes its groups from a service: give {--rollout-buffer-url} http://127.0.0.1:8889"),
        refused(lambda args: args.use_rollout_routing_replay or args.rollout_top_k != -1,
            "{--use-rollout-routing-replay}, {--rollout-top-p} and {--rollout-top-k} need what no buffer tells; drop it")),
    *where(lambda args: args.eval_interval is not None and args.has_engines,
        refused(lambda args: args.eval_function_path.startswith((FULLY_ASYNC, ROLLOUT_BUFFER, SFT_FUNCTION)),
            f"{{--eval-function-path=}} does not evaluate: give {{--eval-function-path}} {GRADING_FUNCTION}"),
        refused(lambda args: args.eval_function_path.startswith(_REPLAYED)
                and "{rollout_id}" not in (args.load_forge_rollout_data or ""),
            "{--eval-function-path=} takes an evaluation from a dump of its own: give {{rollout_id}} in the path of "
            f"{{--load-forge-rollout-data}}, or {{--eval-function-path}} {GRADING_FUNCTION}")),
    *where(lambda args: args.true_on_policy_mode,
        refused(lambda args: args.asynchronous, f"train_async.py trains on older samples: {_PROOF}; use train.py"),
        refused(lambda args: args.num_steps_per_rollout != 1,
            f"{{num_steps_per_rollout}} optimizer steps per rollout: {_PROOF}; give {{--num-steps-per-rollout}} 1"),
        refused_each(("keep_old_actor", "keep_surplus_groups"), lambda args, asked: asked, f"{{0}}: {_PROOF}; drop it"),
        refused(lambda args: args.partial_rollout and not args.mask_offpolicy_in_partial_rollout,
            f"{{--partial-rollout}}: {_PROOF}; add {{--mask-offpolicy-in-partial-rollout}}")),
    rewards,
    refused_each(("rm_url", "rollout_buffer_url"), lambda args, url: url is not None and not url.startswith(_SCHEMES),
        "{0=}: it must start with http:// or https://"),
)  # fmt: skip

_SERVED_TEACHER = "slime.rollout.on_policy_distillation.reward_func"
# Functions that can set `teacher_log_probs` of a sample, or of the train batch.
_SETS_TEACHER_LOG_PROBS = (
    "custom_rm_path", "custom_generate_function_path", "rollout_function_path", "rollout_sample_hook_path",
    "custom_reward_post_process_path", "custom_convert_samples_to_train_data_path",
)  # fmt: skip


def _clips_both_sides(args: argparse.Namespace) -> bool:
    return args.loss_type == "policy_loss" and not estimator(args.advantage_estimator).clips_one_side


OBJECTIVE_RULES: tuple[Rule, ...] = (
    # Loss
    refused(lambda args: args.loss_type == "custom_loss" and args.custom_loss_function_path is None,
        "{--loss-type=} needs {--custom-loss-function-path}, such as my_losses.py:my_loss"),
    refused(lambda args: args.eps_clip_c is not None and args.eps_clip_c <= 1,
        "{--eps-clip-c=}: it must be above 1 (3.0 is usual)"),
    warned(lambda args: estimator(args.advantage_estimator).clips_one_side and args.eps_clip < 1,
        "{--advantage-estimator=} with {--eps-clip=}: its lower bound is normally off (--eps-clip 1.0)"),
    refused(lambda args: _clips_both_sides(args) and args.eps_clip > 1,
        "{--eps-clip=}: the probability ratio may fall to 1 - {eps_clip}, and it is never below 0; give at most 1, which "
        "switches the lower bound off (0.2 is usual)"),
    warned(lambda args: _clips_both_sides(args) and args.eps_clip_high < args.eps_clip <= 1,
        "{--eps-clip-high=} is below {--eps-clip=}: probabilities may rise by less than they may fall; the other way round "
        "is usual (0.28 and 0.2)"),
    warned(lambda args: args.n_samples_per_prompt == 1 and args.rewards_normalization and args.loss_type == "policy_loss"
            and estimator(args.advantage_estimator).centers,
        "{--n-samples-per-prompt=} with rewards normalisation: every group has one member, so all advantages are zero"),
    # Reference
    refused(lambda args: args.kl_coef != 0 and args.kl_loss_coef != 0,
        "{--kl-coef=} and {--kl-loss-coef=} count the KL twice, in the reward and in the loss; set one of them to 0"),
    *where(lambda args: args.ref_load is None and args.has_trainer,
        refused_each(("kl_coef", "use_kl_loss", "ref_update_interval"), lambda args, asked: asked,
            "{0=} needs {--ref-load}, the reference checkpoint; {--hf-checkpoint}'s directory would do")),
    # Estimator
    refused(lambda args: estimator(args.advantage_estimator).needs_whitening and not args.normalize_advantages,
        "{--advantage-estimator=} needs {--normalize-advantages}"),
    refused(lambda args: args.num_critic_only_steps and not args.use_critic,
        "{--num-critic-only-steps=}: {--advantage-estimator=} has no critic; give {--advantage-estimator} "
        f"{names_of_estimators('needs_critic')}, or 0"),
    refused(lambda args: args.use_critic and args.has_trainer and not args.offload_train,
        "{--no-offload-train} with {--advantage-estimator=}: actor and critic take turns on the same GPUs; drop it"),
    warned(lambda args: args.use_critic and args.num_rollout and args.num_critic_only_steps >= args.num_rollout,
        "{--num-critic-only-steps=} of {--num-rollout=}: the critic alone is trained, the actor never"),
    *where(lambda args: args.has_trainer and not args.compute_advantages_and_returns,
        refused(lambda args: args.use_critic,
            "{--advantage-estimator=}: its critic learns returns; drop {--disable-compute-advantages-and-returns}"),
        refused(lambda args: args.loss_type == "policy_loss" and not args.use_critic
                and not (args.rollout_data_postprocess_path or args.custom_convert_samples_to_train_data_path),
            "{--loss-type=} needs advantages: drop {--disable-compute-advantages-and-returns}, or give a function of yours "
            "that sets them ({--rollout-data-postprocess-path} or {--custom-convert-samples-to-train-data-path})")),
    # Importance sampling
    refused(lambda args: args.use_rollout_logprobs and args.custom_tis_function_path is not None and not args.use_tis
            and "use_tis" not in args.typed_flags,
        "{--use-rollout-logprobs} with {--custom-tis-function-path}: its weights would count the mismatch of engine and "
        "trainer twice; give use_tis: false in {--custom-config-path} where it applies none, or drop one"),
    refused(lambda args: args.use_rollout_logprobs and args.use_tis,
        "{--use-rollout-logprobs} and {--use-tis} exclude each other: with the engine's log-probs as old ones there is no "
        "difference left to correct; keep one"),
    refused(lambda args: args.tis_clip_low > args.tis_clip, "{--tis-clip-low=} is above {--tis-clip=}; 0 is usual"),
    warned(lambda args: args.use_tis and not args.tis_clip_low <= 1 <= args.tis_clip,
        "{--tis-clip-low=} and {--tis-clip=} leave 1 out: tokens on which engine and trainer agree are weighted too (0 and 2 "
        "are usual)"),
    # Distillation
    refused(lambda args: not args.use_opd and args.opd_teacher_load is not None,
        "{--opd-teacher-load=} has no effect without {--use-opd}; add {--use-opd} {--opd-type} megatron, or drop it"),
    refused(lambda args: args.use_opd and args.opd_type == "megatron" and args.opd_teacher_load is None,
        "{--opd-type=} needs {--opd-teacher-load}, the teacher's checkpoint; or give {--opd-type} sglang"),
    # With this type the teacher is a server, and a function of the run asks it for the log-probs of every sample.
    *where(lambda args: args.use_opd and args.opd_type == "sglang",
        refused(lambda args: args.opd_teacher_load is not None,
            "{--opd-type=}: the teacher is behind {--rm-url}; drop {--opd-teacher-load=}, or give {--opd-type} megatron"),
        refused(lambda args: args.has_engines and args.typed_flags.isdisjoint(_SETS_TEACHER_LOG_PROBS),
            f"{{--opd-type=}} needs a function that asks the teacher: {{--custom-rm-path}} {_SERVED_TEACHER}, or one of yours "
            "that sets teacher_log_probs"),
        refused(lambda args: args.has_engines and args.custom_rm_path == _SERVED_TEACHER and args.rm_url is None
                and "teacher" not in (model.name for model in args.served_models or ()),
            "{--custom-rm-path=} needs {--rm-url}, the teacher's address, such as http://10.0.0.1:30000, or a model `teacher` "
            "in --sglang-config"),
        refused(lambda args: args.has_engines and args.rm_url is None
                and any(model.name == "teacher" and model.update_weights for model in args.served_models or ()),
            "{--opd-type=}: the model `teacher` of {--sglang-config} would get the trainer's weights with every push; give it "
            "update_weights: false, or give {--rm-url}"),
        warned(lambda args: args.has_engines and args.rollout_temperature != 1,
            "{--opd-type=} with {--rollout-temperature=}: the teacher is asked for log-probs at that temperature, but many "
            "engines give those of a prompt at 1.0 whatever they are asked; make sure that this one does not, or give 1.0"),
        warned(lambda args: args.has_engines and args.rollout_top_k != -1,
            "{--opd-type=} with {--rollout-top-p=} and {--rollout-top-k=}: log-probs of the student are among the tokens that "
            "sampling kept, the teacher's among all; give {--rollout-top-p} 1 {--rollout-top-k} -1, or {--opd-type} megatron")),
)  # fmt: skip


def routing_replay(args: argparse.Namespace) -> Iterator[Violation]:
    if not args.use_routing_replay or not args.has_trainer or args.num_layers is None:
        return
    flag = "--use-rollout-routing-replay" if args.use_rollout_routing_replay else "--use-routing-replay"
    if not args.num_experts:
        template = "{0}: the model has no experts ({--num-experts}), so there is no routing to replay; drop the flag"
        yield broken(args, template, flag)
        return
    if args.loss_type == "sft_loss":
        template = "{0} with {--loss-type=}: no earlier pass has chosen experts for these samples; drop the flag"
        yield broken(args, template, flag)
    if args.moe_router_fusion:
        yield broken(args, "{0}: the kernel of {--moe-router-fusion} chooses experts by itself; drop one of them", flag)


def parameter_patterns(args: argparse.Namespace) -> Iterator[Violation]:
    for name in ("only_train_params_name_list", "freeze_params_name_list"):
        for pattern in vars(args)[name] or []:
            problem = None if pattern else "it is empty, and would match every parameter"
            try:
                re.compile(pattern)
            except re.error as error:
                problem = f"it is no regular expression ({error})"
            if problem is not None:
                template = "{0} {pattern}: {problem}; write one such as 'layers\\.0\\.'"
                yield broken(args, template, flag_of(name), pattern=pattern, problem=problem)


def fixed_models(args: argparse.Namespace) -> Iterator[Violation]:
    """Reference and teacher must be the same at every start of a run."""
    for state, name in ((REFERENCE, "ref_load"), (TEACHER, "opd_teacher_load")):
        path, step = vars(args)[name], name.replace("load", "ckpt_step")
        path = path if state in other_model_states(args) else None
        if holding(args.save_hf, path):
            yield broken(args, "{--save-hf=} would overwrite {0=}; give another directory", flag_of(name))
        own, is_own = "{0=} is where {--save} puts checkpoints: ", holding(args.save, path) and holding(path, args.save)
        if is_own and vars(args)[step] is None:
            own += "a later start would take the newest; give its iteration by {1}, or another {--save}"
            yield broken(args, own, flag_of(name), flag_of(step))
        elif args.keep_last is not None and (is_own or is_iteration_in(args.save, path)):
            own += "{--keep-last=} would delete what is read there; drop {--keep-last}, or give another {--save}"
            yield broken(args, own, flag_of(name))


WEIGHT_RULES: tuple[Rule, ...] = (
    refused(lambda args: args.only_train_params_name_list and args.freeze_params_name_list,
        "{--only-train-params-name-list} and {--freeze-params-name-list} exclude each other: both say what trains; keep one"),
    parameter_patterns, *where(lambda args: args.has_trainer, fixed_models),
    refused(lambda args: args.update_weight_transport == "disk" and args.update_weight_disk_dir is None,
        "{--update-weight-transport=} needs {--update-weight-disk-dir}, a directory that trainer and engines share"),
    refused(lambda args: args.update_weight_mode == "delta" and args.colocate,
        "{--update-weight-mode=} with {--colocate}: weights are handed over in memory there; give {--update-weight-mode} full"),
    refused(lambda args: args.rollout_external and args.update_weight_local_checkpoint_dir is not None,
        "{--update-weight-local-checkpoint-dir} with {--rollout-external-engine-addrs}: a run copies nothing there; drop it"),
    *where(lambda args: args.update_weight_mode == "delta" and not args.colocate,
        refused(lambda args: args.update_weight_transport != "disk",
            "{--update-weight-mode=} with {--update-weight-transport=}: deltas are files: give disk"),
        refused(lambda args: args.update_weight_local_checkpoint_dir is None,
            "{--update-weight-mode=} needs {--update-weight-local-checkpoint-dir}, where every engine host applies the deltas"),
        refused(lambda args: args.update_weight_delta_checksum == "blake3" and importlib.util.find_spec("blake3") is None,
            "{--update-weight-delta-checksum=} needs the package `blake3`: install it on all hosts, or give xxh3-128")),
    *where(lambda args: args.release_train,
        refused(lambda args: args.train_backend != "megatron",
            "{--release-train} with {--train-backend=}: only megatron supports it; drop it"),
        refused(lambda args: args.use_critic,
            "{--release-train} with {--advantage-estimator=}: the critic would be lost; drop it"),
        refused_each(("keep_old_actor", "async_save"), lambda args, asked: asked,
            "{--release-train} with {0=}: ranks end after every rollout, and the copy in their memory with them; drop one"),
        refused(lambda args: args.no_save_rng or args.no_save_optim and not args.use_stateless_adam,
            "{--release-train} with {--no-save-optim} or {--no-save-rng}: these states would be lost in every step; drop it"),
        refused(lambda args: args.save is None,
            "{--release-train} recreates the trainer from a checkpoint for each step; give {--save}"),
        refused(lambda args: args.save_interval not in (None, 1),
            "{--release-train} recreates the trainer from a checkpoint for each step, so {--save-interval=} must be 1"),
        refused(lambda args: (args.update_weight_mode, args.update_weight_transport) != ("full", "disk"),
            "{--release-train} recreates the trainer from a checkpoint for each step and hands weights over as files: give "
            "{--update-weight-mode} full {--update-weight-transport} disk instead of {update_weight_mode} over "
            "{update_weight_transport}")),
    *where(lambda args: args.use_stateless_adam,
        refused(lambda args: args.optimizer != "adam", "{--use-stateless-adam} with {--optimizer=}: give {--optimizer} adam"),
        refused(lambda args: not args.decoupled_weight_decay,
            "{--use-stateless-adam} with {--no-decoupled-weight-decay}: its decay is decoupled; drop one of them"),
        refused(lambda args: not args.no_save_optim,
            "{--use-stateless-adam} has no optimizer state to save: add {--no-save-optim}")),
    warned(lambda args: args.moe_apply_probs_on_input and args.has_engines,
        "{--moe-apply-probs-on-input}: engines multiply the output of experts by their weights; unless they serve your own "
        "model that multiplies the input, their log-probs are those of another policy"),
    *(warned(lambda args, name=name: vars(args)[name] is not None and args.has_trainer and args.has_engines,
        f"{{{flag_of(name)}=}}: engines go by config.json, which says nothing of it; unless they serve your own model that "
        "does the same, their log-probs are those of another policy")
      for name in ("softmax_scale", "rotary_seq_len_interpolation_factor")),
    *where(lambda args: args.keep_old_actor and args.loss_type == "policy_loss" and not args.use_rollout_logprobs
           and not args.debug_train_only,
        warned(lambda args: not args.asynchronous,
            "{--keep-old-actor} without train_async.py: the weights that generated a rollout train on it, but the old "
            "log-probs come from the weights before"),
        warned(lambda args: args.asynchronous and (args.async_buffer_size, args.update_weights_interval) != (1, 1),
            "{--keep-old-actor} with {--async-buffer-size=} and {--update-weights-interval=}: it fits 1 and 1; here some "
            "old log-probs come from other weights than their samples; give {--use-rollout-logprobs} instead"),
        warned(lambda args: args.asynchronous and args.update_weights_in_flight,
            "{--keep-old-actor} with {--update-weights-in-flight}: tokens of one answer come from several weights, and old "
            "log-probs from one; give {--use-rollout-logprobs} instead")),
)  # fmt: skip


def idle_tracker_flags(args: argparse.Namespace) -> Iterator[Violation]:
    """Warns of all W&B flags without `--use-wandb` in one line; yields nothing."""
    idle = sorted(name for name in args.typed_flags if name.startswith("wandb_") and not args.use_wandb)
    if idle:
        logger.warning("%s: no effect without --use-wandb", ", ".join(map(flag_of, idle)))
    yield from ()


TRACKER_RULES: tuple[Rule, ...] = (
    refused(lambda args: args.use_wandb and importlib.util.find_spec("wandb") is None,
        "{--use-wandb} needs the package wandb: pip install wandb"),
    refused(lambda args: args.use_tensorboard and importlib.util.find_spec("tensorboard") is None,
        "{--use-tensorboard} needs the package tensorboard: pip install tensorboard"),
    refused(lambda args: args.wandb_host is not None and not args.wandb_host.startswith(_SCHEMES),
        "{--wandb-host=}: it must start with http:// or https://, as in https://wandb.example.com"),
    refused(lambda args: args.profile and not args.use_pytorch_profiler and args.has_trainer,
        "{--profile} traces nothing by itself; give {--use-pytorch-profiler}"),
    *where(lambda args: args.use_pytorch_profiler and args.has_trainer,
        refused(lambda args: not 0 <= args.profile_step_start < args.profile_step_end,
            "{--profile-step-start=}, {--profile-step-end=}: the end must come after the start, and the start not before 0"),
        refused(lambda args: args.num_rollout and args.profile_step_start >= args.num_rollout,
            "{--profile-step-start=}: none of {--num-rollout=} rollouts is traced, they count from 0; give a smaller number"),
        refused(lambda args: not set(args.profile_ranks or ()) <= set(range(args.world_size)),
            "{--profile-ranks=}: there are {world_size} training ranks, which count from 0; give some of these")),
    idle_tracker_flags,
)  # fmt: skip
