"""The flags without which no model is described, and the vocabulary as it is held in memory."""

from typing import Any

SHAPE_FLAGS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")


def padded_vocabulary(args: Any) -> int:
    """Rows of the embedding as they are held in memory: typed, or `--vocab-size` rounded up so that ranks share evenly.

    Args:
        args: flags of a parser; `vocab_size` is known.
    """
    if args.padded_vocab_size is not None:
        return args.padded_vocab_size
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-args.vocab_size // multiple) * multiple
