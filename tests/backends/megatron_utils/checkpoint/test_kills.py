"""A saver that is killed at any moment leaves a checkpoint that loads, and the next one goes on from it."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from slime.arguments.checkpoints import WeightSource
from slime.utils.checkpoint_directory import is_megatron_checkpoint, latest_iteration
from tests.support.processes.checkpoint_trainer import Trainer, make_args
from tests.support.processes.distributed import run_distributed
from tests.support.processes.resumed_run import digest

KILLS = 20
SECONDS = 60.0


def state_of(trainer) -> dict:
    """Weights and place in the schedule, and a digest of what the optimizer keeps of every parameter."""
    inner = [part.optimizer for part in trainer.optimizer.chained_optimizers if part.optimizer is not None]
    kept = [optimizer.state[p] for optimizer in inner for group in optimizer.param_groups for p in group["params"]]
    tensors = [value for state in kept for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 2 * len(kept) > 0
    state = trainer.state()
    steps = [group.get("step") for optimizer in inner for group in optimizer.param_groups if group["params"]]
    return {**{name: state[name] for name in ("weights", "rollouts", "lr")}, "moments": digest(tensors), "steps": steps}


def differing(state, expected) -> list[str]:
    """Names of weights and other entries that have not the same bits."""
    weights = [name for name, weight in expected["weights"].items() if (state["weights"][name] != weight).any()]
    return weights + [name for name in expected.keys() - {"weights"} if state[name] != expected[name]]


def _save_forever(args, first, messages, in_background) -> None:
    """Go on from the newest checkpoint: step, tell the state, save, tell that it is saved."""
    from slime.backends.megatron_utils.checkpoint import begin_checkpoint, publish_checkpoint

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    trainer = Trainer(args)
    if is_megatron_checkpoint(args.save):
        trainer.load(WeightSource("megatron", args.save, resume=True))
    for iteration in range(first, 1000):
        trainer.step()
        messages.send((iteration, state_of(trainer)))
        if in_background:
            unfinished = begin_checkpoint(args, iteration, trainer.model, trainer.optimizer, trainer.scheduler)
            # What is written is no longer what is trained.
            trainer.step()
            unfinished.finish()
            publish_checkpoint(args, iteration)
        else:
            trainer.save(iteration)
        messages.send((iteration, None))


def _kill_savers(args, in_background) -> list[dict]:
    """What is found after every kill: the newest checkpoint, the moment of the kill, and what had been told."""
    generator, context = random.Random(0), multiprocessing.get_context("fork")
    states, found, duration, first = {}, [], 1.0, 0
    for kill in range(KILLS):
        messages, sender = context.Pipe(duplex=False)
        saver = context.Process(target=_save_forever, args=(args, first, sender, in_background))
        saver.start()
        sender.close()

        def next_message(messages=messages):
            assert messages.poll(SECONDS), "the saver says nothing"
            return messages.recv()

        saved = None
        # One save is left alone, and tells how long they take; the next one is not.
        for save in range(2 if kill == 0 else 1):
            iteration, states[iteration] = next_message()
            start = time.monotonic()
            if kill == 0 and save == 0:
                saved, _ = next_message()
                duration = time.monotonic() - start
        # The moment is drawn: nobody chooses what the saver is at.
        time.sleep(generator.uniform(0, 1.3 * duration))
        # Its writers follow it.
        saver.kill()
        saver.join(SECONDS)
        while messages.poll():
            try:
                number, later = messages.recv()
            except (EOFError, OSError):
                # It was killed while it told something.
                break
            if later is None:
                saved = number
            else:
                states[number] = later
        snapshot = Path(f"{args.save}_after_{kill}")
        shutil.copytree(args.save, snapshot)
        newest = latest_iteration(snapshot)
        found.append({"newest": newest, "saved": saved, "begun": max(states), "snapshot": str(snapshot)})
        first = newest + 1
        if not in_background:
            # The saver itself has taken the step after the one that it saved.
            found[-1]["after"] = states.get(first)
        states = {number: state for number, state in states.items() if number <= newest}
        found[-1]["state"] = states[newest]
    for case in found:
        read = make_args(args.hf_checkpoint, case["snapshot"])
        trainer = Trainer(read)
        case["loaded"] = trainer.load(WeightSource("megatron", case["snapshot"], resume=True))
        case["differing"] = differing(state_of(trainer), case.pop("state"))
        if (after := case.pop("after", None)) is not None:
            trainer.step()
            case["differing after a step"] = differing(state_of(trainer), after)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_a_saver_that_is_killed_at_twenty_moments_leaves_a_loadable_checkpoint_each_time(
    hf_dir, tmp_path, in_background
):
    args = make_args(hf_dir, tmp_path / "checkpoints", async_save=in_background)
    (found,) = run_distributed(_kill_savers, 1, (args, in_background), timeout=400)
    assert len(found) == KILLS
    for case in found:
        assert case["loaded"] == case["newest"] and case["differing"] == [], case
        assert case.get("differing after a step", []) == [], case
        # What was told to be saved is, and nothing is newer than what was begun.
        assert (case["saved"] or 0) <= case["newest"] <= case["begun"], case
    assert any("differing after a step" in case for case in found) != in_background
    # The moments were before and after publication.
    assert {case["newest"] == case["begun"] for case in found} == {True, False}
