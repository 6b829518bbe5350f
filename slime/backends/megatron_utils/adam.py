"""Adam with the state layout that Megatron's optimizers save and reload.

Megatron-Core expects the fused Adam of Transformer Engine or Apex: first and second moment per parameter, the step
count in the parameter group. Without either it falls back to torch's AdamW, which trains but whose state its
distributed optimizer cannot load again (0.16.1: KeyError 'step'). `install()` puts this one in place of the fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Adam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015, arXiv 1412.6980), with decoupled weight decay (Loshchilov & Hutter 2019, arXiv
    1711.05101) when `adam_w_mode`, else with L2 regularisation.

    State per parameter: `exp_avg`, `exp_avg_sq`, of the parameter's shape and dtype. Group entry `step`: int, absent
    before the first step.
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
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One update of all parameters that have a gradient."""
        if closure is not None:
            raise TypeError("Adam.step takes no closure")
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None and param.numel()]
            if params:
                group["step"] = int(group.get("step", 0)) + 1
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        lr, decay, step, (beta1, beta2) = group["lr"], group["weight_decay"], group["step"], group["betas"]
        gradients = [param.grad for param in params]
        moments = [self._moments(param) for param in params]
        exp_avg = [state["exp_avg"] for state in moments]
        exp_avg_sq = [state["exp_avg_sq"] for state in moments]

        if self.adam_w_mode:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            gradients = torch._foreach_add(gradients, params, alpha=decay)
        torch._foreach_lerp_(exp_avg, gradients, 1 - beta1)
        torch._foreach_mul_(exp_avg_sq, beta2)
        torch._foreach_addcmul_(exp_avg_sq, gradients, gradients, 1 - beta2)

        denominator = torch._foreach_sqrt(exp_avg_sq)
        torch._foreach_div_(denominator, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(denominator, group["eps"])
        torch._foreach_addcdiv_(params, exp_avg, denominator, -lr / (1 - beta1**step))

    def _moments(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[param]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state


def install() -> None:
    """Make Megatron's optimizers build this Adam where they would fall back to torch's. Idempotent."""
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    # These names say "the Adam at hand has the fused layout", which is what decides how state is saved and loaded.
    optimizer.Adam = distrib_optimizer.Adam = Adam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
