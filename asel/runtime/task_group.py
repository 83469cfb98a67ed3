"""A task group that one task opens and any other may close."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import anyio
from anyio.abc import TaskGroup

from asel.errors import SelectorClosedError
from asel.runtime.loop import spawn_loop_task

__all__ = ["OwnTaskGroup"]


class OwnTaskGroup:
    """A task group and the resources that its tasks need, both held open by a task of the event loop.

    anyio's task groups, and many resources, have to be closed by the task that entered them. The task that holds these
    open is cancelled when the loop ends.
    """

    def __init__(self, resources: Sequence[AbstractAsyncContextManager[Any]] = ()) -> None:
        self._resources = resources
        self._scope = anyio.CancelScope()
        self._changed = anyio.Event()
        self._tasks: TaskGroup | None = None
        self._keeps_resources = True
        self._over = False
        self._task_error: BaseException | None = None
        self._resource_error: BaseException | None = None
        self._task: object = None

    async def open(self) -> TaskGroup:
        """Enter the resources and return the task group.

        Raises:
            Exception: a resource raised it; the resources that were already open are closed again.
            SelectorClosedError: another task closed the group while a resource was being entered.
        """
        self._task = spawn_loop_task(self._run)
        try:
            while self._tasks is None and not self._over:
                await self._changed.wait()
        except BaseException:
            self._scope.cancel()
            with anyio.CancelScope(shield=True):
                await self._until_over()
            raise
        if self._tasks is None:
            raise self._resource_error or SelectorClosedError("it was closed while it was being opened")
        return self._tasks

    def cancel_tasks(self) -> None:
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    async def end_tasks(self) -> None:
        """Cancel all tasks and return once they have ended. The resources stay open.

        Raises:
            BaseException: the error of a task.
        """
        self.cancel_tasks()
        while self._tasks is not None and not self._over:
            await self._changed.wait()
        if self._task_error is not None:
            raise self._task_error

    async def close_resources(self, within_s: float) -> None:
        """Close the resources in the task that entered them; cancel what is still open after `within_s` seconds.

        Raises:
            BaseException: the error of a resource.
        """
        self._keeps_resources = False
        self._notify()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(within_s):
                await self._until_over()
            self._scope.cancel()
            await self._until_over()
        if self._resource_error is not None:
            raise self._resource_error

    async def _until_over(self) -> None:
        while not self._over:
            await self._changed.wait()

    async def _run(self) -> None:
        try:
            with self._scope:
                async with AsyncExitStack() as stack:
                    for resource in self._resources:
                        await stack.enter_async_context(resource)
                    await self._hold_task_group()
                    while self._keeps_resources:
                        await self._changed.wait()
        except BaseException as error:
            if isinstance(error, anyio.get_cancelled_exc_class()):
                raise
            # Kept for `open` or `close_resources` to raise: on trio, a system task that fails ends the whole loop.
            self._resource_error = error
        finally:
            self._tasks, self._over = None, True
            self._notify()

    async def _hold_task_group(self) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self._notify()
                await anyio.Event().wait()  # not `sleep_forever`, which is a timer: a virtual clock would follow it
        except BaseExceptionGroup as group:
            self._task_error = group.exceptions[0] if len(group.exceptions) == 1 else group
        finally:
            self._tasks = None
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
