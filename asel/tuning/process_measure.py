"""Measures in worker processes, which can be killed and replaced.

The worker is `asel/tuning/worker.py`: it imports the kernel by name, from the same places as this program, and never
runs the program's `__main__`. A worker that hangs is killed when its step is cancelled. If a worker dies, the candidate
whose step it was running fails; its other candidates are compiled again in another worker.
"""

from __future__ import annotations

import pickle
import struct
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import Process

from asel.runtime.loop import PerLoop
from asel.runtime.threads import run_in_thread
from asel.tuning.measure import BaseMeasure, BaseSampler, Charge, Lowered, Sampler, TimingMode, Trial
from asel.tuning.output_check import Outputs
from asel.tuning.worker_startup import import_state, worker_command, worker_environment

if TYPE_CHECKING:
    from asel.tuning.worker_messages import Frame

__all__ = ["ProcessMeasure", "WorkerDied"]

_HEADER = struct.Struct("!Q")
_MAX_WORKERS = 2
_CHUNK_BYTES = 1 << 20
# A running worker answers at once; a new one has to import JAX, perhaps on a busy machine.
_ANSWER_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 120.0


class WorkerDied(Exception):
    """The worker process ended in the middle of a step."""


class CandidateError(Exception):
    """An error of a candidate in its worker: the type's name, the message, and whether it was being built."""

    def __init__(self, type_name: str, message: str, building: bool) -> None:
        super().__init__(type_name, message, building)
        self.type_name = type_name
        self.building = building

    def __str__(self) -> str:
        return str(self.args[1])


class ProcessMeasure(BaseMeasure):
    """A `Measure` that compiles and times in worker processes. Each event loop has its own.

    Kernels must be importable.
    """

    runs_on_device = True

    def __init__(self) -> None:
        self._pools = PerLoop(_WorkerPool)

    @asynccontextmanager
    async def turn(self, charge: Charge = nullcontext) -> AsyncIterator[_WorkerSession]:
        """Hold a worker that answers. A worker that died while idle, or does not answer, is replaced."""
        while True:
            worker = await self._least_busy(charge)
            async with worker.turn:
                with suppress(WorkerDied), anyio.move_on_after(_ANSWER_TIMEOUT_S):
                    await worker.ask("hello", 0)
                if worker.alive:
                    yield _WorkerSession(self, worker)
                    return

    async def compile(self, trial: Trial[Any]) -> Sampler:
        async with self.turn() as session:
            return await session.compile(trial)

    def end_tune(self, shared: dict[str, Any]) -> None:
        """Let the workers forget the tune's arguments and candidates."""
        if (arguments := shared.get("packed_arguments")) is not None:
            for worker in self._pools.here().workers:
                worker.end_tune(arguments)

    async def aclose(self) -> None:
        """End every worker of the running loop."""
        pool = self._pools.here()
        workers, pool.workers = pool.workers, []
        for worker in workers:
            await worker.end()

    async def _least_busy(self, charge: Charge) -> _WorkerProcess:
        pool = self._pools.here()
        async with pool.starting:
            pool.workers = [worker for worker in pool.workers if worker.alive]
            if all(worker.queue for worker in pool.workers) and len(pool.workers) < _MAX_WORKERS:
                with charge():
                    pool.workers.append(await _WorkerProcess.start())
                return pool.workers[-1]
            return min(pool.workers, key=lambda worker: worker.queue)


class _WorkerPool:
    """The workers of one event loop."""

    def __init__(self) -> None:
        self.workers: list[_WorkerProcess] = []
        # One start at a time, so that two tasks that find no idle worker do not both start one.
        self.starting = anyio.Lock()


class _WorkerSession(BaseMeasure):
    """A worker whose turn is held, as a measure."""

    def __init__(self, measure: ProcessMeasure, worker: _WorkerProcess) -> None:
        self._measure = measure
        self._worker = worker

    async def lower(self, trial: Trial[Any]) -> Lowered:
        remote, fingerprint = await self._lowered(trial)

        async def compile() -> Sampler:
            await remote.compile()
            return remote

        async def run_once() -> Sampler:
            # The turn that it was lowered in is over by then: this waits until the device is free.
            async with remote.turn():
                for step in remote.ready() or [remote.compile]:
                    await step()
            return remote

        runs = remote.how == "eager"
        return Lowered(fingerprint, run_once if runs else compile, remote.release, runs=runs)

    async def compile(self, trial: Trial[Any]) -> Sampler:
        remote, _ = await self._lowered(trial)
        await remote.compile()
        return remote

    async def _lowered(self, trial: Trial[Any]) -> tuple[_Remote, str | None]:
        # In a thread, because packing large arguments takes long.
        candidate, arguments = await run_in_thread(
            f"packing {trial.cfg!r}", partial(_packed, trial), grace_s=trial.grace_s, left_behind=trial.left_behind
        )
        remote = _Remote(self._measure, trial, candidate, arguments)
        with remote.released_on_error():
            try:
                return remote, await remote.lower_in(self._worker)
            except CandidateError as error:
                trial.stage = "build" if error.building else "compile"
                raise


# Identifies candidates and the arguments of tunes in workers.
_numbers = count(1)


