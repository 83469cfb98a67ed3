"""Workers inside this process, whose messages can be inspected."""

from __future__ import annotations

import functools
import gc
import pickle
import weakref

import anyio
import anyio.lowlevel

from asel.runtime.threads import run_in_thread
from asel.tuning import process_measure as processes
from asel.tuning import worker

__all__ = ["Near", "Scripted", "until_nothing_is_kept"]


class Near(processes._WorkerProcess):
    """A worker inside this process. Sampling the config `fatal` ends it."""

    def __init__(self, fatal: str | None = None) -> None:
        super().__init__(None)
        self.there = worker._RequestHandler()
        self.fatal = fatal
        self.sent, self.arguments = [], []

    async def _send(self, frames):
        header, *payload = frames
        self.sent.append((pickle.loads(header), list(map(bytearray, payload))))

    async def _receive(self):
        (command, candidate, *_), _ = request = self.sent[-1]
        if command == "sample" and self.there._candidates[candidate].timing.program._trial.cfg == self.fatal:
            raise anyio.EndOfStream
        try:
            answer = "ok", await run_in_thread("answering", functools.partial(self.there.answer, *request))
        except Exception as error:
            answer = "error", (type(error).__name__, str(error), self.there.building)
        for arguments in self.there._arguments.values():
            self.arguments += [weakref.ref(arguments), *map(weakref.ref, arguments.args)]
        return answer

    async def end(self, patience_s=0.0):
        self._ended = True
        return 9

    @property
    def arguments_sent(self) -> int:
        return sum(header[0] == "arguments" for header, _ in self.sent)


class Scripted(Near):
    """A worker that computes nothing: every request takes the same time. The command `fatal` ends it."""

    step_s = 0.0

    async def _receive(self):
        command = self.sent[-1][0][0]
        await anyio.sleep(0.0 if command in ("hello", "arguments") else self.step_s)
        if command == self.fatal:
            raise anyio.EndOfStream
        return "ok", {"lower": ("forward", None), "sample": (self.step_s, None)}.get(command)


async def until_nothing_is_kept(worker: Near) -> None:
    """Send requests until the worker has released everything, which a thread of its own does."""
    with anyio.fail_after(5):
        while worker.there._candidates or worker.there._arguments:
            await worker.ask("hello", 0)
            await anyio.lowlevel.checkpoint()
    gc.collect()
    assert {ref() for ref in worker.arguments} == {None}
