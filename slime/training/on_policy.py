"""`--true-on-policy-mode`: the trainer gives every trained token the log-prob that the engine told, or the run stops.

In every rollout, on every trained token, the engine's log-probs are compared with two others:
- those of the training pass itself, under the weights before the update. So what is proved is what the gradient belongs to, and
  no further pass is needed.
- those of the log-prob pass, if there is one, since ratios and advantages are made of them. With `--loss-type custom_loss` the
  training pass is the user's; then only these are compared, and such a loss always has the pass.

A rank must not stop alone, because the others wait for it in a collective. So while a step computes, each rank only remembers
the largest difference of each micro-batch, on its device. When the gradients are there and the weights have not changed, one
all-reduce tells all ranks the largest of all. Only if that is above `--ci-train-rollout-logprob-abs-diff-threshold`, they
exchange what they remember, and every rank stops with the same message: how large the difference is, at which token of which
sample, and the likely cause: the first one in a list that the evidence speaks for.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from slime.algorithms.mismatch import WorstToken, merge_worst_tokens, worst_tokens
from slime.arguments.config_files.serving_config import arguments_of_group, served_groups
from slime.arguments.flag import as_typed, flag_of
from slime.arguments.server_flags import tensor_parallel_size
from slime.training.backend import RankGroups
from slime.training.metric_reduction import all_reduce_max
from slime.training.rollout_data import RolloutData
from slime.utils.errors import RunError, UserError
from slime.weights.quantisers import quantisation_settings

MODE = "--true-on-policy-mode"
_THRESHOLD = "--ci-train-rollout-logprob-abs-diff-threshold"
# Precision of the parameters → the largest difference of two log-probs that other kernels can explain.
_ROUNDING = {"float32": 1e-3, "float16": 0.2, "bfloat16": 1.0}
# Other names that SGLang has for precisions.
_PRECISIONS = {"half": "float16", "float": "float32", "bf16": "bfloat16", "auto": None}
# Flags of users' functions that can write the engine's log-probs, or ask it for others.
_WRITE_LOG_PROBS = (
    "custom_generate_function_path", "rollout_function_path", "rollout_sample_hook_path",
    "custom_convert_samples_to_train_data_path", "rollout_data_postprocess_path",
)  # fmt: skip
_COLUMNS = ("loss_masks", "sample_indices", "total_lengths", "response_lengths", "positions", "weight_version_spans")


def is_proved(args: argparse.Namespace, role: str) -> bool:
    """Whether log-probs of the model `role` are compared. Imitation has no engine to compare with."""
    return args.true_on_policy_mode and role == "actor" and args.loss_type != "sft_loss"


def expect_proof(args: argparse.Namespace, rollout_id: int, data: RolloutData, weight_version: int) -> None:
    """Make an actor's data ready to be proved; does nothing without the mode.

    Args:
        weight_version: the version under which engines got the weights that the trainer has.

    Raises:
        UserError: the rollout brings several optimizer steps, as a user's rollout function may; on all ranks. After the first
            step the policy is another one, so the others cannot be on policy.
    """
    if not is_proved(args, "actor"):
        return
    if args.has_engines:
        data["live_weight_version"] = weight_version
    steps = len(data["num_microbatches"])
    if steps > 1:
        raise UserError(
            f"rollout {rollout_id} brings {steps} optimizer steps, and {MODE} takes one per rollout: return no more than "
            f"--global-batch-size {args.global_batch_size} rollouts, or give as many there as the function returns"
        )


@dataclasses.dataclass(frozen=True)
class Finding:
    """What all ranks know together of a step whose largest difference is above the threshold.

    Attributes:
        token: the one with that difference; its `sample` is the sample's index.
        made_by: the version of the weights that made it; None: nobody tells.
        live: the version that engines had been given of the trainer's weights; None: there are no engines.
        tokens, samples: how many differ by more than the threshold, of how many that are trained.
    """

    token: WorstToken
    made_by: int | None
    live: int | None
    tokens: tuple[int, int]
    samples: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class _Report:
    """What one rank knows: its worst token with the version that made it, and per part of a sample (data rank, position there,
    context-parallel rank) how many tokens differ, of how many that are trained."""

    worst: WorstToken | None
    made_by: int | None
    counts: dict[tuple[int, int, int], tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class _Part:
    """Samples of this rank with both log-probs of the response tokens that it owns, flat float32 [their number]."""

    samples: RolloutData
    trainer: torch.Tensor
    engine: torch.Tensor
    largest: torch.Tensor


class OnPolicyProof:
    """Compares the log-probs of one optimizer step on one rank.

    Args:
        place: where the step is in the run, for the message.
        data: the rank's data; on the last pipeline stage with `log_probs`, where there was a pass for them.
        indices: positions of the step's samples in them, per micro-batch.
        group: all ranks that train together; None: the world.

    Attributes:
        largest: |trainer's − engine's log-prob| over the step's trained tokens of all ranks, once `require` has been asked.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        place: str,
        groups: RankGroups,
        data: RolloutData,
        indices: Sequence[Sequence[int]],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.largest = 0.0
        self._args, self._place, self._groups = args, place, groups
        self._group = dist.group.WORLD if group is None else group
        self._live = data.get("live_weight_version")
        self._parts: dict[tuple[int, ...] | None, _Part] = {}
        positions = [position for of_batch in indices for position in of_batch]
        if groups.is_last_stage and "log_probs" in data and positions:
            step = data.take(positions)
            step["positions"] = positions
            self._parts[None] = _compared(step, torch.cat(list(step["log_probs"])))

    def compare(self, batch: RolloutData, log_probs: torch.Tensor) -> None:
        """Remember the log-probs of a micro-batch. Waits for nothing; made once more, they take the place of the first.

        Args:
            log_probs: flat [response tokens that this rank owns], without gradient.
        """
        if batch["positions"]:
            self._parts[tuple(batch["positions"])] = _compared(batch, log_probs)

    def require(self) -> None:
        """Go on where no trained token of any rank differs by more than the threshold. Collective.

        Raises:
            RunError: one does; on all ranks, with one message.
        """
        largest = [part.largest for part in self._parts.values()] or [torch.zeros((), dtype=torch.float64)]
        self.largest = float(all_reduce_max(torch.stack(largest).amax(), self._group))
        limit = self._args.ci_train_rollout_logprob_abs_diff_threshold
        if self.largest <= limit:
            return
        own = self._report(limit)
        reports = [own] * dist.get_world_size(self._group)
        dist.all_gather_object(reports, own, group=self._group)
        raise RunError(f"{self._place}: {describe(self._args, _joined(reports, self._live))}")

    def _report(self, limit: float) -> _Report:
        worst, versions, counts = [], {}, {}
        for part in self._parts.values():
            samples, lengths = part.samples, part.samples.local_lengths
            trainer, engine = (flat.cpu().split(lengths) for flat in (part.trainer, part.engine))
            masks = [mask.cpu() for mask in samples.local_masks]
            owned = samples.cut([torch.arange(length) for length in samples["response_lengths"]])
            for token in worst_tokens(trainer, engine, masks, range(len(lengths)), 1, owned):
                named = dataclasses.replace(token, sample=int(samples["sample_indices"][token.sample]))
                worst.append(named)
                versions[named] = _version_of(samples, token)
            for row, mask in enumerate(masks):
                trained = mask != 0
                differs = trained & (_difference(trainer[row], engine[row]) > limit)
                place = self._groups.data_rank, samples["positions"][row], samples.cp.rank
                counts[place] = max(counts.get(place, (0, 0)), (int(differs.sum()), int(trained.sum())))
        first = next(iter(merge_worst_tokens([worst], 1)), None)
        return _Report(first, versions.get(first), counts)


