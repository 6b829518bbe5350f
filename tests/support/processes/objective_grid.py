"""Every objective in any parallel layout, on batches in which ranks own few tokens or none: a worker for `run_distributed`.

A layout starts one group of ranks. All objectives run on it one after the other, each with given log-probs, values and rewards.
The learning rate is 0, so all of them have the same weights. `assert_like_one_rank` compares the results of all ranks with
those of one rank.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.support.models.grpo_batch import OBJECTIVE
from tests.support.models.tiny_model import tiny_args
from tests.support.oracles.plain_objective import PlainSample
from tests.support.oracles.rounding import (
    assert_equal_metrics,
    assert_equal_rows,
    bounds_of_rollout,
    bounds_of_step,
    terms_of_value,
)

if TYPE_CHECKING:
    from slime.training.rollout_data import RolloutData

VOCABULARY = 19
PADDED_VOCABULARY = 32
HIDDEN, LAYERS = 32, 2

# (prompt length, mask of the response, execution) of each sample; a step has 4 executions.
FULL = (
    (3, [1, 1, 1, 1, 1], 0),
    (2, [1], 1),  # one token
    (4, [1, 1, 0, 0, 1, 1], 2),  # tokens of a tool
    (3, [1, 1, 1, 1], 2),  # sibling of the same execution
    (5, [0, 0, 0], 3),  # fully masked
    (1, [1, 1, 1], 0),  # a sibling that is far from the other sample of its execution
    (14, [1, 1], 4),  # prompts longer than a chunk: only one context-parallel rank owns response tokens
    (9, [1], 5),
    (3, [0, 1, 1, 1, 0, 0, 1, 1, 0], 6),  # tokens of tools at both ends
    (2, [1, 1], 7),
    (6, [1, 0, 1], 6),
    (1, [1, 0, 0, 0], 7),
)
# With one sample per micro-batch, one data-parallel rank has only the second sample, which is masked. All response tokens of
# the first sample are on one context-parallel rank, however the sample is split.
SPARSE = ((14, [1, 1], 0), (6, [0, 0, 0], 1))
ROLLOUTS_PER_STEP = {"full": 4, "sparse": 2}
STEPS = {"full": 2, "sparse": 1}
ALONE = {"use_dynamic_batch_size": False, "micro_batch_size": 1}

REINFORCE = {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9, "kl_coef": 0.1}
PPO = {"advantage_estimator": "ppo", "gamma": 0.97, "lambd": 0.9, "kl_coef": 0.1, "kl_loss_type": "k1"}
GSPO = {"advantage_estimator": "gspo", "eps_clip": 0.05, "eps_clip_high": 0.06}
TIS = {"use_tis": True, "tis_clip": 1.2, "tis_clip_low": 0.9}
PER_TOKEN = {"calculate_per_token_loss": True}
WHITE = {"normalize_advantages": True}
OPSM = {"use_opsm": True, "opsm_delta": 0.02}
MIS = {
    "use_tis": True, "use_rs": True, "tis_batch_normalize": True,
    "custom_tis_function_path": "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
}  # fmt: skip
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo per token": PER_TOKEN,
    "grpo whitened": WHITE,
    "grpo, one sample a micro-batch": ALONE,
    "first step": {},
    "dual clip": {"eps_clip_c": 1.05, "eps_clip": 0.1},
    "constant length": {"custom_pg_loss_reducer_function_path": f"{__name__}.constant_length"},
    "gspo": GSPO,
    "gspo with sequence mask, per token": {**GSPO, **OPSM, **PER_TOKEN},
    "gspo, one sample a micro-batch": {**GSPO, **ALONE},
    "sequence mask": OPSM,
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0},
    "ppo": PPO,
    "ppo whitened, per token": {**PPO, **WHITE, **PER_TOKEN, "discount_masked_tokens": True},
    "reinforce_plus_plus": {**REINFORCE, "kl_loss_type": "k2"},
    "reinforce_plus_plus whitened": {**REINFORCE, **WHITE},
    "reinforce_plus_plus_baseline": {**REINFORCE, **WHITE, "advantage_estimator": "reinforce_plus_plus_baseline"},
    "truncated importance sampling": TIS,
    "icepop, per token": {
        **TIS, **PER_TOKEN, "custom_tis_function_path": "slime.backends.megatron_utils.loss.icepop_function"
    },
    "masked importance sampling": {**MIS, "tis_mode": "clip", "rs_lower_bound": 0.7, "rs_upper_bound": 1.4},
    "masked importance sampling of sequences": {
        **MIS, **PER_TOKEN, "tis_level": "sequence", "rs_level": "geometric", "rs_lower_bound": 0.8, "rs_upper_bound": 1.1,
    },
    "mismatch metrics": {"get_mismatch_metrics": True},
    "engine log-probs as old ones": {"use_rollout_logprobs": True},
    "importance weighted kl": {"kl_loss_type": "low_var_kl", "use_unbiased_kl": True},
    "distillation": {"use_opd": True, "opd_kl_coef": 0.5},
    "top-p": {},
    "custom loss": {"loss_type": "custom_loss", "custom_loss_function_path": f"{__name__}.halved_policy_loss"},
    "sft": {"loss_type": "sft_loss"},
    "sft per token": {"loss_type": "sft_loss", **PER_TOKEN},
}  # fmt: skip
CRITIC_OBJECTIVES: dict[str, dict[str, Any]] = {
    "value": PPO,
    "value per token": {**PPO, **PER_TOKEN},
    "value beside given ones": {**PPO, "value_clip": 0.8},
}
# Role -> (its objectives, the flags of its model).
ROLES: dict[str, tuple[dict[str, dict[str, Any]], dict[str, Any]]] = {
    "actor": (OBJECTIVES, {}),
    "critic": (
        CRITIC_OBJECTIVES,
        {"role": "critic", "untie_embeddings_and_output_weights": True, "value_clip": 0.05},
    ),
}
# The objectives that every layout runs on every change. Together they have masks and ratios of whole sequences, discounted
# sums, statistics over all ranks, custom functions, kept tokens, both reductions, and micro-batches of one sample.
SHARPEST = (
    "first step", "grpo, one sample a micro-batch", "grpo whitened", "gspo with sequence mask, per token",
    "ppo whitened, per token", "reinforce_plus_plus whitened", "masked importance sampling", "top-p", "sft per token",
)  # fmt: skip
# Column that the trainer computes on the last pipeline stage -> attribute of a sample.
TRAINERS = {"log_probs": "old", "ref_log_probs": "ref", "values": "values"}
CONSTANT_LENGTH = 16.0


def constant_length(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """The reducer of "Dr. GRPO" as a user would write it."""
    import torch

    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    masks = [slice_log_prob_with_cp(*row) for row in zip(loss_masks, total_lengths, response_lengths, strict=True)]
    return lambda per_token: (per_token * torch.cat(masks)).sum() / CONSTANT_LENGTH


def halved_policy_loss(args, batch, logits, sum_of_sample_mean):
    from slime.backends.megatron_utils.loss import policy_loss_function

    loss, metrics = policy_loss_function(args, batch, logits, sum_of_sample_mean)
    return loss / 2, metrics


def grid_args(hf_dir: Any, batch: str = "full", **overrides: Any) -> SimpleNamespace:
    """The arguments for a batch; `overrides` are parallel sizes or arguments of an objective."""
    values = {
        **OBJECTIVE, "data_parallel_size": 1, "lr": 0.0, "padded_vocab_size": PADDED_VOCABULARY,
        "log_level": "ERROR", "reset_optimizer_states": False, "num_steps_per_rollout": STEPS[batch],
        "global_batch_size": ROLLOUTS_PER_STEP[batch], **(ALONE if batch == "sparse" else {}),
    }  # fmt: skip
    return SimpleNamespace(**{**vars(tiny_args(hf_dir, **overrides)), **values, **overrides})


def run_layouts(
    hf_dir: str,
    layouts: dict[str, dict[str, Any]],
    batches: dict[str, Sequence[PlainSample]],
    roles: Sequence[str] = tuple(ROLES),
    chosen: Mapping[str, Collection[str]] | None = None,
) -> dict[str, dict[tuple[str, str], dict[str, Any]]]:
    """Run objectives in each layout. Returns, by name of the layout, the results of `run_objective` by (objective, batch).

    Args:
        layouts: parallel sizes by name.
        chosen: the objectives to run, by name of the layout; None: all objectives of the roles.
    """
    results: dict[str, dict] = {}
    for layout, sizes in layouts.items():
        results[layout] = {}
        for role in roles:
            objectives, flags = ROLES[role]
            rank = make_rank(grid_args(hf_dir, **sizes, **flags), role)
            for objective, changes in objectives.items():
                if chosen is not None and objective not in chosen[layout]:
                    continue
                for batch, samples in batches.items():
                    rank.args = grid_args(hf_dir, batch, **{**sizes, **flags, **changes})
                    results[layout][objective, batch] = run_objective(rank, samples, objective)
    return results


def make_rank(args: SimpleNamespace, role: str) -> Any:
    """The trainer's own rank, with a backend that this process makes for it."""
    from tests.support.processes.megatron_worker import load_backend

    backend = load_backend(args)
    from slime.training.actor_rank import ActorRank
    from slime.training.train_rank import CriticRank

    if role == "critic":
        _fill_value_heads(backend)
    rank_class = {"actor": ActorRank, "critic": CriticRank}[role]
    rank = rank_class(args, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 0)
    rank.backend = backend
    return rank


