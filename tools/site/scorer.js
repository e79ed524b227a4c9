// How Sphinx's search ranks: a public name that is searched for comes first, as `KVCache` finds
// `unimem.KVCache` before those of the doors, and before every text. The figures are Sphinx's own.
var Scorer = {
  score: ([, title, , , score]) => {
    const asked = new URLSearchParams(location.search).get("q").trim().toLowerCase();
    return title.toLowerCase() === `unimem.${asked.replace(/^(unimem|um)\./, "")}` ? 1000 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
