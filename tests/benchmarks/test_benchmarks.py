"""The benchmark suites without a GPU: plans, rows through fake clocks, the run loop, bars and tables."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
import types

import pytest
import torch

import tuned.dispatch
import tuned.nn
from benchmarks import bars, clock, gru, gru_peers, gru_plan, plan, plot, record, session, table
from benchmarks.gru_plan import SequenceCall, StepCall
from benchmarks.record import Row
from generator.measuring.bench import Timing

ENVIRONMENT = {"device": "test GPU", "torch": "2", "triton": "3"}
FAKE_US = {gru.OURS: 10.0, gru.OURS_IN_A_GRAPH: 8.0, gru.NN_GRU: 50.0, gru.IN_A_GRAPH: 25.0}
SMALL = SequenceCall(5, 3, 4, 8, dtype=torch.float32)


def sequence_row(call=SMALL, bar=None, name=""):
    return Row("gru", call, bar, name=name, kind="call")


@pytest.fixture
def fake_clock(monkeypatch):
    """Every call runs once and has a fixed time: 2 us a set of weights on the device, 7 us on the host."""
    ran = []

    def interleaved(calls):
        for name, call in calls.items():
            ran.append(name)
            call()
        return {name: Timing(FAKE_US[name], 0.1) for name in calls}

    monkeypatch.setattr(clock, "capture", lambda call: call)
    monkeypatch.setattr(clock, "interleaved", interleaved)
    monkeypatch.setattr(clock, "sets", lambda _: 3)
    monkeypatch.setattr(clock, "device", lambda launches: Timing(2.0 * len(launches), 0.1))
    monkeypatch.setattr(clock, "host", lambda launch: (launch(), Timing(7.0, 0.1))[1])
    monkeypatch.setattr(clock, "copy_rate", lambda: 4e12)
    return ran


def results(tmp_path):
    return record.Results(tmp_path / "gpu.json", dict(ENVIRONMENT), {}, {})


def measured(bar, suite="gru", **figures):
    """A row as the suites record it, with the given figures."""
    facts = {"problem": "t1 b1 i1 h1", "layout": "seq first", "dtype": "bfloat16", "name": "", "rule": "winner"}
    return {
        "suite": suite,
        "key": f"{suite}, {bar}",
        "bar": bar,
        "why": "",
        "best_peer": None,
        "missing": {},
        **facts,
        **figures,
    }


# Plans and bars


def test_keys_are_unique_and_name_their_suite():
    keys = [row.key for row in (*plan.rows(), *gru_plan.sequences(), *gru_plan.steps())]
    assert len(set(keys)) == len(keys)
    assert all(key.split(", ")[0] in {*plan.SUITES, "gru", "gru_cell"} for key in keys)
    assert {row.suite for row in plan.rows()} == set(plan.SUITES)


def test_a_rope_key_is_what_the_committed_results_hold():
    committed = json.loads((table.RESULTS / "nvidia_h200.json").read_text())
    assert {row["key"] for row in committed["rows"]} <= {row.key for row in plan.rows()}


def test_every_bar_has_rows_and_every_row_of_a_bar_is_judged():
    rows = [*plan.rows(), *gru_plan.sequences(), *gru_plan.steps()]
    named = {(row.suite, row.bar) for row in rows}
    judging = set()
    for bar in (*bars.BARS, *bars.CALL_BARS, *bars.GRU_BARS):
        for name in (bar.row_bar,) if isinstance(bar.row_bar, str | None) else bar.row_bar:
            judging.add((bar.suite, name))
            assert name is None or (bar.suite, name) in named, f"{bar.name} judges no row"
    assert {(suite, name) for suite, name in named if name is not None} <= judging


def test_judged_sequences_come_first():
    judged = [row.bar is not None for row in gru_plan.sequences()]
    assert judged == sorted(judged, reverse=True)
    assert [r.name for r in gru_plan.sequences() if r.bar == "KernelBench 39"] == ["KernelBench 39 and 40"]


def test_small_rows_are_those_with_few_states():
    for row in gru_plan.sequences():
        call = row.call
        if row.bar is not None and row.bar.startswith("small"):
            assert call.batch * call.hidden <= 16_384
            assert call.hidden <= (1024 if row.bar.endswith("1024") else 512)
        if row.bar is not None and "B 16 to 64" in row.bar:
            assert (call.hidden, 16 <= call.batch <= 64) == (512, True)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_sequence_counts_its_weights(layers, bidirectional):
    call = SequenceCall(7, 2, 5, 8, layers=layers, bidirectional=bidirectional, dtype=torch.float32)
    gru_module = gru_peers.make_gru(call, "cpu")
    matrices = sum(p.numel() for name, p in gru_module.named_parameters() if name.startswith("weight"))
    assert call.weights == matrices
    assert call.flops == 2 * 7 * 2 * matrices
    x, output = gru_peers.make_input(call, "cpu"), gru_module(gru_peers.make_input(call, "cpu"))[0]
    assert call.moved_bytes == 4 * (x.numel() + output.numel() + matrices)


def test_packed_sequences_count_their_own_steps():
    call = dataclasses.replace(SMALL, batch=3, lengths=(5, 2, 1))
    assert gru_peers.make_input(call, "cpu").data.shape == (call.tokens, 4) == (8, 4)


# Rows


@pytest.mark.parametrize(
    "call",
    [SMALL, dataclasses.replace(SMALL, layers=2, bidirectional=True), dataclasses.replace(SMALL, lengths=(5, 4, 1))],
    ids=["plain", "deep", "packed"],
)
def test_a_sequence_row(call, fake_clock):
    row = gru.measure(sequence_row(call), device="cpu")
    assert fake_clock == [gru.OURS, gru.NN_GRU, gru.OURS_IN_A_GRAPH, gru.IN_A_GRAPH]
    assert (row["ours"], row["ours_in_a_graph"], row["us_per_step"]) == (10.0, 8.0, 2.0)
    assert row["peers"] == {gru.NN_GRU: 50.0, gru.IN_A_GRAPH: 25.0}
    assert (row["speedup"], row["speedup_over_graph"], row["speedup_graph_over_graph"]) == (5.0, 2.5, 3.125)
    assert row["floor"] == pytest.approx(max(call.moved_bytes / 4e12, call.flops / 395e12) * 1e6, abs=1e-3)
    assert row["sizes"]["tokens"] == call.tokens
    assert row["rule"] == "eager", "a CPU has no kernels: the record must say so"
    assert "cpu" in row["why"]
    assert row["error"] <= 2 * row["peer_error"] < 1e-5


def test_a_sequence_of_wrong_results_is_not_timed(fake_clock, monkeypatch):
    forward = tuned.nn.GRU.forward

    def off(self, *arguments):
        output, last = forward(self, *arguments)
        return output, last + 0.01

    monkeypatch.setattr(tuned.nn.GRU, "forward", off)
    with pytest.raises(gru.WrongResultError, match=r"largest error 0\.01"):
        gru.measure(sequence_row(), device="cpu")
    assert fake_clock == []


def test_nan_is_wrong():
    with pytest.raises(gru.WrongResultError, match="nan"):
        gru.refuse_wrong(float("nan"), 1.0)


@pytest.mark.usefixtures("fake_clock")
def test_a_graph_that_cannot_be_captured_is_a_reason(monkeypatch):
    def refuse(_):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(clock, "capture", refuse)
    row = gru.measure(sequence_row(), device="cpu")
    reason = "RuntimeError: operation not permitted when stream is capturing"
    assert row["missing"][gru.IN_A_GRAPH] == row["ours_in_a_graph"] == reason
    assert (row["speedup"], row["speedup_over_graph"]) == (5.0, None)
    assert table.gru_markdown({"environment": ENVIRONMENT, "rows": [row]}).count("| - |") == 3
    text = bars.report({"rows": [row]})
    assert f"required peer absent, {gru.IN_A_GRAPH}: {reason}" in text
    assert f"no CUDA graph of ours, t5 b3 i4 h8 seq first float32: {reason}" in text


def test_float32_runs_with_tf32_and_the_setting_comes_back():
    before = torch.backends.cuda.matmul.allow_tf32
    with gru.tf32():
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_flashrnn_gets_the_weights_of_nn_gru(monkeypatch):
    """A stand-in for FlashRNN computes the GRU that FlashRNN documents, from the arguments that FlashRNN takes."""

    def stand_in(projected, recurrent, biases, *, function, backend, dtype):
        assert (function, backend, dtype) == ("gru", "cuda", "float32")
        h, states = torch.zeros_like(projected[:, 0, 0, 0]), []
        for x in projected[:, :, :, 0].unbind(1):  # [B, 3, H]
            n, r, z = (h @ recurrent[i, 0].T for i in range(3))
            r = torch.sigmoid(x[:, 0] + r + biases[1, 0])
            z = torch.sigmoid(x[:, 1] + z + biases[2, 0])
            h = z * h + (1 - z) * torch.tanh(x[:, 2] + biases[3, 0] + r * (n + biases[0, 0]))
            states.append(h)
        return torch.stack(states, 1)[None, :, :, None], h[None, :, None, None]

    monkeypatch.setitem(sys.modules, "flashrnn", types.SimpleNamespace(flashrnn=stand_in))
    module, x = gru_peers.make_gru(SMALL, "cpu"), gru_peers.make_input(SMALL, "cpu")
    with torch.no_grad():
        assert gru.error_of(gru_peers.flashrnn(SMALL, module, x)(), module(x)) < 1e-6
    both = dataclasses.replace(SMALL, bidirectional=True)
    assert "one direction" in gru_peers.flashrnn(both, gru_peers.make_gru(both, "cpu"), x)


@pytest.mark.usefixtures("fake_clock")
@pytest.mark.parametrize(
    ("call", "peers"),
    [
        (StepCall("cell", 3, (4,), 4, torch.float32), [gru_peers.NN_GRU_CELL]),
        (StepCall("step", 3, (2, 4), 4, torch.float32), [gru_peers.CAT_NN_GRU, gru_peers.CAT_NN_GRU_CELL]),
        (StepCall("linear_cat", 3, (4, 4, 2), 20, torch.float32), [gru_peers.CAT_LINEAR]),
    ],
    ids=lambda value: value.operation if isinstance(value, StepCall) else None,
)
def test_a_step_row(call, peers):
    row = gru.measure(Row("gru_cell", call, "cell"), device="cpu")
    assert list(row["peers"]) == peers
    assert (row["ours"], row["hot"]["ours"], row["host"]["ours"]) == (6.0, 2.0, 7.0), "three sets cold, one hot"
    assert row["ours_over_goal"] == pytest.approx(6.0 / (1.1 * row["floor"] + 1.5), rel=1e-3)
    assert row["rule"] == "eager"


@pytest.mark.usefixtures("fake_clock")
def test_a_step_of_wrong_results_is_not_timed(monkeypatch):
    monkeypatch.setattr(
        tuned.dispatch, "linear_cat", lambda xs, weight, bias: torch.zeros(len(xs[0]), len(weight)) * bias
    )
    call = StepCall("linear_cat", 3, (4, 4, 2), 20, torch.float32)
    with pytest.raises(gru.WrongResultError, match="largest error"):
        gru.measure(Row("gru_cell", call, "segments"), device="cpu")


def test_cells_share_their_weights_and_sets_do_not():
    both = gru_peers.cells(StepCall("cell", 3, (4,), 4, torch.float32), "cpu", 2)
    ours, theirs = both.ours[0].func, both.peers[gru_peers.NN_GRU_CELL][0].func
    assert ours.weight_hh.data_ptr() == theirs.weight_hh.data_ptr()
    assert ours.weight_hh.data_ptr() != both.ours[1].func.weight_hh.data_ptr()


def test_a_step_counts_its_weights():
    cell = torch.nn.GRUCell(6, 4)
    assert StepCall("step", 1, (2, 4), 4).weights == cell.weight_ih.numel() + cell.weight_hh.numel()
    assert StepCall("linear_cat", 1, (4, 4, 2), 20).weight_bytes == 2 * 200


def test_calls_take_turns(monkeypatch):
    turns = []

    def span_us(call, calls):
        turns.append((call(), calls))
        return 4000.0

    monkeypatch.setattr(clock, "span_us", span_us)
    times = clock.interleaved({"a": lambda: "a", "b": lambda: "b"})
    assert turns == [("a", 1), ("b", 1)] + [("a", 6), ("b", 6)] * clock.ROUNDS
    assert times["a"] == Timing(4000.0, 0.0)


# The run


@pytest.mark.usefixtures("fake_clock")
def test_a_row_that_fails_costs_no_other_and_rows_are_saved_at_once(tmp_path):
    out = results(tmp_path)
    rows = [sequence_row(dataclasses.replace(SMALL, batch=b)) for b in (1, 2, 3)]
    seen = []

    def measure(row):
        seen.append([r["key"] for r in json.loads(out.path.read_text())["rows"]] if out.path.exists() else [])
        if row.call.batch == 2:
            raise ValueError("no\nmore")
        return gru.measure(row, device="cpu")

    session.run(rows, out, measure, minutes=1)
    assert seen == [[], [rows[0].key], [rows[0].key]]
    saved = json.loads(out.path.read_text())
    assert [r["key"] for r in saved["rows"]] == [rows[0].key, rows[2].key]
    assert saved["skipped"] == {rows[1].key: "ValueError: no"}


def test_when_the_time_is_up_rows_are_left_out_with_the_reason(tmp_path):
    out = results(tmp_path)
    session.run([sequence_row()], out, gru.measure, minutes=-1)
    assert json.loads(out.path.read_text())["skipped"] == {sequence_row().key: "left out: -1 minutes were up"}


def test_when_the_time_is_up_rows_that_were_measured_stay(tmp_path):
    out, row = results(tmp_path), sequence_row()
    out.rows[row.key] = {"suite": "gru", "key": row.key, "us": 1.0}
    session.run([row], out, gru.measure, minutes=-1)
    assert (list(out.rows), out.skipped) == ([row.key], {})


@pytest.mark.parametrize("asked", [("--rows", "1024"), ("--suite", "gru"), ("--missing", "--suite", "gru")])
def test_rows_of_another_environment_are_not_dropped_unless_it_is_said(tmp_path, monkeypatch, capsys, asked):
    monkeypatch.setattr(record, "environment", lambda _: dict(ENVIRONMENT))
    old = record.Results.open(tmp_path, (), {})
    old.add(sequence_row(), {"suite": "gru", "us": 1.0})
    kept = old.path.read_bytes()
    monkeypatch.setattr(record, "environment", lambda _: ENVIRONMENT | {"torch": "3"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(session, "run", lambda _rows, found, *_, **__: found.save())
    assert gru.main([*asked, "--out", str(tmp_path)]) == 1
    assert "torch was" in capsys.readouterr().out
    assert old.path.read_bytes() == kept
    assert gru.main([*asked, "--out", str(tmp_path), "--replace"]) == 0
    assert json.loads(old.path.read_text())["rows"] == []


def test_all_suites_replace_rows_of_another_environment(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(session.subprocess, "run", lambda command, **_: (ran.append(command), Done)[1])
    assert gru.main(["--out", str(tmp_path)]) == 0
    assert [("--replace" in command) for command in ran] == [True, True]


class Done:
    returncode = 0


def test_a_nan_is_the_largest_error_and_no_right_result():
    good, bad = torch.zeros(3), torch.tensor([0.0, float("nan")])
    for given in ((good, bad), (bad, good)):
        assert math.isnan(session.largest(given))
        assert math.isnan(gru.error_of(given, tuple(torch.zeros_like(t) for t in given)))
        with pytest.raises(session.WrongResultError, match="results are nan apart"):
            session.apart(given, tuple(torch.zeros_like(t) for t in given))
    assert session.apart([good + 1.0], [good + 1.5], 20.0) == 0.025
    with pytest.raises(session.WrongResultError, match=r"0\.5 apart"):
        session.apart([good], [good + 0.5])


def test_another_suite_stays_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "environment", lambda _: dict(ENVIRONMENT))
    old = record.Results(tmp_path / "test_gpu.json", dict(ENVIRONMENT), {}, {"gru_cell, b": "left out"})
    old.rows = {"gru, a": {"suite": "gru", "key": "gru, a"}, "gru_cell, a": {"suite": "gru_cell", "key": "gru_cell, a"}}
    old.save()
    opened = record.Results.open(tmp_path, ("gru",), {})
    assert (list(opened.rows), opened.skipped) == (["gru_cell, a"], {"gru_cell, b": "left out"})
    monkeypatch.setattr(record, "environment", lambda _: ENVIRONMENT | {"torch": "3"})
    assert record.Results.open(tmp_path, (), {}).rows == {}


def test_rows_of_another_suite_that_come_in_between_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "environment", lambda _: dict(ENVIRONMENT))
    gru_row, cell_row = sequence_row(), Row("gru_cell", StepCall("step", 3, (2, 4), 4, torch.float32), None)
    before = record.Results.open(tmp_path, (), {})
    before.add(gru_row, {"suite": "gru", "us": 1.0})
    before.add(cell_row, {"suite": "gru_cell", "us": 1.0})
    one, other = (record.Results.open(tmp_path, (name,), {}) for name in ("gru", "gru_cell"))
    other.skip(cell_row, "left out")
    one.add(gru_row, {"suite": "gru", "us": 2.0})
    found = json.loads(one.path.read_text())
    assert [(row["key"], row["us"]) for row in found["rows"]] == [(gru_row.key, 2.0)]
    assert found["skipped"] == {cell_row.key: "left out"}
    other.add(cell_row, {"suite": "gru_cell", "us": 3.0})
    found = json.loads(one.path.read_text())
    assert {row["key"]: row["us"] for row in found["rows"]} == {gru_row.key: 2.0, cell_row.key: 3.0}
    assert found["skipped"] == {}


@pytest.mark.parametrize("suite", ["gru", "gru_cell"])
def test_a_dry_run_lists_the_rows(suite, capsys):
    assert gru.main(["--dry-run", "--suite", suite]) == 0
    rows = gru_plan.sequences() if suite == "gru" else gru_plan.steps()
    out = capsys.readouterr().out
    assert all(row.key in out for row in rows)
    assert f"{len(rows)} rows" in out
    assert gru.main(["--dry-run", "--suite", suite, "--rows", "b128"]) == 0
    assert "b1 " not in capsys.readouterr().out
    assert gru.main(["--rows", "no such row"]) == 1
    assert "'no such row'" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would measure")
def test_without_a_gpu_it_says_so(capsys):
    assert gru.main([]) == 1
    assert "PyTorch sees none here" in capsys.readouterr().out


@pytest.fixture
def commanded(tmp_path, monkeypatch):
    """A function that runs the command line of a suite of three rows with a given ``measure``; results go to tmp_path."""
    monkeypatch.setattr(record, "environment", lambda _: dict(ENVIRONMENT))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = [sequence_row(dataclasses.replace(SMALL, batch=b)) for b in (1, 2, 3)]

    def command(measure, *arguments):
        given = {"prog": "p", "about": "", "rows": rows, "packages": {}, "folder": tmp_path}
        return session.command(arguments, measure=measure, **given)

    return command


def fails_at(batch, measured_us, seen):
    def measure(row):
        seen.append(row.call.batch)
        if row.call.batch == batch:
            raise ValueError("no more")
        return record.common(row, ours_us=measured_us, ours_spread_us=0.0, found={})

    return measure


def test_a_whole_suite_takes_its_time_and_fails_where_a_row_is_skipped(commanded):
    for more, code in (((), 0), (("--whole",), 1)):
        seen = []
        assert commanded(fails_at(2, 1.0, seen), "--minutes=0", *more) == code
        assert seen == ([1, 2, 3] if more else []), "no row is begun when the minutes are up, unless it is to be whole"
    assert commanded(fails_at(None, 1.0, []), "--whole") == 0


def test_a_suite_that_was_cut_goes_on_with_the_rows_that_it_lacks(commanded, tmp_path):
    first, second, third = [], [], []
    assert commanded(fails_at(2, 1.0, first), "--whole") == 1
    assert commanded(fails_at(None, 2.0, second), "--whole", "--missing") == 0
    assert (first, second) == ([1, 2, 3], [2])
    saved = json.loads((tmp_path / "test_gpu.json").read_text())
    assert {row["sizes"]["batch"]: row["ours"] for row in saved["rows"]} == {1: 1.0, 2: 2.0, 3: 1.0}
    assert saved["skipped"] == {}
    assert commanded(fails_at(None, 3.0, third), "--whole") == 0
    assert third == [1, 2, 3], "without it all are measured again"


def test_suites_apart_are_given_how_they_are_to_be_run(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ran = []
    done = types.SimpleNamespace(returncode=0)
    monkeypatch.setattr(session.subprocess, "run", lambda command, **_: ran.append(command) or done)
    assert gru.main(["--whole", "--missing", "--out", str(tmp_path)]) == 0
    assert [command[3:5] for command in ran] == [["--whole", "--missing"]] * 2


# Bars


def test_a_speed_up_must_not_fall_below_its_bar():
    rows = [measured("medium", speedup=s, speedup_over_graph=2.0) for s in (2.4, 4.5, 3.0)]
    text = bars.report({"rows": rows})
    assert "512,128,256 and 256,128,512: nn.GRU / ours >= 2.50: MISSED by 1 of 3; worst 2.400" in text
    assert "    moonshot 4.00: 1 of 3; median 3.000" in text
    assert "    2.400 (-4.0%)" in text
    assert "512,128,256 and 256,128,512: nn.GRU in a CUDA graph / ours >= 1.50: met, by all 3" in text


def test_a_time_must_not_exceed_its_bar():
    text = bars.report({"rows": [measured("KernelBench 39", ours=3600.0)]})
    assert "KernelBench 39, microseconds <= 3500.00: MISSED by 1 of 1; worst 3600.000" in text


def test_a_moonshot_without_a_bar_is_told():
    text = bars.report({"rows": [measured("cell", "gru_cell", ours_over_goal=x) for x in (0.9, 1.2)]})
    assert "cell, cold / (1.1 floors + 1.5 us): no bar; worst 1.200" in text
    assert "    moonshot 1.00: 1 of 2; median 0.900" in text


def test_a_row_that_no_kernel_served_is_told():
    text = bars.report({"rows": [measured("medium", rule="eager", why="no Triton")]})
    assert "no kernel served t1 b1 i1 h1 seq first bfloat16: no Triton" in text


# Tables


@pytest.fixture
def document(fake_clock):  # noqa: ARG001 (pytest marks cannot be put on fixtures)
    slow, fast = sequence_row(name="slow"), sequence_row(dataclasses.replace(SMALL, lengths=(5, 2, 2)))
    rows = [gru.measure(slow, device="cpu"), gru.measure(fast, device="cpu") | {"speedup": 9.0}]
    rows.append(gru.measure(Row("gru_cell", StepCall("step", 3, (2, 4), 4, torch.float32), None), device="cpu"))
    return {"environment": ENVIRONMENT, "rows": rows, "skipped": {}}


def test_the_gru_table_tells_the_worst_and_the_best(document):
    text = table.gru_markdown(document)
    assert "| 5, 3, 4, 8, slow | 1 | float32 | 2.00 | 1.60 | 10.0 | 5.00 | 5.00 | 3.12 |" in text
    assert re.search(
        r"as users call it, times as fast: geometric mean 6.71 of 2; worst 5.00 at .*; best 9.00 at ", text
    )
    assert "* Against nn.GRU, both in a CUDA graph, times as fast: geometric mean 3.12 of 2; worst 3.12 at " in text
    assert "| step: batch 3, 2 + 4 to 4 | 6.00 |" in text
    assert text.count("No kernel served") == 3


def test_each_family_writes_its_own_part(tmp_path, document):
    (tmp_path / "gpu.json").write_text(json.dumps(document))
    page = tmp_path / "README.md"
    marks = "a\n<!-- benchmark:begin -->\nold\n<!-- benchmark:end -->\n"
    page.write_text(marks + "<!-- benchmark-gru:begin -->\nold\n<!-- benchmark-gru:end -->\nz\n")
    table.main([str(tmp_path / "gpu.json"), "--write", str(page)])
    assert page.read_text().startswith(marks)
    assert "slow" in page.read_text()
    assert page.read_text().endswith("<!-- benchmark-gru:end -->\nz\n")
    page.write_text(marks)
    with pytest.raises(SystemExit, match="benchmark-gru:begin"):
        table.main([str(tmp_path / "gpu.json"), "--write", str(page)])


def test_a_family_without_results_has_no_table(tmp_path, capsys, monkeypatch):
    (tmp_path / "gpu.json").write_text((table.RESULTS / "nvidia_h200.json").read_text())
    monkeypatch.setattr(table, "FOLDERS", (tmp_path, tmp_path / "gru"))
    table.main([])
    assert "time step" not in capsys.readouterr().out
    table.main(["--bars"])
    assert "KernelBench 39, microseconds: no row" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no results in"):
        table.newest(tmp_path / "gru")


def test_the_page_of_results_is_what_the_committed_ones_say(tmp_path):
    committed = (table.RESULTS.parent.parent / "docs" / "results.md").read_text()
    page = tmp_path / "results.md"
    page.write_text(
        re.sub(r"(<!-- (benchmark[a-z-]*):begin -->).*?(<!-- \2:end -->)", r"\1\3", committed, flags=re.DOTALL)
    )
    assert page.read_text() != committed
    assert table.main(["--write", str(page)]) == 0
    assert page.read_text() == committed


def test_the_newest_results_are_those_of_the_last_release_whatever_was_written_last(tmp_path, monkeypatch):
    """File times cannot decide: in a fresh clone all files are equally new."""
    folders = [tmp_path, tmp_path / "gru"]
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    for name in ("one", "two", "three"):
        for folder in folders:
            folder.mkdir(exist_ok=True)
            (folder / f"{name}.json").write_text("{}")
            os.utime(folder / f"{name}.json", (len(name), len(name)))
    (tmp_path / "gru" / "one.json").unlink()

    def found():
        return [path.relative_to(tmp_path).as_posix() for path in table.newest(*folders)]

    assert found() == ["three.json", "gru/three.json"]
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "one.json").write_text("{}")
    assert found() == ["one.json"]
    (tmp_path / "release" / "two.json").write_text('{"ended": "2026-11-27 10:00"}')
    assert found() == ["two.json", "gru/two.json"]


def test_what_was_measured_here_is_shown_whatever_was_released(tmp_path, monkeypatch):
    """After `make bench` on the user's GPU."""
    for folder in (tmp_path, tmp_path / "release"):
        folder.mkdir(exist_ok=True)
        (folder / "another.json").write_text('{"rows": [], "skipped": {}}')
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    monkeypatch.setattr(table, "FOLDERS", (tmp_path,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for main in (table.main, plot.main):
        with pytest.raises(SystemExit, match="PyTorch sees none: name a results file"):
            main(["--here"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "My GPU 7")
    with pytest.raises(SystemExit, match="no results in"):
        table.here(tmp_path)
    (tmp_path / "my_gpu_7.json").write_text('{"rows": [], "skipped": {}}')
    assert table.here(tmp_path) == [tmp_path / "my_gpu_7.json"]
    assert table.newest(tmp_path) == [tmp_path / "another.json"]
    with pytest.raises(SystemExit):
        table.main(["--here", "a.json"])


def test_a_suite_is_read_from_the_first_results_that_have_it(tmp_path):
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    new.write_text(json.dumps({"rows": [{"suite": "rope-qk", "ours": 1}], "skipped": {}}))
    rows = [{"suite": "rope-qk", "ours": 2}, {"suite": "rope-thd", "ours": 3}]
    old.write_text(json.dumps({"rows": rows, "skipped": {}}))
    assert [[row["ours"] for row in found["rows"]] for found in table.read([new, old])] == [[1], [3]]


def test_what_is_installed_of_a_peer_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "a_peer", types.SimpleNamespace(__version__="git 123"))
    assert record.version("a_peer", "no-such-distribution") == "git 123", "part of a peer, without its distribution"
    assert record.version("pytest", "pytest") == pytest.__version__
    assert record.version("no_such_package", "pytest") is None
