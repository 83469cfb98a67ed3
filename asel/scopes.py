"""Changes that hold for the current task: context managers over one immutable stack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

__all__ = ["Scope", "Stack", "any_scope_here"]

T = TypeVar("T")


class Frame(NamedTuple, Generic[T]):
    """One open scope: the stack it is on, the object that opened it, and what it says."""

    stack: object
    owner: object
    value: T


_open: ContextVar[tuple[Frame[Any], ...]] = ContextVar("asel_scopes", default=())
any_scope_here = _open.get
"""What is open in the current task, on whichever stack. Asked by the fast lane on every call, so it is one read."""


class Stack(Generic[T]):
    """The scopes of one kind that are open in the current task.

    They are frames of one tuple in a context variable: child tasks and worker threads start with a
    copy, and what they open or close is theirs alone.
    """

    def values(self) -> list[T]:
        """Return what the open scopes say, outermost first."""
        return [frame.value for frame in _open.get() if frame.stack is self]

    def push(self, owner: object, value: T) -> None:
        _open.set((*_open.get(), Frame(self, owner, value)))

    def drop(self, owner: object) -> None:
        """Remove the innermost frame of `owner`, wherever it is.

        By owner and not by ContextVar token, so that scopes may close in any order, and closing in
        a task that never opened is harmless.
        """
        frames = _open.get()
        for i in reversed(range(len(frames))):
            if frames[i].owner is owner:
                _open.set(frames[:i] + frames[i + 1 :])
                return

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Hide every scope of this kind inside the block."""
        token = _open.set(tuple(frame for frame in _open.get() if frame.stack is not self))
        try:
            yield
        finally:
            _open.reset(token)


class Scope(Generic[T]):
    """A context manager that puts one value on a stack; may be entered again, also while open."""

    _stack: Stack[T]

    def _value(self) -> T:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._stack.push(self, self._value())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.drop(self)
