"""Boxes in images: NonMaxSuppression, RoiAlign, MaxRoiPool."""

from __future__ import annotations

import numpy as np

from miniort.errors import KernelError
from miniort.kernels import KernelTable, NodeContext, Run
from miniort.types import Array
from miniort_cpu.floating_point import as_dtype, widen

kernels = KernelTable("cpu")

SAMPLE_ELEMENTS = 1 << 20
"""Elements that RoiAlign gathers at a time."""


@kernels.register("NonMaxSuppression", versions=(10, None))
def non_max_suppression(node: NodeContext) -> Run:
    """Per image and class the boxes by falling score, without those that overlap a better one by more than `iou_threshold`.

    boxes: [N, B, 4], two opposite corners (y, x, y, x), or with `center_point_box` (x, y, width, height); scores: [N, classes, B];
    most (0: none), iou_threshold, score_threshold: [] -> [selected, 3] int64: image, class, box
    """
    centered = bool(node.attribute("center_point_box", 0))

    def run(
        boxes: Array, scores: Array, most: Array | None = None, iou_threshold: Array | None = None, score_threshold: Array | None = None
    ) -> Array:
        limit = 0 if most is None else int(most.item())
        threshold = 0.0 if iou_threshold is None else iou_threshold.item()
        lowest = None if score_threshold is None else score_threshold.item()
        found = []
        for image in range(len(scores)) if limit > 0 else ():
            corners = _corners(boxes[image], centered)
            for label in range(scores.shape[1]):
                chosen = _suppressed(corners, scores[image, label], limit, threshold, lowest)
                found.append(np.column_stack([np.full(len(chosen), image), np.full(len(chosen), label), chosen]))
        return np.concatenate(found).astype(np.int64) if found else np.zeros((0, 3), np.int64)

    return run


def _corners(boxes: Array, centered: bool) -> Array:
    """The lower and then the upper corner of boxes. boxes: [B, 4] -> [4, B]."""
    first, second = boxes[:, :2].T, boxes[:, 2:].T
    if centered:
        first, second = first - second / 2, first + second / 2
    return np.concatenate([np.minimum(first, second), np.maximum(first, second)])


def _suppressed(corners: Array, scores: Array, limit: int, threshold: float, lowest: float | None) -> Array:
    """The boxes that are kept, best first; of equal scores the first. corners: [4, B]; scores: [B] -> [at most limit] int."""
    left = np.argsort(-scores, kind="stable")
    if lowest is not None:
        left = left[scores[left] > lowest]
    area = (corners[2] - corners[0]) * (corners[3] - corners[1])
    chosen: list[int] = []
    while left.size and len(chosen) < limit:
        best, left = left[0], left[1:]
        chosen.append(int(best))
        size = np.minimum(corners[2:, best, None], corners[2:, left]) - np.maximum(corners[:2, best, None], corners[:2, left])
        shared = np.maximum(size[0], 0) * np.maximum(size[1], 0)
        union = area[best] + area[left] - shared
        left = left[~((shared > 0) & (shared / union > threshold))]
    return np.array(chosen, np.int64)


def _axis_samples(start: Array, bin_size: Array, bins: int, samples: int, size: int) -> tuple[Array, Array, Array, Array]:
    """What the sampling points of regions on one axis are made of.

    start, bin_size: [R] -> lower and upper neighbour [R, bins, samples] int64, the upper one's weight, and whether the point counts
    """
    step = np.arange(bins)[:, None] + (np.arange(samples) + 0.5) / max(samples, 1)
    at = start[:, None, None] + step.astype(start.dtype) * bin_size[:, None, None]
    counts = (at >= -1) & (at <= size)
    at = np.clip(at, 0, size - 1)
    low = np.floor(at).astype(np.int64)
    high = np.minimum(low + 1, size - 1)
    return low, high, at - low, counts


