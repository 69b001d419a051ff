"""A file that is cut while it is mapped: the process lives and names it, and no answer comes from what is gone."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.clustered import clustered, small_index

#: argv: index directory, file of queries. Threads search while the file is cut to half and restored.
_SEARCHES = """
import os, sys, threading
import numpy as np
import hybridindex as hx
from hybridindex.errors import DamagedListsError

queries = np.load(sys.argv[2])
file = sys.argv[1] + "/gen-000001/lists.bin"
good = open(file, "rb").read()
with hx.open(sys.argv[1]) as index, index.router(scrub_bytes_per_s=0, **eval(sys.argv[3])) as router:
    expected = [router.search(query, 5, 4) for query in queries]
    failed, wrong, done, cut = [], [], threading.Event(), threading.Event()

    def search():
        while not done.is_set():
            for query, right in zip(queries, expected):
                try:
                    found = router.search(query, 5, 4)
                    if not np.array_equal(found.ids, right.ids):
                        wrong.append((found, right))
                except DamagedListsError as error:
                    failed.append(error)
                    cut.set()

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    # At a page's end: what lies behind the end in its page is no fault, and seen by the scrub alone.
    os.truncate(file, len(good) // 2 // 4096 * 4096)
    assert cut.wait(300)
    report = router.scrub()
    assert 0 < len(report.quarantined) < 32, report
    with open(file, "r+b") as out:
        out.write(good)
    assert router.scrub().ok
    done.set()
    for thread in threads:
        thread.join()
    assert failed and not wrong, wrong[:1]
    for query, right in zip(queries, expected):
        assert np.array_equal(router.search(query, 5, 4).ids, right.ids)
print("lives")
"""

#: Another mapping of the process is cut.
_FOREIGN = """
import mmap, os, sys
import hybridindex as hx
with hx.open(sys.argv[1]) as index, index.router() as router:
    with open(sys.argv[1] + "/other", "w+b") as file:
        file.write(bytes(8192))
        file.flush()
        view = mmap.mmap(file.fileno(), 8192, prot=mmap.PROT_READ)
        os.truncate(file.fileno(), 0)
        print("reads", flush=True)
        view[5000]
"""


def run(script, *given, flags=()):
    command = [sys.executable, *flags, "-c", script, *map(str, given)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("codec", ["flat", "pq8"])
def test_searches_go_on_and_none_answers_from_what_is_gone(tmp_path, codec):
    import numpy as np

    small_index(tmp_path / "i", codec=codec, n=20_000).close()
    np.save(tmp_path / "q.npy", clustered(40, seed=8))
    done = run(_SEARCHES, tmp_path / "i", tmp_path / "q.npy", "{}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "lives\n"
    assert f"hybridindex: {tmp_path / 'i'}/gen-000001/lists.bin was cut while it is served" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("flags", [(), ("-X", "faulthandler")], ids=["plain", "faulthandler"])
def test_another_fault_is_not_ours(tmp_path, flags):
    small_index(tmp_path / "i").close()
    done = run(_FOREIGN, tmp_path / "i", flags=flags)
    assert done.stdout == "reads\n"
    assert done.returncode == -signal.SIGBUS
    assert ("Fatal Python error: Bus error" in done.stderr) == bool(flags)
