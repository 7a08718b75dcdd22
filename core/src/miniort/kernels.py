"""What a kernel is, and how a provider registers its own.

A function that compiles a node is registered in a table, and returns the function that runs it::

    kernels = KernelTable("cpu")


    @kernels.register("Softmax", versions=(13, None))
    def softmax(node: NodeContext) -> Run:
        axis = node.attribute("axis", -1)  # read once, when the session is built

        def run(x): ...  # called for every run, with arrays only

        return run
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from miniort.errors import KernelError
from miniort.types import Array, DType, ValueInfo

if TYPE_CHECKING:
    from miniort.providers import Provider

NEWEST_TESTED: Mapping[str, int] = {"": 28, "ai.onnx.ml": 5, "com.microsoft": 1, "miniort": 1}
"""The newest opset of each domain that this release was tested with: what `versions=(n, None)` reaches to."""

UFUNC_BUFFER = 512
"""`numpy.setbufsize` while kernels run. With NumPy's own 8,192, an operation on arrays whose rows don't follow each other without a gap
takes three times as long where a row has fewer than 2,048 elements: a quarter of the buffer."""

ANY_INPUT = -1
"""What a kernel names as its `view_of` where an output may hold any of its inputs, as a sequence does."""

ANY_PROVIDER = "*"
"""What a kernel names as its provider where it's given to a session by itself and all that it touches is on the host."""

Run: TypeAlias = Callable[..., Any]
"""A kernel that was compiled for one node: takes the node's inputs in order, None for an absent one, and returns the output, or a
tuple of outputs in the node's order. It never writes into an input that isn't one of `dying_inputs`, may return a view only of the
input that `view_of` names, and keeps no array that it returns.
NumPy's floating-point warnings are off while it runs: 1/0 is a result in ONNX."""

CompileKernel: TypeAlias = "Callable[[NodeContext], Run]"

TypeKey: TypeAlias = str | int
"""What a kernel's `types` are keyed by: a schema's type parameter (`"T"`), or an input's position for ops without a schema."""

_MISSING: Any = object()


class Subgraph(Protocol):
    """A graph attribute that was compiled to a callable: `then_branch` of `If`, `body` of `Loop` and `Scan`."""

    @property
    def inputs(self) -> tuple[ValueInfo, ...]:
        """The graph's inputs, in order."""

    @property
    def outputs(self) -> tuple[ValueInfo, ...]:
        """The graph's outputs, in order."""

    def __call__(self, scope: Any, *inputs: Any) -> list[Any]:
        """Run it once. `scope` is what the kernel was handed as its first argument: the values of the outer graph."""


