"""Operators written by hand: GELU, convolution + bias + ReLU, max pooling, and an MLP.

Each operator exists in Python, in C++ for CPUs and in Triton for GPUs, behind one function:

    from gptscale.ops.gelu import gelu, bias_gelu
    from gptscale.ops.conv import conv_bias_relu
    from gptscale.ops.max_pool import max_pool2d

`gptscale.ops.mlp` is a GPT's MLP with GELU inside the matrix products, which cuBLASLt computes on a GPU.

This room imports torch and nothing else of gptscale. docs/ops has a page for each operator with the derivation, the kernel,
what bounds its speed, and measured figures.
"""
