"""What all requests of one process share: tokenizer, limits, sampling parameters, and how far the step has come."""

import asyncio
import json
import logging
import uuid
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from slime.rollout.user_functions import CallKind, CallSlots
from slime.utils.errors import UserError
from slime.utils.http_utils import generation_concurrency, init_http_client
from slime.utils.misc import SingletonMeta
from slime.utils.processing_utils import load_tokenizer, render_chat, require_chat_template
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


class GenerateState(metaclass=SingletonMeta):
    """One per process; `GenerateState.clear_instances()` forgets it.

    `remaining_batch_size` counts the groups of the step that are kept or may still be: started, minus dropped, minus
    given back. `aborted` is True while the step is being wound down; no request may start then.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.processor = None
        self.semaphore = CallSlots(CallKind.GENERATE, generation_concurrency(args))
        self.sampling_params = rollout_sampling_params(args)
        self._warned: set[str] = set()
        # The siblings of a group share their prompt: tokenise it once.
        self._encode = lru_cache(maxsize=1024)(self._encode_text)
        init_http_client(args)
        self.reset()

    def reset(self) -> None:
        """Back to where no step is under way."""
        self.rollout_id: int | None = None
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Any]] = set()
        self.aborted = False

    def warn_once(self, message: str) -> None:
        """Log a warning the first time this process has it."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.args.hf_checkpoint, trust_remote_code=self.args.trust_remote_code)

    @cached_property
    def _hf_config(self) -> dict[str, Any]:
        path = Path(self.args.hf_checkpoint) / "config.json"
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"--hf-checkpoint: cannot read {path}: {error}") from error
        return {**config, **config.get("text_config", {})}

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids the engines know: rows of the embedding."""
        try:
            return int(self._hf_config["vocab_size"])
        except KeyError:
            raise UserError(f"--hf-checkpoint {self.args.hf_checkpoint}: config.json has no vocab_size") from None

    def context_length(self, args: Any) -> int | None:
        """Tokens that prompt and response may have together: the smallest of our limit and the engines'; None = open.

        Ours is `args.rollout_max_context_len`: evaluation passes arguments of its own (`evaluation_args`).
        """
        engine_limit = getattr(args, "sglang_context_length", None) or self._hf_config.get("max_position_embeddings")
        return min([limit for limit in (args.rollout_max_context_len, engine_limit) if limit], default=None)

    def prompt_ids(self, sample: Sample) -> list[int]:
        """Token ids of the prompt. A chat template writes the special tokens itself, other text gets the tokenizer's."""
        rendered = getattr(sample, "prompt_is_rendered", getattr(self.args, "apply_chat_template", False))
        text = sample.prompt
        if not isinstance(text, str):
            require_chat_template(self.tokenizer, f"the prompt of sample {sample.index} is a list of messages")
            template_kwargs = {
                **(getattr(self.args, "apply_chat_template_kwargs", None) or {}),
                **sample.apply_chat_template_kwargs,
            }
            text = render_chat(self.tokenizer, text, sample.metadata.get("tools"), template_kwargs)
            rendered = True
        return list(self._encode(text, not rendered))

    def _encode_text(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))


def rollout_sampling_params(args: Any) -> dict[str, Any]:
    """The sampling parameters of training rollouts, as the engine's `/generate` takes them."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def deterministic_inference(args: Any) -> bool:
    """Whether the engines sample by seed."""
    return bool(getattr(args, "sglang_enable_deterministic_inference", False))


def prepare_group(args: Any, group: list[Any]) -> list[dict[str, Any]]:
    """Give every sample its session and return what each adds to its sampling parameters: its seed, if seeds count."""
    additions: list[dict[str, Any]] = []
    for position, entry in enumerate(group):
        if isinstance(entry, Sample) and entry.session_id is None:
            entry.session_id = str(uuid.uuid4())
        additions.append({"sampling_seed": args.rollout_seed + position} if deterministic_inference(args) else {})
    return additions
