"use strict";

// Asks for what has changed, once a second while somebody looks, and draws it. Texts that come from outside are
// only ever set as text.

const POLL_MS = 1000;
const LATEST_MS = 15000;
const RANGES_S = [60, 300, 1800, 7200];
const STEPS_S = [5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600];
const TICK_PX = 100;
const FATES = ["used", "joined", "wasted", "undecided"];

const byId = (id) => document.getElementById(id);

const view = { epoch: null, version: 0, page: null, conversations: new Map(), rows: new Map() };
const choice = readChoice();
let clock = { server: 0, local: 0 };
let held = null;
let failures = 0;

// ---- words and numbers ----

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const number = (value) => whole.format(value);

function short(tokens) {
  if (tokens < 10000) return number(tokens);
  return tokens < 1e6 ? `${(tokens / 1e3).toFixed(tokens < 1e5 ? 1 : 0)} k` : `${(tokens / 1e6).toFixed(1)} M`;
}

function duration(seconds) {
  if (seconds < 0.0005) return "0 s";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${(seconds / 3600).toFixed(1)} h`;
}

const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const saved = (figures) => (figures.saved_s > 0 ? `≈ ${duration(figures.saved_s)}` : duration(0));
const time = (unix_s, seconds = true) =>
  new Date(unix_s * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(seconds && { second: "2-digit" }) });

function fate(restore) {
  const { landed_tokens, used_tokens, joined_tokens, wasted_tokens } = restore.yielded;
  if (used_tokens > wasted_tokens) return joined_tokens ? "joined" : "used";
  if (wasted_tokens) return "wasted";
  if (landed_tokens || restore.ended_s === null) return "undecided";
  return "nothing";
}

const outcome = (restore) =>
  restore.reason && restore.reason !== "complete" ? `${restore.state}, ${restore.reason.replaceAll("_", " ")}` : restore.state;

// ---- elements ----

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function say(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

// ---- sums ----

function drawSums(page) {
  const sums = page.figures;
  say("saved", saved(sums));
  say("saved-note", sums.unestimated
    ? `${plural(sums.unestimated, "used restore")} more without an estimate`
    : sums.returned ? `${duration(sums.saved_s / sums.returned)} a continuation` : "no continuation yet");
  say("gaps", number(sums.gaps));
  const open = [...view.conversations.values()].filter(isOpen).length;
  const mean = sums.gap_s && sums.gaps > open ? `mean ${duration(sums.gap_s / (sums.gaps - open))}` : "";
  say("gaps-note", [`${open} open`, `${sums.returned} continued`, mean].filter(Boolean).join(" · "));
  say("restores", number(sums.restores));
  say("restores-note", `${number(sums.refused)} refused`);
  say("landed", number(sums.landed_tokens));
  const parts = {
    used: sums.used_tokens - sums.joined_tokens,
    joined: sums.joined_tokens,
    wasted: sums.wasted_tokens,
    undecided: sums.undecided_tokens,
  };
  byId("share").replaceChildren(...FATES.filter((name) => parts[name] > 0).map((name) => {
    const part = make("span", name);
    part.style.flexGrow = parts[name] / sums.landed_tokens;
    return part;
  }));
  byId("share").setAttribute("aria-label", FATES.map((name) => `${name} ${number(parts[name])}`).join(", "));
  for (const name of FATES) say(name, number(parts[name]));
}

function drawRefusals(page) {
  const codes = Object.entries(page.refusals).sort((one, other) => other[1] - one[1]);
  byId("refusals").hidden = codes.length === 0;
  byId("codes").replaceChildren(...codes.map(([code, count]) => {
    const row = make("tr");
    row.append(make("td", "key", code), make("td", "n", number(count)));
    return row;
  }));
}

// ---- the timeline ----

const isOpen = (conversation) => conversation.gaps.length > 0 && conversation.gaps.at(-1).ended_s === null;
const now = () => clock.server + (performance.now() - clock.local) / 1000;

function ticks(from, to) {
  const most = Math.max(2, byId("axis").clientWidth / TICK_PX);
  const step = STEPS_S.find((each) => (to - from) / each <= most) ?? STEPS_S.at(-1);
  const marks = [];
  for (let at = Math.ceil(from / step) * step; at < to; at += step) marks.push(at);
  return { marks, step };
}

function drawAxis(scale) {
  const { marks, step } = ticks(scale.from, scale.to);
  const labels = marks.filter((at) => scale.at(at) > 3 && scale.at(at) < 90).map((at) => {
    const label = make("span", "", time(at, step < 60));
    label.style.left = `${scale.at(at)}%`;
    return label;
  });
  const last = make("span", "last", held === null ? "now" : time(held));
  last.style.left = "100%";
  byId("axis").replaceChildren(...labels, last);
  return marks;
}

function place(element, scale, from, to) {
  const left = scale.at(Math.max(from, scale.from));
  element.style.left = `${left}%`;
  if (to !== undefined) element.style.width = `${Math.max(0, scale.at(Math.min(to, scale.to)) - left)}%`;
  return element;
}

function gapTitle(gap, until) {
  const lines = [
    `${gap.tools.join(", ") || "tools not known"}: ${duration(until - gap.started_s)}${gap.ended_s === null ? " so far" : gap.returned ? "" : ", given up"}`,
    ...(gap.expected_s === null ? [] : [`expected ${duration(gap.expected_s)}`]),
    ...gap.restores.map((restore) => {
      const { landed_tokens, used_tokens, saved_s } = restore.yielded;
      return `${outcome(restore)}: ${number(landed_tokens)} tokens landed, ${number(used_tokens)} used` + (saved_s ? `, ≈ ${duration(saved_s)} saved` : "");
    }),
    ...gap.refusals.map((refusal) => `refused: ${refusal.code}`),
  ];
  return lines.join("\n");
}

function drawRestore(restore, index, gap, scale, end) {
  const lane = `lane${index % 2}`;
  const kind = fate(restore);
  const parts = [place(make("span", `start ${lane}`), scale, restore.accepted_s)];
  const landed = restore.read_s ?? restore.ended_s ?? end;
  const reading = restore.queried_s ?? landed;
  const bar = (className, from, to) => {
    if (to > scale.from && from < scale.to && to > from) parts.push(place(make("span", `restore ${lane} ${className} ${kind}`), scale, from, to));
  };
  bar("query", restore.accepted_s, reading);
  bar("read", reading, landed);
  if (restore.yielded.landed_tokens) bar("held", landed, Math.max(landed, restore.used_s ?? gap.ended_s ?? end));
  const first = parts.find((part) => part.classList.contains("read")) ?? parts[0];
  first.dataset.fate = kind;
  return restore.accepted_s < scale.from ? parts.slice(1) : parts;
}

function drawGap(gap, scale) {
  const end = gap.ended_s ?? scale.now;
  if (end < scale.from || gap.started_s > scale.to) return [];
  const state = gap.ended_s === null ? "open" : gap.returned ? "returned" : "unreturned";
  const block = place(make("div", `gap ${state}`), scale, gap.started_s, end);
  block.title = gapTitle(gap, end);
  block.append(make("span", "tools", gap.tools.join(", ")));
  const drawn = [block];
  const mark = (className, at, text) => {
    if (at >= scale.from && at <= scale.to) drawn.push(place(make("span", className, text), scale, at));
  };
  if (gap.expected_s !== null && gap.ended_s === null) mark("expected", gap.started_s + gap.expected_s);
  gap.restores.forEach((restore, index) => drawn.push(...drawRestore(restore, index, gap, scale, end)));
  for (const refusal of gap.refusals) mark("refusal", refusal.at_s, "×");
  for (const hint of gap.hints) mark("hint", hint.at_s, "▾");
  return drawn;
}

function makeRow(key) {
  const element = make("article", "conversation");
  element.dataset.key = key;
  const row = make("div", "row");
  const name = make("button", "name");
  name.type = "button";
  name.setAttribute("aria-expanded", "false");
  const about = make("span", "about");
  name.append(make("span", "key", key), about);
  const lane = make("div", "lane");
  const used = make("span"), savedBy = make("span");
  const numbers = make("div", "numbers");
  numbers.append(used, savedBy);
  row.append(name, lane, numbers);
  const details = make("div", "details");
  details.hidden = true;
  element.append(row, details);
  name.addEventListener("click", () => {
    if (!choice.open.delete(key)) choice.open.add(key);
    writeChoice();
    draw();
  });
  return { element, name, about, lane, used, saved: savedBy, details, detailed: null };
}

function drawRow(row, conversation, scale, marks) {
  const { figures } = conversation;
  const state = isOpen(conversation) ? "in a gap" : conversation.is_closed ? "no gap" : "continued";
  row.about.textContent = `${plural(figures.gaps, "gap")} · ${state}` + (figures.refused ? ` · ${number(figures.refused)} refused` : "");
  row.used.textContent = figures.landed_tokens ? `${short(figures.used_tokens)}` : "–";
  row.used.title = `${number(figures.landed_tokens)} landed, ${number(figures.used_tokens)} used (${number(figures.joined_tokens)} joined), ${number(figures.wasted_tokens)} wasted`;
  row.saved.textContent = figures.saved_s > 0 ? `≈ ${duration(figures.saved_s)}` : "–";
  const rules = marks.map((at) => place(make("span", "rule"), scale, at));
  row.lane.replaceChildren(...rules, ...conversation.gaps.flatMap((gap) => drawGap(gap, scale)));
  const open = choice.open.has(conversation.key);
  row.name.setAttribute("aria-expanded", String(open));
  row.details.hidden = !open;
  if (open && row.detailed !== conversation) {
    row.details.replaceChildren(detailTable(conversation));
    row.detailed = conversation;
  }
}

function restoreCells(restore) {
  const { landed_tokens, used_tokens, wasted_tokens, saved_s } = restore.yielded;
  return [
    outcome(restore),
    restore.read_s === null ? "–" : duration(restore.read_s - (restore.queried_s ?? restore.accepted_s)),
    ...[restore.requested_tokens, restore.resident_tokens, landed_tokens, used_tokens, wasted_tokens].map(number),
    saved_s ? `≈ ${duration(saved_s)}` : "–",
  ];
}

function detailTable(conversation) {
  const columns = ["gap", "began", "tools", "gap lasted", "restore", "after", "read in", "requested", "resident", "landed", "used", "wasted", "saved"];
  const words = new Set(["tools", "restore"]);
  const head = make("tr");
  head.append(...columns.map((name) => make("th", words.has(name) ? "" : "n", name)));
  const body = make("tbody");
  const line = (cells) => {
    const row = make("tr");
    row.append(...cells.map((text, index) => make("td", words.has(columns[index]) ? "" : "n", text)));
    body.append(row);
  };
  for (const gap of conversation.gaps.toReversed()) {
    const lasted = gap.ended_s === null ? "open" : duration(gap.ended_s - gap.started_s);
    let first = [String(gap.number), time(gap.started_s), gap.tools.join(", "), lasted];
    const done = [
      ...gap.restores.map((restore) => [restore.accepted_s, restoreCells(restore)]),
      ...gap.refusals.map((refusal) => [refusal.at_s, [`refused, ${refusal.code}`, ...Array(7).fill("–")]]),
    ].sort(([one], [other]) => one - other);
    for (const [at_s, [what, ...cells]] of done) {
      line([...first, what, `+ ${duration(Math.max(0, at_s - gap.started_s))}`, ...cells]);
      first = ["", "", "", ""];
    }
    if (gap.left_out) line([...first, `and ${gap.left_out} more`, ...Array(8).fill("")]);
    else if (!done.length) line([...first, "none", ...Array(8).fill("–")]);
  }
  const table = make("table");
  const thead = make("thead");
  thead.append(head);
  table.append(thead, body);
  return table;
}

function drawRows(page) {
  const to = held ?? now();
  const from = to - choice.range_s;
  const scale = { from, to, now: now(), at: (moment) => (100 * (moment - from)) / (to - from) };
  const marks = drawAxis(scale);
  const keys = page.keys.filter((key) => view.conversations.has(key));
  for (const [key, row] of view.rows) {
    if (!keys.includes(key)) {
      row.element.remove();
      view.rows.delete(key);
    }
  }
  let before = null;
  for (const key of keys) {
    if (!view.rows.has(key)) view.rows.set(key, makeRow(key));
    const row = view.rows.get(key);
    drawRow(row, view.conversations.get(key), scale, marks);
    // Moved only if it must be: moving takes the focus away.
    const next = before === null ? byId("rows").firstElementChild : before.nextElementSibling;
    if (next !== row.element) byId("rows").insertBefore(row.element, next);
    before = row.element;
  }
  say("rows-note", page.forgotten ? `${plural(page.forgotten, "older conversation")} counted in the sums and not shown` : "");
}

function draw() {
  const { page } = view;
  if (!page) return;
  const isEmpty = page.keys.length === 0 && page.forgotten === 0;
  byId("empty").hidden = !isEmpty;
  byId("sums").hidden = byId("timeline").hidden = isEmpty;
  if (isEmpty) return;
  drawSums(page);
  drawRefusals(page);
  drawRows(page);
}

// ---- what is chosen: in the address, so that a reload keeps it ----

function readChoice() {
  const given = new URLSearchParams(location.hash.slice(1));
  const range_s = Number(given.get("range"));
  return { range_s: RANGES_S.includes(range_s) ? range_s : 300, open: new Set(given.getAll("open")) };
}

function writeChoice() {
  const chosen = new URLSearchParams([["range", choice.range_s], ...[...choice.open].map((key) => ["open", key])]);
  history.replaceState(null, "", `#${chosen}`);
}

