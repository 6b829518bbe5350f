"""Tokenizers from local directories, and the rendering of chat messages into prompt text."""

from __future__ import annotations

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
        raise UserError(f"{reason}, but the tokenizer {name} has no chat template")


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
