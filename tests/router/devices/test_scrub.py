"""The scrub: damage that comes while an index serves is seen in one pass. From then on no answer comes from it:
searches of it fail, others are answered, and good bytes from elsewhere take its place."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil

import faiss
import numpy as np
import pytest

from hybridindex.errors import CorruptIndexError, DamagedListsError, InvalidInputError, RouterClosedError
from hybridindex.index import open_index
from hybridindex.index.faiss_files.export_faiss import to_faiss
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.other_generations import OtherGenerations
from hybridindex.index.rewrite import write_layout
from hybridindex.index.storage import mapped_lists
from hybridindex.router import Router
from hybridindex.router.devices import scrub
from hybridindex.tiers.paged.arena import PageArena
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.oracle import check_answer
from tests.router.slow_copies import until
from tests.stuck import Stuck

K, NPROBE = 5, 4
QUERIES = clustered(60, seed=5)
FAST_SCAN = faiss.SearchParametersIVF(nprobe=NPROBE)


@pytest.fixture(autouse=True)
def _damage_is_logged(caplog):
    caplog.set_level(logging.CRITICAL, logger="hybridindex")


class Served:
    """An index that is served and damaged, and a copy of it that stays whole."""

    def __init__(self, path, *, verify="full", table=True, **options) -> None:
        small_index(path, **options).close()
        shutil.copytree(path, path.parent / "whole")
        self.folder = path / "gen-000001"
        if not table:
            (self.folder / "lists.xxh3.npy").unlink()
        self.index: IVFIndex = open_index(path, verify=verify)
        self.whole: IVFIndex = open_index(path.parent / "whole")
        self.file = self.folder / "lists.bin"
        self.good = self.file.read_bytes()
        self.probes, _ = self.index.quantize(self.index.transform(QUERIES), NPROBE)

    def flip(self, list_id: int, part: int, *, every: int = 1) -> None:
        """Turns bytes of a list's codes (0) or ids (1)."""
        start, stop = self.index.integrity.spans[list_id, part].tolist()
        with self.file.open("r+b") as file:
            for at in range(start, stop, every):
                file.seek(at)
                file.write(bytes([self.good[at] ^ 0xFF]))

    def restore(self) -> None:
        with self.file.open("r+b") as file:
            file.write(self.good)

    def hottest(self) -> int:
        return int(np.bincount(self.probes.reshape(-1), minlength=NLIST).argmax())

    def check(self, router: Router, damaged=()) -> int:
        """Every query alone: exact, or refused because it probes one of ``damaged``; how many were refused."""
        n_refused = 0
        for row, query in enumerate(QUERIES):
            needed = np.intersect1d(self.probes[row], damaged).tolist()
            if needed:
                with pytest.raises(DamagedListsError) as refused:
                    router.search(query, K, NPROBE)
                assert list(refused.value.lists) == needed
                assert "gen-000001" in str(refused.value)
                n_refused += 1
            else:
                self.check_row(row, router.search(query, K, NPROBE))
        return n_refused

    def check_row(self, row: int, found) -> None:
        """The exact answer to one query."""
        one = slice(row, row + 1)
        own = self.whole.transform(QUERIES[one])
        check_answer(self.whole, own, self.probes[one], K, found.distances, found.ids)

    def close(self) -> None:
        self.index.close()
        self.whole.close()


@pytest.fixture
def serve(tmp_path):
    opened = []

    def make(**options) -> Served:
        opened.append(Served(tmp_path / "i", **options))
        return opened[-1]

    yield make
    for served in opened:
        served.close()


def quiet(served, **options) -> Router:
    """A router whose scrub reads when it is told to."""
    return Router(served.index, scrub_bytes_per_s=0, **options)


@pytest.mark.parametrize("part", [0, 1], ids=["codes", "ids"])
@pytest.mark.parametrize(
    ("codec", "scanner"), [("flat", "native"), ("sq8", "native"), ("bf16", "faiss"), ("pq8", "auto"), ("pqfs8", "auto")]
)
def test_a_flipped_list_is_refused_after_one_pass_and_served_when_restored(serve, codec, scanner, part):
    served = serve(codec=codec)
    with quiet(served, host_scanner=scanner) as router:
        assert router.scrub().ok
        assert served.check(router) == 0
        damaged = served.hottest()
        served.flip(damaged, part)
        # What scans compute from it meanwhile must not stay.
        router.search(QUERIES, K, NPROBE)
        report = router.scrub()
        assert (report.quarantined, report.found, report.mended) == ((damaged,), 1, ())
        assert not report.ok
        assert 0 < served.check(router, [damaged]) < len(QUERIES)
        assert router.scrub().found == 1
        served.restore()
        assert router.scrub().ok
        assert served.check(router) == 0


