import pytest

from slime.utils.data import get_source
from slime.utils.types import Sample


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [({}, None), ({"source_name": None}, None), ({"source_name": "gsm8k"}, "gsm8k"), ({"source_name": 3}, "3")],
)
def test_the_metadata_name_the_source(metadata, expected):
    assert get_source(Sample(metadata=metadata)) == expected
