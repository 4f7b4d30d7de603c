"""Operators written by hand: GELU, convolution + bias + ReLU, max pooling; and `minigrad`, a small autograd that uses them.

Each exists in Python, in C++ for CPUs and in Triton for GPUs, behind one function:

    from gptscale.ops.gelu import gelu, bias_gelu
    from gptscale.ops.conv import conv_bias_relu
    from gptscale.ops.max_pool import max_pool2d

`gptscale.ops.mlp`, a GPT's MLP with GELU inside the matrix products, is cuBLASLt's on a GPU.

docs/ops has a page for each: the derivation, the kernel, what it is bound by, and figures.
"""
