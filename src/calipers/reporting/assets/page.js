(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const position = new Map(data.modules.map((module) => [module.name, module]));
  const inputOf = new Map();
  data.inputs.forEach((input) => input.readers.forEach((name) => inputOf.set(name, input)));
  const VERDICTS = { hurts: "hurts", watch: "watch", fine: "fine", unseen: "not seen", unknown: "not known", float: "not quantized" };
  const RANK = ["hurts", "unseen", "watch", "unknown", "fine", "float"];

  // ---- words

  const dash = "–";
  const minus = (text) => text.replace(/-/g, "−");
  const known = (value) => value !== null && value !== undefined;
  const toDb = (error) => (error > 0 ? 20 * Math.log10(error) : null);
  const signed = (value, places) => minus(value.toFixed(places).replace(/^-(0\.?0*)$/, "$1"));
  const db = (error) => (known(error) && error > 0 ? signed(toDb(error), 1) + " dB" : dash);
  const digits = (value, count = 3) => minus(String(Number(value.toPrecision(count))));
  function percent(share) {
    if (!known(share)) return dash;
    const value = 100 * share, places = value >= 99.95 ? 0 : value >= 9.995 ? 1 : value >= 0.9995 ? 2 : 3;
    return (value && value < 0.01 ? digits(value, 2) : value.toFixed(value ? places : 0)) + " %";
  }
  const whole = (value) => (known(value) ? value.toLocaleString("en-US") : dash);
  function size(bytes) {
    if (!known(bytes)) return dash;
    const units = ["bytes", "kB", "MB", "GB", "TB"];
    let power = 0;
    while (bytes >= 999.5 && power < units.length - 1) { bytes /= 1000; power += 1; }
    return Number(bytes.toPrecision(3)) + " " + units[power];
  }
  /** Text for plots, which would take what looks like a tag for one. */
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const cut = (text, most) => (text.length > most ? "…" + text.slice(1 - most) : text);
  function label(name) {
    const at = position.get(name);
    return at && at.layer !== null ? "layer " + at.layer + " · " + at.kind : name;
  }

  /** An element; strings in it are text. */
  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    Object.entries(attributes || {}).forEach(([key, value]) => element.setAttribute(key, value));
    element.append(...children);
    return element;
  }
  const linkTo = (name) => "#layer=" + encodeURIComponent(name);

  // ---- state

  const state = { checkpoint: 0, figure: "", same: false, sort: "output", down: true, all: false, layer: null };
  const current = () => data.checkpoints[state.checkpoint];

  const FIGURES = [
    ["output", "Output error", (row) => row.output],
    ["byWeight", "Output error by weights", (row) => row.byWeight],
    ["byInput", "Output error by static inputs", (row) => row.byInput],
    ["weight", "Error of the weights themselves", (row) => row.weight],
  ].filter(([, , get]) => data.checkpoints.some((each) => Object.values(each.rows).some((row) => known(get(row)))));
  const figures = new Map(FIGURES.map(([key, title, get]) => [key, {
    title, of: (checkpoint, name) => { const row = checkpoint.rows[name]; return row ? get(row) : null; },
  }]));
  Object.entries(data.predictions).forEach(([scheme, errors]) => figures.set("predicted " + scheme, {
    title: "Predicted output error under " + scheme, predicted: true, of: (_, name) => (known(errors[name]) ? errors[name] : null),
  }));
  state.figure = figures.size ? figures.keys().next().value : "";
  const figure = () => figures.get(state.figure);

  // ---- plots are drawn when they come into sight, and again when something changed

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const drawings = new Map();
  const visible = new Set(), stale = new Set();
  function plot(id, draw) { drawings.set(id, draw); stale.add(id); watcher.observe(byId(id)); }
  const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => {
    const id = entry.target.id;
    if (entry.isIntersecting) { visible.add(id); redraw(id); } else visible.delete(id);
  }), { rootMargin: "300px" });
  function redraw(id) {
    if (!visible.has(id) || !stale.has(id)) return;
    stale.delete(id);
    drawings.get(id)(byId(id));
  }
  function change(...ids) { (ids.length ? ids : [...drawings.keys()]).forEach((id) => { if (drawings.has(id)) { stale.add(id); redraw(id); } }); }

  function draw(element, traces, layout, description) {
    const nothing = element.querySelector(".nothing");
    if (nothing) nothing.remove();
    element.setAttribute("aria-label", description);
    const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true };
    const narrow = element.clientWidth < 480;
    const base = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, dragmode: false,
      font: { family: getComputedStyle(document.body).fontFamily, color: css("--ink"), size: narrow ? 11 : 12 },
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--muted"), font: { color: css("--ink") }, align: "left" },
      margin: { l: 8, r: 8, t: 8, b: 8 },
      ...layout,
    };
    ["xaxis", "yaxis"].forEach((key) => { base[key] = { ...axis, fixedrange: true, ...layout[key] }; });
    element.style.minHeight = base.height ? base.height + "px" : "";
    return Plotly.react(element, traces, base, { displayModeBar: false, responsive: true });
  }
  function nothing(element, text) {
    if (element.classList.contains("js-plotly-plot")) Plotly.purge(element);
    element.style.minHeight = "0";
    element.setAttribute("aria-label", text);
    element.replaceChildren(make("p", { class: "nothing" }, text));
  }
  function onClick(element, open) {
    if (element.dataset.clicks) return;
    element.dataset.clicks = "yes";
    element.on("plotly_click", (event) => { const name = open(event.points[0]); if (name) location.hash = linkTo(name); });
  }

  // ---- where it hurts

  function cells(checkpoint) {
    const found = new Map();
    data.modules.forEach(({ name, layer, kind }) => {
      const error = layer === null ? null : figure().of(checkpoint, name);
      if (!known(error)) return;
      const key = layer + " " + kind, cell = found.get(key);
      if (!cell) found.set(key, { error, name, count: 1 });
      else { cell.count += 1; if (error > cell.error) { cell.error = error; cell.name = name; } }
    });
    return found;
  }
  function spread(maps) {
    const values = maps.flatMap((map) => [...map.values()].map((cell) => toDb(cell.error))).filter(known);
    if (!values.length) return [-60, 0];
    const low = Math.min(...values), high = Math.max(...values), room = Math.max(0, 3 - (high - low)) / 2;
    return [low - room, high + room];
  }
  function drawHeat(element) {
    const layers = [...new Set(data.modules.map((each) => each.layer))].filter((each) => each !== null).sort((a, b) => a - b);
    const found = figure() ? cells(current()) : new Map();
    if (!found.size) return nothing(element, figure() ? "This figure is not known for any layer of this checkpoint." : "No errors are known; the overview says why.");
    const grid = layers.map((layer) => data.kinds.map((kind) => found.get(layer + " " + kind)));
    const [low, high] = spread(state.same && !figure().predicted ? data.checkpoints.map(cells) : [found]);
    const tall = layers.length > 48 ? 14 : 24;
    const trace = {
      type: "heatmap", x: data.kinds.map(plain), y: layers.map(String), zmin: low, zmax: high, xgap: 2, ygap: tall > 14 ? 2 : 1,
      z: grid.map((row) => row.map((cell) => (cell ? toDb(cell.error) : null))),
      text: grid.map((row) => row.map((cell) => (cell && cell.error > 0 ? signed(toDb(cell.error), 0) : ""))),
      customdata: grid.map((row) => row.map((cell) => (cell ? plain(cell.name) + "<br>" + percent(cell.error) + (cell.count > 1 ? ", the worst of " + cell.count : "") : ""))),
      texttemplate: tall > 14 ? "%{text}" : "", hovertemplate: "%{customdata}<br>%{z:.1f} dB<extra></extra>", hoverongaps: false,
      colorscale: [0, 1, 2, 3, 4].map((step) => [step / 4, css("--heat-" + step)]),
      colorbar: { thickness: 10, outlinewidth: 0, ticksuffix: " dB", len: 1, tickfont: { color: css("--muted") } },
    };
    const ranked = [...found.values()].sort((a, b) => b.error - a.error);
    const height = Math.max(Math.min(510, layers.length * 62 + 60), layers.length * tall + 60);
    draw(element, [trace], {
      height,
      xaxis: { type: "category", side: "top", showgrid: false, tickangle: 0, ticks: "" },
      yaxis: { type: "category", autorange: "reversed", showgrid: false, title: { text: "layer" }, ticks: "", dtick: layers.length > 24 ? Math.ceil(layers.length / 24) : 1 },
    }, "Heat map, " + figure().title + " of " + current().name + ": the worst is " + ranked[0].name + " with " + db(ranked[0].error) +
      ", the best " + ranked[ranked.length - 1].name + " with " + db(ranked[ranked.length - 1].error) + ". The table of all modules has the same figures.");
    onClick(element, (point) => { const cell = cells(current()).get(layers[point.pointIndex[0]] + " " + data.kinds[point.pointIndex[1]]); return cell && cell.name; });
  }

  function drawWorst(element) {
    const checkpoint = current();
    const ranked = !figure() ? [] : data.modules.map(({ name }) => ({ name, error: figure().of(checkpoint, name), row: checkpoint.rows[name] }))
      .filter((each) => known(each.error)).sort((a, b) => b.error - a.error).slice(0, 20);
    byId("worst-title").textContent = "The worst " + (ranked.length < 20 ? ranked.length || "" : 20) + " modules, in percent of their output";
    if (state.figure === "weight") byId("worst-title").textContent = "The worst " + ranked.length + " weights, in percent of their norm";
    if (!ranked.length) return nothing(element, "This figure is not known for any module of this checkpoint.");
    const byInput = (each) => state.figure === "byInput" || (state.figure === "output" && (each.row.byInput || 0) > (each.row.byWeight || 0));
    const trace = (title, color, wanted) => {
      const rows = ranked.map((each, index) => ({ ...each, index })).filter(wanted);
      return {
        type: "bar", orientation: "h", name: title, marker: { color }, x: rows.map((each) => 100 * each.error), y: rows.map((each) => each.index),
        customdata: rows.map((each) => plain(each.name) + "<br>" + percent(each.error) + ", " + db(each.error)),
        text: rows.map((each) => percent(each.error)), textposition: "outside", cliponaxis: false, hovertemplate: "%{customdata}<extra></extra>",
      };
    };
    const traces = [trace("mostly by its weights", css("--bar-weight"), (each) => !byInput(each)), trace("mostly by its static input", css("--bar-input"), byInput)].filter((each) => each.x.length);
    draw(element, traces, {
      height: Math.max(300, ranked.length * 22 + 70), bargap: 0.28, showlegend: !["weight", "byWeight", "byInput"].includes(state.figure) && !figure().predicted,
      legend: { orientation: "h", y: 1.01, yanchor: "bottom", x: 0 },
      xaxis: { ticksuffix: " %", rangemode: "tozero", range: [0, (element.clientWidth < 480 ? 130 : 114) * ranked[0].error] },
      yaxis: { autorange: "reversed", tickvals: ranked.map((_, index) => index), ticktext: ranked.map((each) => plain(cut(label(each.name), 26))), showgrid: false, zeroline: false },
    }, "Bars, " + figure().title + " of " + checkpoint.name + ", the worst first: " + ranked.slice(0, 5).map((each) => each.name + " " + percent(each.error)).join(", ") + ".");
    onClick(element, (point) => rankedNames()[point.y]);
  }
  function rankedNames() {
    const checkpoint = current();
    return data.modules.map(({ name }) => [name, figure().of(checkpoint, name)]).filter(([, error]) => known(error)).sort((a, b) => b[1] - a[1]).map(([name]) => name);
  }

  const LINES = ["#3b77b8", "#d2603a", "#3d8f66", "#8a63b8", "#b08a1e", "#4d9aa8"];
  function drawLayers(element) {
    const models = Object.entries(data.layers);
    const numbers = models[0][1].map(([layer]) => layer.split(".").pop());
    const traces = models.flatMap(([name, rows], index) => [[2, "solid", true], [1, "dot", false]].map(([column, dash_, shown]) => ({
      type: "scatter", mode: "lines+markers", name: plain(name), x: numbers.map(plain), y: rows.map((row) => 100 * row[column]), showlegend: shown, legendgroup: String(index),
      line: { color: LINES[index % LINES.length], dash: dash_, width: shown ? 2.5 : 1.5 }, marker: { size: shown ? 6 : 4 },
      hovertemplate: plain(name) + (shown ? ", come together" : ", by itself") + "<br>layer %{x}: %{y:.3g} %<extra></extra>",
    })));
    draw(element, traces, {
      height: 300, showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
      xaxis: { type: "category", title: { text: "decoder layer" } }, yaxis: { ticksuffix: " %", rangemode: "tozero" },
    }, "Lines, the error behind each decoder layer: " + models.map(([name, rows]) => name + " ends at " + percent(rows[rows.length - 1][2])).join(", ") + ".");
  }

  // ---- the table

  const COLUMNS = [
    ["name", "Module", (row, name) => name, null],
    ["scheme", "Scheme", (row) => row.scheme, null],
    ["bits", "Bits", (row) => row.bits, (value) => (known(value) ? value.toFixed(2) : dash)],
    ["size", "Size", (row) => row.size, size],
    ["weight", "Weight error", (row) => row.weight, percent],
    ["output", "Output error", (row) => row.output, percent],
    ["db", "in dB", (row) => (known(row.output) ? toDb(row.output) : null), (value) => (known(value) ? signed(value, 1) : dash)],
    ["byInput", "By static input", (row) => row.byInput, percent],
    ["tokens", "Tokens seen", (row) => row.tokens, whole],
    ["chosen", "Chosen by data", (row) => row.chosen, (value) => (known(value) ? value : dash)],
    ["verdict", "Verdict", (row) => RANK.length - RANK.indexOf(row.verdict), null],
  ];
  const collator = new Intl.Collator("en", { numeric: true });
  const FIRST_ROWS = 250;
  function drawTable() {
    const [, , get] = COLUMNS.find(([key]) => key === state.sort);
    const wanted = byId("filter").value.trim().toLowerCase(), verdict = byId("verdict").value;
    const rows = Object.entries(current().rows).filter(([name, row]) => name.toLowerCase().includes(wanted) && (!verdict || row.verdict === verdict));
    rows.sort(([a, one], [b, other]) => {
      const x = get(one, a), y = get(other, b);
      if (!known(x) || !known(y)) return known(x) ? -1 : known(y) ? 1 : collator.compare(a, b);
      const order = typeof x === "string" ? collator.compare(x, y) : x - y;
      return (state.down ? -order : order) || collator.compare(a, b);
    });
    byId("table").querySelectorAll("thead th").forEach((head) => {
      head.setAttribute("aria-sort", head.dataset.key === state.sort ? (state.down ? "descending" : "ascending") : "none");
    });
    const shown = state.all ? rows : rows.slice(0, FIRST_ROWS);
    byId("table").tBodies[0].replaceChildren(...shown.map(([name, row]) => tableRow(name, row)));
    byId("count").textContent = rows.length + " of " + Object.keys(current().rows).length + " modules";
    byId("more").hidden = shown.length === rows.length;
    byId("more").textContent = "Show all " + rows.length + " modules";
  }
  function tableRow(name, row) {
    const made = make("tr", {});
    COLUMNS.forEach(([key, , get, format]) => {
      if (key === "name") made.append(make("th", { scope: "row" }, make("a", { href: linkTo(name) }, name)));
      else if (key === "verdict") made.append(make("td", {}, tag(row)));
      else made.append(make("td", format ? { class: "n" } : {}, format ? format(get(row, name)) : String(get(row, name))));
    });
    return made;
  }
  const tag = (row) => make("span", { class: "tag " + row.verdict }, VERDICTS[row.verdict]);
  function tableHead() {
    byId("table").tHead.rows[0].append(...COLUMNS.map(([key, title, , format]) => {
      const button = make("button", { type: "button" }, title);
      button.addEventListener("click", () => {
        state.down = state.sort === key ? !state.down : !["name", "scheme"].includes(key);
        state.sort = key;
        drawTable();
      });
      return make("th", { scope: "col", "data-key": key, "aria-sort": "none", class: format ? "n" : "" }, button);
    }));
  }

  // ---- the detail of a layer

  function drawDetail() {
    const name = state.layer, row = current().rows[name];
    byId("module").value = name || "";
    if (!name) { byId("shown").replaceChildren(make("p", { class: "how" }, "Choose a module.")); return; }
    const about = make("h3", {}, name + " ");
    if (!row) { byId("shown").replaceChildren(about, make("p", {}, "It is not a module of " + current().name + ".")); change("input", "weight", "channels"); return; }
    about.append(tag(row));
    const facts = [["Checkpoint", current().name], ["Scheme", row.scheme], ["Bits per weight", known(row.bits) ? row.bits.toFixed(2) : dash], ["Size", size(row.size)],
      ["Weight error", percent(row.weight)], ["Output error", percent(row.output) + " · " + db(row.output)], ["by weights", percent(row.byWeight)], ["by static input", percent(row.byInput)],
      ["Compared with the median", known(row.times) ? digits(row.times, 2) + " ×" : dash], ["Tokens seen", whole(row.tokens)]];
    const enough = data.sufficiency[name + ".input"];
    if (enough) facts.push(["Data", (enough[0] ? "enough" : "more is needed") + (enough[1] ? ": " + enough[1] : "")]);
    const list = make("dl", { class: "facts" }, ...facts.map(([term, told]) => make("div", {}, make("dt", {}, term), make("dd", {}, told))));
    const why = row.why.length ? [make("ul", {}, ...row.why.map((text) => make("li", {}, text)))] : [];
    byId("shown").replaceChildren(about, list, ...why);
    byId("ranges").replaceChildren(...rangesTable(name));
    change("input", "weight", "channels");
  }

  function rangesTable(name) {
    const input = inputOf.get(name), chosen = current().chosen[name];
    if (!input || (!input.ranges.length && !chosen)) return [];
    return input.ranges.map(([format, ranges]) => {
      const rows = (chosen ? [chosen] : []).concat(ranges).map(([observer, low, high, , clipped, vanished, error]) => make("tr", observer === "this checkpoint" ? { class: "chosen" } : {},
        make("th", { scope: "row" }, observer), ...[digits(low) + " … " + digits(high), percent(clipped), percent(vanished), percent(error)].map((text) => make("td", { class: "n" }, text))));
      const heads = ["Chosen by", "Range", "Cut off", "Become zero", "Error of the input"];
      const head = make("tr", {}, ...heads.map((text, index) => make("th", { scope: "col", class: index ? "n" : "" }, text)));
      const title = "What one range for all values makes of the input, in " + format + (chosen ? "" : " (for comparison: this checkpoint has no such range)");
      return make("div", {}, make("h3", {}, title), make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of ranges" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
    });
  }

  const edge = (bin) => Math.pow(2, bin / 4);
  function histogram([first, counts, zeros]) {
    const total = counts.reduce((sum, count) => sum + count, zeros);
    return {
      total, lowest: edge(first), highest: edge(first + counts.length),
      trace: {
        type: "bar", x: counts.map((_, index) => edge(first + index + 0.5)), width: counts.map((_, index) => edge(first + index + 1) - edge(first + index)),
        y: counts.map((count) => (count ? count / total : null)), marker: { color: css("--histogram"), line: { width: 0 } }, showlegend: false,
        customdata: counts.map((count, index) => [(index ? digits(edge(first + index)) : "above 0") + " to " + digits(edge(first + index + 1)), whole(count)]),
        hovertemplate: "|x| from %{customdata[0]}<br>%{customdata[1]} values, %{y:.2e} of all<extra></extra>",
      },
    };
  }
  const upright = (title, value, bottom, style) => ({
    type: "scatter", mode: "lines", name: title, x: [value, value], y: [bottom, 1], line: style, hovertemplate: title + ": ±" + digits(value) + "<extra></extra>",
  });
  function shade(from, to) { return { type: "rect", xref: "x", yref: "paper", x0: from, x1: to, y0: 0, y1: 1, line: { width: 0 }, fillcolor: css("--shade"), layer: "below" }; }
  function distribution(element, found, lines, shapes, description) {
    const bottom = Math.min(0.5 / found.total, 1e-3);
    const axis = { type: "log", exponentformat: "power", dtick: 1 };
    draw(element, [found.trace, ...lines(bottom)], {
      height: 400, bargap: 0, showlegend: true, legend: { orientation: "h", y: -0.16, yanchor: "top" }, shapes, margin: { l: 8, r: 8, t: 8, b: 8 },
      xaxis: { ...axis, title: { text: "|x|", standoff: 4 }, range: [Math.log10(found.lowest), Math.log10(found.highest) + 0.15] },
      yaxis: { ...axis, title: { text: "share of values" }, range: [Math.log10(bottom), 0], dtick: 2 },
    }, description);
  }
  const STYLES = { static_minmax: ["#6d7785", "dot"], histogram_mse: ["#3d8f66", "dash"], percentile: ["#8a63b8", "dashdot"], entropy: ["#b08a1e", "longdash"] };

  function drawInput(element) {
    const name = state.layer, input = inputOf.get(name);
    if (!input || !input.histogram || !input.histogram[1].length) return nothing(element, "Nothing is known of this input: it was not measured, or no measurements were given.");
    const found = histogram(input.histogram), chosen = current().chosen[name];
    const reach = ([, low, high]) => Math.max(Math.abs(low), Math.abs(high));
    const lines = (bottom) => input.ranges.flatMap(([, ranges]) => ranges.map((range) => {
      const [color, dash_] = STYLES[range[0]] || ["#6d7785", "dot"];
      return upright(plain(range[0]), reach(range), bottom, { color, dash: dash_, width: 2 });
    })).concat(chosen ? [upright("this checkpoint", reach(chosen), bottom, { color: css("--bar-input"), width: 3.5 })] : []);
    const shapes = chosen ? [shade(found.lowest, chosen[3] / 2), shade(reach(chosen), found.highest * 2)] : [];
    const told = chosen ? " The chosen range reaches " + digits(reach(chosen)) + "; " + percent(chosen[4]) + " are cut off, " + percent(chosen[5]) + " become zero." : "";
    distribution(element, found, lines, shapes, "Distribution of the input of " + name + ": " + whole(found.total) + " values, the largest below " + digits(found.highest) + "." + told);
  }
  function drawWeight(element) {
    const weight = data.weights[state.layer];
    if (!weight) return nothing(element, "The weights before quantization are not at hand: give the source model.");
    const found = histogram(weight.histogram), limits = current().limits[state.layer];
    const lines = (bottom) => (limits ? [upright(limits[3] > 1 ? "median of " + whole(limits[3]) + " scales" : "its only scale", limits[1], bottom, { color: css("--bar-weight"), width: 3 })] : []);
    const shapes = limits ? [shade(limits[0], limits[2])] : [];
    distribution(element, found, lines, shapes, "Distribution of the weights of " + state.layer + ", " + weight.shape.join(" × ") + ": the largest is " + digits(weight.largest) + ", the root of the mean square " + digits(weight.rms) + ".");
  }
  function drawChannels(element) {
    const input = inputOf.get(state.layer), found = input && input.channels;
    if (!found) return nothing(element, "The ranges of channels were not measured.");
    const x = found.low.map((_, index) => index * found.width), top = found.worst;
    const line = (values, extra) => ({ type: "scatter", mode: "lines", x, y: values, line: { color: css("--bar-weight"), width: 1, shape: "hvh" }, hovertemplate: "channel %{x}" + (found.width > 1 ? " and the next " + (found.width - 1) : "") + ": %{y:.4g}<extra></extra>", showlegend: false, ...extra });
    const marks = {
      type: "scatter", mode: "markers+text", name: "outliers", x: top.map((each) => each[0]), y: top.map((each) => (Math.abs(each[1]) > each[2] ? each[1] : each[2])),
      text: top.map((each, index) => (index < 4 ? String(each[0]) : "")), textposition: "top center", cliponaxis: false, showlegend: false,
      marker: { color: css("--bar-input"), size: 9 }, customdata: top.map((each) => digits(each[3])), hovertemplate: "channel %{x}: %{y:.4g}, %{customdata} × the median<extra></extra>",
    };
    draw(element, [line(found.low), line(found.high, { fill: "tonexty", fillcolor: css("--shade") }), marks], {
      height: 300, margin: { l: 8, r: 8, t: 22, b: 8 }, xaxis: { title: { text: "channel" }, range: [-found.count * 0.01, found.count * 1.01] }, yaxis: { title: { text: "least and largest value" } },
    }, "Ranges of " + whole(found.count) + " channels of the input of " + state.layer + ": " + found.outliers + " outliers" + (top.length ? ", the largest is channel " + top[0][0] + " with " + digits(top[0][3]) + " times the median" : "") + ".");
  }

  // ---- what is chosen

  function choose(index) {
    state.checkpoint = index;
    byId("of").value = String(index);
    byId("checkpoints").querySelectorAll("input").forEach((input, at) => { input.checked = at === index; });
    drawTable(); drawDetail(); change("heat", "worst");
  }
  function openHash() {
    const found = /^#layer=(.*)$/.exec(location.hash);
    if (!found) return;
    let name = "";
    try { name = decodeURIComponent(found[1]); } catch { return; }
    if (!position.has(name)) { byId("shown").replaceChildren(make("p", {}, "There is no module " + name + " on this page.")); return; }
    state.layer = name;
    drawDetail();
    byId("detail").scrollIntoView();
  }
  function move(step) {
    const order = figure() ? rankedNames() : data.modules.map((each) => each.name);
    const at = order.indexOf(state.layer) + step;
    if (order[at]) location.hash = linkTo(order[at]);
  }

  function setTheme(theme) {
    document.documentElement.dataset.theme = theme;
    byId("theme").setAttribute("aria-pressed", String(theme === "dark"));
    change();
  }

  function start() {
    const system = matchMedia("(prefers-color-scheme: dark)");
    byId("theme").setAttribute("aria-pressed", String(system.matches));
    byId("theme").addEventListener("click", () => setTheme(byId("theme").getAttribute("aria-pressed") === "true" ? "light" : "dark"));
    system.addEventListener("change", () => { if (!document.documentElement.dataset.theme) { byId("theme").setAttribute("aria-pressed", String(system.matches)); change(); } });

    data.checkpoints.forEach((each, index) => {
      const input = make("input", { type: "radio", name: "checkpoint", value: String(index) });
      input.addEventListener("change", () => choose(index));
      byId("checkpoints").append(make("label", {}, input, make("span", {}, each.name)));
      byId("of").append(make("option", { value: String(index) }, each.name));
    });
    byId("of").addEventListener("change", () => choose(Number(byId("of").value)));
    figures.forEach((each, key) => byId("figure").append(make("option", { value: key }, each.title)));
    byId("figure").addEventListener("change", () => { state.figure = byId("figure").value; change("heat", "worst"); });
    byId("same").addEventListener("change", () => { state.same = byId("same").checked; change("heat"); });
    byId("same").closest("label").hidden = data.checkpoints.length < 2;
    byId("filter").addEventListener("input", drawTable);
    byId("verdict").addEventListener("change", drawTable);
    byId("more").addEventListener("click", () => { state.all = true; drawTable(); });
    byId("names").append(...data.modules.map(({ name }) => make("option", { value: name })));
    byId("module").addEventListener("change", () => { if (position.has(byId("module").value)) location.hash = linkTo(byId("module").value); });
    byId("previous").addEventListener("click", () => move(-1));
    byId("next").addEventListener("click", () => move(1));
    document.querySelectorAll("a.module").forEach((link) => {
      const index = data.checkpoints.findIndex((each) => each.name === link.dataset.checkpoint);
      if (!position.has(link.dataset.module)) { link.replaceWith(link.dataset.module); return; }
      link.setAttribute("href", linkTo(link.dataset.module));
      link.addEventListener("click", () => { if (index >= 0) choose(index); });
    });

    tableHead();
    plot("heat", drawHeat);
    plot("worst", drawWorst);
    if (Object.keys(data.layers).length) { byId("layers-figure").hidden = false; plot("layers", drawLayers); }
    ["input", "weight", "channels"].forEach((id, index) => plot(id, [drawInput, drawWeight, drawChannels][index]));
    const headline = document.querySelector(".headline a.module");
    const first = headline ? data.checkpoints.findIndex((each) => each.name === headline.dataset.checkpoint) : 0;
    state.layer = headline ? headline.dataset.module : data.modules.length ? data.modules[0].name : null;
    choose(Math.max(0, first));
    addEventListener("hashchange", openHash);
    openHash();
    document.documentElement.dataset.ready = "yes";
  }
  start();
})();
