"""What a run will need and how fast it will be, before it starts.

* mock_cuda: a stand-in for CUDA, so that a rank of any world runs on a machine without a GPU
* memory: bytes, a bound from the options and those of simulated runs
* time: seconds, from calibrated costs and an event simulation
* tables: runs measured by others, to judge the predictions by
"""
