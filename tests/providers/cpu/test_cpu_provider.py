"""The provider itself: how it is offered, opened and closed, what it holds, and what its table of kernels promises."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest

import miniort_cpu.plugin
from miniort.errors import ProviderError
from miniort.kernels import NEWEST_TESTED
from miniort.providers import Provider, ProviderOptions
from miniort_cpu.kernels import FAMILIES, all_kernels, family_kernels

INFO = miniort_cpu.plugin.miniort_providers()[0]


def test_it_is_offered_by_name():
    assert (INFO.name, INFO.priority) == ("cpu", 100)
    found = INFO.check()
    assert found.ok
    assert np.__version__ in found.reason


def test_listing_it_imports_no_kernels():
    code = "import sys, miniort_cpu.plugin as p; p.miniort_providers()[0].check(); sys.exit('miniort_cpu.kernels' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_option_is_an_error():
    with pytest.raises(ProviderError, match="'cpu' has no option 'turbo'"):
        INFO.open(ProviderOptions(options={"turbo": "1"}))


def test_it_is_a_provider_whose_memory_is_pooled():
    provider = INFO.open(ProviderOptions())
    assert isinstance(provider, Provider)
    assert provider.device == "host"
    array = provider.allocate((1000, 1000), np.dtype(np.float32))
    assert provider.upload(array) is array
    assert provider.download(array) is array
    provider.synchronize()
    assert provider.memory().active >= array.nbytes
    del array
    assert provider.memory().active == 0
    assert provider.memory().reserved > 0
    provider.close()
    assert provider.memory().reserved == 0


def test_large_results_come_from_the_pool_and_go_back(node, sample):
    a, b = sample(np.float32, (300, 300)), sample(np.float32, (300, 300))
    model = node("MatMul", 13, [a, b])
    result = model(a, b)
    provider = model.session.providers[0].provider
    assert provider.memory().active >= result[0].nbytes
    reserved = provider.memory().reserved
    for _ in range(20):
        result = model(a, b)
    assert provider.memory().reserved <= 2 * reserved
    del result
    assert provider.memory().active == 0


def test_every_kernel_names_an_op_and_a_version_of_onnx():
    schemas = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        schemas.setdefault((schema.domain, schema.name), set()).add(schema.since_version)
    for kernel in all_kernels():
        if (kernel.domain, kernel.op) in schemas:
            known = schemas[kernel.domain, kernel.op]
            assert any(kernel.covers(version) for version in known), f"{kernel.op} {kernel.versions_text()} covers no version of the op"
            assert kernel.until is None or kernel.until <= NEWEST_TESTED[kernel.domain]


def test_every_version_since_opset_7_of_every_op_that_it_has_is_covered():
    table, versions = all_kernels(), {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and not schema.deprecated and table.find("", schema.name):
            versions.setdefault(schema.name, set()).add(schema.since_version)
    assert len(versions) > 80
    for op, known in versions.items():
        since_opset_7 = {max((each for each in known if each <= opset), default=max(known)) for opset in range(7, NEWEST_TESTED[""] + 1)}
        for version in since_opset_7:
            assert sum(kernel.covers(version) for kernel in table.find("", op)) >= 1, f"{op} {version}"


def test_every_family_has_its_own_table():
    families = [family_kernels(family) for family in FAMILIES]
    assert all(families)
    assert sum(map(len, families)) == len(all_kernels())
    assert {kernel.provider for family in families for kernel in family} == {"cpu"}
