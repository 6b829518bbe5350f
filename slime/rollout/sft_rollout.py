"""Rollout function of supervised fine-tuning: chats from the data source become samples, without any engine.

The response of a sample is everything from the first trained token to the end, with `loss_mask` 0 on what the assistant
did not say. A chat without trained tokens keeps its place in the batch with one masked token. Of a chat with images the tokens
are those of the processor, and what that gives beside them is in `multimodal_train_inputs`.
"""

from __future__ import annotations

import functools
import json
import logging
from typing import Any

from slime.rollout.attempts import new_attempt
from slime.rollout.base_types import RolloutFnTrainOutput, leaves
from slime.rollout.draws import draw_groups
from slime.utils.errors import UserError
from slime.utils.mask_utils import MultiTurnLossMaskGenerator, TokensAndMask
from slime.utils.processing_utils import (
    at_row,
    encode_with_images,
    images_of,
    load_processor,
    load_tokenizer,
    no_processor,
)
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """`rollout_batch_size` groups of tokenised chats, in the order of the data source.

    Metrics: `sft_cut_samples` (longer than `rollout_max_context_len`), `sft_untrained_samples` (no trained token).

    Raises:
        UserError: evaluation is asked for; a prompt is no list of messages, or the template cannot render it; or it has images,
            and the checkpoint has no processor, or that refuses them.
    """
    if evaluation:
        raise UserError(
            "--eval-function-path: supervised fine-tuning has no evaluation of its own; give "
            "slime.rollout.sglang_rollout.generate_rollout (it needs engines), or no --eval-interval"
        )
    groups = new_attempt(draw_groups(args, data_source, args.rollout_batch_size, rollout_id))
    samples = leaves(groups)
    generator = mask_generator(args)
    texts = iter(generator.get_loss_masks([_conversation(sample) for sample in samples if not images_of(sample)]))
    counts = {"sft_cut_samples": 0, "sft_untrained_samples": 0}
    for sample in samples:
        token_ids, loss_mask = _tokens_with_images(args, generator, sample) if images_of(sample) else next(texts)
        fill_sample(sample, token_ids, loss_mask, args.rollout_max_context_len, counts)
        sample.reward = 0.0
    responses = [sample.tokens[len(sample.tokens) - sample.response_length :] for sample in samples]
    for sample, response in zip(samples, generator.tokenizer.batch_decode(responses), strict=True):
        sample.response = response
    logger.debug("rollout %d: of %d chats, %s", rollout_id, len(samples), counts)
    return RolloutFnTrainOutput(groups, metrics=dict(counts))


def mask_generator(args: Any) -> MultiTurnLossMaskGenerator:
    """What finds the tokens of chats that are trained, by the flags of the run; made once."""
    kwargs = json.dumps(args.apply_chat_template_kwargs or {}, sort_keys=True)
    return _mask_generator(args.hf_checkpoint, args.trust_remote_code, args.loss_mask_type, kwargs)


@functools.lru_cache(maxsize=4)
def _mask_generator(
    checkpoint: str, trust_remote_code: bool, loss_mask_type: str, template_kwargs: str
) -> MultiTurnLossMaskGenerator:
    tokenizer = load_tokenizer(checkpoint, trust_remote_code=trust_remote_code)
    return MultiTurnLossMaskGenerator(tokenizer, loss_mask_type, json.loads(template_kwargs))


def _conversation(sample: Sample) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    if not isinstance(sample.prompt, list) or not sample.prompt:
        raise UserError(
            f"supervised fine-tuning: the prompt of sample {sample.index} is {type(sample.prompt).__name__}, expected a "
            "list of messages; name that field with --input-key and leave out --apply-chat-template"
        )
    return sample.prompt, sample.metadata.get("tools")


_processor = functools.lru_cache(maxsize=4)(load_processor)


def _tokens_with_images(args: Any, generator: MultiTurnLossMaskGenerator, sample: Sample) -> TokensAndMask:
    """Ids and mask of a chat with images; `sample` gets what the processor gives beside the ids.

    Where the chat is going to be cut and an image stands behind its first answer, the mask is zero: a part of that image may be
    cut off, and a model sees images whole.
    """
    messages, tools = _conversation(sample)
    processor = _processor(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
    if processor is None:
        raise UserError(no_processor(args.hf_checkpoint, "--multimodal-keys"))
    with at_row(sample):
        text = generator.render(messages, tools)
        token_ids, beside, _ = encode_with_images(processor, text, images_of(sample), add_special_tokens=False)
    sample.multimodal_train_inputs = beside
    _, loss_mask = generator.get_loss_mask_with_multimodal_alignment(messages, token_ids, tools)
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    is_cut = args.rollout_max_context_len is not None and len(token_ids) > args.rollout_max_context_len
    if is_cut and answers and images_of(Sample(prompt=messages[answers[0] :])):
        loss_mask = [0] * len(token_ids)
    return token_ids, loss_mask


def fill_sample(
    sample: Sample, token_ids: list[int], loss_mask: list[int], max_length: int | None, counts: dict[str, int]
) -> None:
    """Give `sample` the tokens of a whole chat, of which the response is what begins with the first trained one.

    A chat longer than `max_length` is cut, which `counts["sft_cut_samples"]` counts; one without a trained token keeps one
    masked token as its response (`counts["sft_untrained_samples"]`).
    """
    sample.status = Sample.Status.COMPLETED
    if max_length is not None and len(token_ids) > max_length:
        token_ids, loss_mask = token_ids[:max_length], loss_mask[:max_length]
        sample.status = Sample.Status.TRUNCATED
        counts["sft_cut_samples"] += 1
    if 1 in loss_mask:
        loss_mask = loss_mask[loss_mask.index(1) :]
    else:
        # One masked token, not zero: every sample of a train batch has a response.
        loss_mask = [0]
        counts["sft_untrained_samples"] += 1
    sample.tokens = token_ids
    sample.loss_mask = loss_mask
    sample.response_length = len(loss_mask)
    sample.validate_lengths()
