"""Commands that plan a layout before any of it runs."""
