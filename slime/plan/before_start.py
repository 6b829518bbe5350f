"""What would end a run later, found after its arguments and before Ray starts, and whether anything is left to do.

The run would find these problems anyway, but only after the 10 to 20 seconds that its processes take to start, or after the
minutes that weights take to load. Of weights only headers, metadata and sizes of files are read.
"""

import argparse
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.arguments.checkpoints import (
    REFERENCE,
    TEACHER,
    WeightSource,
    other_model_states,
    source_of_reference,
    source_of_teacher,
)
from slime.arguments.config_files.eval_file import places_in
from slime.arguments.config_files.role_config import CRITIC, critic_args, place_in
from slime.arguments.config_files.serving_config import arguments_of_group, served_groups, served_models
from slime.arguments.flag import attribute_of, flag_of
from slime.arguments.hf_config import differing_flags, read_hf_config
from slime.arguments.server_flags import tensor_parallel_size
from slime.models.families import FAMILIES, model_args_from_hf
from slime.plan.placement import dtype_of_engine
from slime.plan.prompt_files import SCAN_SECONDS, files_of_the_run, prompt_problems
from slime.utils import env
from slime.utils.checkpoint_directory import (
    FSDP2,
    POINTER,
    TORCH_METADATA,
    evaluated_rollouts,
    iteration_directory,
    latest_iteration,
    read_torch_metadata,
    sharded_backend,
)
from slime.utils.errors import UserError
from slime.utils.processing_utils import lacks_tokenizer
from slime.weights.hf_reader import Place, places_of_checkpoint
from slime.weights.quantisers import loaded_once_on_gpus, quantisation_settings, settings_for_int4

logger = logging.getLogger(__name__)


def check_before_start(args: argparse.Namespace, scan_seconds: float = SCAN_SECONDS) -> None:
    """Check models, data, tokenizer and, if there are images, processor. Warn of evaluations that come too late.

    Raises:
        UserError: one message with everything that would end the run later.
    """
    # A run without engines may have no config.
    dtypes = other_dtypes(args, read_hf_config(args.hf_checkpoint) if args.has_engines else {})
    for warning in (*late_evaluations(args), *dtypes, *pushes_without_a_taker(args), *other_tokenizers(args)):
        logger.warning("%s", warning)
    problems = [
        *_checkpoint_problems(args),
        *_model_problems(args),
        *_int4_problems(args),
        *_stop_token_problems(args),
        *prompt_problems(args, scan_seconds),
    ]
    if problems:
        # The actor may start from the weights of the reference.
        raise UserError("\n".join(dict.fromkeys(problems)))


def late_evaluations(args: argparse.Namespace) -> Iterator[str]:
    """A warning if evaluations measure weights that are older than their place on the step axis says."""
    every, interval = args.eval_interval, args.update_weights_interval
    if args.asynchronous and args.has_trainer and args.has_engines and every is not None and every % interval:
        yield (
            f"--eval-interval {every} is no multiple of --update-weights-interval {interval}: an evaluation after a rollout "
            "without a push measures the weights of the push before it, which fewer rollouts trained than its eval/step says; "
            f"give a multiple of {interval}"
        )


def other_dtypes(args: argparse.Namespace, hf_config: dict[str, Any]) -> Iterator[str]:
    """A warning for each dtype of the run's own engines that differs from the trainer's."""
    if not args.has_trainer or not args.has_engines or args.rollout_external:
        return
    trained = [arguments_of_group(args, group).sglang_dtype for group in served_groups(args) if group.update_weights]
    if None in trained and args.on_gpus and args.params_dtype_name == "float32":
        yield (
            f"engines compute in {dtype_of_engine('auto', hf_config)}, as the config of --hf-checkpoint says, and the trainer "
            "in float32: every push casts the weights, and log-probs differ by the rounding; give --sglang-dtype float32"
        )
    for named in sorted(set(trained) - {None}):
        found = dtype_of_engine(named, hf_config)
        if found != args.params_dtype_name:
            yield (
                f"--sglang-dtype {named}: engines compute in {found}, and the trainer in {args.params_dtype_name}: every push "
                "casts the weights, and log-probs differ by the rounding; leave it out"
            )


