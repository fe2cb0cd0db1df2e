// The status page: polls /status.json, draws it, and streams one prompt to a variant and to the base.
// Everything that comes from the server is set as text, never as markup.
"use strict";

const POLL_MS = 2000;
const at = (id) => document.getElementById(id);
const headers = () => {
  const key = sessionStorage.getItem("key");
  return key ? { Authorization: `Bearer ${key}` } : {};
};

// ---- figures ----
const bytes = (n) => {
  if (n === null) return "";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (n >= 1000 && unit < units.length - 1) { n /= 1000; unit += 1; }
  return `${n >= 100 || unit === 0 ? n.toFixed(0) : n.toFixed(1)} ${units[unit]}`;
};
const seconds = (s) => (s === null ? "" : s < 1 ? `${(s * 1000).toFixed(0)} ms` : `${s.toFixed(2)} s`);
const share = (x) => (x === null ? "" : `${(100 * x).toFixed(0)} %`);
const duration = (s) => (s < 120 ? `${s} s` : s < 7200 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);

// ---- plots ----
const SVG = "http://www.w3.org/2000/svg";
function draw(svg, series, { fill = false, from = 0, span = null } = {}) {
  // series: lists of numbers of one length; drawn from 0 to their common maximum.
  const width = 100, height = 40;
  const top = Math.max(1e-9, ...series.flat()) * 1.05;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.replaceChildren();
  series.forEach((values, index) => {
    if (values.length < 2) return;
    const total = (span ?? values.length) - 1;
    const points = values.map((value, i) =>
      `${(width * (from + i) / total).toFixed(2)},${(height * (1 - value / top)).toFixed(2)}`);
    if (fill && index === 0) {
      const area = document.createElementNS(SVG, "polygon");
      const ends = [`${width * (from + values.length - 1) / total},${height}`, `${width * from / total},${height}`];
      area.setAttribute("points", [...points, ...ends].join(" "));
      svg.append(area);
    }
    const line = document.createElementNS(SVG, "polyline");
    line.setAttribute("points", points.join(" "));
    if (index === 1) line.classList.add("two");
    svg.append(line);
  });
}

// ---- status ----
const rows = new Map();
const COLUMNS = [
  (v) => [v.name, ""],
  (v) => [v.content_hash === null ? "base" : v.tier + (v.pinned ? ", pinned" : ""), v.tier === "device" ? "good" : "quiet"],
  (v) => [v.device_bytes ? bytes(v.device_bytes) : "", "number"],
  (v) => [v.requests_per_s.toFixed(2), "number"],
  (v) => [v.tokens_per_s.toFixed(1), "number"],
  (v) => [v.running, "number"],
  (v) => [v.queued, "number"],
  (v) => [seconds(v.first_token_p50_s), "number"],
  (v) => [seconds(v.first_token_p99_s), "number"],
  null, // the plot
  (v) => [share(v.hit_rate), "number"],
  (v) => [v.content_hash === null ? "" : v.loads, "number"],
];

function row(name) {
  const element = document.createElement("tr");
  COLUMNS.forEach((column, index) => {
    const cell = document.createElement(index === 0 ? "th" : "td");
    if (index === 0) { cell.scope = "row"; cell.title = name; }
    if (column === null) {
      const plot = document.createElementNS(SVG, "svg");
      plot.classList.add("spark");
      plot.setAttribute("role", "img");
      plot.setAttribute("aria-label", "Time to first token of recent requests");
      cell.append(plot);
    }
    element.append(cell);
  });
  return element;
}

function showModels(variants) {
  const body = document.querySelector("#models tbody");
  const names = new Set(variants.map((v) => v.name));
  for (const [name, element] of rows) if (!names.has(name)) { element.remove(); rows.delete(name); }
  variants.forEach((variant, position) => {
    if (!rows.has(variant.name)) rows.set(variant.name, row(variant.name));
    const element = rows.get(variant.name);
    if (body.children[position] !== element) body.insertBefore(element, body.children[position] ?? null);
    COLUMNS.forEach((column, index) => {
      const cell = element.children[index];
      if (column === null) {
        const samples = variant.first_token_recent_s;
        const recent = samples.slice(-60);
        draw(cell.firstChild, [recent]);
        cell.title = recent.length ? `last ${recent.length}, up to ${seconds(Math.max(...recent))}` : "no traffic yet";
        return;
      }
      const [text, kind] = column(variant);
      if (cell.textContent !== String(text)) cell.textContent = text;
      cell.className = kind;
    });
  });
  const select = at("variant");
  const options = variants.filter((v) => v.content_hash !== null).map((v) => v.name);
  if (options.join("\n") !== [...select.options].map((o) => o.value).join("\n")) {
    const chosen = select.value;
    select.replaceChildren(...options.map((name) => new Option(name, name)));
    if (options.includes(chosen)) select.value = chosen;
  }
}

