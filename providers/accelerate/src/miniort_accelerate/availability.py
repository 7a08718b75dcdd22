"""Whether the Accelerate provider can be used here."""

from __future__ import annotations

import platform
from collections.abc import Callable

from miniort.providers import Availability
from miniort_accelerate.library import Accelerate, load_accelerate


def check(system: Callable[[], str] = platform.system, load: Callable[[], Accelerate] = load_accelerate) -> Availability:
    """Whether this is macOS and the framework has every function that we bind; why not, in one sentence. Never raises."""
    name = system()
    if name != "Darwin":
        return Availability(False, f"Accelerate is a macOS framework; this is {name or 'another system'}")
    try:
        load()
    except Exception as error:
        # A check must not take a session down, whatever a broken installation raises.
        return Availability(False, f"the Accelerate framework can't be used: {error}")
    return Availability(True, "Apple's Accelerate framework was found")
