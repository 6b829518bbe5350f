"""Items that bring tokens of the engine."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from slime.utils.errors import UserError
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.samples import samples_of
from tests.support.models.rollout_args import make_args, make_checkpoint
from tests.support.processes.buffer_service import item


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return SimpleNamespace(**vars(make_args(checkpoint)), loss_mask_type="qwen3", rollout_task_type="own")


def made(args, **fields):
    counts = Counter()
    (group,) = samples_of(args, [{"instance_id": "a", "items": [item("a.0", "a", **fields)]}], counts)
    return group.samples[0], counts


TOKENS = {"tokens": [70, 71, 72, 73, 74], "loss_mask": [1, 0, 1], "rollout_log_probs": [-0.1, -0.2, -0.3]}


@pytest.mark.parametrize(
    ("limit", "tokens", "mask", "log_probs", "untrained"),
    [
        (4, [70, 71, 72, 73], [1, 0], [-0.1, -0.2], 0),
        # The prompt alone fills it.
        (2, [70, 71], [0], [0.0], 1),
        (1, [70], [0], [0.0], 1),
    ],
)
def test_tokens_beyond_the_context_are_cut(args, limit, tokens, mask, log_probs, untrained):
    sample, counts = made(SimpleNamespace(**{**vars(args), "rollout_max_context_len": limit}), **TOKENS)
    assert (sample.tokens, sample.loss_mask, sample.rollout_log_probs) == (tokens, mask, log_probs)
    assert sample.response_length == len(mask) and sample.status is Sample.Status.TRUNCATED
    assert counts == {"buffer/cut_samples": 1, "buffer/untrained_samples": untrained}


@pytest.mark.parametrize("limit", [None, 5])
def test_tokens_within_the_context_stay(args, limit):
    sample, counts = made(SimpleNamespace(**{**vars(args), "rollout_max_context_len": limit}), **TOKENS)
    assert sample.tokens == TOKENS["tokens"] and sample.status is Sample.Status.COMPLETED
    assert not any(counts.values())


def test_tokens_without_log_probs_are_refused_where_those_are_needed(args):
    own = {**TOKENS, "rollout_log_probs": None}
    assert made(args, **own)[0].rollout_log_probs is None
    needing = SimpleNamespace(**{**vars(args), "use_tis": True})
    with pytest.raises(UserError, match="item a.0 has tokens and no rollout_log_probs, which --use-tis needs"):
        made(needing, **own)
    assert made(needing, **TOKENS)[0].rollout_log_probs == TOKENS["rollout_log_probs"]


@pytest.mark.parametrize("log_prob", [None, float("nan"), float("-inf")])
def test_a_log_prob_of_a_trained_token_that_is_no_number_is_refused(args, log_prob):
    first, second, third = TOKENS["rollout_log_probs"]
    with pytest.raises(UserError, match=r"item a.0: rollout_log_probs\[2\] is \S+, and its token is trained"):
        made(args, **{**TOKENS, "rollout_log_probs": [first, second, log_prob]})
    # The second token is not trained.
    assert made(args, **{**TOKENS, "rollout_log_probs": [first, log_prob, third]})[0].loss_mask == [1, 0, 1]
