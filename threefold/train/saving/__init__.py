"""When a run saves, by the clock and before its time limit, and what it says when it cannot."""
