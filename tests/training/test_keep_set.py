"""Softmax over the tokens that sampling kept, and how these lie over a stream."""

import math
import random
import resource

import pytest
import torch
import torch.distributed as dist

from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, sft_loss_function
from slime.training import context_parallel, keep_set
from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel
from slime.training.keep_set import KeepSet, KeptTokens, kept_tokens
from slime.training.log_probs import calculate_log_probs_and_entropy
from slime.training.loss import loss_function, response_log_probs
from slime.training.packed_stream import Rows
from slime.training.rollout_data import MicroBatch, RolloutData
from tests.support.models.grpo_batch import objective_args
from tests.support.processes.distributed import run_distributed
from tools.bench.live_tensors import LiveTensors

VOCAB_SIZE, TOKEN_COUNT = 24, 17


def random_case(dtype=torch.float64, seed=0):
    """Logits, sampled tokens, kept ids per row (some without the sampled one, some empty), and weights of the two outputs."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(TOKEN_COUNT, VOCAB_SIZE, generator=generator, dtype=torch.float64) * 3).to(dtype)
    tokens = torch.randint(VOCAB_SIZE, (TOKEN_COUNT,), generator=generator)
    kept = [torch.randperm(VOCAB_SIZE, generator=generator)[: row % 7].tolist() for row in range(TOKEN_COUNT - 1)] + [
        list(range(VOCAB_SIZE))
    ]
    weights = torch.randn(2, TOKEN_COUNT, generator=generator, dtype=torch.float64)
    return logits, tokens, kept, weights


def as_mask(kept):
    mask = torch.zeros(len(kept), VOCAB_SIZE, dtype=torch.bool)
    for row, ids in enumerate(kept):
        mask[row, ids] = True
    return mask


def as_kept_tokens(kept, dtype=torch.int32):
    offsets = [sum(len(ids) for ids in kept[:row]) for row in range(len(kept) + 1)]
    return KeptTokens(torch.tensor(sum(kept, []), dtype=dtype), torch.tensor(offsets, dtype=dtype))


def reference(logits, tokens, kept, weights, temperature, entropy_grad):
    """Row by row with torch's own operators in float64: log_softmax of the kept logits, entropy of all of them."""
    logits = logits.detach().double().clone().requires_grad_()
    log_probs, entropies = [], []
    for row, token in enumerate(tokens.tolist()):
        ids = sorted({*kept[row], token})
        log_probs.append(torch.log_softmax(logits[row, ids] / temperature, 0)[ids.index(token)])
        whole = torch.log_softmax(logits[row] / temperature, 0)
        entropies.append(-(whole.exp() * whole).sum())
    log_probs, entropies = torch.stack(log_probs), torch.stack(entropies)
    total = (log_probs * weights[0]).sum() + (entropies * weights[1]).sum() * entropy_grad
    total.backward()
    return log_probs.detach(), entropies.detach(), logits.grad


def fused(logits, tokens, kept, weights, tp_group=None, with_entropy=True, **options):
    logits = logits.clone().requires_grad_()
    log_probs, entropy = calculate_log_probs_and_entropy(
        logits, tokens, tp_group, with_entropy=with_entropy, log_prob_keep_mask=kept, **options
    )
    total = (log_probs.double() * weights[0]).sum()
    if entropy is not None and entropy.requires_grad:
        total = total + (entropy.double() * weights[1]).sum()
    total.backward()
    return log_probs.detach(), None if entropy is None else entropy.detach(), logits.grad


def test_two_kept_of_four_logits():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 5)
    mask = torch.tensor([[True, True, False, False]] * 5)
    log_probs, entropy = calculate_log_probs_and_entropy(
        logits[:2], torch.tensor([0, 1]), None, with_entropy=True, log_prob_keep_mask=mask[:2]
    )
    assert log_probs.tolist() == pytest.approx([-0.313261688, -1.313261688], abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.947536964] * 2, abs=1e-6)
    sampled_outside, _ = calculate_log_probs_and_entropy(
        logits[:1], torch.tensor([3]), None, log_prob_keep_mask=mask[:1]
    )
    assert sampled_outside.item() == pytest.approx(-3.349012217, abs=1e-6)
    # The other two of that row's three kept tokens {0, 1, 3}.
    with_three = torch.tensor([[True, True, False, True]] * 2)
    others, _ = calculate_log_probs_and_entropy(logits[:2], torch.tensor([0, 1]), None, log_prob_keep_mask=with_three)
    assert others.tolist() == pytest.approx([-0.349012217, -1.349012217], abs=1e-6)