@dataclass(frozen=True)
class NodeView:
    """What is known about a node before anything runs.

    `version` is the version of the op's schema that the model's opset implies, not the opset's number; for domains without schemas it's
    the opset's number. Absent optional inputs and unnamed outputs are None.
    """

    op: str
    domain: str
    version: int
    name: str
    inputs: tuple[ValueInfo | None, ...]
    outputs: tuple[ValueInfo | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def attribute(self, name: str, default: Any = _MISSING) -> Any:
        """An attribute as a Python value: int, float, str, tuple, or a NumPy array for a tensor. KernelError if a needed one is missing."""
        value = self.attributes.get(name, default)
        if value is _MISSING:
            raise KernelError(f"node {self.name!r} ({self.op}) lacks its attribute {name!r}")
        return value

    def constant(self, index: int) -> Array | None:
        """Input `index` as a read-only host array if it's a constant, else None (also where it's absent)."""
        info = self.inputs[index] if index < len(self.inputs) else None
        return None if info is None else info.constant

    def has_input(self, index: int) -> bool:
        """Whether the node has input `index` at all; an optional one may be left out, or be named ""."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def dtype(self, index: int) -> DType | None:
        """Element type of input `index`, None if it's absent or not known before it runs."""
        info = self.inputs[index] if index < len(self.inputs) else None
        return None if info is None else info.dtype


@dataclass(frozen=True)
class NodeContext(NodeView):
    """What a kernel is given when it's compiled: the node, the provider, shared weights, and compiled sub-graphs.

    A kernel of a node with sub-graphs is run with one more argument in front, the scope that it hands on to `subgraph(...)`.
    `block_outputs` are the outputs that may be a `BlockedView`, for all who read them take blocks (`Kernel.block_inputs`).
    `dying_inputs` are those of the kernel's `written_over` that nobody reads after this node, and whose memory is nobody else's.
    """

    provider: Provider = field(kw_only=True)
    subgraphs: Mapping[str, Subgraph] = field(default_factory=dict)
    share: Callable[[Array, str, Callable[[Array], Any]], Any] | None = None
    block_outputs: frozenset[int] = frozenset()
    dying_inputs: frozenset[int] = frozenset()

    def prepare(self, index: int, label: str, make: Callable[[Array], Any]) -> Any:
        """`make(constant)` for the constant input `index`, made once for all sessions that share its `WeightStore`.

        For weights that a kernel re-packs: `label` names the packing, so two kernels with one label must make the same thing.
        KernelError if the input isn't a constant.
        """
        weight = self.constant(index)
        if weight is None:
            raise KernelError(f"node {self.name!r} ({self.op}): input {index} is not a constant, so it can't be prepared")
        return make(weight) if self.share is None else self.share(weight, label, make)

    def subgraph(self, name: str) -> Subgraph:
        """The compiled graph of attribute `name`. KernelError if the node has none."""
        try:
            return self.subgraphs[name]
        except KeyError:
            raise KernelError(f"node {self.name!r} ({self.op}) lacks its sub-graph {name!r}") from None


@dataclass(frozen=True)
class Kernel:
    """How one provider computes one op, from schema version `since` to `until` (None: the newest tested), for some element types.

    types: allowed element types by type parameter or input position; what isn't named is not restricted.
    host_inputs: inputs that the kernel wants as host arrays, whatever its device (the shape of a `Reshape`).
    metadata_inputs: inputs of which it reads only `.shape` and `.dtype`, so an array of any device will do.
    host_outputs: outputs that it returns as host arrays.
    view_of: the input that any of its outputs may share memory with; ANY_INPUT where it may be each of them.
    block_inputs: inputs that it also takes as a `BlockedView` in place of an array.
    written_over: inputs that it writes its first output over where nobody reads them any more, and shape and type fit.
    refuse: looks at a node that the kernel would otherwise take, and says why it can't (a shape or an attribute), or None. Two kernels
        of one provider may cover the same versions and types where one of them refuses: the one that was added first is asked first.
    """

    provider: str
    op: str
    domain: str
    since: int
    until: int | None
    compile: CompileKernel = field(compare=False)
    types: Mapping[TypeKey, frozenset[DType]] = field(default_factory=dict, hash=False)
    host_inputs: frozenset[int] = frozenset()
    metadata_inputs: frozenset[int] = frozenset()
    host_outputs: frozenset[int] = frozenset()
    view_of: int | None = None
    block_inputs: frozenset[int] = frozenset()
    written_over: frozenset[int] = frozenset()
    refuse: Callable[[NodeView], str | None] | None = field(default=None, compare=False)

    def covers(self, version: int) -> bool:
        """Whether schema version `version` is in its range."""
        return self.since <= version and (self.until is None or version <= self.until)

    def versions_text(self) -> str:
        """Its range of versions for people: `13-20`, or `21+`."""
        return f"{self.since}+" if self.until is None else f"{self.since}-{self.until}"

    def overlaps(self, other: Kernel) -> bool:
        """Whether some node would be taken by both."""
        if (self.domain, self.op) != (other.domain, other.op) or self.refuse is not None or other.refuse is not None:
            return False
        first, second = sorted((self, other), key=lambda kernel: kernel.since)
        if first.until is not None and first.until < second.since:
            return False
        return all(self.types[key] & other.types[key] for key in self.types.keys() & other.types.keys())


class KernelTable:
    """The kernels of one provider, by op. Two that claim the same node are an error when the second is added."""

    def __init__(self, provider: str, kernels: Iterable[Kernel] = ()) -> None:
        self.provider = provider
        self._by_op: dict[tuple[str, str], list[Kernel]] = {}
        for kernel in kernels:
            self.add(kernel)

    def register(
        self,
        op: str,
        versions: tuple[int, int | None] = (1, None),
        *,
        domain: str = "",
        types: Mapping[TypeKey, Iterable[DType]] | None = None,
        host_inputs: Collection[int] = (),
        metadata_inputs: Collection[int] = (),
        host_outputs: Collection[int] = (),
        view_of: int | None = None,
        block_inputs: Collection[int] = (),
        written_over: Collection[int] = (),
        refuse: Callable[[NodeView], str | None] | None = None,
    ) -> Callable[[CompileKernel], CompileKernel]:
        """Decorator: the function compiles nodes of `op` whose schema version lies in `versions` (both ends included).

        May be stacked, where one function serves several ops or version ranges. See `Kernel` for the other arguments.
        """
        since, until = versions

        def decorate(compile_kernel: CompileKernel) -> CompileKernel:
            self.add(
                Kernel(
                    provider=self.provider,
                    op=op,
                    domain=domain,
                    since=since,
                    until=until,
                    compile=compile_kernel,
                    types={key: frozenset(dtypes) for key, dtypes in (types or {}).items()},
                    host_inputs=frozenset(host_inputs),
                    metadata_inputs=frozenset(metadata_inputs),
                    host_outputs=frozenset(host_outputs),
                    view_of=view_of,
                    block_inputs=frozenset(block_inputs),
                    written_over=frozenset(written_over),
                    refuse=refuse,
                )
            )
            return compile_kernel

        return decorate

    def add(self, kernel: Kernel, *, first: bool = False) -> None:
        """Add a kernel. KernelError if another already takes some of the same nodes, unless this one shall be asked `first`."""
        if kernel.until is not None and kernel.until < kernel.since:
            raise KernelError(f"{kernel.op}: versions ({kernel.since}, {kernel.until}) run backwards")
        kernel = replace(kernel, provider=self.provider)
        known = self._by_op.setdefault((kernel.domain, kernel.op), [])
        if first:
            known.insert(0, kernel)
            return
        for other in known:
            if kernel.overlaps(other):
                raise KernelError(
                    f"provider {self.provider!r} has two kernels for {qualified_op(kernel.domain, kernel.op)}: versions "
                    f"{other.versions_text()} and {kernel.versions_text()} overlap for the same types; narrow one of them"
                )
        known.append(kernel)

    def find(self, domain: str, op: str) -> Sequence[Kernel]:
        """All kernels for an op, in the order in which they were added."""
        return tuple(self._by_op.get((domain, op), ()))

    def __iter__(self) -> Iterator[Kernel]:
        for kernels in self._by_op.values():
            yield from kernels

    def __len__(self) -> int:
        return sum(len(kernels) for kernels in self._by_op.values())


def merge_tables(provider: str, *tables: Iterable[Kernel]) -> KernelTable:
    """One table of all kernels of several, for a provider that keeps a table per family of ops."""
    return KernelTable(provider, (kernel for table in tables for kernel in table))


def qualified_op(domain: str, op: str) -> str:
    """An op with its domain, `com.microsoft.Gelu`; the default domain goes without."""
    return f"{domain}.{op}" if domain else op
