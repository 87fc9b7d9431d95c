"""How requests leave: what they hold is freed, and results that no step brings are kept for the next one."""

from __future__ import annotations

import torch

from deepinfer.core.errors import RequestError
from deepinfer.core.kv_blocks import KVBlockManager
from deepinfer.core.output_recorder import OutputRecorder
from deepinfer.core.outputs import FinishReason, RequestOutput
from deepinfer.core.request import Request
from deepinfer.core.request_intake import RequestIntake
from deepinfer.core.scheduler import Scheduler
from deepinfer.core.stats import EngineStats


class RequestEndings:
    """The way out of one engine.

    Args:
        intake: knows who is live.
        scheduler: the queues.
        blocks: who holds which KV memory.
        recorder: closes answers.
        stats: the engine's counters.

    Attributes:
        results: of requests that ended between steps.
    """

    def __init__(
        self,
        intake: RequestIntake,
        scheduler: Scheduler,
        blocks: KVBlockManager,
        recorder: OutputRecorder,
        stats: EngineStats,
    ) -> None:
        self._intake = intake
        self._scheduler = scheduler
        self._blocks = blocks
        self._recorder = recorder
        self._stats = stats
        self.results: list[RequestOutput] = []

    def take_results(self) -> list[RequestOutput]:
        """The results of requests that ended since the call before."""
        taken, self.results = self.results, []
        return taken

    def end(self, request: Request, *, is_queued: bool = True) -> None:
        """Free what an answer that is finished holds.

        Args:
            request: the answer.
            is_queued: the scheduler knows it.
        """
        if is_queued:
            self._scheduler.finish(request)
        choices = self._intake.requests[request.request_id]
        choices.remove(request)
        if choices:
            return
        del self._intake.requests[request.request_id]
        if request.return_logits and request.prompt_logits:
            request.output.prompt_logits = torch.cat(request.prompt_logits)
        self._stats.num_finished += 1

    def end_all(self, choices: list[Request]) -> None:
        """Free what the answers to a prompt hold, all of them closed; their result comes with the next step."""
        output = choices[0].output
        is_queued = not self._intake.cancel(output.request_id)
        held = [sibling for request in choices for sibling in request.siblings]  # they are in no queue
        for sibling in held:
            choices.remove(sibling)
        for request in list(choices):
            request.siblings = []
            self.end(request, is_queued=is_queued)
        self.results.append(output)

    def finish_all(self, choices: list[Request], reason: FinishReason) -> None:
        """Close all answers to a prompt, and end them."""
        for request in choices:
            self._recorder.finish(request, reason)
        self.end_all(choices)

    def fail_all(self, request: Request, fault: RequestError) -> None:
        """End all answers to a prompt that the model has no numbers for, and distrust what it stored."""
        choices = self._intake.requests[request.request_id]
        for choice in choices:
            self._recorder.fail(choice, fault)
            if choice.seq:
                self._blocks.quarantine(choice.seq)
        self.end_all(choices)

    def fail_live(self, error: Exception) -> None:
        """End all live requests after a step that failed half-way: nothing it planned or stored is to be trusted."""
        self._scheduler.drop_copies()
        what = f"{type(error).__name__}: {error}"
        fault = RequestError("engine_error", f"a step failed and took this request with it: {what}")
        for choices in list(self._intake.requests.values()):
            for request in choices:
                if request.seq:
                    self._blocks.quarantine(request.seq)
                if request.completion.finish_reason is None:
                    self._recorder.fail(request, fault)
            self.end_all(choices)