@kernels.register("RoiAlign", versions=(10, None))
def roi_align(node: NodeContext) -> Run:
    """Regions of images, each pooled to one size, from bilinear samples at places that aren't rounded (He et al. 2017, arXiv:1703.06870).

    With `sampling_ratio` 0 a bin has as many samples along an axis as it has elements, rounded up. In mode max a sample is the largest of
    its four neighbours' contributions, not their sum.

    x: [N, C, H, W]; rois: [R, 4] (x1, y1, x2, y2); images: [R] int64 -> [R, C, output_height, output_width]
    """
    height, width = node.attribute("output_height", 1), node.attribute("output_width", 1)
    scale, ratio = node.attribute("spatial_scale", 1.0), node.attribute("sampling_ratio", 0)
    half_pixel = node.version >= 16 and node.attribute("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    largest = node.attribute("mode", "avg") == "max"
    allocate = node.provider.allocate

    def run(x: Array, rois: Array, images: Array) -> Array:
        wide, regions = widen(x), widen(rois)
        channels = x.shape[1]
        y = allocate((len(rois), channels, height, width), wide.dtype)
        corners = regions * regions.dtype.type(scale) - regions.dtype.type(0.5 if half_pixel else 0)
        extent = corners[:, 2:] - corners[:, :2]
        if not half_pixel:
            extent = np.maximum(extent, 1)
        bins = extent / np.array([width, height], extent.dtype)  # [R, 2]: x, y
        samples = np.full(bins.shape, ratio) if ratio > 0 else np.maximum(np.ceil(bins), 0).astype(np.int64)
        for grid in np.unique(samples, axis=0):
            same = np.flatnonzero((samples == grid).all(axis=1))
            across, down = grid.tolist()
            if not across or not down:
                y[same] = 0
                continue
            block = max(SAMPLE_ELEMENTS // max(channels * height * width * across * down, 1), 1)
            for first in range(0, len(same), block):
                part = same[first : first + block]
                rows = _axis_samples(corners[part, 1], bins[part, 1], height, down, x.shape[2])
                columns = _axis_samples(corners[part, 0], bins[part, 0], width, across, x.shape[3])
                y[part] = _pooled(wide, images[part], rows, columns, largest)
        return as_dtype(y, x.dtype)

    return run


def _pooled(
    x: Array, images: Array, rows: tuple[Array, Array, Array, Array], columns: tuple[Array, Array, Array, Array], largest: bool
) -> Array:
    """The samples of regions, pooled. x: [N, C, H, W]; images: [R]; rows, columns: of `_axis_samples` -> [R, C, bins, bins]."""
    image = images[:, None, None, None, None]
    pick = (slice(None), slice(None), slice(None), None, None), (slice(None), None, None, slice(None), slice(None))
    counts = rows[3][pick[0]] & columns[3][pick[1]]
    total: Array | None = None
    for upper_row in (0, 1):
        for upper_column in (0, 1):
            values = x[image, :, rows[upper_row][pick[0]], columns[upper_column][pick[1]]]  # [R, PH, gh, PW, gw, C]
            weight = (rows[2] if upper_row else 1 - rows[2])[pick[0]] * (columns[2] if upper_column else 1 - columns[2])[pick[1]]
            values *= np.where(counts, weight, 0)[..., None]
            if total is None:
                total = values
            elif largest:
                np.maximum(total, values, out=total)
            else:
                total += values
    assert total is not None
    pooled = total.max(axis=(2, 4)) if largest else total.mean(axis=(2, 4))
    return np.moveaxis(pooled, -1, 1)


@kernels.register("MaxRoiPool", versions=(1, None))
def max_roi_pool(node: NodeContext) -> Run:
    """Regions of images, each pooled to one size by the maximum over bins with whole elements (Girshick 2015, arXiv:1504.08083).

    x: [N, C, H, W]; rois: [R, 5] (image, x1, y1, x2, y2) -> [R, C, *pooled_shape]; a bin without elements is 0
    """
    pooled = node.attribute("pooled_shape")
    if len(pooled) != 2:
        raise KernelError(f"node {node.name!r} (MaxRoiPool) has pooled_shape {tuple(pooled)}; it takes a height and a width")
    scale = node.attribute("spatial_scale", 1.0)

    def run(x: Array, rois: Array) -> Array:
        wide, regions = widen(x), widen(rois)
        y = np.zeros((len(rois), x.shape[1], *pooled), wide.dtype)
        scaled = regions[:, 1:] * regions.dtype.type(scale)
        corners = np.trunc(scaled + np.copysign(0.5, scaled)).astype(np.int64)  # halves are rounded away from zero
        for region, (left, top, right, bottom) in enumerate(corners.tolist()):
            image = wide[int(regions[region, 0])]
            down, across = _bins(top, bottom, pooled[0], x.shape[2]), _bins(left, right, pooled[1], x.shape[3])
            for row, (first, last) in enumerate(down):
                if last > first:
                    strip = image[:, first:last].max(axis=1)
                    for column, (start, end) in enumerate(across):
                        if end > start:
                            y[region, :, row, column] = strip[:, start:end].max(axis=1)
        return as_dtype(y, x.dtype)

    return run


def _bins(start: int, end: int, bins: int, size: int) -> list[tuple[int, int]]:
    """The first element of each bin and the one after its last, on an axis of a size."""
    length = max(end - start + 1, 1)
    index = np.arange(bins)
    first = start + index * length // bins
    last = start + -(-(index + 1) * length // bins)
    return list(zip(np.clip(first, 0, size).tolist(), np.clip(last, 0, size).tolist(), strict=True))
