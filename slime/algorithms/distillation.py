"""On-policy distillation: the student is paid, token by token, for what the teacher finds likely in the student's own samples.

The log-ratio log π(token) − log π_teacher(token) of a token sampled from the student is the one-sample estimate of
the reverse KL (arXiv 2306.13649, arXiv 2306.08543). Taken off the advantages of any estimator, its expected gradient
is that of the reverse KL.
"""

from collections.abc import Sequence

import torch

from slime.algorithms.action_steps import require_equal_lengths, trained_tokens


@torch.no_grad()
def distilled_advantages(
    advantages: Sequence[torch.Tensor],
    log_probs: Sequence[torch.Tensor],
    teacher_log_probs: Sequence[torch.Tensor | None] | None,
    loss_masks: Sequence[torch.Tensor],
    coefficient: float,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(A − coefficient·(log_probs − teacher_log_probs), that difference), float32 [R_i] per sample; no argument is modified.

    All lists hold one tensor [R_i] per sample; whole responses, or equal parts of them. A masked token is no action of the
    student: its advantage stays as it was, and its difference is 0.

    Raises ValueError if the teacher's log-probs, or those of a sample, are missing or of another length.
    """
    if teacher_log_probs is None:
        raise ValueError(
            "distillation needs teacher_log_probs, and the batch has none: does the teacher answer at all?"
        )
    missing = [sample for sample, teacher in enumerate(teacher_log_probs) if teacher is None]
    if missing:
        raise ValueError(f"teacher_log_probs are missing for {len(missing)} samples, the first ones {missing[:8]}")
    require_equal_lengths(advantages=advantages, log_probs=log_probs, teacher_log_probs=teacher_log_probs)

    reverse_kl = [
        torch.where(trained, student.float() - teacher.to(student.device, torch.float32), 0.0)
        for student, teacher, trained in zip(
            log_probs, teacher_log_probs, trained_tokens(loss_masks, log_probs), strict=True
        )
    ]
    distilled = [tokens.float() - coefficient * kl for tokens, kl in zip(advantages, reverse_kl, strict=True)]
    return distilled, reverse_kl