@pytest.mark.parametrize("form", [as_mask, as_kept_tokens])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("chunk_size", [-1, 3])
def test_values_and_gradients_equal_the_unfused_reference(form, temperature, entropy_grad, chunk_size, monkeypatch):
    monkeypatch.setattr(keep_set, "PAIRS_PER_BLOCK", 7)
    logits, tokens, kept, weights = random_case()
    expected = reference(logits, tokens, kept, weights, temperature, entropy_grad)
    options = {"temperature": temperature, "chunk_size": chunk_size, "with_entropy_grad": entropy_grad}
    actual = fused(logits, tokens, form(kept), weights, **options)
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_tensor, expected_tensor, atol=1e-8, rtol=0)
    without_entropy = fused(logits, tokens, form(kept), weights, with_entropy=False, **options)
    assert without_entropy[1] is None
    assert torch.equal(without_entropy[0], actual[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_less_precise_logits_lose_nothing_but_the_rounding_of_the_results(dtype, entropy_grad):
    logits, tokens, kept, weights = random_case(dtype)
    expected = reference(logits, tokens, kept, weights, 0.7, entropy_grad)
    actual = fused(logits, tokens, as_kept_tokens(kept), weights, temperature=0.7, with_entropy_grad=entropy_grad)
    torch.testing.assert_close(actual[0].double(), expected[0], atol=1e-6, rtol=1e-7)
    torch.testing.assert_close(actual[1].double(), expected[1], atol=2e-6, rtol=1e-6)
    assert actual[2].dtype == dtype
    torch.testing.assert_close(actual[2].double(), expected[2], atol=1e-5, rtol=torch.finfo(dtype).eps)


def test_every_token_kept_is_the_plain_log_prob():
    logits, tokens, _, weights = random_case()
    everything = torch.ones_like(logits, dtype=torch.bool)
    actual, plain = fused(logits, tokens, everything, weights), fused(logits, tokens, None, weights)
    for actual_tensor, plain_tensor in zip(actual, plain, strict=True):
        torch.testing.assert_close(actual_tensor, plain_tensor, atol=1e-12, rtol=0)


def test_nothing_kept_leaves_the_sampled_token_with_log_prob_zero_and_no_gradient():
    logits, tokens, kept, weights = random_case()
    nothing = KeptTokens(torch.zeros(0, dtype=torch.int32), torch.zeros(TOKEN_COUNT + 1, dtype=torch.int32))
    log_probs, _, gradient = fused(logits, tokens, nothing, weights, with_entropy=False)
    assert (log_probs == 0).all()
    assert (gradient == 0).all()


def test_large_and_impossible_logits():
    logits = torch.tensor([[30000.0, 29999.0, -30000.0, -math.inf]], requires_grad=True)
    mask = torch.tensor([[False, True, True, True]])
    log_probs, _ = calculate_log_probs_and_entropy(logits, torch.tensor([0]), None, log_prob_keep_mask=mask)
    assert log_probs.item() == pytest.approx(-math.log1p(math.exp(-1)), abs=1e-6)
    log_probs.sum().backward()
    rest = 1 / (1 + math.e)
    assert logits.grad[0].tolist() == pytest.approx([rest, -rest, 0, 0], abs=1e-6)


def test_a_token_outside_the_vocabulary_gets_log_prob_minus_infinity():
    logits, tokens, kept, _ = random_case()
    tokens[0], tokens[3] = VOCAB_SIZE, -1
    log_probs, _ = calculate_log_probs_and_entropy(logits, tokens, None, log_prob_keep_mask=as_mask(kept))
    assert (log_probs == -math.inf).nonzero()[:, 0].tolist() == [0, 3]


@pytest.mark.parametrize("form", [as_mask, as_kept_tokens])
def test_no_rows_give_empty_results_with_a_gradient_path(form):
    logits = torch.zeros(0, VOCAB_SIZE, requires_grad=True)
    log_probs, _ = calculate_log_probs_and_entropy(
        logits, torch.zeros(0, dtype=torch.int64), None, log_prob_keep_mask=form([])
    )
    log_probs.sum().backward()
    assert logits.grad.shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_of_some_rows_the_sets_are_in_their_order(with_entropy):
    logits, tokens, kept, weights = random_case()
    rows = Rows.at([range(2, 5), range(6, 11)], torch.device("cpu"))
    index = rows.index
    expected = fused(
        logits[index], tokens[index], as_kept_tokens([kept[i] for i in index]), weights[:, index], None, with_entropy
    )
    actual = fused(
        logits, tokens[index], as_kept_tokens([kept[i] for i in index]), weights[:, index], None, with_entropy,
        rows=rows, chunk_size=4,
    )  # fmt: skip
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[2][index], expected[2])
    assert actual[2].count_nonzero() == actual[2][index].count_nonzero() > 0


def test_blocks_cover_all_rows_once_and_hold_few_pairs(monkeypatch):
    monkeypatch.setattr(keep_set, "PAIRS_PER_BLOCK", 5)
    lengths = [0, 3, 2, 1, 9, 0, 0, 4, 1]
    kept = as_kept_tokens([list(range(length)) for length in lengths])
    blocks = list(KeepSet(kept, torch.zeros(len(lengths), dtype=torch.int64), 0, VOCAB_SIZE).blocks())
    assert [row for start, stop in blocks for row in range(start, stop)] == list(range(len(lengths)))
    assert all(sum(lengths[start:stop]) <= 5 or stop == start + 1 for start, stop in blocks)
    assert len(blocks) == 4


def test_the_only_full_size_tensor_is_the_gradient():
    rows, columns = 64, 4096
    logits = torch.randn(rows, columns).bfloat16().requires_grad_()
    tokens = torch.zeros(rows, dtype=torch.int64)
    kept = KeptTokens(torch.arange(5, dtype=torch.int32).repeat(rows), torch.arange(0, 5 * rows + 1, 5))
    with LiveTensors() as live:
        fused_out, _ = calculate_log_probs_and_entropy(logits, tokens, None, log_prob_keep_mask=kept)
        fused_out.sum().backward()
    assert live.peak < rows * columns * 2 + 100 * len(kept.token_ids)


@pytest.mark.parametrize("is_limited", [False, True])
def test_no_operation_copies_the_gradient_inside_itself(is_limited):
    """Counted in pages that the process touches first; tensors this large get fresh ones."""
    rows, columns = 256, 1 << 16
    logits = torch.randn(rows, columns).bfloat16().requires_grad_()
    tokens = torch.arange(rows)
    kept = KeptTokens(torch.arange(5, dtype=torch.int32).repeat(rows), torch.arange(0, 5 * rows + 1, 5))

    def touched_bytes():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        options = {"log_prob_keep_mask": kept if is_limited else None}
        log_probs, _ = calculate_log_probs_and_entropy(logits, tokens, None, **options)
        torch.autograd.grad(log_probs.sum(), logits)
        return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize()

    # Once before, for what a first call loads.
    touched_bytes()
    assert touched_bytes() < 1.5 * logits.numel() * logits.element_size()


def test_what_does_not_fit_is_an_error():
    logits, tokens, kept, _ = random_case()
    mask = as_mask(kept)
    with pytest.raises(ValueError, match=r"bool and as large as the logits, \(17, 24\), got float32 \(17, 24\)"):
        calculate_log_probs_and_entropy(logits, tokens, None, log_prob_keep_mask=mask.float())
    with pytest.raises(ValueError, match=r"got bool \(17, 23\)"):
        calculate_log_probs_and_entropy(logits, tokens, None, log_prob_keep_mask=mask[:, 1:])
    with pytest.raises(ValueError, match="17 rows need 18 offsets from 0 to their number"):
        calculate_log_probs_and_entropy(logits, tokens, None, log_prob_keep_mask=as_kept_tokens(kept[1:]))


def vocabulary_parallel_worker():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = []
    for form in (as_mask, as_kept_tokens):
        for options in PARALLEL_OPTIONS:
            logits, tokens, kept, weights = random_case()
            local_kept = form(kept)
            if form is as_mask:
                local_kept = local_kept.chunk(world_size, dim=1)[rank]
            local_logits = logits.chunk(world_size, dim=1)[rank]
            results.append(fused(local_logits, tokens, local_kept, weights, dist.group.WORLD, **options))
    return results


PARALLEL_OPTIONS = (
    {"with_entropy": False},
    {"temperature": 0.7, "chunk_size": 4},
    {"with_entropy_grad": False},
)


def test_a_vocabulary_in_two_processes_gives_what_one_gives():
    ranks = run_distributed(vocabulary_parallel_worker, 2)
    for case, (left, right) in enumerate(zip(*ranks, strict=True)):
        options = PARALLEL_OPTIONS[case % len(PARALLEL_OPTIONS)]
        logits, tokens, kept, weights = random_case()
        entropy_grad = options.get("with_entropy", True) and options.get("with_entropy_grad", True)
        expected = reference(logits, tokens, kept, weights, options.get("temperature", 1.0), entropy_grad)
        torch.testing.assert_close(left[0], expected[0], atol=1e-8, rtol=0)
        assert torch.equal(left[0], right[0])
        if left[1] is not None:
            torch.testing.assert_close(left[1], expected[1], atol=1e-8, rtol=0)
            assert torch.equal(left[1], right[1])
        torch.testing.assert_close(torch.cat([left[2], right[2]], dim=1), expected[2], atol=1e-8, rtol=0)


VOCABULARY = 11
LENGTHS = ((9, 5), (4, 1), (17, 12), (3, 2))


def make_batch(cp, multiple=4):
    generator = random.Random(5)
    data = {"tokens": [], "total_lengths": [], "response_lengths": [], "rollout_top_p_token_ids": [], "kept": [],
            "rollout_top_p_token_offsets": []}  # fmt: skip
    for total, response in LENGTHS:
        tokens = [generator.randrange(VOCABULARY) for _ in range(total)]
        kept = [sorted(generator.sample(range(VOCABULARY), generator.randint(1, 4))) for _ in range(response)]
        for t, ids in enumerate(kept):
            kept[t] = sorted({*ids, tokens[total - response + t]})
        offsets = [0]
        for ids in kept:
            offsets.append(offsets[-1] + len(ids))
        data["tokens"].append(torch.tensor(tokens))
        data["total_lengths"].append(total)
        data["response_lengths"].append(response)
        data["kept"].append(kept)
        data["rollout_top_p_token_ids"].append(torch.tensor([i for ids in kept for i in ids], dtype=torch.int32))
        data["rollout_top_p_token_offsets"].append(torch.tensor(offsets, dtype=torch.int32))
    return RolloutData(data, cp).micro_batch(range(len(LENGTHS)), multiple)


def sets_of_rows(batch):
    """Kept ids, ascending, by row of a rank that predicts a response token."""
    kept, rows = kept_tokens(batch), batch.stream.predicting_rows.index.tolist()
    offsets, ids = kept.offsets.tolist(), kept.token_ids.tolist()
    return {row: sorted(ids[start:end]) for row, start, end in zip(rows, offsets[:-1], offsets[1:], strict=True)}


def test_no_sets_no_replay():
    assert kept_tokens(MicroBatch({"stream": None})) is None


def places_of_rows(stream, rank, size):
    """Where a rank's rows stand in the whole stream."""
    if stream.cp.all_gather or size == 1:
        return range(rank * len(stream.tokens), (rank + 1) * len(stream.tokens))
    places, begin = [], 0
    for length in stream.sequence_lengths:
        chunk = length // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            places += range(begin + number * chunk, begin + (number + 1) * chunk)
        begin += length
    return places


@pytest.mark.parametrize("size, all_gather", [(1, False), (2, False), (3, False), (2, True), (3, True)])
def test_sets_stand_at_the_rows_that_predict_their_tokens(size, all_gather):
    seen = {}
    for rank in range(size):
        batch = make_batch(ContextParallel(size, rank, None, all_gather) if size > 1 else NO_CONTEXT_PARALLEL)
        sets = sets_of_rows(batch)
        places = places_of_rows(batch["stream"], rank, size)
        seen.update({places[row]: ids for row, ids in sets.items()})
    expected, start = {}, 0
    for sample, (total, response) in enumerate(LENGTHS):
        for t in range(response):
            expected[start + total - response - 1 + t] = batch["kept"][sample][t]
        start += batch["stream"].sequence_lengths[sample]
    assert seen == expected


def test_the_loss_is_that_of_the_renormalised_distribution():
    batch = make_batch(NO_CONTEXT_PARALLEL)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(batch["stream"].tokens), VOCABULARY, generator=generator).requires_grad_()
    # The ratios are the probabilities themselves, and none is clipped.
    args = objective_args(
        calculate_per_token_loss=True, rollout_temperature=1.0, use_kl_loss=False, entropy_coef=0.0, eps_clip=1.0,
        eps_clip_high=1.0,
    )  # fmt: skip
    batch["loss_masks"] = [torch.ones(response) for _, response in LENGTHS]
    batch["log_probs"] = [torch.zeros(response) for _, response in LENGTHS]
    batch["advantages"] = [torch.ones(response) for _, response in LENGTHS]
    loss, _ = loss_function(args, batch, logits, None)
    loss.backward()

    leaf = logits.detach().double().requires_grad_()
    expected, start = 0.0, 0
    for sample, (total, response) in enumerate(LENGTHS):
        for t in range(response):
            place = start + total - response + t
            kept = batch["kept"][sample][t]
            row = leaf[place - 1]
            token = batch["tokens"][sample][total - response + t]
            expected = expected - (row[token] - torch.logsumexp(row[kept], 0)).exp()
        start += total
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(logits.grad.double(), leaf.grad, rtol=1e-5, atol=1e-7)


