"""API keys: where they come from and what they permit, and web pages of other origins."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import httpx
import pytest
from manta.actors.http.config.settings import ServerSettings
from manta.actors.http.middleware.api_keys import Keys, _digest, metrics_key, refuse_written_keys, with_keys
from manta.actors.replica import build_app
from manta.cluster.errors import ConfigError
from manta.jobs.serve.preflight import warning_of_exposure
from support.servers.server_probes import Serve, error_of, http_client

COMPLETIONS = "/v1/completions"


def test_keys_come_from_flags_files_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst\n\n second \n")
    environment = {"MANTA_API_KEY": "third fourth", "MANTA_ADMIN_API_KEY": "root"}
    bare = with_keys(ServerSettings(), environment)
    assert bare.keys("api_key") == ("third", "fourth") and bare.keys("admin_api_key") == ("root",)
    given = with_keys(ServerSettings(api_key="flag", api_key_file=str(file)), environment)
    assert given.keys("api_key") == ("flag", "first", "second") and given.api_key_file is None
    assert with_keys(ServerSettings(), {"MANTA_API_KEY": " "}).api_key is None
    assert "flag" not in repr(given) and "root" not in repr(given)
    file.write_text("\n")
    for wrong in (str(file), "/nowhere"):
        with pytest.raises(ConfigError) as caught:
            with_keys(ServerSettings(admin_api_key_file=wrong), {})
        assert caught.value.param == "admin_api_key_file"
    with pytest.raises(ConfigError) as caught:
        ServerSettings(api_key=("good", "no\ngood"))
    assert "no\ngood" not in caught.value.message


def test_a_key_in_a_serve_config_is_refused_without_showing_it() -> None:
    for name in ("api_key", "admin_api_key"):
        with pytest.raises(ConfigError, match=f"{name}_file") as caught:
            build_app({"model": "m", name: "hidden"})
        assert caught.value.param == name and "hidden" not in caught.value.message
    refuse_written_keys({"model": "m", "api_key_file": "/run/keys"}, "it")


def test_a_requests_key_is_hashed_once_and_only_if_keys_are_configured(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def digest(key: str) -> bytes:
        hashed.append(key)
        return _digest(key)

    keys = {"api_key": ("user", "other"), "admin_api_key": "root"}
    for settings, count in ((keys, 1), ({}, 0)):
        with serve(**settings) as server, monkeypatch.context() as patched:
            ask = partial(httpx.get, f"{server.url}/v1/models", headers={"Authorization": "Bearer user"})
            assert ask().status_code == 200  # the first one has the server read its own keys
            patched.setattr("manta.actors.http.middleware.api_keys._digest", digest)
            assert ask().status_code == 200
        assert hashed == ["user"] * count
        hashed.clear()


def test_the_operators_routes_need_an_admin_key(serve: Serve) -> None:
    keys = {"api_key": ("user", "other"), "admin_api_key": "root", "metrics_api_key": "scrape"}
    with serve(**keys) as server, http_client(server.url) as http:

        def status(path: str, authorization: str | None) -> int:
            headers = {} if authorization is None else {"Authorization": authorization}
            response = http.get(path, headers=headers)
            if response.status_code in (401, 403):
                assert response.json()["error"]["type"] == "AuthenticationError"
            return response.status_code

        assert [status("/load", a) for a in (None, "Bearer user", "Bearer wrong")] == [401, 403, 401]
        assert status("/load", "Bearer root") not in (401, 403)
        for key in ("Bearer user", "bearer other", "Bearer root"):
            assert status("/v1/models", key) == 200
        for key in (None, "user", "Basic user", "Bearer", "Bearer user2"):
            assert status("/v1/models", key) == 401
        assert status("/health", None) == status("/version", None) == 200
        asking = (None, "Bearer user", "Bearer wrong", "Bearer root", "Bearer scrape")
        assert [status("/metrics", key) for key in asking] == [401, 403, 401, 200, 200]
        assert "vllm:" not in http.get("/metrics").text and status("/load", "Bearer scrape") == 401
        for key, wanted in (("user", 200), ("wrong", 401), ("", 401)):  # as Anthropic's clients send it
            assert http.get("/v1/models", headers={"X-Api-Key": key}).status_code == wanted


def test_routes_with_a_keys_own_data_need_a_key_if_any_is_configured() -> None:
    for keys, opening in (
        ({}, ("", "user", "root")),
        ({"admin_api_key": "root"}, ("root",)),
        ({"api_key": "user"}, ("user",)),
        ({"api_key": "user", "admin_api_key": "root"}, ("user", "root")),
    ):
        requested = Keys(ServerSettings(**keys))  # type: ignore[arg-type]
        opened = [
            key
            for key in ("", "user", "root")
            if requested.refusal("/explain", requested.given({"x-api-key": key})) is None
        ]
        assert opened == list(opening), keys


@pytest.mark.parametrize(
    ("keys", "opening", "knowing"),
    [
        ({}, ("", "user", "root", "scrape", "other", "wrong"), ()),
        ({"api_key": "user"}, ("user",), ()),
        ({"api_key": "user", "admin_api_key": "root"}, ("root",), ("user",)),
        ({"api_key": "user", "metrics_api_key": "scrape"}, ("scrape",), ("user",)),
        ({"metrics_api_key": ("scrape", "other")}, ("scrape", "other"), ()),
        ({"admin_api_key": "root"}, ("root",), ()),
        (
            {"api_key": "user", "admin_api_key": "root", "metrics_api_key": "scrape"},
            ("root", "scrape"),
            ("user",),
        ),
    ],
)
def test_metrics_need_a_key_if_one_is_configured(
    keys: dict[str, str], opening: tuple[str, ...], knowing: tuple[str, ...]
) -> None:
    requested = Keys(ServerSettings(**keys))  # type: ignore[arg-type]
    for key in ("", "user", "root", "scrape", "other", "wrong"):
        for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
            refusal = requested.refusal("/metrics", requested.given(headers))
            wanted = None if key in opening else 403 if key in knowing else 401
            assert (refusal and refusal[0]) == wanted, (key, refusal)
    if "api_key" in keys:  # a metrics key is good for the metrics alone
        assert requested.refusal("/v1/completions", requested.given({"x-api-key": "scrape"})) is not None
    opened = metrics_key(ServerSettings(**keys))  # type: ignore[arg-type]
    assert (opened in opening) if keys else opened is None


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.0.2.2", "gpu-1.example", "127.0.0.1", "127.3.2.1", "::1", "localhost"]
)
def test_an_open_address_without_keys_causes_a_warning(host: str) -> None:
    warning = warning_of_exposure(host, ServerSettings())
    assert (warning is None) == (host in ("127.0.0.1", "127.3.2.1", "::1", "localhost"))
    assert warning is None or ("--api-key-file" in warning and host in warning)
    assert warning_of_exposure(host, ServerSettings(api_key="key")) is None


def test_pages_of_other_origins_are_refused_unless_allowed(serve: Serve, http: httpx.Client) -> None:
    origin = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in http.get("/v1/models", headers=origin).headers
    assert error_of(http.options(COMPLETIONS, headers=origin))["code"] == 405
    with (
        serve(allowed_origins="https://a.example", api_key="key") as server,
        http_client(server.url) as other,
    ):
        assert other.options(COMPLETIONS, headers=origin).status_code == 200
        allowed = other.get("/v1/models", headers={**origin, "Authorization": "Bearer key"})
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        assert "X-Request-Id" in allowed.headers["access-control-expose-headers"]
        stranger = other.get("/v1/models", headers={**origin, "Origin": "https://a.exam"})
        assert "access-control-allow-origin" not in stranger.headers
