"""Adam with the state layout that Megatron's optimizers save and reload, and a form of it that keeps less on the device.

Megatron-Core expects the fused Adam of Transformer Engine or Apex: first and second moment per parameter, the step
count in the parameter group. Without either it falls back to torch's AdamW, which trains but whose state its
distributed optimizer cannot load again (0.16.1: KeyError 'step').

Megatron's precision-aware optimizer needs Transformer Engine's Adam, and its optimizer on the host needs CUDA streams.
`PrecisionAwareAdam` does the work of both on any device, with the same state in memory and in checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adam import adam as adam_of_torch

from slime.utils.device import get_accelerator

MAIN = "master_param"  # Megatron's name of a main parameter among the states
MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015, arXiv 1412.6980), with decoupled weight decay (Loshchilov & Hutter 2019, arXiv
    1711.05101) when `adam_w_mode`, else with L2 regularisation.

    State per parameter: `exp_avg`, `exp_avg_sq`, of the parameter's shape and dtype. Group entry `step`: int, absent
    before the first step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One update of all parameters that have a gradient."""
        if closure is not None:
            raise TypeError("Adam.step takes no closure")
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None and param.numel()]
            if params:
                group["step"] = int(group.get("step", 0)) + 1
                states = [self._moments(param) for param in params]
                moments = ([state[name] for state in states] for name in MOMENTS)
                self._update_tensors(group, params, [param.grad for param in params], *moments)

    def _update_tensors(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        gradients: list[torch.Tensor],
        exp_avg: list[torch.Tensor],
        exp_avg_sq: list[torch.Tensor],
    ) -> None:
        lr, decay, step, (beta1, beta2) = group["lr"], group["weight_decay"], group["step"], group["betas"]
        if self.adam_w_mode:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            gradients = torch._foreach_add(gradients, params, alpha=decay)
        torch._foreach_lerp_(exp_avg, gradients, 1 - beta1)
        torch._foreach_mul_(exp_avg_sq, beta2)
        torch._foreach_addcmul_(exp_avg_sq, gradients, gradients, 1 - beta2)

        denominator = torch._foreach_sqrt(exp_avg_sq)
        torch._foreach_div_(denominator, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(denominator, group["eps"])
        torch._foreach_addcdiv_(params, exp_avg, denominator, -lr / (1 - beta1**step))

    def _moments(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[param]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state


# How many entries are updated together. Beside the state a step needs memory for a few times their float32 values.
BLOCK = 2**22
# Dtypes whose range is too small for moments, so that these are stored with a scale. It brings all values below 2 to this
# power.
_SCALED = {torch.float16: 16, torch.float8_e4m3fn: 8}


@dataclass(frozen=True)
class HostShare:
    """The part of its state that an optimizer keeps in host memory, and updates there.

    fraction: share of the entries; they are chosen as whole pieces of tensors, in the order of the parameter groups.
    overlaps: gradients are copied to the host, and parameters back, while others are updated.
    by_torch: torch's fused Adam does the update, which is faster on a host and rounds a little differently.
    pins_state, pins_gradients: that memory is pinned, so the host need not wait for copies from and to the device.
    """

    fraction: float
    overlaps: bool = False
    by_torch: bool = False
    pins_state: bool = True
    pins_gradients: bool = True


class PrecisionAwareAdam(Adam):
    """Adam on the 16-bit or float32 weights themselves, whose moments and main parameters have dtypes of their own, and may
    be in host memory in part.

    Gradients are read from `decoupled_grad`, of any floating dtype. A step is computed in float32 and then rounded to what is
    stored, so with float32 it is that of `Adam` on float32 copies, bit for bit.

    State per parameter, of its shape: `exp_avg` and `exp_avg_sq` in their dtypes, and `master_param`, its value in more bits.
    A float32 parameter on the device of its state is its own main parameter, and has no `master_param`. With
    `store_param_remainders` a bfloat16 parameter holds the upper half of its float32 value, and `master_param` (int16) the
    remainder to be added. The parameter is then the nearest bfloat16; of two that are equally near it is the larger one. In
    host memory `master_param` is always whole.

    Values in float16 and in float8 (e4m3, stored as uint8) are divided by a power of two for every `BLOCK` entries, which
    follows from the largest one. Reading values and storing them again does not change them.

    Args:
        exp_avg_dtype, exp_avg_sq_dtype: float32, bfloat16, float16, or uint8 for float8.
        master_weight_dtype: float32 or float16.
        host: what is kept in host memory; None for nothing.
        settings: those of `Adam`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = True,
        host: HostShare | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(params, **settings)
        self._dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, MAIN: master_weight_dtype}
        self._remainders = store_param_remainders and master_weight_dtype == torch.float32
        self._host = host
        self._hosted: set[torch.Tensor] | None = None
        self._scales: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        self._host_gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._host_buffers: list[torch.Tensor] = []  # kept alive, because their memory is freed with them

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One update of all parameters that have a gradient."""
        if closure is not None:
            raise TypeError("PrecisionAwareAdam.step takes no closure")
        here, on_host = [], []
        for group in self.param_groups:
            params = [param for param in group["params"] if _gradient(param) is not None and param.numel()]
            if params:
                group["step"] = int(group.get("step", 0)) + 1
            for param in params:
                self.initialize_state(param)
                (on_host if self._is_hosted(param) else here).append((group, param))
        device, overlaps = get_accelerator(), self._host is not None and self._host.overlaps
        arrived = {}
        with device.aside() if overlaps else contextlib.nullcontext():
            for _, param in on_host if overlaps else ():
                arrived[param] = self._fetch_gradient(param)
        for group, param in here:
            self._update_blocks(group, param, _gradient(param))
        for group, param in on_host:
            (arrived.get(param) or self._fetch_gradient(param))()
            with device.aside() if overlaps else contextlib.nullcontext():
                self._update_blocks(group, param, self._host_gradients[param])
        if overlaps:
            device.join_aside()

    def initialize_state(self, param: torch.Tensor) -> None:
        """Give `param` moments of 0 and a main parameter of its own value, unless it has a state."""
        state = self.state[param]
        if state:
            return
        for name in MOMENTS:
            state[name] = self._empty(param, name, self._dtypes[name]).zero_()
        is_hosted = self._is_hosted(param)
        if self._remainders and param.dtype == torch.bfloat16 and not is_hosted:
            state[MAIN] = self._empty(param, MAIN, torch.int16).zero_()
        elif param.dtype != torch.float32 or is_hosted and param.device.type != "cpu":
            state[MAIN] = self._empty(param, MAIN, self._dtypes[MAIN])
            self.set_scaled_state(param, MAIN, param.float())

    def state_bytes(self, param: torch.Tensor) -> int:
        """Bytes that the states of `param` take on its device, without the powers of two."""
        if self._is_hosted(param):
            return 0
        each = sum(self._dtypes[name].itemsize for name in MOMENTS)
        if param.dtype != torch.float32:
            takes_remainder = self._remainders and param.dtype == torch.bfloat16
            each += 2 if takes_remainder else self._dtypes[MAIN].itemsize
        return param.numel() * each

    @torch.no_grad()
    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """A state of `param` in float32, 1-D; it may be the state itself."""
        return torch.cat([self._read(param, name, at) for at in _blocks(param)])

    @torch.no_grad()
    def set_scaled_state(self, param: torch.Tensor, name: str, values: torch.Tensor) -> None:
        """Store `values` (float32, of as many entries) as a state of `param`. With a remainder the parameter changes too."""
        flat = values.reshape(-1)
        for at in _blocks(param):
            self._write(param, name, at, flat[at].to(self.state[param][name].device))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the settings of the groups, and create states if `state_dict` has any, without their values: torch would round
        these to the parameters' dtype, and Megatron, whose `state_dict` has none, sets them later."""
        kept = self.state
        super().load_state_dict({**state_dict, "state": {}})
        self.state = kept
        for param in self._params() if state_dict["state"] else ():
            self.initialize_state(param)

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _is_hosted(self, param: torch.Tensor) -> bool:
        if self._host is None:
            return False
        if self._hosted is None:
            # Decided late, because Megatron replaces the parameters by this rank's parts after it has made the optimizer.
            share, taken, self._hosted = self._host.fraction * sum(each.numel() for each in self._params()), 0, set()
            for each in self._params():
                if taken + each.numel() / 2 <= share and self._host.fraction > 0:
                    self._hosted.add(each)
                    taken += each.numel()
        return param in self._hosted

    def _empty(self, param: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        scaled = _stored_as(dtype) in _SCALED
        is_hosted = self._is_hosted(param)
        device = torch.device("cpu") if is_hosted else param.device
        if scaled:
            self._scales[param, name] = torch.ones(len(_blocks(param)), device=device)
        if not is_hosted:
            return torch.empty(param.shape, dtype=dtype, device=device)
        return self._on_host(param.shape, dtype, pinned=self._host.pins_state)

    def _on_host(self, shape: torch.Size, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
        size = shape.numel() * dtype.itemsize
        buffer = get_accelerator().host_buffer(size) if pinned else torch.empty(size, dtype=torch.uint8)
        self._host_buffers.append(buffer)
        return buffer.view(dtype).view(shape)

    def _fetch_gradient(self, param: torch.Tensor) -> Callable[[], None]:
        """Start to copy the gradient of `param` to the host. Returns a function that waits until it is there."""
        gradient = _gradient(param)
        if param not in self._host_gradients:
            on_host = self._on_host(gradient.shape, gradient.dtype, pinned=self._host.pins_gradients)
            self._host_gradients[param] = on_host
        self._host_gradients[param].copy_(gradient, non_blocking=True)
        return get_accelerator().mark()

    def _update_blocks(self, group: dict[str, Any], param: torch.Tensor, gradient: torch.Tensor) -> None:
        by_torch = self._host is not None and self._host.by_torch and self._is_hosted(param)
        for at in _blocks(param):
            main, *moments = (self._read(param, name, at) for name in (MAIN, *MOMENTS))
            update = self._update_by_torch if by_torch else self._update_tensors
            update(group, [main], [gradient.reshape(-1)[at].float()], *([moment] for moment in moments))
            for name, values in zip((MAIN, *MOMENTS), (main, *moments), strict=True):
                self._write(param, name, at, values)
            if self.state[param].get(MAIN) is not None and self.state[param][MAIN].dtype != torch.int16:
                param.detach().view(-1)[at].copy_(main, non_blocking=True)

    def _update_by_torch(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        gradients: list[torch.Tensor],
        exp_avg: list[torch.Tensor],
        exp_avg_sq: list[torch.Tensor],
    ) -> None:
        beta1, beta2 = group["betas"]
        adam_of_torch(
            params, gradients, exp_avg, exp_avg_sq, [], [torch.tensor(group["step"] - 1.0)], fused=True, amsgrad=False,
            decoupled_weight_decay=self.adam_w_mode, beta1=beta1, beta2=beta2, lr=group["lr"], eps=group["eps"],
            weight_decay=group["weight_decay"], maximize=False,
        )  # fmt: skip

    def _read(self, param: torch.Tensor, name: str, at: slice) -> torch.Tensor:
        """Float32 values of a state, or of the parameter if it is its own main parameter. They are the memory itself if that is
        float32."""
        state, own = self.state[param].get(name), param.detach().view(-1)[at]
        if state is None:
            return own
        stored = state.view(-1)[at]
        if name == MAIN and stored.dtype == torch.int16:
            return _joined(own, stored)
        dtype = _stored_as(stored.dtype)
        if dtype not in _SCALED:
            return stored.float()
        return stored.view(dtype).float().mul_(self._scales[param, name][at.start // BLOCK])

    def _write(self, param: torch.Tensor, name: str, at: slice, values: torch.Tensor) -> None:
        state, own = self.state[param].get(name), param.detach().view(-1)[at]
        stored = own if state is None else state.view(-1)[at]
        if stored.data_ptr() == values.data_ptr():
            return
        dtype = _stored_as(stored.dtype)
        if name == MAIN and stored.dtype == torch.int16:
            _split_into(own, stored, values)
        elif dtype in _SCALED:
            largest = values.abs().max() if values.numel() else values.new_zeros(())
            mantissa, exponent = torch.frexp(largest)
            # Rounding may carry the largest value to the next power of two. The scale must follow from the rounded value, so
            # that reading and storing again gives the same scale.
            carry = mantissa.to(dtype).float() >= 1
            scale = torch.ldexp(torch.ones_like(largest), (exponent + carry - _SCALED[dtype]).clamp(-126, 127))
            self._scales[param, name][at.start // BLOCK] = scale
            stored.view(dtype).copy_(values / scale)
        else:
            stored.copy_(values)


@contextlib.contextmanager
def as_megatrons_adam(adam: type[torch.optim.Optimizer], **settings: Any) -> Iterator[None]:
    """In the block, Megatron's optimizers build `adam` with `settings` instead of their own Adam."""
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer

    usual = optimizer.Adam, distrib_optimizer.Adam
    try:
        # The distributed optimizer only checks that it is given the Adam that it knows.
        optimizer.Adam, distrib_optimizer.Adam = functools.partial(adam, **settings), adam
        yield
    finally:
        optimizer.Adam, distrib_optimizer.Adam = usual


def main_parameter(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> torch.Tensor:
    """The float32 value, 1-D, of a parameter that a precision-aware optimizer (this one, or Transformer Engine's) trains."""
    main = optimizer.state[param].get(MAIN)
    if main is None or param.dtype == torch.float32:
        return param.detach().float().view(-1)
    if main.dtype == torch.int16:
        return _joined(param.detach().view(-1), main.view(-1))
    return optimizer.get_unscaled_state(param, MAIN)


@torch.no_grad()
def set_main_parameter(optimizer: torch.optim.Optimizer, param: torch.Tensor, values: torch.Tensor) -> None:
    """Set `main_parameter` to `values` (float32, 1-D), rounded to its dtype. If the bits of `param` are part of that value,
    `param` changes, too."""
    main = optimizer.state[param].get(MAIN)
    if param.dtype == torch.float32:
        param.detach().view(-1).copy_(values)
    if main is not None and main.dtype == torch.int16:
        _split_into(param.detach().view(-1), main.view(-1), values.to(param.device))
    elif main is not None:
        optimizer.set_scaled_state(param, MAIN, values)


def _gradient(param: torch.Tensor) -> torch.Tensor | None:
    return getattr(param, "decoupled_grad", None)


def _blocks(param: torch.Tensor) -> list[slice]:
    """The blocks of its entries; at least one, which may be empty."""
    starts = (*range(0, param.numel(), BLOCK), param.numel())
    return [slice(first, last) for first, last in itertools.pairwise(starts)] or [slice(0, 0)]


def _stored_as(dtype: torch.dtype) -> torch.dtype:
    return torch.float8_e4m3fn if dtype == torch.uint8 else dtype


def _joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 whose bits are those of a bfloat16 above 16 zeros, plus `remainder` (int16)."""
    return ((weight.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def _split_into(weight: torch.Tensor, remainder: torch.Tensor, values: torch.Tensor) -> None:
    """Fill `weight` and `remainder` such that `_joined` gives `values` again; every NaN stays one in both."""
    bits = values.contiguous().view(torch.int32)
    lower = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
    remainder.copy_(lower)
    weight.view(torch.int16).copy_((bits - lower) >> 16)
    # The upper bits of a NaN may have been rounded up to those of a zero.
    weight.masked_fill_(values.isnan(), torch.nan)
    remainder.masked_fill_(values.isnan(), 0)
