"""Custom data sources: what is asked of them, and what their states may hold."""

import resource
from datetime import date
from decimal import Decimal

import numpy as np
import pytest

from slime.rollout.data_source_files import (
    check_methods,
    groups_from_plain,
    groups_to_plain,
    prompts_per_epoch,
    read_state,
    write_state,
)
from slime.utils.dataset import Dataset
from slime.utils.errors import RunError, UserError
from tests.support.models.data_sources import Flat, make_args


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


@pytest.mark.parametrize(
    "name", ["get_samples", "add_samples", "state_dict", "load_state_dict", "save", "load", "buffer_filter"]
)
def test_a_method_that_nobody_would_await_is_reported_at_the_start(name):
    async def late(self, *given): ...

    source = type("Late", (Flat,), {name: late})([])
    with pytest.raises(UserError, match=f"--data-source-path my.Source: Late.{name} is async, and nobody awaits it"):
        check_methods(make_args(), source)


def test_a_source_without_length_needs_a_number_of_rollouts():
    assert prompts_per_epoch(make_args(), Flat([])) is None
    with pytest.raises(UserError, match="Flat has no __len__; give --num-rollout"):
        prompts_per_epoch(make_args(num_rollout=None), Flat([]))


def test_arrays_that_no_file_takes_are_refused_by_their_place(tmp_path):
    with pytest.raises(UserError, match=r"state\['names'\]\[0\] is a ndarray of <U1; keep plain values there"):
        write_state(tmp_path / "state", {"names": [np.array(["a"])]})


@pytest.mark.parametrize("large", ["x" * 5000, np.arange(5000)], ids=["text", "array"])
def test_a_full_disk_is_told_with_the_directory_and_its_room(tmp_path, large):
    """Arrays are written by a library that has an error of its own."""
    place = tmp_path / "rollout" / "global_dataset_state_dict_3"
    write_state(place, {"position": 7})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(RunError, match=f"{place} could not be written: .*File too large.* MB are free there"):
            write_state(place, {"position": 8, "large": large})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_state(place) == {"position": 7} and list(place.parent.iterdir()) == [place]


def test_rows_of_a_table_come_back_as_they_were_drawn(tmp_path):
    """A table has decimals, dates and bytes, and JSON has not."""
    from pyarrow import Table, parquet

    rows = [
        {"prompt": "a", "label": Decimal("1.50"), "metadata": {"day": date(2024, 5, 1), "raw": b"\xff"}},
        {"prompt": "b", "label": Decimal("2.50"), "metadata": {"day": date(2024, 5, 2), "raw": b""}},
    ]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "rows.parquet")
    groups = [[sample] for sample in Dataset(str(tmp_path / "rows.parquet"), None).samples]
    write_state(tmp_path / "state", {"buffer": groups_to_plain(groups)})
    found = groups_from_plain(read_state(tmp_path / "state")["buffer"])
    assert found == groups
    assert [(sample.label, sample.metadata["day"]) for (sample,) in found] == [(1.5, "2024-05-01"), (2.5, "2024-05-02")]


def test_arrays_come_back_with_shape_type_and_values(tmp_path):
    grid = np.arange(6, dtype=np.int16).reshape(2, 3)
    state = {
        "scalar": np.array(7), "empty": np.zeros((0, 3)), "columns first": np.asfortranarray(grid), "of a part": grid[:, 1],
        "mask": np.array([True, False]), "exact": np.array([0.1, 1e300]),
    }  # fmt: skip
    write_state(tmp_path / "state", state)
    found = read_state(tmp_path / "state")
    for name, array in state.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        assert np.array_equal(found[name], array), name


def test_a_source_is_asked_for_its_length_and_an_error_of_it_is_named():
    class Long(Flat):
        def __len__(self):
            return 12

    class Broken(Flat):
        def __len__(self):
            raise ZeroDivisionError("no rows")

    assert prompts_per_epoch(make_args(), Long([])) == 12
    with pytest.raises(UserError, match="my.Source raised ZeroDivisionError for __len__, start of the run: no rows"):
        prompts_per_epoch(make_args(), Broken([]))
