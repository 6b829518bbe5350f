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
        SharedDevices,
        StartedRun,
        StepReport,
        Turn,
        evaluates,
        evaluates_before_training,
        saves,
    )
    from slime.ray.session import ending, main


def train(args: argparse.Namespace, progress: RunProgress | None = None) -> None:
    """The whole run. `rollout_manager` makes the data, `actor` learns from it, `sync` hands the weights back.

    `progress` hears how far it comes, for whoever asks when it ends.
    """
    # Importing Ray takes longer than all that `--help` does, which parsing answers.
    from slime.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models

    placement = create_placement_groups(args)
    rollout_manager = create_rollout_manager(args, placement["rollout"])
    with ending(rollout_manager):
        run = create_training_models(args, placement, rollout_manager)
        with ending(run.actor):
            loop(args, run, progress or RunProgress())


def loop(args: argparse.Namespace, run: StartedRun, progress: RunProgress) -> None:
    from slime.ray.weight_sync import WeightSync

    rollout_manager, actor = run.rollout_manager, run.actor
    report = StepReport(args, run, progress)
    devices = SharedDevices(args, actor, rollout_manager)
    sync = WeightSync(args, actor, rollout_manager, devices) if args.has_trainer and args.has_engines else None
    if sync:
        sync.push()
    if evaluates_before_training(args, run):
        report.evaluation(rollout_manager.evaluate(run.start_rollout_id, before=True).result())

    for rollout_id in range(run.start_rollout_id, run.length.num_rollout):
        with report.step(rollout_id):
            rollout = rollout_manager.generate(rollout_id).result()
            report.add(rollout.logged)
            if actor:
                # Where they are shared, engines sleep from here on until the push.
                devices.turn_to(Turn.TRAINING)
                actor.train(rollout_id, rollout, report.add)
            # The next batch needs its place in the object store.
            del rollout
            if actor and saves(args, run.length, rollout_id):
                with report.phase("save_model"):
                    actor.save(rollout_id)
                    rollout_manager.save(rollout_id)
                    report.saved(rollout_id)
                    actor.publish(rollout_id)
            if sync:
                report.add_metrics(sync.push())
        if evaluates(args, run.length, rollout_id):
            report.evaluation(rollout_manager.evaluate(rollout_id).result())


if __name__ == "__main__":
    sys.exit(main(train))
