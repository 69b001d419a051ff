// The daemon's page: asks its JSON routes, keeps an hour of samples in memory, draws, and changes the plan when told to.

import { chart, el, swatch } from "./charts.js";

const $ = (id) => document.getElementById(id);
const POLL_MS = 1000, EVENTS_MS = 4000, KEPT_S = 3700, PATIENCE_MS = 10000;
const PARTS = [
  ["pinned_bytes", "a", "pinned by the plan"], ["lookahead_bytes", "b", "lookahead"], ["cached_bytes", "c", "cached"],
  ["other_bytes", "d", "coming or leaving"], ["free_bytes", "free", "free"],
];
const COLUMNS = ["at_s", "span_s", "requests", "queries", "p50_ms", "p90_ms", "p99_ms", "judged", "met", "slo_ms",
  "hit_rate", "expected_hit_rate", "waiting"];

const page = {
  key: sessionStorage.getItem("hybridindex-key"), samples: [], state: null, tradeoff: null, tradeoffPlan: undefined,
  events: [], lastEvent: 0, failures: 0, timer: 0, eventsAt: 0, skew: 0, proposed: null,
};

// Words for numbers

const round = (v, digits = 3) => (v === 0 ? "0" : Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(digits))));
const or = (format) => (v) => (v == null ? "–" : format(v));
const ms = or((v) => `${round(v)} ms`);
const percent = or((v) => `${(v * 100).toFixed(1)} %`);
const rate = or((v) => `${round(v)}/s`);
const bytes = or((v) => {
  let unit = 0;
  const size = Math.abs(v);
  while (unit < 4 && size >= 1024 ** (unit + 1)) unit++;
  return `${round(v / 1024 ** unit)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
});
const ago = (s) => (Math.abs(s) < 1 ? "now" : Math.abs(s) < 120 ? `${Math.round(s)} s` : `${round(s / 60, 2)} min`);
const clock = (s) => new Date(s * 1000).toLocaleTimeString();
const lists = (n) => `${n} ${n === 1 ? "list" : "lists"}`;
const words = (text) => String(text ?? "").replaceAll("_", " ");

// Asking

class Refused extends Error {
  constructor(status, detail) { super(detail); this.status = status; }
}

async function ask(path, body) {
  const headers = { accept: "application/json" };
  if (page.key) headers.authorization = `Bearer ${page.key}`;
  if (body) headers["content-type"] = "application/json";
  // A plan may take long to move; a reading may not.
  const signal = body ? undefined : AbortSignal.timeout(PATIENCE_MS);
  const answer = await fetch(path, {
    method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), credentials: "omit", cache: "no-store", signal,
  });
  const said = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, said.detail ?? `the daemon answered ${answer.status}`);
  return said;
}

// Said aloud when it changes, not each second.
function say(line, text) { if (line.textContent !== text) line.textContent = text; }

function connection(state, text) {
  say($("connection"), text);
  $("connection").dataset.state = state;
  $("retry").hidden = state !== "down";
  $("main").classList.toggle("stale", state === "down");
}

const live = () => $("live").checked;

function pause() {
  clearTimeout(page.timer);
  connection("paused", "Paused");
}

function askForKey(problem) {
  connection("refused", "A key is needed");
  $("main").hidden = true;
  $("key-form").hidden = false;
  $("key-problem").textContent = problem;
  $("key").focus();
}

async function poll() {
  clearTimeout(page.timer);
  if (page.polling) return;
  page.polling = true;
  const wait = await pollOnce().finally(() => { page.polling = false; });
  if (wait && live()) page.timer = setTimeout(poll, wait);
}

// Milliseconds until the next one, or 0 where somebody has to act first.
async function pollOnce() {
  let wait = POLL_MS;
  try {
    const last = page.samples.at(-1);
    take(await ask(`v1/series?since=${last ? last.at_s : 0}`));
    if (page.facts?.generation !== page.state.generation) {
      page.facts = (await ask("v1/status")).index;
      const { count, dim, nlist, metric, codec, nprobe } = page.facts;
      $("index-facts").textContent = `${count.toLocaleString("en")} vectors × ${dim} · ${metric} · ${codec} · ${nlist} lists · nprobe ${nprobe}`;
    }
    // A plan that is still verified serves under the number of the one before.
    const serving = `${page.state.generation} ${page.state.plan_id} ${page.state.planned_hit_rate}`;
    if (page.tradeoffPlan !== serving) {
      page.plan = (await ask("v1/plan")).plan;
      page.tradeoff = await ask("v1/plan/tradeoff");
      page.tradeoffPlan = serving;
      drawTradeoff();
    }
    if (Date.now() - page.eventsAt > EVENTS_MS) {
      const fresh = (await ask(`v1/events?since=${page.lastEvent}&limit=100`)).events;
      page.eventsAt = Date.now();
      if (fresh.length) page.lastEvent = fresh.at(-1).id;
      page.events = [...page.events, ...fresh].slice(-100);
      if (fresh.length || !$("events").firstChild) drawEvents();
    }
    page.failures = 0;
    $("main").hidden = false;
    $("key-form").hidden = true;
    $("forget").hidden = !page.key;
    const { draining, ready } = page.state;
    if (!live()) pause();
    else connection("live", draining ? "Connected; the daemon is stopping" : ready ? "Connected" : "Connected; warming up");
    drawAll();
  } catch (error) {
    if (error.status === 401) {
      const shown = page.key;
      forget();
      askForKey(shown ? "The daemon does not know this key." : "");
      return 0;
    }
    // A mistake of this page is for the console; it goes on all the same.
    if (!(error instanceof Refused || error instanceof DOMException || error.message.includes("fetch"))) reportError(error);
    page.failures++;
    page.facts = null;
    wait = Math.min(15000, 1000 * 2 ** (page.failures - 1));
    const why = error instanceof Refused ? `: ${error.message}` : "";
    connection("down", `Not connected${why}; ${live() ? `trying again every ${Math.round(wait / 1000)} s` : "paused"}`);
    $("main").hidden = !page.state;
  }
  return wait;
}

function take(answer) {
  const { samples, devices, ...state } = answer;
  page.state = { ...state, devices };
  // The daemon's clock was put back.
  if (page.samples.at(-1)?.at_s > answer.now_s + 5) page.samples = [];
  const last = page.samples.at(-1);
  samples.at_s.forEach((at, i) => {
    const row = Object.fromEntries(COLUMNS.map((name) => [name, samples[name][i]]));
    row.devices = devices.map((d) => Object.fromEntries([...PARTS.map(([part]) => part), "capacity_bytes", "scratch_bytes", "usable"].map((name) => [name, d[name][i]])));
    if (!last || at > last.at_s) page.samples.push(row);
  });
  page.samples = page.samples.filter((row) => row.at_s > answer.now_s - KEPT_S);
}

// Sums

function sum(rows, name) { return rows.reduce((total, row) => total + (row[name] ?? 0), 0); }

function overall(rows) {
  const span = sum(rows, "span_s"), queries = sum(rows, "queries"), judged = sum(rows, "judged");
  const hits = rows.reduce((total, row) => total + (row.hit_rate ?? 0) * row.queries, 0);
  return {
    attainment: judged ? sum(rows, "met") / judged : null, hit_rate: queries ? hits / queries : null,
    requests_s: span ? sum(rows, "requests") / span : null, queries_s: span ? queries / span : null,
  };
}

function median(rows, name) {
  const values = rows.map((row) => row[name]).filter((v) => v != null).sort((a, b) => a - b);
  return values.length ? values[Math.floor(values.length / 2)] : null;
}

// Drawing

const windowS = () => Number($("window").value);
const target = () => page.state.refresher?.attainment_target ?? (page.tradeoff ? page.tradeoff.percentile / 100 : null);
// Of the lists that are on devices, and of all that the plan wants where these are others.
const predicted = (rows) => {
  const placed = percent(rows.at(-1)?.expected_hit_rate), planned = percent(page.state.planned_hit_rate);
  return placed === planned ? placed : `${placed}, by the plan ${planned}`;
};
const visible = () => page.samples.filter((row) => row.at_s > page.state.now_s - windowS());

function timeAxis() {
  const span = windowS(), now = page.state.now_s, step = { 60: 15, 300: 60, 900: 180, 3600: 600 }[span];
  const ticks = [];
  for (let s = -span; s <= 0; s += step) ticks.push(s);
  return {
    min: -span, max: 0, ticks, label: "time before now", format: (s) => (s === 0 ? "now" : span > 60 ? `−${round(-s / 60)} min` : `−${-s} s`), read: (s) => clock(now + s),
  };
}

const points = (rows, name) => rows.map((row) => [row.at_s - page.state.now_s, row[name]]);

function drawAll() {
  const rows = visible();
  drawNote();
  drawTiles(rows);
  drawLatency(rows);
  drawAttainment(rows);
  drawHits(rows);
  drawLoad(rows);
  drawDevices(rows);
  drawNodes();
  drawDrift();
  drawValues(rows);
  drawForm();
}

function drawNote() {
  const { note } = page.state;
  $("note").hidden = !note;
  say($("note"), note ? `Note: ${note}` : "");
}

function drawTiles(rows) {
  const { state, tradeoff } = page, recent = rows.slice(-30), now = overall(recent), follows = state.refresher;
  const slo = recent.at(-1)?.slo_ms, p99 = median(recent, "p99_ms"), promised = target();
  const late = now.attainment != null && promised != null && now.attainment < promised;
  const usable = state.devices.filter((d) => d.usable.at(-1) ?? true).length;
  const rowsNow = state.changes;
  const tiles = [
    ["p50", ms(median(recent, "p50_ms")), "last 30 s"], ["p90", ms(median(recent, "p90_ms")), "last 30 s"],
    ["p99", ms(p99), slo == null ? "no SLO" : `SLO ${ms(slo)}`],
    ["Attainment", percent(now.attainment), promised == null ? "no target" : `target ${percent(promised)}`, now.attainment == null ? "" : late ? "bad" : "good"],
    ["Hit rate", percent(now.hit_rate), recent.at(-1)?.expected_hit_rate == null ? "no plan" : `predicted ${predicted(recent)}`],
    ["Load", rate(now.requests_s), `${rate(now.queries_s)} queries`],
    ["Plan", state.plan_id == null ? "none" : `#${state.plan_id}`, tradeoff ? `${page.plan?.verdict}, coverage ${percent(tradeoff.chosen.coverage)}` : "host alone", page.plan?.verdict === "infeasible" ? "bad" : ""],
    ["Rows", rowsNow.live.toLocaleString("en"), `+${rowsNow.added}, −${rowsNow.deleted}, ${percent(rowsNow.changed_share)} changed`],
    ["Last change", `#${rowsNow.number}`, `log ${bytes(rowsNow.log_bytes)}`],
    ["Compactions", `${rowsNow.compactions}`, rowsNow.problem ? "the last one failed" : `${rowsNow.split} lists split, ${rowsNow.dissolved} dissolved`, rowsNow.problem ? "bad" : ""],
    ["Scans", state.bits == null ? "rows" : `codes, ${state.bits} bit${state.bits > 1 ? "s" : ""}`, state.bits == null ? state.precision.slice(6) : `${state.candidates} candidates for k 10`],
    ["Devices", state.devices.length ? `${usable} of ${state.devices.length}` : "none", state.devices.length ? "usable" : "host alone", usable < state.devices.length ? "bad" : ""],
    ["Drift", follows ? words(follows.drift_state) : "not watched", follows ? `update: ${words(follows.stage)}` : "no refresher", follows?.drift_state === "drifting" ? "bad" : ""],
  ];
  $("tiles").replaceChildren(...tiles.map(([name, value, note, kind]) =>
    el("div", {}, el("dt", {}, name), el("dd", { class: kind }, value, el("small", {}, note)))));
}

