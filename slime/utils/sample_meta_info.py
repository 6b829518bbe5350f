"""What an engine's `meta_info` does to a sample: weight versions and their spans, counters, routed experts, final status.

`Sample.append_response_tokens` is the only caller; it checks first and applies afterwards, so a refused `meta_info`
leaves the sample as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from slime.utils.errors import UserError
from slime.utils.misc import decode_int32_meta_array
from slime.utils.token_fields import held

if TYPE_CHECKING:
    from slime.utils.types import Sample

_REPLAY_KEYS = (
    "top_p_token_ids",
    "top_p_kept_token_ids",
    "output_token_sampling_mask",
)
_STATUS_OF_FINISH_REASON = {"length": "truncated", "abort": "aborted", "stop": "completed"}

# Our counter → names that engines use for it.
_SPECULATIVE_KEYS = {
    "spec_accept_token_num": ("spec_accept_token_num", "spec_num_correct_drafts"),
    "spec_draft_token_num": ("spec_draft_token_num", "spec_num_proposed_drafts"),
    "spec_verify_ct": ("spec_verify_ct",),
    "completion_token_num": ("completion_tokens",),
}


def refuse_replay(meta_info: dict[str, Any]) -> None:
    """Raise UserError when the engine sent top-p sets, which nothing here would store."""
    present = [key for key in _REPLAY_KEYS if meta_info.get(key) is not None]
    if present:
        raise UserError(
            f"the engine returned {', '.join(present)}, but replay of top-p sets is not supported; do not ask the "
            "engine for it"
        )


def routed_experts(sample: Sample, meta_info: dict[str, Any], total_length: int, args: Any) -> np.ndarray | None:
    """The sample's rows with those of the answer, int32 [total length − 1, layers, k]; None if the engine sent none.

    The answer's rows begin at `routed_experts_start_len`; what the sample has before is kept, what it has from there on is
    replaced.

    Args:
        total_length: tokens of the sample, those of the answer included.

    Raises:
        ValueError: the answer does not have one row per remaining position, or the sample has too few before it.
    """
    flat = decode_int32_meta_array(meta_info, "routed_experts")
    if flat is None:
        return None
    where = f"sample {sample.index}: routed_experts"
    if args is None:
        raise ValueError(f"{where}: their shape is that of the model; give `args`")
    start = meta_info.get("routed_experts_start_len") or 0
    shape = (total_length - 1 - start, args.num_layers, args.moe_router_topk)
    if start < 0 or shape[0] < 0 or flat.size != shape[0] * shape[1] * shape[2]:
        raise ValueError(
            f"{where} have {flat.size} entries from position {start} on, expected (tokens - 1 - start) x layers x k = "
            f"({total_length} - 1 - {start}) x {shape[1]} x {shape[2]}"
        )
    rows, earlier = flat.reshape(shape), sample.rollout_routed_experts
    if start == 0:
        return rows
    known = 0 if earlier is None else len(earlier)
    if known < start:
        raise ValueError(f"{where} begin at position {start}, but the sample has those of {known} positions only")
    return np.concatenate([np.asarray(earlier, np.int32)[:start], rows])


def check_version_spans(meta_info: dict[str, Any], response_length: int) -> None:
    """Raise ValueError when the engine's version spans are longer than the whole response."""
    spans = meta_info.get("weight_versions")
    if spans and spans[-1]["end"] > response_length:
        raise ValueError(f"weight_versions end at token {spans[-1]['end']} of a response of {response_length} tokens")


def apply_terminal_info(sample: Sample, meta_info: dict[str, Any], args: Any) -> None:
    """Apply the metadata of a finished engine call whose tokens are already part of `sample`."""
    _add_weight_version(sample, meta_info)
    sample.prefix_cache_info.cached_tokens += meta_info.get("cached_tokens") or 0
    sample.prefix_cache_info.total_prompt_tokens += meta_info.get("prompt_tokens") or 0
    if getattr(args, "sglang_speculative_algorithm", None):
        for counter, keys in _SPECULATIVE_KEYS.items():
            value = next((meta_info[key] for key in keys if meta_info.get(key) is not None), 0)
            setattr(sample.spec_info, counter, getattr(sample.spec_info, counter) + value)
    finish_reason = meta_info["finish_reason"]
    kind = finish_reason.get("type") if isinstance(finish_reason, dict) else finish_reason
    if kind in _STATUS_OF_FINISH_REASON:
        sample.status = type(sample).Status(_STATUS_OF_FINISH_REASON[kind])


def _add_weight_version(sample: Sample, meta_info: dict[str, Any]) -> None:
    version = meta_info.get("weight_version")
    if version is None:
        return
    sample.weight_versions.append(str(version))
    engine_spans = meta_info.get("weight_versions")
    if engine_spans:
        # The engine counts from the first token of its call, which ends where the response ends now.
        offset = sample.response_length - engine_spans[-1]["end"]
        spans = [(str(span["version"]), offset + span["start"], offset + span["end"]) for span in engine_spans]
    else:
        spans = [(str(version), _start_of_unversioned_tokens(sample), sample.response_length)]
    sample.weight_version_spans.extend(span for span in spans if span[1] < span[2])


def _start_of_unversioned_tokens(sample: Sample) -> int:
    """Start of the run of generated tokens at the end of the response that no span covers yet.

    A stream appends the tokens of one call in many chunks and names the version only at the end.
    """
    covered = sample.weight_version_spans[-1][2] if sample.weight_version_spans else 0
    mask = held(sample, "loss_mask")
    untrained = [] if mask is None else np.flatnonzero(np.asarray(mask[covered : sample.response_length]) == 0)
    return covered + int(untrained[-1]) + 1 if len(untrained) else min(covered, sample.response_length)
