"""Log-probs, entropy and their gradients against torch's own, chunk by chunk."""

import math
import re
import threading

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slime.training import log_probs as row_chunks
from slime.training.log_probs import calculate_log_probs_and_entropy, for_row_chunks, log_sums
from slime.training.packed_stream import Rows
from slime.utils import device
from slime.utils.device import Accelerator, CompiledFunction, CudaAccelerator
from tests.support.processes.distributed import run_distributed

VOCAB_SIZE = 37


def random_case(token_count=23, vocab_size=VOCAB_SIZE, scale=3.0, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(token_count, vocab_size, generator=generator) * scale).to(dtype)
    tokens = torch.randint(vocab_size, (token_count,), generator=generator)
    weights = torch.randn(2, token_count, generator=generator)
    return logits, tokens, weights


def reference(logits, tokens, weights, temperature=1.0, entropy_grad=True):
    """Log-probs, entropy and gradient of their weighted sum in float64 by torch's own operators."""
    logits = logits.detach().double().clone().requires_grad_()
    all_log_probs = torch.log_softmax(logits / temperature, dim=-1)
    log_probs = all_log_probs.gather(1, tokens[:, None])[:, 0]
    probabilities = all_log_probs.exp()
    entropy = -torch.where(probabilities > 0, probabilities * all_log_probs, 0.0).sum(-1)
    total = (log_probs * weights[0]).sum()
    if entropy_grad:
        total = total + (entropy * weights[1]).sum()
    total.backward()
    return log_probs.detach(), entropy.detach(), logits.grad


def fused(logits, tokens, weights, **kwargs):
    logits = logits.clone().requires_grad_()
    log_probs, entropy = calculate_log_probs_and_entropy(logits, tokens, None, with_entropy=True, **kwargs)
    total = (log_probs * weights[0]).sum()
    if entropy.requires_grad:
        total = total + (entropy * weights[1]).sum()
    total.backward()
    return log_probs.detach(), entropy.detach(), logits.grad


@pytest.mark.parametrize(
    ("temperature", "expected", "expected_entropy"),
    [
        (1.0, [-0.440189699, -1.440189699, -2.440189699, -3.440189699], 0.947536964),
        (0.5, [-0.145077939, -2.145077939, -4.145077939, -6.145077939], 0.455428623),
        (2.0, [-0.787338672, -1.287338672, -1.787338672, -2.287338672], 1.245050427),
    ],
)
def test_four_logits(temperature, expected, expected_entropy):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 4)
    log_probs, entropy = calculate_log_probs_and_entropy(
        logits, torch.arange(4), None, with_entropy=True, temperature=temperature
    )
    assert log_probs.tolist() == pytest.approx(expected, abs=1e-6)
    assert entropy.tolist() == pytest.approx([expected_entropy] * 4, abs=1e-6)
    assert log_probs.dtype == entropy.dtype == torch.float32


