"""Advantages and returns against the definition, worked by hand and in float64."""

import pytest
import torch

import slime.utils.ppo_utils as public
from slime.algorithms.advantages import (
    chunked_discounted_returns,
    chunked_gae,
    get_advantages_and_returns_batch,
    get_grpo_returns,
    get_reinforce_plus_plus_baseline_advantages,
    get_reinforce_plus_plus_returns,
    grpo_advantages,
    ppo_advantages,
    reinforce_plus_plus_returns,
    token_rewards,
    vanilla_discounted_returns,
    vanilla_gae,
)

LENGTHS = (1, 127, 128, 129, 300)


def close(actual, expected):
    torch.testing.assert_close(
        actual, [torch.tensor(row, dtype=torch.float32) for row in expected], rtol=1e-5, atol=1e-5
    )


def random_responses(seed):
    """Rewards, kl, values and loss masks of eight responses: the LENGTHS with gaps in the masks, and three of a kind each."""
    generator = torch.Generator().manual_seed(seed)
    masks = [(torch.rand(length, generator=generator) < 0.7).int() for length in LENGTHS]
    masks += [torch.zeros(129, dtype=torch.int32), torch.ones(128, dtype=torch.int32), torch.tensor([0, 0, 1, 1, 0])]
    kl = [torch.randn(len(mask), generator=generator) for mask in masks]
    values = [torch.randn(len(mask), generator=generator) for mask in masks]
    return torch.randn(len(masks), generator=generator).tolist(), kl, values, masks


def plain_token_rewards(reward, kl, mask, kl_coef):
    rewards = [-kl_coef * k if m else 0.0 for k, m in zip(kl, mask, strict=True)]
    if any(mask):
        rewards[max(t for t, m in enumerate(mask) if m)] += reward
    return rewards


def plain_recurrence(rewards, values, mask, gamma, lambd, count_masked_tokens):
    """GAE with all values 0 and λ = 1 is the discounted sum."""
    length = len(mask)
    advantages, returns = [0.0] * length, list(values)
    advantage = next_value = 0.0
    for t in reversed(range(length)):
        if mask[t] or (count_masked_tokens and any(mask)):
            advantage = rewards[t] + gamma * next_value - values[t] + gamma * lambd * advantage
            next_value = values[t]
            advantages[t], returns[t] = advantage, advantage + values[t]
    return advantages, returns


class TestGrpo:
    def test_every_token_gets_the_reward_of_its_sample(self):
        advantages = grpo_advantages([0.5, -1.0, 2.0], [2, 0, 3])
        assert [tokens.tolist() for tokens in advantages] == [[0.5, 0.5], [], [2.0, 2.0, 2.0]]
        assert all(tokens.dtype == torch.float32 for tokens in advantages)

    def test_rewards_may_be_a_tensor(self):
        advantages = grpo_advantages(torch.tensor([1.0, 2.0], dtype=torch.float64), [1, 2])
        assert [tokens.tolist() for tokens in advantages] == [[1.0], [2.0, 2.0]]

    def test_counts_that_differ_are_an_error(self):
        with pytest.raises(ValueError, match="2 rewards and 1 responses"):
            grpo_advantages([1.0, 2.0], [3])

    def test_returns_take_their_lengths_from_kl(self):
        kl = [torch.full((2,), 9.0), torch.full((1,), 9.0)]
        assert [tokens.tolist() for tokens in get_grpo_returns([0.25, -0.5], kl)] == [[0.25, 0.25], [-0.5]]


