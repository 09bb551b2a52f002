"""Trains the small GPT: `python -m benchmarks.parity_gpt`, or under torchrun with --dp, --tp, …"""

from .train import main

if __name__ == "__main__":
    main()