function meter(name, used, budget, text) {
  at(`${name}-text`).textContent = text;
  at(`${name}-bar`).style.width = `${budget ? Math.min(100, 100 * used / budget) : 0}%`;
}

let base = "";
function show(status) {
  base = status.base;
  const state = at("state");
  state.textContent = status.ready ? "ready" : status.draining ? "draining" : `not ready: ${status.why_not_ready}`;
  state.className = `pill ${status.ready ? "good" : "bad"}`;
  at("facts").textContent =
    `base ${status.base}, ${status.variants.length - 1} variants, up ${duration(status.uptime_s)}, ` +
    `${status.engine.tokens_generated} tokens in ${status.engine.steps} steps`;
  const past = status.history;
  const last = past.tokens_per_s.length ? past.tokens_per_s[past.tokens_per_s.length - 1] : 0;
  at("rate").textContent = last.toFixed(0);
  at("running").textContent = status.running;
  at("queued").textContent = status.queued;
  draw(at("rate-plot"), [past.tokens_per_s], { fill: true });
  draw(at("queue-plot"), [past.running, past.queued]);
  at("rate-span").textContent = past.age_s.length > 1
    ? `last ${duration(Math.round(past.age_s[0]))}, at most ${Math.max(...past.tokens_per_s).toFixed(0)}` : "";
  const device = status.device_bytes, host = status.host, kv = status.kv_tokens;
  meter("device", device.used, device.budget, `${bytes(device.used)} of ${bytes(device.budget)}`);
  at("host-meter").hidden = host === null;
  if (host) meter("host", host.used, host.budget, `${bytes(host.used)} of ${bytes(host.budget)}`);
  meter("kv", kv.used, kv.budget, `${kv.used} of ${kv.budget} tokens`);
  at("loads").textContent = status.loads_in_flight
    ? `${status.loads_in_flight} loading` : `${status.engine.preemptions} preemptions`;
  showModels(status.variants);
  at("broken").replaceChildren(...status.broken.map((broken) => {
    const item = document.createElement("li");
    item.textContent = `not served: ${broken.reason}`;
    return item;
  }));
  if (!running) names();
}

function lost(why) {
  at("state").textContent = why;
  at("state").className = "pill bad";
}

async function poll() {
  try {
    const answer = await fetch("status.json", { headers: headers(), cache: "no-store" });
    at("key-form").hidden = answer.status !== 401;
    if (answer.ok) show(await answer.json());
    else lost(answer.status === 401 ? "API key needed" : `status ${answer.status}`);
  } catch {
    lost("no connection");
  }
  setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", at("key").value);
  at("key").value = "";
});

// ---- try ----
let running = null;
function names() {
  at("left-name").textContent = at("variant").value || "no variant yet";
  at("right-name").textContent = base ? `${base} (base)` : "";
}

async function* events(body) {
  // The data of server-sent events; a chunk may end anywhere.
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

async function ask(side, model, signal) {
  const output = at(side), facts = at(`${side}-facts`);
  output.textContent = "";
  facts.textContent = "waiting";
  const started = performance.now();
  let first = null, usage = null;
  try {
    const answer = await fetch("v1/chat/completions", {
      method: "POST", signal,
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify({
        model, stream: true, stream_options: { include_usage: true },
        messages: [{ role: "user", content: at("prompt").value }],
        max_tokens: Number(at("tokens").value), temperature: Number(at("temperature").value),
      }),
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const data of events(answer.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const text = chunk.choices[0]?.delta.content;
      if (text) {
        first ??= performance.now() - started;
        output.append(text);
        output.scrollTop = output.scrollHeight;
      }
    }
    const total = (performance.now() - started) / 1000;
    facts.textContent = `${usage ? usage.completion_tokens : "?"} tokens in ${seconds(total)}` +
      (first === null ? "" : `, first after ${seconds(first / 1000)}`);
  } catch (error) {
    facts.textContent = error.name === "AbortError" ? "stopped" : error.message;
  }
}

at("try").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  at("send").disabled = true;
  at("cancel").disabled = false;
  names();
  const asked = [["right", base]];
  if (at("variant").value) asked.unshift(["left", at("variant").value]);
  await Promise.all(asked.map(([side, model]) => ask(side, model, running.signal)));
  running = null;
  at("send").disabled = false;
  at("cancel").disabled = true;
});
at("cancel").addEventListener("click", () => running?.abort());
at("variant").addEventListener("change", () => { if (!running) names(); });
poll();
