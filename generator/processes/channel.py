"""Messages between a tuner and a process that it may lose: whole, well-formed and in time, or an error that says why."""

from __future__ import annotations

import contextlib
import io
import pickle
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

from ..places import GENERATOR

MARK = b"tuned\x00\x01\x02"  # starts each message; bytes that a broken variant writes into the pipe do not
HEAD = struct.Struct(">8sQ")
MOST_BYTES = 64 * 2**20  # the largest real message, an environment with a variant, is a few thousand
OURS = (f"{GENERATOR}.", "tuned.")  # packages whose classes an answer may hold


class ChannelError(Exception):
    """The other side is gone, or sent something that is no message; the error's text says which."""


class ClosedError(ChannelError):
    """The other side closed its end, or died."""


class GarbledError(ChannelError):
    """The bytes that came are no message, or hold an object that no answer may hold."""


class Channel:
    """One end of a socket pair. No method waits longer than it was told to."""

    def __init__(self, end: socket.socket, *, trusted: bool = False) -> None:
        """``trusted``: a message may hold any class; for the process that a tuner asks."""
        self.socket, self._trusted = end, trusted

    def send(self, message: Any, seconds: float | None = None) -> None:
        """Send one message.

        Raises:
            ClosedError: the other side is gone.
            TimeoutError: the message was not taken in time.
        """
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._within(_deadline(seconds)):
            self.socket.sendall(HEAD.pack(MARK, len(body)) + body)

    def receive(self, seconds: float | None = None) -> Any:
        """The next message.

        Raises:
            ClosedError: the other side is gone.
            GarbledError: something other than a message came.
            TimeoutError: nothing, or only a part of a message, came in time.
        """
        until = _deadline(seconds)
        mark, length = HEAD.unpack(self._read(HEAD.size, until))
        if mark != MARK or length > MOST_BYTES:
            raise GarbledError(f"{mark!r} came instead of a message")
        body = self._read(length, until)
        try:
            return pickle.loads(body) if self._trusted else _Answer(io.BytesIO(body)).load()  # noqa: S301 - see _Answer
        except Exception as error:
            raise GarbledError(f"what came cannot be read: {type(error).__name__}: {error}") from error

    def ready(self, seconds: float) -> bool:
        """Whether a message came, or the other side closed, within ``seconds``."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))

    def close(self) -> None:
        """Close this end."""
        self.socket.close()

    def _read(self, count: int, until: float | None) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            with self._within(until):
                part = self.socket.recv(min(count - len(parts), 2**20))
            if not part:
                raise ClosedError("it closed its end")
            parts += part
        return bytes(parts)

    @contextlib.contextmanager
    def _within(self, until: float | None) -> Iterator[None]:
        """Let a block use the socket until a deadline; an error of the socket means that the other side is gone."""
        try:
            # 0 would not wait at all
            self.socket.settimeout(None if until is None else max(1e-6, until - time.monotonic()))
            yield
        except TimeoutError:
            raise
        except OSError as error:
            raise ClosedError("it closed its end") from error


class _Answer(pickle.Unpickler):
    """Unpickles only plain values and this project's classes: a process that a variant has damaged gets no other code run."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module.startswith(OURS) else None
        if not isinstance(found, type):
            raise pickle.UnpicklingError(f"an answer holds no {module}.{name}")
        return found


def _deadline(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds
