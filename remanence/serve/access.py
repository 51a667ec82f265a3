"""Access: API keys, and how much each owner may use."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from dataclasses import dataclass, fields

from remanence.runtime.choices import short_repr
from remanence.serve.database import Database, Key, new_id
from remanence.serve.errors import ApiError

LOCAL = "local"
"""The owner of all memories of a server without API keys."""
PREFIX = "sk-rem-"
"""What every API key begins with."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much the server lets a request and an owner use.

    Attributes:
        max_memories: largest number of memories of an owner.
        max_bytes: largest size of all files of an owner's memories.
        tokens_per_minute: number of tokens that an owner may have read and generated in a minute; 0: no limit.
        max_body: largest number of bytes of a request, other than the upload of a memory.
        max_upload: largest number of bytes of a memory file that is uploaded.
        timeout: number of seconds after which a request is given up.
        max_waiting: largest number of requests that wait for their turn.
    """

    max_memories: int = 10_000
    max_bytes: int = 2**40
    tokens_per_minute: int = 0
    max_body: int = 2**20
    max_upload: int = 2**30
    timeout: float = 300.0
    max_waiting: int = 64

    def __post_init__(self) -> None:
        for each in fields(self):
            least = 0 if each.name in ("tokens_per_minute", "max_waiting") else 1
            if not getattr(self, each.name) >= least:
                got = getattr(self, each.name)
                raise ValueError(f"{each.name}: expected a number of at least {least}, got {got!r}")


def digest(key: str) -> str:
    """Return the digest of an API key, which is what is stored. Keys are random, so no salt is needed."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def add_key(database: Database, owner: str) -> tuple[Key, str]:
    """Make an API key for an owner. Returns it and its text, which is not stored."""
    if not owner.isprintable() or not 0 < len(owner) <= 256:
        raise ValueError(f"name: expected up to 256 printable characters, got {short_repr(owner)}")
    text = PREFIX + secrets.token_urlsafe(32)
    key = Key(new_id("key"), owner, digest(text), time.time())
    database.add_key(key)
    return key, text


class Access:
    """Who sends a request, and whether they may.

    Args:
        database: where the keys are.
        limits: the limits of every owner.

    Requests need an API key from the moment at which there is one, also if all are removed later. Before, all are those
    of the owner `LOCAL`.
    """

    def __init__(self, database: Database, limits: Limits) -> None:
        self.database, self.limits, self._has_keys = database, limits, False
        self._levels: dict[str, tuple[float, float]] = {}
        """For each owner, the number of tokens left, and when this was known."""
        self._lock = threading.Lock()

    @property
    def has_keys(self) -> bool:
        """Whether requests need an API key."""
        self._has_keys = self._has_keys or self.database.has_keys()
        return self._has_keys

    def owner(self, authorization: str | None) -> str:
        """Return the owner that a header ``Authorization: Bearer KEY`` stands for."""
        if not self.has_keys:
            return LOCAL
        scheme, _, text = (authorization or "").partition(" ")
        key = self.database.key(digest(text.strip())) if scheme.lower() == "bearer" and text else None
        if key is None:
            got = "none" if not authorization else "another"
            raise ApiError(401, "invalid_api_key", f"authorization: expected a key of this server, got {got}")
        return key.owner

    def check_memories(self, owner: str) -> None:
        """Raise an error if an owner may not create another memory."""
        if self.database.usage(owner).memories >= self.limits.max_memories:
            raise _quota(f"memories: expected at most {self.limits.max_memories:,}, got one more; delete one")

    def check_bytes(self, owner: str, size: int = 0) -> None:
        """Raise an error if an owner may not store `size` more bytes."""
        if self.database.usage(owner).bytes + size >= self.limits.max_bytes:
            raise _quota(f"memories: expected at most {self.limits.max_bytes:,} bytes, got more; delete one")

    def check_tokens(self, owner: str, tokens: int) -> None:
        """Raise an error if an owner has to wait until `tokens` more tokens can be read."""
        rate = self.limits.tokens_per_minute
        if not rate:
            return
        missing = min(tokens, rate) - self._level(owner)
        if missing > 0:
            raise ApiError(
                429,
                "rate_limit_exceeded",
                f"tokens: expected at most {rate:,} a minute, got more; send this one again later",
                retry_after=missing * 60 / rate,
            )

    def charge(self, owner: str, tokens: int) -> None:
        """Count tokens that were read or generated for an owner."""
        if self.limits.tokens_per_minute:
            with self._lock:
                self._levels[owner] = self._level(owner) - tokens, time.monotonic()

    def _level(self, owner: str) -> float:
        """The number of tokens that an owner may use now."""
        rate, now = self.limits.tokens_per_minute, time.monotonic()
        level, since = self._levels.get(owner, (float(rate), now))
        return min(float(rate), level + (now - since) * rate / 60)


def _quota(message: str) -> ApiError:
    return ApiError(429, "insufficient_quota", message)
