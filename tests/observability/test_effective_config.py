"""The block that a run prints about its configuration."""

import argparse

from slime.observability.run_record import derived_configuration, effective_configuration

ORIGINS = {
    "lr": "command line", "wandb_key": "command line", "seed": "default", "tis_mode": "YAML", "world_size": "derived",
    "role_overrides": "YAML", "prompt": "HF config", "eval_datasets": "derived", "custom_config": "YAML",
    "global_batch_size": "derived", "num_steps_per_rollout": "command line", "params_dtype_name": "derived",
}  # fmt: skip


def make_args():
    args = argparse.Namespace(
        lr=1e-5, seed=1234, wandb_key="very-secret", tis_mode="clip", world_size=8, role_overrides={"critic": {"a": 1}},
        prompt="x" * 500, eval_datasets=[], custom_config={"tis_mode": "clip"}, typed_flags={"lr"},
        global_batch_size=32, num_steps_per_rollout=2, params_dtype_name="float32",
    )  # fmt: skip
    args.origins = ORIGINS
    return args


def test_a_few_lines_tell_what_was_set_and_what_to_check_without_secrets():
    assert effective_configuration(make_args()).splitlines() == [
        "configuration (what differs from the defaults):",
        "  command line: lr 1e-05, num_steps_per_rollout 2, wandb_key <redacted>",
        '  YAML: role_overrides {"critic": {"a": 1}}, tis_mode clip',
        "  so: parameters in float32, global batch size 32",
    ]


def test_the_rest_is_told_apart():
    assert derived_configuration(make_args()).splitlines() == [
        "configuration (what follows):",
        f"  HF config: prompt {'x' * 99}…",
        "  derived: global_batch_size 32, params_dtype_name float32, world_size 8",
    ]
