"""The model of the toy task: a byte-level tokenizer with the task's words, and random weights in Qwen3's shape.

Invariant: every sentence of the task is the same after encoding and decoding; digits and the opening of the box are single
tokens.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    import tokenizers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# Beside the 256 byte symbols the vocabulary has only the words of the task, so that prompts are short.
WORDS = ("system", "user", "assistant", "What", " is", "\\boxed{")
PRE_TOKENS = r"\\boxed\{|[0-9]|\n| ?\p{L}+| ?[^\s\p{L}\p{N}\\]|\s|."
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> "tokenizers.Tokenizer":
    """Byte-level BPE over the 256 byte symbols. Its merges build exactly `WORDS`, each from its first byte on."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        [(symbols, _)] = byte_level.pre_tokenize_str(word)
        for length in range(1, len(symbols)):
            vocabulary.setdefault(symbols[: length + 1], len(vocabulary))
            if (symbols[:length], symbols[length]) not in merges:
                merges.append((symbols[:length], symbols[length]))

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    split = pre_tokenizers.Split(Regex(PRE_TOKENS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_tokenizer(directory: Path, max_position_embeddings: int) -> "tokenizers.Tokenizer":
    tokenizer = build_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    configuration = {
        # The generic class keeps the pre-tokenizer of the file; a class of a model would replace it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position_embeddings,
    }
    write_json(directory / "tokenizer_config.json", configuration)
    return tokenizer


def model_configuration(arguments: argparse.Namespace, tokenizer: "tokenizers.Tokenizer") -> dict[str, Any]:
    """The `config.json` of the checkpoint."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": arguments.hidden_size,
        "intermediate_size": arguments.ffn_hidden_size,
        "num_hidden_layers": arguments.num_layers,
        "num_attention_heads": arguments.num_attention_heads,
        "num_key_value_heads": arguments.num_key_value_heads,
        "head_dim": arguments.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": arguments.max_position_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }


def parameter_shapes(configuration: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor in the checkpoint, which does not have the tied output layer."""
    hidden, ffn, head = (configuration[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    query = configuration["num_attention_heads"] * head
    key_value = configuration["num_key_value_heads"] * head
    of_a_layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    layers = range(configuration["num_hidden_layers"])
    return {
        "model.embed_tokens.weight": (configuration["vocab_size"], hidden),
        **{f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in of_a_layer.items()},
        "model.norm.weight": (hidden,),
    }


def draw_weights(configuration: dict[str, Any], seed: int) -> "dict[str, numpy.ndarray]":
    """Float32 weights: norms are 1, embeddings have a standard deviation of 0.02, projections one of 1/sqrt(fan-in).

    The output of a layer to the residual stream is divided by sqrt(2 × layers), as in GPT-2, so that depth does not change the
    scale of the model's output.
    """
    import numpy

    generator = numpy.random.default_rng([seed, 1])
    residual_scale = (2 * configuration["num_hidden_layers"]) ** -0.5
    weights = {}
    for name, shape in parameter_shapes(configuration).items():
        if len(shape) == 1:
            weights[name] = numpy.ones(shape, dtype=numpy.float32)
            continue
        deviation = 0.02 if "embed_tokens" in name else shape[1] ** -0.5
        if "o_proj" in name or "down_proj" in name:
            deviation *= residual_scale
        weights[name] = generator.standard_normal(shape, dtype=numpy.float32) * numpy.float32(deviation)
    return weights


def write_model(directory: Path, arguments: argparse.Namespace) -> int:
    """Write the checkpoint. Returns the number of parameters."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(directory, arguments.max_position_embeddings)
    configuration = model_configuration(arguments, tokenizer)
    weights = draw_weights(configuration, arguments.seed)
    write_json(directory / "config.json", configuration)
    special_ids = {key: configuration[key] for key in ("eos_token_id", "pad_token_id")}
    write_json(directory / "generation_config.json", {**special_ids, "do_sample": True, "temperature": 1.0})
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.size for weight in weights.values())
