"""The `miniort` command."""
