"""Two real engines and the real router: dialogues that stay on their engine find their prefixes there."""

import pytest

from tools.bench.bench_affinity import measure


@pytest.mark.slow
def test_dialogues_that_stay_on_their_engine_hit_its_cache_more_often():
    hits = measure(("round_robin", "consistent_hashing"), dialogues=16, turns=3)
    assert 0 < hits["round_robin"].hit_rate < hits["consistent_hashing"].hit_rate - 0.1
