"""A rank's walk through the buckets, with a transport that carries nothing."""

import weakref

import pytest
import torch

from slime.utils.errors import RunError
from slime.weights.buckets import RankBucket, names_of
from slime.weights.source import WeightSource
from slime.weights.transports import EnginesFailed, Transport

BUCKETS = [[("a", torch.zeros(2)), ("b", torch.zeros(1))], [], [("c", torch.zeros(3))]]


class Recording(Transport):
    """Fails where `problems` has an error: at a method, or at the bucket of a name."""

    def __init__(self, problems=()):
        self.problems, self.calls = dict(problems), []

    def _call(self, call, key):
        self.calls.append(call)
        if key in self.problems:
            raise self.problems[key]

    def connect(self, engines):
        self._call("connect", "connect")

    def begin(self, version):
        self._call(("begin", version), "begin")

    def send(self, bucket):
        self._call([name for name, _ in bucket], bucket[0][0])

    def finish(self):
        self._call("finish", "finish")

    def discard(self):
        self._call("discard", "discard")


class Walk:
    """Counts the buckets that were made."""

    def __init__(self):
        self.made = 0

    def __call__(self):
        for bucket in BUCKETS:
            self.made += 1
            yield bucket


def test_s2_every_bucket_is_sent_and_an_empty_one_is_not():
    transport = Recording()
    sent = WeightSource(Walk(), transport, {"a", "b", "c"}).send(3)
    assert transport.calls == [("begin", 3), ["a", "b"], ["c"], "finish"]
    assert (sent.names, sent.num_bytes, sent.num_buckets) == (["a", "b", "c"], 24, 2)
    assert sent.failed == {} and sent.refusal is None


def test_s2_a_rank_that_only_helps_makes_all_buckets():
    walk = Walk()
    source = WeightSource(walk, None)
    assert source.send(1) is None and walk.made == 3
    assert source.connect([]) is None
    source.settle()
    source.close()


@pytest.mark.parametrize("transport", [None, "takes part"])
def test_a_rank_that_only_helps_queues_no_more_than_one_bucket(monkeypatch, transport):
    """A watchdog ends collectives that have been queued for long."""
    marks = []

    class Device:
        def mark(self):
            marks.append("set")
            return lambda: marks.append("reached")

    monkeypatch.setattr("slime.weights.source.get_accelerator", Device)
    walk = Walk()
    WeightSource(walk, transport and TakingPart(), {"a", "b", "c"}, sends=False).send(1)
    assert walk.made == 3 and marks == ["set", "reached"] * 2


class TakingPart(Recording):
    def send(self, bucket):
        self.calls.append(("send", names_of(bucket)))

    def help(self, bucket):
        self.calls.append(("help", names_of(bucket)))


@pytest.mark.parametrize("sends", [True, False], ids=["sends", "only helps"])
def test_s2_a_rank_takes_part_in_a_bucket_of_which_it_has_nothing(sends):
    """Others have experts of it, and meet this rank in the exchange of its memory."""
    transport = TakingPart()
    buckets = [RankBucket([], ["a"], 8), RankBucket([("b", torch.zeros(1))], ["b", "c"], 8)]
    sent = WeightSource(lambda: buckets, transport, {"a", "b", "c"}, sends).send(1)
    if sends:
        assert transport.calls == [("begin", 1), ("send", ["a"]), ("send", ["b", "c"]), "finish"]
        assert (sent.names, sent.num_bytes, sent.num_buckets) == (["a", "b", "c"], 16, 2)
    else:
        assert transport.calls == [("help", ["a"]), ("help", ["b", "c"])] and sent is None


@pytest.mark.parametrize("transport", [Recording(), None], ids=["sends", "only helps"])
def test_no_bucket_is_held_while_the_next_one_is_made(transport):
    alive = []

    def buckets():
        references = []
        for name in "abc":
            alive.append([reference() is not None for reference in references])
            tensor = torch.zeros(2)
            references.append(weakref.ref(tensor))
            bucket = [(name, tensor)]
            del tensor
            yield bucket
            del bucket

    WeightSource(buckets, transport).send(1)
    assert alive == [[], [False], [False, False]]


FAILED = EnginesFailed({4: "engine 4 died"}, certain=True)


@pytest.mark.parametrize("where", ["begin", "a", "c", "finish"])
def test_after_a_failure_the_walk_goes_on_to_its_end(where):
    walk = Walk()
    sent = WeightSource(walk, Recording({where: FAILED})).send(1)
    assert sent.failed == {4: "engine 4 died"} and sent.certain and walk.made == 3


@pytest.mark.parametrize("where", ["begin", "a", "finish"])
def test_an_error_that_no_engine_is_to_blame_for_is_told_after_the_walk(where):
    walk, transport = Walk(), Recording({where: RunError("the disk is full")})
    with pytest.raises(RunError, match="the disk is full"):
        WeightSource(walk, transport).send(1)
    assert walk.made == 3 and transport.calls[-1] == "discard"


@pytest.mark.parametrize("expected, buckets", [({"b", "c"}, 0), ({"a", "b"}, 1)])
def test_an_unknown_name_is_refused_before_it_is_sent(expected, buckets):
    walk, transport = Walk(), Recording()
    sent = WeightSource(walk, transport, expected).send(1)
    assert "does not have: " in sent.refusal and sent.failed == {}
    assert sent.num_buckets == buckets == len(transport.calls) - 2
    assert transport.calls[-1] == "discard"
    assert walk.made == 3


def test_engines_that_cannot_be_reached():
    for error in (FAILED, EnginesFailed({4: "engine 4 answered with an error"}, certain=False)):
        connected = WeightSource(Walk(), Recording({"connect": error})).connect([])
        assert (connected.failed, connected.certain) == (error.failed, error.certain)
    assert WeightSource(Walk(), Recording()).connect([]).failed == {}
