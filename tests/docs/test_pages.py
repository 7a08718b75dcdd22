"""The pages in docs/ say what the code says: signatures, fields, names, links, variables; and their examples run.

In a page, a fenced block marked `python signature` holds declarations. Its first line is a comment that names the module that they're
from, and what it declares must be there as in the source, member by member. Every other `python` block is an example: the blocks of a page
are run in order, as one module. The next block, if it's a `text` one, is what the example prints, `...` standing for whatever differs from
one installation to another. A block with the name of a file behind its language (`python src/mine.py`) is that file of the page's plugin.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import os
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from miniort.plugins import create_plugin_manager

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))

PUBLIC_PACKAGES = ("miniort", "miniort.plugins", "miniort.generation", "miniort.testing")

CONTRACT_MODULES = (
    "miniort.errors",
    "miniort.generation.binding",
    "miniort.generation.cache",
    "miniort.generation.cache_file",
    "miniort.generation.decoder",
    "miniort.generation.detokenizer",
    "miniort.generation.generator",
    "miniort.generation.join",
    "miniort.generation.measurement",
    "miniort.generation.prompt_lookup",
    "miniort.generation.sampling",
    "miniort.generation.scores",
    "miniort.generation.sources",
    "miniort.generation.statistics",
    "miniort.generation.stop_strings",
    "miniort.generation.verification",
    "miniort.graph.passes",
    "miniort.kernels",
    "miniort.model.weights",
    "miniort.plugins.manager",
    "miniort.pool",
    "miniort.providers",
    "miniort.runtime.explain",
    "miniort.runtime.model_recipe",
    "miniort.runtime.observers",
    "miniort.runtime.session",
    "miniort.testing.cache_layouts",
    "miniort.testing.sampling",
)
"""Modules whose public classes and type aliases authors of plugins meet: each has to be declared on some page."""

PLUGGYS_OWN = frozenset({"hookimpl", "hookspec"})
"""Public names that are objects of pluggy, which documents them."""

DECORATORS = frozenset({"property", "classmethod", "staticmethod", "dataclass", "runtime_checkable", "hookspec"})
"""Decorators that belong to a declaration. Others say how a thing is made, not how it's used."""


# Reading pages


@dataclass(frozen=True)
class Block:
    """A fenced block: what stands behind the fence (`python signature`), its text, and the line of the page that the text begins on."""

    info: str
    text: str
    line: int


@dataclass(frozen=True)
class Page:
    """A page as blocks and as the text around them."""

    blocks: tuple[Block, ...]
    prose: str

    @property
    def signatures(self) -> list[Block]:
        return [block for block in self.blocks if block.info.split() == ["python", "signature"]]

    @property
    def examples(self) -> list[Block]:
        return [block for block in self.blocks if block.info == "python"]

    @property
    def code(self) -> str:
        """Everything that is written as code, in blocks or between backticks."""
        return "\n".join([block.text for block in self.blocks] + re.findall(r"`([^`]+)`", self.prose))


def parse_page(text: str) -> Page:
    blocks: list[Block] = []
    prose: list[str] = []
    lines: list[str] = []
    fence: str | None = None
    for number, line in enumerate(text.splitlines(), 1):
        marker = re.match(r"(`{3,})(.*)$", line)
        if fence is None and marker:
            fence, info, lines, start = marker.group(1), marker.group(2).strip(), [], number + 1
        elif fence is not None and line.strip() == fence:
            blocks.append(Block(info, "\n".join(lines) + "\n", start))
            fence = None
            prose.append("")
        elif fence is not None:
            lines.append(line)
        else:
            prose.append(line)
    if fence is not None:
        raise ValueError(f"the block of line {start - 1} isn't closed")
    return Page(tuple(blocks), "\n".join(prose))


def read_page(path: Path) -> Page:
    return parse_page(path.read_text(encoding="utf-8"))


