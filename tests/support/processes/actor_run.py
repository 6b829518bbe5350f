"""A rank of the actor inside a test's process, with rollouts that come from no engine."""

from __future__ import annotations

from pathlib import Path

from tests.support.models.train_steps import shard_of

TEMPERATURE = 0.7
NUM_ROLLOUT = 6


def command_line(directory: Path, *words: str) -> list[str]:
    """The command line of a run on two tensor-parallel ranks that trains without engines."""
    return [
        "--hf-checkpoint", str(directory / "actor"), "--model-args-from-hf", "--debug-train-only", "--num-rollout",
        str(NUM_ROLLOUT), "--rollout-batch-size", "8", "--n-samples-per-prompt", "1", "--actor-num-gpus-per-node", "2",
        "--tensor-model-parallel-size", "2", "--lr", "0.01", "--lr-decay-style", "linear", "--micro-batch-size", "1",
        "--prompt-data", str(directory / "prompts.jsonl"), "--rollout-temperature", str(TEMPERATURE), "--rm-type", "math",
        "--data-pad-size-multiplier", "8", "--clip-grad", "0", *words,
    ]  # fmt: skip


class Rank:
    """A rank of the actor whose rollouts come from `shard_of`."""

    def __init__(self, words: list[str], **overrides) -> None:
        import os

        from slime.arguments import parse_args
        from slime.training.actor_rank import ActorRank

        self.args = parse_args(argv=words)
        vars(self.args).update(overrides)
        before = dict(vars(self.args))
        rank = int(os.environ["RANK"])
        self.actor = ActorRank(self.args, rank, 2, rank)
        self.actor._fetch = lambda shards: self._data()
        self.first = self.actor.init((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        self.changed_args = sorted(name for name, value in vars(self.args).items() if before.get(name) != value)

    def _data(self) -> dict:
        self.data = shard_of(self.args, 0)
        del self.data["log_probs"], self.data["ref_log_probs"]
        return self.data

    def train(self, rollout_id) -> dict:
        """Train on a rollout. Returns the log-probs that were used, by column."""
        self.logged = self.actor.train(rollout_id, [])
        computed = ("log_probs", "ref_log_probs", "teacher_log_probs")
        return {name: self.data[name] for name in computed if name in self.data}

    def told(self) -> dict[str, float]:
        """All metrics of the last rollout."""
        return {name: value for metrics, _ in self.logged for name, value in metrics.items()}

    def save(self, rollout_id) -> None:
        import torch.distributed as dist

        self.actor.save(rollout_id)
        if dist.get_rank() == 0:
            self.actor.publish(rollout_id)
        dist.barrier()

    def weights(self) -> dict:
        return {name: tensor.clone() for name, tensor in self.actor.backend.stage_tensors()()}

    def optimizer_tensors(self) -> list:
        """A copy of everything that the optimizer keeps."""
        return [tensor.clone() for tensor in self.actor.backend.residents().optimizer]

    def learning_rate(self) -> float:
        return self.actor.backend.optimizer.param_groups[0]["lr"]

    def end(self) -> None:
        """Leave the parallel groups. The process group stays for the next rank in this process."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()


def same(left: dict, right: dict) -> dict[str, bool]:
    """Whether both have the same bits, by key."""

    def equal(a, b) -> bool:
        pairs = zip(a, b, strict=True) if isinstance(a, list) else [(a, b)]
        return all(one.equal(other) for one, other in pairs)

    return {name: equal(value, right[name]) for name, value in left.items()}
