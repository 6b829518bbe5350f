"""Synchronous reinforcement learning: generate, train, push the weights, again.

python train.py --help
bash scripts/quickstart.sh
"""

import argparse
import sys

from slime import installed_packages

with installed_packages():
    from slime.ray.driver import (
        RunProgress,
        Saver,
        SharedDevices,
        StartedRun,
        StepReport,
        Turn,
        evaluates_before_training,
        evaluation_is_due,
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
    devices = SharedDevices(args, actor, rollout_manager)
    sync = WeightSync(args, actor, rollout_manager, devices) if args.has_trainer and args.has_engines else None
    if sync:
        sync.push()
    if evaluates_before_training(args, run):
        report.evaluation(rollout_manager.evaluate(run.start_rollout_id, before=True).result())

    with saver.finishing():
        for rollout_id in range(run.start_rollout_id, run.length.num_rollout):
            with report.step(rollout_id):
                rollout = rollout_manager.generate(rollout_id).result()
                report.add(rollout.logged)
                if actor:
                    # If devices are shared, engines sleep from here until the push.
                    devices.turn_to(Turn.TRAINING)
                    actor.train(rollout_id, rollout, report.add)
                # The object store has room for one batch, so this one must go before the next comes.
                del rollout
                if actor:
                    saver.after(rollout_id)
                if sync:
                    report.add_metrics(sync.push())
            if evaluation_is_due(args, run.length, rollout_id):
                report.evaluation(rollout_manager.evaluate(rollout_id).result())


if __name__ == "__main__":
    sys.exit(main(train))
