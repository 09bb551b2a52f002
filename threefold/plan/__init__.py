"""What a layout costs, as arithmetic on shapes: memory, traffic, schedules."""
