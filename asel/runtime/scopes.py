"""Task-local values set by context managers, on one immutable stack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

__all__ = ["Scope", "Stack", "open_scopes"]

T = TypeVar("T")


class _OpenScope(NamedTuple, Generic[T]):
    """One open scope: the stack it is on, the object that opened it, and its value."""

    stack: object
    owner: object
    value: T


_open: ContextVar[tuple[_OpenScope[Any], ...]] = ContextVar("asel_scopes", default=())
open_scopes = _open.get
"""The open scopes of the current task, on all stacks. One variable, because every memory hit reads it."""


class Stack(Generic[T]):
    """The scopes of one kind that are open in the current task.

    They are held in a context variable: child tasks and worker threads start with a copy, and scopes that they open or
    close do not affect the parent.
    """

    def values(self) -> list[T]:
        """Return the values of the open scopes, outermost first."""
        return [scope.value for scope in _open.get() if scope.stack is self]

    def push(self, owner: object, value: T) -> None:
        _open.set((*_open.get(), _OpenScope(self, owner, value)))

    def drop(self, owner: object) -> None:
        """Remove the innermost scope of `owner`, wherever it is.

        By owner rather than by ContextVar token: scopes may then close in any order, and closing a scope in a task that
        never opened it does nothing.
        """
        scopes = _open.get()
        for i in reversed(range(len(scopes))):
            if scopes[i].owner is owner:
                _open.set(scopes[:i] + scopes[i + 1 :])
                return

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Hide every scope of this kind inside the block."""
        before = _open.get()
        _open.set(tuple(scope for scope in before if scope.stack is not self))
        try:
            yield
        finally:
            _open.set(before)  # not by token: after its loop died, a generator may be closed in another context


class Scope(Generic[T]):
    """A context manager that puts one value on a stack. It is reusable and reentrant."""

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
