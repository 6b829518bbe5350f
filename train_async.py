"""Asynchronous reinforcement learning: generate the next rollouts while the trainer learns from the last ones.

python train_async.py --help
python train_async.py ... --async-buffer-size 1
"""

import argparse
import sys

from slime import installed_packages

with installed_packages():
    from slime.ray.driver import (
        RolloutsAhead,
        RunProgress,
        Saver,
        SharedDevices,
        StartedRun,
        StepReport,
        evaluates_before_training,
        evaluation_is_due,
        push_is_due,
    )
    from slime.ray.session import main, started


def train(args: argparse.Namespace, progress: RunProgress | None = None) -> None:
    """Do the whole run. `progress` is told how far it gets, so that its caller can see that after an error, too."""
    with started(args) as run:
        loop(args, run, progress or RunProgress())


def loop(args: argparse.Namespace, run: StartedRun, progress: RunProgress) -> None:
    """Repeat the step: `rollout_manager` makes the data, `actor` learns from it, `sync` hands the weights back."""
    # Imported late, because it imports Ray, which takes longer than the whole of `--help`.
    from slime.ray.weight_sync import WeightSync

    rollout_manager, actor = run.rollout_manager, run.actor
    report = StepReport(args, run, progress)
    saver = Saver(args, run, report)
    # Both sides work at the same time on devices of their own, so neither ever sleeps.
    devices = SharedDevices(args, actor, rollout_manager)
    sync = WeightSync(args, actor, rollout_manager, devices) if args.has_trainer and args.has_engines else None
    if sync:
        sync.push()
    # The first rollouts start now, so that the evaluation below runs beside them.
    ahead = RolloutsAhead(args, run)
    ahead.start(run.start_rollout_id)
    if evaluates_before_training(args, run):
        report.evaluation(rollout_manager.evaluate(run.start_rollout_id, before=True).result())

    with saver.finishing():
        for rollout_id in range(run.start_rollout_id, run.length.num_rollout):
            with report.step(rollout_id):
                rollout = ahead.take(rollout_id)
                report.add(rollout.logged)
                if actor:
                    actor.train(rollout_id, rollout, report.add)
                # The object store has room only for the batches that wait, so this one must go.
                del rollout
                if actor:
                    saver.after(rollout_id)
                if sync and push_is_due(args, run.length, rollout_id):
                    with ahead.ready_for_push():
                        report.add_metrics(sync.push())
            ahead.start(rollout_id + 1)
            if evaluation_is_due(args, run.length, rollout_id):
                report.evaluation(rollout_manager.evaluate(rollout_id).result())


if __name__ == "__main__":
    sys.exit(main(train, asynchronous=True))
