import pytest

from tools.bench.gpu import mfu
from tools.bench.gpu.measured_rank import Case, cases_of, flops_of_step, make_shape_parser


@pytest.fixture
def arguments(monkeypatch, tmp_path):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    return lambda case: case.arguments(tmp_path)


@pytest.mark.parametrize(("shape", "hidden"), [("qwen3-0.6B", 1024), ("qwen3-1.7B", 2048)])
def test_flops_of_a_step_by_hand(arguments, shape, hidden):
    """Two FLOPs for a multiplication and its addition; a backward pass costs two forward passes.

    Of a token in a layer: query and output, each from `hidden` to 16 heads of 128, key and value, each to 8 heads, and three
    projections of the MLP, which is three times as wide as `hidden`; then the head. Of two tokens of which one sees the other:
    a product of queries and keys, one of weights and values, each 2048 wide; L tokens have L²/2 such pairs.
    """
    args = arguments(Case(shape, 2, 8192, tiny=False))
    per_token = 28 * 2 * (2 * hidden * 2048 + 2 * hidden * 1024 + 3 * hidden * 3 * hidden) + 2 * hidden * 151936
    pairs = 2048 * 2048 // 2 + 512 * 512 // 2
    expected = 3 * (2560 * per_token + 28 * pairs * 2 * 2 * 2048)
    assert flops_of_step(args, [2048, 512]) == expected


def test_utilisation():
    """250 TFLOP in half a second are 500 TFLOP/s: half of a peak of 1000, five eighths of a product that reaches 800."""
    row = mfu.row("a shape", 4096, 250 * 10**12, 0.5, 1000.0, 800.0)
    assert row == {
        "shape": "a shape", "tokens of a step": 4096, "model TFLOP": 250.0, "seconds": 0.5, "tokens per second": 8192.0,
        "TFLOP/s": 500.0, "MFU": 0.5, "of a matrix product": 0.625,
    }  # fmt: skip
    assert mfu.row("a shape", 4096, 10**12, 0.5, None, 800.0)["MFU"] is None


def test_the_step_is_packed_full(arguments):
    """Four samples fill a micro-batch; the flags ask for as many rollouts as there are in a step."""
    for count in (2, 8):
        case = Case("qwen3-1.7B", count, 8192, tiny=False)
        args = arguments(case)
        assert case.batches(args) == [[(2048, 2047)] * 4] * count
        assert args.global_batch_size == 4 * count and args.max_tokens_per_gpu == 8192
        assert args.bf16 and args.hidden_size == 2048 and not args.untie_embeddings_and_output_weights


def test_cases_by_the_options():
    parser = make_shape_parser("x", micro_batches=8)
    assert cases_of(parser.parse_args([])) == [
        Case("qwen3-0.6B", 8, 8192, tiny=False),
        Case("qwen3-1.7B", 8, 8192, tiny=False),
    ]
    assert cases_of(parser.parse_args(["--tiny"])) == [Case("qwen3-0.6B", 8, 256, tiny=True)]
    chosen = parser.parse_args(["--shapes", "qwen3-1.7B", "--tokens", "4096", "--micro-batches", "3"])
    assert cases_of(chosen) == [Case("qwen3-1.7B", 3, 4096, tiny=False)]
    # Beside a rehearsal, which knows two.
    assert cases_of(make_shape_parser("x").parse_args(["--tiny"]))[0].micro_batches == 2
