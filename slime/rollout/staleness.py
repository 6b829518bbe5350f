"""How old a sample is when it is trained: the number of pushes between the weights that made it and those that it trains.

Engines stamp the version of their weights on every token. The age of a sample is that of its oldest token, whether that is
trained or not. Which version a rollout will train is known when it begins, since the loop pushes after fixed rollouts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from slime.rollout.base_types import leaves
from slime.utils.errors import UserError
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_FLAG = "--max-weight-staleness"


def oldest_version(entry: Any) -> int | None:
    """The oldest weight version of a sample, an execution or a group; None where no token bears one.

    Engines that keep the weights that they started with have versions that no push gave; these do not count.
    """
    return min((int(version) for version in _versions(entry) if version.isdecimal()), default=None)


def _versions(entry: Any) -> list[str]:
    return [
        str(version)
        for sample in leaves(entry)
        for version in (*sample.weight_versions, *(span[0] for span in sample.weight_version_spans))
    ]


def is_too_old(args: Any, entry: Any, trained_as: int | None) -> bool:
    """Whether `entry` may not train weights that were pushed as `trained_as` (None: unknown, nothing is too old).

    A version that this run has not pushed yet belongs to another run. It says nothing about age here, and counts as too old.
    """
    if args.max_weight_staleness is None or trained_as is None:
        return False
    oldest = oldest_version(entry)
    return oldest is not None and not trained_as - args.max_weight_staleness <= oldest <= trained_as


def hold_to_bound(args: Any, samples: Sequence[Sample], trained_as: int | None) -> dict[str, float]:
    """Take samples that are older than `--max-weight-staleness` out of training: they keep their places, with a mask of zeros.

    Our rollout functions hand out none; a user's may. Samples that train nothing anyway, since they failed or were filtered,
    have no age that matters: they need no version and are not counted. Of those that weights made which no push gave, a warning
    tells.

    Returns:
        Metrics `staleness/{mean,max}`, in pushes, and `stale_samples`, the number of those taken out; empty where
        `trained_as`, the version of the weights that the samples train, is unknown.

    Raises:
        UserError: with the flag, a sample that trains bears no version for its response.
    """
    if trained_as is None:
        return {}
    trained = [sample for sample in samples if not sample.remove_sample]
    foreign = [(s.index, version) for s in trained for version in _versions(s) if not version.isdecimal()]
    if foreign:
        logger.warning(
            "%d of %d samples (the first: %s) train tokens of weights of version %s, which no push of this run gave: those of "
            "a frozen model, or of an engine that was started again outside of this run and waits for the next push",
            len({index for index, _ in foreign}), len(trained), *foreign[0],
        )  # fmt: skip
    taken_out = 0
    for sample in trained:
        if args.max_weight_staleness is not None and sample.response_length and oldest_version(sample) is None:
            raise UserError(
                f"{_FLAG} {args.max_weight_staleness}: sample {sample.index} does not say which weights made it; a function of "
                "yours that generates hands the engine's meta_info to sample.append_response_tokens, or drop the flag"
            )
        if is_too_old(args, sample, trained_as):
            sample.remove_sample = True
            taken_out += 1
    oldest = [oldest_version(sample) for sample in samples if not sample.remove_sample]
    ages = [trained_as - version for version in oldest if version is not None]
    metrics = (
        {"rollout/staleness/mean": sum(ages) / len(ages), "rollout/staleness/max": float(max(ages))} if ages else {}
    )
    return metrics if args.max_weight_staleness is None else {**metrics, "rollout/stale_samples": taken_out}
