"""Evaluation sets: what each one loads, samples and grades with, resolved once.

A value comes from the first place that has it: the set's own entry, the defaults, the `eval_*` flag, the `rollout_*` (or
training) flag.
"""

import copy
import dataclasses
import inspect
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, get_args, get_origin

from slime.utils.errors import UserError
from slime.utils.image_rows import media_keys_problem
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


@dataclass
class EvalDatasetConfig:
    """One evaluation set. The constructor refuses unknown keys of an entry (TypeError naming the key)."""

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    multimodal_keys: dict[str, str] | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)
    # Limits of the default evaluation: seconds for the whole set; how many samples it needs to be worth anything; and an early
    # end, as soon as at most so many prompts remain and none has finished for so many seconds.
    eval_task_timeout: float | None = None
    min_eval_samples: int | None = None
    eval_early_stop_remaining: int | None = None
    eval_early_stop_idle_timeout: float | None = None
    # For the user's functions; nothing here reads these.
    app_service: Any = None
    message_processor: Any = None
    reward_model: Any = None
    remote_environment: Any = None

    @property
    def cache_key(self) -> tuple[str, ...]:
        """Equal for sets that load the same samples."""
        names = ("path", "input_key", "label_key", "tool_key", "metadata_key", "multimodal_keys")
        return tuple(repr(getattr(self, name)) for name in (*names, *_TEMPLATE_KEYS))

    def sampling_params(self) -> dict[str, Any]:
        """The sampling parameters of this set, as the engine's `/generate` takes them."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_new_tokens": self.max_response_len,
            "min_new_tokens": self.min_new_tokens,
            "repetition_penalty": self.repetition_penalty,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "skip_special_tokens": bool(self.skip_special_tokens),
            "no_stop_trim": True if self.no_stop_trim is None else self.no_stop_trim,
            "spaces_between_special_tokens": False,
        }

    def apply_to(self, sample: Sample) -> None:
        """Write this set's overrides into a copy of one of its samples: reward type, metadata, functions by path."""
        # Copied, because a function of the user's may change the metadata of one sample.
        sample.metadata = {**sample.metadata, **copy.deepcopy(self.metadata_overrides)}
        if self.rm_type is not None:
            sample.metadata["rm_type"] = self.rm_type
        sample.custom_rm_path = self.custom_rm_path or sample.custom_rm_path
        sample.generate_function_path = sample.generate_function_path or self.custom_generate_function_path
        sample.prompt_is_rendered = bool(self.apply_chat_template)


_TEMPLATE_KEYS = ("apply_chat_template", "apply_chat_template_kwargs")

# Field → the flags that supply it, of which the first one that is set counts.
_FLAGS: dict[str, tuple[str, ...]] = {
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "multimodal_keys": ("multimodal_keys",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt",),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "min_new_tokens": ("eval_min_new_tokens",),
    "skip_special_tokens": ("rollout_skip_special_tokens",),
}


# Keys whose numbers must be above 0, and those that may be 0.
_POSITIVE = (
    "n_samples_per_eval_prompt", "max_response_len", "eval_task_timeout", "min_eval_samples", "eval_early_stop_remaining",
    "eval_early_stop_idle_timeout",
)  # fmt: skip
_NOT_NEGATIVE = ("temperature", "min_new_tokens", "repetition_penalty")

_KINDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a mapping",
}


def eval_dataset_keys() -> tuple[str, ...]:
    """Every key that an entry may have."""
    return tuple(spec.name for spec in dataclasses.fields(EvalDatasetConfig))


def value_problem(key: str, value: Any) -> str | None:
    """What is wrong with the value of a known key of an entry; None if nothing is. The value None (unset) is always right."""
    annotation = inspect.get_annotations(EvalDatasetConfig)[key]
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    if value is None:
        return None
    if not any(_fits(value, kind) for kind in kinds):
        items = [_KINDS.get(item, "anything") for item in get_args(kinds[0])[-1:]]
        wanted = " of ".join([_KINDS[get_origin(kinds[0]) or kinds[0]], *items])
        return f"{key} is {value!r}, must be {wanted}"
    if key == "multimodal_keys" and (problem := media_keys_problem(value)) is not None:
        return f"{key}: {problem}"
    if key in _POSITIVE and value <= 0:
        return f"{key} is {value}, must be above 0"
    if key in _NOT_NEGATIVE and value < 0:
        return f"{key} is {value}, must not be negative"
    if key == "top_p" and not 0 < value <= 1:
        return f"top_p is {value}, must be a share of the probability, above 0 and at most 1"
    if key == "top_k" and value != -1 and value < 1:
        return f"top_k is {value}, must be -1 for no cut, or at least 1"
    if key == "stop" and "" in value:
        return "stop holds an empty string, which would end every response at once"
    return None


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any or kind is type(None):
        return kind is Any or value is None
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(item, get_args(kind)[0]) for item in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_fits(item, get_args(kind)[1]) for item in value.values())
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def build_eval_dataset_configs(
    args: Any, raw_config: Iterable[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[EvalDatasetConfig]:
    """The evaluation sets of a run, every field resolved.

    Args:
        raw_config: a list of entries with `name` and `path`, or a mapping name → entry.
        defaults: values for all entries that lack them.

    Raises:
        UserError: an unknown key in `defaults`, an entry without name or path, or two sets of one name.
        TypeError: an unknown key in an entry.
    """
    known = {spec.name for spec in dataclasses.fields(EvalDatasetConfig)} - {"name", "path"}
    unknown = sorted(set(defaults) - known)
    if unknown:
        raise UserError(f"eval.defaults: unknown key {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    if isinstance(raw_config, Mapping):
        raw_config = [{"name": name, **entry} for name, entry in raw_config.items()]
    configs = [_build(args, dict(entry), defaults) for entry in raw_config]
    names = [config.name for config in configs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UserError(f"evaluation sets need different names; repeated: {', '.join(repeated)}")
    return configs


def _build(args: Any, entry: dict[str, Any], defaults: Mapping[str, Any]) -> EvalDatasetConfig:
    missing = [key for key in ("name", "path") if not entry.get(key)]
    if missing:
        raise UserError(f"evaluation set {entry.get('name') or 'without a name'}: {' and '.join(missing)} missing")
    if "/" in str(entry["name"]) or entry["name"] == "step":
        raise UserError(
            f"evaluation set {entry['name']}: its mean reward would be eval/{entry['name']}, which is read as the axis or as a "
            "detail of another set; give a name without /, and not step"
        )
    given = {**defaults, **entry}
    values = dict(given)
    for name, flags in _FLAGS.items():
        if values.get(name) is None:
            values[name] = next((v for flag in flags if (v := vars(args).get(flag)) is not None), None)
    if values.get("metadata_overrides") is None:
        values["metadata_overrides"] = {}
    config = EvalDatasetConfig(**values)
    # Only given values are checked here, because values of flags have rules of their own.
    problems = [problem for key in given if (problem := value_problem(key, given[key])) is not None]
    if problems:
        raise UserError(f"evaluation set {config.name}: {'; '.join(problems)}")
    own_reward = vars(args).get("custom_rm_path")
    if config.rm_type and own_reward and not config.custom_rm_path:
        logger.warning(
            "evaluation set %s: its rm_type %s has no effect, because --custom-rm-path %s grades all sets that have no "
            "custom_rm_path of their own", config.name, config.rm_type, own_reward,
        )  # fmt: skip
    return config
