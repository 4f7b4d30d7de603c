"""A small autograd of one's own, to be read in this order; docs/ops/minigrad.md has the derivations.

1. tensor.py: a tensor that remembers where it came from, and arithmetic with a gradient for each operation
2. backward.py: the walk back that turns this memory into gradients
3. loss.py: softmax cross entropy
4. convolution.py: convolution as a matrix product
5. kernels.py: operations whose value and gradient come from compiled kernels
6. layers.py: parameters, modules, and how all parameters are found
7. optimizers.py: SGD and Adam
8. models.py, data.py, training.py: the experiment, which `gptscale minigrad` runs
9. timing.py, report.py: what it took, beside the figures of the experiment that it repeats
"""
