// Joins a page with the course's Python in a worker. It asks, and shows what is answered; it computes nothing.
const here = document.currentScript.src;

function start() {
  const worker = new Worker(new URL("./worker.js", here), { type: "module" });
  const waiting = new Map();
  let count = 0, isReady, broke;
  const ready = new Promise((resolve, reject) => { isReady = resolve; broke = reject; });
  worker.onmessage = ({ data }) => {
    if (data.ready) return isReady();
    if (data.id === undefined) return broke(new Error(data.failed));
    const [resolve, reject] = waiting.get(data.id);
    waiting.delete(data.id);
    if (data.failed) reject(new Error(data.failed)); else resolve(data.said);
  };
  worker.onerror = (event) => broke(new Error(event.message));
  const call = (module, text) => new Promise((resolve, reject) => {
    waiting.set(++count, [resolve, reject]);
    worker.postMessage({ id: count, module, text });
  });
  return { ready, call };
}

function planner(place, course) {
  const form = place.querySelector("form"), shown = place.querySelector(".answer"), said = place.querySelector(".state");
  const ask = async (state) => {
    place.setAttribute("aria-busy", "true");
    said.textContent = "Searching ...";
    said.classList.remove("wrong");
    const found = JSON.parse(await course.call("planner.page", JSON.stringify(state)));
    place.removeAttribute("aria-busy");
    said.textContent = found.error || "The answer is below.";
    said.classList.toggle("wrong", Boolean(found.error));
    shown.innerHTML = found.html || "";
    if (found.state) history.replaceState(null, "", `?${new URLSearchParams(found.state)}`);
    return found.state;
  };
  const fill = (state, names) => { for (const name of names) form.elements[name].value = state[name] || ""; };
  const fields = () => Object.fromEntries([...new FormData(form)].filter(([, value]) => typeof value === "string" && value));
  const read = async (file) => {
    const state = file && await ask({ ...fields(), config: await file.text(), file: file.name });
    if (state) fill(state, ["model", "shape"]);
  };
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(fields()); });
  form.addEventListener("input", ({ target }) => {  // nothing is asked before the question is whole
    if (target.type === "file") return;
    if (target.name === "model") form.elements.shape.value = form.elements.config.value = "";
    said.textContent = "Changed: press Plan.";
    said.classList.remove("wrong");
  });
  form.elements.config.addEventListener("change", ({ target }) => read(target.files[0]));
  document.addEventListener("dragover", (event) => event.preventDefault());  // beside the form, too: else it is opened
  document.addEventListener("drop", (event) => { event.preventDefault(); read(event.dataTransfer.files[0]); });
  form.querySelector("button").disabled = false;
  const asked = Object.fromEntries(new URLSearchParams(location.search));
  if (Object.keys(asked).length) return ask(asked).then((state) => fill(state || asked, [...form.elements].map((one) => one.name).filter((name) => name && name !== "config")));
  said.textContent = "Live: change what you like, then press Plan.";
}

function game(place, course) {
  const shown = place.querySelector(".answer"), said = place.querySelector(".state");
  const ask = async (state, name) => {
    const found = JSON.parse(await course.call("course.pipeline.game_page", JSON.stringify(state)));
    said.textContent = found.error || "Live: press what is lit.";
    said.classList.toggle("wrong", Boolean(found.error));
    if (found.error) return;
    const open = shown.querySelector("details").open;  // so is what one is about to write
    const level = shown.querySelector(".picked").textContent;
    shown.innerHTML = found.html;
    shown.querySelector("details").open = open;
    history.replaceState(null, "", `?${new URLSearchParams(found.state)}`);
    const buttons = [...shown.querySelectorAll("button[data-name]:not(:disabled)")];
    (buttons.find((one) => one.dataset.name === name) || buttons.find((one) => one.className === "lit"))?.focus();
    const picked = shown.querySelector(".picked");  // what is asked for at another level, or anew, stands below it
    if (picked.textContent !== level || name === "again") picked.parentElement.scrollIntoView();
  };
  place.addEventListener("click", async ({ target }) => {
    if (target.dataset.ask) return ask(JSON.parse(target.dataset.ask), target.dataset.name);
    if (target.dataset.copy === undefined) return;
    await navigator.clipboard.writeText(shown.querySelector("pre").textContent);
    target.textContent = "Copied";
  });
  place.addEventListener("submit", (event) => {
    event.preventDefault();
    ask({ level: event.target.dataset.level, lists: new FormData(event.target).getAll("list") });
  });
  const asked = Object.fromEntries(new URLSearchParams(location.search));
  if (asked.level) return ask(asked);
  said.textContent = "Live: press what is lit.";
}

// Sliders of a page: loaded when somebody first moves one, so that who only reads loads nothing.
function sliders(place, course) {
  const form = place.querySelector("form"), shown = place.querySelector(".answer"), said = place.querySelector(".state");
  const fields = [...form.elements].filter((field) => field.name);  // an <output> is an element of its form, too
  let asked = 0;
  const ask = async () => {
    const mine = ++asked, values = {};
    for (const field of fields) values[field.name] = field.type === "checkbox" ? String(field.checked) : field.value;
    const text = JSON.stringify({ cell: place.dataset.cell, values });
    const found = JSON.parse(await course.call("page_sliders", text));
    if (mine !== asked) return;  // moved again meanwhile
    said.textContent = found.error || "Live.";
    said.classList.toggle("wrong", Boolean(found.error));
    if (found.error) return;
    shown.innerHTML = found.html;
    for (const field of fields) {
      field.disabled = found.closed.includes(field.name);
      const text = found.readouts[field.name];
      if (field.type !== "range") continue;
      field.setAttribute("aria-valuetext", text);
      field.nextElementSibling.textContent = text;
    }
  };
  form.addEventListener("input", ask);
  form.addEventListener("submit", (event) => event.preventDefault());
  return form.dataset.moved ? ask() : undefined;
}

const kinds = { planner, game, sliders };

document.addEventListener("DOMContentLoaded", async () => {
  const places = [...document.querySelectorAll("[data-live]")];
  if (!places.length) return;
  const late = places.filter((place) => place.dataset.live === "sliders");
  if (late.length === places.length) await new Promise((moved) => {
    for (const place of late) {
      place.querySelector(".state").textContent = "Move a slider: Python is loaded then.";
      place.querySelector("form").addEventListener("input", ({ currentTarget }) => { currentTarget.dataset.moved = "yes"; moved(); });
    }
  });
  const course = (window.course = start());
  for (const place of places) place.querySelector(".state").textContent = "Python is being loaded ...";
  try {
    await course.ready;
    for (const place of places) await kinds[place.dataset.live](place, course);
    document.documentElement.dataset.course = "live";
  } catch (error) {
    document.documentElement.dataset.course = "still";
    for (const place of places) place.querySelector(".state").textContent = `This page stays as it is: ${error.message}`;
  }
});

// A table or code that is wider than its page, as on a phone, is moved by arrow keys once it has the focus.
document.addEventListener("DOMContentLoaded", () => {
  const sizes = new ResizeObserver((changed) => {
    for (const { target } of changed) {
      if (target.scrollWidth > target.clientWidth) target.tabIndex = 0; else target.removeAttribute("tabindex");
    }
  });
  for (const one of document.querySelectorAll('.bd-article :is(table.table, pre, .cell_output > .output, [data-live="sliders"] .answer)')) sizes.observe(one);
});
