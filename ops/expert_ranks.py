"""Experts divided among ranks: `ep_dispatch` and `ep_combine` as exchanges between devices, for every backend.

Of W ranks, rank r holds experts [r * E / W, (r + 1) * E / W). It dispatches its own tokens and gets the rows of its own
experts, from everybody. The results have the bits of one rank that had all tokens, in rank order.

There is no kernel here. Bringing rows into an order is what a rank's own dispatch and combine do already: a dispatch
groups rows by expert, and a combine with one choice per token picks rows. In between the communicator moves them. So a
backend that runs on one rank and has a communicator runs on several.

How many rows go where is known in one of two ways, and a step's rows alone decide which:

- **Counted.** Ranks tell each other how many rows each expert gets, the host waits for these numbers, and exactly the
  rows that are needed move. Ranks may have different numbers of tokens, or none. No graph can hold it.
- **Even.** Steps of 1 to `ExpertRanks.even_rows` rows: the caller promises that such a step has the same number of rows
  on every rank, as padded decode steps have. Everybody gets all tokens and takes those that chose its experts;
  results come back in a buffer that holds a row for every choice and rank. The host takes no part, so a graph can hold
  it where the communicator can be captured, at the price of moving results W times.

Source: expert parallelism with a two-sided exchange, GShard (arXiv:2006.16668, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from deepinfer.ops.collectives import Communicator
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.formats import QTensor
from deepinfer.ops.heads import known_ids
from deepinfer.ops.index import concat_index, logical_to_slot
from deepinfer.ops.moe import DispatchHandle, Exchange, ep_combine, ep_dispatch
from deepinfer.ops.step import gather_ids, shift
from deepinfer.ops.trees import map_tensors

if TYPE_CHECKING:
    from deepinfer.ops.backend import Dims, Plan
    from deepinfer.ops.registry import OpTable

Dispatched = tuple[Tensor | QTensor, Tensor, Tensor, DispatchHandle]


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks among which experts are divided; all of them run the same layers in the same order.

    Attributes:
        group: this rank's end of the group. Its calls stand in the order of the ops; nobody else calls it in between.
        even_rows: steps of 1 up to so many rows have the same number on every rank; a rank without work pads. Where
            others have more rows than this, it may come with none. 0 promises nothing. Ranks that break the promise get
            an `OpArgumentError` where the communicator can tell, as the host's can.
    """

    group: Communicator
    even_rows: int = 0

    def share(self, num_experts: int) -> range:
        """The experts of this rank.

        Raises:
            OpArgumentError: the ranks cannot hold equally many.
        """
        each, left = divmod(num_experts, self.group.world_size)
        if left:
            raise OpArgumentError(f"{num_experts} experts cannot be divided evenly among {self.group.world_size} ranks")
        return range(self.group.rank * each, (self.group.rank + 1) * each)