@pytest.mark.parametrize("chunk_size", [-1, 0, 1, 5, 23, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_values_and_gradients_equal_the_unfused_reference(chunk_size, temperature, entropy_grad):
    case = random_case()
    expected = reference(*case, temperature=temperature, entropy_grad=entropy_grad)
    actual = fused(*case, temperature=temperature, with_entropy_grad=entropy_grad, chunk_size=chunk_size)
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_tensor.double(), expected_tensor, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_half_precision_logits_lose_nothing_but_the_rounding_of_the_gradient(dtype, temperature):
    logits, tokens, weights = random_case(dtype=dtype)
    log_probs, entropy, gradient = fused(logits, tokens, weights, temperature=temperature, chunk_size=4)
    expected_log_probs, expected_entropy, expected_gradient = reference(logits, tokens, weights, temperature)
    torch.testing.assert_close(log_probs.double(), expected_log_probs, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=2e-6, rtol=1e-6)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient.double(), expected_gradient, atol=1e-5, rtol=torch.finfo(dtype).eps)


def test_entropy_is_a_constant_without_its_gradient_and_absent_unless_asked_for():
    logits, tokens, _ = random_case()
    logits.requires_grad_()
    _, entropy = calculate_log_probs_and_entropy(logits, tokens, None, with_entropy=True, with_entropy_grad=False)
    assert not entropy.requires_grad
    log_probs, entropy = calculate_log_probs_and_entropy(logits, tokens, None)
    assert entropy is None
    assert log_probs.requires_grad


def test_either_output_alone_may_carry_the_gradient():
    logits, tokens, weights = random_case()
    for position in range(2):
        only = torch.zeros_like(weights)
        only[position] = weights[position]
        leaf = logits.clone().requires_grad_()
        outputs = calculate_log_probs_and_entropy(leaf, tokens, None, with_entropy=True)
        (outputs[position] * weights[position]).sum().backward()
        torch.testing.assert_close(leaf.grad.double(), reference(logits, tokens, only)[2], atol=2e-6, rtol=1e-6)


def test_the_logits_are_not_changed():
    logits, tokens, weights = random_case()
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = calculate_log_probs_and_entropy(leaf, tokens, None, with_entropy=True, temperature=0.5)
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.equal(leaf.detach(), logits)


def test_nothing_of_full_size_but_the_logits_is_kept_for_backward():
    logits, tokens, _ = random_case(dtype=torch.bfloat16)
    logits.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        calculate_log_probs_and_entropy(logits, tokens, None, with_entropy=True, temperature=0.5)
    full_size = [tensor for tensor in kept if tensor.numel() >= logits.numel()]
    assert [tensor.data_ptr() for tensor in full_size] == [logits.data_ptr()]


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tokens_give_empty_results_with_a_gradient_path(with_entropy):
    logits = torch.zeros(0, VOCAB_SIZE, requires_grad=True)
    log_probs, entropy = calculate_log_probs_and_entropy(
        logits, torch.zeros(0, dtype=torch.int64), None, with_entropy=with_entropy
    )
    assert log_probs.shape == (0,)
    total = log_probs.sum() + (entropy.sum() if with_entropy else 0.0)
    total.backward()
    assert logits.grad.shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_impossible_tokens_have_no_probability_and_no_gradient(temperature):
    logits, tokens, weights = random_case()
    padded = torch.cat([logits, torch.full((len(tokens), 5), -math.inf)], dim=1)
    expected = fused(logits, tokens, weights, temperature=temperature)
    actual = fused(padded, tokens, weights, temperature=temperature)
    torch.testing.assert_close(actual[0], expected[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(actual[1], expected[1], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(actual[2][:, :VOCAB_SIZE], expected[2], atol=1e-6, rtol=1e-6)
    assert (actual[2][:, VOCAB_SIZE:] == 0).all()


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[30000.0, 29999.0, -30000.0]])
    log_probs, entropy = calculate_log_probs_and_entropy(logits, torch.tensor([1]), None, with_entropy=True)
    probability = 1 / (1 + math.e)
    assert log_probs.item() == pytest.approx(math.log(probability), abs=1e-6)
    expected_entropy = -probability * math.log(probability) - (1 - probability) * math.log(1 - probability)
    assert entropy.item() == pytest.approx(expected_entropy, abs=1e-6)


def test_a_large_logit_is_rounded_alike_as_target_and_as_maximum():
    """30001 / 0.7 has no float32 value; the most likely token still has log-prob log(1 / (1 + e^{−1/0.7}))."""
    logits = torch.tensor([[30001.0, 30000.0]])
    log_probs, _ = calculate_log_probs_and_entropy(logits, torch.tensor([0]), None, temperature=0.7)
    # The difference of the two logits is exact to the spacing of float32 at 43000.
    assert log_probs.item() == pytest.approx(-math.log1p(math.exp(-1 / 0.7)), abs=2**-8)
    alone, _ = calculate_log_probs_and_entropy(logits[:, :1], torch.tensor([0]), None, temperature=0.7)
    assert alone.item() == 0.0


def test_float64_logits_are_computed_in_float64():
    logits, tokens, weights = random_case(dtype=torch.float64)
    actual, expected = fused(logits, tokens, weights, temperature=0.7), reference(logits, tokens, weights, 0.7)
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        assert actual_tensor.dtype == torch.float64
        torch.testing.assert_close(actual_tensor, expected_tensor, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
def test_a_token_outside_the_vocabulary_gets_log_prob_minus_infinity(token):
    logits, tokens, _ = random_case()
    tokens[3] = token
    log_probs, _ = calculate_log_probs_and_entropy(logits, tokens, None)
    assert log_probs[3] == -math.inf
    assert torch.isfinite(log_probs[:3]).all()


def test_a_column_slice_of_wider_logits_is_accepted():
    logits, tokens, weights = random_case(vocab_size=64)
    tokens %= 50
    leaf = logits.clone().requires_grad_()
    log_probs, _ = calculate_log_probs_and_entropy(leaf[:, :50], tokens, None)
    (log_probs * weights[0]).sum().backward()
    expected, _, gradient = reference(logits[:, :50], tokens, weights, entropy_grad=False)
    torch.testing.assert_close(log_probs.detach().double(), expected, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(leaf.grad[:, :50].double(), gradient, atol=2e-6, rtol=1e-6)
    assert (leaf.grad[:, 50:] == 0).all()


# One piece, pieces with gaps, neighbours, the ends alone; with chunks of 4 rows some lie in a piece, and some across.
SOME_ROWS = {
    "one piece": [range(3, 17)],
    "pieces": [range(1, 2), range(4, 12), range(12, 14), range(20, 23)],
    "ends": [range(0, 1), range(22, 23)],
    "none": [],
}


def some_rows(name):
    rows = Rows.at(SOME_ROWS[name], torch.device("cpu"))
    assert rows.index.tolist() == [row for part in rows.ranges for row in part]
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [-1, 4])
@pytest.mark.parametrize("name", SOME_ROWS)
def test_of_some_rows_the_others_are_not_read_and_get_no_gradient(name, chunk_size, temperature, dtype):
    logits, tokens, weights = random_case(dtype=dtype)
    rows = some_rows(name)
    only = rows.index, weights[:, rows.index]
    expected = fused(logits[only[0]], tokens[only[0]], only[1], temperature=temperature, chunk_size=chunk_size)
    others = torch.ones(len(tokens), dtype=torch.bool)
    others[rows.index] = False
    logits[others] = math.nan
    actual = fused(logits, tokens[only[0]], only[1], temperature=temperature, chunk_size=chunk_size, rows=rows)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    assert torch.equal(actual[2][rows.index], expected[2])
    assert (actual[2][others] == 0).all()


class OverBlock(TorchDispatchMode):
    """The operations that read or write as many elements as `count`."""

    def __init__(self, count):
        super().__init__()
        self.count, self.found = count, []

    def __torch_dispatch__(self, operation, types, args=(), options=None):
        result = operation(*args, **(options or {}))
        if not operation.is_view and operation._opname not in ("new_empty", "empty_like"):
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
            if any(tensor.numel() >= self.count for tensor in tensors):
                self.found.append(operation._opname)
        return result


@pytest.mark.parametrize(
    "with_entropy, temperature, forward, backward",
    [
        (False, 1.0, "copy_ amax sub exp_ sum", "index_fill_ copy_ sub exp_ mul_ copy_"),
        (False, 0.7, "copy_ div amax sub exp_ sum", "index_fill_ copy_ div sub exp_ mul_ copy_"),
        (True, 1.0, "copy_ amax sub clamp_ exp sum mul_ sum", "index_fill_ copy_ sub clamp_ mul exp_ add_ mul_ copy_"),
    ],
)
def test_passes_of_a_chunk_over_its_rows(with_entropy, temperature, forward, backward):
    """Each is one operation over the float32 of a chunk; on some rows, the others being written once in the gradient."""
    logits, tokens, _ = random_case(dtype=torch.bfloat16)
    rows = some_rows("one piece")
    logits.requires_grad_()
    block = len(rows.index) * VOCAB_SIZE

    def passes(compute):
        with OverBlock(block) as over:
            result = compute()
        # What is written at single places of the block.
        return result, " ".join(name for name in over.found if name not in ("index", "index_put_"))

    (log_probs, entropy), found = passes(
        lambda: calculate_log_probs_and_entropy(
            logits, tokens[rows.index], None, with_entropy, temperature=temperature, rows=rows
        )
    )
    assert found == forward
    total = log_probs.sum() + (entropy.sum() if with_entropy else 0.0)
    assert passes(total.backward)[1] == backward


class Compiling(Accelerator):
    """The CPU with what CUDA has: a compiler."""

    def fused(self, function):
        return CompiledFunction(function)


@pytest.fixture(
    params=[
        pytest.param(Compiling, marks=pytest.mark.slow, id="cpu"),
        pytest.param(CudaAccelerator, marks=pytest.mark.gpu, id="cuda"),
    ]
)
def compiling(request, monkeypatch):
    """The device; its functions are compiled, and each has to be."""
    accelerator = request.param()
    monkeypatch.setattr(row_chunks, "get_accelerator", lambda: accelerator)
    yield accelerator.current_device()
    for function in (row_chunks.sums_of_rows, row_chunks.gradient_of_rows):
        compiled = device.fused(function, accelerator)
        assert compiled._compiled is not None and not compiled._is_broken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_kernels_give_what_the_chunks_give(compiling, dtype):
    for name, temperature, entropy_grad in (("pieces", 0.7, False), ("pieces", 1.0, True), ("one piece", 0.7, True)):
        logits, tokens, weights = random_case(vocab_size=1003, dtype=dtype)
        logits[:, 17] = -math.inf
        tokens[5] = 1003
        rows = some_rows(name)
        index, options = rows.index, {"temperature": temperature, "with_entropy_grad": entropy_grad}
        expected = fused(logits, tokens[index], weights[:, index], rows=rows, chunk_size=4, **options)
        on_device = Rows(rows.ranges, index.to(compiling))
        actual = fused(
            *(column.to(compiling) for column in (logits, tokens[index], weights[:, index])), rows=on_device, **options
        )
        assert (actual[0].cpu() == -math.inf).tolist() == (index == 5).tolist()
        for one, other in zip(actual, expected, strict=True):
            bound = torch.finfo(one.dtype).eps if one.dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(one.cpu(), other, atol=2e-6, rtol=bound)


def test_compiled_log_probs_are_the_same_whether_or_not_the_entropy_is_asked_for(compiling):
    """A first pass asks for the log-probs alone, and the step that is compared with it for the entropy as well."""
    logits, tokens, _ = random_case(token_count=512, vocab_size=1003)
    logits, tokens = logits.to(compiling), tokens.to(compiling)
    alone, _ = calculate_log_probs_and_entropy(logits, tokens, None, temperature=0.7)
    compiled = counters["stats"]["unique_graphs"]
    beside, _ = calculate_log_probs_and_entropy(logits.requires_grad_(), tokens, None, True, temperature=0.7)
    assert counters["stats"]["unique_graphs"] == compiled > 0
    beside.sum().backward()
    assert torch.equal(beside, alone)


def test_a_compiled_target_is_rounded_as_its_row_is(compiling):
    """The only entry of a row, and the largest by far, has log-prob 0 whatever the temperature is."""
    logits, _, _ = random_case(token_count=512, vocab_size=2, scale=30000.0)
    logits[:, 1] = -math.inf
    tokens = torch.zeros(512, dtype=torch.int64, device=compiling)
    log_probs, _ = calculate_log_probs_and_entropy(logits.to(compiling).requires_grad_(), tokens, None, temperature=0.7)
    log_probs.sum().backward()
    assert (log_probs == 0.0).all()


def test_compiled_kernels_write_nothing_as_large_as_the_logits_but_the_gradient(compiling):
    logits, tokens, _ = random_case(vocab_size=1003, dtype=torch.bfloat16)
    rows = Rows.at(SOME_ROWS["pieces"], compiling)
    logits = logits.to(compiling).requires_grad_()
    (log_probs, _), forward = run_and_get_code(
        lambda: calculate_log_probs_and_entropy(
            logits, tokens.to(compiling)[rows.index], None, True, with_entropy_grad=False, rows=rows
        )
    )
    _, backward = run_and_get_code(lambda: log_probs.sum().backward())
    dimensions = [
        [
            sum(bool(size.strip()) for size in shape.split(","))
            for shape in re.findall(r"empty_strided_\w+\(\((.*?)\)", "".join(sources))
        ]
        for sources in (forward, backward)
    ]
    assert set(dimensions[0]) == {1} and dimensions[1].count(2) == 1


def test_wrong_shapes_and_temperatures_are_errors():
    logits, tokens, _ = random_case()
    with pytest.raises(ValueError, match=r"for each of 23 rows expected, got \(23, 37\) and \(22,\)"):
        calculate_log_probs_and_entropy(logits, tokens[1:], None)
    with pytest.raises(ValueError, match=r"for each of 14 rows expected, got \(23, 37\) and \(23,\)"):
        calculate_log_probs_and_entropy(logits, tokens, None, rows=some_rows("one piece"))
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        calculate_log_probs_and_entropy(logits, tokens, None, temperature=0.0)


def compute_on_rank() -> dict[str, tuple[torch.Tensor, ...]]:
    """By case log-probs, entropy and gradient of this rank's part of the vocabulary; and what is at the edges."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size, found = dist.get_rank(), dist.get_world_size(), {}
    for name, options in PARALLEL_CASES.items():
        logits, tokens, weights = random_case(vocab_size=1000, scale=1.0)
        local_logits = logits.chunk(world_size, dim=1)[rank].clone().requires_grad_()
        log_probs, entropy = calculate_log_probs_and_entropy(
            local_logits, tokens, dist.group.WORLD, with_entropy=True, **options
        )
        (log_probs * weights[0] + (entropy * weights[1] if entropy.requires_grad else 0.0)).sum().backward()
        found[name] = log_probs.detach(), entropy.detach(), local_logits.grad
    empty, _ = calculate_log_probs_and_entropy(
        torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), dist.group.WORLD, with_entropy=True
    )
    outside, _ = calculate_log_probs_and_entropy(torch.zeros(1, 4), torch.tensor([8]), dist.group.WORLD)
    return {**found, "edges": (empty, outside)}


PARALLEL_CASES = {
    "plain": {},
    "chunked": {"chunk_size": 5, "temperature": 0.7},
    "constant_entropy": {"with_entropy_grad": False},
}


def test_a_vocabulary_in_two_processes_gives_what_one_gives():
    of_ranks = run_distributed(compute_on_rank, 2)
    for name, options in PARALLEL_CASES.items():
        expected = fused(*random_case(vocab_size=1000, scale=1.0), **options)
        ranks = [found[name] for found in of_ranks]
        for position in range(2):
            assert torch.equal(ranks[0][position], ranks[1][position])
            torch.testing.assert_close(ranks[0][position], expected[position], atol=1e-6, rtol=0)
        gradient = torch.cat([rank[2] for rank in ranks], dim=1)
        torch.testing.assert_close(gradient, expected[2], atol=1e-6, rtol=0)
    for found in of_ranks:
        empty, outside = found["edges"]
        assert empty.shape == (0,)
        assert outside.item() == -math.inf


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    monkeypatch.setattr(row_chunks, "MIN_ELEMENTS", 0)
    outside = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(outside)


def no_scratch():
    return ()


@pytest.mark.parametrize(("row_count", "rows_per_chunk"), [(0, 4), (1, 4), (4, 4), (23, 4), (5, 100)])
def test_every_row_is_in_one_chunk(threads, row_count, rows_per_chunk):
    rows, found = torch.zeros(row_count), []
    for_row_chunks(rows, 2, rows_per_chunk, lambda start, stop: found.append((start, stop)), no_scratch)
    assert [row for start, stop in sorted(found) for row in range(start, stop)] == list(range(row_count))
    assert all(stop - start <= rows_per_chunk for start, stop in found)


def test_threads_work_side_by_side_with_a_scratch_of_their_own(threads):
    """No thread gets past its first chunk before all have begun one."""
    barrier, used, scratches = threading.Barrier(threads), {}, iter(range(threads))

    def compute(start, stop, scratch):
        name = threading.current_thread().name
        if name not in used:
            barrier.wait(30)
        used.setdefault(name, set()).add(scratch)
        assert threads == 1 or torch.get_num_threads() == 1
        assert not torch.is_grad_enabled()

    for_row_chunks(torch.zeros(12), 1, 1, compute, lambda: [next(scratches)])
    assert sorted(used.values(), key=str) == [{number} for number in range(threads)]


def test_what_a_chunk_raises_comes_out(threads):
    def compute(start, stop):
        if start == 3:
            raise KeyError("row 3")

    with pytest.raises(KeyError, match="row 3"):
        for_row_chunks(torch.zeros(6), 1, 1, compute, no_scratch)


def test_everybody_elses_threads_stay_as_they_are(threads):
    for_row_chunks(torch.zeros(6), 1, 1, lambda start, stop: None, no_scratch)
    assert torch.get_num_threads() == threads
    seen = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join(30)
    assert seen == [threads]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_log_probs_do_not_depend_on_the_number_of_threads(mode, monkeypatch):
    monkeypatch.setattr(row_chunks, "MIN_ELEMENTS", 0)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(37, 501, generator=generator).bfloat16()
    tokens = torch.randint(501, (37,), generator=generator)
    outside, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with mode():
                logits = values.clone().requires_grad_(mode is torch.enable_grad)
                outputs = calculate_log_probs_and_entropy(logits, tokens, None, with_entropy=True, chunk_size=4)
                if mode is torch.enable_grad:
                    sum(output.sum() for output in outputs).backward()
                results.append([*outputs, logits.grad])
    finally:
        torch.set_num_threads(outside)
    for one, three in zip(*results, strict=True):
        assert one is three is None or torch.equal(one, three)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_sums_are_what_log_probs_are_relative_to(temperature):
    logits, tokens, _ = random_case(dtype=torch.float64)
    rows = Rows.at([range(2, 5), range(9, 20)], logits.device)
    sums = log_sums(logits, None, 4, temperature=temperature, rows=rows)
    expected = torch.logsumexp(logits / temperature, dim=1)[rows.index]
    torch.testing.assert_close(sums, expected, rtol=0, atol=1e-12)
    chosen = tokens[rows.index]
    log_probs, _ = calculate_log_probs_and_entropy(logits, chosen, None, 4, temperature=temperature, rows=rows)
    torch.testing.assert_close(logits[rows.index, chosen] / temperature - sums, log_probs, rtol=0, atol=0)
