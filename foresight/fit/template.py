"""The text of a program that `gptscale fit` writes: what all splits share, with places for what is a split's own."""

# A place that stands alone in its line takes several lines, or none.
PROGRAM = '''\
"""$title.

    $launch
    $check_launch

Written by `gptscale fit`, which it does not need.
"""

$imports

$model

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
$constants
$definitions


$shard


def loss_of(model: nn.Module, o: argparse.Namespace, step: int, number: int) -> Tensor:
    """Return the mean loss of a micro-batch of the global batch. It is the same on whichever rank, with its dropout."""
    torch.manual_seed((o.seed * 1_000_003 + step) * 65_537 + number)
    inputs = $inputs
    $loss


def whole(o: argparse.Namespace) -> nn.Module:
    """Build the model on the host, the same on all ranks$shallow_words."""
    torch.manual_seed(o.seed)
    model = build().$train
    $shallow
    $recompute
    return model


def split(model: nn.Module, o: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Cut a model over the devices, and make its optimizer: matrices decay, norms and biases do not."""
    $before
    $groups
    $after


def gradients(model: nn.Module, o: argparse.Namespace, step: int) -> float:
    """Leave the gradients of a step for the optimizer, and return the mean loss of the global batch."""
    total, count = torch.zeros((), device=DEVICE), o.global_batch_size // (o.micro_batch_size * DATA_RANKS)
    $micros
    $mean


def train(o: argparse.Namespace) -> None:
    """Train to the last step, from the newest checkpoint if there is one, with a line for each step."""
    model, optimizer = split(whole(o), o)
    saved = [$saved] if o.save else []
    if first := max(saved, default=0):
        $load
    logs = [sys.stdout, *([open(o.csv, "a")] if o.csv else [])] if RANK == 0 else []
    for log in [] if first else logs:
        print("step,loss,grad_norm,lr,step_time_s", file=log)
    for step in range(first, o.steps):
        began, done = time.perf_counter(), max(0.0, (step - o.warmup) / max(1, o.steps - o.warmup))
        rate = o.lr * min((step + 1) / max(1, o.warmup), 0.55 + 0.45 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = gradients(model, o, step)
        $step
        for log in logs:
            print(f"{step + 1},{loss:.7g},{norm:.7g},{rate:.5g},{time.perf_counter() - began:.4f}", file=log, flush=True)
        if o.save and ((step + 1) % o.save_every == 0 or step + 1 == o.steps):
            $save


$check


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    $check_option
    defaults = {"precision": "$precision", "global_batch_size": $global_batch, "micro_batch_size": $micro_batch, "steps": 1000}
    defaults |= {"lr": 3e-4, "warmup": 100, "weight_decay": 0.1, "clip": 1.0, "seed": 0, "save": "", "save_every": 100, "csv": ""}
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    o = parser.parse_args()
    $start
'''
MICROS = """\
for micro in range(count):
    $sync
    loss = loss_of(model, o, step, micro * DATA_RANKS + DATA_RANK)
    $backward
    total += loss.detach().float() / count"""
CHECK = '''\
def check(o: argparse.Namespace) -> None:
    """Compare a step's gradients in fp32 with those of one process, which each rank computes, too."""
    o.precision, o.micro_batch_size, o.global_batch_size = "fp32", 2, 4 * DATA_RANKS
    (model, _), true = split(whole(o), o), whole(o)
    gradients(model, o, 0)
    for number in range(2 * DATA_RANKS):
        (loss_of(true, o, 0, number) / (2 * DATA_RANKS)).backward()
    $pairs
    floor = max(g.abs().max() for _, g in pairs) / 100
    worst = max(float(($gradient - g).abs().max() / (g.abs().max() + floor)) for p, g in pairs)
    print(f"rank {RANK}: {'right' if worst <= 1e-5 else 'WRONG'}, gradients deviate by at most {worst:.1e}")
    sys.exit(worst > 1e-5)'''
START = """\
if o.check and WORLD == 1:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "$check_ranks"]
    os.execve(sys.executable, [*launch, *sys.argv], os.environ | {"CUDA_VISIBLE_DEVICES": ""$check_env})
if o.global_batch_size % (o.micro_batch_size * DATA_RANKS):
    parser.error(f"{o.global_batch_size} samples are no multiple of {DATA_RANKS} x {o.micro_batch_size}")
if DEVICE.type == "cuda":
    torch.cuda.set_device(DEVICE)
$begin
(check if o.check else train)(o)
$end"""
