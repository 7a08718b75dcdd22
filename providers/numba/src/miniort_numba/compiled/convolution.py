"""Convolutions of images: as products of the weights with patches of the image, or tap by tap where each channel is seen by itself.

The matrix of patches, [channels · taps, windows], is never there as a whole: strips of it are copied into a core's cache, and all
features are multiplied with them. What's added up is activated there too, so that the result is written once.
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit

from miniort.types import Array
from miniort_numba.atomics import floats_at, words_at
from miniort_numba.compiled.activations import activate_row
from miniort_numba.compiled.multiply_add import dot_products
from miniort_numba.compiled.planes import ACROSS, COLUMNS, DOWN, HEIGHT, PLANES, ROWS, TAPS, WIDTH, fill_planes, offsets_of
from miniort_numba.compiled.tiles import LANES, STRIP, add_strip, copy_strip
from miniort_numba.compiled.vectors import add_some_lanes, copy_lanes, copy_some_lanes, sum_taps
from miniort_numba.options import LOOP, PLAIN
from miniort_numba.team import PART, address_of, keep, share
from miniort_numba.windows import SLACK

DEPTH = 256
"""Rows of a strip of patches that are multiplied at a time: 32 KB, which the first cache holds."""

TOGETHER = 8
"""Strips that are copied before they're multiplied, so that a part of the weights is read from the second cache for all of them."""

SUMS = 1 << 16
"""Elements of the result that are added up at a time: 256 KB, which the second cache holds."""

(Y, X, W, BIAS, ADDEND, PARAMETERS, LAYOUT, LAYOUT_SIZE, STARTS, SIZES) = range(10)
"""Addresses of what a part works on, 0 for what there isn't; after them the sizes, as `convolve` is given them."""

(KIND, CHANNELS, FEATURES, GROUPS, STEP, STRIPS, FEATURES_PER_UNIT, UNITS, CHUNK, ALL_SIZES) = range(10)
"""Number of the activation; channels and features of an image, and groups; elements of a channel as it's laid out; strips and features of
a unit; all units, and those of a chunk."""


@njit(**LOOP)
def add_both(y: Array, x: Array, bias: np.float32) -> None:
    """y = x + bias. x, y: [n]."""
    for i in range(y.size):
        y[i] = x[i] + bias


@njit(**LOOP)
def add_to_row(y: Array, x: Array) -> None:
    """y += x. x, y: [n]."""
    for i in range(y.size):
        y[i] += x[i]


@njit(**PLAIN)
def find_pieces(first: int, width: int, across: int, row: int, pieces: Array) -> int:
    """Which parts of a strip lie without gaps in a plane: pieces[i] = column of the strip, element of the plane, how many, at most LANES.

    first: the strip's first window; width: its windows; across: windows in a row; row: elements of a row. Gives how many pieces there are.
    """
    count = done = 0
    line, column = first // across, first % across
    while done < width:
        size = min(LANES, across - column, width - done)
        pieces[count, 0], pieces[count, 1], pieces[count, 2] = done, line * row + column, size
        count += 1
        done += size
        column += size
        if column == across:
            column, line = 0, line + 1
    return count


@njit(**PLAIN)
def copy_patches(target: int, source: int, starts: Array, pieces: Array, count: int) -> None:
    """A strip of patches. target: the address of [depth, STRIP]; source: of the first channel; starts: [depth], where each row begins."""
    for i in range(count):
        to, piece, size = target + 4 * pieces[i, 0], source + 4 * pieces[i, 1], pieces[i, 2]
        if size == LANES:
            for k in range(starts.size):
                copy_lanes(to + 4 * STRIP * k, piece + 4 * starts[k])
        else:
            for k in range(starts.size):
                copy_some_lanes(to + 4 * STRIP * k, piece + 4 * starts[k], size)


@njit(**PLAIN)
def add_to_strip(target: int, source: int, step: int, rows: int, width: int) -> None:
    """Add rows of `width` elements, at most STRIP. By addresses. target: [rows, STRIP]; source: rows that are `step` elements apart."""
    first, second = min(LANES, width), max(0, width - LANES)
    for r in range(rows):
        add_some_lanes(target + 4 * r * STRIP, source + 4 * r * step, first)
        add_some_lanes(target + 4 * (r * STRIP + LANES), source + 4 * (r * step + LANES), second)


@njit(**PLAIN)
def write_strip(target: int, step: int, source: int, rows: int, width: int) -> None:
    """Copy rows of `width` elements, at most STRIP. By addresses. target: rows that are `step` elements apart; source: [rows, STRIP]."""
    if width == STRIP:
        for r in range(rows):
            copy_strip(target + 4 * r * step, source + 4 * r * STRIP)
        return
    first, second = min(LANES, width), max(0, width - LANES)
    for r in range(rows):
        copy_some_lanes(target + 4 * r * step, source + 4 * r * STRIP, first)
        copy_some_lanes(target + 4 * (r * step + LANES), source + 4 * (r * STRIP + LANES), second)


