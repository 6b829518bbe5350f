"""Messages about features that are not built."""

import argparse

from slime.arguments.not_yet import not_yet_violations
from slime.arguments.origins import Origin
from tests.support.args import parse


def violations(origin: Origin, **values) -> list[str]:
    origins = dict.fromkeys(values, origin)
    return list(not_yet_violations(argparse.Namespace(debug_train_only=False, origins=origins, **values)))


def test_a_typed_flag_can_be_dropped():
    (message,) = violations(Origin.COMMAND_LINE, num_experts=8)
    assert message.startswith("--num-experts 8: ") and "drop the flag" in message


def test_what_the_config_asks_for_has_no_flag_to_drop():
    (message,) = violations(Origin.HF_CONFIG, num_experts=8)
    assert message.startswith("config.json of --hf-checkpoint asks for --num-experts 8: ") and "drop" not in message


def test_every_step_is_logged_and_no_other_interval_is_accepted(tmp_path):
    assert violations(Origin.COMMAND_LINE, log_interval=1) == []
    assert violations(Origin.COMMAND_LINE, log_interval=100)
    assert parse(tmp_path).log_interval == 1
