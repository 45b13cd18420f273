"""Every measured figure of README.md and docs: the file in benchmarks/results that it is drawn from, the command that
makes it from a clone, and how long that takes. `benchmarks/figures.py` runs these commands, which is `make figures`.

A command is one of a script in benchmarks, without --json, from the root of a clone. Its inputs are files of the clone,
or models that `TRAINED` says how to make. Needs nothing but Python.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import _digest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
STALE = RESULTS / "stale.txt"  # names of figures that are allowed to be older than what they time


class Trained(NamedTuple):
    """A model that a script of the repository trains, into ``file``."""

    file: str
    command: str
    minutes: float  # of one H200, about
    what: str


class Figure(NamedTuple):
    """``minutes``: of one H200, about, as expected and not measured. ``needs``: names in `TRAINED`. ``package``: one
    that must be installed beside what `make figures` installs. ``folder``: one with others' code that must be there."""

    command: str
    minutes: float
    needs: tuple[str, ...] = ()
    gpus: int = 1
    package: str = ""
    folder: str = ""


TRAIN = "benchmarks/retrieval_model/train.py"
_SMALL = "benchmarks/small_model"
TRAINED = {
    "second_retrieval": Trained(
        "build/figures/retrieval_2.npz",
        f"{TRAIN} --out build/figures/retrieval_2.npz --seed 3 --layers 5 --hidden 320 --intermediate 768 "
        "--head-dim 128 --minutes 12", 13,
        "a second retrieval model, of another shape, that next to nothing of today is chosen on: its answers are "
        "measured last, and calls are timed on its q, k and v",
    ),
    **{
        f"small_{seed}": Trained(
            f"build/figures/small_{seed}.npz",
            f"{_SMALL}/train.py --out build/figures/small_{seed}.npz --seed {seed} --device cuda --long", 4,
            "a small model of language that has seen 131,072 bytes at once",
        )
        for seed in (1, 2)
    },
}  # fmt: skip

RIVALS = "build/rivals"  # checkouts that `benchmarks/_nsa_rivals.py` names
_CALLS = "--input benchmarks/retrieval_model/retrieval_2.py"
_OF_CALLS = ("second_retrieval",)
_SMALL_1, _SMALL_2 = (
    f"small_{seed}={_SMALL}/loader.py:build/figures/small_{seed}.npz:{_SMALL}/text.npz" for seed in (1, 2)
)
_BOTH = f"--models {_SMALL_1},{_SMALL_2} --copy-ids 24 --baselines cudnn"
_CLOSER = (
    "meanpooling", "meanpooling:threshold=0.97", "pbs", "pbs:threshold=0.97", "pbs:scores=antidiagonal,threshold=0.97",
    "sparge:tau=0.97,theta=-0.1", "xattention", "xattention:threshold=0.97", "flexprefill:gamma=0.97",
    "verticalslash", "verticalslash:slashes=1000", "ashape",
)  # fmt: skip
_SPEED = "benchmarks/speed.py --baselines cudnn"
_SERVER = "benchmarks/server.py"
_SHAPE_8B = (
    "--model 8b --lengths 16384,65536,131072 --many 8192,8192,16384,16384,16384,32768,65536,131072 "
    "--parts one,many,decode --repeats 2"
)
_ANSWERS = "--model retrieval --lengths 65536,131072 --samples 4 --memory 0.12"