def pushes_without_a_taker(args: argparse.Namespace) -> Iterator[str]:
    """A warning if engines with GPUs would not survive a push of the checkpoint's quantised form."""
    if not args.has_trainer or not args.has_engines or args.on_gpus is False or not args.hf_checkpoint:
        return
    name = loaded_once_on_gpus(args.hf_checkpoint)
    if name is not None:
        yield (
            f"--hf-checkpoint {args.hf_checkpoint}: {name}: on GPUs SGLang 0.5.21 takes pushes of packed weights for experts "
            "alone, and of FP8 weights with scales of blocks alone; the first push is likely to end engines with this "
            "checkpoint. Convert it with --strategy block (convert_hf_to_fp8.py), or leave all but experts alone "
            "(--ignore-rules of convert_hf_to_int4_direct.py and convert_hf_to_int4.py)"
        )


def other_tokenizers(args: argparse.Namespace) -> Iterator[str]:
    """A warning if the critic is another model, to which the ids of the run's tokens mean something else."""
    directory = critic_args(args).hf_checkpoint if args.has_trainer and args.use_critic else None
    if directory is None or args.hf_checkpoint in (None, directory):
        return
    here, there = _token_ids(args.hf_checkpoint), _token_ids(directory)
    differing = [token for token, number in here.items() if there.get(token) != number] if there else []
    if differing:
        place = place_in(args.megatron_config_path, CRITIC, "hf_checkpoint")
        yield (
            f"{place}: role critic: hf_checkpoint {directory} has another tokenizer than --hf-checkpoint {args.hf_checkpoint}: "
            f"{len(differing)} of its {len(here)} tokens have other ids there, or none ({differing[0]!r} is one), and the "
            "critic would value other texts than the actor writes; give it a model with the same tokenizer"
        )


def _token_ids(directory: str) -> dict[str, int]:
    """The tokens in tokenizer.json of a Hugging Face directory; none where it is missing or says them in another way."""
    try:
        content = json.loads((Path(directory) / "tokenizer.json").read_text(encoding="utf-8"))
        listed = content["model"]["vocab"]
        # Pieces with scores are numbered in their order.
        known = listed if isinstance(listed, dict) else {piece: number for number, (piece, _) in enumerate(listed)}
        return known | {added["content"]: added["id"] for added in content.get("added_tokens", ())}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def nothing_left(args: argparse.Namespace) -> str | None:
    """Why a run with these checked arguments would do nothing; None if it would do something, or if only its data can tell."""
    total = args.num_rollout
    if not total:
        return None  # with epochs only the data set knows, and 0 asks for nothing but an evaluation
    start, source = args.start_rollout_id, args.initial_weights
    if start is not None:
        return (
            None
            if start < total
            else f"nothing left to do: --start-rollout-id {start} is not below --num-rollout {total}"
        )
    if source is None or not source.resume:
        return None
    start = 1 + (latest_iteration(source.path) if source.step is None else source.step)
    if start < total or (start == total and lacks_evaluation(args, start)):
        return None
    return (
        f"nothing left to do: {start} rollouts are done in --load {source.path}, --num-rollout is {total}; a larger "
        "--num-rollout goes on from there"
    )


def lacks_evaluation(args: argparse.Namespace, start: int) -> bool:
    """Whether a run that goes on from a checkpoint of `start` rollouts lacks an evaluation that was due behind it, because the
    run that wrote the checkpoint ended before that evaluation did."""
    source = args.initial_weights
    if not args.has_engines or args.eval_interval is None or source is None or not source.resume:
        return False
    evaluated = evaluated_rollouts(source.path)
    return evaluated is not None and evaluated < start


