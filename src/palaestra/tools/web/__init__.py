"""Web pages and searches for tools: `fetch`, `page_text` and `crawl` read pages from here, `providers` ask others."""
