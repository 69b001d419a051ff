"""The Helm chart as helm renders it: Kubernetes takes it, and GPU memory is taken in order. By ``make recipes``."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.packaging.test_examples import parses

CHART = Path(__file__).parents[2] / "examples/helm"
HELM, VALIDATE = shutil.which("helm"), shutil.which("kubernetes-validate")

pytestmark = pytest.mark.skipif(HELM is None or VALIDATE is None, reason="make recipes installs helm for it")

_HOST_ALONE = ("gpu.enabled=false", "llm.enabled=false")
_WITH_PLAN = ("plan.enabled=true", "llm.modelsClaim=weights", "plan.llm=7")


def helm(word, *values):
    options = [option for value in values for option in ("--set", value)]
    name = ["rag"] if word == "template" else []
    kind = ["--kube-version", "1.34.0"] if word == "template" else ["--strict"]
    command = [HELM, word, *name, str(CHART), *kind, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def rendered(*values):
    """Kind -> object."""
    done = helm("template", *values)
    assert done.returncode == 0, done.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout) if each}


def containers(deployment):
    """Of the pod, in the order in which they start."""
    pod = deployment["spec"]["template"]["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_helm_finds_nothing_to_complain_about():
    done = helm("lint")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("values", [(), _HOST_ALONE, _WITH_PLAN, ("networkPolicy.clientLabel=",)])
def test_kubernetes_takes_it(values, tmp_path):
    file = tmp_path / "all.yaml"
    file.write_text(helm("template", *values).stdout)
    words = [VALIDATE, "--kubernetes-version", "1.34", "--strict", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", [(), _HOST_ALONE, _WITH_PLAN])
def test_its_commands_parse(values):
    own = [each for each in containers(rendered(*values)["Deployment"]) if each["name"] != "llm"]
    assert [parses(each["args"]) for each in own] == (["plan", "apply", "serve"] if values == _WITH_PLAN else ["serve"])


def test_the_index_starts_when_the_plan_is_applied_and_vllm_answers():
    found = rendered(*_WITH_PLAN)
    each = containers(found["Deployment"])
    assert [one["name"] for one in each] == ["plan", "apply", "llm", "index"]
    plan, apply, llm, index = each
    # Plans are for the machine that was measured, with its GPU.
    assert plan["resources"]["claims"] == apply["resources"]["claims"] == [{"name": "gpu"}]
    # A container that stays lets the next one begin once its startup probe has succeeded.
    assert llm["restartPolicy"] == "Always"
    assert llm["startupProbe"]["httpGet"]["path"] == "/health"
    assert llm["resources"]["claims"] == index["resources"]["claims"] == [{"name": "gpu"}]
    pod = found["Deployment"]["spec"]["template"]["spec"]
    template = pod["resourceClaims"][0]["resourceClaimTemplateName"]
    assert template == found["ResourceClaimTemplate"]["metadata"]["name"]
    mounts = {mount["name"] for one in each for mount in one["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_without_a_gpu_nothing_of_one_is_asked_for():
    found = rendered(*_HOST_ALONE, "plan.enabled=true")
    assert "ResourceClaimTemplate" not in found
    (index,) = containers(found["Deployment"])
    assert "claims" not in index["resources"]
    assert "--device=cuda:0" not in index["args"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("gpu.enabled=false", "llm.enabled needs gpu.enabled"),
        ("llm.gpuMemoryUtilization=85", "gpuMemoryUtilization"),
        ("image.repositry=x", "repositry"),
        ("data.index=/abs", "index"),
        ("plan.budget=much", "budget"),
    ],
)
def test_a_wrong_value_is_named(value, said):
    done = helm("template", value)
    assert done.returncode != 0
    assert said in done.stderr
