"""Runs programs of other libraries on flashtile and compares them with their own plain attention.

    python tests/clients.py [NAME ...] [--folder FOLDER]

Their packages, without what they depend on, go to FOLDER (default: .data/clients), never
into this environment. Each program runs in a process of its own on the CPU, where flashtile is
installed as flash_attn and no file of the library is changed. It prints a line for each client: the
seconds, and the largest difference from plain attention relative to the largest value, or an error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]


def difference(got: Tensor, want: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return ((got - want).abs().max() / want.abs().max()).item()


def esm() -> float:
    """ESM C's attention over packed proteins, beside its layer on PyTorch's attention."""
    from esm.layers.attention import FlashMultiHeadAttention, MultiHeadAttention

    flash, plain = FlashMultiHeadAttention(64, 4), MultiHeadAttention(64, 4)
    plain.load_state_dict(flash.state_dict())
    lengths = [7, 1, 12]
    x = torch.randn(sum(lengths), 64)
    tokens = torch.arange(12)[None] < torch.tensor(lengths)[:, None]
    alone = [plain(part[None], None)[0] for part in x.split(lengths)]
    return difference(flash(x, tokens), torch.cat(alone))


def mamba_ssm() -> float:
    """Mamba's MHA: the prompt, then tokens from its cache, beside a whole sequence."""
    # The package imports Triton and compiled code, which this file of it does not need.
    spec = PathFinder.find_spec("mamba_ssm")
    spec = spec_from_file_location("mha", Path(spec.origin).parent / "modules/mha.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    worst = 0.0
    for rotary in (0, 16):
        layer = module.MHA(64, 4, num_heads_kv=2, causal=True, layer_idx=0, rotary_emb_dim=rotary)
        x = torch.randn(2, 9, 64)
        with torch.no_grad():
            want = layer(x)
            cache = SimpleNamespace(
                max_seqlen=16,
                seqlen_offset=0,
                batch_size_offset=0,
                key_value_memory_dict={},
                lengths_per_sample=None,
            )
            parts = [layer(x[:, :5], cache)]
            for position in range(5, 9):
                cache.seqlen_offset = position
                parts.append(layer(x[:, position : position + 1], cache))
        worst = max(worst, difference(torch.cat(parts, 1), want))
    return worst


def yunchang() -> float:
    """yunchang's ring in two processes, both passes, beside one process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--ring", str(Path(folder) / "rendezvous")]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "a process of the ring failed"
    return max(float(text.split()[-1]) for text in printed)


def ring(rendezvous: str, rank: int) -> float:
    """One process of `yunchang`."""
    import torch.distributed as dist
    from yunchang.kernels import AttnType
    from yunchang.ring import zigzag_ring_flash_attn_func

    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=2)
    torch.manual_seed(0)
    # In float32 its sum of dq is its buffer for the next part, so its gradients are wrong.
    whole = [torch.randn(1, 32, 4, 16).half().requires_grad_() for _ in range(3)]
    dout = torch.randn(1, 32, 4, 16).half()
    heads_first = [x.transpose(1, 2) for x in whole]
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
    want = want.transpose(1, 2)
    want.backward(dout)

    def mine(x: Tensor) -> Tensor:
        quarters = x.chunk(4, 1)
        return torch.cat([quarters[rank], quarters[3 - rank]], 1).detach()

    local = [mine(x).requires_grad_() for x in whole]
    out = zigzag_ring_flash_attn_func(*local, causal=True, attn_type=AttnType.FA)
    out.backward(mine(dout))
    pairs = [
        (out, mine(want)),
        *((x.grad, mine(y.grad)) for x, y in zip(local, whole, strict=True)),
    ]
    worst = max(difference(got, exact) for got, exact in pairs)
    dist.destroy_process_group()
    return worst


def diffusers() -> float:
    """diffusers' backends for flash-attn, by their names, beside its native one."""
    from diffusers.models import attention_dispatch

    q, k, v = (torch.randn(2, 21, 4, 16) for _ in range(3))
    attend = attention_dispatch.dispatch_attention_fn
    want = attend(q, k, v, backend="native")
    names = ("flash", "flash_varlen", "_flash_varlen_3")
    return max(difference(attend(q, k, v, backend=name), want) for name in names)


def trl() -> float:
    """Four steps of TRL's SFTTrainer: packed without padding by flash_attention_2, and eager."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = ["<pad>", "<eos>", "a", "row", "of", "tiles", "has", "one", "maximum", "and", "sum"]
    words += ["which", "every", "tile", "corrects"]
    names = {word: index for index, word in enumerate(words)}
    model = Tokenizer(models.WordLevel(names, unk_token="<pad>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>"
    )
    texts = [tokenizer(" ".join(words[2 : 2 + n])) for n in (3, 11, 7, 5, 12, 2, 9, 4)]
    dataset = Dataset.from_dict({"input_ids": [text["input_ids"] for text in texts]})
    losses = []
    for name, packed in (("eager", False), ("flash_attention_2", True)):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(names),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation=name,
        )
        with tempfile.TemporaryDirectory() as folder:
            arguments = SFTConfig(
                output_dir=folder,
                max_steps=4,
                per_device_train_batch_size=4,
                padding_free=packed,
                logging_steps=1,
                report_to=[],
                use_cpu=True,
                bf16=False,
                disable_tqdm=True,
                save_strategy="no",
                max_length=None,
                dataset_kwargs={"skip_prepare_dataset": True},
            )
            trainer = SFTTrainer(
                LlamaForCausalLM(config),
                arguments,
                train_dataset=dataset,
                processing_class=tokenizer,
            )
            trainer.train()
        history = trainer.state.log_history
        losses.append(torch.tensor([row["loss"] for row in history if "loss" in row]))
    assert len(losses[0]) == 4
    return difference(losses[1], losses[0])


# The packages of each client, and the difference that is allowed: roundings of float32, or of
# float16 in the ring. A source archive is unpacked, not built.
CLIENTS: dict[Callable[[], float], tuple[tuple[str, ...], float]] = {
    esm: (("esm", "einops"), 1e-5),
    mamba_ssm: (("mamba_ssm (source)", "einops"), 1e-5),
    yunchang: (("yunchang",), 5e-3),
    diffusers: ((), 1e-5),  # this environment has it
    trl: ((), 1e-5),
}


def fetch(packages: tuple[str, ...], folder: Path) -> None:
    """Put `packages` into `folder`, unless they are there."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for package in packages:
        name, _, source = package.partition(" ")
        stamp = folder / f".{name}"
        if stamp.exists():
            continue
        if source:
            with tempfile.TemporaryDirectory() as scratch:
                command = [*pip, "download", "--no-deps", "--no-build-isolation", "--no-binary"]
                environment = os.environ | {"MAMBA_SKIP_CUDA_BUILD": "TRUE"}
                subprocess.run(
                    [*command, name, "--dest", scratch, name], check=True, env=environment
                )
                (archive,) = Path(scratch).glob("*.tar.gz")
                strip = ["tar", "-xzf", str(archive), "-C", str(folder), "--strip-components=1"]
                subprocess.run([*strip, "--wildcards", f"*/{name}"], check=True)
        else:
            subprocess.run([*pip, "install", "--no-deps", "--target", folder, name], check=True)
        stamp.touch()


def run(name: str, folder: Path) -> bool:
    """Run one client in a process of its own; print its line; return whether it is right."""
    start = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(folder)))}
    command = [sys.executable, __file__, "--in-this-process", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    result = (done.stdout.strip().splitlines() or ["no result"])[-1]
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        result = (done.stderr.strip().splitlines() or ["no message"])[-1]
    print(f"{name:10} {time.perf_counter() - start:6.1f} s  {result}", flush=True)
    return done.returncode == 0


def in_this_process(name: str) -> int:
    """Install flashtile as flash_attn, and run a client."""
    from flashtile.integrations import flash_attn

    program = next(function for function in CLIENTS if function.__name__ == name)
    flash_attn.install()
    torch.manual_seed(0)
    try:
        found = program()
    except Exception:  # whatever the library raises is its result
        traceback.print_exc()
        return 1
    allowed = CLIENTS[program][1]
    if not found <= allowed:
        print(f"largest difference {found:.1e}, allowed {allowed:.0e}", file=sys.stderr)
        return 1
    print(f"largest difference {found:.1e} (allowed {allowed:.0e})")
    return 0


def main() -> int:
    """Run the clients that the command line names, or all."""
    names = [function.__name__ for function in CLIENTS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--folder", type=Path, default=ROOT / ".data" / "clients")
    arguments = parser.parse_args()
    if unknown := {*arguments.names} - {*names}:
        parser.error(f"NAME: got {', '.join(sorted(unknown))}, want some of {', '.join(names)}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    results = []
    for function, (packages, _) in CLIENTS.items():
        if function.__name__ in (arguments.names or names):
            fetch(packages, arguments.folder)
            results.append(run(function.__name__, arguments.folder.resolve()))
    return int(not all(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-this-process"]:
        sys.exit(in_this_process(sys.argv[2]))
    if sys.argv[1:2] == ["--ring"]:
        from flashtile.integrations import flash_attn

        flash_attn.install()
        print(ring(sys.argv[2], int(sys.argv[3])))
    else:
        sys.exit(main())
