"""The container examples as far as they can be checked without containers: their commands parse, their files exist."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hybridindex.cli.main import make_app
from tests.cli.conftest import cli
from tests.cli.test_daemon_commands import running

__all__ = ["cli", "running"]

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "examples/compose.yml"
DOCKERFILE = ROOT / "examples/Dockerfile"
REQUIREMENTS = ROOT / "examples/image-requirements.txt"


def parses(words):
    """Whether the command line takes these words; it is not run."""
    group = typer.main.get_command(make_app())
    context = group.make_context("hybridindex", list(words), resilient_parsing=True)
    name, command, rest = group.resolve_command(context, list(words))
    if rest == ["--help"]:
        return name
    context = command.make_context(name, list(rest), parent=context)
    if hasattr(command, "commands"):  # `profile INDEX` is `profile index INDEX`, by a group that finds that out itself
        of_group, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        command.make_context(of_group, rest, parent=context)
    return name


def instructions():
    """(stage, word, rest) of each instruction of the Dockerfile."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.M).replace("\\\n", " ")
    stage, found = 0, []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        word, _, rest = line.partition(" ")
        stage += word == "FROM"
        found.append((stage, word, " ".join(rest.split())))
    return found


def instruction(name, stage=2):
    return [rest for at, word, rest in instructions() if (at, word) == (stage, name)]


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load(COMPOSE.read_text())


def test_commands_of_the_compose_file_parse(compose):
    index = compose["services"]["index"]["command"]
    assert parses(index) == "serve"
    assert parses([*index, "--drain-timeout", "40"]) == "serve"
    with pytest.raises(Exception, match="No such option"):
        parses([*index, "--no-such-option"])
    shown = re.findall(r"run --rm tools (.*)|^#   (?:hybridindex) (.*?)(?: &&|$)", COMPOSE.read_text(), flags=re.M)
    names = [parses(shlex.split(tool or plain)) for tool, plain in shown]
    assert names == ["build", "profile", "profile", "plan", "apply", "vllm-args", "keys"]
    assert {"--no-shrink-arenas", "--no-retry-open"} < set(index), "vLLM starts again by itself"


def test_vllm_goes_first_and_both_share_one_gpu(compose):
    index, llm = compose["services"]["index"], compose["services"]["llm"]
    assert index["depends_on"] == {"llm": {"condition": "service_healthy"}}
    assert "depends_on" not in llm
    assert "8000/health" in llm["healthcheck"]["test"][-1]
    devices = [s["deploy"]["resources"]["reservations"]["devices"] for s in (index, llm)]
    assert devices[0] == devices[1]
    assert devices[0][0]["device_ids"] == ["0"]
    words = llm["command"]
    assert "--kv-cache-memory-bytes" in words
    assert float(words[words.index("--gpu-memory-utilization") + 1].split(":-")[1].rstrip("}")) < 0.92


def test_the_folder_of_keys_is_made_before_docker_would_make_it_as_root():
    commands = [line.removeprefix("#   ") for line in COMPOSE.read_text().splitlines() if line.startswith("#   ")]
    assert commands[0] == "mkdir -p keys && sudo chown 10001 keys"
    assert sum("keys &&" in command for command in commands) == 1
    assert any(" run " in command for command in commands)


def test_what_the_compose_file_names_is_defined(compose):
    for name, service in compose["services"].items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or source == "../keys", name
        assert set(service.get("networks", ())) <= set(compose["networks"])
        # Nothing is offered beyond this machine.
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    for build in (compose["services"][n]["build"] for n in ("index", "tools")):
        assert (COMPOSE.parent / build["context"] / build["dockerfile"]).resolve() == DOCKERFILE
    index = compose["services"]["index"]
    assert index["command"][index["command"].index("--keys") + 1] == "/keys/keys.json"
    # A folder: a file that is mounted alone stays as it was when another one takes its name.
    assert "../keys:/keys:ro" in index["volumes"]
    grace = int(index["stop_grace_period"].rstrip("s"))
    assert grace > 30  # --drain-timeout


def test_the_image_serves_as_nobody_and_its_commands_parse():
    assert json.loads(instruction("ENTRYPOINT")[0]) == ["hybridindex"]
    assert parses(json.loads(instruction("CMD")[0])) == "serve"
    user = instruction("USER")[0]
    assert user == "10001:10001"
    order = [word for stage, word, _ in instructions() if stage == 2]
    assert order.index("USER") < order.index("ENTRYPOINT")
    assert not {"USER", "RUN"} & set(order[order.index("USER") + 1 :])


