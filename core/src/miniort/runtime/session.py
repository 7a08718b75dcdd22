"""The session: a model that was loaded, raised, assigned and compiled, ready to run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import onnx_ir as ir

from miniort.errors import InputError, KernelError, ModelError, PluginWarning, ProviderError
from miniort.graph.inference import INFER_TYPES, INVENTED_SIZE
from miniort.graph.passes import Change, GraphPass, Level, PassContext, run_passes
from miniort.kernels import Kernel, NodeContext, NodeView
from miniort.model.constants import shape_of
from miniort.model.loading import ModelLike
from miniort.model.plain_form import MAP_TYPES
from miniort.model.schemas import check_opsets
from miniort.model.weights import WeightStore
from miniort.plugins import PluginManager, collect, collect_mapping, create_plugin_manager, first_result
from miniort.providers import HOST, RecordsRuns, SurroundsRuns
from miniort.runtime.assignment import Assigner, OpenProvider
from miniort.runtime.explain import Explanation, explain
from miniort.runtime.graph_cache import graph_place
from miniort.runtime.graph_entry import PreparedGraph
from miniort.runtime.memory_plan import MemoryPlan, memory_plan
from miniort.runtime.model_recipe import ModelRecipe, recipe_of
from miniort.runtime.observers import Observer
from miniort.runtime.open_providers import open_providers
from miniort.runtime.plan import Compiler, missing_kernel
from miniort.runtime.recording import RecordedRun, record_plan
from miniort.runtime.taped_run import TapedRun, tape_plan
from miniort.types import STRING, Array, DType, Shape, dtype_from_onnx, format_shape, type_string

_BUILDING_HOOKS = ("miniort_providers", "miniort_kernels", "miniort_graph_passes", "miniort_observers")


@dataclass(frozen=True)
class SessionOptions:
    """How a session is built.

    graph_optimization_level: `none`, `basic`, `extended` or `all`.
    strict: refuse, when the session is built, a model with a node that no provider has a kernel for. Otherwise such a node is an error
        when it's run.
    intra_op_num_threads: threads that a provider's kernels may use; None or 0 for the provider's own default.
    """

    graph_optimization_level: str = "all"
    strict: bool = False
    intra_op_num_threads: int | None = None

    @property
    def level(self) -> Level:
        """The level as passes know it. ModelError for an unknown name."""
        try:
            return Level.from_name(self.graph_optimization_level)
        except KeyError:
            raise ModelError(
                f"graph_optimization_level is one of none, basic, extended, all; found {self.graph_optimization_level!r}"
            ) from None


@dataclass(frozen=True)
class NodeArg:
    """An input or output of a graph: `type` as ONNX writes it (`tensor(float)`), sizes that aren't fixed by name or None."""

    name: str
    type: str
    shape: Sequence[int | str | None]


@dataclass(frozen=True)
class _Origin:
    """What a session was built from; enough to build it again."""

    model: ModelLike | ModelRecipe
    base_dir: str | os.PathLike[str] | None
    options: SessionOptions
    providers: str | Sequence[Any] | None
    provider_options: Sequence[Mapping[str, Any]] | None
    kernels: tuple[Kernel, ...] = ()
    weights: WeightStore | None = None
    plugins: PluginManager | None = None


