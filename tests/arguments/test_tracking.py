"""Which trackers a run has."""

from types import SimpleNamespace

import pytest

from slime.arguments.tracking import settle_trackers, tracker_violations


@pytest.mark.parametrize(
    ("typed", "wandb", "installed", "written"),
    [
        (None, False, True, True), (None, True, True, False), (None, False, False, False),
        (True, True, True, True), (False, False, True, False),
    ],
)  # fmt: skip
def test_event_files_are_written_unless_another_tracker_is_chosen(monkeypatch, typed, wandb, installed, written):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    args = SimpleNamespace(use_tensorboard=typed, use_wandb=wandb)
    settle_trackers(args)
    assert args.use_tensorboard is written


def violations(**changes):
    values = {"use_wandb": True, "use_tensorboard": True, "wandb_host": None, "typed_flags": set()}
    return list(tracker_violations(SimpleNamespace(**{**values, **changes})))


def test_missing_packages_are_named(monkeypatch):
    assert violations() == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert violations() == [
        "--use-wandb needs the package wandb: pip install wandb",
        "--use-tensorboard needs the package tensorboard: pip install tensorboard",
    ]


def test_the_host_is_an_address():
    (message,) = violations(wandb_host="wandb.example.com")
    assert "--wandb-host wandb.example.com: it must start with http" in message


def test_flags_without_effect_are_warned_about(caplog):
    assert violations(use_wandb=False, typed_flags={"wandb_key", "wandb_group", "lr"}) == []
    assert "--wandb-group, --wandb-key: no effect without --use-wandb" in caplog.text