def test_what_the_image_is_built_from_exists():
    for rest in instruction("COPY", stage=1):
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists(), source
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = instruction("ARG", stage=1)[0].removeprefix("EXTRAS=").split(",")
    assert set(extras) <= set(project["optional-dependencies"])
    assert (ROOT / project["readme"]).name in " ".join(instruction("COPY", stage=1))
    assert all(file in " ".join(instruction("COPY", stage=1)) for file in project["license-files"])


def test_the_image_installs_pinned_and_hashed_packages_alone():
    """The list has what the extras of the image need, at the versions that are tested."""
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    pins = {}
    for line in lines:
        found = re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line)
        assert found, line
        pins[canonicalize_name(found[1])] = found[2]
    known = [line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    tested = {canonicalize_name(name): version for name, _, version in known}
    assert {name for name in pins.keys() & tested.keys() if pins[name] != tested[name]} == set()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = instruction("ARG", stage=1)[0].removeprefix("EXTRAS=").split(",")
    needed = project["dependencies"] + [r for extra in extras for r in project["optional-dependencies"][extra]]
    for requirement in map(Requirement, needed):
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    (build,) = [run for run in instruction("RUN", stage=1) if "pip" in run]
    installs = [step for step in build.split("&&") if "pip install" in step]
    assert [("--require-hashes" in step, "--no-index" in step) for step in installs] == [(True, False), (False, True)]
    assert "PIP_CONSTRAINT=constraints.txt" in build


def test_the_health_check_sees_a_daemon_come_and_go(running, cli):
    index, process, url = running
    words = json.loads(instruction("HEALTHCHECK")[0].partition("CMD ")[2])
    assert words[0] == "python"
    words = [sys.executable, *(word.replace("http://127.0.0.1:8080", url) for word in words[1:])]
    assert url in words[-1]

    def healthy():
        return subprocess.run(words, capture_output=True, timeout=300).returncode == 0

    while not healthy():
        assert process.alive
    assert cli("drain", index).code == 0
    assert process.wait() == 0
    assert not healthy()


def health_checks():
    """Of the image and of the compose file: the program, and the address that it asks."""
    image = json.loads(instruction("HEALTHCHECK")[0].partition("CMD ")[2])
    llm = yaml.safe_load(COMPOSE.read_text())["services"]["llm"]["healthcheck"]["test"]
    assert (image[:2], llm[:3]) == (["python", "-c"], ["CMD", "python3", "-c"])
    return [image[-1], llm[-1]]


@pytest.mark.parametrize("program", health_checks(), ids=["image", "llm"])
def test_a_health_check_asks_no_proxy_for_loopback(program):
    with http.server.HTTPServer(("127.0.0.1", 0), _Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        program = re.sub(r"http://127\.0\.0\.1:\d+", f"http://127.0.0.1:{server.server_port}", program)
        environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
        proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy"), "http://127.0.0.1:9")
        ran = subprocess.run(
            [sys.executable, "-c", program], env=environment | proxies, capture_output=True, text=True, timeout=300
        )
        server.shutdown()
    assert ran.returncode == 0, ran.stderr


class _Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


CLUSTER = ROOT / "examples/cluster"
SCRIPTS = sorted(CLUSTER.glob("*.sh"))


@pytest.fixture(scope="module")
def kuberay():
    """Kind -> object."""
    return {each["kind"]: each for each in yaml.safe_load_all((CLUSTER / "kuberay.yaml").read_text())}


def commands_in(text):
    """Words of every ``ray`` and ``hybridindex`` command of a shell script, also of one that a job of Ray runs."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#")]
    found = re.findall(r"(?:^|exec |-- |\{ )((?:ray|hybridindex) [a-z].*?)(?= -- | \||>|;|$)", "\n".join(lines), re.M)
    return [shlex.split(line.strip()) for line in found]


def ray_takes(words):
    """Whether Ray's command line takes these words; nothing is run. Its commands list and job are in ray[default]."""
    from ray.scripts.scripts import cli as ray_cli

    ray_cli.commands[words[0]].make_context(words[0], words[1:])
    return True


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_of_a_cluster_parse(script):
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    text = script.read_text()
    assert "set -euo pipefail" in text
    # Before anything that reads it.
    first = next(line for line in text.splitlines() if re.match(r"export RAY|(exec )?ray |hybridindex ", line))
    assert first == "export RAY_AUTH_MODE=token"
    commands = commands_in(text)
    assert commands
    for program, *words in commands:
        assert parses(words) == "cluster" if program == "hybridindex" else ray_takes(words)


def test_an_option_that_ray_or_a_cluster_does_not_have_is_noticed():
    text = "hybridindex cluster start idx --no-such\nexec ray start --head \\\n  --no-such-option 1\n"
    ours, rays = commands_in(text)
    assert rays == ["ray", "start", "--head", "--no-such-option", "1"]
    with pytest.raises(Exception, match="No such option"):
        parses(ours[1:])
    with pytest.raises(Exception, match="No such option"):
        ray_takes(rays[1:])


def test_commands_of_the_cluster_on_kubernetes_parse(kuberay):
    (container,) = kuberay["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-ec"]
    (text,) = container["args"]
    subprocess.run(["bash", "-n", "-c", text], check=True, timeout=60)
    found = commands_in(text)
    assert [words[:3] for words in found] == [
        ["ray", "list", "nodes"],
        ["ray", "job", "submit"],
        ["hybridindex", "cluster", "start"],
    ]
    assert parses(found[2][1:]) == "cluster"
    group = kuberay["RayCluster"]["spec"]
    n = 1 + sum(workers["replicas"] for workers in group["workerGroupSpecs"])
    assert f"-ge {n} " in text
    assert f"http://{kuberay['RayCluster']['metadata']['name']}-head-svc:8265" in text


def test_what_the_cluster_on_kubernetes_names_is_defined(kuberay):
    cluster, job = kuberay["RayCluster"], kuberay["Job"]["spec"]["template"]["spec"]
    head = cluster["spec"]["headGroupSpec"]
    pods = [head["template"]["spec"], *(w["template"]["spec"] for w in cluster["spec"]["workerGroupSpecs"])]
    text = (CLUSTER / "kuberay.yaml").read_text()
    secret = re.search(r"kubectl create secret generic (\S+) --from-literal=(\w+)=", text).groups()
    for pod in [*pods, job]:
        (container,) = pod["containers"]
        variables = {each["name"]: each for each in container["env"]}
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        assert tuple(variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"].values()) == secret
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        assert {mount["name"] for mount in container.get("volumeMounts", ())} == volumes
    claims = {v["persistentVolumeClaim"]["claimName"] for v in pods[0]["volumes"] if "persistentVolumeClaim" in v}
    assert claims == {kuberay["PersistentVolumeClaim"]["metadata"]["name"]}
    # Every machine has the index and a folder for shares where the command says that they are.
    words = commands_in(job["containers"][0]["args"][0])[2]
    mounts = {mount["mountPath"] for mount in pods[0]["containers"][0]["volumeMounts"]}
    assert {words[words.index("--data") + 1], str(Path(words[3]).parent)} == mounts
    (port,) = kuberay["Service"]["spec"]["ports"]
    assert words[words.index("--serve") + 1] == f"--port {port['port']}"
    assert kuberay["Service"]["spec"]["selector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    # Without TLS between pods, others are kept away from them.
    policy = kuberay["NetworkPolicy"]["spec"]
    assert "--insecure-network" in words
    assert policy["podSelector"]["matchLabels"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    ready = [source for rule in policy["ingress"] if "ports" not in rule for source in rule["from"]]
    assert all("podSelector" in source and "namespaceSelector" not in source for source in ready)
    assert kuberay["Job"]["metadata"]["name"] in json.dumps(policy["ingress"])


def test_the_image_of_a_cluster_has_the_ray_that_is_tested(kuberay):
    text = (CLUSTER / "Dockerfile").read_text()
    (version,) = re.findall(r'"ray\[default\]==([\d.]+)"', text)
    assert f"ray=={version}\n" in (ROOT / "constraints.txt").read_text()
    assert kuberay["RayCluster"]["spec"]["rayVersion"] == version
    image = re.search(r"docker build -f examples/cluster/Dockerfile -t (\S+)", text)[1]
    assert kuberay["Job"]["spec"]["template"]["spec"]["containers"][0]["image"] == image
    assert "FROM hybridindex\n" in text