class InferenceSession:
    """Runs one model. Its `run` may be called from several threads at once.

    path_or_model: a path, the bytes of a model, a ModelProto, or an onnx-ir model (which the session then owns and changes). What passes
        make of a model in a file is kept for the next session. A `ModelRecipe` makes the model when it's needed, and its notes are `notes`.
    sess_options: see `SessionOptions`.
    providers: names in the order in which they are asked for each node, or `(name, options)` pairs; onnxruntime's spelling
        (`"CPUExecutionProvider"`) is understood. None or `"auto"`: every available one, by priority. One that was asked for by name and
        can't be used is an error.
    provider_options: options for each of `providers`, in the same order.
    base_dir: the folder of external data, for a model that isn't given as a path.
    weights: a store that is shared with other sessions, so that they hold common weights once.
    plugins: a plugin manager, None for one with every installed plugin.
    kernels: further kernels for this session alone, of your own ops or in place of the provider's; each goes to the provider that it
        names, and is asked before the provider's own.

    Raises ModelError, ProviderError, PluginError or KernelError, each with one line that says what to do.
    """

    def __init__(
        self,
        path_or_model: ModelLike | ModelRecipe,
        sess_options: SessionOptions | None = None,
        providers: str | Sequence[str | tuple[str, Mapping[str, Any]]] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        *,
        base_dir: str | os.PathLike[str] | None = None,
        weights: WeightStore | None = None,
        plugins: PluginManager | None = None,
        kernels: Sequence[Kernel] = (),
    ) -> None:
        options = sess_options or SessionOptions()
        self._build(_Origin(path_or_model, base_dir, options, providers, provider_options, tuple(kernels), weights, plugins))

    def _build(self, origin: _Origin) -> None:
        self._origin = origin
        self.options = origin.options
        self.weights = origin.weights or WeightStore()
        self.plugins = origin.plugins or create_plugin_manager()
        level = self.options.level
        recipe = recipe_of(origin.model, origin.base_dir, self.weights)
        if not recipe.files:  # nothing is kept of it, so its errors may come before a provider is opened
            made = _make(recipe)
            recipe = ModelRecipe(lambda: made)
        self.providers = open_providers(
            self.plugins, origin.providers, origin.provider_options, origin.kernels, threads=self.options.intra_op_num_threads
        )
        self._around = _around_runs(self.providers)
        graph = self._prepare(recipe, level, origin.kernels)
        self.model = model = graph.model
        self.changes = graph.changes
        self.notes = graph.notes
        self._placements = self._assigner(model).assign(model.graph)
        missing = [missing_kernel(each, each.view.name) for each in self._placements.values() if each.kernel is None]
        if missing and self.options.strict:
            more = f" ({len(missing) - 1} more nodes have none either)" if len(missing) > 1 else ""
            raise KernelError(f"strict: {missing[0]}{more}")
        self._inputs = list(model.graph.inputs)
        self._input_checks = {value.name or "": _InputCheck.of(value) for value in self._inputs}
        self._named_sizes = _shared_sizes(self._inputs) if level >= Level.EXTENDED else {}
        self._output_names = [value.name or "" for value in model.graph.outputs]
        self._compile(())
        if observers := self._plugin_observers():
            self._compile(observers)
        self._warn_of_failures()

    def _compile(self, observers: tuple[Observer, ...]) -> None:
        compiler = Compiler(self._placements, self.providers, self.weights, observers)
        self.plan = compiler.compile(self.model.graph)
        unknown = [name for observer in observers for name in observer.wants if name not in self.plan.known_names]
        if unknown:
            raise InputError(
                f"no value is named {unknown[0]!r} in the graph that runs; "
                "if an optimisation removed it, build the session with graph_optimization_level='none'"
            )

    def _plugin_observers(self) -> tuple[Observer, ...]:
        return tuple(observer for _, observer in collect(self.plugins, "miniort_observers", Observer, session=self))  # type: ignore[type-abstract]

    def _warn_of_failures(self) -> None:
        for name, reason in self.plugins.hook_failures.items():
            if name.rpartition(".")[2] in _BUILDING_HOOKS:
                warnings.warn(f"{name} failed, and the session goes without what it gives: {reason}", PluginWarning, stacklevel=4)

    def _select_kernel(self, view: NodeView, candidates: list[Kernel]) -> Kernel | None:
        chosen: Kernel | None = first_result(self.plugins, "miniort_select_kernel", node=view, candidates=candidates)
        return chosen

    def _assigner(self, model: ir.Model) -> Assigner:
        return Assigner(self.providers, self.weights, model.opset_imports, self._select_kernel)

    def _prepare(self, recipe: ModelRecipe, level: Level, kernels: Sequence[Kernel]) -> PreparedGraph:
        """The optimised graph: the one that an earlier start kept, else made now, and kept."""
        offered = collect_mapping(self.plugins, "miniort_graph_passes", GraphPass)
        passes = sorted(offered.values(), key=lambda each: each.level)
        place = graph_place(recipe, level, passes, self.providers, self.plugins, kernels, self.weights)
        kept = None if place is None else place.read(self.weights)
        if kept is not None:
            return kept
        model, notes = _make(recipe)
        graph = PreparedGraph(model, self._run_passes(model, passes, level), notes)
        if place is not None:
            place.write(graph, self.weights)
        return graph

    def _run_passes(self, model: ir.Model, offered: Sequence[GraphPass], level: Level) -> Sequence[Change]:
        from miniort.graph.pipeline import LAST_PASSES, STANDARD_PASSES  # a start whose graph was kept goes without the passes' modules

        assigner = self._assigner(model)

        def evaluate(node: ir.Node, inputs: Sequence[Array | None]) -> Sequence[Array] | None:
            return _evaluate(assigner, node, inputs)

        context = PassContext(
            supports=lambda op, domain, version, dtypes: assigner.supports(op, domain, version, dtypes),
            evaluate=evaluate,
            weights=self.weights,
            opsets=model.opset_imports,  # passes may add to it
            provider_of=assigner.provider_of,
        )
        passes = [*STANDARD_PASSES, *offered, *([INFER_TYPES] if offered else []), *LAST_PASSES]
        return run_passes(model, passes, level, context)

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: object | None = None) -> list[Any]:
        """Run once: the outputs named (None: all), in that order, as NumPy arrays that belong to the caller.

        input_feed: a NumPy array for each input by name, of the input's element type. InputError if one is missing, unknown, or of another
        type or shape, or if two disagree about a size that the model calls by one name. RunError, from the kernel's own exception, if a
        node fails.
        """
        wanted = self._wanted(output_names)
        feeds = self._feeds(input_feed)
        with self._around:
            outputs = self.plan.run(feeds)
        results = [self._own(index, outputs[index]) for index in wanted]
        if output_names and len(set(wanted)) < len(wanted):
            return [owned(result, copy=True) for result in results]  # one was asked for twice
        return results

    def execute(self, input_feed: Mapping[str, Any]) -> dict[str, Any]:
        """Run once, without checks or copies: all outputs by name. For callers that feed what they know to be right.

        The outputs may share memory with the feeds or with weights, so they must not be written into.
        """
        feeds = [input_feed.get(name) for name in self._input_checks]
        with self._around:
            outputs = self.plan.run(feeds)
        return dict(zip(self._output_names, outputs, strict=True))

    def _wanted(self, names: Sequence[str] | None) -> Sequence[int]:
        if not names:
            return range(len(self._output_names))
        for name in names:
            if name not in self._output_names:
                raise InputError(f"the model has no output {name!r}; its outputs: {', '.join(self._output_names)}")
        return [self._output_names.index(name) for name in names]

    def _own(self, index: int, value: Any) -> Any:
        return owned(value, copy=index in self.plan.copied_outputs)

    def _feeds(self, feed: Mapping[str, Any]) -> list[Any]:
        for name in feed:
            if name not in self._input_checks:
                raise InputError(f"the model has no input {name!r}; its inputs: {', '.join(self._input_checks) or 'none'}")
        values = [check.accept(name, feed.get(name)) for name, check in self._input_checks.items()]
        for size, places in self._named_sizes.items():
            found = {values[index].shape[axis] for index, axis in places if values[index] is not None}
            if len(found) > 1:
                names = ", ".join(f"axis {axis} of {self._inputs[index].name!r}" for index, axis in places)
                raise InputError(
                    f"inputs disagree about the size {size!r} ({names}): {sorted(found)}. If the names in the model are wrong, build the "
                    "session with graph_optimization_level='basic', which doesn't rely on them"
                )
        return values

    def get_inputs(self) -> list[NodeArg]:
        """The inputs that have to be fed, in the model's order."""
        return [self._node_arg(value) for value in self._inputs if value.const_value is None]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """The inputs that have a default, which a feed may replace."""
        return [self._node_arg(value) for value in self._inputs if value.const_value is not None]

    def get_outputs(self) -> list[NodeArg]:
        """The outputs, in the model's order."""
        return [self._node_arg(value) for value in self.model.graph.outputs]

    def _node_arg(self, value: ir.Value) -> NodeArg:
        known: str | None = self.model.meta.get(MAP_TYPES, {}).get(value.name)
        shape = list(shape_of(value) or ()) if value.type is None or isinstance(value.type, ir.TensorType) else []
        sizes = [None if str(size).startswith(INVENTED_SIZE) else size for size in shape]
        return NodeArg(value.name or "", known or _type_text(value), sizes)

    def get_providers(self) -> list[str]:
        """The session's providers, in the order in which they are asked."""
        return [provider.name for provider in self.providers]

    def explain(self) -> Explanation:
        """What was done to the graph, who runs each node and who refused it and why, and where values are copied between devices."""
        return explain(self.changes, self._placements, self.plan)

    def memory_plan(self, sizes: Mapping[str, int] | None = None) -> MemoryPlan:
        """What the values of one run take of memory, step by step. sizes: a number for each named size of the inputs.

        InputError if one is missing, unknown or negative.
        """
        return memory_plan(self.model, self.plan, self.weights, sizes or {})

    def observe(self, *observers: Observer) -> InferenceSession:
        """A session over the same graph and weights whose every run these observers watch as well. This one goes on as it was.

        InputError if an observer wants a value that the graph doesn't have.
        """
        watched = object.__new__(InferenceSession)
        watched.__dict__.update(self.__dict__)
        watched._compile((*self.plan.observers, *observers))
        return watched

    def leaving_on_device(self, output: str) -> tuple[OpenProvider, InferenceSession] | None:
        """The provider on whose device an output is made, and a session whose `execute` leaves it there. This one goes on as it was.

        None if the host makes the output, or reads it in the run.
        """
        plan = self.plan.leaving_on_device(self._output_names.index(output))
        if plan is None:
            return None
        device = next(copy.source for copy in self.plan.copies if (copy.value, copy.target) == (output, HOST))
        leaving = object.__new__(InferenceSession)
        leaving.__dict__.update(self.__dict__)
        leaving.plan = plan
        return next(each for each in self.providers if each.provider.device == device), leaving

    def record(
        self, input_feed: Mapping[str, Any], told: Array, tell: Callable[[Any], None]
    ) -> tuple[RecordedRun | TapedRun, tuple[Any, ...]]:
        """A run that is noted down, to be replayed, and its outputs: on a tape, where all providers are on the host, or by a device.

        A device records it where the outputs are left there, and gives those of a rehearsal. told: an array that's uploaded besides, whose
        copy `tell` is handed, for what isn't an array, such as a cache that is told where to write. ProviderError, or what a kernel raises,
        if it can't be noted down.
        """
        recorder = self.recorder
        if recorder is None:
            raise ProviderError("no provider of this session records runs")
        feed = {name: input_feed.get(name) for name in self._input_checks}
        if isinstance(recorder.provider, RecordsRuns):
            with self._around:
                return record_plan(self.plan, recorder.provider, feed, told, tell)
        return tape_plan(self.plan, feed, told, tell, self._around)

    @property
    def recorder(self) -> OpenProvider | None:
        """The first provider that records runs and was asked to, or the session's first where all are on the host; None if neither."""
        for each in self.providers:
            if isinstance(each.provider, RecordsRuns) and each.provider.records_runs:
                return each
        return self.providers[0] if all(each.provider.device == HOST for each in self.providers) else None

    def close(self) -> None:
        """Give the providers' memory back. Neither the session nor those that `observe` made of it can run afterwards."""
        for provider in self.providers:
            provider.provider.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._origin.model, ir.Model | ModelRecipe):
            raise ModelError("a session over an onnx-ir model can't be pickled; build it from a path, bytes or a ModelProto")
        return _rebuild, (replace(self._origin, weights=None, plugins=None),)


