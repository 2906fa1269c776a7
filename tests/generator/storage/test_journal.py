"""The journal: what it keeps of a trial, and which trials still count later."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import optuna
import pytest

from generator.searching.pool import legal_pool
from generator.selection import problem_named
from generator.storage import journal as journal_module
from generator.storage.backends import open_storage
from generator.storage.journal import Journal
from tests.support.fakes import ENVIRONMENT
from tuned.families.choices import one_of
from tuned.families.gru_cell.variant import GruCellVariant
from tuned.families.registry import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

PROBLEM = problem_named("gru_cell_512_64")
OTHER = problem_named("gru_cell_1024_64")
DIGESTS = {"gru_cell_bias_copy": "0123456789ab"}
A, B = GruCellVariant(num_warps=2), GruCellVariant(num_warps=8)


@dataclasses.dataclass(frozen=True)
class Enlarged(GruCellVariant):
    """The space of variants with one more knob, and without some choices."""

    block_hidden: int = one_of(8, 128, 256, 512, 1024, default=8)
    unroll: int = one_of(1, 2, 4, default=2)


def digests(variant: Any) -> dict[str, str]:
    del variant
    return DIGESTS


@pytest.fixture(params=["journal file", "sqlite"])
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A function whose every call gives a new process's view of the same trials."""
    url = None if request.param == "journal file" else f"sqlite:///{tmp_path}/trials.db"
    return lambda: Journal(open_storage(url, "test_gpu", tmp_path / "trials.log"))


def test_what_is_added_is_remembered_by_the_next_process(open_again: Any) -> None:
    open_again().add(PROBLEM, ENVIRONMENT, A, (4.5, 0.25), DIGESTS)
    open_again().add(PROBLEM, ENVIRONMENT, B, "spills 16 bytes a thread", DIGESTS)
    assert open_again().remembered(PROBLEM, ENVIRONMENT, digests) == {A: (4.5, 0.25), B: "spills 16 bytes a thread"}
    assert not open_again().remembered(OTHER, ENVIRONMENT, digests)


def test_the_last_result_of_a_variant_counts(open_again: Any) -> None:
    journal = open_again()
    for variant, result in ((A, "lost the worker"), (B, (9.0, 0.1)), (A, (4.0, 0.1))):
        journal.add(PROBLEM, ENVIRONMENT, variant, result, DIGESTS)
    assert list(open_again().remembered(PROBLEM, ENVIRONMENT, digests).items()) == [(B, (9.0, 0.1)), (A, (4.0, 0.1))]


@pytest.mark.parametrize("key", ["device", "driver", "triton", "method", "timing"])
def test_what_was_measured_with_something_else_does_not_count(tmp_path: Path, key: str) -> None:
    journal = Journal(open_storage(None, "test_gpu", tmp_path / "trials.log"))
    journal.add(PROBLEM, {**ENVIRONMENT, key: "another"}, A, (4.5, 0.25), DIGESTS)
    journal.finish(PROBLEM, {**ENVIRONMENT, key: "another"}, "settings", {"median_us": 4.5})
    assert not journal.remembered(PROBLEM, ENVIRONMENT, digests)
    assert journal.finished(PROBLEM, ENVIRONMENT, "settings") is None


def test_a_row_of_before_the_timing_had_a_name_has_its_trials(tmp_path: Path) -> None:
    before = {name: value for name, value in ENVIRONMENT.items() if name != "timing"}
    journal = Journal(open_storage(None, "test_gpu", tmp_path / "trials.log"))
    journal.add(PROBLEM, before, A, (4.5, 0.25), DIGESTS)
    journal.add(PROBLEM, ENVIRONMENT, B, (5.5, 0.25), DIGESTS)
    assert list(journal.remembered(PROBLEM, before, digests)) == [A], "tune.py explain asks so"
    assert list(journal.remembered(PROBLEM, ENVIRONMENT, digests)) == [B]


def test_a_trial_of_another_kernel_text_does_not_count(tmp_path: Path) -> None:
    journal = Journal(open_storage(None, "test_gpu", tmp_path / "trials.log"))
    journal.add(PROBLEM, ENVIRONMENT, A, (4.5, 0.25), DIGESTS)
    journal.add(PROBLEM, ENVIRONMENT, B, (4.5, 0.25), {"gru_cell_bias_copy": "of another text"})
    assert list(journal.remembered(PROBLEM, ENVIRONMENT, digests)) == [A]


