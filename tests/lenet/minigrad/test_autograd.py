"""The small autograd: every gradient beside torch's autograd and beside finite differences, in float64."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.functional import vjp

from gptscale.lenet.minigrad.convolution import ConvBiasReLU, Fold, MaxPooling, Unfold, conv2d
from gptscale.lenet.minigrad.layers import ConvReLU, Linear, LogSumExp, Module, Parameter, build, softmax_cross_entropy
from gptscale.lenet.minigrad.optimizers import SGD, Adam
from gptscale.lenet.minigrad.tensor import Tensor, backward, broadcast_to, recording, sum_to, topological_order

LABELS = torch.tensor([2, 0, 1])
WINDOWS = {"kernel_size": 3, "stride": 2, "padding": 1}


@dataclass(frozen=True)
class Case:
    """A function on minigrad's tensors, the same on torch's, and the shapes of its arguments."""

    minigrad: Callable[..., Tensor]
    torchs: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    positive: bool = False
    # Whether it may be differentiated a second time.
    twice: bool = True


CASES = {
    "add": Case(lambda a, b: a + b, lambda a, b: a + b, ((3, 4), (3, 4))),
    "add a number": Case(lambda a: a + 2.5, lambda a: a + 2.5, ((3, 4),)),
    "add, a row": Case(lambda a, b: a + b, lambda a, b: a + b, ((3, 4), (4,))),
    "add, both broadcast": Case(lambda a, b: a + b, lambda a, b: a + b, ((3, 1, 4), (2, 1))),
    "subtract": Case(lambda a, b: a - b, lambda a, b: a - b, ((3, 4), (3, 1))),
    "subtract from a number": Case(lambda a: 1.0 - a, lambda a: 1.0 - a, ((3,),)),
    "multiply": Case(lambda a, b: a * b, lambda a, b: a * b, ((3, 4), (1, 4))),
    "multiply by a single number": Case(lambda a, b: a * b, lambda a, b: a * b, ((3, 4), ())),
    "divide": Case(lambda a, b: a / b, lambda a, b: a / b, ((3, 4), (4,)), positive=True),
    "divide a number": Case(lambda a: 2.0 / a, lambda a: 2.0 / a, ((3,),), positive=True),
    "power": Case(lambda a: a**3, lambda a: a**3, ((3, 4),)),
    "root": Case(lambda a: a**0.5, lambda a: a**0.5, ((3, 4),), positive=True),
    "exp": Case(lambda a: a.exp(), lambda a: a.exp(), ((3, 4),)),
    "relu": Case(lambda a: a.relu(), lambda a: a.relu(), ((3, 4),)),
    "matmul": Case(lambda a, b: a @ b, lambda a, b: a @ b, ((3, 4), (4, 2))),
    "matmul of a batch": Case(lambda a, b: a @ b, lambda a, b: a @ b, ((5, 3, 4), (5, 4, 2))),
    "matmul, one for a batch": Case(lambda a, b: a @ b, lambda a, b: a @ b, ((3, 4), (5, 4, 2))),
    "transpose": Case(lambda a: a.T, lambda a: a.mT, ((2, 3, 4),)),
    "reshape": Case(lambda a: a.reshape(2, -1), lambda a: a.reshape(2, -1), ((3, 4),)),
    "sum": Case(lambda a: a.sum(), lambda a: a.sum(), ((3, 4),)),
    "sum over an axis": Case(lambda a: a.sum(-1), lambda a: a.sum(-1), ((3, 4),)),
    "sum over two, kept": Case(
        lambda a: a.sum(0, 2, keepdim=True), lambda a: a.sum((0, 2), keepdim=True), ((3, 4, 2),)
    ),
    "mean": Case(lambda a: a.mean(), lambda a: a.mean(), ((3, 4),)),
    "broadcast": Case(lambda a: broadcast_to(a, (2, 3, 4)), lambda a: a.expand(2, 3, 4), ((3, 1),)),
    "sum to a shape": Case(lambda a: sum_to(a, (3, 1)), lambda a: a.sum_to_size(3, 1), ((2, 3, 4),)),
    "logsumexp": Case(lambda a: LogSumExp()(a), lambda a: a.logsumexp(-1, keepdim=True), ((3, 4),)),
    "cross entropy": Case(lambda a: softmax_cross_entropy(a, LABELS), lambda a: F.cross_entropy(a, LABELS), ((3, 4),)),
    "unfold": Case(lambda a: Unfold(**WINDOWS)(a), lambda a: F.unfold(a, **WINDOWS), ((2, 3, 6, 5),)),
    "fold": Case(lambda a: Fold((6, 5), **WINDOWS)(a), lambda a: F.fold(a, (6, 5), **WINDOWS), ((2, 27, 9),)),
    "the same value twice": Case(lambda a: a * a + a, lambda a: a * a + a, ((3, 4),)),
    "a diamond": Case(lambda a: a.exp() * (a * 2).exp(), lambda a: a.exp() * (a * 2).exp(), ((3,),)),
    "a network": Case(
        lambda x, v, w: softmax_cross_entropy((x @ v).relu() @ w, LABELS),
        lambda x, v, w: F.cross_entropy((x @ v).relu() @ w, LABELS),
        ((3, 5), (5, 6), (6, 4)),
    ),
}
for stride, padding in ((1, 0), (2, 1), (3, 2)):
    CASES[f"conv2d, stride {stride}, padding {padding}"] = Case(
        lambda x, w, b, s=stride, p=padding: conv2d(x, w, b, stride=s, padding=p),
        lambda x, w, b, s=stride, p=padding: F.conv2d(x, w, b, s, p),
        ((2, 3, 7, 8), (4, 3, 3, 3), (4,)),
    )
    CASES[f"conv+bias+relu kernel, stride {stride}, padding {padding}"] = Case(
        lambda x, w, b, s=stride, p=padding: ConvBiasReLU(stride=s, padding=p)(x, w, b),
        lambda x, w, b, s=stride, p=padding: F.conv2d(x, w, b, s, p).relu(),
        ((2, 3, 7, 8), (4, 3, 3, 3), (4,)),
        twice=False,
    )
for backward_by in ("auto", "loop", "python"):
    for size, pool_stride, padding in ((2, None, 0), (3, 2, 1), (3, 1, 0)):
        CASES[f"max pooling by {backward_by}, {size}, stride {pool_stride}, padding {padding}"] = Case(
            lambda x, b=backward_by, k=size, s=pool_stride, p=padding: MaxPooling(k, stride=s, padding=p, backward=b)(
                x
            ),
            lambda x, k=size, s=pool_stride, p=padding: F.max_pool2d(x, k, s, p),
            ((2, 3, 7, 6),),
            twice=False,
        )


def arguments(case):
    random = torch.Generator().manual_seed(7)
    arrays = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in case.shapes]
    return [array.abs() + 0.5 for array in arrays] if case.positive else arrays


def weights_of(y):
    """Return weights for the sum over an output, so that the derivative by each of its elements is different."""
    return torch.linspace(-1.0, 2.0, y.numel(), dtype=y.dtype).reshape(y.shape) if y.numel() > 1 else torch.ones_like(y)


def minigrad_gradients(case, arrays):
    leaves = [Tensor(array, needs_grad=True) for array in arrays]
    y = case.minigrad(*leaves)
    backward((y * Tensor(weights_of(y.array))).sum())
    return y, [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_torch(name):
    case = CASES[name]
    arrays = arguments(case)
    y, gradients = minigrad_gradients(case, arrays)
    expected_y, expected = vjp(case.torchs, tuple(arrays), weights_of(y.array))
    torch.testing.assert_close(y.array, expected_y)
    torch.testing.assert_close([g.array for g in gradients], list(expected))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.twice])
def test_gradients_of_gradients_are_those_of_torch(name):
    """The derivative of the sum of the squares of all first derivatives."""
    case = CASES[name]
    arrays = arguments(case)
    leaves = [Tensor(array, needs_grad=True) for array in arrays]
    y = case.minigrad(*leaves)
    backward((y * y * Tensor(weights_of(y.array))).sum(), record=True)
    firsts = [leaf.grad for leaf in leaves if leaf.grad is not None]
    for leaf in leaves:
        leaf.grad = None
    backward(sum(((g * g).sum() for g in firsts[1:]), start=(firsts[0] * firsts[0]).sum()))

    torch_leaves = [array.clone().requires_grad_() for array in arrays]
    z = case.torchs(*torch_leaves)
    grads = torch.autograd.grad((z * z * weights_of(z.detach())).sum(), torch_leaves, create_graph=True)
    expected = torch.autograd.grad(torch.stack([(g * g).sum() for g in grads]).sum(), torch_leaves)
    torch.testing.assert_close([leaf.grad.array for leaf in leaves if leaf.grad], list(expected))


def test_a_second_derivative_through_a_kernel_is_refused():
    x = Tensor(torch.randn(1, 1, 4, 4), needs_grad=True)
    with pytest.raises(NotImplementedError, match="MaxPooling has no second derivative"):
        backward(MaxPooling(2)(x).sum(), record=True)
    # The first derivative still works, and recording is on again.
    backward(MaxPooling(2)(x).sum())
    assert (x * x).op is not None


def test_a_gradient_adds_up_over_uses_and_over_calls():
    x = Tensor(torch.tensor([3.0]), needs_grad=True)
    left, right = x * 2, x * 5
    # This is 10 x^2.
    backward((left * right).sum())
    assert x.grad is not None
    assert x.grad.array.item() == 60.0
    backward((x * 4).sum())
    assert x.grad.array.item() == 64.0


def test_each_op_is_walked_once_after_all_that_used_it():
    """A chain of diamonds has 2^40 paths, so the walk must not take them one by one."""
    x = Tensor(torch.tensor([1.0], dtype=torch.float64), needs_grad=True)
    y = x
    for _ in range(40):
        y = y * 0.5 + y * 0.5
    order = topological_order(y)
    assert len(order) == len({id(node) for node in order}) == 121
    place = {id(node): i for i, node in enumerate(order)}
    assert all(place[id(i)] < place[id(node)] for node in order for i in node.inputs if i.needs_grad)
    backward(y)
    assert x.grad is not None
    assert x.grad.array.item() == 1.0


def test_a_graph_may_be_deeper_than_pythons_stack():
    x = Tensor(torch.zeros(1), needs_grad=True)
    y = x
    for _ in range(5000):
        y = y + 1.0
    backward(y)
    assert x.grad is not None
    assert x.grad.array.item() == 1.0


def test_nothing_is_remembered_without_need():
    x, w = Tensor(torch.ones(2, 2)), Tensor(torch.ones(2, 2), needs_grad=True)
    assert (x @ x).inputs == ()
    with recording(False):
        assert (x @ w).inputs == ()
    y = x @ w
    backward(y.sum())
    assert x.grad is None
    assert w.grad is not None
    # Backward leaves no graph unless it is asked to.
    assert w.grad.op is None
    assert repr(y) == "Tensor(MatMul, shape (2, 2), float32)"


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda w: backward(w * 2), "single number, not from shape"),
        (lambda w: backward(Tensor(torch.ones(1))), "needs a gradient"),
        (lambda w: w @ Tensor(torch.ones(3)), "both need two axes"),
        (lambda w: conv2d(Tensor(torch.ones(1, 1, 2, 2)), Parameter(torch.ones(1, 1, 3, 3)), w), "sliding blocks"),
    ],
)
def test_mistakes_are_named(mistake, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        mistake(Tensor(torch.ones(2, 3), needs_grad=True))


def test_large_logits_do_not_overflow():
    logits = Tensor(torch.tensor([[1e4, 0.0], [-1e4, 0.0]]), needs_grad=True)
    loss = softmax_cross_entropy(logits, torch.tensor([0, 0]))
    backward(loss)
    assert loss.array.item() == pytest.approx(5e3)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.array, torch.tensor([[0.0, 0.0], [-0.5, 0.5]]))


class Tree(Module):
    """A module with parameters in every kind of place."""

    def __init__(self):
        random = torch.Generator().manual_seed(0)
        self.own = Parameter(torch.zeros(1))
        self.listed = [Linear(2, 2, random), (Parameter(torch.zeros(2)), [Linear(2, 1, random)])]
        self.named = {"a": Linear(1, 1, random), "b": {"c": Parameter(torch.zeros(3))}}
        self.shared = self.listed[0]
        self.constant = Tensor(torch.zeros(5))
        self.itself = self


def test_all_parameters_are_found_once_whatever_the_model():
    tree = Tree()
    parameters = tree.parameters()
    assert len(parameters) == len({id(p) for p in parameters}) == 9
    assert sorted(p.array.numel() for p in parameters) == [1, 1, 1, 1, 2, 2, 2, 3, 4]


@pytest.mark.parametrize("optimizer", [SGD, Adam])
@pytest.mark.parametrize("model", ["pure_linear", "simple_conv", "LeNet"])
def test_a_step_changes_every_parameter_of_every_model(model, optimizer):
    net = build(model)
    before = [p.array.clone() for p in net.parameters()]
    images = torch.rand(16, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    backward(softmax_cross_entropy(net(Tensor(images)), torch.arange(16) % 10))
    optimizer(net.parameters(), 0.01).step()
    for old, parameter in zip(before, net.parameters(), strict=True):
        assert not torch.equal(old, parameter.array)


OPTIMIZERS = {
    "sgd": (lambda p: SGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (lambda p: SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "adam": (lambda p: Adam(p, 0.01), lambda p: torch.optim.Adam(p, 0.01)),
    "adam, other betas": (
        lambda p: Adam(p, 0.01, beta1=0.5, beta2=0.9, eps=1e-3),
        lambda p: torch.optim.Adam(p, 0.01, betas=(0.5, 0.9), eps=1e-3),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_do_what_torchs_do(name):
    build_minigrad, build_torch = OPTIMIZERS[name]
    random = torch.Generator().manual_seed(1)
    x = torch.randn(8, 5, generator=random, dtype=torch.float64)
    start = torch.randn(5, 3, generator=random, dtype=torch.float64)
    labels = torch.arange(8) % 3
    weight, unused = Parameter(start.clone()), Parameter(torch.ones(2))
    torch_weight = start.clone().requires_grad_()
    optimizer, reference = build_minigrad([weight, unused]), build_torch([torch_weight])
    for step in range(8):
        optimizer.lr = reference.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.zero_grad()
        backward(softmax_cross_entropy(Tensor(x) @ weight, labels))
        optimizer.step()
        reference.zero_grad()
        F.cross_entropy(x @ torch_weight, labels).backward()
        reference.step()
    torch.testing.assert_close(weight.array, torch_weight.detach())
    # Without a gradient nothing changes.
    assert torch.equal(unused.array, torch.ones(2))


def test_the_operator_and_the_lessons_convolution_agree():
    gradients = []
    x = torch.randn(4, 2, 9, 9, generator=torch.Generator().manual_seed(3))
    for convolution in ("kernel", "im2col"):
        layer = ConvReLU(2, 3, 3, torch.Generator().manual_seed(0), stride=2, padding=1, convolution=convolution)
        y = layer(Tensor(x))
        backward((y * y).sum())
        gradients.append([y.array, *(p.grad.array for p in layer.parameters() if p.grad)])
    assert len(gradients[0]) == 3
    torch.testing.assert_close(gradients[0], gradients[1])


def test_the_pages_examples_run():
    page = (Path(__file__).parents[3] / "docs" / "lenet" / "minigrad.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    exec("\n".join(blocks), {})