def _make(recipe: ModelRecipe) -> tuple[ir.Model, Mapping[str, Any]]:
    """What the recipe makes. ModelError if the model is of a newer opset than the installed onnx knows."""
    model, notes = recipe.make()
    check_opsets("the model", model.opset_imports)
    return model, notes


class _Nested:
    """Several context managers as one, which may be entered from several threads at once."""

    def __init__(self, managers: Sequence[AbstractContextManager[object]]) -> None:
        self._managers = managers

    def __enter__(self) -> None:
        with ExitStack() as entered:
            for manager in self._managers:
                entered.enter_context(manager)
            entered.pop_all()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for manager in reversed(self._managers):
            manager.__exit__(kind, error, trace)


def _around_runs(providers: Sequence[OpenProvider]) -> AbstractContextManager[object]:
    """What is entered around every run: what the providers ask for."""
    managers = [each.provider.running() for each in providers if isinstance(each.provider, SurroundsRuns)]
    if not managers:
        return nullcontext()
    return managers[0] if len(managers) == 1 else _Nested(managers)


def owned(value: Any, copy: bool) -> Any:
    """An output as its caller gets it: arrays, also those in sequences, and copies of them where somebody else has them as well."""
    if isinstance(value, list):
        return [owned(item, copy) for item in value]
    if not isinstance(value, np.ndarray | np.generic):
        return value
    return np.array(value) if copy else np.asarray(value)


