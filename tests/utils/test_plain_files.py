"""Values that JSON does not have come back as they were, and what is not plain goes where its encoder says."""

import json
import resource
from argparse import Namespace

import numpy as np
import pytest
import torch

from slime.utils.plain_files import decode_plain, encode_plain, may_be_dump, read_dump, write_dump
from slime.utils.run_values import SharedArguments

VALUES = {
    "a tuple": (1, ("x", [2.5, None])),
    "a tuple in a list": [(1,), True],
    "bytes": [b"\xff\x00a", {"__bytes__": b""}],
    "keys that are no strings": {1: "a", (2, 3): {None: False}},
    "keys like ours": {"__tuple__": [1], "plain": {"__items__": 0}},
    "long lists": [list(range(1000)), ["é"] * 3],
}


@pytest.mark.parametrize("name", VALUES)
def test_plain_values_come_back_with_their_types(name):
    text = json.dumps(encode_plain(VALUES[name], "state", None))
    assert repr(decode_plain(json.loads(text), None)) == repr(VALUES[name])


def test_lists_and_dicts_of_flags_are_written_as_others_are():
    args = SharedArguments(Namespace(rollout_stop=["</s>", "."], eval_config={"datasets": [{"name": "math"}]}))
    value = {"stop": args.rollout_stop, "beside": [args.eval_config]}
    text = json.dumps(encode_plain(value, "state", None))
    assert decode_plain(json.loads(text), None) == value


def test_what_is_not_plain_is_named_by_its_place():
    met = []

    def other(value, where):
        met.append(where)
        return {"__set__": sorted(value)}

    value = {"a": [1, (2, {3})], 4: {"b": {5}}, "c": np.float64(0.5)}
    text = json.dumps(encode_plain(value, "state", other))
    assert met == ["state[0][1][1][1]", "state[1][1]['b']"]
    decoded = decode_plain(json.loads(text), lambda entry: set(entry["__set__"]))
    assert decoded == value and type(decoded["c"]) is float


@pytest.mark.parametrize("name", ["0.pt", "0.json"])
def test_what_a_dump_is_is_known_without_reading_it(tmp_path, name):
    path = tmp_path / name
    write_dump(path, {"samples": [{"tokens": np.arange(3)}]})
    assert may_be_dump(path)
    path.with_name(f"{name}.safetensors").unlink(missing_ok=True)
    path.write_bytes(b"junk")
    assert not may_be_dump(path) and not may_be_dump(tmp_path / f"nowhere{path.suffix}")


def test_what_torch_once_wrote_may_be_a_dump(tmp_path):
    torch.save({"samples": []}, tmp_path / "0.pt", _use_new_zipfile_serialization=False)
    assert may_be_dump(tmp_path / "0.pt") and read_dump(tmp_path / "0.pt") == {"samples": []}
    # One in zip format has another name, too.
    torch.save({"samples": []}, tmp_path / "0.dump")
    assert may_be_dump(tmp_path / "0.dump") and read_dump(tmp_path / "0.dump") == {"samples": []}


@pytest.mark.parametrize("name", ["3.pt", "3.json"])
def test_a_dump_that_the_disk_refuses_is_named_and_takes_no_room(tmp_path, name):
    """The limit of a file's size stands for a full disk: what was there stays."""
    path = tmp_path / "dumps" / name
    write_dump(path, {"kept": torch.ones(3)})
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with pytest.raises(OSError) as error:
            write_dump(path, {"large": torch.ones(2**16)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.filename.startswith(str(path)) and error.value.errno
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
