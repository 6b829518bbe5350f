"""Modes and sizes that follow from each other."""

import pytest

from slime.arguments import parse_args
from tests.support.args import command_line


def plan(tmp_path, words: str):
    """Derived arguments of a dry run that types no sizes but those in `words`."""
    base = command_line(tmp_path)
    for flag in ("--rollout-num-gpus", "--actor-num-gpus-per-node"):
        at = base.index(flag)
        del base[at : at + 2]
    return parse_args(argv=[*base, *words.split(), "--dry-run"])


def sizes(args):
    return args.actor_num_nodes, args.actor_num_gpus_per_node, args.rollout_num_gpus


def offloads(args):
    return args.offload_train, args.offload_rollout


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--colocate", (1, 8, 8)),
        ("--colocate --actor-num-nodes 2 --actor-num-gpus-per-node 4 --global-batch-size 8", (2, 4, 8)),
        ("--colocate --rollout-num-gpus 4", (1, 8, 4)),
        ("--debug-rollout-only --rollout-num-gpus 4", (1, 4, 4)),
        ("--debug-rollout-only --rollout-num-gpus 16", (2, 8, 16)),
        ("--debug-rollout-only --rollout-num-gpus 0", (0, 0, 0)),
        ("--debug-rollout-only --colocate --actor-num-gpus-per-node 2", (1, 2, 2)),
        ("--debug-rollout-only --rollout-external-engine-addrs a:1 --actor-num-gpus-per-node 4", (1, 4, None)),
        ("--debug-train-only", (1, 8, 0)),
        ("--debug-train-only --rollout-num-gpus 4", (1, 8, 0)),
    ],
)
def test_sizes(tmp_path, words, expected):
    assert sizes(plan(tmp_path, words)) == expected


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--rollout-num-gpus 8", (False, False)),
        ("--rollout-num-gpus 8 --offload", (True, True)),
        ("--rollout-num-gpus 8 --offload-train", (True, False)),
        ("--rollout-num-gpus 8 --offload --no-offload-train", (False, True)),
        ("--colocate --offload --no-offload-rollout", (True, False)),
        ("--colocate", (True, True)),
        ("--colocate --no-offload-rollout", (True, False)),
        ("--colocate --offload", (True, True)),
        ("--debug-rollout-only --colocate --offload", (False, False)),
        ("--rollout-num-gpus 8 --advantage-estimator ppo", (True, False)),
        (
            "--colocate --release-train --save /s --update-weight-transport disk --update-weight-disk-dir /d",
            (False, True),
        ),
    ],
)  # fmt: skip
def test_offloads(tmp_path, words, expected):
    args = plan(tmp_path, words)
    assert offloads(args) == expected
    assert not hasattr(args, "offload")
    assert (args.disable_param_buffer_cpu_backup, args.disable_grad_buffer_cpu_backup) == (expected[0],) * 2


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--colocate --actor-num-gpus-per-node 4", 4),
        ("--colocate --actor-num-gpus-per-node 4 --num-gpus-per-node 8", 8),
        ("--rollout-num-gpus 8 --actor-num-gpus-per-node 4", 8),
    ],
)
def test_the_node_size_of_colocated_engines(tmp_path, words, expected):
    assert plan(tmp_path, words).num_gpus_per_node == expected


def test_the_critic_shares_the_actors_gpus(tmp_path):
    args = plan(tmp_path, "--rollout-num-gpus 8 --advantage-estimator ppo --actor-num-gpus-per-node 4")
    assert args.use_critic and (args.critic_num_nodes, args.critic_num_gpus_per_node) == (1, 4)
    assert not plan(tmp_path, "--colocate").use_critic


def test_a_dump_means_training_only(tmp_path):
    args = plan(tmp_path, "--load-debug-rollout-data /d/{rollout_id}.pt")
    assert args.debug_train_only and args.has_trainer and not args.has_engines
