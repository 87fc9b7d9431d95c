"""Plans of kernels: how arguments reach the function, and what is asked before."""

from deepinfer.backends.nvidia.registry import KernelPlan
from deepinfer.ops.sync_guard import SyncGuard


def test_a_plan_that_may_wait_asks_with_the_arguments_of_the_call_named_or_not():
    guard = SyncGuard()
    plan = KernelPlan(
        lambda table, rows, *, out=None: (table, rows, out, guard.is_forbidden),
        guard=guard,
        waits=lambda table, rows: f"{rows} rows" if table == "host" else "",
    )
    with guard.forbid("a step"):
        assert plan.run("host", 3, out="here") == ("host", 3, "here", False)
        assert plan.run("host", rows=4) == plan.run(rows=4, table="host") == ("host", 4, None, False)
        assert plan.run(table="device", rows=5) == ("device", 5, None, True)
    assert guard.permitted == {"3 rows": 1, "4 rows": 2}
