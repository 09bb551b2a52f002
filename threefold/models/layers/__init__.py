"""The layers that the models are made of, for one device."""
