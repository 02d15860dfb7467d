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
  const focused = place.contains(document.activeElement) ? document.activeElement.id : "";
  place.innerHTML = html;
  if (focused) document.getElementById(focused)?.focus();
}

function tellConnection(text) {
  connection.textContent = text;
  connection.classList.toggle("lost", text !== "");
}

function follow(route) {
  const changes = new EventSource(route);
  changes.onopen = () => tellConnection("");
  changes.onmessage = (event) => {
    for (const [id, html] of Object.entries(JSON.parse(event.data))) show(id, html);
    tellTimes();
  };
  changes.onerror = () => {
    if (changes.readyState === EventSource.CLOSED) {
      tellConnection("This page is no longer allowed in: open the URL that keepstep ui printed.");
    } else {
      tellConnection("keepstep ui does not answer: what is shown is old.");
    }
  };
}

tellConnection("");
tellTimes();
setInterval(tellTimes, 1000);
if (document.body.dataset.changes) follow(document.body.dataset.changes);
