"""What a layout costs, computed from shapes: memory, bytes of collectives, pipeline schedules."""
