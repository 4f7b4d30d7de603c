"""A small autograd, written to be read in the order below.

1. tensor.py: a tensor that remembers which operation it came from, and arithmetic with a gradient for each operation
2. backward.py: the walk back through these operations, which computes the gradients
3. loss.py: softmax cross entropy
4. convolution.py: convolution as a matrix product
5. kernels.py: operations whose value and gradient come from compiled kernels
6. layers.py: parameters, modules, and the search for all parameters of a model
7. optimizers.py: SGD and Adam
8. models.py: three models for images of digits

docs/ops/minigrad.md has the derivations. lenet/minigrad trains these models on MNIST: `gptscale minigrad`.
"""
