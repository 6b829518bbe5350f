"""`Sample`, the one object that travels from the data set through generation and reward to the train batch.

Invariants, checked by `Sample.validate_lengths` after every mutation helper:

* `tokens` = prompt ids + response ids; the response region is the last `response_length` of them.
* `loss_mask`, `rollout_log_probs` and `teacher_log_probs`, where present, have exactly `response_length` entries.
* top-p offsets have `response_length + 1` entries; routed experts at most `len(tokens) - 1` rows. These are fewer while
  tokens of a tool wait for the engine's next answer, which brings the rows of both.

The per-token fields read as Python lists. Until they are read they may be held as arrays (`slime.utils.sample_fields`).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from slime.utils import sample_fields as sample_meta_info
from slime.utils.errors import UserError
from slime.utils.finite_number import finite_number
from slime.utils.sample_fields import TOKEN_FIELDS, TokenField, first_not_finite, held, join, plain_numbers, read_only

# One list (or tensor) entry per sample under each key.
RolloutBatch = dict[str, Any]

# (field with entries for the response's tokens, how many more entries it has than there are tokens).
_ENTRIES_BESIDE_RESPONSE = (
    ("loss_mask", 0), ("rollout_log_probs", 0), ("teacher_log_probs", 0), ("rollout_top_p_token_offsets", 1),
)  # fmt: skip
# Keys that generation writes into `metadata`; a retry must not see their values from the attempt before.
_GENERATED_METADATA_KEYS = (
    "raw_reward", "round_number", "turn_start", "start_rollout_id", "fail_reason", "replies_with_images",
)  # fmt: skip


@dataclass
class SpecInfo:
    """Speculative-decoding counters summed over the calls of one sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted / drafted tokens; 0 when nothing was drafted."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Completion tokens per verification; 0 when nothing was verified."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0