FIGURES = {
    # Calls: time beside dense attention, with the error.
    "speed_query": Figure(
        f"{_SPEED} {_CALLS} --lengths 131072,65536,32768,16384,8192 --orders query,weight --error --memory "
        "--repeats 10", 3, _OF_CALLS,
    ),
    "speed_flash3": Figure(
        f"benchmarks/speed.py --baselines cudnn,flash3 {_CALLS} --lengths 131072,65536,32768,16384 --orders query "
        "--error --repeats 6", 3, _OF_CALLS, package="vllm",
    ),
    "speed_trace": Figure(
        f"{_SPEED} {_CALLS} --lengths 131072,65536,32768,16384,8192,4096,2048 --orders weight,mean --error --memory",
        4, _OF_CALLS,
    ),
    "speed_density": Figure(
        f"{_SPEED} {_CALLS} --lengths 131072 --taus 0.02,0.008,0.0018 --orders mean --workspace-mib 896 --error "
        "--memory --repeats 4", 2, _OF_CALLS,
    ),
    "speed_tau0": Figure(
        f"{_SPEED} {_CALLS} --lengths 16384,131072 --taus 0 --orders mean --error --repeats 4", 2, _OF_CALLS
    ),
    "speed_dense_heads": Figure(
        f"{_SPEED} --lengths 32768 --head-counts 64:8 --taus 0 --orders mean --error --repeats 9", 1
    ),
    "speed_gather": Figure(
        f"{_SPEED} {_CALLS} --lengths 131072 --taus 0 --orders mean --dense-up-to 0 --error --repeats 3", 2, _OF_CALLS
    ),
    "speed_portable": Figure(
        f"benchmarks/speed.py --baselines cudnn,flash2 {_CALLS} --lengths 32768,131072 --orders query,weight "
        "--path portable --error --repeats 6", 3, _OF_CALLS,
    ),
    "speed_portable_dense": Figure(
        "benchmarks/speed.py --baselines flash2 --lengths 32768,131072 --taus 0 --orders mean --path portable --error "
        "--repeats 5", 2,
    ),
    "speed_random_order": Figure(
        f"{_SPEED} --lengths 131072 --random-order 0.05,0.1,0.3 --orders mean --repeats 5", 2
    ),
    "speed_heads": Figure(
        f"{_SPEED} --lengths 32768 --head-counts 32:8,8:2,64:8 --head-dims 64,128 --orders mean --random-order 0.3 "
        "--repeats 5", 2,
    ),
    "speed_head_dims": Figure(
        "benchmarks/speed.py --baselines cudnn,flash2 --lengths 32768 --head-counts 16:8 --head-dims 80,96,256 "
        "--orders mean --taus 0 --error --repeats 9", 2,
    ),
    "speed_head_dim_256": Figure(
        f"{_SPEED} --lengths 32768 --head-counts 16:8 --head-dims 256 --random-order 0.05,0.1,0.3 --orders mean "
        "--repeats 9", 1,
    ),
    "quality_patterns": Figure(
        "benchmarks/quality.py --input patterns --lengths 32768 --taus 0.01 --orders mean,query --repeats 3 "
        "--baselines cudnn", 2,
    ),
    "scaling": Figure(
        "benchmarks/scaling.py --taus 0.01 --errors 0.06 --orders query --lengths 8192,32768,131072,524288,1048576 "
        "--repeats 2 --limit-s 5 --baselines cudnn", 6,
    ),
    "nsa": Figure("benchmarks/nsa.py --lengths 16384,65536 --groups 1,2,4,8", 1),
    "nsa_beside": Figure(
        f"benchmarks/nsa.py {_CALLS} --lengths 65536 --groups 1,2,4,8 --repeats 6 "
        f"--rivals fsa={RIVALS}/fsa,fla={RIVALS}/fla", 4, _OF_CALLS, folder=RIVALS,
    ),
    "lists": Figure("benchmarks/lists.py --lengths 131072 --densities 0.05,0.1,0.3 --repeats 9", 2),
    # Ways to call.
    "paged": Figure(
        f"benchmarks/serving.py {_CALLS} --parts paged --page-sizes 1,16,32,64,256 --taus 0.05 --repeats 9 "
        "--baselines cudnn", 2, _OF_CALLS,
    ),
    "serving": Figure(
        f"benchmarks/serving.py {_CALLS} --parts chunked,packed --taus 0.05 --repeats 5 --baselines cudnn",
        4, _OF_CALLS,
    ),
    "ragged": Figure("benchmarks/ragged.py", 1),
    "host": Figure("benchmarks/host.py", 3),
    "many_gpus": Figure(
        "benchmarks/many_gpus.py --ranks 2 --repeats 9 --lengths 131072,262144,524288,1048576", 4, gpus=2
    ),
    "video": Figure("benchmarks/video.py", 3),
    # Servers, by their own attention and by S2O.
    "server_vllm": Figure(f"{_SERVER} {_SHAPE_8B} --memory 0.46 --density --start-timeout 150", 6, package="vllm"),
    "server_vllm_decode": Figure(
        f"{_SERVER} --model 8b --parts decode --graphs --lengths 16384 --many 8192 --memory 0.4 --start-timeout 300",
        4, package="vllm",
    ),
    "server_vllm_cached": Figure(
        f"{_SERVER} --model retrieval --parts cached --lengths 65536 --samples 4 --memory 0.12 --start-timeout 200", 2,
        package="vllm",
    ),
    "server_vllm_answers": Figure(f"{_SERVER} {_ANSWERS} --start-timeout 200", 3, package="vllm"),
    "server_sglang": Figure(
        f"{_SERVER} --server sglang {_SHAPE_8B} --memory 0.44 --start-timeout 200", 6, package="sglang"
    ),
    "server_sglang_answers": Figure(
        f"{_SERVER} --server sglang {_ANSWERS} --start-timeout 150", 3, package="sglang"
    ),
    # Models: what is lost, answered and saved.
    "retrieval": Figure(
        "benchmarks/tasks.py --retrieval --lengths 32768,65536,131072 --samples 4 --repeats 2 --baselines cudnn "
        "--method meanpooling --set rank=weight,tail=none", 3,
    ),
    "retrieval_methods": Figure(
        "benchmarks/tasks.py --retrieval --lengths 32768,131072 --samples 2 --repeats 1 --baselines cudnn "
        "--set clusters=4 --set rank=weight,tail=none " + " ".join(f"--method {x}" for x in _CLOSER), 4,
    ),
    "small_loss": Figure(
        f"benchmarks/model.py {_BOTH} --lengths 32768,65536,131072 --set rank=weight,tail=none --set tail=none "
        "--set tau=0.01 --repeats 3", 5, ("small_1", "small_2"),
    ),
    "small_methods": Figure(f"benchmarks/methods.py {_BOTH} --lengths 131072 --repeats 1", 6, ("small_1", "small_2")),
    "small_tuned": Figure(
        f"benchmarks/model.py --models {_SMALL_1} --copy-ids 24 --lengths 65536 --baselines cudnn --tune loss=0.005 "
        "--parts loss,time --repeats 3", 5, ("small_1",),
    ),
    "small_asked": Figure(
        f"benchmarks/model.py {_BOTH} --lengths 16384,131072 --parts error --error-rows 4096 --set error=0.02 "
        "--set error=0.05 --set error=0.1", 5, ("small_1", "small_2"),
    ),
    # Last.
    "retrieval_2": Figure(
        "benchmarks/tasks.py --retrieval --weights build/figures/retrieval_2.npz --lengths 32768,65536,131072 "
        "--samples 4 --repeats 2 --baselines cudnn --method meanpooling --set rank=weight,tail=none", 4,
        ("second_retrieval",),
    ),
}  # fmt: skip

