"""The groups of our own flags, in the order in which `--help` shows them."""

from slime.arguments.groups import (
    algorithm,
    checkpoints,
    cluster,
    configuration,
    data,
    debugging,
    distillation,
    evaluation,
    fault_tolerance,
    fsdp,
    logging,
    megatron_hooks,
    network,
    off_policy,
    reward,
    rollout,
    weights,
)

OWN_GROUPS = (
    configuration, cluster, checkpoints, weights, rollout, data, evaluation, reward, algorithm, off_policy, distillation,
    fsdp, fault_tolerance, network, logging, debugging, megatron_hooks,
)  # fmt: skip
