"""Which tokens of a chat are trained: those that the assistant said, and the mark that ends its turn.

`--loss-mask-type` chooses among three ways to find them:

* by turns (`qwen`, `qwen3`): every turn is rendered by itself and tokenised by itself. `qwen` renders it alone and cuts
  off the system prefix that the template puts before a lone message; `qwen3` renders it behind a fixed user message.
  Consecutive tool messages are one turn, as in the templates.
* by spans (`qwen3_5`): the whole chat is rendered once; assistant turns are found by character offsets.
* prompt and answer (`distill_qwen`): the first message is the prompt, the last one the answer.

What the template itself puts before an answer (role header, `<think>`) is given to the model when it generates, and so is
never trained.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from slime.utils.errors import UserError
from slime.utils.processing_utils import PROBE_ANSWER, render_chat, require_chat_template

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
Conversation = tuple[Messages, list[dict[str, Any]] | None]  # messages, tools
TokensAndMask = tuple[list[int], list[int]]

_USER = {"role": "user", "content": "probe question"}
_THINK_OPENER = "<think>\n"
_TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen")


@dataclass(frozen=True)
class _TurnFormat:
    """What a chat template puts around turns."""

    prefix: str  # before a lone user message
    user_turn: str  # the probing user message itself
    role_header: str  # what starts every assistant turn
    generation_prompt: str  # what the model is given to answer; starts with the role header
    closer: str  # what ends an assistant turn

    def opened_by_template(self, turn: str) -> int:
        """Number of characters at the start of an assistant turn that the model does not generate."""
        for opening in (self.generation_prompt, self.role_header):
            if turn.startswith(opening):
                return len(opening)
        raise UserError(
            f"--loss-mask-type: an assistant turn does not start with {self.role_header!r} but with {turn[:40]!r}; "
            "try another type"
        )


class MultiTurnLossMaskGenerator:
    """Token ids and loss masks of chats.

    Args:
        tokenizer: with a chat template; a fast one for `qwen3_5`.
        tokenizer_type: `qwen`, `qwen3`, `qwen3_5` or `distill_qwen` (`--loss-mask-type`).
        template_kwargs: further arguments of the chat template.

    Raises:
        UserError: unknown type; no template; a template that does not fit the type.
    """

    def __init__(
        self, tokenizer: Any, tokenizer_type: str = "qwen", template_kwargs: dict[str, Any] | None = None
    ) -> None:
        if tokenizer_type not in _TYPES:
            raise UserError(f"--loss-mask-type {tokenizer_type}: unknown; choose one of {', '.join(_TYPES)}")
        require_chat_template(tokenizer, "loss masks of chats are asked for")
        if tokenizer_type == "qwen3_5" and not tokenizer.is_fast:
            raise UserError("--loss-mask-type qwen3_5 needs a fast tokenizer (tokenizer.json)")
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type
        self._template_kwargs = template_kwargs
        self._format = self._probe_turn_format()
        self._difference_reported = False

    def get_loss_mask(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> TokensAndMask:
        """Token ids of a chat and its mask, of one length; 1 = trained. A message with `step_loss_mask` ≠ 1 is masked."""
        return self.get_loss_masks([(messages, tools)])[0]

    def get_loss_masks(self, conversations: list[Conversation]) -> list[TokensAndMask]:
        """`get_loss_mask` of many chats, with one call of the tokenizer."""
        if not conversations:
            return []
        if self.tokenizer_type == "qwen3_5":
            return self._mask_by_spans(conversations)
        if self.tokenizer_type == "distill_qwen":
            return self._mask_pieces([self._prompt_and_answer(*conversation) for conversation in conversations])
        masked = self._mask_pieces([self._turn_pieces(*conversation) for conversation in conversations])
        self._compare_with_whole(conversations, masked)
        return masked

    def get_loss_mask_with_multimodal_alignment(
        self, messages: Messages, input_ids: list[int], tools: list[dict[str, Any]] | None = None
    ) -> TokensAndMask:
        """`input_ids`, the chat as a processor tokenised it, and its mask; ids that it inserted for images are not trained.

        Raises:
            UserError: without the inserted ids they are not the ids of the chat.
        """
        token_ids, loss_mask = self.get_loss_mask(messages, tools)
        mask, position = [0] * len(input_ids), 0
        for place, token in enumerate(input_ids):
            # A processor repeats the mark of an image for its patches; the first one counts as the mark in the text.
            if position < len(token_ids) and token == token_ids[position]:
                mask[place] = loss_mask[position]
                position += 1
        if position < len(token_ids):
            raise UserError(
                f"--loss-mask-type {self.tokenizer_type}: {len(input_ids)} ids of a processor hold {position} of the "
                f"{len(token_ids)} tokens of the chat in their order; was it rendered with the same template and tools?"
            )
        return input_ids, mask

    def get_response_lengths(self, masks: list[list[int]]) -> list[int]:
        """Tokens from the first trained one to the end; 0 where nothing is trained."""
        return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in masks]

    def get_text_from_loss_mask(self, token_ids: list[int], loss_mask: list[int]) -> list[str]:
        """The text of every run of trained tokens."""
        runs: list[list[int]] = []
        previous = 0
        for token, trained in zip(token_ids, loss_mask, strict=True):
            if trained:
                if not previous:
                    runs.append([])
                runs[-1].append(token)
            previous = trained
        return [self.tokenizer.decode(run) for run in runs]

    def render(self, messages: Messages, tools: Any = None, generation_prompt: bool = False) -> str:
        """The chat as the chat template renders it. Raises UserError if the template refuses it."""
        try:
            return render_chat(
                self.tokenizer, messages, tools, self._template_kwargs, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # a template runs arbitrary code over the messages
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UserError(
                f"--loss-mask-type {self.tokenizer_type}: the chat template refused messages of {roles} "
                f"({type(error).__name__}: {error})"
            ) from error

    def _encode(self, texts: list[str], **kwargs: Any) -> Any:
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, **kwargs)

    def _probe_turn_format(self) -> _TurnFormat:
        one = self.render([_USER])
        two = self.render([_USER, _USER])
        user_turn = two[len(one) :]
        generation_prompt = self.render([_USER], generation_prompt=True)[len(one) :]
        answer = self.render([_USER, {"role": "assistant", "content": PROBE_ANSWER}])[len(one) :]
        header, found, closer = answer.partition(PROBE_ANSWER)
        role_header = os.path.commonprefix([header, generation_prompt]).partition(_THINK_OPENER.strip())[0]
        if not (user_turn and one.endswith(user_turn) and found and role_header and closer):
            raise UserError(
                f"--loss-mask-type {self.tokenizer_type}: the chat template does not mark turns one by one, so "
                "assistant tokens cannot be found"
            )
        return _TurnFormat(one.removesuffix(user_turn), user_turn, role_header, generation_prompt, closer)

    def _turn_pieces(self, messages: Messages, tools: Any) -> list[tuple[str, bool]]:
        """(text, whether it is trained): first what precedes the first turn, then each turn of the chat."""
        is_system = bool(messages) and messages[0]["role"] == "system"
        lead = self.render([*messages[:is_system], _USER], tools)
        if not lead.endswith(self._format.user_turn):
            raise UserError(f"--loss-mask-type {self.tokenizer_type}: the chat template does not put tools first")
        pieces = [(lead.removesuffix(self._format.user_turn), False)]
        for turn in _turns(messages[is_system:]):
            text = self._render_turn(turn)
            if turn[0]["role"] != "assistant":
                pieces.append((text, False))
                continue
            opened = self._format.opened_by_template(text)
            pieces += [(text[:opened], False), (text[opened:], turn[0].get("step_loss_mask", 1) == 1)]
        return pieces

    def _render_turn(self, turn: Messages) -> str:
        if self.tokenizer_type == "qwen3":
            return self.render([_USER, *turn])[len(self._format.prefix) + len(self._format.user_turn) :]
        return self.render(turn).removeprefix(self._format.prefix)

    def _prompt_and_answer(self, messages: Messages, tools: Any) -> list[tuple[str, bool]]:
        answer = messages[-1]
        if len(messages) < 2 or answer["role"] != "assistant" or not isinstance(answer.get("content"), str):
            raise UserError("--loss-mask-type distill_qwen: the last message must be the assistant's answer, as text")
        prompt = self.render(messages[:1], tools, generation_prompt=True)
        text = answer["content"]
        if prompt.endswith(_THINK_OPENER):
            text = text.removeprefix(_THINK_OPENER)
        # The template itself would drop the reasoning from an answer, so the turn is closed by hand.
        return [(prompt, False), (text + self._format.closer, answer.get("step_loss_mask", 1) == 1)]

    def _mask_pieces(self, chats: list[list[tuple[str, bool]]]) -> list[TokensAndMask]:
        all_ids = iter(self._encode([text for pieces in chats for text, _ in pieces])["input_ids"])
        result = []
        for pieces in chats:
            ids: list[int] = []
            mask: list[int] = []
            for _, trained in pieces:
                piece_ids = next(all_ids)
                ids += piece_ids
                mask += [int(trained)] * len(piece_ids)
            result.append((ids, mask))
        return result

    def _mask_by_spans(self, conversations: list[Conversation]) -> list[TokensAndMask]:
        texts = [self.render(messages, tools) for messages, tools in conversations]
        encoded = self._encode(texts, return_offsets_mapping=True)
        result = []
        for (messages, _), text, ids, offsets in zip(
            conversations, texts, encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            mask = [0] * len(ids)
            position = 0
            for start, end in self._trained_spans(messages, text):
                while position < len(ids) and offsets[position][1] <= start:
                    position += 1
                while position < len(ids) and offsets[position][1] <= end:
                    # A token that also covers the end of the header cannot be generated after the header.
                    mask[position] = int(offsets[position][0] >= start)
                    position += 1
            result.append((ids, mask))
        return result

    def _trained_spans(self, messages: Messages, text: str) -> list[tuple[int, int]]:
        """Character spans of the trained assistant turns in the rendered chat, in order."""
        header, closer = self._format.role_header, self._format.closer
        assistants = [message for message in messages if message["role"] == "assistant"]
        if text.count(header) != len(assistants):
            raise UserError(
                f"--loss-mask-type qwen3_5: {text.count(header)} turns start with {header!r} in a chat of "
                f"{len(assistants)} assistant messages; no message may contain that text"
            )
        spans = []
        cursor = 0
        for message in assistants:
            turn = text.index(header, cursor)
            start = turn + self._format.opened_by_template(text[turn:])
            if start == turn + len(header) and text.startswith(_THINK_OPENER, start):
                start += len(_THINK_OPENER)
            end = text.find(closer, start)
            cursor = len(text) if end < 0 else end + len(closer)
            if message.get("step_loss_mask", 1) == 1:
                spans.append((start, cursor))
        return spans

    def _compare_with_whole(self, conversations: list[Conversation], masked: list[TokensAndMask]) -> None:
        """Report, once, the first chat whose turns do not add up to the template's rendering of the whole."""
        if self._difference_reported:
            return
        whole = self._encode([self.render(messages, tools) for messages, tools in conversations])["input_ids"]
        for number, (expected, (ids, _)) in enumerate(zip(whole, masked, strict=True)):
            if ids != expected:
                position = len(os.path.commonprefix([ids, expected]))
                logger.warning(
                    "--loss-mask-type %s: chat %d, tokenised turn by turn, differs from the chat template's rendering "
                    "of the whole chat from token %d on: %r instead of %r. Reported once.",
                    self.tokenizer_type,
                    number,
                    position,
                    self.tokenizer.decode(ids[position : position + 20]),
                    self.tokenizer.decode(expected[position : position + 20]),
                )
                self._difference_reported = True
                return


def _turns(messages: Messages) -> list[Messages]:
    """Messages one by one, consecutive tool messages together."""
    turns: list[Messages] = []
    for message in messages:
        if message["role"] == "tool" and turns and turns[-1][0]["role"] == "tool":
            turns[-1].append(message)
        else:
            turns.append([message])
    return turns