function nothing(host, text) {
  host.chartHeld = false;
  host.replaceChildren(el("p", { class: "empty" }, text));
}

function drawLatency(rows) {
  const seen = rows.flatMap((row) => [row.p50_ms, row.p99_ms]).filter((v) => v != null), slo = rows.at(-1)?.slo_ms;
  if (!seen.length) return nothing($("c-latency"), "No searches in this time.");
  const all = slo == null ? seen : [...seen, slo];
  chart($("c-latency"), {
    summary: `p50, p90 and p99 of search latency, now about ${ms(median(rows.slice(-10), "p50_ms"))}, ${ms(median(rows.slice(-10), "p90_ms"))} and ${ms(median(rows.slice(-10), "p99_ms"))}; SLO ${ms(slo)}. Numbers are under Values.`,
    x: timeAxis(), y: { min: Math.min(...all) / 1.4, max: Math.max(...all) * 1.5, log: true, label: "ms, logarithmic", format: (v) => round(v) },
    lines: [["p50", "p50_ms", "a"], ["p90", "p90_ms", "b"], ["p99", "p99_ms", "c"]].map(([name, field, kind]) => ({ name, kind, points: points(rows, field), format: ms })),
    rules: slo == null ? [] : [{ y: slo, kind: "slo", text: `SLO ${ms(slo)}` }],
  });
}

