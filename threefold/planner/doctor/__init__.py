"""Description of this machine, its speed of computation and communication, and its problems: `threefold doctor`."""
