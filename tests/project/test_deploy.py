"""Images, Compose and Kubernetes files in deploy/, as far as they can be checked without a container runtime."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from documents import ROOT, check_command
from splitserve.orchestration.spec.cluster_spec import ClusterSpec
from splitserve.orchestration.spec.document import parse_spec
from splitserve.router.http.openapi import openapi_document

DEPLOY = ROOT / "deploy"
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")
MANIFESTS = ("one-node.yaml", "several-nodes.yaml")
PORT = 8000
SHORT_IMAGE = re.compile(r"(python|nvidia/cuda|splitserve):[\w.-]+")  # no registry hosts

pytestmark = pytest.mark.skipif(not DEPLOY.is_dir(), reason="not a checkout")


# ---- Dockerfiles ----


def instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / name).read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(word, " ".join(rest.split())) for word, rest in found]


def values(name: str, word: str) -> list[str]:
    return [rest for each, rest in instructions(name) if each == word]


def copies(name: str) -> list[tuple[list[str], str]]:
    """Sources and target of each COPY."""
    return [(words[:-1], words[-1]) for words in map(str.split, values(name, "COPY"))]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_copy_files_that_exist_and_all_of_the_package(name: str) -> None:
    sources = [source for some, _ in copies(name) for source in some]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    folders = {path.name for path in (ROOT / "src" / "splitserve").iterdir() if path.is_symlink()}
    assert folders and folders | {"src", "pyproject.toml", "LICENSE", "README.md"} <= set(sources)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_images_copy_is_enough_for_the_package(name: str, tmp_path: Path) -> None:
    """The wheel of the copied files has the same modules as the checkout."""
    tree, wheels = tmp_path / "tree", tmp_path / "wheels"
    wheels.mkdir()
    for sources, target in copies(name):
        for source in sources:
            if (ROOT / source).is_dir():
                skipped = shutil.ignore_patterns("__pycache__", "*.egg-info", "results")
                shutil.copytree(ROOT / source, tree / target, symlinks=True, ignore=skipped)
            else:
                (tree / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, tree / target / source)
    program = f"from setuptools import build_meta; build_meta.build_wheel({str(wheels)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [wheel] = wheels.iterdir()
    packed = {info.filename for info in zipfile.ZipFile(wheel).infolist() if info.filename.endswith(".py")}
    package = ROOT / "src" / "splitserve"
    folders = [package, *(path for path in package.iterdir() if path.is_symlink())]
    modules = {
        str(Path("splitserve") / path.relative_to(package))
        for folder in folders
        for path in folder.rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert packed == modules


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_run_our_command(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert values(name, "ENTRYPOINT") == ['["splitserve"]'] and "splitserve" in project["scripts"]
    [command] = values(name, "CMD")
    check_command(yaml.safe_load(command))
    assert values(name, "EXPOSE") == [str(PORT)]
    assert values(name, "USER") == ["splitserve"], "not root"
    arguments = dict(value.replace('"', "").split("=", 1) for value in values(name, "ARG"))
    assert set(arguments["EXTRAS"].split(",")) <= set(project["optional-dependencies"])
    assert f"TORCH_SPEC:={arguments['TORCH_SPEC']}" in (ROOT / "scripts" / "setup").read_text()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_have_short_names_and_a_supported_python(name: str) -> None:
    [base] = values(name, "FROM")
    assert SHORT_IMAGE.fullmatch(base)
    versions = set(re.findall(r"python:?(3\.\d+)", (DEPLOY / name).read_text()))
    assert versions == {"3.12"}


# ---- Compose ----


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_compose_services(compose: dict[str, Any], profile: str) -> None:
    [service] = [each for each in compose["services"].values() if each["profiles"] == [profile]]
    context = (DEPLOY / service["build"]["context"]).resolve()
    assert context == ROOT and (context / service["build"]["dockerfile"]).is_file()
    assert service["image"] == f"splitserve:{profile}"
    command = service["command"]
    check_command(command)
    assert command[command.index("--port") + 1] == str(PORT)
    assert service["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    key = command[command.index("--api-key-file") + 1]
    assert key in {f"/run/secrets/{name}" for name in service["secrets"]} and set(service["secrets"]) <= set(
        compose["secrets"]
    )
    targets = {volume.split("}:")[1].split(":")[0] for volume in service["volumes"]}
    assert command[1] in targets
    check_probe(re.search(rf"http://127\.0\.0\.1:{PORT}(/\w+)", service["healthcheck"]["test"][-1])[1])
    program = service["healthcheck"]["test"]
    assert program[:3] == ["CMD", "python", "-c"]
    compile(program[3], "healthcheck", "exec")


def test_a_gpu_for_each_worker_of_compose(compose: dict[str, Any]) -> None:
    service = compose["services"]["splitserve-cuda"]
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    command = service["command"]
    workers = sum(int(command[command.index(option) + 1]) for option in ("--prefill", "--decode"))
    assert device == {"driver": "nvidia", "count": workers, "capabilities": ["gpu"]}


def check_probe(path: str) -> None:
    assert "get" in openapi_document(("m",), wants_key=True)["paths"][path]


# ---- Kubernetes ----


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def of_kind(name: str, *kinds: str) -> list[dict[str, Any]]:
    return [each for each in objects(name) if each["kind"] in kinds]


def containers(name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each workload's pod with its one container."""
    pods = [each["spec"]["template"]["spec"] for each in of_kind(name, "Deployment", "StatefulSet")]
    assert all(len(pod["containers"]) == 1 for pod in pods)
    return [(pod, pod["containers"][0]) for pod in pods]


