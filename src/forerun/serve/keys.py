"""API keys: read from a file, compared in a time that tells nothing."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from forerun.serve.errors import ApiError

SHORTEST = 8


def read_keys(path: Path) -> list[str]:
    """One a line; empty lines and those that begin with # count for nothing."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"the key file {path} is not a text in UTF-8: write one key a line") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ValueError(f"the key file {path} holds no key: write one a line")
    for number, key in enumerate(keys, start=1):
        if len(key) < SHORTEST or not key.isascii() or any(sign.isspace() for sign in key):
            raise ValueError(
                f"key {number} of {path} cannot be used: a key has at least {SHORTEST} ASCII characters and no spaces"
            )
    return keys


class Keys:
    def __init__(self, keys: list[str]) -> None:
        """None at all lets everyone in."""
        self._digests = [_digest(key) for key in keys]

    def check(self, authorization: str | None) -> None:
        """All keys are compared, whichever fits, and their digests, which are of one length."""
        if not self._digests:
            return
        scheme, _, given = (authorization or "").partition(" ")
        own = _digest(given.strip())
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, own)
        if scheme.lower() != "bearer" or not found:
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