function drawAttainment(rows) {
  const over = 10, promised = target();
  const line = rows.map((row, i) => [row.at_s - page.state.now_s, overall(rows.slice(Math.max(0, i - over + 1), i + 1)).attainment]);
  const known = line.map((p) => p[1]).filter((v) => v != null);
  if (!known.length) return nothing($("c-attainment"), rows.some((row) => row.requests) ? "No SLO is in force." : "No searches in this time.");
  const low = Math.min(...known, promised ?? 1);
  chart($("c-attainment"), {
    summary: `Part of the searches within the SLO, now ${percent(known.at(-1))}${promised == null ? "" : `, target ${percent(promised)}`}.`,
    x: timeAxis(), y: { min: Math.max(0, Math.min(0.9, Math.floor(low * 10 - 0.5) / 10)), max: 1, label: "% of searches within the SLO", format: (v) => `${round(v * 100)} %` },
    lines: [{ name: `within the SLO, over ${over} samples`, kind: "a", points: line, format: percent }],
    rules: promised == null ? [] : [{ y: promised, kind: "slo", text: `target ${round(promised * 100)} %` }],
  });
}

function driftWindows() {
  const { refresher, clock_s } = page.state;
  return (refresher?.windows ?? []).map((w) => ({
    ...w, from: w.began_s - clock_s, to: w.ended_s - clock_s, hit_rate: w.hit_rate_sum / w.queries, attainment: w.within_slo / w.requests,
  }));
}

