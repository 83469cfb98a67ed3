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
from contextlib import suppress
from typing import Any

import anyio
from anyio.abc import Process

from asel.devices import Settings
from asel.errors import InvalidRequestError
from asel.measure import How, Lowered, Sampler, Trial

__all__ = ["ProcessMeasure", "WorkerDied"]

_HEADER = struct.Struct("!Q")
_MOST_WORKERS = 2


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

    async def ready(self) -> None:
        """Have a worker that is up: starting one is nobody's time, and one that died while idle nobody's fault."""
        worker = await self._idle_worker()
        if not worker.busy:
            with suppress(WorkerDied):
                await worker.ask("hello", 0)
                return
            await self._idle_worker()

    async def lower(self, trial: Trial[Any]) -> Lowered:
        worker = await self._idle_worker()
        remote = _Remote(self, trial, _packed(trial))
        fingerprint = await remote.lower_in(worker)

        async def compile() -> Sampler:
            await remote.compile()
            return remote

        return Lowered(fingerprint, compile)

    async def compile(self, trial: Trial[Any]) -> Sampler:
        return await (await self.lower(trial)).compile()

    async def aclose(self) -> None:
        """End every worker."""
        workers, self._workers = self._workers, []
        for worker in workers:
            await worker.end()

    async def _idle_worker(self) -> _Worker:
        self._workers = [worker for worker in self._workers if worker.alive]
        idle = next((worker for worker in self._workers if not worker.busy), None)
        if idle is None and len(self._workers) < _MOST_WORKERS:
            idle = await _Worker.start()
            self._workers.append(idle)
        return idle or self._workers[0]


class _Remote:
    """A candidate in a worker, as a sampler."""

    def __init__(self, measure: ProcessMeasure, trial: Trial[Any], payload: bytes) -> None:
        self._measure = measure
        self._payload = payload
        self._worker: _Worker | None = None
        self.how: How = trial.objective

    async def lower_in(self, worker: _Worker) -> str | None:
        self._worker = worker
        lowered: tuple[How, str | None] = await worker.ask("lower", id(self), self._payload)
        self.how, fingerprint = lowered
        return fingerprint

    async def compile(self) -> None:
        await self._ask("compile")

    async def ready(self) -> None:
        """Be compiled in a live worker, again where the last one was lost to another candidate."""
        if self._worker is None or not self._worker.alive:
            await self.lower_in(await self._measure._idle_worker())
            await self.compile()

    async def __call__(self) -> float:
        seconds: float = await self._ask("sample")
        return seconds

    async def outputs(self) -> list[Any]:
        outputs: list[Any] = await self._ask("outputs")
        return outputs

    def release(self) -> None:
        if self._worker is not None:
            self._worker.forget(id(self))

    async def _ask(self, command: str) -> Any:
        assert self._worker is not None
        return await self._worker.ask(command, id(self))


class _Worker:
    """One process, asked one thing at a time."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._turn = anyio.Lock()
        self._forgotten: list[int] = []
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
    def busy(self) -> bool:
        return self._turn.locked()

    def forget(self, candidate: int) -> None:
        """Let go of a candidate's executable, with the next thing that is asked."""
        self._forgotten.append(candidate)

    async def ask(self, command: str, candidate: int, payload: bytes = b"") -> Any:
        """Return what the worker answers.

        A wait that is cancelled leaves the worker in the middle of a step, so it is killed.
        """
        async with self._turn:
            if not self.alive:
                raise WorkerDied("the worker process was lost to another candidate")
            forgotten, self._forgotten = self._forgotten, []
            try:
                await self._send(pickle.dumps((command, candidate, payload, forgotten)))
                kind, value = pickle.loads(await self._receive())
            except (anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError):
                code = await self.end(patience_s=2.0)  # it is ending by itself, and its code tells of what
                raise WorkerDied(f"the worker process died at {command!r}, exit code {code}") from None
            except BaseException:
                await self.end()
                raise
        if kind == "error":
            raise CandidateError(*value)
        return value

    async def _send(self, message: bytes) -> None:
        assert self._process.stdin is not None
        await self._process.stdin.send(_HEADER.pack(len(message)) + message)

    async def _receive(self) -> bytes:
        assert self._process.stdout is not None
        (length,) = _HEADER.unpack(await self._exactly(_HEADER.size))
        return await self._exactly(length)

    async def _exactly(self, count: int) -> bytes:
        stream, data = self._process.stdout, bytearray()
        assert stream is not None
        while len(data) < count:
            data += await stream.receive(min(count - len(data), 1 << 16))
        return bytes(data)

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


def _packed(trial: Trial[Any]) -> bytes:
    """Return a trial as bytes that a worker can make it from.

    Raises:
        InvalidRequestError: the kernel cannot be imported by another process, or the device not shared.
    """
    import jax
    import numpy as np

    if getattr(trial.device, "platform", None) == "tpu":
        raise InvalidRequestError('isolation="process": one process owns a TPU; use isolation="thread" there')

    def portable(leaf: Any) -> Any:
        return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf

    args, kwargs = jax.tree_util.tree_map(portable, (trial.args, dict(trial.kwargs)))
    settings = trial.settings and Settings(*trial.settings[:2], None, trial.settings.guards)
    place = (getattr(trial.device, "platform", None), getattr(trial.device, "id", 0))
    try:
        packed = pickle.dumps((trial.cfg, trial.fn, args, kwargs, trial.objective, settings, place))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _not_importable(error) from error
    if b"__main__" in packed:
        raise _not_importable("it is defined in __main__, which a worker does not run")
    return packed


def _not_importable(why: object) -> InvalidRequestError:
    return InvalidRequestError(
        f'isolation="process" needs a kernel and configs that another process can import: {why}. '
        'Define them at the top level of a module, or use isolation="thread".'
    )
