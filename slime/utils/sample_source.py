"""Where a sample comes from, in a run that mixes data sets."""

from __future__ import annotations

from slime.utils.types import Sample

# Key of a sample's metadata. A data source or a user's function sets it; the train batch has a column `source_names` then.
SOURCE_NAME = "source_name"


def get_source(sample: Sample) -> str | None:
    """The name under which the metadata of `sample` say that it belongs; None where they do not."""
    name = sample.metadata.get(SOURCE_NAME)
    return None if name is None else str(name)
