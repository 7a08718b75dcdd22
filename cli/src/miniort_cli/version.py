"""`miniort version`: the versions that a bug report needs."""

from __future__ import annotations

import json

import click

LIBRARIES = ("onnx", "onnx-ir", "numpy")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def version(as_json: bool) -> None:
    """Show the versions of everything that matters."""
    import platform
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    from miniort import __version__

    libraries: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            libraries[name] = version_of(name)
        except PackageNotFoundError:
            libraries[name] = None
    distributions = _miniort_distributions()
    python, system = platform.python_version(), platform.platform()
    if as_json:
        report = {"miniort": __version__, "distributions": distributions, "python": python, **libraries, "platform": system}
        click.echo(json.dumps(report))
        return
    for name, text in {"miniort": __version__, **distributions, "Python": python, **libraries, "platform": system}.items():
        click.echo(f"{name} {text or 'is not installed'}")


def _miniort_distributions() -> dict[str, str]:
    """Versions of all installed distributions that are named `miniort-…`, third parties' too."""
    from importlib.metadata import distributions

    found: dict[str, str] = {}
    for distribution in distributions():
        name = distribution.name.lower().replace("_", "-")
        if name.startswith("miniort-"):
            found.setdefault(name, distribution.version)  # the first on the path is the one that's imported
    return dict(sorted(found.items()))