def imitation(args, batch, logits, sum_of_sample_mean):
    return sft_loss_function(args, batch, logits, sum_of_sample_mean)


@pytest.mark.parametrize(
    "objective",
    [{"loss_type": "sft_loss"}, {"loss_type": "custom_loss", "custom_loss_function_path": f"{__file__}:imitation"}],
)
def test_imitation_is_of_tokens_among_the_whole_vocabulary_however_they_were_sampled(objective):
    batch = make_batch(NO_CONTEXT_PARALLEL)
    batch["loss_masks"] = [torch.ones(response) for _, response in LENGTHS]
    logits = torch.randn(len(batch.stream.tokens), VOCABULARY, generator=torch.Generator().manual_seed(3))
    args = objective_args(**objective, calculate_per_token_loss=True)
    loss, _ = loss_function(args, batch, logits, None)
    places = batch.stream.predicting_rows.index
    expected = logits.log_softmax(-1)[places, batch.stream.next_tokens[places]].tolist()
    assert float(loss) == pytest.approx(-sum(expected), rel=1e-5)
    if args.loss_type == "sft_loss":
        of_pass, _ = response_log_probs(args, batch, logits, None, with_entropy=False)
        assert of_pass.tolist() == pytest.approx(expected, rel=1e-5)


COLUMNS = ("total_lengths", "response_lengths")
SETS = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")


