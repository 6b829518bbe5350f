"""Attention of a server without a GPU. That a real server answers with it is shown by every test that starts one."""

import json
import subprocess
import sys

import pytest

from slime.utils.child_process import environment_for_python


@pytest.fixture(scope="module")
def figures() -> dict:
    """What one process finds, which imports sglang for longer than it computes."""
    settings = {"OMP_NUM_THREADS": "1", "SLIME_ACCELERATOR": "cpu", "SGLANG_USE_CPU_ENGINE": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.processes.attention_cases"],
        env={**environment_for_python(), **settings},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


CASES = ("decode", "extend", "latent", "chosen")


@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_a_plain_computation(figures, case):
    assert figures[case]["ours"] < 2e-6
    # Both round float32; neither order of summation is the better one.
    assert case == "chosen" or figures[case]["ours"] < 2 * figures[case]["native"]


@pytest.mark.parametrize("case", CASES)
def test_a_request_depends_on_nothing_beside_it(figures, case):
    assert figures[case]["alone"]
    assert figures[case]["in small calls"]
    assert figures[case]["two steps"]


@pytest.mark.parametrize("case", CASES)
def test_nan_of_another_request_and_of_places_behind_its_own_tokens_stay_away(figures, case):
    assert figures[case]["poisoned"]


def test_a_sliding_window_goes_the_old_way(figures):
    assert figures["window"]


def test_sizes_grow_by_an_eighth_of_an_octave(figures):
    assert figures["sizes"] == [32, 32, 64, 256, 512, 576, 1024, 1152, 5120]


def test_long_prompts_are_cut_into_pieces_that_end_at_their_own_position(figures):
    # Request, first row of the batch, queries, tokens that the last of them sees.
    assert figures["pieces"] == [
        [0, 0, 3, 3],
        [1, 3, 256, 356],
        [1, 259, 256, 612],
        [1, 515, 88, 700],
        [2, 603, 1, 9],
    ]


def test_of_the_table_of_places_no_more_is_read_than_the_longest_request_has(figures):
    # It is 900 wide.
    assert [3, 70] in figures["slots"] and max(width for _, width in figures["slots"]) == 899


def test_an_indexer_chooses_for_new_tokens_behind_cached_ones_what_a_plain_computation_does(figures):
    assert figures["indexer"] == {"halves": True, "pairs": True, "tokens": 38}
