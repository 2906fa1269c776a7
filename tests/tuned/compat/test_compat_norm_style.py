"""style_of finds what a norm computes by calling it; anything but an RMSNorm with one weight is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tuned.compat.norm_style import NormStyle, ready, style_of


class Made(torch.nn.Module):
    """An RMSNorm of many kinds."""

    def __init__(self, size: int = 24, *, rounding: str = "each", centered: bool = False, change: str = "") -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(size))
        self.momentum, self.small = 0.1, 1e-5  # two numbers; only one of them is the eps
        self.rounding, self.centered, self.change = rounding, centered, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        if self.change == "mean":
            wide = wide - wide.mean(-1, keepdim=True)
        if self.change == "training" and self.training:
            wide = wide + 1
        axis = -2 if self.change == "axis" else -1
        scale = wide.square().mean(axis, keepdim=True)
        if self.change == "l2":
            scale = wide.square().sum(axis, keepdim=True)
        normed = wide / scale.sqrt().add(self.small) if self.change == "eps" else wide * torch.rsqrt(scale + self.small)
        gain = 1 + (self.gain if self.rounding == "late" else self.gain.float()) if self.centered else self.gain
        if self.change == "in place":
            x.zero_()
        if self.change == "raises":
            raise KeyError(x)
        if self.change == "wide":
            return normed * gain.float()
        if self.rounding == "each":
            return normed.to(x.dtype) * gain
        return (normed * gain.float()).to(x.dtype)


@pytest.mark.parametrize("rounding", ["each", "product"])
@pytest.mark.parametrize("size", [1, 24, 4096])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_style_is_found_without_the_weights(rounding: str, size: int, device: str) -> None:
    norm = Made(size, rounding=rounding).to(device)
    kept = dict(vars(norm))
    style = style_of(norm)
    if size == 1:  # each row gives one number, 1, so that the two roundings are the same
        assert isinstance(style, NormStyle)
        return
    assert style == NormStyle(Made, Made.forward, "gain", size, "small", zero_centered=False, rounding=rounding)
    assert vars(norm) == kept
    assert ready(norm, style)


def test_a_weight_that_is_added_to_one_is_seen() -> None:
    style = style_of(Made(rounding="product", centered=True))
    assert isinstance(style, NormStyle)
    assert (style.zero_centered, style.rounding) == (True, "product")


def test_the_callers_random_numbers_dtype_and_modes_do_not_matter() -> None:
    wanted, state = style_of(Made()), torch.random.get_rng_state()
    norm = Made()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.device("meta"):
            assert style_of(norm) == wanted
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert isinstance(wanted, NormStyle)


@pytest.mark.parametrize("change", ["mean", "training", "axis", "l2", "eps", "raises", "wide"])
def test_another_norm_is_refused(change: str) -> None:
    assert isinstance(style_of(Made(change=change)), str)


def test_a_rounding_of_its_own_is_refused() -> None:
    norm = Made(rounding="late", centered=True)  # it rounds the sum of 1 and the weight
    assert style_of(norm) == "it rounds in a place of its own in bfloat16"


def buffer(norm: Any) -> None:
    norm.register_buffer("scale", torch.ones(1))


def child(norm: Any) -> None:
    norm.inner = torch.nn.Identity()


def bias(norm: Any) -> None:
    norm.bias = torch.nn.Parameter(torch.zeros(24))


def no_weight(norm: Any) -> None:
    norm.gain = None


def whole(norm: Any) -> None:
    norm.gain = torch.nn.Parameter(torch.ones(24, dtype=torch.int8), requires_grad=False)


def plain_forward(norm: Any) -> None:
    norm.forward = lambda x: x


@pytest.mark.parametrize("change", [buffer, child, bias, no_weight, whole, plain_forward])
def test_a_module_with_more_or_less_than_one_weight_is_refused(change: Any) -> None:
    norm = Made()
    change(norm)
    assert isinstance(style_of(norm), str)


HOOKS = {
    "forward": lambda norm: norm.register_forward_hook(print),
    "before": lambda norm: norm.register_forward_pre_hook(print),
    "backward": lambda norm: norm.register_full_backward_hook(print),
    "before backward": lambda norm: norm.register_full_backward_pre_hook(print),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_while_it_has_a_hook_it_is_not_ready(hook: str) -> None:
    norm = Made()
    style: Any = style_of(norm)
    with HOOKS[hook](norm):
        assert style_of(norm) == "it has hooks"
        assert not ready(norm, style)
    assert ready(norm, style)


@pytest.mark.parametrize("change", [plain_forward, no_weight])
def test_a_module_that_changed_is_not_ready(change: Any) -> None:
    norm = Made()
    style: Any = style_of(norm)
    change(norm)
    assert not ready(norm, style)
    assert not ready(Made(25), style)
    assert not ready(type("Other", (Made,), {})(), style)
    assert not ready(None, style)
