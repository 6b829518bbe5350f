"""Metrics of finished samples, for training rollouts and evaluations. Pure functions from samples to plain numbers.

Samples of one execution share a `rollout_id`; a sample without one is an execution of its own. Samples of one prompt group
share a `group_index`.
"""

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from slime.observability.trace_utils import spans_of
from slime.utils.finite_number import finite_number
from slime.utils.sample_fields import held
from slime.utils.types import Sample, failed_and_masked, turns_of

_REPETITION_CHARACTERS = 10000
_REPETITION_RATIO = 10
# Rewards of a group whose standard deviation is no more than this count as equal. It cannot be 0: the mean of eight times 0.1
# is off by 1e-17.
_ZERO_STD_THRESHOLD = 1e-6
# Metrics of requests, by the attribute of a request's span in which the engine's value is.
_OF_REQUESTS = {
    "e2e_latency": "request/e2e_latency", "queue_time": "request/queue_time", "decode_throughput": "decode/throughput",
}  # fmt: skip
# If two engines shared a request: prefixes of metrics, by the prefix of the attributes.
_OF_PARTS = {"pd_prefill_": "prefill/", "pd_decode_": "decode/", "pd_transfer_": "prefill/transfer_"}


def compute_statistics(values: Iterable[float]) -> dict[str, float]:
    """mean, median, max and min; empty without values."""
    array = np.asarray(list(values), dtype=np.float64)
    if array.size == 0:
        return {}
    return {
        "mean": float(array.mean()),
        "median": float(np.median(array)),
        "max": float(array.max()),
        "min": float(array.min()),
    }


def compute_rollout_metrics(args: Any, samples: Sequence[Sample]) -> dict[str, float]:
    """`rollout/` metrics of the samples of one step, `passrate/` with `--log-passrate`, `multi_turn/` with `--log-multi-turn`.

    Rewards are `get_reward_value(args)`. A reward that is no number, which a user's post-processing may allow, is neither
    correct nor equal to another. Samples that failed and are masked are left out, since their answers say nothing about the
    model.
    """
    samples = [sample for sample in samples if not failed_and_masked(sample)]
    metrics = {f"rollout/{name}": value for name, value in _sample_metrics(args, samples).items()}
    rewards = [_number(sample.get_reward_value(args)) for sample in samples]
    if not args.use_critic:
        counts = zero_std_counts(samples, rewards)
        metrics |= {f"rollout/zero_std/count_{reward}": float(count) for reward, count in counts.items()}
    if args.log_correct_samples:
        correct = [s.effective_response_length for s, r in zip(samples, rewards, strict=True) if r == 1]
        metrics |= _prefixed("rollout/correct_len/", compute_statistics(correct))
    if args.log_passrate:
        metrics |= _prefixed("passrate/", pass_rates(samples, rewards))
    if args.log_multi_turn and samples:
        metrics |= _prefixed("multi_turn/", _multi_turn_metrics(samples))
    return metrics


def compute_eval_metrics(args: Any, data: Mapping[str, Mapping[str, Sequence[Any]]]) -> dict[str, float]:
    """`eval/` metrics. `data`: set → {"rewards", "truncated", "samples"[, "failed"]}.

    pass@k uses the number of samples of each prompt. Failed samples are counted and otherwise left out.
    """
    metrics: dict[str, float] = {}
    for name, results in data.items():
        samples, truncated, rewards = _column(results, "samples"), _column(results, "truncated"), results["rewards"]
        failed = len(_column(results, "failed"))
        if any(map(failed_and_masked, samples)):
            # A user's evaluation function may leave failed samples among the others.
            counted = [position for position, sample in enumerate(samples) if not failed_and_masked(sample)]
            failed += len(samples) - len(counted)
            samples, rewards = [samples[i] for i in counted], [rewards[i] for i in counted]
            truncated = [truncated[i] for i in counted] if truncated else []
        metrics[f"eval/{name}-failed_samples"] = float(failed)
        if len(rewards):
            metrics[f"eval/{name}"] = float(np.mean(np.asarray(rewards, dtype=np.float64)))
        if samples:
            metrics |= _prefixed(f"eval/{name}/", _sample_metrics(args, samples))
        if truncated:
            metrics[f"eval/{name}-truncated_ratio"] = float(np.mean(truncated))
        if args.log_passrate and samples:
            metrics |= _prefixed(f"eval/{name}-", pass_rates(samples, rewards))
    return metrics


def _column(results: Mapping[str, Sequence[Any]], name: str) -> list[Any]:
    """A column of a data set as a list, whether it is a list or an array; empty if it is missing."""
    column = results.get(name)
    return [] if column is None else list(column)


