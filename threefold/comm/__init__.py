"""The mesh of ranks, its axes and their collectives."""
