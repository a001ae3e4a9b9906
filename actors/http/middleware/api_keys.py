"""API keys: their sources, whether a request has a valid one, and what it may access (`KeyLimits`: how much).

Keys come from flags or code, files, or the environment, but never from a Serve config, because Serve stores
and shows it (`serve config`, the dashboard). Wherever settings are shown, keys are left out. Keys are read
once, when the application is built, and are passed to the replicas with their settings
(docs/decisions/keys.md).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....cluster.errors import ConfigError, RateLimitError, RequestError
from ....cluster.metrics.metric import ANY
from ....cluster.request.caller import Caller, domain_of, owner_of
from ..config.settings import OPEN_PATHS, ServerSettings

if TYPE_CHECKING:  # commands that handle keys run without a web server
    from starlette.types import Scope


# Setting -> the environment variable that replaces it.
ENVIRONMENT = {
    "api_key": "MANTA_API_KEY",
    "admin_api_key": "MANTA_ADMIN_API_KEY",
    "metrics_api_key": "MANTA_METRICS_API_KEY",
}
# Needs a key if the server has any: labels contain the names of tenants and models.
METRICS_PATH = "/metrics"
# Pages about the API, and what they load: open, because they contain no data and links to them send no key.
# Exact paths: a gateway forwards what begins like one of them, which `..` may lead elsewhere.
PAGES = frozenset(
    {"/docs", "/redoc", "/openapi.json"}
    | {
        f"/docs/assets/{name}"
        for name in ("swagger-ui-bundle.js", "swagger-ui.css", "redoc.standalone.js", "favicon.png")
    }
)
# Routes for operators; with an admin key set, only that opens them.
ADMIN_PATHS = frozenset({"/load"})
# These show a key its own data, and an admin key all. They need a key if either kind is set.
OWN_PATHS = frozenset({"/explain"})
TENANT_HEADER = "x-tenant"


def refuse_written_keys(args: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if a settings file (Any: YAML), named by `where`, contains keys."""
    for name, variable in ENVIRONMENT.items():
        if name in args:
            raise ConfigError(
                f"{name}: {where} is stored and shown by Serve, so it may contain no key. Write the keys "
                f"into a file, one a line, and name it in {name}_file; or set {variable}.",
                param=name,
            )


def with_keys(settings: ServerSettings, environment: Mapping[str, str] = os.environ) -> ServerSettings:
    """Add keys of the key file, else the environment's. Raises ConfigError for a file without keys."""
    found: dict[str, Any] = {}  # Any: settings of two types
    for name, variable in ENVIRONMENT.items():
        file, flags = getattr(settings, f"{name}_file"), getattr(settings, name) or ()
        flags = (flags,) if isinstance(flags, str) else flags
        given = (*flags, *([] if file is None else _keys_in(file, f"{name}_file")))
        found |= {name: given or tuple(environment.get(variable, "").split()) or None, f"{name}_file": None}
    return replace(settings, **found)


