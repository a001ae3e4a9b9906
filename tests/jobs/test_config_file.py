"""YAML files of settings: the address that `manta serve` uses, and unknown names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from manta.cluster.errors import ConfigError
from manta.jobs.cli import main
from manta.jobs.common import config_file
from manta.jobs.common.config_file import read_config_file
from manta.jobs.render.documents import read_deployment
from pydantic import BaseModel
from ray.serve import schema
from support.paths import ROOT

APPLICATION = {"import_path": "manta.actors.replica:build_app", "args": {"model": "models/target"}}


def write(path: Path, **content: Any) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("names", "model"),
    [
        (config_file.TOP_KEYS, schema.ServeDeploySchema),
        (config_file.HTTP_KEYS, schema.HTTPOptionsSchema),
        (config_file.APPLICATION_KEYS, schema.ServeApplicationSchema),
    ],
)
def test_known_config_names_are_those_of_rays_schema(names: frozenset[str], model: type[BaseModel]) -> None:
    assert names == set(model.model_fields)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ([], ("0.0.0.0", 8765)),
        (["--port", "9001"], ("0.0.0.0", 9001)),
        (["--host", "::1", "--port", "9001"], ("::1", 9001)),
        (["models/target"], ("127.0.0.1", 8000)),
    ],
)
def test_serve_listens_at_the_files_address_and_flags_take_precedence(
    flags: list[str], wanted: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[tuple[str, int]] = []

    def start(_: object, options: Any, **__: object) -> None:
        requested.append((options.host, options.port))
        raise ConfigError("far enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("manta.jobs.serve.server.start_server", start)
    http = {"host": "0.0.0.0", "port": 8765}
    write(tmp_path / "ray_config.yaml", http_options=http, applications=[APPLICATION])
    flat = write(tmp_path / "flat.yaml", model="models/target", **http)
    for given in ([], ["--config", "ray_config.yaml"], ["--config", str(flat)]):
        if not given or "models/target" not in flags:
            with pytest.raises(SystemExit):
                main(["serve", *flags, *given])
    assert set(requested) == {wanted}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"http_option": {"port": 1}, "applications": [APPLICATION]}, "at the top level.*mean http_options?"),
        ({"http_options": {"prt": 1}, "applications": [APPLICATION]}, "in `http_options`.*options.port?"),
        ({"http_options": {"port": 1}, "aplications": [APPLICATION]}, "at the top level.*mean applications?"),
        ({"applications": [{"argz": {}}]}, r"in `applications\[0\]`.*applications\[0\].args?"),
        ({"applications": [APPLICATION, {"nome": "b"}]}, r"applications\[1\].nome"),
        ({"applications": [APPLICATION], "max_num_seqs": 3}, "top level.*belong under `args:`"),
        ({"applications": [APPLICATION], "http_options": [8000]}, "http_options must be a mapping"),
        ({"applications": [{"args": "model"}]}, "args must be a mapping"),
        ({"http_options": {"port": "x"}, "applications": [APPLICATION]}, "port='x'"),
        ({"model": "m", "port": 70000}, "port=70000"),
        ({"http_options": {"host": 1}, "applications": [APPLICATION]}, "host=1"),
    ],
)
def test_keys_that_serve_would_ignore_or_refuse_are_named(content: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        read_config_file(write(tmp_path / "c.yaml", **content))


def test_renderers_name_unknown_keys_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="outside `args:`"):
        read_deployment(write(tmp_path / "c.yaml", http_option={}, applications=[APPLICATION]), None)


def test_settings_for_deployed_configs_only_are_reported(tmp_path: Path) -> None:
    http = {"port": 8000, "root_path": "/v2"}
    entry = {**APPLICATION, "route_prefix": "/a", "deployments": [{"name": "manta", "num_replicas": 2}]}
    content = {"proxy_location": "HeadOnly", "http_options": http, "applications": [entry, APPLICATION]}
    assert read_config_file(write(tmp_path / "c.yaml", **content)).unused == (
        "http_options.root_path",
        "applications[0].deployments",
        "applications[0].route_prefix",
        "applications[1:]",
    )
    assert read_config_file(ROOT / "ray_config.yaml").unused == ()
