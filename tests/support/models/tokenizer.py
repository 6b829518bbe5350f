"""A small byte-level tokenizer with a ChatML template, built in memory.

Every byte is a token and a few merges make longer ones. So token boundaries depend on the neighbourhood, as in real
vocabularies, and text that is tokenised in other pieces gives other ids.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "a"), ("Ċ", "Ċ"), ("t", "h"), ("th", "i"))

# As in the Qwen family, tools stand in the system block, and consecutive tool answers share one user turn.
CHATML_TEMPLATE = (
    "{%- if tools -%}"
    "{{ '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif -%}"
    "{{ '# Tools\n' }}{%- for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' -%}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif -%}"
    "{%- elif message.role != 'system' or not loop.first -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"
)


def build_tokenizer(chat_template: str | None = CHATML_TEMPLATE) -> PreTrainedTokenizerFast:
    """The tokenizer, with `chat_template`; None: without a template."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in MERGES:
        vocabulary[left + right] = len(vocabulary)
    for token in SPECIAL_TOKENS:
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")
    wrapped.chat_template = chat_template
    return wrapped


def save_tokenizer(directory: str | Path, chat_template: str | None = CHATML_TEMPLATE) -> str:
    """Write the tokenizer as a Hugging Face directory and return its path."""
    build_tokenizer(chat_template).save_pretrained(str(directory))
    return str(directory)