def _fill_value_heads(backend: Any) -> None:
    import torch

    from slime.backends.megatron_utils.value_head import is_value_head

    with torch.no_grad():
        for head in (p for chunk in backend.model for p in chunk.parameters() if is_value_head(p)):
            head.copy_(torch.linspace(-0.1, 0.2, HIDDEN))
    backend.optimizer.reload_model_params()


def run_objective(rank: Any, samples: Sequence[PlainSample], objective: str) -> dict[str, Any]:
    """Train on the samples. Returns the results and metrics of this rank.

    Returns:
        `train`, `rollout`: all metrics but times, by (name, step); `columns`: the values per response token by (name, sample),
        on the last pipeline stage, for the samples of this data-parallel rank; `owned`: the number of trained tokens of this
        rank; `masked`: whether kept sets of top-p applied; `bounds`: on one rank, the bounds of `rounding` for `train` and
        `rollout`.
    """
    from slime.training.advantages import compute_advantages_and_returns
    from slime.training.train_step import forward_log_probs, forward_values

    args, groups = rank.args, rank.groups
    masked = objective == "top-p"
    logged: list[tuple[dict[str, Any], str]] = []
    data = _data_of(args, samples, rank, groups.is_last_stage, with_kept_sets=masked)
    if objective == "first step":
        data.update(forward_log_probs(args, rank.backend, data, with_entropy=True))
    if rank.role == "critic":
        if objective != "value beside given ones":
            data.update(forward_values(args, rank.backend, data))
        if groups.is_last_stage:
            compute_advantages_and_returns(args, data, groups.token_group)
        rank._train_steps(0, data, logged)
    else:
        if args.loss_type != "sft_loss":
            rank._compute_advantages(0, data, logged)
        rank._train_steps(0, data, logged)
        logged.append(rank._rollout_metrics(0, data))
    result: dict[str, Any] = {
        "train": {},
        "rollout": {},
        "masked": masked,
        **_per_token_results(data, groups.is_last_stage),
    }
    for metrics, axis in logged:
        step = metrics.pop(axis)
        for name, value in metrics.items():
            kind, _, name = name.partition("/")
            if kind != "perf":
                result[kind][name, step] = value
    if rank.world_size == 1:
        result["bounds"] = _bounds(args, data, result)
    return result


