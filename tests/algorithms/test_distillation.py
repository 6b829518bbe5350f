import pytest
import torch

from slime.algorithms.kl import distilled_advantages


def test_by_hand():
    distilled, reverse_kl = distilled_advantages(
        [torch.ones(2)], [torch.tensor([-1.0, -0.2])], [torch.tensor([-0.5, -0.9])], [torch.ones(2)], 1.0
    )
    torch.testing.assert_close(distilled, [torch.tensor([1.5, 0.3])])
    torch.testing.assert_close(reverse_kl, [torch.tensor([-0.5, 0.7])])


def test_equals_plain_loops():
    generator = torch.Generator().manual_seed(0)
    lengths = (1, 127, 128, 129, 300, 0, 5)
    advantages, student, teacher = [[torch.randn(length, generator=generator) for length in lengths] for _ in range(3)]
    masks = [(torch.rand(length, generator=generator) < 0.5).int() for length in lengths[:-1]] + [torch.zeros(5)]
    before = [tokens.clone() for tokens in advantages]
    distilled, reverse_kl = distilled_advantages(advantages, student, teacher, masks, 0.3)
    for sample in range(len(lengths)):
        columns = (column[sample].tolist() for column in (before, student, teacher, masks))
        pairs = [(a - 0.3 * (s - t), s - t) if m else (a, 0.0) for a, s, t, m in zip(*columns, strict=True)]
        torch.testing.assert_close(distilled[sample], torch.tensor([a for a, _ in pairs]))
        torch.testing.assert_close(reverse_kl[sample], torch.tensor([kl for _, kl in pairs]))
    assert all(torch.equal(one, other) for one, other in zip(advantages, before, strict=True))


def test_masked_tokens_may_have_no_likelihood():
    distilled, reverse_kl = distilled_advantages(
        [torch.zeros(2)], [torch.zeros(2)], [torch.tensor([-1.0, -torch.inf])], [torch.tensor([1, 0])], 1.0
    )
    assert distilled[0].tolist() == [-1, 0] and reverse_kl[0].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (None, "the batch has none"),
        ([torch.zeros(2), None], r"missing for 1 samples, the first ones \[1\]"),
        ([torch.zeros(2), torch.zeros(2)], "sample 1: advantages has 3 tokens and teacher_log_probs 2"),
        ([torch.zeros(2)], "2 advantages and 1 teacher_log_probs"),
    ],
)
def test_missing_teacher_log_probs_are_an_error(teacher, message):
    tokens = [torch.zeros(2), torch.zeros(3)]
    with pytest.raises(ValueError, match=message):
        distilled_advantages(tokens, tokens, teacher, [torch.ones(2), torch.ones(3)], 1.0)
