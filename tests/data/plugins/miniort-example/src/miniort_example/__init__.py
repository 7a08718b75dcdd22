"""An example of a miniort plugin."""
