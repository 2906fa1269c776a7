"""The benchmark of RoPE without a GPU: the plan, calls and peers at tiny sizes, rows, bars and tables."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import types
from typing import get_args

import pytest
import torch

import tuned.dispatch
from benchmarks import bars, clock, extension, peers, plan, rope, session, table
from benchmarks import call as calls
from benchmarks.call import Call
from benchmarks.record import Row
from generator.measuring.bench import Timing

ENVIRONMENT = {"device": "test GPU", "torch": "2", "triton": "3"}
TOKENS = 12
PLAN = plan.rows()


def tiny(call):
    """The same kind of call, small enough for eager PyTorch on a CPU; in float32, so that a wrong term shows."""
    half = {"rotary_dim": 8, "head_dim": 8 if call.rotary_dim == call.head_dim else 24}
    return dataclasses.replace(
        call,
        **half,
        batch=min(call.batch, 2),
        seq=TOKENS if call.layout == "thd" else min(call.seq, 5),
        heads=4,
        key_heads=2 if call.key_heads else 0,
        sequences=min(call.sequences, 3),
        rows=call.rows and 40,
        dtype=torch.float32,
    )


SMALL = [dataclasses.replace(row, call=tiny(row.call), kind="device") for row in PLAN]
KINDS = list({(row.suite, row.call): row for row in SMALL}.values())
kinds = pytest.mark.parametrize("row", KINDS, ids=lambda row: ", ".join((row.suite, *row.call.words)))


def turned(call, t):
    """Query and key rotated as complex numbers in float64, from the documented pairs alone."""
    out = []
    for x in t.rotated:
        tokens = x.detach().reshape(call.tokens, -1, call.head_dim).double()
        angle = t.table.freqs[t.ids].double()[:, None]
        half, result = call.rotary_dim // 2, tokens.clone()
        for j in range(half):
            if call.interleaved:
                a, b = 2 * j, 2 * j + 1
            else:
                a, b = j, j + (call.head_dim // 2 if call.rotated == "proportional" else half)
            if call.rotated == "last":
                a, b = (i + call.head_dim - call.rotary_dim for i in (a, b))
            turn = -1j if call.direction == "backward" else 1j
            z = torch.complex(tokens[..., a], tokens[..., b]) * torch.exp(turn * angle[..., j])
            result[..., a], result[..., b] = z.real, z.imag
        out.append(result.view(x.shape))
    return out


def test_every_kind_of_call_is_there():
    assert {row.suite for row in KINDS} == set(plan.SUITES)
    assert {row.call.angles for row in KINDS} == set(get_args(calls.Angles))
    assert {row.call.layout for row in KINDS} == {"bshd", "sbhd", "thd"}
    assert {row.call.direction for row in KINDS} == {"forward", "backward"}
    assert {row.call.positions for row in KINDS} == {"implicit", "counted", "random"}
    assert {row.call.rotated for row in KINDS} == {"first", "last", "proportional"}


# Plans and bars


def test_every_peer_that_is_named_exists_and_none_is_idle():
    assert {peer for row in PLAN for peer in row.peers} == set(peers.PEERS)


def test_a_quick_plan_has_no_peer_that_takes_time_for_a_shape():
    quick = plan.quick(PLAN)
    assert {row.suite for row in quick} == set(plan.SUITES)
    assert not {peer for row in quick for peer in row.peers} & set(plan.HEAVY)
    assert {row.call.layout for row in quick if row.suite == "rope"} == {"bshd"}
    assert "thd" in {row.call.layout for row in quick if row.suite in plan.COMPLETE}


@pytest.mark.parametrize("sequences", plan.SEQUENCES)
def test_ragged_sequences_hold_all_tokens(sequences):
    call = Call(1, plan.PACKED_TOKENS, 32, 8, 128, 128, layout="thd", sequences=sequences)
    assert (len(call.lengths), sum(call.lengths), min(call.lengths) > 0) == (sequences, 65536, True)
    assert call.lengths == dataclasses.replace(call).lengths
    assert call.angle_bytes == max(call.lengths) * 64 * 4
    assert sequences == 1 or call.longest > 2 * 65536 / sequences, "ragged"


def test_bytes_that_must_move():
    whole = Call(2, 3, 4, 2, 8, 8)
    assert (whole.copy_bytes, whole.moved_bytes) == (2 * 6 * 6 * 8 * 2, 2 * 6 * 6 * 8 * 2 + 3 * 4 * 4)
    packed = Call(2, 3, 4, 0, 8, 8, layout="thd", angles="freqs feature")
    assert (packed.lengths, packed.angle_bytes) == ((3, 3), 3 * 8 * 4)
    part = Call(1, 10, 4, 0, 24, 8, inplace=True)
    assert part.moved_bytes == 2 * 10 * 4 * 8 * 2 + 10 * 4 * 4
    assert dataclasses.replace(part, inplace=False).moved_bytes == 2 * 10 * 4 * 24 * 2 + 10 * 4 * 4
    ids = Call(1, 10, 4, 2, 8, 8, angles="cos_sin_cache", positions="random", rows=99, layout="thd")
    assert ids.angle_bytes == 10 * 8 * 4 + 10 * 8
    assert dataclasses.replace(ids, angles="inv_freq", positions="implicit").angle_bytes == 4 * 4


# Calls and peers


@kinds
def test_ours_and_the_reference_are_right(row):
    call = row.call
    t = calls.probe(call, calls.make_tensors(call, 1, "cpu")[0])
    right = turned(call, t)
    for ours, mine in zip(calls.expected(call, t), right, strict=True):
        torch.testing.assert_close(ours.double(), mine, rtol=0, atol=1e-6)
    value = None if t.qkv is None else t.qkv[:, call.heads + call.key_heads :].clone()
    results = calls.ours(call, [t])[0]()
    for result, x, mine in zip(results, t.rotated, right, strict=True):
        torch.testing.assert_close(result.double(), mine, rtol=0, atol=2e-6)
        assert (result.data_ptr() == x.data_ptr()) == call.inplace
    assert value is None or torch.equal(t.qkv[:, call.heads + call.key_heads :], value)


def test_sets_share_only_the_table_of_random_ids():
    decode = next(row.call for row in KINDS if row.call.positions == "random")
    a, b = calls.make_tensors(decode, 2, "cpu")
    assert a.table is b.table
    assert not torch.equal(a.ids, b.ids)
    assert a.rotated[0].data_ptr() == a.qkv.data_ptr() != b.qkv.data_ptr()
    a, b = calls.make_tensors(dataclasses.replace(decode, positions="counted"), 2, "cpu")
    assert a.table.cache.data_ptr() != b.table.cache.data_ptr()


@pytest.fixture
def stand_ins(monkeypatch):
    """Stand-ins for the foreign packages in plain PyTorch, written from their documentation."""

    def rotate(x, cos, sin, *, interleaved):  # x [..., H, D], cos and sin [..., 1, R / 2]
        half = cos.shape[-1]
        first, second = (
            (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
        )
        out = x.clone()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., second] * cos + x[..., first] * sin
        return out

    def apply_rotary(
        x,
        cos,
        sin,
        seqlen_offsets=0,
        cu_seqlens=None,
        max_seqlen=None,
        *,
        interleaved=False,
        inplace=False,
        conjugate=False,
    ):
        if cu_seqlens is not None:
            lengths = cu_seqlens.diff()
            assert max_seqlen == int(lengths.max())
            row = torch.cat([torch.arange(n) for n in lengths])
        else:
            row = torch.arange(x.shape[1])[None] + torch.as_tensor(seqlen_offsets).reshape(-1, 1)
        sin = -sin if conjugate else sin
        out = rotate(x, cos[row][..., None, :].float(), sin[row][..., None, :].float(), interleaved=interleaved)
        return x.copy_(out) if inplace else out

    def apply_rotary_pos_emb(t, freqs, *, tensor_format, interleaved, fused, cu_seqlens):
        assert fused
        entries = freqs[:, 0, 0, ::2] if interleaved else freqs[:, 0, 0, : freqs.shape[-1] // 2]
        assert (cu_seqlens is not None) == (tensor_format == "thd")
        longest = None if cu_seqlens is None else int(cu_seqlens.diff().max())
        x = t.transpose(0, 1) if tensor_format == "sbhd" else t
        out = apply_rotary(x, entries.cos(), entries.sin(), 0, cu_seqlens, longest, interleaved=interleaved)
        return out.transpose(0, 1) if tensor_format == "sbhd" else out

    class FusedRoPEFunc:
        @staticmethod
        def backward(ctx, grad):
            freqs, cu_seqlens, start_positions = ctx.saved_tensors
            assert (start_positions, ctx.cp_size, ctx.cp_rank) == (None, 1, 0)
            back = {"tensor_format": ctx.tensor_format, "interleaved": ctx.interleaved, "cu_seqlens": cu_seqlens}
            return apply_rotary_pos_emb(grad, -freqs, fused=True, **back), None

    def apply_fused_qkv_rotary_pos_emb(qkv, q_freqs, k_freqs, split, tensor_format, start_positions):
        assert tensor_format == "bshd"
        batch, seq, groups, _ = qkv.shape
        q, k, v = qkv.split(split, dim=-1)
        q = q.reshape(batch, seq, groups * split[0] // split[1], split[1])
        rotated = []
        for x, freqs in ((q, q_freqs), (k, k_freqs)):
            entries = freqs[:, 0, 0, : split[1] // 2]
            starts = 0 if start_positions is None else start_positions
            rotated.append(apply_rotary(x, entries.cos(), entries.sin(), starts))
        return *rotated, v.clone()

    def by_cache(positions, query, key, head_size, cache, is_neox):
        cos, sin = cache[positions].float()[:, None].chunk(2, dim=-1)
        for x in (query, key):
            heads = x.view(len(x), -1, head_size)
            heads.copy_(rotate(heads, cos, sin, interleaved=not is_neox))

    class LigerRopeFunction:
        @staticmethod
        def apply(query, key, cos, sin, position_ids, unsqueeze_dim, rotary_dim):
            assert (position_ids, unsqueeze_dim, len(cos), rotary_dim) == (None, 1, 1, query.shape[-1])
            for x in (query.transpose(1, 2), key.transpose(1, 2)):
                assert x.is_contiguous(), "else it rotates a copy"
                apply_rotary(x, cos[0, : x.shape[1]], sin[0, : x.shape[1]], inplace=True)

    class Extension:
        @staticmethod
        def rope(x, cos, sin):
            return apply_rotary(x, cos, sin)

        @staticmethod
        def rope_inplace(rotated, cos, sin):
            for x in rotated:
                apply_rotary(x, cos, sin, inplace=True)

    te = {
        "FusedRoPEFunc": FusedRoPEFunc,
        "apply_rotary_pos_emb": apply_rotary_pos_emb,
        "apply_fused_qkv_rotary_pos_emb": apply_fused_qkv_rotary_pos_emb,
    }
    modules = {
        "flash_attn.ops.triton.rotary": {"apply_rotary": apply_rotary},
        "flash_attn.layers.rotary": {"apply_rotary_emb": apply_rotary},
        "transformer_engine.pytorch.attention.rope": te,
        "flashinfer.rope": {"apply_rope_with_cos_sin_cache_inplace": by_cache},
        "vllm._custom_ops": {"rotary_embedding": by_cache},
        "liger_kernel.ops.rope": {"LigerRopeFunction": LigerRopeFunction},
        "fla.modules.rotary.ops": {"rotary_embedding_fwdbwd": apply_rotary},
        "quack.rotary": {"apply_rotary_emb": apply_rotary},
    }
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**content))
    monkeypatch.setattr(extension, "load", lambda: Extension)
    monkeypatch.setattr(extension, "refuses", lambda _: None)  # the real one takes only bfloat16 on a GPU
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    peers._compiled.cache_clear()
    yield
    peers._compiled.cache_clear()


def cannot(call):
    """The peers of a whole suite that cannot do one of its calls."""
    if call.gradient:
        return {"C++ extension"}
    if call.formula == "transformers":
        return set()
    names = {"torch.jit.script", "TransformerEngine", "flash-linear-attention"} if call.inplace else set()
    names |= {"flash-linear-attention", "quack"} if call.layout != "bshd" else set()
    return names | ({"quack"} if call.direction == "backward" else set())


@kinds
@pytest.mark.usefixtures("stand_ins")
def test_every_peer_of_a_call_computes_it(row):
    call = row.call
    t = calls.make_tensors(call, 1, "cpu")[0]
    expected = calls.expected(call, t)
    for name in row.peers:
        if name == rope.NO_RIVAL:
            continue
        launches = peers.launches(name, call, [calls.probe(call, t)])
        if isinstance(launches, str):  # why the peer cannot do it: only for peers of a whole suite
            assert name in cannot(call), launches
            continue
        assert name not in cannot(call)
        wide = torch.bfloat16 if "bf16" in name else torch.float32
        results = launches[0]()
        assert len(results) == len(expected)
        for result, right in zip(results, expected, strict=True):
            atol = 8 * torch.finfo(wide).eps * float(right.abs().max())
            torch.testing.assert_close(result.detach(), right, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("TransformerEngine", {"inplace": True}, "allocates its output"),
        ("TransformerEngine fused qkv", {}, "packed"),
        ("flash-attention", {"head_dim": 512}, "above the 256"),
        ("Liger-Kernel", {"inplace": True, "interleaved": True}, "by halves"),
        ("FlashInfer", {}, "in place"),
        ("vLLM", {"inplace": True, "rotated": "last"}, "first features"),
        ("torch.jit.script", {}, "one tensor"),
        ("torch.jit.script", {"inplace": True}, "no faster than out of place"),
        ("flash-linear-attention", {"inplace": True}, "out of place"),
        ("flash-linear-attention", {"head_dim": 512}, "above the 256"),
        ("flash-linear-attention", {}, "one bshd tensor"),
        ("quack", {"direction": "backward"}, "forward"),
        ("quack", {}, "one bshd tensor"),
    ],
)
@pytest.mark.usefixtures("stand_ins")
def test_a_peer_says_what_it_cannot_do(name, change, why):
    call = dataclasses.replace(Call(1, 4, 4, 2, 8, 8), **change)
    assert why in peers.launches(name, call, calls.make_tensors(call, 1, "cpu"))


def test_a_peer_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer.rope", None)
    assert "not installed" in peers.launches("FlashInfer", PLAN[0].call, [])


def test_the_extension_is_built_or_says_what_is_missing(monkeypatch, capsys):
    def load():
        raise ImportError("the C++ extension was not built: CUDA_HOME is not set.")

    monkeypatch.setattr(sys, "argv", ["extension"])
    monkeypatch.setattr(extension, "load", load)
    assert extension.main() == 1
    assert "CUDA_HOME is not set: install the CUDA toolkit" in capsys.readouterr().err
    monkeypatch.setattr(extension, "load", lambda: None)
    assert extension.main() == 0


def test_the_extension_refuses_what_it_would_get_wrong():
    plain = Call(1, 1, 32, 0, 128, 128, angles="cos_sin pair")
    assert extension.refuses(plain) is None
    wrong = [
        {"interleaved": True},
        {"direction": "backward"},
        {"rotary_dim": 64},
        {"key_heads": 8},
        {"layout": "thd"},
        {"dtype": torch.float32},
    ]
    assert all(extension.refuses(dataclasses.replace(plain, **change)) for change in wrong)


# Rows


@pytest.fixture
def fake_clock(monkeypatch):
    """Every launch runs once and takes 2 us on the device, 7 us on the host; copies take 1 us."""
    monkeypatch.setattr(clock, "set_count", lambda _: 2)
    monkeypatch.setattr(clock, "cold", lambda launches, _: ([run() for run in launches], Timing(2.0, 0.1))[1])
    monkeypatch.setattr(clock, "host", lambda launch: (launch(), Timing(7.0, 0.1))[1])
    monkeypatch.setattr(rope, "copy_us", lambda *_: 1.0)


@pytest.mark.usefixtures("fake_clock", "stand_ins")
def test_a_device_row():
    packed = next(r for r in KINDS if r.kind == "device" and r.call.packed)
    call = dataclasses.replace(packed.call, dtype=torch.bfloat16)
    measured = rope.measure(dataclasses.replace(packed, call=call, name="a model"), "cpu")
    assert measured["missing"] == {}
    assert (measured["name"], measured["kind"], measured["angles"]) == ("a model", "device", call.source)
    assert set(measured["peers"].values()) == {2.0}
    floor = call.moved_bytes / call.copy_bytes
    assert (measured["ours"], measured["floor"]) == (2.0, pytest.approx(floor, abs=1e-3))
    assert measured["ours_over_copy"] == 2.0


@pytest.mark.usefixtures("fake_clock")
@pytest.mark.parametrize("row", [r for r in PLAN if r.kind == "host"], ids=lambda r: r.key)
def test_a_host_row(row):
    everyday = dataclasses.replace(row, peers=("eager PyTorch", "torch.add"))
    measured = rope.measure(everyday, "cpu")
    assert (measured["missing"], measured["kind"]) == ({}, "host")
    assert (measured["ours"], measured["ours_over_add"], measured["ours_over_eager"]) == (7.0, 1.0, 1.0)
    assert (measured["measured"] == "forward") == (row.call.direction == "forward")
    assert measured["peers"] == {"eager PyTorch": 7.0, "torch.add": 7.0}


def test_a_host_row_is_written_out_for_one_kind_of_call():
    packed = next(r for r in PLAN if r.kind == "device" and r.call.packed).call
    call = dataclasses.replace(packed, seq=2, rows=4)
    with pytest.raises(ValueError, match="host rows are whole tensors with freqs"):
        calls.as_a_user_calls(call, calls.make_tensors(call, 1, "cpu")[0])


@pytest.mark.usefixtures("fake_clock", "stand_ins")
def test_wrong_results_are_not_timed(monkeypatch):
    row = next(r for r in KINDS if r.call.packed)
    monkeypatch.setitem(peers.PEERS, "vLLM", lambda _, sets: [lambda t=t: t.rotated for t in sets])
    assert "WrongResultError: largest error" in rope.measure(row, "cpu")["missing"]["vLLM"]
    rope_qk = tuned.dispatch.rope_qk

    def key_stays(q, k, **keywords):
        return rope_qk(q, k, **keywords)[0], torch.zeros_like(k)

    monkeypatch.setattr(tuned.dispatch, "rope_qk", key_stays)
    with pytest.raises(rope.WrongResultError, match="largest error"):
        rope.measure(row, "cpu")


def test_a_call_with_autograd_asks_for_a_gradient(monkeypatch):
    seen = []
    monkeypatch.setattr(clock, "host", lambda launch: (seen.append(launch()[0].requires_grad), Timing(7.0, 0.1))[1])
    row = next(r for r in PLAN if r.bar == "with autograd")
    small = dataclasses.replace(row, call=dataclasses.replace(row.call, dtype=torch.float32), peers=())
    rope.measure(small, "cpu")
    assert seen == [True] * rope.HOST_ROUNDS


def test_a_backward_host_row_is_forward_with_backward(monkeypatch):
    seen = []
    monkeypatch.setattr(clock, "host", lambda launch: (seen.append(launch()), Timing(7.0, 0.1))[1])
    row = next(r for r in PLAN if r.bar == "host, forward with backward")
    rope.measure(dataclasses.replace(row, peers=("eager PyTorch",)), "cpu")
    ours, theirs = seen[:2]
    assert not ours[0].requires_grad, "a gradient, not the result of forward"
    torch.testing.assert_close(ours[0], theirs[0])
    backward = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *given: [2 * x for x in backward(*given)])
    with pytest.raises(rope.WrongResultError, match="largest error"):
        rope.measure(row, "cpu")


@pytest.mark.parametrize(("count", "taken_us"), [(2, 50.0), (4, 40.0)])
def test_the_time_of_emptying_the_cache_is_taken_off(monkeypatch, count, taken_us):
    """With 4 sets wanted: for 2 sets (130 - 30) / 2; 4 sets push each other out of the cache, so 160 / 4."""
    ran = []
    monkeypatch.setattr(clock, "sets", lambda _: 4)
    monkeypatch.setattr(clock, "_flush", lambda: lambda: ran.append("flush"))

    def device_time(launches, warm_us):
        assert warm_us > 1e4
        ran.clear()
        launches[0]()
        return Timing({("flush",): 30.0, ("flush", 0, 1): 130.0, (0, 1, 2, 3): 160.0}[tuple(ran)], 4.0)

    monkeypatch.setattr(clock, "device_time", device_time)
    launches = [lambda i=i: ran.append(i) for i in range(count)]
    assert clock.cold(launches, 1) == Timing(taken_us, 4.0 / count)


def test_a_dry_run_lists_the_rows(capsys):
    assert rope.main(["--dry-run"]) == 0
    out = capsys.readouterr().out
    assert all(f"{row.key}  [{row.bar or 'no bar of its own'}]" in out for row in PLAN)
    assert f"{len(PLAN)} rows" in out
    assert rope.main(["--dry-run", "--rows", "rope-thd"]) == 0
    assert capsys.readouterr().out.endswith("\n4 rows\n")
    assert rope.main(["--dry-run", "--only", "rope-features", "--suite", "rope-thd"]) == 0
    assert capsys.readouterr().out.endswith("\n7 rows\n")
    assert rope.main(["--dry-run", "--quick", "--suite", "rope"]) == 0
    assert "sbhd" not in capsys.readouterr().out


# Bars and tables


def measured(suite, bar, peers_us, ours=4.0, **other):
    row = Row(suite, next(r.call for r in PLAN if r.suite == suite), bar, (), "gpt-oss")
    best = min(peers_us, key=peers_us.get, default=None)
    ratio = round(ours / peers_us[best], 4) if best else None
    common = {"suite": suite, "bar": bar, "kind": "device", "missing": {}, "ours": ours, "floor": 3.9}
    ratios = {"ours_over_floor": ours / 3.9, "ours_over_best_peer": ratio}
    return row.call.facts | {"name": row.name} | common | {"peers": peers_us, "best_peer": best} | ratios | other


def test_a_peer_that_is_as_fast_misses_where_ours_must_be_below():
    report = bars.report({"rows": [measured("rope-decode", "decode", {"vLLM": 4.0})]})
    assert "decode: best peer < 1.00: MISSED by 1 of 1; worst 1.000" in report
    report = bars.report({"rows": [measured("rope-qk", "large", {"Liger-Kernel": 4.0})]})
    assert "query and key, large: best peer <= 1.00: met, by all 1" in report
    assert "query and key, large / floor <= 1.03: met, by all 1" in report


def test_the_means_are_over_rows_on_the_device():
    rows = [
        measured("rope-decode", "decode", {"vLLM": 5.0}),
        measured("rope-qk", "large", {"vLLM": 80.0}, ours=50.0),
        measured("rope-calls-host", "in place", {"C++ extension": 40.0}, kind="host"),
        measured("rope-features", None, {}),
    ]
    assert bars.call_mean(rows, bars.BELOW_US) == (pytest.approx(1.25), 1)
    mean = (80 / 50 * 1.25) ** 0.5
    assert bars.call_mean(rows, float("inf")) == (pytest.approx(mean), 2)
    report = bars.report({"rows": rows})
    assert "complete calls under 10 us, geometric mean of best peer / ours over 1 rows >= 1.25: met, 1.250" in report
    assert f"over 2 rows >= 1.15: met, {mean:.3f} (moonshot 1.30: met)" in report


def test_the_tables():
    decode = {"name": "gpt-oss", "problem": "p", "layout": "thd"}
    rows = [
        measured("rope-decode", "decode", {"vLLM": 5.0, "FlashInfer": 8.0}, **decode),
        measured("rope-prefill", None, {"flash-attention": 6.0, "flash-attention bf16 angles": 5.5}),
        measured("rope-calls-host", "in place", {"C++ extension": 6.7}, kind="host"),
    ]
    text = table.complete_markdown({"environment": ENVIRONMENT, "rows": rows})
    assert "| 1 | 4.00 | 5.00 | vLLM |" in text
    header = (
        "| tokens, heads, dim | place | angles | ours | floor | flash-attention | ours / floor | ours / best peer |"
    )
    assert header in text, "only the peers with a time have a column"
    assert (
        "| 512 tokens, 32 + 8, 128 | in place | cos_sin_cache by position | 4.00 | 3.90 | 5.50 | 1.03 | 0.73 |" in text
    )
    assert "| in place | 4.00 | - | 6.70 | - | - | - |" in text
    assert "best peer / ours: 1.31 over 2 rows under 10 us" in text


def test_pairs_are_disjoint_and_cover_the_rotated_features():
    for call in (row.call for row in PLAN):
        first, second = (set(range(call.head_dim)[part]) for part in calls.pairs(call))
        assert len(first) == len(second) == call.rotary_dim // 2
        assert not first & second
        lengths = itertools.pairwise(sorted(first))
        assert all(b - a == (2 if call.interleaved else 1) for a, b in lengths)


def test_each_suite_is_measured_in_a_process_of_its_own(monkeypatch, tmp_path):
    ran = []

    def run(command, **_):
        ran.append(command[1:])
        return types.SimpleNamespace(returncode=len(ran) == 2)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(session.subprocess, "run", run)
    assert rope.main(["--out", str(tmp_path), "--minutes", "3", "--quick"]) == 1, "one of them failed"
    assert [command[:5] for command in ran] == [["-m", "benchmarks.rope", "--quick", "--suite", s] for s in plan.SUITES]
    assert all(command[5:7] == ["--out", str(tmp_path)] and 0 < float(command[8]) <= 3 for command in ran)
