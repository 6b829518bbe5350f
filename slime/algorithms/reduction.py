"""From values per token to one number, so that the result does not depend on how samples fell into micro-batches.

Per rollout: each sample contributes its masked sum over the trained tokens of its whole *execution*. Those denominators are
computed once, over the whole rollout (`rollout_mask_sums`), before samples are packed or split; so any cut of the samples into
micro-batches and ranks sums to the same number. Per token: plain masked sums, divided by the token count of the step later.
A masked token contributes nothing, whatever its value (also NaN). Its gradient is 0 here; that a NaN behind it leaves no NaN
in the gradient either is seen to where the loss begins (`slime.training.micro_batch`).

Which tokens of a response are time steps, and how recursions run over those alone.

A response may hold tokens that the policy did not choose: answers of tools, text of an environment (loss mask 0).
They are not actions. Were they time steps, a discount would make the reward of an action depend on how long a tool's
answer was, and the value of a position that the policy never acts from would enter its neighbours' advantages. So
recursions run over the trained tokens, in order, as if the others were not there: the trained tokens are pulled
together, scanned, and put back in their places.

A scan gets them padded behind the end, a few responses of similar length at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch


def rollout_mask_sums(loss_mask_sums: Sequence[float], rollout_ids: Sequence[int | None]) -> np.ndarray:
    """Trained tokens of the execution that each sample belongs to, float32 [number of samples].

    `loss_mask_sums[i]`: trained tokens of sample i. A sample whose rollout id is None is an execution of its own.
    """
    totals: dict[object, float] = {}
    keys = [
        ("alone", position) if rollout_id is None else rollout_id for position, rollout_id in enumerate(rollout_ids)
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
    flat_values = _flat(values)
    mask = _flat(loss_masks).to(flat_values.device, torch.float32)
    lengths = torch.tensor([len(sample_mask) for sample_mask in loss_masks], dtype=torch.int64, device=mask.device)
    denominators = torch.as_tensor(sample_denominators, dtype=torch.float32, device=mask.device).clamp(min=1.0)
    per_token_denominators = torch.repeat_interleave(denominators, lengths, output_size=len(mask))
    return _masked_sum(flat_values, mask / per_token_denominators)


def masked_sum(
    values: torch.Tensor | Sequence[torch.Tensor], loss_masks: torch.Tensor | Sequence[torch.Tensor]
) -> torch.Tensor:
    """Σ x·m over all tokens, a float32 scalar with gradient; each argument per sample or concatenated."""
    flat_values = _flat(values)
    return _masked_sum(flat_values, _flat(loss_masks).to(flat_values.device, torch.float32))


def _masked_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if values.shape != weights.shape:
        raise ValueError(f"{tuple(values.shape)} values for {tuple(weights.shape)} mask entries")
    return (values.float().masked_fill(weights == 0, 0.0) * weights).sum()


def _flat(tensors: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    return torch.cat(list(tensors)) if len(tensors) else torch.zeros(0)


# Cells [responses, steps] of one padded batch: 16 MiB per float32 column.
BATCH_CELLS = 2**22

Scan = Callable[..., tuple[torch.Tensor, ...]]


def trained_tokens(loss_masks: Sequence[torch.Tensor], responses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Boolean masks [R_i] on the device of the `responses`, one tensor [R_i] each.

    Raises ValueError if a mask is not as long as its response.
    """
    require_equal_lengths(loss_masks=loss_masks, responses=responses)
    return [(mask != 0).to(response.device) for mask, response in zip(loss_masks, responses, strict=True)]


def zero_masked_tokens(
    columns: Mapping[str, Sequence[torch.Tensor]], loss_masks: Sequence[torch.Tensor]
) -> dict[str, list[torch.Tensor]]:
    """The columns, each one tensor [R_i] per response, with 0 in place of whatever stands at masked tokens.

    To be called before ratios and weights are formed: a product with a mask of 0 leaves NaN what was NaN, in the value or in
    the gradient. Raises ValueError if a mask is not as long as its response.
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

    With `count_masked_tokens` all tokens of a response that has trained ones: the older convention, in which the answer of a
    tool passes time. A response without trained tokens has no steps either way.
    """
    return [mask | mask.any() if count_masked_tokens else mask for mask in trained]


def scan_steps(scan: Scan, columns: Sequence[Sequence[torch.Tensor]], steps: Sequence[torch.Tensor]) -> list[list]:
    """Run `scan` over the steps of each response; per result of the scan a list with one float32 tensor [R_i] per response.

    `columns`: what the scan takes, in order, each a list with one tensor [R_i] per response. `scan`: a function of that many
    tensors [B, T], zero behind the end of a row, to a tuple of tensors [B, T]. Tokens that are no steps come back as 0.
    """
    counts = torch.stack([mask.sum() for mask in steps]).tolist() if len(steps) else []
    results: list[list] = []
    for members in _batches_of_similar_length(counts):
        tokens = [steps[member] for member in members]
        taken = torch.cat(tokens).nonzero().squeeze(1)
        rows, places = _coordinates([counts[member] for member in members], taken.device)
        padded = []
        for column in columns:
            cells = torch.zeros(len(members), counts[members[-1]], device=taken.device)
            cells[rows, places] = torch.cat([column[member] for member in members]).float()[taken]
            padded.append(cells)
        outputs = scan(*padded)
        if not results:
            results = [[None] * len(steps) for _ in outputs]
        for result, output in zip(results, outputs, strict=True):
            flat = torch.zeros(sum(map(len, tokens)), device=taken.device)
            flat[taken] = output[rows, places]
            for member, part in zip(members, flat.split([len(mask) for mask in tokens]), strict=True):
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


def _coordinates(counts: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and place in the row of every step, rows in order."""
    per_row = torch.tensor(counts, device=device)
    rows = torch.repeat_interleave(torch.arange(len(counts), device=device), per_row)
    starts = per_row.cumsum(0) - per_row
    return rows, torch.arange(len(rows), device=device) - starts[rows]
