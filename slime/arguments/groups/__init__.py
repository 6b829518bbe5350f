"""The flags of our own, each declared once, in the order in which `--help` shows their groups."""

from slime.arguments.flag import Bounds, Caller, Flag, Group
from slime.arguments.groups import run_flags as run
from slime.arguments.groups import training_flags as training
from slime.arguments.megatron.names import BOUNDS as MEGATRON_BOUNDS

OWN_GROUPS: tuple[Group, ...] = (
    run.CONFIGURATION, run.CLUSTER, training.CHECKPOINTS, training.WEIGHTS, run.ROLLOUT, run.DATA, run.EVALUATION, run.REWARD,
    training.ALGORITHM, training.OFF_POLICY, training.DISTILLATION, training.FSDP, run.FAULT_TOLERANCE, run.NETWORK,
    run.LOGGING, run.DEBUGGING, training.MEGATRON_HOOKS,
)  # fmt: skip
# Attribute -> its flag. The group of the engines stands behind Megatron's, beside those that their packages tell.
OWN_FLAGS: dict[str, Flag] = {flag.dest: flag for group in (*OWN_GROUPS, run.SERVING) for flag in group.flags}
# Attribute -> bounds, of the flags of Megatron too.
BOUNDS: dict[str, Bounds] = {
    **{name: flag.bounds for name, flag in OWN_FLAGS.items() if flag.bounds is not None},
    **MEGATRON_BOUNDS,
}


def plug_ins_of(caller: Caller) -> tuple[str, ...]:
    """The attributes that name what these processes call."""
    return tuple(name for name, flag in OWN_FLAGS.items() if flag.plug_in is caller)
