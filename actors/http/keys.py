"""Who may ask: where a server's keys come from, and whether a request brings one.

Keys stand in flags or code, in files, or in the environment; never in a Serve config, for Serve keeps it and
shows it (`serve config`, the dashboard). Wherever settings are shown, keys are left out. They are read once,
where the application is built, and go to the replicas with their settings (docs/decisions/keys.md).
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...cluster.errors import ConfigError
from .settings import ServerSettings

# Setting -> the variable that stands in for it.
ENVIRONMENT = {"api_key": "MANTA_API_KEY", "admin_api_key": "MANTA_ADMIN_API_KEY"}
OPEN_PATHS = frozenset(
    {"/health", "/ping", "/metrics", "/version", "/ui"}
)  # the page asks for the key itself
# What is the operators' own; all else needs a key of either kind.
ADMIN_PATHS = frozenset({"/load", "/explain", "/receipts"})


def refuse_written_keys(args: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if keys stand in a file of settings (Any: YAML), named by `where`."""
    for name, variable in ENVIRONMENT.items():
        if name in args:
            raise ConfigError(
                f"{name}: {where} is kept and shown by Serve, so no key may stand there. Write the keys "
                f"into a file, one a line, and name it in {name}_file; or set {variable}.",
                param=name,
            )


def with_keys(settings: ServerSettings, environment: Mapping[str, str] = os.environ) -> ServerSettings:
    """The settings with all keys in them: those given and those of the file, else the environment's.

    Raises:
        ConfigError: a file cannot be read, or holds no key.
    """
    found: dict[str, Any] = {}  # Any: settings of two types
    for name, variable in ENVIRONMENT.items():
        file = getattr(settings, f"{name}_file")
        given = (*settings.keys(name), *([] if file is None else _keys_in(file, f"{name}_file")))
        found |= {name: given or tuple(environment.get(variable, "").split()) or None, f"{name}_file": None}
    return replace(settings, **found)


def _keys_in(file: str, param: str) -> list[str]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{param}: {file} cannot be read: {error}.", param=param) from None
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise ConfigError(f"{param}: {file} holds no key. Write one a line.", param=param)
    return keys


class Keys:
    """What a server's requests must bring, as digests: comparing them tells nothing of a key."""

    def __init__(self, settings: ServerSettings) -> None:
        self._admin = [_digest(key) for key in settings.keys("admin_api_key")]
        self._any = [_digest(key) for key in settings.keys("api_key")]
        if self._any:
            self._any += self._admin

    def refusal(self, path: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Status and message where a request may not pass; its headers' names are taken in lower case."""
        if path in OPEN_PATHS:
            return None
        given = _digest(_key_in(headers))
        if path in ADMIN_PATHS and self._admin:
            if _among(given, self._admin):
                return None
            if _among(given, self._any):
                return 403, "This route is the operators' own: send the admin API key."
        elif not self._any or _among(given, self._any):
            return None
        return 401, "Send a valid API key: `Authorization: Bearer <key>`."

    def digest(self, headers: Mapping[str, str]) -> str | None:
        """Tells the key of a request apart from others; None where none is asked for."""
        return _digest(_key_in(headers)).hex() if self._any else None


def _key_in(headers: Mapping[str, str]) -> str:
    """As OpenAI's clients bring it, or as Anthropic's do."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _among(given: bytes, keys: list[bytes]) -> bool:
    return sum(hmac.compare_digest(given, key) for key in keys) > 0  # all are compared


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
