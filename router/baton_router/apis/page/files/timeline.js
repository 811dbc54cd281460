"use strict";

const TERMS = JSON.parse(find("terms").textContent);
const STAGES = {
  "router queue": "waiting in the router until its workers admitted the request",
  "prefill queue": "waiting at the worker that computes the prompt, until its first step for it",
  prefill: "computing the prompt, up to the first token",
  transfer: "from the first token until the decode worker had confirmed the prompt's KV",
  decode: "writing the other tokens",
};

for (const [list, meanings] of [["stage-list", STAGES], ["term-list", TERMS]]) {
  for (const [name, meaning] of Object.entries(meanings)) {
    find(list).append(make("dt", "", name), make("dd", "", meaning));
  }
}

function milliseconds(seconds) {
  const ms = seconds * 1000;
  return ms >= 1000 ? `${seconds.toFixed(2)}\u00a0s` : `${ms.toFixed(ms < 10 ? 1 : 0)}\u00a0ms`;
}

/** Where the time went, each part from the end of the one before. */
function partsOf(seconds) {
  const ends = [
    ["queue", "router queue", seconds.admission],
    ["wait", "prefill queue", seconds.prefill_started],
    ["prefill", "prefill", seconds.time_to_first_token],
    ["transfer", "transfer", seconds.handed_over],
    ["decode", "decode", seconds.total],
  ];
  const parts = [];
  let begin = 0;
  for (const [kind, name, end] of ends) {
    if (end === undefined || end < begin) continue; // it did not happen, or within the one before
    parts.push({ kind, name, begin, length: end - begin });
    begin = end;
  }
  return parts;
}

function summaryOf({ usage, seconds }) {
  const decoding = seconds.total - seconds.time_to_first_token;
  const isMeasured = usage.num_output_tokens > 1 && decoding > 0;
  const rate = isMeasured ? ` \u00b7 ${((usage.num_output_tokens - 1) / decoding).toFixed(0)} tokens/s` : "";
  const summary = make("p", "quiet", `${milliseconds(seconds.total)} \u00b7 ${usage.num_prompt_tokens} prompt tokens (`);
  summary.append(
    `${usage.num_cached_prompt_tokens ?? 0} `, term("cached", TERMS.cached),
    `) \u00b7 ${usage.num_output_tokens} written${rate}`,
  );
  return summary;
}

/** The reason of a placement, whose differences of costs explain themselves. */
function reasonWithTerms(reason) {
  const line = make("p", "quiet");
  reason.split(/(?<=\(|, )([a-z ]+)(?= [+-]\d)/).forEach((text, i) => {
    line.append(i % 2 ? term(text, TERMS[text]) : text);
  });
  return line;
}

/** The timeline of an answer, and the placement of its request. */
function about(told) {
  const element = make("section", "about");
  element.setAttribute("aria-label", "Timeline and placement");
  const total = told.seconds.total;
  const bar = make("div", "bar");
  const legend = make("ul", "legend");
  const parts = partsOf(told.seconds);
  for (const { kind, name, begin, length } of parts) {
    const part = make("span", kind);
    part.title = `${name}: ${milliseconds(length)}`;
    part.style.left = `${(100 * begin) / total}%`;
    part.style.width = `${(100 * length) / total}%`;
    bar.append(part);
    const item = make("li");
    item.dataset.part = kind;
    item.append(make("i", kind), term(name, STAGES[name]), make("b", "", milliseconds(length)));
    legend.append(item);
  }
  bar.setAttribute("role", "img");
  const lengths = parts.map(({ name, length }) => `${name} ${milliseconds(length)}`).join(", ");
  bar.setAttribute("aria-label", `Timeline of ${milliseconds(total)}: ${lengths}`);
  element.append(summaryOf(told), bar, legend, where(told));
  return element;
}

function where(told) {
  const element = make("div", "placement");
  const prefill = told.prefill_worker || `${told.decode_worker} too`;
  const source = told.prefix_source ? `, its beginning from ${told.prefix_source}` : "";
  element.append(
    make("p", "where", `Prompt computed by ${prefill}${source}; written by ${told.decode_worker}.`),
    reasonWithTerms(told.reason),
  );
  if (told.candidates.length) {
    const details = make("details");
    details.append(make("summary", "", "What every worker would have cost"), costs(told));
    element.append(details);
  }
  return element;
}

function costs(told) {
  const table = make("table");
  const head = make("tr");
  const columns = [
    ["Worker"],
    ["Role", "prefill workers compute prompts, decode workers write the other tokens or do both"],
    ["Cached tokens", TERMS.cached],
    ["Cost", TERMS.cost],
    ["Made of", "terms of the cost, the largest first"],
  ];
  for (const [name, meaning] of columns) {
    const cell = make("th");
    cell.scope = "col";
    cell.append(term(name, meaning));
    head.append(cell);
  }
  const rows = make("tbody");
  for (const candidate of told.candidates) rows.append(rowOf(candidate, told));
  const heads = make("thead");
  heads.append(head);
  table.append(heads, rows);
  const frame = make("div", "table");
  frame.tabIndex = 0; // for keys to scroll it
  frame.append(table);
  return frame;
}

function rowOf(candidate, told) {
  const terms = Object.entries(candidate.terms).filter(([, cost]) => cost).sort((a, b) => b[1] - a[1]);
  const cost = terms.reduce((sum, [, one]) => sum + one, 0);
  const isAlone = !told.prefill_worker;
  const isChosen = candidate.role === "prefill"
    ? candidate.worker === told.prefill_worker
    : candidate.worker === told.decode_worker && candidate.computes_prompt === isAlone;
  const row = make("tr", isChosen ? "is-chosen" : "");
  row.append(
    make("td", "", candidate.worker + (isChosen ? " \u2713" : "")),
    make("td", "", candidate.role + (candidate.computes_prompt ? ", computes the prompt" : "")),
    make("td", "", String(candidate.num_cached_tokens)),
    make("td", "", candidate.excluded ? "excluded" : milliseconds(cost)),
  );
  const made = make("td", "", candidate.excluded);
  if (!candidate.excluded) {
    terms.forEach(([name, one], i) => {
      made.append(i ? " + " : "", term(name, TERMS[name]), ` ${milliseconds(one)}`);
    });
  }
  row.append(made);
  return row;
}