class _PackedArguments:
    """A tune's arguments, packed once for all candidates and all workers."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self.number = next(_numbers)
        self.frames = frames


def _packed(trial: Trial[Any]) -> tuple[Sequence[Frame], _PackedArguments]:
    from asel.tuning.worker_messages import pack_arguments, pack_candidate

    candidate = pack_candidate(trial)
    if (arguments := trial.shared.get("packed_arguments")) is None:
        arguments = trial.shared["packed_arguments"] = _PackedArguments(pack_arguments(trial))
    return candidate, arguments


class _Remote(BaseSampler):
    """A candidate in a worker, as a sampler. Its steps run while its `turn` is held."""

    def __init__(
        self, measure: ProcessMeasure, trial: Trial[Any], candidate: Sequence[Frame], arguments: _PackedArguments
    ) -> None:
        self._measure = measure
        self._candidate = candidate
        self._arguments = arguments
        self._worker: _WorkerProcess | None = None
        self._next: _WorkerProcess | None = None
        self._is_warm = False
        self._number = next(_numbers)
        self.how = trial.objective

    async def lower_in(self, worker: _WorkerProcess) -> str | None:
        self._worker = worker
        await worker.ensure_arguments(self._arguments)
        lowered: tuple[TimingMode, str | None]
        lowered = await worker.ask("lower", self._number, self._candidate, self._arguments.number)
        self.how, fingerprint = lowered
        return fingerprint

    async def compile(self) -> None:
        with self.released_on_error():
            await self._ask("compile")

    @asynccontextmanager
    async def turn(self, charge: Charge = nullcontext) -> AsyncIterator[None]:
        """Wait for the candidate's worker, or for another worker if that one was lost to another candidate."""
        if self._worker is not None and self._worker.alive:
            async with self._worker.turn:
                if self._worker.alive:
                    yield
                    return
        async with self._measure.turn(charge) as session:
            self._next = session._worker
            yield

    def ready(self) -> list[Callable[[], Awaitable[object]]]:
        """Return the steps that restore the candidate in another worker if its own was lost, warm if it was warm."""
        if self._worker is not None and self._worker.alive:
            return []
        assert self._next is not None
        return [partial(self.lower_in, self._next), self.compile, *([self.__call__] if self._is_warm else [])]

    async def __call__(self) -> float:
        seconds, self.nan_outputs = await self._ask("sample")
        self._is_warm = True
        return seconds  # type: ignore[no-any-return]

    async def outputs(self) -> Outputs:
        return Outputs(*await self._ask("outputs"))

    def release(self) -> None:
        """Release the candidate's executable, from any thread."""
        self._candidate = ()
        if self._worker is not None:
            self._worker.forget(self._number)

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


class _WorkerProcess:
    """One worker process. It answers one request at a time, for the task that holds `turn`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.turn = anyio.Lock()
        # The tunes whose arguments it has. Released candidates and ended tunes are sent with the next request.
        self._tunes: set[int] = set()
        self._forgotten: deque[int] = deque()
        self._ended_tunes: deque[int] = deque()
        self._ended = False

    @classmethod
    async def start(cls) -> _WorkerProcess:
        imports = await run_in_thread("looking up where modules are", import_state)
        process = await anyio.open_process(
            worker_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            env=worker_environment(),
        )
        worker = cls(process)
        with anyio.move_on_after(_START_TIMEOUT_S):
            await worker.ask("hello", 0, [imports])
        if not worker.alive:
            raise WorkerDied(f"a worker process was started but did not answer within {_START_TIMEOUT_S:g} s")
        return worker

    @property
    def alive(self) -> bool:
        return not self._ended

    @property
    def queue(self) -> int:
        """The number of tasks that hold its turn or wait for it."""
        return self.turn.locked() + self.turn.statistics().tasks_waiting

    def forget(self, candidate: int) -> None:
        """Forget a candidate with the next request."""
        self._forgotten.append(candidate)

    def end_tune(self, arguments: _PackedArguments) -> None:
        """Forget a tune's arguments and candidates with the next request."""
        if arguments.number in self._tunes:
            self._tunes.remove(arguments.number)
            self._ended_tunes.append(arguments.number)

    async def ensure_arguments(self, arguments: _PackedArguments) -> None:
        """Send a tune's arguments, unless the worker already has them."""
        if arguments.number not in self._tunes:
            await self.ask("arguments", arguments.number, arguments.frames)
            self._tunes.add(arguments.number)

    async def ask(self, command: str, number: int, frames: Sequence[Frame] = (), arguments: int = 0) -> Any:
        """Return the worker's answer.

        If the wait is cancelled, the worker is in the middle of a step, so it is killed.
        """
        if not self.alive:
            raise WorkerDied("the worker process was lost to another candidate")
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        ended = [self._ended_tunes.popleft() for _ in range(len(self._ended_tunes))]
        try:
            header = (command, number, arguments, forgotten, ended)
            await self._send([pickle.dumps(header), *frames])
            kind, value = await self._receive()
        except (anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError):
            code = await self.end(patience_s=2.0)  # it ends by itself, with an exit code that shows the cause
            raise WorkerDied(f"the worker process died at {command!r}, exit code {code}") from None
        except BaseException:
            await self.end()
            raise
        if kind == "error":
            raise CandidateError(*value)
        return value

    async def _send(self, frames: Sequence[Frame]) -> None:
        """Send frames with their lengths, in chunks, so that nothing large is copied at once on the loop."""
        assert self._process.stdin is not None
        sizes = [len(frames), *map(len, frames)]
        await self._process.stdin.send(b"".join(map(_HEADER.pack, sizes)))
        for frame in frames:
            view = memoryview(frame)
            for start in range(0, len(view), _CHUNK_BYTES):
                await self._process.stdin.send(bytes(view[start : start + _CHUNK_BYTES]))

    async def _receive(self) -> tuple[str, Any]:
        assert self._process.stdout is not None
        (length,) = _HEADER.unpack(await self._exactly(_HEADER.size))
        answer = await self._exactly(length)
        if length > _CHUNK_BYTES:  # outputs, for a check
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
