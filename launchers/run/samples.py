"""Continuations of held-out text by the model of a finished run, for people who want to look at what they trained."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gptscale.common.checkpoint.reader import Reader
from gptscale.common.data.tokenizers import get_tokenizer
from gptscale.common.model.gpt import Decoder
from gptscale.common.settings.families import model_class
from gptscale.common.settings.shape import ModelConfig
from gptscale.launchers.run.preflight import ReadyRun

# Tokens of text that a continuation begins with, and that it adds, at most.
PROMPT, ADDED = 32, 64


def print_samples(ready: ReadyRun, folder: Path) -> None:
    """Print what the last checkpoint of a run makes of the first sequences of the held-out text.

    A text is quoted on one line. One CPU process computes it in fp32, so that equal weights print the same after any recipe.
    Raises CheckpointError if the checkpoint cannot be read.
    """
    run, source = ready.run, ready.held_out
    # A sequence of one token is a prompt without a continuation.
    prompt = max(1, min(PROMPT, run.seq_len // 2))
    tokenizer = get_tokenizer(run.config.tokenizer)
    model = whole_model(Reader(folder / "checkpoints" / f"step-{run.config.steps}"), run.gpt)
    starts = [i * run.seq_len % (len(source) - prompt) for i in range(run.config.sample)]
    prompts = torch.stack([torch.from_numpy(source.read(start, prompt)) for start in starts])
    n_tokens = min(ADDED, run.seq_len - prompt)
    generator = torch.Generator().manual_seed(run.config.seed)
    likeliest, drawn = (continuation(model, prompts, n_tokens, draw) for draw in (None, generator))
    for number, rows in enumerate(zip(prompts, likeliest, drawn, strict=True), 1):
        print(f"  sample {number} of {len(prompts)}")
        for title, ids in zip(("text", "likeliest", "drawn"), rows, strict=True):
            print(f"    {title:<9} {tokenizer.decode(ids.numpy())!r}", flush=True)


def whole_model(reader: Reader, shape: ModelConfig) -> Decoder:
    """Return the model of a checkpoint, whole, on the CPU in fp32 and for evaluation."""
    with torch.device("meta"):
        model: Decoder = model_class(shape)(shape)
    model.load_state_dict({name: reader.read(f"model/{name}") for name, _ in model.named_parameters()}, assign=True)
    return model.eval()


@torch.no_grad()
def continuation(model: Decoder, prompts: Tensor, n_tokens: int, generator: torch.Generator | None) -> Tensor:
    """Return the `n_tokens` ids that follow each prompt: the likeliest one by one, or drawn from all by `generator`.

    prompts: (texts, tokens). Returns (texts, n_tokens). Together they must fit the model's block size.
    """
    ids = prompts
    for _ in range(n_tokens):
        logits = model(ids)[:, -1]
        if generator is None:
            following = logits.argmax(-1, keepdim=True)
        else:
            following = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, following], 1)
    return ids[:, prompts.shape[1] :]
