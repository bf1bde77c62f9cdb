// The places that explain a symptom. Every number comes with the table, which common/symptoms.py has made; for a question,
// the table's columns of its words are added up, as `find` does there, and the check of the site compares the two.
(() => {
  const { small, endings, doubled, also, weights, places } = window.SYMPTOMS;
  const ignored = new Set(small), MOST = 6, FEW = window.SYMPTOMS.few;

  function stem(whole) {
    const end = endings.find((one) => whole.endsWith(one) && whole.length >= one.length + 3) || "";
    const word = whole.slice(0, whole.length - end.length), last = word.at(-1);
    return word.length > 3 && last === word.at(-2) && doubled.includes(last) ? word.slice(0, -1) : word;
  }

  const termsOf = (words) => (words.match(/[a-z0-9]+/g) || []).filter((word) => !ignored.has(word)).map(stem);

  function asked(words) {
    const low = words.toLowerCase(), names = low.match(/[a-z0-9_]+/g) || [];
    return new Set([...termsOf(low), ...names.flatMap((name) => (Object.hasOwn(also, name) ? also[name] : []))]);
  }

  function scores(words) {
    const found = new Map();
    for (const term of asked(words)) {
      const column = Object.hasOwn(weights, term) ? weights[term] : [];
      for (let at = 0; at < column.length; at += 2) {
        const [score, shared] = found.get(column[at]) || [0, 0];
        found.set(column[at], [score + column[at + 1], shared + 1]);
      }
    }
    return found;
  }

  function fits(words) {
    const [best] = [...scores(words).values()].sort((one, other) => other[0] - one[0] || other[1] - one[1]);
    return !best || best[1] > 1 || asked(words).size <= FEW;
  }

  function find(words, most = MOST) {
    const found = scores(words), best = new Map();
    for (const number of [...found.keys()].sort((one, other) => found.get(other)[0] - found.get(one)[0] || one - other)) {
      const place = places[number], key = place.where + (place.where.startsWith("docs/") ? place.what : "");
      if (!best.has(key)) best.set(key, place);
    }
    return [...best.values()].slice(0, most);
  }
  window.findSymptom = find;
  window.symptomFits = fits;

  const section = document.querySelector(".symptoms"), words = new URLSearchParams(location.search).get("q");
  if (!words) return;
  const found = find(words), list = document.createElement("ol");
  for (const { what, title, why, address } of found) {
    const item = document.createElement("li"), link = document.createElement("a"), cause = document.createElement("p"), page = document.createElement("small");
    link.href = address;
    link.textContent = what;
    cause.textContent = why;
    page.textContent = title;
    item.append(link, cause, page);
    list.append(item);
  }
  section.querySelector(".found").replaceChildren(...(found.length ? [fits(words) ? "" : section.dataset.nearest, list] : [section.dataset.nothing]));
  section.hidden = false;
})();
