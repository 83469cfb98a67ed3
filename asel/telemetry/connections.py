"""The HTTP sessions of exporters: the outcomes of their requests, and new connections after a fork.

An exporter returns only whether a batch arrived. Whether to send it again depends on the cause of the failure.
"""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

from asel.runtime.fork import renew_after_fork
from asel.telemetry.export_queue import Outcome

__all__ = ["Connection"]

# Too many requests, bad gateway, unavailable, gateway timeout: OTLP lets a client send the request again.
_RETRYABLE = frozenset({429, 502, 503, 504})


class Connection:
    """Records the outcomes of the requests of a `requests.Session`."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.outcomes: list[Outcome] = []
        self._request = session.request
        self._errors = import_module("requests.exceptions")
        session.request = self._recorded
        renew_after_fork(self)

    def _recorded(self, *arguments: Any, **options: Any) -> Any:
        try:
            response = self._request(*arguments, **options)
        except Exception as error:
            self.outcomes.append(self._outcome_of(error))
            raise
        is_retryable = response.status_code in _RETRYABLE
        self.outcomes.append(Outcome.UNREACHED if is_retryable else Outcome.REFUSED)
        return response

    def _outcome_of(self, error: Exception) -> Outcome:
        if isinstance(error, self._errors.ReadTimeout):
            return Outcome.UNANSWERED
        is_connection = isinstance(error, (self._errors.ConnectionError, self._errors.Timeout))
        return Outcome.UNREACHED if is_connection else Outcome.REFUSED  # such as a URL that cannot be used

    def failure(self) -> Outcome:
        """Return the cause of a failed export. If there was no request, the exporter itself refused the batch."""
        if Outcome.UNANSWERED in self.outcomes:
            return Outcome.UNANSWERED  # the exporter may have tried to connect once more
        return self.outcomes[-1] if self.outcomes else Outcome.REFUSED

    def renew(self) -> None:
        """In a forked child, use new connections and new locks.

        Requests of two processes on one connection would be mixed up, and a copied lock may be held for ever.
        """
        session = self.session
        for prefix, adapter in list(session.adapters.items()):
            session.adapters[prefix] = copy.copy(adapter)  # with the same settings and an empty pool
        session.cookies = copy.copy(session.cookies)
        self.outcomes = []
