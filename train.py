"""Synchronous reinforcement learning: generate, train, push the weights, again.

python train.py --help
bash scripts/quickstart.sh
"""

import argparse
import sys

from slime import installed_packages

with installed_packages():
    from slime.ray.driver import StepReport, evaluates, evaluates_before_training, saves
    from slime.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
    from slime.ray.session import ending, main
    from slime.ray.weight_sync import WeightSync


def train(args: argparse.Namespace) -> None:
    """The whole run. `rollout_manager` makes the data, `actor` learns from it, `sync` hands the weights back."""
    placement = create_placement_groups(args)
    rollout_manager = create_rollout_manager(args, placement["rollout"])
    with ending(rollout_manager):
        actor = create_training_models(args, placement, rollout_manager)
        with ending(actor):
            run(args, rollout_manager, actor)


def run(args: argparse.Namespace, rollout_manager, actor) -> None:
    report = StepReport(args)
    sync = WeightSync(args, actor, rollout_manager.serving) if args.has_trainer and args.has_engines else None
    if sync:
        sync.push()
    if evaluates_before_training(args):
        report.evaluation(rollout_manager.evaluate(args.start_rollout_id, before=True))

    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        with report.step(rollout_id):
            rollout = rollout_manager.generate(rollout_id)
            report.add(rollout.logged)
            if actor:
                actor.train(rollout_id, rollout, report.add)
            # The next batch needs its place in the object store.
            del rollout
            if actor and saves(args, rollout_id):
                with report.phase("save_model"):
                    actor.save(rollout_id)
                    rollout_manager.save(rollout_id)
                    report.saved(rollout_id)
                    actor.publish(rollout_id)
            if sync:
                report.add_metrics(sync.push())
        if evaluates(args, rollout_id):
            report.evaluation(rollout_manager.evaluate(rollout_id))


if __name__ == "__main__":
    sys.exit(main(train))
