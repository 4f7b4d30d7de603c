"""The time of a recorded step: each kernel, product, collective and copy is priced, and its streams are replayed."""
