import pytest

from slime_plugins.rollout_buffer.items import ItemError, checked_item, has_answer
from tests.support.processes.buffer_service import item


def test_an_item_keeps_what_it_has():
    given = item("u", "i", reward={"score": 1.0, "why": "right"}, round_number=3)
    assert checked_item(given) == given


def test_ids_become_text_and_extra_info_is_there():
    found = checked_item(item(7, 0, extra_info=None))
    assert (found["uid"], found["instance_id"], found["extra_info"]) == ("7", "0", {})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "an item is an object"),
        (item("", "i"), "`uid` of an item is ''"),
        (item("u", None), "`instance_id` of an item is None"),
        (item("u", True), "`instance_id` of an item is True"),
        (item("u", "i", messages=[]), "item u of instance i: `messages` is"),
        (item("u", "i", messages="hello"), "expected a list of chat messages"),
        (item("u", "i", messages=[{"content": "hello"}]), "message 0 is .* expected an object with a `role`"),
        (item("u", "i", reward="good"), "`reward` is 'good'; expected a finite number"),
        (item("u", "i", reward=float("nan")), "`reward` is nan"),
        (item("u", "i", reward={"score": float("inf")}), "`reward` is {'score': inf}"),
        (item("u", "i", reward={"why": "right"}), "`reward` is {'why': 'right'}"),
        (item("u", "i", extra_info=[1]), "`extra_info` is"),
        ({name: value for name, value in item("u", "i").items() if name != "reward"}, "`reward` is missing; send null"),
    ],
)
def test_what_is_no_item_is_told(value, message):
    with pytest.raises(ItemError, match=message):
        checked_item(value)


def test_an_item_without_a_reward_or_an_answer_cannot_be_trained_on():
    assert has_answer(item("u", "i", reward=0.0))
    assert not has_answer(item("u", "i", reward=None))
    assert not has_answer(item("u", "i", messages=[{"role": "user", "content": "hello"}]))
