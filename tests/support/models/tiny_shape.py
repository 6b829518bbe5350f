"""Shape flags of a model so small that its FLOPs can be counted by hand."""

TINY_SHAPE = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_query_groups": 2,
    "vocab_size": 32,
    "ffn_hidden_size": 64,
    "num_layers": 2,
    "kv_channels": 8,
}