def for_each_page(pages: Iterable[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", list(pages), ids=lambda path: path.relative_to(DOCS).as_posix())


# Declarations, of pages and of source alike


@cache
def declarations(code: str) -> dict[str, str]:
    """What Python code declares in public, as one-line texts by name: `Provider`, `Provider.upload`, `HOST`."""
    return dict(_declarations(ast.parse(code).body, ""))


def _declarations(body: Iterable[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    for node in body:
        match node:
            case ast.ClassDef(name=name) if _is_public(name):
                bases = [ast.unparse(base) for base in node.bases]
                yield prefix + name, f"{_decorators(node)}class {name}({', '.join(bases)})"
                yield from _declarations(node.body, f"{prefix}{name}.")
            case ast.FunctionDef(name=name) if _is_public(name):
                returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
                yield prefix + name, f"{_decorators(node)}def {name}({ast.unparse(node.args)}){returns}"
            case ast.AnnAssign(target=ast.Name(id=name)) if _is_public(name):
                value = node.value
                if ast.unparse(node.annotation) == "TypeAlias" and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    value = ast.parse(value.value, mode="eval").body
                yield prefix + name, ast.unparse(ast.AnnAssign(node.target, node.annotation, value, node.simple))
            case ast.Assign(targets=[ast.Name(id=name)]) if _is_public(name):
                yield prefix + name, ast.unparse(node)


def _is_public(name: str) -> bool:
    return name in ("__init__", "__call__") or not (name.startswith("_") or name.startswith("test_"))


def _decorators(node: ast.ClassDef | ast.FunctionDef) -> str:
    return "".join(f"@{text} " for each in node.decorator_list if (text := ast.unparse(each)).split("(")[0] in DECORATORS)


def source_of(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def declared_module(block: Block) -> str:
    """The module that a block of declarations names in its first line."""
    found = re.match(r"# ([\w.]+)\n", block.text)
    if not found:
        raise ValueError(f"line {block.line}: a block of signatures begins with a comment that names a module")
    return found.group(1)


def wrong_declarations(page: Page, source: Callable[[str], str]) -> list[str]:
    """What a page declares otherwise than the source does, or leaves out of a class that it declares."""
    problems = []
    for block in page.signatures:
        module = declared_module(block)
        real, said = declarations(source(module)), declarations(block.text)
        for name, text in said.items():
            if name not in real:
                problems.append(f"line {block.line}: {module} has no {name}")
            elif text != real[name]:
                problems.append(f"line {block.line}: {module} has\n    {real[name]}\nthe page has\n    {text}")
        classes = {name for name in said if "." not in name}
        problems += [
            f"line {block.line}: {name} of {module} isn't declared: {text}"
            for name, text in real.items()
            if name not in said and "." in name and name.split(".")[0] in classes
        ]
    return problems


def declared_names(pages: Iterable[Page]) -> set[str]:
    """`module.name` of whatever pages declare."""
    return {f"{declared_module(block)}.{name}" for page in pages for block in page.signatures for name in declarations(block.text)}


# Hooks


def hook_declaration(name: str, function: Callable[..., Any], firstresult: bool) -> str:
    """A hook's declaration, by the signature that `inspect` gives: what a page about it has to show."""

    class Bare(str):
        """An annotation that is a string already, and shall be shown without quotes."""

        __slots__ = ()

        def __repr__(self) -> str:
            return str(self)

    signature = inspect.signature(function)
    shown = signature.replace(
        parameters=[each.replace(annotation=Bare(each.annotation)) for each in signature.parameters.values()],
        return_annotation=Bare(signature.return_annotation),
    )
    decorator = "@hookspec(firstresult=True)" if firstresult else "@hookspec"
    return f"{decorator}\ndef {name}{shown}: ..."


def hook_declarations() -> dict[str, str]:
    """The declaration of every hook, as the plugin manager knows it."""
    manager = create_plugin_manager(points=[])
    callers = {name: getattr(manager.hook, name) for name in dir(manager.hook) if name.startswith("miniort_")}
    return {
        name: hook_declaration(name, caller.spec.function, bool(caller.spec.opts.get("firstresult"))) for name, caller in callers.items()
    }


HOOKS = hook_declarations()


def wrong_hook_page(hook: str, declaration: str, page: Page) -> list[str]:
    """How a hook's page doesn't show its declaration."""
    shown = [declarations(block.text) for block in page.signatures if hook in declarations(block.text)]
    if len(shown) != 1:
        return [f"the page of {hook} must show its signature once, found {len(shown)} times"]
    wanted, found = declarations(declaration)[hook], shown[0][hook]
    return [] if wanted == found else [f"the hook is\n    {wanted}\nthe page shows\n    {found}"]


def wrong_set_of_pages(hooks: Collection[str], pages: Collection[str]) -> list[str]:
    """Hooks without a page, and pages without a hook."""
    return [f"hook {hook} has no page docs/hooks/{hook}.md" for hook in sorted(set(hooks) - set(pages))] + [
        f"docs/hooks/{page}.md is about a hook that doesn't exist" for page in sorted(set(pages) - set(hooks))
    ]


def untested_hooks(hooks: Iterable[str], tests: Mapping[str, str]) -> list[str]:
    """Hooks that no test names."""
    return [hook for hook in hooks if not any(re.search(rf"\b{hook}\b", text) for text in tests.values())]


def hook_pages() -> dict[str, Path]:
    return {path.stem: path for path in (DOCS / "hooks").glob("*.md")}


# Names, links, variables


def exported_names(package: str) -> list[str]:
    """The public names of a package: `__all__`, and those that are imported when they are first used."""
    module = importlib.import_module(package)
    lazy = module.__dir__() if "__dir__" in vars(module) else []
    return sorted({*module.__all__, *lazy} - {"__version__"})


def home_of(package: str, name: str) -> str:
    """The module that an exported name is defined in."""
    value = getattr(importlib.import_module(package), name)
    for module in sorted(each for each in sys.modules if each.startswith("miniort.")):
        if getattr(sys.modules[module], name, None) is value and name in declarations(source_of(module)):
            return module
    raise LookupError(f"{package}.{name} is defined in no module of miniort")


def has_docstring(code: str, name: str) -> bool:
    """Whether a class, a function or a constant has one; dataclasses make up one of their own, so the source is asked."""
    body = ast.parse(code).body
    for node, following in zip(body, [*body, None][1:], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node) is not None
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id == name:
            return isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant) and isinstance(following.value.value, str)
    return False


def mentions(pages: Iterable[Page], name: str) -> bool:
    """Whether a name stands somewhere as code."""
    return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", page.code) for page in pages)


def heading_anchors(page: Page) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def local_links(page: Page) -> list[str]:
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", page.prose) if not re.match(r"[a-z]+:", target)]


def dead_links(path: Path, page: Page) -> list[str]:
    """Links to a file, or to a heading, that isn't there."""
    dead = []
    for link in local_links(page):
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        if not file.exists() or (anchor and anchor not in heading_anchors(page if file == path else read_page(file))):
            dead.append(link)
    return dead


def named_variables(text: str) -> set[str]:
    return set(re.findall(r"\bMINIORT_[A-Z_]+\b", text))


def read_variables(codes: Iterable[str]) -> set[str]:
    """Environment variables that code names by themselves; one in a message or a docstring isn't read."""
    return {
        node.value
        for code in codes
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"MINIORT_[A-Z_]+", node.value)
    }


def package_sources() -> list[str]:
    folders = [ROOT / "core", ROOT / "cli", *(ROOT / "providers").iterdir(), *(ROOT / "plugins").iterdir()]
    return [path.read_text(encoding="utf-8") for folder in folders for path in sorted((folder / "src").rglob("*.py"))]


# Examples


def agrees(said: str, printed: str) -> bool:
    """Whether an output is the one that a page shows, where `...` stands for any text on one line."""
    return re.fullmatch(".*".join(map(re.escape, said.split("..."))), printed) is not None


def run_examples(page: Page, name: str) -> list[str]:
    """Run a page's examples, in order, in one module of that name. Outputs that aren't what the page says; exceptions are let through."""
    problems = []
    module = types.ModuleType(name)
    sys.modules[name] = module
    try:
        for block, following in zip(page.blocks, [*page.blocks, None][1:], strict=True):
            if block.info != "python":
                continue
            printed = io.StringIO()
            code = compile("\n" * (block.line - 1) + block.text, f"<{name}>", "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, vars(module))
            said = following.text if following is not None and following.info == "text" else ""
            if not agrees(said.rstrip(), printed.getvalue().rstrip()):
                problems.append(f"line {block.line}: the example prints\n{printed.getvalue()}\nthe page says\n{said}")
    finally:
        del sys.modules[name]
    return problems


# The plugin of a page


def files_of(page: Page) -> dict[str, str]:
    """The files that a page shows, by path: blocks such as `toml pyproject.toml`."""
    named = [(block.info.split(), block.text) for block in page.blocks]
    return {words[1]: text for words, text in named if len(words) == 2 and "." in words[1]}


def install(files: Mapping[str, str], site: Path) -> None:
    """What pip does with a package of pure Python: its modules and its entry points, into a folder for modules."""
    about = tomllib.loads(files["pyproject.toml"])
    project = about["project"]
    for package in about["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        folder = site / Path(package).name
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        for path, text in files.items():
            if Path(path).is_relative_to(package):
                (folder / Path(path).relative_to(package)).write_text(text, encoding="utf-8")
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))


def run_python(site: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, with what lies in `site` installed."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *arguments], env=variables, cwd=site, capture_output=True, text=True, timeout=120, check=False)


COMMAND = ("-c", "from miniort_cli.main import main; main()")


@pytest.fixture(scope="module")
def plugin_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the plugin of the page about writing plugins is installed."""
    site = tmp_path_factory.mktemp("site")
    install(files_of(read_page(DOCS / "writing-plugins.md")), site)
    return site


def test_plugin_of_the_page_generates(plugin_site: Path) -> None:
    arguments = ["generate", "In the beginning", "--sampler", "mine", "--max-new-tokens", "2"]
    done = run_python(plugin_site, *COMMAND, *arguments)
    assert (done.returncode, done.stdout[:16]) == (0, "In the beginning"), done.stderr
    without = run_python(plugin_site, *COMMAND, *arguments, MINIORT_DISABLE_PLUGINS="mine")
    assert without.returncode == 2
    assert "no sampler is named 'mine'" in without.stderr


def test_tests_of_the_plugin_pass(plugin_site: Path) -> None:
    [(path, text)] = [(path, text) for path, text in files_of(read_page(DOCS / "writing-plugins.md")).items() if path.startswith("tests/")]
    (plugin_site / Path(path).name).write_text(text, encoding="utf-8")
    done = run_python(plugin_site, "-m", "pytest", "-q", "-p", "no:cacheprovider", Path(path).name)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


# The pages


def test_every_hook_has_a_page_and_every_page_a_hook() -> None:
    assert wrong_set_of_pages(HOOKS, hook_pages()) == []


@pytest.mark.parametrize("hook", HOOKS)
def test_page_of_a_hook_shows_its_signature(hook: str) -> None:
    assert wrong_hook_page(hook, HOOKS[hook], read_page(hook_pages()[hook])) == []


def test_every_hook_is_tested() -> None:
    tests = {str(path): path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name != "docs"}
    assert untested_hooks(HOOKS, tests) == []


@for_each_page(path for path in PAGES if read_page(path).signatures)
def test_declarations_are_those_of_the_source(path: Path) -> None:
    assert wrong_declarations(read_page(path), source_of) == []


def test_every_contract_is_declared_on_a_page() -> None:
    wanted = set()
    for module in CONTRACT_MODULES:
        wanted |= {f"{module}.{name}" for name, text in declarations(source_of(module)).items() if "." not in name and _is_contract(text)}
    for package in PUBLIC_PACKAGES:
        exported = importlib.import_module(package)
        functions = [name for name in exported_names(package) if inspect.isfunction(getattr(exported, name))]
        wanted |= {f"{home_of(package, name)}.{name}" for name in functions}
    assert sorted(wanted - declared_names(map(read_page, PAGES))) == []


def _is_contract(declaration: str) -> bool:
    return " class " in f" {declaration}" or ": TypeAlias" in declaration


@pytest.mark.parametrize("package", PUBLIC_PACKAGES)
def test_public_names_have_docstrings(package: str) -> None:
    names = [name for name in exported_names(package) if name not in PLUGGYS_OWN]
    assert [name for name in names if not has_docstring(source_of(home_of(package, name)), name)] == []


@pytest.mark.parametrize("package", PUBLIC_PACKAGES)
def test_public_names_are_mentioned(package: str) -> None:
    pages = [read_page(path) for path in PAGES]
    assert [name for name in exported_names(package) if not mentions(pages, name)] == []


@for_each_page(path for path in PAGES if local_links(read_page(path)))
def test_links_lead_somewhere(path: Path) -> None:
    assert dead_links(path, read_page(path)) == []


def test_index_links_every_page() -> None:
    index = DOCS / "README.md"
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in local_links(read_page(index))}
    assert sorted(set(PAGES) - linked - {index}) == []


def test_variables_are_read_by_the_code_and_told_in_the_pages() -> None:
    named = named_variables("\n".join(path.read_text(encoding="utf-8") for path in PAGES))
    assert named == read_variables(package_sources())


@for_each_page(path for path in PAGES if read_page(path).examples)
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_examples(read_page(path), f"example_{path.stem}".replace("-", "_")) == []


# The checks themselves


def fenced(info: str, text: str) -> str:
    return f"```{info}\n{text}\n```\n"


SOURCE = '''
from dataclasses import dataclass

@dataclass(frozen=True)
class Thing:
    """A thing."""

    name: str
    size: int = 0

    def grow(self, by: int = 1) -> "Thing":
        return self

    @property
    def weight(self) -> float:
        return 1.0

class Other:
    pass

LIMIT = 3
"""A limit."""
'''

RIGHT = """# somewhere.things
@dataclass(frozen=True)
class Thing:
    name: str
    size: int = 0
    def grow(self, by: int = 1) -> "Thing": ...
    @property
    def weight(self) -> float: ..."""


def problems_of(declared: str) -> list[str]:
    return wrong_declarations(parse_page(fenced("python signature", declared)), lambda module: SOURCE)


def test_right_declarations_pass() -> None:
    assert problems_of(RIGHT) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("    size: int = 0\n", ""),  # a field that isn't mentioned
        ("size: int = 0", "size: int"),  # without its default
        ("size: int = 0", "size: float = 0"),
        ("by: int = 1", "by: int"),
        ("by: int = 1", "by: int = 2"),
        (' -> "Thing"', ""),
        ("def grow", "def shrink"),  # a method that doesn't exist, and one that's missing
        ("    @property\n", ""),
        ("frozen=True", "frozen=False"),
        ("class Thing", "class Thong"),
        ("class Thing", "class Thing(Other)"),
    ],
)
def test_wrong_declarations_are_caught(right: str, wrong: str) -> None:
    assert right in RIGHT
    assert problems_of(RIGHT.replace(right, wrong)) != []


def test_declarations_must_name_their_module() -> None:
    with pytest.raises(ValueError, match="names a module"):
        problems_of(RIGHT.partition("\n")[2])


def choose_thing(node: str, things: list[str]) -> str | None:
    return None


CHOOSE = "# hooks\n@hookspec(firstresult=True)\ndef choose_thing(node: str, things: list[str]) -> str | None: ..."


def problems_of_hook(page: str) -> list[str]:
    return wrong_hook_page("choose_thing", hook_declaration("choose_thing", choose_thing, firstresult=True), parse_page(page))


def test_right_hook_page_passes() -> None:
    assert problems_of_hook(fenced("python signature", CHOOSE)) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(firstresult=True)", ""),
        ("node: str, ", ""),
        ("list[str]", "list[int]"),
        (" | None", ""),
        (" -> str | None", ""),
        ("choose_thing", "choose_things"),
    ],
)
def test_wrong_hook_signature_is_caught(right: str, wrong: str) -> None:
    assert right in CHOOSE
    assert problems_of_hook(fenced("python signature", CHOOSE.replace(right, wrong))) != []


def test_hook_signature_must_be_shown_once_and_as_one() -> None:
    assert problems_of_hook("`choose_thing(node, things)`") != []
    assert problems_of_hook(fenced("python", CHOOSE)) != []
    assert problems_of_hook(2 * fenced("python signature", CHOOSE)) != []


def test_firstresult_is_known_of_the_hook_that_has_it() -> None:
    assert [name for name, text in HOOKS.items() if "firstresult" in text] == ["miniort_select_kernel"]


def test_missing_and_stale_hook_pages_are_caught() -> None:
    assert wrong_set_of_pages(["kept", "added"], ["kept", "removed"]) == [
        "hook added has no page docs/hooks/added.md",
        "docs/hooks/removed.md is about a hook that doesn't exist",
    ]


def test_untested_hook_is_caught() -> None:
    tests = {"test_a.py": "def miniort_samplers(): ...", "test_b.py": "miniort_kernels_of_mine"}
    assert untested_hooks(["miniort_samplers", "miniort_kernels"], tests) == ["miniort_kernels"]


@pytest.mark.parametrize(("name", "documented"), [("Thing", True), ("Other", False), ("LIMIT", True), ("Missing", False)])
def test_docstrings_are_looked_for_in_the_source(name: str, documented: bool) -> None:
    assert has_docstring(SOURCE, name) is documented


def test_mentions_are_whole_names_written_as_code() -> None:
    pages = [parse_page("The sampler `greedy`, and `hot.sample(x)`.\n\n" + fenced("python", "import numpy"))]
    assert mentions(pages, "greedy")
    assert mentions(pages, "sample")
    assert mentions(pages, "numpy")
    assert not mentions(pages, "sampler")
    assert not mentions(pages, "greed")


def test_dead_links_are_caught(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A page\n\n## Its `code`, and more\n")
    text = "[a](there.md) [b](there.md#its-code-and-more) [c](#here) [d](https://example.org)\n"
    text += "[e](gone.md) [f](there.md#gone) [g](#gone)\n\n# Here\n"
    path = tmp_path / "page.md"
    path.write_text(text)
    assert dead_links(path, parse_page(text)) == ["gone.md", "there.md#gone", "#gone"]


def test_only_code_that_names_a_variable_by_itself_reads_it() -> None:
    code = '"""Reads MINIORT_COLOUR."""\nos.environ.get("MINIORT_SPEED")\nraise ValueError("set MINIORT_PLACE")\n'
    assert read_variables([code]) == {"MINIORT_SPEED"}
    assert named_variables("`MINIORT_SPEED`, MINIORT_COLOUR and miniort_samplers") == {"MINIORT_SPEED", "MINIORT_COLOUR"}


def test_examples_of_a_page_are_one_module() -> None:
    page = fenced("python", "import sys\nn = 2") + fenced("python", "print(sys.modules[__name__].n + 1)") + "\n" + fenced("text", "3")
    assert run_examples(parse_page(page), "example") == []
    assert "example" not in sys.modules


@pytest.mark.parametrize("said", ["", fenced("text", "4"), "So it is.\n\n" + fenced("text", "4")])
def test_other_output_than_the_page_says_is_caught(said: str) -> None:
    assert run_examples(parse_page(fenced("python", "print(3)") + said), "example") != []


def test_dots_in_an_output_stand_for_anything_on_one_line() -> None:
    assert agrees("there is: ..., mine (b.c)", "there is: cpu, cuda, mine (b.c)")
    assert not agrees("there is: ..., mine (b.c)", "there is: cpu, mine (bxc)")
    assert not agrees("one\n...", "one\ntwo\nthree")
    assert not agrees("...one", "one and more")


def test_failing_example_is_caught_with_its_line() -> None:
    page = parse_page("# A page\n\n" + fenced("python", "x = 1\nassert x == 2"))
    with pytest.raises(AssertionError) as caught:
        run_examples(page, "example")
    assert caught.traceback[-1].lineno + 1 == 5


def test_signatures_and_files_are_not_run() -> None:
    page = parse_page(fenced("python signature", "raise ValueError") + fenced("python src/mine.py", "raise ValueError"))
    assert run_examples(page, "example") == []
    assert files_of(page) == {"src/mine.py": "raise ValueError\n"}


def test_block_that_is_not_closed_is_caught() -> None:
    with pytest.raises(ValueError, match="line 1"):
        parse_page("```python\nx = 1\n")
