"""Every way in which a flag of our own takes its value. Names, types and defaults of all are frozen in `command_line.txt`."""

import pytest

from slime.arguments import build_parser

BASE = ["--rollout-batch-size", "8"]
ON = object()  # a switch: off by default, True when given

# words on the command line, attribute (None: that of the flag), value, default.
FLAGS = [
    ("--actor-num-nodes 2", None, 2, 1),
    ("--colocate", None, ON, None),
    ("--offload-train", None, True, None),
    ("--no-offload-train", "offload_train", False, None),
    ("--engine-start-timeout 90", None, 90.0, None),
    ('--train-env-vars {"A":"1"}', None, {"A": "1"}, {}),
    ("--freeze-params-name-list a b", None, ["a", "b"], None),
    ("--rollout-stop-token-ids 1 2", None, [1, 2], None),
    ("--rollout-sample-hook-path m.f --rollout-sample-hook-path m.g", None, ["m.f", "m.g"], []),
    ("--disable-rollout-global-dataset", "rollout_global_dataset", False, True),
    ("--prompt-data a.jsonl b.jsonl@[0:5]", None, ["a.jsonl", "b.jsonl@[0:5]"], None),
    ('--apply-chat-template-kwargs {"enable_thinking":false}', None, {"enable_thinking": False}, {}),
    ("--eval-prompt-data a P --eval-prompt-data b Q", None, ["a", "P", "b", "Q"], None),
    ("--save d", None, "d", None),
    ("--lr 1e-5", None, 1e-5, 1e-6),
    ("--loss-type sft_loss", None, "sft_loss", "policy_loss"),
    ("--entropy-coef 0.01", None, 0.01, 0.0),
    ("--no-use-tensorboard", "use_tensorboard", False, None),
    ("--log-level DEBUG", None, "DEBUG", "INFO"),
    ("--offload-optimizer-states", "optimizer_cpu_offload", ON, None),
]


@pytest.fixture(scope="module")
def parser():
    return build_parser()


@pytest.fixture(scope="module")
def defaults(parser):
    return parser.parse_args(BASE)


@pytest.mark.parametrize("words, attribute, value, default", FLAGS, ids=[row[0] for row in FLAGS])
def test_flag(parser, defaults, words, attribute, value, default):
    attribute = attribute or words.split()[0].removeprefix("--").replace("-", "_")
    value, default = (True, False) if value is ON else (value, default)
    found = getattr(parser.parse_args([*BASE, *words.split(" ")]), attribute)
    assert (found, type(found)) == (value, type(value))
    before = getattr(defaults, attribute)
    assert (before, type(before)) == (default, type(default))


@pytest.mark.parametrize("words", ["--train-backend deepspeed", "--kl-loss-type k4", "--log-level LOUD", "--seed one"])
def test_values_outside_a_flags_range_are_refused(parser, words):
    with pytest.raises(ValueError, match=words.split()[0]):
        parser.parse_args([*BASE, *words.split()])