function windowState(w) {
  const late = w.late ? "late" : "in time";
  return w.thin ? "too few queries" : `${w.outside ? "outside" : "inside"}, ${late}`;
}

function drawHits(rows) {
  const windows = driftWindows();
  if (!rows.some((row) => row.hit_rate != null) && !windows.length) return nothing($("c-hits"), "No searches in this time.");
  chart($("c-hits"), {
    summary: `Hit rate by bytes, now ${percent(overall(rows.slice(-10)).hit_rate)}; predicted ${predicted(rows)}. Windows are listed under Drift windows.`,
    x: timeAxis(), y: { min: 0, max: 1, label: "% of probed bytes served by devices", format: (v) => `${round(v * 100)} %` },
    lines: [
      { name: "observed", kind: "a", points: points(rows, "hit_rate"), format: percent },
      { name: "predicted", kind: "soft", points: points(rows, "expected_hit_rate"), format: percent },
    ],
    bands: windows.map((w) => ({ x0: w.from, x1: w.to, y0: w.interval[0], y1: w.interval[1] })),
    dots: windows.map((w) => ({ x: w.to, y: w.hit_rate, kind: w.outside ? "out" : "in", text: `window ${w.number}: ${percent(w.hit_rate)}, ${windowState(w)}` })),
  });
  if (windows.length) $("c-hits").querySelector(".legend")?.append(el("span", {}, "band: predicted; ● inside, ○ outside"));
}

function drawLoad(rows) {
  const queries = rows.map((row) => [row.at_s - page.state.now_s, row.queries / row.span_s]);
  const requests = rows.map((row) => [row.at_s - page.state.now_s, row.requests / row.span_s]);
  const top = Math.max(1, ...queries.map((p) => p[1]), ...rows.map((row) => row.waiting));
  if (!rows.length) return nothing($("c-load"), "No samples yet.");
  chart($("c-load"), {
    summary: `Requests and queries per second and queries that wait, now ${rate(requests.at(-1)[1])}, ${rate(queries.at(-1)[1])} and ${rows.at(-1).waiting}.`,
    x: timeAxis(), y: { min: 0, max: top * 1.1, label: "per second; waiting: queries", format: (v) => round(v) },
    lines: [
      { name: "requests", kind: "a", points: requests, format: rate }, { name: "queries", kind: "b", points: queries, format: rate },
      { name: "waiting", kind: "c", points: points(rows, "waiting"), format: (v) => round(v) },
    ],
  });
}

function drawDevices(rows) {
  const { devices } = page.state, host = $("devices");
  $("device-legend").replaceChildren(...(devices.length ? PARTS.map(([, kind, name]) => el("span", {}, swatch(kind, true), name)) : []));
  const isStandIn = (d) => d.name.includes("stand-in");
  $("stand-in").hidden = !devices.some(isStandIn);
  if (!devices.length) return nothing(host, "No devices: the host scans everything. Start the daemon with --device to use some.");
  while (host.children.length > devices.length || host.querySelector(":scope > .empty")) host.lastChild.remove();
  devices.forEach((device, i) => {
    const card = host.children[i] ?? host.appendChild(el("div", {}, el("h3"), el("div")));
    const last = page.samples.at(-1)?.devices[i];
    const state = device.disabled_reason ? `off: ${device.disabled_reason}` : !last || last.usable ? "" : "failed; the host serves its lists";
    const failed = device.failures ? ` · failed ${device.failures} time(s)` : "";
    card.firstChild.replaceChildren(`${i}: ${device.name}${last ? ` · ${bytes(last.capacity_bytes)} + ${bytes(last.scratch_bytes)} scratch` : ""}${failed} `, el("span", { class: "bad" }, state));
    if (!last || !last.capacity_bytes) return nothing(card.lastChild, last ? "It has no room for lists." : "No samples yet.");
    chart(card.lastChild, {
      height: 150, legend: false,
      summary: `Bytes of device ${i}: ${PARTS.map(([part, , name]) => `${bytes(last[part])} ${name}`).join(", ")}.`,
      x: timeAxis(), y: { min: 0, max: last.capacity_bytes, label: "bytes", bytes: true, format: bytes },
      stack: { parts: PARTS, rows: rows.map((row) => [row.at_s - page.state.now_s, ...PARTS.map(([part]) => row.devices[i]?.[part] ?? 0)]) },
    });
  });
}

