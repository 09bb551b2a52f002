"""The layers of the models, for one device: attention, MLP, rotary embeddings, experts and router."""
