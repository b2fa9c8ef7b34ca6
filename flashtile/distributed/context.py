"""`ContextParallel`: attention over sequences that are sharded across the ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from .. import statistics
from ..autograd import is_transformed
from ..call import checks, dispatch
from ..call.dispatch import BackendName
from ..dropout import draw_rng_state
from ..lru import Memo
from ..problem import AttentionProblem, Operands, lse_dtype
from . import compile as compiled
from . import partition
from .arguments import (
    Arguments,
    PackedCall,
    Qkv,
    call_signature,
    digest,
    lengths_of,
    packed_call,
    plan_key,
    refuse_transforms,
    refuse_unknown,
    shapes,
)
from .buffers import indices
from .collectives import (
    MOST_SIGNATURES,
    Communicator,
    ProcessCommunicator,
    VerifiedCalls,
    connect,
)
from .decode import Decoder
from .executor import Plan, attend, is_recomputing, plan_of
from .layout import Layout
from .partition import Mask, Work, is_divided, repeated
from .strategy import (
    Machine,
    Number,
    Requested,
    Workload,
    explained,
    machine_of,
    measured,
    select_strategy,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ContextParallel(Decoder):
    """Attention over the ranks of a group, each of which holds a part of the tokens.

    Args:
        group: a process group, or a `DeviceMesh`; None is the default group. The second dimension
            of a 2-D mesh exchanges tokens for heads: the ranks of a node, say.
        ulysses: how many neighbouring ranks exchange tokens for heads (DeepSpeed Ulysses); 1 for
            none, the number of ranks for nothing else. It divides the number of ranks. "auto" is
            the second dimension of a 2-D mesh, or the fastest of 1, the ranks of a node and all.
        stages: 1 gathers all keys that a rank needs at once; more stages take less memory; "auto"
            is 1, or as many as `stage_tokens` takes.
        head_groups: number of groups of key heads: a rank fetches one group while it computes with
            another; None is 1, or as many as `stage_tokens` takes. It divides the key heads of a
            rank.
        stage_tokens: the most keys of other ranks, with all heads, that a rank fetches at once;
            None is any number.
        gradient_dtype: dtype in which gradients of keys and values are sent. torch.float32 does not
            round them (float64 inputs: sent in float64); torch.bfloat16 halves the bytes.
        machine: the rates for the estimated times of strategies; None selects by the GPU's name.
        timeout: seconds to wait for an exchange; None leaves it to the group.

    Attributes:
        generator: draws the seeds of dropout; None is PyTorch's own for the device. It must be in
            the same state on all ranks.
        reserved_processors: how many multiprocessors of a GPU the persistent kernels (the forward
            of the Hopper backend, and most backwards at head dims 64 and 128) leave to exchanges; 0
            at first. It changes no result.

    Raises:
        ValueError: a number does not fit the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        ulysses: Number = "auto",
        stages: Number = "auto",
        head_groups: int | None = None,
        stage_tokens: int | None = None,
        gradient_dtype: torch.dtype = torch.float32,
        machine: Machine | None = None,
        timeout: float | None = None,
    ) -> None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            group, ulysses = of_mesh(group, ulysses)
        requested = Requested(ulysses, stages, head_groups, stage_tokens)
        self._set(ProcessCommunicator(group, timeout), requested, gradient_dtype, machine)

    @classmethod
    def over(
        cls,
        wire: Communicator,
        *,
        ulysses: Number = "auto",
        stages: Number = "auto",
        head_groups: int | None = None,
        stage_tokens: int | None = None,
        gradient_dtype: torch.dtype = torch.float32,
        machine: Machine | None = None,
    ) -> ContextParallel:
        """The same over ranks that `wire` connects instead of torch.distributed."""
        context = cls.__new__(cls)
        requested = Requested(ulysses, stages, head_groups, stage_tokens)
        context._set(wire, requested, gradient_dtype, machine)
        return context

    def _set(
        self,
        comm: Communicator,
        requested: Requested,
        gradient_dtype: torch.dtype,
        machine: Machine | None,
    ) -> None:
        if gradient_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"gradient_dtype: got {gradient_dtype!r}, want torch.float32 or torch.bfloat16"
            )
        self._gradient_dtype = None if gradient_dtype == torch.float32 else gradient_dtype
        self.comm, self.requested = comm, requested.checked(comm.ranks)
        self.machine = machine
        self.reserved_processors = 0
        self.generator: torch.Generator | None = None
        self._verified, self._steps = VerifiedCalls(comm), Memo(MOST_SIGNATURES)

    def layout(
        self,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        *,
        cu_seqlens_k: Tensor | Sequence[int] | None = None,
        batch: int = 1,
        seq_len: int | None = None,
        seq_len_k: int | None = None,
        masks: Sequence[Mask] = (Mask(causal=True),),
        way: str = "auto",
        grain: int = 128,
    ) -> Layout:
        """The owner of each token of packed documents, or of `batch` sequences of `seq_len` tokens.

        All ranks call it with the same arguments; it does not communicate.

        Args:
            cu_seqlens: cumulative lengths of packed documents, 0 first.
            cu_seqlens_k, seq_len_k: the same for keys, if they differ from those of the queries.
            masks: the layers of the model; the ranks are balanced for their sum.
            way: "contiguous", "zigzag", "documents" (long ones divided, short ones whole), or
                "auto", which is "documents" for packed documents and "zigzag" otherwise.
            grain: pieces begin at multiples of this many tokens, or of fewer in short documents.
                "documents" lets them begin at any token to balance the work at the ends of
                documents. With block masks they always begin at multiples of the tiles.

        Raises:
            ValueError: an argument does not fit.
        """
        if (cu_seqlens is None) == (seq_len is None):
            raise ValueError("layout: want either cu_seqlens or seq_len")
        if cu_seqlens is not None:
            lengths = lengths_of("cu_seqlens", cu_seqlens)
            keys = lengths
            if cu_seqlens_k is not None:
                keys = lengths_of("cu_seqlens_k", cu_seqlens_k)
            if len(keys) != len(lengths):
                raise ValueError(
                    f"cu_seqlens_k: got {len(keys)} documents, want {len(lengths)} as in cu_seqlens"
                )
            batch = 0
        else:
            assert seq_len is not None
            checks.length("seq_len", seq_len)
            lengths = (seq_len,)
            keys = (seq_len if seq_len_k is None else checks.length("seq_len_k", seq_len_k),)
        ranks, layers = self.comm.ranks, [mask.work(is_shared=bool(batch)) for mask in masks]
        unit = lcm(*(size for _, tiles, _ in layers if tiles for size in (tiles.BM, tiles.BN)))
        if way == "auto":
            way = "zigzag" if batch else "documents"
        work = Work(
            layers, lengths, keys, partition.largest_grain(lengths, ranks, grain, unit), unit
        )
        queries = partition.divided(way, work, ranks)
        key_shards = queries
        if keys != lengths:
            size = partition.largest_grain(keys, ranks, grain, unit)
            key_shards = partition.contiguous(keys, ranks, size)
        rows = [
            max(shards.tokens(rank) for rank in range(ranks)) for shards in (queries, key_shards)
        ]
        if batch:
            queries, key_shards = (repeated(x, batch) for x in (queries, key_shards))
        return Layout(self, self.comm, queries, key_shards, batch, (rows[0], rows[1]))

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        *,
        return_lse: bool = False,
        return_stats: Sequence[str] | None = None,
        backend: BackendName | None = None,
        **options: Any,
    ) -> Any:
        """Exactly `flashtile.attention` of the whole (`attention_varlen` for packed documents), of
        which each rank passes and gets its own rows.

        Args:
            q: (batch, local_tokens, heads, head_dim), or (local_tokens, heads, head_dim) for packed
                documents, in the layout's order. Or a DTensor with the tokens of all ranks, one
                shard after the other.
            k, v: likewise.
            layout: made by this object.
            qv: as q, with value_head_dim.
            bias: rows sharded like q, all keys; of packed documents (1, heads or 1, local_tokens,
                longest seq_k or 1), where each row has the keys of its own document.
            attn_mask: of dense batches; rows sharded like q, all keys.
            key_padding_mask: (batch, seq_k), the whole mask on every rank; of dense batches.
            block_mask: `BlockMask`, of whole documents, the same on every rank; the host reads it
                once. Its tiles have to divide the pieces of the layout (see `Mask`).
            mask: `Spans`; rows sharded like q, keys counted in the whole document.
            seqused_q, seqused_k: (documents,), the used tokens of every whole document; the host
                reads them.
            score_mod: a function of whole documents, whose indices count as in one process; every
                rank has all that it captures.
            return_stats: as in `attention`. `max_logit` is the largest of all ranks, `column_sum`
                has this rank's own keys, added up over the queries of all ranks. Not under
                torch.compile, and not with DTensors.
            options: all others of `attention`, except the scales of float8 inputs. With dropout
                the generators of all ranks must be in the same state.

        Returns:
            out, shaped as q with value_head_dim, and on request lse (batch, heads, local_tokens) or
            (heads, local_tokens), and `Statistics`. Padding has out 0, lse -inf and statistics 0.

        Raises:
            ValueError, TypeError, NotImplementedError: an argument does not fit, or the ranks
                disagree; every rank raises the same error.
        """
        if return_stats is not None:
            options["return_stats"] = tuple(sorted(statistics.checked_names(return_stats)))
        arguments = Arguments((q, k, v), layout, options, return_lse, backend)
        stats: list[Any] = []
        if all(type(x) in (Tensor, torch.nn.Parameter) for x in (q, k, v)):
            out, lse, *stats = self._attend(arguments)
        else:
            from . import dtensors  # imported late, because loading DTensor takes long

            out, lse = dtensors.attend(self._attend, arguments)
        if stats:
            return (out, lse, *stats) if return_lse else (out, *stats)
        return (out, lse) if return_lse else out

    def _attend(self, arguments: Arguments) -> tuple[Any, ...]:
        """(out, lse) of a rank's own tensors, traced or not, and statistics."""
        if not torch.compiler.is_compiling():
            return self.run(*arguments)
        if self.generator is not None:
            raise NotImplementedError(
                "generator: got a torch.Generator under torch.compile, want None, for PyTorch's own"
            )
        return compiled.attend(arguments)

    def explain(
        self,
        layout: Layout,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        backend: BackendName | None = None,
        **options: Any,
    ) -> str:
        """A table of what each rank would do in this call: its tokens, share of the scores and keys
        received from others; and the strategy, with the estimated times of all candidates. It
        computes nothing and does not communicate.

        Raises:
            ValueError, TypeError, NotImplementedError: an argument does not fit.
        """
        arguments = Arguments((q, k, v), layout, options, backend=backend).with_program()
        call, plan = self._planned(arguments, self._signature(arguments))
        return explained(self.requested, self._workload(layout, call), plan.strategy)

    def check(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any) -> str:
        """Compare the output of a call, its log-sum-exp and the gradients of q, k, v, the sink, and
        of slopes and a relative bias that require one, with the definition of attention in float64,
        which rank 0 evaluates on the whole: for a few thousand tokens, since it stores all scores.
        All ranks call it, with the arguments of `attention`.

        Returns:
            The largest error of each tensor.

        Raises:
            AssertionError: the error of a tensor is larger than the rule of `flashtile.testing`
                allows; it names the tensor and the rank that has these tokens.
            NotImplementedError: the call has dropout.
        """
        from .check import checked  # not loaded otherwise: it needs the tools of tests

        return checked(layout, q, k, v, options)

    def measure(self, device: torch.device | str) -> Machine:
        """The machine of this group, with the bandwidth and latency that its links have between
        tensors on `device`. All ranks call it, and get the same.

        ``parallel.machine = parallel.measure("cuda")`` then selects by what was measured.
        """
        device = torch.device(device)
        return measured(self.comm, self.machine or machine_of(device), device)

    def run(
        self,
        qkv: Qkv,
        layout: Layout,
        options: Mapping[str, Any],
        return_lse: bool,
        backend: BackendName | None,
        rng_state: Tensor | None = None,
        known: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Any, ...]:
        """(out, lse) of `attention`, outside of tracers, and statistics.

        Args:
            rng_state: of dropout; None draws it.
            known: (out, lse) of an equal call, to record its gradients without computing it again.
        """
        arguments = Arguments(qkv, layout, options, return_lse, backend).with_program()
        signature = self._signature(arguments)
        layout.calls += known is None
        is_verified = signature in layout.verified
        if is_verified and layout.context is self and arguments.has_only_qkv():
            plan = layout.plans.get((plan_key(signature, qkv, self.reserved_processors), None))
            if plan is not None:
                return self._run(plan, None, qkv, layout, rng_state, known)
        if is_verified:
            call, plan = self._planned(arguments, signature)
        else:
            call, plan = layout.verified.verify(
                signature, lambda: self._runnable(arguments, signature)
            )
            connect(self.comm, qkv[0].device)
        # The first call runs as the others: checkpoints compare what they keep.
        operands = call.operands if plan.memo is None else None
        return self._run(plan, operands, qkv, layout, rng_state, known)

    def _signature(self, arguments: Arguments) -> Any:
        qkv, _, options, *settings = arguments
        transforms = is_transformed(), forward_ad._current_level >= 0
        needs_gradients = arguments.needs_gradients()
        return call_signature(qkv, options, *settings, transforms, needs_gradients, self.machine)

    def _runnable(
        self, arguments: Arguments, signature: Any
    ) -> tuple[tuple[PackedCall, Plan], dict[str, Any]]:
        """`_planned`, for a call that some backend can run on every rank, and the facts that have
        to be equal on all ranks."""
        call, plan = self._planned(arguments, signature)
        layout, backend = arguments.layout, arguments.backend
        q, _, v = call.operands[:3]
        problem = AttentionProblem.of(call.operands, call.options)
        divided = is_divided(call.used.queries, call.used.keys, plan.strategy.ulysses)
        is_partial = problem.needs_grad or plan.strategy.stages > 1
        problem = problem._replace(layout="packed", runs=2 if divided else 0, is_partial=is_partial)
        if plan.statistics:
            problem = problem._replace(has_statistics=statistics.of_rows(plan.statistics))
        # A rank without tokens refuses the call as well, or it would wait for the others.
        dispatch.select(problem, backend)
        return (call, plan), {
            "documents": len(layout.queries.lengths),
            "tokens": sum(layout.queries.lengths),
            "the lengths of documents": layout.queries.lengths[:8],
            "who owns which tokens": layout.digests,
            "device and dtype": (q.device.type, q.dtype),
            "heads": call.heads,
            "head dims": (q.shape[2], v.shape[2]),
            "options": call.options._replace(
                max_seqlen_q=0,
                max_seqlen_k=0,
                backend=backend or "",
                score_mod=digest(call.options.score_mod),
                score_mod_gradient=digest(call.options.score_mod_gradient),
            ),
            "numbers of tokens in use": call.used.facts(),
            "the block mask": call.tiles and call.tiles.digest,
            "the shapes of optional tensors": shapes(arguments.options),
            "return_lse": arguments.return_lse,
            "return_stats": sorted(plan.statistics),
            "ulysses, stages, head groups": tuple(plan.strategy),
            "gradient_dtype": self._gradient_dtype,
            "gradients": arguments.needs_gradients(),
        }

    def _planned(self, arguments: Arguments, signature: Any) -> tuple[PackedCall, Plan]:
        """A checked call, whose `call_signature` is given, and its plan."""
        layout, options = arguments.layout, arguments.options
        if layout.context is not self:
            raise ValueError("layout: got one of another ContextParallel")
        if self.reserved_processors < 0:
            raise ValueError(f"reserved_processors: got {self.reserved_processors}, want 0 or more")
        refuse_unknown(options, ContextParallel.attention)
        refuse_transforms(arguments)
        call = packed_call(arguments)
        only_qkv = arguments.has_only_qkv()
        values = None if only_qkv else call.options
        key = plan_key(signature, arguments.qkv, self.reserved_processors), values
        plan: Plan | None = layout.plans.get(key)
        if plan is None:
            strategy = select_strategy(self.requested, self._workload(layout, call))
            # The rows of one sequence, or of packed documents, have the padding at their end.
            names = frozenset(options.get("return_stats", ()))
            is_flat = only_qkv and layout.sequences <= 1 and strategy.ulysses == 1 and not names
            plan = layout.plans[key] = plan_of(
                call,
                layout,
                strategy,
                self._gradient_dtype,
                backend=arguments.backend,
                wants_lse=arguments.return_lse,
                statistics=names,
                reserved_processors=self.reserved_processors,
                tokens=layout.tokens if is_flat else None,
                memo=Memo(MOST_SIGNATURES) if only_qkv else None,
            )
        return call, plan

    def _workload(self, layout: Layout, call: PackedCall) -> Workload:
        q, k, v = call.operands[:3]
        gradient = self._gradient_dtype or lse_dtype(q.dtype)
        return Workload(
            self.machine or machine_of(q.device),
            call.heads,
            (q.shape[2], k.shape[2], v.shape[2]),
            (q.element_size(), gradient.itemsize),
            layout.queries,
            layout.keys,
            call.options.facts,
            call.tiles,
        )

    def _run(
        self,
        plan: Plan,
        operands: Operands | None,
        qkv: Qkv,
        layout: Layout,
        rng_state: Tensor | None,
        precomputed: tuple[Tensor, Tensor] | None,
    ) -> tuple[Any, ...]:
        """(out, lse) of this rank's rows, padding included, and statistics.

        Args:
            operands: None for a call that has nothing but q, k and v.
        """
        if plan.options.dropout_p > 0 and rng_state is None:
            rng_state = self._rng_state(qkv[0].device)
        if operands is None and plan.tokens is not None and precomputed is None:
            operands = Operands(*layout.flat(*qkv), rng_state=rng_state)
            out, lse = attend(plan, operands)
            return layout.flat_results(out, lse, plan.wants_lse)
        if operands is None:
            operands, plan = Operands(*layout.packed(*qkv)), plan._replace(tokens=None)
        slopes = operands.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            rows = indices(plan.schedule.documents, slopes.device)
            operands = operands._replace(alibi_slopes=slopes.index_select(0, rows))
        if rng_state is not None:
            operands = operands._replace(rng_state=rng_state)
        used = plan.used
        if precomputed is not None:
            precomputed = used.of_used(*layout.results_without_padding(*precomputed))
        out, lse, *found = attend(plan, operands, precomputed)
        tokens = layout.tokens[0]
        results = layout.with_padding(*used.with_unused(out, lse, tokens))
        if not found:
            return results
        largest, entropy, sums = found
        if "max_logit" in plan.statistics:
            largest = torch.stack(self.comm.all_gather(largest)).amax(0).to(out.device)
        if "entropy" in plan.statistics:
            _, rows = layout.with_padding(*used.with_unused(out, entropy, tokens))
            entropy = rows.masked_fill(rows == -torch.inf, 0.0)
        if sums is not None:
            sums = layout.of_own_keys(used.with_unused_keys(sums, layout.tokens[1]))
        wanted = zip(statistics.Statistics._fields, (largest, entropy, sums), strict=True)
        stats = {name: x for name, x in wanted if name in plan.statistics}
        return *results, statistics.Statistics(**stats)

    def _rng_state(self, device: torch.device) -> Tensor:
        """A new seed and offset of dropout."""
        if self.generator is not None and is_recomputing():
            raise NotImplementedError(
                "generator: got a torch.Generator in an activation checkpoint, which does not "
                "restore its state; want None, for PyTorch's own"
            )
        return draw_rng_state(device, self.generator)


def of_mesh(mesh: DeviceMesh, ulysses: Number) -> tuple[dist.ProcessGroup, Number]:
    """The group of all ranks of the mesh, and how many neighbours exchange heads.

    Raises:
        ValueError: the mesh has more than two dimensions or does not count its ranks up, or
            `ulysses` is not its second dimension.
    """
    if mesh.ndim == 1:
        return mesh.get_group(), ulysses
    if mesh.ndim != 2:
        raise ValueError(f"group: got a mesh of {mesh.ndim} dimensions, want one or two")
    if ulysses not in ("auto", mesh.size(1)):
        raise ValueError(f"ulysses: got {ulysses}, want {mesh.size(1)}, as in the mesh, or 'auto'")
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(f"group: got a mesh of ranks {ranks}, want ranks that count up")
    return mesh._flatten().get_group(), mesh.size(1)
