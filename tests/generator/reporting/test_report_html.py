"""The page of a device: it says what was measured, and it is self-contained."""

from __future__ import annotations

import collections
import dataclasses
import html.parser
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from generator import command_line
from generator.places import RESULTS
from generator.problem import Problem
from generator.rendering.structures import structures
from generator.reporting.blocks import answer, per_thread, rows, tile
from generator.reporting.history import History, from_journal
from generator.reporting.html import contents
from generator.reporting.html.block_size import block_answer
from generator.reporting.html.charts import Axis, apart, byte_name, count_name, number
from generator.reporting.html.page import Sources, page
from generator.reporting.html.tiles import read_summary
from generator.reporting.importance import importances, knobs_of, spread
from generator.searching.pool import legal_pool
from generator.storage.backends import open_storage
from generator.storage.journal import Journal
from generator.storage.record import save_winner
from generator.workload import WORKLOADS, default_problems
from tests.support.fakes import ENVIRONMENT
from tests.support.records import winner
from tuned.families.gru_cell.spec import GruCellSize, GruCellSpec

# Steps in place have the library's form only, whose tile has three knobs.
GRU = [
    Problem(name, "gru_cell", GruCellSpec("bfloat16", hidden, (hidden,), bias=bias, inplace=True), GruCellSize(batch))
    for name, hidden, batch, bias in (
        ("gru_cell_512_64", 512, 64, True),
        ("gru_cell_1024_64", 1024, 64, True),
        ("gru_cell_512_1024", 512, 1024, True),
        ("gru_cell_1024_inplace_64", 1024, 64, False),
    )
]
VOID = {"meta", "link", "br"}
BY_THREAD = {1: 1.3, 2: 1.1, 4: 1.0, 8: 1.2, 16: 1.6}  # features a thread -> cost


def landscape(problem: Any, cost: Any, *, whole: bool = True) -> History:
    return History(problem, {v: cost(problem, v) for v in legal_pool(problem, 90).variants}, {}, whole)


def by_rows(problem: Any, variant: Any) -> float:
    """Two rows are best for every problem; the best width and the best number of warps differ between problems."""
    which = GRU.index(problem)
    others = abs(math.log2(variant.block_hidden) - 6 - which) + abs(math.log2(variant.num_warps) - (which ^ 1))
    return 5.0 + 3 * abs(variant.block_batch - 2) + others


def by_whole(problem: Any, variant: Any) -> float:
    """256 features are best for every problem; the best numbers of rows and warps differ between problems."""
    which = GRU.index(problem)
    others = abs(math.log2(variant.block_batch) - which % 3) + abs(math.log2(variant.num_warps) - which)
    return 5.0 + abs(math.log2(variant.block_batch * variant.block_hidden) - 8) + others


def by_thread(problem: Any, variant: Any) -> float:
    """The cost depends only on features a thread, so rules for rows or features a program cannot be as good."""
    return 10.0 * BY_THREAD[max(1, round(per_thread(problem, variant)))]


# --- what is computed -----------------------------------------------------------------------------------------------


def test_a_spread_is_the_median_nine_of_ten_and_the_worst() -> None:
    costs = spread([1.0] * 6 + [1.1] * 3 + [3.0])
    assert (costs.problems, costs.median) == (10, 0.0)
    assert costs.ninth == pytest.approx(10)
    assert costs.worst == pytest.approx(200)
    assert spread([1.5]).ninth == pytest.approx(50)


def test_the_knob_that_alone_decides_is_the_important_one() -> None:
    times = {v: 4.0 + v.num_warps + 0.001 * v.block_batch for v in legal_pool(GRU[0], 90).variants}
    found = importances(times)
    assert max(found, key=found.__getitem__) == "num_warps"
    assert sum(found.values()) == pytest.approx(1)
    assert found["num_warps"] > 0.4


def test_importances_need_trials_and_knobs_that_varied() -> None:
    variants = legal_pool(GRU[0], 90).variants
    assert importances(dict.fromkeys(variants[:5], 1.0)) == {}
    assert importances({}) == {}


def test_a_choice_costs_what_the_best_variant_with_it_is_above_the_best() -> None:
    found = {k.name: k for k in knobs_of([landscape(p, lambda _p, v: 8.0 + v.num_warps).times for p in GRU])}
    costs = found["num_warps"].costs
    assert [round(costs[n].median, 3) for n in (2, 4, 8)] == [0.0, 20.0, 60.0]
    assert costs[8].problems == len(GRU)
    assert knobs_of([]) == []


