"""What the assembler must leave as the sources have it, seen in the machine code of Hopper's kernels: it moves waits
for products, and a kernel is right and slow where it moves one too far. Needs nvdisasm, of the CUDA toolkit or of its
wheel, and no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from s2o_cupy.cuda import compiler
from s2o_cupy.tools.catalogue import kernels_for


def disassembler() -> str | None:
    """Of PATH, or of the wheel nvidia-cuda-nvdisasm."""
    wheels = (Path(folder) / "nvidia" for folder in sys.path)
    return shutil.which("nvdisasm") or next((str(x) for w in wheels for x in w.glob("cu*/bin/nvdisasm")), None)


pytestmark = pytest.mark.skipif(disassembler() is None, reason="no nvdisasm")


class Stage(NamedTuple):
    """What comes before a wait for products."""

    products: int  # wgmma instructions
    exponentials: int
    pending: int  # groups of products that the wait leaves in flight


@cache
def disassembled(name: str, folder: Path) -> str:
    pytest.importorskip("cupy")
    kernel = next(kernel for kernel in kernels_for(90) if kernel.name == name)
    file = folder / f"{name}.cubin"
    file.write_bytes(compiler.machine_code(kernel, "sm_90a").code + b"\0")
    done = subprocess.run([disassembler() or "", "-c", str(file)], capture_output=True, text=True, check=True)
    return done.stdout


@cache
def stages(name: str, folder: Path) -> tuple[Stage, ...]:
    found, products, exponentials = [], 0, 0
    code = disassembled(name, folder)
    for instruction, pending in re.findall(r"(HGMMA|MUFU\.EX2|WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d))", code):
        if pending:
            found.append(Stage(products, exponentials, int(pending)))
            products = exponentials = 0
        products += instruction == "HGMMA"
        exponentials += instruction == "MUFU.EX2"
    return tuple(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cubins")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("pass1_sm90-bfloat16-d128-s2", 16), ("pass2_tail_sm90-bfloat16-d128-s2-paged", 16),
        ("pass2_boxes_tail_sm90-bfloat16-d128-s2", 16), ("pass2_tail_sm90-bfloat16-d64-s2", 12),
        ("pass2_sm90-bfloat16-d128-s2", 16),
        ("pass2_sm90-float16-d128-m64-s2", 12), ("pass2_listed_sm90-bfloat16-d64-m64-s2", 8),
        ("nsa_window_sm90-bfloat16-d128", 12),
    ],
)  # fmt: skip
def test_scores_and_outputs_are_in_flight_together(name, products, folder):
    """Of head_dim / 16 instructions and keys / 16: nothing waits between them."""
    assert any(stage.products == products and stage.pending == 1 for stage in stages(name, folder))


@pytest.mark.parametrize("name", ["pass1_sm90-bfloat16-d128-s2", "pass2_boxes_tail_sm90-bfloat16-d128-s2"])
def test_a_turn_is_passed_to_products_that_are_ready(name, folder):
    """Scores are issued one after the other, with what describes queries and keys in uniform registers, and the turn is
    passed before the last product of an output."""
    found = re.findall(r"HGMMA|R2UR|BAR\.ARV|BAR\.SYNC|gsb0", disassembled(name, folder))
    code = " ".join(found)
    assert "BAR.SYNC" + 8 * " HGMMA" + " gsb0" in code
    assert 7 * "HGMMA " + "BAR.ARV HGMMA gsb0" in code


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [
    "pass2_boxes_tail_sm90-bfloat16-d128-s2", "pass2_boxes_sm90-float16-d128-s2",
    "pass2_boxes_listed_sm90-bfloat16-d128-s2", "pass2_boxes_listed_sm90-bfloat16-d128-m64-s2",
    "pass2_boxes_listed_pairs_sm90-bfloat16-d128-s2",
    "pass2_boxes_skipping_sm90-bfloat16-d128-s2", "pass2_boxes_skipping_sm90-bfloat16-d128-m64-s2",
    "pass2_boxes_tail_sm90-bfloat16-d128-s2-paged", "pass2_boxes_listed_sm90-float16-d128-m64-s2-paged",
])  # fmt: skip
def test_outputs_have_been_read_before_their_place_is_released(name, folder):
    """Each register that pass 1's outputs are loaded to is used before a consumer arrives for them, which it does after
    it has for the first keys. An arrival behind a load is no proof that it has been made."""
    code = disassembled(name, folder).splitlines()
    first = next(i for i, line in enumerate(code) if "LDSM" in line)
    loads = [i for i in range(first, first + 100) if "LDSM" in code[i]]
    assert len(loads) == 8  # of 16 rows and columns each
    for at in loads:
        to = int(re.search(r"LDSM\S+ R(\d+),", code[at])[1])
        behind = code[at + 1 :]
        arrivals = [i for i, line in enumerate(code) if i > loads[-1] and "SYNCS.ARRIVE" in line]
        for register in range(to, to + 4):
            used = next(i for i, line in enumerate(behind, at + 1) if re.search(rf"R\d+, .*\bR{register}\b", line))
            assert used < arrivals[1]


def test_weights_are_packed_under_exponentials(folder):
    """Wherever pass 1 packs those of a key tile: no branch holds the packing behind the last of them."""
    code = disassembled("pass1_sm90-bfloat16-d128-s2", folder)
    blocks = [block.split() for block in " ".join(re.findall(r"MUFU\.EX2|F2FP|BRA", code)).split("BRA")]
    packing = [block for block in blocks if block.count("F2FP") == 32]
    assert packing and all("MUFU.EX2" in block[block.index("F2FP") + 16 :] for block in packing)


@pytest.mark.parametrize(
    ("name", "exponentials"),
    [
        ("pass2_boxes_tail_sm90-bfloat16-d128-s2", 128), ("pass2_sm90-float16-d128-m64-s2", 64),
        ("pass1_sm90-float16-d256-s2", 32), ("nsa_window_sm90-bfloat16-d128", 32),
    ],
)  # fmt: skip
def test_exponentials_run_under_the_output(name, exponentials, folder):
    """The wait for it is behind those of a whole key tile: a branch in settled_softmax or wgmma_wait_behind holds it
    there."""
    of_both = [(first, second) for first, second in pairwise(stages(name, folder)) if first.pending == 1]
    if "tail" in name:  # after those of key tiles come those of parts of a sample, which are smaller
        most = max(first.products for first, _ in of_both)
        of_parts = [second for first, second in of_both if first.products < most]
        assert len(of_parts) == 1 and of_parts[0].exponentials >= 32
        of_both = [(first, second) for first, second in of_both if first.products == most]
    after = [second for _, second in of_both]
    assert after and all(stage.exponentials >= exponentials for stage in after)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "loads"), [("query_norms-bfloat16-d128", 16), ("query_norms-float16-d64", 8)])
def test_queries_are_asked_for_together(name, loads, folder):
    """No branch stands between the loads of a thread's queries: where it ends, those before it are waited for."""
    found = re.findall(r"LDG\.E\.128|BRA|BAR", disassembled(name, folder))
    assert "LDG.E.128 " * loads in " ".join(found) + " "


@pytest.mark.parametrize(
    ("head_dim", "clusters"), [pytest.param(64, 4, marks=pytest.mark.slow), (64, 8), (128, 8)]
)
def test_no_product_of_queries_and_keys_is_taken_out(head_dim, clusters, folder):
    """Of four tiles a turn, by 64 columns at a time, in two loops: where each key is a group, and elsewhere."""
    code = disassembled(f"query_weights_sm90-bfloat16-d{head_dim}-c{clusters}", folder)
    assert len(re.findall(r"\bQGMMA\.", code)) == 2 * 4 * head_dim // 64