def _bounds(args: SimpleNamespace, data: dict[str, Any], result: dict[str, Any]) -> dict[str, dict]:
    import torch

    def on_host(value: Any) -> Any:
        return value.cpu() if torch.is_tensor(value) else value

    data = {name: list(map(on_host, rows)) if isinstance(rows, list) else rows for name, rows in data.items()}
    of_steps = [bounds_of_step(args, data, step) for step in range(len(data["num_microbatches"]))]
    of_rollout = bounds_of_rollout(args, data)
    train = {key: of_steps[key[1]].get(key[0].removeprefix("critic-"), 0.0) for key in result["train"]}
    return {"train": train, "rollout": {key: of_rollout.get(key[0], 0.0) for key in result["rollout"]}}


def _per_token_results(data: RolloutData, is_last_stage: bool) -> dict[str, Any]:
    from slime.training.columns import Kind, names_of

    owned = sum(int(mask.sum()) for mask in data.local_masks)
    if not is_last_stage:
        return {"columns": {}, "owned": owned}
    whole = data.with_whole_responses()
    columns = {
        (name, index): row.tolist()
        for name in names_of(Kind.RESPONSE_PART)
        if name in whole
        for index, row in zip(data["sample_indices"], whole[name], strict=True)
    }
    return {"columns": columns, "owned": owned}


