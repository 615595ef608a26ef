"""Settings of all tests, and the check that a test leaves nothing behind."""

import os

os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("KERAS_DISTRIB_LOGICAL_DEVICES", "cpu=5")

import gc
import multiprocessing
import sys
import threading
import time

import pytest
import torch

import keras_distrib as kd

# Scripts for TensorFlow, which tests migrate.
collect_ignore_glob = ["migrate_scripts/*"]


def _package_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("keras_distrib")}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    report = (yield).get_result()
    if report.when == "call":
        item.passed = report.passed


@pytest.fixture(autouse=True)
def nothing_left(request):
    """Fails a test that leaves a thread, a process, a setting or a strategy behind."""
    environment = dict(os.environ)
    without_tensorflow = "tensorflow" not in sys.modules
    threads = _package_threads()
    torch_threads = torch.get_num_threads()
    yield
    if not getattr(request.node, "passed", False):
        return  # the failure's traceback keeps the test's objects alive
    request.node.funcargs.clear()  # the strategies that fixtures made
    assert not kd.has_strategy(), "a strategy's scope is still entered"
    assert torch.get_num_threads() == torch_threads, "torch's number of threads was not restored"
    environment["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST", "")
    if without_tensorflow and "tensorflow" in sys.modules:  # its import, by Keras, sets variables of its own
        environment = {**os.environ, **environment}
    assert dict(os.environ) == environment
    assert not multiprocessing.active_children(), "a process is still running"
    deadline = time.monotonic() + 20
    while _package_threads() - threads and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)  # a collection holds the interpreter, which the threads need to end
    assert not _package_threads() - threads, "a replica's thread is still alive"


@pytest.fixture(params=[1, 2, 3, 5])
def replicas(request) -> int:
    return request.param


@pytest.fixture
def mirrored(replicas):
    """A MirroredStrategy on 1, 2, 3 or 5 logical CPUs."""
    return kd.MirroredStrategy([f"cpu:{index}" for index in range(replicas)])


@pytest.fixture
def two():
    """A MirroredStrategy on two logical CPUs."""
    return kd.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(params=["one", "mirrored", "central"])
def any_strategy(request):
    """Each one-machine strategy, the last two on two logical CPUs."""
    if request.param == "one":
        return kd.OneDeviceStrategy("cpu:0")
    if request.param == "mirrored":
        return kd.MirroredStrategy(["cpu:0", "cpu:1"])
    return kd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])
