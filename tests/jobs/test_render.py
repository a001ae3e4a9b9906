"""The outputs of `manta render` are accepted by KubeRay, Ray, systemd and Manta's command line."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml
from manta.actors.http.config.settings_mapping import split_settings
from manta.cluster.errors import ConfigError, PlacementError
from manta.jobs.cli import app
from manta.jobs.render.documents import ENVIRONMENT, PodOptions, render_document
from manta.version import DISTRIBUTION, __version__
from support.paths import TESTS

SCHEMAS = TESTS / "kuberay"
SCALED = {"min_replicas": 2, "max_replicas": 24}
BATCH = ["--input", "s3://bucket/in/*.parquet", "--output", "s3://bucket/out", "--prompt-column", "question"]


def config(folder: Path, **args: Any) -> Path:
    """Write a ray_config.yaml with these `args`, and `deployments` next to them."""
    deployments = args.pop("deployments", None)
    application = {
        "name": "My_App",
        "import_path": "manta.actors.replica:build_app",
        "args": {"model": "Qwen/Qwen3-8B", "device": "cuda", **args},
    }
    application |= {"deployments": deployments} if deployments else {}
    file = folder / "ray_config.yaml"
    file.write_text(yaml.safe_dump({"http_options": {"port": 9000}, "applications": [application]}))
    return file


def rendered(kind: str, file: Path, gpus_per_node: int | None = None) -> Any:
    flags = BATCH if kind == "kuberay-job" else []
    return yaml.safe_load(render_document(kind, file, gpus_per_node, None, flags))


def closed(schema: Any) -> Any:
    """Return the schema with additional properties forbidden."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if isinstance(inner.get("properties"), dict) and "type" in inner:
        inner.setdefault("additionalProperties", False)
    if inner.get("x-kubernetes-int-or-string"):
        inner = {"type": ["integer", "string"]}
    return inner


def check(document: Any, kind: str) -> None:
    schema = closed(json.loads((SCHEMAS / f"{kind}.json").read_text()))
    schema["properties"]["metadata"] = {"type": "object"}  # of all Kubernetes' objects
    jsonschema.Draft202012Validator(schema).validate(document)


def workers(document: Any) -> Any:
    spec = document["spec"].get("rayClusterConfig") or document["spec"]["rayClusterSpec"]
    (group,) = spec["workerGroupSpecs"]
    return group


@pytest.mark.parametrize("replicas", [1, 5, "1:16", "0:3"])
@pytest.mark.parametrize("kind", ["service", "job"])
def test_kuberays_schemas_accept_service_and_job(tmp_path: Path, kind: str, replicas: int | str) -> None:
    document = rendered(f"kuberay-{kind}", config(tmp_path, replicas=replicas, tensor_parallel_size=2))
    check(document, f"ray{kind}")
    cluster = document["spec"].get("rayClusterConfig") or document["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"} and cluster["rayVersion"] == metadata.version("ray")
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", "engines go to workers"
    assert cluster.get("enableInTreeAutoscaling", False) == (replicas in ("1:16", "0:3"))
    for group in (cluster["headGroupSpec"], workers(document)):
        (container,) = group["template"]["spec"]["containers"]
        found = {each["name"]: each.get("value") for each in container["env"]}
        assert ENVIRONMENT.items() <= found.items(), "HAProxy is chosen on head and workers"


@pytest.mark.parametrize("kind", ["rayservice", "rayjob"])
def test_a_misspelled_key_would_be_detected(tmp_path: Path, kind: str) -> None:
    document = rendered(f"kuberay-{kind.removeprefix('ray')}", config(tmp_path))
    workers(document)["template"]["spec"]["containers"][0]["imagePullPolicies"] = "Always"
    with pytest.raises(jsonschema.ValidationError, match="imagePullPolicies"):
        check(document, kind)


