"""Small models, tokenizers and the peers that load them."""
