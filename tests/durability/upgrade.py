"""``upgrade.py STORE SCRIPTS``: brings a control store to the version of other migrations than the released ones."""

from __future__ import annotations

import sys
from pathlib import Path

from hybridindex.store.engine import locate
from hybridindex.store.migrate import upgrade_store

if __name__ == "__main__":
    print(upgrade_store(locate(sys.argv[1]), busy_timeout_s=5, scripts=Path(sys.argv[2])))
