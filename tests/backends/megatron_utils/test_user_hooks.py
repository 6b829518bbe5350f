"""Functions of the user inside Megatron's ranks: at the start, before passes without gradient, and before steps."""

import json

import pytest

from slime.utils.errors import UserError
from slime.utils.plugin_loader import call_plug_in
from tests.support.models.tiny_model import write_tiny_model
from tests.support.models.train_steps import make_args, shard_of
from tests.support.processes.distributed import run_distributed

HOOKS = """
import json, os
from pathlib import Path

def note(**what):
    with open(Path(__file__).with_name(f"rank-{os.environ['RANK']}.jsonl"), "a") as file:
        print(json.dumps(what), file=file)

def at_start(args):
    from megatron.core import parallel_state
    note(at="start", tensor_ranks=parallel_state.get_tensor_model_parallel_world_size(), seed=args.seed)

def before_pass(args, model, store_prefix):
    note(at="pass", prefix=store_prefix, is_training=model[0].training, chunks=len(model))

def before_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    left = sum(float(buffer.grad_data.abs().sum()) for chunk in model for buffer in chunk.buffers)
    rates = [group["lr"] for group in optimizer.param_groups]
    of_schedule = opt_param_scheduler.get_lr(optimizer.param_groups[0])
    note(at="step", rollout=rollout_id, step=step_id, gradient=left, rate=rates[0], of_schedule=of_schedule)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
"""
FLAGS = {
    "custom_megatron_init_path": "at_start",
    "custom_megatron_before_log_prob_hook_path": "before_pass",
    "custom_megatron_before_train_step_hook_path": "before_step",
}


def worker(args):
    from tests.support.processes.megatron_worker import load_backend

    backend = load_backend(args)
    from slime.training.advantages import compute_advantages_and_returns
    from slime.training.train_step import forward_log_probs, train_one_step

    data = shard_of(args, backend.groups.data_rank)
    compute_advantages_and_returns(args, data)
    names = [sorted(forward_log_probs(args, backend, data, with_entropy=False, prefix=p)) for p in ("", "ref_")]
    before = [tensor.clone() for _, tensor in backend.live_tensors()]
    # Twice, since gradients of the first are left when the second begins.
    train_one_step(args, backend, data, 5, 0)
    train_one_step(args, backend, data, 6, 0)
    same = all(old.equal(tensor) for old, (_, tensor) in zip(before, backend.live_tensors(), strict=True))
    return names, same


def test_hooks_are_called_on_each_rank_at_their_moments_and_what_they_change_counts(tmp_path):
    write_tiny_model(tmp_path / "model", tied=True)
    (tmp_path / "hooks.py").write_text(HOOKS)
    paths = {flag: f"{tmp_path}/hooks.py:{name}" for flag, name in FLAGS.items()}
    args = make_args(tmp_path / "model", tensor_model_parallel_size=2, **paths)
    # The step's hook took the learning rate away.
    assert run_distributed(worker, 2, (args,)) == [([["log_probs"], ["ref_log_probs"]], True)] * 2
    for rank in range(2):
        start, *passes, step, later = map(json.loads, (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines())
        assert start == {"at": "start", "tensor_ranks": 2, "seed": args.seed}
        assert [(each["prefix"], each["chunks"]) for each in passes] == [("", 1), ("ref_", 1)]
        assert (step["rollout"], step["step"], step["gradient"]) == (5, 0, 0.0)
        assert (later["rollout"], later["gradient"]) == (6, 0.0)
        assert step["rate"] == step["of_schedule"] > 0


def test_a_hook_that_raises_or_that_nobody_awaits_is_named(tmp_path):
    (tmp_path / "hooks.py").write_text("def wrong(args): raise KeyError('x')\nasync def late(args): pass\n")
    for name, told in (("wrong", "rollout 1, step 2"), ("late", "async")):
        with pytest.raises(UserError, match=f"--custom-megatron-init-path .*hooks.py:{name}.*") as caught:
            call_plug_in("--custom-megatron-init-path", f"{tmp_path}/hooks.py:{name}", "rollout 1, step 2", None)
        assert told in str(caught.value)
