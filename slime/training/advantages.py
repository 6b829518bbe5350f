"""Advantages and returns of a rank's samples, set on the rollout data before training."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from slime.algorithms.advantages import grpo_advantages
from slime.utils.errors import UserError
from slime.utils.misc import load_function
from slime.utils.user_code import calling_user_code


def compute_advantages_and_returns(args: argparse.Namespace, rollout_data: dict[str, Any]) -> None:
    """Set `kl`, `advantages` and `returns`: lists with one float32 tensor [response length] per sample.

    Raises:
        UserError: a custom advantage function sets tensors of another number or length.
    """
    lengths = rollout_data["response_lengths"]
    device = rollout_data["tokens"][0].device if rollout_data["tokens"] else None
    # The KL penalty inside the reward is an option of estimators with returns; GRPO has none.
    rollout_data["kl"] = [torch.zeros(length, device=device) for length in lengths]
    if args.custom_advantage_function_path is not None:
        path, flag = args.custom_advantage_function_path, "--custom-advantage-function-path"
        with calling_user_code(flag, path, f"{len(lengths)} samples"):
            load_function(path, flag=flag)(args, rollout_data)
        _check_lengths(rollout_data, lengths, path)
        return
    advantages = grpo_advantages(rollout_data["rewards"], lengths, device=device)
    rollout_data["advantages"] = advantages
    rollout_data["returns"] = advantages


def _check_lengths(rollout_data: dict[str, Any], lengths: list[int], path: str) -> None:
    for name in ("advantages", "returns"):
        tensors = rollout_data.get(name)
        found = None if tensors is None else [len(tensor) for tensor in tensors]
        if found != list(lengths):
            raise UserError(
                f"--custom-advantage-function-path {path}: rollout_data[{name!r}] must be a list with one tensor of the "
                f"response's length per sample; expected lengths {list(lengths)[:5]}…, got {found and found[:5]}"
            )
