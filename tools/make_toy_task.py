#!/usr/bin/env python3
"""Write a toy task: a tiny random model, its tokenizer, and a verifiable arithmetic data set.

    python tools/make_toy_task.py runs/toy --seed 1

The task is addition with the working written out column by column, units first, and the answer in a box:

    user       What is 47+38?
    assistant  7+8=15 4+3+1=8 \\boxed{85}

The supervised demonstrations come from a teacher who knows the tables but forgets most carries ("4+3=7", boxed 75), so
imitation ends at a middling accuracy however long it lasts, and what is left to learn, the reward has to teach. That
makes the start of reinforcement learning the same for every seed, and its success visible within minutes.

Invariants:
- no held-out problem (in either order of its operands) is a training problem or a demonstration;
- the output depends on the arguments alone: equal arguments give equal bytes;
- every sentence of the task tokenises back to itself, digits are single tokens, and so is the opening of the box.

Written: `model/` (Hugging Face checkpoint, Qwen3 architecture), `train.jsonl` and `eval.jsonl` (`prompt`, `label`,
`metadata`), `sft.jsonl` (`messages`, `metadata`) and, last, `task.json` (the arguments), the mark of a complete task.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    import tokenizers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# Besides the 256 byte symbols the vocabulary holds only the words of the task, so that prompts stay short.
WORDS = ("system", "user", "assistant", "What", " is", "\\boxed{")
PRE_TOKENS = r"\\boxed\{|[0-9]|\n| ?\p{L}+| ?[^\s\p{L}\p{N}\\]|\s|."
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARK_OF_COMPLETENESS = "task.json"
# Rejection sampling gives up after this many draws for each problem that is asked for.
MAX_DRAWS_PER_PROBLEM = 2000


@dataclass(frozen=True)
class Problem:
    """`left + right`, both with the same number of digits."""

    left: int
    right: int

    @property
    def key(self) -> tuple[int, int]:
        """The same for both orders of the operands."""
        return min(self.left, self.right), max(self.left, self.right)

    @property
    def columns(self) -> list[tuple[int, int]]:
        """Digit pairs, units first."""
        return list(zip(map(int, reversed(str(self.left))), map(int, reversed(str(self.right))), strict=True))

    @property
    def carries(self) -> int:
        """How many columns receive a carry from the one before."""
        carry, count = 0, 0
        for left_digit, right_digit in self.columns[:-1]:
            carry = int(left_digit + right_digit + carry >= 10)
            count += carry
        return count

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"What is {self.left}+{self.right}?"}]

    @property
    def metadata(self) -> dict[str, Any]:
        return {"operands": [self.left, self.right], "carries": self.carries}

    def working(self, forgotten: Sequence[bool] | None = None) -> str:
        """The written-out answer; `forgotten[i]` drops the carry into column i + 1."""
        forgotten = forgotten or [False] * len(self.columns)
        steps, digits, carry = [], "", 0
        for (left_digit, right_digit), forget in zip(self.columns, forgotten, strict=True):
            total = left_digit + right_digit + carry
            steps.append(f"{left_digit}+{right_digit}{'+1' if carry else ''}={total}")
            digits = f"{total % 10}{digits}"
            carry = int(total >= 10 and not forget)
        return f"{' '.join(steps)} \\boxed{{{total // 10 or ''}{digits}}}"


def draw_problem(generator: "numpy.random.Generator", digits: int, carry_share: float) -> Problem:
    """One problem; with probability `carry_share` it has at least one carry, otherwise none."""
    wants_carry = generator.random() < carry_share
    low, high = 10 ** (digits - 1), 10**digits
    while True:
        problem = Problem(*(int(operand) for operand in generator.integers(low, high, size=2)))
        if digits == 1 or (problem.carries > 0) == wants_carry:
            return problem


def draw_distinct_problems(
    generator: "numpy.random.Generator", count: int, arguments: argparse.Namespace, taken: set[tuple[int, int]]
) -> list[Problem]:
    """`count` problems whose keys are neither in `taken` nor equal to one another."""
    problems: dict[tuple[int, int], Problem] = {}
    for _ in range(count * MAX_DRAWS_PER_PROBLEM):
        if len(problems) == count:
            return list(problems.values())
        problem = draw_problem(generator, arguments.digits, arguments.carry_share)
        if problem.key not in taken:
            problems.setdefault(problem.key, problem)
    raise ValueError(
        f"found only {len(problems)} of {count} distinct problems with --digits {arguments.digits}: "
        "ask for fewer (--train-size, --eval-size) or for longer operands (--digits)"
    )


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_data(directory: Path, arguments: argparse.Namespace) -> None:
    """Write `train.jsonl`, `eval.jsonl` and `sft.jsonl`."""
    import numpy

    generator = numpy.random.default_rng([arguments.seed, 0])
    held_out = draw_distinct_problems(generator, arguments.eval_size, arguments, taken=set())
    held_out_keys = {problem.key for problem in held_out}
    training = draw_distinct_problems(generator, arguments.train_size, arguments, taken=held_out_keys)

    demonstrations = []
    while len(demonstrations) < arguments.sft_size:
        problem = draw_problem(generator, arguments.digits, arguments.carry_share)
        forgotten = [bool(draw < arguments.forget_rate) for draw in generator.random(arguments.digits)]
        if problem.key in held_out_keys:
            continue
        answer = {"role": "assistant", "content": problem.working(forgotten)}
        demonstrations.append({"messages": [*problem.prompt, answer], "metadata": problem.metadata})

    for name, problems in (("eval", held_out), ("train", training)):
        rows = [{"prompt": p.prompt, "label": str(p.left + p.right), "metadata": p.metadata} for p in problems]
        write_jsonl(directory / f"{name}.jsonl", rows)
    write_jsonl(directory / "sft.jsonl", demonstrations)


def build_tokenizer() -> "tokenizers.Tokenizer":
    """Byte-level BPE over the 256 byte symbols whose merges build exactly `WORDS`, each from its front."""
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
        # The generic class keeps the file's own pre-tokenizer; a model-specific one would install its own.
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
    """Name → shape of every tensor in the checkpoint; the tied output layer is not stored."""
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
    """Float32 weights: norms 1, embeddings of deviation 0.02, projections of deviation 1/sqrt(fan-in).

    What a layer adds to the residual stream is divided by sqrt(2 × layers), as GPT-2 does, so that depth does not
    change the scale of the output.
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
    """Write the checkpoint; returns the number of parameters."""
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


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Write a toy task: a tiny random Qwen3-shaped model with its tokenizer, and JSONL data of a "
        "verifiable arithmetic task (addition with the working written out).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", type=Path, help="directory to write; made if missing")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the data")
    parser.add_argument("--force", action="store_true", help="write over a task that is already there")
    data = parser.add_argument_group("data")
    data.add_argument("--digits", type=int, default=2, help="digits of each operand")
    data.add_argument("--train-size", type=int, default=2048, help="problems in train.jsonl")
    data.add_argument("--eval-size", type=int, default=256, help="held-out problems in eval.jsonl")
    data.add_argument("--sft-size", type=int, default=16384, help="demonstrations in sft.jsonl")
    data.add_argument("--carry-share", type=float, default=0.8, help="share of problems with a carry")
    data.add_argument("--forget-rate", type=float, default=0.65, help="share of carries the demonstrations forget")
    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", type=int, default=2)
    model.add_argument("--hidden-size", type=int, default=256)
    model.add_argument("--ffn-hidden-size", type=int, default=512)
    model.add_argument("--num-attention-heads", type=int, default=4)
    model.add_argument("--num-key-value-heads", type=int, default=2)
    model.add_argument("--head-dim", type=int, default=64)
    model.add_argument("--max-position-embeddings", type=int, default=2048)
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise ValueError, naming the option, for a value that cannot work."""
    names = ("digits", "train_size", "eval_size", "sft_size", "num_layers", "hidden_size", "ffn_hidden_size")
    for name in (*names, "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be at least 1")
    for name in ("carry_share", "forget_rate"):
        if not 0 <= getattr(arguments, name) <= 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must lie between 0 and 1")
    if arguments.seed < 0:
        raise ValueError(f"--seed {arguments.seed}: must not be negative")
    if arguments.num_attention_heads % arguments.num_key_value_heads:
        raise ValueError(
            f"--num-attention-heads {arguments.num_attention_heads}: must be a multiple of "
            f"--num-key-value-heads {arguments.num_key_value_heads}"
        )
    if arguments.head_dim % 2:
        raise ValueError(f"--head-dim {arguments.head_dim}: must be even, rotary embeddings pair the dimensions")
    if (arguments.output_dir / MARK_OF_COMPLETENESS).exists() and not arguments.force:
        raise ValueError(f"{arguments.output_dir} holds a task already: choose another directory or give --force")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    directory = arguments.output_dir
    try:
        check_arguments(arguments)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MARK_OF_COMPLETENESS).unlink(missing_ok=True)
        write_data(directory, arguments)
    except ValueError as error:
        print(f"make_toy_task: {error}", file=sys.stderr)
        return 2
    parameters = write_model(directory / "model", arguments)
    options = {name: value for name, value in vars(arguments).items() if name not in ("output_dir", "force")}
    write_json(directory / MARK_OF_COMPLETENESS, {**options, "parameters": parameters})
    print(
        f"toy task in {directory}: model of {parameters / 1e6:.2f} M parameters, {arguments.train_size} training "
        f"problems, {arguments.eval_size} held-out problems, {arguments.sft_size} demonstrations"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
