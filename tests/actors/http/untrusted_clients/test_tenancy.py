"""Several keys on one server: files, batches, prefixes and timelines, over real HTTP."""

from __future__ import annotations

import json
import re
import stat
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from manta.actors.gateway.app import create_gateway
from manta.actors.gateway.replica_set import Fleet, ServedModel
from manta.actors.http.app import create_app
from manta.actors.http.config.settings import ServerSettings
from manta.actors.http.middleware.api_keys import (
    Keys,
    decode_caller,
    encode_caller,
    with_keys,
    without_gateway_settings,
)
from manta.cluster.config import EngineConfig
from manta.cluster.errors import ConfigError
from manta.cluster.request.caller import Caller, domain_of, owner_of
from support.checkpoints.text_pair import LiveServer
from support.servers.gateway_stand import GatewayStand
from support.servers.server_probes import Serve, http_client
from support.servers.simulated_server import simulated
from support.waiting import wait_until

ALICE, BOB, PROXY, ROOT = "alice-key", "bob-key", "proxy-key", "root-key"
KEYS = (ALICE, f"{BOB} acme", f"{PROXY} *")
LONG = "a beginning that both have in common, longer than a page of tokens and than a gateway's block: " * 2
QUOTA = 40_000

# Who may use a route, by path; a new route must be put here, and handled by the tests below.
#   open: all.   key: every key; shows nothing that another has sent or left.   admin: operators.
#   own: shows a key its own alone, an admin key everything.   page: the server's own text.
WHO = {
    **dict.fromkeys(("/health", "/ping", "/version", "/", "/ui"), "open"),
    **dict.fromkeys(("/openapi.json", "/docs", "/redoc"), "open"),
    **dict.fromkeys(("/docs/assets", "/docs/oauth2-redirect"), "page"),  # of the assets, the folder
    **dict.fromkeys(("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"), "key"),
    **dict.fromkeys(("/v1/messages/count_tokens", "/tokenize", "/detokenize"), "key"),
    **dict.fromkeys(("/v1/models", "/v1/models/{name:path}"), "key"),
    # Nothing is stored: 404 for every id.
    **dict.fromkeys(("/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items"), "key"),
    "/v1/responses/{response_id}/cancel": "key",
    **dict.fromkeys(("/load", "/metrics"), "admin"),
    "/explain": "own",
    **dict.fromkeys(("/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"), "own"),
    **dict.fromkeys(("/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"), "own"),
    "/{path:path}": "key",  # a gateway's: a replica answers, and gets the caller
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def settings(folder: Path) -> ServerSettings:
    return ServerSettings(
        served_model_name="tiny",
        api_key=KEYS,
        admin_api_key=ROOT,
        batch_storage=str(folder / "batches"),
        tenants=("globex",),
        categories=("code",),
        max_stored_bytes=QUOTA,
        replicas=2,
    )


@pytest.fixture(scope="module")
def server(config: EngineConfig, settings: ServerSettings) -> Iterator[LiveServer]:
    with LiveServer(config, settings, simulated) as server:
        yield server


@pytest.fixture(scope="module")
def stand(config: EngineConfig, settings: ServerSettings) -> Iterator[GatewayStand]:
    """Start the same behind a gateway, with the same storage."""
    with GatewayStand([(config, settings)] * 2, makers=[simulated] * 2) as stand:
        yield stand


@pytest.fixture(params=["one engine", "a gateway and two replicas"])
def url(request: pytest.FixtureRequest, server: LiveServer, stand: GatewayStand) -> str:
    return server.url if request.param == "one engine" else stand.url


Ask = Callable[..., httpx.Response]


def asking(client: httpx.Client) -> Ask:
    """Return ask(key, method, path, ...)."""

    def ask(key: str | None, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return client.request(method, path, headers=headers | more.pop("headers", {}), **more)

    return ask


@pytest.fixture
def ask(url: str) -> Iterator[Ask]:
    with http_client(url) as client:
        yield asking(client)


@pytest.fixture
def ask_engine(http: httpx.Client) -> Ask:
    """`ask` of the server without a gateway."""
    return asking(http)


def lines(prompt: str, count: int = 1) -> bytes:
    body = {"prompt": prompt, "max_tokens": 2}
    row = {"method": "POST", "url": "/v1/completions", "body": body}
    return b"".join(json.dumps({"custom_id": f"r{i}", **row}).encode() + b"\n" for i in range(count))


def upload(ask: Ask, key: str | None, content: bytes) -> httpx.Response:
    file = {"file": ("in.jsonl", content)}
    return ask(key, "POST", "/v1/files", files=file, data={"purpose": "batch"})


def batch_of(ask: Ask, key: str | None, content: bytes, **more: Any) -> dict[str, Any]:
    """Return a batch at its end."""
    made = {"input_file_id": upload(ask, key, content).json()["id"], "endpoint": "/v1/completions", **more}
    batch = ask(key, "POST", "/v1/batches", json=made).json()
    seen = [batch]

    def has_ended() -> bool:
        seen.append(ask(key, "GET", f"/v1/batches/{batch['id']}").json())
        return seen[-1]["status"] in ("completed", "failed")

    wait_until(has_ended)
    assert seen[-1]["status"] == "completed", seen[-1]
    return seen[-1]


def rows_of(ask: Ask, key: str | None, batch: dict[str, Any]) -> list[dict[str, Any]]:
    text = ask(key, "GET", f"/v1/files/{batch['output_file_id']}/content").text
    return [json.loads(line)["response"]["body"] for line in text.splitlines()]


def routes_of(router: Any) -> Iterator[Any]:
    """Return all routes, including those that FastAPI keeps in included routers."""
    for route in router.routes:
        inner = getattr(route, "original_router", None)
        yield from [route] if inner is None else routes_of(inner)


def test_every_route_declares_its_permissions(server: LiveServer, settings: ServerSettings) -> None:
    fleet: Any = Fleet([ServedModel(("tiny",))], None)  # type: ignore[arg-type]  # it gets no calls
    for app in (create_app(server.engine, settings), create_gateway(fleet, settings)):
        paths = [route.path for route in routes_of(app)]
        assert len(paths) > 10
        unknown = set(paths) - WHO.keys()
        assert not unknown, "put each into WHO, and see that it shows a key no more than its own"


def test_each_route_refuses_keys_without_permission(
    ask: Ask, server: LiveServer, settings: ServerSettings
) -> None:
    for route in routes_of(create_app(server.engine, settings)):
        owner, path = WHO[route.path], re.sub(r"\{\w+(:path)?\}", "batch_x", route.path)
        for method in getattr(route, "methods", {"GET"}) - {"HEAD"}:  # a static folder has none
            bare, user = ask(None, method, path).status_code, ask(BOB, method, path).status_code
            assert (bare == 401) == (owner != "open"), (method, path, bare)
            assert (user == 403) == (owner == "admin") and user != 401, (method, path, user)
            assert ask(ROOT, method, path).status_code not in (401, 403), (method, path)


def test_a_path_that_begins_like_an_open_page_needs_a_key(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    for path in ("/docs/../v1/models", "/docs/assets/../../v1/models", "/docs/assets/x", "/openapi.json/"):
        client = HTTPConnection(host, int(port), timeout=60)  # httpx would resolve the path
        client.request("GET", path)
        assert client.getresponse().status == 401, path
        client.close()


def test_an_object_is_404_for_other_keys(ask: Ask) -> None:
    name = ask(ALICE, "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 2}).headers[
        "x-request-id"
    ]
    batch = batch_of(ask, ALICE, lines("x"))
    file_id, output_id = batch["input_file_id"], batch["output_file_id"]
    assert not {"owner", "domain", "tenant"} & batch.keys()
    others = [("GET", f"/v1/batches/{batch['id']}", {}), ("POST", f"/v1/batches/{batch['id']}/cancel", {})]
    for id in (file_id, output_id):
        others += [("GET", f"/v1/files/{id}", {}), ("GET", f"/v1/files/{id}/content", {})]
        others += [("DELETE", f"/v1/files/{id}", {}), ("GET", f"/v1/files?after={id}", {})]
    others += [("POST", "/v1/batches", {"json": {"input_file_id": file_id, "endpoint": "/v1/completions"}})]
    others += [("GET", f"/v1/batches?after={batch['id']}", {})]
    others += [("GET", f"/explain?id={name}", {}), ("GET", f"/explain?id={batch['id']}/r0", {})]
    for method, path, more in others:
        theirs = ask(BOB, method, path, **more)
        invented = {id: id[:-4] + "0000" for id in (file_id, output_id, batch["id"], name)}
        for id, none in invented.items():
            path, more = path.replace(id, none), json.loads(json.dumps(more).replace(id, none))
        nobodys = ask(BOB, method, path, **more)
        assert theirs.status_code == nobodys.status_code in (400, 404), (method, path, theirs.text)
        assert re.sub(r"[0-9a-f]{8,}", "", theirs.text) == re.sub(r"[0-9a-f]{8,}", "", nobodys.text)

    def listed(key: str, kind: str) -> set[str]:
        return {each["id"] for each in ask(key, "GET", f"/v1/{kind}?limit=100").json()["data"]}

    for key, sees in ((ALICE, True), (BOB, False), (PROXY, False), (ROOT, True)):
        assert ({file_id, output_id} <= listed(key, "files")) is sees
        assert (batch["id"] in listed(key, "batches")) is sees
        assert ({file_id, output_id} & listed(key, "files") != set()) is sees
    for key in (ALICE, ROOT):
        lives = [ask(key, "GET", f"/explain?id={each}") for each in (name, f"{batch['id']}/r0")]
        assert [life.status_code for life in lives] == [200, 200] and "owner" not in lives[0].text
        assert ask(key, "GET", f"/v1/files/{file_id}/content").content == lines("x")
    for key, seen in ((ALICE, {owner_of(ALICE)}), (BOB, {owner_of(BOB)})):
        reports = ask(key, "GET", "/explain").json()["data"]
        tenants = [
            each["value"] for report in reports for each in report["slices"] if each["dimension"] == "tenant"
        ]
        assert set(tenants) <= seen, "slices of another key's requests"
    assert ask(ROOT, "DELETE", f"/v1/files/{file_id}").json()["deleted"]
    assert ask(ALICE, "DELETE", f"/v1/files/{output_id}").json()["deleted"]


def cached(answer: httpx.Response) -> int:
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("cached_tokens", usage.get("cache_read_input_tokens"))


def test_no_key_learns_another_keys_prefixes(ask: Ask) -> None:
    talk = [{"role": "user", "content": ""}]
    routes: dict[str, Callable[[str], dict[str, Any]]] = {
        "/v1/completions": lambda text: {"prompt": text, "max_tokens": 1},
        "/v1/chat/completions": lambda text: {"messages": [talk[0] | {"content": text}], "max_tokens": 1},
        "/v1/responses": lambda text: {"input": text, "max_output_tokens": 1},
        "/v1/messages": lambda text: {"messages": [talk[0] | {"content": text}], "max_tokens": 1},
    }
    for path, body in routes.items():

        def tokens(key: str, text: str, _path: str = path, _body: Any = body, **more: Any) -> int:
            return cached(ask(key, "POST", _path, json=_body(text) | more))

        text = f"{path}{time.monotonic_ns()} {LONG}"
        assert [tokens(ALICE, text) for _ in range(2)][1] > 0, "its own, sent again"
        assert [tokens(BOB, text), tokens(ROOT, text), tokens(PROXY, text)] == [0, 0, 0]
        assert tokens(BOB, text) > 0, "its own by now"
    text = f"{time.monotonic_ns()} {LONG}"
    salted = {"prompt": text, "max_tokens": 1, "cache_salt": "mine"}
    first, second = (cached(ask(ALICE, "POST", "/v1/completions", json=salted)) for _ in range(2))
    assert first == 0 and second > 0
    domain = domain_of("key", owner_of(ALICE))
    for salt in ("mine", domain, Caller(domain=domain).salt("mine"), Caller(domain=domain).salt(None)):
        stolen = ask(BOB, "POST", "/v1/completions", json=salted | {"cache_salt": salt})
        assert cached(stolen) == 0, "no client chooses another's salt"
    forged = {"X-Manta-Caller": encode_caller(Caller(sees_all=True, domain=domain)), "X-Manta-Token": "x"}
    assert cached(ask(PROXY, "POST", "/v1/completions", json=salted, headers=forged)) == 0
    assert ask(None, "GET", "/v1/files", headers=forged).status_code == 401


def test_batch_rows_share_prefixes_with_their_owner_only(ask: Ask) -> None:
    text = f"{time.monotonic_ns()} {LONG}"
    ask(ALICE, "POST", "/v1/completions", json={"prompt": text, "max_tokens": 1})

    def row_of(key: str) -> int:
        batch = batch_of(ask, key, lines(text))
        (row,) = rows_of(ask, key, batch)
        ids = (batch["input_file_id"], batch["output_file_id"])
        assert all(ask(key, "DELETE", f"/v1/files/{id}").is_success for id in ids)
        return row["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert row_of(BOB) == 0
    found = [row_of(ALICE) for _ in range(2)]
    assert max(found) > 0, "either replica may have worked on it"


def test_a_gateway_routes_by_prefixes_of_the_same_key(stand: GatewayStand) -> None:
    def routed() -> dict[str, float]:
        text = stand.http.get("/metrics", headers={"Authorization": f"Bearer {ROOT}"}).text
        found = re.findall(r'manta:gateway_requests_total\{.*reason="(\w+)".*\} (\S+)', text)
        return {reason: float(value) for reason, value in found}

    def reason(key: str, body: dict[str, Any]) -> str:
        before = routed()
        headers = {"Authorization": f"Bearer {key}"}
        assert stand.http.post("/v1/completions", json=body, headers=headers).is_success
        (grown,) = (why for why, value in routed().items() if value > before.get(why, 0.0))
        return grown

    body = {"prompt": f"{time.monotonic_ns()} {LONG}", "max_tokens": 1}
    wanted = ["load", "prefix", "load", "prefix"]
    assert [reason(key, body) for key in (ALICE, ALICE, BOB, BOB)] == wanted
    salted = body | {"cache_salt": "s"}
    assert [reason(key, salted) for key in (ALICE, ALICE, BOB)] == ["load", "prefix", "load"]


def tenants_in(text: str, label: str = "tenant", what: str = "dflash:spec_drafts") -> set[str]:
    return set(re.findall(rf'{what}_by_{label}_total\{{[^}}]*{label}="([^"]*)"', text))


def test_unknown_tenants_share_one_label(ask_engine: Ask) -> None:
    def ignored(key: str, headers: dict[str, str] | None = None, **body: Any) -> str | None:
        """Send a request and return what of it is ignored."""
        body = {"prompt": "x", "max_tokens": 1} | body
        answer = ask_engine(key, "POST", "/v1/completions", json=body, headers=headers or {})
        return answer.headers.get("x-ignored-params")

    for i in range(70):  # more than there are places
        reported = {"metadata": {"tenant": f"body-{i}", "category": f"kind-{i}"}}
        named = {"X-Tenant": f"t-{i}"} if i % 2 else {}
        assert ignored(ALICE, named, **reported) == ("X-Tenant" if i % 2 else "metadata.tenant")
    assert ignored(ALICE, {"X-Tenant": "globex", "X-Category": "code"}) is None
    assert ignored(BOB, {"X-Tenant": "globex"}) == "X-Tenant"
    assert ignored(BOB) is None
    assert ignored(ALICE, {"X-Tenant": "acme"}) == "X-Tenant"
    assert ignored(PROXY, {"X-Tenant": "initech"}) is None
    ignored(ALICE)
    text = ask_engine(ROOT, "GET", "/metrics").text
    assert {"globex", "acme", "initech", "other", "none"} == tenants_in(text)
    assert tenants_in(text, "category") == {"code", "other", "none"}
    assert tenants_in(text, "tenant", "manta:generation_tokens") == tenants_in(text)


def test_a_batch_counts_for_its_keys_tenant(ask_engine: Ask) -> None:
    def generated() -> float:
        text = ask_engine(ROOT, "GET", "/metrics").text
        line = r'manta:generation_tokens_by_tenant_total\{[^}]*tenant="acme"[^}]*\} (\S+)'
        return sum(map(float, re.findall(line, text)))

    before = generated()
    batch = batch_of(ask_engine, BOB, lines("x"), metadata={"tenant": "initech"})
    for id in (batch["input_file_id"], batch["output_file_id"]):
        ask_engine(BOB, "DELETE", f"/v1/files/{id}")
    assert generated() == before + 2


def test_unknown_http_methods_share_one_label(ask_engine: Ask) -> None:
    for method in ("PROPFIND", "SEARCH", "M-SEARCH"):
        ask_engine(BOB, method, "/v1/models")
    text = ask_engine(ROOT, "GET", "/metrics").text
    assert 'method="other"' in text and "PROPFIND" not in text


def delete_all(ask: Ask, key: str) -> None:
    for each in ask(key, "GET", "/v1/files").json()["data"]:
        assert ask(key, "DELETE", f"/v1/files/{each['id']}").is_success


def test_a_key_stores_no_more_than_its_quota(ask: Ask) -> None:
    delete_all(ask, PROXY)
    kept = [upload(ask, PROXY, b"x" * 15_000).json()["id"] for _ in range(2)]
    full = upload(ask, PROXY, b"x" * 15_000)
    said = full.json()["error"]
    assert full.status_code == 413 and said["param"] == "file"
    assert all(word in said["message"] for word in ("15000", "30000 of 40000", "max_stored_bytes", "DELETE"))
    assert upload(ask, BOB, b"x" * 15_000).is_success, "others have their own"
    assert [upload(ask, PROXY, b"").status_code for _ in range(3)] == [200, 200, 413], "4 KiB each"
    assert ask(PROXY, "DELETE", f"/v1/files/{kept[0]}").is_success
    assert upload(ask, PROXY, b"x" * 15_000).is_success
    for key in (PROXY, BOB):
        delete_all(ask, key)


def test_outputs_count_in_the_quota_and_a_full_key_starts_no_batch(ask: Ask) -> None:
    batch = batch_of(ask, PROXY, lines("x", 30))
    files = ask(PROXY, "GET", "/v1/files").json()["data"]
    output = next(each for each in files if each["id"] == batch["output_file_id"])
    left = QUOTA - sum(max(each["bytes"], 4096) for each in files)
    assert len(files) == 2 and output["bytes"] > 10_000 and left > 4096
    assert upload(ask, PROXY, b"x" * (left + 1)).status_code == 413
    assert upload(ask, PROXY, b"x" * left).is_success
    again = {"input_file_id": batch["input_file_id"], "endpoint": "/v1/completions"}
    refused = ask(PROXY, "POST", "/v1/batches", json=again)
    assert refused.status_code == 413 and refused.json()["error"]["param"] == "input_file_id"
    assert ask(PROXY, "DELETE", f"/v1/files/{batch['output_file_id']}").is_success
    assert ask(PROXY, "POST", "/v1/batches", json=again | {"endpoint": "/v1/chat/completions"}).is_success
    wait_until(lambda: ask(PROXY, "GET", "/v1/batches?limit=1").json()["data"][0]["status"] == "failed")
    delete_all(ask, PROXY)


def test_stored_files_are_readable_by_the_servers_user_only(server: LiveServer, folder: Path) -> None:
    """Runs last: a batch's lock, segments and parts and files have all been written."""
    found = [folder / "batches", *(folder / "batches").rglob("*")]
    assert {"files", "work", "queue"} <= {path.name for path in found} and len(found) > 20
    for path in found:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_batches_made_without_keys_belong_to_the_admin_key(serve: Serve, tmp_path: Path) -> None:
    storage = {"batch_storage": str(tmp_path / "batches")}
    with serve(simulated, **storage) as server, http_client(server.url) as client:
        batch = batch_of(asking(client), None, lines("x"))
    keys = {"api_key": (ALICE, BOB), "admin_api_key": ROOT}
    with serve(simulated, **storage, **keys) as server, http_client(server.url) as client:
        ask = asking(client)
        for key, status, count in ((ALICE, 404, 0), (ROOT, 200, 2)):
            assert ask(key, "GET", f"/v1/batches/{batch['id']}").status_code == status
            assert len(ask(key, "GET", "/v1/files").json()["data"]) == count
    with serve(simulated, **storage, api_key=ALICE) as server, http_client(server.url, ALICE) as client:
        assert len(client.get("/v1/files").json()["data"]) == 2, "a lone key is its operator's"


def test_isolation_is_by_key_with_several_keys() -> None:
    assert ServerSettings().isolation == ServerSettings(api_key=ALICE).isolation == "none"
    assert ServerSettings(api_key=(ALICE, ALICE)).isolation == "none"
    assert ServerSettings(api_key=(ALICE, BOB)).isolation == "key"
    assert ServerSettings(api_key=ALICE, admin_api_key=ROOT).isolation == "key"
    assert ServerSettings(api_key=(ALICE, BOB), prefix_cache_isolation="none").isolation == "none"
    with pytest.raises(ConfigError, match="prefix_cache_isolation"):
        ServerSettings(prefix_cache_isolation="user")  # type: ignore[arg-type]


def domain(settings: ServerSettings, key: str | None, tenant: str | None = None) -> str | None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return caller(settings, headers | ({"x-tenant": tenant} if tenant else {})).domain


def caller(settings: ServerSettings, headers: dict[str, str]) -> Caller:
    keys = Keys(settings)
    return keys.caller(keys.given(headers), headers)


def test_with_isolation_by_tenant_keys_of_a_tenant_share_and_no_key_claims_another() -> None:
    keys = (ALICE, f"{BOB} acme", "carol acme", f"{PROXY} *")
    by_tenant = ServerSettings(api_key=keys, prefix_cache_isolation="tenant", tenants=("acme", "globex"))
    acme = domain(by_tenant, BOB)
    assert acme == domain(by_tenant, "carol") == domain(by_tenant, PROXY, "acme")
    assert acme == domain(by_tenant, BOB, "globex"), "whatever it says"
    assert domain(by_tenant, ALICE, "acme") == domain(by_tenant, ALICE) not in (acme, None)
    assert domain(by_tenant, PROXY) != domain(by_tenant, PROXY, "any") != acme
    by_key = ServerSettings(api_key=keys)
    assert len({domain(by_key, key) for key in (ALICE, BOB, "carol", PROXY)}) == 4
    assert domain(by_key, PROXY, "acme") == domain(by_key, PROXY)
    trusted = ServerSettings(prefix_cache_isolation="tenant", tenants=("acme", "globex"))
    assert len({domain(trusted, None, each) for each in ("acme", "globex", "else")}) == 3
    assert domain(trusted, None, "else") == domain(trusted, None, "other") == domain(trusted, None)
    assert domain(ServerSettings(tenants=("acme",)), None, "acme") is None
    reported = caller(by_tenant, {"x-api-key": PROXY, "x-tenant": "d\u00e9j\u00e0"})
    assert decode_caller(encode_caller(reported)) == reported and encode_caller(reported).isascii()
    assert without_gateway_settings(by_tenant).keys("api_key") == ()
    assert decode_caller(None) == Caller() and not decode_caller(None).may_see("x")


def test_keys_may_name_tenants_in_files_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{ALICE}\n{BOB} \tacme\n{PROXY} *\n")
    found = with_keys(ServerSettings(api_key="flag globex", api_key_file=str(file)), {})
    assert found.key_tenants("api_key") == {"flag": "globex", ALICE: None, BOB: "acme", PROXY: "*"}
    for wrong in ("key two words", "key other", "key none", "key a,b", " key", "key " + "x" * 65):
        with pytest.raises(ConfigError) as caught:
            ServerSettings(api_key=wrong)
        assert caught.value.param == "api_key" and not caught.value.message.startswith("key ")
        assert "key two" not in caught.value.message
    for name in ("tenants", "categories"):
        with pytest.raises(ConfigError) as caught:
            ServerSettings(**{name: ("fine", "other")})
        assert caught.value.param == f"{name}.1"
