"use strict";
// The page of the demo: playback on one time axis, the passes of a request, and the replay of a pasted edit.
// All that it shows is in the element #demo-data; `replay` is in replay.js. Texts are only ever set as text.

const ORIGINS = { prediction: 1, context: 2, recipe: 3, memory: 4 };
const SOURCE_NAMES = {
  prediction: "the prediction",
  context: "the prompt and the output so far",
  recipe: "a recipe: what often follows in any text",
  memory: "earlier answers",
};
const AXIS = 1000; // units of an svg's width for the longest request
const CLOSEST_MARKS = 2.5; // units
const CONTEXT_SHOWN = 48; // tokens shown around a place

const byId = (id) => document.getElementById(id);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const plural = (number, word) => `${number} ${word}${number === 1 ? "" : word.endsWith("s") ? "es" : "s"}`;

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** The spans of one pass: its accepted drafts in the colour of their source, then the model's own token. */
function spansOfStep(run, step, start) {
  const accepted = run.output.slice(start, start + step.accepted).join("");
  const own = run.output.slice(start + step.accepted, start + step.count).join("");
  const spans = [];
  if (accepted) spans.push(element("span", `o o${ORIGINS[step.source]}`, accepted));
  if (own) spans.push(element("span", "o o0", own));
  return spans;
}

// --- playback -------------------------------------------------------------------------------------------

/** One request's answer, of which a part is written and the rest is faint. */
class Pane {
  constructor(root) {
    this.title = element("h3");
    this.state = element("p", "state");
    this.text = element("pre", "tokens");
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "region");
    root.replaceChildren(this.title, this.state, this.text);
  }

  load(run) {
    this.run = run;
    this.title.textContent = run.label;
    this.text.setAttribute("aria-label", `Answer: ${run.label}`);
    let start = 0;
    this.ends = []; // tokens written after each pass
    this.spans = run.steps.map((step) => {
      const spans = spansOfStep(run, step, start);
      start += step.count;
      this.ends.push(start);
      return spans;
    });
    this.shown = 0;
    for (const span of this.spans.flat()) span.classList.add("todo");
    this.text.replaceChildren(...this.spans.flat());
    this.text.scrollTop = 0;
  }

  /** Show the request as it stands after `seconds`. */
  show(seconds, follow) {
    const total = this.spans.length;
    // A pass ends at (index + 1) * seconds / total; half a microsecond covers rounding.
    const done = Math.max(0, Math.min(total, Math.floor(((seconds + 5e-7) / this.run.seconds) * total)));
    for (let i = this.shown; i < done; i += 1) for (const span of this.spans[i]) span.classList.remove("todo");
    for (let i = done; i < this.shown; i += 1) for (const span of this.spans[i]) span.classList.add("todo");
    this.shown = done;
    const tokens = done ? this.ends[done - 1] : 0;
    const finished = done === total ? "finished: " : "";
    const written = `${tokens} of ${plural(this.run.output.length, "token")}`;
    this.state.textContent = `${finished}${written}, ${done} of ${plural(total, "pass")}`;
    const frontier = done && this.spans[done - 1].at(-1);
    if (follow && frontier)
      this.text.scrollTop = frontier.offsetTop - this.text.offsetTop - this.text.clientHeight * 0.7;
  }
}

class Playback {
  constructor(rows, none, onRow) {
    this.rows = rows;
    // The axis holds all requests that can be played.
    this.end = Math.max(...rows.filter((row) => row.steps).map((row) => row.seconds));
    this.panes = [new Pane(byId("pane-none")), new Pane(byId("pane-row"))];
    this.panes[0].load(none);
    this.slider = byId("time");
    this.button = byId("play");
    this.slider.addEventListener("input", () => {
      this.pause();
      this.show((this.slider.value / this.slider.max) * this.end, true);
    });
    this.button.addEventListener("click", () => (this.playing ? this.pause() : this.play()));
    for (const radio of document.querySelectorAll("#choice input"))
      radio.addEventListener("change", () => onRow(radio.value));
    this.drawBars();
  }

  /** A bar for each request, with a mark for each pass unless the marks would run together. */
  drawBars() {
    this.heads = this.rows.map((row) => {
      const lane = document.querySelector(`#lanes [data-row="${CSS.escape(row.name)}"] svg`);
      const width = Math.min(AXIS, (AXIS * row.seconds) / this.end);
      const pass = (AXIS * row.seconds) / this.end / row.numSteps;
      const parts = [svg("rect", { class: "bar", x: 0, y: 0, width, height: 20 })];
      if (pass >= CLOSEST_MARKS)
        for (let x = pass; x < width - pass / 2; x += pass)
          parts.push(svg("rect", { class: "mark", x: x - 0.25, y: 0, width: 0.5, height: 20 }));
      // A request that takes longer than the axis is cut off; its time stands beside it.
      const cut = "M 975 -2 L 985 10 L 975 22 L 982 22 L 992 10 L 982 -2 Z";
      if (row.seconds > this.end) parts.push(svg("path", { class: "cut", d: cut }));
      const head = svg("rect", { class: "head", y: -2, width: 2.5, height: 24 });
      lane.replaceChildren(...parts, head);
      return head;
    });
  }

