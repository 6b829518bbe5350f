"""The flags of our own, each declared once, in the order in which `--help` shows their groups."""

from slime.arguments.flag import Bounds, Caller, Flag, Group
from slime.arguments.groups import objective_flags as objective
from slime.arguments.groups import rollout_flags as rollout
from slime.arguments.groups import run_flags as run
from slime.arguments.groups import training_flags as training
from slime.arguments.groups.sglang_flags import SERVING
from slime.arguments.megatron.names import BOUNDS as MEGATRON_BOUNDS

OWN_GROUPS: tuple[Group, ...] = (
    run.CONFIGURATION, run.CLUSTER, training.CHECKPOINTS, training.WEIGHTS, rollout.ROLLOUT, rollout.DATA, rollout.EVALUATION,
    rollout.REWARD, objective.ALGORITHM, objective.OFF_POLICY, objective.DISTILLATION, training.FSDP, run.FAULT_TOLERANCE,
    run.NETWORK, run.LOGGING, run.DEBUGGING, training.MEGATRON_HOOKS,
)  # fmt: skip
# Attribute -> its flag.
OWN_FLAGS: dict[str, Flag] = {flag.dest: flag for group in (*OWN_GROUPS, SERVING) for flag in group.flags}
# Attribute -> bounds, of the flags of Megatron too.
BOUNDS: dict[str, Bounds] = {
    **{name: flag.bounds for name, flag in OWN_FLAGS.items() if flag.bounds is not None},
    **MEGATRON_BOUNDS,
}


def plug_ins_of(caller: Caller) -> tuple[str, ...]:
    """The attributes that name what these processes call."""
    return tuple(name for name, flag in OWN_FLAGS.items() if flag.plug_in is caller)
