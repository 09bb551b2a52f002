"""What lies in a checkpoint on disk: tensor files and their index (version 2), and those of version 1."""