class DispatchOverRanks:
    """`ep_dispatch` with an exchange, as a plan.

    Rows are [R, H] with R what this rank's experts got (counted), or world_size * T * k (even); psum is [E / W].

    Args:
        table: the ops of this rank.
        ranks: who holds the experts.
        dims: of the op: `experts` over all ranks, and `k`.

    Raises:
        OpArgumentError: the ranks cannot hold equally many experts.
    """

    scratch_bytes = 0
    persistent_bytes = 0

    def __init__(self, table: OpTable, ranks: ExpertRanks, dims: Dims) -> None:
        self.experts, k = int(dims["experts"]), int(dims["k"])
        self.share = ranks.share(self.experts)
        self._ranks, self._group = ranks, ranks.group
        self._runtime, self._outputs = table.context.runtime, table.outputs
        each = len(self.share)
        self.here = table.bind_here(ep_dispatch, **dims)
        self._regroup = table.bind_here(ep_dispatch, **{**dims, "experts": each, "k": 1})
        self.capturable = False
        if ranks.even_rows > 0:
            self._arrange = table.bind_here(ep_dispatch, **{**dims, "experts": each})
            self._look_up, self._beside = table.bind(gather_ids), table.bind(concat_index)
            self._copy, self._known, self._slots = table.bind(shift), table.bind(known_ids), table.bind(logical_to_slot)
            used = (self._arrange, self._look_up, self._beside, self._copy, self._known, self._slots)
            self.capturable = self._group.capturable and all(op.capturable for op in used)
            self._prepare_tables(ranks.even_rows * k)

    def run(self, *inputs: Any, **options: Any) -> Dispatched:
        """As `ep_dispatch`.

        Raises:
            OpArgumentError: `num_experts` is not what the plan was bound for.
        """
        call = ep_dispatch.signature.bind(*inputs, **options).arguments
        if call["num_experts"] != self.experts:
            raise OpArgumentError(f"bound for {self.experts} experts over all ranks, called with {call['num_experts']}")
        even = 0 < call["expert_ids"].shape[0] <= self._ranks.even_rows
        run = self._even if even else self._counted
        return run(call["x"], call["expert_ids"], call["weights"])

    def _counted(self, x: Tensor | QTensor, expert_ids: Tensor, weights: Tensor) -> Dispatched:
        rows, row_weights, psum, handle = self.here(x, expert_ids, weights, self.experts)
        sent, received, ids = self._splits(psum)

        def move(tensor: Tensor) -> Tensor:
            return self._group.all_to_all(tensor[: sum(sent)], sent, received)

        came, came_weights = map_tensors(rows, move), move(row_weights)
        grouped, row_weights, psum, back = self._regroup(came, ids, came_weights.unsqueeze(1), len(self.share))
        exchange = Exchange(back.slot_to_row, sent, received)
        return grouped, row_weights, psum, DispatchHandle(handle.slot_to_row, exchange)

    def _splits(self, psum: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
        """Rows for each rank and from each, and the experts of those that come, counted from this rank's first."""
        size, each = self._group.world_size, len(self.share)
        with self._runtime.sync_guard.permit("ranks tell each other how many rows their experts get"):
            ends = self._runtime.to_host(self._group.all_gather(psum)).view(size, self.experts).long()
        counts = ends.diff(dim=1, prepend=ends.new_zeros(size, 1))
        mine = counts[:, self.share.start : self.share.stop]
        ids = torch.arange(each).repeat(size).repeat_interleave(mine.flatten())
        sent = counts[self._group.rank].view(size, each).sum(1).tolist()
        return tuple(sent), tuple(mine.sum(1).tolist()), self._runtime.to_device(ids.unsqueeze(1))

    def _prepare_tables(self, choices: int) -> None:
        """What the host knows before any step, so that none has to ask it."""
        send, each = self._runtime.to_device, len(self.share)
        places = torch.arange(choices, dtype=torch.int32)
        experts = torch.arange(self.experts, dtype=torch.int32)
        held = (experts >= self.share.start) & (experts < self.share.stop)
        self._places, self._low_words = send(places), send(2 * places)
        self._local = send(torch.where(held, experts - self.share.start, -1))
        self._high_words = send(torch.zeros(each, dtype=torch.int32))
        self._holders = send((experts // max(each, 1)).unsqueeze(1))

    def _even(self, x: Tensor | QTensor, expert_ids: Tensor, weights: Tensor) -> Dispatched:
        (tokens, k), size = expert_ids.shape, self._group.world_size
        count = tokens * k
        # First, since no counted step begins so: ranks that break the promise notice at once.
        came = map_tensors(x, self._gather)
        chosen = self._look_up(expert_ids.view(torch.int32).reshape(-1), self._low_words[:count])
        local = self._look_up(self._local, self._gather(chosen))
        # Ids are int64 and table look-ups int32: 0 and -1 are the high words of what is not negative, and of -1.
        high = self._look_up(self._high_words, local)
        ids = self._beside(local.unsqueeze(1), high.unsqueeze(1)).view(torch.int64).view(size * tokens, k)
        rows, row_weights, psum, handle = self._arrange(came, ids, self._gather(weights), len(self.share))
        # A rank sends back a block with a row for every choice of this one: choice i is row i of its expert's holder.
        # A choice of nobody is looked for at the first holder, where it is a row of zeros as at all others.
        slots = self._copy(self._places[:count], 0).view(count, 1)
        self._slots(slots, count, self._holders, self._known(chosen, 0))
        exchange = Exchange(handle.slot_to_row.view(size * count, 1), (count,) * size, (count,) * size)
        return rows, row_weights, psum, DispatchHandle(slots.view(tokens, k), exchange)

    def _gather(self, tensor: Tensor) -> Tensor:
        shape = self._group.world_size * tensor.shape[0], *tensor.shape[1:]
        return self._group.all_gather(tensor, out=self._outputs.new(shape, tensor.dtype))


class CombineOverRanks:
    """`ep_combine` with an exchange, as a plan: results travel back and are summed where their tokens are.

    Args:
        table: the ops of this rank.
        ranks: who holds the experts.
        dims: of the op.
    """

    scratch_bytes = 0
    persistent_bytes = 0

    def __init__(self, table: OpTable, ranks: ExpertRanks, dims: Dims) -> None:
        self._group, self._runtime, self._outputs = ranks.group, table.context.runtime, table.outputs
        self.here = table.bind_here(ep_combine, **dims)
        self._pick = table.bind_here(ep_combine, **({**dims, "k": 1} if "k" in dims else dims))
        used = self._group.capturable and self.here.capturable and self._pick.capturable
        self.capturable = ranks.even_rows > 0 and used

    def run(self, *inputs: Any, **options: Any) -> Tensor:
        """As `ep_combine`.

        Raises:
            OpArgumentError: the handle is of a dispatch that exchanged nothing.
        """
        call = ep_combine.signature.bind(*inputs, **options).arguments
        y, handle = call["y"], call["handle"]
        exchange = handle.exchange
        if exchange is None:
            raise OpArgumentError("the handle is of a dispatch on one rank; this combine brings rows back from several")
        arrived = self._pick(y, DispatchHandle(exchange.order), None, y.dtype)
        shape = sum(exchange.sent), y.shape[1]
        back = self._outputs.new(shape, y.dtype)
        self._group.all_to_all(arrived, exchange.received, exchange.sent, out=back)
        if not shape[0]:
            back = self._runtime.zeros((1, y.shape[1]), y.dtype)  # choices of nobody still point into it
        return self.here(back, DispatchHandle(handle.slot_to_row), call["bias"], call["out_dtype"])


class _MakePlan(Protocol):
    def __call__(self, table: OpTable, ranks: ExpertRanks, dims: Dims) -> DispatchOverRanks | CombineOverRanks: ...


PLANS: Final[Mapping[str, _MakePlan]] = {ep_dispatch.name: DispatchOverRanks, ep_combine.name: CombineOverRanks}
"""How the ops that exchange rows are bound over ranks, by the op's name."""

if TYPE_CHECKING:

    def _are_plans(dispatch: DispatchOverRanks, combine: CombineOverRanks) -> tuple[Plan, Plan]:
        return dispatch, combine
