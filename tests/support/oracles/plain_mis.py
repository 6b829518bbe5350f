"""Masked importance sampling in its plainest form: one loop over sequences and tokens of a whole step, in Python floats."""

import math


def bounded_exp(exponent):
    return math.exp(min(max(exponent, -20.0), 20.0))


def level_weights(level, log_weights, mask):
    """The weight of every token of one sequence."""
    trained = [log_weight for log_weight, m in zip(log_weights, mask, strict=True) if m]
    total = sum(trained)
    if level == "sequence":
        return [bounded_exp(total)] * len(mask)
    if level == "geometric":
        return [bounded_exp(total / max(len(trained), 1))] * len(mask)
    return [bounded_exp(log_weight) for log_weight in log_weights]


def bound(mode, weight, lower, upper):
    if mode == "mask":
        return weight if lower <= weight <= upper else 0.0
    if mode == "clip":
        weight = max(weight, lower)
    return min(weight, upper)


def plain_step(settings, train, rollout, masks):
    """Returns, per sequence of a step, every token's final factor in the loss and new mask; and the mean that divides weights.

    train, rollout, masks: lists of lists. Masked tokens have factor 0.
    """
    tis_lower, tis_upper = settings.tis_bounds
    rs_lower, rs_upper = settings.rs_bounds
    weights, new_masks = [], []
    for train_row, rollout_row, mask in zip(train, rollout, masks, strict=True):
        log_weights = [t - r if m else 0.0 for t, r, m in zip(train_row, rollout_row, mask, strict=True)]
        row = [
            bound(settings.tis_mode, w, tis_lower, tis_upper)
            for w in level_weights(settings.tis_level, log_weights, mask)
        ]
        weights.append(row if settings.use_tis else [1.0] * len(row))
        new_mask = list(mask)
        if settings.use_rs:
            rejecting = level_weights(settings.rs_level, log_weights, mask)
            new_mask = [m if rs_lower <= w <= rs_upper else 0 for m, w in zip(mask, rejecting, strict=True)]
            threshold = settings.rs_veto_threshold
            if threshold is not None and any(
                m and math.exp(lw) < threshold for lw, m in zip(log_weights, mask, strict=True)
            ):
                new_mask = [0] * len(mask)
        new_masks.append(new_mask)
    kept = [w for row, mask in zip(weights, new_masks, strict=True) for w, m in zip(row, mask, strict=True) if m]
    mean = 1.0
    if settings.use_tis and settings.tis_batch_normalize and sum(kept) > 0:
        mean = sum(kept) / len(kept)
    factors = [
        [w / mean if m else 0.0 for w, m in zip(row, mask, strict=True)]
        for row, mask in zip(weights, new_masks, strict=True)
    ]
    return factors, new_masks, mean
