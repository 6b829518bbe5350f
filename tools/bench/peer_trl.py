"""Steps of TRL's `GRPOTrainer`, on CPU, for `bench_peers.py`; it runs in an environment of its own, without slime.

    PEER/bin/python tools/bench/peer_trl.py MODEL PROMPTS --lengths LENGTHS.json --samples-per-prompt 8

Prints a line of JSON: the seconds of every step, including generation. LENGTHS is a file with the lengths of the answers of
every step: before that length the end token has probability 0, and at it 1. Rewards are random, so that there is something to
learn from. Everything that makes a step of TRL longer and is not needed here is off: recomputation, bfloat16 on a CPU, the
reference model, logs of texts.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="Hugging Face directory")
    parser.add_argument("prompts", type=Path, help="rows of JSON with a conversation as `prompt`")
    parser.add_argument("--lengths", type=Path, required=True, help="JSON: for every step the tokens of its answers")
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(seconds_of_steps(options)))


def seconds_of_steps(options: argparse.Namespace) -> list[float]:
    """The seconds of every step, from the end of the step before it; those of the first from the start of training."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    lengths = json.loads(options.lengths.read_text())
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    rows = [{"prompt": json.loads(line)["prompt"]} for line in options.prompts.read_text().splitlines()]
    draw = random.Random(0)

    def rewards(completions: list[Any], **columns: Any) -> list[float]:
        return [draw.random() for _ in completions]

    ends = []

    class Clock(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory(prefix="bench-peers-") as directory:
        config = GRPOConfig(
            output_dir=directory, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            save_strategy="no", disable_tqdm=True, logging_steps=1000, learning_rate=1e-5, max_grad_norm=1.0, beta=0.0,
            per_device_train_batch_size=len(lengths[0]), num_generations=options.samples_per_prompt,
            max_completion_length=max(map(max, lengths)), max_steps=len(lengths), temperature=1.0, top_k=0, top_p=1.0,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model, rewards, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
            callbacks=[Clock()],
        )  # fmt: skip
        _end_answers(trainer.model, iter(lengths), tokenizer.eos_token_id)
        trainer.train()
    return [after - before for before, after in zip(ends, ends[1:], strict=False)]


def _end_answers(model: Any, lengths: Any, end: int) -> None:
    """Make every call of `model.generate` end its answers at the next of `lengths`."""
    import torch
    from transformers import LogitsProcessor

    class Ends(LogitsProcessor):
        def __init__(self, prompt_tokens: int, tokens: list[int]) -> None:
            self._last = prompt_tokens + torch.tensor(tokens) - 1

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            ending = self._last <= input_ids.shape[1]
            scores[:, end] = -torch.inf
            scores[ending] = -torch.inf
            scores[ending, end] = 0.0
            return scores

    generate = model.generate

    def generate_as_drawn(input_ids: Any, **options: Any) -> Any:
        return generate(input_ids, logits_processor=[Ends(input_ids.shape[1], next(lengths))], **options)

    model.generate = generate_as_drawn


if __name__ == "__main__":
    main()
