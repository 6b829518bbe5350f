import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import orjson
import pytest

from slime.utils.engine_answers import TokenLogProbs, decode_engine_answer, num_requests

KEY = "output_token_logprobs"


def answer(entries, text="a text", **meta_info):
    return {"text": text, "meta_info": {"id": "x", KEY: entries, "finish_reason": {"type": "stop"}, **meta_info}}


def decoded(value, dump=orjson.dumps):
    parsed = []
    result = decode_engine_answer(dump(value), lambda content: parsed.append(content) or json.loads(content))
    return result, parsed


def as_json_sees_it(value):
    if isinstance(value, TokenLogProbs):
        # NaN for what the engine left out.
        log_probs = [None if np.isnan(number) else number for number in value.log_probs.tolist()]
        return [[log_prob, token, None] for log_prob, token in zip(log_probs, value.tokens.tolist(), strict=True)]
    return {key: as_json_sees_it(entry) for key, entry in value.items()} if isinstance(value, dict) else value


EDGE_VALUES = [0.0, -0.0, -1e-7, -5e-324, -1.7976931348623157e308, -0.1, -0.10000000149011612, -3, -12.25, None]


@pytest.mark.parametrize("dump", [orjson.dumps, lambda value: json.dumps(value).encode()])
def test_a_table_is_read_exactly_and_is_not_part_of_what_is_parsed(dump):
    entries = [[value, token, None] for token, value in enumerate(EDGE_VALUES)]
    value = answer(entries, input_token_logprobs=[[None, 5, None], [-0.5, 2**31, None]])
    result, parsed = decoded(value, dump)
    assert as_json_sees_it(result) == value
    assert isinstance(result["meta_info"][KEY], TokenLogProbs)
    assert isinstance(result["meta_info"]["input_token_logprobs"], TokenLogProbs)
    assert len(parsed) == 1 and b"-0.1" not in parsed[0] and b"2147483648" not in parsed[0]


@pytest.mark.parametrize("count", [1, 2, 7, 60_000])
def test_random_log_probs_are_those_of_the_engine_bit_by_bit(count):
    generator = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        log_probs = np.log(generator.random(count)).astype(dtype)
        tokens = generator.integers(0, 150_000, count)
        entries = [[p, t, None] for p, t in zip(log_probs.tolist(), tokens.tolist(), strict=True)]
        table = decoded(answer(entries))[0]["meta_info"][KEY]
        assert table.log_probs.dtype == dtype and (table.log_probs == log_probs).all()
        assert table.tokens.dtype == np.int64 and (table.tokens == tokens).all()


@pytest.mark.parametrize(
    "value",
    [
        answer([]),
        answer([[-0.5, 1]]),
        answer([[-0.5, 1, "text ]] of, a token"], [-0.5, 2, None]]),
        answer([[-0.5, 1, None, 4]]),
        answer([[-0.5, 1, None, 4, 5]]),
        answer([[-0.5, 1, 1234]]),
        answer([[-0.5, None, None]]),
        answer([[-0.5, 1.5, None]]),
        answer(None),
        answer({"no": "table"}),
        answer([-0.5, 1]),
        answer([[-0.5, 1, None], [[-0.5], 2, None]]),
        answer([[-0.5, 1, None], [-0.5, 2, [3]], [-0.5, 4, None]]),
        answer([[-0.5, 1, [2]], [-0.5, 3, None]]),
        answer([[-0.5, 1, None]], inner={KEY: [[-0.5, 2, None]]}),
        {"text": "no log-probs", "meta_info": {}},
        {KEY: [[-0.5, 1, None]]},
        {"meta_info": {"inner": {KEY: [[-0.5, 1, None]]}}},
        [answer([[-0.5, 1, None]]), answer([[-0.5, 2, None]])],
    ],
)
def test_what_is_no_such_table_is_parsed_as_json(value):
    assert decoded(value)[0] == value
    assert decoded(value, lambda value: json.dumps(value, indent=1).encode())[0] == value


@pytest.mark.parametrize(
    "mixed", [b"[-0.5, 12, null], [-0.5,34, null]", b"[-0.5,12,null],[-0.5, 34,null]", b"[ -0.5,12,null]"]
)
def test_blanks_that_come_and_go_change_no_number(mixed):
    content = orjson.dumps(answer([])).replace(b"[]", b"[%b]" % mixed)
    assert as_json_sees_it(decode_engine_answer(content, json.loads)) == json.loads(content)


def test_threads_read_their_answers_at_once():
    numbers = range(1, 65)
    contents = [orjson.dumps(answer([[-float(number), number, None]] * 30_000)) for number in numbers]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda content: decode_engine_answer(content, orjson.loads), contents))
    for number, result in zip(numbers, results, strict=True):
        assert set(result["meta_info"][KEY].tokens) == {number}


def test_a_text_that_speaks_of_the_key_is_a_text():
    text = f'He said "{KEY}": [[1, 2, 3]] and \\"{KEY}\\":[[1,2,3]]'
    value = answer([[-0.5, 7, None]], text=text)
    assert as_json_sees_it(decoded(value)[0]) == value
    assert decoded(answer(None, text=text))[0] == answer(None, text=text)


def test_a_broken_answer_is_left_to_the_json_parser():
    content = orjson.dumps(answer([[-0.5, 7, None]]))[:-3]
    assert decode_engine_answer(content, lambda content: "broken") in ("broken",)


def test_entries_that_were_parsed_become_arrays_too():
    table = TokenLogProbs.of([[-0.1, 3], [None, 4, "x"]])
    assert table.tokens.tolist() == [3, 4] and table.log_probs[0] == -0.1 and np.isnan(table.log_probs[1])
    assert len(TokenLogProbs.of(None)) == 0 and TokenLogProbs.of(table) is table


@pytest.mark.parametrize(
    ("log_probs", "dtype"),
    [([-0.5, -1.25], "float32"), ([0, -3], "float32"), ([-0.5, -0.1], "float64"), ([-0.5, None], "float32")],
    ids=["exact", "whole", "rounded", "missing"],
)
def test_log_probs_that_were_parsed_are_as_short_as_they_are_exact(log_probs, dtype):
    table = TokenLogProbs.of([[log_prob, 2**40 + token, None] for token, log_prob in enumerate(log_probs)])
    assert (table.log_probs.dtype, table.tokens.dtype) == (dtype, np.int64)
    np.testing.assert_array_equal(table.log_probs, np.array(log_probs, np.float64))
    assert table.tokens.tolist() == [2**40, 2**40 + 1]
    assert not table.log_probs.flags.writeable and not table.tokens.flags.writeable


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 3}, {"num_running_reqs": 1}]}, 6),
        ([{"num_reqs": 4}, {"num_total_reqs": 1}], 5),
        ({"loads": [{"total_reqs": 7, "num_running_reqs": 2}]}, 7),
        ({"loads": []}, 0),
    ],
)
def test_the_requests_of_all_ranks_are_counted(loads, expected):
    assert num_requests(loads) == expected


@pytest.mark.parametrize("page", ["<html>", None, 3, {}, ["x"], {"loads": None}, {"loads": [{"num_reqs": None}]}])
def test_an_answer_without_counts_is_not_that_of_an_idle_engine(page):
    with pytest.raises(ValueError, match="does not tell the requests"):
        num_requests(page)
