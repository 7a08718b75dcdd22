"""KV-cache layouts for miniort."""
