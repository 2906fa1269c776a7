"""Claim work in an Optuna storage, so that of many tuners exactly one ends each piece.

A claim is a study: its name says what is claimed and which attempt this is, and a storage takes a name once, from whoever
asks first. Its owner counts up a heartbeat. A claim whose count stands still for STALE_SECONDS of the observer's own clock is
dead (no two hosts' clocks are compared), and the next attempt may be claimed, again by one. Only the last attempt counts.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..storage.backends import new_study, study_named

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

STALE_SECONDS = 60.0
BEATS = 6  # in that time
LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The last claim of a piece of work, as an observer sees it."""

    number: int
    owner: str
    live: bool  # claimed, not ended, and its heartbeat moved lately
    ended: dict[str, Any] | None  # what its owner left; "complete" says whether the work is done

    @property
    def complete(self) -> bool:
        """Whether the work is done."""
        return self.ended is not None and bool(self.ended["complete"])


@dataclasses.dataclass
class Claim:
    """A piece of work that is ours."""

    key: str
    number: int
    study: int
    beat: int = 0


class Claims:
    """The claims of one set of work, seen by one tuner."""

    def __init__(
        self,
        storage: BaseStorage,
        scope: str,
        owner: str,
        *,
        stale_s: float = STALE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``scope`` is the same for all tuners that share the work; ``owner`` tells a person which tuner this is."""
        self.owner = owner
        self._storage, self._prefix = storage, f"claims/{scope}/"
        self._stale_s, self._clock = stale_s, clock
        self._seen: dict[tuple[str, int], tuple[int, float]] = {}  # attempt -> its count, since when
        self._final: set[tuple[str, int]] = set()  # complete, and no attempt followed

    def look(self) -> dict[str, Attempt]:
        """The last attempt at each piece of work that was ever claimed, in one reading of the storage."""
        last: dict[str, tuple[int, dict[str, Any]]] = {}
        before = self._clock()
        studies = self._storage.get_all_studies()
        # A count is seen from after one reading until before another: this tuner may stand still in the middle of either.
        span = before, self._clock()
        for study in studies:
            if study.study_name.startswith(self._prefix):
                key, _, number = study.study_name[len(self._prefix) :].rpartition("/")
                if key not in last or int(number) > last[key][0]:
                    last[key] = (int(number), study.user_attrs)
        return {key: self._attempt(key, number, attrs, *span) for key, (number, attrs) in last.items()}

    def _attempt(self, key: str, number: int, attrs: dict[str, Any], before: float, after: float) -> Attempt:
        beat = attrs.get("beat", -1)
        if self._seen.get((key, number), (None, after))[0] != beat:
            self._seen[key, number] = (beat, after)
        ended = attrs.get("ended")
        if ended is not None and ended["complete"] and (key, number) not in self._final:
            # Its owner may have slept, ended late, and been taken over between the storage's answers on names and on attributes.
            if self._study(key, number + 1) is not None:
                return Attempt(number + 1, "another tuner", live=True, ended=None)
            self._final.add((key, number))
        live = ended is None and before - self._seen[key, number][1] < self._stale_s
        return Attempt(number, attrs.get("owner", "another tuner"), live, ended)

    @property
    def beat_s(self) -> float:
        """Seconds between heartbeats."""
        return self._stale_s / BEATS

    def claim(self, key: str, last: Attempt | None) -> Claim | None:
        """The next attempt at a piece of work, ours; None if another was faster, or its owner ended it after all."""
        number = 1 if last is None else last.number + 1
        study = new_study(self._storage, self._name(key, number))
        if study is None:
            return None
        claim = Claim(key, number, study)
        self._storage.set_study_user_attr(study, "owner", self.owner)
        # An owner that was only asleep may have ended its attempt before ours was there: then that is how it ended.
        theirs = self._study(key, number - 1)
        before = None if theirs is None else self._storage.get_study_user_attrs(theirs).get("ended")
        if before is not None and before["complete"]:
            self._storage.set_study_user_attr(study, "ended", before)
            return None
        self.beat(claim)
        return claim

    def beat(self, claim: Claim) -> None:
        """Show that the owner lives."""
        claim.beat += 1
        self._storage.set_study_user_attr(claim.study, "beat", claim.beat)

    def lost(self, claim: Claim) -> bool:
        """Whether another has taken the work over, since this tuner stood still for too long."""
        return self._study(claim.key, claim.number + 1) is not None

    def end(self, claim: Claim, left: dict[str, Any], *, complete: bool) -> bool:
        """Say how the work ended; False if another has taken it over, and what is left here does not count.

        Work that is not complete may be claimed again.
        """
        # Written first, asked after: of an owner that ends late and another that takes over, at least one sees the other.
        self._storage.set_study_user_attr(claim.study, "ended", {**left, "complete": complete})
        return not self.lost(claim)

    def abandon(self, owner: str) -> None:
        """End the claims of an owner that is known to be dead, so that nobody waits for its heartbeat."""
        for key, attempt in self.look().items():
            study = self._study(key, attempt.number)
            if attempt.owner == owner and attempt.ended is None and study is not None:
                self._storage.set_study_user_attr(study, "ended", {"complete": False, "reason": "its tuner died"})

    def _study(self, key: str, number: int) -> int | None:
        return study_named(self._storage, self._name(key, number))

    def _name(self, key: str, number: int) -> str:
        return f"{self._prefix}{key}/{number}"


class Heart:
    """Beats for the claim that a tuner holds, in a thread, until the tuner ends or its process dies."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._claim: Claim | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()  # no beat after hold(None)
        self.lost = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def hold(self, claim: Claim | None) -> None:
        """Beat for this claim from now on, or for none."""
        with self._lock:
            self._claim, self.lost = claim, False

    def _run(self) -> None:
        while not self._stop.wait(self._claims.beat_s):
            self._beat()

    def _beat(self) -> None:
        with self._lock:
            if self._claim is None:
                return
            try:
                self._claims.beat(self._claim)
                self.lost = self._claims.lost(self._claim)
            except Exception as error:  # noqa: BLE001 - the tuner meets the same storage itself, and says so
                LOG.warning("no heartbeat: %s", error)


def first_says(storage: BaseStorage, name: str, value: str, patience_s: float = 5.0) -> str:
    """What the first tuner to ask under this name gave as its value: the same answer for all, also for those at once."""
    if study_named(storage, name) is None and (ours := new_study(storage, name)) is not None:
        storage.set_study_user_attr(ours, "value", value)
    study = storage.get_study_id_from_name(name)
    end = time.monotonic() + patience_s
    while (said := storage.get_study_user_attrs(study).get("value")) is None:
        if time.monotonic() > end:  # the first one died before it could say
            storage.set_study_user_attr(study, "value", value)
        time.sleep(0.02)
    return str(said)
