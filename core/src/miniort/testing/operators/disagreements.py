"""Where onnxruntime or onnx's reference evaluator contradict the specification's text: whoever compares with them has to know."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx

from miniort.testing.operators.cases import NodeCase, Operator
from miniort.types import Array


@dataclass(frozen=True)
class Disagreement:
    """Where oracles differ: which one the specification contradicts, for which cases, and why.

    `wrong` is `onnxruntime` or `reference`; `when` says whether a case is concerned.
    """

    op: str
    wrong: str
    why: str
    when: Callable[[NodeCase, Operator], bool] = lambda case, operator: True


def _is_dilated(case: NodeCase) -> bool:
    """Whether a window has gaps."""
    return any(dilation > 1 for dilation in case.attributes.get("dilations", ()))


def _skips_elements(case: NodeCase) -> bool:
    """Whether a window's stride is longer than the window."""
    kernel = case.attributes["kernel_shape"]
    return any(stride > size for stride, size in zip(case.attributes.get("strides", ()), kernel, strict=False))


def _is_grey(encoded: Array) -> bool:
    """Whether an encoded image has one channel."""
    from PIL import Image  # only where the op is tested

    return bool(Image.open(io.BytesIO(encoded.tobytes())).mode == "L")


def _has_weight_below_zero(case: NodeCase) -> bool:
    """Whether leaves of a tree ensemble vote against a class."""
    weights = case.attributes.get("class_weights")
    if weights is None:
        weights = onnx.numpy_helper.to_array(case.attributes["class_weights_as_tensor"])
    return bool(np.min(weights) <= 0)


def _asks_for_other(case: NodeCase) -> bool:
    """Whether nodes of a tree ensemble ask whether a feature is another number."""
    modes = case.attributes["nodes_modes"]
    return "BRANCH_NEQ" in modes if isinstance(modes, list) else bool((onnx.numpy_helper.to_array(modes) == 5).any())


def _aligns_corners_of_a_fraction(case: NodeCase) -> bool:
    """Whether a Resize maps corners to corners and its scales give no whole size."""
    if case.attributes.get("coordinate_transformation_mode") != "align_corners" or len(case.inputs) < 3 or case.inputs[2] is None:
        return False
    x, scales = case.inputs[0], case.inputs[2]
    sizes = [x.shape[axis] for axis in case.attributes.get("axes", range(x.ndim))]
    return any(size * scale % 1 for size, scale in zip(sizes, scales.tolist(), strict=False))


def _starts_before_the_first_element(case: NodeCase) -> bool:
    """Whether a Slice goes backwards from before the first element of an axis."""
    if len(case.inputs) < 5 or case.inputs[4] is None:
        return False
    x, starts, _, axes, steps = case.inputs
    places = range(len(starts)) if axes is None else axes.tolist()
    return any(step < 0 and start < -x.shape[axis] for start, axis, step in zip(starts.tolist(), places, steps.tolist(), strict=True))


def _is_padded_to_same_size(case: NodeCase) -> bool:
    """Whether the padding follows from the sizes."""
    return str(case.attributes.get("auto_pad", "")).startswith("SAME")


