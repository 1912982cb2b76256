/* Scores of the search: those of Sphinx, and guides before the pages of single names. */
var Scorer = {
  score: ([page, , , , score]) => score + (page.startsWith("examples/") || page === "README" ? 6 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
