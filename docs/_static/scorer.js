"use strict";

// Order of the search results: the page about the word that was searched for, the Python name that is that word, pages
// with the word in their titles, other pages (guides first), sections, and last the Python reference, which mentions
// every word.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  score: ([page, title, anchor, _description, score]) => {
    const singular = (text) => text.trim().toLowerCase().replace(/s$/, "");
    const query = singular(new URLSearchParams(location.search).get("q") || "");
    const folder = page.slice(0, page.lastIndexOf("/"));
    const file = page.slice(folder.length).replace("/", "").replaceAll("-", " ");
    const heading = title.split(" > ").pop();
    if (folder === "reference/python") return singular(heading) === query ? score + 50 : score / 100;
    if (anchor) return score / 10;
    if ([file, heading].some((name) => singular(name) === query)) return score + 100;
    const names = `${file} ${heading}`.toLowerCase().split(/[^a-z0-9]+/);
    const named = query.split(/\s+/).every((word) => names.some((name) => singular(name) === singular(word)));
    const kinds = ["coming-from", "reference", "explanation", "how-to"];
    return score + (named ? 20 : 0) + 2 * kinds.indexOf(folder);
  },
};
