"""Sums and recursions over the trained tokens of responses.

The first half reduces values per token to one number that does not depend on how samples fell into micro-batches and ranks.
- Per rollout, a sample contributes its masked sum, divided by the number of trained tokens of its whole *execution*. These
  denominators are computed once, over the whole rollout (`rollout_mask_sums`), before samples are packed or split.
- Per token, a sample contributes its plain masked sum; the total is divided by the token count of the step later.
- A masked token contributes nothing, whatever its value is, even NaN. Its gradient is 0 here. `slime.training.loss` takes care
  that a NaN from which its value was computed does not reach the gradient either.

The second half says which tokens of a response are time steps, and runs recursions over those alone. A response may hold
tokens that the policy did not choose: answers of tools, text of an environment (loss mask 0). They are not actions. If they
were time steps, a discount would make the reward of an action depend on how long a tool's answer was, and the value of a
position that the policy never acts from would enter its neighbours' advantages. So recursions run over the trained tokens, in
order, as if the others were not there: `scan_steps` pulls these together, pads them behind the end, scans a few responses of
similar length at a time, and puts the results back in their places.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch.autograd.function import once_differentiable


def rollout_mask_sums(loss_mask_sums: Sequence[float], execution_ids: Sequence[int | None]) -> np.ndarray:
    """Trained tokens of the execution that each sample belongs to, float32 [number of samples].

    `loss_mask_sums[i]`: trained tokens of sample i. A sample whose execution id is None is an execution of its own.
    """
    totals: dict[object, float] = {}
    keys = [
        ("alone", position) if execution_id is None else execution_id
        for position, execution_id in enumerate(execution_ids)
    ]
    for key, mask_sum in zip(keys, loss_mask_sums, strict=True):
        totals[key] = totals.get(key, 0) + mask_sum
    return np.array([totals[key] for key in keys], dtype=np.float32)


def sum_of_sample_mean(
    values: torch.Tensor | Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    sample_denominators: Sequence[float] | torch.Tensor,
) -> torch.Tensor:
    """Σ_i (Σ_t x_t·m_t)_i / max(D_i, 1), a float32 scalar with gradient.

    `values`: one tensor [R_i] per sample, or all of them concatenated in the order of `loss_masks`, which are always per
    sample. `sample_denominators` D: one per sample, from `rollout_mask_sums`.
    """
    return masked_sum(values, token_weights(loss_masks, sample_denominators))


def token_weights(
    loss_masks: Sequence[torch.Tensor], sample_denominators: Sequence[float] | torch.Tensor | None = None
) -> torch.Tensor:
    """m_t / max(D_i, 1) of every token, float32, flat, on the device of the masks; m_t without denominators.

    `masked_sum` with these weights is `sum_of_sample_mean`; a caller that reduces many values makes the weights once. There is
    no wait for the device.
    """
    mask = flat(loss_masks).float()
    if sample_denominators is None:
        return mask
    denominators = torch.as_tensor(sample_denominators, dtype=torch.float32).to(mask.device, non_blocking=True)
    return mask / per_token(denominators.clamp(min=1.0), [len(sample_mask) for sample_mask in loss_masks])


def masked_sum(
    values: torch.Tensor | Sequence[torch.Tensor], loss_masks: torch.Tensor | Sequence[torch.Tensor]
) -> torch.Tensor:
    """Σ x·m over all tokens, a float32 scalar with gradient. Each argument is one tensor per sample, or all concatenated. The
    masks may be weights, for example those of `token_weights`."""
    flat_values = flat(values)
    weights = flat(loss_masks).to(flat_values.device, torch.float32)
    if flat_values.shape != weights.shape:
        raise ValueError(f"{tuple(flat_values.shape)} values for {tuple(weights.shape)} mask entries")
    return (flat_values.float().masked_fill(weights == 0, 0.0) * weights).sum()


def flat(tensors: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor [N] with the tokens of all responses, one after the other, from one tensor [R_i] per response. A tensor is
    returned as it is."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    return torch.cat(list(tensors)) if len(tensors) else torch.zeros(0)


def per_token(per_response: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The value [S] of each response at each of its tokens, [sum of the lengths]. There is no wait for the device."""
    on_device = torch.as_tensor(lengths, dtype=torch.int64).to(per_response.device, non_blocking=True)
    return per_response.repeat_interleave(on_device, output_size=sum(lengths))


