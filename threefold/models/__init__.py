"""Single-device models, with a folder for each family, and the rules for sharding them."""
