"""Objectives of the grid on one rehearsed rank, one after the other: a module that `rehearse_rank` can start.

`args.rehearsed_objectives` names them. Each has its own data, pass and step, in phases that carry its name; they share model
and optimizer. Nothing in this module may import torch before the process has prepared itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slime.algorithms.estimators import estimator
from slime.rehearsal.rank import main

if TYPE_CHECKING:
    from slime.rehearsal.actor import RehearsedRank
    from slime.rehearsal.recorder import Recorder
    from slime.rehearsal.report import Task

KEPT = 3


def rank_of_grid(task: Task, recorder: Recorder) -> RehearsedRank:
    from slime.rehearsal.actor import RANKS
    from slime.training import loss
    from tests.support.processes.objective_grid import ROLES

    of_role, _ = ROLES[task.args.role]
    objectives = {name: of_role[name] for name in task.args.rehearsed_objectives}

    class RankOfGrid(RANKS[task.args.role]):
        def phases(self) -> dict[str, Callable[[], None]]:
            usual, run = super().phases(), self.args
            name_of_pass = "log-probs" if task.args.role == "actor" else "values"
            of_each = [name for name in (name_of_pass, "step", "metrics") if name in usual]
            phases = {name: usual[name] for name in ("model", "load", "data", name_of_pass, "first step")}

            def begin(objective: str, changes: dict[str, Any]) -> Callable[[], None]:
                def make() -> None:
                    self.args = argparse.Namespace(**{**vars(run), **changes})
                    row = estimator(self.args.advantage_estimator)
                    self.args.use_critic = row.needs_critic
                    self.args.compute_advantages_and_returns = self.args.loss_type != "sft_loss"
                    loss.kept_tokens = _kept_tokens if objective == "top-p" else lambda batch: None
                    usual["data"]()

                return make

            for objective, changes in objectives.items():
                phases[f"data: {objective}"] = begin(objective, changes)
                phases |= {f"{name}: {objective}": usual[name] for name in of_each}
            return phases

    return RankOfGrid(task, recorder)


def _kept_tokens(batch: Any) -> Any:
    """Sets of `KEPT` tokens. The host knows the sizes of such sets, so these are real numbers."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    from slime.training.keep_set import KeptTokens

    rows = len(batch.stream.predicting_rows.index)
    with _disable_current_modes():
        return KeptTokens(torch.zeros(KEPT * rows, dtype=torch.int32), KEPT * torch.arange(rows + 1))


if __name__ == "__main__":
    sys.exit(main(rank_of_grid))
