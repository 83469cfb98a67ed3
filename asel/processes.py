"""Measures in worker processes: whatever a candidate does there, it does to a process that can be replaced.

The worker is `asel/_worker.py`: it imports the kernel by name, from where this program would, and never runs
the program's own `__main__`. One that hangs is killed when its step is cancelled, and one that dies costs the candidate
that was at its step; the others are compiled again in the next worker, before they are timed.
"""

from __future__ import annotations

import pickle
import struct
import subprocess
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import Process

from asel.measure import How, Lowered, Sampler, Trial
from asel.threads import run_in_thread
from asel.worker_startup import import_state, worker_command, worker_environment

if TYPE_CHECKING:
    from asel.parcels import Frame

__all__ = ["ProcessMeasure", "WorkerDied"]

_HEADER = struct.Struct("!Q")
_MOST_WORKERS = 2
_PIECE = 1 << 20
# A worker that is up answers at once; one that starts has JAX to import, perhaps on a busy machine.
_ANSWERS_S = 10.0
_STARTS_S = 120.0

Charge = Callable[[], AbstractContextManager[object]]


class WorkerDied(Exception):
    """The worker process ended in the middle of a step."""


class CandidateError(Exception):
    """What a candidate raised in its worker: the name of its type, the message, and whether it was being built."""

    def __init__(self, type_name: str, message: str, building: bool) -> None:
        super().__init__(type_name, message, building)
        self.type_name = type_name
        self.building = building

    def __str__(self) -> str:
        return str(self.args[1])


class ProcessMeasure:
    """A `Measure` that compiles and times in worker processes. Kernels must be importable."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._starting: anyio.Lock | None = None

    @asynccontextmanager
    async def turn(self, charge: Charge = nullcontext) -> AsyncIterator[_Desk]:
        """Wait for a worker that is up. One that died while idle, or does not answer, is nobody's fault."""
        while True:
            worker = await self._least_busy(charge)
            async with worker.turn:
                with suppress(WorkerDied), anyio.move_on_after(_ANSWERS_S):
                    await worker.ask("hello", 0)
                if worker.alive:
                    yield _Desk(self, worker)
                    return

    async def compile(self, trial: Trial[Any]) -> Sampler:
        async with self.turn() as desk:
            return await desk.compile(trial)

    async def aclose(self) -> None:
        """End every worker."""
        workers, self._workers = self._workers, []
        self._starting = None  # it belongs to the loop, and the next user may have another
        for worker in workers:
            await worker.end()

    async def _least_busy(self, charge: Charge) -> _Worker:
        # One start at a time, so that two who find none idle do not both start the last one.
        if self._starting is None:
            self._starting = anyio.Lock()
        async with self._starting:
            self._workers = [worker for worker in self._workers if worker.alive]
            if all(worker.queue for worker in self._workers) and len(self._workers) < _MOST_WORKERS:
                with charge():
                    self._workers.append(await _Worker.start())
                return self._workers[-1]
            return min(self._workers, key=lambda worker: worker.queue)


class _Desk:
    """A worker whose turn is ours, as a measure."""

    def __init__(self, measure: ProcessMeasure, worker: _Worker) -> None:
        self._measure = measure
        self._worker = worker

    async def lower(self, trial: Trial[Any]) -> Lowered:
        # In a thread: large arguments take their time.
        candidate, parcel = await run_in_thread(
            f"packing {trial.cfg!r}", partial(_packed, trial), grace_s=trial.grace_s, left_behind=trial.left_behind
        )
        remote = _Remote(self._measure, trial, candidate, parcel)
        with remote.released_on_error():
            try:
                fingerprint = await remote.lower_in(self._worker)
            except CandidateError as error:
                trial.stage = "build" if error.building else "compile"
                raise

        async def compile() -> Sampler:
            with remote.released_on_error():
                await remote.compile()
            return remote

        return Lowered(fingerprint, compile, remote.release)

    async def compile(self, trial: Trial[Any]) -> Sampler:
        return await (await self.lower(trial)).compile()


# What a worker knows a candidate by, and the arguments of many.
_numbers = count(1)


