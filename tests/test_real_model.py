"""A real model: the ALBERT that maps atoms of chemical reactions, from the wheel of rxnmapper.

Only its files are used (weights, vocabulary): 12 shared layers, 8 heads, trained on 1.3 million
reactions. Eager attention in float64 is the truth, eager in float32 what plain PyTorch makes.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from flashtile.testing import assert_close

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

MODEL = "models/transformers/albert_heads_8_uspto_all_1310k"

# From the USPTO patents; lengths differ, so the batch is padded.
REACTIONS = (
    "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F",
    "CCO.CC(=O)O>>CC(=O)OCC",
    "C1COCCO1.CC(C)(C)OC(=O)CONC(=O)NCc1cccc2ccccc12.Cl>>O=C(O)CONC(=O)NCc1cccc2ccccc12",
    "Brc1ccccc1.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1",
)

# The SMILES tokens of Schwaller et al. 2019, "Molecular Transformer", as rxnmapper cuts them.
TOKEN = re.compile(
    r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
)


@pytest.fixture(scope="module")
def folder():
    found = importlib.util.find_spec("rxnmapper")
    if found is None or not found.submodule_search_locations:
        pytest.skip(
            "rxnmapper, whose wheel carries the model, is not installed (--no-deps is enough)"
        )
    return Path(found.submodule_search_locations[0]) / MODEL


def batch(folder, side):
    """input_ids and attention_mask (4, longest), padded on one side."""
    words = (folder / "vocab.txt").read_text().splitlines()
    number = {word: i for i, word in enumerate(words)}
    rows = [
        [
            number["[CLS]"],
            *(number.get(t, number["[UNK]"]) for t in TOKEN.findall(r)),
            number["[SEP]"],
        ]
        for r in REACTIONS
    ]
    assert all(number["[UNK]"] not in row for row in rows)
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), number["[PAD]"])
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        ids[i, at], mask[i, at] = torch.tensor(row), 1
    return ids, mask


def run(folder, attention, dtype, ids, mask):
    """Hidden states of the real tokens, and the gradient of their square in the word embeddings."""
    model = transformers.AlbertModel.from_pretrained(
        folder, attn_implementation=attention, dtype=dtype, add_pooling_layer=False
    ).eval()
    assert model.config._attn_implementation == attention
    hidden = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    hidden.square().sum().backward()
    return hidden.detach(), model.embeddings.word_embeddings.weight.grad


@pytest.mark.parametrize("side", ["right", "left"])
def test_flashtile_agrees_with_eager(folder, side):
    from flashtile.integrations.transformers import register

    ids, mask = batch(folder, side)
    truth = run(folder, "eager", torch.float64, ids, mask)
    plain = [run(folder, name, torch.float32, ids, mask) for name in ("eager", "sdpa")]
    got = run(folder, register(name="flashtile"), torch.float32, ids, mask)
    assert truth[0].std() > 0.1
    for i, name in enumerate(("hidden states", "gradient of the embeddings")):
        farther = max((x[i] for x in plain), key=lambda x: (x - truth[i]).abs().max())
        assert_close(name, got[i], truth[i], farther)


def test_padding_is_not_ignored(folder):
    """The hidden states of a sentence do not depend on what is padded around it."""
    from flashtile.integrations.transformers import register

    ids, mask = batch(folder, "right")
    together, _ = run(folder, register(name="flashtile"), torch.float64, ids, mask)
    alone = [
        run(
            folder,
            register(name="flashtile"),
            torch.float64,
            row[None, m.bool()],
            m[None, m.bool()],
        )
        for row, m in zip(ids, mask, strict=True)
    ]
    torch.testing.assert_close(together, torch.cat([hidden for hidden, _ in alone]))
