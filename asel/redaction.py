"""Removing secrets from text: the one place that knows what in a URL must not be shown."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

__all__ = ["SecretFilter", "redact"]

_HIDDEN = "***"
# Up to the last @: a password that was not percent-encoded may hold any of / ? # @ itself. One or three slashes are
# what a path library or a typing error leaves of two; a single letter before them is a drive.
_USER_INFO = re.compile(r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]+:/{1,3})[^\s\"<>]*@", re.IGNORECASE)
_PARAMETER = re.compile(
    r"([?&;][\w.-]*(?:token|key|secret|passw|pwd|auth|credential|signature|\bsig\b)[\w.-]*=)[^\s&;#'\"<>]+",
    re.IGNORECASE,
)


def redact(text: object) -> str:
    """Return text without the user, the password and the token-like parameters of any URL in it."""
    return _PARAMETER.sub(rf"\1{_HIDDEN}", _USER_INFO.sub(rf"\1{_HIDDEN}@", str(text)))


class SecretFilter(logging.Filter):
    """Removes known secrets from what another library logs, tracebacks included."""

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__()
        # Longest first: one may be part of another. Very short ones are in every other word.
        self._secrets = sorted((secret for secret in set(secrets) if len(secret) > 3), key=len, reverse=True)

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self._clean(record.getMessage()), None
        if record.exc_info:
            record.exc_text = self._clean(logging.Formatter().formatException(record.exc_info))
            record.exc_info = None
        return True

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        return redact(text)
