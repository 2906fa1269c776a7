"""A process that forks others: they start at once, with everything imported, and none outlives the tuner.

The server imports what measuring and compiling need, touches no GPU, and forks when asked. Each child has a process
group of its own, a log for whatever it prints, and dies with the server. The server ends when its tuner does, however
the tuner ends, and kills the groups of its children, also the assemblers that they started.

Tuners of one host may share the server of the process which started them, by its address. When one of these tuners
ends, so do the children that were forked for it.

``multiprocessing`` has a fork server too; there a child that hangs keeps the server, and so itself, alive.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import gc
import importlib
import io
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from typing import IO, Any

from ..places import GENERATOR, cache_folder
from .channel import Channel, ChannelError, ClosedError

PRELOAD = (f"{GENERATOR}.processes.compiler", f"{GENERATOR}.processes.serve", f"{GENERATOR}.measuring.stage")
# Functions called after the first fork, while that child wakes its GPU, or when the server is told to prepare.
LATER = (f"{GENERATOR}.processes.compiler:prepare",)
FORK_SECONDS = 120.0  # the first fork waits for the imports of torch and Triton: 2 s, from a cold disk more
REQUEST_SECONDS = 10.0  # for the rest of another tuner's request, once a part of it came
REAP_SECONDS = 10.0  # a killed process that holds a GPU takes a moment to go
GRACE_SECONDS = (
    10.0  # for a process that closed its end to exit by itself, which tells how it ended; takes milliseconds
)
TICK_SECONDS = 0.5  # between looks at the log of a child that is waited for
LOG_BYTES = 64 * 2**20  # only a loop prints more
TAIL_CHARACTERS = 300
PR_SET_PDEATHSIG = 1  # linux/prctl.h
WAITING = 64  # tuners of a host that may connect to the server at one time


class LostError(Exception):
    """A child died, hung or answered nonsense, and was ended; the message says which, and what it printed last."""


@dataclasses.dataclass
class Child:
    """A forked process, as the tuner holds it."""

    server: ForkServer
    pid: int
    channel: Channel
    log: IO[bytes]
    log_start: int  # where in the log this child begins

    def ask(self, message: Any, seconds: float) -> Any:
        """The answer to a message.

        Raises:
            LostError: none came within ``seconds``, or none that can be read; the child has been ended.
        """
        until = self.now() + seconds
        try:
            self.channel.send(message, seconds)
            while not self.channel.ready(min(TICK_SECONDS, max(0.0, until - self.now()))):
                if os.fstat(self.log.fileno()).st_size - self.log_start > LOG_BYTES:
                    raise self.lost(f"it printed more than {LOG_BYTES // 2**20} MiB, and was killed")
                if self.now() >= until:
                    raise self.lost(f"no answer in {seconds:g} s: it hung, and was killed")
            return self.channel.receive(TICK_SECONDS)
        except ClosedError:
            raise self.lost(None) from None
        except TimeoutError:
            raise self.lost("half an answer came, and it was killed") from None
        except ChannelError as error:
            raise self.lost(f"it answered nonsense, and was killed: {error}") from None

    def now(self) -> float:
        """The clock, in seconds, that limits the wait for an answer; tests replace it by one that no load slows down."""
        return time.monotonic()

    def lost(self, reason: str | None) -> LostError:
        """End the child and return the error, which says why, or how it ended by itself, and what it printed last."""
        ended = self.end(0.0 if reason else GRACE_SECONDS)
        tail = self.tail()
        self.log.close()
        return LostError((reason or f"the process died ({ended})") + (f"; it printed last: {tail}" if tail else ""))

    def stop(self) -> None:
        """End the child and everything that it started."""
        self.end()
        self.log.close()

    def kill(self) -> None:
        """Kill the child from another thread; the thread that asks the child then finds it lost."""
        _kill_group(self.pid)

    def end(self, grace_s: float = 0.0) -> str:
        """End the child, unless it ends by itself within ``grace_s``; returns how it ended."""
        self.channel.close()
        return _ending(self.server.reap(self.pid, grace_s))

    def tail(self) -> str:
        """The last that it printed, on one line, without unprintable characters."""
        end = os.fstat(self.log.fileno()).st_size
        start = max(self.log_start, end - 4 * TAIL_CHARACTERS)
        text = os.pread(self.log.fileno(), max(0, end - start), start).decode(errors="replace")
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())[-TAIL_CHARACTERS:]


def _ending(status: int | None) -> str:
    if status is None:
        return f"killed, and still there after {REAP_SECONDS:g} s: its GPU may hang"
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


class ForkServer:
    """A tuner's end of a fork server."""

    def __init__(
        self, channel: Channel, address: str | None, process: subprocess.Popen[bytes] | None, log: IO[bytes]
    ) -> None:
        """``process`` and ``log`` belong to a server that this process started; a joined one has no process and an empty log."""
        self.address = address  # for other tuners of this host; None if the server cannot be shared
        self._channel, self._process, self._log = channel, process, log
        self._lock = threading.Lock()
        self._asked = 0
        self._lost = False
        self._tuner = os.getpid()
        atexit.register(self.close)

    @classmethod
    def started(cls, preload: tuple[str, ...], later: tuple[str, ...] = ()) -> ForkServer:
        """A new server, which imports the modules ``preload`` while the tuner does other things.

        After its first fork, or when told to prepare, the server calls the functions ``later``, each "module:name".
        """
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile(dir=cache_folder("logs"))  # noqa: SIM115 - open as long as the server
        paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109 - as Python means it
        listener, address = _listener()
        ends = [theirs, *([listener] if listener else [])]
        with contextlib.ExitStack() as stack:
            for end in ends:
                stack.enter_context(end)
            process = subprocess.Popen(  # noqa: S603 - this very interpreter
                [
                    sys.executable,
                    "-m",
                    f"{GENERATOR}.processes.forkserver",
                    ",".join(str(e.fileno()) for e in ends),
                    *preload,
                    *later,
                ],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=[end.fileno() for end in ends],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is the tuner's to handle
            )
        return cls(Channel(ours), address, process, log)

    @classmethod
    def joined(cls, address: str) -> ForkServer | None:
        """The server of another tuner of this host and this user, or None if there is none at that address."""
        ours = socket.socket(socket.AF_UNIX)
        try:
            ours.connect(address)
        except OSError:
            ours.close()
            return None
        if not _of_this_user(ours):
            ours.close()
            return None
        return cls(Channel(ours), address, None, io.BytesIO())

    @property
    def alive(self) -> bool:
        """Whether the server can still fork."""
        return not self._lost and (self._process is None or self._process.poll() is None)

    def prepare(self) -> None:
        """Tell the server to call its ``later`` functions now, and do not wait for them."""
        with self._lock, contextlib.suppress(ChannelError):  # if the server died, the next request raises
            self._asked += 1
            self._channel.send((self._asked, ("prepare",), 0))

    def fork(self, serve: str, arguments: tuple[Any, ...], log: IO[bytes]) -> Child:
        """A new process that answers with an instance of the class ``serve`` ("module:name"), made with ``arguments``.

        The process has the environment that this process has now. ``log`` takes what it prints, and is closed with it.

        Raises:
            LostError: the server has died.
        """
        ours, theirs = socket.socketpair()
        start = os.fstat(log.fileno()).st_size  # the child may print, and die, before this process runs again
        with theirs:
            request = ("fork", serve, arguments, dict(os.environ), os.getcwd())  # noqa: PTH109
            try:
                pid = self._ask(request, FORK_SECONDS, [theirs.fileno(), log.fileno()])
            except LostError:
                ours.close()
                log.close()
                raise
        if isinstance(pid, str):
            ours.close()
            log.close()
            raise LostError(f"no process could be started: {pid}")
        return Child(self, pid, Channel(ours), log, start)

    def reap(self, pid: int, grace_s: float) -> int | None:
        """The wait status of a child that ends by itself within ``grace_s``, or is killed; None if it does not die."""
        try:
            return self._ask(("reap", pid, grace_s), grace_s + 2 * REAP_SECONDS)  # type: ignore[no-any-return]
        except LostError:
            return signal.SIGKILL  # the server's children died with it

    def close(self) -> None:
        """End the server if this process started it, and all children that were forked for this process."""
        atexit.unregister(self.close)
        self._lost = True
        self._channel.close()
        if self._process is not None and os.getpid() == self._tuner:  # a fork of the tuner did not start the server
            self._process.terminate()  # ends a server that still imports; once it serves, it ends with its channel
            try:
                self._process.wait(REAP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._log.close()

    def _said(self) -> str:
        """The last that the server printed."""
        if self._log.closed:  # closed with the server
            return ""
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()[-2000:]

    def _ask(self, request: Any, seconds: float, files: list[int] | None = None) -> Any:
        with self._lock:
            self._asked += 1
            try:
                self._channel.send((self._asked, request, len(files or ())), seconds)
                if files:
                    socket.send_fds(self._channel.socket, [b"."], files)  # the message says how many
                while True:
                    number, answer = self._channel.receive(seconds)
                    if number == self._asked:  # another number answers an earlier request, which Ctrl-C interrupted
                        return answer
            except (ChannelError, TimeoutError, ValueError) as error:
                self._lost = True
                self._channel.close()
                if self._process is not None:
                    self._process.kill()
                    self._process.wait()
                said = self._said()
                raise LostError(f"the process that starts others died ({error}){': ' if said else ''}{said}") from error


def fork_server(address: str | None = None) -> ForkServer:
    """The living fork server of this process; if there is none, another tuner's, by its address, or else a new one."""
    with _STARTING:
        server = _SERVERS.get(os.getpid())
        if server is None or not server.alive:
            if server is not None:
                server.close()
            joined = None if address is None else ForkServer.joined(address)
            server = _SERVERS[os.getpid()] = joined or ForkServer.started(PRELOAD, LATER)
        return server


_STARTING = threading.Lock()
_SERVERS: dict[int, ForkServer] = {}  # by the tuner's process: a forked tuner has a server of its own


def _listener() -> tuple[socket.socket | None, str | None]:
    """A socket where other tuners can connect to the server, and its address: an abstract name, which only Linux has."""
    if sys.platform != "linux":
        return None, None
    address = f"\0tuned-{os.getpid()}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(WAITING)
    return listener, address


def _of_this_user(end: socket.socket) -> bool:
    """Whether the process at the other end is this user's: an abstract name has no owner, and a request runs code."""
    _, user, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.getuid())


