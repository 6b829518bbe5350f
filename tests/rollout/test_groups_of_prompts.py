"""What is drawn and given back: groups made of plain prompts, and what is no group."""

import pytest

from slime.rollout.draws import draw_groups, give_back
from slime.utils.errors import UserError
from slime.utils.types import Sample
from tests.support.models.data_sources import Flat, make_args


def test_plain_prompts_become_numbered_groups_of_independent_copies():
    chat = [{"role": "user", "content": "hi"}]
    sample = Sample(prompt="b", metadata={"k": [1]})
    kept = [Sample(index=7, group_index=3), Sample(index=8, group_index=3)]
    groups = draw_groups(make_args(), Flat(["a", sample, chat, kept]), 4, rollout_id=1, drawn=5)
    assert [[s.prompt for s in group] for group in groups[:3]] == [["a", "a"], ["b", "b"], [chat, chat]]
    first = 2**20 + 5
    numbers = [[s.group_index for s in group] for group in groups]
    assert numbers == [[first] * 2, [first + 1] * 2, [first + 2] * 2, [3, 3]]
    assert [s.index for group in groups[:2] for s in group] == [2 * first, 2 * first + 1, 2 * first + 2, 2 * first + 3]
    groups[1][0].metadata["k"].append(2)
    assert groups[1][1].metadata == sample.metadata == {"k": [1]}
    assert groups[3] is kept


def test_groups_without_numbers_get_some_also_where_they_hold_one_object():
    one = Sample(prompt="a", metadata=None)
    groups = draw_groups(make_args(), Flat([[one, one], [Sample(prompt="b"), Sample(prompt="b")]]), 2, rollout_id=0)
    assert [[(s.group_index, s.index) for s in group] for group in groups] == [[(0, 0), (0, 1)], [(1, 2), (1, 3)]]
    assert groups[0][0].metadata == {} and one.index is None


def test_a_sample_that_cannot_be_used_is_named_with_its_source():
    with pytest.raises(
        UserError, match="^--data-source-path my.Source: get_samples returned sample 3 with metadata 'x'"
    ):
        draw_groups(make_args(), Flat([Sample(index=3, metadata="x")]), 1, 0)


def test_the_rollout_id_is_passed_where_it_is_accepted():
    seen = []

    class Source:
        def get_samples(self, num_samples, rollout_id=None):
            seen.append((num_samples, rollout_id))
            return []

    assert draw_groups(make_args(), Source(), 3, rollout_id=9) == []
    assert seen == [(3, 9)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("prompts", "--data-source-path my.Source: get_samples returned str; expected a list"),
        ([["a prompt", "another"]], "my.Source: get_samples returned a group that holds str; expected Samples"),
        ([[Sample()]], "my.Source: get_samples returned a group of 1 entries; expected a list of 2 Samples"),
        ([(Sample(), Sample())], "my.Source: get_samples returned a group of tuple; expected a list of 2 Samples"),
    ],
    ids=["no list", "no samples", "a small group", "a group that is no list"],
)
def test_what_is_no_list_of_groups_is_refused(given, message):
    class Source:
        def get_samples(self, num_samples):
            return given

    with pytest.raises(UserError, match=message):
        draw_groups(make_args(), Source(), 2, 0)


def test_groups_that_cannot_be_given_back_are_an_error():
    with pytest.raises(UserError, match=r"Flat has no add_samples\(groups\), but rollout 2 has 1 unfinished"):
        give_back(make_args(), Flat([]), [[Sample()]], 2)