def true_until(flags: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the boolean `flags` [N], over the tokens of all responses, are true: in each response, int64 [S], and from
    the start of the response up to and including each token, int64 [N]."""
    ends = torch.as_tensor([0, *itertools.accumulate(lengths)], dtype=torch.int64).to(flags.device, non_blocking=True)
    # Running sums of whole numbers are exact, and so are their differences.
    until = torch.nn.functional.pad(flags.cumsum(0), (1, 0))
    at_ends = until.index_select(0, ends)
    return at_ends.diff(), until[1:] - per_token(at_ends[:-1], lengths)


def sums_of_responses(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The sum of each response, float64 [S] with gradient, of `values` [N] over the tokens of all responses. The result has the
    same bits every time."""
    on_device = torch.as_tensor(lengths, dtype=torch.int64).to(values.device, non_blocking=True)
    return _SumsOfSegments.apply(values.double(), on_device)


class _SumsOfSegments(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, lengths):
        ctx.save_for_backward(lengths)
        ctx.count = len(values)
        return torch.segment_reduce(values, "sum", lengths=lengths, initial=0.0, unsafe=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (lengths,) = ctx.saved_tensors
        return gradient.repeat_interleave(lengths, output_size=ctx.count), None


# Cells [responses, steps] of one padded batch: 16 MiB per float32 column.
BATCH_CELLS = 2**22

Scan = Callable[..., tuple[torch.Tensor, ...]]


def trained_tokens(loss_masks: Sequence[torch.Tensor], responses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Boolean masks [R_i] on the device of the `responses`, one tensor [R_i] each.

    Raises ValueError if a mask is not as long as its response.
    """
    require_equal_lengths(loss_masks=loss_masks, responses=responses)
    if not len(loss_masks):
        return []
    trained = (torch.cat(list(loss_masks)) != 0).to(responses[0].device)
    return list(trained.split([len(response) for response in responses]))


def zero_masked_tokens(
    columns: Mapping[str, Sequence[torch.Tensor]], loss_masks: Sequence[torch.Tensor]
) -> dict[str, list[torch.Tensor]]:
    """The columns, each one tensor [R_i] per response, with 0 at masked tokens.

    Call this before ratios and weights are formed: multiplication with a mask of 0 does not remove NaN, neither from the value
    nor from the gradient. Raises ValueError if a mask is not as long as its response.
    """
    require_equal_lengths(loss_masks=loss_masks, **columns)
    if not len(loss_masks):
        return {name: [] for name in columns}
    trained = torch.cat(list(loss_masks)) != 0
    zeroed = {}
    for name, responses in columns.items():
        flat = torch.cat(list(responses))
        trained = trained.to(flat.device)
        zeroed[name] = list(torch.where(trained, flat, 0.0).split([len(response) for response in responses]))
    return zeroed


def step_masks(trained: Sequence[torch.Tensor], count_masked_tokens: bool) -> list[torch.Tensor]:
    """Which tokens take a time step, boolean [R_i] per response: the trained ones.

    With `count_masked_tokens`, all tokens of a response that has trained ones take a step. That is the older convention, in
    which time passes during the answer of a tool. A response without trained tokens has no steps either way.
    """
    if not count_masked_tokens or not len(trained):
        return list(trained)
    lengths = [len(mask) for mask in trained]
    counts, _ = true_until(torch.cat(list(trained)), lengths)
    return list(per_token(counts > 0, lengths).split(lengths))


def scan_steps(scan: Scan, columns: Sequence[Sequence[torch.Tensor]], steps: Sequence[torch.Tensor]) -> list[list]:
    """Run `scan` over the steps of each response; per result of the scan a list with one float32 tensor [R_i] per response.

    `columns`: what the scan takes, in order, each a list with one tensor [R_i] per response. `scan`: a function of that many
    tensors [B, T], zero behind the end of a row, to a tuple of tensors [B, T]. Tokens that are no steps come back as 0.
    """
    # This is the one wait for the device: the lengths of batches depend on these numbers.
    counts = true_until(torch.cat(list(steps)), [len(mask) for mask in steps])[0].tolist() if len(steps) else []
    results: list[list] = []
    for members in _batches_of_similar_length(counts):
        lengths = [len(steps[member]) for member in members]
        shape = len(members), counts[members[-1]]
        cells = _cells(
            torch.cat([steps[member] for member in members]), lengths, [counts[m] for m in members], shape[1]
        )
        padded = []
        for column in columns:
            # The tokens that take no step all go to one more cell, behind the batch.
            batch = torch.zeros(shape[0] * shape[1] + 1, device=cells.device)
            batch[cells] = torch.cat([column[member] for member in members]).float()
            padded.append(batch[:-1].view(shape))
        outputs = scan(*padded)
        if not results:
            results = [[None] * len(steps) for _ in outputs]
        for result, output in zip(results, outputs, strict=True):
            flat = torch.nn.functional.pad(output.flatten().float(), (0, 1))[cells]
            for member, part in zip(members, flat.split(lengths), strict=True):
                result[member] = part
    return results


def require_equal_lengths(**columns: Sequence) -> None:
    """Raises ValueError unless all columns have as many entries, and their tensors one length per sample."""
    (first_name, first), *others = columns.items()
    for name, column in others:
        if len(column) != len(first):
            raise ValueError(f"one entry per sample: {len(first)} {first_name} and {len(column)} {name}")
        for sample, (one, other) in enumerate(zip(first, column, strict=True)):
            if len(one) != len(other):
                raise ValueError(
                    f"sample {sample}: {first_name} has {len(one)} tokens and {name} {len(other)}; "
                    "is one of them only a context-parallel rank's part of the response?"
                )


def _batches_of_similar_length(counts: Sequence[int]) -> Iterator[list[int]]:
    """Positions in ascending order of their counts, cut so that (members × largest count) stays within BATCH_CELLS."""
    batch: list[int] = []
    for position in sorted(range(len(counts)), key=counts.__getitem__):
        if batch and (len(batch) + 1) * counts[position] > BATCH_CELLS:
            yield batch
            batch = []
        batch.append(position)
    if batch:
        yield batch


def _cells(taken: torch.Tensor, lengths: Sequence[int], counts: Sequence[int], width: int) -> torch.Tensor:
    """Where each token stands in a batch of rows of `width` steps, laid end to end; behind the last row if it takes no step.

    Args:
        taken: boolean, the tokens of all rows one after the other.
        lengths, counts: tokens and steps of each row.
    """
    starts = [row * width - before for row, before in enumerate([0, *itertools.accumulate(counts)][:-1])]
    on_device = [torch.as_tensor(numbers).to(taken.device, non_blocking=True) for numbers in (starts, lengths)]
    first_cells = torch.repeat_interleave(*on_device, output_size=len(taken))
    return torch.where(taken, first_cells + taken.cumsum(0) - 1, len(lengths) * width)