def test_the_rule_of_the_block_is_the_measure_that_explains_the_times() -> None:
    found = answer([landscape(p, by_thread) for p in GRU])
    assert found is not None
    assert (found.rules[0].measure, found.rules[0].value) == ("features a thread", 4)
    assert found.rules[0].cost.worst == 0
    assert [c.median for c in found.curves["features a thread"].values()] == pytest.approx([30, 10, 0, 20])
    assert answer([]) is None
    assert answer([History(GRU[0], {}, {next(iter(legal_pool(GRU[0], 90).variants)): "spills"})]) is None


@pytest.mark.parametrize(
    ("cost", "lead"),
    [
        (by_thread, "Choose it by the thread: 4 features a thread, so that a program takes 128 for each of its warps."),
        (by_rows, "Choose it by rows: 2 a program, whatever their width."),
        (by_whole, "Choose it by the whole: 256 features a program, whatever the width of a row."),
    ],
)
def test_the_paragraph_says_what_was_measured(cost: Any, lead: str) -> None:
    found = answer([landscape(p, cost) for p in GRU])
    assert found is not None
    text = block_answer(found, [1.0, 1.02, 1.5], (None, None))
    assert text.startswith(lead)
    assert f"Over {len(GRU)} problems and {found.trials:,} measured variants" in text
    assert "by 0.0% in the median problem, 0.0% in nine of ten and 0.0% in the worst" in text
    assert "slower than the winner by 2.0% in the median and 50.0% in the worst of 3" in text


def test_the_paragraph_takes_small_and_large_calls_apart() -> None:
    whole = answer([landscape(p, by_thread) for p in GRU])
    small = answer([landscape(p, lambda _p, v: by_thread(_p, v) + 9 * (per_thread(_p, v) > 2)) for p in GRU])
    assert whole is not None
    assert small is not None
    apart_ = block_answer(whole, [], (small, whole))
    assert (
        f"Taken apart, the {len(GRU)} calls that fit in L2 want 2 features a thread, the {len(GRU)} larger ones 4."
        in apart_
    )
    assert "The number is the same" in block_answer(whole, [], (whole, whole))


def test_failures_are_grouped_by_their_reason_without_its_numbers() -> None:
    variants = legal_pool(GRU[0], 90).variants
    reasons = ["spills 8 bytes a thread", "spills 24 bytes a thread", "the result is wrong\nat [3, 4]"]
    histories = [History(p, {}, dict(zip(variants, reasons, strict=False))) for p in GRU[:2]]
    found = contents.failures(histories)
    assert [(f.kind, f.count, f.problems) for f in found] == [
        ("spills … bytes a thread", 4, 2),
        ("the result is wrong", 2, 2),
    ]
    assert found[0].reason == reasons[0]
    assert found[0].example.startswith(f"{GRU[0].name}: form=library block_batch=")


def result_row(**changes: Any) -> dict[str, Any]:
    row = {
        "suite": "rope",
        "problem": "b2 s4096",
        "layout": "bshd",
        "direction": "forward",
        "inplace": False,
        "kind": "device",
        "ours": 10.0,
        "floor": 9.0,
        "peers": {"eager PyTorch": 80.0, "flash-attention": 12.5},
        "sizes": {"batch": 1, "heads": 32, "head_dim": 128, "seq": 4096},
    }
    return row | changes


def test_peers_are_compared_call_by_call_and_none_is_hidden() -> None:
    rows = [
        result_row(),
        result_row(ours=20.0, direction="backward"),
        result_row(kind="host"),
        result_row(suite="rope-sweep"),
    ]
    found = {p.name: p for p in contents.peers({"rows": rows})}
    assert next(iter(found)) == "the fastest peer"
    fastest = found["the fastest peer"]
    assert [round(r, 3) for r, _ in fastest.ratios] == [0.625, 1.25]
    assert fastest.slower == 1
    assert fastest.mean == pytest.approx((0.625 * 1.25) ** 0.5)
    assert found["eager PyTorch"].slower == 0
    assert "backward, flash-attention" in fastest.ratios[0][1]
    assert contents.peers(None) == []