class TestTokenRewards:
    def test_by_hand(self):
        close(token_rewards([1.0], [torch.tensor([0.1, 0.2, 0.3])], [torch.ones(3)], 0.1), [[-0.01, -0.02, 0.97]])

    def test_l4_logged_kl_stays_as_it_is(self):
        rewards, kl, values, masks = random_responses(seed=0)
        before = [tokens.clone() for tokens in kl]
        ppo_advantages(rewards, kl, values, masks, kl_coef=0.5, gamma=0.9, lambd=0.9)
        reinforce_plus_plus_returns(rewards, kl, masks, kl_coef=0.5, gamma=0.9)
        get_reinforce_plus_plus_baseline_advantages(rewards, kl, masks, 0.5)
        assert all(torch.equal(one, other) for one, other in zip(kl, before, strict=True))

    def test_l5_end_reward_lands_on_the_last_trained_token_of_every_length(self):
        lengths = range(1, 201)
        masks = [torch.ones(length) for length in lengths]
        for length, mask in zip(lengths, masks, strict=True):
            mask[max(length - 3, 1) :] = 0
        rewarded = token_rewards([2.0] * len(masks), [torch.zeros(length) for length in lengths], masks, 0.1)
        for length, tokens in zip(lengths, rewarded, strict=True):
            assert tokens.nonzero().flatten().tolist() == [max(length - 3, 1) - 1]
            assert tokens.sum() == 2.0

    def test_l6_kl_of_tool_tokens_never_reaches_a_result(self):
        masks = [torch.tensor([1, 0, 1])]
        values = [torch.tensor([0.5, 0.4, 0.3])]
        for count in (False, True):
            results = []
            for tool_kl in (0.0, 1e6, float("nan")):
                kl = [torch.tensor([0.1, tool_kl, 0.3])]
                advantages, returns = ppo_advantages(
                    [1.0], kl, values, masks, kl_coef=0.1, gamma=0.9, lambd=0.9, count_masked_tokens=count
                )
                sums = reinforce_plus_plus_returns([1.0], kl, masks, kl_coef=0.1, gamma=0.9, count_masked_tokens=count)
                baseline = get_reinforce_plus_plus_baseline_advantages([1.0], kl, masks, 0.1)
                results.append(torch.stack([*advantages, *returns, *sums, *baseline]))
            assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


class TestPpo:
    def test_by_hand(self):
        advantages, returns = ppo_advantages(
            [1.0],
            [torch.tensor([0.1, 0.2, 0.3])],
            [torch.tensor([0.5, 0.4, 0.3])],
            [torch.ones(3)],
            kl_coef=0.1,
            gamma=1.0,
            lambd=0.95,
        )
        close(advantages, [[0.380675, 0.5165, 0.67]])
        close(returns, [[0.880675, 0.9165, 0.97]])

    @pytest.mark.parametrize(
        ("count_masked_tokens", "expected"),
        [(False, [0.418306675, 0.0, 0.55535, 0.7]), (True, [0.408217428, 0.018306675, 0.55535, 0.7])],
    )
    def test_masked_token_by_hand(self, count_masked_tokens, expected):
        values = [torch.tensor([0.5, 0.9, 0.4, 0.3])]
        advantages, returns = ppo_advantages(
            [1.0],
            [torch.zeros(4)],
            values,
            [torch.tensor([1, 0, 1, 1])],
            kl_coef=0.0,
            gamma=0.99,
            lambd=0.95,
            count_masked_tokens=count_masked_tokens,
        )
        close(advantages, [expected])
        if not count_masked_tokens:
            close(returns, [[0.918306675, 0.9, 0.95535, 1.0]])

    @pytest.mark.parametrize("count_masked_tokens", [False, True])
    @pytest.mark.parametrize("seed", range(3))
    def test_equals_plain_loops(self, seed, count_masked_tokens):
        rewards, kl, values, masks = random_responses(seed)
        for kl_coef, gamma, lambd in [(0.1, 0.99, 0.95), (0.0, 1.0, 1.0), (0.3, 0.9, 0.0)]:
            expected = [
                plain_recurrence(
                    plain_token_rewards(reward, k, mask, kl_coef), v, mask, gamma, lambd, count_masked_tokens
                )
                for reward, k, v, mask in zip(
                    rewards, *([t.tolist() for t in c] for c in (kl, values, masks)), strict=True
                )
            ]
            advantages, returns = ppo_advantages(
                rewards,
                kl,
                values,
                masks,
                kl_coef=kl_coef,
                gamma=gamma,
                lambd=lambd,
                count_masked_tokens=count_masked_tokens,
            )
            close(advantages, [a for a, _ in expected])
            close(returns, [g for _, g in expected])

    def test_without_discount_and_kl_both_forms_agree_on_trained_tokens(self):
        rewards, kl, values, masks = random_responses(seed=9)
        forms = [
            ppo_advantages(rewards, kl, values, masks, kl_coef=0.0, gamma=1.0, lambd=1.0, count_masked_tokens=count)[0]
            for count in (False, True)
        ]
        for skipping, counting, mask in zip(*forms, masks, strict=True):
            torch.testing.assert_close(skipping[mask == 1], counting[mask == 1], rtol=1e-5, atol=1e-5)

    def test_l8_returns_that_train_the_critic_hold_the_kl_penalty(self):
        kl, values, masks = [torch.tensor([0.1, 0.2])], [torch.zeros(2)], [torch.ones(2)]
        _, returns = ppo_advantages([1.0], kl, values, masks, kl_coef=0.1, gamma=1.0, lambd=1.0)
        close(returns, [[1 - 0.01 - 0.02, 1 - 0.02]])

    @pytest.mark.parametrize("count_masked_tokens", [False, True])
    def test_response_without_trained_tokens(self, count_masked_tokens):
        advantages, returns = ppo_advantages(
            [5.0, 1.0],
            [torch.ones(2), torch.zeros(0)],
            [torch.tensor([0.5, 0.4]), torch.zeros(0)],
            [torch.zeros(2), torch.zeros(0)],
            kl_coef=0.1,
            gamma=0.9,
            lambd=0.9,
            count_masked_tokens=count_masked_tokens,
        )
        close(advantages, [[0, 0], []])
        close(returns, [[0.5, 0.4], []])

    def test_no_samples(self):
        assert ppo_advantages([], [], [], [], kl_coef=0.1, gamma=1.0, lambd=1.0) == ([], [])

    def test_parts_of_responses_are_refused(self):
        kl, values = [torch.zeros(3)], [torch.zeros(3)]
        with pytest.raises(
            ValueError, match=r"sample 0: loss_masks has 5 tokens and responses 3; .*part of the response"
        ):
            ppo_advantages([1.0], kl, values, [torch.ones(5)], kl_coef=0.0, gamma=1.0, lambd=1.0)
        with pytest.raises(ValueError, match="2 rewards and 1 responses"):
            ppo_advantages([1.0, 1.0], kl, values, [torch.ones(3)], kl_coef=0.0, gamma=1.0, lambd=1.0)
        with pytest.raises(ValueError, match="sample 0: values has 2 tokens and kl 3"):
            ppo_advantages([1.0], kl, [torch.zeros(2)], [torch.ones(3)], kl_coef=0.0, gamma=1.0, lambd=1.0)


