// Operations and classes come before the guides that name them. The other scores are Sphinx's.
var Scorer = {
  objNameMatch: 31,
  objPartialMatch: 16,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
