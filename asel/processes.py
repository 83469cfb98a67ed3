"""Measures in worker processes: whatever a candidate does there, it does to a process that can be replaced.

The worker is `python -m asel._worker`: it imports the kernel by name and never runs the program's own
`__main__`. One that hangs is killed when its step is cancelled, and one that dies costs the candidate
that was at its step; the others are compiled again in the next worker, before they are timed.
"""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import Process

from asel.measure import How, Lowered, Sampler, Trial
from asel.threads import run_in_thread

if TYPE_CHECKING:
    from asel.parcels import Frame

__all__ = ["ProcessMeasure", "WorkerDied"]

_HEADER = struct.Struct("!Q")
_MOST_WORKERS = 2
_PIECE = 1 << 20


class WorkerDied(Exception):
    """The worker process ended in the middle of a step."""


class CandidateError(Exception):
    """What a candidate raised in its worker: the name of its type, and the message."""

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(type_name, message)
        self.type_name = type_name

    def __str__(self) -> str:
        return str(self.args[1])


class ProcessMeasure:
    """A `Measure` that compiles and times in worker processes. Kernels must be importable."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._starting = anyio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[_Desk]:
        """Wait for a worker that is up: starting one is nobody's time, one that died while idle nobody's fault."""
        while True:
            worker = await self._least_busy()
            async with worker.turn:
                with suppress(WorkerDied):
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
        for worker in workers:
            await worker.end()

    async def _least_busy(self) -> _Worker:
        # One start at a time, so that two who find none idle do not both start the last one.
        async with self._starting:
            self._workers = [worker for worker in self._workers if worker.alive]
            if all(worker.queue for worker in self._workers) and len(self._workers) < _MOST_WORKERS:
                self._workers.append(await _Worker.start())
                return self._workers[-1]
            return min(self._workers, key=lambda worker: worker.queue)


class _Desk:
    """A worker whose turn is ours, as a measure."""

    def __init__(self, measure: ProcessMeasure, worker: _Worker) -> None:
        self._measure = measure
        self._worker = worker

    async def lower(self, trial: Trial[Any]) -> Lowered:
        from asel.parcels import packed  # JAX is imported when it is first needed

        # In a thread: large arguments take their time.
        frames = await run_in_thread(
            f"packing {trial.cfg!r}", partial(packed, trial), grace_s=trial.grace_s, left_behind=trial.left_behind
        )
        remote = _Remote(self._measure, trial, frames)
        fingerprint = await remote.lower_in(self._worker)

        async def compile() -> Sampler:
            await remote.compile()
            return remote

        return Lowered(fingerprint, compile)

    async def compile(self, trial: Trial[Any]) -> Sampler:
        return await (await self.lower(trial)).compile()


class _Remote:
    """A candidate in a worker, as a sampler. Its steps are asked for in its turn."""

    def __init__(self, measure: ProcessMeasure, trial: Trial[Any], frames: Sequence[Frame]) -> None:
        self._measure = measure
        self._frames = frames
        self._worker: _Worker | None = None
        self._next: _Worker | None = None
        self._is_warm = False
        self.how: How = trial.objective

    async def lower_in(self, worker: _Worker) -> str | None:
        self._worker = worker
        lowered: tuple[How, str | None] = await worker.ask("lower", id(self), self._frames)
        self.how, fingerprint = lowered
        return fingerprint

    async def compile(self) -> None:
        await self._ask("compile")

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the candidate's worker, or for another where that one was lost to another candidate."""
        if self._worker is not None and self._worker.alive:
            async with self._worker.turn:
                if self._worker.alive:
                    yield
                    return
        async with self._measure.turn() as desk:
            self._next = desk._worker
            yield

    async def ready(self) -> None:
        """Be compiled in the worker whose turn it is, again where the last one was lost, and as warm as there."""
        if self._worker is None or not self._worker.alive:
            assert self._next is not None
            await self.lower_in(self._next)
            await self.compile()
            if self._is_warm:
                await self()

    async def __call__(self) -> float:
        seconds: float = await self._ask("sample")
        self._is_warm = True
        return seconds

    async def outputs(self) -> list[Any]:
        outputs: list[Any] = await self._ask("outputs")
        return outputs

    def release(self) -> None:
        self._frames = []
        if self._worker is not None:
            self._worker.forget(id(self))

    async def _ask(self, command: str) -> Any:
        assert self._worker is not None
        return await self._worker.ask(command, id(self))


class _Worker:
    """One process, asked one thing at a time by whoever has its turn."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.turn = anyio.Lock()
        self._forgotten: deque[int] = deque()
        self._ended = False

    @classmethod
    async def start(cls) -> _Worker:
        command = [sys.executable, "-m", "asel._worker", *filter(None, sys.path)]
        process = await anyio.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None)
        worker = cls(process)
        await worker.ask("hello", 0)
        return worker

    @property
    def alive(self) -> bool:
        return not self._ended

    @property
    def queue(self) -> int:
        """How many have its turn or wait for it."""
        return self.turn.locked() + self.turn.statistics().tasks_waiting

    def forget(self, candidate: int) -> None:
        """Let go of a candidate's executable, with the next thing that is asked. From any thread."""
        self._forgotten.append(candidate)

    async def ask(self, command: str, candidate: int, frames: Sequence[Frame] = ()) -> Any:
        """Return what the worker answers.

        A wait that is cancelled leaves the worker in the middle of a step, so it is killed.
        """
        if not self.alive:
            raise WorkerDied("the worker process was lost to another candidate")
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        try:
            await self._send([pickle.dumps((command, candidate, forgotten)), *frames])
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
