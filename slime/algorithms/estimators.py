"""The advantage estimators, one row each: adding one is a row here and a function in `slime.algorithms.advantages`.

All other code asks a row what the estimator does, and never compares names. This file does not import torch, since the
rules of the flags read it too.
"""

from dataclasses import dataclass

from slime.utils.errors import UserError


@dataclass(frozen=True)
class Estimator:
    """What an estimator does with rewards, and what it needs.

    Attributes:
        advantages: the function of `slime.algorithms.advantages` that takes its `AdvantageInputs` to (advantages, returns).
        centers: rewards are centred within their prompt group; the others get their baseline from values or whitening.
        scales: centred rewards are divided by the group's standard deviation, unless `--disable-grpo-std-normalization`.
        discounts: later rewards of a response reach earlier tokens, so it needs whole responses; the others have no time steps.
        counts_kl: `--kl-coef` reaches the advantages; otherwise the KL is only logged.
        needs_critic: it is computed from a critic's values.
        needs_whitening: it needs `--normalize-advantages`.
        objective: the function of `slime.algorithms.policy_loss` that makes a loss of ratios and advantages.
        ratio_of_sequence: the probability ratio is that of the whole sequence, not of a token.
        clips_one_side: only the upper side is clipped, by design: nothing bounds how far the ratio may fall.
    """

    name: str
    advantages: str
    centers: bool = False
    scales: bool = False
    discounts: bool = False
    counts_kl: bool = True
    needs_critic: bool = False
    needs_whitening: bool = False
    objective: str = "clipped_objective"
    ratio_of_sequence: bool = False
    clips_one_side: bool = False


_OF_A_GROUP = {"advantages": "grpo", "centers": True, "scales": True, "counts_kl": False}
_ROWS = (
    # arXiv 2402.03300
    Estimator("grpo", **_OF_A_GROUP),
    # arXiv 2507.18071
    Estimator("gspo", **_OF_A_GROUP, ratio_of_sequence=True),
    # arXiv 2506.13585
    Estimator("cispo", **_OF_A_GROUP, objective="cispo_objective", clips_one_side=True),
    # arXiv 2501.03262
    Estimator("reinforce_plus_plus", "reinforce_plus_plus", discounts=True, needs_whitening=True),
    Estimator("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline", centers=True, needs_whitening=True),
    # arXiv 1707.06347
    Estimator("ppo", "ppo", discounts=True, needs_critic=True),
)
ESTIMATORS: dict[str, Estimator] = {row.name: row for row in _ROWS}


def estimator(name: str) -> Estimator:
    """The estimator of `--advantage-estimator`.

    Raises:
        UserError: there is none of this name.
    """
    if name not in ESTIMATORS:
        raise UserError(f"--advantage-estimator {name}: unknown; there are {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]


def names_of_estimators(fact: str, *, without: bool = False, joined_by: str = "or") -> str:
    """The names of the estimators that have `fact` (an attribute), or are `without` it, as words of a sentence: `a, b or c`."""
    *names, last = [row.name for row in _ROWS if bool(getattr(row, fact)) is not without]
    return f"{', '.join(names)} {joined_by} {last}" if names else last