def test_a_problem_is_what_it_asks_not_what_it_is_called(tmp_path: Path) -> None:
    journal = Journal(open_storage(None, "test_gpu", tmp_path / "trials.log"))
    journal.add(PROBLEM, ENVIRONMENT, A, (4.5, 0.25), DIGESTS)
    same, other = dataclasses.replace(PROBLEM, name="renamed"), dataclasses.replace(OTHER, name=PROBLEM.name)
    again = Journal(open_storage(None, "test_gpu", tmp_path / "trials.log"))
    assert list(again.remembered(same, ENVIRONMENT, digests)) == [A]
    assert not again.remembered(other, ENVIRONMENT, digests)


def test_a_larger_space_keeps_what_was_measured(open_again: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_again()
    journal.add(PROBLEM, ENVIRONMENT, A, (4.5, 0.25), DIGESTS)
    journal.add(PROBLEM, ENVIRONMENT, GruCellVariant(block_hidden=64), (5.0, 0.25), DIGESTS)  # Enlarged lacks it
    family = dataclasses.replace(FAMILIES["gru_cell"], variant_type=Enlarged)
    monkeypatch.setattr(journal_module, "FAMILIES", {"gru_cell": family})
    enlarged = open_again()
    assert enlarged.remembered(PROBLEM, ENVIRONMENT, digests) == {Enlarged(num_warps=2, unroll=2): (4.5, 0.25)}
    enlarged.add(PROBLEM, ENVIRONMENT, Enlarged(num_warps=2, unroll=2), (4.0, 0.25), DIGESTS)
    enlarged.add(PROBLEM, ENVIRONMENT, Enlarged(unroll=4), (3.0, 0.25), DIGESTS)
    known = open_again().remembered(PROBLEM, ENVIRONMENT, digests)
    assert known == {Enlarged(num_warps=2): (4.0, 0.25), Enlarged(unroll=4): (3.0, 0.25)}, (
        "the present space is the last"
    )
    monkeypatch.undo()
    assert set(open_again().remembered(PROBLEM, ENVIRONMENT, digests)) == {A, GruCellVariant(block_hidden=64)}, (
        "a trial with a knob that is no more says nothing"
    )


def test_a_search_that_finished_is_known_by_its_settings(open_again: Any) -> None:
    journal = open_again()
    assert journal.finished(PROBLEM, ENVIRONMENT, "96 trials") is None
    journal.finish(PROBLEM, ENVIRONMENT, "96 trials", {"median_us": 4.5})
    journal.finish(PROBLEM, ENVIRONMENT, "20 trials", {"median_us": 4.6})
    again = open_again()
    assert again.finished(PROBLEM, ENVIRONMENT, "96 trials") == {"median_us": 4.5}
    assert again.finished(PROBLEM, ENVIRONMENT, "20 trials") == {"median_us": 4.6}
    assert again.finished(PROBLEM, ENVIRONMENT, "21 trials") is None
    assert again.finished(OTHER, ENVIRONMENT, "96 trials") is None
    assert not again.remembered(PROBLEM, ENVIRONMENT, digests)


def test_asking_writes_nothing(tmp_path: Path) -> None:
    journal = Journal(open_storage(None, "test_gpu", tmp_path / "trials.log"))
    journal.remembered(PROBLEM, ENVIRONMENT, digests)
    journal.finished(PROBLEM, ENVIRONMENT, "settings")
    assert (tmp_path / "trials.log").read_bytes() == b""


def test_a_trial_is_one_line_of_the_file_and_reads_well_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "trials.log"
    journal = Journal(open_storage(None, "test_gpu", path))
    pool = legal_pool(PROBLEM, 90).variants
    for i, variant in enumerate(pool):
        journal.add(PROBLEM, ENVIRONMENT, variant, (4.0 + i, 0.25) if i else "does not compile", DIGESTS)
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + len(pool), "the study, and the trials"
    assert max(map(len, lines)) < 2000
    # Open the file as optuna-dashboard does.
    plain = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    (study,) = optuna.get_all_study_summaries(plain)
    assert PROBLEM.name in study.study_name
    trials = optuna.load_study(study_name=study.study_name, storage=plain).trials
    assert [dict(t.params) for t in trials] == [dataclasses.asdict(v) for v in pool]
    assert [t.value for t in trials] == [None, *(4.0 + i for i in range(1, len(pool)))]
    assert trials[0].state.name == "FAIL"
    assert trials[0].user_attrs["note"]["failed"] == "does not compile"
