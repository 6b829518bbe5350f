"""Adam without memory: every step is the first one.

With zero moments the bias-corrected averages of the first step are the gradient and its square, so Adam's update is
−lr·g / (|g| + ε): the sign of the gradient, softened where it is as small as ε. Nothing is kept between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class StatelessAdam(torch.optim.Optimizer):
    """The first step of Adam (Kingma & Ba 2015, arXiv 1412.6980), taken again and again.

    Per step: p ← (1 − lr·weight_decay)·p, then p ← p − lr·g / (|g| + eps). `betas` are accepted and change nothing, since
    bias correction takes them out of a first step.

    Raises:
        ValueError: `adam_w_mode` is False, which would put the weight decay into the gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("StatelessAdam decouples the weight decay from the gradient; adam_w_mode must be True")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One update of all parameters that have a gradient."""
        if closure is not None:
            raise TypeError("StatelessAdam.step takes no closure")
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                param.mul_(1 - group["lr"] * group["weight_decay"])
                # One parameter at a time: the denominator is all the memory that a step takes.
                param.addcdiv_(param.grad, param.grad.abs().add_(group["eps"]), value=-group["lr"])
