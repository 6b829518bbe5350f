"""The plan's estimate against the peak of live tensors in real training steps."""

import pytest

from tests.support.processes.distributed import run_distributed
from tools.bench.bench_memory_plan import FULL, LAYOUTS, MODELS, case_words, estimated, peak_of_training

TOLERANCE = 0.15
SMALL = (
    "--num-layers 3 --hidden-size 192 --ffn-hidden-size 576 --num-attention-heads 4 --num-query-groups 2 --kv-channels 48 "
    "--vocab-size 4000 --qk-layernorm"
)


def peaks_of(commands):
    return [peak_of_training(words) for words in commands]


def check(words, measured, *, tolerance):
    estimate, _ = estimated(words)
    assert estimate == pytest.approx(measured, rel=tolerance), f"{words}: {estimate} announced, {measured} measured"


def test_small_model_on_two_ranks(monkeypatch):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    monkeypatch.setitem(MODELS, "small", SMALL)
    layouts = ("TP 2, sequence parallel", "DP 2, full recompute")
    commands = [case_words("small", layout) for layout in layouts]
    results = run_distributed(peaks_of, 2, (commands,), env={"SLIME_ACCELERATOR": "cpu"})
    for words, *ranks in zip(commands, *results, strict=True):
        check(words, max(ranks), tolerance=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ["1 rank, full recompute", "TP 2"])
def test_fifty_million_parameters_and_more(monkeypatch, model, layout):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    words = case_words(model, layout)
    results = run_distributed(peaks_of, LAYOUTS[layout][0], ([words],), env={"SLIME_ACCELERATOR": "cpu"}, timeout=300)
    check(words, max(peaks[0] for peaks in results), tolerance=TOLERANCE)


def test_models_have_fifty_million_parameters(monkeypatch):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    from slime.arguments import parse_args
    from slime.plan import make_plan

    totals = [
        make_plan(parse_args(argv=[*case_words(model, "1 rank"), "--dry-run"])).parameters.total for model in MODELS
    ]
    assert len(totals) >= 3 and min(totals) >= 50_000_000 and FULL