DISAGREEMENTS: tuple[Disagreement, ...] = (
    Disagreement(
        "Sign",
        "onnxruntime",
        "says that a float16 NaN is 0, where NaN is neither above, below nor equal to 0, and stays NaN in its other types",
        lambda case, operator: case.inputs[0].dtype == np.float16 and bool(np.isnan(case.inputs[0]).any()),
    ),
    Disagreement(
        "Slice",
        "reference",
        "gives nothing for a backward slice that starts before the first element; by the text such a start is clamped to 0",
        lambda case, operator: _starts_before_the_first_element(case),
    ),
    Disagreement(
        "Unique",
        "reference",
        "takes slices along axis 0 where they aren't to be sorted, whatever the axis is",
        lambda case, operator: case.attributes.get("sorted", 1) == 0 and case.attributes.get("axis", 0) != 0,
    ),
    *(
        Disagreement(
            "Attention",
            oracle,
            "mode 0 of its last output has the scores after the soft cap; by the attribute's text they're those before",
            lambda case, operator: (
                case.outputs == 4 and bool(case.attributes.get("softcap")) and not case.attributes.get("qk_matmul_output_mode")
            ),
        )
        for oracle in ("onnxruntime", "reference")
    ),
    Disagreement(
        "Attention",
        "reference",
        "applies the causal bound to a mask of one row before that is repeated for every query, so that all see what the first one sees",
        lambda case, operator: (
            len(case.inputs) > 3
            and case.inputs[3] is not None
            and case.inputs[3].shape[-2] == 1 < case.inputs[0].shape[-2]
            and bool({"is_causal", "left_window_size", "right_window_size"} & case.attributes.keys())
        ),
    ),
    Disagreement(
        "Attention",
        "onnxruntime",
        "the last query sees every key, however few queries there are; by the text query i sees those up to i + the length of the past",
        lambda case, operator: (
            bool(case.attributes.get("is_causal"))
            and any(value is not None for value in case.inputs[4:5])
            and case.inputs[0].shape[-2] != case.inputs[1].shape[-2]
        ),
    ),
    Disagreement(
        "BatchNormalization",
        "reference",
        "running statistics have the type of the input; by the schema it's that of the statistics",
        lambda case, operator: case.outputs > 1 and case.inputs[0].dtype != case.inputs[3].dtype,
    ),
    Disagreement(
        "Bernoulli",
        "onnxruntime",
        "expands the schema's function for types that it has no kernel for; that gives 1 with probability 1 - p, against the op's text",
    ),
    Disagreement(
        "Det",
        "reference",
        "the output has NumPy's wider type; by the schema it's that of the input",
        lambda case, operator: case.inputs[0].dtype.itemsize == 2,
    ),
    Disagreement(
        "Constant",
        "reference",
        "gives the values of a sparse tensor in a structure of its own, not as a dense tensor",
        lambda case, operator: "sparse_value" in case.attributes,
    ),
    Disagreement(
        "Dropout",
        "onnxruntime",
        "the mask of version 10 is all false where nothing is dropped; it says what is kept, as the texts from version 12 on make plain",
        lambda case, operator: operator.version == 10 and case.outputs == 2,
    ),
    Disagreement(
        "Dropout",
        "reference",
        "the output of a training-mode Dropout has the type of its ratio; by the schema it's that of the data",
        lambda case, operator: case.shapes_only and case.inputs[0].dtype.isbuiltin != 1,
    ),
    Disagreement(
        "Gather",
        "onnxruntime",
        "loses strings where several of them are taken in a row",
        lambda case, operator: case.inputs[0].dtype == object,
    ),
    *(
        Disagreement(
            op,
            "reference",
            "knows only version 13, with one axis; earlier ones flatten all axes from that one on",
            lambda case, operator: operator.version < 13,
        )
        for op in ("Hardmax", "LogSoftmax", "Softmax")
    ),
    Disagreement(
        "If",
        "reference",
        "hands an optional out as a list",
        lambda case, operator: case.attributes["then_branch"].output[0].type.HasField("optional_type"),
    ),
    Disagreement(
        "LayerNormalization",
        "onnxruntime",
        'crashes where the bias is written as ""',
        lambda case, operator: len(case.inputs) == 3 and case.inputs[2] is None,
    ),
    Disagreement(
        "LayerNormalization",
        "reference",
        "mean and deviation have the type of the input; by the op's text it's that of stash_type",
        lambda case, operator: case.outputs > 1 and case.inputs[0].dtype != np.float32,
    ),
    Disagreement(
        "Loop",
        "reference",
        "stacks scans as rows of a matrix; what each turn gives has to keep its rank",
        lambda case, operator: case.captured["outer"].ndim != 1,
    ),
    Disagreement(
        "Scan",
        "reference",
        "knows neither lengths nor axes and directions of what is scanned",
        lambda case, operator: operator.version == 8 or any(name.startswith("scan_") for name in case.attributes),
    ),
    Disagreement(
        "QuantizeLinear",
        "reference",
        "divides in a wider type than that of the scale, which the quotient has since version 23",
        lambda case, operator: operator.version >= 23 and case.inputs[0].dtype != case.inputs[1].dtype,
    ),
    Disagreement(
        "Unsqueeze",
        "reference",
        "inserts axes in the order in which they're given, though they are places in the result",
        lambda case, operator: list(case.attributes.get("axes", ())) != sorted(case.attributes.get("axes", ())),
    ),
    Disagreement(
        "Loop",
        "onnxruntime",
        "moves the strings of an outer value into the first turn's scan, so that later turns find empty ones",
        lambda case, operator: case.captured["outer"].dtype == object,
    ),
    Disagreement(
        "LpNormalization",
        "reference",
        "adds up signed values, not magnitudes, where p is 1",
        lambda case, operator: case.attributes.get("p") == 1,
    ),
    Disagreement(
        "LRN",
        "reference",
        "takes no more channels than there are rows in the batch",
        lambda case, operator: case.inputs[0].shape[0] < case.inputs[0].shape[1],
    ),
    Disagreement(
        "NonZero",
        "onnxruntime",
        "a scalar gives [1, count]; by the op's text it's [0, count]",
        lambda case, operator: case.inputs[0].ndim == 0,
    ),
    Disagreement(
        "RMSNormalization",
        "reference",
        "the output has NumPy's common type of input and scale; by the schema it's that of the scale",
        lambda case, operator: case.inputs[0].dtype != case.inputs[1].dtype,
    ),
    Disagreement(
        "ReduceLogSumExp",
        "onnxruntime",
        "for integers it makes each exponential whole before it adds them up",
        lambda case, operator: case.inputs[0].dtype.kind in "iu",
    ),
    Disagreement("Optional", "reference", "hands an optional out as a list"),
    Disagreement(
        "ReduceSumSquare",
        "reference",
        "the output has NumPy's wider type of sums; by the schema it's that of the input",
        lambda case, operator: case.inputs[0].dtype in (np.int32, np.uint32),
    ),
    *(
        Disagreement(
            op,
            "onnxruntime",
            "SAME padding is found without the dilation; by the op's text it's found from the dilated kernel",
            lambda case, operator: _is_padded_to_same_size(case) and _is_dilated(case),
        )
        for op in ("AveragePool", "LpPool", "MaxPool")
    ),
    *(
        Disagreement(
            op,
            "reference",
            "puts half of what ceil_mode adds before the input, finds SAME and VALID undilated, pads less than none for long strides",
            lambda case, operator: (
                bool(case.attributes.get("ceil_mode"))
                or (_is_padded_to_same_size(case) and _skips_elements(case))
                or (case.attributes.get("auto_pad", "NOTSET") != "NOTSET" and _is_dilated(case))
            ),
        )
        for op in ("AveragePool", "LpPool", "MaxPool")
    ),
    Disagreement(
        "MaxPool",
        "reference",
        "gives indices of other places where there are three spatial axes; onnxruntime's are those of the maxima",
        lambda case, operator: case.inputs[0].ndim == 5,
    ),
    Disagreement(
        "ConvTranspose",
        "reference",
        "adds the first feature's bias to every group",
        lambda case, operator: case.attributes.get("group", 1) > 1 and len(case.inputs) > 2 and case.inputs[2] is not None,
    ),
    Disagreement(
        "GlobalMaxPool",
        "reference",
        "reduces two axes, whatever the rank",
        lambda case, operator: case.inputs[0].ndim != 4,
    ),
    Disagreement(
        "AffineGrid",
        "reference",
        "the grid is float32 for matrices of 16 bits; by the schema it has the type of the matrices",
        lambda case, operator: case.inputs[0].dtype.itemsize == 2,
    ),
    Disagreement(
        "Resize",
        "reference",
        "drops the imaginary part",
        lambda case, operator: case.inputs[0].dtype.kind == "c",
    ),
    Disagreement(
        "Pad",
        "reference",
        "pads text with zeros; by the op's text the default is an empty string",
        lambda case, operator: case.inputs[0].dtype == object and not any(value is not None for value in case.inputs[2:3]),
    ),
    *(
        Disagreement(
            op,
            "reference",
            "adds the zero point before it rounds; by the op's text the quotient is rounded, which is another number at ties",
            lambda case, operator: bool(int(case.inputs[7]) % 2),
        )
        for op in ("QLinearConv", "QLinearMatMul")
    ),
    Disagreement(
        "QLinearConv",
        "reference",
        "takes scales per feature for images of two axes only",
        lambda case, operator: case.inputs[0].ndim != 4 and case.inputs[4].size > 1,
    ),
    *(
        Disagreement(
            op,
            "reference",
            "knows neither clip nor sequence_lens, input_forget or other activations",
            lambda case, operator: (
                any(name in case.attributes for name in ("clip", "activations", "input_forget"))
                or any(value is not None for value in case.inputs[4:5])
            ),
        )
        for op in ("GRU", "LSTM", "RNN")
    ),
    Disagreement(
        "ImageDecoder",
        "reference",
        "gives a grey image without channels; by the op's text it has those of the pixel format",
        lambda case, operator: _is_grey(case.inputs[0]),
    ),
    Disagreement(
        "StringNormalizer",
        "reference",
        "compares lowered words with stop words as they are written",
        lambda case, operator: not case.attributes.get("is_case_sensitive") and "stopwords" in case.attributes,
    ),
    Disagreement(
        "StringSplit",
        "onnxruntime",
        "takes spaces only for white space",
        lambda case, operator: (
            not case.attributes.get("delimiter") and any(space in word for word in case.inputs[0].flat for space in "\t\n")
        ),
    ),
    Disagreement(
        "DictVectorizer",
        "onnxruntime",
        "gives [1, words]; by the op's text the output has one axis",
    ),
    Disagreement(
        "DictVectorizer",
        "reference",
        "has the types of Python's numbers, not that of the map's values",
        lambda case, operator: (
            case.inputs[0] and case.output_types[0].tensor_type.elem_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.STRING)
        ),
    ),
    *(
        Disagreement(
            op,
            "reference",
            "the output has the type of the input; by the schema it's float32",
            lambda case, operator: case.inputs[0].dtype != np.float32,
        )
        for op in ("LinearClassifier", "LinearRegressor", "SVMRegressor", "TreeEnsembleRegressor")
    ),
    *(
        Disagreement(
            op,
            "reference",
            "takes intercepts that aren't there for NaN",
            lambda case, operator: "intercepts" not in case.attributes,
        )
        for op in ("LinearClassifier", "LinearRegressor")
    ),
    Disagreement(
        "TreeEnsemble",
        "reference",
        "ignores post_transform",
        lambda case, operator: bool(case.attributes.get("post_transform")),
    ),
    Disagreement(
        "TreeEnsembleClassifier",
        "onnxruntime",
        "takes the votes for two classes for those of one, leaves out classes whose votes are none or 0, and misses base values",
        lambda case, operator: (
            set(case.attributes["class_ids"]) == {0, 1}
            or _has_weight_below_zero(case)
            or any(name.startswith("base_values") for name in case.attributes)
        ),
    ),
    Disagreement(
        "TreeEnsemble",
        "onnxruntime",
        "doesn't transform a single target, and takes SOFTMAX for LOGISTIC and the other way round",
        lambda case, operator: (
            case.attributes.get("post_transform") in (1, 2)
            or (case.attributes["n_targets"] == 1 and bool(case.attributes.get("post_transform")))
        ),
    ),
    Disagreement(
        "TreeEnsembleClassifier",
        "onnxruntime",
        "doesn't transform scores where votes are for one of two classes",
        lambda case, operator: set(case.attributes["class_ids"]) == {0} and "SOFTMAX" in case.attributes.get("post_transform", ""),
    ),
    Disagreement(
        "Resize",
        "onnxruntime",
        "aligns corners with the size as it's rounded; the ONNX project's own test data have it by size · scale",
        lambda case, operator: _aligns_corners_of_a_fraction(case),
    ),
    Disagreement(
        "Resize",
        "onnxruntime",
        "ignores keep_aspect_ratio_policy where axes count from the end",
        lambda case, operator: (
            case.attributes.get("keep_aspect_ratio_policy", "stretch") != "stretch"
            and any(axis < 0 for axis in case.attributes.get("axes", ()))
        ),
    ),
    Disagreement(
        "LabelEncoder",
        "reference",
        "doesn't find NaN; by the op's text a key of NaN matches every NaN",
        lambda case, operator: case.inputs[0].dtype.kind == "f" and bool(np.isnan(case.inputs[0]).any()),
    ),
    Disagreement(
        "TreeEnsemble",
        "reference",
        "takes a 0 for the end of a set of members",
        lambda case, operator: "membership_values" in case.attributes,
    ),
    Disagreement(
        "TreeEnsembleRegressor",
        "onnxruntime",
        "leaves base values out, or undefined, where no leaf votes for a target, and doesn't transform a single target",
        lambda case, operator: (
            any(name.startswith("base_values") for name in case.attributes)
            or (case.attributes["n_targets"] == 1 and case.attributes.get("post_transform", "NONE") != "NONE")
        ),
    ),
    Disagreement(
        "StringSplit",
        "onnxruntime",
        "finds nothing in an empty string; between delimiters, and so also where there are none, lies one substring",
        lambda case, operator: bool(case.attributes.get("delimiter")) and "" in case.inputs[0].ravel().tolist(),
    ),
    *(
        Disagreement(
            op,
            oracle,
            "NaN goes the true way at a BRANCH_NEQ; by the text of nodes_missing_value_tracks_true its way is false by default",
            lambda case, operator: case.inputs[0].dtype.kind == "f" and bool(np.isnan(case.inputs[0]).any()) and _asks_for_other(case),
        )
        for op, oracle in (
            ("TreeEnsemble", "onnxruntime"),
            ("TreeEnsemble", "reference"),
            ("TreeEnsembleClassifier", "onnxruntime"),
            ("TreeEnsembleRegressor", "onnxruntime"),
        )
    ),
    Disagreement(
        "DFT",
        "onnxruntime",
        "needs as many bins as the one-sided inverse gives; by the text of dft_length they're cut off or filled up with zeros",
        lambda case, operator: bool(case.attributes.get("inverse")) and bool(case.attributes.get("onesided")),
    ),
)
"""Where the oracles differ, which one the specification's text contradicts, and why."""
