"""The search example: what a turn asks for, what is found, what is trained, and what an answer is worth."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.utils.async_utils import slots
from slime.utils.http_utils import HttpError
from slime.utils.plugin_loader import load_function
from slime.utils.types import Sample
from tests.support.models.args import parse
from tests.support.models.tokenizer import build_tokenizer
from tests.support.models.toy_rows import toy_rows
from tests.support.processes.http_server import serving_app
from tests.support.processes.spoken import spoken

EXAMPLE = Path(__file__).parents[3] / "examples/search-r1"


def load(name):
    module, _, attribute = name.partition(":")
    return load_function(f"{EXAMPLE}/{module}.py:{attribute}")


action, is_exact_match, reward_func = (
    load(f"generate_with_search:{n}") for n in ("action", "is_exact_match", "reward_func")
)
generate, search = load("generate_with_search:generate"), load("generate_with_search:search")
as_information = load("generate_with_search:as_information")
BM25, make_app, read_corpus = load("retriever:BM25"), load("retriever:make_app"), load("retriever:read_corpus")
DOCUMENTS = [
    {"id": "a", "contents": "Paris is the capital of France"},
    {"id": "b", "contents": "Berlin is the capital of Germany, and Berlin is large"},
    {"id": "c", "contents": "Bananas are yellow"},
]
SETTINGS = {"search_topk": 2, "search_concurrency": 2, "search_format_score": 0.2}


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ("<search> who is it </search>", ("search", "who is it")),
        ("<search>a</search><search>b</search>", ("search", "b")),
        ("I know.<answer>x\ny</answer>", ("answer", "x\ny")),
        ("<search>open", None),
        ("<search>a</answer>", None),
        ("<search>a<search>b</search>", ("search", "a<search>b")),
        ("<search>a</search><search>b<answer>c</answer>", ("answer", "c")),
        ("<answer>a</answer><answer>b<search>c</search>", ("search", "c")),
        ("<search></search>", ("search", "")),
        ("nothing", None),
    ],
)
def test_the_last_complete_action_counts(said, asked):
    assert action(said) == asked


def test_a_model_that_repeats_itself_holds_nobody_up():
    said, started = "<answer>a</answer>" + "<search>" * 20_000, time.process_time()
    assert action(said) == ("answer", "a")
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("answer", "label", "exact"),
    [
        ("The  Eiffel tower.", "eiffel tower", True),
        ("Paris", ["Lyon", "paris"], True),
        ("58", {"target": [58]}, True),
        ("paris france", "paris", False),
        ("", "paris", False),
    ],
)
def test_an_exact_match_is_one_up_to_case_punctuation_and_articles(answer, label, exact):
    assert is_exact_match(answer, label) is exact


@pytest.mark.parametrize(
    ("response", "evaluation", "reward"),
    [
        ("<search>x</search>…<answer>Paris</answer>", False, 1.0),
        ("<answer>Rome</answer>", False, 0.2),
        ("<answer>Rome</answer>", True, 0.0),
        ("<answer>Paris</answer>", True, 1.0),
        ("<answer>Paris</answer><search>on</search>", False, 0.0),
        ("Paris", False, 0.0),
    ],
)
def test_the_last_answer_is_graded_and_its_form_is_worth_something_in_training(response, evaluation, reward):
    sample = Sample(response=response, label="paris")
    assert asyncio.run(reward_func(SimpleNamespace(**SETTINGS), sample, evaluation=evaluation)) == reward


def test_the_name_in_common_use_has_the_same_functions():
    def place(function):
        return Path(function.__code__.co_filename).name, function.__code__.co_firstlineno

    for name, function in (("generate", generate), ("reward_func", reward_func)):
        assert place(load(f"search_r1_logic:{name}")) == place(function)


def test_bm25_ranks_by_rare_and_frequent_words():
    index = BM25(DOCUMENTS)
    assert [hit["document"]["id"] for hit in index.search("capital Berlin", 3)] == ["b", "a"]
    assert [hit["document"]["id"] for hit in index.search("the CAPITAL", 1)] == ["a"]
    assert index.search("nowhere", 3) == []
    # By hand: N = 3, "bananas" is in one document of 3 words, once; all have 19 words.
    idf, norm = 0.9808292530117262, 1.2 * (1 - 0.75 + 0.75 * 3 / (19 / 3))
    assert index.search("bananas", 1)[0]["score"] == pytest.approx(idf * 2.2 / (1 + norm))


def test_a_broken_line_of_the_corpus_is_named(tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"contents": "x"}\n{"text": "y"}\n')
    with pytest.raises(ValueError, match="corpus.jsonl:2"):
        read_corpus(file)


def test_only_the_end_of_a_line_ends_a_document(tmp_path):
    """JSON has other characters as they are, at which a text would be cut."""
    documents = [{"contents": f"a{mark}b"} for mark in "\u2028\u2029\x85"]
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in documents), encoding="utf-8")
    assert read_corpus(file) == documents


def asked_retriever(function, **settings):
    """What `function(args)` returns with a retriever of the three documents."""

    async def main():
        async with serving_app(make_app(BM25(DOCUMENTS))) as url:
            return await function(SimpleNamespace(**{**SETTINGS, **settings, "search_url": f"{url}/retrieve"}))

    return asyncio.run(main())


def test_the_retriever_is_asked_for_as_many_documents_as_the_settings_say():
    found = asked_retriever(lambda args: search(args, "the capital"), search_topk=1)
    assert [hit["document"]["id"] for hit in found] == ["a"]


def test_the_retriever_refuses_what_is_no_query():
    with pytest.raises(HttpError, match="queries"):
        asked_retriever(lambda args: search(args, None))


def test_no_more_searches_than_the_settings_say_are_under_way():
    async def main(args):
        under_way = most = 0

        async def hold():
            nonlocal under_way, most
            async with slots("search", args.search_concurrency):
                under_way += 1
                most = max(most, under_way)
                await asyncio.sleep(0)
                under_way -= 1

        await asyncio.gather(*(hold() for _ in range(6)), search(args, "capital"))
        return most

    assert asked_retriever(main) == 2


@pytest.mark.usefixtures("fresh_state")
def test_r11_turns_end_at_the_marks_and_what_was_found_is_not_trained(checkpoint):
    async def with_retriever(args, sample, sampling_params):
        async with serving_app(make_app(BM25(DOCUMENTS))) as url:
            vars(args).update(SETTINGS, search_url=f"{url}/retrieve")
            return await generate(args, sample, sampling_params)

    said = ["<search>bananas</search>", "<answer>yellow</answer>"]
    sample = Sample(index=0, prompt=[{"role": "user", "content": "Color?"}], label="yellow")
    answer, requests = spoken(checkpoint, with_retriever, sample, said, max_turns=2, rollout_stop=["###"])
    assert [request["sampling_params"]["stop"] for request in requests] == [["###", "</search>", "</answer>"]] * 2
    found = "<information>Bananas are yellow</information>"
    assert answer.response.startswith(said[0]) and found in answer.response and answer.response.endswith(said[1])
    trained = [
        token for token, mask in zip(answer.tokens[-answer.response_length :], answer.loss_mask, strict=True) if mask
    ]
    tokenizer = build_tokenizer()
    assert trained == [token for text in said for token in tokenizer.encode(text, add_special_tokens=False)]
    # The log-probs that corrections need are there, for the model's own tokens alone.
    assert [value != 0.0 for value in answer.rollout_log_probs] == [mask == 1 for mask in answer.loss_mask]
    assert answer.metadata["round_number"] == 2


@pytest.mark.usefixtures("fresh_state")
def test_a_turn_that_is_neither_is_told_so(checkpoint):
    sample = Sample(index=0, prompt=[{"role": "user", "content": "?"}])
    answer, _ = spoken(checkpoint, generate, sample, ["hm", "<answer>1</answer>"], max_turns=2)
    assert "neither a search nor an answer" in answer.response
    answer.label = "answer"
    assert asyncio.run(reward_func(SimpleNamespace(**SETTINGS), answer)) == 0.2, (
        "the model's answer, and not what it was told"
    )
    sample = Sample(index=0, prompt=[{"role": "user", "content": "?"}])
    answer, _ = spoken(checkpoint, generate, sample, ["hm", "hm"], max_turns=2)
    assert action(answer.response) is None


def test_marks_in_a_document_are_no_actions():
    shown = as_information([{"document": {"contents": "a <answer>b</answer> <search>c</search>"}}])
    assert action(shown) is None and "a b c" in shown


def test_a_run_takes_the_settings(tmp_path):
    args = parse(tmp_path, "--custom-config-path", str(EXAMPLE / "search.yaml"))
    assert args.search_url == "http://127.0.0.1:8000/retrieve"
    assert (args.search_topk, args.search_concurrency, args.search_format_score) == (3, 256, 0.2)


def test_demonstrations_see_what_the_retriever_finds_and_a_third_of_them_end_right(tmp_path):
    toy_task = SimpleNamespace(write_data=load("toy_task:write_data"))
    task = toy_rows(tmp_path, toy_task)
    index = BM25(task["corpus"])
    codes = dict(document["contents"].split() for document in task["corpus"])
    right = 0
    for row in task["sft"]:
        messages = row["messages"]
        if len(messages) == 4:
            kind, query = action(messages[1]["content"])
            [hit] = index.search(query, 3)
            assert (
                kind == "search"
                and messages[2]["content"] == f"<information>{hit['document']['contents']}</information>"
            )
        room = messages[0]["content"].removesuffix("?").split()[-1]
        right += action(messages[-1]["content"]) == ("answer", codes[room])
    assert 0.25 < right / len(task["sft"]) < 0.4
    rooms = {name: {row["prompt"][0]["content"] for row in task[name]} for name in ("train", "eval")}
    demonstrated = {row["messages"][0]["content"] for row in task["sft"]}
    assert len(rooms["eval"]) == 64 and not rooms["eval"] & (rooms["train"] | demonstrated)