def _compared(samples: RolloutData, trainer: torch.Tensor) -> _Part:
    """Without a column of the engine's log-probs every trained token differs by infinity."""
    engine = samples.flat("rollout_log_probs") if "rollout_log_probs" in samples else trainer.new_full((1,), torch.nan)
    engine = engine.expand_as(trainer)
    trained = torch.cat(samples.local_masks).to(trainer.device) != 0
    largest = torch.cat([torch.where(trained, _difference(trainer, engine), 0.0), trainer.new_zeros(1)]).amax()
    kept = {name: samples[name] for name in _COLUMNS if name in samples}
    return _Part(RolloutData(kept, samples.cp), trainer, engine, largest)


def _difference(trainer: torch.Tensor, engine: torch.Tensor) -> torch.Tensor:
    """float64; infinite where one of them is no number."""
    return (trainer.double() - engine.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)


def _version_of(samples: RolloutData, token: WorstToken) -> int | None:
    """The version of the weights that made a token, of the sample in the row `token.sample`."""
    spans = samples["weight_version_spans"][token.sample] if "weight_version_spans" in samples else ()
    found = [version for version, start, end in spans if start <= token.position < end]
    return int(found[-1]) if found and str(found[-1]).isdecimal() else None


def _joined(reports: Sequence[_Report], live: int | None) -> Finding:
    """What ranks found; those that share a vocabulary have the same samples, and count once."""
    counts: dict[tuple[int, int, int], tuple[int, int]] = {}
    versions = {report.worst: report.made_by for report in reports if report.worst is not None}
    for report in reports:
        for place, found in report.counts.items():
            counts[place] = max(counts.get(place, (0, 0)), found)
    (token,) = merge_worst_tokens([versions], 1)
    differing = {place[:2] for place, (count, _) in counts.items() if count}
    trained = {place[:2] for place, (_, count) in counts.items() if count}
    tokens = sum(count for count, _ in counts.values()), sum(count for _, count in counts.values())
    return Finding(token, versions[token], live, tokens, (len(differing), len(trained)))


