"""``python -m hybridindex``."""

from hybridindex.cli.main import run

run()
