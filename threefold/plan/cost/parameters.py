"""Elements of the weights of each layer that a rank computes with, from sizes alone."""

from threefold.config import Config


def layer_elements(config: Config) -> list[float]:
    """Of the embedding, the blocks and the head, on a rank of the tensor and expert axes; norms and biases aside, which
    are a thousandth of them."""
    model, parallel = config.model, config.parallel
    hidden = model.hidden_size
    attention = hidden * model.head_dim * 2 * (model.num_attention_heads + model.num_key_value_heads)
    matrices = 3 if model.architecture == "llama" else 2
    table = model.vocab_size * hidden / parallel.tp
    found = [table]
    for layer in range(model.num_layers):
        inner: float = model.ffn_hidden_size
        if model.has_experts(layer):
            inner = model.num_experts / parallel.ep * model.expert_ffn_hidden_size + model.shared_expert_ffn_hidden_size
        found.append((attention + matrices * hidden * inner) / parallel.tp)
    shared = model.tie_embeddings and parallel.pp == 1
    return [*found, 0.0 if shared else table]
