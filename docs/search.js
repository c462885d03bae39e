/* Ranks the results of the site's search. Sphinx puts this file into its own script (`html_search_scorer`).

Sphinx shows only pages that contain every word of the query, and orders them by their best word, so a question of four
words often finds nothing. This ranking adds up the words: a rare word counts more than a common one, a word in a
heading more than one in the text, and a word in a long page, which contains almost every word, less than one in a short
page, and one of the reference, which explains no task, counts least. Each page is one result, which leads to its best section if the heading fits the query. */
Search.performTermsSearch = (words) => {
  const { alltitles, docnames, filenames, terms, titles, titleterms } = Search._index;
  const listed = (pages) => (pages === undefined ? [] : [].concat(pages));
  const size = docnames.map(() => 0);
  for (const pages of Object.values(terms)) listed(pages).forEach((page) => (size[page] += 1));
  const mean = size.reduce((total, each) => total + each, 0) / size.length;

  const known = [...new Set([...Object.keys(terms), ...Object.keys(titleterms)])];
  const matches = (word) =>
    word.length < 4 || known.includes(word) ? [word] : known.filter((term) => term.includes(word));
  const pagesWith = (word) =>
    new Set(matches(word).flatMap((term) => [...listed(terms[term]), ...listed(titleterms[term])]));

  const found = new Map([...words].map((word) => [word, pagesWith(word)]));
  const weight = (word) => (found.get(word).size ? Math.log(1 + docnames.length / found.get(word).size) : 0);
  const whole = [...words].reduce((total, word) => total + weight(word), 0);
  const share = (some) => some.reduce((total, word) => total + weight(word), 0) / whole;

  const stemmer = new Stemmer();
  const best = docnames.map(() => ({ value: 0, title: "", anchor: "" }));
  for (const [title, places] of Object.entries(alltitles)) {
    const stems = splitQuery(title.toLowerCase())
      .filter((each) => !stopwords.has(each))
      .map((each) => stemmer.stemWord(each));
    const hit = [...words].filter((word) => stems.some((stem) => matches(word).includes(stem)));
    const value = share(hit) * (0.5 + (0.5 * hit.length) / (stems.length || 1));
    const fits = share(hit) >= 0.35; // else the anchor would lead past the answer
    for (const [page, anchor] of places)
      if (value > best[page].value) best[page] = { value, title, anchor: fits && anchor !== null ? "#" + anchor : "" };
  }

  const pages = new Set([...found.values()].flatMap((each) => [...each]));
  return [...pages].map((page) => {
    const { value, title, anchor } = best[page];
    const listing = docnames[page].startsWith("reference/") ? 0.5 : 1;
    const text = (listing * share([...words].filter((word) => found.get(word).has(page)))) / (1 + (0.25 * size[page]) / mean);
    const name = anchor ? `${titles[page]} > ${title}` : titles[page];
    return [docnames[page], name, anchor, null, Math.round(100 * (text + value)), filenames[page], SearchResultKind.text];
  });
};
