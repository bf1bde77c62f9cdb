// Predict first: what a page shows after a question is hidden until the reader has answered, or says not to want to.
// The questions, what counts as right and what is said then were written by common/questions.py when the site was built.
(() => {
  const KEY = "predictions";
  const stored = () => { try { return JSON.parse(localStorage.getItem(KEY)) || {}; } catch { return {}; } };
  const keep = (all) => { try { localStorage.setItem(KEY, JSON.stringify(all)); } catch { /* a private window: for this page only */ } };
  let all = stored();

  // What a question hides: the output of the next cell, and what follows it up to the next question or section. So it
  // does with each later cell whose output has all that the answer was found in.
  function hidden(form) {
    const found = [], place = form.closest(".bd-article") || document;
    const answers = JSON.parse(form.dataset.answers), cells = [...place.querySelectorAll(".cell")];
    const later = cells.filter((cell) => form.compareDocumentPosition(cell) & Node.DOCUMENT_POSITION_FOLLOWING);
    const shows = (cell) => answers.length && answers.every((text) => [...cell.querySelectorAll(".cell_output")].some((one) => one.textContent.includes(text)));
    for (const [number, cell] of later.entries()) {
      if (number && !shows(cell)) continue;
      found.push(...cell.querySelectorAll(".cell_output"));
      for (let one = cell.nextElementSibling; one && one.tagName !== "SECTION" && !one.matches(".predict"); one = one.nextElementSibling) found.push(one);
    }
    return [...new Set(found)].filter((one) => !one.matches(".predict-waits, .predict-score"));
  }

  // In the place of an output that is hidden far from its question.
  function wait(form, output) {
    const cell = output.closest(".cell");
    if (!output.matches(".cell_output") || cell.previousElementSibling?.matches(".predict") || cell.querySelector(".predict-waits")) return;
    const note = document.createElement("p"), link = document.createElement("a");
    note.className = "predict-waits";
    link.href = `#${form.id}`;
    link.textContent = "a question above";
    note.append("What comes out here is shown when you have answered ", link, ".");
    cell.append(note);
  }

  function start() {
    const forms = [...document.querySelectorAll("form.predict")];
    if (!forms.length) return;
    const score = document.querySelector(".predict-score");
    const waiting = new Map();  // element -> questions that still hide it

    function count() {
      const ids = Object.values(all), here = forms.map((form) => all[form.dataset.predict]).filter(Boolean);
      const right = (answers) => answers.filter((one) => one.right).length;
      score.querySelector(".here").textContent = `${right(here)} of ${forms.length}`;
      score.querySelector(".course").textContent = `${right(ids)} of ${ids.length}`;
    }
    function open(form) {
      for (const [one, questions] of waiting) {
        questions.delete(form);
        if (questions.size) continue;
        one.hidden = false;
        one.closest(".cell")?.querySelector(".predict-waits")?.remove();
        waiting.delete(one);
      }
    }
    function close(form, said) {
      form.classList.add("closed");
      for (const field of form.querySelectorAll("input, button")) field.disabled = true;
      const verdict = form.querySelector(".verdict");
      verdict.innerHTML = said || "";
      verdict.append(form.querySelector("template").content.cloneNode(true));
      open(form);
    }
    const words = (answer) => (answer.right ? "<b>Right.</b> " : "<b>Not quite.</b> ");

    for (const form of forms) {
      form.hidden = false;
      const before = all[form.dataset.predict];
      if (before) {
        for (const field of form.elements) {
          if (field.type === "radio") field.checked = field.value === before.given;
          else if (field.name === "given") field.value = before.given;
        }
        close(form, words(before));
        continue;
      }
      for (const one of hidden(form)) {
        one.hidden = true;
        wait(form, one);
        waiting.set(one, (waiting.get(one) || new Set()).add(form));
      }
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        const given = new FormData(form).get("given"), { low, high, right } = form.dataset;
        const number = Number(String(given).replaceAll(",", "").replace("−", "-"));
        const verdict = form.querySelector(".verdict");
        if (!given || (low !== undefined && Number.isNaN(number))) {
          verdict.textContent = low === undefined ? "Pick an answer first, or have it shown without one." : "Type a number first, or have it shown without one.";
          return form.querySelector("input").focus();
        }
        const isRight = low === undefined ? given === right : Number(low) <= number && number <= Number(high);
        all = { ...stored(), [form.dataset.predict]: { given, right: isRight, at: new Date().toISOString() } };
        keep(all);
        close(form, words(all[form.dataset.predict]));
        count();
        verdict.focus();
      });
      form.querySelector(".skip").addEventListener("click", () => { close(form); form.querySelector(".verdict").focus(); });
    }
    score.hidden = false;
    score.querySelector(".export").addEventListener("click", () => {
      const file = new Blob([JSON.stringify({ predictions: all }, null, 1)], { type: "application/json" });
      const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(file), download: "predictions.json" });
      link.click();
      URL.revokeObjectURL(link.href);
    });
    score.querySelector(".forget").addEventListener("click", () => {
      if (!confirm("Forget all of your predictions, on every page?")) return;
      keep({});
      location.reload();
    });
    count();
    // Who follows a link to a place that is hidden came for what stands there.
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && [...waiting.keys()].some((one) => one.contains(target))) {
      for (const form of forms) if (!form.classList.contains("closed")) close(form);
      target.scrollIntoView();
    }
  }
  document.addEventListener("DOMContentLoaded", start);
})();
