"""The cost model of the search: exact for one layout, and as bounds for all options of a mesh at once."""
