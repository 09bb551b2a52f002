"""Hardware for the planner: rates, memory, links and prices of GPU types, from a catalogue that users extend."""