// ---- asking ----

function status(className, text) {
  byId("status").className = `status ${className}`;
  say("status-text", text);
}

function take(page) {
  if (page.epoch !== view.epoch) view.conversations.clear();
  view.epoch = page.epoch;
  view.version = page.version;
  view.page = page;
  clock = { server: page.now_s, local: performance.now() };
  for (const conversation of page.conversations) view.conversations.set(conversation.key, conversation);
  const shown = new Set(page.keys);
  for (const key of view.conversations.keys()) if (!shown.has(key)) view.conversations.delete(key);
}

async function ask() {
  const query = view.epoch === null ? "" : `?since=${view.version}&epoch=${view.epoch}`;
  try {
    const answer = await fetch(`toolgap/state${query}`, { cache: "no-store", signal: AbortSignal.timeout(LATEST_MS) });
    if (!answer.ok) throw new Error(`the gateway answered ${answer.status}`);
    take(await answer.json());
    failures = 0;
    status("live", held === null ? `live · counting since ${time(view.page.since_s, false)}` : `held at ${time(held)}`);
  } catch (problem) {
    failures += 1;
    status("lost", `${problem instanceof TypeError ? "the gateway cannot be reached" : problem.message} · trying again`);
  }
  draw();
}

async function poll() {
  if (!document.hidden) await ask();
  setTimeout(poll, POLL_MS * Math.min(8, 2 ** failures));
}

function start() {
  say("openai-url", `export OPENAI_BASE_URL=${location.origin}/v1`);
  say("anthropic-url", `export ANTHROPIC_BASE_URL=${location.origin}`);
  for (const input of document.querySelectorAll('input[name="range"]')) {
    input.checked = Number(input.value) === choice.range_s;
    input.addEventListener("change", () => {
      choice.range_s = Number(input.value);
      writeChoice();
      draw();
    });
  }
  byId("hold").addEventListener("click", () => {
    held = held === null ? now() : null;
    byId("hold").setAttribute("aria-pressed", String(held !== null));
    draw();
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
  poll();
}

start();
