// The box of the site that takes a question and lists the symptoms that fit: `found` of diagnosis/symptoms.py, in a
// browser. Its tables, `sealegsSymptoms`, are written by assemble.py; tests/browser holds the two to the same answers.
(() => {
  const table = window.sealegsSymptoms;
  const start = new URL("../", document.currentScript.src);

  function stem(word) {
    if (/^\d/.test(word)) return word.replace(/\.0+$/, "");
    for (const ending of table.endings) {
      if (word.endsWith(ending) && word.length - ending.length >= 3 && !word.endsWith("ss")) {
        word = word.slice(0, -ending.length);
        break;
      }
    }
    return word.replace(/([^aeiouls])\1$/, "$1");
  }

  function words(text) {
    const spelt = text.toLowerCase().replaceAll("_", " ").replaceAll("learning rate", "lr").match(/[a-z]+\d*|\d+(?:\.\d+)?/g);
    const says = (word) => !table.sayNothing.includes(word);
    return new Set((spelt ?? []).filter(says).map(stem).map((word) => table.same[word] ?? word).filter(says));
  }

  function found(question, most = 5) {
    const asked = [...words(question)].sort(); // the sum is the same to the last bit
    const said = asked.join(" ");
    const scored = table.symptoms.map((symptom) => [
      asked.reduce((sum, word) => sum + (Object.hasOwn(symptom.worth, word) ? symptom.worth[word] : 0), 0) *
        (symptom.phrases.includes(said) ? 3 : 1),
      symptom,
    ]);
    const fitting = scored.filter(([score]) => score > 0).sort(([one], [other]) => other - one);
    return fitting.slice(0, most).map(([, symptom]) => symptom);
  }

  // What stands below the list: where to go on if the page is not in it, and what is no symptom.
  function further(isEmpty) {
    const line = document.createElement("p");
    const links = [
      [isEmpty ? "No page has these words. See " : "Not among them? See ", "symptoms/index.html", "all symptoms"],
      [". To skip a bad update before it is made, see ", "guard.html", "the guard"],
      [". To judge a training log, see ", "check.html", "sealegs check"],
    ];
    for (const [before, page, text] of links) {
      const link = document.createElement("a");
      link.href = new URL(page, start).href;
      link.textContent = text;
      line.append(before, link);
    }
    line.append(".");
    return line;
  }

  for (const place of document.querySelectorAll(".symptom-finder")) {
    const box = document.createElement("input");
    box.type = "search";
    box.placeholder = "What do you see? A sentence, or a line of the log";
    box.setAttribute("aria-label", box.placeholder);
    const list = document.createElement("ul");
    const below = document.createElement("div");
    below.setAttribute("role", "status");
    box.addEventListener("input", () => {
      const fitting = found(box.value);
      below.replaceChildren(...(box.value.trim() ? [further(fitting.length === 0)] : []));
      list.replaceChildren(
        ...fitting.map((symptom) => {
          const item = document.createElement("li");
          const link = document.createElement("a");
          link.href = new URL(`symptoms/${symptom.name}.html`, start).href;
          link.textContent = symptom.title;
          item.append(link);
          return item;
        }),
      );
    });
    place.append(box, list, below);
  }
})();
