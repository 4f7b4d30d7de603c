"""gptscale bench ops: our operators beside PyTorch's own."""
