"""Some optimizer steps of GRPO in any parallel layout, with all results that must not depend on the layout.

`train_steps` is a worker for `run_distributed`. Every case starts from the weights of its `args.hf_checkpoint`, and
`assert_equal_runs` compares the results of all ranks with those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.models.grpo_batch import ADVANTAGES, OBJECTIVE, TRAINED_TOKENS, make_samples, old_and_reference
from tests.support.models.tiny_model import tiny_args
from tests.support.oracles.rounding import (
    assert_equal_metrics,
    assert_equal_rows,
    assert_equal_weights,
    bound_of_weights,
    bounds_of_rollout,
    bounds_of_step,
)

if TYPE_CHECKING:
    from slime.training.rollout_data import RolloutData
    from slime.utils.types import Sample

# Takes the size of the vocabulary and returns a sample for each of `ADVANTAGES`.
MakeSamples = Callable[[int], "list[Sample]"]
STEPS = 3


def layout_args(hf_dir: Any, **overrides: Any) -> SimpleNamespace:
    """Arguments of a run on the batch of `grpo_batch`; `overrides` are parallel sizes, objective or model flags.

    The vocabulary has the same padding in all layouts. Adam's epsilon is large: with a small one, the update of a tiny gradient
    would be its sign, and rounding errors would become as large as the learning rate.
    """
    values = {**OBJECTIVE, "data_parallel_size": 1, "lr": 1e-3, "adam_eps": 1e-4, "padded_vocab_size": 144}
    return SimpleNamespace(**{**vars(tiny_args(hf_dir, **overrides)), **values, **overrides})


class LayoutRun:
    """Model, optimizer and data of this rank.

    Args:
        loads: whether the weights come from `args.hf_checkpoint`; otherwise they are random.
        make: makes the samples.
    """

    def __init__(self, args: SimpleNamespace, *, loads: bool = True, make: MakeSamples = make_samples) -> None:
        from tests.support.processes.megatron_worker import load_backend

        self.args = args
        self.backend = load_backend(args, loads=loads)
        self.model, self.optimizer, self.scheduler = (
            self.backend.model,
            self.backend.optimizer,
            self.backend.scheduler,
        )
        groups = self.backend.groups
        self.cp, self.is_last_stage = groups.cp, groups.is_last_stage
        self.data = shard(args, groups.data_rank, self.cp, make)

    def prepare(self) -> None:
        """Compute log-probs with the present weights, and advantages; both exist on the last pipeline stage only."""
        from slime.training.advantages import compute_advantages_and_returns
        from slime.training.train_step import forward_log_probs

        self.data.update(forward_log_probs(self.args, self.backend, self.data, with_entropy=True))
        if self.is_last_stage:
            compute_advantages_and_returns(self.args, self.data)

    def step(self) -> dict[str, float]:
        from slime.training.train_step import train_one_step

        return train_one_step(self.args, self.backend, self.data, 0, 0)

    def mean_gradient(self) -> float:
        """The mean absolute entry of the last gradient, over the parameters of this rank."""
        import torch

        trained = [p for chunk in self.model for p in chunk.parameters() if p.requires_grad]
        flat = torch.cat([p.main_grad.flatten() for p in trained])
        return float(flat.abs().mean())

    def largest_gradient(self) -> float:
        """The mean absolute entry of the last gradient in the matrix where it is largest. Families differ in how far that
        matrix is above the others."""
        trained = [p for chunk in self.model for p in chunk.parameters() if p.requires_grad and p.ndim > 1]
        return max(float(p.main_grad.abs().mean()) for p in trained)

    def weights(self) -> dict[str, np.ndarray]:
        """All exported weights, by HF name."""
        from tests.support.processes.megatron_worker import whole_weights

        return {name: tensor.numpy() for name, tensor in whole_weights(self.args, self.model).items()}


def train_steps(cases: dict[str, SimpleNamespace], make: MakeSamples = make_samples) -> dict[str, dict[str, Any]]:
    """The results of `train_case` by case."""
    return {name: train_case(args, make) for name, args in cases.items()}


def train_case(args: SimpleNamespace, make: MakeSamples = make_samples) -> dict[str, Any]:
    """Returns log-probs before training, metrics of the batch, metrics of every step, weights before and after.

    `log_probs` (by name and sample index, for the samples of this data rank) and `batch` exist on the last pipeline stage only;
    the bounds of `rounding` exist only if one rank has everything.
    """
    import torch.distributed as dist

    run = LayoutRun(args, make=make)
    run.prepare()
    result: dict[str, Any] = {"loaded": run.weights()}
    if run.is_last_stage:
        from slime.training.reports import rollout_data_metrics

        result["batch"] = rollout_data_metrics(args, run.data, run.backend.groups.token_group)
        rows = zip(run.data["sample_indices"], run.data.whole("log_probs"), strict=True)
        result["log_probs"] = {("log_probs", i): row.tolist() for i, row in rows}
    if dist.get_world_size() == 1:
        result["bounds"] = {"step": bounds_of_step(args, run.data, 0), "batch": bounds_of_rollout(args, run.data)}
    result["steps"], gradients = [], []
    for _ in range(STEPS):
        result["steps"].append(run.step())
        gradients.append(run.largest_gradient())
    if dist.get_world_size() == 1:
        result["bounds"]["weights"] = bound_of_weights(args, gradients, TRAINED_TOKENS)
    result["weights"] = run.weights()
    return result


def shard(args: SimpleNamespace, data_rank: int, cp: Any, make: MakeSamples = make_samples) -> RolloutData:
    """The tensors of one data-parallel rank, with reference log-probs."""
    import torch

    from slime.training.rollout_batch import build_train_batch, split_for_data_parallel, to_tensors
    from slime.training.rollout_data import RolloutData
    from slime.training.schedule import schedule_from_args, train_parallel_config

    samples = make(args.vocab_size)
    batch = build_train_batch(samples, ADVANTAGES, ADVANTAGES)
    schedule = schedule_from_args(
        args, train_parallel_config(args), batch["total_lengths"].tolist(), global_batch_size=args.global_batch_size,
        execution_ids=batch["rollout_ids"].tolist(),
    )  # fmt: skip
    data = to_tensors(split_for_data_parallel(batch, schedule)[data_rank], torch.device("cpu"))
    _, reference = old_and_reference(samples)
    data["ref_log_probs"] = [torch.from_numpy(reference[i]) for i in data["partition"]]
    return RolloutData.of_rank(data, cp)


def assert_equal_runs(ranks: Sequence[dict[str, Any]], one_rank: dict[str, Any]) -> None:
    """The results of `train_case` on all ranks of a layout are those of one rank."""
    log_probs: dict[Any, list[float]] = {}
    bounds = one_rank["bounds"]
    for rank in ranks:
        for step, expected in zip(rank["steps"], one_rank["steps"], strict=True):
            assert_equal_metrics(step, expected, bounds["step"])
        if "batch" in rank:
            assert_equal_metrics(rank["batch"], one_rank["batch"], bounds["batch"])
            log_probs.update(rank["log_probs"])
        for when in ("loaded", "weights"):
            assert list(rank[when]) == list(one_rank[when])
        assert all(np.array_equal(weight, one_rank["loaded"][name]) for name, weight in rank["loaded"].items())
        assert_equal_weights(rank["weights"], one_rank["weights"], bounds["weights"])
    assert_equal_rows(log_probs, one_rank["log_probs"])
