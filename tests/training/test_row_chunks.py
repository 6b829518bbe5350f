import threading

import pytest
import torch

from slime.training import log_probs as row_chunks
from slime.training.log_probs import calculate_log_probs_and_entropy, for_row_chunks


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
    rows, found = torch.zeros(row_count, 2), []
    for_row_chunks(rows, rows_per_chunk, lambda start, stop: found.append((start, stop)), no_scratch)
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

    for_row_chunks(torch.zeros(12, 1), 1, compute, lambda: [next(scratches)])
    assert sorted(used.values(), key=str) == [{number} for number in range(threads)]


def test_what_a_chunk_raises_comes_out(threads):
    def compute(start, stop):
        if start == 3:
            raise KeyError("row 3")

    with pytest.raises(KeyError, match="row 3"):
        for_row_chunks(torch.zeros(6, 1), 1, compute, no_scratch)


def test_everybody_elses_threads_stay_as_they_are(threads):
    for_row_chunks(torch.zeros(6, 1), 1, lambda start, stop: None, no_scratch)
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
