"""Kernels of devices that are not here exchange rows between two ranks as well: interpreted, in processes."""

import pytest

from deepinfer.testing.launched import launch_ranks

PROGRAM = """
import sys
from deepinfer.ops.errors import BackendUnavailableError
from deepinfer.ops.registry import find_emulated

try:
    backend = find_emulated(sys.argv[1])
except BackendUnavailableError as error:
    print(error)
    sys.exit(77)

from deepinfer.conformance.rank_experts import EXPERT_PROGRAMS
from deepinfer.conformance.rank_place import Place
from deepinfer.ops.collectives import Rendezvous
from deepinfer.ops.sockets import join

group = join(Rendezvous.from_environment(timeout=120.0))
place = Place(backend, backend.runtime(), group)
for case, program in EXPERT_PROGRAMS.items():
    checks = list(program(place))
    print(len(checks), [check for check in checks if not check.ok], case)
group.close()
"""


@pytest.mark.parametrize("backend", [pytest.param("cuda_sm90", marks=pytest.mark.slow), "ascend950"])
def test_experts_over_two_ranks_have_the_bits_of_one(backend) -> None:
    statuses, outputs = launch_ranks(PROGRAM, backend, timeout=300)
    if statuses == [77, 77]:
        pytest.skip(outputs[0])
    assert statuses == [0, 0], outputs
    for output in outputs:
        lines = output.splitlines()
        assert len(lines) == 4
        assert all(int(line.split()[0]) >= 4 and line.split()[1] == "[]" for line in lines), lines
