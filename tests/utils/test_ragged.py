import numpy as np

from slime.utils.packed_sample import RaggedArray


def test_rows_are_views_of_one_array():
    ragged = RaggedArray.from_rows([np.array([1, 2]), np.array([], dtype=np.int64), np.array([3])], np.int32)
    assert ragged.values.dtype == np.int32 and ragged.values.tolist() == [1, 2, 3]
    assert ragged.offsets.tolist() == [0, 2, 2, 3] and ragged.lengths.tolist() == [2, 0, 1]
    assert [row.tolist() for row in ragged] == [[1, 2], [], [3]]
    assert np.shares_memory(ragged[0], ragged.values)


def test_no_rows():
    ragged = RaggedArray.from_rows([], np.float32)
    assert len(ragged) == 0 and ragged.values.dtype == np.float32