def spec_in(name: str) -> tuple[ClusterSpec, dict[str, str]]:
    """The cluster spec in the manifest's ConfigMap, and all of its files."""
    [config] = of_kind(name, "ConfigMap")
    return parse_spec(config["data"]["cluster.yaml"], name), config["data"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_hang_together(name: str) -> None:
    for each in objects(name):
        assert each["apiVersion"] in ("v1", "apps/v1") and each["metadata"]["name"]
    workloads = of_kind(name, "Deployment", "StatefulSet")
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in workloads]
    for each in workloads:
        assert each["spec"]["selector"]["matchLabels"] == each["spec"]["template"]["metadata"]["labels"]
    [config] = of_kind(name, "ConfigMap")
    for pod, container in containers(name):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        assert volumes["spec"]["configMap"]["name"] == config["metadata"]["name"]
        assert SHORT_IMAGE.fullmatch(container["image"])
        assert f"--uid {pod['securityContext']['runAsUser']} " in (DEPLOY / "Dockerfile.cuda").read_text()
    ports = {port["name"] for _, container in containers(name) for port in container.get("ports", [])}
    for service in of_kind(name, "Service"):
        chosen = service["spec"]["selector"].items()
        assert any(chosen <= label.items() for label in labels)
        assert {port.get("targetPort", port["name"]) for port in service["spec"]["ports"]} <= ports


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_name_files_that_they_mount(name: str) -> None:
    spec, files = spec_in(name)
    for _, container in containers(name):
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert spec.model.path.startswith(mounts["models"] + "/")
        secrets = mounts.get("secrets") or mounts["api-key"]
        for reference in (spec.secrets.shared, spec.secrets.api_key):
            assert reference is None or str(Path(reference.file).parent) == secrets
        words = container.get("args") or container["command"]
        named = [word for word in words if word.startswith(mounts["spec"])]
        assert named and all(Path(word).name in files for word in named)


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_ask_for_probes_and_gpus_that_fit(name: str) -> None:
    spec, _ = spec_in(name)
    gpus = 0
    for _, container in containers(name):
        gpus += container["resources"]["limits"]["nvidia.com/gpu"]
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe in container:
                check_probe(container[probe]["httpGet"]["path"])
                assert ports[container[probe]["httpGet"]["port"]] == spec.router.port
    assert gpus == sum(pool.count * pool.tensor_parallel_size for pool in spec.pools)
    assert spec.router.host == "0.0.0.0" and spec.secrets.api_key is not None


def test_one_node_runs_our_command() -> None:
    [(_, container)] = containers("one-node.yaml")
    check_command(container["args"])


def test_scripts_of_several_nodes(tmp_path: Path) -> None:
    """Bash accepts them, and Splitserve and Ray accept the commands in them."""
    from ray.scripts.scripts import start

    ray_options = {option for parameter in start.params for option in parameter.opts}
    spec, files = spec_in("several-nodes.yaml")
    for name in ("ray.env", "head.sh", "worker.sh"):
        subprocess.run(["bash", "-n"], input=files[name], text=True, check=True)
    commands = [shlex.split(line.removeprefix("exec ")) for name in ("head.sh", "worker.sh") for line in
                files[name].splitlines()]  # fmt: skip
    ours = [words[1:] for words in commands if words[:1] == ["splitserve"]]
    assert [words[0] for words in ours] == ["up", "logs"]
    for words in ours:
        check_command(words)
    started = [words[2:] for words in commands if words[:2] == ["ray", "start"]]
    assert len(started) == 2
    for words in started:
        assert {word.partition("=")[0] for word in words} <= ray_options
    [service] = [each for each in of_kind("several-nodes.yaml", "Service") if each["spec"].get("clusterIP") == "None"]
    assert f"--address={service['metadata']['name']}:6379" in started[1]
    assert spec.secrets.shared is not None, "workers on several nodes need one"