def describe(args: argparse.Namespace, found: Finding) -> str:
    """How large the difference is, where, and the likely cause; one line."""
    token, limit = found.token, args.ci_train_rollout_logprob_abs_diff_threshold
    where = f"response token {token.position} of sample {token.sample}"
    values = f"engine {token.rollout_log_prob:.9g}, trainer {token.train_log_prob:.9g}"
    counts = (
        f"{found.tokens[0]} of {found.tokens[1]} trained tokens, in {found.samples[0]} of {found.samples[1]} samples"
    )
    return (
        f"log-probs of engine and trainer differ by {token.difference:.6g} at {where} ({values}), more than {_THRESHOLD} "
        f"{limit:g} allows ({MODE}); {counts}, differ by more. Likely cause: {likely_cause(args, found)}. The weights are not "
        "updated; --save-debug-train-data shows the samples"
    )


def likely_cause(args: argparse.Namespace, found: Finding) -> str:
    """The cause that what can be seen speaks for most: what is certain first, then what would differ by so much."""
    return next(_causes(args, found))


def _causes(args: argparse.Namespace, found: Finding) -> Iterator[str]:
    token, functions = found.token, _functions(args)
    if not math.isfinite(token.rollout_log_prob):
        told = f" ({functions})" if functions else ""
        yield f"the samples have no log-probs of the engine; the function that generates{told} must hand them on"
    if not math.isfinite(token.train_log_prob):
        yield "the trainer's log-prob is no finite number, so its weights or logits are none"
    if None not in (found.made_by, found.live) and found.made_by != found.live:
        versions = f"weights of version {found.made_by} made the token, and the trainer has version {found.live}"
        kept = f", or {functions} kept it from another rollout" if functions else ""
        yield f"{versions}: an engine missed a push{kept}"
    others = found.samples[1] - found.samples[0]
    if functions and others > 0:
        yield f"{others} other samples agree, so weights and kernels do; what may have changed these is {functions}"
    if args.num_experts and not args.use_rollout_routing_replay:
        yield "routers of the trainer may choose other experts than the engine's did; give --use-rollout-routing-replay"
    if quantisation_settings(Path(args.hf_checkpoint)) is not None:
        yield "--hf-checkpoint is quantised: the engine computes with rounded weights; take a checkpoint that is not"
    if args.fp8:
        yield f"the trainer multiplies in FP8 (--fp8-format {args.fp8}), and no engine rounds in the same way; leave it out"
    engines = [arguments_of_group(args, group) for group in served_groups(args) if group.update_weights]
    for name in ("sglang_kv_cache_dtype", "sglang_dtype"):
        values = {_PRECISIONS.get(vars(engine)[name], vars(engine)[name]) for engine in engines}
        for value in values - {None, args.params_dtype_name}:
            yield f"the engine computes with {flag_of(name)} {value}, and the trainer in {args.params_dtype_name}"
    if token.difference <= _ROUNDING[args.params_dtype_name]:
        yield _kernels(args, engines)
    plain = {"rollout_temperature": 1, "rollout_top_p": 1, "rollout_top_k": -1}
    sampling = [f"{flag_of(name)} {vars(args)[name]:g}" for name in plain if vars(args)[name] != plain[name]]
    if sampling:
        who = f"requests of {functions}" if functions else "SGLANG_RETURN_ORIGINAL_LOGPROB in the engines' environment"
        trainers = f"it is more than rounding, and the trainer's log-probs are those of {' and '.join(sampling)}"
        yield f"{trainers}; {who} may have the engine tell others"
    if functions:
        yield f"it is more than rounding; what may have changed the engine's log-probs is {functions}"
    weights = "it is more than rounding: engine and trainer have other weights, or compute another model"
    yield f"{weights}; --check-weight-update-equal compares the weights after every push"


def _functions(args: argparse.Namespace) -> str:
    """The flags of functions of the user's that may have written the engine's log-probs."""
    paths = {name: as_typed(vars(args)[name]) for name in _WRITE_LOG_PROBS}
    return ", ".join(
        f"{flag_of(n)} {path}" for n, path in paths.items() if path and not path.startswith("slime.rollout.")
    )


def _kernels(args: argparse.Namespace, engines: Sequence[argparse.Namespace]) -> str:
    """Rounding alone: what decides in which order numbers are added, on both sides."""
    if args.on_gpus is False:
        return f"without a GPU engine and trainer round {args.params_dtype_name} in ways of their own; give {_THRESHOLD} 1e-4"
    sizes = sorted({tensor_parallel_size(engine) for engine in engines} - {args.tensor_model_parallel_size})
    if sizes:
        return (
            f"sums are cut into {args.tensor_model_parallel_size} ranks by --tensor-model-parallel-size and into {sizes[0]} by "
            "--rollout-num-gpus-per-engine, and round apart; give the same size"
        )
    names = "sglang_attention_backend", "sglang_rl_on_policy_target"
    told = sorted({f"{flag_of(name)} {vars(engine)[name]}" for engine in engines for name in names})
    return (
        f"kernels add in another order; what decides is {', '.join(told) or 'what it was started with'} in the engine, "
        f"--transformer-impl {args.transformer_impl} and --attention-backend {args.attention_backend} in the trainer"
    )
