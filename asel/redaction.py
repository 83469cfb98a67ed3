"""Removing the secrets of URLs from text that people and logs see."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

__all__ = ["SecretFilter", "redact"]

_HIDDEN = "***"
# Up to the last @, because a password that was not percent-encoded may contain / ? # or @. One or three slashes cover
# pathlib, which joins two into one, and typing errors; a single letter before them is a drive.
_USER_INFO = re.compile(r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]+:/{1,3})[^\s\"<>]*@", re.IGNORECASE)
_PARAMETER = re.compile(
    r"([?&;][\w.-]*(?:token|key|secret|passw|pwd|auth|credential|signature|\bsig\b)[\w.-]*=)[^\s&;#'\"<>]+",
    re.IGNORECASE,
)


def redact(text: object) -> str:
    """Return the text with the user, the password and any token-like query value of each URL replaced by `***`."""
    return _PARAMETER.sub(rf"\1{_HIDDEN}", _USER_INFO.sub(rf"\1{_HIDDEN}@", str(text)))


class SecretFilter(logging.Filter):
    """Removes known secrets from what another library logs, tracebacks included."""

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__()
        # Longest first, since one may contain another. Very short ones would match parts of ordinary words.
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