def compute_rollout_perf_metrics(args: Any, samples: Sequence[Sample], rollout_time: float) -> dict[str, float]:
    """`perf/` metrics of generation. `rollout_time` is in seconds. Response tokens count; effective ones are those trained."""
    metrics = {"perf/rollout_time": rollout_time, **request_metrics(samples)}
    if rollout_time <= 0 or not samples:
        return metrics
    outside = [sample.non_generation_time for sample in samples]
    for prefix, lengths in (
        ("", [sample.response_length for sample in samples]),
        ("effective_", [0 if sample.remove_sample else sample.effective_response_length for sample in samples]),
    ):
        if args.rollout_num_gpus:
            metrics[f"perf/{prefix}tokens_per_gpu_per_sec"] = sum(lengths) / rollout_time / args.rollout_num_gpus
        longest = max(lengths)
        metrics[f"perf/longest_{prefix}sample_tokens_per_sec"] = longest / rollout_time
        if not any(outside):
            continue
        # Several samples may be the longest: their mean counts.
        own = float(np.mean([spent for spent, length in zip(outside, lengths, strict=True) if length == longest]))
        metrics[f"perf/longest_{prefix}sample_non_generation_time"] = own
        # A sample that was begun in an earlier step may have spent more time than this step took.
        if own < rollout_time:
            without = longest / (rollout_time - own)
            metrics[f"perf/longest_{prefix}sample_tokens_per_sec_without_non_generation"] = without
    if any(outside):
        metrics |= _prefixed("perf/non_generation_time/", compute_statistics(outside))
    return metrics


def request_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """`perf/` statistics of the values that engines reported for the samples' requests, taken from the traces: `request/`,
    `prefill/` and `decode/` in seconds, `decode/throughput` in tokens per second."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for span in spans_of(samples):
        for metric, value in _values_of_span(span):
            values[metric].append(value)
    return {
        f"perf/{metric}/{name}": value
        for metric, told in values.items()
        for name, value in compute_statistics(told).items()
    }


def _values_of_span(span: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The values that an engine reported for one request, as (metric, value); none for spans of other kinds."""
    attributes = span["attrs"]
    if span["name"] == "sglang_generate":
        yield from ((metric, attributes[name]) for name, metric in _OF_REQUESTS.items() if name in attributes)
    elif span["name"] == "sglang_pd_summary":
        for prefix, metric in _OF_PARTS.items():
            yield from (
                (metric + name.removeprefix(prefix), value)
                for name, value in attributes.items()
                if name.startswith(prefix)
            )


def merge_extra_metrics(metrics: dict[str, Any], extra: Mapping[str, Any] | None, prefix: str) -> dict[str, Any]:
    """`metrics` together with those that a rollout function returned; names without `prefix` get it."""
    named = {name if name.startswith(prefix) else prefix + name: value for name, value in (extra or {}).items()}
    return {**metrics, **named}


def zero_std_counts(samples: Sequence[Sample], rewards: Sequence[float]) -> dict[float, int]:
    """Reward, rounded to one digit → the number of prompt groups, of two samples or more, in which all have this reward."""
    counts: Counter[float] = Counter()
    for positions in _by_group(samples).values():
        values = np.asarray([rewards[position] for position in positions], dtype=np.float64)
        if values.size > 1 and values.std() <= _ZERO_STD_THRESHOLD:
            # Adding 0 makes 0 of -0, which would be another name of the same reward.
            counts[round(float(values[0]), 1) + 0.0] += 1
    return dict(sorted(counts.items()))


