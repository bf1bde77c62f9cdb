// The places that explain a symptom. Every number comes with the table, which common/symptoms.py has made; for a question,
// the table's columns of its words are added up, as `find` does there, and the check of the site compares the two.
(() => {
  const { small, endings, doubled, also, weights, places } = window.SYMPTOMS;
  const ignored = new Set(small), MOST = 6;

  function stem(whole) {
    const end = endings.find((one) => whole.endsWith(one) && whole.length >= one.length + 3) || "";
    const word = whole.slice(0, whole.length - end.length), last = word.at(-1);
    return word.length > 3 && last === word.at(-2) && doubled.includes(last) ? word.slice(0, -1) : word;
  }

  const termsOf = (words) => (words.match(/[a-z0-9]+/g) || []).filter((word) => !ignored.has(word)).map(stem);

  function find(words, most = MOST) {
    const low = words.toLowerCase(), names = low.match(/[a-z0-9_]+/g) || [], score = new Map(), best = new Map();
    for (const term of new Set([...termsOf(low), ...names.flatMap((name) => (Object.hasOwn(also, name) ? also[name] : []))])) {
      const column = Object.hasOwn(weights, term) ? weights[term] : [];
      for (let at = 0; at < column.length; at += 2) score.set(column[at], (score.get(column[at]) || 0) + column[at + 1]);
    }
    for (const number of [...score.keys()].sort((one, other) => score.get(other) - score.get(one) || one - other)) {
      const place = places[number];
      if (!best.has(place.where)) best.set(place.where, place);
    }
    return [...best.values()].slice(0, most);
  }
  window.findSymptom = find;

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
  section.querySelector(".found").replaceChildren(found.length ? list : section.dataset.nothing);
  section.hidden = false;
})();
