"""Samplers for miniort."""
