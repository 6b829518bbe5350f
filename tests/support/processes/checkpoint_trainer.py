"""A tiny trainer that saves and loads checkpoints, and reports the state that it loaded."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tests.support.models.tiny_model import tiny_args
from tests.support.oracles.rounding import RELATIVE

LAYOUTS = {
    "dp1": {},
    "dp2": {"world_size": 2},
    "tp2": {"world_size": 2, "tensor_model_parallel_size": 2},
}
SEQUENCES = ([5, 9, 77, 100, 31, 8], [90, 3, 14, 15, 92, 65, 35])
# Every token but the last of a sequence predicts the next one.
PREDICTED_TOKENS = sum(len(sequence) - 1 for sequence in SEQUENCES)
ROLLOUTS_PER_STEP = 8


def make_args(hf_dir, save, **overrides) -> SimpleNamespace:
    values = {
        "save": str(save), "save_hf": None, "no_save_optim": False, "no_load_optim": False, "no_load_rng": False,
        "keep_last": None, "world_size": 1,
        "optimizer": "adam", "lr": 1e-2, "min_lr": 1e-3, "lr_decay_style": "linear", "lr_decay_iters": 4,
        "lr_warmup_iters": 0, "lr_warmup_fraction": None, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.98,
        "adam_eps": 1e-8, "clip_grad": 1.0, "num_rollout": 4, "rollout_batch_size": 8, "n_samples_per_prompt": 1,
        "global_batch_size": ROLLOUTS_PER_STEP,
    }  # fmt: skip
    return SimpleNamespace(**{**vars(tiny_args(hf_dir, **overrides)), **values, **overrides})


class Trainer:
    """Model, optimizer and scheduler of this rank, at the weights of the HF checkpoint."""

    def __init__(self, args) -> None:
        from tests.support.processes.megatron_worker import load_model

        self.args, self.mean_gradient = args, 0.0
        self.model = load_model(args)
        from slime.backends.megatron_utils.optimizer import build_optimizer_and_scheduler

        self.optimizer, self.scheduler = build_optimizer_and_scheduler(args, self.model)

    def step(self) -> None:
        """One optimizer step on the same data on every rank."""
        from megatron.core.distributed import finalize_model_grads

        from tests.support.processes.megatron_worker import next_token_loss, packed_forward

        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        next_token_loss(packed_forward(self.model[0], SEQUENCES), SEQUENCES).backward()
        finalize_model_grads(self.model)
        self.optimizer.step()
        trained = [p for chunk in self.model for p in chunk.parameters() if p.requires_grad]
        entries = torch.cat([p.main_grad.flatten() for p in trained])
        self.mean_gradient = float(entries.abs().mean())
        self.scheduler.step(increment=ROLLOUTS_PER_STEP)

    def save(self, iteration, publish=True) -> None:
        from slime.backends.megatron_utils.checkpoint import begin_checkpoint, publish_checkpoint

        begin_checkpoint(self.args, iteration, self.model, self.optimizer, self.scheduler).finish()
        if publish and torch.distributed.get_rank() == 0:
            publish_checkpoint(self.args, iteration)
        torch.distributed.barrier()

    def load(self, source) -> int:
        from slime.backends.megatron_utils.checkpoint import load_checkpoint

        return load_checkpoint(self.args, source, self.model, self.optimizer, self.scheduler)

    def state(self) -> dict:
        """HF-named weights, schedule, the next numbers of the random generators, mean absolute entry of the last gradient."""
        from tests.support.processes.megatron_worker import whole_weights

        weights = {name: tensor.numpy() for name, tensor in whole_weights(self.args, self.model).items()}
        return {
            "weights": weights,
            "rollouts": self.scheduler.num_steps,
            "lr": self.optimizer.param_groups[0]["lr"],
            "random": torch.rand(4).tolist(),
            "gradient": self.mean_gradient,
        }


def resume(args, source) -> tuple[int, dict, dict]:
    """Load into a trainer with other weights. Returns (iteration, state, state after one more step)."""
    trainer = Trainer(args)
    with torch.no_grad():
        for parameter in trainer.model[0].parameters():
            parameter.add_(1.0)
    torch.rand(7)
    iteration = trainer.load(source)
    loaded = trainer.state()
    trainer.step()
    return iteration, loaded, trainer.state()


def train_and_save(args) -> tuple[dict, dict]:
    """One step, a checkpoint of rollout 3, one step: the states at the checkpoint and after the second step."""
    trainer = Trainer(args)
    trainer.step()
    trainer.save(3)
    saved = trainer.state()
    trainer.step()
    return saved, trainer.state()


def assert_same(state, expected, absolute=0.0) -> None:
    """Both have the same weights within `absolute` (0: the same bits) and the same place in the schedule."""
    assert state["weights"].keys() == expected["weights"].keys()
    for name, weight in state["weights"].items():
        torch.testing.assert_close(
            torch.from_numpy(weight),
            torch.from_numpy(expected["weights"][name]),
            rtol=RELATIVE if absolute else 0,
            atol=absolute,
            msg=name,
        )
    assert (state["rollouts"], state["lr"]) == (expected["rollouts"], expected["lr"])