@pytest.mark.parametrize("codec", ["sq8", "pq8"])
def test_scans_keep_nothing_that_they_computed_from_damaged_bytes(serve, codec):
    served = serve(codec=codec, metric="l2")
    start, stop = served.index.integrity.spans[served.hottest(), 0].tolist()
    with quiet(served, warm_bytes=0) as router:
        with served.file.open("r+b") as file:
            file.seek(start)
            file.write(b"\xff" * (stop - start))  # rows that are much longer
        router.search(QUERIES, K, NPROBE)
        assert not router.scrub().ok
        served.restore()
        assert router.scrub().ok
        assert served.check(router) == 0


def test_others_in_the_batch_are_answered(serve):
    served = serve()
    with quiet(served) as router:
        served.flip(served.hottest(), 0)
        router.scrub()
        answers = [router.submit(query, K, NPROBE) for query in QUERIES]
        failed = [isinstance(answer.exception(), DamagedListsError) for answer in answers]
        assert failed == (served.probes == served.hottest()).any(axis=1).tolist()
        assert any(failed)
        assert not all(failed)
        # One request fails as a whole.
        with pytest.raises(DamagedListsError):
            router.search(QUERIES, K, NPROBE)


def test_padding_is_nobodys_damage(serve):
    served = serve(codec="sq8")
    with quiet(served) as router:
        router.scrub()
        spans = served.index.integrity.spans
        gaps = np.flatnonzero(spans[:-1, 1, 1] < spans[1:, 0, 0])
        with served.file.open("r+b") as file:
            file.seek(int(spans[gaps[0], 1, 1]))
            file.write(b"\xff")
        assert router.scrub().ok
        assert router.scrub().ok


def test_a_batch_that_was_reading_is_searched_again(serve):
    served = serve()
    damaged = served.hottest()
    # Nothing leaves before the scan has ended.
    with quiet(served, early_dispatch=False) as router:
        scan = router._served.host.scan_checked
        scans = []

        def flips_meanwhile(*given, **options):
            found = scan(*given, **options)
            if not scans:
                scans.append(served.flip(damaged, 1))
                router._served.scrub.check()  # not a callback's business
                found[1][:] = 7
            return found

        router._served.host.scan_checked = flips_meanwhile
        probed, batches = [], []
        told = {"on_probes": probed.append, "on_batch": batches.append}
        with (
            router._served.engine._turn.of_engine()
        ):  # one batch: what comes later is refused before it is told its lists
            answers = [router.submit(query, K, NPROBE, **told) for query in QUERIES]
        for row, answer in enumerate(answers):
            if damaged in served.probes[row]:
                with pytest.raises(DamagedListsError):
                    answer.result(300)
            else:
                served.check_row(row, answer.result(300))
        assert scans == [None]
        # Once, though some were searched again.
        assert len(probed) == len(QUERIES)
        assert router.stats().requests == router.stats().queries == len(QUERIES)
    n_refused = int((served.probes == damaged).any(axis=1).sum())
    assert len(QUERIES) - n_refused <= len(batches) <= len(QUERIES)


