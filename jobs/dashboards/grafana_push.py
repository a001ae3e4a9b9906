"""Pushes dashboards to Grafana by its HTTP API (package `grafana-api`); unchanged ones are not written.

Dashboards are identified by their fixed ids, so a push is idempotent. Grafana adds its own numbers (`id`,
`version`), which are ignored in comparisons. Called by `cli.py`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from ...cluster.errors import ConfigError, UnreachableError, brief_url

if TYPE_CHECKING:
    from grafana_api.grafana_face import GrafanaFace

Json = dict[str, Any]  # Any: JSON
State = Literal["new", "changed", "unchanged"]
_OWN_NUMBERS = ("id", "version", "iteration")
_TIMEOUT_S = 15.0
_MESSAGE = "manta dashboards push"


@dataclass(frozen=True, slots=True)
class Difference:
    """A dashboard as it should be (`wanted`) and as Grafana has it (`found`, None if missing)."""

    wanted: Json
    found: Json | None

    @property
    def state(self) -> State:
        if self.found is None:
            return "new"
        return "unchanged" if self.found == self.wanted else "changed"

    def lines(self) -> Iterator[str]:
        before = [] if self.found is None else _written(self.found)
        title = self.wanted["title"]
        return difflib.unified_diff(before, _written(self.wanted), f"{title} (Grafana)", title, lineterm="")


class Grafana:
    """A client of Grafana's HTTP API; the token is a service account's, or "user:password"."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"grafana={brief_url(url)} is not an address. Give it as http://host:3000.", param="grafana"
            )
        self._url, self._api = (
            brief_url(url),
            _client(parts.scheme, parts.hostname, parts.port, parts.path, token),
        )

    def difference(self, wanted: Json, source_uid: str | None = None) -> Difference:
        """Compare a dashboard with Grafana's; `source_uid` selects a data source, by default Grafana's."""
        wanted = _with_source(wanted, source_uid)
        found = self._found(f"/dashboards/uid/{wanted['uid']}")
        return Difference(wanted, None if found is None else _without_numbers(found["dashboard"]))

    def push(self, dashboard: Json, folder_uid: str) -> None:
        content = {"dashboard": dashboard, "folderUid": folder_uid, "overwrite": True, "message": _MESSAGE}
        with self._translated_errors():
            self._api.dashboard.update_dashboard(content)

    def folder(self, title: str) -> str:
        uid = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "manta"
        with self._translated_errors():
            for folder in self._api.folder.get_all_folders():
                if folder["title"] == title:
                    return folder["uid"]
            return self._api.folder.create_folder(title, uid)["uid"]

    def source(self, name: str) -> str:
        """Return the id of the data source with this name. Raises ConfigError if there is none."""
        found = self._found(f"/datasources/name/{name}")
        if found is None:
            with self._translated_errors():
                known = [each["name"] for each in self._api.datasource.list_datasources()]
            raise ConfigError(
                f"datasource={name!r} does not exist in Grafana; it has: {', '.join(known) or 'none'}.",
                param="datasource",
            )
        return found["uid"]

    def _found(self, path: str) -> Json | None:
        from grafana_api.grafana_api import GrafanaClientError

        with self._translated_errors():
            try:
                return self._api.api.GET(path)
            except GrafanaClientError as error:
                if error.status_code == 404:
                    return None
                raise

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        import requests
        from grafana_api.grafana_api import GrafanaException

        try:
            yield
        except GrafanaException as error:
            raise _refused(self._url, error.status_code, str(error)) from None
        except requests.RequestException as error:
            raise UnreachableError(
                f"Grafana at {self._url} does not answer ({type(error).__name__}). Check --grafana."
            ) from None


def _refused(url: str, status: int | None, message: str) -> ConfigError:
    if status in (401, 403):
        return ConfigError(
            f"Grafana at {url} rejects the token (HTTP {status}). Give one of a service account with the "
            "role Editor with --token or GRAFANA_TOKEN.",
            param="token",
        )
    return ConfigError(f"Grafana at {url} reports an error: {message}", param="grafana")


def _client(scheme: str, host: str, port: int | None, path: str, token: str) -> GrafanaFace:
    try:
        from grafana_api.grafana_face import GrafanaFace
    except ModuleNotFoundError:
        raise ConfigError(
            "Pushing needs the package grafana-api: pip install grafana-api requests."
        ) from None
    user, _, password = token.partition(":")
    prefix = path.strip("/")
    return GrafanaFace(
        auth=(user, password) if password else token,
        host=host,
        port=port,
        url_path_prefix=f"{prefix}/" if prefix else "",
        protocol=scheme,
        timeout=_TIMEOUT_S,
    )


def _with_source(dashboard: Json, uid: str | None) -> Json:
    if uid is None:
        return dashboard
    variables: Sequence[Json] = dashboard["templating"]["list"]
    chosen = [
        variable | {"current": {"text": uid, "value": uid}} if variable["type"] == "datasource" else variable
        for variable in variables
    ]
    return dashboard | {"templating": {"list": chosen}}


def _without_numbers(dashboard: Json) -> Json:
    return {name: value for name, value in dashboard.items() if name not in _OWN_NUMBERS}


def _written(dashboard: Json) -> list[str]:
    return json.dumps(dashboard, indent=2, sort_keys=True).splitlines()
