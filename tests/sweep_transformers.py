"""Compare flashtile with eager attention on a tiny random model of every transformers family.

    python tests/sweep_transformers.py                    # all families
    python tests/sweep_transformers.py llama t5 whisper   # some of them
    python tests/sweep_transformers.py --jobs 2 --seconds 600 --piece 1/4

Each family runs in its own process, with a limit of time and memory. It compares the outputs
without padding, with padding on the left and on the right; all gradients; and the
generation from a padded batch with a dynamic and with a static cache. Every part of a composite
model that is a model itself (a vision tower, an audio encoder) is compared, too.

The rule is that of every other test: the reference is eager attention in float64, and the error of
flashtile in float32 may be twice that of eager attention in float32, plus one rounding. After many
layers errors of single numbers are a matter of luck, so the norm of a whole result is compared.
The exit status is 0 only when no family DIFFERS. Families that are not compared have a reason in
`sweep_reasons.py`; "not built" means that the script found no small configuration or no inputs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import multiprocessing
import os
import resource
import sys
import time
import traceback
import warnings

import torch
import transformers
from shrunken_inputs import candidates
from shrunken_models import (
    FEW_SIZES,
    SIZES,
    SPECIAL_TOKENS,
    families,
    model_classes,
    randomise,
    shrunken,
)
from shrunken_timm import offer_timm
from sweep_reasons import EAGER_IS_WRONG, LIBRARY, NEED_SCIPY, NEED_TIMM, NEED_TORCHAUDIO, REASONS
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AttentionInterface, PreTrainedModel
from transformers.utils import is_scipy_available, is_torchaudio_available

from flashtile.integrations import transformers as integration

EQUAL, DIFFERS, NOT_BUILT, OWN = "equal", "DIFFERS", "not built", "own attention"

NOT_COMPARED = "not compared"

if not offer_timm():
    REASONS |= dict.fromkeys(NEED_TIMM, LIBRARY + "timm")
if not is_scipy_available():
    REASONS |= dict.fromkeys(NEED_SCIPY, LIBRARY + "scipy")
if not is_torchaudio_available():
    REASONS |= dict.fromkeys(NEED_TORCHAUDIO, LIBRARY + "torchaudio")


class Differs(AssertionError):
    """flashtile's result is further from the reference than the rule allows."""


class Calls:
    """Counts the calls that reach flashtile."""

    def __init__(self):
        self.count = 0

    def __call__(self, *args, **kwargs):
        self.count += 1
        return integration.attention_forward(*args, **kwargs)


def build(family):
    """A tiny model in evaluation mode, and inputs that it takes."""
    reasons = []
    for kind, sizes in itertools.product(model_classes(family), (SIZES, FEW_SIZES)):
        try:
            config = shrunken(CONFIG_MAPPING[family], sizes)
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
            if size > 150e6:
                raise MemoryError(f"{size / 1e6:.0f} million parameters")
            model = kind._from_config(config, attn_implementation="eager").eval()
            randomise(model)
            return model, inputs_of(model)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
    raise RuntimeError(reasons[0])


@torch.no_grad()
def inputs_of(model):
    """The first of the candidate inputs that the model runs on."""
    problem = None
    for inputs in candidates(model):
        try:
            values = tensors(outputs(model, inputs))
            if values and all(x.isfinite().all() for x in values[:1]):
                return inputs
        except Exception as error:
            problem = problem or error
    raise RuntimeError(f"no inputs fit: {type(problem).__name__}: {problem}")


def outputs(model, inputs):
    torch.manual_seed(0)
    with Precision(model) as precision:
        return model(**precision.cast(inputs))


class Precision(TorchFunctionMode):
    """Compute everything in the model's precision, also what models always compute in float32."""

    def __init__(self, model):
        super().__init__()
        self.dtype = next(model.parameters()).dtype

    def __enter__(self):
        torch.set_default_dtype(self.dtype)
        return super().__enter__()

    def __exit__(self, *error):
        torch.set_default_dtype(torch.float32)
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0].double()
            args = [self.dtype if x is torch.float32 else x for x in args]
            kwargs = {n: self.dtype if x is torch.float32 else x for n, x in kwargs.items()}
        return func(*args, **kwargs)

    def cast(self, inputs):
        return {n: x.to(self.dtype) if x.is_floating_point() else x for n, x in inputs.items()}


