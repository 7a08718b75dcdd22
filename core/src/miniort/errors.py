"""Every error that miniort raises on purpose, a class per kind under one base.

A message says what was wanted, what was found, and what to do about it. The command turns each of these into one line and
exit status 2; any other exception that leaves miniort is a bug.
"""

from __future__ import annotations


class MiniortError(Exception):
    """Base of all errors that miniort raises on purpose."""


class ModelError(MiniortError):
    """A model, or a file that belongs to one, is missing, damaged, invalid or of an unknown kind."""


class BindingError(ModelError):
    """A graph's inputs and outputs can't be understood as those of a decoder."""


class ChatTemplateError(ModelError):
    """A chat template is missing, can't be read, or refuses a conversation."""


class TokenizerError(MiniortError):
    """A tokenizer is missing, damaged, or doesn't fit the model."""


class InputError(MiniortError):
    """A value that was fed to a session, or an output that was asked of it, doesn't fit its graph."""


class PluginError(MiniortError):
    """A plugin, or a name that a plugin should have given, is missing, broken or in conflict with another."""


class PluginWarning(UserWarning):
    """A plugin failed in a hook and was left out. What it would have given is missing from the session that warns."""


class ProviderError(MiniortError):
    """A provider is unknown, unavailable, or was given an option that it doesn't know."""


class KernelError(MiniortError):
    """No kernel fits a node, or two kernels claim the same one."""


class RunError(MiniortError):
    """A kernel failed while a graph was run. The kernel's own exception is the cause."""


class CacheError(MiniortError):
    """A KV cache was asked for something that it can't do, such as a rewind past what it still holds."""


class GenerationError(MiniortError):
    """Generation was asked for something impossible, such as a prompt longer than the model's context."""
