"""axe finds nothing on the page of a daemon, and nothing in a report, in the light and in the dark, on wide and on
narrow screens; and nothing sticks out to the side.

Skipped where there is no chromium or no Playwright (``make chromium`` installs the former where it can).
"""

from __future__ import annotations

import json
from importlib import resources

import pytest

from tests.report.conftest import bare_plan, bare_profile, full_plan, full_profile, full_report  # noqa: F401
from tests.service.http.test_page_browser import CHROMIUM, browser, serving, wait_for_state  # noqa: F401

axe = pytest.importorskip("axe_playwright_python", reason="the Python package axe-playwright-python is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the page with")
LOOKS = [(scheme, width) for scheme in ("light", "dark") for width in (1200, 400)]


def found_by_axe(page):
    """Rule and element of each violation."""
    page.evaluate(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text())
    violations = page.evaluate("axe.run()")["violations"]
    return [(rule["id"], node["html"]) for rule in violations for node in rule["nodes"]]


def looked_at(browser, url, scheme, width, until):  # noqa: F811
    """What is wrong with a page."""
    # Scripts of tests are none that the page would run.
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True)
    try:
        page = context.new_page()
        page.goto(url)
        until(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        return found_by_axe(page)
    finally:
        context.close()


@pytest.mark.timeout(300)
def test_the_page_of_a_daemon(browser, serving):  # noqa: F811
    with serving("--device", "cpu", "--refresh") as (_, [url]):
        for look in LOOKS:
            found = looked_at(browser, url, *look, lambda page: wait_for_state(page, "live"))
            assert found == [], json.dumps(found, indent=1)


@pytest.mark.timeout(300)
def test_a_report(browser, full_report):  # noqa: F811
    for look in LOOKS:
        found = looked_at(browser, full_report.html.as_uri(), *look, lambda _page: None)
        assert found == [], json.dumps(found, indent=1)


@pytest.mark.timeout(300)
def test_what_is_wrong_is_found(browser, tmp_path):  # noqa: F811
    (tmp_path / "page.html").write_text("<html><body><img src='x.png'><button></button></body></html>")
    found = looked_at(browser, (tmp_path / "page.html").as_uri(), "light", 1200, lambda _page: None)
    assert {"image-alt", "button-name", "html-has-lang"} <= {rule for rule, _ in found}