function drawTradeoff() {
  const t = page.tradeoff;
  if (!t) {
    $("plan-words").textContent = "";
    nothing($("c-tradeoff"), "No plan is in force: the host scans everything.");
    $("c-rate").replaceChildren();
    return;
  }
  const { chosen } = t, most = t.points.at(-1).device_bytes, x = { min: 0, max: Math.max(most, chosen.device_bytes) * 1.05 || 1, bytes: true, label: "device bytes, scratch included", format: bytes };
  const line = (field) => t.points.map((p) => [p.device_bytes, p[field]]);
  const budget = t.budget_bytes <= x.max ? [{ x: t.budget_bytes, kind: "soft", text: `budget ${bytes(t.budget_bytes)}` }] : [];
  const { verdict, reason, bytes_by_precision: held } = page.plan ?? {};
  const forms = held?.codes === undefined ? "" : ` (codes ${bytes(held.codes)}, rows ${bytes(held.rows)})`;
  $("plan-words").replaceChildren(el("strong", { class: verdict === "feasible" ? "good" : "bad" }, `Verdict: ${verdict}`), `: ${reason}. Chosen: ${percent(chosen.coverage)} of the lists, ${bytes(chosen.device_bytes)}${forms} of ${bytes(t.budget_bytes)} on devices, hit rate ${percent(chosen.hit_rate)}, ${ms(chosen.latency_ms)} at p${round(t.percentile)} for a batch of ${t.batch}; at most ${rate(chosen.max_qps)} within the target.`);
  const seen = [...t.points, chosen].flatMap((p) => [p.median_ms, p.latency_ms]);
  chart($("c-tradeoff"), {
    height: 210, summary: `Predicted latency of a batch of ${t.batch} against device bytes, from ${ms(t.points[0].latency_ms)} without devices to ${ms(t.points.at(-1).latency_ms)} with every useful list; chosen ${ms(chosen.latency_ms)}.`,
    x, y: { min: 0, max: Math.max(...seen, Math.min(t.target_ms, 2 * Math.max(...seen))) * 1.12, label: `predicted ms, batch of ${t.batch}`, format: (v) => round(v) },
    lines: [
      { name: `p${round(t.percentile)}`, kind: "a", points: line("latency_ms"), format: ms, shown: [0, chosen.latency_ms] },
      { name: "median", kind: "b", points: line("median_ms"), format: ms, shown: [0, chosen.median_ms] },
    ],
    dots: [{ x: chosen.device_bytes, y: chosen.latency_ms, kind: "chosen", text: "the plan", label: `plan: ${ms(chosen.latency_ms)}` }],
    rules: [...budget, ...(t.target_ms <= 2 * Math.max(...seen) ? [{ y: t.target_ms, kind: "slo", text: `target ${ms(t.target_ms)}` }] : [])],
  });
  const top = Math.max(1, ...t.points.map((p) => p.max_qps), chosen.max_qps, t.rate_qps ?? 0);
  chart($("c-rate"), {
    height: 210, summary: `Requests per second within the latency target against device bytes; chosen ${rate(chosen.max_qps)}.`,
    x, y: { min: 0, max: top * 1.12, label: `requests/s within the target of ${ms(t.target_ms)}`, format: (v) => round(v) },
    lines: [{ name: "predicted", kind: "a", points: line("max_qps"), format: rate, shown: [0, chosen.max_qps] }],
    dots: [{ x: chosen.device_bytes, y: chosen.max_qps, kind: "chosen", text: "the plan", label: `plan: ${rate(chosen.max_qps)}` }],
    rules: [...budget, ...(t.rate_qps ? [{ y: t.rate_qps, kind: "slo", text: `asked for ${rate(t.rate_qps)}` }] : [])],
  });
}

function table(heads, rows, caption) {
  const cell = (kind, [text, style]) => el(kind, { class: style, scope: kind === "th" ? "col" : null }, text);
  return el("table", {}, caption ? el("caption", {}, caption) : null,
    el("thead", {}, el("tr", {}, ...heads.map((h) => cell("th", h)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((c) => cell("td", c))))));
}