def _checkpoint_problems(args: argparse.Namespace) -> Iterator[str]:
    """Why weights that training ranks start from are not there, are not whole, or are those of another model."""
    for place, source, of_role in _sources_of_ranks(args):
        if source.kind == "megatron":
            step = latest_iteration(source.path) if source.step is None else source.step
            yield from _iteration_problems(place, source, iteration_directory(source.path, step), of_role)
        elif source.kind == "hf" and source.path != args.hf_checkpoint:
            yield from _other_model(place, Path(source.path), _differing_config(of_role, Path(source.path)))


def _iteration_problems(place: str, source: WeightSource, directory: Path, args: argparse.Namespace) -> Iterator[str]:
    backend = sharded_backend(directory)
    if backend is None:
        what = "is no whole checkpoint" if directory.is_dir() else "does not exist"
        if source.step is None:
            pointer = Path(source.path) / POINTER
            yield f"{directory} {what}, although {pointer} names it; name a whole one there, or start elsewhere"
        else:
            yield f"{directory} {what}; ask for another step, or start elsewhere"
        return
    # A run that does not resume reads the weights alone, and no further sets of them.
    beside = [path.parent for path in directory.rglob(TORCH_METADATA)] if source.resume else []
    unread = () if source.resume and not args.no_load_optim else ("optimizer.",)
    try:
        stored = {one: read_torch_metadata(one) for one in {*beside, *([] if backend == FSDP2 else [directory])}}
        damage = [line for one in stored.values() for line in one.damage(lambda name: not name.startswith(unread))]
        if backend == FSDP2:
            places_of_checkpoint(directory)
    except UserError as error:
        damage = [str(error)]
    for line in damage:
        yield f"{place} {source.path}: {line}; copy the checkpoint again, or start from another one"
    if not damage:
        is_hf = backend == FSDP2
        yield from _other_model(place, directory, (_differing_config if is_hf else _differing_sizes)(args, directory))


def _other_model(place: str, directory: Path, differences: Iterable[tuple[str, object, object]]) -> Iterator[str]:
    """Args: differences: (flag, its value in the run, what the weights have)."""
    told = [f"{flag} {there} there, {here} here" for flag, here, there in differences]
    if told:
        yield f"{place} {directory} is of another model than the run's: {', '.join(told)}; give weights of the same model"


def _differing_config(args: argparse.Namespace, directory: Path) -> list[tuple[str, str, str]]:
    """Differences of a Hugging Face directory. Without --hf-checkpoint nothing but typed flags describe the run's model."""
    if args.hf_checkpoint is None:
        return []
    try:
        found = differing_flags(args, model_args_from_hf(read_hf_config(directory)))
    except UserError as error:
        raise UserError(f"{directory}/config.json: {error}") from error
    # The head of a critic is its own, so it does not matter whether that of the weights is tied to the embedding.
    ignored = flag_of("untie_embeddings_and_output_weights") if vars(args).get("role") == CRITIC else None
    return [row for row in found if row[0] != ignored]


def _differing_sizes(args: argparse.Namespace, directory: Path) -> Iterator[tuple[str, int, int]]:
    """Differences of a torch_dist checkpoint. Sizes that its shapes do not tell are compared when it is loaded."""
    shapes = {name: entry.size for name, entry in read_torch_metadata(directory).tensors.items()}
    layers = [_LAYER.match(name) for name in shapes]
    apart = [int(layer[1]) + 1 for layer in layers if layer is not None and layer[1]]
    stacked = [
        shapes[layer.string][0] for layer in layers if layer is not None and not layer[1] and shapes[layer.string]
    ]
    embedding = shapes.get("embedding.word_embeddings.weight", ())
    found = {
        "num_layers": max(apart or stacked, default=None),
        "hidden_size": embedding[-1] if embedding else None,
        "ffn_hidden_size": next((shape[-1] for name, shape in shapes.items() if _DENSE.match(name)), None),
        # Rows that pad the vocabulary may be as many as there are.
        "vocab_size": min(embedding[0], args.vocab_size) if embedding and args.vocab_size else None,
    }
    for name, size in found.items():
        if size is not None and size != vars(args)[name]:
            yield flag_of(name), vars(args)[name], size