  choose(run) {
    this.panes[1].load(run);
    for (const lane of document.querySelectorAll("#lanes li"))
      lane.classList.toggle("chosen", lane.dataset.row === run.name);
    this.pause();
    // Where this request has just finished, the difference to the other is seen without playing anything.
    this.show(run.seconds, true);
  }

  show(seconds, follow) {
    this.now = Math.max(0, Math.min(this.end, seconds));
    this.slider.value = Math.round((this.now / this.end) * this.slider.max);
    const text = `${this.now.toFixed(2)} s of ${this.end.toFixed(2)} s`;
    byId("clock").textContent = text;
    this.slider.setAttribute("aria-valuetext", text);
    for (const head of this.heads) head.setAttribute("x", (1000 * this.now) / this.end - 1);
    for (const pane of this.panes) pane.show(this.now, follow);
  }

  play() {
    this.playing = true;
    this.button.textContent = "❚❚ Pause";
    this.button.setAttribute("aria-label", "Pause");
    let before = null;
    // From the start the first time, and after the end; else from where it was paused.
    let now = this.paused && this.now < this.end ? this.now : 0;
    const frame = (stamp) => {
      if (!this.playing) return;
      if (before !== null) now += ((stamp - before) / 1000) * Number(byId("speed").value);
      before = stamp;
      this.show(now, true);
      if (now >= this.end) this.pause();
      else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  pause() {
    this.paused = this.playing;
    this.playing = false;
    this.button.textContent = "▶ Play";
    this.button.setAttribute("aria-label", this.paused && this.now < this.end ? "Play on" : "Play from the start");
  }
}

// --- the passes of one request ----------------------------------------------------------------------------

class Explorer {
  constructor(root) {
    root.replaceChildren(byId("explorer-template").content.cloneNode(true));
    this.find = (selector) => root.querySelector(selector);
    this.slider = this.find(".pass");
    this.slider.addEventListener("input", () => this.show(Number(this.slider.value)));
    this.find(".previous").addEventListener("click", () => this.show(this.index - 1));
    this.find(".next").addEventListener("click", () => this.show(this.index + 1));
    this.find(".next-rejection").addEventListener("click", () => this.show(this.nextRejection()));
    this.find(".chart").addEventListener("click", (event) => {
      const box = this.find(".chart").getBoundingClientRect();
      this.show(Math.floor(((event.clientX - box.left) / box.width) * this.run.steps.length));
    });
  }

  load(run, label) {
    this.run = run;
    let start = 0;
    this.starts = run.steps.map((step) => (start += step.count) - step.count);
    this.slider.max = run.steps.length - 1;
    this.drawChart(label);
    this.show(this.mostTelling());
  }

  /** A pass in which the output leaves the prediction: some drafts accepted, some rejected. Else the second. */
  mostTelling() {
    const { steps } = this.run;
    const both = (step) => Math.min(step.accepted, step.verified - step.accepted);
    const score = (step) => (step.source === "prediction" ? both(step) : 0);
    const best = steps.reduce((chosen, step, i) => (score(step) > score(steps[chosen]) ? i : chosen), 0);
    return score(steps[best]) ? best : Math.min(1, steps.length - 1);
  }

  nextRejection() {
    const rejects = (step) => step.verified > step.accepted;
    const later = this.run.steps.findIndex((step, i) => i > this.index && rejects(step));
    return later >= 0 ? later : Math.max(0, this.run.steps.findIndex(rejects));
  }

  /** Above the line the tokens that each pass wrote, below it the drafts that it rejected. */
  drawChart(label) {
    const { steps } = this.run;
    const up = Math.max(...steps.map((step) => step.count), 1);
    const down = Math.max(...steps.map((step) => step.verified - step.accepted), 1);
    const chart = this.find(".chart");
    chart.setAttribute("viewBox", `0 0 ${steps.length} ${up + down}`);
    chart.setAttribute("aria-label", `Tokens written and drafts rejected in each pass: ${label}`);
    this.column = svg("rect", { class: "column", y: 0, width: 1, height: up + down });
    const bars = [this.column];
    steps.forEach((step, i) => {
      const add = (name, y, height) => {
        if (height) bars.push(svg("rect", { class: name, x: i + 0.1, y, width: 0.8, height }));
      };
      const own = step.count - step.accepted;
      add("own", up - step.count, own);
      add(`from${ORIGINS[step.source] || 0}`, up - step.accepted, step.accepted);
      add("bad", up, step.verified - step.accepted);
    });
    chart.replaceChildren(...bars);
  }

  show(index) {
    const { steps } = this.run;
    this.index = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[this.index];
    this.slider.value = this.index;
    this.column.setAttribute("x", this.index);
    const rejected = step.verified - step.accepted;
    const drafts = step.proposed.length
      ? `${step.proposed.length} proposed, ${step.accepted} accepted, ${rejected} rejected`
      : "no drafts";
    const written = `${plural(step.count, "token")} written`;
    const summary = `Pass ${this.index + 1} of ${steps.length}: ${drafts}; ${written}.`;
    this.find(".summary").textContent = summary;
    this.slider.setAttribute("aria-valuetext", `pass ${this.index + 1} of ${steps.length}`);
    this.find(".previous").disabled = this.index === 0;
    this.find(".next").disabled = this.index === steps.length - 1;
    this.find(".next-rejection").disabled = !steps.some((other) => other.verified > other.accepted);
    this.showOutput(step);
    this.showPlace(step);
  }

  /** The end of the output so far, then this pass: its drafts by their fate, and the model's own token. */
  showOutput(step) {
    const { output } = this.run;
    const start = this.starts[this.index];
    const matched = Math.min(step.matched || 0, start, CONTEXT_SHOWN);
    const accepted = step.proposed.slice(0, step.accepted).join("");
    const origin = ORIGINS[step.source] || 0;
    this.find(".now").replaceChildren(
      element("span", "past", output.slice(Math.max(0, start - CONTEXT_SHOWN), start - matched).join("")),
      element("span", "matched", output.slice(start - matched, start).join("")),
      element("span", `o o${origin} accepted`, accepted),
      element("span", "o rejected", step.proposed.slice(step.accepted, step.verified).join("")),
      element("span", "o unverified", step.proposed.slice(step.verified).join("")),
      element("span", "o o0 own", output.slice(start + step.accepted, start + step.count).join("")),
    );
  }

  /** The text that was drafted from, around the place, and why that place. */
  showPlace(step) {
    const { prompt, prediction, output } = this.run;
    const start = this.starts[this.index];
    const place = this.find(".place");
    const drafted = step.proposed.length > 0;
    const isContext = step.source === "context";
    const text = isContext ? [...prompt, ...output.slice(0, start)] : prediction;
    const inText = drafted && step.position !== null && (isContext || step.source === "prediction");
    place.hidden = !inText;
    const facts = [];
    if (inText) {
      const from = Math.max(0, step.position - Math.max(CONTEXT_SHOWN, step.matched));
      const to = step.position + step.proposed.length;
      place.replaceChildren(
        element("span", "past", text.slice(from, step.position - step.matched).join("")),
        element("span", "matched", text.slice(step.position - step.matched, step.position).join("")),
        element("span", "cursor-mark"),
        element("span", `o o${ORIGINS[step.source]}`, text.slice(step.position, to).join("")),
        element("span", "past", text.slice(to, to + CONTEXT_SHOWN / 2).join("")),
      );
      facts.push(["Place", `token ${step.position} of ${text.length}`], ["Equal tokens before it", step.matched]);
    }
    if (drafted && step.expected !== undefined)
      facts.push(["Drafts expected to be accepted", `${step.expected.toFixed(1)} of ${step.proposed.length}`]);
    if (step.cursor && prediction.length)
      facts.push(["Cursor in the prediction", `${step.cursor[0]} → ${step.cursor[1]} of ${prediction.length}`]);
    if (step.others) facts.push(["Other candidates", step.others]);
    this.find(".place-title").textContent = drafted ? `Drafts from ${SOURCE_NAMES[step.source]}` : "No drafts";
    const first = this.index === 0 ? "The first pass reads the prompt; drafts begin with the second." : "";
    const none = drafted ? "" : first || "No place was likely enough to be worth a draft.";
    this.find(".why").textContent = step.why ? `Why there: ${step.why}.` : none;
    this.find(".facts").replaceChildren(
      ...facts.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", String(value))]),
    );
  }
}

// --- the replay of a pasted edit --------------------------------------------------------------------------

function connectReplay() {
  const root = byId("yours-explorer");
  const explorer = new Explorer(root);
  const show = () => {
    const run = replay(byId("before").value, byId("after").value, Number(byId("num-draft-tokens").value));
    const accepted = (source) => sum(run.steps.map((step) => (step.source === source ? step.accepted : 0)));
    const rejected = sum(run.steps.map((step) => step.verified - step.accepted));
    const tokens = run.output.length;
    byId("yours-result").textContent =
      `${plural(tokens, "token")} in ${plural(run.steps.length, "pass")} instead of ${tokens}: ` +
      `${(tokens / run.steps.length).toFixed(1)}× fewer. ${accepted("prediction")} drafts accepted from the ` +
      `prediction, ${accepted("context")} from the output so far; ${rejected} rejected.`;
    root.hidden = false;
    explorer.load(run, "your edit");
  };
  byId("yours").addEventListener("submit", (event) => {
    event.preventDefault();
    show();
  });
  show(); // the example that stands there at first
}

// --- the page ---------------------------------------------------------------------------------------------

function start() {
  const { rows, prompt } = JSON.parse(byId("demo-data").textContent);
  for (const row of rows) row.prompt = prompt;
  const explorer = new Explorer(byId("explorer"));
  const playback = new Playback(rows, rows[0], choose);
  function choose(name) {
    const row = rows.find((candidate) => candidate.name === name);
    playback.choose(row);
    explorer.load(row, row.label);
  }
  connectReplay();
  choose(document.querySelector("#choice input:checked").value);
}

start();