function drawNodes() {
  const c = page.state.cluster;
  $("cluster").hidden = !c;
  if (!c) return;
  const lost = c.unreachable_lists, bad = { down: "bad", silent: "bad", late: "bad" };
  $("cluster-words").replaceChildren(
    el("strong", { class: lost ? "bad" : "good" }, lost ? `${lists(lost)}, ${percent(c.unreachable_share)} of the bytes, on no node that answers` : "Every list is on a node that answers"),
    `. ${lists(c.lists_below_replicas)} on fewer than ${c.replicas} nodes. Fan-out: ${c.fan_out == null ? "no searches yet" : `${round(c.fan_out)} other nodes asked per search`}. Map ${c.map_version}.`);
  const host = $("nodes"), at = host.scrollTop;
  host.replaceChildren(table([["node"], ["state"], ...["lists", "bytes", "asked", "hedged", "failed"].map((name) => [name, "n"])],
    c.nodes.map((node) => [[node.name], [node.state, bad[node.state] ?? ""], [`${node.lists}`, "n"], [bytes(node.bytes), "n"], ...[node.asked, node.hedged, node.failed].map((count) => [`${count}`, "n"])])));
  host.scrollTop = at;
}

function drawDrift() {
  const follows = page.state.refresher;
  if (!follows) {
    $("drift-words").replaceChildren();
    return nothing($("drift"), "Drift is not watched: the daemon runs without --refresh.");
  }
  const last = follows.last_update, back = follows.back_off_s ? `; backs off for ${Math.ceil(follows.back_off_s)} s` : "";
  const update = last ? ` Last update: #${last.number}, ${words(last.outcome ?? last.stage)}${last.why ? ` (${last.why})` : ""}.` : "";
  $("drift-words").textContent = `State: ${words(follows.drift_state)}. Update: ${words(follows.stage)}${back}.${update}`;
  const windows = driftWindows().reverse();
  if (!windows.length) return nothing($("drift"), "No window has closed yet.");
  $("drift").replaceChildren(table(
    [["window", "n"], ["closed"], ["requests", "n"], ["in time", "n"], ["hit rate", "n"], ["predicted", "n"], ["state"]],
    windows.map((w) => [[`${w.number}`, "n"], [w.to > -1 ? "now" : `${ago(-w.to)} ago`, "t"], [`${w.requests}`, "n"], [percent(w.attainment), "n"], [percent(w.hit_rate), "n"],
      [`${round(w.interval[0] * 100)} – ${round(w.interval[1] * 100)} %`, "n"], [windowState(w), w.thin || w.late !== w.outside ? "t" : w.late ? "t bad" : "t good"]]),
  ));
}

const SAID = {
  plan_current: (p) => `Plan #${p.plan_id} is the current one${p.verified ? ", verified" : ""}${p.why ? `: ${p.why}` : ""}`,
  refresh_trigger: (p) => `Drift: ${p.reason}`,
  refresh_proposal: (p) => `Proposal: hit rate ${percent(p.hit_rate_before)} → ${percent(p.hit_rate_after)}, ${ms(p.latency_ms_before)} → ${ms(p.latency_ms_after)}, ${bytes(p.bytes_to_move)} to move${p.objection ? `; objection: ${p.objection}` : ""}`,
  refresh_stage: (p) => `Update #${p.update}: ${words(p.source)} → ${words(p.target)}${p.why ? ` (${p.why})` : ""}`,
  refresh_ended: (p) => `Update #${p.number} ended: ${words(p.outcome)}${p.why ? ` (${p.why})` : ""}`,
  refresh_interrupted: (p) => `Update #${p.update} interrupted while ${words(p.stage)}`,
  device_failed: (p) => `Device ${p.device} failed (${p.failures} so far); the host serves its lists`,
  device_recovered: (p) => `Device ${p.device} is back`,
  index_reloaded: (p) => `Generation ${p.generation} serves${p.generation === p.generation_before ? " with its devices" : `, in place of ${p.generation_before}`}: ${p.reason}`,
  reload_failed: (p) => `Reload failed: ${p.why}`,
};

function drawEvents() {
  if (!page.events.length) return nothing($("events"), "Nothing has happened yet.");
  $("events").replaceChildren(table([["time"], ["event"]], [...page.events].reverse().map((event) => {
    const bad = event.kind === "device_failed" || event.kind === "reload_failed" || event.payload.outcome === "rolled_back" || event.payload.outcome === "failed" || event.payload.target === "rolling_back";
    const text = SAID[event.kind] ? SAID[event.kind](event.payload) : `${words(event.kind)} ${JSON.stringify(event.payload).slice(0, 200)}`;
    return [[new Date(event.at).toLocaleString([], { dateStyle: "short", timeStyle: "medium" }), "t"], [text, bad ? "w bad" : "w"]];
  })));
}