# Layers are numbered, or stacked in one tensor where all are alike.
_LAYER = re.compile(r"decoder\.layers\.(\d*)")
_DENSE = re.compile(r"decoder\.layers\.(\d+\.)?mlp\.linear_fc2\.weight$")


def _model_problems(args: argparse.Namespace) -> Iterator[str]:
    """What Hugging Face directories lack that the run loads from them: the tokenizer, all weights, or some of them, as after a
    download that broke off.

    Only the headers of weight files are read. A directory from which no weights are loaded may hold a config alone.
    """
    loads = [*_loads_of_ranks(args), *_loads_of_engines(args)]
    for directory in sorted({load.directory for load in loads if load.files}):
        try:
            places = places_of_checkpoint(Path(directory))
        except UserError as error:
            yield str(error)
        else:
            yield from sizes_against_config(Path(directory), places)
            yield from divided_blocks(args, directory, places)
    without: dict[tuple[str, str], list[str]] = {}
    for load in loads:
        if load.files and not any(any(Path(load.directory).glob(pattern)) for pattern in load.files):
            without.setdefault((load.place, load.directory), []).extend(load.ways_out)
    for (place, directory), ways_out in without.items():
        pickled = min((path.name for path in Path(directory).glob("*.bin")), default=None)
        yield (
            f"{place} has no weights (*.safetensors), which are loaded from there; "
            f"{f'make them of {pickled} by save_pretrained of transformers' if pickled else 'download them'}"
            f"{', or start without: ' if ways_out else ''}{', '.join(ways_out)}"
        )
    encoding = {load.place: load.directory for load in loads if load.tokenizer}
    if args.hf_checkpoint is not None and any(
        file.in_template or file.prompts != "any" for file in files_of_the_run(args)
    ):
        encoding[f"--hf-checkpoint {args.hf_checkpoint}"] = args.hf_checkpoint
    for place, directory in encoding.items():
        if lacks_tokenizer(directory):
            yield (
                f"{place} has no tokenizer (tokenizer.json, or a vocabulary of another kind), which is loaded from there; "
                "download its files, or copy them there"
            )


# The entries of config.json by which the sides of a tensor go, in all families whose tensors have such names. They are other
# entries for some tensors of some families (queries with a gate, for one), which are compared when they are loaded.
_SIDES = {
    re.compile(rf"(?:model\.(?:language_model\.)?(?:layers\.\d+\.)?)?{name}\.weight"): sides
    for name, sides in {
        r"(?:embed_tokens|lm_head)": ("vocab_size", "hidden_size"),
        r"(?:norm|input_layernorm|post_attention_layernorm)": ("hidden_size",),
        r"self_attn\.[kv]_proj": ("key_value_width", "hidden_size"),
        r"mlp\.(?:gate|up)_proj": ("intermediate_size", "hidden_size"),
        r"mlp\.down_proj": ("hidden_size", "intermediate_size"),
        r"mlp\.experts\.\d+\.(?:gate|up)_proj": ("moe_intermediate_size", "hidden_size"),
        r"mlp\.experts\.\d+\.down_proj": ("hidden_size", "moe_intermediate_size"),
    }.items()
}
# Names of dtypes in which a tensor has as many elements in the file as in the model; several of 4 bits share one.
_UNPACKED = frozenset({"F32", "F16", "BF16", "F8_E4M3"})


