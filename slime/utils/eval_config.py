"""Evaluation sets: what each one loads, samples and grades with, resolved once.

A value comes from the first place that has it: the set's own entry, the defaults, the `eval_*` flag, the `rollout_*`
(or training) flag.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.utils.errors import UserError
from slime.utils.types import Sample


@dataclass
class EvalDatasetConfig:
    """One evaluation set. Unknown keys of an entry are refused by the constructor (TypeError naming the key)."""

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
        sample.metadata = {**sample.metadata, **self.metadata_overrides}
        if self.rm_type is not None:
            sample.metadata["rm_type"] = self.rm_type
        sample.custom_rm_path = self.custom_rm_path or sample.custom_rm_path
        sample.generate_function_path = sample.generate_function_path or self.custom_generate_function_path
        sample.prompt_is_rendered = bool(self.apply_chat_template)


_TEMPLATE_KEYS = ("apply_chat_template", "apply_chat_template_kwargs")

# Field → flags that supply it, the first that is set wins.
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

_FALLBACKS = {"metadata_key": "metadata", "tool_key": "tools", "n_samples_per_eval_prompt": 1}


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
        raise UserError(f"evaluation set {entry}: {' and '.join(missing)} missing")
    values = {**defaults, **entry}
    for name, flags in _FLAGS.items():
        if values.get(name) is None:
            values[name] = next((v for flag in flags if (v := getattr(args, flag, None)) is not None), None)
    for name, value in _FALLBACKS.items():
        values[name] = value if values.get(name) is None else values[name]
    config = EvalDatasetConfig(**values)
    if config.n_samples_per_eval_prompt < 1:
        raise UserError(
            f"evaluation set {config.name}: n_samples_per_eval_prompt is {config.n_samples_per_eval_prompt}, must be ≥ 1"
        )
    return config
