import pytest
import torch

from slime.algorithms.advantages import (
    chunked_discounted_returns,
    chunked_gae,
    vanilla_discounted_returns,
    vanilla_gae,
)

LENGTHS = (1, 2, 31, 32, 33, 127, 128, 129, 300)
DISCOUNTS = ((1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0), (0.5, 0.5))
GAES = (vanilla_gae, chunked_gae)


def plain_gae(rewards, values, gamma, lambd):
    """Lists of Python floats to lists of Python floats."""
    advantages, advantage, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * next_value - value + gamma * lambd * advantage
        next_value = value
        advantages.insert(0, advantage)
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def plain_discounted_returns(rewards, discount):
    return [sum(discount**k * reward for k, reward in enumerate(rewards[t:])) for t in range(len(rewards))]


def random_batch(rows, length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, rows, length, generator=generator)


@pytest.mark.parametrize("gae", GAES)
@pytest.mark.parametrize(
    ("gamma", "lambd", "advantages", "returns"),
    [
        (0.99, 0.95, [0.418306675, 0.55535, 0.7], [0.918306675, 0.95535, 1.0]),
        (1.0, 1.0, [0.5, 0.6, 0.7], [1.0, 1.0, 1.0]),
    ],
)
def test_gae_by_hand(gae, gamma, lambd, advantages, returns):
    results = gae(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.4, 0.3]]), gamma, lambd)
    torch.testing.assert_close(results, (torch.tensor([advantages]), torch.tensor([returns])))


@pytest.mark.parametrize("discounted_returns", [vanilla_discounted_returns, chunked_discounted_returns])
def test_discounted_sum_by_hand(discounted_returns):
    returns = discounted_returns(torch.tensor([[1.0, 2.0, 3.0]]), 0.9)
    torch.testing.assert_close(returns, torch.tensor([[5.23, 4.7, 3.0]]))


@pytest.mark.parametrize("length", LENGTHS)
def test_all_forms_equal_a_plain_loop(length):
    rewards, values = random_batch(3, length, seed=length)
    for gamma, lambd in DISCOUNTS:
        expected = [
            plain_gae(r, v, gamma, lambd)
            for r, v in zip(rewards.double().tolist(), values.double().tolist(), strict=True)
        ]
        sums = [plain_discounted_returns(r, gamma) for r in rewards.double().tolist()]
        for gae in GAES:
            advantages, returns = gae(rewards, values, gamma, lambd)
            assert advantages.dtype == returns.dtype == torch.float32
            torch.testing.assert_close(advantages, torch.tensor([a for a, _ in expected]), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(returns, torch.tensor([g for _, g in expected]), rtol=1e-6, atol=1e-6)
        for discounted in (vanilla_discounted_returns, chunked_discounted_returns):
            torch.testing.assert_close(discounted(rewards, gamma), torch.tensor(sums), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gamma_lambd", [(1.0, 1.0), (0.99, 0.95)])
def test_chunks_equal_the_recurrence_at_8192_steps(gamma_lambd):
    # Sums of thousands of terms that nearly cancel: here float32 accumulation alone is off by 1e-3.
    rewards, values = random_batch(128, 8192, seed=0)
    serial, chunked = vanilla_gae(rewards, values, *gamma_lambd), chunked_gae(rewards, values, *gamma_lambd)
    torch.testing.assert_close(chunked, serial, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, 32, 128, 1000])
def test_the_chunk_size_does_not_matter(chunk_size):
    rewards, values = random_batch(2, 300, seed=7)
    torch.testing.assert_close(
        chunked_gae(rewards, values, 0.99, 0.95, chunk_size=chunk_size), vanilla_gae(rewards, values, 0.99, 0.95)
    )
    torch.testing.assert_close(
        chunked_discounted_returns(rewards, 0.9, chunk_size=chunk_size), vanilla_discounted_returns(rewards, 0.9)
    )


def test_more_rows_than_one_block_holds():
    rewards, values = random_batch(700, 200, seed=1)
    torch.testing.assert_close(chunked_gae(rewards, values, 0.99, 0.95), vanilla_gae(rewards, values, 0.99, 0.95))


def test_padding_behind_the_end_changes_nothing():
    rewards, values = random_batch(2, 50, seed=3)
    padded = [torch.nn.functional.pad(tensor, (0, 90)) for tensor in (rewards, values)]
    for result, expected in zip(
        chunked_gae(*padded, 0.99, 0.95), chunked_gae(rewards, values, 0.99, 0.95), strict=True
    ):
        torch.testing.assert_close(result[:, :50], expected)
        assert (result[:, 50:] == 0).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_nothing_to_scan(shape):
    empty = torch.zeros(shape)
    for gae in GAES:
        assert [tuple(result.shape) for result in gae(empty, empty, 0.9, 0.9)] == [shape, shape]
    assert chunked_discounted_returns(empty, 0.9).shape == vanilla_discounted_returns(empty, 0.9).shape == shape


def test_arguments_stay_as_they_are_and_get_no_gradient():
    rewards, values = random_batch(2, 40, seed=5)
    values.requires_grad_()
    before = rewards.clone(), values.detach().clone()
    results = [*chunked_gae(rewards, values, 1.0, 0.9), *vanilla_gae(rewards, values, 1.0, 0.9)]
    assert not any(result.requires_grad for result in results)
    assert torch.equal(rewards, before[0]) and torch.equal(values, before[1])


def test_dtype_of_the_result():
    for dtype, expected in [(torch.bfloat16, torch.float32), (torch.int64, torch.float32), (torch.float64,) * 2]:
        assert chunked_discounted_returns(torch.ones(1, 3, dtype=dtype), 1.0).dtype == expected
        assert vanilla_gae(torch.ones(1, 3, dtype=dtype), torch.ones(1, 3), 1.0, 1.0)[0].dtype == expected


def test_wrong_arguments():
    with pytest.raises(ValueError, match="chunk_size 0"):
        chunked_discounted_returns(torch.zeros(1, 4), 1.0, chunk_size=0)
    for gae in GAES:
        with pytest.raises(ValueError, match=r"got \(1, 4\) and \(1, 3\)"):
            gae(torch.zeros(1, 4), torch.zeros(1, 3), 1.0, 1.0)
