from argparse import Namespace

import pytest

from slime.arguments.layout import layout_of

# A = 4 GPUs train, R = 2 or 6 serve: total, first GPU of an engine.
MODES = [
    ({"has_engines": False}, (4, 0)),
    ({"rollout_external": True, "has_trainer": False}, (4, 0)),
    ({"colocate": True}, (4, 0)),
    ({"colocate": True, "rollout_num_gpus": 6}, (6, 0)),
    ({"rollout_external": True}, (4, 4)),
    ({"has_trainer": False}, (2, 0)),
    ({}, (6, 4)),
]


@pytest.mark.parametrize("values, expected", MODES, ids=[" ".join(values) or "otherwise" for values, _ in MODES])
def test_layout(values, expected):
    usual = {
        "world_size": 4, "rollout_num_gpus": 2, "has_trainer": True, "has_engines": True, "rollout_external": False,
        "colocate": False,
    }  # fmt: skip
    layout = layout_of(Namespace(**{**usual, **values}))
    assert (layout.gpus, layout.first_rollout_gpu) == expected


def test_external_engines_take_none_of_the_runs_gpus():
    args = Namespace(world_size=4, rollout_num_gpus=8, has_trainer=True, has_engines=True, rollout_external=True)
    assert layout_of(args).rollout_gpus == 0