@dataclass
class PrefixCacheInfo:
    """Prefix-cache counters summed over the calls of one sample."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached / prompt tokens; 0 without prompt tokens."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0


@dataclass
class Sample:
    """One prompt with its answer. See the module docstring for the invariants."""

    class Status(enum.Enum):
        """How far a sample has come."""

        PENDING = "pending"  # not generated, or only in part
        COMPLETED = "completed"  # ended by itself
        TRUNCATED = "truncated"  # ended by a length limit
        ABORTED = "aborted"  # interrupted; can be continued
        FAILED = "failed"  # recoverable error in a tool or parser; may hold partial output

    SpecInfo: ClassVar[type] = SpecInfo
    PrefixCacheInfo: ClassVar[type] = PrefixCacheInfo

    # identity
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None  # siblings of one execution share it; None = an execution of its own
    # prompt
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # response
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None  # 1 = trained; None = all ones
    weight_versions: list[str] = field(default_factory=list)  # one per engine call
    weight_version_spans: list[tuple[str, int, int]] = field(default_factory=list)  # (version, start, end) in response
    rollout_log_probs: list[float] | None = None  # 0.0 on untrained tokens
    rollout_top_p_token_ids: Any = None  # int32 array; nucleus of response token i is ids[offsets[i]:offsets[i + 1]]
    rollout_top_p_token_offsets: Any = None  # int32 array
    rollout_routed_experts: Any = None  # int32 array [len(tokens) - 1, num_layers, topk]
    remove_sample: bool = False  # train with an all-zero mask
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    # the user's own
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None  # handed to the trainer as batch key `metadata`
    # bookkeeping
    session_id: str | None = None
    non_generation_time: float = 0.0  # seconds in tools and environments
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return self._fields() == other._fields()

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._fields().items())
        return f"{type(self).__name__}({fields})"

    def _fields(self) -> dict[str, Any]:
        """Values by field, read so that arrays stay arrays when samples are compared or printed (asyncio prints results).

        What a processor made of the prompt is left out, because it follows from the prompt, and `==` of tensors gives tensors.
        """
        names = [spec.name for spec in dataclasses.fields(self) if spec.name != "multimodal_train_inputs"]
        values = {name: self.__dict__.get(name) for name in names}
        return values | {name: _as_list(held(self, name)) for name in TOKEN_FIELDS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a pickle or a copy. Fields that it lacks take their defaults, and arrays are read-only again."""
        self.__dict__.update(state)
        missing = [spec.name for spec in dataclasses.fields(self) if spec.name not in state]
        if missing:
            fresh = type(self)()
            self.__dict__.update({name: fresh.__dict__[name] for name in missing})
        for name in TOKEN_FIELDS:
            if isinstance(held(self, name), np.ndarray):
                read_only(held(self, name))

    def to_dict(self, *, token_arrays: bool = False) -> dict[str, Any]:
        """A plain dict of all fields and of attributes that users added; containers are copies, `status` is its value.

        Args:
            token_arrays: per-token fields that are held as arrays stay arrays, read-only and shared with the sample.
        """
        values = {name: _copy_containers(value) for name, value in self.__dict__.items()}
        if not token_arrays:
            values |= {name: _as_list(values.get(name)) for name in TOKEN_FIELDS}
        # A user's function may have left something else than a Status, which an error report has to show.
        values["status"] = getattr(self.status, "value", self.status)
        values["spec_info"] = dataclasses.asdict(self.spec_info)
        values["prefix_cache_info"] = dataclasses.asdict(self.prefix_cache_info)
        return values

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Sample:
        """The inverse of `to_dict`: missing keys take their defaults, unknown keys become attributes."""
        values = {name: _copy_containers(value) for name, value in d.items()}
        sample = cls()
        for name, value in values.items():
            setattr(sample, name, value)
        sample.status = cls.Status(values.get("status", cls.Status.PENDING))
        sample.spec_info = _as_dataclass(SpecInfo, values.get("spec_info"))
        sample.prefix_cache_info = _as_dataclass(PrefixCacheInfo, values.get("prefix_cache_info"))
        sample.weight_version_spans = [tuple(span) for span in sample.weight_version_spans]
        return sample

    def get_reward_value(self, args: Any) -> float | dict[str, Any] | None:
        """`reward`, or its entry `args.reward_key`; None while there is no reward."""
        key = getattr(args, "reward_key", None)
        if not key or self.reward is None:
            return self.reward
        if not isinstance(self.reward, dict) or key not in self.reward:
            raise UserError(
                f"--reward-key {key}: the reward of sample {self.index} is {self.reward!r}, without that key"
            )
        return self.reward[key]

    @property
    def effective_response_length(self) -> int:
        """Number of trained response tokens."""
        mask = held(self, "loss_mask")
        if isinstance(mask, np.ndarray):
            return mask.sum().item()
        return self.response_length if mask is None else sum(mask)

    @property
    def truncated(self) -> bool:
        """Whether `status` is TRUNCATED. Setting False completes a PENDING or TRUNCATED sample and no other."""
        return self.status is Sample.Status.TRUNCATED

    @truncated.setter
    def truncated(self, value: bool) -> None:
        if value:
            self.status = Sample.Status.TRUNCATED
        elif self.status in (Sample.Status.PENDING, Sample.Status.TRUNCATED):
            self.status = Sample.Status.COMPLETED

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | np.ndarray | None = None,
        log_probs: Sequence[float] | np.ndarray | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append generated (`trainable`) or tool tokens to the response, and apply the engine's `meta_info`.

        Tokens and log-probs that are arrays are held as arrays, tensors as lists. The sample is unchanged when an error is
        raised. Untrained tokens get log-prob 0.0 and mask 0; a response that had no mask so far counts as trained. Without
        `meta_info["finish_reason"]`, or with `update_terminal_info=False` (a chunk of a stream), versions, counters and
        status stay as they are. If there is a `meta_info` but no token, `text` is ignored, since it belongs to no token.

        Raises:
            ValueError: log-probs missing, superfluous, not finite, of another length than `tokens`, or following response
                tokens that have none; routed experts of another shape than the tokens and the model have; not one kept set per
                token, or log-probs of another softmax than that over the kept ones; or the lengths of the sample do not fit
                together.
        """
        new_tokens = _as_list_or_array([] if tokens is None else tokens)
        new_log_probs = None if log_probs is None else _as_list_or_array(log_probs)
        meta_info, count = meta_info or {}, len(new_tokens)
        self.validate_lengths()
        self._check_append(new_tokens, new_log_probs, trainable)
        terminal = bool(meta_info.get("finish_reason")) and update_terminal_info
        kept = sample_meta_info.kept_sets(self, meta_info, count, trainable)
        if kept is not None and new_log_probs is not None:
            sample_meta_info.check_log_probs_among_kept(self, meta_info, new_log_probs)
        experts = sample_meta_info.routed_experts(self, meta_info, count, args)
        if terminal:
            sample_meta_info.check_version_spans(meta_info, self.response_length + count)
        if count:
            self._extend_response(new_tokens, new_log_probs, trainable)
        if experts is not None:
            self.rollout_routed_experts = experts
        if kept is not None:
            self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets = kept
        if text and (count or not meta_info):
            self.response += text
        if terminal:
            sample_meta_info.apply_terminal_info(self, meta_info, args)
        self.validate_lengths()

    def reset_for_retry(self) -> None:
        """Go back to the bare prompt: everything that generation or grading wrote is cleared, the user's data stays.

        The ids of the prompt stay too, because a user may have given them instead of a text. So do the fields that a subclass
        adds.
        """
        tokens = held(self, "tokens")
        prompt_ids = tokens[: max(0, len(tokens) - self.response_length)]
        kept = {
            "group_index",
            "index",
            "prompt",
            "train_metadata",
            "multimodal_inputs",
            "apply_chat_template_kwargs",
            "label",
            "metadata",
            "generate_function_path",
            "custom_rm_path",
        }
        fresh = Sample()
        for spec in dataclasses.fields(Sample):
            if spec.name not in kept:
                setattr(self, spec.name, getattr(fresh, spec.name))
        self.tokens = prompt_ids
        self.train_metadata = None if self.train_metadata is None else dict(self.train_metadata)
        self.metadata = {key: value for key, value in self.metadata.items() if key not in _GENERATED_METADATA_KEYS}
        self.validate_lengths()

    def validate_lengths(self) -> None:
        """Raise ValueError, which names the field and both numbers, if the per-token fields do not fit together."""
        values, total, response = self.__dict__, len(held(self, "tokens")), self.response_length
        if not 0 <= response <= total:
            raise ValueError(f"sample {self.index}: response_length {response} does not fit {total} tokens")
        for name, more in _ENTRIES_BESIDE_RESPONSE:
            # A field that was deleted has its default, None.
            if name in values and (value := values[name]) is not None and len(value) != response + more:
                raise ValueError(f"sample {self.index}: {name} has {len(value)} entries, expected {response + more}")
        experts = self.rollout_routed_experts
        if experts is not None and len(experts) > max(total - 1, 0):
            raise ValueError(
                f"sample {self.index}: rollout_routed_experts has {len(experts)} entries, expected at most {total - 1}"
            )

    def _check_append(
        self, tokens: list[int] | np.ndarray, log_probs: list[float] | np.ndarray | None, trainable: bool
    ) -> None:
        count = len(tokens)
        if log_probs is not None and len(log_probs) != count:
            raise ValueError(f"sample {self.index}: {len(log_probs)} log_probs for {count} tokens")
        if not count:
            return
        if trainable and log_probs is None:
            raise ValueError(f"sample {self.index}: trainable response tokens require rollout log probabilities")
        if trainable and (wrong := first_not_finite(log_probs)) is not None:
            raise ValueError(
                f"sample {self.index}: log_prob {log_probs[wrong]} of response token {self.response_length + wrong} is "
                "no finite number"
            )
        if not trainable and log_probs is not None:
            raise ValueError(f"sample {self.index}: untrained response tokens must not carry log_probs")
        if trainable and self.response_length and held(self, "rollout_log_probs") is None:
            raise ValueError(
                f"sample {self.index}: log_probs cannot follow {self.response_length} response tokens without log_probs"
            )
        if held(self, "teacher_log_probs") is not None:
            raise ValueError(f"sample {self.index}: cannot append response tokens after teacher_log_probs was set")

    def _extend_response(
        self, tokens: list[int] | np.ndarray, log_probs: list[float] | np.ndarray | None, trainable: bool
    ) -> None:
        count, as_array = len(tokens), isinstance(tokens, np.ndarray)
        if log_probs is None:
            log_probs = np.zeros(count, np.float32) if as_array else [0.0] * count
        if as_array:
            mask = np.empty(count, np.int32)
            mask.fill(trainable)
            read_only(mask)
        else:
            mask = [int(trainable)] * count
        added = {"tokens": tokens, "loss_mask": mask, "rollout_log_probs": log_probs}
        present = {"tokens": held(self, "tokens"), "loss_mask": [], "rollout_log_probs": []}
        if self.response_length == 0:
            # The ids of a prompt may be shared by the samples of its group.
            if isinstance(present["tokens"], list):
                present["tokens"] = list(present["tokens"])
        else:
            mask_before = held(self, "loss_mask")
            present["loss_mask"] = [1] * self.response_length if mask_before is None else mask_before
            present["rollout_log_probs"] = held(self, "rollout_log_probs")
        if present["rollout_log_probs"] is None:
            del present["rollout_log_probs"]
        growing = []
        for name, before in present.items():
            # Lists stay lists as long as lists are added, so that a stream which grows token by token copies nothing.
            if type(added[name]) is list and isinstance(before, list):
                growing.append(name)
            else:
                present[name] = join(self, name, before, added[name])
        for name in growing:
            present[name].extend(added[name])
        self.__dict__.update(present)
        self.response_length += count


for _name in TOKEN_FIELDS:
    setattr(Sample, _name, TokenField(_name))


def failed_and_masked(sample: Sample) -> bool:
    """Whether `sample` failed and is masked: it trains nothing, an evaluation leaves it out, and a step or an evaluation set
    that mostly has such samples stops.

    It is not a property of `Sample`, because any other name on a sample is the user's.
    """
    return sample.status is Sample.Status.FAILED and bool(sample.remove_sample)


def turns_of(sample: Sample) -> int:
    """Turns of the model in the response: `metadata["round_number"]`, which generate functions may set; else 1.

    Raises:
        UserError: it is not a whole number.
    """
    turns = sample.metadata.get("round_number", 1)
    number = finite_number(turns)
    if number is None or number != int(number):
        raise UserError(f'metadata["round_number"] of sample {sample.index} is {turns!r}; expected a whole number')
    return int(number)


def _as_list(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _as_list_or_array(values: Any) -> list[Any] | np.ndarray:
    return values if isinstance(values, np.ndarray) else plain_numbers(values)


def _copy_containers(value: Any) -> Any:
    """Copy dicts, lists and tuples; leave everything else by reference."""
    if isinstance(value, dict):
        return {key: _copy_containers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        # Per-token lists are long and flat, so the first entry decides; then the list is copied at the speed of memory.
        if not value or isinstance(value[0], int | float):
            return list(value)
        return [_copy_containers(entry) for entry in value]
    if isinstance(value, tuple):
        return tuple(_copy_containers(entry) for entry in value)
    return value


def _as_dataclass(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) else kind(**(value or {}))


@dataclass(frozen=True)
class ParamInfo:
    """What bucket planning needs to know about a parameter; `size` in bytes."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    attrs: dict[str, Any]
    size: int
    src_rank: int


@dataclass(frozen=True)
class MultimodalType:
    """A kind of media and the text that stands for it in a prompt."""

    name: str
    placeholder: str


class MultimodalTypes:
    """The known kinds of media."""

    IMAGE = MultimodalType("image", "<image>")
    VIDEO = MultimodalType("video", "<video>")
    AUDIO = MultimodalType("audio", "<audio>")

    @classmethod
    def all(cls) -> list[MultimodalType]:
        """All kinds, in a fixed order."""
        return [cls.IMAGE, cls.VIDEO, cls.AUDIO]

    @classmethod
    def get(cls, name: str) -> MultimodalType | None:
        """The kind called `name`, or None."""
        return next((kind for kind in cls.all() if kind.name == name), None)