def test_a_sweep_is_taken_from_the_results_with_most_of_it() -> None:
    few = [result_row(suite="rope-sweep", sizes={"batch": 1, "heads": 32, "head_dim": 128, "seq": s}) for s in (128,)]
    many = [
        result_row(suite="rope-sweep", direction=d, sizes={"batch": 1, "heads": 32, "head_dim": 128, "seq": s})
        for s in (128, 256, 512)
        for d in ("forward", "backward")
    ]
    ((title, source, charts),) = contents.sweep_charts([("new.json", {"rows": few}), ("old.json", {"rows": many})])
    assert (title, source) == ("batch 1, 32 heads, head dimension 128", "old.json")
    assert [c.title for c in charts] == ["forward", "backward"]
    ours = next(s for s in charts[0].series if s.label == "this project")
    assert [m.title for m in ours.marks] == [f"this project, {n}: 10.0 us" for n in ("128", "256", "512")]
    assert contents.sweep_charts([]) == []


def test_what_lies_beyond_an_axis_is_drawn_at_its_edge_and_says_its_value() -> None:
    rows = contents.winner_rows([winner(), winner("gru_cell_512_64", floor_us=345.0)])
    chart = contents.floor_chart(rows)
    assert chart is not None
    marks = {s.label: s.marks for s in chart.series}
    (beyond,) = marks["GRU cell"]
    assert beyond.beyond
    assert beyond.y == chart.frame.top
    assert "1000.0% of the floor" in beyond.title
    assert not marks["forward"][0].beyond
    assert contents.floor_chart([]) is None


def test_axes_labels_and_numbers() -> None:
    axis = Axis(1, 100, 0, 200, log=True)
    assert [axis(v) for v in (1, 10, 100)] == [0, 100, 200]
    assert axis(1e6) == 200
    assert apart([10, 11, 50], 13) == [10, 23, 50]
    assert apart([10, 95, 96], 10, lowest=100) == [10, 90, 100]
    assert [number(x) for x in (1.234, 34.56, 123.4, 1234.5)] == ["1.23", "34.6", "123", "1,234"]
    assert [count_name(x) for x in (64, 1024, 131072)] == ["64", "1k", "128k"]
    assert [byte_name(x) for x in (512, 2**20, 2**31)] == ["512 B", "1 MiB", "2 GiB"]


def test_the_journal_gives_what_was_tried_with_the_kernels_of_today(tmp_path: Path) -> None:
    journal = Journal(open_storage(None, "test_gpu", tmp_path / "journal.log"))
    problem, family = GRU[0], WORKLOADS["gru_cell"].family
    good, bad, old = legal_pool(problem, 90).variants[:3]
    digests = {n: structures()[n].digest for n in family.kernel_names(problem.spec, good)}
    journal.add(problem, ENVIRONMENT, good, (4.5, 0.3), digests)
    journal.add(problem, ENVIRONMENT, bad, "spills 8 bytes a thread", digests)
    journal.add(problem, ENVIRONMENT, old, (1.0, 0.3), dict.fromkeys(digests, "0123456789ab"))
    (found,) = from_journal(journal, [(p, ENVIRONMENT) for p in GRU])
    assert (found.problem, found.times, found.failed) == (problem, {good: 4.5}, {bad: "spills 8 bytes a thread"})
    assert (found.tried, found.whole) == (2, False)


# --- the page -------------------------------------------------------------------------------------------------------


