// Charts drawn as SVG: scales, axes with units, lines, stacked areas, bands and dots, and a legend that reads values.

const NS = "http://www.w3.org/2000/svg";

export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== false && value != null) made.setAttribute(key, value);
  made.append(...children.filter((c) => c != null));
  return made;
}

function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function swatch(kind, filled) {
  const mark = filled
    ? svg("rect", { width: 22, height: 10, class: `fill ${kind}` })
    : svg("path", { d: "M0 5H22", class: `s ${kind}` });
  return svg("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" }, mark);
}

function linearTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((m) => m * unit >= raw) * unit;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const m of [1, 2, 5]) if (m * 10 ** power >= low && m * 10 ** power <= high) ticks.push(m * 10 ** power);
  return ticks;
}

// Binary steps for bytes: ticks at 1, 2, 4, 8 … of the unit.
function byteTicks(low, high, count) {
  const step = 2 ** Math.ceil(Math.log2(Math.max(1, (high - low) / Math.max(1, count))));
  const ticks = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) ticks.push(value);
  return ticks;
}

const ruler = document.createElement("canvas").getContext("2d");

// Pixels of a text of the axes; the font is that of "svg text" in page.css.
function wide(text) {
  ruler.font = "11px system-ui, sans-serif";
  return ruler.measureText(text).width;
}

// chart(host, {height, summary, x, y, lines, stack, bands, dots, rules, legend})
//   x, y: {min, max, label, format, log, bytes}; lines: {name, kind, points: [[x, y or null]], format}
//     shown: the point that the legend reads while nobody points at one; else the last
//   stack: {parts: [[, kind, name]], rows: [[x, v1, v2, …]]}; bands: {x0, x1, y0, y1}; dots: {x, y, kind, text, label}; rules: {x or y, text, kind}
export function chart(host, given) {
  host.chartGiven = given;
  if (!host.chartWatched) {
    host.chartWatched = true;
    new ResizeObserver(() => { if (host.clientWidth !== host.chartWidth) draw(host); }).observe(host);
  }
  // Whoever points at a value reads it in peace.
  if (!host.chartHeld) draw(host);
}

