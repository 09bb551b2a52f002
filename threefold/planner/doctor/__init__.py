"""What this machine is, how fast it computes and communicates, and what is wrong with it: `threefold doctor`."""
