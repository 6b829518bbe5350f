import re

import pytest

from slime.arguments.parser import build_parser
from slime.arguments.retired import DERIVED, RETIRED, replacement_of
from slime.backends.sglang_utils.flag_surface import NOT_EXPOSED
from slime.utils.errors import UserError
from tests.support.args import parse

FLAG = re.compile(r"--[a-z][a-z0-9-]*\*?")


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["--rollout-external"], "--rollout-external-engine-addrs"),
        (["--slime-router-policy", "random"], "--router-*"),
        (["--critic-lr=1e-5"], "--megatron-config-path"),
        (["--critic-num-nodes", "1"], "--num-critic-only-steps"),
        (["--over-sampling-filter-path", "f.py"], "--dynamic-sampling-filter-path"),
        (["--ci-metric-checker-key", "x"], "--custom-rollout-log-function-path"),
        (["--config", "x.yaml"], "--custom-config-path"),
        (["--warmup-ratio", "0.1"], "--lr-warmup-fraction"),
        (["--use-http2"], "drop it"),
    ],
)
def test_a_retired_flag_names_its_replacement(tmp_path, words, instead):
    with pytest.raises(UserError) as error:
        parse(tmp_path, *words)
    (message,) = str(error.value).splitlines()
    flag = words[0].split("=")[0]
    assert message.startswith(f"{flag} does not exist any more") and instead in message


def test_no_retired_flag_is_known_and_every_replacement_is():
    known = build_parser()._option_string_actions
    assert [name for name in RETIRED if name in known] == []
    patterns = tuple(name[:-1] for name in RETIRED if name.endswith("*"))
    assert [flag for flag in known if flag.startswith(patterns)] == []
    named = {flag for text in RETIRED.values() for flag in FLAG.findall(text)}
    assert [flag for flag in named if not flag.endswith("*") and flag not in known] == []


def test_a_family_covers_every_ending_and_nothing_else():
    assert replacement_of("--slime-router-anything") is not None
    assert replacement_of("--slime-routers") is None and replacement_of("--config-file") is None


def test_settings_of_a_server_that_follow_from_the_run(tmp_path):
    words = ["--sglang-model-path", "x", "--sglang-port", "1", "--sglang-random-seed", "2", "--sglang-nnodes", "3"]
    with pytest.raises(UserError) as error:
        parse(tmp_path, *words)
    lines = str(error.value).splitlines()
    assert [line.split(" is set by the run: ")[0] for line in lines] == words[::2]
    assert "--hf-checkpoint" in lines[0] and "--seed" in lines[2]


def test_every_setting_that_is_not_exposed_has_a_reason():
    # --sglang-config is a flag of ours.
    assert set(DERIVED) == {"--sglang-" + name.replace("_", "-") for name in NOT_EXPOSED - {"config"}}
