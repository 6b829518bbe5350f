"""Which samples of a rollout are trained: none that are too old, and of a dump the part that was asked for."""

from slime.ray.rollout_pipeline import RolloutPipeline
from slime.rollout.rollout_dump import save_rollout
from slime.utils.types import Sample
from tests.support.models.args import parse

OF_TWO_VERSIONS = """
from slime.rollout.generation_call import current_call
from slime.utils.types import Sample

def generate_rollout(args, rollout_id, data_source, evaluation=False):
    args.told.append(current_call().trained_as)
    values = {"group_index": 0, "tokens": [1, 2], "response_length": 1, "reward": 1.0}
    return [[Sample(index=index, weight_versions=[version], **values) for index, version in enumerate("52")]]
"""


def test_samples_that_are_too_old_for_what_they_train_have_no_part_in_the_batch(tmp_path, monkeypatch):
    monkeypatch.setattr("ray.put", lambda value: value)
    (tmp_path / "mine.py").write_text(OF_TWO_VERSIONS)
    words = ["--rollout-function-path", str(tmp_path / "mine.py"), "--rollout-batch-size", "1"]
    args = parse(tmp_path, *words, "--global-batch-size", "2", "--max-weight-staleness", "1")
    args.told = []
    result = RolloutPipeline(args).generate(3, trained_as=5)
    assert args.told == [5]
    assert result.shards[0].inner["rollout_mask_sums"].tolist() == [1, 0]
    metrics, _ = result.logged[-1]
    assert (metrics["rollout/stale_samples"], metrics["rollout/staleness/max"]) == (1, 0)


def test_of_a_dump_the_part_is_trained_that_was_asked_for(tmp_path):
    template = str(tmp_path / "dumps/{rollout_id}.pt")
    save_rollout(template, 0, [Sample(index=index, tokens=[1, 2], response_length=1) for index in range(8)])
    words = ["--load-debug-rollout-data", template, "--load-debug-rollout-data-subsample", "0.5"]
    samples, _ = RolloutPipeline(parse(tmp_path, *words)).samples_of(0)
    assert [sample.index for sample in samples] == [0, 1, 6, 7]
