"""Custom data sources: what is asked of them, and groups made of plain prompts."""

from types import SimpleNamespace

import pytest

from slime.rollout.data_source_files import check_methods, draw_groups, give_back, prompts_per_epoch
from slime.utils.errors import UserError
from slime.utils.types import Sample


def make_args(**changes):
    values = {
        "data_source_path": "my.Source",
        "n_samples_per_prompt": 2,
        "save": None,
        "num_rollout": 2,
        "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 2,
        "dynamic_sampling_filter_path": None,
    }
    return SimpleNamespace(**{**values, **changes})


class Flat:
    """Gives what it was made with."""

    def __init__(self, entries):
        self.entries = entries

    def get_samples(self, num_samples):
        return self.entries[:num_samples]


def test_plain_prompts_become_numbered_groups_of_independent_copies():
    chat = [{"role": "user", "content": "hi"}]
    sample = Sample(prompt="b", metadata={"k": [1]})
    kept = [Sample(index=7, group_index=3), Sample(index=8, group_index=3)]
    groups = draw_groups(make_args(), Flat(["a", sample, chat, kept]), 4, rollout_id=1, drawn=5)
    assert [[s.prompt for s in group] for group in groups[:3]] == [["a", "a"], ["b", "b"], [chat, chat]]
    first = 2**20 + 5
    assert [[s.group_index for s in group] for group in groups] == [
        [first] * 2,
        [first + 1] * 2,
        [first + 2] * 2,
        [3, 3],
    ]
    assert [s.index for group in groups[:2] for s in group] == [2 * first, 2 * first + 1, 2 * first + 2, 2 * first + 3]
    groups[1][0].metadata["k"].append(2)
    assert groups[1][1].metadata == sample.metadata == {"k": [1]}
    assert groups[3] is kept


def test_the_rollout_id_is_passed_where_it_is_accepted():
    seen = []

    class Source:
        def get_samples(self, num_samples, rollout_id=None):
            seen.append((num_samples, rollout_id))
            return []

    assert draw_groups(make_args(), Source(), 3, rollout_id=9) == []
    assert seen == [(3, 9)]


def test_what_is_no_list_is_refused():
    class Source:
        def get_samples(self, num_samples):
            return "prompts"

    with pytest.raises(UserError, match="--data-source-path my.Source: get_samples returned str; expected a list"):
        draw_groups(make_args(), Source(), 2, 0)


def test_missing_methods_are_reported_at_the_start():
    class Nothing: ...

    with pytest.raises(UserError, match=r"--data-source-path my.Source: Nothing has no get_samples\(num_samples\)$"):
        check_methods(make_args(), Nothing())
    flat = Flat([])
    check_methods(make_args(), flat)
    with pytest.raises(UserError, match=r"Flat has no add_samples\(groups\)"):
        check_methods(make_args(over_sampling_batch_size=4), flat)
    check_methods(make_args(over_sampling_batch_size=4, rollout_function_path="my.rollout"), flat)
    check_methods(make_args(dynamic_sampling_filter_path="my.filter"), flat)
    with pytest.raises(UserError, match=r"Flat has no state_dict\(\) and load_state_dict\(state\), or save"):
        check_methods(make_args(save="out"), flat)
    flat.state_dict = flat.load_state_dict = lambda *state: {}
    check_methods(make_args(save="out"), flat)


def test_groups_that_cannot_be_given_back_are_an_error():
    with pytest.raises(UserError, match=r"Flat has no add_samples\(groups\), but rollout 2 has 1 unfinished"):
        give_back(make_args(), Flat([]), [[Sample()]], 2)


def test_a_source_without_length_needs_a_number_of_rollouts():
    assert prompts_per_epoch(make_args(), Flat([])) is None
    with pytest.raises(UserError, match="Flat has no __len__; give --num-rollout"):
        prompts_per_epoch(make_args(num_rollout=None), Flat([]))
