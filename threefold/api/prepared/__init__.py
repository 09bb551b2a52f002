"""Distribution of any `nn.Module`, its optimizer and its `DataLoader` in one call (`prepare`)."""
