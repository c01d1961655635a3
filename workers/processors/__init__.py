"""What stands between a caller's tensors and a model's own: a closed list of named processors (`choice`). No code comes from an artifact."""