# What the notebook keeps of something that was tried: on no other page, and not made again.
NOTEBOOK = ("error_estimates", "int8", "retrieval_2_units", "speed_tail")


def without_folders(text: str) -> str:
    """Also of NAME=FILE:FILE."""
    return re.sub(r"[^=:,]*/", "", text)


def told(words: Iterable[str]) -> str:
    """A command as a result keeps it: as from the root of a checkout, and without other folders."""
    script, *arguments = words
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *map(without_folders, arguments)])


def result_of(name: str, results: Path = RESULTS) -> dict[str, Any]:
    """Nothing where it is not measured yet."""
    path = results / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def why_stale(name: str, results: Path = RESULTS, root: Path = ROOT) -> str:
    """Why a figure is not what its command gives now, in words; nothing if it may be."""
    result = result_of(name, results)
    if not result:
        return "not measured yet"
    if changed := _digest.since(result, root):
        return changed
    command = told([*shlex.split(FIGURES[name].command), "--json", f"{name}.json"])
    return "" if result.get("command") == command else f"measured by another command: {result.get('command')}"


def stale(results: Path = RESULTS) -> dict[str, str]:
    """Names of stale figures, and why they are."""
    return {name: why for name in FIGURES if (why := why_stale(name, results))}


def allowed(path: Path = STALE) -> list[str]:
    """Names of figures that may be stale."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [line for line in lines if line and not line.startswith("#")]