class TestReinforcePlusPlus:
    KL = (0.1, 0.2, 0.3, 0.4)

    def test_by_hand(self):
        returns = reinforce_plus_plus_returns(
            [1.0], [torch.tensor(self.KL)], [torch.tensor([1, 0, 1, 1])], kl_coef=0.1, gamma=0.99
        )
        close(returns, [[0.901196, 0.0, 0.9204, 0.96]])

    def test_public_function_counts_masked_tokens(self):
        returns = get_reinforce_plus_plus_returns(
            rewards=[1.0],
            kl=[torch.tensor(self.KL)],
            loss_masks=[torch.tensor([1, 0, 1, 1])],
            response_lengths=[4],
            total_lengths=[9],
            kl_coef=0.1,
            gamma=0.99,
        )
        close(returns, [[0.89208404, 0.911196, 0.9204, 0.96]])

    @pytest.mark.parametrize("count_masked_tokens", [False, True])
    def test_equals_plain_loops(self, count_masked_tokens):
        rewards, kl, _, masks = random_responses(seed=4)
        expected = []
        for reward, k, mask in zip(rewards, [t.tolist() for t in kl], [t.tolist() for t in masks], strict=True):
            shaped = plain_token_rewards(reward, k, mask, 0.2)
            expected.append(plain_recurrence(shaped, [0.0] * len(k), mask, 0.97, 1.0, count_masked_tokens)[0])
        returns = reinforce_plus_plus_returns(
            rewards, kl, masks, kl_coef=0.2, gamma=0.97, count_masked_tokens=count_masked_tokens
        )
        close(returns, expected)

    @pytest.mark.parametrize("count_masked_tokens", [False, True])
    def test_l7_masked_sample_gives_zeros(self, count_masked_tokens):
        returns = reinforce_plus_plus_returns(
            torch.tensor([1.0, 1.0]),
            [torch.ones(3), torch.zeros(1)],
            [torch.zeros(3), torch.ones(1)],
            kl_coef=0.1,
            gamma=0.9,
            count_masked_tokens=count_masked_tokens,
        )
        close(returns, [[0, 0, 0], [1]])

    def test_parts_of_responses_are_refused(self):
        with pytest.raises(ValueError, match=r"expected \[4\], got \[2\]"):
            get_reinforce_plus_plus_returns([1.0], [torch.zeros(2)], [torch.ones(2)], [4], [6], 0.1, 1.0)


