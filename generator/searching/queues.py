"""Which problem a tuner takes next: the first that no tuner has claimed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tuned.families.choices import choices
from tuned.families.registry import FAMILIES
from tuned.lookup.record import SCHEMA, Winner, winner_from_json, winner_to_json

from ..problem import Problem
from ..rendering.structures import digests
from ..storage.journal import KEY, problem_digest
from .claims import Claims, Heart, first_says
from .search import Outcome

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

POLL_SECONDS = 1.0  # between looks at a storage while others finish
NO_TIME = "the time budget was used up before it"


class TakenOverError(Exception):
    """Another tuner works on this problem, since this one gave no sign of life for too long."""


class MixedDevicesError(ValueError):
    """GPUs of different models cannot share work; the message names them and the way out."""


class Shared:
    """The problems that tuners share through a storage: each is claimed, and ended once; of one tuner alone, in order."""

    def __init__(
        self,
        problems: Iterable[Problem],
        claims: Claims,
        *,
        detail: Callable[[Problem], str] = lambda _: "search",
        poll_s: float = POLL_SECONDS,
    ) -> None:
        """``detail`` says what is to be done with a problem; only tuners that do the same with it share it."""
        self._keys = {f"{p.name}/{problem_digest(p)}/{detail(p)}": p for p in problems}
        self._claims, self._poll_s = claims, poll_s
        self._heart = Heart(claims)
        self._held: Any = None
        self._tried: set[str] = set()  # by this tuner: once each, however it ended
        self._known: set[str] = set()  # whose winners this tuner has found or told of
        self._news: list[Winner] = []
        self._free: list[str] = []
        self.done = 0  # how many were taken, or ended by others, before the present one
        self.share = 1.0  # of the time that is left, for the present one

    def __enter__(self) -> None:
        """Show from now on that the tuner lives."""
        self._heart.__enter__()

    def __exit__(self, *_: object) -> None:
        """Give back what is held, so that another tuner need not wait for it to go stale."""
        self._heart.__exit__()
        if self._held is not None:
            with contextlib.suppress(Exception):  # the storage may be what ended the run
                self._claims.end(self._held, {"reason": "its tuner was stopped"}, complete=False)

    def take(self, end: float, waiting: Callable[[str], None]) -> Problem | None:
        """A problem that is now this tuner's; None when all are done, or at ``end`` (time.monotonic).

        While others work on the last ones it waits, since one of them may die; ``waiting`` is told for what.
        """
        while True:
            attempts = self._look()
            for position, key in enumerate(self._free):
                held = self._claims.claim(key, attempts.get(key))
                if held is None:
                    continue
                self._held = held
                self._heart.hold(held)
                self._tried.add(key)
                self._free = self._free[position + 1 :]
                return self._keys[key]
            if self._free:
                continue  # all of them went to others in the meantime
            theirs = {k: a for k, a in attempts.items() if k in self._keys and a.live}
            if not theirs or time.monotonic() >= end:
                return None
            waiting(", ".join(f"{self._keys[k].name} ({a.owner})" for k, a in theirs.items()))
            time.sleep(min(self._poll_s, max(0.0, end - time.monotonic())))

    def _look(self) -> dict[str, Any]:
        attempts = self._claims.look()
        ended = {k for k in self._keys if k in attempts and attempts[k].complete}
        for key in sorted(ended - self._known):
            self._news.append(winner_from_json(attempts[key].ended["winner"], f"the storage's winner of {key}"))  # type: ignore[index]
        self._known |= ended
        live = {k for k in self._keys if k in attempts and attempts[k].live}
        self._free = [k for k in self._keys if k not in ended | live | self._tried]
        self.done = len(ended | self._tried)
        # As if each tuner that is at work now had an even part of what is left.
        tuners = 1 + len({attempts[k].owner for k in live})
        self.share = min(1.0, tuners / max(1, len(self._free) + len(live)))
        return attempts

    def following(self) -> Problem | None:
        """What will probably be taken next."""
        return self._keys[self._free[0]] if self._free else None

    def check(self) -> None:
        """Ask that the problem still be this tuner's.

        Raises:
            TakenOverError: it is not.
        """
        if self._heart.lost:
            raise TakenOverError("it was taken over by another tuner: this one gave no sign of life for too long")

    def end(self, outcome: Outcome | str, *, complete: bool) -> bool:
        """Tell all how the problem ended; False if another tuner has it now, and this result does not count."""
        held, self._held = self._held, None
        self._heart.hold(None)
        if isinstance(outcome, str):
            return self._claims.end(held, {"reason": outcome}, complete=False)
        counts = self._claims.end(held, {"winner": winner_to_json(outcome.winner)}, complete=complete)
        if counts and complete:
            self._known.add(held.key)
        return counts

    def left(self) -> dict[str, str]:
        """Problem -> why nobody did it."""
        attempts = self._look()
        theirs = {key: f"{attempt.owner} was still at it" for key, attempt in attempts.items() if attempt.live}
        reasons = dict.fromkeys(self._free, NO_TIME) | theirs
        return {p.name: reasons[key] for key, p in self._keys.items() if key in reasons and key not in self._tried}

    def abandon(self, owner: str) -> None:
        """Let others have what a tuner held that is known to be dead."""
        self._claims.abandon(owner)

    def news(self) -> list[Winner]:
        """Winners that others found, each told once."""
        news, self._news = self._news, []
        return news


def scope_of(environment: dict[str, Any], *settings: Any) -> str:
    """What tuners must have in common to share work: device, versions, method, kernels, spaces and settings."""
    common = {
        "environment": [environment[k] for k in KEY],
        "kernels": digests(),
        "spaces": {name: choices(family.variant_type) for name, family in FAMILIES.items()},
        "record": SCHEMA,
        "settings": settings,
    }
    digest = hashlib.sha256(json.dumps(common, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return f"{environment['device']}/{digest}"


def owner_name(index: int) -> str:
    """What other tuners call the one on this GPU; unlike any other, however alike the hosts are named."""
    return f"{socket.gethostname()} GPU {index} [{os.getpid()}-{uuid.uuid4().hex[:4]}]"


def share_storage(storage: BaseStorage, device: str) -> None:
    """Let only GPUs of one model share a storage.

    Raises:
        MixedDevicesError: GPUs of another model share it.
    """
    theirs = first_says(storage, "shared by GPUs of one model", device)
    if theirs != device:
        raise MixedDevicesError(
            f"all GPUs that share a storage must be of one model: this storage is that of {theirs}, this GPU is {device}. "
            "Give each model a database of its own, or tune without --storage."
        )