def pass_rates(samples: Sequence[Sample], rewards: Sequence[float]) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4, …: the mean over the groups that have at least k executions.

    An execution is correct if the rewards of its samples average 1.
    """
    outcomes = [_executions_correct(samples, rewards, positions) for positions in _by_group(samples).values()]
    largest = max((len(outcome) for outcome in outcomes), default=0)
    rates = {}
    k = 1
    while k <= largest:
        values = [pass_at_k(len(outcome), sum(outcome), k) for outcome in outcomes if len(outcome) >= k]
        rates[f"pass@{k}"] = float(np.mean(values))
        k *= 2
    return rates


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased probability that k of n tries, c of them correct, hold a correct one (arXiv 2107.03374, equation 1)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def has_repetition(text: str) -> bool:
    """Whether a long text ends in repetitions: its last 10000 characters shrink to less than a tenth by zlib."""
    if len(text) <= _REPETITION_CHARACTERS:
        return False
    tail = text[-_REPETITION_CHARACTERS:].encode("utf-8", "replace")
    return len(tail) > _REPETITION_RATIO * len(zlib.compress(tail, 9))


def _number(reward: Any) -> float:
    number = finite_number(reward)
    return math.nan if number is None else number


def _sample_metrics(args: Any, samples: Sequence[Sample]) -> dict[str, float]:
    if not samples:
        return {}
    metrics = _prefixed("response_len/", compute_statistics(s.effective_response_length for s in samples))
    metrics["truncated_ratio"] = float(np.mean([sample.truncated for sample in samples]))
    # Reward functions, such as `deepscaler`, set it to say why they found nothing to judge in a complete answer.
    unjudged = [
        s for s in samples if s.metadata.get("fail_reason") is not None and s.status is not Sample.Status.FAILED
    ]
    if unjudged:
        metrics["unjudged_samples"] = float(len(unjudged))
    metrics["repetition_frac"] = float(np.mean([has_repetition(sample.response) for sample in samples]))
    metrics |= _prefix_cache_metrics(samples) | _speculative_metrics(samples) | _kept_vocabulary(samples)
    category = args.log_reward_category
    if category:
        values = Counter(
            str(s.reward[category]) for s in samples if isinstance(s.reward, dict) and category in s.reward
        )
        metrics |= {f"error_cat/{value}": count / len(samples) for value, count in values.items()}
    return metrics


def _multi_turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Lengths of responses with and without the text of tools, and the model's turns. `clip_ratio` is the share of responses
    that a limit cut off."""
    metrics = {}
    for prefix, values in (
        ("raw_response_length/response_length_", [sample.response_length for sample in samples]),
        ("wo_obs_response_length/response_length_", [sample.effective_response_length for sample in samples]),
        ("multi_turn_metric/round_number_", [turns_of(sample) for sample in samples]),
    ):
        statistics = compute_statistics(values)
        metrics |= _prefixed(prefix, {name: statistics[name] for name in ("mean", "max", "min")})
    metrics["raw_response_length/response_length_clip_ratio"] = float(np.mean([sample.truncated for sample in samples]))
    return metrics


def _prefix_cache_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    cached = sum(sample.prefix_cache_info.cached_tokens for sample in samples)
    prompts = sum(sample.prefix_cache_info.total_prompt_tokens for sample in samples)
    if prompts == 0:
        return {}
    return {"prefix_cache_hit_rate": cached / prompts, "avg_cached_tokens_per_sample": cached / len(samples)}


def _speculative_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    infos = [sample.spec_info for sample in samples]
    drafted, verified = sum(i.spec_draft_token_num for i in infos), sum(i.spec_verify_ct for i in infos)
    metrics = {}
    if drafted:
        metrics["spec_accept_rate"] = sum(i.spec_accept_token_num for i in infos) / drafted
    if verified:
        metrics["spec_accept_length"] = sum(i.completion_token_num for i in infos) / verified
    return metrics


def _kept_vocabulary(samples: Sequence[Sample]) -> dict[str, float]:
    """The mean number of tokens among which a trained token was sampled; nothing if engines do not report the kept tokens."""
    kept = trained = 0
    for sample in samples:
        if sample.rollout_top_p_token_offsets is None:
            continue
        sizes, mask = np.diff(sample.rollout_top_p_token_offsets), held(sample, "loss_mask")
        mask = np.ones(len(sizes)) if mask is None else np.asarray(mask)[: len(sizes)]
        kept += int((sizes * mask).sum())
        trained += int(mask.sum())
    return {"top_p_kept_vocab_per_token": kept / trained} if trained else {}


def _executions_correct(samples: Sequence[Sample], rewards: Sequence[float], positions: Sequence[int]) -> list[bool]:
    executions: dict[Any, list[float]] = {}
    for position in positions:
        execution_id = samples[position].rollout_id
        key = ("own", position) if execution_id is None else ("shared", execution_id)
        executions.setdefault(key, []).append(rewards[position])
    return [math.isclose(sum(values) / len(values), 1.0, abs_tol=1e-6) for values in executions.values()]


def _by_group(samples: Sequence[Sample]) -> dict[Any, list[int]]:
    """Prompt group → positions of its samples; a sample without a group is one of its own."""
    groups: dict[Any, list[int]] = {}
    for position, sample in enumerate(samples):
        key = ("own", position) if sample.group_index is None else ("group", sample.group_index)
        groups.setdefault(key, []).append(position)
    return groups


def _prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {prefix + name: value for name, value in metrics.items()}