def _shared_sizes(inputs: Sequence[ir.Value]) -> dict[str, list[tuple[int, int]]]:
    """Symbolic sizes that several axes of the inputs share, each with its places (input, axis): EXTENDED passes take them as equal."""
    places: dict[str, list[tuple[int, int]]] = {}
    for index, value in enumerate(inputs):
        for axis, size in enumerate(shape_of(value) or () if isinstance(value.type, ir.TensorType) else ()):
            if isinstance(size, str):
                places.setdefault(size, []).append((index, axis))
    return {size: found for size, found in places.items() if len(found) > 1}


def _rebuild(origin: _Origin) -> InferenceSession:
    session = object.__new__(InferenceSession)
    session._build(origin)
    return session


def _evaluate(assigner: Assigner, node: ir.Node, inputs: Sequence[Array | None]) -> Sequence[Array] | None:
    """The outputs of a node whose inputs are known, by a kernel on the host; None where there is none, or it fails."""
    placement = replace(assigner, providers=[each for each in assigner.providers if each.provider.device == HOST]).place(node)
    if placement.provider is None or placement.kernel is None:
        return None
    view = placement.view
    context = NodeContext(**{name: getattr(view, name) for name in NodeView.__dataclass_fields__}, provider=placement.provider.provider)
    try:
        run = placement.kernel.compile(context)
        with np.errstate(all="ignore"):
            result = run(*inputs)
    except Exception:
        # What can't be computed now is left in the graph; its error comes when it's run, with the node's name.
        return None
    results = result if type(result) is tuple else (result,)
    # A result may be a view of an input, which is fine: both are constants. It must not hold memory of the pool.
    return [np.array(each) if isinstance(each, np.generic) else each for each in results]