function drawValues(rows) {
  const spans = [["now", rows.slice(-3)], ["last 30 s", rows.slice(-30)], ["shown time", rows]];
  const measured = [
    ["p50", (r) => ms(median(r, "p50_ms"))], ["p90", (r) => ms(median(r, "p90_ms"))], ["p99", (r) => ms(median(r, "p99_ms"))],
    ["SLO", (r) => ms(r.at(-1)?.slo_ms)], ["attainment", (r) => percent(overall(r).attainment)], ["hit rate", (r) => percent(overall(r).hit_rate)],
    ["predicted hit rate", (r) => percent(r.at(-1)?.expected_hit_rate)], ["by the plan", () => percent(page.state.planned_hit_rate)], ["requests", (r) => rate(overall(r).requests_s)], ["queries", (r) => rate(overall(r).queries_s)],
    ["waiting queries", (r) => or((v) => round(v))(median(r, "waiting"))],
    ...page.state.devices.flatMap((d, i) => PARTS.map(([part, , name]) => [`device ${i}: ${name}`, (r) => bytes(r.at(-1)?.devices[i]?.[part])])),
  ];
  const host = $("values"), at = host.scrollTop;
  host.replaceChildren(table([["value"], ...spans.map(([name]) => [name, "n"])], measured.map(([name, read]) => [[name], ...spans.map(([, r]) => [read(r), "n"])])),
    el("p", { class: "hint" }, "Percentiles are of single samples; over a time, the median of them. Devices: at the end of the time."));
  host.scrollTop = at;
}

// Repartition

const SCALE = { device_budget_bytes: 1 << 20, coverage: 0.01, bandwidth_share: 0.01 };

function drawForm() {
  const none = !page.state.devices.length;
  $("repartition-off").hidden = !none;
  $("repartition-off").textContent = `There is nothing to repartition: the daemon serves on the host alone. ${page.state.note ? `Why: ${page.state.note}.` : "Start it with --device."}`;
  $("repartition-form").hidden = none;
  for (const [name, value] of [["slo_ms", page.tradeoff?.slo_ms], ["rate_qps", page.tradeoff?.rate_qps], ["coverage", page.tradeoff && page.tradeoff.chosen.coverage * 100],
    ["device_budget_bytes", page.tradeoff && page.tradeoff.budget_bytes / page.state.devices.length / SCALE.device_budget_bytes], ["bandwidth_share", page.state.refresher ? null : 100]])
    $("repartition-form").elements[name].placeholder = value == null ? "" : round(value);
}

function wanted() {
  const asked = {};
  for (const input of $("repartition-form").querySelectorAll("input[type=number]"))
    if (input.value !== "") {
      const value = Number(input.value) * (SCALE[input.name] ?? 1);
      asked[input.name] = input.name === "device_budget_bytes" ? Math.round(value) : value;
    }
  if ($("repartition-form").elements.solve.checked) asked.coverage = "solve";
  return asked;
}

function showProposal(o) {
  const next = o.plan, { placed } = o, row = (name, show, a, b) => [[name], [show(a), "n"], [show(b), "n"]], yes = (verdict) => (verdict === "feasible" ? "yes" : "no");
  const met = placed.verdict === "feasible", gain = o.gain.latency_ms, slo = ms(next.slo_ms);
  const facts = [
    el("p", { class: met ? "good" : "bad" }, el("strong", {}, `Predicted to ${met ? "meet" : "miss"} the SLO of ${slo}`), `: ${placed.reason}`),
    table([[`at an SLO of ${slo}`], [o.applied ? "before" : "now", "n"], [o.applied ? "placed" : "proposed", "n"]], [
      row("meets it", yes, o.verdict_before, placed.verdict), row("most requests within it", rate, o.max_qps_before, o.max_qps_after),
      row(`latency, batch of ${o.gain.batch}`, ms, o.latency_ms_before, placed.latency_ms), row("hit rate", percent, o.hit_rate_before, placed.hit_rate),
      row("lists on devices", String, o.resident.lists, placed.lists), row("their bytes", bytes, o.resident.bytes, placed.bytes),
    ]),
    el("p", {}, el("strong", {}, "To move: "), `${lists(o.lists_to_move)}, ${bytes(o.bytes_to_move)}${o.move_s == null ? "" : `, about ${round(o.move_s)} s`}; to leave: ${lists(o.lists_to_drop)}. `,
      el("strong", {}, "Gain: "), gain == null ? "unknown" : gain ? `predicted ${ms(Math.abs(gain))} ${gain > 0 ? "faster" : "slower"}` : "latency as before"),
  ];
  if (placed.lists < o.planned.lists) facts.push(el("p", { class: "bad" }, `${placed.lists} of ${lists(o.planned.lists)} that were planned have room; the host scans the others.`));
  if (o.objection) facts.push(el("p", { class: "bad" }, `The refresher would not do it: ${o.objection}.`));
  if (!met && next.nearest_slo_ms != null) facts.push(el("p", {}, `The nearest SLO that could be met: ${ms(next.nearest_slo_ms)}.`));
  if (o.applied) {
    const u = o.update;
    const stage = u ? `${words(u.outcome ?? u.stage)}${u.why ? `: ${u.why}` : ""}` : o.unplaced_lists ? `${lists(o.unplaced_lists)} found no room` : "every list has its place";
    facts.unshift(el("p", { class: "good" }, el("strong", {}, `Applied as plan #${o.plan_id ?? "?"}`), `; ${stage}.`));
  }
  $("repartition-said").replaceChildren(...facts);
}

