"""Figures of the reports as they gave them, beside which the studies print their own.

docs/lenet/README.md says what the exercise and the reports A to D are. Their hardware differs (2080 Ti, A100, H100), so that
seconds show the shape of a result and accuracies its level. Accuracies are percentages and times are seconds.
"""

from __future__ import annotations

from typing import Any

# The accuracy of LeNet-5 on MNIST that the exercise asks for.
EXERCISE_ACCURACY = 98.0
# LeNet-5 on MNIST in report A: Adam, rate 0.001, 10 epochs, with four losses of each epoch, one every 200 batches.
LENET_WITH_ADAM: dict[str, Any] = {
    "name": "report A: Adam .001, 2080 Ti",
    "accuracy": 99.02,
    "memory_mib": 1098,
    "losses": (
        (0.681, 0.171, 0.117, 0.092), (0.076, 0.063, 0.060, 0.058), (0.052, 0.050, 0.048, 0.045),
        (0.035, 0.039, 0.037, 0.037), (0.028, 0.032, 0.030, 0.029), (0.021, 0.026, 0.033, 0.029),
        (0.018, 0.020, 0.022, 0.022), (0.019, 0.018, 0.019, 0.018), (0.017, 0.014, 0.017, 0.015),
        (0.011, 0.016, 0.017, 0.019),
    ),
}  # fmt: skip
# LeNet-5 on MNIST in report B: RandomAffine(15, .1, .8-1.2), batch 32, 10 epochs, no worker processes, with a loss of each epoch.
LENET_WITH_AFFINE: dict[str, Any] = {
    "name": "report B: RandomAffine",
    "accuracy": 99.19,
    "seconds": 73.16,
    "losses": (0.5223, 0.1826, 0.1362, 0.1165, 0.1025, 0.0902, 0.0861, 0.0791, 0.0785, 0.0720),
    "by_class": (99.49, 99.91, 98.45, 99.60, 98.27, 98.88, 99.37, 99.42, 98.87, 99.50),
}
# The same by 8 processes of DDP with 4 workers each, and by DataParallel on 8 GPUs.
LENET_BY_DDP: dict[str, Any] = {
    "name": "report B: DDP, 8 GPUs",
    "accuracy": 98.93,
    "seconds": 26.11,
    "losses": (0.5043, 0.1707, 0.1265, 0.1048, 0.0928, 0.0837, 0.0790, 0.0729, 0.0710, 0.0687),
    "by_class": (99.39, 99.74, 99.42, 99.11, 99.19, 99.33, 98.75, 98.74, 99.38, 96.23),
}
LENET_BY_DATAPARALLEL: dict[str, Any] = {
    "name": "report B: DataParallel, 8 GPUs",
    "accuracy": 98.94,
    "seconds": 160.88,
    "losses": (0.5163, 0.1740, 0.1309, 0.1116, 0.0993, 0.0892, 0.0828, 0.0781, 0.0756, 0.0700),
    "by_class": (100.00, 99.47, 99.03, 98.51, 98.68, 98.54, 98.75, 98.44, 98.87, 99.01),
}

# Report B: worker processes of the loader, seconds of loading and of updating per step, seconds in all, accuracy.
LOADER_WORKERS = (
    (0, 0.0064, 0.0011, 72.80, 99.08),
    (2, 0.0043, 0.0012, 34.96, 99.10),
    (4, 0.0005, 0.0012, 18.47, 99.07),
)
# Report B: seconds of loading per step with RandomAffine and without, no worker processes.
LOADING_WITH_AFFINE_S, LOADING_WITHOUT_AFFINE_S = 0.006419, 0.003305
# Report B: run, worker processes of its loader, seconds, accuracy, and how busy nvidia-smi showed each GPU to be, in percent.
STRATEGY_RUNS = (
    ("baseline, 1 GPU", 0, 73.16, 99.19, "-"),
    ("DDP, 8 GPUs", 4, 26.11, 98.93, "40-60"),
    ("DataParallel, 8 GPUs", 0, 160.88, 98.94, "8, others 1"),
    ("DDP, 1 GPU", 4, 20.27, 99.09, "-"),
    ("baseline, 1 GPU", 4, 18.47, 99.07, "-"),
    ("DDP, 1 GPU", 0, 75.58, 99.09, "-"),
    ("baseline, 1 GPU", 0, 72.80, 99.08, "-"),
)

# Report D: layers, way to compute them, seconds forward, seconds backward, accuracy. Its 10 layers are one convolution that is
# applied ten times.
FUSED_CONVOLUTIONS = (
    (10, "cuDNN", 7.04, 13.88, 11.35),
    (10, "fused", 3.41, 19.17, 11.35),
    (10, "cuDNN off", 97.08, 220.32, 11.35),
    (10, "CPU", 20.56, 109.53, 11.35),
    (2, "cuDNN", 2.27, 4.87, 94.14),
    (2, "fused", 1.88, 6.39, 94.12),
    (2, "cuDNN off", 23.52, 43.88, 93.79),
    (2, "CPU", 6.67, 22.03, 93.76),
)

# Report C: the setting and the modes of its precision runs. It shows curves without figures, and its average memory was typed in
# by hand.
PRECISION_SETTING = "VGG-19 on CIFAR-10, 200 epochs, batch 256, SGD 0.01"
PRECISION_MODES = ("fp32", "fp16", "bf16")

# Report D: GPUs, images per GPU, seconds, MB, accuracy of 15 epochs. With two GPUs the accuracy is that of rank 0.
BATCH_SIZES = (
    (1, 32, 107.87, 312.08, 64.84),
    (2, 32, 67.21, 313.80, 61.85),
    (2, 16, 78.67, 167.25, 63.08),
    (2, 32, 80.27, 313.80, 61.10),
    (2, 64, 80.30, 605.17, 58.65),
    (2, 128, 80.59, 1189.30, 56.83),
)
# Report D: backend, images per GPU, seconds, MB, on two GPUs.
BACKENDS = (
    ("NCCL", 32, 78.58, 312.9),
    ("Gloo", 32, 77.11, 312.9),
    ("NCCL", 128, 75.83, 1189.0),
    ("Gloo", 128, 75.31, 1188.0),
)
