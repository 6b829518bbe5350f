"""Tokenizers from local directories, and the rendering of chat messages into prompt text."""

from __future__ import annotations

import json
import os
from typing import Any

from slime.utils.errors import UserError


def load_tokenizer(path: str, trust_remote_code: bool = False, *, flag: str = "--hf-checkpoint", **kwargs: Any) -> Any:
    """The tokenizer in the directory `path`. Never asks the network.

    `kwargs` go to `AutoTokenizer.from_pretrained`; `flag` is named in messages.

    Raises:
        UserError: no such directory, or no tokenizer that can be loaded in it.
    """
    if not os.path.isdir(path):
        raise UserError(f"{flag} {path}: there is no such directory; give a local Hugging Face checkpoint")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code, **kwargs)
    except Exception as error:
        raise UserError(
            f"{flag} {path}: no tokenizer could be loaded from this directory ({type(error).__name__}: {error}); "
            "it needs tokenizer.json and tokenizer_config.json (and --trust-remote-code where its code is its own)"
        ) from error


def require_chat_template(tokenizer: Any, reason: str) -> None:
    """Raise UserError, naming the tokenizer and `reason`, when it has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "of --hf-checkpoint"
        raise UserError(no_chat_template(reason, name))


def no_chat_template(reason: str, name: str) -> str:
    """The message about a tokenizer that has no chat template although `reason`."""
    return f"{reason}, but the tokenizer {name} has no chat template; put one there as chat_template.jinja"


def lacks_chat_template(directory: str) -> bool:
    """Whether the tokenizer in a Hugging Face directory has no chat template for sure, from its files alone.

    Loading the tokenizer takes seconds. Code of its own, or a file of another format, may bring a template along.
    """
    try:
        with open(os.path.join(directory, "tokenizer_config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError):
        return False  # whoever loads the tokenizer says what is wrong with it
    named = ("chat_template.jinja", "chat_template.json", "additional_chat_templates", "tekken.json")
    elsewhere = any(os.path.exists(os.path.join(directory, name)) for name in named)
    return not elsewhere and not config.get("chat_template") and "auto_map" not in config


def render_chat(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The text of `messages` in the tokenizer's chat template, ready to be tokenised without special tokens."""
    return tokenizer.apply_chat_template(
        messages,
        tools=tools or None,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **(template_kwargs or {}),
    )
