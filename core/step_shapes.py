"""The shapes of a step's rows: those of all forms together, and of every other shaper by itself."""

from __future__ import annotations

import numpy as np

from deepinfer.core.errors import RequestError, as_request_error
from deepinfer.core.request_table import RequestTable
from deepinfer.core.row_picks import RowPicks
from deepinfer.core.row_shaping import RowShaping, StepShapes


def shape_rows(picks: RowPicks, table: RequestTable, shaping: RowShaping) -> tuple[StepShapes, dict[int, RequestError]]:
    """What changes the rows of requests that have a shaper, and the errors of shapers, by place.

    Args:
        picks: the rows of the step.
        table: the running requests.
        shaping: whose grammar masks are filled.
    """
    shapes = StepShapes()
    faults: dict[int, RequestError] = {}
    slots = picks.slots
    is_shaped = table.is_shaped[slots]
    if not is_shaped.any():
        return shapes, faults
    is_single = table.follows_form[slots] & (picks.num_drafts == 0)
    single = np.flatnonzero(is_single)
    places = np.flatnonzero(is_shaped & ~is_single).tolist()
    constrained = [
        (request.grammar, request.drafts[: int(picks.num_drafts[place])])
        for place in places
        if (request := picks.draws[place]).grammar is not None
    ]
    forms = [form for place in single.tolist() if (form := picks.draws[place].grammar) is not None]
    if constrained or forms:
        if shaping.grammar.fill(constrained, forms):
            shapes.form_rows = picks.starts[single]
        else:
            places = np.flatnonzero(is_shaped).tolist()
    for place in places:
        request, count = picks.draws[place], int(picks.num_drafts[place])
        assert request.shaper is not None, "the table says that it has one"
        try:
            rows = request.shaper.shape(request.drafts[:count] if request.waits else [-1] * count)
        except Exception as error:  # a user's code may raise anything, and it is this request's own fault
            faults[place] = as_request_error("shaping_failed", error)
            continue
        first = int(picks.starts[place])
        shapes.rows.extend((first + i, shape) for i, shape in enumerate(rows) if not shape.is_plain)
    return shapes, faults