class Reader(html.parser.HTMLParser):
    """Keeps the facts of a page that tests check, and fails on tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: collections.Counter[str] = collections.Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.inside: dict[str, list[list[str]]] = {"table": [], "svg": []}  # the tags inside of each
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        for outer, found in self.inside.items():
            if tag == outer:
                found.append([])
            elif outer in self.open:
                found[-1].append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes what it did not open"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def sources() -> Sources:
    variants = legal_pool(GRU[0], 90).variants
    trials = [
        dataclasses.replace(
            landscape(p, by_thread, whole=False), failed={variants[0]: "<script>alert('no')</script> & 8"}
        )
        for p in GRU
    ]
    winners = [winner(), winner("llama3_8b_inplace_bshd_2x4096", median_us=33.0), winner("gru_cell_512_64")]
    rows = [result_row(), result_row(ours=20.0)] + [
        result_row(suite="rope-sweep", direction=d, sizes={"batch": 1, "heads": 32, "head_dim": 128, "seq": s})
        for s in (128, 256)
        for d in ("forward", "backward")
    ]
    environment = {"device": "Test GPU", "python": "3.12.3", "peers": {"flash_attn": "2.8"}}
    return Sources("test_gpu", winners, trials, [], [("results.json", {"rows": rows, "environment": environment})])


def test_the_page_is_whole_and_needs_no_network(sources: Sources) -> None:
    text = page(sources)
    read = Reader(text)
    links = [v for _, name, v in read.attributes if name in ("href", "src", "srcset", "action", "data", "xlink:href")]
    assert all(v.startswith("#") or v == "data:," for v in links), links
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest", text)
    ids = [v for _, name, v in read.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {v[1:] for v in links if v.startswith("#")} <= set(ids)
    assert ("html", "lang", "en") in read.attributes
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_the_page_can_be_read_without_seeing_it(sources: Sources) -> None:
    read = Reader(page(sources))
    assert len(read.inside["svg"]) == 1 + 2 + 1 + 3
    for tags in read.inside["svg"]:
        assert tags[:2] == ["title", "desc"]
    assert sum(tag == "svg" and name == "role" and v == "img" for tag, name, v in read.attributes) == len(
        read.inside["svg"]
    )
    for tags in read.inside["table"]:
        assert tags[0] == "caption"
    scopes = sum(tag == "th" and name == "scope" for tag, name, _ in read.attributes)
    assert scopes == read.tags["th"]


def test_the_page_says_what_was_measured(sources: Sources) -> None:
    text = Reader(page(sources)).text
    for said in (
        "Test GPU: tuned kernels",
        "3 problems have a winner",
        "llama3_8b_inplace_bshd_2x4096",
        "99.1%",  # the share of the floor: 34.2 / 34.5, both the lowest and the median
        "1.04\N{MULTIPLICATION SIGN}",  # the default's time over the winner's, median of three
        "Choose it by the thread: 4 features a thread",
        "From the journal, 4 problems",
        f"4 of {sum(len(legal_pool(p, 90).variants) + 1 for p in GRU)} variants tried, out of the journal",
        "<script>alert('no')</script> & 8",  # is shown as text
        "Where a peer is faster: 1 of 2 calls",
        "flash_attn",
        "3.12.3",
        "1.2.3",
    ):
        assert said in text, said


def test_the_tiles_say_what_they_count_and_count_what_the_readme_counts(sources: Sources) -> None:
    calls = {
        "a rotation": {"graph": 0.5, "call": 2.0},
        "a recurrence": {"graph": 8.0, "call": 8.0},
    }
    text = Reader(page(dataclasses.replace(sources, summary=calls))).text
    times = "\N{MULTIPLICATION SIGN}"
    for said in (
        f"as fast as the best of what each call replaces, in a CUDA graph geometric mean of README's 2 calls, from 0.50 to 8.0; slower in 1 2.0{times}",
        f"as calls, with the time of the host geometric mean of README's 2 calls, from 2.00 to 8.0; slower in 0 4.0{times}",
        "of the floor, the median of 2 RoPE winners 100% is a copy of the bytes that must move; small calls pass it",
        "of the floor, the lowest of these 2 llama3_8b_2x4096 99.1%",
        "as fast as the fastest peer of each call geometric mean of the 2 calls under Peers; a peer is faster in 1",
        "as fast as the untuned default median of 3 winners; the default needs no tuning",
    ):
        assert said in text, said
    assert "README" not in Reader(page(sources)).text, "they were not measured there"


def test_the_calls_of_the_readme_are_read_from_its_results() -> None:
    calls = read_summary(RESULTS, "nvidia_h200")
    assert calls is not None
    readme = (RESULTS.parents[1] / "README.md").read_text().partition("summary:begin")[2].partition("summary:end")[0]
    assert [name for name in calls if f"| {name} |" in readme] == list(calls)
    assert len(calls) == len(readme.strip().splitlines()) - 6
    assert read_summary(RESULTS, "no_gpu") is None


def test_text_from_a_journal_cannot_become_part_of_the_page(sources: Sources) -> None:
    assert "<script>alert" not in page(sources)


def test_the_same_data_give_the_same_bytes(sources: Sources) -> None:
    assert page(sources) == page(sources)


def test_landscapes_are_preferred_since_they_are_whole(sources: Sources) -> None:
    whole = [landscape(p, by_rows) for p in GRU]
    text = Reader(page(dataclasses.replace(sources, landscapes=whole))).text
    assert "Choose it by rows: 2 a program" in text
    assert "From 4 recorded landscapes: every legal variant was measured." in text
    older = [dataclasses.replace(whole[0], fresh=False), *whole[1:]]
    text = Reader(page(dataclasses.replace(sources, landscapes=older))).text
    assert "every legal variant was measured, in 1 of them with an older text of the kernel." in text


def test_what_is_missing_is_said_and_how_to_get_it() -> None:
    text = Reader(page(Sources("test_gpu"))).text
    for said in (
        "The record of test_gpu has no winner: python tune.py --gpu auto finds them.",
        "No results of a sweep over sequence lengths: python -m benchmarks.rope --only rope-sweep measures it.",
        "No benchmark results of test_gpu: make bench measures",
        "No journal and no recorded landscape of test_gpu",
    ):
        assert said in text


def test_a_row_that_does_not_count_is_marked() -> None:
    stale = winner(digests=dict.fromkeys(winner().digests, "0123456789ab"))
    assert "stale" not in Reader(page(Sources("test_gpu", [winner()]))).text
    assert "llama3_8b_2x4096 stale" in Reader(page(Sources("test_gpu", [stale]))).text


def test_the_command_writes_the_page_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNED_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    path = save_winner(winner(), tmp_path / "records")
    done = CliRunner().invoke(command_line.app, ["--out", str(path.parent), "report"], catch_exceptions=False)
    assert (done.exit_code, (tmp_path / "report-test_gpu.html").exists()) == (0, True)
    assert "llama3_8b_2x4096" in (tmp_path / "report-test_gpu.html").read_text()
    other = tmp_path / "page.html"
    asked = ["--out", str(path.parent), "report", "--device", "test_gpu", "--out", str(other)]
    assert CliRunner().invoke(command_line.app, asked, catch_exceptions=False).exit_code == 0
    assert other.read_bytes() == (tmp_path / "report-test_gpu.html").read_bytes()
    assert not list((tmp_path / "cache").rglob("*.log")), "a question leaves no journal behind"
    refused = CliRunner().invoke(command_line.app, ["report", "--device", "nvidia_b200"], catch_exceptions=False)
    assert refused.exit_code == 1
    assert "no record of nvidia_b200" in " ".join(refused.output.split())


ONE_OF_EACH = list({p.family: p for p in reversed(default_problems())}.values())


def test_the_tile_of_every_family_is_counted() -> None:
    for problem in ONE_OF_EACH:
        assert problem.family in WORKLOADS
        for variant in legal_pool(problem, 90).variants[:50]:
            assert tile(problem, variant) % rows(problem, variant) == 0
            assert per_thread(problem, variant) == tile(problem, variant) / 32 / variant.num_warps
    assert {p.family for p in ONE_OF_EACH} == set(WORKLOADS)


def test_the_command_reports_on_trials_of_every_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNED_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "trials").mkdir(parents=True)
    journal = Journal(open_storage(None, "test_gpu"))
    for problem in ONE_OF_EACH:
        save_winner(winner(problem.name), tmp_path / "records")
        names = WORKLOADS[problem.family].family.kernel_names
        for place, variant in enumerate(legal_pool(problem, 90).variants[:24]):
            digests = {n: structures()[n].digest for n in names(problem.spec, variant)}
            result = (10.0 + place, 0.5) if place % 8 else "spills 8 bytes a thread"
            journal.add(problem, ENVIRONMENT, variant, result, digests)
    asked = ["--out", str(tmp_path / "records"), "report", "--out", str(tmp_path / "page.html")]
    assert CliRunner().invoke(command_line.app, asked, catch_exceptions=False).exit_code == 0
    text = (tmp_path / "page.html").read_text()
    for problem in ONE_OF_EACH:
        assert problem.name in text
        explained = ["--out", str(tmp_path / "records"), "explain", problem.name]
        assert CliRunner().invoke(command_line.app, explained, catch_exceptions=False).exit_code == 0
    assert text.count("Over 1 problems and 21 measured variants") == len(WORKLOADS)


def test_results_are_read_where_they_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    assert contents.read_results(folder, "test_gpu") == []
    (folder / "test_gpu.json").write_text(json.dumps({"rows": []}))
    assert contents.read_results(folder, "test_gpu") == [("benchmarks/results/test_gpu.json", {"rows": []})]