def tensors(output):
    """The floating tensors of a model's output, the most important one first."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), torch.Tensor):
            return [getattr(output, name)]
    values = output
    if hasattr(output, "items"):  # flashtile stores no attention probabilities
        values = [value for name, value in output.items() if "attentions" not in name]
    if isinstance(output, torch.Tensor):
        values = [output]
    flat = []
    for value in values:
        if isinstance(value, torch.Tensor):
            flat += [value] if value.is_floating_point() else []
        elif isinstance(value, (tuple, list)):
            flat += tensors(value)
    return flat


class Rule:
    """The rule of correctness for one model.

    The error of plain PyTorch is its largest error in any output so far, because the error of a
    few numbers is a matter of luck.
    """

    def __init__(self):
        self.plain_error = 0.0

    def check(self, what, got, plain, exact):
        """Lists of tensors: flashtile's, eager attention's, and the reference."""
        errors, weights = [], []
        for g, p, e in zip(got, plain, exact, strict=True):
            if not e.numel():
                continue
            finite = e.isfinite()
            if not torch.equal(g.isfinite(), finite & p.isfinite()):
                raise Differs(f"{what}: other numbers are finite")
            g, p, e = (x[finite].double() for x in (g, p, e))
            size = e.norm().clamp_min(torch.finfo(torch.float32).tiny)
            errors += [[float((x - e).norm() / size) ** 2 for x in (g, p)]]
            weights += [e.numel()]
        if not errors:
            return
        # The error of a result of a few numbers is a matter of luck, so it counts for a few.
        error, plain_error = (
            (sum(w * x for w, x in zip(weights, column, strict=True)) / sum(weights)) ** 0.5
            for column in zip(*errors, strict=True)
        )
        rounding = torch.finfo(torch.float32).eps
        # A model that insists on float32 is its own reference, whose error may be 0.
        plain_error = max(plain_error, self.plain_error) or 32 * rounding
        if not error <= 2 * plain_error + rounding:
            raise Differs(f"{what}: error {error:.1e}, plain PyTorch {plain_error:.1e}")
        if "output" in what:
            self.plain_error = plain_error


def of_tokens(mask, ids):
    """The mask in the shape of token ids, which may have a third dimension, of codebooks."""
    return mask.view(*mask.shape, *[1] * (ids.dim() - mask.dim()))


def ended(inputs, mask):
    """Token ids with padding; every row ends in the end token, where some models pool."""
    ids = inputs["input_ids"] * of_tokens(mask, inputs["input_ids"])
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    ids[torch.arange(len(ids)), last] = 2
    return ids


class Family:
    """One model in three versions: flashtile and eager in float32, eager in float64."""

    def __init__(self, model, inputs, name):
        self.inputs = inputs
        self.plain, self.got = model, copy.deepcopy(model)
        self.got.set_attn_implementation(name)
        try:
            self.exact = copy.deepcopy(model).double()
            with torch.no_grad():
                outputs(self.exact, inputs)
        except Exception:  # a model that insists on float32: two of PyTorch's ways, compared
            self.exact = model
            with contextlib.suppress(Exception):
                self.plain = copy.deepcopy(model)
                self.plain.set_attn_implementation("sdpa")
        self.versions = (self.got, self.plain, self.exact)
        self.check = Rule().check

    def results(self, inputs, real=None):
        found = []
        for model in self.versions:
            values = tensors(outputs(model, inputs))
            if real is not None:
                values = [x[same] for x, same in zip(values, real, strict=False)]
            found.append(values)
        return found

    @torch.no_grad()
    def check_forward(self):
        self.check("outputs", *self.results(self.inputs))
        if "input_ids" not in self.inputs:
            return
        for side in ("right", "left"):
            mask = torch.ones(self.inputs["input_ids"].shape[:2], dtype=torch.long)
            mask[-1, slice(0, 4) if side == "left" else slice(-4, None)] = 0
            ids = ended(self.inputs, mask)
            padded = self.inputs | {"attention_mask": mask, "input_ids": ids}
            try:
                plain = tensors(outputs(self.plain, padded))
                # Results that change with other tokens at the padding are not compared.
                shown = of_tokens(mask, ids).bool()
                others = padded | {"input_ids": ids.where(shown, torch.tensor(SPECIAL_TOKENS))}
                changed = tensors(outputs(self.plain, others))
            except Exception:
                continue  # eager attention has no padding, either
            if plain[0].shape[:2] == mask.shape:
                real = [mask.bool()]
            else:
                real = [x == y for x, y in zip(plain, changed, strict=True)]
                if not any(same.any() for same in real):
                    continue
            self.check(f"outputs, {side} padding", *self.results(padded, real))

    def check_gradients(self):
        gradients = []
        for model in self.versions:
            model.zero_grad()
            values = tensors(outputs(model, self.inputs))[:1]
            generator = torch.Generator().manual_seed(3)
            weights = [torch.rand(x.shape, generator=generator) for x in values]
            sum(
                (x.nan_to_num(0, 0, 0) * w).sum() for x, w in zip(values, weights, strict=True)
            ).backward()
            gradients.append({n: p.grad for n, p in model.named_parameters()})
        got, plain, exact = gradients
        for name, gradient in exact.items():
            if (gradient is None) != (got[name] is None):
                raise Differs(f"gradient of {name}: missing")
        whole = [
            torch.cat([g[n].flatten() for n, x in exact.items() if x is not None]).double()
            for g in (got, plain, exact)
        ]
        self.check("gradients", *([x] for x in whole))

    @torch.no_grad()
    def generated(self, model, cache):
        """The logits of a few tokens, generated from a batch with padding on the left."""
        inputs = {n: x for n, x in self.inputs.items() if n != "decoder_input_ids"}
        if "input_ids" in inputs:
            mask = torch.ones_like(inputs["input_ids"])
            mask[-1, :4] = 0
            inputs |= {"attention_mask": mask, "input_ids": inputs["input_ids"] * mask}
        torch.manual_seed(0)
        with Precision(model) as precision:
            output = model.generate(
                **precision.cast(inputs),
                max_new_tokens=5,
                min_new_tokens=5,
                do_sample=False,
                num_beams=1,
                cache_implementation=cache,
                disable_compile=True,
                return_dict_in_generate=True,
                output_logits=True,
            )
        return [torch.stack(output.logits)]


def compare(family):
    """(verdict, details) of one family."""
    if family in REASONS:
        return NOT_COMPARED, REASONS[family]
    try:
        model, inputs = build(family)
        if family in EAGER_IS_WRONG:
            model.set_attn_implementation("sdpa")
    except Exception as error:
        return NOT_BUILT, " ".join(str(error).split())[:160]
    notes = []
    names = (integration.register(), integration.register("tiles"))
    calls = Calls()
    for name in names:
        AttentionInterface.register(name, calls)
    try:
        compare_roundings(model, inputs, names, calls, notes)
        parts = compare_parts(model, names, calls, notes)
    except Differs as difference:
        return DIFFERS, str(difference)
    except Exception as error:
        trace = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(trace.filename)}:{trace.lineno}"
        return DIFFERS, f"{type(error).__name__} at {where}: {' '.join(str(error).split())[:200]}"
    if not calls.count:
        return OWN, "; ".join(notes)
    return EQUAL, "; ".join([type(model).__name__, *parts, *notes])


def compare_roundings(model, inputs, names, calls, notes):
    """`compare_model`, for two other roundings of the inputs when it differs.

    Detectors choose between near ties (the best of many boxes, the maximum of a pool), so that the
    last bit of an input can decide. A fault of ours differs for all three inputs.
    """
    has_numbers = any(torch.is_tensor(x) and x.is_floating_point() for x in inputs.values())
    for attempt in range(3 if has_numbers else 1):
        found = ["near ties"] if attempt else []
        try:
            compare_model(model, rounded_otherwise(inputs, attempt), names, calls, found)
        except Differs as difference:
            last = difference
        else:
            notes += found
            return
    raise last


def rounded_otherwise(inputs, attempt):
    """The inputs with every floating number moved by one rounding, each time another way."""
    generator = torch.Generator().manual_seed(attempt)

    def moved(x):
        if not attempt or not torch.is_tensor(x) or not x.is_floating_point():
            return x
        signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
        return x * (1 + torch.finfo(torch.float32).eps * signs)

    return {name: moved(x) for name, x in inputs.items()}


def compare_model(model, inputs, names, calls, notes):
    name, public = names
    try:
        family = Family(model, inputs, name)
        with torch.no_grad():
            outputs(family.got, inputs)
    except ValueError as refusal:
        if "lash" not in str(refusal):
            raise
        notes.append("name without flash")
        family = Family(model, inputs, public)
    family.check_forward()
    if family.exact is model:
        notes.append("float32 reference")
    try:
        family.plain.zero_grad()
        tensors(outputs(family.plain, inputs))[0].sum().backward()
    except Exception:
        notes.append("no gradients")
    else:
        family.check_gradients()
    if not (hasattr(model, "can_generate") and model.can_generate()):
        return
    for cache in (None, "static"):
        what = f"{cache or 'dynamic'} cache"
        try:
            plain, exact = (family.generated(model, cache) for model in family.versions[1:])
        except Exception as error:  # eager attention cannot, either
            notes.append(f"no generation with a {what} ({type(error).__name__})")
            continue
        family.check(f"generation with a {what}", family.generated(family.got, cache), plain, exact)


def compare_parts(model, names, calls, notes):
    """Models inside the model, each class once, that take other inputs than text."""
    parts = {}
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and type(part) is not type(model):
            parts.setdefault(type(part), part)
    compared = []
    for kind, part in parts.items():
        if part.main_input_name == model.main_input_name:
            continue
        try:
            inputs = inputs_of(part)
        except Exception:
            continue
        compare_model(copy.deepcopy(part), inputs, names, calls, [])
        compared.append(kind.__name__)
    return compared


def child(family, gigabytes, pipe):
    """Start the process of one family."""
    resource.setrlimit(resource.RLIMIT_DATA, (gigabytes << 30,) * 2)
    torch.set_num_threads(1)
    pipe.send(compare(family))


def sweep(names, jobs, seconds, gigabytes):
    """(family, verdict, details) of each family as it ends."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=child, args=(waiting[0], gigabytes, theirs))
            process.start()
            theirs.close()
            running[waiting.pop(0)] = (process, ours, time.monotonic() + seconds)
        for family, (process, pipe, deadline) in list(running.items()):
            late = time.monotonic() > deadline
            if not (pipe.poll(0.05) or late or not process.is_alive()):
                continue
            try:
                result = pipe.recv() if pipe.poll() else None
            except EOFError:
                result = None
            if result is None:
                process.kill()
                result = (NOT_BUILT, f"more than {seconds} s" if late else "out of memory")
            process.join()
            del running[family]
            yield family, *result


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", help="model types; all of them if none is given")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120, help="for each family")
    parser.add_argument("--gigabytes", type=int, default=8, help="of memory for each family")
    parser.add_argument("--piece", default="1/1", help="i/n: the i-th of n parts of the families")
    parser.add_argument("--list", action="store_true", help="print the families, compare nothing")
    options = parser.parse_args(arguments)
    piece, pieces = map(int, options.piece.split("/"))
    names = (options.families or families())[piece - 1 :: pieces]
    if options.list:
        print(*names)
        return 0
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    counts = dict.fromkeys((EQUAL, DIFFERS, NOT_BUILT, NOT_COMPARED, OWN), 0)
    results = sweep(names, options.jobs, options.seconds, options.gigabytes)
    for number, (family, verdict, details) in enumerate(results, 1):
        counts[verdict] += 1
        print(f"{number:4}/{len(names)}  {family:32} {verdict:14} {details}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 1 if counts[DIFFERS] else 0


if __name__ == "__main__":
    sys.exit(main())
