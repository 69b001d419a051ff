// Draws the daemon's OpenAPI document: routes with their parameters, bodies and answers. Asks nothing else.

import { el } from "./charts.js";

const $ = (id) => document.getElementById(id);
const pretty = (value) => el("pre", { class: "scroll" }, JSON.stringify(value, null, 1));
const deref = (document, value) => (value?.$ref ? value.$ref.slice(2).split("/").reduce((at, part) => at[part], document) : value);

function typeOf(schema = {}) {
  const some = schema.oneOf ?? schema.anyOf;
  if (some) return some.map(typeOf).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((v) => JSON.stringify(v)).join(" or ");
  const low = schema.minimum ?? schema.exclusiveMinimum, high = schema.maximum;
  const range = low == null && high == null ? "" : ` (${"exclusiveMinimum" in schema ? "above " : ""}${low ?? "…"} to ${high ?? "…"})`;
  if (schema.type === "array") return `array of ${typeOf(schema.items)}`;
  return [schema.type ?? "any"].flat().join(" or ") + range;
}

function table(caption, rows) {
  if (!rows.length) return null;
  const cells = (kind, row) => el("tr", {}, ...row.map((text) => el(kind, {}, String(text ?? ""))));
  return el("table", {}, el("caption", {}, caption), el("thead", {}, cells("th", ["name", "needed", "what", ""])), el("tbody", {}, ...rows.map((row) => cells("td", row))));
}

const fields = (schema) => Object.entries(schema?.properties ?? {}).map(([name, s]) =>
  [name, schema.required?.includes(name) ? "yes" : "", typeOf(s), [s.description, "default" in s ? `default ${JSON.stringify(s.default)}` : ""].filter(Boolean).join("; ")]);

function contents(document, holder, caption) {
  return Object.entries(holder.content ?? {}).flatMap(([media, { schema, example }]) => {
    const whole = deref(document, schema);
    return [table(`${caption}, ${media}`, fields(whole)) ?? el("p", {}, `${caption}, ${media}: ${typeOf(whole)}`), example === undefined ? null : pretty(example)];
  });
}

function route(document, path, method, said) {
  const answers = Object.entries(said.responses ?? {}).map(([status, answer]) =>
    el("details", {}, el("summary", {}, `${status}: ${answer.description}`), ...contents(document, answer, "Answer")));
  const parameters = (said.parameters ?? []).map((p) => [p.name, p.required ? "yes" : "", `${p.in}: ${typeOf(p.schema)}`, p.description ?? p.schema.description]);
  return el("details", { class: "card", id: said.operationId }, el("summary", {}, el("strong", {}, `${method.toUpperCase()} ${path}`), ` ${said.summary ?? ""}`),
    table("Parameters", parameters), ...contents(document, said.requestBody ?? {}, "Body"), ...answers);
}

async function show() {
  const key = sessionStorage.getItem("hybridindex-key");
  const answer = await fetch("v1/openapi.json", { headers: key ? { authorization: `Bearer ${key}` } : {}, credentials: "omit", cache: "no-store" });
  if (answer.status === 401) throw new Error("A key is needed: give it to the page first, in this tab");
  if (!answer.ok) throw new Error(`The daemon answered ${answer.status}`);
  const document = await answer.json();
  $("said").textContent = `${document.info.title} ${document.info.version}. ${document.info.description}`;
  $("routes").replaceChildren(...Object.entries(document.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, said]) => route(document, path, method, said))));
}

show().catch((error) => { $("said").textContent = `${error.message}.`; });