@dataclass(frozen=True)
class _InputCheck:
    """What is known of an input, to look at what is fed for it."""

    dtype: DType | None
    shape: Shape | None
    fixed: tuple[tuple[int, int], ...]
    optional: bool

    @classmethod
    def of(cls, value: ir.Value) -> _InputCheck:
        is_tensor = isinstance(value.type, ir.TensorType)
        shape = shape_of(value) if is_tensor else None
        return cls(
            dtype=dtype_from_onnx(int(value.dtype)) if is_tensor and value.dtype else None,
            shape=shape,
            fixed=tuple((axis, size) for axis, size in enumerate(shape or ()) if isinstance(size, int)),
            optional=value.const_value is not None or isinstance(value.type, ir.OptionalType),
        )

    def accept(self, name: str, value: Any) -> Any:
        """The value as kernels take it. InputError if it doesn't fit."""
        if value is None:
            if self.optional:
                return None
            raise InputError(f"input {name!r} is missing: {type_string(self.dtype)} of shape {format_shape(self.shape)} is needed")
        if self.dtype is None:
            return value
        array = value if isinstance(value, np.ndarray) else self._array(name, value)
        if self.dtype == STRING and array.dtype.kind in "US":
            array = array.astype(object)
        if array.dtype != self.dtype:
            wanted, found = type_string(self.dtype), type_string(array.dtype)
            raise InputError(f"input {name!r} must be {wanted}, found {found}; convert it with .astype({str(self.dtype)!r})")
        if self.shape is not None and (array.ndim != len(self.shape) or any(array.shape[axis] != size for axis, size in self.fixed)):
            raise InputError(f"input {name!r} must have the shape {format_shape(self.shape)}, found {list(array.shape)}")
        return array

    def _array(self, name: str, value: Any) -> Array:
        """Python's own numbers and lists of them, which have no element type, as an array of the input's. A fraction is never cut off."""
        if isinstance(value, np.generic):
            return np.asarray(value)
        if hasattr(value, "dtype"):
            raise InputError(
                f"input {name!r} must be a NumPy array, found {type(value).__module__}.{type(value).__name__}; convert it first"
            )
        try:
            array = np.asarray(value)
            kinds = {"b": "b", "u": "iu", "i": "iu", "f": "iuf", "V": "iuf", "c": "iufc"}.get(
                "" if self.dtype is None else self.dtype.kind, ""
            )
            if array.dtype.kind in kinds:
                array = np.array(value, dtype=self.dtype)
        except Exception as error:
            # NumPy calls the value's own methods, so this may be anything.
            raise InputError(
                f"input {name!r} must be {type_string(self.dtype)}; {type(value).__name__} can't be made an array: {error}"
            ) from error
        return array


def _type_text(value: ir.Value) -> str:
    kind: Any = value.type
    wrappers = []
    while isinstance(kind, ir.SequenceType | ir.OptionalType):
        wrappers.append("seq" if isinstance(kind, ir.SequenceType) else "optional")
        kind = kind.elem_type
    text = type_string(dtype_from_onnx(int(value.dtype)) if value.dtype else None)
    for wrapper in reversed(wrappers):
        text = f"{wrapper}({text})"
    return text
