"""docs/metrics.md, made from what a daemon and a node answer. ``python -m tests.service.metrics_reference``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

import hybridindex as hx
from hybridindex.cluster.node_process import NodeProcess, NodeSpec
from hybridindex.service.auth import new_key
from tests.clustered import clustered

__all__ = ["reference"]

_HEAD = """# Metrics

`GET /metrics` of a [daemon](service.md) answers these metrics in Prometheus's text format. With several indexes each
value has the label `index`. Histograms have `_bucket`, `_sum`, `_count`. [alerts.yml](../examples/alerts.yml) has alert
rules, and [grafana.json](../examples/grafana.json) a dashboard.

"""
_NODES = """
## Nodes of a cluster

In addition to those above ([several machines](cluster.md#operations)):

"""
_TABLE = "| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n"


def reference() -> str:
    """The whole file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "idx"
        with hx.build(clustered(2000, seed=1), path, nlist=16, metric="l2", nprobe=4) as index:
            profile = index.profile(clustered(200, seed=2), 4, devices=0, max_seconds=1)
            index.apply_plan(index.plan(50, 16 << 20, profile, coverage=0.3))
        one = _of_daemon(path)
        cluster = _of_node(path, Path(folder) / "node")
    own = [row for name, row in cluster.items() if name not in one]
    return _HEAD + _TABLE + "".join(one.values()) + _NODES + _TABLE + "".join(own)


def _of_daemon(path: Path) -> dict[str, str]:
    words = [sys.executable, "-m", "hybridindex", "serve", str(path), "--device", "cpu", "--refresh"]
    words += ["--port", "0", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as daemon:
        try:
            assert daemon.stdout is not None
            url = json.loads(daemon.stdout.readline())["urls"][0]
            _post(f"{url}/v1/search", {"queries": clustered(1, seed=1).tolist()})
            _post(f"{url}/v1/vectors/delete", {})  # refused
            return _rows(url)
        finally:
            daemon.terminate()


def _of_node(path: Path, folder: Path) -> dict[str, str]:
    key = new_key()
    process = NodeProcess(NodeSpec(name="a", index=str(path), data=str(folder), memory_bytes=1 << 30, key=key))
    try:
        return _rows(process.url, key)
    finally:
        process.close()


def _post(url: str, body: Any) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=30).close()
    except urllib.error.HTTPError as refused:
        refused.close()


def _rows(url: str, key: str = "") -> dict[str, str]:
    """Name -> its row."""
    request = urllib.request.Request(f"{url}/metrics", headers={"authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("hybridindex_") or family.name.endswith("_created"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        # Labels of what has not happened are not told: those of nodes that are not there.
        if family.name.startswith("hybridindex_node_"):
            labels = ["node"]
        shown = ", ".join(f"`{label}`" for label in labels)
        found[name] = f"| `{name}` | {family.type} | {shown} | {family.documentation} |\n"
    return found


if __name__ == "__main__":
    sys.stdout.write(reference())