@pytest.mark.parametrize("codec", ["flat", "pq8", "pqfs8"])
def test_codes_come_from_a_device_that_holds_them(serve, codec):
    served = serve(codec=codec, metric="l2")
    damaged = served.hottest()
    plan = hand_made_plan(served.index, np.where(np.arange(NLIST) == damaged, 0, -1))
    with quiet(served, plan=plan, devices=["cpu"]) as router:
        served.flip(damaged, 0)
        report = router.scrub()
        assert (report.quarantined, report.mended) == ((), (damaged,))
        assert not report.ok
        assert served.check(router) == 0
        # The bytes at the list's place, with devices or without.
        with quiet(served) as host:
            assert served.check(host) == 0
        # Neighbours are still the file's; of short lists several lie in one page of memory.
        other = (damaged + (1 if codec == "flat" else NLIST // 2)) % NLIST
        served.flip(other, 0)
        assert router.scrub().quarantined == (other,)
        assert served.check(router, [other]) > 0
        served.restore()
        assert router.scrub().ok
        assert served.check(router) == 0


@pytest.mark.parametrize("codec", ["flat", "bf16"])
def test_a_cut_file_takes_what_mended_a_list_along(serve, codec):
    """The handler of the fault puts zeros in the place of all that follows, mended or not."""
    served = serve(codec=codec)
    spans = served.index.integrity.spans
    damaged = NLIST // 2 + int(np.bincount(served.probes.reshape(-1), minlength=NLIST)[NLIST // 2 :].argmax())
    plan = hand_made_plan(served.index, np.where(np.arange(NLIST) == damaged, 0, -1))
    with quiet(served, plan=plan, devices=["cpu"], host_scanner="faiss" if codec == "bf16" else "auto") as router:
        served.flip(damaged, 0)
        assert router.scrub().mended == (damaged,)
        # No copy is left, and lists before it are cut, too.
        router._served.residency.publish({}, drops=[damaged])
        os.truncate(served.file, int(spans[damaged // 2, 0, 0]) // 4096 * 4096)
        n_refused = 0
        for row, query in enumerate(QUERIES):
            try:
                served.check_row(row, router.search(query, K, NPROBE))
            except DamagedListsError:
                n_refused += 1
        assert n_refused
        assert damaged in router.scrub().quarantined
        assert router.damage.mended == ()
        served.file.write_bytes(served.good)
        assert router.scrub().ok
        assert served.check(router) == 0


def test_lists_of_a_cut_file_come_from_another_generation(tmp_path):
    whole = Served(tmp_path / "i")
    again = small_index(tmp_path / "i", replace=True)
    try:
        with quiet(whole) as router:
            half = len(whole.good) // 2 // 4096 * 4096
            os.truncate(whole.file, half)
            for query in QUERIES:  # a scan finds it
                with contextlib.suppress(DamagedListsError):
                    router.search(query, K, NPROBE)
            assert router.damage.quarantined
            report = router.scrub()
            assert (report.quarantined, len(report.mended) > 1) == ((), True)
            assert whole.check(router) == 0
    finally:
        again.close()
        whole.close()


def test_a_slow_scrub_keeps_nobody_waiting(serve, monkeypatch):
    monkeypatch.setattr(scrub, "_FIRST_S", 0.0)
    monkeypatch.setattr(scrub, "_LOOK_S", 0.01)
    served = serve()
    # A pass of hours; meanwhile another one is asked for, and a damaged file is looked at.
    with Router(served.index, scrub_bytes_per_s=1) as router:
        until(lambda: router.damage.nbytes > 0)
        assert router.scrub().passes == 1
        served.flip(served.hottest(), 0)
        assert router.scrub().quarantined == (served.hottest(),)
        served.restore()
        assert router.scrub().ok


def test_ids_are_on_the_host_alone(serve):
    served = serve()
    damaged = served.hottest()
    plan = hand_made_plan(served.index, np.where(np.arange(NLIST) == damaged, 0, -1))
    with quiet(served, plan=plan, devices=["cpu"]) as router:
        served.flip(damaged, 1)
        assert router.scrub().quarantined == (damaged,)
        assert served.check(router, [damaged]) > 0


@pytest.mark.parametrize("codec", ["flat", "pq8", "pqfs8"])
def test_codes_come_from_page_locked_memory(serve, codec):
    served = serve(codec=codec, metric="l2")
    plan = hand_made_plan(served.index, np.full(NLIST, -1))
    options = {"devices": ["cpu"], "device_budget_bytes": 8 << 20, "pin_host_lists": 64 << 20}
    with quiet(served, plan=plan, **options) as router:
        damaged = served.hottest()
        assert damaged in router.page_locked_lists
        served.flip(damaged, 0)
        assert router.scrub().mended == (damaged,)
        assert served.check(router) == 0


def test_a_device_is_not_read_where_nearer_bytes_are_good(serve):
    served = serve()
    damaged = served.hottest()
    plan = hand_made_plan(served.index, np.where(np.arange(NLIST) == damaged, 0, -1))
    with quiet(served, plan=plan, devices=["cpu"]) as router:
        copies = router._served.scrub._copies
        start, stop = served.index.integrity.spans[damaged, 0].tolist()
        copies._pinned_codes = lambda _: np.frombuffer(served.good[start:stop], dtype=np.uint8)
        router.devices[0].read_back = None
        served.flip(damaged, 0)
        assert copies.find(damaged, 0) == ("page-locked memory", served.good[start:stop])


@pytest.mark.parametrize("codec", ["flat", "pq8", "pqfs8"])
def test_a_damaged_copy_on_a_device_is_dropped_and_the_host_scans(serve, codec):
    served = serve(codec=codec, metric="l2")
    damaged = served.hottest()
    plan = hand_made_plan(served.index, np.full(NLIST, 0))
    with quiet(served, plan=plan, devices=["cpu"]) as router:
        assert router.scrub().ok
        [tier] = router.devices
        tier.arena.data[int(router.residency.list_pages[damaged][0])] ^= 255
        report = router.scrub()
        assert (report.found, report.ok) == (1, True)
        assert router.residency.list_device[damaged] == -1
        assert served.check(router) == 0
        assert router.scrub().found == 1


def test_a_damaged_list_goes_to_no_device(serve):
    served = serve()
    damaged = served.hottest()
    with quiet(served, devices=["cpu"], device_budget_bytes=8 << 20) as router:
        served.flip(damaged, 0)
        router.scrub()
        router.apply_plan(hand_made_plan(served.index, np.full(NLIST, 0)), force=True)
        assert router.residency.list_device[damaged] == -1
        assert router.residency.n_resident > 0
        assert served.check(router, [damaged]) > 0


def test_a_load_that_read_while_damage_was_found_is_not_published(serve):
    served = serve()
    damaged = served.hottest()
    with quiet(served, devices=["cpu"], device_budget_bytes=8 << 20) as router, Stuck(PageArena, "write") as write:
        [tier] = router.devices
        loading = tier.load([damaged], router._served.residency)
        assert write.begun.wait(300)
        served.flip(damaged, 0)
        assert not router.scrub().ok
        served.restore()
        assert router.scrub().ok
        write.go_on.set()
        assert loading.result(300).skipped == (damaged,)
        assert router.residency.n_resident == 0
        router.check_invariants()


def test_lists_that_are_restored_before_others_are_served_before_them(serve):
    served = serve()
    first = served.hottest()
    second = (first + 5) % NLIST
    with quiet(served) as router:
        served.flip(first, 0)
        served.flip(second, 1)
        assert router.scrub().quarantined == tuple(sorted((first, second)))
        start, stop = served.index.integrity.spans[first, 0].tolist()
        with served.file.open("r+b") as file:
            file.seek(start)
            file.write(served.good[start:stop])
        report = router.scrub()
        assert (report.quarantined, report.mended) == ((second,), ())
        assert served.check(router, [second]) > 0


def test_equal_lists_of_another_generation_are_used(tmp_path):
    rows = clustered(3000)
    whole = Served(tmp_path / "i")
    again = small_index(tmp_path / "i", replace=True)
    try:
        damaged = whole.hottest()
        assert rows.shape[0] == again.count
        for part in (0, 1):
            whole.flip(damaged, part)
        with quiet(whole) as router:
            assert router.scrub().mended == (damaged,)
            assert whole.check(router) == 0
    finally:
        again.close()
        whole.close()


def test_a_generation_that_could_not_be_read_once_is_read_again(tmp_path):
    served = Served(tmp_path / "i")
    again = small_index(tmp_path / "i", replace=True)
    others, manifest = OtherGenerations(served.index.integrity), tmp_path / "i" / "gen-000002" / "manifest.json"
    try:
        content = manifest.read_bytes()
        manifest.write_bytes(b"{")
        assert others.find(3, 0) is None
        manifest.write_bytes(content)
        found = others.find(3, 0)
        assert found is not None
        assert found[0] == "gen-000002"
    finally:
        again.close()
        served.close()


def test_a_closed_router_scrubs_nothing(serve):
    router = quiet(serve())
    router.close()
    with pytest.raises(RouterClosedError):
        router.scrub()


def test_without_digests_of_lists_the_first_pass_makes_them(serve):
    served = serve(verify="quick", table=False)
    with quiet(served) as router:
        assert served.index.integrity.digests is None
        assert router.scrub().ok
        assert np.array_equal(served.index.integrity.digests, served.whole.integrity.digests)
        served.flip(served.hottest(), 0)
        assert router.scrub().quarantined == (served.hottest(),)


def test_without_digests_of_lists_a_damaged_file_answers_nothing(serve):
    served = serve(verify="quick", table=False)
    with quiet(served) as router:
        served.flip(served.hottest(), 0)
        report = router.scrub()
        assert report.unknown
        assert served.check(router, range(NLIST)) == len(QUERIES)
        served.restore()
        report = router.scrub()
        assert (report.ok, report.unknown) == (True, False)
        assert served.check(router) == 0


def test_another_file_of_the_name_mends_what_is_damaged(serve, tmp_path):
    served = serve()
    with quiet(served) as router:
        damaged = served.hottest()
        served.flip(damaged, 1)
        assert router.scrub().quarantined == (damaged,)
        (tmp_path / "copy").write_bytes(served.good)
        os.replace(tmp_path / "copy", served.file)
        report = router.scrub()
        assert (report.quarantined, report.mended) == ((), (damaged,))
        assert served.check(router) == 0


def test_bytes_that_cannot_be_read_are_damaged(serve, monkeypatch):
    served = serve()
    with quiet(served) as router:
        damaged = served.hottest()
        start, stop = served.index.integrity.spans[damaged, 0].tolist()
        readable = mapped_lists.MappedLists.readable
        reads = mapped_lists.MappedLists.read_file

        def fails(self, first, last):
            return (last <= start or first >= stop) and readable(self, first, last)

        def raises(self, first, last):
            if first < stop and last > start:
                raise OSError(errno.EIO, "Input/output error")
            return reads(self, first, last)

        monkeypatch.setattr(mapped_lists.MappedLists, "readable", fails)
        monkeypatch.setattr(mapped_lists.MappedLists, "read_file", raises)
        assert router.scrub().quarantined == (damaged,)
        assert served.check(router, [damaged]) > 0
        monkeypatch.undo()
        assert router.scrub().ok


def test_the_thread_finds_damage_by_itself_and_ends_with_the_router(serve, monkeypatch):
    monkeypatch.setattr(scrub, "_FIRST_S", 0.0)
    monkeypatch.setattr(scrub, "_LEAST_PASS_S", 0.0)
    served = serve()
    with Router(served.index, scrub_bytes_per_s=1 << 30) as router:
        until(lambda: router.damage.passes > 0)
        served.flip(served.hottest(), 0)
        until(lambda: router.damage.quarantined == (served.hottest(),))
        assert served.check(router, [served.hottest()]) > 0
        served.restore()
        until(lambda: router.damage.ok)
        assert served.check(router) == 0
    # However slow it is.
    with Router(served.index, scrub_bytes_per_s=1):
        pass


def test_the_rate_is_checked(serve):
    served = serve()
    with pytest.raises(InvalidInputError, match="scrub_bytes_per_s is -1"):
        Router(served.index, scrub_bytes_per_s=-1)


@pytest.fixture(params=["faiss", "blocks16"])
def copy(request, tmp_path):
    """``copy(index, progress)``; nothing of it may be left at the end."""

    def make(index, progress=None) -> None:
        if request.param == "faiss":
            to_faiss(index, tmp_path / "copy", progress=progress)
        else:
            write_layout(index, tmp_path / "copy", "blocks16", progress=progress)

    yield make
    assert not list(tmp_path.glob("copy/gen-*"))
    assert not (tmp_path / "copy").is_file()


def test_no_copy_is_made_of_damaged_lists(serve, copy):
    served = serve()
    with quiet(served) as router:
        served.flip(served.hottest(), 0)
        router.scrub()
        with pytest.raises(CorruptIndexError, match=rf"list {served.hottest()}\b"):
            copy(served.index)


def test_no_copy_is_made_of_a_file_that_is_cut_meanwhile(serve, copy):
    served = serve()
    with pytest.raises(CorruptIndexError, match="restore the file"):
        copy(served.index, lambda *_: os.truncate(served.file, 4096))
