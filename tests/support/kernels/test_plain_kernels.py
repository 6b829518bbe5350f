"""The stand-ins for Transformer Engine's kernels, by plain formulas and the gradients that autograd finds for these."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.support.kernels import plain_fp8, plain_kernels, plain_permutation

DType = plain_kernels.DType
WIDTH = 8


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm_and_its_gradients(zero_centered):
    x, weight, gradient = drawn(5, WIDTH), drawn(WIDTH), drawn(5, WIDTH).detach()
    expected = F.rms_norm(x, (WIDTH,), weight + zero_centered, 1e-6)
    expected.backward(gradient)
    with torch.no_grad():
        y, _, r = plain_kernels.rmsnorm_fwd(x, weight, 1e-6, None, None, DType.kFloat32, 0, zero_centered)
        of_x, of_weight = plain_kernels.rmsnorm_bwd(gradient, x, r, weight, 0, zero_centered)
    for found, wanted in ((y, expected), (of_x, x.grad), (of_weight, weight.grad)):
        torch.testing.assert_close(found, wanted)


def product(a, transposes_a, b, transposes_b, out=None, bias=None, *, grad=False, accumulate=False, quantizer=None):
    return plain_kernels.generic_gemm(
        a, transposes_a, b, transposes_b, out, quantizer, None, bias, DType.kFloat32, False, None, grad, None, 0, accumulate,
        True,
    )  # fmt: skip


def test_products_of_a_linear_layer_and_their_gradients():
    """Forwards, and for the gradients of the input, of the weight, which is added to what is there, and of the bias."""
    x, weight, bias, gradient = drawn(2, 3, WIDTH), drawn(5, WIDTH), drawn(5), drawn(2, 3, 5).detach()
    expected = F.linear(x, weight, bias)
    expected.backward(gradient)
    with torch.no_grad():
        torch.testing.assert_close(product(weight, True, x, False, bias=bias)[0], expected)
        torch.testing.assert_close(product(weight, False, gradient, False)[0], x.grad)
        of_weight = torch.ones(5, WIDTH)
        _, of_bias, _, _ = product(x, False, gradient, True, of_weight, bias, grad=True, accumulate=True)
    torch.testing.assert_close(of_weight, 1 + weight.grad)
    torch.testing.assert_close(of_bias, bias.grad)


@pytest.mark.parametrize("rows", [[2, 0, 3], [0, 0, 0]])
def test_grouped_products_are_products_of_each_group(rows):
    x, weights, bias = drawn(sum(rows), WIDTH).detach(), drawn(3, 5, WIDTH).detach(), drawn(3, 5).detach()
    whole = torch.empty(sum(rows), 5)
    plain_kernels.te_general_grouped_gemm(
        list(weights), True, x.split(rows), False, [whole], DType.kFloat32, rows, list(bias), DType.kFloat32, True, None,
        False, None, 0, False, True, 0,
    )  # fmt: skip
    groups = zip(x.split(rows), weights, bias, strict=True)
    torch.testing.assert_close(whole, torch.cat([F.linear(*group) for group in groups]))
    gradients, of_bias = [torch.full((5, WIDTH), 7.0) for _ in rows], [torch.zeros(5) for _ in rows]
    plain_kernels.te_general_grouped_gemm(
        x.split(rows), False, whole.split(rows), True, gradients, DType.kFloat32, rows, of_bias, DType.kFloat32, False, None,
        True, None, 0, False, True, 0,
    )  # fmt: skip
    for part, inputs, found, found_bias in zip(whole.split(rows), x.split(rows), gradients, of_bias, strict=True):
        torch.testing.assert_close(found, part.T @ inputs)
        torch.testing.assert_close(found_bias, part.sum(0))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_and_its_gradient(interleaved):
    """As complex numbers; the last channels stay, and so do rows behind the samples. Parts of samples are rotated by their
    positions in these."""
    lengths, half = [8, 4], 3
    x = drawn(14, 2, WIDTH)
    angles = torch.rand(8, half, generator=torch.Generator().manual_seed(0))
    frequencies = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    frequencies = frequencies[:, None, None]
    positions = torch.cat([torch.arange(length) for length in lengths])
    pairs = x[:12, :, : 2 * half].unflatten(-1, (half, 2) if interleaved else (2, half))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(()), angles)[positions][:, None]
    turned = torch.view_as_real(turned)
    turned = (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)
    expected = torch.cat([torch.cat([turned, x[:12, :, 2 * half :]], -1), x[12:]])
    boundaries = torch.tensor([0, 8, 12], dtype=torch.int32)

    def rotate(kernel, rows, boundaries, size=1, rank=0):
        with torch.no_grad():
            return kernel(rows, frequencies, None, None, interleaved, boundaries, size, rank)

    torch.testing.assert_close(rotate(plain_kernels.fused_rope_forward, x, boundaries), expected)
    of_one = rotate(plain_kernels.fused_rope_forward, x[:8, None], None)
    torch.testing.assert_close(of_one[:, 0], expected[:8])
    for rank, own in enumerate(([0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10])):
        torch.testing.assert_close(rotate(plain_kernels.fused_rope_forward, x[own], boundaries, 2, rank), expected[own])
    gradient = drawn(14, 2, WIDTH).detach()
    expected.backward(gradient)
    torch.testing.assert_close(rotate(plain_kernels.fused_rope_backward, gradient, boundaries), x.grad)


def test_packed_samples_are_unpacked_and_packed_again():
    x, boundaries = drawn(6, 2).detach(), torch.tensor([0, 2, 5], dtype=torch.int32)
    unpacked = plain_kernels.convert_thd_to_bshd(x, boundaries, 2, 4)
    assert torch.equal(unpacked[0, :2], x[:2]) and torch.equal(unpacked[1, :3], x[2:5])
    assert not unpacked[0, 2:].any() and not unpacked[1, 3:].any()
    assert torch.equal(
        plain_kernels.convert_bshd_to_thd(unpacked, boundaries, 6), torch.cat([x[:5], torch.zeros(1, 2)])
    )


def test_norms_and_scales_of_many_tensors():
    tensors = [drawn(3).detach(), drawn(2, 2, dtype=torch.bfloat16).detach()]
    norm, each = plain_kernels.multi_tensor_l2norm(0, None, [tensors], True)
    flat = torch.cat([tensor.float().flatten() for tensor in tensors])
    torch.testing.assert_close(norm, flat.norm().view(1))
    torch.testing.assert_close(each, torch.stack([tensor.float().norm() for tensor in tensors]))
    plain_kernels.multi_tensor_scale(0, None, [tensors, tensors], 0.5)
    torch.testing.assert_close(torch.cat([tensor.float().flatten() for tensor in tensors]), 0.5 * flat)


@pytest.mark.parametrize(("mode", "kind"), [(0, torch.optim.Adam), (1, torch.optim.AdamW)])
def test_adam_is_that_of_torch(mode, kind):
    parameter, reference = drawn(4).detach(), torch.nn.Parameter(drawn(4).detach().clone())
    copy, rounded = parameter.clone(), parameter.bfloat16()
    # Together they begin as the others.
    cut, remainder = (
        parameter.view(torch.int16)[1::2].clone().view(torch.bfloat16),
        parameter.view(torch.int16)[::2].clone(),
    )
    cut.view(torch.int16).add_((remainder < 0).short())
    plain, with_copy, with_remainder = ([torch.zeros(4), torch.zeros(4)] for _ in range(3))
    optimizer = kind([reference], lr=0.1, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.3)
    for step in (1, 2, 3):
        reference.grad = drawn(4, step).detach()[:, 0]
        optimizer.step()
        numbers = 0.1, 0.9, 0.95, 1e-3, step, mode, 1, 0.3
        plain_kernels.multi_tensor_adam(0, None, [[t] for t in (reference.grad, parameter, *plain)], *numbers)
        plain_kernels.multi_tensor_adam(0, None, [[t] for t in (reference.grad, rounded, *with_copy, copy)], *numbers)
        plain_kernels.multi_tensor_adam_param_remainder(
            0, None, [[t] for t in (reference.grad, cut, *with_remainder, remainder)], *numbers
        )
    torch.testing.assert_close(parameter, reference.detach())
    torch.testing.assert_close(copy, reference.detach())
    assert torch.equal(rounded, copy.bfloat16())
    assert torch.equal(((cut.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32), copy)


def test_tokens_go_to_their_experts_and_come_back():
    chosen = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)
    x, probs = drawn(5, WIDTH).detach(), drawn(5, 3).detach().masked_fill(~chosen, 0)
    row_id_map = plain_permutation.make_row_id_map(chosen, 5, 3)
    # The example in Transformer Engine's source; -1 is where it leaves anything.
    assert row_id_map.tolist() == [
        [3, 0, -1, 1, 0, -1, 2], [5, 1, -1, 2, 0, -1, 2], [6, -1, -1, 2, -1, -1, 1], [4, 2, -1, 1, 0, -1, 2],
        [-1, -1, -1, -1, -1, -1, 0],
    ]  # fmt: skip
    rows, scales, of_rows = plain_permutation.permute_with_mask_map(x, row_id_map, probs, x, 5, 3, 7, WIDTH, WIDTH)
    tokens = [0, 1, 3, 0, 3, 1, 2]
    assert torch.equal(rows, x[tokens]) and torch.equal(scales, rows)
    assert torch.equal(of_rows, probs.T[chosen.T])
    summed, by_token = plain_permutation.unpermute_with_mask_map(rows, row_id_map, None, of_rows, 5, 3, WIDTH)
    torch.testing.assert_close(summed, x * chosen.sum(1, keepdim=True))
    assert torch.equal(by_token, probs)
    weighted, _ = plain_permutation.unpermute_with_mask_map(rows, row_id_map, probs, None, 5, 3, WIDTH)
    torch.testing.assert_close(weighted, x * probs.sum(1, keepdim=True))


def test_chunks_are_sorted_and_put_back():
    x, probs = drawn(6, 2).detach(), drawn(6).detach()
    sizes, order = torch.tensor([1, 3, 0, 2]), torch.tensor([3, 1, 2, 0])
    where = plain_permutation.make_chunk_sort_map(sizes, order, 6, 4)
    rows, of_rows = plain_permutation.sort_chunks_by_map(x, where, probs, 6, 2, True)
    sorted_rows = [4, 5, 1, 2, 3, 0]
    assert torch.equal(rows, x[sorted_rows]) and torch.equal(of_rows, probs[sorted_rows])
    back, back_probs = plain_permutation.sort_chunks_by_map(rows, where, of_rows, 6, 2, False)
    assert torch.equal(back, x) and torch.equal(back_probs, probs)


@pytest.mark.parametrize("dtype", [DType.kFloat8E4M3, DType.kFloat8E5M2])
@pytest.mark.parametrize("kind", ["tensor", "rows", "squares"])
def test_numbers_in_fp8_are_as_near_as_their_scales_let_them(kind, dtype):
    """Both as they are and transposed. Rounding to 3 or 2 bits behind the first one moves a number by at most 1/16 or 1/8 of
    it, and one that is too small for that by no more than the smallest step, as far below the largest number of the block."""
    bits = 3 if dtype == DType.kFloat8E4M3 else 2
    x = (drawn(200, 150) * torch.logspace(-2, 2, 150)).detach()
    tensor = in_fp8(x, kind, dtype)
    smallest = torch.finfo(plain_fp8._FLOAT8[dtype]).smallest_normal / 2**bits
    for found in (plain_fp8.values_of(tensor), plain_fp8.values_of(without_rows(tensor))):
        # A scale that is a power of two may be half of what there would be room for.
        block = x.abs().amax() if kind != "rows" else torch.maximum(x.abs().amax(1, keepdim=True), x.abs().amax(0))
        bound = torch.maximum(x.abs() / 2 ** (bits + 1), block / plain_fp8.largest(dtype) * smallest)
        assert found.shape == x.shape and bool(((found - x).abs() <= bound * 1.001).all())
        assert not torch.equal(found, x)


def in_fp8(x, kind, dtype):
    """`x` in FP8 by a quantizer as Transformer Engine makes them, as far as the kernel looks at it."""

    def make_empty(shape, dtype=None):
        rows, columns = shape
        blocks = {"rows": (-(-columns // 128), rows + 4), "squares": (-(-rows // 128), -(-columns // 128) + 2)}
        if kind == "tensor":
            return SimpleNamespace(
                _data=torch.zeros(shape, dtype=torch.uint8), _scale_inv=torch.zeros(1), _fp8_dtype=own.dtype,
                _transpose=torch.zeros(columns, rows, dtype=torch.uint8),
            )  # fmt: skip
        transposed = {"rows": (-(-rows // 128), columns + 4), "squares": blocks["squares"][::-1]}
        return SimpleNamespace(
            _rowwise_data=torch.zeros(shape, dtype=torch.uint8), _rowwise_scale_inv=torch.zeros(blocks[kind]),
            _columnwise_data=torch.zeros(columns, rows, dtype=torch.uint8),
            _columnwise_scale_inv=torch.zeros(transposed[kind][0] + 1, transposed[kind][1] + 4),
            _fp8_dtype=own.dtype, _is_2D_scaled=kind == "squares",
        )  # fmt: skip

    own = SimpleNamespace(dtype=int(dtype), make_empty=make_empty)
    if kind == "tensor":
        own.use_existing_amax = False
    else:
        own.block_scaling_dim = 2 if kind == "squares" else 1
        own.force_pow_2_scales, own.amax_epsilon = True, 0.0
    return plain_kernels.quantize(x, own)


def without_rows(tensor):
    """The tensor with nothing but its transposed matrix."""
    absent = {name: None for name in ("_data", "_rowwise_data") if name in vars(tensor)}
    return SimpleNamespace(**{**vars(tensor), **absent})


def test_the_scales_of_delayed_follow_the_largest_numbers_of_some_steps():
    history, scale = torch.tensor([[0.0, 0.0], [4.0, 1.0], [1.0, 2.0]]), torch.tensor([1.0, 7.0])
    plain_kernels.fused_amax_and_scale_update_after_reduction(
        torch.tensor([2.0, torch.inf]), [history], [scale], "max", DType.kFloat8E4M3, 1
    )
    assert history.tolist() == [[0.0, 0.0], [1.0, 2.0], [2.0, torch.inf]]
    # Half of what the largest number of the first tensor, 4, has room for; where a number is none, the scale stays.
    assert scale.tolist() == [448 / 4 / 2, 7.0]


def test_rows_of_groups_are_padded_with_zeros_and_found_again():
    x, out = drawn(5, 2).detach(), torch.full((12, 2), 9.0)
    plain_kernels.fused_multi_row_padding(x, out, [2, 0, 3], [4, 0, 8])
    assert torch.equal(out, torch.cat([x[:2], torch.zeros(2, 2), x[2:], torch.zeros(5, 2)]))
    back = torch.empty(5, 2)
    plain_kernels.fused_multi_row_unpadding(out, back, [4, 0, 8], [2, 0, 3])
    assert torch.equal(back, x)


def test_what_has_no_stand_in_says_its_name():
    with pytest.raises(NotImplementedError, match=r"transformer_engine_torch.fused_attn_fwd has no stand-in"):
        plain_kernels.fused_attn_fwd(1)
    with pytest.raises(NotImplementedError, match="plain kernels have no quantizer"):
        product(drawn(1, 2), True, drawn(1, 2), False, quantizer="FP8")