def without_gateway_settings(settings: ServerSettings) -> ServerSettings:
    """Return the settings of a gateway's replicas, without what the gateway does for them.

    It checks keys and origins, sends each request with its caller, counts a key's requests and waits for slow
    clients.
    """
    return replace(
        settings,
        api_key=None,
        admin_api_key=None,
        metrics_api_key=None,
        allowed_origins=(),
        max_requests_per_key=None,
        reader_timeout=0.0,
    )


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
    """The keys of a server, as digests: the time of a comparison reveals nothing about a key."""

    def __init__(self, settings: ServerSettings) -> None:
        self._admin = [_digest(key) for key in settings.keys("admin_api_key")]
        self._any = [_digest(key) for key in settings.keys("api_key")]
        self._is_only_key = len(settings.keys("api_key")) == 1
        tenants = settings.key_tenants("admin_api_key") | settings.key_tenants("api_key")
        self._callers = {_digest(key): self._caller(key, tenant) for key, tenant in tenants.items()}
        self._metrics = [_digest(key) for key in settings.keys("metrics_api_key")]
        if self._any:
            self._any += self._admin
        self._isolation, self._tenants = settings.isolation, settings.tenants

    def _caller(self, key: str, tenant: str | None) -> Caller:
        """Return a key's permissions. A server's only key belongs to its operator, and sees all."""
        sees_all = _digest(key) in self._admin or (not self._admin and self._is_only_key)
        own = None if tenant == ANY else tenant
        return Caller(owner=owner_of(key), sees_all=sees_all, tenant=own, names_tenants=tenant == ANY)

    def given(self, headers: Mapping[str, str]) -> bytes:
        """Return the digest of the key in lower-case headers. Without configured keys, none is read."""
        return _digest(_key_in(headers)) if self._callers or self._metrics else b""

    def refusal(self, path: str, given: bytes) -> tuple[int, str] | None:
        """Return (status, message) for a request that is refused; None if it may pass."""
        if path == METRICS_PATH:
            return self._metrics_refusal(given)
        if path in OPEN_PATHS or path in PAGES:
            return None
        known = self._any or (self._admin if path in OWN_PATHS else [])
        if path in ADMIN_PATHS and self._admin:
            if _among(given, self._admin):
                return None
            if _among(given, self._any):
                return 403, "This route is the operators' own: send the admin API key."
        elif not known or _among(given, known):
            return None
        return 401, "Send a valid API key: `Authorization: Bearer <key>`."

    def _metrics_refusal(self, given: bytes) -> tuple[int, str] | None:
        """/metrics takes metrics and admin keys, or without those any key."""
        wanted = [*self._metrics, *self._admin] or self._any
        if not wanted or _among(given, wanted):
            return None
        if _among(given, self._any):
            return 403, "Metrics are the operators' own: send the metrics key, or the admin API key."
        return 401, "Send the metrics key, or the admin API key: `Authorization: Bearer <key>`."

    def caller(self, given: bytes, headers: Mapping[str, str]) -> Caller:
        found = self._callers.get(given) or Caller(sees_all=not self._callers)
        return found if self._isolation == "none" else replace(found, domain=self._domain(found, headers))

    def _domain(self, caller: Caller, headers: Mapping[str, str]) -> str:
        """Return the prefix-cache domain. Without keys X-Tenant is trusted, as a proxy's."""
        if self._isolation == "tenant":
            believed = caller.names_tenants or not self._callers
            named = headers.get(TENANT_HEADER) if believed else None
            allowed = self._tenants if caller.owner is None else (ANY,)
            tenant = caller.tenant or (named if named in allowed or ANY in allowed else None)
            if tenant:
                return domain_of("tenant", tenant)
        return domain_of("key", caller.owner or "")


def metrics_key(settings: ServerSettings) -> str | None:
    """Return the least privileged key that opens /metrics; None if it is open."""
    names = ("metrics_api_key", "admin_api_key", "api_key")
    return next((key for name in names for key in settings.keys(name)), None)


def caller_of(scope: Scope) -> Caller:
    return scope["state"]["caller"]


def encode_caller(caller: Caller) -> str:
    """Encode a caller for a header from a gateway to a replica."""
    return json.dumps(asdict(caller))


def decode_caller(header: str | None) -> Caller:
    """Return a caller that owns nothing if there is no header."""
    return Caller() if header is None else Caller(**json.loads(header))


def _key_in(headers: Mapping[str, str]) -> str:
    """Return the key as OpenAI's or Anthropic's clients send it; "" without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return (key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()


def _among(given: bytes, keys: list[bytes]) -> bool:
    return sum(hmac.compare_digest(given, key) for key in keys) > 0  # compares all keys, in constant time


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


_SHARE = "max_requests_per_key"


class KeyLimits:
    """Limits the completions in flight of one API key, running and waiting ones together.

    The process that checks the keys counts: the gateway or, without one, the request's run. Only digests of
    keys are kept.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._most = settings.max_requests_per_key
        self._num_open: Counter[str] = Counter()

    @contextmanager
    def acquire(self, key: str | None, count: int, num_replicas: int = 1) -> Iterator[None]:
        """Count completions as in flight; the limit applies to each replica of the model.

        `key`: `Caller.owner`; None counts nothing. Raises RateLimitError if too many would be in flight,
        RequestError if the request alone exceeds the limit.
        """
        if key is None or self._most is None:
            yield
            return
        maximum = self._most * max(num_replicas, 1)
        if count > maximum:
            raise RequestError(
                f"The request needs {count} completions, and one API key may have {maximum} at a time "
                f"({_SHARE}). Request fewer (`n`, prompts).",
                param="n",
            )
        if (num_open := self._num_open[key]) + count > maximum:
            raise RateLimitError(
                f"{num_open} completions of this API key are in progress and {count} would join them; at "
                f"most {maximum} are allowed ({_SHARE}). Retry when some have ended.",
                param=_SHARE,
            )
        self._num_open[key] += count
        try:
            yield
        finally:
            self._num_open[key] -= count
            if not self._num_open[key]:
                del self._num_open[key]
