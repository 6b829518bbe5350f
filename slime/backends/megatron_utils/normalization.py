"""The layer norm of the local layer spec.

Megatron-Core's own fallback (`WrappedTorchNorm`) refuses sequence parallelism: there each rank normalises only its part
of the sequence, so the gradient of the weight has to be summed over the tensor-parallel ranks. Marking the weight is
all that takes; Megatron's `finalize_model_grads` does the rest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slime.utils.errors import UserError


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019, arXiv 1910.07467).

    The constructor takes what Megatron's layer specs pass to a norm: `config`, `hidden_size`, `eps`.

    Raises:
        UserError: `--normalization` is not RMSNorm, or the weights are stored around zero.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise UserError(
                f"--normalization {config.normalization}"
                f"{' --apply-layernorm-1p' if config.layernorm_zero_centered_gamma else ''} needs Transformer Engine; "
                "the local layer spec has plain RMSNorm only"
            )
        self.normalized_shape = (hidden_size,)
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [..., hidden_size], any float dtype; same shape and dtype out."""
        return F.rms_norm(hidden, self.normalized_shape, self.weight, self.eps)
