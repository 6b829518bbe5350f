"""The longest sample that the flags allow."""

from argparse import Namespace

import pytest

from slime.arguments.lengths import longest_sample, planned_sample, prompt_is_limited


def lengths(context=None, prompt=None, response=None):
    return Namespace(
        rollout_max_context_len=context,
        rollout_max_prompt_len=prompt,
        rollout_max_response_len=response,
        seq_length=4096,
    )


@pytest.mark.parametrize(
    "flags, longest, limited",
    [
        ((None, 1024, 7168), 8192, True),
        ((8000, 1024, 7168), 8000, True),
        ((10000, 1024, 7168), 8192, True),
        ((8192, 1000, 1000), 2000, True),
        ((None, None, 7168), 7168, False),
        ((None, 1024, None), None, True),
        ((8000, None, None), 8000, True),
        ((None, None, None), None, False),
    ],
)
def test_longest_sample(flags, longest, limited):
    args = lengths(*flags)
    assert longest_sample(args) == longest and prompt_is_limited(args) is limited
    assert planned_sample(args) == (longest or 4096)
