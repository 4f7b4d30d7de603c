"""The vision experiments: LeNet-5 and others on digits, MNIST, CIFAR-10 or a folder of images."""
