"""A small autograd, written to be read in the order below, and the experiment that trains it on digits.

1. tensor.py: a tensor that remembers its operation, arithmetic with a gradient for each, and the walk back from a loss
2. convolution.py: convolution as a matrix product, and operations whose value and gradient come from compiled kernels
3. layers.py: parameters, modules, softmax cross entropy, and three models for images of digits
4. optimizers.py: SGD and Adam
5. training.py, report.py: what `gptscale lenet minigrad` (studies/minigrad.py) trains, times and shows beside older figures

docs/lenet/minigrad.md has the derivations.
"""
