"""The reducer of Dr. GRPO (arXiv 2503.20783): tokens are summed and divided by a constant, not by their response's length.

--custom-pg-loss-reducer-function-path examples/dr_grpo/constant_length.py:constant_length_reducer
"""

from collections.abc import Callable, Sequence

import torch

from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean

# Any constant gives the same direction; the longest response that the run allows gives a loss of the usual size.
LENGTH = 32


def constant_length_reducer(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    calculate_per_token_loss: bool,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from losses per token, flat over this rank's response tokens, to their masked sum / `LENGTH`.

    Args:
        total_lengths, response_lengths: tokens of prompt and response, and of the response, per sample.
        loss_masks: whole responses, one tensor [response length] per sample.

    Raises:
        ValueError: with `--calculate-per-token-loss`, which is a reduction of its own.
    """
    if calculate_per_token_loss:
        raise ValueError("a constant length takes the place of --calculate-per-token-loss: leave one of the two out")
    return get_sum_of_sample_mean(total_lengths, response_lengths, loss_masks, [LENGTH] * len(loss_masks))
