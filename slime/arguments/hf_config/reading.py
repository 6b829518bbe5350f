"""Finding and opening a `config.json`."""

import json
from pathlib import Path
from typing import Any

from slime.arguments.hf_config.families import SUPPORTED_MODEL_TYPES
from slime.utils.errors import UserError

Config = dict[str, Any]

# What a multimodal config says about the whole model; the same entries inside `text_config` are only defaults.
_OF_THE_WHOLE_MODEL = ("model_type", "architectures", "tie_word_embeddings")


def read_hf_config(checkpoint: str | Path, flag: str = "--hf-checkpoint") -> Config:
    """The `config.json` of a Hugging Face directory, the entries of `text_config` taken out when there is one.

    Raises:
        UserError: no such directory, no config in it, or broken JSON.
    """
    path = Path(checkpoint) / "config.json"
    if not Path(checkpoint).is_dir():
        raise UserError(no_directory(flag, checkpoint))
    if not path.is_file():
        raise UserError(f"{flag} {checkpoint}: it holds no config.json; give a Hugging Face checkpoint directory")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: broken JSON: {error.msg}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: it holds no JSON object; give a Hugging Face checkpoint directory")
    return text_config_of(config)


def no_directory(flag: str, path: str | Path) -> str:
    """The message about a missing checkpoint; `OWNER/MODEL`, typed as on the hub, is no path and deserves a hint."""
    message = f"{flag} {path}: no such directory; give a Hugging Face checkpoint directory"
    owner = Path(path).absolute().parent
    if owner.parent == Path.cwd() and not owner.exists():
        message += (
            f" (models are not downloaded here: `hf download {owner.name}/{Path(path).name} --local-dir {path}` does)"
        )
    return message


def text_config_of(config: Config) -> Config:
    """The config of the language model: `config` itself, or of a multimodal one its `text_config` in front of the rest."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    whole = {name: config[name] for name in _OF_THE_WHOLE_MODEL if config.get(name) is not None}
    return {**config, **text, **whole}


def is_hf_checkpoint(path: str | Path) -> bool:
    """Whether `path` is a Hugging Face directory of a supported family."""
    config = Path(path) / "config.json"
    return config.is_file() and read_hf_config(path).get("model_type") in SUPPORTED_MODEL_TYPES
