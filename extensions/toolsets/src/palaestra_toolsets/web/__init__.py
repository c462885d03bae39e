"""Web pages and searches for tools: `fetch`, `page_text` and `extract_article` read pages, `providers` use APIs."""