def sizes_against_config(directory: Path, places: Mapping[str, Place]) -> Iterator[str]:
    """The first tensor of a Hugging Face directory whose shape is not the one that follows from its config.json."""
    if not (directory / "config.json").is_file():
        return
    config = read_hf_config(directory)
    if config.get("model_type") not in FAMILIES:
        return
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if heads and hidden:
        width = config.get("head_dim") or hidden // heads
        config["key_value_width"] = (config.get("num_key_value_heads") or heads) * width
    differing = []
    for name, place in places.items():
        sides = next((sides for known, sides in _SIDES.items() if known.fullmatch(name)), ())
        expected = tuple(config.get(side) for side in sides)
        if place.dtype in _UNPACKED and expected and None not in expected and place.shape != expected:
            differing.append((name, place, list(expected)))
    if differing:
        name, place, expected = differing[0]
        others = f", and {len(differing) - 1} more tensors differ" if len(differing) > 1 else ""
        yield (
            f"{place.path}: {name} is {list(place.shape)}, and by config.json beside it {expected}{others}; get weights and "
            "config of the same model"
        )


# Of the layers that SGLang divides among all tensor-parallel ranks of an engine: dense ones, and experts that see every token.
_DIVIDED = re.compile(r".*\.mlp\.(shared_experts?\.)?down_proj\.weight")


def divided_blocks(args: argparse.Namespace, directory: str, places: Mapping[str, Place]) -> Iterator[str]:
    """The first dense layer and the first shared expert of an FP8 checkpoint whose blocks would lie on two ranks of an engine.

    SGLang 0.5.21 refuses such a layer when it builds the model.

    Args:
        directory: the checkpoint, as flags and serving files name it; `places`: its tensors.
    """
    block = (quantisation_settings(Path(directory)) or {}).get("weight_block_size")
    if not block or not args.has_engines or args.rollout_external:
        return
    columns, divided = math.lcm(*block), {}
    for match in filter(None, map(_DIVIDED.fullmatch, places)):
        if f"{match.string}_scale_inv" in places:
            divided.setdefault(bool(match[1]), match.string)
    has_experts = any(".experts." in name for name in places)
    for group in served_groups(args):
        engine = arguments_of_group(args, group)
        if engine.hf_checkpoint != directory or not group.num_engines:
            continue
        ranks, stages = tensor_parallel_size(engine), engine.sglang_pp_size or 1
        for is_shared, name in divided.items():
            width, whole = places[name].shape[1], has_experts and engine.sglang_moe_dense_tp_size == 1
            way_out = "--sglang-moe-dense-tp-size 1" if has_experts else ""
            if is_shared:
                exchanged = engine.sglang_moe_a2a_backend not in (None, "none")
                whole, way_out = exchanged or env.engines_keep_shared_experts_whole(), "--sglang-moe-a2a-backend deepep"
            fitting = [size for size in range(1, ranks) if ranks % size == 0 and width % (size * columns) == 0]
            if whole or width % (ranks * columns) == 0 or not fitting:
                continue
            place, size = ("", "--rollout-num-gpus-per-engine")
            if group.where:
                place, size = f"{group.where}: ", "num_gpus_per_engine"
            yield (
                f"{place}{size} {group.num_gpus_per_engine}: {name} has {width} columns in {directory}, in FP8 blocks of "
                f"{columns}, and {ranks} tensor-parallel ranks cannot share it in whole blocks; give {size} "
                f"{fitting[-1] * stages}{way_out and f', or {way_out}, with which each rank has such layers whole'}"
            )


def _int4_problems(args: argparse.Namespace) -> Iterator[str]:
    """Why ranks cannot train for engines in INT4, which variables of the environment ask for."""
    if args.has_trainer and args.train_backend == "megatron" and args.hf_checkpoint is not None:
        try:
            group_size = env.int4_training_group_size()
            if group_size is not None:
                settings_for_int4(args.hf_checkpoint, group_size)
        except UserError as error:
            yield str(error)