function refusal(error) {
  const text = error.status === 403 ? `Refused: ${error.message}. A key with the role search may look, not change.` : error.status ? `Refused: ${error.message}` : "The daemon could not be reached; whether it changed anything shows once it is back.";
  return el("p", { class: "problem", role: "alert" }, text);
}

async function repartition(apply) {
  const asked = apply ? { ...page.proposed.asked, force: $("force").checked } : wanted();
  const buttons = [$("dry-run"), $("apply")];
  for (const button of buttons) button.disabled = true;
  $("repartition-said").replaceChildren(el("p", {}, apply ? "Moving lists …" : "Planning …"));
  try {
    const said = await ask("v1/repartition", { ...asked, apply });
    showProposal(said);
    page.proposed = apply ? null : { asked, said };
    page.eventsAt = 0;
  } catch (error) {
    page.proposed = null;
    $("repartition-said").replaceChildren(refusal(error));
  } finally {
    $("dry-run").disabled = false;
    $("apply").disabled = !page.proposed;
  }
}

$("repartition-form").addEventListener("submit", (event) => { event.preventDefault(); repartition(false); });
$("repartition-form").addEventListener("input", () => {
  const { coverage, solve } = $("repartition-form").elements;
  coverage.disabled = solve.checked;
  page.proposed = null;
  $("apply").disabled = true;
});
$("apply").addEventListener("click", () => {
  const o = page.proposed.said;
  $("confirm-words").textContent = `To move to devices: ${lists(o.lists_to_move)}, ${bytes(o.bytes_to_move)}; to leave: ${lists(o.lists_to_drop)}. Predicted latency ${ms(o.placed.latency_ms)}, hit rate ${percent(o.placed.hit_rate)}, verdict ${o.placed.verdict}.${o.objection ? ` Objection: ${o.objection}.` : ""}`;
  const infeasible = o.placed.verdict === "infeasible";
  $("confirm-force").hidden = !infeasible;
  $("force").checked = false;
  $("confirm-yes").disabled = infeasible;
  $("confirm").showModal();
});
$("force").addEventListener("change", () => { $("confirm-yes").disabled = !$("force").checked; });
$("confirm-no").addEventListener("click", () => $("confirm").close());
$("confirm-yes").addEventListener("click", () => { $("confirm").close(); repartition(true); });

// Reload

async function reload() {
  const said = $("reload-said");
  $("reload").disabled = true;
  said.replaceChildren(el("p", {}, "Opening and reading the index …"));
  try {
    const o = await ask("v1/reload", {}), plan = o.plan_id == null ? "no plan" : `plan #${o.plan_id}, ${o.plan_origin}`;
    const place = o.generation === o.generation_before ? "with its devices" : `in place of ${o.generation_before}`;
    const text = o.reloaded ? `Generation ${o.generation} serves, ${place}; ${plan}.` : `Generation ${o.generation} serves already.`;
    said.replaceChildren(el("p", { class: "good" }, text), o.note ? el("p", { class: "bad" }, o.note) : "");
    page.eventsAt = 0;
    page.tradeoffPlan = undefined;
  } catch (error) {
    said.replaceChildren(refusal(error));
  } finally {
    $("reload").disabled = false;
  }
}

$("reload").addEventListener("click", () => {
  const { generation, plan_id } = page.state;
  $("confirm-reload-words").textContent = `Generation ${generation} serves now, ${plan_id == null ? "without a plan" : `by plan #${plan_id}`}. The generation that the index directory names as current will serve.`;
  $("confirm-reload").showModal();
});
$("reload-no").addEventListener("click", () => $("confirm-reload").close());
$("reload-yes").addEventListener("click", () => { $("confirm-reload").close(); reload(); });

// The rest

function forget() {
  page.key = null;
  sessionStorage.removeItem("hybridindex-key");
  Object.assign(page, { samples: [], state: null, events: [], lastEvent: 0, facts: null, tradeoffPlan: undefined, proposed: null });
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  page.key = $("key").value.trim();
  // Anything else could not be sent in a header.
  if (!/^[\x21-\x7e]+$/.test(page.key)) return askForKey("That is no key.");
  sessionStorage.setItem("hybridindex-key", page.key);
  $("key").value = "";
  poll();
});
$("forget").addEventListener("click", () => { clearTimeout(page.timer); forget(); $("forget").hidden = true; askForKey(""); });
$("retry").addEventListener("click", poll);
$("live").addEventListener("change", () => live() ? poll() : pause());
$("window").addEventListener("change", () => page.state && drawAll());
poll();
