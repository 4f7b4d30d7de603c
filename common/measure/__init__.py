"""What is counted and timed in a run: devices, operations, speed, memory, offload, pipeline bubbles."""
