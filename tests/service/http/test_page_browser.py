"""The page in a real browser, over a real daemon: charts fill, a plan is tried and applied, nothing leaves the origin.

Skipped where there is no chromium or no Playwright (``make chromium`` installs the former where it can).
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

import hybridindex as hx
from hybridindex.client import Client, RetryPolicy
from hybridindex.service.auth import KeyFile
from tests.cluster.test_repairs import started
from tests.clustered import clustered
from tests.router.slow_copies import until
from tests.service.changes.test_served_plan import forget_what_was_applied

sync_api = pytest.importorskip("playwright.sync_api", reason="the Python package playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the page with")
#: Longest wait for what a page shows in the end. Plans are made with the lowest priority: on a busy machine that takes
#: long.
SHOWN_MS = 120_000
#: A foreign name that points at this machine, as after DNS rebinding.
REBOUND = "rebound.example"
#: JavaScript: texts of charts that stick out of their picture.
TEXTS_OUTSIDE = """[...document.querySelectorAll('svg.chart text')].filter((text) => {
  const [own, frame] = [text, text.ownerSVGElement].map((e) => e.getBoundingClientRect());
  return own.left < frame.left - 1 || own.right > frame.right + 1 || own.bottom > frame.bottom + 1;
}).map((text) => text.textContent)"""


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        # Its sandbox needs rights that root in a container has not.
        arguments = [
            "--no-sandbox",
            f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1, MAP evil.example 127.0.0.1",
            # Not every browser keeps foreign pages from local addresses by itself; the daemon must.
            "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests",
        ]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """``open_page(url, **context)``: the page, with everything that it asked for and complained of."""
    contexts = []

    def open_(url, *, expected=(), **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.asked, page.complaints = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))

        def note(message):
            if message.type in ("error", "warning") and not any(word in message.text for word in expected):
                page.complaints.append(message.text)

        page.on("console", note)
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()


@pytest.fixture
def serving(launcher, index_path):
    """``serving(*words)``: a daemon over the planned index; its process, and its URLs."""

    def start(*words, port=0):
        return launcher.daemon(index_path, "--port", port, *words)

    return start


def client_of(url, **options):
    return Client(url, retry=RetryPolicy(attempts=30), **options)


def text_of(page, selector):
    return page.locator(selector).inner_text()


def wait_for_state(page, state):
    page.wait_for_selector(f"#connection[data-state={state}]", timeout=SHOWN_MS)


def csv_of(page, link):
    with page.expect_download() as saved:
        page.locator(link).first.click()
    return Path(saved.value.path()).read_text()


def test_charts_fill_while_searches_go_on_and_nothing_leaves_the_origin(serving, open_page, queries):
    with serving("--device", "cpu", "--refresh") as (_, [url]), client_of(url) as client:
        page = open_page(url)
        wait_for_state(page, "live")
        for chart in ("c-latency", "c-attainment", "c-hits"):
            host = page.locator(f"#{chart}")
            for _ in range(200):
                client.search(queries, 5)
                if host.locator("svg.chart path.s").count():
                    break
            # Drawn from searches, not only framed.
            assert "L" in host.locator("svg.chart path.s.a").get_attribute("d") or host.locator("b").first.inner_text()
        # Five kinds of bytes. Not ``wait_for_function``: it evaluates text in the page, whose policy forbids that.
        page.locator("#devices svg.chart path.fill").nth(4).wait_for(state="attached", timeout=SHOWN_MS)
        assert "pinned by the plan" in page.locator("#devices svg").get_attribute("aria-label")
        page.wait_for_selector("#c-tradeoff circle.chosen")
        page.wait_for_selector("#c-rate circle.chosen")
        plan = client.plan()["plan"]
        assert f"hit rate {plan['predicted_hit_rate'] * 100:.1f} %" in text_of(page, "#plan-words")
        assert f"Verdict: feasible: {plan['reason']}" in text_of(page, "#plan-words")
        assert "feasible, coverage" in text_of(page, "#tiles")
        assert "its times say nothing of a GPU" in text_of(page, "#stand-in")
        assert "State: stable" in text_of(page, "#drift-words")
        assert "No window has closed yet" in text_of(page, "#drift")
        assert "is the current one" in text_of(page, "#events")
        values = dict(row.split("\t")[:2] for row in text_of(page, "#values").splitlines() if "\t" in row)
        assert values["SLO"] == "50 ms"
        assert values["predicted hit rate"] == f"{plan['predicted_hit_rate'] * 100:.1f} %"
        assert values["device 0: free"].endswith("iB")
        # Usable without seeing: names for fields and pictures.
        assert page.evaluate("[...document.querySelectorAll('input, select')].every((e) => e.labels.length)")
        assert page.evaluate("[...document.querySelectorAll('svg.chart')].every((e) => e.ariaLabel.length > 20)")
        rows = csv_of(page, "#c-latency .csv a").splitlines()
        assert rows[0].startswith('"series",')
        assert {row.split(",")[0] for row in rows[1:]} == {'"p50"', '"p90"', '"p99"'}
        assert "pinned by the plan" in csv_of(page, "#devices .csv a")
        assert page.asked
        assert all(asked.startswith(f"{url}/") for asked in page.asked)
        assert page.complaints == []


def test_a_dry_run_moves_nothing_and_applying_asks_first(serving, open_page):
    with serving("--device", "cpu") as (_, [url]), client_of(url) as client:
        before = client.plan()
        page = open_page(url)
        wait_for_state(page, "live")
        assert page.locator("#apply").is_disabled()
        page.get_by_role("spinbutton", name="Coverage").fill("60")
        page.get_by_role("button", name="Dry run").click()
        page.wait_for_selector("#apply:enabled", timeout=SHOWN_MS)
        said = text_of(page, "#repartition-said")
        dry = client.repartition(coverage=0.6)
        assert "SLO of 50 ms" in said
        assert f"To move: {dry['lists_to_move']} list" in said
        assert dry["plan"]["reason"] in said
        for row in ("at an SLO of 50 ms", "meets it", "most requests within it", "lists on devices"):
            assert row in said
        assert client.plan() == before
        page.locator("#apply").click()
        page.get_by_role("button", name="Cancel").click()
        assert client.plan() == before
        # Another wish needs another dry run.
        page.get_by_role("spinbutton", name="Coverage").fill("58")
        assert page.locator("#apply").is_disabled()
        page.get_by_role("button", name="Dry run").click()
        page.wait_for_selector("#apply:enabled", timeout=SHOWN_MS)
        page.locator("#apply").click()
        page.get_by_role("button", name="Move lists").click()
        page.wait_for_selector("text=Applied as plan #", timeout=SHOWN_MS)
        after = client.plan()
        assert after["plan_id"] != before["plan_id"]
        assert after["plan"]["coverage"] == pytest.approx(0.58, abs=0.03)
        page.wait_for_selector(f"#events >> text=Plan #{after['plan_id']} is the current one", timeout=SHOWN_MS)
        # What cannot be met is said so, and may be tried all the same.
        page.get_by_role("spinbutton", name="Coverage").fill("")
        page.get_by_role("spinbutton", name="SLO").fill("40")
        page.get_by_role("button", name="Dry run").click()
        page.wait_for_selector("#repartition-said >> text=fixed by the plan in force", timeout=SHOWN_MS)
        page.get_by_role("checkbox", name="Solve").check()
        assert page.get_by_role("spinbutton", name="Coverage").is_disabled()
        page.get_by_role("spinbutton", name="Rate").fill("1000000000")
        page.get_by_role("button", name="Dry run").click()
        page.wait_for_selector("text=Predicted to miss the SLO of 40 ms", timeout=SHOWN_MS)
        assert client.plan() == after
        # It is applied only by force.
        page.locator("#apply").click()
        assert page.get_by_role("button", name="Move lists").is_disabled()
        page.get_by_role("checkbox", name="cannot meet the SLO").check()
        page.get_by_role("button", name="Move lists").click()
        page.wait_for_selector("text=Applied as plan #", timeout=SHOWN_MS)
        assert client.plan()["plan"]["verdict"] == "infeasible"
        page.wait_for_selector("#plan-words >> text=Verdict: infeasible", timeout=SHOWN_MS)
        assert page.asked
        assert all(asked.startswith(f"{url}/") for asked in page.asked)


def test_it_says_why_the_host_serves_and_reloading_asks_first(serving, open_page, index_path):
    forget_what_was_applied(index_path)
    with serving("--device", "cpu") as (_, [url]), client_of(url) as client:
        page = open_page(url)
        wait_for_state(page, "live")
        assert "Note: plan 1 is stored (feasible); apply it with" in text_of(page, "#note")
        assert "apply it with" in text_of(page, "#repartition-off")
        with hx.open(index_path) as index:
            index.apply_plan(1)
        page.get_by_role("button", name="Reload …").click()
        assert "Generation 1 serves now, without a plan" in text_of(page, "#confirm-reload")
        page.get_by_role("button", name="Cancel").click()
        assert client.status()["plan_id"] is None
        page.get_by_role("button", name="Reload …").click()
        page.get_by_role("button", name="Reload", exact=True).click()
        page.wait_for_selector("text=Generation 1 serves, with its devices; plan #1, stored", timeout=SHOWN_MS)
        page.wait_for_selector("#note", state="hidden", timeout=SHOWN_MS)
        page.wait_for_selector("#repartition-form", timeout=SHOWN_MS)
        assert "Scans\nrows" in text_of(page, "#tiles")
        hx.build(clustered(600, seed=4), index_path, nlist=8, metric="l2", bits=1, replace=True).close()
        page.get_by_role("button", name="Reload …").click()
        assert "by plan #1" in text_of(page, "#confirm-reload")
        page.get_by_role("button", name="Reload", exact=True).click()
        page.wait_for_selector("text=Generation 2 serves, in place of 1; no plan", timeout=SHOWN_MS)
        page.wait_for_selector("#note >> text=no plan is stored", timeout=SHOWN_MS)
        page.wait_for_selector("#index-facts >> text=600 vectors", timeout=SHOWN_MS)
        page.wait_for_selector("#tiles >> text=codes, 1 bit", timeout=SHOWN_MS)
        assert f"{client.status()['index']['candidates']} candidates for k 10" in text_of(page, "#tiles")
        page.wait_for_selector("#events >> text=Generation 2 serves, in place of 1", timeout=SHOWN_MS)
        (index_path / "gen-000002" / "manifest.json").write_text("{")
        page.get_by_role("button", name="Reload …").click()
        page.get_by_role("button", name="Reload", exact=True).click()
        page.wait_for_selector("#reload-said >> text=generation 2 goes on serving", timeout=SHOWN_MS)


def test_rows_that_come_and_go_are_shown(serving, open_page):
    with serving("--device", "cpu") as (_, [url]), client_of(url) as client:
        page = open_page(url)
        wait_for_state(page, "live")

        def shows(*lines):
            """One below the other, with a minus sign for each dash."""
            until(lambda: "\n".join(lines).replace("-", "\N{MINUS SIGN}") in text_of(page, "#tiles"))

        shows("Rows", "2,500", "+0, -0, 0.0 % changed")
        ids = client.add(100 + clustered(200, seed=8))
        client.delete(ids[:75])
        shows("Rows", "2,625", "+125, -0, 5.0 % changed")
        shows("Compactions", "0", "0 lists split, 0 dissolved")
        changes = client.status()["changes"]
        assert changes["number"] == 2
        shows("Last change", "#2", "log ")
        client.compact()
        changes = client.status()["changes"]
        shows("Rows", "2,625", "+0, -0, 0.0 % changed")
        shows("Compactions", "1", f"{changes['split']} lists split, {changes['dissolved']} dissolved")
        assert not page.complaints


def test_a_key_is_asked_for_and_its_role_decides(serving, open_page, tmp_path):
    file = KeyFile(tmp_path / "keys.json")
    search, admin = file.add("web", "search"), file.add("ops", "admin")
    with serving("--device", "cpu", "--keys", file.path) as (_, [url]), client_of(url, key=search) as client:
        client.status()
        # The browser's own lines about refused requests.
        page = open_page(url, expected=("401", "403"))

        def show(key):
            page.get_by_label("Key", exact=True).fill(key)
            page.get_by_role("button", name="Use it").click()

        wait_for_state(page, "refused")
        assert not page.locator("#main").is_visible()
        show("hix_wrong")
        page.wait_for_selector("text=does not know this key")
        show(search)
        wait_for_state(page, "live")
        page.get_by_role("spinbutton", name="Coverage").fill("40")
        page.get_by_role("button", name="Dry run").click()
        page.wait_for_selector("#repartition-said >> text=role admin")
        assert page.locator("#apply").is_disabled()
        # It survives a reload of this tab, and is nowhere else.
        page.reload()
        wait_for_state(page, "live")
        assert page.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie]") == [
            [search],
            0,
            "",
        ]
        page.get_by_role("button", name="Forget key").click()
        assert page.evaluate("sessionStorage.length") == 0
        show(admin)
        wait_for_state(page, "live")
        page.get_by_role("spinbutton", name="Coverage").fill("40")
        page.get_by_role("button", name="Dry run").click()
        page.wait_for_selector("#apply:enabled", timeout=SHOWN_MS)
        assert not any(key in asked for asked in page.asked for key in (search, admin))
        assert page.complaints == []


@pytest.mark.parametrize("width", [400, 1600])
def test_the_nodes_of_a_cluster_are_shown(open_page, tmp_path, width):
    with started(tmp_path, 2, 1.1, "none", replicas=1, repair_after_s=3600.0) as (nodes, _):
        lost = int(nodes.manager._state.map.held_by(1).sum())
        page = open_page(nodes.processes["node-0"].url, expected=("401",), viewport={"width": width, "height": 900})
        page.get_by_label("Key", exact=True).fill(nodes.key)
        page.get_by_role("button", name="Use it").click()
        wait_for_state(page, "live")
        region = page.locator("#nodes")
        assert region.get_by_role("columnheader").all_inner_texts() == [
            *("node", "state", "lists", "bytes", "asked", "hedged", "failed")
        ]
        sync_api.expect(page.locator("#cluster-words")).to_contain_text("Every list is on a node", timeout=SHOWN_MS)
        assert "node-0\tthis node\t" in region.inner_text()
        nodes.end("node-1")
        words = page.locator("#cluster-words .bad")
        sync_api.expect(words).to_contain_text(f"{lost} lists, ", timeout=SHOWN_MS)
        sync_api.expect(region.get_by_role("cell", name="down")).to_be_visible(timeout=SHOWN_MS)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.complaints == []


def test_every_route_stands_on_a_page_of_its_own(serving, open_page):
    with serving("--device", "cpu") as (_, [url]), client_of(url) as client:
        client.status()
        page = open_page(f"{url}/docs")
        page.wait_for_selector("#routes details")
        document = page.evaluate("fetch('v1/openapi.json').then((a) => a.json())")
        routes = [f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods]
        assert page.locator("#routes > details > summary > strong").all_inner_texts() == routes
        page.locator("#post_v1_repartition > summary").click()
        shown = text_of(page, "#post_v1_repartition")
        for words in ("bandwidth_share", "number (0.01 to 1)", "default false", "200: What changes", '"solve"'):
            assert words in shown, words
        assert all(asked.startswith(f"{url}/") for asked in page.asked)
        assert page.complaints == []


def test_a_daemon_without_plan_devices_or_searches_says_what_is_missing(serving, open_page):
    with serving("--plan", "none") as (_, [url]):
        page = open_page(url)
        wait_for_state(page, "live")
        for where, words in (
            ("#c-latency", "No searches in this time"),
            ("#c-hits", "No searches in this time"),
            ("#devices", "the host scans everything"),
            ("#c-tradeoff", "No plan is in force"),
            ("#drift", "without --refresh"),
            ("#events", "Plan #1 is the current one"),
            ("#repartition-off", "nothing to repartition"),
        ):
            assert words in text_of(page, where), where
        assert not page.locator("#cluster").is_visible()
        assert not page.locator("#repartition-form").is_visible()
        assert "none" in text_of(page, "#tiles")
        assert page.complaints == []


def test_a_daemon_that_went_away_is_noticed_and_found_again(serving, open_page):
    with serving("--device", "cpu") as (process, [url]):
        page = open_page(url, expected=("ERR_", "Failed to load"))
        wait_for_state(page, "live")
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 0
        wait_for_state(page, "down")
        assert "Not connected" in text_of(page, "#connection")
        assert page.locator("#main").is_visible()
    with serving("--device", "cpu", port=url.rpartition(":")[2]):
        # The page also looks by itself, and the button goes when it has found the daemon: here maybe before the click.
        page.get_by_role("button", name="Try again now", include_hidden=True).dispatch_event("click")
        wait_for_state(page, "live")
        assert not page.get_by_role("button", name="Try again now").is_visible()
        assert page.complaints == []


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_narrow_and_wide_screens_in_both_schemes(serving, open_page, queries, width, scheme):
    with serving("--device", "cpu") as (_, [url]), client_of(url) as client:
        client.search(queries, 5)
        page = open_page(url, viewport={"width": width, "height": 900}, color_scheme=scheme)
        wait_for_state(page, "live")
        page.wait_for_selector("#c-tradeoff circle.chosen")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # Text of the charts stays inside its picture.
        assert page.evaluate(TEXTS_OUTSIDE) == []
        background, ink = page.evaluate(
            "(() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]; })()"
        )
        light = [sum(map(int, colour[4:-1].split(","))) for colour in (background, ink)]
        assert (light[0] > light[1]) == (scheme == "light")
        assert page.complaints == []


@pytest.mark.parametrize("most", [3e-7, 0.04, 900.0, 1.5e6, 4e9])
def test_numbers_of_every_size_stay_inside_their_chart(serving, open_page, most):
    with serving("--plan", "none") as (_, [url]):
        page = open_page(url, viewport={"width": 400, "height": 900})
        wait_for_state(page, "live")
        drawn = page.evaluate(
            """async (most) => {
              const { chart } = await import("./charts.js");
              const host = document.createElement("div");
              const format = (v) => v.toLocaleString("en", { maximumSignificantDigits: 3 });
              const axis = (label) => ({ min: 0, max: most, label, format });
              document.querySelector("main").append(host);
              chart(host, { summary: "test", x: axis("x"), y: axis("y") });
              return [...host.querySelectorAll("text")].map((text) => text.textContent);
            }""",
            most,
        )
        assert len(drawn) > 5
        assert page.evaluate(TEXTS_OUTSIDE) == []


def test_a_page_that_was_paused_says_so_whatever_its_requests_do(serving, open_page):
    with serving("--plan", "none") as (_, [url]):
        page = open_page(url, expected=("ERR_", "Failed to load"))
        wait_for_state(page, "live")
        held = []
        page.route("**/v1/series*", lambda route: held.append(route))
        while not held:
            page.wait_for_timeout(50)
        page.uncheck("#live")
        assert text_of(page, "#connection") == "Paused"
        held.pop().continue_()
        page.wait_for_timeout(500)
        assert text_of(page, "#connection") == "Paused", "a request that was on its way"
        page.unroute_all()
        page.route("**/v1/series*", lambda route: route.abort())
        page.evaluate("document.getElementById('retry').click()")
        wait_for_state(page, "down")
        assert text_of(page, "#connection") == "Not connected; paused"
        page.check("#live")
        page.locator("#connection", has_text="trying again every").wait_for(timeout=SHOWN_MS)
        page.unroute_all()
        page.evaluate("document.getElementById('retry').click()")
        wait_for_state(page, "live")
        assert page.complaints == []


def test_a_chart_that_was_gone_under_a_resting_mouse_comes_back(serving, open_page, queries):
    with serving("--device", "cpu") as (_, [url]), client_of(url) as client:
        client.search(queries, 5)
        page = open_page(url)
        chart, empty = page.locator("#c-latency svg.chart"), page.locator("#c-latency .empty")
        chart.wait_for(timeout=SHOWN_MS)
        chart.hover()
        page.locator("#c-latency .legend", has_text="at ").wait_for(timeout=SHOWN_MS)

        def an_hour_ago(route):
            """The daemon's clock was put back: nothing is known of that time."""
            answer = route.fetch()
            said = answer.json()
            said["now_s"] -= 5000
            said["samples"] = {name: [] for name in said["samples"]}
            for device in said["devices"]:
                device |= {name: [] for name, value in device.items() if isinstance(value, list)}
            route.fulfill(response=answer, json=said)

        page.route("**/v1/series*", an_hour_ago)
        empty.wait_for(timeout=SHOWN_MS)
        page.unroute_all(behavior="wait")
        client.search(queries, 5)
        chart.wait_for(timeout=20_000)
        assert page.complaints == []