@dataclasses.dataclass
class _Tuner:
    """A tuner, as the server holds it."""

    end: socket.socket
    channel: Channel
    children: set[int] = dataclasses.field(default_factory=set)


class _Server:
    """The fork server, inside its own process."""

    def __init__(self, ends: list[socket.socket], later: list[str]) -> None:
        self._own, *self._listeners = ends
        self._later = later
        self._tuners: dict[int, _Tuner] = {}  # by the file number of their ends
        self._admit(self._own)

    def serve(self) -> None:
        """Answer requests of tuners, until the one that started this server is gone."""
        try:
            while self._own.fileno() in self._tuners:
                listening = {end.fileno(): end for end in self._listeners}
                for number in select.select([*listening, *self._tuners], [], [])[0]:
                    if number in listening:
                        end, _ = listening[number].accept()
                        if _of_this_user(end):
                            self._admit(end)
                        else:
                            end.close()
                        continue
                    try:
                        self._answer(self._tuners[number])
                    except (ChannelError, OSError):  # a tuner that breaks its channel must not disturb the others
                        self._dismiss(number)
        finally:
            for number in list(self._tuners):
                self._dismiss(number)

    def _admit(self, end: socket.socket) -> None:
        self._tuners[end.fileno()] = _Tuner(end, Channel(end, trusted=True))

    def _dismiss(self, number: int) -> None:
        """Forget a tuner that is gone, and end its children."""
        tuner = self._tuners.pop(number)
        for pid in tuner.children:
            _kill_group(pid)
        if tuner.end is not self._own:
            for pid in tuner.children:
                _wait(pid, REAP_SECONDS)
            tuner.end.close()

    def _answer(self, tuner: _Tuner) -> None:
        seconds = None if tuner.end is self._own else REQUEST_SECONDS  # without its own tuner the server ends anyway
        number, request, count = tuner.channel.receive(seconds)
        tuner.end.settimeout(seconds)
        answer: Any = None
        if request[0] == "fork":
            ends = [*self._listeners, *(t.end for t in self._tuners.values())]
            files = socket.recv_fds(tuner.end, 1, count)[1]
            try:
                answer = _fork(request[1:], ends, files)
                tuner.children.add(answer)
            except OSError as error:  # too many processes, or too little memory
                answer = f"{error.strerror}"
                for file in files:
                    os.close(file)
        elif request[0] == "reap" and request[1] not in tuner.children:
            answer = int(signal.SIGKILL)  # the child was reaped before: its pid may be another process's by now
        elif request[0] == "reap":
            answer = _reap(*request[1:])
            if answer is not None:
                tuner.children.discard(request[1])
        tuner.channel.send((number, answer))
        if request[0] != "reap":
            self._prepare()

    def _prepare(self) -> None:
        while self._later:
            module, _, function = self._later.pop(0).partition(":")
            getattr(importlib.import_module(module), function)()
            gc.freeze()


