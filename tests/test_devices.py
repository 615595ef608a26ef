"""Device names, logical devices and the strategies' device lists."""

import pytest
import torch
from processes import output

import keras_distrib as kd
from keras_distrib import config, devices


def python(code: str, **environment: str) -> str:
    """Runs code in a process of its own, where no strategy has been made yet."""
    return output("-c", "import keras_distrib as kd\n" + code, **environment).strip()


@pytest.mark.parametrize("name", ["cpu:1", "/cpu:1", "CPU:1", "/device:CPU:1", torch.device("cpu", 1)])
def test_spellings(name):
    device = devices.resolve(name)
    assert (str(device), device.torch_device) == ("cpu:1", torch.device("cpu"))


def test_kind_alone_means_the_first():
    assert str(devices.resolve("cpu")) == "cpu:0"
    assert devices.parse_name("cuda:3") == ("gpu", 3)
    assert devices.parse_name("/gpu:1") == ("gpu", 1)


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        (["cpu:9"], ValueError, r"No such device. Received: device='cpu:9'. Visible devices: cpu:0, .*cpu:4"),
        (["cpu:0", "/cpu:0"], ValueError, "Duplicated devices in `devices`.*Visible devices: cpu:0"),
        (["tpu:0"], ValueError, "Received: device='tpu:0'. Visible devices"),
        (["/job:worker/task:1/cpu:0"], ValueError, "In-graph multi-worker training"),
        ("cpu:0", TypeError, "must be a list of devices"),
        ([3], TypeError, "Received: device=3"),
    ],
)
def test_bad_device_lists(names, error, text):
    with pytest.raises(error, match=text):
        kd.MirroredStrategy(names)


def test_mixed_kinds(monkeypatch):
    gpu = devices.Device("gpu", 0, torch.device("cuda", 0))
    cpus = devices.registry.logical("cpu")
    monkeypatch.setattr(devices.registry, "logical", lambda kind: [gpu] if kind == "gpu" else cpus)
    with pytest.raises(ValueError, match="must not mix CPU and GPU.*Visible devices: cpu:0, .*gpu:0"):
        kd.MirroredStrategy(["cpu:0", "gpu:0"])
    assert kd.MirroredStrategy().devices == (gpu,)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_no_gpu():
    with pytest.raises(ValueError, match="No such device. Received: device='/gpu:0'.*CUDA_VISIBLE_DEVICES"):
        kd.OneDeviceStrategy("/gpu:0")
    assert config.list_physical_devices("GPU") == []


def test_default_is_all_logical_cpus():
    assert [str(d) for d in kd.MirroredStrategy().devices] == [f"cpu:{i}" for i in range(5)]
    assert [str(d) for d in kd.MirroredStrategy([]).devices] == [f"cpu:{i}" for i in range(5)]


def test_lists():
    assert config.list_physical_devices()[0] == config.PhysicalDevice("/physical_device:CPU:0", "CPU")
    assert config.list_logical_devices("CPU")[4] == config.LogicalDevice("/device:CPU:4", "CPU")
    with pytest.raises(ValueError, match="Received: kind='TPU'"):
        config.list_physical_devices("TPU")


def test_the_guides_way_to_split_the_cpu():
    out = python(
        """
cpus = kd.config.list_physical_devices("CPU")
kd.config.set_logical_device_configuration(cpus[0], [kd.config.LogicalDeviceConfiguration() for _ in range(2)])
strategy = kd.MirroredStrategy()
print(strategy.num_replicas_in_sync, [d.name for d in kd.config.list_logical_devices()])
try:
    kd.config.set_logical_device_configuration(cpus[0], [kd.config.LogicalDeviceConfiguration()] * 3)
except RuntimeError as error:
    print(error)
""",
        KERAS_DISTRIB_LOGICAL_DEVICES="",
    )
    assert out.splitlines()[0] == "2 ['/device:CPU:0', '/device:CPU:1']"
    assert "Virtual devices cannot be modified after being initialized" in out


def test_the_environment_variable():
    assert python("print(kd.MirroredStrategy().num_replicas_in_sync)", KERAS_DISTRIB_LOGICAL_DEVICES="cpu=3") == "3"
    assert python("print(kd.MirroredStrategy().num_replicas_in_sync)", KERAS_DISTRIB_LOGICAL_DEVICES="") == "1"
    out = python(
        "try: kd.MirroredStrategy()\nexcept ValueError as error: print(error)", KERAS_DISTRIB_LOGICAL_DEVICES="cpu:3"
    )
    assert "Received: KERAS_DISTRIB_LOGICAL_DEVICES='cpu:3'" in out


def test_bad_configurations():
    with pytest.raises(ValueError, match="No such physical device. Received: device='gpu:7'"):
        config.set_logical_device_configuration("gpu:7", [config.LogicalDeviceConfiguration()])
    with pytest.raises(ValueError, match="at least one logical device"):
        config.set_logical_device_configuration("cpu:0", [])
    with pytest.raises(TypeError, match="must be a list of `LogicalDeviceConfiguration`"):
        config.set_logical_device_configuration("cpu:0", [1, 2])


def test_strategies_properties():
    strategy = kd.MirroredStrategy(["cpu:0", "cpu:2"])
    assert strategy.num_replicas_in_sync == 2
    assert strategy.cluster_resolver is None
    assert "MirroredStrategy on cpu:0, cpu:2" in repr(strategy)
    central = kd.experimental.CentralStorageStrategy(["cpu:1", "cpu:2"], parameter_device="cpu:3")
    assert str(central.parameter_device) == "cpu:3"
    assert str(kd.experimental.CentralStorageStrategy(["cpu:1"]).parameter_device) == "cpu:1"
    assert str(kd.experimental.CentralStorageStrategy(["cpu:1", "cpu:2"]).parameter_device) == "cpu:0"
    with pytest.raises(TypeError, match="Received: cross_device_ops='nccl'"):
        kd.MirroredStrategy(["cpu:0"], cross_device_ops="nccl")
