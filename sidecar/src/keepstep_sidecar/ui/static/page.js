// Puts the sections that come from the server in their places, and says how long ago things were.
// Everything shown is worked out, and escaped, by the server.
"use strict";

const connection = document.getElementById("connection");

function ago(unix) {
  const seconds = Math.max(0, Math.round(Date.now() / 1000 - unix));
  if (seconds < 60) return `${seconds} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min ago`;
  return new Date(1000 * unix).toLocaleString();
}

function tellTimes() {
  for (const time of document.querySelectorAll("time[data-unix]")) {
    const unix = Number(time.dataset.unix);
    time.title = new Date(1000 * unix).toLocaleString();
    time.textContent = ago(unix);
  }
}

function show(id, html) {
  const place = document.getElementById(id);
  if (!place) return;
  const news = document.createElement("template");
  news.innerHTML = html;
  match(place, news.content);
}

// What is there stays there, with its focus, its selection and a click that is under way.
function match(place, news) {
  const before = [...place.childNodes];
  const after = [...news.childNodes];
  after.forEach((now, at) => {
    const was = before[at];
    if (!was) place.append(now);
    else if (was.nodeName !== now.nodeName) was.replaceWith(now);
    else if (now.nodeType !== Node.ELEMENT_NODE) {
      if (was.data !== now.data) was.data = now.data;
    } else {
      for (const { name } of [...was.attributes]) if (!now.hasAttribute(name)) was.removeAttribute(name);
      for (const { name, value } of now.attributes) if (was.getAttribute(name) !== value) was.setAttribute(name, value);
      match(was, now);
    }
  });
  for (const left of before.slice(after.length)) left.remove();
}

// --- charts -----------------------------------------------------------------------------------

// The steps of each tier, nearest first, are rings around those of the tier before. The first is a line.
const tierLine = (name, at) => ({ name, label: name, color: `--${name}`, ...(at ? { size: 4 * at + 1 } : { width: 2 }) });
const RESTORED = { name: "restored", label: "restored", color: "--bad", size: 11 };
const LINES = {
  steps: (names) => [...names.filter((name) => name !== RESTORED.name).map(tierLine), RESTORED],
  time: () => [
    { name: "with", label: "with keepstep (ms)", color: "--local", width: 2 },
    { name: "without", label: "without (ms)", color: "--memory", width: 2, dash: [6, 4] },
  ],
};
const HEIGHT = 240;
const drawn = {}; // by chart: what was drawn, and the plot

function draw(id, lines) {
  const place = document.getElementById(`chart-${id}`);
  if (!place) return;
  const shown = LINES[id](Object.keys(lines)).filter((line) => lines[line.name]?.[0].length > 0);
  const names = shown.map((line) => line.name).join();
  place.hidden = names === "";
  if (place.hidden) return;
  const data = uPlot.join(shown.map((line) => lines[line.name]));
  const known = drawn[id];
  if (known && known.names === names) {
    known.lines = lines;
    known.plot.setData(data);
    return;
  }
  if (known) known.plot.destroy();
  drawn[id] = { names, lines, plot: new uPlot(options(place, shown), data, place) };
}

function options(place, shown) {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => (style.getPropertyValue(name) || style.getPropertyValue("--text")).trim();
  const axis = { stroke: color("--text"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
  return {
    width: place.clientWidth,
    height: HEIGHT,
    cursor: { drag: { x: true, y: false } },
    axes: [axis, { ...axis, size: 70 }],
    scales: { y: { range: (plot, low, high) => range(low, high) } },
    series: [{ label: "time" }, ...shown.map((line) => ({
      label: line.label,
      stroke: color(line.color),
      width: line.width ?? 2,
      dash: line.dash,
      paths: line.width ? undefined : () => null,
      points: line.width ? { show: false } : { show: true, size: line.size, stroke: color(line.color), fill: "transparent" },
    }))],
  };
}

function range(low, high) {
  if (low === null) return [0, 1];
  const room = Math.max((high - low) * 0.08, 1e-3 * Math.abs(high), 0.01);
  return [Math.max(0, low - room), high + room];
}

// other colours, or another width: drawn anew
function drawAgain() {
  for (const [id, { lines, plot }] of Object.entries(drawn)) {
    plot.destroy();
    delete drawn[id];
    draw(id, lines);
  }
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);
let resized;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(drawAgain, 200);
});

function tellConnection(text) {
  connection.textContent = text;
  connection.classList.toggle("lost", text !== "");
}

// While the page is not looked at, nothing is asked for.
function follow(route) {
  let before = "";
  async function ask() {
    const answer = await fetch(route);
    if (answer.status === 403) return false;
    if (!answer.ok) throw new Error(answer.statusText);
    const news = await answer.text();
    tellConnection("");
    if (news === before) return true;
    before = news;
    const { sections, charts } = JSON.parse(news);
    for (const [id, html] of Object.entries(sections)) show(id, html);
    for (const [id, lines] of Object.entries(charts)) draw(id, lines);
    tellTimes();
    return true;
  }
  const asking = setInterval(async () => {
    if (document.visibilityState !== "visible") return;
    try {
      if (await ask()) return;
      clearInterval(asking);
      tellConnection("This page is no longer allowed in: start keepstep ui again, and open the URL that it prints.");
    } catch {
      tellConnection("keepstep ui does not answer: what is shown is old.");
    }
  }, 1000);
}

tellConnection("");
tellTimes();
setInterval(tellTimes, 1000);
if (document.body.dataset.changes) follow(document.body.dataset.changes);
