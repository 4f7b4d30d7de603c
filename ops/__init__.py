"""Operators written by hand: GELU, convolution + bias + ReLU, and max pooling.

Each operator exists in Python, in C++ for CPUs and in Triton for GPUs, behind one function:

    from gptscale.ops.gelu import gelu, bias_gelu
    from gptscale.ops.conv import conv_bias_relu
    from gptscale.ops.max_pool import max_pool2d

This room imports torch and nothing else of gptscale. docs/ops has a page for each operator with the derivation, the kernel,
what bounds its speed, and measured figures.
"""
