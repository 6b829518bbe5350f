"""A step with a loss or gradient that is not finite ends the same way on every rank, and says whose it was."""

import math

import pytest
import torch

from slime.training.loss_guard import BadMicroBatch, Report, describe
from tests.support.processes.distributed import run_distributed

NAN = math.nan


def report(rank, *micro_batches, parameters=()):
    return Report(rank, tuple(BadMicroBatch(samples, loss) for samples, loss in micro_batches), tuple(parameters))


@pytest.mark.parametrize(
    "reports, message",
    [
        (
            [report(0), report(1, ((3, 7), NAN))],
            "the loss is nan on rank 1 in the micro-batch with samples [3, 7]",
        ),
        (
            [report(0, ((9, 3, 4, 8, 12, 7, 10), NAN))],
            "the loss is nan on rank 0 in the micro-batch with samples [3, 4, 7–10, 12]",
        ),
        (  # a tensor-parallel group shares the micro-batch; a gradient that follows from a bad loss is no news
            [report(0, ((3, 7), math.inf), ((4,), 1.0)), report(1, ((3, 7), math.inf)), report(2, ((9,), NAN))],
            "the loss is inf on ranks 0, 1 in the micro-batch with samples [3, 7]; the loss is nan on rank 2 in the "
            "micro-batch with samples [9]",
        ),
        (
            [report(0), report(1, ((3, 7), 0.5), parameters=["b", "a"])],
            "the gradient norm is nan; losses are finite, but the gradient at the logits is not on rank 1 in the micro-batch "
            "with samples [3, 7]",
        ),
        (
            [report(0, parameters=["b", "a"]), report(1, parameters=["b", "c", "d", "e", "f"])],
            "the gradient norm is nan; losses and their gradients at the logits are finite, so it arose inside the model; "
            "gradients that are not finite: a, b, c, d, e and 1 more",
        ),
    ],
)  # fmt: skip
def test_message(reports, message):
    assert describe(reports, NAN) == message


def guard_worker(cases) -> dict:
    """Per case (loss per rank, slope per rank, gradient norm, overflowed, stops) what came of a step of two micro-batches."""
    import logging
    import os

    import torch.distributed as dist

    from slime.training.loss_guard import LossGuard
    from slime.utils.errors import RunError

    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("slime.training.loss_guard").addHandler(handler)
    results = {}
    for name, (losses, slopes, grad_norm, overflowed, stops) in cases.items():
        guard = LossGuard("rollout 5, step 0", stops, lambda: ["decoder.final_layernorm.weight"])
        for index, (value, slope) in enumerate(((1.0, 1.0), (losses[rank], slopes[rank]))):
            logits = torch.zeros(1, 3, 4, dtype=torch.bfloat16, requires_grad=True) * 1
            guard.watch(torch.tensor(value), logits, [10 * rank + index])
            logits.backward(torch.full_like(logits, slope))
        try:
            results[name] = guard.accepts(grad_norm, overflowed)
        except RunError as error:
            results[name] = str(error)
    empty = LossGuard("a rank without the last stage", True)
    results["no losses here"] = empty.accepts(1.0)
    dist.destroy_process_group()
    return results, warnings


FINE, ONE, BAD = (1.0, 1.0), (1.0, 1.0), (1.0, NAN)
CASES = {
    # losses by rank, slopes by rank, gradient norm, overflowed, stops
    "good": (FINE, ONE, 2.0, False, True),
    "stop": (BAD, ONE, NAN, False, True),
    "skip": (BAD, ONE, NAN, False, False),
    "bad loss, finite gradient": (BAD, ONE, 2.0, False, False),
    "gradient at the logits": (FINE, (1.0, math.inf), NAN, False, True),
    "gradient in the model": (FINE, ONE, math.inf, False, True),
    "overflow of the loss scale": (FINE, (math.inf, 1.0), math.inf, True, True),
    "overflow and a bad loss": (BAD, ONE, math.inf, True, True),
}


def test_only_rank_1_has_the_nan_and_both_answer_alike():
    (zero, warnings), (one, others) = run_distributed(guard_worker, 2, (CASES,))
    assert zero == one
    advice = ". The weights are not saved; --save-debug-train-data shows the samples"
    nan_loss = "rollout 5, step 0: the loss is nan on rank 1 in the micro-batch with samples [11]"
    assert zero == {
        "good": True,
        "stop": nan_loss + advice,
        "skip": False,
        "bad loss, finite gradient": False,
        "gradient at the logits": "rollout 5, step 0: the gradient norm is nan; losses are finite, but the gradient at the "
        "logits is not on rank 1 in the micro-batch with samples [11]" + advice,
        "gradient in the model": "rollout 5, step 0: the gradient norm is inf; losses and their gradients at the logits are "
        "finite, so it arose inside the model; gradients that are not finite: decoder.final_layernorm.weight" + advice,
        "overflow of the loss scale": True,
        "overflow and a bad loss": nan_loss + advice,
        "no losses here": True,
    }  # fmt: skip
    assert warnings == [nan_loss + ". No weights are updated in this step"] * 2 and others == []


def test_looking_at_gradients_keeps_no_copy_of_them():
    from slime.training.loss_guard import LossGuard
    from tools.bench.live_tensors import LiveTensors

    guard = LossGuard("here", True, group=object())
    base = torch.zeros(64, 1000, requires_grad=True)
    logits = base * 1.0
    guard.watch(logits.sum(), logits, [0])
    gradient = torch.ones_like(logits)
    with LiveTensors([base, logits, gradient]) as watched:
        before = watched.current
        for hook in logits._backward_hooks.values():
            hook(gradient)
    assert watched.peak - before < 1000


def test_logits_without_a_gradient_and_a_rank_without_rows_are_not_looked_at():
    from slime.training.loss_guard import LossGuard

    guard = LossGuard("here", True, group=object())
    guard.watch(torch.tensor(1.0), torch.zeros(2, 4), [0])
    nothing = torch.zeros(0, 4, requires_grad=True) * 1
    guard.watch(nothing.sum(), nothing, [1])
    nothing.sum().backward()
