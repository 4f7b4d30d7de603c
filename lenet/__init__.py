"""Vision experiments on MNIST and CIFAR-10; empty until they land."""
