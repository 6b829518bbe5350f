"""All rules together: what is broken is reported in one message; what only a plan can do without becomes a note."""

import argparse

from slime.arguments.config_files.custom_config import overruled_values
from slime.arguments.config_files.role_config import critic_values
from slime.arguments.config_files.serving_config import missing_models, serving_violations
from slime.arguments.not_yet import not_yet_violations
from slime.arguments.rules import Rule
from slime.arguments.rules.batch import BATCH_RULES
from slime.arguments.rules.checkpoints import CHECKPOINT_RULES
from slime.arguments.rules.data import DATA_RULES
from slime.arguments.rules.files import FILE_RULES
from slime.arguments.rules.megatron import MEGATRON_RULES
from slime.arguments.rules.model_name import MODEL_NAME_RULES
from slime.arguments.rules.not_built import NOT_BUILT_RULES
from slime.arguments.rules.objective import OBJECTIVE_RULES
from slime.arguments.rules.placement import PLACEMENT_RULES
from slime.arguments.rules.replay import REPLAY_RULES
from slime.arguments.rules.rollout import ROLLOUT_RULES
from slime.arguments.rules.serving import SERVING_RULES
from slime.arguments.rules.weights import WEIGHT_RULES
from slime.arguments.sizes import warn_of_idle_flags, warn_of_unusual_values
from slime.arguments.tracking import tracker_violations

# Own rules, then those of Megatron, then those of the engines.
RULES: tuple[Rule, ...] = (
    *PLACEMENT_RULES, *BATCH_RULES, *ROLLOUT_RULES, *OBJECTIVE_RULES, *REPLAY_RULES, *DATA_RULES, *CHECKPOINT_RULES,
    *WEIGHT_RULES, *MODEL_NAME_RULES, warn_of_idle_flags,
    warn_of_unusual_values,
    overruled_values, critic_values, tracker_violations, *MEGATRON_RULES, *SERVING_RULES, serving_violations,
)  # fmt: skip
# A plan needs neither the files of a run nor features that are not built; both are notes of a dry run.
NOTED_RULES: tuple[Rule, ...] = (*FILE_RULES, missing_models, *NOT_BUILT_RULES, not_yet_violations)


def violations_of(args: argparse.Namespace) -> list[str]:
    """Messages of all broken rules, in the order of the rules; under `--dry-run` some go to `args.plan_notes` instead."""
    violations = [message for rule in RULES for message in rule(args)]
    noted = [message for rule in NOTED_RULES for message in rule(args)]
    if args.dry_run:
        args.plan_notes = [*args.plan_notes, *noted]
        return violations
    return [*violations, *noted]