def _data_of(
    args: SimpleNamespace, samples: Sequence[PlainSample], rank: Any, is_last_stage: bool, *, with_kept_sets: bool
) -> RolloutData:
    """A rank's shard of the samples, as the trainer has it before it computes advantages."""
    import torch

    from slime.training.rollout_batch import split_for_data_parallel, to_tensors, train_batch_from_columns
    from slime.training.rollout_data import RolloutData
    from slime.training.schedule import schedule_from_args, train_parallel_config
    from slime.utils.device import get_accelerator

    columns = {
        "tokens": [s.tokens for s in samples], "response_lengths": [len(s.mask) for s in samples],
        "rewards": [s.reward for s in samples], "raw_reward": [2 * s.reward for s in samples],
        "truncated": [i % 2 for i in range(len(samples))], "sample_indices": list(range(len(samples))),
        "loss_masks": [s.mask for s in samples], "rollout_ids": [s.execution for s in samples],
        "rollout_log_probs": [s.roll for s in samples], "teacher_log_probs": [s.teacher for s in samples],
    }  # fmt: skip
    if with_kept_sets:
        kept = [[(token + step) % VOCABULARY for token in s.tokens[s.prompt :] for step in (0, 1, 5)] for s in samples]
        columns["rollout_top_p_token_ids"] = kept
        columns["rollout_top_p_token_offsets"] = [list(range(0, len(ids) + 1, 3)) for ids in kept]
    batch = train_batch_from_columns(columns, "columns")
    schedule = schedule_from_args(
        args, train_parallel_config(args), batch["total_lengths"].tolist(), global_batch_size=args.global_batch_size,
        execution_ids=batch["rollout_ids"].tolist(),
    )  # fmt: skip
    device = get_accelerator().current_device()
    data = to_tensors(split_for_data_parallel(batch, schedule)[rank.groups.data_rank], device)
    if is_last_stage:
        for column, name in TRAINERS.items():
            rows = [getattr(samples[i], name) for i in data["partition"]]
            data[column] = [torch.tensor(row, dtype=torch.float32, device=device) for row in rows]
    return RolloutData.of_rank(data, rank.groups.cp)


def columns_of(ranks: Sequence[dict[str, Any]]) -> dict[tuple[str, int], list[float]]:
    """The columns of all samples by (name, sample), from the results of `run_objective` on all ranks of a layout."""
    columns: dict[tuple[str, int], list[float]] = {}
    for rank in ranks:
        columns.update(rank["columns"])
    return columns


def of_step(train: dict[tuple[str, int], float], number: int) -> dict[str, float]:
    """The metrics of an optimizer step by name; those of a critic without its prefix."""
    return {name.removeprefix("critic-"): value for (name, step), value in train.items() if step == number}


def assert_like_one_rank(ranks: Sequence[dict[str, Any]], expected: dict[str, Any], layers: int = LAYERS) -> None:
    """The ranks of a layout have the results of one rank, for a model of `layers`. Every rank logs all numbers."""
    for rank in ranks:
        bounds, masked = expected["bounds"]["train"], expected["masked"]
        assert_equal_metrics(rank["train"], expected["train"], bounds, masked=masked)
    assert_equal_rows(columns_of(ranks), expected["columns"], terms_of_value=terms_of_value(HIDDEN, layers))