def likelihood(args, batch, logits, sum_of_sample_mean):
    """A loss of a user's, who hands on the columns that the helper needs; of the batch, of copies, and of other tokens."""
    lengths = {name: batch[name] for name in COLUMNS}

    def found(tokens):
        return torch.cat(get_log_probs_and_entropy(logits, args=args, unconcat_tokens=tokens, **lengths)["log_probs"])

    args.found = [found(batch["unconcat_tokens"]), found([row.clone() for row in batch["tokens"]])]
    args.of_others = found([(row + 1) % VOCABULARY for row in batch["tokens"]])
    return sum_of_sample_mean(-args.found[0]), {}


@pytest.mark.parametrize("size, rank", [(1, 0), (2, 0), (2, 1)])
def test_a_loss_of_the_users_has_log_probs_within_the_sets(monkeypatch, size, rank):
    cp = ContextParallel(size, rank, None)
    monkeypatch.setattr(context_parallel, "_told", cp)
    batch = make_batch(cp)
    batch["loss_masks"] = [torch.ones(response) for _, response in LENGTHS]
    logits = torch.randn(len(batch.stream.tokens), VOCABULARY, generator=torch.Generator().manual_seed(3))
    args = objective_args(loss_type="custom_loss", custom_loss_function_path=f"{__file__}:likelihood")
    args.calculate_per_token_loss = True
    loss, _ = loss_function(args, batch, logits, None)
    within, _ = response_log_probs(args, batch, logits, None, with_entropy=False)
    assert all(torch.equal(found, within) for found in args.found)
    assert float(loss) == pytest.approx(-float(within.sum()))
    # Outside of a loss there are the sets that a caller gives.
    lengths = {name: batch[name] for name in COLUMNS}

    def outside(tokens, **sets):
        found = get_log_probs_and_entropy(logits, args=args, unconcat_tokens=tokens, **lengths, **sets)
        return torch.cat(found["log_probs"])

    assert torch.equal(outside(batch["tokens"], **{name: batch[name] for name in SETS}), within)
    assert (outside(batch["tokens"]) < within - 1e-3).any()
    # Other tokens were not sampled from the sets.
    assert torch.equal(args.of_others, outside([(row + 1) % VOCABULARY for row in batch["tokens"]]))


def test_offsets_of_another_response_are_refused():
    batch = make_batch(NO_CONTEXT_PARALLEL)
    batch["rollout_top_p_token_offsets"][1] = torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="of sample 1 has 3 entries for 1 response tokens"):
        kept_tokens(batch)
