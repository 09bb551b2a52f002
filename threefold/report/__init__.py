"""Reports of runs: what their folders record, as one JSON document, a page, a table, and live in a terminal."""
