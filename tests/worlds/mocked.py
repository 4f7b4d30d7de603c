"""The variables under which a process of a test has the mock of CUDA."""

from gptscale.foresight.mock_cuda.devices import device_named, environment
from gptscale.foresight.simulate.interpreters import cuda_version, prepare_mock, torch_folder_of


def mock_variables(environment_name, device, devices):
    """Return what shows a program `devices` devices of a name of common/measure/gpus.csv."""
    version = cuda_version(torch_folder_of(environment_name))
    return environment(device_named(device), prepare_mock(environment_name), devices, version)
