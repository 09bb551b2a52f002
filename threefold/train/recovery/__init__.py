"""What a run needs to survive restarts: which attempt it is, its state in memory, and the ledger of its goodput."""
