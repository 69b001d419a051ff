"""The page: how its files are served, and what a real browser makes of a real daemon."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from hybridindex.service.http.page.files import PAGE_FILES, PAGE_PATHS
from tests.service.conftest import ask

_ELSEWHERE = re.compile(rb"""(?:src|href|url|fetch|import|from)\s*[=(]?\s*["'(]\s*(?:https?:)?//""")


@pytest.mark.parametrize("file", PAGE_FILES, ids=lambda file: file.name)
def test_every_file_is_served_with_its_headers_and_asked_for_anew(service, file):
    answer = ask(service, "GET", file.path)
    assert answer.status_code == 200
    assert answer.content == files("hybridindex.service.http.page").joinpath(file.name).read_bytes() != b""
    assert answer.headers["content-type"] == file.media_type
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == policy["script-src"] == policy["style-src"] == "'self'"
    etag = answer.headers["etag"]
    for shown in (etag, f'"old", W/{etag}', "*"):
        again = ask(service, "GET", file.path, headers={"if-none-match": shown})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert ask(service, "GET", file.path, headers={"if-none-match": '"old"'}).status_code == 200
    assert ask(service, "HEAD", file.path).status_code == 200
    assert ask(service, "POST", file.path).status_code == 405


def test_the_bundle_is_small_whole_and_names_nothing_elsewhere():
    assert sum(len(file.body) for file in PAGE_FILES) < 62_000
    assert len({file.etag for file in PAGE_FILES}) == len(PAGE_FILES)
    folder = files("hybridindex.service.http.page")
    static = {entry.name for entry in folder.iterdir() if entry.name.rpartition(".")[2] in ("html", "css", "js", "svg")}
    assert static == {file.name for file in PAGE_FILES}
    for file in PAGE_FILES:
        assert not _ELSEWHERE.search(file.body), file.name
        # The policy would refuse these, and somebody would wonder why.
        assert not re.search(rb"<style|\sstyle=|\son[a-z]+=|innerHTML|eval\(|localStorage", file.body), file.name
    assert "/" in PAGE_PATHS


def test_a_page_of_another_site_changes_nothing(service):
    for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "http://evil.example"}):
        for path in ("/v1/repartition", "/v1/drain", "/v1/sessions", "/v1/search"):
            answer = ask(service, "POST", path, json={"apply": True}, headers=headers)
            assert answer.status_code == 403, path
            assert answer.json()["type"] == "urn:hybridindex:problem:cross-site"
    assert service.ready
    assert len(service.store.list_plans()) == 1
