"""The provider on the test double of CuPy: memory, devices, options, and arrays that nobody may take for host arrays."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from miniort.errors import ProviderError
from miniort.kernels import NodeContext
from miniort.providers import Provider, ProviderOptions
from miniort.types import ValueInfo
from miniort_cuda.provider import CUDAProvider, open_provider


def compiled(provider: CUDAProvider, op: str, arity: int, **attributes: Any) -> Any:
    (kernel,) = [kernel for kernel in provider.kernels.find("", op) if kernel.until is None]
    context = NodeContext(
        op=op,
        domain="",
        version=kernel.since,
        name="node",
        inputs=tuple(ValueInfo(f"x{index}") for index in range(arity)),
        outputs=(ValueInfo("y"),),
        provider=provider,
        attributes=attributes,
    )
    return kernel.compile(context)


@pytest.fixture
def provider(cupy: Any) -> CUDAProvider:
    return CUDAProvider(cupy, cupy.special)


def test_it_is_a_provider_of_its_own_device(provider: CUDAProvider) -> None:
    assert isinstance(provider, Provider)
    assert provider.device == "cuda:0"
    assert provider.kernels.provider == "cuda"


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_what_is_uploaded_comes_back(provider: CUDAProvider, dtype: Any, shape: tuple[int, ...]) -> None:
    host = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    back = provider.download(provider.upload(host))
    assert back.dtype == host.dtype
    np.testing.assert_array_equal(back, host, strict=True)


def test_small_arrays_are_uploaded_together(provider: CUDAProvider, cupy: Any) -> None:
    hosts = [
        np.arange(5),
        np.ones((1, 3), np.bool_),
        np.linspace(0, 1, 7, dtype=np.float32).astype(ml_dtypes.bfloat16),
        np.float16([[0.5]]),
        np.zeros((0, 2), np.float32),
        np.zeros((300, 300), np.float32),
        np.arange(12, dtype=np.int32).reshape(3, 4).T,
    ]
    arrays = provider.upload_together(*hosts, None)
    assert cupy.counts["upload"] == 3, "one for all small ones, one for the empty, one for the large"
    assert arrays[-1] is None
    for array, host in zip(arrays, hosts, strict=False):
        np.testing.assert_array_equal(provider.download(array), host, strict=True)


def test_upload_and_download_are_copies(provider: CUDAProvider) -> None:
    host = np.arange(4)
    array = provider.upload(host)
    host[0] = 9
    first = provider.download(array)
    first[1] = 9
    assert provider.download(array).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [np.dtype(ml_dtypes.float8_e5m2), np.dtype(object), np.dtype(np.complex64)])
def test_element_types_without_arrays_are_refused(provider: CUDAProvider, dtype: np.dtype[Any]) -> None:
    with pytest.raises(ProviderError, match="has no arrays of tensor"):
        provider.upload(np.zeros(2, dtype))
    with pytest.raises(ProviderError, match="has no arrays of tensor"):
        provider.allocate((2,), dtype)


def test_device_arrays_refuse_to_become_host_arrays(provider: CUDAProvider) -> None:
    array = provider.upload(np.arange(3))
    for convert in (np.asarray, np.sum, lambda x: np.add(x, 1), lambda x: np.add(np.arange(3), x), list, bool):
        with pytest.raises(TypeError):
            convert(array)


def test_a_host_operand_is_refused_by_the_double(provider: CUDAProvider) -> None:
    add = compiled(provider, "Add", 2)
    with pytest.raises(TypeError, match="host array"):
        add(provider.upload(np.arange(3)), np.arange(3))


def test_memory_follows_the_arrays_and_views_keep_their_base(provider: CUDAProvider) -> None:
    assert provider.memory().active == 0
    array = provider.allocate((1024,), np.dtype(np.float32))
    assert provider.memory().active == 4096
    view = compiled(provider, "Reshape", 2)(array, np.array([32, 32]))
    assert provider.memory().active == 4096
    del array
    assert provider.memory().active == 4096
    del view
    memory = provider.memory()
    assert (memory.active, memory.reserved, memory.peak) == (0, 4096, 4096)
    provider.close()
    assert provider.memory().reserved == 0


def test_allocate(provider: CUDAProvider) -> None:
    array = provider.allocate([2, 3], np.dtype(np.int32))
    assert (array.shape, array.dtype) == ((2, 3), np.int32)
    assert provider.allocate((), np.dtype(np.float32)).shape == ()


def test_kernels_copy_nothing_between_host_and_device(provider: CUDAProvider, cupy: Any) -> None:
    x, weight = provider.upload(np.ones((2, 3), np.float32)), provider.upload(np.ones((3, 4), np.float32))
    before = dict(cupy.counts)
    hidden = compiled(provider, "MatMul", 2)(x, weight)
    hidden = compiled(provider, "Reshape", 2)(hidden, np.array([4, -1]))
    hidden = compiled(provider, "Slice", 3)(hidden, np.array([1]), np.array([3]))
    y = compiled(provider, "Softmax", 1, axis=-1)(hidden)
    assert (cupy.counts["upload"], cupy.counts["download"]) == (before["upload"], before.get("download", 0))
    np.testing.assert_allclose(provider.download(y), np.full((2, 2), 0.5))


def test_views_launch_nothing(provider: CUDAProvider, cupy: Any) -> None:
    x = provider.upload(np.ones((2, 3, 1), np.float32))
    compiled(provider, "Reshape", 2)(x, np.array([3, 2]))
    compiled(provider, "Transpose", 1)(x)
    compiled(provider, "Unsqueeze", 2)(x, np.array([0]))
    compiled(provider, "Squeeze", 2)(x, np.array([2]))
    compiled(provider, "Slice", 3)(x, np.array([0]), np.array([1]))
    compiled(provider, "Expand", 2)(x, np.array([2, 3, 5]))
    assert cupy.counts["launch"] == 0


def test_work_goes_to_the_chosen_device_from_any_thread(fake_cupy: ModuleType) -> None:
    cupy = fake_cupy.FakeCupy(devices=2)
    provider = CUDAProvider(cupy, cupy.special, device_id=1)
    assert provider.device == "cuda:1"
    double = compiled(provider, "Add", 2)
    x = provider.upload(np.arange(3.0))
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(double(x, x)))
    thread.start()
    thread.join()
    (y,) = results
    assert (x.device_id, y.device_id, cupy.current_device) == (1, 1, 0)
    assert provider.download(y).tolist() == [0, 2, 4]
    assert provider.memory().active == 2 * fake_cupy.POOL_BLOCK
    assert cupy.get_default_memory_pool().used_bytes() == 0  # that of device 0
    provider.synchronize()
    assert cupy.synchronized == [1]


def test_the_double_notices_work_on_the_wrong_device(fake_cupy: ModuleType) -> None:
    cupy = fake_cupy.FakeCupy(devices=2)
    provider = CUDAProvider(cupy, cupy.special, device_id=1)
    with pytest.raises(RuntimeError, match="device 1 was touched while device 0"):
        cupy.add(provider.upload(np.arange(3)), 1)


def test_a_device_that_is_not_there(cupy: Any) -> None:
    with pytest.raises(ProviderError, match="device_id 3 is not one of the 1 devices"):
        CUDAProvider(cupy, cupy.special, device_id=3)


@pytest.mark.parametrize(("capability", "ok"), [("61", False), ("70", True), ("90", True), ("120", True)])
def test_a_device_that_is_too_old(fake_cupy: ModuleType, capability: str, ok: bool) -> None:
    cupy = fake_cupy.FakeCupy(capability=capability)
    if ok:
        assert CUDAProvider(cupy, cupy.special).device == "cuda:0"
    else:
        with pytest.raises(ProviderError, match=r"device 0 has compute capability 6\.1, and 7\.0 is needed"):
            CUDAProvider(cupy, cupy.special)


def test_open_imports_cupy_and_takes_the_option(fake_cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cupy.FakeCupy(devices=2)
    scipy = ModuleType("cupyx.scipy")
    scipy.special = cupy.special  # type: ignore[attr-defined]
    for name, module in {"cupy": cupy, "cupyx": ModuleType("cupyx"), "cupyx.scipy": scipy}.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert open_provider(ProviderOptions()).device == "cuda:0"
    assert open_provider(ProviderOptions(options={"device_id": "1"})).device == "cuda:1"
    for value, wanted in {"0": [], "1": ["tf32", "own"], "True": ["tf32", "own"]}.items():
        with open_provider(ProviderOptions(options={"use_tf32": value})).running():
            assert cupy.compute_types == wanted[:1]
        assert cupy.compute_types == wanted
        cupy.compute_types.clear()


def test_tf32_needs_a_device_that_has_it(fake_cupy: ModuleType) -> None:
    cupy = fake_cupy.FakeCupy(capability="75")
    with pytest.raises(ProviderError, match=r"device 0 has compute capability 7\.5, and use_tf32 needs 8\.0; leave it out"):
        CUDAProvider(cupy, cupy.special, use_tf32=True)


def test_open_without_cupy_is_a_provider_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ProviderError, match="CuPy can't be imported"):
        open_provider(ProviderOptions())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_id": "first"}, "device_id must be a number such as 0, found 'first'"),
        ({"use_tf32": "maybe"}, "use_tf32 must be 0 or 1, found 'maybe'"),
        ({"enable_cuda_graph": "2"}, "enable_cuda_graph must be 0 or 1, found '2'"),
        ({"stream": "1"}, "no option 'stream'"),
    ],
)
def test_wrong_options(options: dict[str, str], message: str) -> None:
    with pytest.raises(ProviderError, match=message):
        open_provider(ProviderOptions(options=options))