@cfunc(PART, cache=True, error_model="numpy")
def _products(arguments: int, begin: int, end: int) -> None:
    """Units `begin` to `end`: a unit is an image, a group, some of its features, and some strips of its windows."""
    words = carray(words_at(arguments), SIZES + ALL_SIZES)
    sizes = words[SIZES:]
    layout = carray(words_at(words[LAYOUT]), words[LAYOUT_SIZE])
    parameters = carray(floats_at(words[PARAMETERS]), 2)
    groups, strips_per_unit, features_per_unit = sizes[GROUPS], sizes[STRIPS], sizes[FEATURES_PER_UNIT]
    features, channels = sizes[FEATURES] // groups, sizes[CHANNELS] // groups
    inner, points = channels * layout[TAPS], layout[DOWN] * layout[ACROSS]
    starts = carray(words_at(words[STARTS]), inner)
    across = points if layout[COLUMNS] == layout[ACROSS] else layout[ACROSS]
    strips = (points + STRIP - 1) // STRIP
    strip_units = (strips + strips_per_unit - 1) // strips_per_unit
    feature_units = (features + features_per_unit - 1) // features_per_unit
    deep = -(-inner // max(1, -(-inner // DEPTH)))  # parts of one depth, not a small one at the end
    most = min(features, features_per_unit)
    together = 1 if deep == inner else max(1, min(strips_per_unit, TOGETHER, SUMS // (most * STRIP)))
    patches = np.zeros((together, deep * STRIP), np.float32)
    biases = np.zeros(most * STRIP, np.float32)
    sums = np.empty((together, most * STRIP), np.float32)
    pieces = np.empty((together, STRIP, 3), np.int64)
    counts = np.empty(together, np.int64)
    for unit in range(begin, end):
        rest, strip_unit = unit // strip_units, unit % strip_units
        whole_group, feature_unit = rest // feature_units, rest % feature_units
        first_feature = whole_group * features + feature_unit * features_per_unit  # of all images' features
        first_weight = first_feature % sizes[FEATURES]
        rows = min(features_per_unit, features - feature_unit * features_per_unit)
        weights = words[W] + 4 * first_weight * inner
        source = words[X] + 4 * whole_group * channels * sizes[STEP]
        if words[BIAS]:
            bias = carray(floats_at(words[BIAS]), sizes[FEATURES])
            for r in range(rows):
                biases[r * STRIP : (r + 1) * STRIP] = bias[first_weight + r]
        last_strip = min(strips, (strip_unit + 1) * strips_per_unit)
        for first_strip in range(strip_unit * strips_per_unit, last_strip, together):
            number = min(together, last_strip - first_strip)
            for s in range(number):
                first = (first_strip + s) * STRIP
                width = min(STRIP, points - first)
                counts[s] = find_pieces(first, width, across, layout[COLUMNS], pieces[s])
                sums[s, : rows * STRIP] = biases[: rows * STRIP]
                if words[ADDEND]:
                    add_to_strip(sums[s].ctypes.data, words[ADDEND] + 4 * (first_feature * points + first), points, rows, width)
            for k in range(0, inner, deep):
                depth = min(deep, inner - k)
                for s in range(number):
                    copy_patches(patches[s].ctypes.data, source, starts[k : k + depth], pieces[s], counts[s])
                for s in range(number):
                    add_strip(sums[s].ctypes.data, STRIP, weights + 4 * k, inner, patches[s].ctypes.data, STRIP, rows, depth)
            for s in range(number):
                first = (first_strip + s) * STRIP
                done = sums[s, : rows * STRIP]
                activate_row(sizes[KIND], done, parameters[0], parameters[1])
                write_strip(words[Y] + 4 * (first_feature * points + first), points, done.ctypes.data, rows, min(STRIP, points - first))
    keep(patches)
    keep(sums)


@cfunc(PART, cache=True, error_model="numpy")
def _single_windows(arguments: int, begin: int, end: int) -> None:
    """Features `begin` to `end` of all images where each image has one window: a dot product each."""
    words = carray(words_at(arguments), SIZES + ALL_SIZES)
    sizes = words[SIZES:]
    layout = carray(words_at(words[LAYOUT]), words[LAYOUT_SIZE])
    parameters = carray(floats_at(words[PARAMETERS]), 2)
    features, channels = sizes[FEATURES] // sizes[GROUPS], sizes[CHANNELS] // sizes[GROUPS]
    inner = channels * layout[TAPS]
    starts = carray(words_at(words[STARTS]), inner)
    patch = np.empty(inner, np.float32)
    start = begin
    while start < end:
        whole_group = start // features
        stop = min(end, (whole_group + 1) * features)
        x = carray(floats_at(words[X] + 4 * whole_group * channels * sizes[STEP]), channels * sizes[STEP])
        for k in range(inner):
            patch[k] = x[starts[k]]
        group = whole_group % sizes[GROUPS]
        w = carray(floats_at(words[W] + 4 * group * features * inner), (features, inner))
        whole = carray(floats_at(words[Y] + 4 * whole_group * features), features)
        first, last = start - whole_group * features, stop - whole_group * features
        dot_products(whole, patch, w, first, last)
        y = whole[first:last]
        if words[BIAS]:
            add_to_row(y, carray(floats_at(words[BIAS] + 4 * (group * features + first)), last - first))
        if words[ADDEND]:
            add_to_row(y, carray(floats_at(words[ADDEND] + 4 * start), last - first))
        activate_row(sizes[KIND], y, parameters[0], parameters[1])
        start = stop


@cfunc(PART, cache=True, error_model="numpy")
def _single_channels(arguments: int, begin: int, end: int) -> None:
    """Channels `begin` to `end` of all images, each of which some features see by itself."""
    words = carray(words_at(arguments), SIZES + ALL_SIZES)
    sizes = words[SIZES:]
    layout = carray(words_at(words[LAYOUT]), words[LAYOUT_SIZE])
    offsets = offsets_of(layout)
    parameters = carray(floats_at(words[PARAMETERS]), 2)
    features = sizes[FEATURES] // sizes[CHANNELS]  # of each channel
    down, across, row, taps = layout[DOWN], layout[ACROSS], layout[COLUMNS], offsets.size
    planes = np.empty(layout[PLANES] * layout[ROWS] * row + SLACK, np.float32)
    sums = np.empty(down * row + SLACK, np.float32)
    for channel in range(begin, end):
        fill_planes(planes.ctypes.data, words[X] + 4 * channel * layout[HEIGHT] * layout[WIDTH], layout, np.float32(0))
        for feature in range(channel * features, (channel + 1) * features):
            own = feature % sizes[FEATURES]
            w = carray(floats_at(words[W] + 4 * own * taps), taps)
            sum_taps(sums, w, offsets, planes, (down - 1) * row + across)
            bias = carray(floats_at(words[BIAS]), sizes[FEATURES])[own] if words[BIAS] else np.float32(0)
            y = carray(floats_at(words[Y] + 4 * feature * down * across), down * across)
            for r in range(down):
                add_both(y[r * across : (r + 1) * across], sums[r * row : r * row + across], bias)
            if words[ADDEND]:
                add_to_row(y, carray(floats_at(words[ADDEND] + 4 * feature * down * across), down * across))
            activate_row(sizes[KIND], y, parameters[0], parameters[1])
    keep(planes)


PRODUCTS, SINGLE_WINDOWS, SINGLE_CHANNELS = address_of(_products), address_of(_single_windows), address_of(_single_channels)


@njit(**PLAIN)
def convolve(
    board: int,
    helpers: int,
    part: int,
    sizes: Array,
    layout: Array,
    starts: Array,
    x: Array,
    w: Array,
    bias: Array,
    addend: Array,
    parameters: Array,
    y: Array,
) -> None:
    """y = activation(w * x + bias + addend).

    part: PRODUCTS; or SINGLE_WINDOWS, where there's one window on an image; or SINGLE_CHANNELS, with one channel in a group.
    sizes: [ALL_SIZES]; layout: as in `miniort_numba.compiled.planes`; starts: [C / groups · taps], where the first window of an image sees
    each, from the group's first channel on; x: [n], for SINGLE_CHANNELS as it is, else laid out; w: [M, C / groups, ...]; bias: [M] or [0];
    addend: [N, M, ...] or [0]; parameters: the two of the activation; y: [N, M, ...].
    """
    words = np.empty(SIZES + ALL_SIZES, np.int64)
    words[Y], words[X], words[W], words[PARAMETERS] = y.ctypes.data, x.ctypes.data, w.ctypes.data, parameters.ctypes.data
    words[BIAS] = bias.ctypes.data if bias.size else 0
    words[ADDEND] = addend.ctypes.data if addend.size else 0
    words[LAYOUT], words[LAYOUT_SIZE], words[STARTS] = layout.ctypes.data, layout.size, starts.ctypes.data
    words[SIZES:] = sizes
    share(board, helpers, part, words.ctypes.data, sizes[UNITS], sizes[CHUNK])
    keep(words)
