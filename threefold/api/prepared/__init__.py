"""Any `nn.Module`, optimizer and `DataLoader` made distributed in one call."""
