"""Costs of a layout, computed from shapes: memory, bytes of collectives, pipeline schedules."""