def test_a_foreign_page_and_a_rebound_name_get_nothing(serving, open_page):
    with serving("--device", "cpu") as (_, [url]), client_of(url) as client:
        client.status()
        port = url.rpartition(":")[2]
        foreign = open_page("about:blank")
        foreign.route("http://evil.example/", lambda route: route.fulfill(body="<p>hello", content_type="text/html"))
        foreign.goto("http://evil.example/")
        answers = []
        foreign.on("response", lambda answer: answers.append((answer.request.method, answer.status)))
        for options in ("{method: 'POST', mode: 'no-cors'}", "{method: 'POST', mode: 'no-cors', body: '{}'}"):
            foreign.evaluate(f"fetch('{url}/v1/drain', {options}).catch(() => 0)")
        assert answers == [("POST", 403)] * 2
        foreign.evaluate(
            "(url) => new Promise((done) => { const f = document.createElement('iframe'); f.src = url; f.onload = done;"
            " document.body.append(f); })",
            url,
        )
        assert not any(frame.query_selector("#connection") for frame in foreign.frames[1:])
        rebound = open_page("about:blank")
        assert rebound.goto(f"http://{REBOUND}:{port}/").status == 421
        assert rebound.evaluate("fetch('/v1/status').then((a) => a.status)") == 421
        assert client.status()["ready"]
