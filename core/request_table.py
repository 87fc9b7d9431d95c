"""What a step must know of every running request, as arrays, so that a thousand of them cost a few NumPy calls.

A running request owns the row of its sequence handle, from `bind` to `release`. Whoever remembers a handle across steps
remembers its generation as well: a row that was given up since, or has another owner, has another one. Requests that do
not run have no row; all that is known of them is their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepinfer.core.step_buffers import Int32Array

if TYPE_CHECKING:
    from deepinfer.core.request import Request

BoolArray = NDArray[np.bool_]
Int64Array = NDArray[np.int64]


class RequestTable:
    """Counters and traits of running requests.

    All arrays are [num_slots + 1], indexed by sequence handle; row 0 is nobody's. "Planned" is what is true once the
    steps in flight are done, if all their drafts are accepted.

    Attributes:
        generation: int64, counts the owners of a row; even while nobody owns it.
        num_computed: positions whose records are stored.
        planned_computed: the same, planned.
        replay_end: while `num_computed` is below, rows run again for their window records alone.
        num_tokens: known tokens, prompt and outputs.
        planned_tokens: the same, planned.
        num_prompt: tokens of the prompt.
        max_tokens: tokens it may reach, prompt included.
        num_drafts: drafts that its next step may verify.
        draw: its place among the draws of the newest step, -1 when it was not in it.
        may_generate: it asks for tokens.
        waits: planned again only when its tokens are known.
        is_shaped: it has a shaper.
        wants_logprobs: of its generated tokens.
        scores_prompt: logits of prompt positions are kept.
        follows_form: all that shapes it is a form that holds already, and nothing but ids is wanted: it is masked and
            recorded together with all others of its kind.
        is_irregular: `Request.next_rows` must be asked for its rows, rather than `Scheduler`'s arithmetic.
        is_recorded_by_token: each of its tokens has more to it than its id: logprobs, stop strings, a shaper that
            looks at it.
        shares_output: its result has other choices.
        is_new: its sampling parameters are not set yet, and it was in no step.
        awaits_first_token: nobody noted when its first token came.
        is_plain: it asks for tokens, and nothing that is named above from `waits` to `shares_output` is true of it: ids
            are all that it wants, and all that its next step depends on.
        version: counts changes of any of these traits, and of who owns a row.
        stop_counts: [vocab_size + 1] int32, how many running requests name an id as an end, and the model's own
            ends; the last entry stands for -1 and is 0.

    Args:
        num_slots: handles run from 1 to `num_slots`.
        vocab_size: ids run from 0 to `vocab_size` - 1.
        eos_token_ids: the model's own ends.
    """

    def __init__(self, num_slots: int, vocab_size: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        size = num_slots + 1
        self.generation: Int64Array = np.zeros(size, np.int64)
        self.num_computed: Int32Array = np.zeros(size, np.int32)
        self.planned_computed: Int32Array = np.zeros(size, np.int32)
        self.replay_end: Int32Array = np.zeros(size, np.int32)
        self.num_tokens: Int32Array = np.zeros(size, np.int32)
        self.planned_tokens: Int32Array = np.zeros(size, np.int32)
        self.num_prompt: Int32Array = np.zeros(size, np.int32)
        self.max_tokens: Int32Array = np.zeros(size, np.int32)
        self.num_drafts: Int32Array = np.zeros(size, np.int32)
        self.draw: Int32Array = np.full(size, -1, np.int32)
        self.may_generate: BoolArray = np.zeros(size, np.bool_)
        self.waits: BoolArray = np.zeros(size, np.bool_)
        self.is_shaped: BoolArray = np.zeros(size, np.bool_)
        self.wants_logprobs: BoolArray = np.zeros(size, np.bool_)
        self.scores_prompt: BoolArray = np.zeros(size, np.bool_)
        self.follows_form: BoolArray = np.zeros(size, np.bool_)
        self.is_irregular: BoolArray = np.zeros(size, np.bool_)
        self.is_recorded_by_token: BoolArray = np.zeros(size, np.bool_)
        self.shares_output: BoolArray = np.zeros(size, np.bool_)
        self.is_new: BoolArray = np.zeros(size, np.bool_)
        self.awaits_first_token: BoolArray = np.zeros(size, np.bool_)
        self.is_plain: BoolArray = np.zeros(size, np.bool_)
        self.version = 0
        self.stop_counts: Int32Array = np.zeros(vocab_size + 1, np.int32)
        self._asked: tuple[Int32Array, int, bool] | None = None
        self._count_stops([token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size], 1)

    def bind(self, request: Request, num_computed: int, replay_end: int = 0) -> None:
        """Give a request the row of its handle.

        Args:
            request: with `seq` set; its traits do not change from here on, but `Request.siblings`, which may become
                empty.
            num_computed: positions that it need not compute.
            replay_end: 0, or where the rows that run again end.
        """
        seq, params = request.seq, request.params
        self.generation[seq] += 1
        self.num_computed[seq] = self.planned_computed[seq] = num_computed
        self.replay_end[seq] = replay_end
        self.num_tokens[seq] = self.planned_tokens[seq] = request.num_tokens
        self.num_prompt[seq] = len(request.prompt_token_ids)
        self.max_tokens[seq] = min(len(request.prompt_token_ids) + params.max_tokens, request.max_len)
        self.num_drafts[seq], self.draw[seq] = 0, -1
        self.may_generate[seq] = request.may_generate
        self.waits[seq] = request.waits
        self.is_shaped[seq] = request.shaper is not None
        self.wants_logprobs[seq] = params.wants_logprobs
        self.scores_prompt[seq] = request.num_prompt_rows_wanted > 0
        self.is_irregular[seq] = (
            bool(request.siblings)
            or request.chunk_size is not None
            or request.decode_from is not None
            or request.num_prompt_rows_wanted > 0
        )
        self.shares_output[seq] = params.n > 1
        self.note_form(request)
        self.is_new[seq] = True
        self.awaits_first_token[seq] = request.output.timings.first_token is None
        self._count_stops(params.stop_token_ids, 1)
        request.table = self

    def note_form(self, request: Request) -> None:
        """Note whether a request follows a form and nothing else; said again when its form begins to hold."""
        seq, form, params = request.seq, request.grammar, request.params
        wants_more = params.wants_logprobs or bool(params.stop)
        follows = form is not None and form is request.shaper and form.is_open and not wants_more
        self.follows_form[seq] = follows
        self.is_recorded_by_token[seq] = wants_more or (request.waits and not follows)
        traits = (
            self.waits,
            self.is_shaped,
            self.wants_logprobs,
            self.scores_prompt,
            self.follows_form,
            self.is_irregular,
            self.is_recorded_by_token,
            self.shares_output,
        )
        self.is_plain[seq] = self.may_generate[seq] and not any(trait[seq] for trait in traits)
        self.version += 1

    def release(self, request: Request) -> None:
        """Take the row of a request that runs no more; its `seq` becomes 0."""
        self._count_stops(request.params.stop_token_ids, -1)
        self.generation[request.seq] += 1
        self.version += 1
        request.seq, request.table = 0, None

    def are_plain(self, seqs: Int32Array) -> bool:
        """Whether all of these requests are plain. The answer is kept, since most steps are about the same ones.

        Args:
            seqs: [n] int32 handles, in an array that nobody changes.
        """
        asked = self._asked
        if asked is None or asked[0] is not seqs or asked[1] != self.version:
            self._asked = asked = seqs, self.version, bool(self.is_plain[seqs].all())
        return asked[2]

    def is_current(self, request: Request, generation: int) -> bool:
        """Whether a request has kept its row since its generation was noted."""
        return request.seq > 0 and int(self.generation[request.seq]) == generation

    def _count_stops(self, token_ids: Sequence[int], count: int) -> None:
        np.add.at(self.stop_counts, np.array(token_ids, dtype=np.int64), count)