function draw(host) {
  const { height = 190, summary, x, y, lines = [], stack, bands = [], dots = [], rules = [], legend = true } = host.chartGiven;
  host.chartWidth = host.clientWidth;
  const width = Math.max(240, Math.floor(host.clientWidth));
  const yTicks = y.log ? logTicks(y.min, y.max) : y.bytes ? byteTicks(y.min, y.max, 4) : linearTicks(y.min, y.max, 4);
  // Charts below each other line up, unless a number needs more room.
  const left = Math.max(58, ...yTicks.map((tick) => Math.ceil(wide(y.format(tick))) + 8)), right = 12, top = 18, bottom = 36;
  const across = (v) => left + ((v - x.min) / (x.max - x.min)) * (width - left - right);
  const level = y.log ? (v) => Math.log(v / y.min) / Math.log(y.max / y.min) : (v) => (v - y.min) / (y.max - y.min);
  const up = (v) => height - bottom - Math.min(1, Math.max(0, level(v))) * (height - top - bottom);
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": summary });

  // Ticks closer than a line of text are thinned, from the bottom.
  let lastY = Infinity;
  for (const tick of yTicks) {
    const at = up(tick);
    picture.append(svg("path", { class: "grid", d: `M${left} ${at}H${width - right}` }));
    if (lastY - at < 14) continue;
    lastY = at;
    picture.append(svg("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, y.format(tick)));
  }
  const many = Math.floor((width - left - right) / 85);
  const xTicks = x.ticks ?? (x.bytes ? byteTicks(x.min, x.max, many) : linearTicks(x.min, x.max, many));
  // From the right, where "now" is; what would touch its neighbour is left out.
  let lastX = Infinity;
  for (const tick of [...xTicks].reverse()) {
    const at = across(tick);
    if (lastX - at < (at < left + 12 ? 72 : 52)) continue;
    lastX = at;
    const anchor = at > width - 30 ? "end" : at < left + 12 ? "start" : "middle";
    picture.append(svg("text", { x: at, y: height - bottom + 14, "text-anchor": anchor }, x.format(tick)));
  }
  picture.append(
    svg("path", { class: "axis", fill: "none", d: `M${left} ${top}V${height - bottom}H${width - right}` }),
    svg("text", { x: left, y: 11, "text-anchor": "start" }, y.label),
    svg("text", { x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, x.label),
  );

  const inside = (v) => v >= x.min && v <= x.max;
  for (const band of bands) {
    const from = Math.max(across(band.x0), left), to = Math.min(across(band.x1), width - right);
    if (to > from) picture.append(svg("rect", { class: "band", x: from, width: to - from, y: up(band.y1), height: Math.max(1, up(band.y0) - up(band.y1)) }));
  }
  if (stack && stack.rows.length > 1) {
    const rows = stack.rows.filter((row) => inside(row[0]));
    let below = rows.map(() => 0);
    stack.parts.forEach(([, kind], i) => {
      const above = rows.map((row, j) => below[j] + row[i + 1]);
      const edge = rows.map((row, j) => `${across(row[0]).toFixed(1)} ${up(above[j]).toFixed(1)}`);
      const back = rows.map((row, j) => `${across(row[0]).toFixed(1)} ${up(below[j]).toFixed(1)}`).reverse();
      if (rows.length) picture.append(svg("path", { class: `fill ${kind}`, d: `M${edge.join("L")}L${back.join("L")}Z` }));
      below = above;
    });
  }
  // Above everything that is drawn, so that it can be read.
  const labels = [];
  for (const rule of rules) {
    if (rule.x != null && inside(rule.x)) {
      const at = across(rule.x), late = at > width / 2;
      picture.append(svg("path", { class: `s ${rule.kind}`, d: `M${at} ${top}V${height - bottom}` }));
      labels.push(svg("text", { class: "label plain", x: at + (late ? -5 : 5), y: top + 10, "text-anchor": late ? "end" : "start" }, rule.text));
    }
    if (rule.y != null) {
      const at = up(rule.y);
      picture.append(svg("path", { class: `s ${rule.kind}`, d: `M${left} ${at}H${width - right}` }));
      labels.push(svg("text", { class: "label", x: left + 6, y: at - 5 < top + 6 ? at + 14 : at - 5, "text-anchor": "start" }, rule.text));
    }
  }
  for (const line of lines) {
    let path = "", pen = false;
    for (const [px, py] of line.points) {
      if (py == null || !inside(px)) { pen = false; continue; }
      const at = `${across(px).toFixed(1)} ${up(py).toFixed(1)}`;
      // A point that stands alone is drawn as one.
      path += pen ? `L${at}` : `M${at}h.01`;
      pen = true;
    }
    picture.append(svg("path", { class: `s ${line.kind}`, d: path, "stroke-linecap": "round" }));
  }
  for (const dot of dots) {
    if (!inside(dot.x)) continue;
    picture.append(svg("circle", { class: `dot ${dot.kind}`, cx: across(dot.x), cy: up(dot.y), r: dot.kind === "chosen" ? 5.5 : 4 }, svg("title", {}, dot.text)));
    if (dot.label) {
      const late = across(dot.x) > width / 2;
      labels.push(svg("text", { class: "mark", x: across(dot.x) + (late ? -9 : 9), y: Math.max(top + 24, up(dot.y) - 9), "text-anchor": late ? "end" : "start" }, dot.label));
    }
  }
  picture.append(...labels);

  const parts = [];
  const readings = [];
  if (legend) {
    const list = el("p", { class: "legend" });
    for (const line of lines.filter((l) => l.name)) {
      const value = el("b");
      const last = [...line.points].reverse().find((p) => p[1] != null);
      const show = (point) => { value.textContent = point && point[1] != null ? line.format(point[1]) : "–"; };
      show(line.shown ?? last);
      readings.push({ line, show });
      list.append(el("span", {}, swatch(line.kind), `${line.name} `, value));
    }
    const moment = el("span");
    list.append(moment);
    parts.push(list);
    const cursor = svg("path", { class: "cursor", d: "" });
    picture.append(cursor);
    picture.addEventListener("pointermove", (event) => {
      const scale = width / picture.getBoundingClientRect().width;
      const at = x.min + ((event.offsetX * scale - left) / (width - left - right)) * (x.max - x.min);
      if (!inside(at)) return;
      host.chartHeld = event.pointerType === "mouse";
      cursor.setAttribute("d", `M${across(at)} ${top}V${height - bottom}`);
      moment.textContent = `at ${x.read ? x.read(at) : x.format(at)}`;
      for (const { line, show } of readings)
        show(line.points.reduce((best, p) => (best && Math.abs(best[0] - at) <= Math.abs(p[0] - at) ? best : p), null));
    });
    picture.addEventListener("pointerleave", () => {
      host.chartHeld = false;
      draw(host);
    });
  }
  // The link stays, with the focus that it may have.
  const saver = host.querySelector(".csv") ?? el("p", { class: "csv" }, saveLink(host));
  for (const child of [...host.children]) if (child !== saver) child.remove();
  if (!host.contains(saver)) host.append(saver);
  host.prepend(...parts, picture);
}

// A row a point.
function csvOf({ x, y, lines = [], stack, dots = [] }) {
  const rows = [["series", x.label, y.label]];
  lines.forEach((line, i) => line.points.forEach(([at, v]) => v != null && rows.push([line.name || i + 1, at, v])));
  for (const [at, ...row] of stack?.rows ?? []) row.forEach((v, i) => rows.push([stack.parts[i][2], at, v]));
  for (const dot of dots) rows.push([dot.label || dot.text, dot.x, dot.y]);
  return rows.map((row) => row.map((v) => (typeof v === "number" ? v : `"${v.replaceAll('"', '""')}"`)).join() + "\n").join("");
}

function saveLink(host) {
  const link = el("a", { href: "#", download: "chart.csv", "aria-label": `CSV: ${host.chartGiven.y.label}` }, "CSV");
  link.addEventListener("click", () => { link.href = `data:text/csv,${encodeURIComponent(csvOf(host.chartGiven))}`; });
  return link;
}