def _stop_token_problems(args: argparse.Namespace) -> Iterator[str]:
    """Stop token ids that no token of the model has: no answer would end at them, and engines that forbid them in the first
    tokens of an answer would die of them."""
    if not args.has_engines or args.hf_checkpoint is None:
        return
    given = {"--rollout-stop-token-ids": args.rollout_stop_token_ids}
    if args.eval_interval is not None:
        place = places_in(args.eval_config)
        for one in args.eval_datasets:
            in_file = place(one.name, "stop_token_ids")
            if in_file is not None:
                given[f"{in_file}: stop_token_ids"] = one.stop_token_ids
    vocabulary = read_hf_config(args.hf_checkpoint).get("vocab_size") if any(given.values()) else None
    for where, ids in given.items():
        beyond = [str(token) for token in ids or () if vocabulary is not None and token >= vocabulary]
        if beyond:
            yield (
                f"{where} {' '.join(beyond)}: the model of --hf-checkpoint {args.hf_checkpoint} has the tokens 0 to "
                f"{vocabulary - 1} (`vocab_size` in its config.json); give ids of its tokenizer"
            )


@dataclass(frozen=True)
class _Load:
    """What is loaded from a Hugging Face directory.

    Attributes:
        place: the flag or the place in a file that names the directory, followed by the directory, for messages.
        files: patterns, any of which files with weights may match; empty where no weights are loaded.
        ways_out: flags that start without these weights, each with the part of the run that then has none.
        tokenizer: whether there must be one.
    """

    place: str
    directory: str
    files: tuple[str, ...]
    ways_out: tuple[str, ...] = ()
    tokenizer: bool = False


_STARTS_FROM = ("--load", "--initial-megatron-checkpoint", "--ref-load", "--hf-checkpoint")


def _loads_of_ranks(args: argparse.Namespace) -> Iterator[_Load]:
    for place, source, _ in _sources_of_ranks(args):
        if source.kind == "hf":
            ways_out = ("--random-init for training ranks",) if place == "--hf-checkpoint" else ()
            yield _Load(f"{place} {source.path}", source.path, ("*.safetensors",), ways_out)


def _sources_of_ranks(args: argparse.Namespace) -> Iterator[tuple[str, WeightSource, argparse.Namespace]]:
    """(the flag or the place in a file that names it, the source, the flags of its model) of all weights that are loaded."""
    start = args.initial_weights
    if not args.has_trainer or start is None:
        return
    flag = next((flag for flag in _STARTS_FROM if vars(args)[attribute_of(flag)] == start.path), "initial weights:")
    yield flag, start, args
    critic = args.critic_initial_weights if args.use_critic else start
    if critic.path != start.path:
        file = args.megatron_config_path
        place = f"{place_in(file, CRITIC, 'load', 'hf_checkpoint')}: role critic:" if file is not None else flag
        yield place, critic, critic_args(args)
    states = other_model_states(args)
    # A checkpoint that the run resumes from may hold the reference, and then `--ref-load` is not read.
    if REFERENCE in states and not start.resume:
        yield "--ref-load", source_of_reference(args), args
    if TEACHER in states:
        yield "--opd-teacher-load", source_of_teacher(args), args


def _loads_of_engines(args: argparse.Namespace) -> Iterator[_Load]:
    """What engines that the run starts load. If a load format was typed, weights are left to SGLang to find."""
    if not args.has_engines or args.rollout_external:
        return
    for model in served_models(args):
        groups = [group for group in model.groups if group.num_engines]
        formats = {group.overrides.get("load_format", vars(args).get("sglang_load_format")) for group in groups}
        place = f"--hf-checkpoint {model.model_path}"
        if model.model_path != args.hf_checkpoint:
            place = f"{model.where}: model {model.name}: {model.model_path}"
        files = ("*.safetensors", "*.bin", "*.pt") if formats & {None, "auto"} else ()
        # Engines need not load weights that the first push brings anyway.
        ways_out = ("--sglang-load-format dummy for engines",) if args.has_trainer and model.update_weights else ()
        if groups:
            yield _Load(place, model.model_path, files, ways_out, tokenizer=True)