class TestReinforcePlusPlusBaseline:
    def test_by_hand(self):
        advantages = get_reinforce_plus_plus_baseline_advantages(
            rewards=[0.5], kl=[torch.tensor([0.1, 0.2, 0.3])], loss_masks=[torch.ones(3)], kl_coef=0.1
        )
        close(advantages, [[0.49, 0.48, 0.47]])

    def test_masked_tokens_are_not_actions(self):
        advantages = get_reinforce_plus_plus_baseline_advantages(
            [0.5, 1.0], [torch.tensor([0.1, 9.0, 0.3]), torch.ones(1)], [torch.tensor([1, 0, 1]), torch.zeros(1)], 0.1
        )
        close(advantages, [[0.49, 0.0, 0.47], [0.0]])


class TestPublicBatch:
    @pytest.mark.parametrize("chunked", [True, False])
    def test_every_token_is_a_step(self, chunked):
        values = [torch.tensor([0.5, 0.9, 0.4, 0.3]), torch.tensor([0.5, 0.4, 0.3])]
        rewards = [torch.tensor([0.0, 0, 0, 1]), torch.tensor([0.0, 0, 1])]
        advantages, returns = get_advantages_and_returns_batch(
            total_lengths=[6, 5],
            response_lengths=[4, 3],
            values_list=values,
            rewards_list=rewards,
            gamma=0.99,
            lambd=0.95,
            chunked=chunked,
        )
        close(advantages, [[0.408217428, 0.018306675, 0.55535, 0.7], [0.418306675, 0.55535, 0.7]])
        close(returns, [[0.908217428, 0.918306675, 0.95535, 1.0], [0.918306675, 0.95535, 1.0]])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_columns_of_any_dtype_give_float32(self, dtype):
        # All of these numbers, and the results, are exact in bfloat16.
        values, rewards = [torch.tensor([0.5, 0.25], dtype=dtype)], [torch.tensor([0.0, 1.0], dtype=dtype)]
        advantages, returns = get_advantages_and_returns_batch([4], [2], values, rewards, 1.0, 1.0)
        assert [tokens.tolist() for tokens in (*advantages, *returns)] == [[0.5, 0.75], [1.0, 1.0]]
        assert {tokens.dtype for tokens in (*advantages, *returns)} == {torch.float32}

    def test_other_lengths_are_refused(self):
        with pytest.raises(ValueError, match=r"rewards_list.*expected \[2\], got \[3\]"):
            get_advantages_and_returns_batch([4], [2], [torch.zeros(2)], [torch.zeros(3)], 1.0, 1.0)


def test_no_samples():
    assert grpo_advantages([], []) == get_grpo_returns([], []) == []
    assert get_reinforce_plus_plus_returns([], [], [], [], [], 0.1, 1.0) == []
    assert get_reinforce_plus_plus_baseline_advantages([], [], [], 0.1) == []
    assert get_advantages_and_returns_batch([], [], [], [], 1.0, 1.0) == ([], [])


def test_public_import_path():
    assert public.get_advantages_and_returns_batch is get_advantages_and_returns_batch
    assert public.get_reinforce_plus_plus_returns is get_reinforce_plus_plus_returns
    assert {"vanilla_gae", "chunked_gae", "chunked_discounted_returns"} <= set(public.__all__)


PADDED_LENGTHS = (1, 2, 31, 32, 33, 127, 128, 129, 300)
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


@pytest.mark.parametrize("length", PADDED_LENGTHS)
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
