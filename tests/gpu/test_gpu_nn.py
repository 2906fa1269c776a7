"""tuned.nn on a real GPU: for all constructor arguments a kernel serves, and errs no more than PyTorch's module."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import tuned
import tuned.nn
from tests.support.as_good import WORSE, assert_as_good, data_of
from tuned.dispatch import gru

pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights")  # torch.nn.GRU warns of its weights in bfloat16

# float32 with TF32: cuDNN multiplies upper layers' inputs in float32 if they are as small as here; a stack uses TF32.
WORSE_STACK = 1.3
FEATURES, H, LENGTHS = 48, 64, (9, 17, 1, 12)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GRID = list(itertools.product((1, 2, 3), (False, True), (False, True), (False, True), (True, False), DTYPES))


def doubled(x: Any) -> Any:
    return x._replace(data=x.data.double()) if isinstance(x, PackedSequence) else x.double()


def case(layers: int, both: bool, first: bool, packs: bool, bias: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    torch.manual_seed(0)
    theirs = torch.nn.GRU(FEATURES, H, layers, bias, first, bidirectional=both, device="cuda", dtype=dtype)
    ours = tuned.nn.GRU(FEATURES, H, layers, bias, first, bidirectional=both, device="cuda", dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    if packs:
        rows = [torch.randn(n, FEATURES, device="cuda", dtype=dtype) for n in LENGTHS]
        x: Any = pack_sequence(rows, enforce_sorted=False)
    else:
        x = torch.randn((4, 17, FEATURES) if first else (17, 4, FEATURES), device="cuda", dtype=dtype)
    stacked = layers * (2 if both else 1)
    hx = torch.randn(stacked, H, 4, device="cuda", dtype=dtype).transpose(1, 2)  # not contiguous
    return ours, theirs, x, hx


@pytest.mark.gpu_sample
@pytest.mark.parametrize(("layers", "both", "first", "packs", "bias", "dtype"), GRID)
def test_what_serves_errs_no_more_than_pytorch(
    layers: int, both: bool, first: bool, packs: bool, bias: bool, dtype: torch.dtype
) -> None:
    ours, theirs, x, hx = case(layers, both, first, packs, bias, dtype)
    with torch.no_grad():
        told = tuned.explain(ours, x, hx)
        # cuDNN keeps small float32 layers on chip if sequences have one length, and may be faster than any kernel.
        assert told.rule != "eager" or (dtype == torch.float32 and not packs), told.why
        assert bool(told.kernels) == (told.rule != "eager")
        found = ours(x, hx)
        again = ours(x, hx)
        assert all(torch.equal(data_of(a), data_of(b)) for a, b in zip(found, again, strict=True)), "from run to run"
        with tuned.nn.patched():
            patched = theirs(x, hx)
        assert all(torch.equal(data_of(a), data_of(b)) for a, b in zip(found, patched, strict=True))
        exact = copy.deepcopy(theirs).double()(doubled(x), hx.double().contiguous())
        stack = dtype == torch.float32 and layers > 1 and not both
        assert_as_good(found, theirs(x, hx.contiguous()), exact, WORSE_STACK if stack else WORSE)


@pytest.mark.gpu_sample
def test_a_gradient_is_pytorchs_own_in_training_and_evaluation() -> None:
    ours, theirs, x, hx = case(2, True, False, False, True, torch.float32)
    assert "a gradient is needed" in tuned.explain(ours, x, hx).why
    wanted = torch.autograd.grad(theirs(x, hx.contiguous())[0].square().sum(), list(theirs.parameters()))
    for module in (ours, ours.eval()):  # PyTorch's GRU has no gradient in evaluation
        found = torch.autograd.grad(module(x, hx)[0].square().sum(), list(module.parameters()))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu_sample
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_gives_its_dtype_by_a_kernel(dtype: torch.dtype) -> None:
    ours, theirs, x, hx = case(2, False, False, False, True, torch.float32)
    with torch.no_grad():
        exact = copy.deepcopy(theirs).double()(x.double(), hx.double().contiguous())
        with torch.autocast("cuda", dtype):
            assert tuned.explain(ours, x, hx).rule != "eager"
            found, reference = ours(x, hx), theirs(x, hx.contiguous())
    assert {t.dtype for t in found} == {dtype}
    if reference[0].dtype == dtype:  # torch 2.11 gives float16 whatever dtype autocast asks for
        assert_as_good(found, reference, exact)


@pytest.mark.gpu_sample
def test_sequences_by_their_bounds_give_what_a_pack_gives() -> None:
    ours, _, x, hx = case(2, True, False, True, True, torch.bfloat16)
    rows = torch.nn.utils.rnn.unpack_sequence(x)
    bounds = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        packed, h_n = ours(x, hx)
        weights = [getattr(ours, name) for name in ours._flat_weights_names]
        output, state = gru(
            torch.cat(rows),
            hx,
            weights,
            num_layers=2,
            bidirectional=True,
            cu_seqlens=bounds,
            max_seqlen=max(LENGTHS),
        )
    wanted = torch.cat(torch.nn.utils.rnn.unpack_sequence(packed))
    torch.testing.assert_close(output, wanted, rtol=0.02, atol=0.02)
    torch.testing.assert_close(state, h_n, rtol=0.02, atol=0.02)


@pytest.mark.gpu_sample
def test_a_compiled_model_and_a_graph_give_what_the_call_gives() -> None:
    ours, _, x, hx = case(2, True, True, False, True, torch.bfloat16)
    with torch.no_grad():
        wanted = ours(x, hx)
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)(x, hx)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ours(x, hx)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = ours(x, hx)
        graph.replay()
        torch.cuda.synchronize()
    for found in (compiled, captured):
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
