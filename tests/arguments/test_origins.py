import argparse

from slime.arguments.origins import Origin, recording, start_origins


def test_each_phase_leaves_its_name_and_typed_values_stay_the_users():
    args = argparse.Namespace(load="run", lr=1.0, seed=1, layers=None, epsilon=0.1, devices=[0], evaluated=[["a"]])
    start_origins(args, {"load", "lr"})
    with recording(args, Origin.YAML):
        args.lr = 2.0
    with recording(args, Origin.DERIVED):
        args.load = "/abs/run"
        with recording(args, Origin.HF_CONFIG):
            args.layers = 2
        args.world_size = 8
        args.devices.append(1)
    assert args.origins == {
        "load": Origin.COMMAND_LINE,
        "lr": Origin.YAML,
        "seed": Origin.DEFAULT,
        "layers": Origin.HF_CONFIG,
        "epsilon": Origin.DEFAULT,
        "devices": Origin.DERIVED,
        "evaluated": Origin.DEFAULT,
        "world_size": Origin.DERIVED,
    }
    assert args.typed_flags == {"load", "lr"}