class _Parcel:
    """A call's arguments, packed once for all candidates."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self.number = next(_numbers)
        self.frames = frames


def _packed(trial: Trial[Any]) -> tuple[Sequence[Frame], _Parcel]:
    from asel.parcels import pack_arguments, pack_candidate  # JAX is imported when it is first needed

    candidate = pack_candidate(trial)
    if (parcel := trial.shared.get("parcel")) is None:
        parcel = trial.shared["parcel"] = _Parcel(pack_arguments(trial))
    return candidate, parcel


class _Remote:
    """A candidate in a worker, as a sampler. Its steps are asked for in its turn."""

    def __init__(self, measure: ProcessMeasure, trial: Trial[Any], candidate: Sequence[Frame], parcel: _Parcel) -> None:
        self._measure = measure
        self._candidate = candidate
        self._parcel: _Parcel | None = parcel
        self._worker: _Worker | None = None
        self._next: _Worker | None = None
        self._is_warm = False
        self._number = next(_numbers)
        self.how: How = trial.objective

    async def lower_in(self, worker: _Worker) -> str | None:
        self._worker = worker
        lowered: tuple[How, str | None] = await worker.ask("lower", self._number, self._candidate, self._parcel)
        self.how, fingerprint = lowered
        return fingerprint

    async def compile(self) -> None:
        await self._ask("compile")

    @asynccontextmanager
    async def turn(self, charge: Charge = nullcontext) -> AsyncIterator[None]:
        """Wait for the candidate's worker, or for another where that one was lost to another candidate."""
        if self._worker is not None and self._worker.alive:
            async with self._worker.turn:
                if self._worker.alive:
                    yield
                    return
        async with self._measure.turn(charge) as desk:
            self._next = desk._worker
            yield

    def ready(self) -> list[Callable[[], Awaitable[object]]]:
        """Be compiled in the worker whose turn it is, again where the last one was lost, and as warm as there."""
        if self._worker is not None and self._worker.alive:
            return []
        assert self._next is not None
        return [partial(self.lower_in, self._next), self.compile, *([self.__call__] if self._is_warm else [])]

    async def __call__(self) -> float:
        seconds: float = await self._ask("sample")
        self._is_warm = True
        return seconds

    async def outputs(self) -> list[Any]:
        outputs: list[Any] = await self._ask("outputs")
        return outputs

    def release(self) -> None:
        """Let go of the candidate's executable, and of the arguments if it is the last. From any thread."""
        parcel, self._parcel, self._candidate = self._parcel, None, ()
        if self._worker is not None and parcel is not None:
            self._worker.forget(self._number, parcel)

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.release()
            raise

    async def _ask(self, command: str) -> Any:
        assert self._worker is not None
        return await self._worker.ask(command, self._number)


class _Worker:
    """One process, asked one thing at a time by whoever has its turn."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.turn = anyio.Lock()
        self._parcels: Counter[int] = Counter()
        self._forgotten: deque[tuple[int, int]] = deque()
        self._ended = False

    @classmethod
    async def start(cls) -> _Worker:
        imports = await run_in_thread("looking up where modules are", import_state)
        process = await anyio.open_process(
            worker_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            env=worker_environment(),
        )
        worker = cls(process)
        with anyio.move_on_after(_STARTS_S):
            await worker.ask("hello", 0, [imports])
        if not worker.alive:
            raise WorkerDied(f"a worker process was started, and did not answer within {_STARTS_S:g} s")
        return worker

    @property
    def alive(self) -> bool:
        return not self._ended

    @property
    def queue(self) -> int:
        """How many have its turn or wait for it."""
        return self.turn.locked() + self.turn.statistics().tasks_waiting

    def forget(self, candidate: int, parcel: _Parcel) -> None:
        """Have a candidate forgotten with the next thing that is asked."""
        self._forgotten.append((candidate, parcel.number))

    async def ask(
        self, command: str, candidate: int, frames: Sequence[Frame] = (), parcel: _Parcel | None = None
    ) -> Any:
        """Return what the worker answers; a parcel that it does not have is sent along.

        A wait that is cancelled leaves the worker in the middle of a step, so it is killed.
        """
        if not self.alive:
            raise WorkerDied("the worker process was lost to another candidate")
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        self._parcels.subtract(number for _, number in forgotten)
        number, along = (0, ()) if parcel is None else self._take(parcel)
        try:
            header = (command, candidate, number, len(frames), [old for old, _ in forgotten])
            await self._send([pickle.dumps(header), *frames, *along])
            kind, value = await self._receive()
        except (anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError):
            code = await self.end(patience_s=2.0)  # it is ending by itself, and its code tells of what
            raise WorkerDied(f"the worker process died at {command!r}, exit code {code}") from None
        except BaseException:
            await self.end()
            raise
        if kind == "error":
            raise CandidateError(*value)
        return value

    def _take(self, parcel: _Parcel) -> tuple[int, Sequence[Frame]]:
        """Count one more candidate of a parcel; return what is to be sent of it."""
        self._parcels[parcel.number] += 1
        return parcel.number, parcel.frames if self._parcels[parcel.number] == 1 else ()

    async def _send(self, frames: Sequence[Frame]) -> None:
        """Send frames, their lengths before them, in pieces: nothing large is copied at once on the loop."""
        assert self._process.stdin is not None
        sizes = [len(frames), *map(len, frames)]
        await self._process.stdin.send(b"".join(map(_HEADER.pack, sizes)))
        for frame in frames:
            view = memoryview(frame)
            for start in range(0, len(view), _PIECE):
                await self._process.stdin.send(bytes(view[start : start + _PIECE]))

    async def _receive(self) -> tuple[str, Any]:
        assert self._process.stdout is not None
        (length,) = _HEADER.unpack(await self._exactly(_HEADER.size))
        answer = await self._exactly(length)
        if length > _PIECE:  # outputs, for a check
            return await run_in_thread("reading a worker's answer", partial(pickle.loads, answer))
        return pickle.loads(answer)  # type: ignore[no-any-return]

    async def _exactly(self, count: int) -> bytearray:
        stream, data = self._process.stdout, bytearray()
        assert stream is not None
        while len(data) < count:
            data += await stream.receive(min(count - len(data), 1 << 16))
        return data

    async def end(self, patience_s: float = 0.0) -> int | None:
        """Give the process some seconds to end, kill it, and wait until it is gone."""
        self._ended = True
        if patience_s:
            with anyio.move_on_after(patience_s, shield=True):
                await self._process.wait()
        with suppress(ProcessLookupError):
            self._process.kill()
        with anyio.move_on_after(5, shield=True):
            await self._process.aclose()
        return self._process.returncode