def test_the_service_config_listens_for_the_clusters_service(tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    file = config(tmp_path, replicas=2)
    document = rendered("kuberay-service", file)
    text = document["spec"]["serveConfigV2"]
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    assert schema.http_options.host == "0.0.0.0" and schema.http_options.port == 9000
    assert yaml.safe_load(text)["applications"] == yaml.safe_load(file.read_text())["applications"]
    (container,) = workers(document)["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["port"] == 9000
    assert {"containerPort": 9000, "name": "serve"} in container["ports"]
    assert document["metadata"]["name"] == "my-app", "as Kubernetes takes it"


@pytest.mark.parametrize(
    ("args", "gpus_per_node", "gpus", "minimum", "maximum"),
    [
        ({}, None, 1, 1, 1),
        ({"replicas": 8}, None, 8, 1, 1),
        ({"replicas": 9}, None, 8, 2, 2),
        ({"tensor_parallel_size": 4, "replicas": "1:4"}, None, 8, 1, 2),
        ({"tensor_parallel_size": 2, "replicas": 3}, 4, 4, 2, 2),
        ({"tensor_parallel_size": 8, "replicas": "0:2"}, None, 8, 0, 2),
        ({"replicas": 4, "speculative_config": {"model": "d", "placement": "split"}}, None, 8, 1, 1),
        ({"replicas": 7, "speculative_config": {"model": "d", "placement": "shared"}}, None, 8, 1, 1),
        ({"replicas": 8, "speculative_config": {"model": "d", "placement": "shared"}}, None, 8, 2, 2),
        ({"device": "cpu", "replicas": 2}, None, 0, 2, 2),
        ({"deployments": [{"name": "manta", "num_replicas": 16}]}, None, 8, 2, 2),
        ({"deployments": [{"name": "manta", "autoscaling_config": SCALED}]}, None, 8, 1, 3),
    ],
)
def test_workers_are_counted_from_the_topology(
    tmp_path: Path, args: dict[str, Any], gpus_per_node: int | None, gpus: int, minimum: int, maximum: int
) -> None:
    group = workers(rendered("kuberay-service", config(tmp_path, **args), gpus_per_node))
    (container,) = group["template"]["spec"]["containers"]
    assert int(container["resources"]["limits"].get("nvidia.com/gpu", 0)) == gpus
    assert (group["minReplicas"], group["maxReplicas"]) == (minimum, maximum)


def test_several_models_are_counted_together(tmp_path: Path) -> None:
    large = {"model": "Qwen/Qwen3-32B", "tensor_parallel_size": 4}
    models = [{"model": "Qwen/Qwen3-8B", "replicas": 2}, large]
    file, args = tmp_path / "ray_config.yaml", {"device": "cuda", "models": models}
    application = {"import_path": "manta.actors.replica:build_app", "args": args}
    file.write_text(yaml.safe_dump({"applications": [application]}))
    group = workers(rendered("kuberay-service", file))
    assert group["minReplicas"] == 1, "2 GPUs and 4 are together on a node"
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "6"
    assert workers(rendered("kuberay-service", file, 4))["minReplicas"] == 2


def test_pods_have_the_resources_keys_and_cache_that_are_named(tmp_path: Path) -> None:
    file = config(tmp_path, device="cpu", replicas=2)
    pod = PodOptions(cpus=2, memory="8Gi", model_cache="models")
    document = yaml.safe_load(render_document("kuberay-service", file, None, None, [], pod))
    check(document, "rayservice")
    cluster = document["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], workers(document)):
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        variables = {each["name"]: each for each in container["env"]}
        key = {"name": "manta-api-keys", "key": "keys", "optional": True}
        assert variables["MANTA_API_KEY"]["valueFrom"] == {"secretKeyRef": key}
        (mount,), (volume,) = container["volumeMounts"], spec["volumes"]
        assert variables["HF_HOME"]["value"] == mount["mountPath"] and mount["name"] == volume["name"]
        assert volume["persistentVolumeClaim"] == {"claimName": "models"}
    (container,) = workers(document)["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "8Gi"}


def test_pods_that_are_too_small_or_misspelled_are_refused(tmp_path: Path) -> None:
    file = config(tmp_path, device="cpu")
    with pytest.raises(PlacementError, match=r"1\.5 CPU for each engine.* at least 2"):
        render_document("kuberay-service", file, None, None, [], PodOptions(cpus=1))
    with pytest.raises(PlacementError, match=r"4 in a pod.* at least 4"):
        render_document("kuberay-service", config(tmp_path, replicas=4), None, None, [], PodOptions(cpus=2))
    with pytest.raises(ConfigError, match=r"memory='8 GB'.* as 64Gi"):
        PodOptions(memory="8 GB")
    with pytest.raises(ConfigError, match="not for systemd"):
        render_document("systemd", file, None, None, [], PodOptions(cpus=2))


def test_configs_that_no_node_can_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match="needs 8 GPUs on one node, which has 4"):
        rendered("kuberay-service", config(tmp_path, tensor_parallel_size=8), 4)


@pytest.mark.parametrize("text", ["", "[1, 2]", "applications: []", "applications: 3", "{"])
def test_invalid_serve_configs_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "ray_config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="config: "):
        rendered("systemd", tmp_path / "ray_config.yaml")


def parsed(command: list[str]) -> dict[str, Any]:
    """Parse the parameters of a `manta` command without running it; click raises for wrong ones."""
    group: Any = typer.main.get_command(app)
    return group.commands[command[1]].make_context(command[1], command[2:]).params


def test_the_entrypoint_of_the_job_is_a_batch_command_with_the_engines_settings(tmp_path: Path) -> None:
    spec = {"method": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16"}
    file = config(
        tmp_path,
        replicas="1:4",
        max_model_len=8192,
        enable_prefix_caching=False,
        speculative_config=spec,
        api_key_file="/run/keys",
    )
    found = parsed(shlex.split(rendered("kuberay-job", file)["spec"]["entrypoint"]))
    assert (found["model"], found["max_model_len"], found["enable_prefix_caching"]) == (
        "Qwen/Qwen3-8B",
        8192,
        False,
    )
    assert json.loads(found["speculative_config"]) == spec and str(found["concurrency"]) == "1:4"
    assert found["output"] == "s3://bucket/out" and found["prompt_column"] == "question"
    assert "/run/keys" not in rendered("kuberay-job", file)["spec"]["entrypoint"], "no key of the server's"
    with pytest.raises(ConfigError, match="needs flags of `manta batch`"):
        render_document("kuberay-job", file, None, None, [])


def test_ray_ups_schema_accepts_the_cluster(tmp_path: Path) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    file = config(tmp_path, replicas="1:16")
    cluster = rendered("ray-up", file)
    validate_config(prepare_config({**cluster, "file_mounts": {}}))
    assert (cluster["max_workers"], cluster["available_node_types"]["engines"]["resources"]["GPU"]) == (2, 8)
    assert list(cluster["file_mounts"].values()) == [str(file), "~/.ray/auth_token"]
    commands = (*cluster["head_start_ray_commands"], *cluster["worker_start_ray_commands"])
    starts = [line for line in commands if " ray start" in line]
    assert len(starts) == 2 and all("RAY_AUTH_MODE=token" in line for line in starts)
    assert all(line.startswith("chmod 600 /home/ray/.ray/auth_token;") for line in starts)
    for line in starts:
        assert environment_of("ray", line, tmp_path).items() >= ENVIRONMENT.items()


def environment_of(program: str, line: str, folder: Path) -> dict[str, str]:
    """Return the environment in which a shell runs a program of this name."""
    (folder / program).write_text("#!/bin/sh\nexec env\n")
    (folder / program).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    ran = subprocess.run(["bash", "-c", line], env={"PATH": path}, capture_output=True, text=True, check=True)
    return dict(each.split("=", 1) for each in ran.stdout.splitlines())


def test_the_image_compiles_the_kernels_of_each_engine_on_gpus(tmp_path: Path) -> None:
    spec = {"model": "z-lab/Qwen3-8B-DFlash-b16", "num_speculative_tokens": 7}
    file = config(tmp_path, replicas=2, kv_cache_dtype="fp8", tensor_parallel_size=2, speculative_config=spec)
    text = render_document("dockerfile", file, None, None, [], compile_for="b200")
    (line,) = re.findall(r"^RUN (manta compile .*)$", text, re.M)
    found = parsed(shlex.split(line))
    assert (found["gpu"], found["model"], found["kv_cache_dtype"]) == ("b200", "Qwen/Qwen3-8B", "fp8")
    assert found["tensor_parallel_size"] == 2 and json.loads(found["speculative_config"]) == spec
    on_cpus = config(tmp_path, device="cpu")
    assert "manta compile" not in render_document("dockerfile", on_cpus, None, None, [], compile_for="h200")
    assert "manta compile" not in render_document("dockerfile", file, None, None, [])
    with pytest.raises(ConfigError, match=r"gpu='h20' is not known.*h200"):
        render_document("dockerfile", file, None, None, [], compile_for="h20")
    with pytest.raises(ConfigError, match="--compile is not for systemd"):
        render_document("systemd", file, None, None, [], compile_for="h200")


def test_the_image_has_the_versions_installed_here(tmp_path: Path) -> None:
    text = render_document("dockerfile", config(tmp_path), None, None, [])
    pins = dict(re.findall(r"^    '([\w-]+)(?:\[[\w,]+])?==([\w.]+)'", text, re.M))
    needed = {
        re.split(r"[^\w.-]", each)[0]
        for each in metadata.requires(DISTRIBUTION) or ()
        if "extra ==" not in each
    }
    assert pins.keys() >= needed and "triton" in pins
    assert pins["ray"] == metadata.version("ray") and text.startswith("#")
    assert (
        f"FROM rayproject/ray:{metadata.version('ray')}-py{sys.version_info.major}{sys.version_info.minor}-cu"
        in text
    )
    # Docker splits a line at spaces outside of quotes, as a shell does.
    given = [shlex.split(line) for line in text.splitlines() if line.startswith("ENV ")]
    assert dict(pair.split("=", 1) for _, *pairs in given for pair in pairs) == ENVIRONMENT
    assert f"\nCOPY dist/manta_dflash-{__version__}-py3-none-any.whl /tmp/\n" in text
    cpu = render_document("dockerfile", config(tmp_path, device="cpu"), None, None, [])
    assert "'triton" not in cpu and "-cpu\n" in cpu


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    file = config(tmp_path)
    unit = tmp_path / "manta.service"
    unit.write_text(render_document("systemd", file, None, None, []))
    command = shlex.split(
        next(line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    )
    assert "Environment=RAY_AUTH_MODE=token\n" in unit.read_text()
    found = parsed(["manta", *command[1:]])
    assert (found["host"], found["port"]) == ("127.0.0.1", 9000)
    split_settings(yaml.safe_load(file.read_text())["applications"][0]["args"])  # raises for a wrong one
    if (verify := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd is not here to verify the unit")
    done = subprocess.run(
        [verify, "verify", "--man=no", unit], capture_output=True, text=True, timeout=600, check=False
    )
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "manta.service" in line]
    assert not ours, ours


def test_a_config_with_keys_is_not_rendered(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api_key_file") as caught:
        rendered("systemd", config(tmp_path, api_key="secret"))
    assert "secret" not in caught.value.message