def _main(ends: list[int], names: list[str]) -> None:
    """Fork when asked. ``ends``: the tuner's socket, and the listener. ``names``: modules to import, functions to call later."""
    os.environ.pop("PYTHONPATH", None)  # each child gets the environment of the tuner that asks for it
    for name in names:
        if ":" not in name:
            importlib.import_module(name)
    gc.freeze()  # the memory of imported modules stays shared with the children
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on there may be children, which ``serve`` ends
    _Server([socket.socket(fileno=end) for end in ends], [name for name in names if ":" in name]).serve()


def _fork(request: Any, ends: list[socket.socket], files: list[int]) -> int:
    """Fork the process that was asked for, and return its pid; the child keeps none of the server's ``ends``."""
    server = os.getpid()
    pid = os.fork()
    if pid:
        for file in files:
            os.close(file)
        with contextlib.suppress(OSError):  # parent and child both set it, so that it is set whichever runs first
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        die_with_parent(server)
        for held in ends:
            held.close()
        end, log = files
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        serve, arguments, environment, folder = request
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        from .serve import serve_with  # noqa: PLC0415 - the server has imported all that this imports

        serve_with(Channel(socket.socket(fileno=end), trusted=True), serve, arguments)
        code = 0
    except BaseException:  # noqa: BLE001 - into the log, which the tuner reads
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it, in process ``parent``, is gone; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent was gone before the prctl
        os._exit(1)


def _reap(pid: int, grace_s: float) -> int | None:
    """Wait for a child, kill what is left of its group, and return its wait status; None if it does not die."""
    status = _wait(pid, grace_s)
    _kill_group(pid)  # also the processes that the child started
    return status if status is not None else _wait(pid, REAP_SECONDS)


def _wait(pid: int, seconds: float) -> int | None:
    until = time.monotonic() + seconds
    while True:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # it was reaped before, as when Ctrl-C came while a tuner asked
            return int(signal.SIGKILL)  # a plain int: an answer may hold no signal.Signals
        if ended:
            return status
        if time.monotonic() >= until:
            return None
        time.sleep(0.002)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    _main([int(end) for end in sys.argv[1].split(",")], sys.argv[2:])
