"""Log-probabilities as transformers computes them: the independent reference for engines and trainers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ReferenceModel:
    """The checkpoint `path` in float32, on the CPU."""

    def __init__(self, path: str | Path):
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()

    def named_tensors(self) -> dict[str, Any]:
        """The tensors of the checkpoint by name; tied tensors occur once."""
        return dict(self._model.named_parameters())

    def log_probs(self, prompt: list[int], response: list[int]) -> list[float]:
        """The log-probability of each response token given all tokens before it, at temperature 1."""
        import torch

        with torch.no_grad():
            logits = self._model(torch.tensor([prompt + response])).logits[0]
        rows = torch.log_softmax(logits.double(), dim=-1)[len(prompt) - 1 : -1]
        return rows[torch.arange(len(response)), torch.tensor(response)].tolist()


def generation_request(prompt: list[int], max_new_tokens: int = 24) -> dict[str, Any]:
    """A `/generate` payload at temperature 1 that never stops early and returns log-probs."""
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
        "return_logprob": True,
    }


def response_of(answer: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """Token ids and log-probs of a `/generate` answer."""
    entries = answer["meta_info"]["output_token_logprobs"]
    return [entry[1] for entry in entries], [entry[0] for entry in entries]
