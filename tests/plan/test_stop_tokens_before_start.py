"""Stop token ids that the model of the run does not have."""

import json

import pytest

from slime.plan.before_start import check_before_start
from slime.utils.errors import UserError
from tests.support.models.args import parse, write_stand_ins


def told(directory, *words):
    args = parse(directory, *words)
    write_stand_ins(directory / "model")
    try:
        check_before_start(args)
    except UserError as error:
        return str(error).splitlines()
    return []


def test_ids_beyond_the_vocabulary_are_told_with_their_place(tmp_path):
    parse(tmp_path)
    size = json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"]
    words = ["--rollout-stop-token-ids", "0", str(size - 1)]
    assert told(tmp_path, *words) == []
    (line,) = told(tmp_path, *words, str(size), "999999")
    assert line.startswith(f"--rollout-stop-token-ids {size} 999999: the model of --hf-checkpoint {tmp_path}/model has")
    assert f"the tokens 0 to {size - 1} " in line
    assert told(tmp_path, *words, str(size), "--debug-train-only") == [], "nothing is generated"


@pytest.mark.parametrize("place", ["sets", "defaults"])
def test_ids_of_an_evaluation_set_are_told_by_its_file(tmp_path, place):
    parse(tmp_path)
    sets = tmp_path / "sets.yaml"
    one = f"    - name: held_out\n      path: {tmp_path}/prompts.jsonl\n"
    text = {
        "sets": f"eval:\n  datasets:\n{one}      stop_token_ids: [1, 999999]\n",
        "defaults": f"eval:\n  defaults:\n    stop_token_ids: [1, 999999]\n  datasets:\n{one}",
    }[place]
    sets.write_text(text)
    words = ["--eval-config", str(sets)]
    number = 1 + next(n for n, line in enumerate(text.splitlines()) if "stop_token_ids" in line)
    (line,) = told(tmp_path, *words, "--eval-interval", "2")
    assert line.startswith(f"{sets}:{number}: stop_token_ids 999999: the model of --hf-checkpoint")
