"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const PAGE_ROWS = 200;
  const byId = (id) => document.getElementById(id);

  // Elements and texts. Everything from a record is set as text, never as markup.

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  function duration(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds >= 120) return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
    const [unit, scale] = unitFor(seconds);
    return `${Number((seconds * scale).toPrecision(3))} ${unit}`;
  }

  function unitFor(seconds) {
    return [["ns", 1e9], ["µs", 1e6], ["ms", 1e3]].find(([, scale]) => Number((seconds * scale).toPrecision(3)) < 1000) ?? ["s", 1];
  }

  const factor = (value) => (value === null ? "–" : `${value.toFixed(2)}×`);
  const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)}%`);
  const date = (seconds) => new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ");
  const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

  // The table.

  const COLUMNS = [
    { name: "Operation", of: (key) => key.op },
    { name: "Call", of: (key) => key.call, code: true },
    { name: "Config", of: (key) => key.config_text, code: true },
    { name: "Speed-up", of: (key) => key.speedup, show: speedup, number: true },
    { name: "Time", of: (key) => key.winner_s, show: duration, number: true },
    { name: "Candidates", of: (key) => key.counts.all, show: candidates, number: true },
    { name: "Tune", of: (key) => key.tune_s, show: duration, number: true },
    { name: "Device", of: (key) => key.device_name.split(",")[0] },
    { name: "JAX", of: (key) => key.environment.jax ?? "" },
    { name: "Written", of: (key) => key.created, show: date, number: true },
  ];
  const state = { column: 0, ascending: true, shown: PAGE_ROWS };

  function speedup(value, key) {
    if (value === null) return "–";
    return factor(value) + (key.noise === null ? "" : ` ±${(100 * key.noise).toFixed(0)}%`);
  }

  function candidates(all, key) {
    return key.counts.failed ? `${all} (${key.counts.failed} failed)` : `${all}`;
  }

  for (const key of data.keys) {
    key.text = [key.op, key.call, key.config_text, key.key, key.device].join(" ").toLowerCase();
  }

  function compare(a, b) {
    const of = COLUMNS[state.column].of;
    const [left, right] = [of(a), of(b)];
    if (left === right) return a.order - b.order;
    if (left === null || left === undefined) return 1;
    if (right === null || right === undefined) return -1;
    const sign = typeof left === "string" ? left.localeCompare(right, "en", { numeric: true }) : left - right;
    return state.ascending ? sign : -sign;
  }

  function wanted() {
    const words = byId("text").value.toLowerCase().split(/\s+/).filter(Boolean);
    const [op, device, failures] = [byId("op").value, byId("device").value, byId("failures").checked];
    return data.keys.filter(
      (key) =>
        (!op || key.op === op) &&
        (!device || key.device === device) &&
        (!failures || key.counts.failed > 0) &&
        words.every((word) => key.text.includes(word)),
    );
  }

  function drawTable() {
    const found = wanted().sort(compare);
    byId("keys").tBodies[0].replaceChildren(...found.slice(0, state.shown).map(row));
    const more = byId("more");
    more.hidden = found.length <= state.shown;
    more.textContent = `Show ${Math.min(PAGE_ROWS, found.length - state.shown)} more of ${found.length.toLocaleString("en")}`;
    byId("count").textContent = `${found.length.toLocaleString("en")} of ${count(data.keys.length, "key")}`;
    for (const [index, header] of [...byId("keys").tHead.rows[0].cells].entries()) {
      header.setAttribute("aria-sort", index !== state.column ? "none" : state.ascending ? "ascending" : "descending");
    }
  }

  function row(key) {
    const cells = COLUMNS.map((column) => {
      const value = column.of(key);
      const text = column.show ? column.show(value, key) : value;
      const classes = [column.number && "number", column.code && "code"].filter(Boolean).join(" ");
      return element("td", { class: classes || null, "data-name": column.name }, text);
    });
    const opener = element("button", { type: "button", class: "opener", "aria-expanded": "false" }, key.op);
    cells[0].replaceChildren(opener);
    const made = element("tr", { id: `key-${key.order}` }, ...cells);
    opener.addEventListener("click", () => toggle(made, opener, key));
    return made;
  }

  function toggle(row, opener, key) {
    const open = opener.getAttribute("aria-expanded") === "true";
    opener.setAttribute("aria-expanded", String(!open));
    history.replaceState(null, "", open ? "#" : `#${key.key}`);
    if (open) {
      row.nextElementSibling.remove();
      return;
    }
    const cell = element("td", { colspan: COLUMNS.length });
    row.after(element("tr", { class: "details" }, cell));
    fillDetails(cell, key);
  }

  // One key, opened.

  function fillDetails(cell, key) {
    const environment = Object.entries(key.environment).map(([name, value]) => `${name} ${value}`).join(", ");
    const facts = [
      ["Key", key.key],
      ["Config", key.config_text],
      ["Against the heuristic", against(key)],
      ["Timed", key.objective],
      ["Tune", `${duration(key.tune_s)}, written ${date(key.created)} UTC by ${key.writer || "a user's put"}`],
      ["Device", key.device],
      ["Environment", environment],
      ["Cache", key.cache],
    ];
    const list = element("dl");
    for (const [name, value] of facts) {
      if (value) list.append(element("dt", {}, name), element("dd", { class: "code" }, value));
    }
    cell.append(list);
    if (key.measured.length) {
      const plot = element("div");
      const title = "Samples of each candidate; the tall tick is the time that it is ranked by";
      cell.append(element("figure", {}, element("figcaption", {}, title), plot));
      draw(plot, (width) => samplesPlot(key, width), `${title}. The table below has the numbers.`);
      cell.append(measuredTable(key));
    }
    if (key.failed.length) {
      cell.append(element("h3", {}, "Failed"));
      const items = key.failed.map((one) =>
        element("li", {}, element("code", {}, one.config), ` in ${one.stage}: `, element("span", { class: "failed" }, one.error), `: ${one.message}`),
      );
      cell.append(element("ul", {}, ...items));
    }
    if (key.skipped.length) {
      cell.append(element("h3", {}, "Not tried"));
      const items = key.skipped.map((one) =>
        element("li", {}, `${count(one.count, "candidate")}: ${one.reason} (`, element("code", {}, one.examples.join("; ")), one.count > one.examples.length ? "; …)" : ")"),
      );
      cell.append(element("ul", {}, ...items));
    }
    if (!key.counts.all) {
      cell.append(element("p", {}, "There are no measurements: a user put it, or its report could not be kept."));
    }
  }

  function against(key) {
    if (key.heuristic === null) return null;
    if (key.speedup === null) return `${key.heuristic} was not measured`;
    if (key.measured.some((one) => one.winner && one.heuristic)) {
      return `it is the heuristic's config: no candidate was faster by more than the noise of ${percent(key.noise)}`;
    }
    return `${percent(key.margin)} less time than ${key.heuristic} (${factor(key.speedup)}), noise ${percent(key.noise)}`;
  }

  const roleOf = (one) => (one.winner ? "winner" : one.heuristic ? "heuristic" : "other");

  function measuredTable(key) {
    const best = key.measured.find((one) => one.winner)?.ranked_s;
    const head = ["Candidate", "Time", "Against the winner", "Samples", "Compile", ""].map((name, index) =>
      element("th", { class: index >= 1 && index <= 4 ? "number" : null }, name),
    );
    const rows = key.measured.map((one) =>
      element(
        "tr",
        {},
        element("td", { class: `code ${roleOf(one)}` }, one.config),
        element("td", { class: "number" }, duration(one.ranked_s)),
        element("td", { class: "number" }, best ? factor(one.ranked_s / best) : "–"),
        element("td", { class: "number" }, String(one.sample_count)),
        element("td", { class: "number" }, duration(one.compile_s)),
        element("td", { class: "notes" }, one.notes.join(", ")),
      ),
    );
    return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)));
  }

  // Plots: drawn for the width of their element, and again when that changes.

  const drawn = new Map();
  const widths = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const plot = drawn.get(target);
      if (!target.isConnected) {
        widths.unobserve(target);
        drawn.delete(target);
      } else if (plot && Math.abs(plot.width - contentRect.width) > 1) {
        plot.width = contentRect.width;
        plot.paint();
      }
    }
  });

  function draw(target, make, label) {
    const plot = { width: target.clientWidth, paint: null };
    plot.paint = () => {
      const made = make(Math.max(240, plot.width));
      made.setAttribute("role", "img");
      made.setAttribute("aria-label", label);
      target.replaceChildren(made);
    };
    plot.paint();
    drawn.set(target, plot);
    widths.observe(target);
  }

  const COLOURS = { winner: "var(--winner)", heuristic: "var(--heuristic)", other: "var(--other)" };
  const STYLE = { background: "transparent", color: "var(--front)", fontFamily: "system-ui, sans-serif", fontSize: "12px" };

  function shortened(text, characters) {
    return text.length <= characters ? text : `${text.slice(0, characters - 1)}…`;
  }

  function samplesPlot(key, width) {
    const [unit, scale] = unitFor(Math.max(...key.measured.map((one) => one.ranked_s)));
    const points = key.measured.flatMap((one) =>
      one.samples_s.map((seconds) => ({ config: one.label, time: seconds * scale, role: roleOf(one) })),
    );
    const ranked = key.measured.map((one) => ({ config: one.label, time: one.ranked_s * scale, role: roleOf(one) }));
    const times = points.concat(ranked).map((one) => one.time);
    const spansDecades = Math.max(...times) > 10 * Math.min(...times) && Math.min(...times) > 0;
    const characters = Math.floor((0.42 * width) / 7);
    const longest = Math.max(...key.measured.map((one) => Math.min(one.label.length, characters)));
    return Plot.plot({
      width,
      height: 50 + 24 * key.measured.length,
      marginLeft: 12 + 7 * longest,
      marginRight: 16,
      marginBottom: 34,
      style: STYLE,
      x: { type: spansDecades ? "log" : "linear", label: `time, ${unit}${spansDecades ? " (logarithmic)" : ""}`, tickFormat: "~f", grid: true, nice: !spansDecades },
      y: { label: null, domain: key.measured.map((one) => one.label), tickFormat: (label) => shortened(label, characters), tickSize: 0 },
      marks: [
        Plot.dot(points, { x: "time", y: "config", r: 3, fill: (one) => COLOURS[one.role], fillOpacity: 0.35 }),
        Plot.tickX(ranked, { x: "time", y: "config", stroke: (one) => COLOURS[one.role], strokeWidth: 2.5, title: (one) => `${one.config}: ${duration(one.time / scale)}` }),
      ],
    });
  }

  function drawOverview() {
    const compared = data.keys.filter((key) => key.speedup !== null);
    if (compared.length) {
      const label = `Speed-up of ${count(compared.length, "key")} over the heuristic; the table has the numbers.`;
      draw(byId("speedups"), (width) => speedupsPlot(compared, width), label);
    } else {
      byId("speedups").replaceChildren(element("p", { class: "quiet" }, "No key was compared with a heuristic."));
    }
    const tuned = data.keys.filter((key) => key.tune_s > 0);
    if (tuned.length) {
      draw(byId("costs"), (width) => costsPlot(tuned, width), `Seconds of tuning for each of ${count(new Set(tuned.map((key) => key.op)).size, "operation")}.`);
    } else {
      byId("costs").replaceChildren(element("p", { class: "quiet" }, "No key was tuned."));
    }
  }

  function speedupsPlot(keys, width) {
    const axes = { x: { label: "times as fast as the heuristic", grid: true, nice: true }, style: STYLE, width, height: 220, marginBottom: 36 };
    const even = Plot.ruleX([1], { stroke: "var(--heuristic)", strokeDasharray: "4,3" });
    return Plot.plot({
      ...axes,
      y: { label: "keys", grid: true, ticks: Math.min(6, keys.length), tickFormat: (n) => (Number.isInteger(n) ? `${n}` : "") },
      marks: [Plot.rectY(keys, Plot.binX({ y: "count" }, { x: "speedup", thresholds: 30, fill: "var(--winner)", inset: 0.5 })), even, Plot.ruleY([0])],
    });
  }

  function costsPlot(keys, width) {
    const MOST = 12;
    const sums = d3.rollups(keys, (of) => d3.sum(of, (key) => key.tune_s), (key) => key.op).sort((a, b) => b[1] - a[1]);
    const rows = sums.slice(0, MOST).map(([op, seconds]) => ({ op, seconds }));
    if (sums.length > MOST) rows.push({ op: `${sums.length - MOST} others`, seconds: d3.sum(sums.slice(MOST), (one) => one[1]) });
    const characters = Math.floor((0.4 * width) / 7);
    const longest = Math.max(...rows.map((one) => Math.min(one.op.length, characters)));
    return Plot.plot({
      style: STYLE,
      width,
      height: Math.max(120, 46 + 24 * rows.length),
      marginLeft: 12 + 7 * longest,
      marginBottom: 36,
      x: { label: "seconds", grid: true },
      y: { label: null, domain: rows.map((one) => one.op), tickFormat: (op) => shortened(op, characters), tickSize: 0 },
      marks: [Plot.barX(rows, { x: "seconds", y: "op", fill: "var(--other)", title: (one) => `${one.op}: ${duration(one.seconds)}` }), Plot.ruleX([0])],
    });
  }

  // The page.

  function fillSummary() {
    const faster = data.keys.filter((key) => key.speedup !== null && key.speedup > 1 + (key.noise ?? 0));
    const median = d3.median(data.keys.filter((key) => key.speedup !== null), (key) => key.speedup);
    const parts = [
      `${count(data.keys.length, "key")} of ${count(new Set(data.keys.map((key) => key.op)).size, "operation")} on ${count(new Set(data.keys.map((key) => key.device)).size, "device")}`,
      `${faster.length} faster than their heuristic by more than the noise`,
      ...(median === undefined ? [] : [`median speed-up ${factor(median)}`]),
      `${duration(d3.sum(data.keys, (key) => key.tune_s))} of tuning`,
    ];
    byId("summary").textContent = `${data.title}: ${parts.join(", ")}.`;
    byId("made").textContent = `Made by asel ${data.asel} on ${date(data.created)} UTC. Plots by Observable Plot and D3 (ISC licence).`;
    document.title = `asel: ${data.title}`;
  }

  function fillFilters() {
    for (const [id, of] of [["op", (key) => key.op], ["device", (key) => key.device]]) {
      const values = [...new Set(data.keys.map(of))].sort();
      byId(id).append(element("option", { value: "" }, "all"), ...values.map((value) => element("option", { value }, shortened(value, 40))));
      byId(id).closest("label").hidden = values.length < 2;
    }
    const refill = () => {
      state.shown = PAGE_ROWS;
      drawTable();
    };
    document.querySelector(".filters").addEventListener("input", refill);
    document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());
    byId("more").addEventListener("click", () => {
      state.shown += PAGE_ROWS;
      drawTable();
    });
  }

  function fillHeader() {
    const cells = COLUMNS.map((column, index) => {
      const button = element("button", { type: "button" }, column.name);
      button.addEventListener("click", () => sortBy(index));
      return element("th", { scope: "col", class: column.number ? "number" : null }, button);
    });
    byId("keys").tHead.append(element("tr", {}, ...cells));
    // A narrow window has no header to click.
    byId("sort").append(...COLUMNS.map((column, index) => element("option", { value: index }, column.name)));
    byId("sort").addEventListener("change", () => sortBy(Number(byId("sort").value)));
  }

  function sortBy(index) {
    state.ascending = state.column === index ? !state.ascending : !COLUMNS[index].number;
    state.column = index;
    byId("sort").value = index;
    drawTable();
  }

  function fillUnreadable() {
    byId("unreadable").hidden = data.unreadable.length === 0;
    byId("unreadable").querySelector("ul").append(...data.unreadable.map((one) => element("li", {}, element("code", {}, one.where), `: ${one.reason}`)));
  }

  // `report.html#KEY` opens that key, so the address of an opened key can be passed on.
  function openLinked() {
    const name = decodeURIComponent(location.hash.slice(1));
    if (!name || !data.keys.some((key) => key.key === name)) return;
    byId("text").value = name;
    drawTable();
    document.querySelector(".opener").click();
  }

  // The arrow keys move between keys, `/` moves to the filter, Escape closes a key.
  document.addEventListener("keydown", (event) => {
    const openers = [...document.querySelectorAll(".opener")];
    const at = openers.indexOf(document.activeElement);
    if (event.key === "/" && !/^(INPUT|SELECT)$/.test(document.activeElement.tagName)) {
      event.preventDefault();
      byId("text").focus();
    } else if (at >= 0 && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
      event.preventDefault();
      openers[at + (event.key === "ArrowDown" ? 1 : -1)]?.focus();
    } else if (at >= 0 && event.key === "Escape" && openers[at].getAttribute("aria-expanded") === "true") {
      openers[at].click();
    }
  });

  fillSummary();
  fillFilters();
  fillHeader();
  fillUnreadable();
  drawOverview();
  drawTable();
  openLinked();
})();
