"""Language models of transformers inside `with layout:` on two ranks, compared with one process.

    python tests/sweep_layouts.py                 # all families: about a minute
    python tests/sweep_layouts.py llama roberta

A family may be equal, or raise an error; the exit status is 1 if the logits of one are different.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter
from typing import Any

import torch
import transformers
from shrunken_models import SPECIAL_TOKENS, VOCABULARY, randomise, shrunken
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from flashtile.distributed import ContextParallel
from flashtile.integrations.transformers import register
from flashtile.testing.wires import run_ranks

MAPPINGS = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING)
TOKENS = 24
NAME = register("tiles")


def families() -> list[str]:
    """The model types of language models."""
    return sorted(f for f in CONFIG_MAPPING if any(CONFIG_MAPPING[f] in m for m in MAPPINGS))


def build(family: str) -> torch.nn.Module:
    """A tiny random model."""
    config = CONFIG_MAPPING[family]
    kind: Any = next(m[config] for m in MAPPINGS if config in m)
    kind = kind[0] if isinstance(kind, tuple) else kind
    torch.manual_seed(0)
    model = kind._from_config(shrunken(config), attn_implementation=NAME).eval()
    randomise(model)
    model.set_attn_implementation(NAME)
    return model


@torch.no_grad()
def outcome(family: str) -> str:
    """What two ranks make of the model, in a few words."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(SPECIAL_TOKENS + 1, VOCABULARY, (1, TOKENS), generator=generator)
    try:
        model = build(family)
        want = model(input_ids=ids).logits
    except Exception as error:  # models fail in many ways; the table names each
        return f"not built: {type(error).__name__}"

    def one_rank(comm: Any) -> Tensor:
        layout = ContextParallel.over(comm).layout(seq_len=TOKENS, way="contiguous", grain=4)
        mine = copy.deepcopy(model)
        with layout, torch.no_grad():
            return layout.unshard(mine(**layout.batch(input_ids=ids)).logits, 1)

    try:
        got = run_ranks(2, one_rank, timeout=20)[0]
    except Exception as error:  # likewise
        return f"{type(error).__name__}: {str(error)[:100]}"
    return "equal" if (got - want).norm() < 1e-3 * want.norm() else "DIFFERENT"


def main(names: list[str]) -> int:
    """Print a line for each family, and how many had each outcome."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for family in names or families():
        found = outcome(family)
        counts[found.partition(":")[0]] += 1
        print(f"{family}: {found}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.most_common()))
    return counts["DIFFERENT"] > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
