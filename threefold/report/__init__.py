"""Reports of runs: files of their metrics, and what their folders record as a document, a page, a table, and live."""
