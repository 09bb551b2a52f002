"""Rules between the settings: what goes with what, what divides what, and the sentences for what does not."""
