"""The clipped value loss of PPO, per token (arXiv 2005.12729, section 3, "value function clipping").

Clipping can only make the loss larger: a value that moved more than the range away from the old one gets no gradient for moving
on, unless it is further from the return than the edge of the range is.
"""

import torch


def compute_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and clip indicator (0 or 1, without gradient) per token, both float32 in the shape of `values`.

    loss = max((clip(V, V_old − c, V_old + c) − G)², (V − G)²), without a factor ½; gradient through `values` only. The
    indicator tells where |V − V_old| > c.
    """
    values, old_values, returns = values.float(), old_values.detach().float(), returns.detach().float()
    change = values - old_values
    clipped = old_values + change.clamp(-value_clip, value_clip)
    loss = torch.maximum((clipped - returns).square(), (values - returns).square())
    return loss, (change.detach().abs() > value_clip).float()
