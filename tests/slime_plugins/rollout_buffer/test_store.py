"""What the buffer keeps: no group is lost, none is handed out twice, also over a restart."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from slime.utils.errors import UserError
from slime_plugins.rollout_buffer.store import Store
from tests.support.processes.buffer_service import group_of, item


def as_it_is(instance_id, items):
    return items


def begun(path=None, size=2):
    store = Store(path)
    store.begin({"run_id": "run", "task_type": "idle", "num_repeat_per_sample": size})
    return store


@pytest.fixture
def store():
    with_groups = begun()
    yield with_groups
    with_groups.close()


def filled(store, *instances, settle=as_it_is):
    for instance in instances:
        for one in group_of(instance):
            assert store.add(one, settle)


def names(groups):
    return [group.instance_id for group in groups]


def test_groups_leave_whole_and_in_the_order_in_which_they_began(store):
    a, b = group_of("a"), group_of("b")
    for one in (a[0], b[0], b[1]):
        store.add(one, as_it_is)
    assert store.hand_out("first", 2) == []
    store.add(a[1], as_it_is)
    groups = store.hand_out("first", 2)
    assert names(groups) == ["a", "b"] and groups[0].items == a
    assert store.counts() == {"open": 0, "waiting": 0, "handed": 2, "received": 0, "dropped": 0}


def test_a_request_that_is_made_again_gets_the_same_groups_until_they_are_received(store):
    filled(store, "a", "b", "c")
    first = store.hand_out("first", 2)
    assert store.hand_out("first", 2) == first
    assert names(store.hand_out("second", 1)) == ["c"]
    store.received(["first"])
    with pytest.raises(UserError, match="request 'first' was told as received"):
        store.hand_out("first", 2)
    assert store.hand_out("third", 1) == []


def test_a_request_with_another_size_is_another_request(store):
    filled(store, "a", "b")
    store.hand_out("first", 1)
    with pytest.raises(UserError, match="was answered with 1 groups, not 2"):
        store.hand_out("first", 2)


def test_too_few_groups_stay_where_they_are(store):
    filled(store, "a")
    assert store.hand_out("first", 2) == [] and store.counts()["waiting"] == 1
    filled(store, "b")
    assert names(store.hand_out("first", 2)) == ["a", "b"]


def test_an_item_that_is_sent_again_is_kept_once_whatever_became_of_its_group(store):
    one, two = group_of("a")
    assert store.add(one, as_it_is) and not store.add(one, as_it_is)
    assert store.add(two, as_it_is) and not store.add(two, as_it_is)
    store.hand_out("first", 1)
    assert not store.add(one, as_it_is)
    store.received(["first"])
    assert not store.add(two, as_it_is)
    assert sum(store.counts().values()) == 1


def test_an_instance_that_comes_again_is_another_group(store):
    filled(store, "a")
    assert store.add(item("next epoch", "a"), as_it_is)
    assert store.counts()["open"] == 1 and store.counts()["waiting"] == 1
    assert store.finished_instances() == ["a"]


def test_a_group_is_settled_when_it_is_full(store):
    seen = []

    def settle(instance_id, items):
        seen.append((instance_id, [one["uid"] for one in items]))
        return None if instance_id == "a" else items[::-1]

    filled(store, "a", "b", settle=settle)
    assert seen == [("a", ["a.0", "a.1"]), ("b", ["b.0", "b.1"])]
    assert store.counts()["dropped"] == 1 and store.finished_instances() == ["a", "b"]
    (group,) = store.hand_out("first", 1)
    assert [one["uid"] for one in group.items] == ["b.1", "b.0"]


def test_an_item_whose_group_cannot_be_settled_is_not_kept(store):
    def broken(instance_id, items):
        raise UserError("broken")

    one, two = group_of("a")
    store.add(one, broken)
    with pytest.raises(UserError, match="broken"):
        store.add(two, broken)
    assert store.counts()["open"] == 1
    assert store.add(two, as_it_is) and store.counts()["waiting"] == 1


def test_a_new_run_begins_with_nothing(store):
    filled(store, "a")
    store.begin({"run_id": "next", "task_type": "idle", "num_repeat_per_sample": 3})
    assert sum(store.counts().values()) == 0 and store.group_size == 3
    assert store.add(item("a.0", "a"), as_it_is)


def test_a_service_that_is_killed_leaves_everything_it_answered(tmp_path):
    state = tmp_path / "state" / "buffer.sqlite"
    script = f"""
import os
from slime_plugins.rollout_buffer.store import Store
from tests.support.processes.buffer_service import group_of, item
store = Store({str(state)!r})
store.begin({{"run_id": "run", "task_type": "idle", "num_repeat_per_sample": 2}})
for one in [*group_of("a"), *group_of("b"), *group_of("c"), item("d.0", "d")]:
    store.add(one, lambda instance_id, items: items)
store.hand_out("first", 1)
store.hand_out("second", 1)
store.received(["first"])
os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3], timeout=60)
    assert done.returncode == 9
    store = Store(state)
    assert store.run["run_id"] == "run"
    assert store.counts() == {"open": 1, "waiting": 1, "handed": 1, "received": 1, "dropped": 0}
    assert names(store.hand_out("second", 1)) == ["b"] and names(store.hand_out("third", 1)) == ["c"]
    assert store.finished_instances() == ["a", "b", "c"]
    # Its generator is gone, and makes the group again.
    assert store.forget_open() == 1 and store.add(item("d.0", "d"), as_it_is)
    store.close()


def test_one_service_has_the_file(tmp_path):
    store = begun(tmp_path / "buffer.sqlite")
    with pytest.raises(UserError, match="--state .*locked; give a file that no other service uses"):
        Store(tmp_path / "buffer.sqlite")
    store.close()


@pytest.mark.parametrize("content", [b"not a buffer, though long enough to be taken for one" * 40, "format"])
def test_what_is_no_buffer_is_refused(tmp_path, content):
    file = tmp_path / "buffer.sqlite"
    if content == "format":
        begun(file).close()
        with sqlite3.connect(file) as database:
            database.execute("UPDATE facts SET value = '99' WHERE name = 'format'")
        database.close()
    else:
        file.write_bytes(content)
    with pytest.raises(UserError, match="--state .*(not a database|format 99, expected 1)"):
        Store(file)
