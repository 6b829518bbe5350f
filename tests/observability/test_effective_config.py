"""The block that a run prints about its configuration."""

import argparse

from slime.observability.effective_config import effective_configuration


def test_only_what_differs_is_told_by_origin_and_without_secrets():
    args = argparse.Namespace(
        lr=1e-5, seed=1234, wandb_key="very-secret", tis_mode="clip", world_size=8, role_overrides={"critic": {"a": 1}},
        prompt="x" * 500, eval_datasets=[], custom_config={"tis_mode": "clip"}, typed_flags={"lr"},
    )  # fmt: skip
    args.origins = {
        "lr": "command line", "wandb_key": "command line", "seed": "default", "tis_mode": "YAML", "world_size": "derived",
        "role_overrides": "YAML", "prompt": "HF config", "eval_datasets": "derived", "custom_config": "YAML",
    }  # fmt: skip
    assert effective_configuration(args).splitlines() == [
        "configuration (what differs from the defaults):",
        "  command line: lr 1e-05, wandb_key <redacted>",
        '  YAML: role_overrides {"critic": {"a": 1}}, tis_mode clip',
        f"  HF config: prompt {'x' * 99}…",
        "  derived: world_size 8",
    ]
