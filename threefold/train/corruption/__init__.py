"""Silent corruption: finds bits that changed on one rank without an error, and names the rank."""
