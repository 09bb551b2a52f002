"""Pictures of plans and runs as PNG or SVG, in one style: timelines of schedules, memory, results of a search."""
