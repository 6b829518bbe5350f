import pytest

from slime.ray.weight_sync import mean_difference, probe_sequences


def test_probe_is_fixed_and_inside_the_vocabulary():
    assert probe_sequences(50) == probe_sequences(50)
    assert all(0 <= token < 50 for sequence in probe_sequences(50) for token in sequence)


def test_mean_difference():
    assert mean_difference([[1.0, 2.0], [3.0]], [[1.5, 2.0], [2.0]]) == pytest.approx(0.5)


def test_lost_tokens_are_an_error():
    with pytest.raises(ValueError):
        mean_difference([[1.0, 2.0]], [[1.0]])
